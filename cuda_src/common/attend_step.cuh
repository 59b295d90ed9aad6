// One step of attention on integer tensor cores: 32 keys, K q8_0 and V q5_1, in class `exact`.
//
// A team of D / 64 warps serves Q queries of one kv head. In a step each warp scores its share of the
// keys; the team exchanges the scores; then each warp adds the step to its 64 channels of V:
//
//   Q K^T  products of three 8-bit digits of q (fixed point, one scale a row) and the codes of K, exact
//          in int32; times the block's scale in f32;
//   P V    products of three 8-bit digits of p * scale (fixed point of 23 bits) and the codes of V, exact
//          in int32 over a whole chunk; the sum of p * minimum beside them in f32.
//
// p * scale is held against a power of two, the query's reference. A masked key weighs exactly 0, no
// lane's sum depends on another query, and Q changes no bit: with Q = 4 the digits of a query lie in
// neighbouring lanes, with Q = 8 in one.
#pragma once
#include "common/device.cuh"
#include "common/fragments.cuh"
#include "common/joined_chunks.cuh"
#include "common/mma.cuh"

constexpr int K_BLOCK_BYTES = 34, V_BLOCK_BYTES = 24;
constexpr int STEP = 32;             // keys
constexpr int TILES = STEP / 8;      // of 8 keys, a column of the tensor cores each
constexpr int CHANNELS = 64;         // of V, a warp's share
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int WEIGHT_BITS = 23;      // p * scale < 2^23 in units of the fixed point
constexpr int QUERY_BITS = 22;       // |q| < 2^22
// Floats whose low bits count whole numbers: from -2^22, and from 0 on.
constexpr int32_t SIGNED_BITS = 0x4B400000;
constexpr float SIGNED = 12582912.0f, UNSIGNED = 8388608.0f;

template <int D>
__host__ __device__ constexpr int team_size() {
    return D / CHANNELS;
}

// What the warps of a team tell one another of a step: scores of the keys 8 * tile + 2t + i of a query,
// cell 4 * query + t, and the largest sum of a score and its key's exponent among each warp's keys.
template <int D, int Q>
struct alignas(16) Exchange {
    float2 scores[4 * Q][TILES];
    float highest[team_size<D>()][4 * Q];
};

// Where the lanes read and write in a step, in bytes. In shared memory, the same for all warps: to
// compute it anew in each step would cost a twentieth of the instructions, and registers are scarce.
struct LaneOffsets {
    int4 fill[WARP_LANES];  // in K and V of the key to score, in V of the lane's key; in `fifth`
    int4 read[WARP_LANES];  // in K of a tile, in V for load_across; its cell; in `values` and `fifth`

