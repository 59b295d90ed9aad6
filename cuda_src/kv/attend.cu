// Split-KV decode attention over a quantised plane, in class `exact`: q, scores and weights in f32.
//
// A thread block owns one kv head and up to QT queries (a query = one row of one query head of the
// group), and walks chunks of keys. A chunk is cut into tiles of keys; each tile of K, then of V, is
// decoded once into shared memory for all queries. Every chunk leaves a maximum, a sum of weights
// and a weighted sum of V; attend_combine joins the chunks of a row in a fixed order.
//
// No result depends on anything but the row's own keys: tiles and chunks lie at absolute positions,
// keys outside a row's range are left out of its sums (not multiplied by 0, so a NaN there stays
// there), and the order of every sum is fixed. A row therefore gets the same bits alone and among
// others, on a ring and on a flat plane, with a window and with the other keys masked.
#include "common/block32.cuh"
#include "common/counters.cuh"
#include "common/reduce.cuh"

constexpr int ATTEND_THREADS = 128;
constexpr int ATTEND_WARPS = ATTEND_THREADS / WARP_LANES;
constexpr float LOG2_E = 1.4426950408889634f;

// The shape of the work for head sizes DK, DV and QT queries. Only QT may vary between launches that
// must agree: nothing of a single query's arithmetic depends on it.
template <int DK, int DV, int QT>
struct AttendShape {
    static constexpr int WIDEST = DK > DV ? DK : DV;
    static constexpr int TILE = WIDEST <= 64 ? 128 : WIDEST <= 128 ? 64 : WIDEST <= 256 ? 32 : 16;
    static constexpr int PITCH = WIDEST + 4;  // rows of a tile start 4 banks apart
    static constexpr int PARTS = ATTEND_THREADS / TILE;  // threads that share the dot product of a key
    static constexpr int PART = DK / PARTS;
    static constexpr int QUADS = DV / 4;  // threads that share the channels of a row of V
    static constexpr int FIT = ATTEND_THREADS / QUADS < TILE / 4 ? ATTEND_THREADS / QUADS : TILE / 4;
    static constexpr int SPLITS = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
    static constexpr int SPLIT = TILE / SPLITS;  // keys of a tile that one of them sums
    // Shared memory, in floats: tile (later the partial sums), q, scores and weights, rescaling.
    static constexpr int TILE_FLOATS =
        TILE * PITCH > SPLITS * QT * DV ? TILE * PITCH : SPLITS * QT * DV;
    static constexpr int Q_AT = TILE_FLOATS;
    static constexpr int SCORE_AT = Q_AT + QT * DK;
    static constexpr int ALPHA_AT = SCORE_AT + PARTS * QT * TILE;
    static constexpr int FLOATS = ALPHA_AT + QT;
    static_assert(DK % 32 == 0 && DV % 32 == 0 && PART % 4 == 0 && SPLIT % 4 == 0, "unsupported head size");
    static_assert(WIDEST <= 512 && QT % ATTEND_WARPS == 0, "unsupported shape");
};

// Decodes the rows [from, to) of a tile, one head of D elements each, into shared memory.
template <int F, int D, int TILE, int PITCH>
__device__ __forceinline__ void decode_tile(const uint8_t* __restrict__ head, int64_t row_bytes,
                                            float* tile, int from, int to) {
    constexpr int UNITS = D / 8;
#pragma unroll 4
    for (int unit = threadIdx.x; unit < TILE * UNITS; unit += ATTEND_THREADS) {
        const int key = unit / UNITS;
        const int block = unit % UNITS / BLOCK_QUARTERS;
        const int quarter = unit % BLOCK_QUARTERS;
        if (key >= from && key < to) {
            float x[8];
            read_quarter<F>(head + key * row_bytes + block * block_bytes<F>(), quarter, x);
            float* row = tile + key * PITCH + block * BLOCK_ELEMENTS;
            *reinterpret_cast<float4*>(row + quarter_low<F>(quarter)) =
                make_float4(x[0], x[1], x[2], x[3]);
            *reinterpret_cast<float4*>(row + quarter_high<F>(quarter)) =
                make_float4(x[4], x[5], x[6], x[7]);
        }
    }
}

__device__ __forceinline__ void add_scaled(float4& sum, float weight, const float4& v) {
    sum.x = fmaf(weight, v.x, sum.x);
    sum.y = fmaf(weight, v.y, sum.y);
    sum.z = fmaf(weight, v.z, sum.z);
    sum.w = fmaf(weight, v.w, sum.w);
}

