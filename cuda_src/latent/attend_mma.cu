// Latent attention in its absorbed form on tensor cores, dense and over lists, in class `f16x2`: the
// products of common/latent_step.cuh.
//
// A thread block takes 16 * M queries (a query = one row of one head) and walks tiles of 16 keys. A
// tile is split once, in its place in shared memory, and serves as K and as V for all queries. The
// warps share the channels: of a score four slices of them, which are added in order; of the result
// neighbouring ones.
//
// Chunks of keys at absolute positions (or positions of a list) each leave a weighted sum, a
// reference and a sum of weights; latent_mma_combine joins them in a fixed order. Nothing depends on
// anything but the query's own keys: a row gets the same bits alone and among others, whatever M,
// HELD, STAGES, WARPS and COPY are and whichever block takes a chunk.
#include "common/bulk.cuh"
#include "common/counters.cuh"
#include "common/dependent.cuh"
#include "common/latent_shape.cuh"
#include "common/latent_step.cuh"

constexpr int COPY_ASYNC = 0, COPY_BULK = 1;
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
constexpr int COPY_BEST = COPY_BULK;
#else
constexpr int COPY_BEST = COPY_ASYNC;
#endif
constexpr int COMBINE_THREADS = 256, COMBINE_WARPS = COMBINE_THREADS / WARP_LANES;

