// The values of a step of attention on integer tensor cores: codes, scales and minima of V, the digits of
// weights times scales, and what becomes of their sums when a reference is raised.
#pragma once
#include "common/attend_team.cuh"
#include "common/convert.cuh"
#include "common/mma.cuh"

// What a lane reads of V for the tables: scales of the key that it compares, the heads of its key's two
// blocks.
template <int D, int Q>
struct Heads {
    using Own = Share<D, Q>;
    static constexpr int COMPARED = Own::TEAM == 1 ? 2 : D / 64;
    uint16_t compared[COMPARED];
    uint2 heads[2];

    template <int PITCH_V>
    __device__ __forceinline__ void load(const uint8_t* v, const int4& offsets, int member) {
        const uint8_t* const own = v + member * (2 * V_BLOCK_BYTES) + offsets.y;
        const uint8_t* const row = v + Own::half(member) * HALF * PITCH_V + offsets.x;
#pragma unroll
        for (int i = 0; i < 2; i++) heads[i] = *reinterpret_cast<const uint2*>(own + i * V_BLOCK_BYTES);
#pragma unroll
        for (int i = 0; i < COMPARED; i++)
            compared[i] = Own::TEAM == 1
                              ? uint16_t(heads[i % 2].x)
                              : *reinterpret_cast<const uint16_t*>(row + i * V_BLOCK_BYTES);
    }

    // Fills the tables; a key that does not count is one of zeros. Returns whether one of this lane's minima
    // is not finite, or one of its scales not a finite number from 0 on.
    __device__ __forceinline__ bool fill(WarpTables<D, Q>& tables, const int4& offsets, int lane,
                                         bool counts) {
        if (!counts) heads[0].x = heads[1].x = 0u;
        uint8_t* const fifth = reinterpret_cast<uint8_t*>(&tables.fifth) + offsets.z;
        bool wild = false;
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < COMPARED; i++) {
            const uint32_t size = compared[i] & 0x7FFFu;
            most = size < 0x7C00u && size > most ? size : most;
        }
        if constexpr (Own::TEAM > 1) {
            const uint32_t other = __shfl_xor_sync(FULL_MASK, most, HALF);
            most = other > most ? other : most;
        }
        // |scale| < 2^exponent; no scale but 0 is below 2^-24.
        const int exponent = int(__float_as_uint(f16_to_f32(uint16_t(most))) >> 23) - 126;
        if (Own::TEAM == 1 || lane < HALF)
            tables.exponent[lane] = float(exponent < -24 ? -24 : exponent);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t scale = heads[i].x & 0xFFFFu, minimum = heads[i].x >> 16;
            *displaced(tables.scales[i], offsets.w) = f16_to_f32(uint16_t(scale));
            *displaced(tables.minima[i], offsets.w) = f16_to_f32(uint16_t(minimum));
            wild = wild || scale >= 0x7C00u || (minimum & 0x7C00u) == 0x7C00u;
            uint8_t* const bits = fifth + i * int(sizeof(tables.fifth[0]));
            bits[0] = uint8_t(heads[i].y), bits[8] = uint8_t(heads[i].y >> 8);
            bits[4] = uint8_t(heads[i].y >> 16), bits[12] = uint8_t(heads[i].y >> 24);
        }
        return wild;
    }
};

// The value of the three digits of a sum, and the digits of 2^-shift
// of it, rounded.
__device__ __forceinline__ int64_t digits_value(int32_t digit0, int32_t digit1, int32_t digit2) {
    return (int64_t(digit2) * 256 + digit1) * 256 + digit0;
}
__device__ __forceinline__ void shrink_digits(int32_t& digit0, int32_t& digit1, int32_t& digit2,
                                              int shift) {
    if (shift == 0) return;
    int64_t value = digits_value(digit0, digit1, digit2);
    value = shift > 50 ? 0 : (value + (int64_t(1) << (shift - 1))) >> shift;
    digit0 = int32_t(value & 0xFFFF), digit1 = 0, digit2 = int32_t(value >> 16);
}

