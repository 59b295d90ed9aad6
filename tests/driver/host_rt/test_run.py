"""Launches: indices, orders, workers, shared memory, parameters, exchange within a warp."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner

ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]

INDICES = """
KERNEL void indices(uint32_t* out) {
  const uint32_t t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const uint32_t b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint32_t n = blockDim.x * blockDim.y * blockDim.z;
  uint32_t* mine = out + 6 * (b * n + t);
  mine[0] = threadIdx.x; mine[1] = threadIdx.y; mine[2] = threadIdx.z;
  mine[3] = blockIdx.x; mine[4] = blockIdx.y; mine[5] = blockIdx.z;
}
"""


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_every_thread_of_every_block_runs_once(kernel, order, seed, workers):
    grid, block = (3, 2, 4), (5, 3, 2)
    out = np.full((4, 2, 3, 2, 3, 5, 6), 0xFFFFFFFF, np.uint32)
    kernel(INDICES, "indices")(grid, block, 0, out, order=order, seed=seed, workers=workers)
    want = np.indices(out.shape[:-1])[[5, 4, 3, 2, 1, 0]]
    np.testing.assert_array_equal(out, np.moveaxis(want, 0, -1))


SCAN = """
template <int N> __global__ void reverse_scan(const int* x, int* out) {
  __shared__ int s[2][N];
  DYN_SMEM(int, d);
  const int i = threadIdx.x;
  s[0][i] = x[blockIdx.x * N + N - 1 - i];
  __syncthreads();
  int from = 0;
  for (int step = 1; step < N; step *= 2, from ^= 1) {
    s[from ^ 1][i] = s[from][i] + (i >= step ? s[from][i - step] : 0);
    __syncthreads();
  }
  d[N - 1 - i] = s[from][i];
  __syncthreads();
  out[blockIdx.x * N + i] = d[i];
}
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("n", [1, 31, 64, 100, 257, 1024])
def test_barriers_and_both_kinds_of_shared_memory(kernel, n, order, seed, workers):
    x = np.random.default_rng(n).integers(-1000, 1000, (6, n)).astype(np.int32)
    out = np.full_like(x, -1)
    run = kernel(SCAN, f"reverse_scan<{n}>")
    run(6, n, 4 * n, x, out, order=order, seed=seed, workers=workers)
    np.testing.assert_array_equal(out, np.cumsum(x[:, ::-1], axis=1)[:, ::-1])


def test_shared_memory_starts_as_poison_in_every_block(kernel):
    body = """
    template <int N> __device__ void look(uint32_t* out) {
      __shared__ uint32_t inner[N];
      out[2] = inner[threadIdx.x];
      inner[threadIdx.x] = 1;
    }
    KERNEL void poison(uint32_t* out, int k) {
      __shared__ uint32_t s[32];
      DYN_SMEM(uint32_t, d);
      uint32_t* mine = out + 3 * (blockIdx.x * 32 + threadIdx.x);
      mine[0] = s[threadIdx.x]; mine[1] = d[threadIdx.x];
      s[threadIdx.x + k] = d[threadIdx.x] = 0;
      look<32>(mine);
    }"""
    out = np.zeros((5, 32, 3), np.uint32)
    kernel(body, "poison")(5, 32, 128, out, np.int32(0))
    assert (out == 0xFFFFFFFF).all()


WARP = """
KERNEL void warp(const int* x, int* out, unsigned mask) {
  const int i = threadIdx.x, lane = i % 32;
  const int v = x[i];
  int* mine = out + 16 * i;
  if (!((mask >> lane) & 1)) return;
  mine[0] = __shfl_sync(mask, v, __ffs(mask) - 1);
  mine[1] = __shfl_xor_sync(mask, v, 0);
  mine[2] = __ballot_sync(mask, v & 1);
  mine[3] = __any_sync(mask, v > 90);
  mine[4] = __all_sync(mask, v > 5);
  mine[5] = __match_any_sync(mask, v % 3);
  mine[6] = __reduce_add_sync(mask, v);
  mine[7] = __reduce_max_sync(mask, v);
  __syncwarp(mask);
  if (mask == FULL_MASK) {
    mine[8] = __shfl_up_sync(mask, v, 3);
    mine[9] = __shfl_down_sync(mask, v, 5);
    mine[10] = __shfl_xor_sync(mask, v, 9);
    mine[11] = __shfl_sync(mask, v, 3, 8);
    mine[12] = __shfl_up_sync(mask, v, 2, 8);
    mine[13] = __shfl_down_sync(mask, v, 3, 16);
    mine[14] = __shfl_xor_sync(mask, v, 20, 16);
    int same;
    mine[15] = __match_all_sync(mask, v, &same);
  }
}
"""


