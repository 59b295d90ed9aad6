// One step of attention on tensor cores: 16 keys, K q8_0 and V q5_1, for the queries of one warp.
//
//   Q K^T  f16 products of q as two f16 (22 bits) and the codes of K, which are exact as subnormal
//          f16 (code + 128, the offset taken back in the accumulator's start), one sum per block of
//          32 channels, times the block's scale;
//   P V    f16 products of p * scale as two f16 and the codes of V, exact as subnormal f16; the sum
//          of p * (minimum + 16 * scale) beside them.
//
// p and p * scale are held against powers of two, so that a change of the reference is exact. A
// masked key weighs exactly 0, and no lane's sum depends on another query.
#pragma once
#include "common/device.cuh"
#include "common/fragments.cuh"
#include "common/mma.cuh"

constexpr int K_BLOCK_BYTES = 34, V_BLOCK_BYTES = 24;
constexpr int STEP = 16;  // keys of one tensor-core step
constexpr int SET = 8;    // queries of one tensor-core tile
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NO_REFERENCE = -1e30f;
constexpr int MOST_ROOM = 28;  // scales below 2^-14 are not told apart

// What a warp keeps in shared memory: of a step the blocks' scales; of its queries the start of their
// accumulators, the factor of their scores and the keys they see; and its place.
template <int D, int SETS>
struct WarpTables {
    static constexpr int BLOCKS = D / 32;
    float k_scale[BLOCKS][STEP];
    float2 values[BLOCKS][STEP];  // scale, value of code 16
    // Fifth bits of V: [block][tile of 8 keys][pair of keys][half of the channels][key]
    uint16_t fifth[BLOCKS][2][4][2][2];
    float bias[SETS][D / 32][SET];
    float factor[SETS][SET];  // of a raw score
    int32_t start[SETS][SET], end[SETS][SET];
    int4 keys;  // [x, y) of this block that some query sees, [z, w) that all see
    int4 place;  // row and query of the warp's first query, its number of queries, its kv head
    int32_t slot_zero;  // chunk of slot 0
    const uint8_t* k;  // its slices of the rows, as if absolute row 0 was there
    const uint8_t* v;
};

// The pitch of K rows puts 4 rows 8 banks apart, that of V rows 8 rows 4 banks apart.
__device__ __forceinline__ int k_pitch(int bytes) { return (bytes + 63) / 64 * 64 + 32; }
__device__ __forceinline__ int v_pitch(int bytes) { return (bytes + 31) / 32 * 32 + 16; }

// Where a lane reads and writes in a step, in bytes. In shared memory, the same for all warps: to
// compute it anew in each step would cost a tenth of the instructions, and registers are scarce.
struct LaneOffsets {
    int4 fill;  // its key in the rows of K, of V; in k_scale (values: twice), in fifth
    int4 read;  // its codes of K; its row for load_across of V; 8t; g