    template <int D, int Q, int PITCH_K, int PITCH_V>
    __device__ __forceinline__ void set(int lane) {
        constexpr int OWN = STEP / team_size<D>();
        const int key = lane % OWN, part = lane / OWN, g = lane / 4, t = lane % 4;
        fill[lane] = make_int4(key * PITCH_K + part * (2 * K_BLOCK_BYTES),
                               key * PITCH_V + part * (2 * V_BLOCK_BYTES), lane * PITCH_V,
                               lane / 16 * 64 + lane % 8 / 2 * 16 + lane / 8 % 2 * 2 + lane % 2);
        read[lane] = make_int4(g * PITCH_K + 8 * t, across_offset(lane, PITCH_V, 8 * PITCH_V, 16),
                               (Q == 8 ? g : g / 2) * 4 + t, 16 * t + (g < 4 ? 8 : 0));
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

// What a warp keeps of a step in shared memory: block scales of the keys that it scores (tile-major
// within a block), the exponents of their largest scale of V; scales and minima of its 64 channels,
// and the fifth bits of their codes, as [block][half of the keys][t][pair of bytes]: byte e of the
// first word belongs to key 16 * half + 8 * (e / 2) + 2 * t + e % 2.
template <int D>
struct alignas(16) WarpTables {
    float k_scale[D / 32][STEP / team_size<D>()];
    float exponent[STEP / team_size<D>()];
    float2 values[2][STEP];
    uint2 fifth[2][2][4][2];
};

// The pitch of K rows puts 4 rows 8 banks apart, that of V rows 8 rows 4 banks apart.
__host__ __device__ constexpr int k_pitch(int bytes) { return (bytes + 63) / 64 * 64 + 32; }
__host__ __device__ constexpr int v_pitch(int bytes) { return (bytes + 31) / 32 * 32 + 16; }

// The query of lane group g, and of an accumulator's column 2t + i.
template <int Q>
__device__ __forceinline__ int query_of_group(int g) { return Q == 8 ? g : g / 2; }
template <int Q>
__device__ __forceinline__ int query_of_column(int t, int i) { return Q == 8 ? 2 * t + i : t; }

// Sums of a warp over a chunk, for the query of its lane group: weights, and p * minimum of the two
// blocks; for the queries of its columns: digits of p * scale times the codes of V, [digit][tile of 16
// channels][column]. With Q = 4 the columns 2t and 2t + 1 of the first hold digits 0 and 1.
template <int D, int Q>
struct WarpState {
    static constexpr int DIGITS = Q == 8 ? 3 : 2;
    // Digits of the query: 0 and 1 with Q = 8; 0 and 2, or 1 with Q = 4. Of the last blocks in shared
    // memory, as is digit 2 with Q = 8; registers do not suffice.
    static constexpr int HELD = D > 128 ? 3 : D / 32;
    uint32_t q[HELD][4];
    float factor;  // of a raw score
    float reference, weight;
    float minima[2];
    int32_t sums[DIGITS][4][4];
    int32_t start, end;  // the keys that the lane group's query sees
};

// What a team keeps of its queries in shared memory, for each lane.
template <int D, int Q>
struct QueryTables {
    static constexpr int REST = D / 32 - WarpState<D, Q>::HELD;
    uint4 rest[REST > 0 ? REST : 1][REST > 0 ? WARP_LANES : 1];
    uint2 high[Q == 8 ? D / 32 : 1][Q == 8 ? WARP_LANES : 1];
};

template <int D, int Q>
__device__ __forceinline__ void begin_chunk(WarpState<D, Q>& state) {
    state.reference = NO_REFERENCE, state.weight = 0.0f;
    state.minima[0] = state.minima[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < WarpState<D, Q>::DIGITS * 16; i++) state.sums[i / 16][i / 4 % 4][i % 4] = 0;
}

// What this lane holds of a query: 8 elements of every 32.
template <int D>
struct RawQuery {
    float4 x[D / 32][2];
    __device__ __forceinline__ void load(const float* q) {
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            x[i / 2][i % 2] = *reinterpret_cast<const float4*>(
                q + 32 * (i / 2) + 8 * (threadIdx.x % 4) + i % 2 * 4);
    }
};

// Takes the digits of the lane group's query. All warps of the team write the same into `tables`.
template <int D, int Q>
__device__ __forceinline__ void take_query(WarpState<D, Q>& state, QueryTables<D, Q>& tables,
                                           const RawQuery<D>& raw, int member, float scale,
                                           float softcap) {
    const int lane = threadIdx.x % WARP_LANES;
    float most = 0.0f, bad = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const float4 v = raw.x[i / 2][i % 2];
        most = fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
        bad = bad + 0.0f * (v.x + v.y + v.z + v.w);  // NaN if one is not finite
    }
    most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
    bad = bad + __shfl_xor_sync(FULL_MASK, bad, 1);
    bad = bad + __shfl_xor_sync(FULL_MASK, bad, 2);
    int32_t above = int32_t(__float_as_uint(most) >> 23) - 126;  // |q| < 2^above
    above = above < -90 ? -90 : above > 127 ? 127 : above;
    const float lift = power_of_two(QUERY_BITS - above);
    const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int b = 0; b < D / 32; b++) {
        uint32_t digits[4], high[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 v = raw.x[b][i];
            // Digits from -128 to 127: the sum carries into the next digit, the exclusion returns.
            uint32_t y[4] = {uint32_t(__float2int_rn(v.x * lift)), uint32_t(__float2int_rn(v.y * lift)),
                             uint32_t(__float2int_rn(v.z * lift)), uint32_t(__float2int_rn(v.w * lift))};
#pragma unroll
            for (int e = 0; e < 4; e++) y[e] = (y[e] + 0x00008080u) ^ 0x00008080u;
            const uint32_t low01 = __byte_perm(y[0], y[1], 0x5140), low23 = __byte_perm(y[2], y[3], 0x5140);
            const uint32_t high01 = __byte_perm(y[0], y[1], 0x0062), high23 = __byte_perm(y[2], y[3], 0x0062);
            const uint32_t digit0 = __byte_perm(low01, low23, 0x5410);
            const uint32_t digit1 = __byte_perm(low01, low23, 0x7632);
            high[i] = __byte_perm(high01, high23, 0x5410);
            digits[2 * i] = Q == 4 && odd ? digit1 : digit0;
            digits[2 * i + 1] = Q == 8 ? digit1 : odd ? 0u : high[i];
        }
        constexpr int HELD = WarpState<D, Q>::HELD;
        if (b < HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) state.q[b < HELD ? b : 0][i] = digits[i];
        } else if (member == 0) {
            tables.rest[b - HELD][lane] = make_uint4(digits[0], digits[1], digits[2], digits[3]);
        }
        if (Q == 8 && member == 0) tables.high[b][lane] = make_uint2(high[0], high[1]);
    }
    const float natural = power_of_two(above - QUERY_BITS) * scale + bad;
    state.factor = softcap > 0.0f ? natural : natural * LOG2_E;
}

