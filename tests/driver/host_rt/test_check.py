"""Check mode: races of one byte, between barriers, lanes, blocks; uninitialised reads; bounds."""

from __future__ import annotations

import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner

ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
F32, I32, U8 = np.float32, np.int32, np.uint8


def verdict(run, *args, **options):
    """Name of the error that a launch raises, or ``"clean"``."""
    try:
        run(*args, **options)
    except errors.HostCheckError as error:
        return type(error).__name__, error
    return "clean", None


def every_order(kernel, body, name, launch, want, defines=None, match=""):
    run = kernel(body, name, defines, check=True)
    for order, seed in ORDERS:
        got, error = verdict(run, *launch(), order=order, seed=seed)
        assert got == want, (order, seed, error)
        if match:
            assert match in str(error)


BYTES = """
KERNEL void own(uint8_t* a, int shift) { a[(threadIdx.x + shift) % blockDim.x] = threadIdx.x; }
KERNEL void twice(uint8_t* a, int k) {
  a[threadIdx.x] = 1;
  __syncwarp();
  if (threadIdx.x == 32) a[k] = 2;
}
KERNEL void halves(uint16_t* a) { a[threadIdx.x] = 1; if (threadIdx.x == 9) a[8] += 1; }
KERNEL void words(uint32_t* w, int k) {
  if (threadIdx.x == 0) w[0] = 5; else reinterpret_cast<uint8_t*>(w)[k] = 1;
}
KERNEL void unaligned(uint8_t* a, int k) {
  struct __attribute__((packed)) Loose { uint32_t v; };
  if (threadIdx.x == 0) reinterpret_cast<Loose*>(a + 3)->v = 7; else a[k] = 1;
}
"""


def test_neighbouring_bytes_are_no_race_and_the_same_byte_is(kernel):
    def cells(*extra):
        return lambda: (1, 64, 0, np.zeros(64, U8), *extra)

    every_order(kernel, BYTES, "own", cells(I32(0)), "clean")
    every_order(kernel, BYTES, "own", cells(I32(7)), "clean")
    for k, want in ((32, "clean"), (33, "clean"), (63, "clean"), (31, "DataRace"), (0, "DataRace")):
        # Lanes of warp 1 are ordered by __syncwarp; those of warp 0 are not.
        every_order(kernel, BYTES, "twice", cells(I32(k)), want)
    every_order(kernel, BYTES, "halves", lambda: (1, 32, 0, np.zeros(32, np.uint16)), "DataRace")
    for k, want in ((0, "DataRace"), (3, "DataRace"), (4, "clean"), (7, "clean")):
        every_order(
            kernel, BYTES, "words", lambda k=k: (1, 2, 0, np.zeros(2, np.uint32), I32(k)), want
        )
    for k, want in ((2, "clean"), (3, "DataRace"), (6, "DataRace"), (7, "clean")):
        every_order(
            kernel, BYTES, "unaligned", lambda k=k: (1, 2, 0, np.zeros(8, U8), I32(k)), want
        )


SHARED = """
KERNEL void exchange(const float* x, float* out) {
  __shared__ float s[2][128];
  const int i = threadIdx.x;
  s[0][i] = x[i];
#if BREAK != 1
  __syncthreads();
#endif
  float v = s[0][i ^ 64];
  for (int k = 0; k < 3; ++k) {
    s[1][i] = v;
#if BREAK != 2
    __syncthreads();
#endif
    v += s[1][127 - i];
#if BREAK != 3
    __syncthreads();
#endif
  }
  s[0][127 - i] = v;
#if BREAK != 4
  __syncwarp();
#endif
  out[i] = s[0][127 - (i ^ 1)];
}
"""


@pytest.mark.parametrize("broken", [0, 1, 2, 3, 4])
def test_each_barrier_of_an_exchange_is_needed(kernel, broken):
    x = np.random.default_rng(0).random(128, F32)
    run = kernel(SHARED, "exchange", {"BREAK": broken}, check=True)
    want = {0: {"clean"}}.get(broken, {"DataRace", "UninitialisedRead"})
    for order, seed in ORDERS:
        out = np.full(128, np.nan, F32)
        got, error = verdict(run, 1, 128, 0, x, out, order=order, seed=seed)
        assert got in want, error
    if not broken:
        assert np.isfinite(out).all()