    template <int D>
    __device__ __forceinline__ void set(int lane, int pitch_k, int pitch_v) {
        const int key = lane % STEP, first = lane / STEP * (D / 64);  // blocks of the fill
        const int g = lane / 4, t = lane % 4;
        fill = make_int4(key * pitch_k + first * K_BLOCK_BYTES, key * pitch_v + first * V_BLOCK_BYTES,
                         first * (STEP * 4) + key * 4,
                         first * 64 + key / 8 * 32 + key % 8 / 2 * 8 + key % 2 * 2);
        read = make_int4(g * pitch_k + 8 * t, across_offset(lane, pitch_v, 8 * pitch_v, 16), 8 * t, g);
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

// One warp's queries and running sums. Lane 4 g + t holds query g of each set, and of the sums of V
// the queries 2t and 2t + 1.
template <int D, int SETS>
struct WarpState {
    static constexpr int BLOCKS = D / 32;
    // Fragments of q that stay in registers, as many as there is room for; the others are in shared
    // memory.
    static constexpr int HELD = SETS > 1 || D > 128 ? 0 : D == 128 ? 5 : 4;
    static constexpr int SHARED = SETS * D / 16 - HELD;
    uint32_t q_held[HELD > 0 ? HELD : 1][4];
    uint4* q_shared;  // [SHARED][lane]
    float sums[SETS][BLOCKS][2][4];
    // A key weighs 2^(score - reference). With the scores so far <= reference + room, both whole, and
    // the scales of V below 2^(14 - room), that is at most 2^14 times a scale.
    float reference[SETS], room[SETS];
    float weight[SETS];            // sum of weights
    float middles[SETS][BLOCKS];   // of weight * value of code 16; each lane its keys
    float limit;                   // 2^(14 - largest room)
};

// What a lane needs of a query: of each block its channels 8t to 8t + 7.
template <int D>
struct RawQuery {
    float4 x[D / 32][2];
    __device__ __forceinline__ void load(const float* row) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            x[i / 2][i % 2] = *reinterpret_cast<const float4*>(row + 32 * (i / 2) + 8 * t + i % 2 * 4);
    }
};

template <int D, int SETS>
__device__ __forceinline__ void prepare_query(WarpState<D, SETS>& state,
                                              WarpTables<D, SETS>& tables, int set,
                                              const RawQuery<D>& raw, float scale, float softcap) {
    constexpr int BLOCKS = D / 32;
    const int lane = threadIdx.x % WARP_LANES, t = lane % 4;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++) {
        const float4 x = raw.x[i / 2][i % 2];
        most = fmaxf(fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
    }
    most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
    int32_t above = int32_t(__float_as_uint(most) >> 23) - 126;  // |q| < 2^above
    above = above < -110 ? -110 : above;
    const float lift = power_of_two(15 - above);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 x = raw.x[b][i];
            const float y[4] = {x.x * lift, x.y * lift, x.z * lift, x.w * lift};
            uint32_t a[4];
            split_pair(y[0], y[2], a[0], a[1]);
            split_pair(y[1], y[3], a[2], a[3]);
            total = total + ((y[0] + y[1]) + (y[2] + y[3]));
            const int at = set * (D / 16) + 2 * b + i;
            constexpr int HELD = WarpState<D, SETS>::HELD;
            if (at >= HELD) {
                state.q_shared[(at - HELD) * WARP_LANES + lane] = make_uint4(a[0], a[1], a[2], a[3]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) state.q_held[at][j] = a[j];
            }
        }
        total = total + __shfl_xor_sync(FULL_MASK, total, 1);
        total = total + __shfl_xor_sync(FULL_MASK, total, 2);
        if (t == 0) tables.bias[set][b][lane / 4] = total * (-128.0f * 0x1p-24f);
    }
    const float natural = power_of_two(above + 9) * scale;  // codes of K count 2^-24, q is 2^lift high
    if (t == 0) tables.factor[set][lane / 4] = softcap > 0.0f ? natural : natural * LOG2_E;
}

template <int D, int SETS>
__device__ __forceinline__ void begin_part(WarpState<D, SETS>& state) {
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        state.weight[s] = 0.0f;
        state.reference[s] = NO_REFERENCE, state.room[s] = MOST_ROOM;
#pragma unroll
        for (int b = 0; b < D / 32; b++) {
            state.middles[s][b] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) state.sums[s][b][i / 4][i % 4] = 0.0f;
        }
    }
    state.limit = power_of_two(14 - MOST_ROOM);
}

// Scales and fifth bits of a step. Lanes 0 to 15 are the keys, lanes 16 to 31 the same with the other
// half of the blocks. Keys outside [from, to) count as zeros. Returns this lane's largest scale;
// wild: one of its values is not finite.
template <int D, int SETS>
__device__ __forceinline__ float fill_tables(WarpTables<D, SETS>& tables, const int4& own,
                                             const uint8_t* k, const uint8_t* v, bool masked,
                                             int from, int to, bool& wild) {
    const int key = threadIdx.x % STEP;
    const uint8_t* k_row = k + own.x;
    const uint8_t* v_row = v + own.y;
    float* const k_scale = displaced(&tables.k_scale[0][0], own.z);
    float2* const values = displaced(&tables.values[0][0], 2 * own.z);
    uint16_t* const fifth = displaced(&tables.fifth[0][0][0][0][0], own.w);
    float most = 0.0f, all = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        const uint16_t k_half = *reinterpret_cast<const uint16_t*>(k_row + i * K_BLOCK_BYTES);
        uint2 head = *reinterpret_cast<const uint2*>(v_row + i * V_BLOCK_BYTES);
        if (masked) head.x = key >= from && key < to ? head.x : 0u;
        const float scale = f16_to_f32(uint16_t(head.x));
        const float middle = fmaf(16.0f, scale, f16_to_f32(uint16_t(head.x >> 16)));
        k_scale[i * STEP] = f16_to_f32(k_half);
        values[i * STEP] = make_float2(scale, middle);
        fifth[i * 32] = uint16_t(head.y);
        fifth[i * 32 + 2] = uint16_t(head.y >> 16);
        most = fmaxf(most, fabsf(scale));
        all = all + fabsf(middle);
    }
    wild = !(all < INF_F32);
    return most;
}

