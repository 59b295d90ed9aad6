// How a block of latent_mma lies on queries, channels and shared memory, and where chunks begin.
#pragma once
#include "common/latent_step.cuh"

constexpr int32_t MOST_KEYS = 0x7fffffff - 1024;
constexpr int SPLITTERS = 8, SCORERS = 8;  // warps
constexpr int AHEAD = 2;        // steps of a score that may be under way at once
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

// Shared memory, in bytes from its begin: STAGES tiles; fragments of the queries, but those of the
// last HELD steps of each slice, which stay in registers; scores by slice; fragments of weights; what
// is known of queries and keys.
template <int RANK, int ROPE, int M, int HELD, int STAGES, int WARPS>
struct MmaShape {
    static constexpr int WIDTH = RANK + ROPE, QUERIES = 16 * M, THREADS = WARPS * WARP_LANES;
    static constexpr int STEPS = WIDTH / 16 / SLICES;  // of 16 channels, of a slice
    static constexpr int IN_SHARED = STEPS - HELD;
    static constexpr int PITCH = 4 * WIDTH + 16;  // rows start 4 banks apart
    static constexpr int TILE_BYTES = STEP * PITCH;
    // Rows are brought and split by the last eight warps. Where there are more, these do nothing else
    // while the first eight make scores and weights of the tile before.
    static constexpr int FIRST_SPLITTER = WARPS - SPLITTERS;
    // Scores: the two warps of a slice share the sets of queries, or the halves of the keys.
    static constexpr int BY_SETS = M > 1 ? 2 : 1, BY_KEYS = M > 1 ? 1 : 2;
    static constexpr int SCORE_SETS = M / BY_SETS, SCORE_KEYS = 2 / BY_KEYS;  // of a warp; keys in 8
    // Weights: a thread has M neighbouring keys of a query.
    static constexpr int SHARERS = STEP / M;
    // Results: the warps share the channels, and halves of the sets if there are many.
    static constexpr int HALVES = WARPS > 8 && M > 1 ? 2 : 1;
    static constexpr int SETS = M / HALVES;                       // of a warp
    static constexpr int CHANNELS = RANK / (WARPS / HALVES) / 8;  // of a warp, in 8
    static constexpr int AT_ONCE = (WARPS > 8 ? 4 : 8) / SETS;
    static constexpr int GROUP = CHANNELS < AT_ONCE ? CHANNELS : AT_ONCE;  // of these at once
    static constexpr int FRAGMENT = 2 * WARP_LANES * 16;  // bytes
    static constexpr int Q_AT = STAGES * TILE_BYTES;
    // Until the warps take them, steps that are held lie in the place of the scores; many of them in
    // that of the tiles, which then come later.
    static constexpr bool TILES_FIRST = HELD <= 1;
    static constexpr int SCORES_AT = Q_AT + SLICES * IN_SHARED * M * FRAGMENT;
    static constexpr int WEIGHTS_AT = SCORES_AT + SLICES * QUERIES * STEP * 4;
    static constexpr int KEYS_AT = WEIGHTS_AT + M * FRAGMENT;
    static constexpr int QUERY_AT = KEYS_AT + STAGES * STEP * 16;
    static constexpr int PLACE_AT = QUERY_AT + 3 * QUERIES * 4;
    static constexpr int FULL_AT = PLACE_AT + int(sizeof(MmaPlace));
    static constexpr int BYTES = FULL_AT + STAGES * SPLITTERS * 8;
    static constexpr int HELD_AT = TILES_FIRST ? SCORES_AT : 0;
    static_assert(RANK % 128 == 0 && WIDTH % 64 == 0 && HELD <= STEPS, "no such shape");
    static_assert(WARPS == 8 ? STAGES >= 2 : WARPS == 16 && STAGES >= 3, "no such shape");
};
