"""Streams and events: order, timing, protocol, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch_fixtures import shifted

from memra_lowlevel import Device, LaunchConfig, Stream, errors, launch

ONE = LaunchConfig(1, 32)


def test_work_on_one_stream_is_in_order(device: Device, stream: Stream, kernels: Any) -> None:
    out = device.zeros(1, np.int32, stream)
    value = 0
    for i in range(30):
        launch(stream, ONE, kernels.shift, out, i)
        value = shifted(value, i)
    assert out.to_numpy(stream)[0] == value
    out.close()


def test_events_order_streams(device: Device, stream: Stream, kernels: Any) -> None:
    """On the host device streams run in a random order that only events constrain."""
    other = device.stream(name="other")
    there, back = device.event(name="there"), device.event(name="back")
    out = device.zeros(1, np.int32, stream)
    value = 0
    for i in range(20):
        launch(stream, ONE, kernels.shift, out, i)
        other.wait(stream.record(there))
        launch(other, ONE, kernels.shift, out, -i)
        stream.wait(other.record(back))
        value = shifted(shifted(value, i), -i)
    assert out.to_numpy(stream)[0] == value
    for thing in (out, there, back, other):
        thing.close()


def test_waiting_for_a_stream(device: Device, stream: Stream, kernels: Any) -> None:
    other = device.stream(name="other")
    out = device.zeros(1, np.int32, stream)
    value = 0
    for i in range(20):
        launch(stream, ONE, kernels.shift, out, i)
        other.wait(stream)
        launch(other, ONE, kernels.shift, out, i)
        stream.wait(other)
        value = shifted(shifted(value, i), i)
    assert out.to_numpy(stream)[0] == value
    out.close()
    other.close()


def test_done_and_sync(device: Device, stream: Stream) -> None:
    event = device.event(name="mark")
    assert event.done()
    b = device.zeros(1, np.int32, stream)
    stream.record(event)
    event.sync()
    assert event.done()
    stream.sync()
    assert stream.done()
    b.close()
    event.close()


def test_timing(device: Device, stream: Stream, kernels: Any) -> None:
    start, end = device.event(timing=True, name="start"), device.event(timing=True, name="end")
    out = device.zeros(1, np.int32, stream)
    stream.record(start)
    launch(stream, ONE, kernels.put, out, 1)
    stream.record(end)
    stream.sync()
    assert 0 <= end.elapsed_ms(start) < 60_000
    plain = device.event(name="plain")
    stream.record(plain)
    with pytest.raises(errors.ArgumentError, match=r"plain.*without timing"):
        plain.elapsed_ms(start)
    never = device.event(timing=True, name="never")
    with pytest.raises(errors.ArgumentError, match="never recorded"):
        end.elapsed_ms(never)
    for thing in (start, end, plain, never, out):
        thing.close()


def test_priorities_are_clamped(device: Device) -> None:
    for priority in (-1000, 0, 1000):
        s = device.stream(name="p", priority=priority)
        assert -1000 < s.priority < 1000
        s.close()


def test_events_and_streams_of_different_devices(stream: Stream) -> None:
    with Device("host:1") as other:
        event = other.event(name="foreign")
        with pytest.raises(errors.ArgumentError, match="foreign"):
            stream.record(event)
        event.close()


def test_cuda_stream_protocol(device: Device, stream: Stream) -> None:
    if device.kind == "cuda":
        assert stream.__cuda_stream__() == (0, stream.handle)
        return
    with pytest.raises(errors.ArgumentError, match="no CUDA stream"):
        stream.__cuda_stream__()


def test_foreign_streams_are_wrapped_and_not_destroyed(
    device: Device, stream: Stream, kernels: Any
) -> None:
    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    destroyed = device.driver.counts().get("cuStreamDestroy", 0)
    ours = device.stream_of(Theirs(), name="theirs")
    assert ours.handle == stream.handle
    out = device.zeros(1, np.int32, stream)
    launch(ours, ONE, kernels.put, out, 9)
    assert out.to_numpy(stream)[0] == 9
    ours.close()
    assert device.driver.counts().get("cuStreamDestroy", 0) == destroyed
    assert out.to_numpy(stream)[0] == 9
    out.close()

    class Newer:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 7, 0

    with pytest.raises(errors.ArgumentError, match="version 7"):
        device.stream_of(Newer())


def test_a_bare_zero_is_no_stream(device: Device) -> None:
    with pytest.raises(errors.ArgumentError, match="stream_of got 0"):
        device.stream_of(0)


@pytest.mark.host_only  # a fault ends a CUDA context
def test_kernel_faults_surface_at_the_sync_and_leave_the_device_usable(
    stream: Stream, device: Device, kernels: Any
) -> None:
    out = device.zeros(4, np.float32, stream, name="small")
    x = device.zeros(4096, np.float32, stream)
    launch(stream, LaunchConfig(64, 64), kernels.axpy, x, out, None, 1.0, 4096)
    with pytest.raises(errors.OutOfBounds, match="axpy"):
        stream.sync()
    launch(stream, ONE, kernels.axpy, x, out, None, 1.0, 4)
    assert (out.to_numpy(stream) == 0).all()
    out.close()
    x.close()
