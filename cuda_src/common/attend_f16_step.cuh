// One step of attention on tensor cores over small floats: 32 keys of f16, bf16 or e4m3, in class `exact`.
//
// A warp serves QUERIES queries of one kv head, 8 of them a set. K and V are multiplied as they are
// stored (e4m3 as f16, which holds it), q and p in parts that hold them:
//
//   f16, e4m3  two parts of 11 bits, the second 2^11 times as large, so that it is in the range of f16
//              where the first is; summed apart. q is lifted by a power of two a query.
//   bf16       three parts of 8 bits, which are all of an f32.
//
// Tensor cores cut off low bits when they add: their sums go over 128 channels of a score, or the 32 keys
// of a step, and from there on in f32.
//
// p is held against a power of two, the query's reference. A masked key weighs exactly 0. No lane's
// sum depends on another query.
#pragma once
#include "common/attend_walk.cuh"
#include "common/block32.cuh"
#include "common/fragments.cuh"
#include "common/joined_chunks.cuh"
#include "common/mma.cuh"

constexpr int SET = 8;              // queries
constexpr int TILES = STEP / 8;     // of 8 keys
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int LIFTED = 15;          // |q| < 2^15
constexpr float FINER = 2048.0f;    // of a second part
constexpr float LEAST_FACTOR = 1.1754944e-38f;

template <int F>
__host__ __device__ constexpr int element_bytes() { return F == E4M3 ? 1 : 2; }
// Words of a fragment of q, and parts of p.
template <int F>
__host__ __device__ constexpr int query_words() { return F == BF16 ? 6 : 4; }
template <int F>
__host__ __device__ constexpr int weight_parts() { return F == BF16 ? 3 : 2; }
// p <= 2^TOP; a new reference leaves room for growth.
template <int F>
__host__ __device__ constexpr int top_of_weights() { return F == BF16 ? 0 : 15; }
constexpr int ROOM = 3;

// What a decoded number is to be multiplied with: without an instruction for it, e4m3 is moved to f16
// bit by bit, which leaves its exponent 8 too small.
#if MEMRA_CUDA && __CUDA_ARCH__ >= 890
constexpr float E4M3_UNIT = 1.0f;
#else
constexpr float E4M3_UNIT = 256.0f;
#endif
template <int F>
__host__ __device__ constexpr float unit_of() { return F == E4M3 ? E4M3_UNIT : 1.0f; }

// Rows of a stage lie 4 banks apart, so that the 8 rows of a tile are read at once.
__host__ __device__ constexpr int row_pitch(int bytes) { return (bytes + 127) / 128 * 128 + 16; }

// Two f16 of the lower two e4m3, and two of the upper two.
__device__ __forceinline__ void widen(uint32_t four, uint32_t& low, uint32_t& high) {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
#else
    const uint32_t pairs[2] = {__byte_perm(four, 0u, 0x1404), __byte_perm(four, 0u, 0x3424)};
    uint32_t found[2];
    for (int i = 0; i < 2; i++) {
        const uint32_t size = (pairs[i] >> 1) & 0x3F803F80u;
        const uint32_t nan = (size + 0x00800080u) & 0x40004000u;  // of 0x7F alone
        found[i] = size | nan | (pairs[i] & 0x80008000u);
    }
    low = found[0], high = found[1];
#endif
}

// Four tiles of 8 rows of 16 bytes in shared memory, as load_across_x4 of common/fragments.cuh, but read
// along the rows: with g = lane / 4 and t = lane % 4, out[i] is the 32-bit word number t of row g of tile i.
__device__ __forceinline__ void load_along_x4(uint32_t* out, const uint8_t* base, int own, int pitch,
                                              int odd, int upper) {
#if MEMRA_CUDA
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(base + own));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
#else
    const int lane = threadIdx.x % WARP_LANES;
    const uint8_t* word = base + (lane / 4) * pitch + (lane % 4) * 4;
    for (int i = 0; i < 4; ++i)
        out[i] = *reinterpret_cast<const uint32_t*>(word + (i & 1) * odd + (i >> 1) * upper);
#endif
}

