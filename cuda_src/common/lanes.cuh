// The canonical dot product of the layer cache and the elementary functions, as its C loops have
// them: 32 lanes of fused steps, then a butterfly. One thread runs all lanes of a row, so a row
// costs no shuffle.
#pragma once

#define LKV_FN __device__ __forceinline__
#define LKV_FMA(a, b, c) fmaf(a, b, c)
#define LKV_BITS(x) __float_as_uint(x)
#define LKV_FLOAT(u) __uint_as_float(u)
#include "common/elementary.cuh"

__device__ __forceinline__ float sum32(float* acc) {
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2)
#pragma unroll
        for (int j = 0; j < 16; j++)
            if (j < stride) acc[j] = acc[j] + acc[j + stride];
    return acc[0];
}

// value(d) gives the second factor of channel d.
template <class Value>
__device__ __forceinline__ float dot32(const float* q, int hd, Value value) {
    float acc[32];
#pragma unroll
    for (int j = 0; j < 32; j++) acc[j] = 0.0f;
    for (int d = 0; d < hd; d += 32) {
#pragma unroll
        for (int j = 0; j < 32; j++)
            if (d + j < hd) acc[j] = fmaf(q[d + j], value(d + j), acc[j]);
    }
    return sum32(acc);
}
