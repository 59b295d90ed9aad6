// The indexer of latent attention: its rows, the key of each pool of rows, the scores of the pools.
//
// Scores decide which rows are attended, so every rounding of them is fixed and no transcendental
// function of a library takes part: both devices, and every shape of launch, give the same bits.
#include "common/device.cuh"
#include "common/lanes.cuh"
#include "common/pipeline.cuh"

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

template <int HEADS, int POOLS, int GROUPS, int SLICE>
struct ScoreShape {
    static constexpr int LANES = SCORE_THREADS / GROUPS;  // threads side by side over the pools
    static constexpr int POOLS_AT_ONCE = LANES * POOLS, HEADS_AT_ONCE = HEADS * GROUPS;
    static constexpr int PITCH = SLICE + 4;  // rows start 4 banks apart
    static constexpr int Q_AT = POOLS_AT_ONCE * PITCH;
    static constexpr int STAGE = Q_AT + HEADS_AT_ONCE * SLICE;  // floats: a slice of keys, of queries
    static constexpr int TERMS_AT = 2 * STAGE;  // of the heads and pools of all groups but the first
    static constexpr int FLOATS = TERMS_AT + HEADS * (GROUPS - 1) * POOLS_AT_ONCE;
};

// Grid (any number of blocks, which share the pools; n_rows), 128 threads, ScoreShape::FLOATS * 4
// bytes of dynamic shared memory. A thread does POOLS pools and HEADS heads at a time, in slices of
// channels; GROUPS threads share a pool.
//   q       f32 [n_rows, n_heads, d]        weights  f32 [n_rows, n_heads]
//   keys    f32 [at least the visible pools, d], 16-byte aligned where d is a multiple of 4
//   scores  f32 [n_rows, stride]; pools that the last row sees are written, -inf where the own row
//           does not see them; the rest is left alone
// Row r sees pools below (len + r + 1 - counted) / pool, at most n_pools.
// Rounding: a dot product is a chain of fmaf over ascending channels from +0; times dot_scale; at
// least 0 (a NaN stays); times weight * head_scale, itself rounded; added over ascending heads from
// +0. No zeros are padded in.
template <int HEADS, int POOLS, int GROUPS, int SLICE>
__global__ void __launch_bounds__(SCORE_THREADS, 1)
    index_scores(const float* __restrict__ q, const float* __restrict__ weights,
                 const float* __restrict__ keys, float* __restrict__ scores, int32_t n_rows,
                 int32_t n_heads, int32_t d, int32_t pool, int32_t n_pools, int32_t stride,
                 int32_t counted, float dot_scale, float head_scale,
                 const int32_t* __restrict__ len_d) {
    typedef ScoreShape<HEADS, POOLS, GROUPS, SLICE> S;
    DYN_SMEM(float, shared);
    float* const terms = shared + S::TERMS_AT;  // [head][pool]
    const int thread = threadIdx.x, lane = thread % S::LANES, group = thread / S::LANES;
    const int row = blockIdx.y;
    const int64_t before = int64_t(len_d[0]) - counted;
    const int64_t own_seen = (before + row + 1) / pool;
    const int64_t all_seen = (before + n_rows) / pool;
    const int32_t visible = own_seen < n_pools ? int32_t(own_seen) : n_pools;
    const int32_t last = all_seen < n_pools ? int32_t(all_seen) : n_pools;
    const float* const own_q = q + size_t(row) * n_heads * d;
    const float* const own_weights = weights + size_t(row) * n_heads;

    // `n` rows of `width` channels into rows of a slice; those up to `n_all` may become zeros.
    const auto bring = [&](float* to, int pitch, const float* from, int n, int n_all, int width) {
        if (d % 4 == 0) {  // a thread brings the same quad of every so many rows
            constexpr int QUADS = SLICE / 4, ROWS = SCORE_THREADS / QUADS;
            const int first = thread / QUADS, quad = thread % QUADS * 4;
            to += first * pitch + quad;
            from += size_t(first) * d + quad;
            if (quad < width)
#pragma unroll 4
                for (int i = first; i < n_all; i += ROWS, to += ROWS * pitch, from += ROWS * d)
                    if (i < n)
                        cp_async<16>(to, from);
                    else
                        *reinterpret_cast<float4*>(to) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else {
            for (int i = thread; i < n_all * width; i += SCORE_THREADS) {
                float* const at = to + i / width * pitch + i % width;
                if (i / width < n)
                    cp_async<4>(at, from + size_t(i / width) * d + i % width);
                else
                    *at = 0.0f;
            }
        }
    };
    // A slice of channels of some pools and heads into a stage.
    const auto ask = [&](int32_t first, int h0, int c0, int stage) {
        if (first < last) {
            float* const key_at = shared + stage * S::STAGE;
            const int width = d - c0 < SLICE ? d - c0 : SLICE;
            const int heads = n_heads - h0 < S::HEADS_AT_ONCE ? n_heads - h0 : S::HEADS_AT_ONCE;
            const int there = last - first < S::POOLS_AT_ONCE ? last - first : S::POOLS_AT_ONCE;
            bring(key_at, S::PITCH, keys + size_t(first) * d + c0, there, there, width);
            bring(key_at + S::Q_AT, SLICE, own_q + size_t(h0) * d + c0, heads, S::HEADS_AT_ONCE, width);
        }
        cp_async_commit();
    };

    int stage = 0;
    const int32_t step = int32_t(gridDim.x) * S::POOLS_AT_ONCE;
    int32_t first = int32_t(blockIdx.x) * S::POOLS_AT_ONCE;
    ask(first, 0, 0, 0);
    for (; first < last; first += step) {
        float total[POOLS];
#pragma unroll
        for (int j = 0; j < POOLS; j++) total[j] = 0.0f;
        for (int h0 = 0; h0 < n_heads; h0 += S::HEADS_AT_ONCE) {
            float dot[HEADS][POOLS];
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int j = 0; j < POOLS; j++) dot[h][j] = 0.0f;
            for (int c0 = 0; c0 < d; c0 += SLICE, stage ^= 1) {
                const int width = d - c0 < SLICE ? d - c0 : SLICE;
                cp_async_wait_all();
                __syncthreads();
                // What comes next: the next slice, the next heads, or the next pools.
                const bool more = c0 + SLICE < d, others = h0 + S::HEADS_AT_ONCE < n_heads;
                ask(more || others ? first : first + step,
                    more ? h0 : others ? h0 + S::HEADS_AT_ONCE : 0, more ? c0 + SLICE : 0,
                    stage ^ 1);
                // Pools and heads beyond what there is give sums that nobody uses.
                const float* key_at[POOLS];
#pragma unroll
                for (int j = 0; j < POOLS; j++) {
                    const int key = lane + j * S::LANES;
                    key_at[j] = shared + stage * S::STAGE + (first + key < last ? key : 0) * S::PITCH;
                }
                const float* const q_at =
                    shared + stage * S::STAGE + S::Q_AT + group * HEADS * SLICE;
                if (width == SLICE) {
#pragma unroll 2
                    for (int c = 0; c < SLICE; c += 4) {
                        float4 key[POOLS];
#pragma unroll
                        for (int j = 0; j < POOLS; j++)
                            key[j] = *reinterpret_cast<const float4*>(key_at[j] + c);
#pragma unroll
                        for (int h = 0; h < HEADS; h++) {
                            const float4 a =
                                *reinterpret_cast<const float4*>(q_at + h * SLICE + c);
#pragma unroll
                            for (int j = 0; j < POOLS; j++) {
                                dot[h][j] = fmaf(a.x, key[j].x, dot[h][j]);
                                dot[h][j] = fmaf(a.y, key[j].y, dot[h][j]);
                                dot[h][j] = fmaf(a.z, key[j].z, dot[h][j]);
                                dot[h][j] = fmaf(a.w, key[j].w, dot[h][j]);
                            }
                        }
                    }
                } else {
#pragma unroll 1
                    for (int c = 0; c < width; c++)
#pragma unroll
                        for (int j = 0; j < POOLS; j++) {
                            const float key = key_at[j][c];
#pragma unroll
                            for (int h = 0; h < HEADS; h++)
                                dot[h][j] = fmaf(q_at[h * SLICE + c], key, dot[h][j]);
                        }
                }
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const int head = h0 + group * HEADS + h;
                if (head < n_heads) {
                    const float weight = __fmul_rn(own_weights[head], head_scale);
#pragma unroll
                    for (int j = 0; j < POOLS; j++) {
                        const float scaled = __fmul_rn(dot[h][j], dot_scale);
                        const float positive = scaled > 0.0f || scaled != scaled ? scaled : 0.0f;
                        const float term = __fmul_rn(positive, weight);
                        if (group == 0)
                            total[j] = __fadd_rn(total[j], term);
                        else
                            terms[((group - 1) * HEADS + h) * S::POOLS_AT_ONCE + lane + j * S::LANES] =
                                term;
                    }
                }
            }
            if constexpr (GROUPS > 1) {
                // The first group adds the others' terms; the barrier of the next slice is behind it.
                __syncthreads();
                const int others = n_heads - h0 - HEADS;
                if (group == 0) {
#pragma unroll 8
                    for (int h = 0; h < HEADS * (GROUPS - 1); h++)
                        if (h < others)
#pragma unroll
                            for (int j = 0; j < POOLS; j++)
                                total[j] = __fadd_rn(
                                    total[j], terms[h * S::POOLS_AT_ONCE + lane + j * S::LANES]);
                }
            }
        }
        if (group == 0)
#pragma unroll
            for (int j = 0; j < POOLS; j++) {
                const int32_t p = first + lane + j * S::LANES;
                if (p < last) scores[size_t(row) * stride + p] = p < visible ? total[j] : -INF_F32;
            }
    }
}