READERS = """
KERNEL void readers(int* out, int writer) {
  __shared__ int s;
  if (threadIdx.x == 0) s = 5;
  __syncthreads();
  out[threadIdx.x] = s;
#ifdef WARP
  __syncwarp();
#endif
  if (int(threadIdx.x) == writer) s = 6;
}
KERNEL void one_warp(int* out, int writer, unsigned mask) {
  __shared__ int s;
  if (threadIdx.x == 0) s = 5;
  __syncwarp();
  out[threadIdx.x] = s;
  if ((mask >> threadIdx.x) & 1) __syncwarp(mask);
  if (int(threadIdx.x) == writer) s = 6;
}
KERNEL void chain(int* out) {   // 0 -> 1 through {0,1}, 1 -> 2 through {1,2}
  __shared__ int s;
  const int i = threadIdx.x;
  if (i == 0) s = 7;
  if (i < 2) __syncwarp(3);
#ifndef BROKEN
  if (i == 1 || i == 2) __syncwarp(6);
#endif
  if (i == 2) out[0] = s;
}
"""


def test_a_write_after_reads_of_other_threads(kernel):
    for writer in (0, 31, 32, 95):
        args = lambda w=writer: (1, 96, 0, np.zeros(96, I32), I32(w))  # noqa: E731
        every_order(kernel, READERS, "readers", args, "DataRace")
        every_order(kernel, READERS, "readers", args, "DataRace", {"WARP": 1})
    for mask, want in ((0xFFFFFFFF, "clean"), (0x7FFFFFFF, "DataRace"), (0x20, "DataRace")):
        args = lambda m=mask: (1, 32, 0, np.zeros(32, I32), I32(5), np.uint32(m))  # noqa: E731
        every_order(kernel, READERS, "one_warp", args, want)
    every_order(kernel, READERS, "chain", lambda: (1, 32, 0, np.zeros(1, I32)), "clean")
    args = lambda: (1, 32, 0, np.zeros(1, I32))  # noqa: E731
    run = kernel(READERS, "chain", {"BROKEN": 1}, check=True)
    got = {verdict(run, *args(), order=o, seed=s)[0] for o, s in ORDERS}
    assert "clean" not in got and got <= {"DataRace", "UninitialisedRead"}


EXCHANGES = """
KERNEL void exchange(int32_t* a, int how) {
  a[threadIdx.x] = threadIdx.x;
  int v = 1;
  if (how == 0) __syncwarp();
  if (how == 1) v = __shfl_xor_sync(~0u, v, 1);
  if (how == 2) v = __ballot_sync(~0u, v) != 0;
  if (how == 3) {
    float sums[4] = {0, 0, 0, 0};
    const uint32_t x[4] = {0, 0, 0, 0};
    mma_m16n8k16_f16(sums, x, x, sums);
    v = sums[0] == 0.0f;
  }
  a[32 + threadIdx.x] = a[threadIdx.x ^ 1] * v;
}
"""


@pytest.mark.parametrize(
    ("how", "want"), [(0, "clean"), (1, "DataRace"), (2, "DataRace"), (3, "DataRace")]
)
def test_lanes_that_exchange_values_do_not_order_memory(kernel, how, want):
    every_order(
        kernel, EXCHANGES, "exchange", lambda: (1, 32, 0, np.zeros(64, I32), I32(how)), want
    )


BLOCKS = """
KERNEL void overlap(float* out, int step) { out[blockIdx.x * step + threadIdx.x] = threadIdx.x; }
KERNEL void neighbour(float* x) { x[blockIdx.x] = x[(blockIdx.x + 1) % gridDim.x] + 1; }
KERNEL void histogram(unsigned* bins, int plain) {
  atomicAdd(bins + threadIdx.x % 3, 1u);
  if (plain == int(blockIdx.x) && threadIdx.x == 40) bins[1] = 0;
}
KERNEL void reading(unsigned* bins, unsigned* out) {
  atomicAdd(bins, 1u);
  if (threadIdx.x == 63) out[blockIdx.x] = bins[0];
}
"""


