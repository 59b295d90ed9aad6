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
// A short context is a chain of steps that wait for each other: many threads, each with little to do. What
// earlier steps have left of K and V is on its way before the wait for the predecessor; behind it only the
// newest rows are asked for, beside q.
#include "common/attend_join.cuh"
#include "common/block32.cuh"
#include "common/block32_fresh.cuh"
#include "common/counters.cuh"
#include "common/dependent.cuh"
#include "common/reduce.cuh"

constexpr int ATTEND_THREADS = 256;
constexpr int ATTEND_WARPS = ATTEND_THREADS / WARP_LANES;
// Scores have two bodies with the same results. Four neighbouring lanes that hold a block of a key in registers
// score it, and ask each other; on the host, where that costs more, a thread does it from shared memory.
// Tests run the first on the host too.
#ifndef ATTEND_LANES
#define ATTEND_LANES MEMRA_CUDA
#endif
// Rows by which the length that is read before the wait is wrong: for tests.
#ifndef ATTEND_ASTRAY
#define ATTEND_ASTRAY 0
#endif
constexpr bool FORESEES = ATTEND_LANES;  // whether a length is read, and old rows asked for, before the wait
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
    static constexpr int PARTS = DK / BLOCK_ELEMENTS;  // of a dot product, each of one block
    static constexpr int QUADS = DV / 4;  // threads that share the channels of a row of V
    // Of the threads: one sums V for the even queries of a block, one for the odd. Of few queries one half
    // sums all, and the other adds up their weights.
    static constexpr int HALVES = QT > 4 ? 2 : 1;
    static constexpr int TEAMS = ATTEND_THREADS / 2 / QUADS;
    static constexpr int FIT = TEAMS < TILE / 4 ? TEAMS : TILE / 4;
    static constexpr int SPLITS = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
    static constexpr int SPLIT = TILE / SPLITS;  // keys of a tile that one of them sums
    static constexpr int WEIGHED = (QT + ATTEND_WARPS - 1) / ATTEND_WARPS;  // queries of a warp
    static constexpr int RESIDENT = QT == 4 && WIDEST % 64 == 0 ? FEW_RESIDENT : 1;
    static constexpr int JOINED = DV <= 256 ? 4 : 2;  // queries whose chunks are joined at a time
    // Scores of a part lie by query, so that a warp reads those of one; of four queries by key, so that a thread
    // reads the weights of all at once.
    static constexpr int KEY_PITCH = QT > 4 ? 1 : QT;
    static constexpr int QUERY_PITCH = QT > 4 ? TILE : 1;
    // Shared memory, in floats: tile (of many queries later the partial sums), q, scores and weights,
    // rescaling.
    static constexpr int SUM_FLOATS = SPLITS * QT * DV;
    static constexpr int TILE_FLOATS =
        QT > 4 && TILE * PITCH < SUM_FLOATS ? SUM_FLOATS : TILE * PITCH;
    static constexpr int SUMS_AT = QT > 4 ? 0 : TILE_FLOATS;
    static constexpr int Q_AT = SUMS_AT + (QT > 4 ? TILE_FLOATS : SUM_FLOATS);
    static constexpr int SCORE_AT = Q_AT + QT * DK;
    static constexpr int ALPHA_AT = SCORE_AT + PARTS * QT * TILE;
    static constexpr int FLOATS = ALPHA_AT + QT;
    static_assert(DK % 32 == 0 && DV % 32 == 0 && SPLIT % 4 == 0, "unsupported head size");
    static_assert(WIDEST <= 512 && QT % 4 == 0 && PARTS * TILE <= ATTEND_THREADS, "unsupported shape");
    static_assert(TILE_FLOATS >= JOIN_SPLITS * JOINED * (DV + 2), "no room to join");
};

