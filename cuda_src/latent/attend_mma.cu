// Latent attention in its absorbed form on tensor cores, dense and over lists, in class `f16x2`: the
// products of common/latent_step.cuh.
//
// A thread block takes 16 * M queries (a query = one row of one head) and walks tiles of 16 keys. A
// tile is split once, in its place in shared memory, and serves as K and as V for all queries. Eight
// warps share the channels: of a score four slices of them, which are added in order; of the result
// an eighth each.
//
// Chunks of keys at absolute positions (or positions of a list) each leave a weighted sum, a
// reference and a sum of weights; latent_mma_combine joins them in a fixed order. Nothing depends on
// anything but the query's own keys: a row gets the same bits alone and among others, whatever M,
// HELD and STAGES are and whichever block takes a chunk.
#include "common/counters.cuh"
#include "common/dependent.cuh"
#include "common/latent_step.cuh"

constexpr int MMA_THREADS = 256;
constexpr int MMA_WARPS = MMA_THREADS / WARP_LANES;
constexpr int32_t MOST_KEYS = 0x7fffffff - 1024;
constexpr int LIST_PART = 64;  // entries of a list that leave one partial result

// Chunks: 64 keys below 4096, 256 below 32768, 512 below 65536, then 1024. Few enough for the
// combination, and fine enough to be shared out evenly at every length.
__device__ __forceinline__ int32_t part_of(int32_t key) {
    const int32_t near = key < 4096 ? key >> 6 : 48 + (key >> 8);
    const int32_t far = key < 65536 ? 112 + (key >> 9) : 176 + (key >> 10);
    return key < 32768 ? near : far;
}
__device__ __forceinline__ int64_t part_begin(int32_t part) {
    const int64_t near = part < 64 ? int64_t(part) * 64 : int64_t(part - 48) * 256;
    const int64_t far = part < 240 ? int64_t(part - 112) * 512 : int64_t(part - 176) * 1024;
    return part < 176 ? near : far;
}

// What a block works on; in shared memory, because registers are scarce and it is seldom needed.
struct MmaPlace {
    int32_t begin, stop;  // keys, or entries of the list
    int32_t n_keys;       // that some query sees, or entries
    int32_t last_end;     // of the keys that some query sees
    int32_t row, column, n_queries;  // first row and query of the block, its queries
    int32_t unused;
};

// Shared memory, in bytes from its begin. STAGES tiles; fragments of the queries, HELD of each
// slice's steps excepted, which stay in registers; scores by slice; fragments of weights; what is
// known of queries and keys.
template <int RANK, int ROPE, int M, int HELD, int STAGES>
struct MmaShape {
    static constexpr int WIDTH = RANK + ROPE, QUERIES = 16 * M;
    static constexpr int STEPS = WIDTH / 16 / SLICES;  // of 16 channels, of a slice
    static constexpr int IN_SHARED = STEPS - HELD;
    static constexpr int PITCH = 4 * WIDTH + 16;  // rows start 4 banks apart
    static constexpr int TILE_BYTES = STEP * PITCH;
    static constexpr int OWN_QUERIES = M == 4 ? 2 : 1;  // of a warp's scores, in 16
    static constexpr int OWN_KEYS = M == 1 ? 1 : 2;     // in 8
    static constexpr int CHANNELS = RANK / MMA_WARPS / 8;  // of a warp's result, in 8
    static constexpr int GROUP = CHANNELS < 8 / M ? CHANNELS : 8 / M;  // of these at once
    static constexpr int Q_AT = STAGES * TILE_BYTES;
    static constexpr int SCORES_AT = Q_AT + SLICES * IN_SHARED * M * 2 * WARP_LANES * 16;
    static constexpr int WEIGHTS_AT = SCORES_AT + SLICES * QUERIES * STEP * 4;
    static constexpr int QUERY_AT = WEIGHTS_AT + M * 2 * WARP_LANES * 16;
    static constexpr int KEYS_AT = QUERY_AT + 4 * QUERIES * 4;
    static constexpr int BYTES = KEYS_AT + STAGES * STEP * 4 + sizeof(MmaPlace);
    static_assert(RANK % 128 == 0 && WIDTH % 64 == 0 && HELD <= STEPS && STAGES >= 2, "no such shape");
};

