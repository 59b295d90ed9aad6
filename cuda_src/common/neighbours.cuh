// Over LANES lanes beside each other, a power of 2, by xor butterflies: each of them gets the same.
// Over a whole warp see common/reduce.cuh.
#pragma once
#include "common/device.cuh"

template <int LANES>
__device__ __forceinline__ float sum_of_neighbours(float sum) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) sum = sum + __shfl_xor_sync(FULL_MASK, sum, lanes);
    return sum;
}