// Grid (query blocks, any number of blocks which share the chunks), 32 * WARPS threads,
// MmaShape::BYTES of dynamic shared memory. Query blocks: ceil(n_rows * n_heads / (16 * M)), or with a list
// n_rows * ceil(n_heads / (16 * M)). Parameters as of latent_partial in latent/attend.cu, but
//   workspace  f32 [n_rows, n_heads, n_slots, RANK] weighted sums, slot = chunk; behind them
//              f32 [n_rows, n_heads, n_slots, 2] references (exponents of 2) and sums of weights
template <int F, int RANK, int ROPE, int M, int HELD, int STAGES, int WARPS, int COPY = COPY_BEST>
__global__ void __launch_bounds__(WARPS * WARP_LANES, 1)
    latent_mma(const float* __restrict__ q, const uint8_t* __restrict__ plane, int32_t n_rows,
               int32_t n_heads, int32_t capacity, const int32_t* NULLABLE list, int32_t n_list,
               int32_t counted, float scale, const int32_t* __restrict__ len_d,
               float* __restrict__ workspace, int32_t n_slots) {
#if MEMRA_CUDA && __CUDA_ARCH__ < 800
    __trap();  // the selector asks for sm_80
#else
    typedef MmaShape<RANK, ROPE, M, HELD, STAGES, WARPS> S;
    typedef RawRow<F, S::WIDTH> Row;
    constexpr bool BULK = COPY == COPY_BULK && Row::BYTES % 16 == 0;
    DYN_SMEM(uint8_t, shared);
    uint4* const q_parts = reinterpret_cast<uint4*>(shared + S::Q_AT);  // [slice][step][m][2][lane]
    float* const scores = reinterpret_cast<float*>(shared + S::SCORES_AT);  // [slice][query][key]
    uint32_t* const weights = reinterpret_cast<uint32_t*>(shared + S::WEIGHTS_AT);  // [m][2][lane][4]
    KeyFactors* const keys = reinterpret_cast<KeyFactors*>(shared + S::KEYS_AT);  // [stage][key]
    float* const factors = reinterpret_cast<float*>(shared + S::QUERY_AT);  // of a raw score
    float* const alphas = factors + S::QUERIES;
    int32_t* const ends = reinterpret_cast<int32_t*>(alphas + S::QUERIES);
    MmaPlace& place = *reinterpret_cast<MmaPlace*>(shared + S::PLACE_AT);
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared + S::FULL_AT);
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x, warp = thread / WARP_LANES, lane = thread % WARP_LANES;
    const int g = lane / 4, t = lane % 4;

    int first_row = 0, first_query = int(blockIdx.x) * S::QUERIES, all_queries = n_rows * n_heads;
    if (list != nullptr) {
        const int per_row = (n_heads + S::QUERIES - 1) / S::QUERIES;
        first_row = int(blockIdx.x) / per_row;
        first_query = (int(blockIdx.x) - first_row * per_row) * S::QUERIES;
        all_queries = n_heads;
    }
    const int left = all_queries - first_query;
    const int n_queries = left < S::QUERIES ? left : S::QUERIES;
    const auto end_of = [&](int query) {  // of the keys that a query of this block sees
        const int64_t bound =
            int64_t(len_d[0]) + first_row + (first_query + query) / n_heads + 1 - counted;
        return int32_t(bound < 0 ? 0 : bound < capacity ? bound : int64_t(capacity));
    };
    const auto edge_behind = [&](int32_t at) {  // of the chunk that holds a key
        const int64_t edge = list != nullptr ? (int64_t(at / LIST_PART) + 1) * LIST_PART
                                             : part_begin(part_of(at) + 1);
        return edge < MOST_KEYS ? int32_t(edge) : MOST_KEYS;
    };
    if (thread == 0) {
        // Its share of the chunks: those that begin in an equal share of the keys.
        const int32_t last_end = end_of(n_queries - 1), n_keys = list != nullptr ? n_list : last_end;
        const int64_t share = blockIdx.y, shares = gridDim.y;
        const int64_t from = n_keys * share / shares, to = n_keys * (share + 1) / shares;
        const int32_t first = from == 0 ? 0 : edge_behind(int32_t(from - 1));
        const int32_t behind = to == 0 ? 0 : edge_behind(int32_t(to - 1));
        place = {first < n_keys ? first : n_keys,
                 behind < n_keys ? behind : n_keys,
                 n_keys,
                 last_end,
                 first_row,
                 first_row * n_heads + first_query,
                 n_queries,
                 0};
        if constexpr (BULK) {
            for (int i = 0; i < STAGES * SPLITTERS; i++) mbar_init(full + i, 1);
            mbar_publish();
        }
    }
    __syncthreads();
    const bool idle = place.begin >= place.stop;

    // Rows of the tile at a key into a stage, by the warp that will split them.
    const int splitter = warp - S::FIRST_SPLITTER;
    const auto row_of = [&](int32_t at) {
        int32_t row = at < place.n_keys ? at : -1;
        if (list != nullptr && row >= 0) row = list[size_t(place.row) * n_list + at];
        return row < place.last_end ? row : -1;
    };
    const auto ask = [&](int32_t tile_at, int stage) {
        constexpr int OWN_ROWS = STEP / SPLITTERS;
        uint8_t* const to = shared + stage * S::TILE_BYTES + splitter * S::PITCH;
        if (splitter >= 0 && tile_at < place.stop) {
            const int32_t own = lane < OWN_ROWS ? row_of(tile_at + splitter + lane * SPLITTERS) : -1;
            const unsigned seen = __ballot_sync(FULL_MASK, own >= 0);
            if (lane < OWN_ROWS)
                keys[stage * STEP + splitter + lane * SPLITTERS] =
                    make_float4(0.0f, 0.0f, 0.0f, own >= 0 ? 0.0f : -INF_F32);
#pragma unroll
            for (int i = 0; i < OWN_ROWS; i++) {
                const int32_t row = __shfl_sync(FULL_MASK, own, i);
                if (row < 0)
                    Row::clear(to + i * SPLITTERS * S::PITCH, lane);
                else if constexpr (!BULK)
                    Row::ask(to + i * SPLITTERS * S::PITCH, plane, row, lane);
            }
            if constexpr (BULK) {
                uint64_t* const there = full + stage * SPLITTERS + splitter;
                if (lane < OWN_ROWS) order_before_bulk_copies();
                if (lane == 0) mbar_arrive_expecting(there, __popc(seen) * Row::BYTES);
                if (own >= 0)
                    bulk_copy(to + lane * SPLITTERS * S::PITCH, plane + int64_t(own) * Row::BYTES,
                              Row::BYTES, there);
            }
        }
        if constexpr (!BULK) cp_async_commit();
    };
    const auto split = [&](int stage, int parity) {
        if constexpr (BULK)
            mbar_wait(full + stage * SPLITTERS + splitter, parity);
        else
            __syncwarp();  // the copies of the other lanes
#pragma unroll 1
        for (int key = splitter; key < STEP; key += SPLITTERS)
            split_row<F, S::WIDTH>(shared + stage * S::TILE_BYTES + key * S::PITCH, lane,
                                   keys[stage * STEP + key]);
    };

    if constexpr (S::TILES_FIRST)
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) ask(place.begin + i * STEP, i);
    if (!idle) {  // the queries
        constexpr int PASSES = (S::WIDTH / 4 + WARP_LANES - 1) / WARP_LANES;
        constexpr int BATCH = M >= 4 ? 2 : 1;
        const float* const own_q = q + (size_t(first_row) * n_heads + first_query) * S::WIDTH;
#pragma unroll 1
        for (int query0 = warp; query0 < S::QUERIES; query0 += WARPS * BATCH) {
            float4 x[BATCH][PASSES];
#pragma unroll
            for (int k = 0; k < BATCH; k++)
#pragma unroll
                for (int i = 0; i < PASSES; i++) {
                    const int query = query0 + k * WARPS, piece = lane + i * WARP_LANES;
                    x[k][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (query < n_queries && piece < S::WIDTH / 4)
                        x[k][i] = *reinterpret_cast<const float4*>(own_q + size_t(query) * S::WIDTH +
                                                                   4 * piece);
                }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int query = query0 + k * WARPS;
                split_query<S::WIDTH>(x[k], lane, query % 16, scale, factors[query], [&](int step) {
                    const int slice = step % SLICES, own = step / SLICES, m = query / 16;
                    const int at = own < S::IN_SHARED
                                       ? S::Q_AT + ((slice * S::IN_SHARED + own) * M + m) * S::FRAGMENT
                                       : S::HELD_AT + ((slice * HELD + own - S::IN_SHARED) * M + m) *
                                                          S::FRAGMENT;
                    return reinterpret_cast<uint32_t*>(shared + at);
                });
                if (lane == 0)
                    ends[query] = query >= n_queries ? 0 : list != nullptr ? n_list : end_of(query);
            }
        }
    }
    __syncthreads();
    const bool scoring = warp < SCORERS;
    const int slice = warp / 2 % SLICES;
    const int m_first = M > 1 ? warp % 2 * S::SCORE_SETS : 0;
    const int key_first = M > 1 ? 0 : warp % 2 * 8;
    Halves held[HELD > 0 ? HELD : 1][S::SCORE_SETS];
    if (HELD > 0 && scoring && !idle)