// Grid (query blocks, any number of blocks which share the chunks), 256 threads, MmaShape::BYTES of
// dynamic shared memory. Query blocks: ceil(n_rows * n_heads / (16 * M)), or with a list
// n_rows * ceil(n_heads / (16 * M)). Parameters as of latent_partial in latent/attend.cu, but
//   workspace  f32 [n_rows, n_heads, n_slots, RANK] weighted sums, slot = chunk; behind them
//              f32 [n_rows, n_heads, n_slots, 2] references (exponents of 2) and sums of weights
template <int F, int RANK, int ROPE, int M, int HELD, int STAGES>
__global__ void __launch_bounds__(MMA_THREADS, 1)
    latent_mma(const float* __restrict__ q, const uint8_t* __restrict__ plane, int32_t n_rows,
               int32_t n_heads, int32_t capacity, const int32_t* NULLABLE list, int32_t n_list,
               int32_t counted, float scale, const int32_t* __restrict__ len_d,
               float* __restrict__ workspace, int32_t n_slots) {
#if MEMRA_CUDA && __CUDA_ARCH__ < 800
    __trap();  // the selector asks for sm_80
#else
    typedef MmaShape<RANK, ROPE, M, HELD, STAGES> S;
    typedef RawRow<F, S::WIDTH> Row;
    DYN_SMEM(uint8_t, shared);
    uint4* const q_parts = reinterpret_cast<uint4*>(shared + S::Q_AT);  // [slice][step][m][2][lane]
    float* const scores = reinterpret_cast<float*>(shared + S::SCORES_AT);  // [slice][query][key]
    uint32_t* const weights = reinterpret_cast<uint32_t*>(shared + S::WEIGHTS_AT);  // [m][2][lane][4]
    float* const lifts = reinterpret_cast<float*>(shared + S::QUERY_AT);
    float* const factors = lifts + S::QUERIES;  // of a raw score
    float* const alphas = factors + S::QUERIES;
    int32_t* const ends = reinterpret_cast<int32_t*>(alphas + S::QUERIES);
    int32_t* const exponents = reinterpret_cast<int32_t*>(shared + S::KEYS_AT);  // [stage][key]
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x, warp = thread / WARP_LANES, lane = thread % WARP_LANES;
    const int g = lane / 4, t = lane % 4;
    MmaPlace& place = *reinterpret_cast<MmaPlace*>(exponents + STAGES * STEP);

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
    const float* const own_q = q + (size_t(first_row) * n_heads + first_query) * S::WIDTH;
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
    }
    __syncthreads();
    const bool idle = place.begin >= place.stop;

    // The rows of the tile at a key into a stage; a warp brings those that it will split.
    const auto ask = [&](int32_t tile_at, int stage) {
        if (tile_at < place.stop) {
#pragma unroll 1
            for (int key = warp; key < STEP; key += MMA_WARPS) {
                const int32_t at = tile_at + key;
                int32_t row = at < place.n_keys ? at : -1;
                if (list != nullptr && row >= 0) row = list[size_t(place.row) * n_list + at];
                const bool seen = row >= 0 && row < place.last_end;
                uint8_t* const to = shared + stage * S::TILE_BYTES + key * S::PITCH;
                if (seen) {
                    Row::ask(to, plane, row, lane);
                } else {
                    Row::clear(to, lane);
                }
                if (lane == 0) exponents[stage * STEP + key] = seen ? 0 : HIDDEN_ROW;
            }
        }
        cp_async_commit();
    };
    const auto split = [&](int stage) {
        __syncwarp();  // the copies of the other lanes
#pragma unroll 1
        for (int key = warp; key < STEP; key += MMA_WARPS) {
            uint8_t* const row = shared + stage * S::TILE_BYTES + key * S::PITCH;
            const int exponent = split_row<F, S::WIDTH>(row, lane);
            int32_t* const to = exponents + stage * STEP + key;
            if (lane == 0 && *to != HIDDEN_ROW) *to = exponent;
        }
    };

