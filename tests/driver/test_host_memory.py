"""Memory of the host device: bounds, order of frees, pinned and pageable copies, the pool."""

from __future__ import annotations

import ctypes

import pytest
from driver_bench import Bench

from memra_lowlevel.driver.host import host_options
from memra_lowlevel.driver.table import StreamOrderedPool
from memra_lowlevel.errors import InvalidArgument, OutOfBounds, OutOfMemory


def test_new_memory_is_poisoned_and_copies_are_exact(bench: Bench) -> None:
    d = bench.d
    for n in (1, 3, 4, 255, 256, 4096, 10_000):
        ptr = d.cuMemAlloc(n)
        out = ctypes.create_string_buffer(n)
        d.cuMemcpyDtoH(ctypes.addressof(out), ptr, n)
        assert out.raw == b"\xff" * n
        data = bytes((7 * i + n) % 256 for i in range(n))
        source = ctypes.create_string_buffer(data, n)
        d.cuMemcpyHtoD(ptr, ctypes.addressof(source), n)
        d.cuMemcpyDtoH(ctypes.addressof(out), ptr, n)
        assert out.raw == data
        d.cuMemFree(ptr)


@pytest.mark.parametrize(("offset", "n"), [(0, 65), (1, 64), (64, 1), (-1, 1), (-1, 65)])
def test_a_copy_outside_its_block_is_refused(bench: Bench, offset: int, n: int) -> None:
    ptr = bench.d.cuMemAlloc(64)
    data = ctypes.create_string_buffer(128)
    with pytest.raises(InvalidArgument, match="cuMemcpyHtoD"):
        bench.d.cuMemcpyHtoD(ptr + offset, ctypes.addressof(data), n)
    s = bench.stream()
    with pytest.raises(InvalidArgument, match="cuMemsetD8Async"):
        bench.d.cuMemsetD8Async(ptr + offset, 0, n, s)
    bench.d.cuMemsetD8Async(ptr, 0, 64, s)  # nothing was harmed
    bench.d.cuStreamSynchronize(s)


def test_a_set_must_be_aligned(bench: Bench) -> None:
    ptr = bench.d.cuMemAlloc(64)
    with pytest.raises(InvalidArgument, match="multiple of 4"):
        bench.d.cuMemsetD32Async(ptr + 2, 0, 1, bench.stream())


