// Scores of a step of attention on integer tensor cores: digits of q, and their products with the codes of K.
#pragma once
#include "common/attend_team.cuh"
#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/q8_codes.cuh"

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
    above = above < -90 ? -90 : above > 128 ? 128 : above;
    const float lift = power_of_two(QUERY_BITS - above);
    const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int b = 0; b < D / 32; b++) {
        uint32_t digits[4], high[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 v = raw.x[b][i];
            const Digits found(v, lift);
            const uint32_t digit0 = found.of[0], digit1 = found.of[1];
            high[i] = found.of[2];
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
