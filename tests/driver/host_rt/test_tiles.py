"""Tensor-core tiles against NumPy, and copies that arrive only when waited for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from memra_lowlevel import errors

TILE = """
template <typename T, int K, int STEP>
__device__ void fragments(const T* A, const T* B, uint32_t* a, uint32_t* b) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  auto word = [](const T* p) { return *reinterpret_cast<const uint32_t*>(p); };
  for (int i = 0; i < 4; ++i) a[i] = word(A + (g + (i & 1) * 8) * K + STEP * t + (i >> 1) * K / 2);
  for (int i = 0; i < 2; ++i) b[i] = word(B + g * K + STEP * t + i * K / 2);
}
template <typename S> __device__ void put(S* D, const S* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) D[(g + (i >> 1) * 8) * 8 + 2 * t + (i & 1)] = d[i];
}
KERNEL void f16(const uint16_t* A, const uint16_t* B, const float* C, float* D) {
  uint32_t a[4], b[2];
  float c[4], d[4];
  fragments<uint16_t, 16, 2>(A, B, a, b);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) c[i] = C[(g + (i >> 1) * 8) * 8 + 2 * t + (i & 1)];
  MMA(d, a, b, c);
  put(D, d);
}
KERNEL void s8(const int8_t* A, const int8_t* B, int* D) {
  uint32_t a[4], b[2];
  int d[4] = {1, -2, 3, 0x7fffffff};
  fragments<int8_t, 32, 4>(A, B, a, b);
  S8_MMA(d, a, b, d);
  put(D, d);
}
"""


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_float_tiles(kernel, name, dtype, check):
    rng = np.random.default_rng(0)
    run = kernel(TILE, "f16", S8 | {"MMA": f"mma_m16n8k16_{name}"}, check=check)
    for scale in (1.0, 1e-7, 300.0):  # subnormal f16 values among them
        a = (rng.standard_normal((16, 16)) * scale).astype(dtype)
        b = rng.standard_normal((8, 16)).astype(dtype)
        c, d = rng.standard_normal((16, 8)).astype(np.float32), np.full((16, 8), np.nan, np.float32)
        run(1, 32, 0, a.view(np.uint16), b.view(np.uint16), c, d, order="random", seed=4)
        np.testing.assert_array_equal(
            d, (c + a.astype(float) @ b.astype(float).T).astype(np.float32)
        )
    a[3, 5] = np.inf
    a[4, 4] = np.nan
    run(1, 32, 0, a.view(np.uint16), b.view(np.uint16), c, d)
    assert (
        np.isinf(d[3]).all() and np.isnan(d[4]).all() and np.isfinite(np.delete(d, [3, 4], 0)).all()
    )


S8 = {"MMA": "mma_m16n8k16_f16", "S8_MMA": "mma_m16n8k32_s8"}


@pytest.mark.parametrize("second", [np.int8, np.uint8])
def test_integer_tiles_are_exact_and_wrap(kernel, second):
    rng = np.random.default_rng(1)
    a = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    b = rng.integers(0, 256, (8, 32)).astype(np.uint8).view(second)
    names = S8 | ({"S8_MMA": "mma_m16n8k32_s8u8"} if second is np.uint8 else {})
    d = np.full((16, 8), 9, np.int32)
    kernel(TILE, "s8", names)(1, 32, 0, a, b.view(np.int8), d)
    c = np.zeros((16, 8), np.int64)
    c[:8, 0::2], c[:8, 1::2], c[8:, 0::2], c[8:, 1::2] = 1, -2, 3, 0x7FFFFFFF
    np.testing.assert_array_equal(
        d, (a.astype(np.int64) @ b.astype(np.int64).T + c).astype(np.int32)
    )


def test_a_tile_needs_the_whole_warp(kernel):
    with pytest.raises(errors.BarrierDivergence, match="all 32 lanes"):
        kernel(TILE, "s8", S8)(
            1,
            16,
            0,
            np.zeros((16, 32), np.int8),
            np.zeros((8, 32), np.int8),
            np.zeros(128, np.int32),
        )


@pytest.mark.parametrize("n_bytes", [4, 8, 16])
def test_short_copies_are_filled_with_zeros(kernel, n_bytes):
    body = """template <int N> __global__ void copy(const uint8_t* x, uint8_t* out, int valid) {
      __shared__ __align__(16) uint8_t s[32 * N];
      cp_async<N>(s + N * threadIdx.x, x + N * threadIdx.x, valid);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      for (int i = 0; i < N; ++i) out[N * threadIdx.x + i] = s[N * (31 - threadIdx.x) + i];
    }"""
    x = np.random.default_rng(n_bytes).integers(1, 256, (32, n_bytes)).astype(np.uint8)
    for valid in {0, 1, n_bytes - 1, n_bytes}:
        out = np.full_like(x, 7)
        kernel(body, f"copy<{n_bytes}>", check=True)(1, 32, 0, x, out, np.int32(valid))
        want = x[::-1].copy()
        want[:, valid:] = 0
        np.testing.assert_array_equal(out, want)
