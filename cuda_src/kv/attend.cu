// Split-KV decode attention over a quantised plane, in class `exact`: q, scores and weights in f32.
//
// A thread block owns one kv head and up to QT queries (a query = one row of one query head of the
// group), and walks chunks of keys. A chunk is cut into tiles of keys; each tile of K, then of V, is
// decoded once into shared memory for all queries. Every chunk leaves a maximum, a sum of weights
// and a weighted sum of V. The chunks of a row are joined in a fixed order: with tickets by the block
// that finishes last, else by attend_combine.
//
// No result depends on anything but the row's own keys: tiles and chunks lie at absolute positions,
// keys outside a row's range are left out of its sums (not multiplied by 0, so a NaN there stays
// there), and the order of every sum is fixed. A row therefore gets the same bits alone and among
// others, on a ring and on a flat plane, with a window and with the other keys masked.
//
// A short context is a chain of steps that wait for each other: many threads, each with little to do.
#include "common/attend_join.cuh"
#include "common/block32.cuh"
#include "common/counters.cuh"
#include "common/dependent.cuh"
#include "common/reduce.cuh"
#include "common/ticket.cuh"

constexpr int ATTEND_THREADS = 256;
constexpr int ATTEND_WARPS = ATTEND_THREADS / WARP_LANES;
constexpr int HALVES = 2;  // of the threads: one sums V for the even queries of a block, one for the odd
// Blocks per multiprocessor of a few queries: their registers shall suffice for that many.
#if MEMRA_CUDA && __CUDA_ARCH__ >= 1000
constexpr int FEW_RESIDENT = 1;
#else
constexpr int FEW_RESIDENT = 2;
#endif

// The shape of the work for head sizes DK, DV and QT queries. Only QT may vary between launches that
// must agree: nothing of a single query's arithmetic depends on it.
template <int DK, int DV, int QT>
struct AttendShape {
    static constexpr int WIDEST = DK > DV ? DK : DV;
    static constexpr int TILE = WIDEST <= 64 ? 128 : WIDEST <= 128 ? 64 : WIDEST <= 256 ? 32 : 16;
    static constexpr int PITCH = WIDEST + 4;  // rows of a tile start 4 banks apart
    static constexpr int PARTS = TILE >= 32 ? ATTEND_THREADS / TILE : 8;  // threads that share a dot product
    static constexpr int PART = DK / PARTS;
    static constexpr int QUADS = DV / 4;  // threads that share the channels of a row of V
    static constexpr int TEAMS = ATTEND_THREADS / HALVES / QUADS;
    static constexpr int FIT = TEAMS < TILE / 4 ? TEAMS : TILE / 4;
    static constexpr int SPLITS = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
    static constexpr int SPLIT = TILE / SPLITS;  // keys of a tile that one of them sums
    static constexpr int WEIGHED = (QT + ATTEND_WARPS - 1) / ATTEND_WARPS;  // queries of a warp
    static constexpr int RESIDENT = QT == 4 && WIDEST % 64 == 0 ? FEW_RESIDENT : 1;
    static constexpr int JOINED = DV <= 256 ? 4 : 2;  // queries whose chunks are joined at a time
    // Shared memory, in floats: tile (later the partial sums), q, scores and weights, rescaling.
    static constexpr int TILE_FLOATS =
        TILE * PITCH > SPLITS * QT * DV ? TILE * PITCH : SPLITS * QT * DV;
    static constexpr int Q_AT = TILE_FLOATS;
    static constexpr int SCORE_AT = Q_AT + QT * DK;
    static constexpr int ALPHA_AT = SCORE_AT + PARTS * QT * TILE;
    static constexpr int FLOATS = ALPHA_AT + QT;
    static_assert(DK % 32 == 0 && DV % 32 == 0 && PART % 4 == 0 && SPLIT % 4 == 0, "unsupported head size");
    static_assert(WIDEST <= 512 && QT % 4 == 0, "unsupported shape");
    static_assert(TILE_FLOATS >= JOIN_SPLITS * JOINED * (DV + 2), "no room to join");
};