// Fills the scales of the keys to score: TEAM lanes a key, which take two blocks. In both fills all
// loads come first: the compiler would not move them over the stores.
template <int D, int PITCH_K>
__device__ __forceinline__ void fill_keys(WarpTables<D>& tables, const uint8_t* k, const int4& offsets,
                                          int lane, int member) {
    constexpr int OWN = STEP / team_size<D>();
    const uint8_t* row = k + member * OWN * PITCH_K + offsets.x;
    uint16_t scales[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        scales[i] = *reinterpret_cast<const uint16_t*>(row + i * K_BLOCK_BYTES);
#pragma unroll
    for (int i = 0; i < 2; i++)
        tables.k_scale[2 * (lane / OWN) + i][lane % OWN] = f16_to_f32(scales[i]);
}

// Fills what belongs to V. Keys outside [from, to) count as zeros. Returns whether one of this warp's
// minima is not finite, or one of its scales not a finite number from 0 on.
template <int D, int PITCH_V>
__device__ __forceinline__ bool fill_values(WarpTables<D>& tables, const uint8_t* v,
                                            const int4& offsets, int lane, int member, int masked,
                                            int from, int to) {
    constexpr int OWN = STEP / team_size<D>();
    const uint8_t* row = v + member * OWN * PITCH_V + offsets.y;
    const uint8_t* own = v + member * (2 * V_BLOCK_BYTES) + offsets.z;
    uint16_t scales[2];
    uint2 heads[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        scales[i] = *reinterpret_cast<const uint16_t*>(row + i * V_BLOCK_BYTES);
        heads[i] = *reinterpret_cast<const uint2*>(own + i * V_BLOCK_BYTES);
    }
    if (masked && (lane < from || lane >= to)) heads[0].x = heads[1].x = 0u;
    uint8_t* const fifth = reinterpret_cast<uint8_t*>(&tables.fifth) + offsets.w;
    bool wild = false;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t size = scales[i] & 0x7FFFu;
        most = size < 0x7C00u && size > most ? size : most;
        const uint32_t scale = heads[i].x & 0xFFFFu, minimum = heads[i].x >> 16;
        tables.values[i][lane] = make_float2(f16_to_f32(uint16_t(scale)), f16_to_f32(uint16_t(minimum)));
        wild = wild || scale >= 0x7C00u || (minimum & 0x7C00u) == 0x7C00u;
        uint8_t* const bits = fifth + i * int(sizeof(tables.fifth[0]));
        bits[0] = uint8_t(heads[i].y), bits[8] = uint8_t(heads[i].y >> 8);
        bits[4] = uint8_t(heads[i].y >> 16), bits[12] = uint8_t(heads[i].y >> 24);
    }
#pragma unroll
    for (int apart = OWN; apart < WARP_LANES; apart *= 2) {
        const uint32_t other = __shfl_xor_sync(FULL_MASK, most, apart);
        most = other > most ? other : most;
    }
    // |scale| < 2^exponent; no scale but 0 is below 2^-24.
    const int exponent = int(__float_as_uint(f16_to_f32(uint16_t(most))) >> 23) - 126;
    if (lane < OWN) tables.exponent[lane] = float(exponent < -24 ? -24 : exponent);
    return wild;
}

