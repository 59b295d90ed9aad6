// The output layer: last norm, logits, and the greedy token of each row.
#include "common/product.cuh"

constexpr int OUTS = 32;
constexpr int PICK_THREADS = 256;
constexpr int PICK_GROUPS = 16;
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

// grid (n_tiles, ceil(n_rows / group)); shared f32 [group, 32 * n_blocks], [group, 32],
// [group, n_slices, 32], [group, n_blocks].
//   w        tiles of [n_vocab, 32 * n_blocks]
//   h, gain  f32 [n_rows, 32 * n_blocks], f32 [32 * n_blocks]
//   logits   f32 [n_rows, n_vocab]
//   values, ids  f32 and i32 [n_rows, n_tiles]: the best logit of each tile of 32
//   sums     f32 [n_rows, n_tiles] or null: sum of exp(logit - best) over the tile
template <class Tile>
__global__ void __launch_bounds__(64, 12)
    logits_rows(const uint8_t* __restrict__ w, const float* h, const float* __restrict__ gain,
                float* logits, float* values, int32_t* ids, float* NULLABLE sums, int32_t n_rows,
                int32_t group, int32_t n_vocab, int32_t n_blocks, int32_t slice_blocks, int32_t n_slices,
                float share, float eps) {
    DYN_SMEM(float, gained);
    const int first_out = blockIdx.x * OUTS;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const int n_outs = min(OUTS, n_vocab - first_out);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    admit_successor();
    Product<OUTS, 1, false, Tile> product(w, first_out, cut, nullptr, threadIdx.x, blockDim.x);
    // A block reads each activation many times: its gain is applied once, in shared memory.
    const int width = n_blocks * TILE_COLS;
    const float* x = h + size_t(first_row) * width;
    float* staged = gained + rows * width;
    float* parts = staged + rows * OUTS;
    float* squares = parts + size_t(rows) * n_slices * OUTS;
    const float4* from = reinterpret_cast<const float4*>(x);
    const float4* by = reinterpret_cast<const float4*>(gain);
    float4* to = reinterpret_cast<float4*>(gained);
    await_predecessor();
#pragma unroll 1
    for (int r = 0; r < rows; r++)
#pragma unroll 3
        for (int c = threadIdx.x; c < width / 4; c += blockDim.x) {
            const float4 v = from[r * (width / 4) + c], g = by[c];
            to[r * (width / 4) + c] = make_float4(v.x * g.x, v.y * g.y, v.z * g.z, v.w * g.w);
        }
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * n_blocks; i += blockDim.x) {
        const Activations v(x + size_t(i) * TILE_COLS);
        squares[i] = dot32(v.v, v);
    }
    __syncthreads();
    product.run(gained, rows, parts, nullptr, [] {});
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * OUTS; i += blockDim.x) {
        const int r = i / OUTS;
        const int out = i % OUTS;
        const float* row = squares + r * n_blocks;
        const float total = sum_of<4>(n_blocks, [&](int i) { return row[i]; });
        const float scale = 1.0f / sqrtf(total * share + eps);
        const float* terms = parts + size_t(r) * n_slices * OUTS + out;
        const float logit = sum_of<4>(n_slices, [&](int i) { return terms[i * OUTS]; }) * scale;
        staged[i] = out < n_outs ? logit : NAN_F32;
        if (out < n_outs) logits[size_t(first_row + r) * n_vocab + first_out + out] = logit;
    }
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        const float* row = staged + r * OUTS;
        Best best = {NAN_F32, NO_TOKEN};
#pragma unroll
        for (int c = 0; c < OUTS; c++)
            if (row[c] > best.value || (row[c] == row[c] && best.id == NO_TOKEN))
                best = Best{row[c], first_out + c};
        const size_t at = size_t(first_row + r) * gridDim.x + blockIdx.x;
        values[at] = best.value;
        ids[at] = best.id;
        if (sums != nullptr) {
            float sum = 0.0f;  // an infinite best differs from itself by NaN
            for (int c = 0; c < n_outs; c++)
                sum = sum + (row[c] == best.value ? 1.0f : expf(row[c] - best.value));
            sums[at] = sum;
        }
    }
}

// One block of 256 threads per row: the best of the tiles' best.
//   out     i32 [n_rows]: lowest id of the greatest logit, NO_TOKEN where all are NaN
//   prob_d  f32 [n_rows] or null: softmax probability of that id, NaN where any logit is NaN
KERNEL void pick_rows(const float* values, const int32_t* ids, const float* NULLABLE sums,
                      int32_t* out, float* NULLABLE prob_d, int32_t n_tiles) {
    __shared__ float thread_values[PICK_THREADS];
    __shared__ int32_t thread_ids[PICK_THREADS];
    __shared__ float group_values[PICK_GROUPS];
    __shared__ int32_t group_ids[PICK_GROUPS];
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x;
    const size_t row = size_t(blockIdx.x) * n_tiles;
    Best best = {NAN_F32, NO_TOKEN};  // unrolled below, so that eight loads are under way at a time
#pragma unroll 8
    for (int t = thread; t < n_tiles; t += PICK_THREADS)
        best = better(best, Best{values[row + t], ids[row + t]});
    thread_values[thread] = best.value;
    thread_ids[thread] = best.id;
    __syncthreads();
    if (thread < PICK_GROUPS) {
#pragma unroll
        for (int k = 1; k < PICK_THREADS / PICK_GROUPS; k++) {
            const int i = thread + PICK_GROUPS * k;
            best = better(best, Best{thread_values[i], thread_ids[i]});
        }
        group_values[thread] = best.value;
        group_ids[thread] = best.id;
    }
    __syncthreads();
    best = Best{group_values[0], group_ids[0]};
#pragma unroll
    for (int i = 1; i < PICK_GROUPS; i++) best = better(best, Best{group_values[i], group_ids[i]});
    if (thread == 0) out[blockIdx.x] = best.id;

    if (prob_d != nullptr && sums != nullptr) {  // the same for all threads of the launch
        float sum = 0.0f;
        for (int t = thread; t < n_tiles; t += PICK_THREADS)
            sum = sum + sums[row + t] * expf(values[row + t] - best.value);
        thread_values[thread] = sum;  // last read before the second barrier
        __syncthreads();
        if (thread < PICK_GROUPS) {
            float group = 0.0f;
            for (int i = thread; i < PICK_THREADS; i += PICK_GROUPS)
                group = group + thread_values[i];
            thread_ids[thread] = __float_as_int(group);
        }
        __syncthreads();
        if (thread == 0) {
            float total = 0.0f;
            for (int i = 0; i < PICK_GROUPS; i++) total = total + __int_as_float(thread_ids[i]);
            prob_d[blockIdx.x] = 1.0f / total;
        }
    }
}
