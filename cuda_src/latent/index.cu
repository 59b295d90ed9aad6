// The indexer of latent attention: its rows, the key of each pool of rows, the scores of the pools.
//
// Scores decide which rows are attended, so every rounding of them is fixed and no transcendental
// function of a library takes part: both devices, and every shape of launch, give the same bits.
#include "common/device.cuh"
#include "common/lanes.cuh"

constexpr int INDEX_THREADS = 128;

// Appends rows and builds the keys of the pools that they complete. Grid (pools that n_rows rows can
// touch: n_rows / pool + 2 suffice), 128 threads; a block owns a pool.
//   rows    f32 [n_rows, 2 * d] = [k | gate], rows `first` ... of the call
//   ape     f32 [pool, d], added to the gates
//   plane   f32 [ring or capacity, 2 * d]; absolute row a lies at a % ring, or at a if ring is 0.
//           Rows that are still to be read and the new ones must fit in the ring together.
//   keys    f32 [capacity / pool, d]
// Row r is absolute row len + first + r; the counter is not moved. Rows past the capacity are
// dropped. key = sum over the rows of a pool of softmax(gate + ape) * k, by channel.
KERNEL void __launch_bounds__(INDEX_THREADS, 1)
    index_append(const float* __restrict__ rows, const float* __restrict__ ape, float* plane,
                 float* __restrict__ keys, int32_t n_rows, int32_t first, int32_t d, int32_t pool,
                 int32_t ring, int32_t capacity, const int32_t* __restrict__ len_d) {
    const int64_t begin = int64_t(len_d[0]) + first;
    const int64_t wanted = begin + n_rows;
    const int64_t end = wanted < capacity ? wanted : int64_t(capacity);
    const int64_t p = begin / pool + blockIdx.x;
    const int64_t pool_end = (p + 1) * pool;
    const int64_t from = p * pool > begin ? p * pool : begin;
    const int64_t to = pool_end < end ? pool_end : end;
    for (int64_t a = from; a < to; a++) {
        const float* source = rows + (a - begin) * 2 * d;
        float* target = plane + (ring > 0 ? a % ring : a) * 2 * d;
        for (int c = threadIdx.x; c < 2 * d; c += INDEX_THREADS) target[c] = source[c];
    }
    if (from < to && to == pool_end) {
        // A thread reads back only the channels of older rows, which no thread writes here.
        const auto row = [&](int s) -> const float* {
            const int64_t a = p * pool + s;
            return a >= begin ? rows + (a - begin) * 2 * d
                              : plane + (ring > 0 ? a % ring : a) * 2 * d;
        };
        for (int c = threadIdx.x; c < d; c += INDEX_THREADS) {
            float high = -INF_F32;
            for (int s = 0; s < pool; s++) {
                const float z = row(s)[d + c] + ape[s * d + c];
                high = z > high ? z : high;
            }
            float total = 0.0f;
            for (int s = 0; s < pool; s++)
                total = total + lkv_exp(row(s)[d + c] + ape[s * d + c] - high);
            float key = 0.0f;
            for (int s = 0; s < pool; s++) {
                const float e = lkv_exp(row(s)[d + c] + ape[s * d + c] - high);
                key = key + e / total * row(s)[c];
            }
            keys[p * d + c] = key;
        }
    }
}

constexpr int SCORE_THREADS = 128;
constexpr int SCORE_SLICE = 32;               // channels that are staged at once
constexpr int SCORE_PITCH = SCORE_SLICE + 4;  // rows start 4 banks apart

