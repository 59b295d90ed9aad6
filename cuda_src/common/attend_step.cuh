// One step of attention on integer tensor cores: 32 keys, K q8_0 and V q5_1, in class `exact`.
//
// A team of D / 64 warps serves Q queries of one kv head. In a step each warp scores a half of the keys
// (with D = 64 both, with D = 256 for a half of the queries) and weighs them; the team exchanges the
// weights; then each warp adds the step to its 64 channels of V:
//
//   K Q^T  products of the codes of K and three 8-bit digits of q (fixed point, one scale a row), exact
//          in int32; times the block's scale in f32;
//   P V    products of the codes of V and three digits of p * scale (fixed point of 23 bits), exact
//          in int32 over a whole chunk; the sum of p * minimum beside them in f32.
//
// p * scale is held against a power of two, the query's reference. A masked key weighs exactly 0, no
// lane's sum depends on another query, and Q changes no bit: with Q = 4 the digits of a query lie in
// neighbouring columns of the tensor cores, with Q = 8 in one column each.
#pragma once
#include "common/device.cuh"
#include "common/fragments.cuh"
#include "common/joined_chunks.cuh"
#include "common/mma.cuh"

constexpr int K_BLOCK_BYTES = 34, V_BLOCK_BYTES = 24;
constexpr int STEP = 32;             // keys
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
    int4 fill[WARP_LANES];  // in V of the key whose scales it compares, of its key; in `fifth`, `values`
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
// raw scores, its reference, and the keys that it sees.
template <int D, int Q>
struct alignas(16) WarpTables {
    float exponent[Share<D, Q>::HALVES * HALF];
    float scales[2][STEP];
    float minima[2][STEP + 4];  // of two blocks on different banks
    uint2 fifth[2][2][4][2];
    float factor[Q], reference[Q];
    int2 seen[Q];
};

// The pitch of K rows puts 4 rows 8 banks apart, that of V rows 8 rows 4 banks apart.
__host__ __device__ constexpr int k_pitch(int bytes) { return (bytes + 31) / 64 * 64 + 32; }
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

// Takes the digits of the query of the lane group's column; they, and the factor, are there after the
// next barrier. All warps that score the same queries write the same into `tables`.
template <int D, int Q>
__device__ __forceinline__ void take_query(WarpState<D, Q>& state, QueryTables<D, Q>& tables,
                                           WarpTables<D, Q>& own, const RawQuery<D>& raw, int member,
                                           float scale, float softcap) {
    using Own = Share<D, Q>;
    constexpr bool THREE = Own::QUERIES == 8;
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
            digits[i] = !THREE && odd ? digit1 : digit0;
            digits[2 + i] = THREE ? digit1 : odd ? 0u : high[i];
        }
        constexpr int HELD = WarpState<D, Q>::HELD;
        if (b < HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) state.q[b < HELD ? b : 0][i] = digits[i];
        } else if (Own::half(member) == 0) {
            tables.rest[member / 2][b - HELD][lane] =
                make_uint4(digits[0], digits[1], digits[2], digits[3]);
        }
        if (THREE && member == 0) tables.high[b][lane] = make_uint2(high[0], high[1]);
    }
    float factor = power_of_two(above - QUERY_BITS) * scale + bad;
    if (softcap <= 0.0f) factor = factor * LOG2_E;
    if (lane % 4 == 0 && (THREE || !odd))
        own.factor[Own::first_query(member) + query_of_group<Own::QUERIES>(lane / 4)] = factor;
}

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