// 8 codes of a key from channel 8t of block B on; `own` is 8t bytes behind the head.
template <int D, int B>
__device__ __forceinline__ void load_codes(const uint8_t* own, uint32_t* codes) {
    const uint8_t* at = own + B * K_BLOCK_BYTES + B % 2 * 2;  // a word before or at the codes
    constexpr bool WIDE = D % 128 == 0;
    if constexpr (B % 2 == 0) {  // the codes begin in the middle of a word
        uint32_t w0, w1, w2;
        if constexpr (WIDE && B % 4 == 0) {
            const uint2 w = *reinterpret_cast<const uint2*>(at);
            w0 = w.x, w1 = w.y, w2 = *reinterpret_cast<const uint32_t*>(at + 8);
        } else if constexpr (WIDE) {
            const uint2 w = *reinterpret_cast<const uint2*>(at + 4);
            w0 = *reinterpret_cast<const uint32_t*>(at), w1 = w.x, w2 = w.y;
        } else {
            w0 = *reinterpret_cast<const uint32_t*>(at);
            w1 = *reinterpret_cast<const uint32_t*>(at + 4);
            w2 = *reinterpret_cast<const uint32_t*>(at + 8);
        }
        codes[0] = __byte_perm(w0, w1, 0x5432), codes[1] = __byte_perm(w1, w2, 0x5432);
    } else if constexpr (WIDE && B % 4 == 3) {
        const uint2 w = *reinterpret_cast<const uint2*>(at);
        codes[0] = w.x, codes[1] = w.y;
    } else {
        codes[0] = *reinterpret_cast<const uint32_t*>(at);
        codes[1] = *reinterpret_cast<const uint32_t*>(at + 4);
    }
}

// The sums start at SIGNED_BITS, which makes them floats at the price of a subtraction; with Q = 8 at 0,
// for want of four registers, and are converted.
template <int Q>
__device__ __forceinline__ float whole(int32_t counted) {
    return Q == 8 ? __int2float_rn(counted) : __int_as_float(counted) - SIGNED;
}

