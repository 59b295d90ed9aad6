// One step of attention on tensor cores in f16: 32 keys, in class `exact`.
//
// A warp serves SETS sets of 8 queries of one kv head. K and V are multiplied as they are stored (e4m3 as
// f16, which holds it; formats with scales, and q beside them: common/attend_packed.cuh), q and p in parts that
// hold them:
//
//   bf16        three parts of 8 bits, which are all of an f32.
//   the others  two parts of 11 bits, the second 2^11 times as large where it has sums of its own, so that it
//               is in the range of f16 where the first is. q is lifted by a power of two a query.
//
// Tensor cores cut off low bits when they add: their sums go over 128 channels of a score, or the warp's keys
// of a step, and from there on in f32.
//
// p is held against a power of two, the query's reference. A masked key weighs exactly 0. No lane's
// sum depends on another query.
#pragma once
#include "common/attend_packed.cuh"

// Of D / 16 fragments of a set of queries so many lie in shared memory, where registers would not do.
template <int KF, int D, int SETS>
__host__ __device__ constexpr int shared_fragments() {
    return !is_packed<KF>() && D * SETS > 128 ? D / 64 : 0;
}

// What this lane holds of a set of queries: of fragment i of 16 channels the words of the query of its
// lane group, [first part 0, second part 0, first part 1, second part 1], then third parts of 0 and 1.
// The last fragments lie in `shared`, for each lane.
template <int F, int D, int N_SHARED>
struct QuerySet {
    static constexpr int HELD = D / 16 - N_SHARED;
    uint32_t words[HELD][query_words<F>()];
    float factor;  // of a raw score, above 0: the sign is with q

    __device__ __forceinline__ void load(const float* q, int lane, float scale, float softcap,
                                         uint4 (*shared)[WARP_LANES]) {
        const int t = lane % 4;
        float x[D / 16][4];
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            if constexpr (F == E4M3) {
                const float4 four = *reinterpret_cast<const float4*>(q + 16 * i + 4 * t);
                x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
            } else {
                const float2 low = *reinterpret_cast<const float2*>(q + 16 * i + 2 * t);
                const float2 high = *reinterpret_cast<const float2*>(q + 16 * i + 8 + 2 * t);
                x[i][0] = low.x, x[i][1] = low.y, x[i][2] = high.x, x[i][3] = high.y;
            }
#pragma unroll
            for (int e = 0; e < 4; e++) most = fmaxf(most, fabsf(x[i][e]));
        }
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
        int32_t above = int32_t(__float_as_uint(most) >> 23) - 126;  // |q| < 2^above
        above = F == BF16 ? LIFTED : above < -90 ? -90 : above > 128 ? 128 : above;
        const float lift = scale < 0.0f ? -power_of_two(LIFTED - above) : power_of_two(LIFTED - above);
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint32_t parts[weight_parts<F>()];
                split_two<F>(x[i][2 * e] * lift, x[i][2 * e + 1] * lift, parts);
                if (i < HELD) {
                    uint32_t* const to = words[i < HELD ? i : 0];
                    to[2 * e] = parts[0], to[2 * e + 1] = parts[1];
                    if constexpr (F == BF16) to[4 + e] = parts[2];
                } else {
                    uint4& to = shared[i - HELD][lane];
                    if (e == 0) to.x = parts[0], to.y = parts[1];
                    else to.z = parts[0], to.w = parts[1];
                }
            }
        const float natural = power_of_two(above - LIFTED) * unit_of<F>() * fabsf(scale);
        factor = fmaxf(softcap > 0.0f ? natural : natural * LOG2_E, LEAST_FACTOR);
    }
};

template <int KF, int D, int SETS>
struct QueriesOf {
    static_assert(KF != BF16 || shared_fragments<KF, D, SETS>() == 0, "three parts are too many");
    typedef QuerySet<KF, D, shared_fragments<KF, D, SETS>()> Set;
};
template <int D, int SETS>
struct QueriesOf<Q8_0, D, SETS> {
    typedef DigitSet<D> Set;
};