// 8 codes of a key from channel 8t of block b on; `own` is 8t bytes behind the head.
template <int D, int B>
__device__ __forceinline__ void load_codes(const uint8_t* own, uint32_t* codes) {
    const uint8_t* at = own + B * K_BLOCK_BYTES + B % 2 * 2;  // a word before or at the codes
    constexpr bool WIDE = D % 128 == 0;
    uint32_t x, y;
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
        x = __byte_perm(w0, w1, 0x5432), y = __byte_perm(w1, w2, 0x5432);
    } else if constexpr (WIDE && B % 4 == 3) {
        const uint2 w = *reinterpret_cast<const uint2*>(at);
        x = w.x, y = w.y;
    } else {
        x = *reinterpret_cast<const uint32_t*>(at), y = *reinterpret_cast<const uint32_t*>(at + 4);
    }
    x ^= 0x80808080u, y ^= 0x80808080u;
    codes[0] = __byte_perm(x, 0, 0x4240), codes[1] = __byte_perm(x, 0, 0x4341);
    codes[2] = __byte_perm(y, 0, 0x4240), codes[3] = __byte_perm(y, 0, 0x4341);
}

// Adds block B to the raw scores [set][2 * tile + i] of the keys 8 * tile + 2t + i.
template <int D, int SETS, int B>
__device__ __forceinline__ void score_block(const WarpState<D, SETS>& state,
                                            const WarpTables<D, SETS>& tables, const int4& own,
                                            const uint8_t* k, int pitch,
                                            float (&scores)[SETS][4]) {
    const int lane = threadIdx.x % WARP_LANES;
    uint32_t codes[2][4];
    load_codes<D, B>(k + own.x, codes[0]);
    load_codes<D, B>(k + own.x + 8 * pitch, codes[1]);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        uint32_t q[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = s * (D / 16) + 2 * B + i;
            constexpr int HELD = WarpState<D, SETS>::HELD;
            if (at >= HELD) {
                const uint4 a = state.q_shared[(at - HELD) * WARP_LANES + lane];
                q[i][0] = a.x, q[i][1] = a.y, q[i][2] = a.z, q[i][3] = a.w;
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) q[i][j] = state.q_held[at][j];
            }
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const float bias = tables.bias[s][B][own.w];
            float dots[4] = {bias, bias, 0.0f, 0.0f};
            mma_m16n8k16_f16(dots, q[0], codes[tile], dots);
            mma_m16n8k16_f16(dots, q[1], codes[tile] + 2, dots);
            const float2 scale = *reinterpret_cast<const float2*>(
                displaced(&tables.k_scale[B][8 * tile], own.z));
            scores[s][2 * tile] = fmaf(dots[0] + dots[2], scale.x, scores[s][2 * tile]);
            scores[s][2 * tile + 1] = fmaf(dots[1] + dots[3], scale.y, scores[s][2 * tile + 1]);
        }
    }
    if constexpr (B + 1 < D / 32) score_block<D, SETS, B + 1>(state, tables, own, k, pitch, scores);
}

template <int SETS>
__device__ __forceinline__ void cap_scores(float (&scores)[SETS][4], float softcap) {
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            const float x = i == 0   ? scores[s][0]
                            : i == 1 ? scores[s][1]
                            : i == 2 ? scores[s][2]
                                     : scores[s][3];
            const float y = softcap * tanhf(x / softcap) * LOG2_E;
            scores[s][0] = i == 0 ? y : scores[s][0], scores[s][1] = i == 1 ? y : scores[s][1];
            scores[s][2] = i == 2 ? y : scores[s][2], scores[s][3] = i == 3 ? y : scores[s][3];
        }
}