#pragma unroll
    for (int i = 0; i < STAGES; i++) ask(place.begin + i * STEP, i);
    // Of each query: the power of two that lifts it, and the factor that takes it back.
    for (int query = warp; query < S::QUERIES; query += MMA_WARPS) {
        float most = 0.0f;
        if (query < n_queries && !idle)
            for (int c = 4 * lane; c < S::WIDTH; c += 4 * WARP_LANES) {
                const float4 x =
                    *reinterpret_cast<const float4*>(own_q + size_t(query) * S::WIDTH + c);
                most = max_or_nan(most, max_or_nan(max_or_nan(fabsf(x.x), fabsf(x.y)),
                                                   max_or_nan(fabsf(x.z), fabsf(x.w))));
            }
        int exponent = exponent_above(warp_max_bits(most));
        exponent = exponent < -100 ? -100 : exponent;
        if (lane == 0) {
            lifts[query] = power_of_two(LIFTED - exponent);
            factors[query] = power_of_two(exponent - LIFTED) * scale * LOG2_E;
            ends[query] = query >= n_queries ? 0 : list != nullptr ? n_list : end_of(query);
        }
    }
    __syncthreads();
    const int slice = warp / 2;
    const int m_first = M == 1 ? 0 : warp % 2 * S::OWN_QUERIES;
    const int key_first = M == 1 ? warp % 2 * 8 : 0;
    Halves held[HELD > 0 ? HELD : 1][S::OWN_QUERIES];
    if (!idle) {
#pragma unroll 1
        for (int i = warp; i < SLICES * S::IN_SHARED * M; i += MMA_WARPS) {
            const int m = i % M, step = i / M % S::IN_SHARED, of = i / M / S::IN_SHARED;
            const Halves made = query_halves(own_q, S::WIDTH, n_queries, 16 * m,
                                             (step * SLICES + of) * 16, lifts + 16 * m);
            uint4* const to = q_parts + size_t(i) * 2 * WARP_LANES + lane;
            to[0] = make_uint4(made.coarse[0], made.coarse[1], made.coarse[2], made.coarse[3]);
            to[WARP_LANES] = make_uint4(made.fine[0], made.fine[1], made.fine[2], made.fine[3]);
        }
#pragma unroll
        for (int h = 0; h < HELD; h++)
#pragma unroll
            for (int m = 0; m < S::OWN_QUERIES; m++)
                held[h][m] = query_halves(own_q, S::WIDTH, n_queries, 16 * (m_first + m),
                                          ((S::IN_SHARED + h) * SLICES + slice) * 16,
                                          lifts + 16 * (m_first + m));
    }
    cp_async_wait<STAGES - 1>();
    if (!idle) split(0);
    __syncthreads();

    constexpr int PER = 16 / M;  // threads of a query in between: each has M neighbouring keys
    const int query = thread / PER, sub = thread % PER;
    float reference = NO_REFERENCE, total = 0.0f;
    float acc[M][S::CHANNELS][4];
#pragma unroll
    for (int i = 0; i < M * S::CHANNELS * 4; i++) acc[i / 4 / S::CHANNELS][i / 4 % S::CHANNELS][i % 4] = 0.0f;

    int stage = 0;
    int32_t edge = edge_behind(place.begin);