#pragma unroll
        for (int i = 0; i < HELD * S::SCORE_SETS; i++) {
            const int h = i / S::SCORE_SETS, m = i % S::SCORE_SETS;
            held[h][m] = load_halves(reinterpret_cast<const uint4*>(
                shared + S::HELD_AT + ((slice * HELD + h) * M + m_first + m) * S::FRAGMENT) + lane);
        }
    if constexpr (!S::TILES_FIRST) {
        __syncthreads();  // the place of the tiles is free
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) ask(place.begin + i * STEP, i);
    }
    if constexpr (!BULK) cp_async_wait<STAGES - 1>();
    if (!idle && splitter >= 0) split(0, 0);
    __syncthreads();

    const int query = thread / S::SHARERS, sub = thread % S::SHARERS;  // of a scorer
    const int set_first = warp / (WARPS / S::HALVES) * S::SETS;        // of results
    const int unit_first = warp % (WARPS / S::HALVES) * S::CHANNELS;
    float reference = NO_REFERENCE, total = 0.0f;
    float acc[S::SETS][S::CHANNELS][4];
#pragma unroll
    for (int i = 0; i < S::SETS * S::CHANNELS * 4; i++)
        acc[i / 4 / S::CHANNELS][i / 4 % S::CHANNELS][i % 4] = 0.0f;

    int stage = 0, next_parity = 0;
    int32_t edge = edge_behind(place.begin);