template <int D, int SETS>
__device__ __forceinline__ void mask_scores(float (&scores)[SETS][4],
                                            const WarpTables<D, SETS>& tables, int32_t key) {
    const int lane = threadIdx.x % WARP_LANES, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const int32_t start = tables.start[s][g] - key, end = tables.end[s][g] - key;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = i / 2 * 8 + 2 * t + i % 2;
            scores[s][i] = at >= start && at < end ? scores[s][i] : -INF_F32;
        }
    }
}

// Raises the references where this step's scores or scales are above them.
template <int D, int SETS>
__device__ __forceinline__ void raise(WarpState<D, SETS>& state, const WarpTables<D, SETS>& tables,
                                      const float (&scores)[SETS][4], int32_t key) {
    const int lane = threadIdx.x % WARP_LANES, g = lane / 4, t = lane % 4;
    float most_room = -100.0f;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float high = -INF_F32, scale = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) high = fmaxf(high, scores[s][i]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = i / 2 * 8 + 2 * t + i % 2;
            if (key + at < tables.start[s][g] || key + at >= tables.end[s][g]) continue;
#pragma unroll
            for (int b = 0; b < D / 32; b++) {
                const float d = fabsf(tables.values[b][at].x);
                scale = d < INF_F32 ? fmaxf(scale, d) : scale;
            }
        }
        high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, 1));
        high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, 2));
        scale = fmaxf(scale, __shfl_xor_sync(FULL_MASK, scale, 1));
        scale = fmaxf(scale, __shfl_xor_sync(FULL_MASK, scale, 2));
        // The same test as of the caller: whether a reference moves must not depend on the other rows.
        const float old = state.reference[s];
        const float pivot = high - old > state.room[s] ? ceilf(high) : old + state.room[s];
        const float below = float(int32_t(__float_as_uint(scale) >> 23) - 126);
        state.room[s] = fminf(state.room[s], 14.0f - below);
        state.reference[s] = pivot - state.room[s];
        const int32_t down = int32_t(fmaxf(old - state.reference[s], -1000.0f));
        most_room = fmaxf(most_room, state.room[s]);
        const float shrink = power_of_two(down);
        const float shrink0 = power_of_two(__shfl_sync(FULL_MASK, down, 8 * t));
        const float shrink1 = power_of_two(__shfl_sync(FULL_MASK, down, 8 * t + 4));
        state.weight[s] = state.weight[s] * shrink;
#pragma unroll
        for (int b = 0; b < D / 32; b++) {
            state.middles[s][b] = state.middles[s][b] * shrink;
#pragma unroll
            for (int i = 0; i < 8; i++)
                state.sums[s][b][i / 4][i % 4] *= i % 2 ? shrink1 : shrink0;
        }
    }
#pragma unroll
    for (int offset = 4; offset < WARP_LANES; offset *= 2)
        most_room = fmaxf(most_room, __shfl_xor_sync(FULL_MASK, most_room, offset));
    state.limit = power_of_two(14 - int32_t(most_room));
}

// Codes of V less 16 as pairs of subnormal f16, for the keys 2t and 2t + 1 of a tile: channels 2h and
// 2h + 16 (tile 0 of the tensor cores, in units of 1 and 16), 2h + 1 and 2h + 17 (tile 1; 2 and 32).
// Without the 16 the sums would be large and cancel against those of the minima, and with them what
// the tensor cores cut off when they add.
__device__ __forceinline__ void unpack_codes(uint32_t nibbles, uint32_t low, uint32_t high,
                                             uint32_t& c0, uint32_t& c16, uint32_t& c1,
                                             uint32_t& c17) {
    const uint32_t odd = nibbles >> 7;
    c0 = subtract_halves((nibbles & 0x000F000Fu) | (low & 0x00100010u), 0x00100010u);
    c16 = subtract_halves((nibbles & 0x00F000F0u) | (high & 0x01000100u), 0x01000100u);
    c1 = subtract_halves((odd & 0x001E001Eu) | (low & 0x00200020u), 0x00200020u);
    c17 = subtract_halves((odd & 0x01E001E0u) | (high & 0x02000200u), 0x02000200u);
}

// Which half-word of the codes of a block lane group g holds: a pair of V blocks is three pieces of
// 16 bytes, and the codes of the first block straddle two of them.
__device__ __forceinline__ int half_word(int block, int g) { return block % 2 ? g : g ^ 4; }