def test_blocks_are_not_ordered(kernel):
    every_order(kernel, BLOCKS, "overlap", lambda: (3, 32, 0, np.zeros(96, F32), I32(32)), "clean")
    every_order(
        kernel, BLOCKS, "overlap", lambda: (3, 32, 0, np.zeros(96, F32), I32(31)), "DataRace",
        match="are not ordered: blocks order only through",
    )  # fmt: skip
    every_order(kernel, BLOCKS, "neighbour", lambda: (4, 1, 0, np.zeros(4, F32)), "DataRace")
    every_order(
        kernel, BLOCKS, "histogram", lambda: (3, 64, 0, np.zeros(3, np.uint32), I32(-1)), "clean"
    )
    every_order(
        kernel, BLOCKS, "histogram", lambda: (3, 64, 0, np.zeros(3, np.uint32), I32(2)), "DataRace"
    )
    every_order(
        kernel, BLOCKS, "reading",
        lambda: (2, 64, 0, np.zeros(1, np.uint32), np.zeros(2, np.uint32)),
        "DataRace",
    )  # fmt: skip


def test_launches_are_ordered(kernel):
    run = kernel(BLOCKS, "neighbour", check=True)
    x = np.zeros(1, F32)
    for _ in range(3):
        run(1, 1, 0, x)
    assert x[0] == 3


LAST_BLOCK = """
KERNEL void last_block(const float* x, float* part, unsigned* count, float* out) {
  __shared__ float s[64];
  __shared__ bool last;
  const int i = threadIdx.x;
  part[64 * blockIdx.x + i] = 2 * x[64 * blockIdx.x + i];
#if EACH_FENCES
  __threadfence();
#endif
#if BREAK != 1
  __syncthreads();
#endif
  if (i == 0) {
#if !EACH_FENCES && BREAK != 2
    __threadfence();
#endif
#if BREAK == 3
    last = (*count += 1) == gridDim.x;
#elif BREAK == 4
    __threadfence_block();
    last = atomicAdd(count + blockIdx.x, 1u) == gridDim.x - 1;
#else
    last = atomicAdd(count, 1u) == gridDim.x - 1;
#endif
#if !EACH_FENCES && BREAK != 5
    __threadfence();
#endif
  }
  __syncthreads();
#if BREAK == 4
  last = blockIdx.x == gridDim.x - 1;
  __syncthreads();
#endif
  if (!last) return;
#if EACH_FENCES && BREAK != 5
  __threadfence();
#endif
  float sum = 0;
  for (int b = 0; b < int(gridDim.x); ++b) sum += part[64 * b + i];
  s[i] = sum;
  __syncthreads();
  if (i == 0) {
    sum = 0;
    for (int k = 0; k < 64; ++k) sum += s[k];
    *out = sum;
  }
}
"""


@pytest.mark.parametrize("each", [0, 1])
@pytest.mark.parametrize("broken", [0, 1, 2, 3, 5])
def test_a_reduction_by_the_last_block(kernel, each, broken):
    if each and broken == 2:
        return
    run = kernel(LAST_BLOCK, "last_block", {"EACH_FENCES": each, "BREAK": broken}, check=True)
    for order, seed in ORDERS:
        x = np.arange(64 * 5, dtype=F32)
        part, count, out = np.zeros(64 * 5, F32), np.zeros(5, np.uint32), np.zeros(1, F32)
        got, error = verdict(run, 5, 64, 0, x, part, count, out, order=order, seed=seed)
        assert got == ("DataRace" if broken else "clean"), error
        if not broken:
            assert out[0] == 2 * x.sum() and count[0] == 5
        if broken == 5:
            assert "a __threadfence() after the atomic is missing" in str(error)