#pragma unroll 1
    for (int32_t at = place.begin; at < place.stop; at += STEP) {
        const bool last = at + STEP >= edge || at + STEP >= place.stop;  // of its chunk
        const uint8_t* const tile = shared + stage * S::TILE_BYTES;
        const bool more = at + STEP < place.stop;
        const int next = stage + 1 == STAGES ? 0 : stage + 1;
        if (next == 0) next_parity ^= 1;
        if (WARPS > 8 && splitter >= 0 && more) {
            if constexpr (!BULK) cp_async_wait<STAGES - 2>();
            split(next, next_parity);
        }
        if (scoring) {  // raw scores of this warp's slice
            // It begins in units that are alike in what comes first.
            const int flip = coarse_first(slice * 2), upper = 16 - 2 * flip;
            const int own = across_offset(lane, S::PITCH, 32, upper);
            const uint8_t* const slice_tile = tile + key_first * S::PITCH + slice * 64 + flip;
            const uint4* const slice_q =
                q_parts + (slice * S::IN_SHARED * M + m_first) * 2 * WARP_LANES + lane;
            float main[S::SCORE_SETS][S::SCORE_KEYS][4], rest[S::SCORE_SETS][S::SCORE_KEYS][4];
#pragma unroll
            for (int m = 0; m < S::SCORE_SETS; m++)
#pragma unroll
                for (int n = 0; n < S::SCORE_KEYS; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) main[m][n][j] = rest[m][n][j] = 0.0f;
            const auto score_step = [&](int step, int h) {  // h: of those that are held
                uint32_t b[S::SCORE_KEYS][4];  // coarse, coarse, fine, fine
                const uint8_t* const from = slice_tile + step * (SLICES * 64);
#pragma unroll
                for (int n = 0; n < S::SCORE_KEYS; n++)
                    load_along_x4(b[n], from + n * 8 * S::PITCH, own, S::PITCH, 32, upper);
#pragma unroll
                for (int m = 0; m < S::SCORE_SETS; m++) {
                    Halves a = held[h < 0 ? 0 : h][m];
                    if (h < 0) a = load_halves(slice_q + (step * M + m) * 2 * WARP_LANES);
#pragma unroll
                    for (int n = 0; n < S::SCORE_KEYS; n++)
                        mma_m16n8k16_f16(main[m][n], a.coarse, b[n], main[m][n]);
#pragma unroll
                    for (int n = 0; n < S::SCORE_KEYS; n++)
                        mma_m16n8k16_f16(rest[m][n], a.coarse, b[n] + 2, rest[m][n]);
#pragma unroll
                    for (int n = 0; n < S::SCORE_KEYS; n++)
                        mma_m16n8k16_f16(rest[m][n], a.fine, b[n], rest[m][n]);
                }
            };
#pragma unroll AHEAD
            for (int step = 0; step < S::IN_SHARED; step++)
                score_step(step, -1);
#pragma unroll
            for (int h = 0; h < HELD; h++)
                score_step(S::IN_SHARED + h, h);
            // Every other pair of rows has its keys 8 apart, so that a warp meets each bank once.
#pragma unroll
            for (int m = 0; m < S::SCORE_SETS; m++)
#pragma unroll
                for (int n = 0; n < S::SCORE_KEYS; n++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int row = (m_first + m) * 16 + g + 8 * j;
                        const int key = (key_first + n * 8 + 2 * t) ^ (g / 2 % 2 * 8);
                        *reinterpret_cast<float2*>(scores + (slice * S::QUERIES + row) * STEP + key) =
                            make_float2(main[m][n][2 * j] + rest[m][n][2 * j],
                                        main[m][n][2 * j + 1] + rest[m][n][2 * j + 1]);
                    }
        }
        __syncthreads();
        if (scoring) {  // weights
            constexpr int OWN = M;
            const int key = sub * OWN, stored = key ^ (query / 2 % 2 * 8);
            const float* const from = scores + query * STEP + stored;
            const float factor = factors[query];
            const int32_t behind = ends[query] - at - key;
            float score[OWN], up[OWN], high = -INF_F32;
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                const float dot = (from[j] + from[S::QUERIES * STEP + j]) +
                                  (from[2 * S::QUERIES * STEP + j] + from[3 * S::QUERIES * STEP + j]);
                const KeyFactors known = keys[stage * STEP + key + j];
                up[j] = known.z;
                score[j] = fmaf(dot, known.x * factor, known.w);
                score[j] = j < behind ? score[j] : -INF_F32;
                // What the key contributes at most: its weight times its row.
                high = fmaxf(high, score[j] + known.y);
            }
#pragma unroll
            for (int offset = 1; offset < S::SHARERS; offset *= 2)
                high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, offset));
            const float old = reference;
            reference = fmaxf(reference, ceilf(high));
            const float alpha = exp2_whole(old - reference);
            if (sub == 0) alphas[query] = alpha;
            float lifted[OWN];
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                score[j] = exp2_fast(score[j] - reference);
                lifted[j] = score[j] * up[j];
            }
            // Fragments of A: pair p of keys is lane t = p % 4, and register p / 4 * 2 + row / 8.
            const int row = query % 16, pair = key / 2;
            uint32_t* const to =
                weights + (query / 16 * 2 * WARP_LANES + row % 8 * 4 + pair % 4) * 4 + pair / 4 * 2 + row / 8;
            if constexpr (OWN == 1) {
                uint32_t coarse, fine;
                split_pair(lifted[0], 0.0f, coarse, fine);
                reinterpret_cast<uint16_t*>(to)[key % 2] = uint16_t(coarse);
                reinterpret_cast<uint16_t*>(to + WARP_LANES * 4)[key % 2] = uint16_t(fine);
            } else {
#pragma unroll
                for (int j = 0; j < OWN; j += 2)  // two pairs of four keys are neighbours
                    split_pair(lifted[j], lifted[j + 1], to[j / 2 * 4], to[j / 2 * 4 + WARP_LANES * 4]);
            }
            float sum = score[0];  // in a tree over the 16 keys
            if constexpr (OWN == 2) sum = sum + score[1];
            if constexpr (OWN == 4) sum = (sum + score[1]) + (score[OWN / 2] + score[OWN - 1]);