// Fragments of 32 channels of 16 keys, [half of the channels][...]. `rows`: the channels of the first
// key; `own`: lane_offset() of the lane.
__device__ __forceinline__ int lane_offset(int lane, int pitch) {
    return across_offset(lane, pitch, 16, 8 * pitch);
}
// Of K as B: two words of each tile of 8 keys.
template <int F>
__device__ __forceinline__ void load_keys(uint32_t (&b)[2][4], const uint8_t* rows, int own,
                                          int pitch) {
    if constexpr (F == E4M3) {
        uint32_t raw[4];  // [tile][half]
        load_along_x4(raw, rows, own, pitch, 16, 8 * pitch);
#pragma unroll
        for (int i = 0; i < 4; i++) widen(raw[i], b[i % 2][i / 2 * 2], b[i % 2][i / 2 * 2 + 1]);
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++)
            load_along_x4(b[h], rows + 32 * h, own, pitch, 16, 8 * pitch);
    }
}
// Of V as A.
template <int F>
__device__ __forceinline__ void load_values(uint32_t (&a)[2][4], const uint8_t* rows, int own,
                                            int pitch) {
    if constexpr (F == E4M3) {
        uint32_t raw[4];  // [half of the keys][half], channels 2g and 2g + 1 of two keys
        load_across_x4(raw, rows, own, pitch, 16, 8 * pitch);
#pragma unroll
        for (int i = 0; i < 4; i++)
            widen(__byte_perm(raw[i], raw[i], 0x3120), a[i % 2][i / 2 * 2], a[i % 2][i / 2 * 2 + 1]);
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++)
            load_across_x4(a[h], rows + 32 * h, own, pitch, 16, 8 * pitch);
    }
}
// The channel, of 16, of row g + 8 * upper of such a fragment.
template <int F>
__device__ __forceinline__ int channel_of(int g, int upper) {
    return F == E4M3 ? 2 * g + upper : g + 8 * upper;
}

template <int F>
__device__ __forceinline__ void multiply(float* d, const uint32_t* a, const uint32_t* b,
                                         const float* c) {
    if constexpr (F == BF16) mma_m16n8k16_bf16(d, a, b, c);
    else mma_m16n8k16_f16(d, a, b, c);
}

// Parts of two numbers, [part], the first number in the lower half.
template <int F>
__device__ __forceinline__ void split_two(float x0, float x1, uint32_t* parts) {
    if constexpr (F == BF16) {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const uint32_t y0 = __float_as_uint(x0), y1 = __float_as_uint(x1);
            parts[i] = __byte_perm(y0, y1, 0x7632);
            x0 = x0 - __uint_as_float(y0 & 0xFFFF0000u), x1 = x1 - __uint_as_float(y1 & 0xFFFF0000u);
        }
    } else {
        const float c0 = coarse_part(x0), c1 = coarse_part(x1);
        parts[0] = pack_halves(c0, c1);
        parts[1] = pack_halves((x0 - c0) * FINER, (x1 - c1) * FINER);
    }
}
// Adds to a sum what tensor cores found of its parts.
template <int F>
__device__ __forceinline__ float add_parts(float sum, float first, float second) {
    return F == BF16 ? (sum + first) + second : fmaf(second, 1.0f / FINER, sum + first);
}

// Of D / 16 fragments of a set of queries so many lie in shared memory, where registers would not do.
template <int D, int SETS>
__host__ __device__ constexpr int shared_fragments() { return D * SETS > 128 ? D / 64 : 0; }

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
        above = F == BF16 ? LIFTED : above < -90 ? -90 : above > 127 ? 127 : above;
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

// Sums of a warp over a chunk: weights for the query of its lane group (a part of them a lane), p * V for
// the queries of its columns, [tile of 16 channels][column].
template <int KF, int D, int SETS>
struct WarpState {
    static_assert(KF != BF16 || shared_fragments<D, SETS>() == 0, "three parts are too many");
    QuerySet<KF, D, shared_fragments<D, SETS>()> q[SETS];
    float reference[SETS], weight[SETS];
    float sums[SETS][D / 16][4];
};

template <int KF, int D, int SETS>
__device__ __forceinline__ void begin_chunk(WarpState<KF, D, SETS>& state) {
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        state.reference[s] = NO_REFERENCE, state.weight[s] = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 4; i++) state.sums[s][i / 4][i % 4] = 0.0f;
    }
}

