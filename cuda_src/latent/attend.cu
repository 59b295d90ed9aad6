// Latent attention in its absorbed form: all heads share the rows of one plane, and the value of a
// row is its first RANK elements. Class `exact`: scores, weights and sums in f32.
//
// A thread block takes QT queries (a query = one row of one head) and walks chunks of keys, tile by
// tile; a tile is read once and serves as K and as V. Every chunk leaves a maximum, a sum of weights
// and a weighted sum of rows; latent_combine joins the chunks of a query in a fixed order.
//
// No result depends on anything but the query's own keys: tiles and chunks lie at absolute positions
// (or at positions of the query's own list), keys outside a query's range are left out of its sums
// (not multiplied by 0), and the order of every sum is fixed. So a row gets the same bits alone and
// among others; QT and STAGES change no bit.
#include "common/block32.cuh"
#include "common/counters.cuh"
#include "common/pipeline.cuh"

constexpr int LATENT_THREADS = 256;
constexpr int LATENT_SPLITS = LATENT_THREADS / WARP_LANES;  // warps share the channels of a score
constexpr int LATENT_TILE = 16;
constexpr int LIST_CHUNK = 32;  // entries of a list that leave one partial result
constexpr float LOG2_E = 1.4426950408889634f;

__host__ __device__ constexpr int at_most(int limit, int wanted) {
    return wanted < limit ? wanted : limit;
}
__host__ __device__ constexpr int power_below(int n) {
    return n >= 256 ? 256 : n >= 128 ? 128 : n >= 64 ? 64 : n >= 32 ? 32 : n >= 16 ? 16 : n >= 8 ? 8
           : n >= 4 ? 4
           : n >= 2 ? 2
                    : 1;
}

template <int RANK, int ROPE, int QT, int STAGES>
struct LatentShape {
    static constexpr int WIDTH = RANK + ROPE;
    static constexpr int PADDED = (WIDTH + 3) / 4 * 4;               // zeros behind an odd row
    static constexpr int PITCH = (PADDED + 31) / 32 * 32 + 4;        // rows start 4 banks apart
    static constexpr int PART = (PADDED / 4 + LATENT_SPLITS - 1) / LATENT_SPLITS * 4;
    static constexpr int OWN_QUERIES = QT / 8;                       // of a lane, for scores
    static constexpr int QUADS = (RANK + 3) / 4;
    static constexpr int GROUPS = at_most(QT / 4, power_below(LATENT_THREADS / QUADS));
    static constexpr int OWN = QT / GROUPS;                          // queries of a thread, for sums
    // Shared memory, in floats: tiles, queries, scores by split, scores, weights, per query.
    static constexpr int TILE_FLOATS = LATENT_TILE * PITCH;
    static constexpr int Q_AT = STAGES * TILE_FLOATS;
    static constexpr int PARTS_AT = Q_AT + QT * PITCH;
    static constexpr int SCORES_AT = PARTS_AT + LATENT_SPLITS * LATENT_TILE * QT;
    static constexpr int WEIGHTS_AT = SCORES_AT + LATENT_TILE * QT;
    static constexpr int MAXIMA_AT = WEIGHTS_AT + LATENT_TILE * QT;
    static constexpr int ALPHA_AT = MAXIMA_AT + 2 * QT;
    static constexpr int FLOATS = ALPHA_AT + QT;
    static_assert(QT % 8 == 0 && RANK >= 1 && QUADS <= LATENT_THREADS, "unsupported shape");
};

// One row of the plane into one row of a tile; threads take units of it.
template <int F, int WIDTH, int PADDED>
struct RowReader {
    static constexpr bool VECTORS = F == F32 && WIDTH % 4 == 0;
    static constexpr int UNITS = VECTORS ? WIDTH / 4 : F == F32 ? PADDED : WIDTH / 8;