// Grid (x: any number of blocks, which share the chunks; kv heads; query blocks), 128 threads,
// AttendShape::FLOATS * 4 bytes of dynamic shared memory. Query blocks: ceil(n_rows * group / QT), or
// with a table n_rows * ceil(group / QT).
//   q          f32 [n_rows, n_kv_heads * group, DK], 16-byte aligned
//   k_plane    u8 [capacity, row bytes] of n_kv_heads * DK elements; v_plane with DV. Both null and
//              len_d null when there is a table (common/counters.cuh)
//   window     keys a row sees at most; 0 or less: all
//   counted    rows by which len_d already counts this launch's own (0, or n_rows)
//   scale      factor of q . k; softcap > 0: cap * tanh(score / cap) afterwards
//   partial    f32 [n_rows, n_heads, n_slots, DV + 2] : weighted sum of V, maximum, sum of weights;
//              slot = chunk - first chunk of row 0 (with a table: of the row itself)
template <int KF, int VF, int DK, int DV, int QT>
__global__ void __launch_bounds__(ATTEND_THREADS)
    attend_partial(const float* __restrict__ q, const uint8_t* NULLABLE k_plane,
                   const uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t n_kv_heads,
                   int32_t group, int32_t capacity, int32_t window, int32_t counted, float scale,
                   float softcap, const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                   const uint64_t* NULLABLE table, float* __restrict__ partial, int32_t n_slots) {
    typedef AttendShape<DK, DV, QT> S;
    DYN_SMEM(float, shared);
    float* const tile = shared;
    float* const q_tile = shared + S::Q_AT;
    float* const scores = shared + S::SCORE_AT;  // [PARTS][QT][TILE]; plane 0 becomes the weights
    float* const alphas = shared + S::ALPHA_AT;
    __shared__ int64_t starts[QT];
    __shared__ int64_t ends[QT];

    const int thread = threadIdx.x;
    const int warp = thread / WARP_LANES;
    const int lane = thread % WARP_LANES;
    const int kv_head = blockIdx.y;
    const int n_heads = n_kv_heads * group;

    // Queries [first_query, first_query + n_queries) of the rows from first_row on.
    int first_row = 0, first_query = int(blockIdx.z) * QT, all_queries = n_rows * group;
    if (table != nullptr) {
        const int blocks_per_row = (group + QT - 1) / QT;
        first_row = blockIdx.z / blocks_per_row;
        first_query = int(blockIdx.z) % blocks_per_row * QT;
        all_queries = group;
    }
    const int n_queries = all_queries - first_query < QT ? all_queries - first_query : QT;
    const int last_row = first_row + (first_query + n_queries - 1) / group;

    if (thread < n_queries) {
        const int row = first_row + (first_query + thread) / group;
        const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, row);
        const KeyRange keys = key_range(view, window, counted, capacity);
        starts[thread] = keys.start;
        ends[thread] = keys.end;
    }
    for (int i = thread; i < n_queries * DK; i += ATTEND_THREADS) {
        const int query = first_query + i / DK;
        const int row = first_row + query / group;
        const int head = kv_head * group + query % group;
        q_tile[i] = q[(size_t(row) * n_heads + head) * DK + i % DK];
    }

    // The starts and ends of the ranges ascend with the row, so the first and the last row of this
    // block tell which keys some query sees, and which all of them see.
    const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, first_row);
    const KeyRange first_keys =
        key_range(row_view(k_plane, v_plane, len_d, base_d, table, first_row + first_query / group),
                  window, counted, capacity);
    const KeyRange last_keys =
        key_range(row_view(k_plane, v_plane, len_d, base_d, table, last_row), window, counted,
                  capacity);
    const int64_t key_start = first_keys.start, shared_start = last_keys.start;
    const int64_t key_end = last_keys.end, shared_end = first_keys.end;
    const int32_t slot_zero = chunk_of(key_range(view, window, counted, capacity).start);
    const ChunkRange chunks = chunk_range({key_start, key_end});
    const int64_t k_row = int64_t(n_kv_heads) * (DK / BLOCK_ELEMENTS) * block_bytes<KF>();
    const int64_t v_row = int64_t(n_kv_heads) * (DV / BLOCK_ELEMENTS) * block_bytes<VF>();
    const uint8_t* k_head = view.k + kv_head * (DK / BLOCK_ELEMENTS) * block_bytes<KF>();
    const uint8_t* v_head = view.v + kv_head * (DV / BLOCK_ELEMENTS) * block_bytes<VF>();

    const int score_key = thread % S::TILE;
    const int score_part = thread / S::TILE;
    const int quad = thread % S::QUADS;
    const int split = thread / S::QUADS;

    for (int32_t chunk = chunks.first + int(blockIdx.x); chunk < chunks.last; chunk += gridDim.x) {
        const int64_t chunk_start = chunk_begin(chunk);
        const int64_t chunk_end = chunk_begin(chunk + 1);
        float maximum[QT / ATTEND_WARPS];
        float weight_sum[QT / ATTEND_WARPS];
#pragma unroll
        for (int u = 0; u < QT / ATTEND_WARPS; u++) maximum[u] = -INF_F32, weight_sum[u] = 0.0f;
        float4 sums[QT];
#pragma unroll
        for (int i = 0; i < QT; i++) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        for (int64_t tile_key = chunk_start; tile_key < chunk_end; tile_key += S::TILE) {
            // Keys of the tile that any query sees: the only ones that are read.
            const int from = key_start <= tile_key ? 0
                             : key_start - tile_key < S::TILE ? int(key_start - tile_key)
                                                              : S::TILE;
            const int to = key_end <= tile_key ? 0
                           : key_end - tile_key < S::TILE ? int(key_end - tile_key)
                                                          : S::TILE;
            if (from >= to) continue;  // the same for all threads
            const int64_t physical = tile_key - view.base;

            __syncthreads();  // the tile is free (and q and the ranges are there)
            decode_tile<KF, DK, S::TILE, S::PITCH>(k_head + physical * k_row, k_row, tile, from, to);
            __syncthreads();

            if (score_key >= from && score_key < to) {
                const float4* mine = reinterpret_cast<const float4*>(
                    tile + score_key * S::PITCH + score_part * S::PART);
                float4 key[S::PART / 4];
#pragma unroll
                for (int d = 0; d < S::PART / 4; d++) key[d] = mine[d];
#pragma unroll 1
                for (int i = 0; i < n_queries; i++) {
                    const float4* query =
                        reinterpret_cast<const float4*>(q_tile + i * DK + score_part * S::PART);
                    float4 dot = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                    for (int d = 0; d < S::PART / 4; d++) {
                        const float4 a = query[d];
                        dot.x = fmaf(a.x, key[d].x, dot.x);
                        dot.y = fmaf(a.y, key[d].y, dot.y);
                        dot.z = fmaf(a.z, key[d].z, dot.z);
                        dot.w = fmaf(a.w, key[d].w, dot.w);
                    }
                    scores[(score_part * QT + i) * S::TILE + score_key] =
                        (dot.x + dot.y) + (dot.z + dot.w);
                }
            }
            __syncthreads();

            // One warp per query: scores become weights, beside the running maximum.
#pragma unroll
            for (int u = 0; u < QT / ATTEND_WARPS; u++) {
                const int i = warp + u * ATTEND_WARPS;
                if (i >= n_queries) break;
                constexpr int PER_LANE = (S::TILE + WARP_LANES - 1) / WARP_LANES;
                float score[PER_LANE];
                float tile_max = -INF_F32;
#pragma unroll
                for (int t = 0; t < PER_LANE; t++) {
                    const int key = lane + t * WARP_LANES;
                    score[t] = -INF_F32;
                    if (key < S::TILE && tile_key + key >= starts[i] && tile_key + key < ends[i]) {
                        float dot = scores[i * S::TILE + key];
#pragma unroll
                        for (int p = 1; p < S::PARTS; p++)
                            dot = dot + scores[(p * QT + i) * S::TILE + key];
                        score[t] = dot * scale;
                        if (softcap > 0.0f) score[t] = softcap * tanhf(score[t] / softcap);
                    }
                    tile_max = score[t] > tile_max ? score[t] : tile_max;
                }
                tile_max = warp_max(tile_max);
                const float high = tile_max > maximum[u] ? tile_max : maximum[u];
                // With no key yet the maximum is -inf, which must not meet itself in a difference.
                const float pivot = high == -INF_F32 ? 0.0f : high;
                const float alpha = exp2f((maximum[u] - pivot) * LOG2_E);
                weight_sum[u] = weight_sum[u] * alpha;
                maximum[u] = high;
#pragma unroll
                for (int t = 0; t < PER_LANE; t++) {
                    const int key = lane + t * WARP_LANES;
                    const float weight = exp2f((score[t] - pivot) * LOG2_E);
                    weight_sum[u] = weight_sum[u] + weight;
                    if (key < S::TILE) scores[i * S::TILE + key] = weight;
                }
                if (lane == 0) alphas[i] = alpha;
            }
            decode_tile<VF, DV, S::TILE, S::PITCH>(v_head + physical * v_row, v_row, tile, from, to);
            __syncthreads();

            if (split < S::SPLITS) {
#pragma unroll
                for (int i = 0; i < QT; i++) {
                    if (i >= n_queries) break;
                    const float alpha = alphas[i];
                    sums[i].x *= alpha, sums[i].y *= alpha, sums[i].z *= alpha, sums[i].w *= alpha;
                }
                const float* values = tile + split * S::SPLIT * S::PITCH + quad * 4;
                const float* weights = scores + split * S::SPLIT;
                if (tile_key >= shared_start && tile_key + S::TILE <= shared_end) {
                    for (int j = 0; j < S::SPLIT; j += 4) {
                        float4 v[4];
#pragma unroll
                        for (int t = 0; t < 4; t++)
                            v[t] = *reinterpret_cast<const float4*>(values + (j + t) * S::PITCH);
#pragma unroll
                        for (int i = 0; i < QT; i++) {
                            if (i >= n_queries) break;
                            const float4 w =
                                *reinterpret_cast<const float4*>(weights + i * S::TILE + j);
                            add_scaled(sums[i], w.x, v[0]);
                            add_scaled(sums[i], w.y, v[1]);
                            add_scaled(sums[i], w.z, v[2]);
                            add_scaled(sums[i], w.w, v[3]);
                        }
                    }
                } else {
                    for (int j = 0; j < S::SPLIT; j++) {
                        const int key = split * S::SPLIT + j;
                        if (key >= from && key < to) {
                            const float4 v = *reinterpret_cast<const float4*>(values + j * S::PITCH);
#pragma unroll
                            for (int i = 0; i < QT; i++) {
                                if (i >= n_queries) break;
                                if (tile_key + key >= starts[i] && tile_key + key < ends[i])
                                    add_scaled(sums[i], weights[i * S::TILE + j], v);
                            }
                        }
                    }
                }
            }
        }

        __syncthreads();  // the last tile of V is free: it takes the sums of the splits
        if (split < S::SPLITS) {
#pragma unroll
            for (int i = 0; i < QT; i++) {
                if (i >= n_queries) break;
                *reinterpret_cast<float4*>(tile + (split * QT + i) * DV + quad * 4) = sums[i];
            }
        }
        __syncthreads();
        const int32_t slot = chunk - slot_zero;
        if (slot < n_slots) {
            for (int at = thread; at < n_queries * DV; at += ATTEND_THREADS) {
                const int i = at / DV;
                const int row = first_row + (first_query + i) / group;
                const int head = kv_head * group + (first_query + i) % group;
                float sum = tile[i * DV + at % DV];
#pragma unroll
                for (int s = 1; s < S::SPLITS; s++) sum = sum + tile[(s * QT + i) * DV + at % DV];
                partial[((size_t(row) * n_heads + head) * n_slots + slot) * (DV + 2) + at % DV] = sum;
            }
        }
#pragma unroll
        for (int u = 0; u < QT / ATTEND_WARPS; u++) {
            const int i = warp + u * ATTEND_WARPS;
            if (i >= n_queries) break;
            const float total = warp_sum(weight_sum[u]);
            if (lane == 0 && slot < n_slots) {
                const int row = first_row + (first_query + i) / group;
                const int head = kv_head * group + (first_query + i) % group;
                float* at = partial + ((size_t(row) * n_heads + head) * n_slots + slot) * (DV + 2) + DV;
                at[0] = maximum[u];
                at[1] = total;
            }
        }
    }
}