template <int D, int SETS>
__device__ __forceinline__ void step(WarpState<D, SETS>& state, WarpTables<D, SETS>& tables,
                                     const LaneOffsets& lane_offsets, const uint8_t* k, int pitch_k, const uint8_t* v, int pitch_v,
                                     int32_t key, float softcap) {
    __syncwarp();  // the tables are free
    const int4 keys = tables.keys;
    const bool masked = key < keys.z || key + STEP > keys.w;
    bool wild;
    const float scale =
        fill_tables(tables, lane_offsets.fill, k, v, masked, keys.x - key, keys.y - key, wild);
    __syncwarp();
    const int4 own = lane_offsets.read;
    const int g = own.w, t = threadIdx.x % 4;

    float p[SETS][4];
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[s][i] = 0.0f;
    score_block<D, SETS, 0>(state, tables, own, k, pitch_k, p);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const float factor = tables.factor[s][g];
#pragma unroll
        for (int i = 0; i < 4; i++) p[s][i] = p[s][i] * factor;
    }
    if (softcap > 0.0f) cap_scores(p, softcap);
    if (masked) mask_scores(p, tables, key);
    bool above = wild || scale >= state.limit;
#pragma unroll
    for (int s = 0; s < SETS; s++)
        above = above || fmaxf(fmaxf(p[s][0], p[s][1]), fmaxf(p[s][2], p[s][3])) -
                                 state.reference[s] > state.room[s];
    bool guarded = false;
    if (__any_sync(FULL_MASK, above)) {
        raise<D, SETS>(state, tables, p, key);
        guarded = __any_sync(FULL_MASK, wild);
    }
#pragma unroll
    for (int s = 0; s < SETS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[s][i] = exp2_fast(p[s][i] - state.reference[s]);
            state.weight[s] = state.weight[s] + p[s][i];
        }
    }

#pragma unroll
    for (int pair = 0; pair < D / 64; pair++) {
        uint32_t outer[4], inner[2];  // [2 * piece + tile] of the pieces 0 and 1; [tile] of piece 2
        load_across_x4(outer, v + pair * 48, own.y, pitch_v, 8 * pitch_v, 16);
        load_across_x2(inner, v + pair * 48 + 32, own.y, pitch_v, 8 * pitch_v);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int b = 2 * pair + j;
            const int h = half_word(j, g);
            uint32_t codes[2][4];
            float4 values[2];  // scale and value of code 16, of two keys
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                values[tile] = *reinterpret_cast<const float4*>(
                    displaced(&tables.values[b][8 * tile], 2 * own.z));
                const uint2 fifth = *reinterpret_cast<const uint2*>(
                    displaced(&tables.fifth[b][tile][0][0][0], own.z));
                const uint32_t nibbles =
                    j ? inner[tile] : g < 4 ? outer[2 + tile] : outer[tile];
                unpack_codes(nibbles, __funnelshift_r(fifth.x, fifth.x, 2 * h - 4),
                             __funnelshift_r(fifth.y, fifth.y, 2 * h - 8), codes[0][2 * tile],
                             codes[0][2 * tile + 1], codes[1][2 * tile], codes[1][2 * tile + 1]);
            }
#pragma unroll
            for (int s = 0; s < SETS; s++) {
                float d[4] = {values[0].x, values[0].z, values[1].x, values[1].z};
                float m[4] = {values[0].y, values[0].w, values[1].y, values[1].w};
                if (guarded) {  // what is not finite stays with the rows that see it
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int32_t at = key + i / 2 * 8 + 2 * t + i % 2;
                        const bool seen = at >= tables.start[s][g] && at < tables.end[s][g];
                        const bool finite = fabsf(d[i]) < INF_F32 && fabsf(m[i]) < INF_F32;
                        d[i] = !seen ? 0.0f : finite ? d[i] : NAN_F32;
                        m[i] = seen && finite ? m[i] : 0.0f;
                    }
                }
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[i] = p[s][i] * d[i];
                    state.middles[s][b] = fmaf(p[s][i], m[i], state.middles[s][b]);
                }
                uint32_t coarse[2], fine[2];
                split_pair(x[0], x[1], coarse[0], fine[0]);
                split_pair(x[2], x[3], coarse[1], fine[1]);
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    float* sums = state.sums[s][b][tile];
                    mma_m16n8k16_f16(sums, codes[tile], coarse, sums);
                    mma_m16n8k16_f16(sums, codes[tile], fine, sums);
                }
            }
        }
    }
}