// Adds the blocks from B on to the raw scores of the keys g + 8r of a half: `even` the digits 0 and 2,
// `odd` the digit 1, [r][column]. The products start at SIGNED_BITS, which makes them floats at the
// price of a subtraction.
template <int D, int Q, int B>
__device__ __forceinline__ void score_blocks(const WarpState<D, Q>& state,
                                             const QueryTables<D, Q>& tables, int lane, int member,
                                             const uint8_t* row, int apart,
                                             float (&even)[2][Share<D, Q>::COLUMNS],
                                             float (&odd)[2][Share<D, Q>::COLUMNS]) {
    constexpr int COLUMNS = Share<D, Q>::COLUMNS, HELD = WarpState<D, Q>::HELD;
    constexpr int32_t NOTHING[4] = {SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS};
    uint32_t codes[2][2];
    float d[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint8_t* const at = row + r * apart;
        load_codes<D, B>(at + 8 * (lane % 4), codes[r]);
        d[r] = f16_to_f32(*reinterpret_cast<const uint16_t*>(at + B * K_BLOCK_BYTES));
    }
    const uint32_t k[4] = {codes[0][0], codes[1][0], codes[0][1], codes[1][1]};
    uint4 q;
    if constexpr (B < HELD) q = make_uint4(state.q[B][0], state.q[B][1], state.q[B][2], state.q[B][3]);
    else q = tables.rest[member / 2][B - HELD][lane];
    const uint32_t first[2] = {q.x, q.y}, second[2] = {q.z, q.w};
    int32_t sums[3][4];
    mma_m16n8k32_s8(sums[0], k, first, NOTHING);
    mma_m16n8k32_s8(sums[1], k, second, NOTHING);
    if constexpr (COLUMNS == 2) {
        const uint2 high = tables.high[B][lane];
        const uint32_t third[2] = {high.x, high.y};
        mma_m16n8k32_s8(sums[2], k, third, NOTHING);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int at = 2 * r + c;
            const int32_t raw[3] = {sums[0][at], COLUMNS == 2 ? sums[1][at] : sums[0][at + 1],
                                    COLUMNS == 2 ? sums[2][at] : sums[1][at]};
            float digit[3];
            for (int i = 0; i < 3; i++) digit[i] = __int_as_float(raw[i]) - SIGNED;
            even[r][c] = fmaf(fmaf(digit[2], 65536.0f, digit[0]), d[r], even[r][c]);
            odd[r][c] = fmaf(digit[1], d[r], odd[r][c]);
        }
    if constexpr (B + 1 < D / 32)
        score_blocks<D, Q, B + 1>(state, tables, lane, member, row, apart, even, odd);
}

// Scores of the keys g + 8r of a half, in powers of 2. row: of key g.
template <int D, int Q>
__device__ __forceinline__ void score_half(const WarpState<D, Q>& state,
                                           const QueryTables<D, Q>& tables,
                                           const WarpTables<D, Q>& own, int lane, int member,
                                           const uint8_t* row, int apart, float softcap,
                                           float (&scores)[2][Share<D, Q>::COLUMNS]) {
    using Own = Share<D, Q>;
    constexpr int COLUMNS = Own::COLUMNS;
    float even[2][COLUMNS], odd[2][COLUMNS];
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS; i++)
        even[i / COLUMNS][i % COLUMNS] = odd[i / COLUMNS][i % COLUMNS] = 0.0f;
    score_blocks<D, Q, 0>(state, tables, lane, member, row, apart, even, odd);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float& score = scores[r][c];
            const int query =
                Own::first_query(member) + query_of_column<Own::QUERIES>(lane % 4, c);
            score = fmaf(odd[r][c], 256.0f, even[r][c]) * own.factor[query];
            if (softcap > 0.0f) score = softcap * tanhf(score / softcap) * LOG2_E;
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

// The reference of a query whose largest p * scale among some keys is below 2^highest.
__device__ __forceinline__ float raised(float reference, float highest) {
    return highest - WEIGHT_BITS > reference ? ceilf(highest) - (WEIGHT_BITS - SPARE_BITS) : reference;
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

// Waits for the warps of a team. On the host device all warps of a block take the same steps.
template <int TEAM>
__device__ __forceinline__ void team_barrier(int team) {
#if MEMRA_CUDA
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM * WARP_LANES) : "memory");
#else
    __syncthreads();
#endif
}