template <int F, int D>
__host__ __device__ constexpr int fragments_of_values() {
    if constexpr (is_packed<F>()) return Pieces<F, D>::TILES + Pieces<F, D>::MINIMA;
    else return D / 16;
}

// Sums of a warp over a chunk: weights for the query of its lane group (a part of them a lane), p * V for
// the queries of its columns, [fragment of V][column].
template <int KF, int VF, int D, int SETS>
struct WarpState {
    static constexpr int TILES = fragments_of_values<VF, D>();
    typename QueriesOf<KF, D, SETS>::Set q[SETS];
    float reference[SETS], weight[SETS];
    float sums[SETS][TILES][4];
};

template <int KF, int VF, int D, int SETS>
__device__ __forceinline__ void begin_chunk(WarpState<KF, VF, D, SETS>& state) {
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        state.reference[s] = NO_REFERENCE, state.weight[s] = 0.0f;
        // Makes it a branch: else each step chooses, at an instruction a sum.
        if constexpr (halves_of<KF, VF>() == 2)
            state.reference[s] = __int_as_float(kept(__float_as_int(state.reference[s])));
#pragma unroll
        for (int i = 0; i < 4 * state.TILES; i++) state.sums[s][i / 4][i % 4] = 0.0f;
    }
}

// A fragment of the queries of a set. shared: those in shared memory, of each set.
template <int KF, int VF, int D, int SETS>
__device__ __forceinline__ void query_fragment(const WarpState<KF, VF, D, SETS>& state, int s, int at,
                                               const uint4 (*shared)[WARP_LANES], int lane,
                                               uint32_t* words) {
    constexpr int N_SHARED = shared_fragments<KF, D, SETS>(), HELD = D / 16 - N_SHARED;
    if (at < HELD) {
#pragma unroll
        for (int e = 0; e < query_words<KF>(); e++) words[e] = state.q[s].words[at < HELD ? at : 0][e];
    } else {
        const uint4 four = shared[s * N_SHARED + at - HELD][lane];
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
}

// Raw scores of the keys 8 * tile + 2t + i. shared: the fragments of q in shared memory, of each set.
template <int PITCH, int KF, int VF, int D, int SETS, int N>
__device__ __forceinline__ void score_keys(const WarpState<KF, VF, D, SETS>& state, const uint8_t* k,
                                           int own, int lane, const uint4 (*shared)[WARP_LANES],
                                           float (&scores)[SETS][N][2]) {
    constexpr int CHAIN = D < 128 ? D / 16 : 8;  // fragments whose sum the tensor cores make
#pragma unroll
    for (int pair = 0; pair < N / 2; pair++) {
#pragma unroll
        for (int first = 0; first < D / 16; first += CHAIN) {
            float low[SETS][2][4], rest[SETS][KF == BF16 ? 2 : 1][4];
#pragma unroll
            for (int i = 0; i < SETS * 8; i++) low[i / 8][i / 4 % 2][i % 4] = 0.0f;
            if constexpr (KF == BF16) {
#pragma unroll
                for (int i = 0; i < SETS * 8; i++) rest[i / 8][i / 4 % 2][i % 4] = 0.0f;
            }
#pragma unroll
            for (int half = 0; half < CHAIN / 2; half++) {
                uint32_t b[2][4];
                load_keys<KF>(b, k + pair * 16 * PITCH + (first + 2 * half) * 16 * element_bytes<KF>(),
                              own, PITCH);
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int s = 0; s < SETS; s++) {
                        uint32_t q[query_words<KF>()];
                        query_fragment(state, s, first + 2 * half + i, shared, lane, q);
#pragma unroll
                        for (int tile = 0; tile < 2; tile++) {
                            multiply<KF>(low[s][tile], q, b[i] + 2 * tile, low[s][tile]);
                            if constexpr (KF == BF16) {
                                const uint32_t third[4] = {q[4], 0u, q[5], 0u};
                                multiply<KF>(rest[s][tile], third, b[i] + 2 * tile, rest[s][tile]);
                            }
                        }
                    }
            }
#pragma unroll
            for (int s = 0; s < SETS; s++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& score = scores[s][2 * pair + i / 2][i % 2];
                    const float* const found = low[s][i / 2];
                    score = add_parts<KF>(first == 0 ? 0.0f : score, found[i % 2], found[2 + i % 2]);
                    if constexpr (KF == BF16) score = score + rest[s][i / 2][i % 2];
                }
        }
    }
}