constexpr int COMBINE_THREADS = 128;

// Joins the chunks of each row and head. Grid (n_heads, n_rows), 128 threads; parameters as above.
//   sinks  f32 [n_heads] or null: a logit per head that takes weight and has no value
//   out    f32 [n_rows, n_heads, DV]; 0 for a row without keys; NaN if n_slots is too small
//   lse    f32 [n_rows, n_heads] or null: log of the sum of exp(score), the sink included; -inf for
//          a row without keys and sink
template <int DV>
__global__ void __launch_bounds__(COMBINE_THREADS)
    attend_combine(const float* __restrict__ partial, const float* NULLABLE sinks,
                   float* __restrict__ out, float* NULLABLE lse, int32_t capacity, int32_t window,
                   int32_t counted, const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                   const uint64_t* NULLABLE table, int32_t n_slots) {
    constexpr int QUADS = DV / 4;
    constexpr int SPLITS = COMBINE_THREADS / QUADS;  // chunk c belongs to split c % SPLITS
    __shared__ float maxima[COMBINE_THREADS];
    __shared__ float4 sums[SPLITS][QUADS];
    __shared__ float totals[SPLITS];
    const int thread = threadIdx.x;
    const int head = blockIdx.x;
    const int row = blockIdx.y;
    const int n_heads = gridDim.x;
    const KeyRange keys =
        key_range(row_view(nullptr, nullptr, len_d, base_d, table, row), window, counted, capacity);
    const ChunkRange chunks = chunk_range(keys);
    const int32_t slot_zero =
        table != nullptr
            ? chunks.first
            : chunk_of(key_range(row_view(nullptr, nullptr, len_d, base_d, table, 0), window,
                                 counted, capacity).start);
    const bool fits = chunks.last - slot_zero <= n_slots;
    const int32_t last = fits ? chunks.last : chunks.first;
    const float* parts = partial + (size_t(row) * n_heads + head) * n_slots * (DV + 2);

    float high = sinks != nullptr ? sinks[head] : -INF_F32;
    for (int32_t c = chunks.first + thread; c < last; c += COMBINE_THREADS) {
        const float m = parts[size_t(c - slot_zero) * (DV + 2) + DV];
        high = m > high ? m : high;
    }
    maxima[thread] = high;
    __syncthreads();
    const int busy = last - chunks.first < COMBINE_THREADS ? last - chunks.first : COMBINE_THREADS;
    for (int i = 0; i < busy; i++) high = maxima[i] > high ? maxima[i] : high;
    const float pivot = high == -INF_F32 ? 0.0f : high;

    const int quad = thread % QUADS;
    const int split = thread / QUADS;
    if (split < SPLITS) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float total = 0.0f;
        const int32_t behind = (split - chunks.first % SPLITS + SPLITS) % SPLITS;
        for (int32_t c = chunks.first + behind; c < last; c += SPLITS) {
            const float* part = parts + size_t(c - slot_zero) * (DV + 2);
            const float m = part[DV];
            const float l = part[DV + 1];
            if (l != 0.0f) {  // else the row sees no key of this chunk
                const float weight = exp2f((m - pivot) * LOG2_E);
                const float2 a = *reinterpret_cast<const float2*>(part + quad * 4);
                const float2 b = *reinterpret_cast<const float2*>(part + quad * 4 + 2);
                add_scaled(sum, weight, make_float4(a.x, a.y, b.x, b.y));
                total = fmaf(weight, l, total);
            }
        }
        sums[split][quad] = sum;
        if (quad == 0) totals[split] = total;
    }
    __syncthreads();
    float total = totals[0];
#pragma unroll
    for (int s = 1; s < SPLITS; s++) total = total + totals[s];
    if (sinks != nullptr) total = total + exp2f((sinks[head] - pivot) * LOG2_E);
    if (thread < QUADS) {
        float4 sum = sums[0][thread];
#pragma unroll
        for (int s = 1; s < SPLITS; s++) {
            const float4 more = sums[s][thread];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        float* to = out + (size_t(row) * n_heads + head) * DV + thread * 4;
        const bool empty = total == 0.0f;
        to[0] = !fits ? NAN_F32 : empty ? 0.0f : sum.x / total;
        to[1] = !fits ? NAN_F32 : empty ? 0.0f : sum.y / total;
        to[2] = !fits ? NAN_F32 : empty ? 0.0f : sum.z / total;
        to[3] = !fits ? NAN_F32 : empty ? 0.0f : sum.w / total;
    }
    if (thread == 0 && lse != nullptr)
        lse[row * n_heads + head] =
            !fits ? NAN_F32 : total == 0.0f ? -INF_F32 : pivot + logf(total);
}