// The reference of a query whose largest p * scale among some keys is below 2^highest. From 2^26 on a float
// cannot tell weights apart that the sums can hold: then the query's answer is NaN.
__device__ __forceinline__ float raised(float reference, float highest) {
    if (!(highest - WEIGHT_BITS > reference)) return reference;
    return fabsf(highest) < 67108864.0f ? ceilf(highest) - (WEIGHT_BITS - SPARE_BITS) : NAN_F32;
}

// Takes over the references that warps of the team raised: holds the sums against them, this step's
// weights of the lane group's query [tile of 8 keys][i], and those of its own keys [half][r][column].
template <int D, int Q>
__device__ __forceinline__ void follow(WarpState<D, Q>& state, WarpTables<D, Q>& tables,
                                       const Exchange<D, Q>& exchange, int lane, int member,
                                       float (&p)[4][2],
                                       float (&own)[Share<D, Q>::HALVES][2][Share<D, Q>::COLUMNS]) {
    using Own = Share<D, Q>;
    lane = kept(lane);
    const int t = lane % 4, query = lane % Q;  // the lane's, till it tells the others
    const float old = tables.reference[query];
    float half[2] = {old, old};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (Own::TEAM == 1 || exchange.raised[h + query / Own::QUERIES * 2])
            half[h] = exchange.references[Own::TEAM == 1 ? 0 : h][query];
    }
    const float reference = fmaxf(half[0], half[1]);
    // Sums against no reference are zeros, and stay so.
    const int shift = old == NO_REFERENCE ? 0 : int(fminf(reference - old, 1000.0f));
    __syncwarp();
    if (lane < Q) tables.reference[query] = reference;
    const float times[2] = {exp2_whole(half[0] - reference), exp2_whole(half[1] - reference)};
    const float shrink = power_of_two(-shift);
#pragma unroll
    for (int c = 0; c < Own::COLUMNS; c++) {
        const int from = Own::first_query(member) + query_of_column<Own::QUERIES>(t, c);
        const float by = __shfl_sync(FULL_MASK, shrink, from);
#pragma unroll
        for (int h = 0; h < Own::HALVES; h++) {
            const int at = Own::TEAM == 1 ? h : Own::half(member);
            const float now = __shfl_sync(FULL_MASK, at ? times[1] : times[0], from);
            state.weight[h][c] = state.weight[h][c] * by;
            own[h][0][c] = own[h][0][c] * now, own[h][1][c] = own[h][1][c] * now;
        }
    }
    const int from = query_of_group<Q>(lane / 4);
    const float by = __shfl_sync(FULL_MASK, shrink, from);
#pragma unroll
    for (int b = 0; b < WarpState<D, Q>::BLOCKS; b++) state.minima[b] = state.minima[b] * by;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float now = __shfl_sync(FULL_MASK, times[h], from);
#pragma unroll
        for (int i = 0; i < 4; i++) p[2 * h + i / 2][i % 2] = p[2 * h + i / 2][i % 2] * now;
    }
    const int shift0 = __shfl_sync(FULL_MASK, shift, query_of_column<Q>(t, 0));
    const int shift1 = __shfl_sync(FULL_MASK, shift, query_of_column<Q>(t, 1));
    if (!__any_sync(FULL_MASK, shift)) return;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
            if constexpr (Q == 8) {
                shrink_digits(state.sums[0][m][r], state.sums[1][m][r], state.sums[2][m][r], shift0);
                shrink_digits(state.sums[0][m][r + 1], state.sums[1][m][r + 1],
                              state.sums[2][m][r + 1], shift1);
            } else {
                shrink_digits(state.sums[0][m][r], state.sums[0][m][r + 1], state.sums[1][m][r],
                              shift0);
            }
        }
}