#pragma unroll
            for (int offset = 1; offset < S::SHARERS; offset *= 2)
                sum = sum + __shfl_xor_sync(FULL_MASK, sum, offset);
            total = fmaf(total, alpha, sum);
            if (last) {
                const int32_t slot = list != nullptr ? at / LIST_PART : part_of(at);
                const size_t column = size_t(place.column) + query;
                float* const marks = workspace + size_t(n_rows) * n_heads * n_slots * RANK;
                if (sub == 0 && query < place.n_queries && slot < n_slots)
                    *reinterpret_cast<float2*>(marks + (column * n_slots + slot) * 2) =
                        make_float2(reference, total);
                reference = NO_REFERENCE, total = 0.0f;
            }
        }
        __syncthreads();
        // With eight warps half of them split before they multiply, the others behind it.
        if constexpr (WARPS == 8 && !BULK) cp_async_wait<STAGES - 2>();
        if (WARPS == 8 && warp < 4 && more) split(next, next_parity);
        {  // this warp's channels
            float old[S::SETS][2];
            bool moved = false;
#pragma unroll
            for (int m = 0; m < S::SETS; m++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    old[m][j] = alphas[16 * (set_first + m) + g + 8 * j];
                    moved = moved || old[m][j] != 1.0f;
                }
            if (__any_sync(FULL_MASK, moved)) {
#pragma unroll
                for (int m = 0; m < S::SETS; m++)
#pragma unroll
                    for (int n = 0; n < S::CHANNELS; n++)
#pragma unroll
                        for (int j = 0; j < 4; j++) acc[m][n][j] *= old[m][j / 2];
            }
            Halves p[S::SETS];
#pragma unroll
            for (int m = 0; m < S::SETS; m++)
                p[m] = load_halves(reinterpret_cast<const uint4*>(weights) +
                                   (set_first + m) * 2 * WARP_LANES + lane);
#pragma unroll
            for (int n0 = 0; n0 < S::CHANNELS; n0 += S::GROUP) {
                uint32_t b[S::GROUP][4];
#pragma unroll
                for (int n = 0; n < S::GROUP; n++) {
                    const int unit = unit_first + n0 + n, flip = coarse_first(unit);
                    const int upper = 16 - 2 * flip;
                    load_across_x4(b[n], tile + unit * 32 + flip,
                                   across_offset(lane, S::PITCH, 8 * S::PITCH, upper), S::PITCH,
                                   8 * S::PITCH, upper);
                }
#pragma unroll
                for (int product = 0; product < 3; product++)
#pragma unroll
                    for (int n = 0; n < S::GROUP; n++)
#pragma unroll
                        for (int m = 0; m < S::SETS; m++) {
                            float* const to = acc[m][n0 + n];
                            mma_m16n8k16_f16(to, product == 2 ? p[m].fine : p[m].coarse,
                                             product == 1 ? b[n] + 2 : b[n], to);
                        }
            }
        }
        if (WARPS == 8 && warp >= 4 && more) split(next, next_parity);
        if (last) {
            const int32_t slot = list != nullptr ? at / LIST_PART : part_of(at);
#pragma unroll
            for (int m = 0; m < S::SETS; m++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int row = 16 * (set_first + m) + g + 8 * j;
                    const size_t column = size_t(place.column) + row;
                    float* const to = workspace + (column * n_slots + slot) * RANK + unit_first * 8 + 2 * t;
#pragma unroll
                    for (int n = 0; n < S::CHANNELS; n++) {
                        if (row < place.n_queries && slot < n_slots)
                            *reinterpret_cast<float2*>(to + n * 8) = make_float2(
                                acc[m][n][2 * j] * 0x1p-30f, acc[m][n][2 * j + 1] * 0x1p-30f);
                        acc[m][n][2 * j] = acc[m][n][2 * j + 1] = 0.0f;
                    }
                }
            edge = edge_behind(at + STEP);
        }
        __syncthreads();
        ask(at + STAGES * STEP, stage);
        stage = next;
    }
