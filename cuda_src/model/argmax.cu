// The token of each row of logits: greedy choice, and its probability where it is asked for.
#include "common/device.cuh"

constexpr int ARGMAX_THREADS = 1024;
constexpr int ARGMAX_GROUPS = 32;
constexpr int32_t NO_TOKEN = 0x7FFFFFFF;

struct Best {
    float value;
    int32_t id;
};

// NaN never wins, a tie goes to the lower id; NO_TOKEN stands for "nothing but NaN so far".
__device__ __forceinline__ Best better(Best a, Best b) {
    if (b.id == NO_TOKEN) return a;
    if (a.id == NO_TOKEN) return b;
    return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

// One block of 1024 threads per row.
//   logits    f32 [n_rows, n_cols]
//   out       i32 [n_rows]: lowest id of the greatest value, NO_TOKEN where every value is NaN
//   prob_d    f32 [n_rows] or null: softmax probability of that id, NaN where any value is NaN
KERNEL void argmax_rows(const float* __restrict__ logits, int32_t* __restrict__ out,
                        float* NULLABLE prob_d, int32_t n_cols) {
    __shared__ float values[ARGMAX_THREADS];
    __shared__ int32_t ids[ARGMAX_THREADS];
    __shared__ float group_values[ARGMAX_GROUPS];
    __shared__ int32_t group_ids[ARGMAX_GROUPS];
    const int thread = threadIdx.x;
    const float* row = logits + size_t(blockIdx.x) * n_cols;

    Best best = {0.0f, NO_TOKEN};  // unrolled below, so that eight loads are under way at a time
#pragma unroll 8
    for (int c = thread; c < n_cols; c += ARGMAX_THREADS) {
        const float value = row[c];
        if (value == value) best = better(best, Best{value, c});
    }
    values[thread] = best.value;
    ids[thread] = best.id;
    __syncthreads();
    if (thread < ARGMAX_GROUPS) {
        Best group = {0.0f, NO_TOKEN};
        for (int i = thread; i < ARGMAX_THREADS; i += ARGMAX_GROUPS)
            group = better(group, Best{values[i], ids[i]});
        group_values[thread] = group.value;
        group_ids[thread] = group.id;
    }
    __syncthreads();
    best = Best{0.0f, NO_TOKEN};
    for (int i = 0; i < ARGMAX_GROUPS; i++) best = better(best, Best{group_values[i], group_ids[i]});
    if (thread == 0) out[blockIdx.x] = best.id;

    if (prob_d != nullptr) {  // the same for all threads of the launch
        float sum = 0.0f;
        for (int c = thread; c < n_cols; c += ARGMAX_THREADS) sum = sum + expf(row[c] - best.value);
        values[thread] = sum;  // last read before the second barrier
        __syncthreads();
        if (thread < ARGMAX_GROUPS) {
            float group = 0.0f;
            for (int i = thread; i < ARGMAX_THREADS; i += ARGMAX_GROUPS) group = group + values[i];
            ids[thread] = __float_as_int(group);
        }
        __syncthreads();
        if (thread == 0) {
            float total = 0.0f;
            for (int i = 0; i < ARGMAX_GROUPS; i++) total = total + __int_as_float(ids[i]);
            prob_d[blockIdx.x] = 1.0f / total;
        }
    }
}
