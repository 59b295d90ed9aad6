"""Check mode knows views and slices of arenas: a kernel keeps to what it was given."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, compile_source, errors, launch
from memra_lowlevel.driver.host import host_options

SOURCE = """#include "common/device.cuh"
KERNEL void put(float* y, int32_t i) { y[i] = 7.0f; }
KERNEL void move(const float* x, float* y, int32_t i) { y[0] = x[i]; }
KERNEL void through(const uint64_t* table, float* y) {
  reinterpret_cast<float*>(table[0])[0] = y[0];
}
"""
ONE = LaunchConfig(1, 1)
F32 = np.float32


@pytest.fixture
def checked() -> Iterator[tuple[Device, Any, Any]]:
    """A device in check mode, a stream, and a function that gives a kernel."""
    with host_options(check=True), Device("host:3") as device, device.stream() as stream:
        module = device.module(compile_source(SOURCE, arch="host", name="views.cu"))
        yield device, stream, module.kernel


@pytest.mark.parametrize("cut", ["view", "arena"])
@pytest.mark.parametrize(("index", "where"), [(8, "past"), (-1, "before"), (7, ""), (0, "")])
def test_past_a_view_inside_its_allocation(checked: Any, cut: str, index: int, where: str) -> None:
    device, stream, kernel = checked
    if cut == "view":
        whole = device.zeros(64, F32, stream, name="logits")
        part = whole.view(64, (8,), F32)
    else:
        arena = device.arena(4096, name="logits")
        arena.take(64, F32)
        part = arena.take(8, F32)
        part.fill(stream, 0)
    launch(stream, ONE, kernel("put"), part, index)
    if not where:
        assert part.to_numpy(stream)[index] == 7.0
        return
    with pytest.raises(errors.OutOfBounds) as caught:
        stream.sync()
    said = str(caught.value)
    for text in ("views.cu:2", f"4 bytes {where} the 32 bytes of it, parameter 0 (y)", "'logits'"):
        assert text in said, said


def test_reads_and_replays_too(checked: Any) -> None:
    device, stream, kernel = checked
    whole = device.zeros(64, F32, stream)
    x, y = whole.view(32, (8,), F32), device.zeros(1, F32, stream)
    for index, fails in ((7, False), (8, True)):
        with stream.capture("step") as graph:
            launch(stream, ONE, kernel("move"), x, y, index)
        with graph.instantiate() as step:
            step.launch(stream)
            if fails:
                with pytest.raises(errors.OutOfBounds, match=r"read outside the view.*\(x\)"):
                    stream.sync()
            else:
                stream.sync()


def test_the_parts_of_one_launch_are_open_together(checked: Any) -> None:
    device, stream, kernel = checked
    whole = device.zeros(64, F32, stream)
    x, y = whole.view(32, (8,), F32), whole.view(64, (8,), F32)
    launch(stream, ONE, kernel("move"), x, y, 12)  # in y's view, whoever computed it
    stream.sync()
    launch(stream, ONE, kernel("move"), x, y, 16)
    with pytest.raises(errors.OutOfBounds, match="4 bytes past"):
        stream.sync()


@pytest.mark.parametrize("end", ["dropped", "closed"])
def test_the_largest_living_view_counts(checked: Any, end: str) -> None:
    device, stream, kernel = checked
    whole = device.zeros(64, F32, stream)
    part, larger = whole.view(64, (4,), F32), whole.view(64, (16,), F32)
    launch(stream, ONE, kernel("put"), part, 9)
    stream.sync()
    if end == "closed":
        larger.close()
    else:
        del larger
        gc.collect()
    launch(stream, ONE, kernel("put"), part, 9)
    with pytest.raises(errors.OutOfBounds):
        stream.sync()


def test_what_a_table_leads_to_stays_open(checked: Any) -> None:
    device, stream, kernel = checked
    whole = device.zeros(64, F32, stream)
    y = whole.view(64, (4,), F32)
    aim = whole.view(128, (1,), F32)
    table = device.from_numpy(np.array([aim.ptr], np.uint64), stream)
    y.fill(stream, 1)
    launch(stream, ONE, kernel("through"), table, y)
    stream.sync()
    assert whole.to_numpy(stream).view(np.uint32)[32] == 0x01010101


@pytest.mark.parametrize("kept", ["buffer", "nothing", "graph"])
def test_a_table_need_not_live_on_in_python(checked: Any, kept: str) -> None:
    """What leads elsewhere is known from when the work is issued, as memory is freed in order."""
    device, stream, kernel = checked
    whole = device.zeros(64, F32, stream)
    y = whole.view(64, (4,), F32)
    y.fill(stream, 1)
    numbers = np.array([0, whole.view(128, (1,), F32).ptr], np.uint64)
    table = device.from_numpy(numbers, stream)
    graph = stream.capture("step") if kept == "graph" else None
    if graph is None:
        launch(stream, ONE, kernel("through"), table.view(8, (1,), np.uint64), y)
    else:
        with graph as captured:
            launch(stream, ONE, kernel("through"), table.view(8, (1,), np.uint64), y)
    if kept != "buffer":
        del table
        gc.collect()
    if graph is not None:
        with captured.instantiate() as step:
            step.launch(stream)
            stream.sync()
    stream.sync()
    assert whole.to_numpy(stream).view(np.uint32)[32] == 0x01010101


def test_without_check_mode_nothing_is_kept() -> None:
    with Device("host:2") as device, device.stream() as stream:
        views = device.driver._views
        on, views.on = views.on, False  # another test may have loaded a checked kernel
        try:
            kept = len(views._at)
            buffer = device.zeros(64, F32, stream)
            assert len(views._at) == kept and views.extent(buffer.ptr) is None
        finally:
            views.on = on