// Where a position lies in a tile: 0 for all before it, TILE for all behind it.
template <int TILE>
__device__ __forceinline__ int in_tile(int position, int tile_key) {
    return position <= tile_key ? 0 : min(position - tile_key, TILE);
}

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

    // physical: of the tile's first key, which a ring may not have
    __device__ __forceinline__ void load(const uint8_t* head, int row_bytes, int physical, int from,
                                         int to) {
        const uint8_t* column = head + block() * block_bytes<F>();
#pragma unroll
        for (int i = 0; i < N; i++) {
            // Rows outside the range ask for the nearest one inside: no branch parts the loads.
            int key = first_row() + i * ROWS;
            key = key < from ? from : key < to ? key : to - 1;
            const uint64_t at = uint64_t(uint32_t(physical + key)) * uint32_t(row_bytes);
            packed[i] = load_quarter<F>(column + at, quarter());
        }
    }
    // Calls then(i, block) for the blocks of rows [from, to) that the thread has: most threads have none.
    template <class Then>
    __device__ __forceinline__ static void of_few(const uint8_t* head, int row_bytes, int physical, int from,
                                                  int to, const Then& then) {
        const uint8_t* column = head + block() * block_bytes<F>();
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int key = first_row() + i * ROWS;
            const uint64_t at = uint64_t(uint32_t(physical + key)) * uint32_t(row_bytes);
            if (key >= from && key < to) then(i, column + at);
        }
    }
    __device__ __forceinline__ void load_few(const uint8_t* head, int row_bytes, int physical, int from, int to) {
        of_few(head, row_bytes, physical, from, to,
               [&](int i, const uint8_t* block) { packed[i] = load_quarter<F>(block, quarter()); });
    }
    // Brings nearer what load_few() will ask for, whatever it holds yet: the rest of a sector that was written in
    // part may have to come from memory.
    __device__ __forceinline__ static void near_few(const uint8_t* head, int row_bytes, int physical, int from,
                                                    int to) {
        of_few(head, row_bytes, physical, from, to, [](int, const uint8_t* block) {
            prefetch_line(block + quarter() * (block_bytes<F>() / BLOCK_QUARTERS));
        });
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

// Keys [start, end) that some query of a block sees; all of them see [shared_start, shared_end).
struct BlockKeys {
    int start, shared_start, shared_end, end;
};

// Of rows [first, last] behind that of the view: the starts and ends of their ranges ascend.
__device__ __forceinline__ BlockKeys block_keys(const RowView& view, int first, int last, int32_t window,
                                                int32_t counted, int32_t capacity) {
    const auto keys = [&](int row) {
        return key_range({view.k, view.v, view.slot + row, view.base}, window, counted, capacity);
    };
    const KeyRange low = keys(first), high = keys(last);
    return {int(low.start), int(high.start), int(low.end), int(high.end)};
}

// The same number, of which the compiler knows nothing: what follows from it is worked out where it is
// needed, not kept in registers that are scarce.
__device__ __forceinline__ int forget(int x) {
#if MEMRA_CUDA
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Dot products of one key with four queries over D elements.
template <int D>
__device__ __forceinline__ void score_four(const float* key, const float* query, int query_pitch,
                                           float* score, int score_pitch) {
    float4 dots[4];
#pragma unroll
    for (int i = 0; i < 4; i++) dots[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        const float4 k = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 q = *reinterpret_cast<const float4*>(query + i * query_pitch + d);
            dots[i].x = fmaf(q.x, k.x, dots[i].x);
            dots[i].y = fmaf(q.y, k.y, dots[i].y);
            dots[i].z = fmaf(q.z, k.z, dots[i].z);
            dots[i].w = fmaf(q.w, k.w, dots[i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        score[i * score_pitch] = (dots[i].x + dots[i].y) + (dots[i].z + dots[i].w);
}

// Grid (x: any number of blocks, which share the chunks; kv heads; query blocks), 256 threads,
// AttendShape::FLOATS * 4 bytes of dynamic shared memory. Query blocks: ceil(n_rows * group / QT), or
// with a table n_rows * ceil(group / QT).
//   q          f32 [n_rows, n_kv_heads * group, DK], 16-byte aligned
//   k_plane    u8 [capacity, row bytes] of n_kv_heads * DK elements; v_plane with DV. Both null and
//              len_d null when there is a table (common/counters.cuh)
//   window     keys a row sees at most; 0 or less: all
//   counted    rows by which len_d already counts this launch's own (0, or n_rows)
//   scale      factor of q . k; softcap > 0: cap * tanh(score / cap) afterwards
//   partial    f32 [n_rows, n_heads, n_slots, DV] : weighted sums of V, then [n_rows, n_heads, n_slots, 2]:
//              maximum, sum of weights; 16-byte aligned;
//              slot = chunk - first chunk of row 0 (with a table: of the row itself)
//   tickets    u32 [query blocks, kv heads], zero before and after; null: attend_combine joins the chunks
//   sinks      f32 [n_heads] or null: a logit per head that takes weight and has no value
//   out        f32 [n_rows, n_heads, DV]; 0 for a row without keys; NaN if n_slots is too small
//   lse        f32 [n_rows, n_heads] or null: log of the sum of exp(score), the sink included; -inf for
//              a row without keys and sink
//   settled    whether counters, and rows below the launch's own, were written before the last launch that did
//              not start early, so that they may be read before the predecessor has ended
template <int KF, int VF, int DK, int DV, int QT>
__global__ void __launch_bounds__(ATTEND_THREADS, AttendShape<DK, DV, QT>::RESIDENT)
    attend_partial(const float* q, const uint8_t* NULLABLE k_plane,
                   const uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t n_kv_heads,
                   int32_t group, int32_t capacity, int32_t window, int32_t counted, float scale,
                   float softcap, const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                   const uint64_t* NULLABLE table, float* partial, int32_t n_slots,
                   uint32_t* NULLABLE tickets, const float* NULLABLE sinks, float* NULLABLE out,
                   float* NULLABLE lse, int32_t settled) {
    typedef AttendShape<DK, DV, QT> S;
    DYN_SMEM(float, shared);
    float* const tile = shared;
    float* const q_tile = shared + S::Q_AT;
    float* const scores = shared + S::SCORE_AT;  // [PARTS][QT][TILE]; plane 0 becomes the weights
    float* const alphas = shared + S::ALPHA_AT;
    __shared__ int2 seen[QT];      // keys [x, y) of each query
    __shared__ int row_heads[QT];  // row * n_heads + head of each query
    __shared__ float2 chunk_marks[QT];  // maximum and sum of weights of a chunk
    __shared__ int slot_zero;           // chunk of slot 0
    __shared__ bool is_last;

    admit_successor();
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
    const int n_queries = min(all_queries - first_query, QT);
    // A division is slow: this one is exact below 2^31 / group.
    const uint32_t inverse = all_queries == group ? 0 : 0x7FFFFFFFu / uint32_t(group) + 1;
    const auto row_of = [&](int i) { return int(uint64_t(uint32_t(first_query + i)) * inverse >> 31); };
    const auto row_head = [&](int i) {
        const int row = row_of(i);
        return (first_row + row) * n_heads + kv_head * group + (first_query + i - row * group);
    };
    const int low_row = row_of(0), high_row = row_of(n_queries - 1);
    const int k_row = n_kv_heads * (DK / BLOCK_ELEMENTS) * block_bytes<KF>();
    const int v_row = n_kv_heads * (DV / BLOCK_ELEMENTS) * block_bytes<VF>();
    const int k_column = kv_head * (DK / BLOCK_ELEMENTS) * block_bytes<KF>();
    const int v_column = kv_head * (DV / BLOCK_ELEMENTS) * block_bytes<VF>();
    TileInFlight<KF, DK, S::TILE, S::PITCH> k_tile;
    TileInFlight<VF, DV, S::TILE, S::PITCH> v_tile;
    // The first tile of a chunk with a key that some query sees.
    const auto first_tile = [&](const BlockKeys& keys, int chunk) {
        return max(keys.start & ~(S::TILE - 1), int(chunk_begin(chunk)));
    };

    if (!settled) await_predecessor();
    const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, first_row);
    const BlockKeys keys = block_keys(view, low_row, high_row, window, counted, capacity);
    if (thread < QT) {
        const int query = min(thread, n_queries - 1), row = row_of(query);
        const BlockKeys own = block_keys(view, row, row, window, counted, capacity);
        seen[thread] = thread < n_queries ? make_int2(own.start, own.end) : make_int2(0, 0);
        row_heads[thread] = row_head(query);
        if (thread == 0) slot_zero = chunk_of(block_keys(view, 0, 0, window, counted, capacity).start);
    }
    const ChunkRange chunks = chunk_range({keys.start, keys.end});
    const uint8_t* const k_head = global_pointer(view.k) + k_column;
    const uint8_t* const v_head = global_pointer(view.v) + v_column;
    const auto load = [&](int tile_key, int end) {
        const int from = in_tile<S::TILE>(keys.start, tile_key), to = in_tile<S::TILE>(end, tile_key);
        const int physical = tile_key - int(view.base);
        k_tile.load(k_head, k_row, physical, from, to);
        v_tile.load(v_head, v_row, physical, from, to);
    };
    const int first_chunk = chunks.first + int(blockIdx.x);
    const bool works = first_chunk < chunks.last;
    const int first_key = first_tile(keys, first_chunk);
    // The launch's own rows are what a predecessor still writes; of the first tile those below are taken early.
    int taken = 0;  // so many rows of the tile
    if (settled) {
        const int old = min(int(view.slot) - counted, keys.end);
        if (works && old > max(keys.start, first_key)) {
            load(first_key, old);
            taken = in_tile<S::TILE>(old, first_key);
            k_tile.store(tile, in_tile<S::TILE>(keys.start, first_key), taken);
            const int to = in_tile<S::TILE>(keys.end, first_key), physical = first_key - int(view.base);
            k_tile.near_few(k_head, k_row, physical, taken, to);
            v_tile.near_few(v_head, v_row, physical, taken, to);
        }
        await_predecessor();
    }
#pragma unroll 1
    for (int i = thread; i < QT * (DK / 4); i += ATTEND_THREADS) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < n_queries * (DK / 4))
            four = reinterpret_cast<const float4*>(q)[size_t(row_head(i / (DK / 4))) * (DK / 4) +
                                                      i % (DK / 4)];
        reinterpret_cast<float4*>(q_tile)[i] = four;
    }
    if (works && taken == 0) {
        load(first_key, keys.end);
    } else if (works) {
        const int to = in_tile<S::TILE>(keys.end, first_key), physical = first_key - int(view.base);
        k_tile.load_few(k_head, k_row, physical, taken, to);
        v_tile.load_few(v_head, v_row, physical, taken, to);
    }
    const auto parts = [&] { return partials_in<DV>(partial, n_rows * n_heads, n_slots); };
    // With one chunk there is nothing to join.
    const bool is_whole =
        tickets != nullptr && sinks == nullptr && chunks.last - chunks.first == 1;

#pragma unroll 1
    for (int chunk = first_chunk; chunk < chunks.last; chunk += gridDim.x) {
        float maximum[S::WEIGHED];
        float weight_sum[S::WEIGHED];
#pragma unroll
        for (int u = 0; u < S::WEIGHED; u++) maximum[u] = -INF_F32, weight_sum[u] = 0.0f;
        float4 sums[QT / HALVES];  // of the queries half + HALVES * o
#pragma unroll
        for (int o = 0; o < QT / HALVES; o++) sums[o] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        // Tiles with a key that any query sees, and of them only those keys, are read.
        const int stop = chunk + 1 < chunks.last ? int(chunk_begin(chunk + 1)) : keys.end;
        const int begin = first_tile(keys, chunk);
#pragma unroll 1
        for (int tile_key = begin; tile_key < stop; tile_key += S::TILE) {
            const int from = in_tile<S::TILE>(keys.start, tile_key);
            const int to = in_tile<S::TILE>(keys.end, tile_key);
            if (tile_key != first_key) __syncthreads();  // the tile is free
            k_tile.store(tile, max(from, taken), to);
            taken = 0;
            __syncthreads();

            const int scorer = forget(thread);
            const int score_key = scorer % S::TILE;
            const int score_part = scorer / S::TILE;
            if (score_part < S::PARTS && score_key >= from && score_key < to) {
                const float* key = tile + score_key * S::PITCH + score_part * S::PART;
                const float* query = q_tile + score_part * S::PART;
                float* score = scores + score_part * QT * S::TILE + score_key;
#pragma unroll 1
                for (int i = 0; i < n_queries; i += 4)
                    score_four<S::PART>(key, query + i * DK, DK, score + i * S::TILE, S::TILE);
            }
            __syncthreads();

            // One warp per query: scores become weights, beside the running maximum.
#pragma unroll
            for (int u = 0; u < S::WEIGHED; u++) {
                const int i = warp + u * ATTEND_WARPS;
                if (i >= n_queries) break;
                constexpr int PER_LANE = (S::TILE + WARP_LANES - 1) / WARP_LANES;
                const int2 range = seen[i];
                float score[PER_LANE];
                float tile_max = -INF_F32;
#pragma unroll
                for (int t = 0; t < PER_LANE; t++) {
                    const int key = lane + t * WARP_LANES;
                    score[t] = -INF_F32;
                    if (key < S::TILE && tile_key + key >= range.x && tile_key + key < range.y) {
                        float dot = scores[i * S::TILE + key];
#pragma unroll
                        for (int p = 1; p < S::PARTS; p++)
                            dot = dot + scores[(p * QT + i) * S::TILE + key];
                        score[t] = dot * scale;
                        if (softcap > 0.0f) score[t] = softcap * tanhf(score[t] / softcap);
                    }
                    tile_max = larger_number(tile_max, score[t]);
                }
                tile_max = warp_max(tile_max);
                const float high = larger_number(maximum[u], tile_max);
                const float alpha = weight_of(maximum[u], high);
                weight_sum[u] = weight_sum[u] * alpha;
                maximum[u] = high;
#pragma unroll
                for (int t = 0; t < PER_LANE; t++) {
                    const int key = lane + t * WARP_LANES;
                    const float weight = weight_of(score[t], high);
                    weight_sum[u] = weight_sum[u] + weight;
                    if (key < S::TILE) scores[i * S::TILE + key] = weight;
                }
                if (lane == 0) alphas[i] = alpha;
            }
            v_tile.store(tile, from, to);
            __syncthreads();
            // The next tile is on its way while this one is summed.
            int next_chunk = chunk, next_key = tile_key + S::TILE;
            if (next_key >= stop) {
                next_chunk += gridDim.x;
                next_key = first_tile(keys, next_chunk);
            }
            if (next_chunk < chunks.last) load(next_key, keys.end);

            const int me = forget(thread);
            const int quad = me % (ATTEND_THREADS / HALVES) % S::QUADS;
            const int half = me / (ATTEND_THREADS / HALVES);
            const int split = me % (ATTEND_THREADS / HALVES) / S::QUADS;
            if (split < S::SPLITS) {
                if (tile_key != begin) {
#pragma unroll
                    for (int o = 0; o < QT / HALVES; o++) {
                        const int i = half + HALVES * o;
                        if (i >= n_queries) break;
                        scale_all(sums[o], alphas[i]);
                    }
                }
                const float* values = tile + split * S::SPLIT * S::PITCH + quad * 4;
                const float* weights = scores + split * S::SPLIT;
                if (tile_key >= keys.shared_start && tile_key + S::TILE <= keys.shared_end) {
#pragma unroll 1
                    for (int j = 0; j < S::SPLIT; j += 4) {
                        float4 v[4];
#pragma unroll
                        for (int t = 0; t < 4; t++)
                            v[t] = *reinterpret_cast<const float4*>(values + (j + t) * S::PITCH);
#pragma unroll
                        for (int o = 0; o < QT / HALVES; o++) {
                            const int i = half + HALVES * o;
                            if (i >= n_queries) break;
                            const float4 w =
                                *reinterpret_cast<const float4*>(weights + i * S::TILE + j);
                            add_scaled(sums[o], w.x, v[0]);
                            add_scaled(sums[o], w.y, v[1]);
                            add_scaled(sums[o], w.z, v[2]);
                            add_scaled(sums[o], w.w, v[3]);
                        }
                    }
                } else {
                    const int first_key = tile_key + split * S::SPLIT;
                    const int low = max(from - split * S::SPLIT, 0);
                    const int high = min(to - split * S::SPLIT, S::SPLIT);
                    int2 range[QT / HALVES];
#pragma unroll
                    for (int o = 0; o < QT / HALVES; o++) {
                        range[o] = seen[half + HALVES * o];
                        range[o].x -= first_key, range[o].y -= first_key;
                    }
#pragma unroll 1
                    for (int j = low & ~3; j < high; j += 4) {
                        float4 v[4];
#pragma unroll
                        for (int t = 0; t < 4; t++) {
                            const int key = max(low, min(j + t, high - 1));
                            v[t] = *reinterpret_cast<const float4*>(values + key * S::PITCH);
                        }
#pragma unroll
                        for (int o = 0; o < QT / HALVES; o++) {
                            const int i = half + HALVES * o;
                            if (i >= n_queries) break;
                            const float4 four = *reinterpret_cast<const float4*>(weights + i * S::TILE + j);
                            const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                            for (int t = 0; t < 4; t++)
                                if (j + t >= range[o].x && j + t < range[o].y) add_scaled(sums[o], w[t], v[t]);
                        }
                    }
                }
            }
        }

        __syncthreads();  // the last tile of V is free: it takes the sums of the splits
        float4* const split_sums = reinterpret_cast<float4*>(tile);
        const int me = forget(thread);
        const int quad = me % (ATTEND_THREADS / HALVES) % S::QUADS;
        const int half = me / (ATTEND_THREADS / HALVES);
        const int split = me % (ATTEND_THREADS / HALVES) / S::QUADS;
        if (split < S::SPLITS) {
#pragma unroll
            for (int o = 0; o < QT / HALVES; o++) {
                const int i = half + HALVES * o;
                if (i >= n_queries) break;
                split_sums[(split * QT + i) * S::QUADS + quad] = sums[o];
            }
        }
        const int slot = chunk - slot_zero;
#pragma unroll
        for (int u = 0; u < S::WEIGHED; u++) {
            const int i = warp + u * ATTEND_WARPS;
            if (i >= n_queries) break;
            const float2 mark = make_float2(maximum[u], warp_sum(weight_sum[u]));
            if (lane == 0) {
                chunk_marks[i] = mark;
                if (!is_whole && slot < n_slots)
                    parts().marks[size_t(row_heads[i]) * n_slots + slot] = mark;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int at = thread; at < n_queries * S::QUADS; at += ATTEND_THREADS) {
            const int i = at / S::QUADS;
            float4 sum = split_sums[at];
#pragma unroll
            for (int s = 1; s < S::SPLITS; s++)
                add_scaled(sum, 1.0f, split_sums[s * QT * S::QUADS + at]);
            if (is_whole) {  // to the bit what joining would make of it
                const float2 mark = chunk_marks[i];
                const bool empty = mark.y == 0.0f;
                const float share = slot >= n_slots ? NAN_F32 : empty ? 0.0f : 1.0f / mark.y;
                add_scaled(sum, 1.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
                scale_all(sum, share);
                reinterpret_cast<float4*>(out)[size_t(row_heads[i]) * S::QUADS + at % S::QUADS] = sum;
                if (at % S::QUADS == 0 && lse != nullptr)
                    lse[row_heads[i]] = slot >= n_slots ? NAN_F32
                                        : empty         ? -INF_F32
                                                        : mark.x + logf(mark.y);
            } else if (slot < n_slots) {
                parts().sums[(size_t(row_heads[i]) * n_slots + slot) * S::QUADS + at % S::QUADS] = sum;
            }
        }
    }

    // Of the blocks that had a chunk (or the first, where there is none) the last joins them all.
    const int busy = min(int(gridDim.x), max(chunks.last - chunks.first, 1));
    if (tickets != nullptr && !is_whole && int(blockIdx.x) < busy) {  // the same for all threads of the block
        __syncthreads();  // the block's own partial results are there
        if (busy > 1) {
            if (thread == 0) {
                const uint32_t last = busy - 1;
                is_last = take_ticket(tickets + blockIdx.z * gridDim.y + kv_head, last) == last;
            }
            __syncthreads();
        }
        if (busy == 1 || is_last) {
#pragma unroll 1
            for (int i = 0; i < n_queries; i += S::JOINED) {
                join_chunks<DV, S::JOINED, ATTEND_THREADS>(
                    tile, row_heads + i, min(n_queries - i, S::JOINED), parts(), slot_zero,
                    chunks.first - slot_zero, chunks.last - slot_zero, {sinks, out, lse, n_heads});
                __syncthreads();  // what it kept in the tile is read
            }
        }
    }
}

// Joins the chunks of each row and head. Grid (n_heads, n_rows), 2 * DV threads; parameters as above.
template <int DV>
__global__ void __launch_bounds__(2 * DV)
    attend_combine(float* partial, const float* NULLABLE sinks, float* __restrict__ out,
                   float* NULLABLE lse, int32_t capacity, int32_t window, int32_t counted,
                   const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                   const uint64_t* NULLABLE table, int32_t n_slots) {
    __shared__ float4 scratch[JOIN_SPLITS * (DV + 2) / 4];
    admit_successor();
    await_predecessor();
    const int n_heads = gridDim.x;
    const int row = blockIdx.y;
    const int at = row * n_heads + blockIdx.x;
    const ChunkRange chunks = chunk_range(
        key_range(row_view(nullptr, nullptr, len_d, base_d, table, row), window, counted, capacity));
    int slot_zero = chunks.first;
    if (table == nullptr)
        slot_zero = chunk_of(key_range(row_view(nullptr, nullptr, len_d, base_d, table, 0), window,
                                       counted, capacity).start);
    join_chunks<DV, 1, 2 * DV>(reinterpret_cast<float*>(scratch), &at, 1,
                               partials_in<DV>(partial, gridDim.y * n_heads, n_slots), slot_zero,
                               chunks.first - slot_zero, chunks.last - slot_zero,
                               {sinks, out, lse, n_heads});
}