// Adds the keys [key, key + STEP) to the sums. k, v: the rows of the head, which are there; keys: [x, y)
// that count, [z, w) that all queries see. `exchange`: this step's of the team. What does not depend
// on weights comes before them, so that few instructions follow the exchange. ask: called when the
// warps of other teams have had half a step to finish the one before.
template <int D, int Q, int PITCH_K, int PITCH_V, class Ask>
__device__ __forceinline__ void step(WarpState<D, Q>& state, const QueryTables<D, Q>& queries,
                                     WarpTables<D, Q>& tables, Exchange<D, Q>& exchange,
                                     const LaneOffsets& offsets, int lane, const uint8_t* k,
                                     const uint8_t* v, int team, int member, int32_t key,
                                     const int4& keys, float softcap, Ask ask) {
    using Own = Share<D, Q>;
    constexpr int COLUMNS = Own::COLUMNS, HALVES = Own::HALVES;
    constexpr int EARLY = D > 128 ? 0 : 2;  // blocks of codes that registers hold meanwhile
    const int g = lane / 4, t = lane % 4;
    const int masked = (key < keys.x) | (key + STEP > keys.y) | (key < keys.z) | (key + STEP > keys.w);
    const int half = Own::half(member), first = Own::first_query(member);
    float own[HALVES][2][COLUMNS];  // scores, then weights, of the keys 16 * half + 8r + g
    const auto hide = [&](float with) {
#pragma unroll
        for (int i = 0; i < Own::ALL; i++) {
            const int h = i / COLUMNS / 2, r = i / COLUMNS % 2, c = i % COLUMNS;
            const int2 seen = tables.seen[first + query_of_column<Own::QUERIES>(t, c)];
            const int32_t at = key + (half + h) * HALF + 8 * r + g;
            if (at < seen.x || at >= seen.y) own[h][r][c] = with;
        }
    };
    const int4 fill = offsets.fill[lane], read = offsets.read[lane];
    const uint8_t* const pair = v + member * (2 * V_BLOCK_BYTES);
    Heads<D, Q> heads;
    if constexpr (D <= 128) heads.template load<PITCH_V>(v, fill, member);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
        score_half<D, Q>(state, queries, tables, lane, member, k + (half + h) * HALF * PITCH_K + read.x,
                         8 * PITCH_K, softcap, own[h]);
    if constexpr (D > 128) heads.template load<PITCH_V>(v, fill, member);
    bool wild = heads.fill(tables, fill, lane, !masked || (key + lane >= keys.x && key + lane < keys.y));
    Codes codes[2];
#pragma unroll
    for (int block = 0; block < EARLY; block++)
        codes[block].template load<PITCH_V>(pair, block, read.y, lane);
    wild = __any_sync(FULL_MASK, wild);
    if (masked) hide(-INF_F32);
    __syncwarp();
#pragma unroll
    for (int block = 0; block < EARLY; block++) codes[block].complete(tables, block, lane);
    float highest[COLUMNS], reference[COLUMNS];
    bool above = false;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        highest[c] = -INF_F32;
        reference[c] = tables.reference[first + query_of_column<Own::QUERIES>(t, c)];
    }
#pragma unroll
    for (int i = 0; i < Own::ALL; i++) {
        const int h = i / COLUMNS / 2, r = i / COLUMNS % 2, c = i % COLUMNS;
        highest[c] = fmaxf(highest[c], own[h][r][c] + tables.exponent[h * HALF + 8 * r + g]);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) above = above || highest[c] - WEIGHT_BITS > reference[c];
    bool raise = __any_sync(FULL_MASK, above);
    if (raise) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int apart = 4; apart < WARP_LANES; apart *= 2)
                highest[c] = fmaxf(highest[c], __shfl_xor_sync(FULL_MASK, highest[c], apart));
            reference[c] = raised(reference[c], highest[c]);
            if (g == 0)
                exchange.references[half][first + query_of_column<Own::QUERIES>(t, c)] = reference[c];
        }
    }
#pragma unroll
    for (int i = 0; i < Own::ALL; i++) {
        float& x = own[i / COLUMNS / 2][i / COLUMNS % 2][i % COLUMNS];
        x = exp2_fast(x - reference[i % COLUMNS]);
    }
    if (masked) hide(-0.0f);  // unlike a small weight
#pragma unroll
    for (int i = 0; i < Own::ALL; i++) {
        const int h = i / COLUMNS / 2, r = i / COLUMNS % 2, c = i % COLUMNS;
        const int at = (read.z + 128 * c) ^ (16 * (half + h) ^ 16 * c);
        *displaced(&exchange.weights[first][0], at + 8 * r) = own[h][r][c];
    }
    if (Own::TEAM > 1 && lane == 0) exchange.raised[member] = raise;
    team_barrier<Own::TEAM>(team);
#pragma unroll
    for (int i = 0; i < (Own::TEAM > 1 ? Own::TEAM : 0); i++) raise = raise | (exchange.raised[i] != 0);
    ask();
    float p[4][2];  // of the keys 8 * tile + 2t + i of the lane group's query
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float4 four =
            *reinterpret_cast<const float4*>(displaced(&exchange.weights[0][0], read.w ^ 16 * h));
        p[2 * h][0] = four.x, p[2 * h][1] = four.y, p[2 * h + 1][0] = four.z, p[2 * h + 1][1] = four.w;
    }
    if (raise) follow<D, Q>(state, tables, exchange, lane, member, p, own);
#pragma unroll
    for (int i = 0; i < Own::ALL; i++) {
        float& weight = state.weight[i / COLUMNS / 2][i % COLUMNS];
        weight = weight + own[i / COLUMNS / 2][i / COLUMNS % 2][i % COLUMNS];
    }
#pragma unroll
    for (int block = EARLY; block < 2; block++) {
        codes[block].template load<PITCH_V>(pair, block, read.y, lane);
        codes[block].complete(tables, block, lane);
    }
    if (wild) add_values<true>(state, tables, lane, codes, p);
    else add_values<false>(state, tables, lane, codes, p);
}