// Digit words of four whole numbers that stand in the low bits of floats from UNSIGNED on.
template <int Q>
__device__ __forceinline__ void split_weights(const float (&counted)[4], bool second,
                                              uint32_t (&digits)[WarpState<64, Q>::DIGITS]) {
    const uint32_t y0 = __float_as_uint(counted[0]), y1 = __float_as_uint(counted[1]);
    const uint32_t y2 = __float_as_uint(counted[2]), y3 = __float_as_uint(counted[3]);
    if constexpr (Q == 8) {
        const uint32_t low01 = __byte_perm(y0, y1, 0x5140), low23 = __byte_perm(y2, y3, 0x5140);
        digits[0] = __byte_perm(low01, low23, 0x5410), digits[1] = __byte_perm(low01, low23, 0x7632);
        digits[2] = __byte_perm(__byte_perm(y0, y1, 0x0062), __byte_perm(y2, y3, 0x0062), 0x5410);
    } else {
        const uint32_t own = second ? 0x6251 : 0x6240;
        const uint32_t both01 = __byte_perm(y0, y1, own), both23 = __byte_perm(y2, y3, own);
        digits[0] = __byte_perm(both01, both23, 0x5410), digits[1] = __byte_perm(both01, both23, 0x7632);
    }
}

// Which half-word of the codes of a block lane group g holds: a pair of V blocks is three pieces of
// 16 bytes, and the codes of the first block straddle two of them.
__device__ __forceinline__ int half_word(int block, int g) { return block % 2 ? g : g ^ 4; }

// A scale and a minimum of V that may be of any kind: d * code + m = -d * (31 - code) + (m + 31 d) makes
// d positive; what is not finite spoils the block for the queries that see it.
struct Guarded {
    float d, m;
    bool negative;
    __device__ __forceinline__ Guarded(float scale, float minimum, float weight) {
        const bool finite = fabsf(scale) + fabsf(minimum) < INF_F32;
        negative = finite && scale < 0.0f;
        const bool seen = __float_as_uint(weight) != 0x80000000u;
        m = negative ? fmaf(31.0f, scale, minimum) : minimum;
        m = finite ? m : seen ? NAN_F32 : 0.0f, d = finite ? fabsf(scale) : 0.0f;
    }
};

// Adds p * minimum of a step to the sum of a block of V. GUARDED: with scales below 0, and with what
// is not finite.
template <bool GUARDED, int D, int Q>
__device__ __forceinline__ void add_minima(float& sum, const WarpTables<D, Q>& tables, int block, int t,
                                           const float (&p)[4][2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = 8 * t + 4 * half;
        const float4 minima = *reinterpret_cast<const float4*>(&tables.minima[block][at]);
        float m[4] = {minima.x, minima.y, minima.z, minima.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float weight = p[2 * half + i / 2][i % 2];
            if constexpr (GUARDED) m[i] = Guarded(tables.scales[block][at + i], m[i], weight).m;
            sum = fmaf(weight, m[i], sum);
        }
    }
}

// Codes of a block of V, in two tiles of 16 channels: of the channels 2h and 2h + 16, and twice those of
// 2h + 1 and 2h + 17, for half-word h = half_word(block, g); their four words are the keys
// 16 * half + 8 * (e / 2) + 2t + e % 2, [2 * half + (channel from 16 on)].
struct Codes {
    uint32_t x[2][4];

