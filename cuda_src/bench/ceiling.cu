// Kernels that measure what the hardware allows: an empty launch, a pure read, a copy.
#include "common/device.cuh"

KERNEL void bench_empty() {}

// Reads n_vectors 16-byte vectors and writes one word per thread only if their xor is `never`,
// which random data does not hit, so the loads cannot be dropped.
KERNEL void __launch_bounds__(512) bench_read(const uint4* __restrict__ src, uint64_t n_vectors,
                                              uint32_t never, uint32_t* __restrict__ out) {
  const uint64_t first = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
  uint32_t mix = 0;
  uint64_t i = first;
  for (; i + 7 * stride < n_vectors; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = src[i + j * stride];
#pragma unroll
    for (int j = 0; j < 8; ++j) mix ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < n_vectors; i += stride) {
    const uint4 v = src[i];
    mix ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (mix == never) out[first] = mix;
}

KERNEL void __launch_bounds__(512) bench_copy(const uint4* __restrict__ src,
                                              uint4* __restrict__ dst, uint64_t n_vectors) {
  const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n_vectors; i += stride)
    dst[i] = src[i];
}