HAND_OVER = """
KERNEL void hand_over(int* x, unsigned* flag) {   // one warp tells another, within a block
  const int i = threadIdx.x;
  if (i == 0) {
    x[0] = 41;
    FENCE;
    atomicExch(flag, 1u);
  }
  if (i == 32) {
    while (atomicAdd(flag, 0u) == 0u) __nanosleep(10);
    FENCE_AFTER;
    x[1] = x[0] + 1;
  }
}
KERNEL void lock(unsigned* l) {
  for (int i = 0; i < 3; ++i) {
    while (atomicCAS(l, 0u, 1u) != 0u) __nanosleep(10);
    FENCE_AFTER;
    l[1] += 1;
    FENCE;
    atomicExch(l, 0u);
  }
}
"""


@pytest.mark.parametrize("fence", ["__threadfence()", "__threadfence_block()", "(void)0"])
@pytest.mark.parametrize("after", ["__threadfence()", "(void)0"])
def test_atomics_with_fences_order_threads(kernel, fence, after):
    defines = {"FENCE": fence, "FENCE_AFTER": after}
    good = fence != "(void)0" and after != "(void)0"
    every_order(
        kernel, HAND_OVER, "hand_over",
        lambda: (1, 64, 0, np.zeros(2, I32), np.zeros(1, np.uint32)),
        "clean" if good else "DataRace", defines,
    )  # fmt: skip
    # Within a block a fence of the block is enough; between blocks it is not.
    for grid in (1, 2):
        enough = good and (grid == 1 or fence == "__threadfence()")
        every_order(
            kernel, HAND_OVER, "lock", lambda g=grid: (g, 33, 0, np.zeros(2, np.uint32)),
            "clean" if enough else "DataRace", defines,
        )  # fmt: skip


def test_a_volatile_flag_with_fences(kernel):
    body = """KERNEL void flag(int* x, volatile int* flag) {
      if (threadIdx.x == 0) { x[0] = 1; FENCE; *flag = 1; }
      if (threadIdx.x == 40) { while (*flag == 0) __nanosleep(1); __threadfence(); x[1] = x[0]; }
    }"""
    args = lambda: (1, 64, 0, np.zeros(2, I32), np.zeros(1, I32))  # noqa: E731
    every_order(kernel, body, "flag", args, "clean", {"FENCE": "__threadfence()"})
    every_order(kernel, body, "flag", args, "DataRace", {"FENCE": "(void)0"})


PIPELINE = """
KERNEL void stages(const float* x, float* out, int n) {
  __shared__ float s[2][128];
  const int i = threadIdx.x;
  cp_async<16>(&s[0][4 * i], x + 4 * i);
  cp_async_commit();
  for (int k = 0; k < n; ++k) {
    if (k + 1 < n) cp_async<16>(&s[(k + 1) & 1][4 * i], x + 128 * (k + 1) + 4 * i);
    cp_async_commit();
#if BREAK != 1
    cp_async_wait<BREAK == 2 ? 2 : 1>();
#endif
#if BREAK != 3
    __syncwarp();
#endif
    for (int j = 0; j < 4; ++j) out[128 * k + 32 * j + i] = s[k & 1][32 * j + i];
#if BREAK != 4
    __syncwarp();
#endif
  }
  cp_async_wait_all();
}
"""


@pytest.mark.parametrize("broken", [0, 1, 2, 3, 4])
def test_asynchronous_copies(kernel, broken):
    x = np.random.default_rng(1).random(512, F32)
    run = kernel(PIPELINE, "stages", {"BREAK": broken}, check=True)
    for order, seed in ORDERS:
        out = np.full(512, np.nan, F32)
        got, error = verdict(run, 1, 32, 0, x, out, I32(4), order=order, seed=seed)
        # A reader that comes before the copy is issued finds memory that nobody wrote.
        assert got in ({"DataRace", "UninitialisedRead"} if broken else {"clean"}), error
    if not broken:
        np.testing.assert_array_equal(out, x)
    if broken < 3:  # unwaited data is NaN even without checks
        plain = kernel(PIPELINE, "stages", {"BREAK": broken})
        out[:] = 0
        plain(1, 32, 0, x, out, I32(4))
        assert np.isnan(out).any() == (broken > 0)


