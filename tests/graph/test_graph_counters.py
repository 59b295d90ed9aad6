"""Device counters: mirrors in lock-step with the device, room checked before each launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, DeviceCounter, LaunchConfig, Stream, errors, launch
from memra_lowlevel.graph import sync_counters, verify_counters

ONE = LaunchConfig(1, 32)


@pytest.fixture
def counter(device: Device, stream: Stream) -> Iterator[DeviceCounter]:
    made = DeviceCounter(device, "len", capacity=10, stream=stream)
    yield made
    made.close()


def on_device(counter: DeviceCounter, stream: Stream) -> int:
    (value,) = set(counter.buffer.to_numpy(stream).tolist())
    return int(value)


def test_eager_writes_move_both(counter: DeviceCounter, stream: Stream) -> None:
    for act, want in (
        (lambda: counter.advance(stream, 3), 3),
        (lambda: counter.set(stream, 7), 7),
        (lambda: counter.advance(stream), 8),
        (lambda: counter.advance(stream, -8), 0),
        (lambda: counter.set(stream, 10), 10),
        (lambda: counter.advance(stream, 0), 10),
    ):
        act()
        assert counter.value == want == on_device(counter, stream)
    verify_counters(stream, [counter])


def test_what_does_not_fit_is_refused_before_anything_moves(
    counter: DeviceCounter, stream: Stream
) -> None:
    counter.set(stream, 8)
    for act in (
        lambda: counter.advance(stream, 3),
        lambda: counter.advance(stream, -9),
        lambda: counter.set(stream, 11),
        lambda: counter.note_need(stream, 3),
    ):
        with pytest.raises(errors.CapacityExceeded, match="'len'"):
            act()
    with pytest.raises(errors.ArgumentError, match=r"'len': value got -1 .*of at least 0"):
        counter.set(stream, -1)  # no room would make it right
    assert counter.value == 8 == on_device(counter, stream)


def test_capture_moves_no_mirror_and_launches_do(counter: DeviceCounter, stream: Stream) -> None:
    counter.set(stream, 2)
    with stream.capture("step") as graph:
        counter.note_need(stream, 1)
        counter.advance(stream, 1)
        counter.note_need(stream, 2)
        assert counter.value == 2
    step = graph.instantiate()
    assert [str(e) for e in step.effects] == ["len + 1, needs 3"]
    assert step.effects[0].advance == 1
    done = 0
    while counter.value + 3 <= 10:
        step.launch(stream)
        done += 1
        assert counter.value == 2 + done == on_device(counter, stream)
    assert done == 6
    for _ in range(2):
        with pytest.raises(errors.CapacityExceeded, match="at 8 of 10, 3 more"):
            step.launch(stream)
    assert counter.value == 8 == on_device(counter, stream)
    counter.set(stream, 0)
    step.launch(stream)
    assert counter.value == 1
    step.close()
    graph.close()


def test_recorded_sets_and_rewinds(counter: DeviceCounter, stream: Stream) -> None:
    with stream.capture("set") as graph:
        counter.advance(stream, 2)
        counter.set(stream, 5)
        counter.advance(stream, -1)
    step = graph.instantiate()
    counter.set(stream, 1)
    for _ in range(3):
        step.launch(stream)
        assert counter.value == 4 == on_device(counter, stream)
    counter.set(stream, 9)
    with pytest.raises(errors.CapacityExceeded):
        step.launch(stream)  # its first part needs two rows
    step.close()
    graph.close()
    with stream.capture("rewind") as graph:
        counter.advance(stream, -3)
    step = graph.instantiate()
    counter.set(stream, 4)
    step.launch(stream)
    assert counter.value == 1 == on_device(counter, stream)
    with pytest.raises(errors.CapacityExceeded, match="below zero"):
        step.launch(stream)
    assert counter.value == 1 == on_device(counter, stream)
    step.close()
    graph.close()


def test_a_recorded_set_that_can_never_fit_is_refused_at_capture(
    counter: DeviceCounter, stream: Stream
) -> None:
    with stream.capture("never") as graph:
        with pytest.raises(errors.CapacityExceeded):
            counter.set(stream, 11)
        counter.set(stream, 9)
        with pytest.raises(errors.CapacityExceeded, match="at 9 of 10, 2 more"):
            counter.note_need(stream, 2)
    graph.close()


def test_amounts_that_a_kernel_decides_widen_the_bounds(
    counter: DeviceCounter, stream: Stream
) -> None:
    counter.set(stream, 1)
    counter.advance_recorded(stream, 0, at_most=4)
    assert not counter.known and counter.bounds == (1, 5)
    with pytest.raises(errors.CounterUnknown, match=r"1 … 5.*sync_counters"):
        counter.value  # noqa: B018
    counter.note_need(stream, 5)
    with pytest.raises(errors.CapacityExceeded, match="at 5 of 10, 6 more"):
        counter.note_need(stream, 6)
    assert counter.sync(stream) == 1 and counter.value == 1
    counter.note_unbounded(stream)
    assert counter.bounds == (1, None)
    with pytest.raises(errors.CounterUnknown, match="no bound"):
        counter.note_need(stream, 1)
    sync_counters(stream, [counter])
    assert counter.value == 1


def test_amounts_that_are_none_are_refused_and_not_booked(
    counter: DeviceCounter, stream: Stream
) -> None:
    counter.set(stream, 4)

    def each(counter: DeviceCounter) -> None:
        for value in (-1, 2**31, None, "3", 1.5, True, [], np.zeros(2)):
            with pytest.raises(errors.ArgumentError, match="'len': note_set: value got"):
                counter.note_set(value, stream)  # type: ignore[arg-type]
            with pytest.raises(errors.ArgumentError, match="'len': note_need: n got"):
                counter.note_need(stream, value)  # type: ignore[arg-type]
        for n, at_most in ((None, None), ("3", 4), (1.5, 2), (3, 2), (0, -1), (0, "x"), (2**31, 0)):
            with pytest.raises(errors.ArgumentError, match=r"'len': advance_recorded: (n|at_most)"):
                counter.advance_recorded(stream, n, at_most)  # type: ignore[arg-type]

    each(counter)
    with pytest.raises(errors.CapacityExceeded, match="'len': at 4, the work takes it 5 lower"):
        counter.advance_recorded(stream, -5)
    assert counter.value == 4
    with stream.capture("none") as graph:
        each(counter)
    assert not graph.effects
    graph.close()
    counter.advance_recorded(stream, np.int64(-4))  # type: ignore[arg-type]
    counter.note_set(np.int64(3))  # type: ignore[arg-type]
    assert counter.value == 3


def test_a_device_that_holds_less_than_nothing_is_told(
    counter: DeviceCounter, stream: Stream
) -> None:
    launch_add(counter, stream, -2)
    with pytest.raises(errors.MemraError, match=r"'len' holds \[-2\], which should be 0 or more"):
        counter.sync(stream)
    assert counter.value == 0


def test_device_decided_amounts_under_capture(counter: DeviceCounter, stream: Stream) -> None:
    """The graph adds 1; the host is told only that it adds up to 3."""
    with stream.capture("loop") as graph:
        launch_add(counter, stream, 1)
        counter.advance_recorded(stream, 0, at_most=3)
    step = graph.instantiate()
    for n in (1, 2, 3):
        step.launch(stream)
        assert counter.bounds == (0, 3 * n)
    with pytest.raises(errors.CapacityExceeded, match="at 9"):
        step.launch(stream)
    assert counter.sync(stream) == 3
    step.launch(stream)
    assert counter.bounds == (3, 6)
    counter.set(stream, 0)
    assert counter.value == 0
    step.close()
    graph.close()
    with stream.capture("unbounded") as graph:
        counter.note_need(stream, 1)
        counter.note_unbounded(stream)
    step = graph.instantiate()
    step.launch(stream)
    assert counter.bounds == (0, None)
    with pytest.raises(errors.CounterUnknown):
        step.launch(stream)
    counter.sync(stream)
    step.launch(stream)
    step.close()
    graph.close()


def launch_add(counter: DeviceCounter, stream: Stream, n: int) -> None:
    from memra_lowlevel.graph.counters import counter_kernel

    kernel = counter_kernel(stream.device, "add_counters")
    launch(stream, ONE, kernel, counter, None, counter.buffer.size, n)


def test_random_replays_and_rewinds_stay_in_lock_step(
    device: Device, stream: Stream, scale: int
) -> None:
    rng = np.random.default_rng()
    block = device.zeros(2, np.int32, stream)
    counters = [
        DeviceCounter(block.view(4 * i, 1, np.int32), f"c{i}", capacity=20 + 10 * i)
        for i in range(2)
    ]
    steps = []
    for n in (1, 2, 5):
        with stream.capture(f"by {n}") as graph:
            for c in counters:
                c.advance(stream, n)
        steps.append((n, graph.instantiate()))
        graph.close()
    done = {"launch": 0, "refused": 0, "rewind": 0}
    expect = [0, 0]
    for _ in range(200 * scale):
        if rng.random() < 0.25:
            to = int(rng.integers(0, min(expect) + 1))
            for c in counters:
                c.set(stream, to)
            expect = [to, to]
            done["rewind"] += 1
        else:
            n, step = steps[rng.integers(3)]
            try:
                step.launch(stream)
                expect = [e + n for e in expect]
                done["launch"] += 1
            except errors.CapacityExceeded as error:
                assert "'c0'" in str(error) and expect[0] + n > 20
                done["refused"] += 1
        assert [c.value for c in counters] == expect
        assert block.to_numpy(stream).tolist() == expect
    assert done["launch"] >= 50 and done["refused"] >= 5 and done["rewind"] >= 20, done
    for _, step in steps:
        step.close()
    block.close()


def test_blocks_of_words_are_one_counter(device: Device, stream: Stream) -> None:
    block = device.zeros(300, np.int32, stream)
    counter = DeviceCounter(block, "all lengths", capacity=1000)
    counter.advance(stream, 5)
    counter.advance(stream, -2)
    assert (block.to_numpy(stream) == 3).all() and counter.value == 3
    counter.set(stream, 900)
    assert (block.to_numpy(stream) == 900).all()
    assert counter.sync(stream) == 900
    block.view(4 * 17, 1, np.int32).fill(stream, 0)
    for check in (verify_counters, sync_counters):
        with pytest.raises(errors.MemraError, match="all lengths"):
            check(stream, [counter])
    block.close()


def test_writes_behind_the_counters_back_are_found(counter: DeviceCounter, stream: Stream) -> None:
    verify_counters(stream, [counter])
    launch_add(counter, stream, 1)
    with pytest.raises(errors.MemraError, match="'len'"):
        verify_counters(stream, [counter])


def test_counters_refuse_wrong_places(device: Device, stream: Stream) -> None:
    floats = device.zeros(1, np.float32, stream)
    for place in (floats, device):
        with pytest.raises(errors.ArgumentError, match="i32"):
            DeviceCounter(place, "bad")
    with pytest.raises(errors.ArgumentError, match="capacity"):
        DeviceCounter(device, "bad", capacity=-1, stream=stream)
    floats.close()


def test_reading_back_is_refused_under_capture(counter: DeviceCounter, stream: Stream) -> None:
    with stream.capture("no reading") as graph, pytest.raises(errors.CaptureForbidden):
        counter.sync(stream)
    graph.close()


def test_plane_checks_run_before_each_launch(
    counter: DeviceCounter, device: Device, stream: Stream
) -> None:
    asked: list[Any] = []

    def headroom(executable: Any) -> None:
        asked.append(executable)
        if len(asked) == 3:
            raise errors.RingLapped("no headroom left")

    with stream.capture("checked") as graph:
        counter.advance(stream, 1)
        stream.recording.add_check(headroom)  # type: ignore[union-attr]
    step = graph.instantiate()
    step.launch(stream)
    step.launch(stream)
    before = device.driver.counts().get("cuGraphLaunch", 0)
    with pytest.raises(errors.RingLapped):
        step.launch(stream)
    assert device.driver.counts().get("cuGraphLaunch", 0) == before
    assert asked == [step] * 3 and counter.value == 2 == on_device(counter, stream)
    step.close()
    graph.close()


def test_a_failed_launch_moves_no_mirror(
    counter: DeviceCounter, device: Device, stream: Stream, path: str
) -> None:
    with stream.capture("fails") as graph:
        counter.advance(stream, 1)
    step = graph.instantiate()
    with Device("host:1") as other:
        s = other.stream(name="wrong")
        with pytest.raises(errors.ArgumentError):
            step.launch(s)
        s.close()
    assert counter.value == 0
    step.close()
    with pytest.raises(errors.ClosedError):
        step.launch(stream)
    assert counter.value == 0 == on_device(counter, stream)
    graph.close()


def test_graphs_inside_graphs_compose_their_effects(
    counter: DeviceCounter, device: Device, stream: Stream
) -> None:
    with stream.capture("inner") as inner:
        counter.note_need(stream, 2)
        counter.advance(stream, 1)
    small = inner.instantiate()
    with stream.capture("outer") as outer:
        small.launch(stream)
        counter.advance(stream, 1)
        small.launch(stream)
    assert counter.value == 0
    step = outer.instantiate()
    assert str(step.effects[0]) == "len + 3, needs 4"
    small.close()
    inner.close()
    for n in (3, 6, 9):
        if counter.value + 4 > 10:
            break
        step.launch(stream)
        assert counter.value == n == on_device(counter, stream)
    with pytest.raises(errors.CapacityExceeded):
        step.launch(stream)
    census = step.describe()
    assert census.nodes["graph"] == 2 and census.kernels == {"add_counters": 3}
    step.close()
    outer.close()