def bits(lanes):
    return np.array([sum(1 << int(k) for k in lanes)], np.uint32).astype(np.int32)[0]


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x1, 0x80000000, 0xF0F0A501, 0x7FFFFFFF])
def test_warp_operations(kernel, mask, order, seed):
    x = np.random.default_rng(mask).integers(0, 100, 64).astype(np.int32)
    out = np.full((64, 16), -7, np.int32)
    kernel(WARP, "warp")(1, 64, 0, x, out, np.uint32(mask), order=order, seed=seed)
    lanes = [k for k in range(32) if mask >> k & 1]
    for warp in range(2):
        v = x[32 * warp : 32 * warp + 32]
        got = out[32 * warp : 32 * warp + 32]
        for k in range(32):
            if k not in lanes:
                assert (got[k] == -7).all()
                continue
            want = [
                v[lanes[0]], v[k], bits(j for j in lanes if v[j] & 1), any(v[lanes] > 90),
                all(v[lanes] > 5), bits(j for j in lanes if v[j] % 3 == v[k] % 3),
                v[lanes].sum(), v[lanes].max(),
            ]  # fmt: skip
            assert list(got[k, :8]) == [int(w) for w in want]
            if mask == 0xFFFFFFFF:
                eight, sixteen = k & ~7, k & ~15
                want = [
                    v[k - 3] if k >= 3 else v[k], v[k + 5] if k + 5 < 32 else v[k], v[k ^ 9],
                    v[eight + 3], v[k - 2] if k - 2 >= eight else v[k],
                    v[k + 3] if k + 3 < sixteen + 16 else v[k],
                    v[k ^ 20] if k ^ 20 <= (k | 15) else v[k], 0,
                ]  # fmt: skip
                assert list(got[k, 8:]) == [int(w) for w in want]


def test_lanes_that_do_not_exist_are_no_part_of_a_mask(kernel):
    body = """KERNEL void tail(int* out) {
      out[threadIdx.x] = __ballot_sync(FULL_MASK, 1) + __shfl_sync(FULL_MASK, threadIdx.x, 35);
    }"""
    out = np.zeros(40, np.int32)
    kernel(body, "tail")(1, 40, 0, out)
    np.testing.assert_array_equal(out, [-1 + 3] * 32 + [255 + 35] * 8)


def test_disjoint_masks_run_at_once_and_wide_values_move(kernel):
    body = """KERNEL void halves(double* out) {
      const int lane = threadIdx.x;
      const bool low = lane < 16;
      double v = 0;
      struct Wide { double a, b, c, d; } w = {lane + 0.5, 0, 0, -double(lane)};
      if (low) for (int i = 0; i < 5; ++i) v += __shfl_xor_sync(0xffffu, lane + 0.25 * i, 1);
      else for (int i = 0; i < 3; ++i) v -= __shfl_xor_sync(0xffff0000u, lane + 0.25 * i, 2);
      __syncwarp();
      w = __shfl_xor_sync(FULL_MASK, w, 31);
      out[lane] = v + 1000 * w.a + 1e6 * w.d;
    }"""
    out = np.zeros(32)
    kernel(body, "halves")(1, 32, 0, out, order="random", seed=5)
    lane = np.arange(32)
    v = np.where(lane < 16, 5 * (lane ^ 1) + 2.5, -(3 * (lane ^ 2) + 0.75))
    np.testing.assert_array_equal(out, v + 1000 * ((31 - lane) + 0.5) - 1e6 * (31 - lane))