    static __device__ __forceinline__ void read(const uint8_t* plane, int64_t row, int unit,
                                                float* to) {
        if constexpr (VECTORS) {
            const float* from = reinterpret_cast<const float*>(plane) + row * WIDTH;
            cp_async<16>(to + 4 * unit, from + 4 * unit);
        } else if constexpr (F == F32) {
            const float* from = reinterpret_cast<const float*>(plane) + row * WIDTH;
            to[unit] = unit < WIDTH ? from[unit] : 0.0f;
        } else {
            const int block = unit / BLOCK_QUARTERS, quarter = unit % BLOCK_QUARTERS;
            float x[8];
            const uint8_t* from =
                plane + (row * (WIDTH / BLOCK_ELEMENTS) + block) * block_bytes<F>();
            unpack_quarter<F>(load_quarter<F>(from, quarter), quarter, x);
            to += block * BLOCK_ELEMENTS;
            *reinterpret_cast<float4*>(to + quarter_low<F>(quarter)) =
                make_float4(x[0], x[1], x[2], x[3]);
            *reinterpret_cast<float4*>(to + quarter_high<F>(quarter)) =
                make_float4(x[4], x[5], x[6], x[7]);
        }
    }
    static __device__ __forceinline__ void zero(int unit, float* to) {
        if constexpr (VECTORS) {
            *reinterpret_cast<float4*>(to + 4 * unit) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else if constexpr (F == F32) {
            to[unit] = 0.0f;
        } else {
            *reinterpret_cast<float4*>(to + 8 * unit) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            *reinterpret_cast<float4*>(to + 8 * unit + 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
};

// Grid (x: any number of blocks, which share the chunks; y: query blocks), 256 threads,
// LatentShape::FLOATS * 4 bytes of dynamic shared memory. Query blocks: ceil(n_rows * n_heads / QT),
// or with a list n_rows * ceil(n_heads / QT).
//   q        f32 [n_rows, n_heads, RANK + ROPE]
//   plane    u8 [capacity, row bytes], 16-byte aligned
//   list     i32 [n_rows, n_list] or null: rows that all heads of a row attend; entries below 0 and
//            rows the query may not see are skipped
//   counted  rows by which len_d already counts this launch's own (0, or n_rows)
//   partial  f32 [n_rows, n_heads, n_slots, RANK + 2]: weighted sum, maximum, sum of weights;
//            slot = chunk of keys, or of list entries; 8-byte aligned
// Row r sees the rows below len + r + 1 - counted.
template <int F, int RANK, int ROPE, int QT, int STAGES>
__global__ void __launch_bounds__(LATENT_THREADS, 1)
    latent_partial(const float* __restrict__ q, const uint8_t* __restrict__ plane, int32_t n_rows,
                   int32_t n_heads, int32_t capacity, const int32_t* NULLABLE list, int32_t n_list,
                   int32_t counted, float scale, const int32_t* __restrict__ len_d,
                   float* __restrict__ partial, int32_t n_slots) {
    typedef LatentShape<RANK, ROPE, QT, STAGES> S;
    typedef RowReader<F, S::WIDTH, S::PADDED> Reader;
    DYN_SMEM(float, shared);
    float* const q_tile = shared + S::Q_AT;
    float* const parts = shared + S::PARTS_AT;      // [split][key][query]
    float* const scores = shared + S::SCORES_AT;    // [key][query]
    float* const weights = shared + S::WEIGHTS_AT;  // [key][query]
    float* const maxima = shared + S::MAXIMA_AT;    // [tile parity][query]
    float* const alphas = shared + S::ALPHA_AT;
    __shared__ int64_t ends[QT];
    __shared__ int32_t listed[2][LATENT_TILE];

    const int thread = threadIdx.x;
    const int warp = thread / WARP_LANES;
    const int lane = thread % WARP_LANES;

    int first_row = 0, first_query = int(blockIdx.y) * QT, all_queries = n_rows * n_heads;
    if (list != nullptr) {
        const int per_row = (n_heads + QT - 1) / QT;
        first_row = int(blockIdx.y) / per_row;
        first_query = int(blockIdx.y) % per_row * QT;
        all_queries = n_heads;
    }
    const int n_queries = all_queries - first_query < QT ? all_queries - first_query : QT;
    const int64_t first_end = [&] {
        const int64_t bound = int64_t(len_d[0]) + first_row + first_query / n_heads + 1 - counted;
        return bound < capacity ? bound : int64_t(capacity);
    }();
    const int64_t last_end = [&] {
        const int row = first_row + (first_query + n_queries - 1) / n_heads;
        const int64_t bound = int64_t(len_d[0]) + row + 1 - counted;
        return bound < capacity ? bound : int64_t(capacity);
    }();

    if (thread < QT) {
        const int row = first_row + (first_query + thread) / n_heads;
        const int64_t bound = int64_t(len_d[0]) + row + 1 - counted;
        ends[thread] = thread >= n_queries ? 0 : bound < capacity ? bound : int64_t(capacity);
    }
    for (int i = thread; i < QT * S::PADDED; i += LATENT_THREADS) {
        const int query = i / S::PADDED, c = i % S::PADDED;
        const size_t at = size_t(first_row) * n_heads + first_query + query;
        q_tile[query * S::PITCH + c] =
            query < n_queries && c < S::WIDTH ? q[at * S::WIDTH + c] : 0.0f;
    }

    const int lane_query = lane % 8;  // queries lane_query + 8 * i, keys lane_key + 4 * j
    const int lane_key = lane / 8;
    const int quad = thread % S::QUADS;
    const int group = thread / S::QUADS;

    const int32_t* own_list = list == nullptr ? nullptr : list + size_t(first_row) * n_list;
    const int32_t n_chunks = list != nullptr ? (n_list + LIST_CHUNK - 1) / LIST_CHUNK
                             : last_end > 0  ? chunk_of(last_end - 1) + 1
                                             : 0;

    // The keys of the tile at `at` into buffer `buffer`; rows nobody may see become zeros.
    const auto issue = [&](int64_t at, int buffer) {
        float* tile = shared + buffer * S::TILE_FLOATS;
#pragma unroll 4
        for (int unit = thread; unit < LATENT_TILE * Reader::UNITS; unit += LATENT_THREADS) {
            const int key = unit / Reader::UNITS;
            int64_t row = at + key;
            if (own_list != nullptr) row = row < n_list ? own_list[row] : -1;
            if (row >= 0 && row < last_end) {
                Reader::read(plane, row, unit % Reader::UNITS, tile + key * S::PITCH);
            } else {
                Reader::zero(unit % Reader::UNITS, tile + key * S::PITCH);
            }
        }
        if (own_list != nullptr && thread < LATENT_TILE) {
            const int32_t row = at + thread < n_list ? own_list[at + thread] : -1;
            listed[buffer][thread] = row < last_end ? row : -1;
        }
        cp_async_commit();
    };

    for (int32_t chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        const int64_t chunk_start = list != nullptr ? int64_t(chunk) * LIST_CHUNK : chunk_begin(chunk);
        const int64_t limit = list != nullptr ? int64_t(n_list) : last_end;
        const int64_t chunk_stop =
            list != nullptr ? chunk_start + LIST_CHUNK : chunk_begin(chunk + 1);
        const int64_t chunk_end = chunk_stop < limit ? chunk_stop : limit;
        float total = 0.0f;  // of query `thread`
        float4 sums[S::OWN];
#pragma unroll
        for (int i = 0; i < S::OWN; i++) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        __syncthreads();  // tiles and maxima are free
        if (thread < QT) maxima[thread] = -INF_F32;
        if (STAGES == 2) issue(chunk_start, 0);
        int step = 0;
        for (int64_t tile_key = chunk_start; tile_key < chunk_end;
             tile_key += LATENT_TILE, step++) {
            const int buffer = STAGES == 2 ? step % 2 : 0;
            if (STAGES == 1) {
                if (step > 0) __syncthreads();  // the sums have read the tile
                issue(tile_key, 0);
            }
            cp_async_wait_all();
            __syncthreads();
            if (STAGES == 2 && tile_key + LATENT_TILE < chunk_end)
                issue(tile_key + LATENT_TILE, buffer ^ 1);
            const float* tile = shared + buffer * S::TILE_FLOATS;

            {  // scores: each warp sums its share of the channels for all queries and keys
                float dot[S::OWN_QUERIES][4];
#pragma unroll
                for (int i = 0; i < S::OWN_QUERIES; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) dot[i][j] = 0.0f;
                const int stop = at_most(S::PADDED, (warp + 1) * S::PART);
#pragma unroll 2
                for (int c = warp * S::PART; c < stop; c += 4) {
                    float4 b[4];
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        b[j] = *reinterpret_cast<const float4*>(tile + (lane_key + 4 * j) * S::PITCH + c);
#pragma unroll
                    for (int i = 0; i < S::OWN_QUERIES; i++) {
                        const float4 a =
                            *reinterpret_cast<const float4*>(q_tile + (lane_query + 8 * i) * S::PITCH + c);
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            dot[i][j] = fmaf(a.x, b[j].x, dot[i][j]);
                            dot[i][j] = fmaf(a.y, b[j].y, dot[i][j]);
                            dot[i][j] = fmaf(a.z, b[j].z, dot[i][j]);
                            dot[i][j] = fmaf(a.w, b[j].w, dot[i][j]);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < S::OWN_QUERIES; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        parts[(warp * LATENT_TILE + lane_key + 4 * j) * QT + lane_query + 8 * i] =
                            dot[i][j];
            }
            __syncthreads();
            for (int e = thread; e < LATENT_TILE * QT; e += LATENT_THREADS) {
                const int key = e / QT, query = e % QT;
                const bool seen = list != nullptr ? listed[buffer][key] >= 0 && query < n_queries
                                                  : tile_key + key < ends[query];
                float score = -INF_F32;
                if (seen) {
                    float dot = parts[e];
#pragma unroll
                    for (int s = 1; s < LATENT_SPLITS; s++)
                        dot = dot + parts[s * LATENT_TILE * QT + e];
                    score = dot * scale;
                }
                scores[e] = score;
            }
            __syncthreads();
            for (int e = thread; e < LATENT_TILE * QT; e += LATENT_THREADS) {
                const int query = e % QT;
                const float before = maxima[step % 2 * QT + query];
                float high = before;
#pragma unroll
                for (int key = 0; key < LATENT_TILE; key++) {
                    const float other = scores[key * QT + query];
                    high = other > high ? other : high;
                }
                // With no key yet the maximum is -inf, which must not meet itself in a difference.
                const float pivot = high == -INF_F32 ? 0.0f : high;
                weights[e] = exp2f((scores[e] - pivot) * LOG2_E);
                if (e < QT) {
                    maxima[(step + 1) % 2 * QT + query] = high;
                    alphas[query] = exp2f((before - pivot) * LOG2_E);
                }
            }
            __syncthreads();
            if (thread < QT) {
                total = total * alphas[thread];
#pragma unroll
                for (int key = 0; key < LATENT_TILE; key++)
                    total = total + weights[key * QT + thread];
            }
            if (group < S::GROUPS) {
                const int own = group * S::OWN;
#pragma unroll
                for (int i = 0; i < S::OWN; i++) {
                    const float alpha = alphas[own + i];
                    sums[i].x *= alpha, sums[i].y *= alpha, sums[i].z *= alpha, sums[i].w *= alpha;
                }
                const float* values = tile + quad * 4;
                if (list == nullptr && tile_key + LATENT_TILE <= first_end) {
#pragma unroll 2
                    for (int key = 0; key < LATENT_TILE; key++) {
                        const float4 v = *reinterpret_cast<const float4*>(values + key * S::PITCH);
#pragma unroll
                        for (int i = 0; i < S::OWN; i++) {
                            const float w = weights[key * QT + own + i];
                            sums[i].x = fmaf(w, v.x, sums[i].x);
                            sums[i].y = fmaf(w, v.y, sums[i].y);
                            sums[i].z = fmaf(w, v.z, sums[i].z);
                            sums[i].w = fmaf(w, v.w, sums[i].w);
                        }
                    }
                } else {
                    for (int key = 0; key < LATENT_TILE; key++) {
                        if (list != nullptr && listed[buffer][key] < 0) continue;
                        const float4 v = *reinterpret_cast<const float4*>(values + key * S::PITCH);
#pragma unroll
                        for (int i = 0; i < S::OWN; i++) {
                            if (list != nullptr || tile_key + key < ends[own + i]) {
                                const float w = weights[key * QT + own + i];
                                sums[i].x = fmaf(w, v.x, sums[i].x);
                                sums[i].y = fmaf(w, v.y, sums[i].y);
                                sums[i].z = fmaf(w, v.z, sums[i].z);
                                sums[i].w = fmaf(w, v.w, sums[i].w);
                            }
                        }
                    }
                }
            }
        }

        if (chunk < n_slots) {
            if (group < S::GROUPS) {
#pragma unroll
                for (int i = 0; i < S::OWN; i++) {
                    const int query = group * S::OWN + i;
                    if (query < n_queries) {
                        const size_t at = size_t(first_row) * n_heads + first_query + query;
                        float* to = partial + (at * n_slots + chunk) * (RANK + 2) + 4 * quad;
                        if constexpr (RANK % 4 == 0) {
                            reinterpret_cast<float2*>(to)[0] = make_float2(sums[i].x, sums[i].y);
                            reinterpret_cast<float2*>(to)[1] = make_float2(sums[i].z, sums[i].w);
                        } else {
                            to[0] = sums[i].x;
                            if (4 * quad + 1 < RANK) to[1] = sums[i].y;
                            if (4 * quad + 2 < RANK) to[2] = sums[i].z;
                            if (4 * quad + 3 < RANK) to[3] = sums[i].w;
                        }
                    }
                }
            }
            if (thread < n_queries) {
                const size_t at = size_t(first_row) * n_heads + first_query + thread;
                float* to = partial + (at * n_slots + chunk) * (RANK + 2) + RANK;
                to[0] = maxima[step % 2 * QT + thread];
                to[1] = total;
            }
        }
    }
}

constexpr int COMBINE_QUADS = 32;
constexpr int COMBINE_SPLITS = LATENT_THREADS / COMBINE_QUADS;  // chunk c belongs to split c % 8

// Joins the chunks of each query. Grid (n_heads, n_rows, ceil(RANK / 128)), 256 threads; parameters
// as above, n_list 0 without a list.
//   out  f32 [n_rows, n_heads, RANK]; 0 for a query without keys; NaN if n_slots is too small
//   lse  f32 [n_rows, n_heads] or null: log of the sum of exp(score); -inf without keys
template <int RANK>
__global__ void __launch_bounds__(LATENT_THREADS, 1)
    latent_combine(const float* __restrict__ partial, float* __restrict__ out, float* NULLABLE lse,
                   int32_t capacity, int32_t n_list, int32_t counted,
                   const int32_t* __restrict__ len_d, int32_t n_slots) {
    __shared__ float maxima[LATENT_THREADS];
    __shared__ float4 sums[COMBINE_SPLITS][COMBINE_QUADS];
    __shared__ float totals[COMBINE_SPLITS];
    const int thread = threadIdx.x;
    const int head = blockIdx.x;
    const int row = blockIdx.y;
    const size_t query = size_t(row) * gridDim.x + head;
    const int64_t bound = int64_t(len_d[0]) + row + 1 - counted;
    const int64_t end = bound < capacity ? bound : int64_t(capacity);
    const int32_t n_chunks = n_list > 0 ? (n_list + LIST_CHUNK - 1) / LIST_CHUNK
                             : end > 0  ? chunk_of(end - 1) + 1
                                        : 0;
    const bool fits = n_chunks <= n_slots;
    const int32_t last = fits ? n_chunks : 0;
    const float* own = partial + query * n_slots * (RANK + 2);

    float high = -INF_F32;
    for (int32_t c = thread; c < last; c += LATENT_THREADS) {
        const float m = own[size_t(c) * (RANK + 2) + RANK];
        high = m > high ? m : high;
    }
    maxima[thread] = high;
    __syncthreads();
    const int busy = last < LATENT_THREADS ? last : LATENT_THREADS;
    for (int i = 0; i < busy; i++) high = maxima[i] > high ? maxima[i] : high;
    const float pivot = high == -INF_F32 ? 0.0f : high;

    const int lane_quad = thread % COMBINE_QUADS;
    const int split = thread / COMBINE_QUADS;
    const int channel = 4 * (int(blockIdx.z) * COMBINE_QUADS + lane_quad);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float total = 0.0f;
#pragma unroll 2
    for (int32_t c = split; c < last; c += COMBINE_SPLITS) {
        const float* part = own + size_t(c) * (RANK + 2);
        const float m = part[RANK];
        const float l = part[RANK + 1];
        if (l != 0.0f) {  // else the query sees no key of this chunk
            const float weight = exp2f((m - pivot) * LOG2_E);
            if constexpr (RANK % 4 == 0) {
                if (channel < RANK) {
                    const float2 a = *reinterpret_cast<const float2*>(part + channel);
                    const float2 b = *reinterpret_cast<const float2*>(part + channel + 2);
                    sum.x = fmaf(weight, a.x, sum.x);
                    sum.y = fmaf(weight, a.y, sum.y);
                    sum.z = fmaf(weight, b.x, sum.z);
                    sum.w = fmaf(weight, b.y, sum.w);
                }
            } else {
                if (channel < RANK) sum.x = fmaf(weight, part[channel], sum.x);
                if (channel + 1 < RANK) sum.y = fmaf(weight, part[channel + 1], sum.y);
                if (channel + 2 < RANK) sum.z = fmaf(weight, part[channel + 2], sum.z);
                if (channel + 3 < RANK) sum.w = fmaf(weight, part[channel + 3], sum.w);
            }
            total = fmaf(weight, l, total);
        }
    }
    sums[split][lane_quad] = sum;
    if (lane_quad == 0) totals[split] = total;
    __syncthreads();
    total = totals[0];
#pragma unroll
    for (int s = 1; s < COMBINE_SPLITS; s++) total = total + totals[s];
    if (split == 0) {
        sum = sums[0][lane_quad];
#pragma unroll
        for (int s = 1; s < COMBINE_SPLITS; s++) {
            const float4 more = sums[s][lane_quad];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        float* to = out + query * RANK;
        const bool empty = total == 0.0f;
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (channel + i < RANK)
                to[channel + i] = !fits ? NAN_F32 : empty ? 0.0f : values[i] / total;
    }
    if (thread == 0 && blockIdx.z == 0 && lse != nullptr)
        lse[query] = !fits ? NAN_F32 : total == 0.0f ? -INF_F32 : pivot + logf(total);
}
