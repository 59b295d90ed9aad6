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
#include "common/dependent.cuh"
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

// A tile of keys on its way from memory, one head of D elements each: what one thread holds of it.
// load() asks for the rows [from, to), store() decodes them into shared memory when they are there.
template <int F, int D, int TILE, int PITCH>
struct TileInFlight {
    static constexpr int BLOCKS = D / BLOCK_ELEMENTS;
    static constexpr int PAIRS = ATTEND_THREADS / (2 * BLOCK_QUARTERS * BLOCKS);
    static constexpr int ROWS = 2 * PAIRS;  // that the threads take at a time
    static constexpr int N = (TILE + ROWS - 1) / ROWS;
    // Eight neighbouring threads take one block of two rows. Their distance is such that the 16-byte
    // pieces which they store lie in different banks (a row begins 4 banks behind the one before).
    static constexpr int APART = !has_nibbles<F>() ? 1 : PAIRS % 4 == 0 ? 4 : PAIRS;
    Packed<F> packed[N];

    __device__ __forceinline__ static int first_row() {
        const int pair = threadIdx.x / (2 * BLOCK_QUARTERS * BLOCKS);
        const int second = threadIdx.x / BLOCK_QUARTERS % 2;
        return pair % APART + second * APART + pair / APART * 2 * APART;
    }
    __device__ __forceinline__ static int block() {
        return threadIdx.x / (2 * BLOCK_QUARTERS) % BLOCKS;
    }
    __device__ __forceinline__ static int quarter() { return threadIdx.x % BLOCK_QUARTERS; }

    __device__ __forceinline__ void load(const uint8_t* head, int64_t row_bytes, int from, int to) {
        const uint8_t* column = head + block() * block_bytes<F>();
#pragma unroll
        for (int i = 0; i < N; i++) {
            // Rows outside the range ask for the nearest one inside: no branch parts the loads.
            int key = first_row() + i * ROWS;
            key = key < from ? from : key < to ? key : to - 1;
            packed[i] = load_quarter<F>(column + key * row_bytes, quarter());
        }
    }
    __device__ __forceinline__ void store(float* tile, int from, int to) const {
        float* row = tile + first_row() * PITCH + block() * BLOCK_ELEMENTS;
        float* low = row + quarter_low<F>(quarter());
        float* high = row + quarter_high<F>(quarter());
        const bool busy = threadIdx.x < ROWS * BLOCK_QUARTERS * BLOCKS;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int key = first_row() + i * ROWS;
            if (busy && key >= from && key < to) {
                float x[8];
                unpack_quarter<F>(packed[i], quarter(), x);
                *reinterpret_cast<float4*>(low + i * ROWS * PITCH) =
                    make_float4(x[0], x[1], x[2], x[3]);
                *reinterpret_cast<float4*>(high + i * ROWS * PITCH) =
                    make_float4(x[4], x[5], x[6], x[7]);
            }
        }
    }
};

// Where a position lies in a tile: 0 for all before it, TILE for all behind it.
template <int TILE>
__device__ __forceinline__ int in_tile(int64_t position, int64_t tile_key) {
    const int64_t offset = position - tile_key;
    return offset <= 0 ? 0 : offset < TILE ? int(offset) : TILE;
}

__device__ __forceinline__ void add_scaled(float4& sum, float weight, const float4& v) {
    sum.x = fmaf(weight, v.x, sum.x);
    sum.y = fmaf(weight, v.y, sum.y);
    sum.z = fmaf(weight, v.z, sum.z);
    sum.w = fmaf(weight, v.w, sum.w);
}