@pytest.mark.parametrize("workers", [1, 2])
def test_votes_of_a_block(kernel, workers):
    body = """KERNEL void votes(int* out) {
      int* mine = out + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
      mine[0] = __syncthreads_count(threadIdx.x % 3 == 0);
      mine[1] = __syncthreads_and(threadIdx.x < 100 + blockIdx.x);
      mine[2] = __syncthreads_or(threadIdx.x == 99 && blockIdx.x == 2);
      mine[3] = __syncthreads_count(7);
    }"""
    out = np.full((4, 101, 4), -1, np.int32)
    kernel(body, "votes")(4, 101, 0, out, workers=workers)
    want = [[34, int(b >= 1), int(b == 2), 101] for b in range(4)]
    np.testing.assert_array_equal(out, np.repeat(np.array(want)[:, None], 101, axis=1))


ATOMICS = """
KERNEL void atomics(unsigned* u, int* s, float* f, unsigned long long* w, double* d) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(u, 3u); atomicInc(u + 1, 6u); atomicDec(u + 2, 4u); atomicOr(u + 3, 1u << (i % 32));
  atomicAnd(u + 4, ~(1u << (i % 7))); atomicXor(u + 5, unsigned(i));
  atomicMax(s, i - 500); atomicMin(s + 1, 500 - i); atomicSub(s + 2, 2);
  atomicAdd(f, 0.5f); atomicAdd(d, 0.25); atomicAdd(w, 1ull << 33);
  atomicCAS(u + 6, unsigned(i), unsigned(i + 1));
  const unsigned old = atomicExch(u + 7, unsigned(i) + 1); atomicAdd(u + 8, old);
}
"""


@pytest.mark.parametrize("workers", [1, 4])
def test_atomics_lose_nothing(kernel, workers):
    n = 8 * 96
    u = np.array([0, 0, 4, 0, 0xFFFFFFFF, 0, 0, 0, 0], np.uint32)
    s, f = np.array([-1000, 1000, 0], np.int32), np.zeros(1, np.float32)
    w, d = np.zeros(1, np.uint64), np.zeros(1)
    kernel(ATOMICS, "atomics")(8, 96, 0, u, s, f, w, d, workers=workers)
    assert list(u[:6]) == [3 * n, n % 7, (4 - n) % 5, 0xFFFFFFFF, 0xFFFFFF80,
                           np.bitwise_xor.reduce(np.arange(n))]  # fmt: skip
    assert u[7] + u[8] == n * (n + 1) // 2  # every value was handed on exactly once
    assert list(s) == [n - 1 - 500, 500 - (n - 1), -2 * n]
    assert (f[0], d[0], w[0]) == (n * 0.5, n * 0.25, n << 33)


def test_workers_have_shared_memory_of_their_own(kernel):
    body = """KERNEL void own(int* out) {
      __shared__ int s[256];
      DYN_SMEM(int, d);
      for (int i = 0; i < 50; ++i) {
        s[threadIdx.x] = d[threadIdx.x] = blockIdx.x * 1000 + i;
        __syncthreads();
        if (s[255 - threadIdx.x] != d[threadIdx.x] || s[threadIdx.x] != blockIdx.x * 1000 + i)
          atomicAdd(out, 1);
        __syncthreads();
      }
    }"""
    for _ in range(3):
        out = np.zeros(1, np.int32)
        kernel(body, "own")(64, 256, 1024, out, workers=4)
        assert out[0] == 0


def test_a_writable_variable_at_file_scope_needs_one_worker(kernel):
    body = """__device__ int counter;
    KERNEL void count(int* out) { out[blockIdx.x] = atomicAdd(&counter, 1); }"""
    out = np.full(4, -1, np.int32)
    run = kernel(body, "count")
    run(4, 1, 0, out)
    np.testing.assert_array_equal(out, range(4))
    with pytest.raises(errors.LaunchLimit, match="counter"):
        run(4, 1, 0, out, workers=2)


