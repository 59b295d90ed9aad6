"""Order of work on the host device: random where nothing orders it, exact where an event does."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest
from driver_bench import Bench

from memra_lowlevel.driver.host import HostOptions, current_options, host_options
from memra_lowlevel.errors import (
    DriverError,
    InvalidArgument,
    NotReady,
    OutOfBounds,
)

SEEDS = 24


def _two_streams(bench: Bench, with_event: bool) -> int:
    """x = 1 on one stream, y = 2 x on another; the event may be forgotten."""
    d, s, t = bench.d, bench.stream(), bench.stream()
    x, y = bench.ints([0]), bench.ints([0])
    done = bench.event()
    for _ in range(3):
        d.cuMemsetD32Async(y, 0, 1, s)
    bench.add(x, 1, 1, s)
    d.cuEventRecord(done, s)
    if with_event:
        d.cuStreamWaitEvent(t, done)
    bench.scale_add(y, x, 2, 1, t)
    d.cuStreamSynchronize(t)
    d.cuStreamSynchronize(s)
    return bench.read(y, 1)[0]


def test_a_forgotten_event_is_found_over_seeds(bench: Bench) -> None:
    results = []
    for seed in range(SEEDS):
        with host_options(seed=seed):
            results.append(_two_streams(bench, with_event=False))
    assert 1 in results and 0 in results, results


def test_with_the_event_every_seed_and_order_is_right(bench: Bench) -> None:
    for order in ("forward", "reverse", "random"):
        for seed in range(SEEDS if order == "random" else 1):
            with host_options(seed=seed, order=order):  # type: ignore[arg-type]
                assert _two_streams(bench, with_event=True) == 1


def test_a_missing_edge_behind_a_long_chain_is_found(bench: Bench) -> None:
    """The reader is right unless it overtakes forty operations of another stream."""
    d, s, t = bench.d, bench.stream(), bench.stream()
    results = set()
    for seed in range(SEEDS):
        with host_options(seed=seed):
            x, y, go = bench.ints([0]), bench.ints([0]), bench.event()
            for i in range(40):
                bench.add(x, 1, 1, s)
                if i == 4:
                    d.cuEventRecord(go, s)
            d.cuStreamWaitEvent(t, go)  # the wrong event: five of forty are certain
            bench.scale_add(y, x, 1, 1, t)
            d.cuCtxSynchronize()
            results.add(bench.read(y, 1)[0])
    assert min(results) >= 5
    assert 40 in results and min(results) < 15, results


def test_one_seed_is_one_order(bench: Bench) -> None:
    def run(seed: int) -> list[int]:
        with host_options(seed=seed):
            x, one = bench.ints([1]), bench.ints([1])
            streams = [bench.stream() for _ in range(4)]
            for i, s in enumerate(streams):
                bench.scale_add(x, one, i + 1, 1, s)  # x = (i + 1) x + 1: order shows
            bench.d.cuCtxSynchronize()
            return bench.read(x, 1)

    results = [run(seed) for seed in range(12)]
    assert results == [run(seed) for seed in range(12)]
    assert len({r[0] for r in results}) > 3  # other seeds, other orders


def test_work_on_one_stream_keeps_its_order(bench: Bench) -> None:
    rng = random.Random(7)
    for seed in range(10):
        with host_options(seed=seed):
            x, one, s = bench.ints([1]), bench.ints([1]), bench.stream()
            want = 1
            for _ in range(20):
                factor = rng.randint(1, 3)
                bench.scale_add(x, one, factor, 1, s)
                want = (want * factor + 1 + 2**31) % 2**32 - 2**31
            bench.d.cuStreamSynchronize(s)
            assert bench.read(x, 1) == [want]


def test_random_programs_agree_with_a_sequential_run(bench: Bench) -> None:
    """Streams that hand values on by events give what a sequential program gives."""
    d, n = bench.d, 4
    for seed in range(15):
        rng = random.Random(1000 + seed)
        with host_options(seed=seed):
            streams = [bench.stream() for _ in range(3)]
            cells = [bench.ints([i]) for i in range(n)]
            model = list(range(n))
            last: list[int | None] = [None] * n  # event after the last use of each cell
            for _ in range(30):
                a, b = rng.sample(range(n), 2)
                s = rng.choice(streams)
                for cell in (a, b):
                    if last[cell] is not None:
                        d.cuStreamWaitEvent(s, last[cell])  # type: ignore[arg-type]
                bench.scale_add(cells[a], cells[b], 3, 1, s)
                model[a] = (model[a] * 3 + model[b] + 2**31) % 2**32 - 2**31
                last[a] = last[b] = bench.event()
                d.cuEventRecord(last[a], s)
            d.cuCtxSynchronize()
            assert [bench.read(c, 1)[0] for c in cells] == model


def test_query_makes_progress_and_ends(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x, e = bench.ints([0]), bench.event()
    for _ in range(50):
        bench.add(x, 1, 1, s)
    d.cuEventRecord(e, s)
    answers = []
    for _ in range(200):
        answers.append(d.cuStreamQuery(s))
        if answers[-1]:
            break
    assert answers[-1] and answers[0] is False
    assert d.cuEventQuery(e) and bench.read(x, 1) == [50]


def test_events_have_times_in_order(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x, a, b = bench.ints([0] * 32), bench.event(), bench.event()
    with pytest.raises(InvalidArgument, match="never recorded"):
        d.cuEventElapsedTime(a, b)
    d.cuEventRecord(a, s)
    bench.add(x, 1, 32, s)
    d.cuEventRecord(b, s)
    with pytest.raises(NotReady):
        d.cuEventElapsedTime(a, b)
    d.cuEventSynchronize(b)
    assert 0 < d.cuEventElapsedTime(a, b) < 10_000
    with pytest.raises(InvalidArgument, match="without timing"):
        d.cuEventElapsedTime(a, bench.event(flags=2))


def test_a_rerecorded_event_stands_for_the_last_record(bench: Bench) -> None:
    for seed in range(10):
        with host_options(seed=seed):
            d, s, t = bench.d, bench.stream(), bench.stream()
            x, y, e = bench.ints([0]), bench.ints([0]), bench.event()
            bench.add(x, 1, 1, s)
            d.cuEventRecord(e, s)
            bench.add(x, 1, 1, s)
            d.cuEventRecord(e, s)
            d.cuStreamWaitEvent(t, e)
            bench.add(x, 1, 1, s)
            bench.scale_add(y, x, 1, 1, t)
            d.cuCtxSynchronize()
            assert bench.read(y, 1)[0] in (2, 3)


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_there_is_no_default_stream(bench: Bench, handle: int) -> None:
    x = bench.ints([0])
    with pytest.raises(InvalidArgument, match="default stream"):
        bench.d.cuMemsetD32Async(x, 0, 1, handle)
    with pytest.raises(InvalidArgument, match="default stream"):
        bench.add(x, 1, 1, handle)


def test_closed_handles_are_refused(bench: Bench) -> None:
    d, s, e = bench.d, bench.stream(), bench.event()
    d.cuStreamDestroy(s)
    d.cuEventDestroy(e)
    for call in (lambda: d.cuStreamSynchronize(s), lambda: d.cuEventQuery(e)):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.result == "CUDA_ERROR_INVALID_HANDLE"


def test_destroyed_stream_still_finishes_its_work(bench: Bench) -> None:
    x, s = bench.ints([0]), bench.stream()
    bench.add(x, 1, 1, s)
    bench.d.cuStreamDestroy(s)
    bench.d.cuCtxSynchronize()
    assert bench.read(x, 1) == [1]


def test_events_belong_to_a_device(bench: Bench) -> None:
    d = bench.d
    e = bench.event()
    d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(1))
    with pytest.raises(InvalidArgument, match="belongs to device 0"):
        d.cuEventRecord(e, d.cuStreamCreateWithPriority(1, 0))


def test_events_order_streams_of_two_devices(bench: Bench) -> None:
    d = bench.d
    other = d.cuDevicePrimaryCtxRetain(1)
    for seed in range(12):
        with host_options(seed=seed):
            d.cuCtxSetCurrent(bench.ctx)
            x, y, s, e = bench.ints([0]), bench.ints([0]), bench.stream(), bench.event()
            d.cuCtxSetCurrent(other)
            t = bench.stream()
            bench.add(x, 1, 1, s)
            d.cuEventRecord(e, s)
            d.cuStreamWaitEvent(t, e)
            bench.scale_add(y, x, 2, 1, t)
            d.cuStreamSynchronize(t)
            assert bench.read(y, 1) == [1]


# -- errors -----------------------------------------------------------------------------------


def test_a_kernel_fault_surfaces_at_the_sync_and_leaves_the_device_usable(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x, y = bench.ints([0] * 4), bench.ints([1])
    d.name_handle(s, "decode")
    bench.launch("stray", s, ctypes.c_void_p(x), ctypes.c_int32(1 << 16))
    bench.add(y, 5, 1, s)  # behind the fault: not run
    with pytest.raises(OutOfBounds) as caught:
        d.cuStreamSynchronize(s)
    assert caught.value.kernel == "stray" and caught.value.thread == (0, 0, 0)
    d.cuStreamSynchronize(s)  # reported once
    assert bench.read(y, 1) == [1]
    bench.add(y, 5, 1, s)
    d.cuStreamSynchronize(s)
    assert bench.read(y, 1) == [6]


def test_a_fault_of_another_device_waits_for_its_own_sync(bench: Bench) -> None:
    d = bench.d
    x = bench.ints([0] * 4)
    d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(1))
    t = bench.stream()
    with host_options(order="forward"):
        s0 = x  # device 0 has the memory
        d.cuCtxSetCurrent(bench.ctx)
        s = bench.stream()
        bench.launch("stray", s, ctypes.c_void_p(s0), ctypes.c_int32(1 << 16))
        d.cuMemsetD32Async(x, 0, 1, t)
        d.cuStreamSynchronize(t)  # ran the fault of device 0 on the way, and does not report it
        with pytest.raises(OutOfBounds):
            d.cuStreamSynchronize(s)


def test_a_fault_does_not_keep_pool_memory(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x = bench.ints([0] * 4)
    a = d.cuMemAllocAsync(64, s)
    bench.launch("stray", s, ctypes.c_void_p(x), ctypes.c_int32(1 << 16))
    d.cuMemFreeAsync(a, s)
    with pytest.raises(OutOfBounds):
        d.cuStreamSynchronize(s)
    assert d.cuMemPoolGetUsage(0).used_bytes == 0


# -- queues, options, threads --------------------------------------------------------------------


def test_a_full_queue_runs_work(bench: Bench) -> None:
    with host_options(max_pending=8):
        x, s = bench.ints([0]), bench.stream()
        for _ in range(100):
            bench.add(x, 1, 1, s)
        assert bench.d._schedule.n_pending <= 8
        bench.d.cuStreamSynchronize(s)
        assert bench.read(x, 1) == [100]


def test_options_are_checked_and_restored() -> None:
    before = current_options()
    with host_options(seed=9, order="reverse", workers=1, check=True) as o:
        assert o == current_options() and (o.seed, o.order, o.check) == (9, "reverse", True)
    assert current_options() is before
    kept = host_options(seed=5)  # without a block it stays until it is undone
    assert current_options().seed == 5
    kept.__exit__()
    assert current_options() is before
    for bad in ({"order": "sideways"}, {"workers": 0}, {"max_pending": 0}):
        with pytest.raises(ValueError):
            HostOptions(**bad)  # type: ignore[arg-type]


def test_threads_share_the_driver(bench: Bench) -> None:
    d, errors = bench.d, []
    before = d.counts()["cuLaunchKernel"]

    def work() -> None:
        try:
            d.cuCtxSetCurrent(bench.ctx)
            s, x = bench.stream(), bench.ints([0])
            for i in range(60):
                bench.add(x, 1, 1, s)
                if i % 20 == 0:
                    d.cuStreamSynchronize(s)
            d.cuStreamSynchronize(s)
            assert bench.read(x, 1) == [60]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert d.counts()["cuLaunchKernel"] - before == 240


def test_a_thread_without_context_is_told(bench: Bench) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            bench.d.cuMemAlloc(4)
        except DriverError as error:
            caught.append(error)

    t = threading.Thread(target=work)
    t.start()
    t.join()
    assert isinstance(caught[0], InvalidArgument) and "no context" in str(caught[0])