    // All but the fifth bits. pair: of the first key, behind the blocks of other warps.
    template <int PITCH_V>
    __device__ __forceinline__ void load(const uint8_t* pair, int block, int across, int lane) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint8_t* const rows = pair + half * HALF * PITCH_V;
            uint32_t words[2];  // of tiles of 8 keys
            if (block == 0) {
                uint32_t outer[4];  // [2 * piece + tile] of the pieces 0 and 1
                load_across_x4(outer, rows, across, PITCH_V, 8 * PITCH_V, 16);
                words[0] = lane < 16 ? outer[2] : outer[0];
                words[1] = lane < 16 ? outer[3] : outer[1];
            } else {
                load_across_x2(words, rows + 32, across, PITCH_V, 8 * PITCH_V);
            }
            const uint32_t first = __byte_perm(words[0], words[1], 0x6420);
            const uint32_t second = __byte_perm(words[0], words[1], 0x7531);
            x[0][2 * half] = first & 0x0F0F0F0Fu;
            x[0][2 * half + 1] = (first >> 4) & 0x0F0F0F0Fu;
            x[1][2 * half] = (second << 1) & 0x1E1E1E1Eu;
            x[1][2 * half + 1] = (second >> 3) & 0x1E1E1E1Eu;
        }
    }

    // The fifth bits, from the table. turn: brings those of half-word h to the bits 4 and 5.
    template <int D, int Q>
    __device__ __forceinline__ void complete(const WarpTables<D, Q>& tables, int block, int lane) {
        const int turn = lane / 4 % 4 * 2 - 4, pair = block ? lane / 16 : lane / 16 ^ 1;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint2 fifth = tables.fifth[block][half][lane % 4][pair];
            const uint32_t low = __funnelshift_r(fifth.x, fifth.x, turn);
            const uint32_t high = __funnelshift_r(fifth.y, fifth.y, turn);
            x[0][2 * half] |= low & 0x10101010u, x[0][2 * half + 1] |= high & 0x10101010u;
            x[1][2 * half] |= low & 0x20202020u, x[1][2 * half + 1] |= high & 0x20202020u;
        }
    }
};

// Adds a step to one block of V: its codes, weights of the keys 8 * tile + 2t + i.
template <bool GUARDED, int D, int Q>
__device__ __forceinline__ void add_block(WarpState<D, Q>& state, const WarpTables<D, Q>& tables,
                                          int block, int lane, const Codes& codes,
                                          const float (&p)[4][2]) {
    constexpr int DIGITS = WarpState<D, Q>::DIGITS;
    uint32_t x[2][4], digits[DIGITS][2];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = codes.x[i / 4][i % 4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = 8 * (lane % 4) + 4 * half;
        const float4 scales = *reinterpret_cast<const float4*>(&tables.scales[block][at]);
        float d[4] = {scales.x, scales.y, scales.z, scales.w}, counted[4];
        uint32_t below = 0u;  // the bytes of keys whose scale is below 0
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float weight = p[2 * half + i / 2][i % 2];
            if constexpr (GUARDED) {
                const Guarded value(d[i], tables.minima[block][at + i], weight);
                d[i] = value.d, below |= value.negative ? 0xFFu << (8 * i) : 0u;
            }
            counted[i] = fmaf(weight, d[i], UNSIGNED);
        }
        if constexpr (GUARDED) {
#pragma unroll
            for (int r = 2 * half; r < 2 * half + 2; r++)
                x[0][r] ^= below & 0x1F1F1F1Fu, x[1][r] ^= below & 0x3E3E3E3Eu;
        }
        uint32_t four[DIGITS];
        split_weights<Q>(counted, lane / 4 % 2, four);
#pragma unroll
        for (int i = 0; i < DIGITS; i++) digits[i][half] = four[i];
    }
#pragma unroll
    for (int i = 0; i < DIGITS; i++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            int32_t* sums = state.sums[i][2 * block + m];
            mma_m16n8k32_s8u8(sums, x[m], digits[i], sums);
        }
}

// Adds a step to the warp's two blocks of V.
template <bool GUARDED, int D, int Q>
__device__ __forceinline__ void add_values(WarpState<D, Q>& state, const WarpTables<D, Q>& tables,
                                           int lane, const Codes (&codes)[2], const float (&p)[4][2]) {
    const int t = lane % 4;
    if constexpr (Q == 8) {
        add_minima<GUARDED>(state.minima[0], tables, 0, t, p);
        add_minima<GUARDED>(state.minima[1], tables, 1, t, p);
    } else {
        add_minima<GUARDED>(state.minima[0], tables, lane / 4 % 2, t, p);
    }
    add_block<GUARDED>(state, tables, 0, lane, codes[0], p);
    add_block<GUARDED>(state, tables, 1, lane, codes[1], p);
}