UNINITIALISED = """
KERNEL void partly(const uint8_t* x, uint8_t* out, int n) { out[0] = x[n]; }
KERNEL void wide(const uint4* x, uint4* out, int n) { out[0] = x[n]; }
KERNEL void local(float* out, int n) {
  __shared__ float s[64];
  if (int(threadIdx.x) < n) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
KERNEL void dynamic(float* out, int n) {
  DYN_SMEM(float, s);
  if (int(threadIdx.x) < n) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
KERNEL void bump(unsigned* x) { atomicAdd(x, 1u); }
"""


def test_uninitialised_reads_are_exact(kernel):
    from ctypes import addressof, c_void_p, create_string_buffer

    from memra_lowlevel.compile.hostcxx import compile_host

    text = '#include "common/device.cuh"\n' + UNINITIALISED
    module = runner.load(compile_host(text, [], [runner.cuda_src()], check=True).path)

    def launch(name, *values):
        keep = [create_string_buffer(v.tobytes(), v.nbytes) for v in values]
        pointers = (c_void_p * len(keep))(*map(addressof, keep))
        runner.run(runner.get_function(module, name), 1, 1, 0, addressof(pointers), check=True)

    a, b, c = runner.alloc(64), runner.alloc(64), runner.alloc(64)
    runner.copy_in(a + 3, np.arange(29, dtype=U8))  # bytes 3 … 31
    runner.copy(b, a, 64)
    try:
        for ptr in (a, b):
            for n, good in ((2, False), (3, True), (31, True), (32, False)):
                if good:
                    launch("partly", np.uint64(ptr), np.uint64(c), I32(n))
                    continue
                with pytest.raises(errors.UninitialisedRead, match=f"offset {n} of a buffer of 64"):
                    launch("partly", np.uint64(ptr), np.uint64(c), I32(n))
            launch("wide", np.uint64(ptr), np.uint64(c), I32(1))
            with pytest.raises(errors.UninitialisedRead, match="offset 0 of"):
                launch("wide", np.uint64(ptr), np.uint64(c), I32(0))
        launch("wide", np.uint64(c), np.uint64(a + 32), I32(0))  # written by a kernel, readable
        runner.fill(a, 0, 2)
        launch("partly", np.uint64(a), np.uint64(c), I32(1))
        with pytest.raises(errors.UninitialisedRead):
            launch("partly", np.uint64(a), np.uint64(c), I32(2))
        with pytest.raises(errors.UninitialisedRead, match="atomic operation of memory"):
            launch("bump", np.uint64(b + 60))
    finally:
        for ptr in (a, b, c):
            runner.free(ptr)


@pytest.mark.parametrize("name", ["local", "dynamic"])
def test_uninitialised_shared_memory(kernel, name):
    run = kernel(UNINITIALISED, name, check=True)
    assert verdict(run, 1, 64, 256, np.zeros(64, F32), I32(64))[0] == "clean"
    got, error = verdict(run, 1, 64, 256, np.zeros(64, F32), I32(63))
    assert got == "UninitialisedRead" and error.thread == (63, 0, 0)
    assert ("shared array s" if name == "local" else "dynamic shared memory") in str(error)


BOUNDS = """
KERNEL void device(uint8_t* a, int n) { a[n] = 1; }
KERNEL void fixed(float* out, int n) { __shared__ float s[10]; s[n] = 1; out[0] = s[n]; }
KERNEL void pointed(float* o, int n) { __shared__ float s[10]; float* p = s; p[n] = 1; *o = p[n]; }
KERNEL void other(float* out, int n) { __shared__ float t[64]; t[n] = 1; out[0] = t[n]; }
KERNEL void dynamic(uint8_t* out, int n) { DYN_SMEM(uint8_t, s); s[n] = 1; out[0] = s[n]; }
KERNEL void vector(float* x, int n) { float4 v = *reinterpret_cast<float4*>(x + n); x[0] = v.y; }
KERNEL void local(float* x, int n) { float a[4] = {1, 2, 3, 4}; a[n] = 5; x[0] = a[1] + a[n]; }
KERNEL void shift(int* x, int n) { x[0] = x[1] << n; }
"""