// Dot products of one key with N queries over D elements. The order of a sum does not depend on N.
template <int N, int D>
__device__ __forceinline__ void score_queries(const float* key, const float* query, int query_pitch,
                                              float* score, int score_pitch) {
    float4 dots[N];
#pragma unroll
    for (int i = 0; i < N; i++) dots[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        const float4 k = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float4 q = *reinterpret_cast<const float4*>(query + i * query_pitch + d);
            dots[i].x = fmaf(q.x, k.x, dots[i].x);
            dots[i].y = fmaf(q.y, k.y, dots[i].y);
            dots[i].z = fmaf(q.z, k.z, dots[i].z);
            dots[i].w = fmaf(q.w, k.w, dots[i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        score[i * score_pitch] = (dots[i].x + dots[i].y) + (dots[i].z + dots[i].w);
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
__global__ void __launch_bounds__(ATTEND_THREADS, 2)
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

    admit_successor();
    await_predecessor();
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
        float maximum[QT / ATTEND_WARPS];
        float weight_sum[QT / ATTEND_WARPS];
#pragma unroll
        for (int u = 0; u < QT / ATTEND_WARPS; u++) maximum[u] = -INF_F32, weight_sum[u] = 0.0f;
        float4 sums[QT];
#pragma unroll
        for (int i = 0; i < QT; i++) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        // Tiles with a key that any query sees, and of them only those keys, are read.
        const int64_t chunk_start = chunk_begin(chunk);
        const int64_t chunk_end = chunk_begin(chunk + 1);
        const int64_t stop = key_end < chunk_end ? key_end : chunk_end;
        const int64_t begin =
            key_start > chunk_start ? key_start - key_start % S::TILE : chunk_start;
        for (int64_t tile_key = begin; tile_key < stop; tile_key += S::TILE) {
            const int from = in_tile<S::TILE>(key_start, tile_key);
            const int to = in_tile<S::TILE>(key_end, tile_key);
            const int64_t physical = tile_key - view.base;
            TileInFlight<KF, DK, S::TILE, S::PITCH> k_tile;
            TileInFlight<VF, DV, S::TILE, S::PITCH> v_tile;
            k_tile.load(k_head + physical * k_row, k_row, from, to);
            v_tile.load(v_head + physical * v_row, v_row, from, to);
            __syncthreads();  // the tile is free (and q and the ranges are there)
            k_tile.store(tile, from, to);
            __syncthreads();

            if (score_key >= from && score_key < to) {
                const float* key = tile + score_key * S::PITCH + score_part * S::PART;
                const float* query = q_tile + score_part * S::PART;
                float* score = scores + score_part * QT * S::TILE + score_key;
                int i = 0;
#pragma unroll 1
                for (; i + 4 <= n_queries; i += 4)
                    score_queries<4, S::PART>(key, query + i * DK, DK, score + i * S::TILE, S::TILE);
                if (i + 3 == n_queries) {
                    score_queries<3, S::PART>(key, query + i * DK, DK, score + i * S::TILE, S::TILE);
                    i += 3;
                }
#pragma unroll 1
                for (; i < n_queries; i++)
                    score_queries<1, S::PART>(key, query + i * DK, DK, score + i * S::TILE, S::TILE);
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
            v_tile.store(tile, from, to);
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
#pragma unroll 1
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
                } else if (key_start == shared_start && key_end == shared_end) {
                    const int low = from - split * S::SPLIT;
                    const int high = to - split * S::SPLIT;
#pragma unroll 4
                    for (int j = low > 0 ? low : 0; j < (high < S::SPLIT ? high : S::SPLIT); j++) {
                        const float4 v = *reinterpret_cast<const float4*>(values + j * S::PITCH);
#pragma unroll
                        for (int i = 0; i < QT; i++) {
                            if (i >= n_queries) break;
                            add_scaled(sums[i], weights[i * S::TILE + j], v);
                        }
                    }
                } else {
#pragma unroll 1
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

// Joins the chunks of each row and head. Grid (n_heads, n_rows), 2 * DV threads; parameters as above.
//   sinks  f32 [n_heads] or null: a logit per head that takes weight and has no value
//   out    f32 [n_rows, n_heads, DV]; 0 for a row without keys; NaN if n_slots is too small
//   lse    f32 [n_rows, n_heads] or null: log of the sum of exp(score), the sink included; -inf for
//          a row without keys and sink
template <int DV>
__global__ void __launch_bounds__(2 * DV)
    attend_combine(const float* __restrict__ partial, const float* NULLABLE sinks,
                   float* __restrict__ out, float* NULLABLE lse, int32_t capacity, int32_t window,
                   int32_t counted, const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                   const uint64_t* NULLABLE table, int32_t n_slots) {
    constexpr int QUADS = DV / 4;
    constexpr int SPLITS = 8;  // chunk c belongs to split c % 8
    constexpr int THREADS = SPLITS * QUADS;
    __shared__ float maxima[THREADS];
    __shared__ float4 sums[SPLITS][QUADS];
    __shared__ float totals[SPLITS];
    admit_successor();
    await_predecessor();
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
    for (int32_t c = chunks.first + thread; c < last; c += THREADS) {
        const float m = parts[size_t(c - slot_zero) * (DV + 2) + DV];
        high = m > high ? m : high;
    }
    maxima[thread] = high;
    __syncthreads();
    const int busy = last - chunks.first < THREADS ? last - chunks.first : THREADS;
    for (int i = 0; i < busy; i++) high = maxima[i] > high ? maxima[i] : high;
    const float pivot = high == -INF_F32 ? 0.0f : high;

    const int quad = thread % QUADS;
    const int split = thread / QUADS;
    float4 partial_sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float partial_total = 0.0f;
    const int32_t behind = (split - chunks.first % SPLITS + SPLITS) % SPLITS;
#pragma unroll 4
    for (int32_t c = chunks.first + behind; c < last; c += SPLITS) {
        const float* part = parts + size_t(c - slot_zero) * (DV + 2);
        const float m = part[DV];
        const float l = part[DV + 1];
        const float2 a = *reinterpret_cast<const float2*>(part + quad * 4);
        const float2 b = *reinterpret_cast<const float2*>(part + quad * 4 + 2);
        if (l != 0.0f) {  // else the row sees no key of this chunk
            const float weight = exp2f((m - pivot) * LOG2_E);
            add_scaled(partial_sum, weight, make_float4(a.x, a.y, b.x, b.y));
            partial_total = fmaf(weight, l, partial_total);
        }
    }
    sums[split][quad] = partial_sum;
    if (quad == 0) totals[split] = partial_total;
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