// Raises the reference of the lane group's query if `highest` is too far above it.
template <int KF, int VF, int D, int SETS>
__device__ __forceinline__ void raise(WarpState<KF, VF, D, SETS>& state, int s, float highest, int t) {
    highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));
    const float old = state.reference[s];
    constexpr int TOP = top_of_weights<VF>();
    if (highest - TOP > old) state.reference[s] = ceilf(highest) - (TOP - ROOM);
    const float shrink = exp2_whole(old - state.reference[s]);
    state.weight[s] = state.weight[s] * shrink;
    const float shrink0 = __shfl_sync(FULL_MASK, shrink, 8 * t);
    const float shrink1 = __shfl_sync(FULL_MASK, shrink, 8 * t + 4);
#pragma unroll
    for (int m = 0; m < state.TILES; m++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            state.sums[s][m][r] = state.sums[s][m][r] * (r % 2 ? shrink1 : shrink0);
}

template <int F>
constexpr uint32_t ONE = F == BF16 ? 0x3F80u : 0x3C00u;

// Adds the products of a fragment of values, a: [half of the keys][word].
template <int VF, int HALVES>
__device__ __forceinline__ void add_fragment(float (&sums)[4], const uint32_t (&a)[HALVES][4],
                                             const uint32_t (&p)[weight_parts<VF>()][HALVES][2]) {
    float first[4] = {0.0f, 0.0f, 0.0f, 0.0f}, second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int part = weight_parts<VF>() - 1; part >= 0; part--)  // the smallest first
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            float* const sum = part == 0 ? first : second;
            multiply<VF>(sum, a[half], p[part][half], sum);
        }
#pragma unroll
    for (int r = 0; r < 4; r++) sums[r] = add_parts<VF>(sums[r], first[r], second[r]);
}

// Loads the values of 32 channels, [tile of channels][half of the keys][word].
template <int VF, int PITCH, int HALVES>
__device__ __forceinline__ void load_step(uint32_t (&a)[2][HALVES][4], const uint8_t* v, int own) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        uint32_t two[2][4];
        load_values<VF>(two, v + half * 16 * PITCH, own, PITCH);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i / 4][half][i % 4] = two[i / 4][i % 4];
    }
}

// Adds the values of a step; p: parts of the weights, [set][part][half of the keys][word].
template <int PITCH, int KF, int VF, int D, int SETS, int HALVES>
__device__ __forceinline__ void add_values(WarpState<KF, VF, D, SETS>& state, const uint8_t* v, int own,
                                           const uint32_t (&p)[SETS][weight_parts<VF>()][HALVES][2]) {
#pragma unroll
    for (int both = 0; both < D / 32; both++) {
        uint32_t a[2][HALVES][4];
        load_step<VF, PITCH>(a, v + both * 32 * element_bytes<VF>(), own);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int s = 0; s < SETS; s++)
                add_fragment<VF>(state.sums[s][2 * both + i], a[i], p[s]);
    }
}

// Whether this lane meets a value that is not finite.
template <int VF, int D, int PITCH, int HALVES>
__device__ __forceinline__ bool meets_wild(const uint8_t* v, int own) {
    uint32_t wild = 0u;
#pragma unroll 1
    for (int both = 0; both < D / 32; both++) {
        uint32_t a[2][HALVES][4];
        load_step<VF, PITCH>(a, v + both * 32 * element_bytes<VF>(), own);
#pragma unroll
        for (int i = 0; i < 8 * HALVES; i++) {
            constexpr uint32_t EXPONENTS = VF == BF16 ? 0x7F807F80u : 0x7C007C00u;
            constexpr uint32_t LAST = VF == BF16 ? 0x00800080u : 0x04000400u;
            // An exponent of ones carries into the sign.
            wild |= (a[i / 4 / HALVES][i / 4 % HALVES][i % 4] & EXPONENTS) + LAST;
        }
    }
    return (wild & 0x80008000u) != 0u;
}