@pytest.mark.parametrize(
    ("name", "good", "bad", "says"),
    [
        ("device", (0, 99), (100, -1, 101, -100), "of a buffer of 100 bytes"),
        ("fixed", (0, 9), (10, -1, 1 << 20), "outside the array"),
        ("pointed", (0, 9), (10, 11), "offset 4[04] of the shared array s of 40 bytes"),
        ("dynamic", (0, 76), (77, 79), "offset 7[79] of the dynamic shared memory of 77 bytes"),
        ("vector", (0, 4), (1, 2), "not aligned to 16 bytes"),
        ("local", (0, 3), (4, -1), "outside the array"),
    ],
)
def test_bounds_are_exact(kernel, name, good, bad, says):
    run = kernel(BOUNDS, name, check=True)
    for n in (*good, *bad):
        x = np.zeros(100, U8)
        got, error = verdict(run, 1, 1, 77, x, I32(n))
        assert got == ("clean" if n in good else "OutOfBounds"), (n, error)
        if n in bad:
            import re

            assert re.search(says, str(error)), error


def test_shifts_by_the_width_are_reported(kernel):
    run = kernel(BOUNDS, "shift", check=True)
    assert verdict(run, 1, 1, 0, np.ones(2, I32), I32(31))[0] == "clean"
    got, error = verdict(run, 1, 1, 0, np.ones(2, I32), I32(32))
    assert got == "HostCheckError" and "shift" in str(error)


def test_host_memory_is_no_device_memory(kernel):
    x = np.zeros(16, U8)
    run = kernel(
        "KERNEL void host(uint64_t at) { *reinterpret_cast<int*>(at) = 1; }", "host", check=True
    )
    got, error = verdict(run, 1, 1, 0, np.uint64(x.ctypes.data))
    assert got == "OutOfBounds" and "which is no device memory" in str(error) and not x.any()


def test_reports_name_both_places(kernel):
    body = """KERNEL void places(float* x) {
      if (threadIdx.x == 3)
        x[1] = 1;
      if (threadIdx.x == 40)
        x[1] = x[2];
    }"""
    got, error = verdict(kernel(body, "places", check=True), 1, 64, 0, np.zeros(4, F32))
    assert got == "DataRace"
    assert error.where == "source.cu:8" and error.thread == (40, 0, 0)
    assert "by thread (3, 0, 0)" in str(error) and "the other access: source.cu:6" in str(error)


def test_memory_of_unchecked_launches_counts_as_initialised(kernel):
    body = """KERNEL void put(float* x) { x[threadIdx.x] = 1; }
    KERNEL void get(float* x) { x[0] += x[9]; }"""
    plain, checked = kernel(body, "put"), kernel(body, "get", check=True)
    runner.enable_check()
    ptr = runner.alloc(64)
    values = (np.zeros(16, F32),)
    plain(1, 16, 0, *values)
    assert verdict(checked, 1, 1, 0, *values)[0] == "clean"
    runner.free(ptr)


def test_large_grids_stay_cheap(kernel):
    """Shadow per word and block: 20,000 blocks that share a counter pass in linear time."""
    body = """KERNEL void many(float* x, unsigned* count) {
      x[blockIdx.x * blockDim.x + threadIdx.x] = 1;
      __syncthreads();
      if (threadIdx.x == 0) { __threadfence(); atomicAdd(count, 1u); }
    }"""
    count = np.zeros(1, np.uint32)
    kernel(body, "many", check=True)(20_000, 32, 0, np.zeros(640_000, F32), count)
    assert count[0] == 20_000


def test_what_lanes_exchange_is_no_memory_of_the_device(kernel):
    body = """KERNEL void exchange(float* x) {
      float v = x[threadIdx.x];
      for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(FULL_MASK, v, d);
      if (__all_sync(FULL_MASK, v > 0)) x[threadIdx.x] = v + __popc(__ballot_sync(FULL_MASK, 1));
    }"""
    x = np.ones(64, F32)
    kernel(body, "exchange", check=True)(1, 64, 0, x)
    assert (x == 64).all()
