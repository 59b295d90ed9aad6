// Joining the partial results that the chunks of a row's keys have left, in a fixed order: each of 8 splits
// takes every eighth chunk, by its absolute number, and then the splits follow each other.
#pragma once
#include "common/device.cuh"

constexpr int JOIN_SPLITS = 8;  // chunk c of a row is summed by split c % 8
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ void add_scaled(float4& sum, float weight, const float4& v) {
    sum.x = fmaf(weight, v.x, sum.x);
    sum.y = fmaf(weight, v.y, sum.y);
    sum.z = fmaf(weight, v.z, sum.z);
    sum.w = fmaf(weight, v.w, sum.w);
}
__device__ __forceinline__ void scale_all(float4& sum, float factor) {
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
}
__device__ __forceinline__ float larger_number(float a, float b) { return b > a ? b : a; }

// exp(x - reference), where a reference of -inf stands for "nothing yet" and must not meet itself.
__device__ __forceinline__ float weight_of(float x, float reference) {
    return exp2f((x - (reference == -INF_F32 ? 0.0f : reference)) * LOG2_E);
}

// What the chunks of all rows and heads have left, by (row, head) and slot.
struct Partials {
    float4* sums;   // [n_rows, n_heads, n_slots, DV / 4]: weighted sums of V
    float2* marks;  // [n_rows, n_heads, n_slots]: maximum, sum of weights
    int n_slots;
};
template <int DV>
__device__ __forceinline__ Partials partials_in(float* workspace, int n_row_heads, int n_slots) {
    const size_t n = size_t(n_row_heads) * n_slots;
    return {reinterpret_cast<float4*>(workspace), reinterpret_cast<float2*>(workspace + n * DV), n_slots};
}

// Where results go; see attend_partial.
struct Results {
    const float* sinks;
    float *out, *lse;
    int n_heads;
};

// Joins the chunks of n <= N (row, head)s whose slots are [first, last); that of slot 0 is slot_zero. Called
// by all threads of a block. scratch: f32 [8, N, DV + 2]. A chunk in which a row sees no key has no
// weight, and leaves no trace.
template <int DV, int N, int THREADS>
__device__ __forceinline__ void join_chunks(float* scratch, const int* at, int n, Partials parts,
                                            int slot_zero, int first, int last, Results to) {
    constexpr int QUADS = DV / 4;
    constexpr int TEAMS = THREADS / QUADS;
    float4* const sums = reinterpret_cast<float4*>(scratch);                       // [8, N, QUADS]
    float2* const marks = reinterpret_cast<float2*>(sums + JOIN_SPLITS * N * QUADS);  // [8, N]
    __shared__ float weights[JOIN_SPLITS][N], shares[N];
    const int quad = threadIdx.x % QUADS;
    const int team = threadIdx.x / QUADS;
    if (team < TEAMS) {
#pragma unroll 1
        for (int split = team; split < JOIN_SPLITS; split += TEAMS) {
            float4 sum[N];
            float2 mark[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), mark[i] = make_float2(-INF_F32, 0.0f);
#pragma unroll 1
            for (int slot = first + (split - slot_zero - first & (JOIN_SPLITS - 1)); slot < last;
                 slot += JOIN_SPLITS) {
                float4 more[N];
                float2 its[N];
#pragma unroll
                for (int i = 0; i < N; i++) {  // behind the last stands the last once more
                    const size_t from = size_t(at[min(i, n - 1)]) * parts.n_slots + slot;
                    more[i] = parts.sums[from * QUADS + quad];
                    its[i] = parts.marks[from];
                }
#pragma unroll
                for (int i = 0; i < N; i++) {
                    if (its[i].y == 0.0f) continue;
                    const float high = larger_number(mark[i].x, its[i].x);
                    const float shrink = weight_of(mark[i].x, high);
                    const float weight = weight_of(its[i].x, high);
                    scale_all(sum[i], shrink);
                    add_scaled(sum[i], weight, more[i]);
                    mark[i] = make_float2(high, fmaf(weight, its[i].y, mark[i].y * shrink));
                }
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                sums[(split * N + i) * QUADS + quad] = sum[i];
                if (quad == 0) marks[split * N + i] = mark[i];
            }
        }
    }
    __syncthreads();
    const bool fits = last <= parts.n_slots;
    if (int(threadIdx.x) < n) {
        const int i = threadIdx.x;
        const float sink = to.sinks != nullptr ? to.sinks[at[i] % to.n_heads] : -INF_F32;
        float high = sink;
#pragma unroll
        for (int s = 0; s < JOIN_SPLITS; s++) high = larger_number(high, marks[s * N + i].x);
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < JOIN_SPLITS; s++) {
            const float2 mark = marks[s * N + i];
            const float weight = weight_of(mark.x, high);
            weights[s][i] = weight;
            total = fmaf(weight, mark.y, total);
        }
        total = total + weight_of(sink, high);
        const bool empty = total == 0.0f;
        shares[i] = !fits ? NAN_F32 : empty ? 0.0f : 1.0f / total;
        if (to.lse != nullptr) to.lse[at[i]] = !fits ? NAN_F32 : empty ? -INF_F32 : high + logf(total);
    }
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < n * QUADS; item += THREADS) {
        const int i = item / QUADS;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int s = 0; s < JOIN_SPLITS; s++)
            add_scaled(sum, weights[s][i], sums[(s * N + i) * QUADS + item % QUADS]);
        scale_all(sum, shares[i]);
        reinterpret_cast<float4*>(to.out)[size_t(at[i]) * QUADS + item % QUADS] = sum;
    }
}