// Raw scores of the keys 8 * tile + 2t + i. shared: the fragments of q in shared memory, of each set.
template <int KF, int D, int SETS, int PITCH>
__device__ __forceinline__ void score_keys(const WarpState<KF, D, SETS>& state, const uint8_t* k,
                                           int own, int lane, const uint4 (*shared)[WARP_LANES],
                                           float (&scores)[SETS][TILES][2]) {
    constexpr int N_SHARED = shared_fragments<D, SETS>(), HELD = D / 16 - N_SHARED;
    constexpr int CHAIN = D < 128 ? D / 16 : 8;  // fragments whose sum the tensor cores make
#pragma unroll
    for (int pair = 0; pair < TILES / 2; pair++) {
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
                        const int at = first + 2 * half + i;
                        uint32_t q[query_words<KF>()];
                        if (at < HELD) {
#pragma unroll
                            for (int e = 0; e < query_words<KF>(); e++)
                                q[e] = state.q[s].words[at < HELD ? at : 0][e];
                        } else {
                            const uint4 four = shared[s * N_SHARED + at - HELD][lane];
                            q[0] = four.x, q[1] = four.y, q[2] = four.z, q[3] = four.w;
                        }
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
template <int VF, int KF, int D, int SETS>
__device__ __forceinline__ void raise(WarpState<KF, D, SETS>& state, int s, float highest, int t) {
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
    for (int m = 0; m < D / 16; m++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            state.sums[s][m][r] = state.sums[s][m][r] * (r % 2 ? shrink1 : shrink0);
}

// The halves of a word that are not finite.
template <int F>
__device__ __forceinline__ uint32_t wild_halves(uint32_t two) {
    constexpr uint32_t EXPONENT = F == BF16 ? 0x7F80u : 0x7C00u;
    return ((two & EXPONENT) == EXPONENT ? 0xFFFFu : 0u) |
           ((two >> 16 & EXPONENT) == EXPONENT ? 0xFFFF0000u : 0u);
}
template <int F>
constexpr uint32_t ONE = F == BF16 ? 0x3F80u : 0x3C00u;

// Makes NaN of the sums that see a value which is not finite, in a step that some query does not see
// wholly. `own_key`: this lane's first key; seen(set): the keys that the lane group's query sees.
template <int VF, int PITCH, int KF, int D, int SETS, class Seen>
__device__ __forceinline__ void spoil(WarpState<KF, D, SETS>& state, const uint8_t* v, int own,
                                      int32_t own_key, Seen seen) {
    uint32_t ones[SETS][2][2];  // where a query sees a key
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const int2 keys = seen(s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t at = own_key + 8 * i;
            ones[s][i / 2][i % 2] = (at >= keys.x && at < keys.y ? ONE<VF> : 0u) |
                                    (at + 1 >= keys.x && at + 1 < keys.y ? ONE<VF> << 16 : 0u);
        }
    }
    uint64_t bad[SETS] = {};  // a bit for each sum
#pragma unroll 1
    for (int both = 0; both < D / 32; both++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t a[2][4];
            load_values<VF>(a, v + half * 16 * PITCH + both * 32 * element_bytes<VF>(), own, PITCH);
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    a[i][e] = wild_halves<VF>(a[i][e]) & (ONE<VF> | ONE<VF> << 16);
#pragma unroll
                for (int s = 0; s < SETS; s++) {
                    float met[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    multiply<VF>(met, a[i], ones[s][half], met);
#pragma unroll
                    for (int r = 0; r < 4; r++)
                        bad[s] |= uint64_t(met[r] > 0.0f) << (8 * both + 4 * i + r);
                }
            }
        }
    }
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int i = 0; i < D / 4; i++)
            if (bad[s] >> i & 1) state.sums[s][i / 4][i % 4] = NAN_F32;
}