// Adds the blocks from B on to the raw scores of the keys 2t + i of a tile: `even` the digits 0 and 2,
// `odd` the digit 1 (with Q = 4: `even` those of this lane group).
template <int D, int Q, int B>
__device__ __forceinline__ void score_blocks(const WarpState<D, Q>& state,
                                             const QueryTables<D, Q>& tables, int lane,
                                             const float* scales, const uint8_t* codes,
                                             float (&even)[2], float (&odd)[2]) {
    constexpr int32_t ZERO = Q == 8 ? 0 : SIGNED_BITS, NOTHING[4] = {ZERO, ZERO, ZERO, ZERO};
    uint32_t k[2];
    load_codes<D, B>(codes, k);
    const float2 d = *reinterpret_cast<const float2*>(scales + B * (STEP / team_size<D>()));
    int32_t low[4];
    constexpr int HELD = WarpState<D, Q>::HELD;
    if constexpr (B < HELD) {
        mma_m16n8k32_s8(low, state.q[B], k, NOTHING);
    } else {
        const uint4 rest = tables.rest[B - HELD][lane];
        const uint32_t digits[4] = {rest.x, rest.y, rest.z, rest.w};
        mma_m16n8k32_s8(low, digits, k, NOTHING);
    }
    if constexpr (Q == 8) {
        const uint2 third = tables.high[B][lane];
        const uint32_t digit2[4] = {third.x, 0u, third.y, 0u};
        int32_t high[4];
        mma_m16n8k32_s8(high, digit2, k, NOTHING);
        even[0] = fmaf(fmaf(whole<Q>(high[0]), 65536.0f, whole<Q>(low[0])), d.x, even[0]);
        even[1] = fmaf(fmaf(whole<Q>(high[1]), 65536.0f, whole<Q>(low[1])), d.y, even[1]);
        odd[0] = fmaf(whole<Q>(low[2]), d.x, odd[0]);
        odd[1] = fmaf(whole<Q>(low[3]), d.y, odd[1]);
    } else {
        even[0] = fmaf(fmaf(whole<Q>(low[2]), 65536.0f, whole<Q>(low[0])), d.x, even[0]);
        even[1] = fmaf(fmaf(whole<Q>(low[3]), 65536.0f, whole<Q>(low[1])), d.y, even[1]);
    }
    if constexpr (B + 1 < D / 32) 
        score_blocks<D, Q, B + 1>(state, tables, lane, scales, codes, even, odd);
}

// Scores of the keys 2t + i of one of the warp's tiles, in powers of 2.
template <int D, int Q>
__device__ __forceinline__ void score_tile(const WarpState<D, Q>& state,
                                           const QueryTables<D, Q>& tables, int lane,
                                           const float* scales, const uint8_t* codes, float softcap,
                                           float (&scores)[2]) {
    float even[2] = {0.0f, 0.0f}, odd[2] = {0.0f, 0.0f};
    score_blocks<D, Q, 0>(state, tables, lane, scales, codes, even, odd);
    const bool second = lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (Q == 4) {
            const float own = even[i], other = __shfl_xor_sync(FULL_MASK, own, 4);
            even[i] = second ? other : own, odd[i] = second ? own : other;
        }
        scores[i] = fmaf(odd[i], 256.0f, even[i]) * state.factor;
        if (softcap > 0.0f) scores[i] = softcap * tanhf(scores[i] / softcap) * LOG2_E;
    }
}

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

// Raises the reference of the lane group's query to `highest`, if that is above it.
template <int D, int Q>
__device__ __forceinline__ void raise(WarpState<D, Q>& state, float highest) {
    const int t = threadIdx.x % 4;
    highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));
    const float old = state.reference;
    if (highest - WEIGHT_BITS > old) state.reference = ceilf(highest) - WEIGHT_BITS;
    const int shift = int(fminf(state.reference - old, 1000.0f));
    const float shrink = power_of_two(-shift);
    state.weight = state.weight * shrink;
    state.minima[0] = state.minima[0] * shrink, state.minima[1] = state.minima[1] * shrink;
    const int shift0 = __shfl_sync(FULL_MASK, shift, 8 * t);
    const int shift1 = __shfl_sync(FULL_MASK, shift, 8 * t + 4);
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

