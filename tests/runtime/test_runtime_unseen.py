"""Errors of work that nobody waited for: closing tells them, and never instead of another."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, compile_source, errors, launch
from memra_lowlevel.driver.host import host_options

SOURCE = '#include "common/device.cuh"\nKERNEL void put(float* y, int32_t i) { y[i] = 7.0f; }\n'
ONE = LaunchConfig(1, 1)
HERE = "host:3"  # no other test holds it open


def _fault(device: Device, stream: Any) -> Any:
    put = device.module(compile_source(SOURCE, arch="host", name="put.cu")).kernel("put")
    y = device.zeros(16, np.float32, stream)
    launch(stream, ONE, put, y, 100_000)
    return y


def test_the_end_of_the_block_raises_it() -> None:
    with pytest.raises(errors.OutOfBounds, match=r"put\.cu:2"):
        with Device(HERE) as device, device.stream() as stream:
            _fault(device, stream)


def test_another_exception_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "memra_lowlevel"), pytest.raises(KeyError):
        with Device(HERE) as device, device.stream() as stream:
            _fault(device, stream)
            raise KeyError
    assert caplog.text.count("put.cu:2") == 1


def test_the_last_close_raises_it_and_everything_is_closed() -> None:
    device = Device(HERE)
    stream = device.stream()
    y = _fault(device, stream)
    with pytest.raises(errors.OutOfBounds):
        device.close()
    assert device.closed
    y.close()
    stream.close()


def test_what_is_held_when_the_device_closed_tells_too() -> None:
    device = Device(HERE)
    stream = device.stream()
    module = device.module(compile_source(SOURCE, arch="host", name="put.cu"))
    with device.zeros(16, np.float32, stream) as y:
        put = module.kernel("put")
        device.close()
        launch(stream, ONE, put, y, 100_000)
    told = []
    for thing in (module, stream):
        try:
            thing.close()
        except errors.OutOfBounds as error:
            told.append(error)
    assert len(told) == 1 and stream.closed and module.closed


def test_a_stream_tells_what_is_known() -> None:
    """Its close does not wait; what has failed by then is raised, once."""
    with Device(HERE) as device, device.stream() as witness, host_options(max_pending=1):
        stream = device.stream()
        _fault(device, stream)
        stream.wait(witness)  # beyond max_pending: the launch runs
        stream.wait(witness)
        with pytest.raises(errors.OutOfBounds):
            stream.close()
        assert stream.closed
        device.sync()


def test_a_lost_context_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, where every call gives the error that ended the context again."""
    device = Device(HERE)
    stream = device.stream()
    device.zeros(1, np.float32, stream).close()
    driver = device.driver
    monkeypatch.setattr(driver, "told_sticky", False)

    def lost(*_: object) -> None:
        raise driver.error_from(700, "cuCtxSynchronize")

    for call in ("cuEventSynchronize", "cuStreamQuery", "cuCtxSynchronize"):
        monkeypatch.setattr(driver, call, lost, raising=False)
    with device.event() as event, pytest.raises(errors.IllegalAddress):
        event.sync()
    with caplog.at_level(logging.WARNING, "memra_lowlevel"):
        stream.close()
        device.close()
    assert caplog.text.count("the context was lost before") == 1
    monkeypatch.undo()
    device.context.lost = ""  # it was not, here
    device.context.reap()


def test_a_lost_context_that_nobody_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(HERE)
    driver = device.driver
    monkeypatch.setattr(driver, "told_sticky", False)

    def lost(*_: object) -> None:
        raise driver.error_from(700, "cuCtxSynchronize")

    monkeypatch.setattr(driver, "cuCtxSynchronize", lost, raising=False)
    with pytest.raises(errors.IllegalAddress):
        device.close()
    assert device.closed
    monkeypatch.undo()
    device.context.lost = ""
    device.context.reap()


def test_the_next_owner_starts_clean() -> None:
    with pytest.raises(errors.OutOfBounds), Device(HERE) as device, device.stream() as stream:
        _fault(device, stream)
    with Device(HERE) as device, device.stream() as stream:
        stream.sync()