// Adds the values of a step; p: parts of the weights, [set][part][half of the keys][word]. With GUARDED,
// what is not finite counts as 0, which a weight of 0 would not make it; returns whether this lane met it.
template <bool GUARDED, int VF, int PITCH, int KF, int D, int SETS>
__device__ __forceinline__ bool add_values(WarpState<KF, D, SETS>& state, const uint8_t* v, int own,
                                           const uint32_t (&p)[SETS][weight_parts<VF>()][2][2]) {
    uint32_t wild = 0u;
#pragma unroll
    for (int both = 0; both < D / 32; both++) {
        uint32_t a[2][2][4];  // [half of the keys][tile of channels]
#pragma unroll
        for (int half = 0; half < 2; half++)
            load_values<VF>(a[half], v + half * 16 * PITCH + both * 32 * element_bytes<VF>(), own,
                            PITCH);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (GUARDED) {
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    uint32_t& two = a[e / 4][i][e % 4];
                    const uint32_t halves = wild_halves<VF>(two);
                    two &= ~halves, wild |= halves;
                }
            }
#pragma unroll
            for (int s = 0; s < SETS; s++) {
                float first[4] = {0.0f, 0.0f, 0.0f, 0.0f}, second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int part = weight_parts<VF>() - 1; part >= 0; part--)  // the smallest first
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float* const sum = part == 0 ? first : second;
                        multiply<VF>(sum, a[half][i], p[s][part][half], sum);
                    }
                float* const sums = state.sums[s][2 * both + i];
#pragma unroll
                for (int r = 0; r < 4; r++) sums[r] = add_parts<VF>(sums[r], first[r], second[r]);
            }
        }
    }
    return wild != 0u;
}

// Adds the keys [key, key + STEP) to the sums. k, v: the rows of the head; own_k, own_v: lane_offset();
// shared: fragments of q.
// masked: some query does not see some key; seen as in spoil().
template <int VF, int PITCH_K, int PITCH_V, int KF, int D, int SETS, class Seen>
__device__ __forceinline__ void step(WarpState<KF, D, SETS>& state, const uint8_t* k, const uint8_t* v,
                                     int own_k, int own_v, int lane,
                                     const uint4 (*shared)[WARP_LANES], int32_t key, bool masked,
                                     float softcap, Seen seen) {
    const int t = lane % 4;
    const int32_t own_key = key + 2 * t;
    float scores[SETS][TILES][2];
    score_keys<KF, D, SETS, PITCH_K>(state, k, own_k, lane, shared, scores);
    uint32_t p[SETS][weight_parts<VF>()][2][2];
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float factor = state.q[s].factor;
        if (softcap > 0.0f) {
#pragma unroll 1
            for (int i = 0; i < 2 * TILES; i++) {  // in turn, for the sake of its size
                const float score = softcap * tanhf(scores[s][0][0] * factor / softcap) * LOG2_E;
#pragma unroll
                for (int e = 0; e < 2 * TILES - 1; e++)
                    scores[s][e / 2][e % 2] = scores[s][(e + 1) / 2][(e + 1) % 2];
                scores[s][TILES - 1][1] = score;
            }
            factor = 1.0f;
        }
        if (masked) {
            const int2 keys = seen(s);
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                const int32_t at = own_key + i / 2 * 8 + i % 2;
                if (at < keys.x || at >= keys.y) scores[s][i / 2][i % 2] = -INF_F32;
            }
        }
        float highest = -INF_F32;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) highest = fmaxf(highest, scores[s][i / 2][i % 2]);
        highest = highest * factor;
        if (__any_sync(FULL_MASK, highest - top_of_weights<VF>() > state.reference[s]))
            raise<VF>(state, s, highest, t);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float p0 = exp2_fast(fmaf(scores[s][tile][0], factor, -state.reference[s]));
            const float p1 = exp2_fast(fmaf(scores[s][tile][1], factor, -state.reference[s]));
            state.weight[s] = (state.weight[s] + p0) + p1;
            uint32_t parts[weight_parts<VF>()];
            split_two<VF>(p0, p1, parts);
#pragma unroll
            for (int i = 0; i < weight_parts<VF>(); i++) p[s][i][tile / 2][tile % 2] = parts[i];
        }
    }
    if (masked) {
        const bool wild = add_values<true, VF, PITCH_V>(state, v, own_v, p);
        if (__any_sync(FULL_MASK, wild)) spoil<VF, PITCH_V>(state, v, own_v, own_key, seen);
    } else {
        add_values<false, VF, PITCH_V>(state, v, own_v, p);
    }
}