def test_tables_of_constants_work_with_any_number_of_workers(kernel):
    body = """__constant__ int table[4] = {7, 11, 13, 17};
    __device__ const float more[2] = {0.5f, 0.25f};
    KERNEL void look(float* out) { out[blockIdx.x] = table[blockIdx.x % 4] * more[blockIdx.x % 2]; }
    """
    out = np.zeros(8, np.float32)
    kernel(body, "look", check=True)(8, 1, 0, out)
    want = np.tile(np.array([3.5, 2.75, 6.5, 4.25], np.float32), 2)
    np.testing.assert_array_equal(out, want)
    kernel(body, "look")(8, 1, 0, out, workers=2)
    np.testing.assert_array_equal(out, want)


def test_parameters_keep_their_sizes_and_values(kernel):
    body = """struct Plan { int8_t a; double b; uint16_t c[3]; };
    template <typename T, int N> __global__ void take(int8_t a, T b, Plan p, const T* NULLABLE q,
                                                      double* out) {
      out[0] = a; out[1] = b; out[2] = p.a; out[3] = p.b; out[4] = p.c[2]; out[5] = q == nullptr;
      out[6] = N;
    }"""
    from memra_lowlevel.compile.hostcxx import compile_host

    name = "take<int16_t, 5>"
    text = '#include "common/device.cuh"\n' + body
    image = compile_host(text, [name], [runner.cuda_src()])
    assert image.param_sizes == {name: (1, 2, 24, 8, 8)}
    plan = np.zeros((), np.dtype("i1,f8,3u2", align=True))
    plan[()] = (-3, 2.5, (1, 2, 60000))
    out = np.full(7, np.nan)
    run = kernel(body, name)
    run(1, 1, 0, np.int8(-4), np.int16(-300), plan[()], None, out)
    np.testing.assert_array_equal(out, [-4, -300, -3, 2.5, 60000, 1, 5])
    with pytest.raises(errors.ArgumentError, match="wants 2"):
        run(1, 1, 0, np.int8(-4), np.int32(-300), plan[()], None, out)
    with pytest.raises(errors.ArgumentError, match="5 arguments"):
        run(1, 1, 0, np.int8(-4))


def test_unknown_kernels_and_impossible_launches_are_refused(kernel):
    from memra_lowlevel.compile.hostcxx import compile_host

    text = '#include "common/device.cuh"\nKERNEL void here(int* out) { out[0] = 1; }\n'
    module = runner.load(compile_host(text, [], [runner.cuda_src()]).path)
    with pytest.raises(errors.InvalidArgument, match="'there'; it has: here"):
        runner.get_function(module, "there")
    func = runner.get_function(module, "here")
    none = (ctypes.c_void_p * 1)()
    for grid, block, shared in ((0, 1, 0), (1, 0, 0), (1, (32, 33), 0), (1, 1, 300_000)):
        with pytest.raises(errors.LaunchLimit):
            runner.run(func, grid, block, shared, ctypes.addressof(none))
    runner.unload(module)
    with pytest.raises(errors.InvalidArgument, match="cannot load"):
        runner.load("/nonexistent.so")


def test_static_shared_memory_of_a_kernel_is_known():
    from memra_lowlevel.compile.hostcxx import compile_host

    text = (
        '#include "common/device.cuh"\n'
        "KERNEL void a(int* o) { __shared__ int s[10]; s[o[0]] = 1; __syncthreads();"
        " o[1] = s[o[0]]; }\n"
        "template <int N> __global__ void b(int* o) { __shared__ double s[N];"
        " __shared__ int t[2];\n"
        "  s[o[0]] = 1; t[o[0]] = 2; __syncthreads(); o[1] = s[o[1]] + t[o[0]]; }\n"
    )
    module = runner.load(compile_host(text, ["b<3>"], [runner.cuda_src()]).path)
    sizes = {n: runner.static_shared_bytes(runner.get_function(module, n)) for n in ("a", "b<3>")}
    assert sizes == {"a": 40, "b<3>": 32}