#pragma unroll 1
    for (int32_t at = place.begin; at < place.stop; at += STEP) {
        const bool last = at + STEP >= edge || at + STEP >= place.stop;  // of its chunk
        const uint8_t* const tile = shared + stage * S::TILE_BYTES;
        {  // raw scores of this warp's slice
            // It begins in units that are alike in what comes first.
            const int flip = coarse_first(slice * 2), upper = 16 - 2 * flip;
            const int own = across_offset(lane, S::PITCH, 32, upper);
            const uint8_t* const slice_tile = tile + key_first * S::PITCH + slice * 64 + flip;
            float main[S::OWN_QUERIES][S::OWN_KEYS][4], rest[S::OWN_QUERIES][S::OWN_KEYS][4];
#pragma unroll
            for (int m = 0; m < S::OWN_QUERIES; m++)
#pragma unroll
                for (int n = 0; n < S::OWN_KEYS; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) main[m][n][j] = rest[m][n][j] = 0.0f;
#pragma unroll
            for (int step = 0; step < S::STEPS; step++) {
                uint32_t b[S::OWN_KEYS][4];  // coarse, coarse, fine, fine
                const uint8_t* const from = slice_tile + step * (SLICES * 64);
#pragma unroll
                for (int n = 0; n < S::OWN_KEYS; n++)
                    load_along_x4(b[n], from + n * 8 * S::PITCH, own, S::PITCH, 32, upper);
#pragma unroll
                for (int m = 0; m < S::OWN_QUERIES; m++) {
                    Halves a = held[step < S::IN_SHARED ? 0 : step - S::IN_SHARED][m];
                    if (step < S::IN_SHARED)
                        a = load_halves(q_parts + ((slice * S::IN_SHARED + step) * M + m_first + m) *
                                                      2 * WARP_LANES + lane);
#pragma unroll
                    for (int n = 0; n < S::OWN_KEYS; n++)
                        mma_m16n8k16_f16(main[m][n], a.coarse, b[n], main[m][n]);
#pragma unroll
                    for (int n = 0; n < S::OWN_KEYS; n++)
                        mma_m16n8k16_f16(rest[m][n], a.coarse, b[n] + 2, rest[m][n]);
#pragma unroll
                    for (int n = 0; n < S::OWN_KEYS; n++)
                        mma_m16n8k16_f16(rest[m][n], a.fine, b[n], rest[m][n]);
                }
            }
            // Every other pair of rows has its keys 8 apart, so that a warp meets each bank once.
#pragma unroll
            for (int m = 0; m < S::OWN_QUERIES; m++)
#pragma unroll
                for (int n = 0; n < S::OWN_KEYS; n++)
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
        {  // weights
            const int key = sub * M, stored = key ^ (query / 2 % 2 * 8);
            float score[M], high = -INF_F32;
            int exponent[M];
#pragma unroll
            for (int j = 0; j < M; j++) {
                const float* from = scores + query * STEP + stored + j;
                const float dot = (from[0] + from[S::QUERIES * STEP]) +
                                  (from[2 * S::QUERIES * STEP] + from[3 * S::QUERIES * STEP]);
                exponent[j] = exponents[stage * STEP + key + j];
                const bool seen = at + key + j < ends[query] && exponent[j] != HIDDEN_ROW;
                const bool wild = exponent[j] == WILD_ROW;
                exponent[j] = exponent[j] >= HIDDEN_ROW ? 0 : exponent[j];
                score[j] = dot * (power_of_two(exponent[j] - LIFTED) * factors[query]);
                score[j] = !seen ? -INF_F32 : wild ? NAN_F32 : score[j];
                // What the key contributes at most: its weight times its row.
                high = fmaxf(high, score[j] + float(exponent[j]));
            }
#pragma unroll
            for (int offset = 1; offset < PER; offset *= 2)
                high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, offset));
            const float old = reference;
            reference = fmaxf(reference, ceilf(high));
            const float alpha = exp2_whole(old - reference);
            if (sub == 0) alphas[query] = alpha;
            uint16_t coarse[M], fine[M];
#pragma unroll
            for (int j = 0; j < M; j++) {
                score[j] = exp2_fast(score[j] - reference);
                const float lifted = score[j] * power_of_two(exponent[j] + LIFTED);
                coarse[j] = f32_to_f16(coarse_part(lifted));
                fine[j] = f32_to_f16(lifted - coarse_part(lifted));
            }
            // Fragments of A: pair p of keys is lane t = p % 4, and register p / 4 * 2 + row / 8.
            const int row = query % 16, pair = key / 2;
            uint32_t* const to =
                weights + (query / 16 * 2 * WARP_LANES + row % 8 * 4 + pair % 4) * 4 + pair / 4 * 2 + row / 8;
            if constexpr (M == 1) {
                reinterpret_cast<uint16_t*>(to)[key % 2] = coarse[0];
                reinterpret_cast<uint16_t*>(to + WARP_LANES * 4)[key % 2] = fine[0];
            } else {
#pragma unroll
                for (int j = 0; j < M; j += 2) {  // M = 4: its two pairs are neighbours, never 4 apart
                    to[j / 2 * 4] = coarse[j] | uint32_t(coarse[j + 1]) << 16;
                    to[j / 2 * 4 + WARP_LANES * 4] = fine[j] | uint32_t(fine[j + 1]) << 16;
                }
            }
            float sum = score[0];  // in a tree over the 16 keys
            if constexpr (M == 2) sum = sum + score[1];
            if constexpr (M == 4) sum = (sum + score[1]) + (score[M / 2] + score[M - 1]);
#pragma unroll
            for (int offset = 1; offset < PER; offset *= 2)
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
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const int next = stage + 1 == STAGES ? 0 : stage + 1;
        if (warp < MMA_WARPS / 2 && at + STEP < place.stop) split(next);
        {  // this warp's channels
            float old[M][2];
            bool moved = false;
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    old[m][j] = alphas[16 * m + g + 8 * j];
                    moved = moved || old[m][j] != 1.0f;
                }
            if (__any_sync(FULL_MASK, moved)) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < S::CHANNELS; n++)