// Adds a step to one block of V: 16-bit words of codes [half of the keys][tile of 8], weights of the
// keys 8 * tile + 2t + i. GUARDED: with scales below 0, and with what is not finite.
template <bool GUARDED, int D, int Q>
__device__ __forceinline__ void add_block(WarpState<D, Q>& state, const WarpTables<D>& tables,
                                          int block, int own, int lane,
                                          const uint32_t (&words)[2][2], const float (&p)[TILES][2]) {
    constexpr int DIGITS = WarpState<D, Q>::DIGITS;
    const int turn = lane / 4 % 4 * 2 - 4;  // brings the fifth bits of half-word h to the bits 4 and 5
    uint32_t codes[2][4];  // of channels 2h and 2h + 16, and twice those of 2h + 1 and 2h + 17
    uint32_t digits[DIGITS][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint2 fifth = *displaced(&tables.fifth[block][half][0][0], own ^ (block * 8));
        const uint32_t low = __funnelshift_r(fifth.x, fifth.x, turn);
        const uint32_t high = __funnelshift_r(fifth.y, fifth.y, turn);
        const uint32_t first = __byte_perm(words[half][0], words[half][1], 0x6420);
        const uint32_t second = __byte_perm(words[half][0], words[half][1], 0x7531);
        codes[0][2 * half] = (first & 0x0F0F0F0Fu) | (low & 0x10101010u);
        codes[0][2 * half + 1] = ((first >> 4) & 0x0F0F0F0Fu) | (high & 0x10101010u);
        codes[1][2 * half] = ((second << 1) & 0x1E1E1E1Eu) | (low & 0x20202020u);
        codes[1][2 * half + 1] = ((second >> 3) & 0x1E1E1E1Eu) | (high & 0x20202020u);
        float counted[4];
        uint32_t below = 0u;  // the bytes of keys whose scale is below 0
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const float* const weight = p[2 * half + tile];
            const float4 value = *reinterpret_cast<const float4*>(
                displaced(&tables.values[block][8 * (2 * half + tile)], own & ~8));
            float d[2] = {value.x, value.z}, m[2] = {value.y, value.w};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if constexpr (GUARDED) {
                    const bool finite = fabsf(d[i]) + fabsf(m[i]) < INF_F32;
                    const bool negative = finite && d[i] < 0.0f;
                    // d * code + m = -d * (31 - code) + (m + 31 d)
                    m[i] = negative ? fmaf(31.0f, d[i], m[i]) : m[i], d[i] = fabsf(d[i]);
                    below |= negative ? 0xFFu << (16 * tile + 8 * i) : 0u;
                    // What is not finite spoils the block for the queries that see it.
                    const bool seen = __float_as_uint(weight[i]) != 0x80000000u;
                    d[i] = finite ? d[i] : 0.0f, m[i] = finite ? m[i] : seen ? NAN_F32 : 0.0f;
                }
                counted[2 * tile + i] = fmaf(weight[i], d[i], UNSIGNED);
                state.minima[block] = fmaf(weight[i], m[i], state.minima[block]);
            }
        }
        if constexpr (GUARDED) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                codes[0][2 * half + r] ^= below & 0x1F1F1F1Fu;
                codes[1][2 * half + r] ^= below & 0x3E3E3E3Eu;
            }
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
            mma_m16n8k32_s8u8(sums, codes[m], digits[i], sums);
        }
}

// Waits for the warps of a team. On the host device all warps of a block take the same steps.
template <int TEAM>
__device__ __forceinline__ void team_barrier(int team) {
#if MEMRA_CUDA
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM * WARP_LANES) : "memory");
#else
    __syncthreads();
#endif
}

