"""Captures: what is recorded, what is refused, and life after failure."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from launch_fixtures import shifted

from memra_lowlevel import (
    CaptureMode,
    Device,
    Graph,
    LaunchConfig,
    Stream,
    compile_source,
    errors,
    launch,
    prepare,
)
from memra_lowlevel.runtime import lifetime

ONE = LaunchConfig(1, 32)


@pytest.fixture
def cell(device: Device, stream: Stream) -> Iterator[Any]:
    out = device.from_numpy(np.array([1], np.int32), stream, name="cell")
    yield out
    out.close()


def check_usable(device: Device, stream: Stream, kernels: Any) -> None:
    """One plain launch and one fresh capture succeed, and leave nothing behind."""
    probe = device.zeros(1, np.int32, stream, name="probe")
    launch(stream, ONE, kernels.put, probe, 5)
    assert probe.to_numpy(stream)[0] == 5
    with stream.capture("probe") as graph:
        launch(stream, ONE, kernels.shift, probe, 2)
    step = graph.instantiate()
    step.launch(stream)
    assert probe.to_numpy(stream)[0] == 17
    for thing in (step, graph, probe):
        thing.close()


def test_replay_equals_eager(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    with stream.capture("step") as graph:
        launch(stream, ONE, kernels.shift, cell, 5)
        launch(stream, ONE, kernels.shift, cell, -1)
    assert cell.to_numpy(stream)[0] == 1  # nothing ran during the capture
    step = graph.instantiate()
    graph.close()
    value = 1
    for _ in range(10):
        step.launch(stream)
        value = shifted(shifted(value, 5), -1)
    assert cell.to_numpy(stream)[0] == value
    step.close()


def test_a_replay_is_one_driver_call(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    with stream.capture("step") as graph:
        for i in range(8):
            launch(stream, ONE, kernels.shift, cell, i)
    step = graph.instantiate()
    step.launch(stream)
    before = dict(device.driver.counts())
    for _ in range(20):
        step.launch(stream)
    after = dict(device.driver.counts())
    changed = {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)}
    assert changed == {"cuGraphLaunch": 20}
    assert step.n_launches == 21 and step.n_updates == 0
    stream.sync()
    step.close()
    graph.close()


def test_prepared_launches_and_copies_are_recorded(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    p = prepare(device, ONE, kernels.shift, cell, 3)
    p.launch(stream)  # warm, so that the compiled path would take it
    up, down = device.pinned(1, np.int32), device.pinned(1, np.int32)
    with stream.capture("copies") as graph:
        cell.copy_from(stream, up)
        p.launch(stream)
        cell.copy_to(stream, down)
    step = graph.instantiate()
    for value in (10, -4):
        up.array[0] = value
        step.launch(stream)
        stream.sync()
        assert down.array[0] == shifted(value, 3)
    assert step.describe().nodes == {"kernel": 1, "memcpy": 2}
    for thing in (step, graph, up, down):
        thing.close()


# -- refusals -------------------------------------------------------------------------------------


def _calls(device: Device, stream: Stream) -> dict[str, Callable[[], Any]]:
    b = device.zeros(4, np.int32, stream, name="operand")
    p = device.pinned(4, np.int32)
    event, timing = device.event(name="e"), device.event(timing=True, name="timing event")
    other = device.stream(name="bystander")
    source = '#include "common/device.cuh"\nKERNEL void late(int32_t* p) { p[0] = 1; }\n'
    image = compile_source(source, arch=device.arch, name="late.cu")
    empty = Graph(device, "empty")
    step = empty.instantiate()
    things = [b, p, event, timing, other, step, empty]
    stream.sync()
    return {
        "cuStreamSynchronize": stream.sync,
        "cuStreamQuery": stream.done,
        "cuCtxSynchronize": device.sync,
        "cuMemAllocAsync": lambda: device.alloc(16, stream),
        "cuMemAllocAsync on another stream": lambda: device.alloc(16, other),
        "cuMemAlloc": lambda: device.arena(1 << 12),
        "cuMemHostAlloc": lambda: device.pinned(1 << 14, np.int32),
        "cuMemcpyHtoD": lambda: b.copy_from(stream, np.zeros(4, np.int32)),
        "cuMemcpyDtoH": lambda: b.to_numpy(stream),
        "cuMemcpyHtoD on another stream": lambda: b.copy_from(other, np.zeros(4, np.int32)),
        "cuModuleLoadData": lambda: device.module(image),
        "cuEventRecord": lambda: stream.record(timing),
        "cuStreamBeginCapture": lambda: stream.capture("inner").__enter__(),
        "cuStreamDestroy": stream.close,
        "cuStreamSynchronize of another stream": other.sync,
        "cuEventQuery": lambda: stream.record(event).done(),
        "cuEventSynchronize": lambda: stream.record(event).sync(),
        "cuGraphInstantiate": empty.instantiate,
        "cuGraphUpload": lambda: step.upload(stream),
        "close": lambda: [t.close() for t in things],
    }


def test_forbidden_calls_are_refused_before_the_driver_and_poison_nothing(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    calls = _calls(device, stream)
    close = calls.pop("close")
    refusing = ("cuMemAlloc", "cuMem", "cuStreamSync", "cuStreamQuery", "cuCtx", "cuModule")
    with stream.capture("guarded") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
        for name, act in calls.items():
            call = name.split()[0]
            before = device.driver.counts()
            with pytest.raises(errors.CaptureForbidden) as caught:
                act()
            assert caught.value.call == call, name
            text = str(caught.value)
            assert '"test"' in text or '"e"' in text
            assert "test_graph_capture.py" in text
            if call.startswith(refusing):
                assert device.driver.counts() == before, name
        launch(stream, ONE, kernels.shift, cell, 2)
    step = graph.instantiate()
    step.launch(stream)
    assert cell.to_numpy(stream)[0] == shifted(shifted(1, 1), 2)
    step.close()
    graph.close()
    close()
    check_usable(device, stream, kernels)


def test_relaxed_captures_allow_what_touches_no_captured_stream(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    with stream.capture("relaxed", mode=CaptureMode.RELAXED) as graph:
        p = device.pinned(1 << 13, np.uint8)
        other = device.stream(name="free")
        other.sync()
        with pytest.raises(errors.CaptureForbidden):
            stream.sync()
        launch(stream, ONE, kernels.shift, cell, 1)
    for thing in (p, other, graph):
        thing.close()
    check_usable(device, stream, kernels)


@pytest.mark.parametrize("mode", [CaptureMode.THREAD_LOCAL, CaptureMode.GLOBAL])
def test_other_threads_are_concerned_by_global_captures_only(
    device: Device, stream: Stream, kernels: Any, cell: Any, mode: CaptureMode
) -> None:
    outcome: list[Any] = []

    def elsewhere() -> None:
        try:
            device.pinned(1 << 15, np.uint8).close()
            outcome.append("allowed")
        except errors.CaptureForbidden as error:
            outcome.append(error.call)

    with stream.capture("threads", mode=mode) as graph:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        launch(stream, ONE, kernels.shift, cell, 1)
    assert outcome == ["cuMemHostAlloc" if mode is CaptureMode.GLOBAL else "allowed"]
    graph.close()
    check_usable(device, stream, kernels)


# -- failure --------------------------------------------------------------------------------------


def test_an_exception_in_the_block_ends_the_capture(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    with pytest.raises(ZeroDivisionError), stream.capture("failing") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
        raise ZeroDivisionError
    assert stream.recording is None and graph.closed
    with pytest.raises(errors.CaptureError, match="failed"):
        graph.instantiate()
    assert cell.to_numpy(stream)[0] == 1
    check_usable(device, stream, kernels)


def test_a_refused_argument_in_the_block_poisons_nothing(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    with stream.capture("careful") as graph:
        with pytest.raises(errors.ArgumentError):
            launch(stream, ONE, kernels.shift, cell, "x")
        with pytest.raises(errors.LaunchLimit):
            launch(stream, LaunchConfig(0, 1), kernels.shift, cell, 1)
        launch(stream, ONE, kernels.shift, cell, 1)
    step = graph.instantiate()
    step.launch(stream)
    assert cell.to_numpy(stream)[0] == 4
    step.close()
    graph.close()


def test_the_first_cause_of_an_invalidation_is_named(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    """A call past this library (another one in the process, say) ruins the capture."""
    driver = device.driver
    with pytest.raises(errors.CaptureInvalidated, match="cuMemHostAlloc") as caught:
        with stream.capture("ruined") as graph:
            launch(stream, ONE, kernels.shift, cell, 1)
            with contextlib.suppress(errors.MemraError):
                driver.cuMemHostAlloc(64)
            with contextlib.suppress(errors.MemraError):
                launch(stream, ONE, kernels.shift, cell, 1)
            with contextlib.suppress(errors.MemraError):
                driver.cuCtxSynchronize()
    assert "cuMemHostAlloc" in caught.value.cause and "test_graph_capture.py" in caught.value.cause
    assert "cuCtxSynchronize" not in caught.value.cause
    assert graph.closed and stream.recording is None
    for _ in range(3):
        check_usable(device, stream, kernels)


def test_unjoined_forks_are_named(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    side = device.stream(name="side")
    other = device.zeros(1, np.int32, stream)
    stream.sync()
    with pytest.raises(errors.CaptureUnjoined, match=r'"ragged".*side') as caught:
        with stream.capture("ragged"):
            side.wait(stream)
            launch(side, ONE, kernels.put, other, 1)
            launch(stream, ONE, kernels.shift, cell, 1)
    assert caught.value.streams == ("side",)
    assert side.recording is None and stream.recording is None
    check_usable(device, stream, kernels)
    check_usable(device, side, kernels)
    other.close()
    side.close()


def test_ending_on_another_thread_is_refused_and_the_owner_can_still_end(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    manager = stream.capture("threaded")
    graph = manager.__enter__()
    launch(stream, ONE, kernels.shift, cell, 1)
    caught: list[BaseException] = []

    def end() -> None:
        try:
            manager.__exit__(None, None, None)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert isinstance(caught[0], errors.CaptureWrongThread) and "threaded" in str(caught[0])
    manager.__exit__(None, None, None)
    graph.instantiate().close()
    graph.close()
    check_usable(device, stream, kernels)


def test_a_graph_is_not_usable_while_it_is_captured(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    with stream.capture("early") as graph:
        for act in (graph.instantiate, graph.describe, graph.nodes):
            with pytest.raises(errors.CaptureError, match="early"):
                act()
        with pytest.raises(errors.CaptureForbidden):
            graph.close()
        launch(stream, ONE, kernels.shift, cell, 1)
    graph.close()
    with pytest.raises(errors.ClosedError, match="early"):
        graph.instantiate()


def test_empty_captures_give_empty_graphs(device: Device, stream: Stream) -> None:
    with stream.capture("nothing") as graph:
        pass
    step = graph.instantiate()
    step.launch(stream)
    stream.sync()
    assert step.describe().nodes == {}
    step.close()
    graph.close()


# -- forks and joins ------------------------------------------------------------------------------


def test_forks_run_side_by_side_and_join(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    sides = [device.stream(name=f"side {i}") for i in range(3)]
    cells = [device.zeros(1, np.int32, stream) for _ in sides]
    start = device.event(name="start")
    ends = [device.event(name=f"end {i}") for i in range(3)]
    stream.sync()
    with stream.capture("fork") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
        stream.record(start)
        for side, out, end in zip(sides, cells, ends, strict=True):
            side.wait(start)
            assert side.recording is stream.recording
            launch(side, ONE, kernels.shift, out, 7)
            side.record(end)
        for end in ends:
            stream.wait(end)
        launch(stream, ONE, kernels.shift, cell, 2)
    assert all(side.recording is None for side in sides)
    census = graph.describe()
    assert census.kernels == {"shift": 5}
    needed = {(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)}
    # Whether the edge from first to last is kept, which the others imply, is the driver's affair.
    assert needed <= set(graph.edges()) <= needed | {(0, 4)}
    step = graph.instantiate()
    value, side_value = 1, 0
    for _ in range(6):
        step.launch(stream)
        value, side_value = shifted(shifted(value, 1), 2), shifted(side_value, 7)
    assert cell.to_numpy(stream)[0] == value
    assert [out.to_numpy(stream)[0] for out in cells] == [side_value] * 3
    for thing in (step, graph, start, *ends, *cells, *sides):
        thing.close()


def test_events_do_not_cross_the_border_of_a_capture(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    other = device.stream(name="outside")
    before, inside = device.event(name="before"), device.event(name="inside")
    other.record(before)
    with stream.capture("bordered") as graph:
        with pytest.raises(errors.CaptureForbidden, match="before"):
            stream.wait(before)
        launch(stream, ONE, kernels.shift, cell, 1)
        stream.record(inside)
    with pytest.raises(errors.CaptureForbidden, match=r"inside.*ended"):
        other.wait(inside)
    with pytest.raises(errors.CaptureForbidden, match="inside"):
        inside.done()
    stream.record(inside)
    inside.sync()
    other.wait(inside)
    for thing in (graph, before, inside, other):
        thing.close()
    check_usable(device, stream, kernels)


def test_two_captures_at_once_stay_apart(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    other = device.stream(name="second")
    out = device.zeros(1, np.int32, stream)
    event = device.event(name="of the first")
    stream.sync()
    with stream.capture("first") as one, other.capture("second") as two:
        launch(stream, ONE, kernels.shift, cell, 1)
        stream.record(event)
        with pytest.raises(errors.CaptureForbidden, match="first"):
            other.wait(event)
        launch(other, ONE, kernels.shift, out, 2)
    assert one.describe().kernel_nodes == two.describe().kernel_nodes == 1
    for thing in (one, two, event, out, other):
        thing.close()


# -- lifetimes ------------------------------------------------------------------------------------


def test_graphs_keep_their_operands(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    frees = lambda: device.driver.counts().get("cuMemFreeAsync", 0)  # noqa: E731
    hidden = device.from_numpy(np.array([2], np.int32), stream, name="hidden")
    pinned = device.pinned(1, np.int32)
    pinned.array[0] = 6
    down = device.pinned(1, np.int32)
    with stream.capture("keeper") as graph:
        hidden.copy_from(stream, pinned)
        launch(stream, ONE, kernels.shift, hidden, 1)
        hidden.copy_to(stream, down)
    step = graph.instantiate()
    before = frees()
    hidden.close()
    del hidden, pinned
    gc.collect()
    device.sync()
    # Memory of the same sizes must not land on the operands of the graph.
    crowd = [device.from_numpy(np.array([99], np.int32), stream) for _ in range(8)]
    crowd_pinned = [device.pinned(1, np.int32) for _ in range(4)]
    for p in crowd_pinned:
        p.array[0] = 99
    step.launch(stream)
    stream.sync()
    assert down.array[0] == 19
    graph.close()
    step.launch(stream)
    stream.sync()
    assert down.array[0] == 19 and frees() == before
    step.close()
    stream.sync()
    assert frees() == before + 1
    for thing in (*crowd, *crowd_pinned, down):
        thing.close()


def test_closing_an_operand_during_the_capture_is_safe(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    inner = device.from_numpy(np.array([1], np.int32), stream, name="inner")
    unrelated = device.zeros(1, np.int32, stream)
    frees = lambda: device.driver.counts().get("cuMemFreeAsync", 0)  # noqa: E731
    before = frees()
    with stream.capture("closing") as graph:
        launch(stream, ONE, kernels.shift, inner, 1)
        inner.copy_to(stream, cell)
        inner.close()
        unrelated.close()
        assert frees() == before
    assert frees() == before + 1  # the unrelated one
    step = graph.instantiate()
    step.launch(stream)
    assert cell.to_numpy(stream)[0] == 4
    step.close()
    graph.close()
    assert frees() == before + 2


def test_finalisers_call_no_driver_during_a_capture_on_any_thread(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    class Cycle:
        pass

    def litter() -> None:
        for _ in range(5):
            c = Cycle()
            c.me, c.event, c.buffer = c, device.event(name="litter"), None  # type: ignore[attr-defined]

    buffers = [device.zeros(4, np.int32, stream) for _ in range(5)]
    stream.sync()
    calls = ("cuEventDestroy", "cuMemFreeAsync", "cuMemFree", "cuStreamDestroy", "cuGraphDestroy")
    count = lambda: sum(device.driver.counts().get(c, 0) for c in calls)  # noqa: E731
    with stream.capture("littered") as graph:
        litter()
        before = count()
        buffers.clear()
        thread = threading.Thread(target=lambda: (gc.collect(), device.ctx.reap()))
        thread.start()
        thread.join()
        gc.collect()
        device.event(name="one more").close()
        launch(stream, ONE, kernels.shift, cell, 1)
        assert count() == before
    assert count() == before + 11
    assert not lifetime.recordings
    graph.close()


def test_executables_keep_modules_loaded(device: Device, stream: Stream, cell: Any) -> None:
    source = """#include "common/device.cuh"
    KERNEL void triple(int32_t* p) { if (threadIdx.x == 0) p[0] *= 3; }"""
    module = device.module(compile_source(source, arch=device.arch, name="triple.cu"))
    unloads = lambda: device.driver.counts().get("cuModuleUnload", 0)  # noqa: E731
    before = unloads()
    with stream.capture("kept") as graph:
        launch(stream, ONE, module.kernel("triple"), cell)
    step = graph.instantiate()
    module.close()
    graph.close()
    step.launch(stream)
    assert cell.to_numpy(stream)[0] == 3
    assert not module.closed and unloads() == before
    step.close()
    stream.sync()
    assert module.closed and unloads() == before + 1


def test_dropped_graphs_and_executables_are_destroyed(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    counts = device.driver.counts
    graphs, executables = counts().get("cuGraphDestroy", 0), counts().get("cuGraphExecDestroy", 0)
    with stream.capture("dropped") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
    step = graph.instantiate()
    step.launch(stream)
    del step, graph
    gc.collect()
    stream.sync()
    assert counts()["cuGraphDestroy"] == graphs + 1
    assert counts()["cuGraphExecDestroy"] == executables + 1
    assert cell.to_numpy(stream)[0] == 4


def test_closed_executables_refuse(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    with stream.capture("closed") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
    step = graph.instantiate()
    step.launch(stream)
    step.close()
    for act in (
        lambda: step.launch(stream),
        lambda: step.upload(stream),
        lambda: step.update("shift"),
    ):
        with pytest.raises(errors.ClosedError, match="closed"):
            act()
    graph.close()
    with Device("host:1") as other:
        s = other.stream(name="elsewhere")
        with stream.capture("here") as graph:
            launch(stream, ONE, kernels.shift, cell, 1)
        step = graph.instantiate()
        with pytest.raises(errors.ArgumentError, match="elsewhere"):
            step.launch(s)
        for thing in (step, graph, s):
            thing.close()