// Blocks per multiprocessor: one, where keys that are stored in many bytes are on their way in registers.
template <int KF, int VF, class S>
__device__ constexpr int residents() {
    return Packed<KF>::WORDS + Packed<VF>::WORDS < 8 ? S::RESIDENT : 1;
}

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

    __device__ __forceinline__ static const uint8_t* column(const uint8_t* head) {
        return head + block() * block_bytes<F>();
    }
    __device__ __forceinline__ static bool works() {
        return int(threadIdx.x) < ROWS * BLOCK_QUARTERS * BLOCKS;
    }

    // physical: of the tile's first key, which a ring may not have
    __device__ __forceinline__ void load(const uint8_t* head, int row_bytes, int physical, int from,
                                         int to) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            // Rows outside the range ask for the nearest one inside: no branch parts the loads.
            int key = first_row() + i * ROWS;
            key = key < from ? from : key < to ? key : to - 1;
            const uint64_t at = uint64_t(uint32_t(physical + key)) * uint32_t(row_bytes);
            packed[i] = load_quarter<F>(column(head) + at, quarter());
        }
    }
    // The same, of rows that a kernel may have written since this one began.
    __device__ __forceinline__ void load_fresh(const uint8_t* head, int row_bytes, int physical, int from,
                                               int to) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int key = first_row() + i * ROWS;
            if (key < from || key >= to) continue;
            const uint64_t at = uint64_t(uint32_t(physical + key)) * uint32_t(row_bytes);
            packed[i] = load_fresh_quarter<F>(column(head) + at, quarter());
        }
    }
    __device__ __forceinline__ void store(float* tile, int from, int to) const {
        float* row = tile + first_row() * PITCH + block() * BLOCK_ELEMENTS;
        float* low = row + quarter_low<F>(quarter());
        float* high = row + quarter_high<F>(quarter());
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int key = first_row() + i * ROWS;
            if (works() && key >= from && key < to) {
                float x[8];
                unpack_quarter<F>(packed[i], quarter(), x);
                *reinterpret_cast<float4*>(low + i * ROWS * PITCH) =
                    make_float4(x[0], x[1], x[2], x[3]);
                *reinterpret_cast<float4*>(high + i * ROWS * PITCH) =
                    make_float4(x[4], x[5], x[6], x[7]);
            }
        }
    }
    __device__ __forceinline__ void unpack(int i, float* x) const {
        unpack_quarter<F>(packed[i], quarter(), x);
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

// Eight elements of a quarter, as two runs of four.
__device__ __forceinline__ void read_runs(const float* low, const float* high, float* x) {
    const float4 a = *reinterpret_cast<const float4*>(low), b = *reinterpret_cast<const float4*>(high);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
template <int F>
__device__ __forceinline__ void read_quarter(const float* block, int g, float* x) {
    read_runs(block + quarter_low<F>(g), block + quarter_high<F>(g), x);
}
__device__ __forceinline__ float dot_quarter(const float* q, const float* k) {
    float sum = q[0] * k[0];
#pragma unroll
    for (int e = 1; e < 8; e++) sum = fmaf(q[e], k[e], sum);
    return sum;
}

// Dot products of one block of a key with four queries.
template <int F>
__device__ __forceinline__ void score_four(const float* key, const float* query, int query_pitch,
                                           float* score, int score_pitch) {
    float sums[BLOCK_QUARTERS][4];
#pragma unroll
    for (int g = 0; g < BLOCK_QUARTERS; g++) {
        float k[8], q[8];
        read_quarter<F>(key, g, k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            read_quarter<F>(query + i * query_pitch, g, q);
            sums[g][i] = dot_quarter(q, k);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        score[i * score_pitch] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

// The same by four lanes, of which lane g has what its quarter of the block gives each query, and gets
// the sum of query g.
__device__ __forceinline__ float sum_of_quarters(const float* mine, int g) {
    const bool odd = g % 2, late = g / 2;
    const float even_pair = odd ? mine[1] : mine[0], odd_pair = odd ? mine[3] : mine[2];
    const float a = even_pair + __shfl_xor_sync(FULL_MASK, odd ? mine[0] : mine[1], 1);
    const float b = odd_pair + __shfl_xor_sync(FULL_MASK, odd ? mine[2] : mine[3], 1);
    return (late ? b : a) + __shfl_xor_sync(FULL_MASK, late ? a : b, 2);
}

// Scores of all keys in flight within [from, to) with n_queries queries. scores: [blocks][TILE keys, queries].
template <class S, int F, class Tile>
__device__ __forceinline__ void score_in_flight(const Tile& tile, int from, int to, int n_queries,
                                                const float* queries, int query_pitch, float* scores,
                                                int part_pitch) {
    const int g = Tile::quarter();
    float* score = scores + Tile::block() * part_pitch + g * S::QUERY_PITCH;
    const auto key_at = [](int i) { return Tile::first_row() + i * Tile::ROWS; };
    const auto counts = [&](int i) { return Tile::works() && key_at(i) >= from && key_at(i) < to; };
    const auto read_four = [&](int first, float (*q)[8]) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            read_quarter<F>(queries + (first + j) * query_pitch + Tile::block() * BLOCK_ELEMENTS, g, q[j]);
    };
    const auto add = [&](int i, int first, const float (*q)[8], const float* k) {
        float mine[4];
#pragma unroll
        for (int j = 0; j < 4; j++) mine[j] = dot_quarter(q[j], k);
        const float sum = sum_of_quarters(mine, g);
        if (counts(i)) score[first * S::QUERY_PITCH + key_at(i) * S::KEY_PITCH] = sum;
    };
    if constexpr (S::HALVES == 1) {  // one group of queries
        float q[4][8];
        read_four(0, q);
#pragma unroll
        for (int i = 0; i < Tile::N; i++) {
            if (!__any_sync(FULL_MASK, counts(i))) continue;  // the same for the lanes of a warp
            float k[8];
            tile.unpack(i, k);
            add(i, 0, q, k);
        }
    } else {
        float k[Tile::N][8];
#pragma unroll
        for (int i = 0; i < Tile::N; i++) tile.unpack(i, k[i]);
#pragma unroll 1
        for (int first = 0; first < n_queries; first += 4) {
            float q[4][8];
            read_four(first, q);
#pragma unroll
            for (int i = 0; i < Tile::N; i++)
                if (__any_sync(FULL_MASK, counts(i))) add(i, first, q, k[i]);
        }
    }
}

// The largest of what the lanes of a warp have, none of it NaN.
__device__ __forceinline__ float warp_largest(float x) {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 800
    const int bits = __float_as_int(x);  // as a whole number of the same order
    int most;
    asm("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(bits ^ (bits >> 31 & 0x7fffffff)));
    return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
#else
    return warp_max(x);
#endif
}

// Adds the keys [low, high) of a split, in this order, to the sums of N queries; sees(o, key): whether
// query o sees one. WHOLE: all keys of the split, which the compiler then knows.
template <class S, int N, bool WHOLE, class Sees>
__device__ __forceinline__ void add_values(float4* sums, const float* values, const float* weights, int low,
                                           int high, int half, int n_queries, const Sees& sees) {
    constexpr int STEP = 4;
    const auto add = [&](int j) {
        float4 v[STEP];
        float w[N][STEP];
#pragma unroll
        for (int t = 0; t < STEP; t++) {
            const int key = WHOLE ? j + t : min(j + t, high - 1);
            v[t] = *reinterpret_cast<const float4*>(values + key * S::PITCH);
            if constexpr (S::HALVES == 1) {
                const float4 four = *reinterpret_cast<const float4*>(weights + key * S::KEY_PITCH);
                w[0][t] = four.x, w[1][t] = four.y, w[2][t] = four.z, w[3][t] = four.w;
            }
        }
#pragma unroll
        for (int o = 0; o < N; o++) {
            const int i = half + S::HALVES * o;
            if (i >= n_queries) break;
            if constexpr (S::HALVES > 1 && WHOLE) {
                const float4 four = *reinterpret_cast<const float4*>(weights + i * S::QUERY_PITCH + j);
                w[o][0] = four.x, w[o][1] = four.y, w[o][2] = four.z, w[o][3] = four.w;
            } else if constexpr (S::HALVES > 1) {
#pragma unroll
                for (int t = 0; t < STEP; t++) w[o][t] = weights[i * S::QUERY_PITCH + min(j + t, high - 1)];
            }
#pragma unroll
            for (int t = 0; t < STEP; t++)
                if (WHOLE || (j + t < high && sees(o, j + t))) add_scaled(sums[o], w[o][t], v[t]);
        }
    };
    if constexpr (WHOLE && S::HALVES == 1) {
#pragma unroll
        for (int j = 0; j < S::SPLIT; j += STEP) add(j);
    } else {
#pragma unroll 1
        for (int j = WHOLE ? 0 : low; j < (WHOLE ? S::SPLIT : high); j += STEP) add(j);
    }
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
template <int KF, int VF, int DK, int DV, int QT>
__global__ void __launch_bounds__(ATTEND_THREADS, residents<KF, VF, AttendShape<DK, DV, QT>>())
    attend_partial(const float* q, const uint8_t* NULLABLE k_plane,
                   const uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t n_kv_heads,
                   int32_t group, int32_t capacity, int32_t window, int32_t counted, float scale,
                   float softcap, const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                   const uint64_t* NULLABLE table, float* partial, int32_t n_slots,
                   uint32_t* NULLABLE tickets, const float* NULLABLE sinks, float* NULLABLE out,
                   float* NULLABLE lse) {
    typedef AttendShape<DK, DV, QT> S;
    DYN_SMEM(float, shared);
    float* const tile = shared;
    float* const q_tile = shared + S::Q_AT;
    float* const scores = shared + S::SCORE_AT;  // [PARTS][QT][TILE]; plane 0 becomes the weights
    float* const alphas = shared + S::ALPHA_AT;
    __shared__ int2 seen[QT];           // keys [x, y) of each query
    __shared__ int row_heads[QT];       // row * n_heads + head of each query
    __shared__ float2 chunk_marks[QT];  // maximum and sum of weights of a chunk
    __shared__ float lane_sums[S::HALVES == 1 ? QT : 1][WARP_LANES];  // what the lanes have of that sum
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
    const auto row_of = [&](int i) {  // a division is slow
        return all_queries == group ? 0 : (first_query + i) / group;
    };
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

    RowView view = {k_plane, v_plane, -1, -1};  // of no counters
    BlockKeys keys = {0, 0, 0, 0};
    ChunkRange chunks = {0, 0};
    const int own = min(thread, n_queries - 1);  // query whose keys this thread tells
    if (thread < QT) row_heads[thread] = row_head(own);
    const auto look = [&](const RowView& now) {
        view = now;
        keys = block_keys(view, low_row, high_row, window, counted, capacity);
        chunks = chunk_range({keys.start, keys.end});
        if (thread < QT) {
            const BlockKeys its = block_keys(view, row_of(own), row_of(own), window, counted, capacity);
            seen[thread] = thread < n_queries ? make_int2(its.start, its.end) : make_int2(0, 0);
            if (thread == 0) slot_zero = chunk_of(block_keys(view, 0, 0, window, counted, capacity).start);
        }
    };
    // Asks for the rows of a tile that no kernel has written since this one began, those below `fresh`, and
    // for the others.
    int fresh = FORESEES ? 0 : 0x7fffffff;
    const auto load_old = [&](int tile_key) {
        const int from = in_tile<S::TILE>(keys.start, tile_key);
        const int to = in_tile<S::TILE>(min(keys.end, fresh), tile_key);
        const int physical = tile_key - int(view.base);
        if (from >= to) return;
        k_tile.load(global_pointer(view.k) + k_column, k_row, physical, from, to);
        v_tile.load(global_pointer(view.v) + v_column, v_row, physical, from, to);
    };
    const auto load_new = [&](int tile_key) {
        const int from = in_tile<S::TILE>(max(keys.start, fresh), tile_key);
        const int to = in_tile<S::TILE>(keys.end, tile_key);
        const int physical = tile_key - int(view.base);
        if (from >= to) return;
        v_tile.load_fresh(view.v + v_column, v_row, physical, from, to);
        k_tile.load_fresh(view.k + k_column, k_row, physical, from, to);
    };
    const auto first_chunk = [&] { return chunks.first + int(blockIdx.x); };
    // The first piece of q that this thread brings, if any.
    const auto q_piece = [&](int i) {
        return reinterpret_cast<const float4*>(q) + size_t(row_head(i / (DK / 4))) * (DK / 4) + i % (DK / 4);
    };
    const float4* const first_piece = thread < n_queries * (DK / 4) ? q_piece(thread) : nullptr;
    // Of a table nothing is foreseen.
    const int32_t* const base_or_len = base_d == nullptr ? len_d : base_d;
    const auto view_of = [&](int len, int base) {
        return RowView{k_plane, v_plane, len, base_d == nullptr ? 0 : base};
    };
    int len = 0, base = 0;
    if (FORESEES && table == nullptr) {
        len = int(load_fresh_u32(len_d)) - ATTEND_ASTRAY, base = int(load_fresh_u32(base_or_len));
        look(view_of(len, base));
        fresh = len - counted;
        if (first_chunk() < chunks.last) load_old(first_tile(keys, first_chunk()));
    }

    await_predecessor();
    float4 piece = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first_piece != nullptr) piece = *first_piece;
    if constexpr (FORESEES) {
        int len_now = -1, base_now = 0;  // looked at when the new rows have been asked for
        if (table == nullptr) {
            len_now = int(load_fresh_u32(len_d));
            base_now = int(load_fresh_u32(base_or_len));
        }
#pragma unroll 1
        while (true) {
            if (first_chunk() < chunks.last) load_new(first_tile(keys, first_chunk()));
            if (len_now == len && (base_d == nullptr || base_now == base)) break;
            len = len_now, base = base_now;
            look(table == nullptr ? view_of(len, base)
                                  : row_view(nullptr, nullptr, nullptr, nullptr, table, first_row));
            fresh = 0;
        }
        if (table != nullptr) fresh = 0x7fffffff;
    } else {
        look(row_view(k_plane, v_plane, len_d, base_d, table, first_row));
        if (first_chunk() < chunks.last) load_old(first_tile(keys, first_chunk()));
    }
    if (thread < QT * (DK / 4)) reinterpret_cast<float4*>(q_tile)[thread] = piece;
#pragma unroll 1
    for (int i = thread + ATTEND_THREADS; i < QT * (DK / 4); i += ATTEND_THREADS)
        reinterpret_cast<float4*>(q_tile)[i] =
            i < n_queries * (DK / 4) ? *q_piece(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto parts = [&] { return partials_in<DV>(partial, n_rows * n_heads, n_slots); };
    // With one chunk there is nothing to join.
    const bool is_whole =
        tickets != nullptr && sinks == nullptr && chunks.last - chunks.first == 1;

    bool first = true;  // nothing lies in shared memory yet
#pragma unroll 1
    for (int chunk = first_chunk(); chunk < chunks.last; chunk += gridDim.x) {
        float maximum[S::WEIGHED];
        float weight_sum[S::WEIGHED];
#pragma unroll
        for (int u = 0; u < S::WEIGHED; u++) maximum[u] = -INF_F32, weight_sum[u] = 0.0f;
        float4 sums[QT / S::HALVES];  // of the queries half + HALVES * o
#pragma unroll
        for (int o = 0; o < QT / S::HALVES; o++) sums[o] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        // Tiles with a key that any query sees, and of them only those keys, are read.
        const int stop = chunk + 1 < chunks.last ? int(chunk_begin(chunk + 1)) : keys.end;
        const int begin = first_tile(keys, chunk);
#pragma unroll 1
        for (int tile_key = begin; tile_key < stop; tile_key += S::TILE) {
            const int from = in_tile<S::TILE>(keys.start, tile_key);
            const int to = in_tile<S::TILE>(keys.end, tile_key);
            if constexpr (ATTEND_LANES) {
                if (!first) __syncthreads();  // the tile is free
                v_tile.store(tile, from, to);
                if (first) __syncthreads();  // q is there
                score_in_flight<S, KF>(k_tile, from, to, n_queries, q_tile, DK, scores, QT * S::TILE);
            } else {
                if (!first) __syncthreads();
                k_tile.store(tile, from, to);
                __syncthreads();
                const int key = thread % S::TILE, part = thread / S::TILE;
                if (part < S::PARTS && key >= from && key < to) {
                    const float* query = q_tile + part * BLOCK_ELEMENTS;
                    float* score = scores + part * QT * S::TILE + key * S::KEY_PITCH;
#pragma unroll 1
                    for (int i = 0; i < n_queries; i += 4)
                        score_four<KF>(tile + key * S::PITCH + part * BLOCK_ELEMENTS, query + i * DK, DK,
                                       score + i * S::QUERY_PITCH, S::QUERY_PITCH);
                }
            }
            first = false;
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
                        const float* terms = scores + i * S::QUERY_PITCH + key * S::KEY_PITCH;
                        float dot = terms[0];
#pragma unroll
                        for (int p = 1; p < S::PARTS; p++) dot = dot + terms[p * QT * S::TILE];
                        score[t] = dot * scale;
                        if (softcap > 0.0f) score[t] = softcap * tanhf(score[t] / softcap);
                    }
                    tile_max = larger_number(tile_max, score[t]);
                }
                tile_max = warp_largest(tile_max);
                const float high = larger_number(maximum[u], tile_max);
                const float alpha = weight_of(maximum[u], high);
                weight_sum[u] = weight_sum[u] * alpha;
                maximum[u] = high;
#pragma unroll
                for (int t = 0; t < PER_LANE; t++) {
                    const int key = lane + t * WARP_LANES;
                    const float weight = weight_of(score[t], high);
                    weight_sum[u] = weight_sum[u] + weight;
                    if (key < S::TILE) scores[i * S::QUERY_PITCH + key * S::KEY_PITCH] = weight;
                }
                if (lane == 0) alphas[i] = alpha;
                if constexpr (S::HALVES == 1) {
                    lane_sums[i][lane] = weight_sum[u];
                    if (lane == 0) chunk_marks[i].x = maximum[u];
                }
            }
            if constexpr (!ATTEND_LANES) v_tile.store(tile, from, to);
            __syncthreads();
            // The next tile is on its way while this one is summed.
            const bool ends = tile_key + S::TILE >= stop;
            const int next_chunk = ends ? chunk + int(gridDim.x) : chunk;
            if (next_chunk < chunks.last) {
                const int next_key = ends ? first_tile(keys, next_chunk) : tile_key + S::TILE;
                load_old(next_key);
                if constexpr (FORESEES) load_new(next_key);
            }

            const int me = forget(thread);
            const int quad = me % (ATTEND_THREADS / 2) % S::QUADS;
            const int half = me / (ATTEND_THREADS / 2);
            const int split = me % (ATTEND_THREADS / 2) / S::QUADS;
            if (half < S::HALVES && split < S::SPLITS) {
                if (tile_key != begin) {
#pragma unroll
                    for (int o = 0; o < QT / S::HALVES; o++) {
                        const int i = half + S::HALVES * o;
                        if (i >= n_queries) break;
                        scale_all(sums[o], alphas[i]);
                    }
                }
                const float* values = tile + split * S::SPLIT * S::PITCH + quad * 4;
                const float* weights = scores + split * S::SPLIT * S::KEY_PITCH;
                const int low = max(from - split * S::SPLIT, 0);
                const int high = min(to - split * S::SPLIT, S::SPLIT);
                const int shared_from = in_tile<S::TILE>(keys.shared_start, tile_key);
                const int shared_to = in_tile<S::TILE>(keys.shared_end, tile_key);
                const bool alike = shared_from <= from && shared_to >= to;  // all queries see the same keys
                constexpr int N = QT / S::HALVES;
                if (alike && low == 0 && high == S::SPLIT) {
                    add_values<S, N, true>(sums, values, weights, low, high, half, n_queries,
                                           [](int, int) { return true; });
                } else {
                    const int first_key = tile_key + split * S::SPLIT;
                    int2 range[N];
#pragma unroll
                    for (int o = 0; o < N; o++) {
                        range[o] = seen[half + S::HALVES * o];
                        range[o].x -= first_key, range[o].y -= first_key;
                    }
                    add_values<S, N, false>(
                        sums, values, weights, low, high, half, n_queries,
                        [&](int o, int key) { return alike || (key >= range[o].x && key < range[o].y); });
                }
            }
            if (S::HALVES == 1 && half == 1) {
                const int i = warp - ATTEND_WARPS / 2;
                if (i < n_queries) {  // the same for all lanes
                    const float sum = warp_sum(lane_sums[i][lane]);
                    if (lane == 0) chunk_marks[i].y = sum;
                }
            }
        }

        float4* const split_sums = reinterpret_cast<float4*>(shared + S::SUMS_AT);
        if constexpr (S::HALVES > 1) __syncthreads();  // the last tile of V is free
        const int me = forget(thread);
        const int quad = me % (ATTEND_THREADS / 2) % S::QUADS;
        const int half = me / (ATTEND_THREADS / 2);
        const int split = me % (ATTEND_THREADS / 2) / S::QUADS;
        if (half < S::HALVES && split < S::SPLITS) {
#pragma unroll
            for (int o = 0; o < QT / S::HALVES; o++) {
                const int i = half + S::HALVES * o;
                if (i >= n_queries) break;
                split_sums[(split * QT + i) * S::QUADS + quad] = sums[o];
            }
        }
        const int slot = chunk - slot_zero;
        if constexpr (S::HALVES > 1) {
#pragma unroll
            for (int u = 0; u < S::WEIGHED; u++) {
                const int i = warp + u * ATTEND_WARPS;
                if (i >= n_queries) break;
                const float sum = warp_sum(weight_sum[u]);
                if (lane == 0) chunk_marks[i] = make_float2(maximum[u], sum);
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
                if (at % S::QUADS == 0) parts().marks[size_t(row_heads[i]) * n_slots + slot] = chunk_marks[i];
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
                __threadfence();
                uint32_t* ticket = tickets + blockIdx.z * gridDim.y + kv_head;
                is_last = atomicInc(ticket, busy - 1) == uint32_t(busy - 1);  // wraps to 0
                __threadfence();
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
