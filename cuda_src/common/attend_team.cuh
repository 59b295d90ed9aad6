// How a team of warps shares a step of attention on integer tensor cores (common/attend_step.cuh): which keys,
// queries and channels are whose, what the warps keep, and what they tell one another.
#pragma once
#include "common/attend_walk.cuh"
#include "common/device.cuh"
#include "common/fragments.cuh"
#include "common/joined_chunks.cuh"
#include "common/q8_codes.cuh"

constexpr int K_BLOCK_BYTES = Q8_BLOCK_BYTES, V_BLOCK_BYTES = 24;
constexpr int HALF = STEP / 2;       // keys that are scored together, the rows of the tensor cores
constexpr int CHANNELS = 64;         // of V, a warp's share
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int WEIGHT_BITS = 23;      // p * scale < 2^23 in units of the fixed point
constexpr int SPARE_BITS = 2;        // that a new reference leaves, so that it lasts
constexpr int QUERY_BITS = 22;       // |q| < 2^22
// Floats whose low bits count whole numbers: from -2^22, and from 0 on.
constexpr int32_t SIGNED_BITS = 0x4B400000;
constexpr float SIGNED = 12582912.0f, UNSIGNED = 8388608.0f;

// Blocks of a query of 256 channels that registers hold.
#if MEMRA_CUDA && __CUDA_ARCH__ >= 1000
constexpr int MOST_HELD = 1;
#else
constexpr int MOST_HELD = 3;
#endif

template <int D>
__host__ __device__ constexpr int team_size() {
    return D / CHANNELS;
}

// What a warp of a team scores: halves of the keys, and queries (columns of them in a lane).
template <int D, int Q>
struct Share {
    static constexpr int TEAM = team_size<D>();
    static constexpr int HALVES = TEAM == 1 ? 2 : 1;
    static constexpr int QUERIES = TEAM == 4 ? Q / 2 : Q;
    static constexpr int COLUMNS = QUERIES / 4;
    static constexpr int ALL = HALVES * 2 * COLUMNS;  // scores of a lane
    static_assert(QUERIES == 4 || QUERIES == 8, "a warp scores 4 or 8 queries");
    static __device__ __forceinline__ int half(int member) { return TEAM == 1 ? 0 : member % 2; }
    static __device__ __forceinline__ int first_query(int member) {
        return TEAM == 4 ? member / 2 * QUERIES : 0;
    }
};

// The query of lane group g, and of an accumulator's column 2t + i, when Q queries lie on 8 columns.
template <int Q>
__device__ __forceinline__ int query_of_group(int g) { return Q == 8 ? g : g / 2; }
template <int Q>
__device__ __forceinline__ int query_of_column(int t, int i) { return Q == 8 ? 2 * t + i : t; }

// Where the weight of key 16 * half + 8 * r + 2t + i of a query stands, in bytes: at
// (128 * query + 32 * t + 8 * r + 4 * i + weight_turn(query)) ^ 16 * half, which keeps rows of two
// neighbouring queries on different banks, and halves of a row together.
__device__ __forceinline__ int weight_turn(int query) { return (query ^ query >> 1) % 2 * 16; }

// What the warps of a team tell one another of a step: weights; references that a warp raised for its
// half of the keys, and whether it did; at the end of a chunk the sums of weights of both halves.
template <int D, int Q>
struct alignas(16) Exchange {
    float weights[Q][STEP];
    float references[2][Q];
    float totals[2][Q];
    int32_t raised[4];
};

// Where the lanes read and write in a step, in bytes. In shared memory, the same for all warps: to
// compute it anew in each step would cost a twentieth of the instructions, and registers are scarce.
struct LaneOffsets {
    int4 fill[WARP_LANES];  // in V of the key whose scales it compares, of its key; in `fifth`, `scales`
    int4 read[WARP_LANES];  // in K; in V for load_across; in weights: the lane's own, of its query

    template <int D, int Q, int PITCH_K, int PITCH_V>
    __device__ __forceinline__ void set(int lane) {
        const int g = lane / 4, t = lane % 4;
        const int first = query_of_column<Share<D, Q>::QUERIES>(t, 0), query = query_of_group<Q>(g);
        fill[lane] = make_int4(lane % HALF * PITCH_V + lane / HALF * (D / 64 * V_BLOCK_BYTES),
                               lane * PITCH_V,
                               lane / 16 * 64 + lane % 8 / 2 * 16 + lane / 8 % 2 * 2 + lane % 2,
                               lane % 8 / 2 * 32 + lane / 8 * 8 + lane % 2 * 4);
        read[lane] = make_int4(g * PITCH_K, across_offset(lane, PITCH_V, 8 * PITCH_V, 16),
                               128 * first + 32 * (g / 2) + 4 * (g % 2) + weight_turn(first),
                               128 * query + 32 * t + weight_turn(query));
    }
};