// As add_values() in a step that some query does not see wholly: a value that is not finite, which a weight
// of 0 would not make 0, counts as 0, and makes NaN of the sums that see it. `own_key`: this lane's first key;
// seen(set): the keys that the lane group's query sees. It is rare, and so small instead of fast: the sums
// pass by.
template <int PITCH, int KF, int VF, int D, int SETS, int HALVES, class Seen>
__device__ __forceinline__ void add_wild_values(WarpState<KF, VF, D, SETS>& state, const uint8_t* v,
                                                int own,
                                                const uint32_t (&p)[SETS][weight_parts<VF>()][HALVES][2],
                                                int32_t own_key, Seen seen) {
    uint32_t ones[SETS][HALVES][2];  // where a query sees a key
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const int2 keys = seen(s);
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            const int32_t at = own_key + 8 * i;
            ones[s][i / 2][i % 2] = (at >= keys.x && at < keys.y ? ONE<VF> : 0u) |
                                    (at + 1 >= keys.x && at + 1 < keys.y ? ONE<VF> << 16 : 0u);
        }
    }
#pragma unroll 1
    for (int both = 0; both < D / 32; both++) {
        uint32_t a[2][HALVES][4], wild[2][HALVES][4];
        load_step<VF, PITCH>(a, v + both * 32 * element_bytes<VF>(), own);
#pragma unroll
        for (int i = 0; i < 8 * HALVES; i++) {
            uint32_t& two = a[i / 4 / HALVES][i / 4 % HALVES][i % 4];
            const uint32_t halves = wild_halves<VF>(two);
            two &= ~halves;
            wild[i / 4 / HALVES][i / 4 % HALVES][i % 4] = halves & (ONE<VF> | ONE<VF> << 16);
        }
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            float sums[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float met[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    multiply<VF>(met, wild[i][half], ones[s][half], met);
#pragma unroll
                for (int r = 0; r < 4; r++) sums[i][r] = state.sums[s][i][r];
                add_fragment<VF>(sums[i], a[i], p[s]);
#pragma unroll
                for (int r = 0; r < 4; r++)
                    if (met[r] > 0.0f) sums[i][r] = NAN_F32;
            }
#pragma unroll
            for (int i = 0; i < D / 4 - 8; i++)
                state.sums[s][i / 4][i % 4] = state.sums[s][i / 4 + 2][i % 4];
#pragma unroll
            for (int i = 0; i < 8; i++) state.sums[s][D / 16 - 2 + i / 4][i % 4] = sums[i / 4][i % 4];
        }
    }
}