// Adds the keys [key, key + STEP) to the sums. k, v: the rows of the head; keys: [x, y) that count, [z, w)
// that all queries see. `exchange`: this step's of the team. wait_k, wait_v: until the keys are there; wait_k
// for the lanes of the warp, too, which leave the tables.
template <int D, int Q, int PITCH_K, int PITCH_V, class WaitK, class WaitV>
__device__ __forceinline__ void step(WarpState<D, Q>& state, const QueryTables<D, Q>& queries,
                                     WarpTables<D>& tables, Exchange<D, Q>& exchange,
                                     const LaneOffsets& offsets, int lane, const uint8_t* k,
                                     const uint8_t* v, int team, int member, int32_t key,
                                     const int4& keys, float softcap, WaitK wait_k, WaitV wait_v) {
    constexpr int TEAM = team_size<D>(), OWN = TILES / TEAM;
    const int t = lane % 4;
    const bool second = lane / 4 % 2;
    const int masked = (key < keys.x) | (key + STEP > keys.y) | (key < keys.z) | (key + STEP > keys.w);
    const int4 fill = offsets.fill[lane], own = offsets.read[lane];
    const auto hide = [&](float (&x)[2], int tile, float with) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t at = key + 8 * tile + 2 * t + i;
            if (at < state.start || at >= state.end) x[i] = with;
        }
    };
    wait_k();
    fill_keys<D, PITCH_K>(tables, k, fill, lane, member);
    __syncwarp();
    float mine[OWN][2];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int tile = member * OWN + i;
        score_tile<D, Q>(state, queries, lane, &tables.k_scale[0][8 * i + 2 * t],
                         k + 8 * tile * PITCH_K + own.x, softcap, mine[i]);
        if (masked) hide(mine[i], tile, -INF_F32);
        if (Q == 8 || !second) exchange.scores[own.z][tile] = make_float2(mine[i][0], mine[i][1]);
    }
    wait_v();
    const bool wild = fill_values<D, PITCH_V>(tables, v, fill, lane, member, masked, keys.x - key,
                                              keys.y - key);
    __syncwarp();
    float highest = -INF_F32;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const float2 exponent = *reinterpret_cast<const float2*>(&tables.exponent[8 * i + 2 * t]);
        highest = fmaxf(highest, fmaxf(mine[i][0] + exponent.x, mine[i][1] + exponent.y));
    }
    if constexpr (TEAM > 1) {
        if (Q == 8 || !second) exchange.highest[member][own.z] = highest;
        team_barrier<TEAM>(team);
#pragma unroll
        for (int i = 0; i < TEAM; i++) highest = fmaxf(highest, exchange.highest[i][own.z]);
    }
    float scores[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i += 2) {
        const float4 two = *reinterpret_cast<const float4*>(&exchange.scores[own.z][i]);
        scores[i][0] = two.x, scores[i][1] = two.y;
        scores[i + 1][0] = two.z, scores[i + 1][1] = two.w;
    }
    if (__any_sync(FULL_MASK, highest - WEIGHT_BITS > state.reference)) raise<D, Q>(state, highest);

    float p[TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++)
        p[i / 2][i % 2] = exp2_fast(scores[i / 2][i % 2] - state.reference);
    if (masked) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) hide(p[tile], tile, -0.0f);  // unlike a small weight
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) state.weight = state.weight + p[i / 2][i % 2];
    const uint8_t* const pair = v + member * (2 * V_BLOCK_BYTES);
    const bool guarded = __any_sync(FULL_MASK, wild);
#pragma unroll
    for (int block = 0; block < 2; block++) {
        uint32_t words[2][2];  // [half of the keys][tile]
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint8_t* const rows = pair + half * 16 * PITCH_V;
            if (block == 0) {
                uint32_t outer[4];  // [2 * piece + tile] of the pieces 0 and 1
                load_across_x4(outer, rows, own.y, PITCH_V, 8 * PITCH_V, 16);
                words[half][0] = lane < 16 ? outer[2] : outer[0];
                words[half][1] = lane < 16 ? outer[3] : outer[1];
            } else {
                load_across_x2(words[half], rows + 32, own.y, PITCH_V, 8 * PITCH_V);
            }
        }
        if (guarded) add_block<true, D, Q>(state, tables, block, own.w, lane, words, p);
        else add_block<false, D, Q>(state, tables, block, own.w, lane, words, p);
    }
}
