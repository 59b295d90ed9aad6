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
#include "common/attend_scores.cuh"
#include "common/attend_values.cuh"

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