#endif
}

// Joins the chunks of each query. Grid (n_heads, n_rows, RANK / 128), 256 threads; parameters as
// above, out and lse as of latent_combine in latent/attend.cu, n_list 0 without a list.
template <int RANK>
__global__ void __launch_bounds__(COMBINE_THREADS)
    latent_mma_combine(const float* __restrict__ workspace, float* __restrict__ out,
                       float* NULLABLE lse, int32_t capacity, int32_t n_list, int32_t counted,
                       const int32_t* __restrict__ len_d, int32_t n_slots) {
    __shared__ float4 parts[COMBINE_WARPS][WARP_LANES];
    __shared__ float pivots[COMBINE_WARPS], weights[COMBINE_WARPS];
    admit_successor();
    await_predecessor();
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const size_t query = size_t(blockIdx.y) * gridDim.x + blockIdx.x;
    const int64_t bound = int64_t(len_d[0]) + blockIdx.y + 1 - counted;
    const int32_t end = int32_t(bound < 0 ? 0 : bound < capacity ? bound : int64_t(capacity));
    const int32_t n_parts = n_list > 0 ? (n_list + LIST_PART - 1) / LIST_PART
                            : end > 0  ? part_of(end - 1) + 1
                                       : 0;
    const bool fits = n_parts <= n_slots;
    const int32_t behind = fits ? n_parts : 0;
    const float* const own_marks =
        workspace + size_t(gridDim.y) * gridDim.x * n_slots * RANK + query * n_slots * 2;
    const float* const own = workspace + query * n_slots * RANK + blockIdx.z * 128 + lane * 4;

    JoinedChunks some;  // chunk c belongs to warp c % 8
    some.add<RANK>(own_marks, own, warp, behind, COMBINE_WARPS);
    parts[warp][lane] = some.sum;
    if (lane == 0) pivots[warp] = some.pivot, weights[warp] = some.weight;
    __syncthreads();
    if (warp == 0) {
        float high = NO_REFERENCE, all = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < COMBINE_WARPS; w++) high = fmaxf(high, pivots[w]);
#pragma unroll
        for (int w = 0; w < COMBINE_WARPS; w++) {
            const float times = exp2_whole(pivots[w] - high);
            const float4 part = parts[w][lane];
            sum.x = fmaf(part.x, times, sum.x), sum.y = fmaf(part.y, times, sum.y);
            sum.z = fmaf(part.z, times, sum.z), sum.w = fmaf(part.w, times, sum.w);
            all = fmaf(weights[w], times, all);
        }
        const bool empty = all == 0.0f;
        const float bad = fits ? 0.0f : NAN_F32;
        float* const to = out + query * RANK + blockIdx.z * 128 + lane * 4;
        to[0] = empty ? bad : sum.x / all, to[1] = empty ? bad : sum.y / all;
        to[2] = empty ? bad : sum.z / all, to[3] = empty ? bad : sum.w / all;
        if (lane == 0 && blockIdx.z == 0 && lse != nullptr)
            lse[query] = !fits ? NAN_F32 : empty ? -INF_F32 : high * LN_2 + logf(all);
    }
}