// Adds a warp's keys of a step, from `key` on, to the sums. k, v: their rows, at the head; skew: bytes of v
// behind a piece of 16; shared: fragments of q; masked: some query does not see some key; seen as in
// add_wild_values(). The lanes have met since the step before, whose tables they read.
template <int PITCH_K, int PITCH_V, int KF, int VF, int D, int SETS, class Seen>
__device__ __forceinline__ void step(WarpState<KF, VF, D, SETS>& state, const uint8_t* k, const uint8_t* v,
                                     int skew, int lane, const uint4 (*shared)[WARP_LANES],
                                     StepTables<KF, VF, D>& tables, int32_t key, bool masked, float softcap,
                                     Seen seen) {
    constexpr int OWN_TILES = TILES / halves_of<KF, VF>();
    if constexpr (StepTables<KF, VF, D>::USED) lane = kept(lane);
    const int t = lane & 3;
    const int32_t own_key = key + 2 * t;
    float scores[SETS][OWN_TILES][2];
    uint32_t found = 0u;
    if constexpr (StepTables<KF, VF, D>::USED) {
        found = fill_tables<KF, VF, D, PITCH_K, PITCH_V>(tables, k, v, lane, masked);
        __syncwarp();
    }
    if constexpr (is_packed<KF>()) {
        score_packed<D, SETS, PITCH_K>(k, tables.k, lane, state.q, scores);
    } else {
        score_keys<PITCH_K>(state, k, lane_offset(lane, PITCH_K), lane, shared, scores);
    }
    uint32_t p[SETS][weight_parts<VF>()][OWN_TILES / 2][2];
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float factor = state.q[s].factor;
        if (softcap > 0.0f) {
#pragma unroll 1
            for (int i = 0; i < 2 * OWN_TILES; i++) {  // in turn, for the sake of its size
                const float score = softcap * tanhf(scores[s][0][0] * factor / softcap) * LOG2_E;
#pragma unroll
                for (int e = 0; e < 2 * OWN_TILES - 1; e++)
                    scores[s][e / 2][e % 2] = scores[s][(e + 1) / 2][(e + 1) % 2];
                scores[s][OWN_TILES - 1][1] = score;
            }
            factor = 1.0f;
        }
        if (masked) {
            const int2 keys = seen(s);
#pragma unroll
            for (int i = 0; i < 2 * OWN_TILES; i++) {
                const int32_t at = own_key + i / 2 * 8 + i % 2;
                if (at < keys.x || at >= keys.y) scores[s][i / 2][i % 2] = -INF_F32;
            }
        }
        float highest = -INF_F32;
#pragma unroll
        for (int i = 0; i < 2 * OWN_TILES; i++) highest = fmaxf(highest, scores[s][i / 2][i % 2]);
        highest = highest * factor;
        if (__any_sync(FULL_MASK, highest - top_of_weights<VF>() > state.reference[s]))
            raise(state, s, highest, t);
        float weights[OWN_TILES][2];
#pragma unroll
        for (int tile = 0; tile < OWN_TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                weights[tile][i] = exp2_fast(fmaf(scores[s][tile][i], factor, -state.reference[s]));
            state.weight[s] = (state.weight[s] + weights[tile][0]) + weights[tile][1];
        }
        if constexpr (is_packed<VF>()) {
            if (found & LIFTED_KEYS) {
#pragma unroll
                for (int i = 0; i < 2 * OWN_TILES; i++)
                    weights[i / 2][i % 2] = weights[i / 2][i % 2] * tables.lift[4 * t + i];
            }
        }
#pragma unroll
        for (int tile = 0; tile < OWN_TILES; tile++) {
            uint32_t parts[weight_parts<VF>()];
            split_two<VF>(weights[tile][0], weights[tile][1], parts, is_packed<VF>() ? 1.0f : FINER);
#pragma unroll
            for (int i = 0; i < weight_parts<VF>(); i++) p[s][i][tile / 2][tile % 2] = parts[i];
        }
    }
    if constexpr (is_packed<VF>()) {
        add_packed<KF, VF, D, SETS, PITCH_V>(state.sums, tables, v - skew, skew / 2, lane, p);
        if (found & WILD_KEYS) {
            uint32_t keys[SETS];
#pragma unroll
            for (int s = 0; s < SETS; s++) keys[s] = seen_bits(seen(s), key);
            spoil_packed<KF, VF, D, SETS>(state.sums, tables, lane, skew / 2, keys);
        }
    } else {
        const int own_v = lane_offset(lane, PITCH_V);
        bool wild = false;
        if (masked) {
            const bool met = meets_wild<VF, D, PITCH_V, OWN_TILES / 2>(v, own_v);
            wild = __any_sync(FULL_MASK, met);
        }
        if (wild) add_wild_values<PITCH_V>(state, v, own_v, p, own_key, seen);
        else add_values<PITCH_V>(state, v, own_v, p);
    }
}