#pragma unroll
                        for (int j = 0; j < 4; j++) acc[m][n][j] *= old[m][j / 2];
            }
            Halves p[M];
#pragma unroll
            for (int m = 0; m < M; m++)
                p[m] = load_halves(reinterpret_cast<const uint4*>(weights) + m * 2 * WARP_LANES + lane);
#pragma unroll
            for (int n0 = 0; n0 < S::CHANNELS; n0 += S::GROUP) {
                uint32_t b[S::GROUP][4];
#pragma unroll
                for (int n = 0; n < S::GROUP; n++) {
                    const int unit = warp * S::CHANNELS + n0 + n, flip = coarse_first(unit);
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
                        for (int m = 0; m < M; m++) {
                            float* const to = acc[m][n0 + n];
                            mma_m16n8k16_f16(to, product == 2 ? p[m].fine : p[m].coarse,
                                             product == 1 ? b[n] + 2 : b[n], to);
                        }
            }
        }
        if (warp >= MMA_WARPS / 2 && at + STEP < place.stop) split(next);
        if (last) {
            const int32_t slot = list != nullptr ? at / LIST_PART : part_of(at);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int row = 16 * m + g + 8 * j;
                    const size_t column = size_t(place.column) + row;
                    float* const to = workspace + (column * n_slots + slot) * RANK + warp * S::CHANNELS * 8 + 2 * t;
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
__global__ void __launch_bounds__(MMA_THREADS)
    latent_mma_combine(const float* __restrict__ workspace, float* __restrict__ out,
                       float* NULLABLE lse, int32_t capacity, int32_t n_list, int32_t counted,
                       const int32_t* __restrict__ len_d, int32_t n_slots) {
    __shared__ float4 parts[MMA_WARPS][WARP_LANES];
    __shared__ float pivots[MMA_WARPS], weights[MMA_WARPS];
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

    // Chunk c belongs to warp c % 8.
    float pivot = NO_REFERENCE, weight = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    constexpr int BATCH = 8;  // chunks that are asked for at once
    for (int32_t c = warp; c < behind; c += BATCH * MMA_WARPS) {
        float2 mark[BATCH];
        float4 value[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int32_t slot = c + i * MMA_WARPS;
            mark[i] = make_float2(NO_REFERENCE, 0.0f), value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (slot < behind) {
                mark[i] = *reinterpret_cast<const float2*>(own_marks + size_t(slot) * 2);
                value[i] = *reinterpret_cast<const float4*>(own + size_t(slot) * RANK);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (mark[i].y == 0.0f) continue;  // the query sees no key of this chunk
            const float high = fmaxf(pivot, mark[i].x);
            const float old = exp2_whole(pivot - high), add = exp2_whole(mark[i].x - high);
            sum.x = fmaf(value[i].x, add, sum.x * old), sum.y = fmaf(value[i].y, add, sum.y * old);
            sum.z = fmaf(value[i].z, add, sum.z * old), sum.w = fmaf(value[i].w, add, sum.w * old);
            weight = fmaf(mark[i].y, add, weight * old);
            pivot = high;
        }
    }
    parts[warp][lane] = sum;
    if (lane == 0) pivots[warp] = pivot, weights[warp] = weight;
    __syncthreads();
    if (warp == 0) {
        float high = NO_REFERENCE, all = 0.0f;
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < MMA_WARPS; w++) high = fmaxf(high, pivots[w]);
#pragma unroll
        for (int w = 0; w < MMA_WARPS; w++) {
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
