"""What is always found: bounds at guard pages, divergence, deadlock, stack overflow, faults."""

from __future__ import annotations

import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner

ORDERS = [("forward", 0), ("reverse", 0), ("random", 3)]
LINE = 3  # three includes stand before the text of a kernel


def fails(run, kind, *args, match, **options):
    """Run, demand an error of the kind, then a clean launch on the same runtime."""
    with pytest.raises(kind, match=match) as caught:
        run(*args, **options)
    fresh = np.zeros(64, np.int32)
    GOOD[0](2, 32, 0, fresh)
    np.testing.assert_array_equal(fresh, np.arange(64) // 32 + 100)
    return caught.value


GOOD = []


@pytest.fixture(autouse=True)
def good(kernel):
    body = """KERNEL void good(int* out) {
      __shared__ int s[32];
      s[threadIdx.x] = 100;
      __syncthreads();
      const int b = __shfl_sync(FULL_MASK, blockIdx.x, 3);
      out[blockIdx.x * 32 + threadIdx.x] = s[31 - threadIdx.x] + b;
    }"""
    GOOD[:] = [kernel(body, "good")]


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_write_past_the_end_of_a_buffer(kernel, order, seed):
    body = """KERNEL void past(float* x, int n) { const int i = blockIdx.x * 32 + threadIdx.x;
    x[i] = 1; }"""
    x = np.zeros(96, np.float32)
    error = fails(
        kernel(body, "past"), errors.OutOfBounds, 4, 32, 0, x, np.int32(0),
        order=order, seed=seed,
        match=r"write out of bounds: offset (384|508|\d+) of a buffer of 384",
    )  # fmt: skip
    assert error.kernel == "past" and error.block == (3, 0, 0) and len(error.thread) == 3
    assert error.where == f"source.cu:{LINE + 2}"


def test_read_before_the_begin_and_of_null(kernel):
    body = "KERNEL void before(float* x, const float* NULLABLE y, int n) { x[0] = (y ? y : x)[n]; }"
    run = kernel(body, "before")
    x = np.zeros(1024, np.float32)
    fails(
        run,
        errors.OutOfBounds,
        1,
        1,
        0,
        x,
        None,
        np.int32(-1),
        match="offset -4 of a buffer of 4096",
    )
    body = "KERNEL void null(float* x, const float* y) { x[0] = y[2]; }"
    fails(kernel(body, "null"), errors.OutOfBounds, 1, 1, 0, x, None, match="a null pointer")


def test_use_of_freed_memory(kernel):
    body = "KERNEL void use(uint64_t at) { *reinterpret_cast<float*>(at + 8) = 1; }"
    ptr = runner.alloc(4096)
    runner.free(ptr)
    fails(
        kernel(body, "use"), errors.OutOfBounds, 1, 1, 0, np.uint64(ptr),
        match="offset 8 of a freed buffer of 4096 bytes",
    )  # fmt: skip


def test_bytes_beside_a_buffer_are_watched_at_free(kernel):
    body = "KERNEL void beside(uint64_t at) { *reinterpret_cast<uint8_t*>(at) = 1; }"
    ptr = runner.alloc(100)
    kernel(body, "beside")(1, 1, 0, np.uint64(ptr + 100))
    with pytest.raises(errors.OutOfBounds, match="beside the buffer of 100 bytes"):
        runner.free(ptr)
    with pytest.raises(errors.InvalidArgument):
        runner.free(ptr)


def test_dynamic_shared_memory_ends_at_a_guard_page(kernel):
    body = "KERNEL void dyn(int* out) { DYN_SMEM(int, s);\n  s[threadIdx.x] = 1; out[0] = s[0]; }"
    run, out = kernel(body, "dyn"), np.zeros(1, np.int32)
    run(1, 100, 400, out)
    error = fails(
        run, errors.OutOfBounds, 1, 101, 400, out,
        match="offset 400 of the dynamic shared memory of 400 bytes",
    )  # fmt: skip
    assert error.thread == (100, 0, 0)


DIVERGENT = {
    "two barriers": (
        "if (threadIdx.x < 40)\n __syncthreads();\n else\n __syncthreads();",
        errors.BarrierDivergence,
        r"__syncthreads of source.cu:\d+, thread \(\d+, 0, 0\) waits at the one",
    ),
    "two barriers on one line": (
        "if (threadIdx.x < 40) __syncthreads(); else __syncthreads();",
        errors.BarrierDivergence, "must meet the same barrier",
    ),
    "returned before a barrier": (
        "if (threadIdx.x == 7) return;\n __syncthreads();", errors.BarrierDivergence, "returned",
    ),
    "lane returned": (
        "if (threadIdx.x == 7) return;\n x[0] = __shfl_sync(FULL_MASK, 1, 0);",
        errors.BarrierDivergence, "returned",
    ),
    "barrier in some lanes": (
        "if (threadIdx.x % 2) __syncwarp(); else __syncthreads();",
        errors.BarrierDivergence, r"no thread of the block can go on: threads .* at __syncthreads",
    ),
    "lane outside its mask": (
        "__syncwarp(0xffff);", errors.BarrierDivergence,
        "lane 1[6-9]|lane [23]. calls .* 0x0000ffff",
    ),
    "mixed operations": (
        "if (threadIdx.x % 2) __syncwarp(); else x[0] = __ballot_sync(FULL_MASK, 1);",
        errors.BarrierDivergence, "met different warp operations",
    ),
    "two masks": (
        "if (threadIdx.x % 32 < 16) __syncwarp(0xffffffffu); else __syncwarp(0xffff0000u);",
        errors.BarrierDivergence, "no thread of the block can go on|returned",
    ),
    "shuffle from outside": (
        "if (threadIdx.x % 32 < 16) x[0] = __shfl_sync(0xffffu, 1, 20);",
        errors.BarrierDivergence, "reads a lane that does not take part",
    ),
    "asynchronous copy never waited for": (
        "__shared__ float s[64];\n cp_async<4>(s + threadIdx.x, x + threadIdx.x); "
        "cp_async_commit();",
        errors.DataRace, "in flight",
    ),
    "misaligned asynchronous copy": (
        "__shared__ float s[80];\n cp_async<16>(s + threadIdx.x % 8, x); cp_async_wait_all();",
        errors.OutOfBounds, "needs 16-byte aligned",
    ),
    "spin on a lane that cannot run": (
        "__shared__ volatile int flag; if (threadIdx.x == 0) flag = 0; __syncthreads();\n"
        "while (!flag) __nanosleep(20);",
        errors.Deadlock, "spins without progress: threads 0-63 (spin|run)",
    ),
    "spin on an atomic": (
        "while (atomicAdd(reinterpret_cast<unsigned*>(x), 0u) != 5u) {}",
        errors.Deadlock, "must not wait for another",
    ),
    "trap": ("if (threadIdx.x == 3) __trap();", errors.HostCheckError, r"__trap\(\)"),
    "assertion": (
        "assert(threadIdx.x < 3);", errors.HostCheckError, "does not hold: threadIdx.x < 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("case", DIVERGENT)
def test_wrong_use_of_barriers(kernel, case, order, seed):
    statements, kind, match = DIVERGENT[case]
    body = f"KERNEL void wrong(float* x) {{\n{statements}\n}}\n"
    x = np.zeros(80, np.float32)
    error = fails(
        kernel(body, "wrong"), kind, 2, 64, 0, x, order=order, seed=seed, match=match
    )  # fmt: skip
    assert "kernel wrong, block (" in str(error)
    if kind is not errors.Deadlock:
        file, line = error.where.rsplit(":", 1)
        assert file == "source.cu" and LINE + 1 < int(line) <= LINE + 5


def test_without_strict_mode_threads_may_return_before_a_barrier(kernel):
    body = """KERNEL void some(int* out) {
      __shared__ int s[64];
      s[threadIdx.x] = threadIdx.x;
      if (threadIdx.x % 3 == 0) return;
      __syncthreads();
      out[threadIdx.x] = s[63 - threadIdx.x] + 1000 * __popc(__ballot_sync(FULL_MASK, 1));
    }"""
    for order, seed in ORDERS:
        out = np.zeros(64, np.int32)
        kernel(body, "some")(1, 64, 0, out, strict=False, order=order, seed=seed)
        i = np.arange(64)
        lanes = np.where(i < 32, 21, 21)
        np.testing.assert_array_equal(out, np.where(i % 3 == 0, 0, 63 - i + 1000 * lanes))


def test_threads_may_wait_for_each_other_through_memory(kernel):
    body = """KERNEL void hand_over(int* x) {
      __shared__ volatile int turn;
      if (threadIdx.x == 0) turn = 0;
      __syncthreads();
      while (turn != int(threadIdx.x)) __nanosleep(10);
      x[threadIdx.x] = x[threadIdx.x ? threadIdx.x - 1 : 0] + 1;
      turn = threadIdx.x + 1;
    }
    KERNEL void lock(unsigned* x) {
      for (int i = 0; i < 20; ++i) {
        while (atomicCAS(x, 0u, 1u) != 0u) {}
        x[1] += 1;
        __threadfence();
        atomicExch(x, 0u);
      }
    }"""
    for order, seed in ORDERS:
        x = np.zeros(70, np.int32)
        kernel(body, "hand_over")(1, 70, 0, x, order=order, seed=seed)
        np.testing.assert_array_equal(x, range(1, 71))
        y = np.zeros(2, np.uint32)
        kernel(body, "lock")(3, 64, 0, y, order=order, seed=seed, workers=2)
        assert list(y) == [0, 3 * 64 * 20]


def test_stack_overflow(kernel):
    body = """__device__ __noinline__ int deep(int n, volatile int* x) {
      volatile int pad[64];
      pad[n & 63] = n;
      return n == 0 ? x[0] : deep(n - 1, x) + pad[n & 63];
    }
    KERNEL void recurse(int* x, int n) { __syncthreads(); x[1] = deep(n, x); }"""
    x = np.zeros(2, np.int32)
    run = kernel(body, "recurse")
    run(1, 4, 0, x, np.int32(100))
    assert x[1] == 5050
    for workers in (1, 2):
        fails(
            run, errors.OutOfBounds, 2, 4, 0, x, np.int32(100_000), workers=workers,
            match="stack overflow: a thread has 124 KiB",
        )  # fmt: skip


def test_integer_division_by_zero(kernel):
    body = "KERNEL void divide(int* x) { x[1] = 7 / x[0]; }"
    import platform

    x = np.zeros(2, np.int32)
    if platform.machine() == "x86_64":
        fails(kernel(body, "divide"), errors.HostCheckError, 1, 1, 0, x, match="division by zero")
    else:
        kernel(body, "divide")(1, 1, 0, x)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_first_failing_block_is_the_one_reported(kernel, workers):
    body = "KERNEL void some(int* x) { if (blockIdx.x >= 3) x[1000 * blockIdx.x] = 1; }"
    for _ in range(5):
        error = fails(
            kernel(body, "some"), errors.OutOfBounds, 40, 32, 0, np.zeros(4, np.int32),
            workers=workers, match="no device memory|out of bounds",
        )  # fmt: skip
        assert error.block[0] >= 3 and (workers > 1 or error.block == (3, 0, 0))


def test_a_hundred_failures_leak_no_stacks(kernel):
    body = """KERNEL void fail_late(int* x, int n) {
      __syncthreads();
      x[threadIdx.x == 255 ? n : 0] = __shfl_sync(FULL_MASK, 1, 2);
    }"""
    run, x = kernel(body, "fail_late"), np.zeros(4, np.int32)
    for _ in range(100):
        with pytest.raises(errors.OutOfBounds):
            run(1, 256, 0, x, np.int32(1 << 16))
    run(1, 256, 0, x, np.int32(3))
    assert x[3] == 1
