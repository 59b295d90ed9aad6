"""What one thread closes while a call of another is on its way to the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import (
    Device,
    LaunchConfig,
    Stream,
    compile_source,
    errors,
    launch,
    launch_many,
    prepare,
)
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.runtime import context as contexts
from memra_lowlevel.runtime import lifetime

ONE = LaunchConfig(1, 32)
SOURCE = """#include "common/device.cuh"
KERNEL void add(const int32_t* from, int32_t* to, int32_t n) {
    if (threadIdx.x < 8) to[threadIdx.x] = from[threadIdx.x] + n;
}"""


class Rig:
    """A checked kernel, two buffers, and the calls that use them on one stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.module = device.module(compile_source(SOURCE, arch="host", name="threads.cu"))
        self.stream = stream = device.stream(name="theirs")
        self.a = device.from_numpy(np.arange(8, dtype=np.int32), stream, name="a")
        self.b = device.zeros(8, np.int32, stream, name="b")
        kernel = self.module.kernel("add")
        ready = prepare(stream, ONE, kernel, self.a, self.b, 1)
        self.calls: dict[str, Callable[[], None]] = {
            "prepared": lambda: ready.launch(stream),
            "plain": lambda: launch(stream, ONE, kernel, self.a, self.b, 1),
            "numpy": lambda: launch(stream, ONE, kernel, self.a, self.b, np.int32(1)),
            "many": lambda: launch_many(stream, [ready]),
            "copy": lambda: self.b.copy_from(stream, self.a),
            "fill": lambda: self.a.fill(stream, 1),
        }

    def close(self) -> None:
        for thing in (self.a, self.b, self.stream, self.module):
            thing.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(contexts, "_PATIENCE_S", 0.02)
    with host_options(check=True), Device("host") as device:
        made = Rig(device)
        yield made
        made.close()


def on_its_way(device: Device) -> bool:
    """Whether a call has made its checks and waits for the driver."""
    compiled = device.context.native
    return bool(lifetime.calls) or (compiled is not None and compiled.busy)


def repeat(call: Callable[[], None], n: int, raised: list[Exception]) -> None:
    """Make a call some times, until it raises."""
    try:
        for _ in range(n):
            call()
    except Exception as error:
        raised.append(error)


def meanwhile(device: Device, call: Callable[[], None], act: Callable[[], None]) -> list[Exception]:
    """Act while another thread's call stands before the driver; gives what the call raised."""
    raised: list[Exception] = []
    current, go = threading.Event(), threading.Event()

    def other() -> None:
        device.context.ensure()  # the first call of a thread asks the driver before its checks
        current.set()
        go.wait()
        repeat(call, 1, raised)

    thread = threading.Thread(target=other)
    thread.start()
    current.wait()
    lock: Any = device.driver._lock  # type: ignore[attr-defined]
    with lock:
        go.set()
        end = time.monotonic() + 20
        while not on_its_way(device) and time.monotonic() < end:
            time.sleep(0.001)
        act()
    thread.join()
    return raised


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["prepared", "plain", "numpy", "many", "copy", "fill"])
def test_memory_outlives_a_call_that_found_it_open(rig: Rig, name: str, warm: bool) -> None:
    call, counts = rig.calls[name], rig.device.driver.counts
    if warm:
        call()
    rig.stream.sync()
    freed = counts().get("cuMemFreeAsync", 0)
    assert meanwhile(rig.device, call, rig.a.close) == []
    assert counts().get("cuMemFreeAsync", 0) == freed
    rig.stream.sync()
    assert counts()["cuMemFreeAsync"] == freed + 1
    with pytest.raises(errors.ClosedError, match="'a'"):
        call()


@pytest.mark.parametrize("name", ["prepared", "plain", "many", "copy"])
def test_a_stream_outlives_a_call_that_found_it_open(rig: Rig, name: str) -> None:
    rig.calls[name]()
    rig.stream.sync()
    assert meanwhile(rig.device, rig.calls[name], rig.stream.close) == []
    rig.device.sync()
    with pytest.raises(errors.ClosedError, match="'theirs'"):
        rig.calls[name]()


def test_a_wait_for_an_event_that_is_closed(rig: Rig) -> None:
    event = rig.device.event(name="mark")
    rig.stream.record(event)
    for call in (lambda: rig.stream.wait(event), lambda: rig.stream.record(event)):
        assert meanwhile(rig.device, call, lambda: None) == []
    assert meanwhile(rig.device, lambda: rig.stream.wait(event), event.close) == []
    rig.device.sync()
    with pytest.raises(errors.ClosedError, match="'mark'"):
        rig.stream.record(event)


def test_threads_that_launch_all_the_time_hold_up_no_close(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "_PATIENCE_S", 60.0)
    stop = threading.Event()
    streams = [rig.device.stream(name=f"busy {i}") for i in range(2)]
    buffers = [rig.device.zeros(8, np.int32, s, name="busy") for s in streams]
    kernel = rig.module.kernel("add")

    def work(stream: Stream, buffer: Any) -> None:
        ready = prepare(stream, ONE, kernel, rig.a, buffer, 1)
        while not stop.is_set():
            ready.launch(stream)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(streams, buffers, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        begin = time.monotonic()
        for _ in range(10):
            rig.device.zeros(8, np.int32, rig.stream, name="short").close()
        took = time.monotonic() - begin
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    rig.device.sync()
    for thing in (*buffers, *streams):
        thing.close()
    assert took < 30


def test_whatever_is_closed_at_whatever_moment(rig: Rig, scale: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20 * scale):
        one = Rig(rig.device)
        call = one.calls[str(rng.choice(list(one.calls)))]
        thing = (one.a, one.stream, one.module)[rng.integers(3)]
        raised: list[Exception] = []
        thread = threading.Thread(target=repeat, args=(call, 200, raised))
        thread.start()
        time.sleep(float(rng.random()) * 0.005)
        thing.close()
        thread.join()
        rig.device.sync()
        one.close()
        assert all(type(error) is errors.ClosedError for error in raised), raised