// Grid (any number of blocks, which share the pools; n_rows), 128 threads. A thread owns POOLS pools
// and walks HEADS heads at a time.
//   q       f32 [n_rows, n_heads, d]        weights  f32 [n_rows, n_heads]
//   keys    f32 [at least the visible pools, d], 16-byte aligned where d is a multiple of 4
//   scores  f32 [n_rows, stride]; pools that the last row sees are written, -inf where the own row
//           does not see them; the rest is left alone
// Row r sees pools below (len + r + 1 - counted) / pool, at most n_pools.
// Rounding: a dot product is a chain of fmaf over ascending channels from +0; times dot_scale; at
// least 0 (a NaN stays); times weight * head_scale, itself rounded; added over ascending heads from
// +0. No zeros are padded in.
template <int HEADS, int POOLS>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    index_scores(const float* __restrict__ q, const float* __restrict__ weights,
                 const float* __restrict__ keys, float* __restrict__ scores, int32_t n_rows,
                 int32_t n_heads, int32_t d, int32_t pool, int32_t n_pools, int32_t stride,
                 int32_t counted, float dot_scale, float head_scale,
                 const int32_t* __restrict__ len_d) {
    constexpr int BLOCK = SCORE_THREADS * POOLS;
    __shared__ float4 key_slice[BLOCK * SCORE_PITCH / 4];
    __shared__ float4 q_slice[HEADS * SCORE_SLICE / 4];
    __shared__ float head_weights[HEADS];
    float* const key_at = reinterpret_cast<float*>(key_slice);
    float* const q_at = reinterpret_cast<float*>(q_slice);
    const int thread = threadIdx.x;
    const int row = blockIdx.y;
    const int64_t before = int64_t(len_d[0]) - counted;
    const int64_t own_seen = (before + row + 1) / pool;
    const int64_t all_seen = (before + n_rows) / pool;
    const int32_t visible = own_seen < n_pools ? int32_t(own_seen) : n_pools;
    const int32_t last = all_seen < n_pools ? int32_t(all_seen) : n_pools;
    const float* own_q = q + size_t(row) * n_heads * d;

    for (int32_t first = int32_t(blockIdx.x) * BLOCK; first < last; first += gridDim.x * BLOCK) {
        float total[POOLS];
#pragma unroll
        for (int j = 0; j < POOLS; j++) total[j] = 0.0f;
        for (int h0 = 0; h0 < n_heads; h0 += HEADS) {
            const int heads = n_heads - h0 < HEADS ? n_heads - h0 : HEADS;
            float dot[HEADS][POOLS];
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int j = 0; j < POOLS; j++) dot[h][j] = 0.0f;
            for (int c0 = 0; c0 < d; c0 += SCORE_SLICE) {
                const int width = d - c0 < SCORE_SLICE ? d - c0 : SCORE_SLICE;
                __syncthreads();  // the slices are free
                if (d % 4 == 0) {
                    const int quads = width / 4;
#pragma unroll 8
                    for (int i = thread; i < BLOCK * (SCORE_SLICE / 4); i += SCORE_THREADS) {
                        const int key = i / (SCORE_SLICE / 4), quad = i % (SCORE_SLICE / 4);
                        if (quad < quads && first + key < last)
                            *reinterpret_cast<float4*>(key_at + key * SCORE_PITCH + 4 * quad) =
                                *reinterpret_cast<const float4*>(keys + size_t(first + key) * d + c0 +
                                                                 4 * quad);
                    }
                } else {
                    for (int i = thread; i < BLOCK * width; i += SCORE_THREADS) {
                        const int key = i / width, c = i % width;
                        if (first + key < last)
                            key_at[key * SCORE_PITCH + c] = keys[size_t(first + key) * d + c0 + c];
                    }
                }
                for (int i = thread; i < HEADS * SCORE_SLICE; i += SCORE_THREADS) {
                    const int h = i / SCORE_SLICE, c = i % SCORE_SLICE;
                    q_at[i] = h < heads && c < width ? own_q[size_t(h0 + h) * d + c0 + c] : 0.0f;
                }
                if (thread < HEADS)
                    head_weights[thread] =
                        thread < heads
                            ? __fmul_rn(weights[size_t(row) * n_heads + h0 + thread], head_scale)
                            : 0.0f;
                __syncthreads();
                if (first + thread < last) {
                    int c = 0;
#pragma unroll 1
                    for (; c + 4 <= width; c += 4) {
                        float4 key[POOLS];
#pragma unroll
                        for (int j = 0; j < POOLS; j++) {
                            const int at = first + thread + j * SCORE_THREADS < last
                                               ? thread + j * SCORE_THREADS
                                               : thread;
                            key[j] = *reinterpret_cast<const float4*>(key_at + at * SCORE_PITCH + c);
                        }
#pragma unroll
                        for (int h = 0; h < HEADS; h++) {
                            const float4 a =
                                *reinterpret_cast<const float4*>(q_at + h * SCORE_SLICE + c);
#pragma unroll
                            for (int j = 0; j < POOLS; j++) {
                                dot[h][j] = fmaf(a.x, key[j].x, dot[h][j]);
                                dot[h][j] = fmaf(a.y, key[j].y, dot[h][j]);
                                dot[h][j] = fmaf(a.z, key[j].z, dot[h][j]);
                                dot[h][j] = fmaf(a.w, key[j].w, dot[h][j]);
                            }
                        }
                    }
#pragma unroll 1
                    for (; c < width; c++) {
#pragma unroll
                        for (int j = 0; j < POOLS; j++) {
                            const int at = first + thread + j * SCORE_THREADS < last
                                               ? thread + j * SCORE_THREADS
                                               : thread;
                            const float key = key_at[at * SCORE_PITCH + c];
#pragma unroll
                            for (int h = 0; h < HEADS; h++)
                                dot[h][j] = fmaf(q_at[h * SCORE_SLICE + c], key, dot[h][j]);
                        }
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h < heads) {
#pragma unroll
                    for (int j = 0; j < POOLS; j++) {
                        const float scaled = __fmul_rn(dot[h][j], dot_scale);
                        const float positive =
                            scaled > 0.0f || scaled != scaled ? scaled : 0.0f;
                        total[j] = __fadd_rn(total[j], __fmul_rn(positive, head_weights[h]));
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < POOLS; j++) {
            const int32_t p = first + thread + j * SCORE_THREADS;
            if (p < last) scores[size_t(row) * stride + p] = p < visible ? total[j] : -INF_F32;
        }
    }
}
