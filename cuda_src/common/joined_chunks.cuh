// Joining the partial results of chunks: weighted sums, each held against a power of two of its own.
#pragma once
#include "common/device.cuh"
#include "common/fragments.cuh"

constexpr float NO_REFERENCE = -1e30f;  // of a chunk in which a query sees no key

// Four channels of the sum of some chunks, and the sum of their weights, against 2^pivot.
struct JoinedChunks {
    float pivot = NO_REFERENCE, weight = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    // Adds the chunks first, first + apart ... below `behind`, in that order. marks: reference and
    // weight of each; values: this lane's four channels of chunk 0, D apart.
    template <int D>
    __device__ __forceinline__ void add(const float* marks, const float* values, int32_t first,
                                        int32_t behind, int32_t apart) {
        constexpr int BATCH = 8;  // chunks that are asked for at once
        for (int32_t c = first; c < behind; c += BATCH * apart) {
            float2 mark[BATCH];
            float4 value[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int32_t slot = c + i * apart;
                mark[i] = make_float2(NO_REFERENCE, 0.0f);
                value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (slot < behind) {
                    mark[i] = *reinterpret_cast<const float2*>(marks + size_t(slot) * 2);
                    value[i] = *reinterpret_cast<const float4*>(values + size_t(slot) * D);
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (mark[i].y == 0.0f) continue;  // the query sees no key of this chunk
                const float high = fmaxf(pivot, mark[i].x);
                const float old = exp2_whole(pivot - high), by = exp2_whole(mark[i].x - high);
                sum.x = fmaf(value[i].x, by, sum.x * old), sum.y = fmaf(value[i].y, by, sum.y * old);
                sum.z = fmaf(value[i].z, by, sum.z * old), sum.w = fmaf(value[i].w, by, sum.w * old);
                weight = fmaf(mark[i].y, by, weight * old);
                pivot = high;
            }
        }
    }
};
