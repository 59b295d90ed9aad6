"""A thread that ends inside a capture: the next call says so, and the stream is usable again."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from memra_lowlevel import Device
from memra_lowlevel.driver.table import CaptureMode
from memra_lowlevel.errors import CaptureError, CaptureForbidden, CaptureWrongThread


@pytest.fixture
def world():
    with Device("host") as device, device.stream(name="s") as s, device.stream(name="o") as o:
        yield device, s, o


def abandon(stream, mode=CaptureMode.THREAD_LOCAL, work=None):
    kept = []

    def begin():
        kept.append(stream.capture("step", mode=mode))
        kept[0].__enter__()
        if work:
            work()

    thread = threading.Thread(target=begin, name="worker-7")
    thread.start()
    thread.join()
    return kept[0]


def zeros(device, stream):
    return device.zeros(4, np.float32, stream)


@pytest.mark.parametrize("mode", list(CaptureMode))
@pytest.mark.parametrize(
    "touch",
    [
        lambda device, s, buffer: s.sync(),
        lambda device, s, buffer: zeros(device, s),
        lambda device, s, buffer: buffer.fill(s, 0),
        lambda device, s, buffer: s.capture("again").__enter__(),
        lambda device, s, buffer: buffer.to_numpy(s),
    ],
)
def test_the_next_call_says_who_left_it_open(world, mode, touch):
    device, s, _ = world
    buffer = zeros(device, s)
    s.sync()
    abandon(s, mode)
    with pytest.raises(CaptureError) as info:
        touch(device, s, buffer)
    said = str(info.value)
    assert '"worker-7"' in said and '"step"' in said and "has ended without ending it" in said
    assert "test_host_abandoned_capture.py" in said and not isinstance(info.value, CaptureForbidden)
    buffer.fill(s, 0)
    assert (buffer.to_numpy(s) == 0).all()
    with s.capture("again") as graph:
        buffer.fill(s, 255)
    with graph, graph.instantiate() as step:
        step.launch(s)
        s.sync()
    assert (buffer.to_numpy(s).view(np.uint8) == 255).all()


def test_streams_that_had_joined_are_free_too(world):
    device, s, o = world
    with device.event() as event:

        def fork():
            s.record(event)
            o.wait(event)

        abandon(s, work=fork)
        with pytest.raises(CaptureError, match="worker-7"):
            o.sync()
        s.sync()
        o.sync()


def test_a_capture_that_forbids_calls_everywhere_is_found_from_another_stream(world):
    device, s, o = world
    abandon(s, CaptureMode.GLOBAL)
    with pytest.raises(CaptureError, match="worker-7"):
        device.empty(4, np.float32, o)
    device.empty(4, np.float32, o)


def test_closing_needs_no_ceremony():
    with Device("host") as device, device.stream(name="s") as s:
        abandon(s)


def test_leaving_the_block_on_another_thread(world):
    _, s, _ = world
    capture = abandon(s)
    with pytest.raises(CaptureError, match="worker-7"):
        capture.__exit__(None, None, None)
    capture.__exit__(None, None, None)  # it has ended
    s.sync()


def test_a_thread_that_lives_keeps_its_capture(world):
    _, s, _ = world
    begun, leave = threading.Event(), threading.Event()

    def hold():
        with s.capture("step"):
            begun.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(20)
    with pytest.raises(CaptureForbidden):
        s.sync()
    leave.set()
    thread.join()
    s.sync()


def test_the_driver_says_it_too(world):
    device, s, _ = world
    driver = device.context.driver
    thread = threading.Thread(
        target=lambda: (
            device.context.activate(),
            driver.cuStreamBeginCapture(s.handle, CaptureMode.GLOBAL),
        )
    )
    thread.start()
    thread.join()
    with pytest.raises(CaptureWrongThread, match="has ended without ending it"):
        driver.cuStreamEndCapture(s.handle)
    s.sync()