template <class T>
__device__ __forceinline__ T* displaced(T* base, int bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(base) + bytes);
}
template <class T>
__device__ __forceinline__ const T* displaced(const T* base, int bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(base) + bytes);
}

// What a warp keeps in shared memory. Of a step: the exponents of the largest scale of V of the keys that it
// scores; scales and minima of its 64 channels, of the keys 16 * half + 8 * r + 2t + i at 8t + 4 * half +
// 2r + i; the fifth bits of their codes, as [block][half of the keys][t][pair of bytes]: byte e of the
// first word belongs to key 16 * half + 8 * (e / 2) + 2 * t + e % 2. Of each query: the factor of its
// raw scores, its reference, the keys that it sees, and its column of the partial results of the chunk, or -1.
template <int D, int Q>
struct alignas(16) WarpTables {
    float exponent[Share<D, Q>::HALVES * HALF];
    float scales[2][STEP];
    float minima[2][STEP + 4];  // of two blocks on different banks
    uint2 fifth[2][2][4][2];
    float factor[Q], reference[Q];
    int2 seen[Q];
    int32_t column[Q];
};

// The pitch of V rows puts 8 rows 4 banks apart.
__host__ __device__ constexpr int v_pitch(int bytes) { return (bytes + 31) / 32 * 32 + 16; }

// Sums of a warp over a chunk: weights of each half of the keys that it scores, of the queries of its
// columns there; p * minimum, for the query of its lane group, of both blocks, or with Q = 4 of the
// lane group's one (the neighbouring group has the other); for the queries of the columns: digits of
// p * scale times the codes of V, [digit][tile of 16 channels][column]. With Q = 4 the columns 2t and
// 2t + 1 of the first hold digits 0 and 1.
template <int D, int Q>
struct WarpState {
    using Own = Share<D, Q>;
    static constexpr int DIGITS = Q == 8 ? 3 : 2;
    static constexpr int BLOCKS = Q == 8 ? 2 : 1;
    // Digits of the query of a column: 0 and 1 of 8 queries; 0 or 1, and 2 or none, of 4. Of the last
    // blocks in shared memory, as is digit 2 of 8 queries; registers do not suffice.
    static constexpr int HELD = D > 128 ? MOST_HELD : D / 32;
    uint32_t q[HELD][4];
    float weight[Own::HALVES][Own::COLUMNS];
    float minima[BLOCKS];
    int32_t sums[DIGITS][4][4];
};

// What a team keeps of its queries in shared memory, for each lane of the warps that score them.
template <int D, int Q>
struct QueryTables {
    static constexpr int REST = D / 32 - WarpState<D, Q>::HELD;
    static constexpr int GROUPS = Q / Share<D, Q>::QUERIES;
    static constexpr bool THREE = Share<D, Q>::QUERIES == 8;
    uint4 rest[REST > 0 ? GROUPS : 1][REST > 0 ? REST : 1][REST > 0 ? WARP_LANES : 1];
    uint2 high[THREE ? D / 32 : 1][THREE ? WARP_LANES : 1];
};

template <int D, int Q>
__device__ __forceinline__ void begin_chunk(WarpState<D, Q>& state, WarpTables<D, Q>& tables) {
    using Own = Share<D, Q>;
    const int lane = threadIdx.x % WARP_LANES;
    if (lane < Q) tables.reference[lane] = NO_REFERENCE;
#pragma unroll
    for (int c = 0; c < Own::COLUMNS; c++) {
        for (int h = 0; h < Own::HALVES; h++) state.weight[h][c] = 0.0f;
    }
    for (int b = 0; b < WarpState<D, Q>::BLOCKS; b++) state.minima[b] = 0.0f;
#pragma unroll
    for (int i = 0; i < WarpState<D, Q>::DIGITS * 16; i++) state.sums[i / 16][i / 4 % 4][i % 4] = 0;
}

// Waits for the warps of a team. On the host device all warps of a block take the same steps.
template <int TEAM>
__device__ __forceinline__ void team_barrier(int team) {
#if MEMRA_CUDA
    if constexpr (TEAM == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM * WARP_LANES) : "memory");
#else
    __syncthreads();
#endif
}