def test_free_waits_for_work_and_refuses_twice(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    src, dst = bench.ints([5] * 4), bench.ints([0] * 4)
    d.cuMemcpyDtoDAsync(dst, src, 16, s)
    d.cuMemFree(src)
    assert bench.read(dst, 4) == [5] * 4
    with pytest.raises(InvalidArgument, match="no start of a live block"):
        d.cuMemFree(src)
    with pytest.raises(InvalidArgument):
        d.cuMemFree(dst + 4)
    d.cuMemFree(0)


def test_out_of_memory_tells_the_figures(bench: Bench) -> None:
    with host_options(memory_bytes=1 << 20):
        a = bench.d.cuMemAlloc(1 << 19)
        assert bench.d.cuMemGetInfo() == ((1 << 20) - (1 << 19), 1 << 20)
        with pytest.raises(OutOfMemory, match=f"{1 << 20} bytes asked for"):
            bench.d.cuMemAlloc(1 << 20)
        bench.d.cuMemFree(a)
        bench.d.cuMemFree(bench.d.cuMemAlloc(1 << 20))


@pytest.mark.parametrize("n", [0, -1])
def test_no_empty_blocks(bench: Bench, n: int) -> None:
    with pytest.raises(InvalidArgument):
        bench.d.cuMemAlloc(n)


def test_pinned_source_is_read_late_and_pageable_at_once(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    pinned = d.cuMemHostAlloc(4)
    pageable = ctypes.c_int32(1)
    ctypes.c_int32.from_address(pinned).value = 1
    a, b = d.cuMemAlloc(4), d.cuMemAlloc(4)
    d.cuMemcpyHtoDAsync(a, pinned, 4, s)
    d.cuMemcpyHtoDAsync(b, ctypes.addressof(pageable), 4, s)
    ctypes.c_int32.from_address(pinned).value = 2
    pageable.value = 2
    d.cuStreamSynchronize(s)
    assert bench.read(a, 1) == [2]
    assert bench.read(b, 1) == [1]
    d.cuMemFreeHost(pinned)


def test_copy_to_pageable_memory_is_complete_on_return(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    ptr, out = bench.ints([1, 2]), (ctypes.c_int32 * 2)()
    bench.add(ptr, 10, 2, s)
    d.cuMemcpyDtoHAsync(ctypes.addressof(out), ptr, 8, s)
    assert list(out) == [11, 12]


def test_synchronous_copy_does_not_wait_for_non_blocking_streams(bench: Bench) -> None:
    seen = set()
    for seed in range(30):
        with host_options(seed=seed):
            ptr, s = bench.ints([0]), bench.stream()
            for _ in range(3):
                bench.add(ptr, 1, 1, s)
            seen.add(bench.read(ptr, 1)[0])
            bench.d.cuStreamSynchronize(s)
            assert bench.read(ptr, 1) == [3]
    assert len(seen) > 1


def test_synchronous_copy_waits_for_blocking_streams(bench: Bench) -> None:
    for seed in range(20):
        with host_options(seed=seed):
            ptr, s = bench.ints([0]), bench.stream(flags=0)
            bench.add(ptr, 1, 1, s)
            assert bench.read(ptr, 1) == [1]


def test_peer_copy_checks_the_devices(bench: Bench) -> None:
    d = bench.d
    other = d.cuDevicePrimaryCtxRetain(1)
    a = bench.ints([42])
    d.cuCtxSetCurrent(other)
    b = d.cuMemAlloc(4)
    s = d.cuStreamCreateWithPriority(1, 0)
    with pytest.raises(InvalidArgument, match="lies on device"):
        d.cuMemcpyPeerAsync(b, bench.ctx, a, other, 4, s)
    d.cuMemcpyPeerAsync(b, other, a, bench.ctx, 4, s)
    d.cuStreamSynchronize(s)
    assert bench.read(b, 1) == [42]


# -- the stream-ordered pool ----------------------------------------------------------------------


def test_pool_block_is_reused_on_its_stream_and_poisoned_again(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    a = d.cuMemAllocAsync(64, s)
    d.cuMemsetD32Async(a, 1, 16, s)
    d.cuMemFreeAsync(a, s)
    b = d.cuMemAllocAsync(64, s)
    assert b == a
    out = (ctypes.c_int32 * 16)()
    d.cuMemcpyDtoHAsync(ctypes.addressof(out), b, 64, s)
    assert list(out) == [-1] * 16
    d.cuMemFreeAsync(b, s)
    d.cuStreamSynchronize(s)


def test_pool_block_goes_to_another_stream_only_after_its_release_ran(bench: Bench) -> None:
    d, s, t = bench.d, bench.stream(), bench.stream()
    a = d.cuMemAllocAsync(64, s)
    d.cuMemFreeAsync(a, s)
    b = d.cuMemAllocAsync(64, t)
    assert b != a
    d.cuStreamSynchronize(s)
    c = d.cuMemAllocAsync(64, t)
    assert c == a


def test_release_then_reuse_then_release_keeps_the_second_owner(bench: Bench) -> None:
    d, s, t = bench.d, bench.stream(), bench.stream()
    for seed in range(20):
        with host_options(seed=seed):
            a = d.cuMemAllocAsync(96, s)
            d.cuMemFreeAsync(a, s)
            b = d.cuMemAllocAsync(96, s)
            d.cuMemsetD32Async(b, 3, 24, s)
            d.cuMemFreeAsync(b, s)
            d.cuStreamQuery(s)
            c = d.cuMemAllocAsync(96, t)
            d.cuMemsetD32Async(c, 4, 24, t)
            out = (ctypes.c_int32 * 24)()
            d.cuMemcpyDtoHAsync(ctypes.addressof(out), c, 96, t)
            assert list(out) == [4] * 24
            d.cuMemFreeAsync(c, t)
            d.cuStreamSynchronize(s)
            d.cuStreamSynchronize(t)


def test_use_after_stream_ordered_free_is_found(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    a, dst = d.cuMemAllocAsync(64, s), d.cuMemAlloc(64)
    d.cuMemFreeAsync(a, s)
    d.cuMemcpyDtoDAsync(dst, a, 64, s)
    with pytest.raises(OutOfBounds, match="freed before the copy"):
        d.cuStreamSynchronize(s)


def test_use_on_another_stream_without_an_event_is_found_over_seeds(bench: Bench) -> None:
    d, found = bench.d, 0
    s, t, dst = bench.stream(), bench.stream(), bench.d.cuMemAlloc(64)
    for seed in range(20):
        with host_options(seed=seed):
            a = d.cuMemAllocAsync(64, s)
            d.cuMemcpyDtoDAsync(dst, a, 64, t)  # t never waited for the allocation on s
            try:
                d.cuCtxSynchronize()
            except OutOfBounds:
                found += 1
            d.cuMemFreeAsync(a, s)
            d.cuCtxSynchronize()
    assert 0 < found < 20


def test_check_mode_never_reuses_and_unmaps(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    with host_options(check=True):
        a = d.cuMemAllocAsync(64, s)
        d.cuMemFreeAsync(a, s)
        assert d.cuMemAllocAsync(64, s) != a
        d.cuStreamSynchronize(s)
        with pytest.raises(InvalidArgument):
            d.cuMemsetD8Async(a, 0, 64, s)


def test_pool_figures_and_trim(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    a, b = d.cuMemAllocAsync(64, s), d.cuMemAllocAsync(32, s)
    d.cuMemFreeAsync(a, s)
    d.cuStreamSynchronize(s)
    assert d.cuMemPoolGetUsage(0) == StreamOrderedPool(96, 32)
    d.cuMemPoolTrimTo(0, 0)
    assert d.cuMemPoolGetUsage(0) == StreamOrderedPool(32, 32)
    d.cuMemFreeAsync(b, s)
    with pytest.raises(InvalidArgument, match="no live pool block"):
        d.cuMemFreeAsync(b, s)
