// Split-KV decode attention with tensor cores over K q8_0 and V q5_1, in class `exact`.
//
// A warp owns one kv head and up to 8 * SETS queries (a query = one row of one query head of the
// group); a thread block owns a range of keys and some neighbouring kv heads, whose slices of the
// rows it streams through shared memory. Per step of 16 keys:
//   Q K^T  f16 products of q as two f16 (22 bits) and the codes of K, which are exact as subnormal
//          f16 (code + 128, the offset taken back in the accumulator's start), one sum per block of
//          32 channels, times the block's scale;
//   P V    f16 products of p * scale as two f16 and the codes of V, exact as subnormal f16; the sum
//          of p * minimum beside them.
// p and p * scale are held against powers of two, so that a change of the reference is exact.
//
// Chunks of keys at absolute positions each leave a weighted sum, a reference and a sum of weights;
// attend_mma_combine joins them in a fixed order. Steps and chunks are a function of the position
// alone, a masked key weighs exactly 0, and no lane's sum depends on another query: a row gets the
// same bits alone and among others, on a ring and on a flat plane, whichever block takes a chunk.
//
// A scale or minimum that is not finite makes NaN of the outputs that see it.
#include "common/bulk.cuh"
#include "common/counters.cuh"
#include "common/dependent.cuh"
#include "common/fragments.cuh"
#include "common/mma.cuh"
#include "common/pipeline.cuh"

constexpr int K_BLOCK_BYTES = 34, V_BLOCK_BYTES = 24;
constexpr int STEP = 16;        // keys of one tensor-core step
constexpr int SET = 8;          // queries of one tensor-core tile
constexpr int N_STAGES = 3;     // tiles of keys in flight or in use
constexpr int COPY_ASYNC = 0, COPY_BULK = 1;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float NO_PIVOT = -1e30f;

// Chunks: 32 keys below 8192, 128 below 65536, 256 below 262144, then 1024. Few enough for the
// combination, and fine enough to be shared out evenly at every length.
__device__ __forceinline__ int32_t part_of(int32_t key) {
    const int32_t near = key < 8192 ? key >> 5 : 192 + (key >> 7);
    const int32_t far = key < 262144 ? 448 + (key >> 8) : 1216 + (key >> 10);
    return key < 65536 ? near : far;
}
__device__ __forceinline__ int32_t part_begin(int32_t part) {
    const int32_t near = part < 256 ? part * 32 : (part - 192) * 128;
    const int32_t far = part < 1472 ? (part - 448) * 256 : (part - 1216) * 1024;
    return part < 704 ? near : far;
}

// The planes and counters of a launch, or of one row of a table, in 32 bits; common/counters.cuh says
// what they mean. A row r sees the keys [start, end) of seen(r - the row of the view).
struct Plane {
    const uint8_t* k;
    const uint8_t* v;
    int32_t bound;  // of the keys that the first row sees
    int32_t base, window, capacity;

    __device__ __forceinline__ Plane(const uint8_t* k_plane, const uint8_t* v_plane,
                                     const int32_t* len_d, const int32_t* base_d,
                                     const uint64_t* table, int row, int32_t window,
                                     int32_t counted, int32_t capacity)
        : window(window), capacity(capacity) {
        const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, row);
        k = view.k, v = view.v;
        bound = int32_t(view.slot) + 1 - counted, base = int32_t(view.base);
    }
    __device__ __forceinline__ int2 seen(int r) const {
        const int32_t behind = bound + r;
        const int32_t first = window > 0 && behind > window ? behind - window : 0;
        const int32_t start = first > base ? first : base;
        const int32_t end = behind - base < capacity ? behind : base + capacity;
        return make_int2(start, end > start ? end : start);
    }
};

// What a warp keeps in shared memory: of a step the blocks' scales; of its queries the start of their
// accumulators, the factor of their scores and the keys they see; and its place.
template <int D, int SETS>
struct WarpTables {
    static constexpr int BLOCKS = D / 32;
    float k_scale[BLOCKS][STEP];
    float v_scale[BLOCKS][STEP];
    float v_minimum[BLOCKS][STEP];
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

// One warp's queries and running sums. Lane 4 g + t holds query g of each set, and of the sums of V
// the queries 2t and 2t + 1.
template <int D, int SETS>
struct WarpState {
    static constexpr int BLOCKS = D / 32;
    // Fragments of q that stay in registers, as many as there is room for; the others are in shared
    // memory.
    static constexpr int HELD = SETS > 1 || D > 128 ? 0 : D == 128 ? 6 : 4;
    static constexpr int SHARED = SETS * D / 16 - HELD;
    uint32_t q_held[HELD > 0 ? HELD : 1][4];
    uint4* q_shared;  // [SHARED][lane]
    float sums[SETS][BLOCKS][2][4];
    float minima[SETS][BLOCKS];  // sums of p * minimum * 2^(14 - top)
    float weight[SETS];
    float pivot[SETS];  // p = 2^(score - pivot), an integer
    int32_t top[SETS];  // scales of V seen so far are below 2^top
    int32_t least_top;
};

template <int D, int SETS>
__device__ __forceinline__ void load_query(WarpState<D, SETS>& state,
                                           WarpTables<D, SETS>& tables, int set, const float* row,
                                           float scale, float softcap) {
    constexpr int BLOCKS = D / 32;
    const int lane = threadIdx.x % WARP_LANES, t = lane % 4;
    float most = 0.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 x = *reinterpret_cast<const float4*>(row + 32 * b + 8 * t + 4 * i);
            most = fmaxf(fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
        }
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
            const float4 x = *reinterpret_cast<const float4*>(row + 32 * b + 8 * t + 4 * i);
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
        state.weight[s] = 0.0f, state.pivot[s] = NO_PIVOT, state.top[s] = -14;
#pragma unroll
        for (int b = 0; b < D / 32; b++) {
            state.minima[s][b] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) state.sums[s][b][i / 4][i % 4] = 0.0f;
        }
    }
    state.least_top = -14;
}

// Scales, minima and fifth bits of a step. Lanes 0 to 15 are the keys, lanes 16 to 31 the same with
// the other half of the blocks. Keys that no query sees count as zeros. Returns the largest exponent
// field of a scale, and whether a scale or minimum of V is not finite.
template <int D, int SETS>
__device__ __forceinline__ int32_t fill_tables(WarpTables<D, SETS>& tables, const uint8_t* k,
                                               int pitch_k, const uint8_t* v, int pitch_v,
                                               int from, int to, bool& wild) {
    const int lane = threadIdx.x % WARP_LANES;
    const int key = lane % STEP, half = lane / STEP;
    const bool seen = key >= from && key < to;
    const uint8_t* k_row = k + key * pitch_k;
    const uint8_t* v_row = v + key * pitch_v;
    uint32_t most = 0, least = 0;
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        const int b = half * (D / 64) + i;
        const uint16_t k_scale = *reinterpret_cast<const uint16_t*>(k_row + b * K_BLOCK_BYTES);
        const uint2 head = *reinterpret_cast<const uint2*>(v_row + b * V_BLOCK_BYTES);
        const uint32_t scale = seen ? head.x & 0xFFFFu : 0u, minimum = seen ? head.x >> 16 : 0u;
        tables.k_scale[b][key] = f16_to_f32(k_scale);
        tables.v_scale[b][key] = f16_to_f32(uint16_t(scale));
        tables.v_minimum[b][key] = f16_to_f32(uint16_t(minimum));
        tables.fifth[b][key / 8][key % 8 / 2][0][key % 2] = uint16_t(head.y);
        tables.fifth[b][key / 8][key % 8 / 2][1][key % 2] = uint16_t(head.y >> 16);
        most = most > (scale & 0x7FFFu) ? most : scale & 0x7FFFu;
        least = least > (minimum & 0x7FFFu) ? least : minimum & 0x7FFFu;
    }
    wild = most >= 0x7C00u || least >= 0x7C00u;
    return int32_t(most >> 10);
}

// 8 codes of key g of a tile: words of four bytes, from channel 8t of block b on.
template <int D, int B>
__device__ __forceinline__ void load_codes(const uint8_t* row, uint32_t* codes) {
    const int t = threadIdx.x % 4;
    const uint8_t* at = row + B * K_BLOCK_BYTES + B % 2 * 2 + 8 * t;  // a word before or at the codes
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
                                            const WarpTables<D, SETS>& tables, const uint8_t* k,
                                            int pitch, float (&scores)[SETS][4]) {
    const int lane = threadIdx.x % WARP_LANES, g = lane / 4, t = lane % 4;
    uint32_t codes[2][4];
    load_codes<D, B>(k + g * pitch, codes[0]);
    load_codes<D, B>(k + (8 + g) * pitch, codes[1]);
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
            const float bias = tables.bias[s][B][g];
            float dots[4] = {bias, bias, 0.0f, 0.0f};
            mma_m16n8k16_f16(dots, q[0], codes[tile], dots);
            mma_m16n8k16_f16(dots, q[1], codes[tile] + 2, dots);
            const float2 scale = *reinterpret_cast<const float2*>(&tables.k_scale[B][8 * tile + 2 * t]);
            scores[s][2 * tile] = fmaf(dots[0] + dots[2], scale.x, scores[s][2 * tile]);
            scores[s][2 * tile + 1] = fmaf(dots[1] + dots[3], scale.y, scores[s][2 * tile + 1]);
        }
    }
    if constexpr (B + 1 < D / 32) score_block<D, SETS, B + 1>(state, tables, k, pitch, scores);
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
    int32_t least = 100;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float high = NO_PIVOT, scale = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) high = fmaxf(high, scores[s][i]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = i / 2 * 8 + 2 * t + i % 2;
            if (key + at < tables.start[s][g] || key + at >= tables.end[s][g]) continue;
#pragma unroll
            for (int b = 0; b < D / 32; b++) {
                const float d = fabsf(tables.v_scale[b][at]);
                scale = d < INF_F32 ? fmaxf(scale, d) : scale;
            }
        }
        high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, 1));
        high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, 2));
        scale = fmaxf(scale, __shfl_xor_sync(FULL_MASK, scale, 1));
        scale = fmaxf(scale, __shfl_xor_sync(FULL_MASK, scale, 2));
        const float pivot = fmaxf(state.pivot[s], ceilf(fminf(high, 1e8f)));
        int32_t top = int32_t(__float_as_uint(scale) >> 23) - 126;
        top = top > state.top[s] ? top : state.top[s];
        const int32_t down = int32_t(fmaxf(state.pivot[s] - pivot, -1000.0f));
        const int32_t down_sums = down + state.top[s] - top;
        state.pivot[s] = pivot, state.top[s] = top;
        least = top < least ? top : least;
        const float shrink_own = power_of_two(down_sums);
        const float shrink0 = power_of_two(__shfl_sync(FULL_MASK, down_sums, 8 * t));
        const float shrink1 = power_of_two(__shfl_sync(FULL_MASK, down_sums, 8 * t + 4));
        state.weight[s] = state.weight[s] * power_of_two(down);
#pragma unroll
        for (int b = 0; b < D / 32; b++) {
            state.minima[s][b] = state.minima[s][b] * shrink_own;
#pragma unroll
            for (int i = 0; i < 8; i++)
                state.sums[s][b][i / 4][i % 4] *= i % 2 ? shrink1 : shrink0;
        }
    }
#pragma unroll
    for (int offset = 4; offset < WARP_LANES; offset *= 2) {
        const int32_t other = __shfl_xor_sync(FULL_MASK, least, offset);
        least = other < least ? other : least;
    }
    state.least_top = least;
}

// Codes of V as pairs of subnormal f16, for the keys 2t and 2t + 1 of a tile: channels 2h, 2h + 16
// (tile 0 of the tensor cores, in units of 1 and 16) and 2h + 1, 2h + 17 (tile 1; 2 and 32).
__device__ __forceinline__ void unpack_codes(uint32_t nibbles, uint32_t low, uint32_t high,
                                             uint32_t& c0, uint32_t& c16, uint32_t& c1,
                                             uint32_t& c17) {
    const uint32_t odd = nibbles >> 7;
    c0 = (nibbles & 0x000F000Fu) | (low & 0x00100010u);
    c16 = (nibbles & 0x00F000F0u) | (high & 0x01000100u);
    c1 = (odd & 0x001E001Eu) | (low & 0x00200020u);
    c17 = (odd & 0x01E001E0u) | (high & 0x02000200u);
}

// Which half-word of the codes of a block lane group g holds: a pair of V blocks is three pieces of
// 16 bytes, and the codes of the first block straddle two of them.
__device__ __forceinline__ int half_word(int block, int g) { return block % 2 ? g : g ^ 4; }

template <int D, int SETS>
__device__ __forceinline__ void step(WarpState<D, SETS>& state, WarpTables<D, SETS>& tables,
                                     const uint8_t* k, int pitch_k, const uint8_t* v, int pitch_v,
                                     int32_t key, float softcap) {
    const int lane = threadIdx.x % WARP_LANES, g = lane / 4, t = lane % 4;
    __syncwarp();  // the tables are free
    const int4 keys = tables.keys;
    const bool shared_keys = key >= keys.z && key + STEP <= keys.w;
    bool wild;
    const int32_t scale_field =
        fill_tables<D, SETS>(tables, k, pitch_k, v, pitch_v, keys.x - key, keys.y - key, wild);
    __syncwarp();

    float p[SETS][4];
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[s][i] = 0.0f;
    score_block<D, SETS, 0>(state, tables, k, pitch_k, p);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const float factor = tables.factor[s][g];
#pragma unroll
        for (int i = 0; i < 4; i++) p[s][i] = p[s][i] * factor;
    }
    if (softcap > 0.0f) cap_scores(p, softcap);
    if (!shared_keys) mask_scores(p, tables, key);
    bool above = wild || scale_field - 14 > state.least_top;
#pragma unroll
    for (int s = 0; s < SETS; s++)
        above = above || fmaxf(fmaxf(p[s][0], p[s][1]), fmaxf(p[s][2], p[s][3])) > state.pivot[s];
    bool guarded = false;
    if (__any_sync(FULL_MASK, above)) {
        raise<D, SETS>(state, tables, p, key);
        guarded = __any_sync(FULL_MASK, wild);
    }
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const float lift = power_of_two(14 - state.top[s]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[s][i] = exp2_fast(p[s][i] - state.pivot[s]);
            state.weight[s] = state.weight[s] + p[s][i];
            p[s][i] = p[s][i] * lift;
        }
    }

#pragma unroll
    for (int pair = 0; pair < D / 64; pair++) {
        uint32_t outer[4], inner[2];  // [2 * piece + tile] of the pieces 0 and 1; [tile] of piece 2
        load_across_x4(outer, v + pair * 48, pitch_v, 8 * pitch_v, 16);
        load_across_x2(inner, v + pair * 48 + 32, pitch_v, 8 * pitch_v);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int b = 2 * pair + j;
            const int h = half_word(j, g);
            uint32_t codes[2][4];
            float2 scale[2], minimum[2];
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const int at = 8 * tile + 2 * t;
                scale[tile] = *reinterpret_cast<const float2*>(&tables.v_scale[b][at]);
                minimum[tile] = *reinterpret_cast<const float2*>(&tables.v_minimum[b][at]);
                const uint2 fifth = *reinterpret_cast<const uint2*>(tables.fifth[b][tile][t]);
                const uint32_t nibbles =
                    j ? inner[tile] : g < 4 ? outer[2 + tile] : outer[tile];
                unpack_codes(nibbles, __funnelshift_r(fifth.x, fifth.x, 2 * h - 4),
                             __funnelshift_r(fifth.y, fifth.y, 2 * h - 8), codes[0][2 * tile],
                             codes[0][2 * tile + 1], codes[1][2 * tile], codes[1][2 * tile + 1]);
            }
#pragma unroll
            for (int s = 0; s < SETS; s++) {
                float d[4] = {scale[0].x, scale[0].y, scale[1].x, scale[1].y};
                float m[4] = {minimum[0].x, minimum[0].y, minimum[1].x, minimum[1].y};
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
                    state.minima[s][b] = fmaf(p[s][i], m[i], state.minima[s][b]);
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

// Where the partial results of a launch lie: f32 [n_rows, n_heads, n_slots, D] weighted sums, then
// f32 [n_rows, n_heads, n_slots, 2] references (as exponents of 2) and sums of weights.
template <int D>
struct Partials {
    float* sums;
    float* marks;
    int32_t n_slots;
    __device__ __forceinline__ Partials(float* workspace, int32_t n_rows, int32_t n_heads,
                                        int32_t slots)
        : sums(workspace), marks(workspace + size_t(n_rows) * n_heads * slots * D), n_slots(slots) {}
};

// Leaves the sums of a chunk in its slot, those of the queries below n_queries.
template <int D, int SETS>
__device__ __forceinline__ void end_part(const WarpState<D, SETS>& state,
                                         const WarpTables<D, SETS>& tables, const Partials<D>& to,
                                         int32_t part, int n_rows, int group,
                                         int n_heads) {
    const int first_row = tables.place.x, first_query = tables.place.y;
    const int n_queries = tables.place.z;
    const int32_t slot = part - tables.slot_zero;
    const int kv_head = tables.place.w;
    const int lane = threadIdx.x % WARP_LANES, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float weight = state.weight[s];
        weight = weight + __shfl_xor_sync(FULL_MASK, weight, 1);
        weight = weight + __shfl_xor_sync(FULL_MASK, weight, 2);
        size_t column[3];  // of the queries g, 2t, 2t + 1
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const uint32_t query = first_query + s * SET + (i == 0 ? g : 2 * t + i - 1);
            const uint32_t row = n_rows == 1 ? 0u : query / uint32_t(group);
            const uint32_t head = kv_head * group + query - row * group;
            column[i] = (size_t(first_row + row) * n_heads + head) * to.n_slots + slot;
        }
        const bool fits = slot < to.n_slots;
        const int left = fits ? n_queries - s * SET : 0;
        if (t == 0 && g < left)
            *reinterpret_cast<float2*>(to.marks + column[0] * 2) =
                make_float2(state.pivot[s], weight);
        const float own_unit = power_of_two(state.top[s] - 14);
        float unit[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            unit[i] = power_of_two(__shfl_sync(FULL_MASK, state.top[s], 8 * t + 4 * i) + 10);
#pragma unroll
        for (int b = 0; b < D / 32; b++) {
            float minimum = state.minima[s][b];
            minimum = minimum + __shfl_xor_sync(FULL_MASK, minimum, 1);
            minimum = minimum + __shfl_xor_sync(FULL_MASK, minimum, 2);
            minimum = minimum * own_unit;
            const int channel = 32 * b + 2 * half_word(b, g);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float base = __shfl_sync(FULL_MASK, minimum, 8 * t + 4 * i);
                const float* c = state.sums[s][b][0];
                const float* c1 = state.sums[s][b][1];
                if (2 * t + i < left) {
                    float* row = to.sums + column[1 + i] * D + channel;
                    *reinterpret_cast<float2*>(row) = make_float2(
                        fmaf(c[i], unit[i], base), fmaf(c1[i], unit[i] * 0.5f, base));
                    *reinterpret_cast<float2*>(row + 16) =
                        make_float2(fmaf(c[2 + i], unit[i] * 0.0625f, base),
                                    fmaf(c1[2 + i], unit[i] * 0.03125f, base));
                }
            }
        }
    }
}

// Shared memory: N_STAGES tiles of keys_per_stage rows of K, then of V, of the block's heads; then
// per warp WarpTables, then the shared fragments of q; then with COPY_BULK 2 * N_STAGES
// barriers.
//
// Grid (x: any number of blocks, which share the chunks; n_kv_heads / heads_per_block; query blocks),
// heads_per_block * warps_per_head warps. A query block is
// warps_per_head * SETS * 8 queries of all n_rows * group, or with a table of one row's group.
// Slices of heads_per_block heads and whole rows of K and V are multiples of 16 bytes, planes and q
// are 16-byte aligned. keys_per_stage: a multiple of 16. Other parameters as in kv/attend.cu.
template <int D, int SETS, int COPY>
__global__ void __launch_bounds__(256, D * SETS <= 128 ? 2 : 1)
    attend_mma(const float* __restrict__ q, const uint8_t* NULLABLE k_plane,
               const uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t n_kv_heads, int32_t group,
               int32_t capacity, int32_t window, int32_t counted, float scale, float softcap,
               const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
               const uint64_t* NULLABLE table, float* __restrict__ workspace, int32_t n_slots,
               int32_t heads_per_block, int32_t warps_per_head, int32_t keys_per_stage) {
    constexpr int K_HEAD = D / 32 * K_BLOCK_BYTES, V_HEAD = D / 32 * V_BLOCK_BYTES;
    DYN_SMEM(uint8_t, shared);
    admit_successor();
    await_predecessor();
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int n_workers = heads_per_block * warps_per_head;
    const int slice_k = heads_per_block * K_HEAD, slice_v = heads_per_block * V_HEAD;
    const int pitch_k = k_pitch(slice_k), pitch_v = v_pitch(slice_v);
    const int stage_bytes = keys_per_stage * (pitch_k + pitch_v);
    WarpTables<D, SETS>* const tables =
        reinterpret_cast<WarpTables<D, SETS>*>(shared + N_STAGES * stage_bytes);
    uint4* const fragments = reinterpret_cast<uint4*>(tables + n_workers);
    const int n_heads = n_kv_heads * group;

    // Queries [first_query, first_query + n_queries) of the rows from first_row on.
    const uint32_t queries = warps_per_head * SETS * SET;
    uint32_t first_row = 0, first_query = blockIdx.z * queries, all_queries = n_rows * group;
    if (table != nullptr) {
        const uint32_t blocks_per_row = (group + queries - 1) / queries;
        first_row = blockIdx.z / blocks_per_row;
        first_query = (blockIdx.z - first_row * blocks_per_row) * queries;
        all_queries = group;
    }
    const uint32_t n_queries =
        all_queries - first_query < queries ? all_queries - first_query : queries;
    const auto row_of = [&](uint32_t query) {  // spares one row the division
        return all_queries == uint32_t(group) ? 0u : query / uint32_t(group);
    };

    // Keys that some query sees, keys that all see, and this block's share of the chunks. The ranges
    // ascend with the row.
    const Plane plane(k_plane, v_plane, len_d, base_d, table, first_row, window, counted, capacity);
    const int2 top_keys = plane.seen(row_of(first_query));
    const int2 last_keys = plane.seen(row_of(first_query + n_queries - 1));
    const int32_t key_start = top_keys.x, key_end = last_keys.y;
    int32_t first_key = 0, last_key = 0;
    if (key_end > key_start) {
        const uint32_t first = part_of(key_start), n = part_of(key_end - 1) + 1 - first;
        const uint32_t n_shares = n < gridDim.x ? n : gridDim.x, share = blockIdx.x;
        if (share < n_shares) {
            const uint32_t span = key_end - key_start;
            const uint32_t each = span / n_shares, more = span - each * n_shares;
            const int32_t from = key_start + int32_t(each * share + (share < more ? share : more));
            const int32_t to = from + int32_t(each + (share < more ? 1 : 0));
            first_key = share == 0 ? key_start : part_begin(part_of(from - 1) + 1);
            first_key = first_key > key_start ? first_key : key_start;
            last_key = part_begin(part_of(to - 1) + 1);
            last_key = last_key < key_end ? last_key : key_end;
        }
    }
    const int32_t stage_zero = first_key / STEP * STEP;
    const int32_t step_end = last_key > first_key ? (last_key + STEP - 1) / STEP * STEP : stage_zero;

    const int32_t row_k = n_kv_heads * K_HEAD, row_v = n_kv_heads * V_HEAD;
    const int head = warps_per_head == 1 ? warp : int(uint32_t(warp) / uint32_t(warps_per_head));
    const int kv_head = int(blockIdx.y) * heads_per_block + head;
    const uint32_t own_query = (warp - head * warps_per_head) * (SETS * SET);  // within the block
    WarpTables<D, SETS>& own = tables[warp];
    if (lane == 0) {
        own.keys = make_int4(first_key, last_key, last_keys.x, top_keys.y);
        own.place = make_int4(first_row, first_query + own_query, int(n_queries) - int(own_query),
                              kv_head);
        own.slot_zero = part_of(plane.seen(0).x);
        own.k = plane.k + blockIdx.y * slice_k - int64_t(plane.base) * row_k;
        own.v = plane.v + blockIdx.y * slice_v - int64_t(plane.base) * row_v;
    }
    __syncwarp();
    uint64_t* const full = reinterpret_cast<uint64_t*>(
        reinterpret_cast<uint8_t*>(fragments) +
        n_workers * WarpState<D, SETS>::SHARED * WARP_LANES * 16);
    uint64_t* const empty = full + N_STAGES;
    if constexpr (COPY == COPY_BULK) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < N_STAGES; i++) mbar_init(full + i, n_workers), mbar_init(empty + i, n_workers);
            mbar_publish();
        }
        __syncthreads();
    }
    // Rows outside the range ask for the nearest one inside: their keys are masked.
    const auto ask = [&](int32_t key, int slot) {
        const int n = step_end - key < keys_per_stage ? step_end - key : keys_per_stage;
        uint8_t* const k = shared + slot * stage_bytes;
        uint8_t* const v = k + keys_per_stage * pitch_k;
        const int low = own.keys.x, high = own.keys.y - 1;
        const uint8_t* const rows_k = own.k;
        const uint8_t* const rows_v = own.v;
        if constexpr (COPY == COPY_BULK) {
            // Each warp brings every n_workers-th row.
            uint64_t* const there = full + slot;
            const int n_own = n > warp ? (n - warp + n_workers - 1) / n_workers : 0;
            if (lane == 0) mbar_arrive_expecting(there, n_own * (slice_k + slice_v));
#pragma unroll 1
            for (int r = warp; r < n; r += n_workers) {
                int32_t at = key + r < high ? key + r : high;
                at = at > low ? at : low;
                const uint8_t* const from_k = rows_k + int64_t(at) * row_k;
                const uint8_t* const from_v = rows_v + int64_t(at) * row_v;
                if (lane == 0) {
                    bulk_copy(k + r * pitch_k, from_k, slice_k, there);
                    bulk_copy(v + r * pitch_v, from_v, slice_v, there);
                }
            }
        } else {
#pragma unroll 1
            for (int r = warp; r < n; r += n_workers) {
                int32_t at = key + r < high ? key + r : high;
                at = at > low ? at : low;
                const uint8_t* const from_k = rows_k + int64_t(at) * row_k;
                const uint8_t* const from_v = rows_v + int64_t(at) * row_v - slice_k;
#pragma unroll 2
                for (int x = lane * 16; x < slice_k + slice_v; x += WARP_LANES * 16)
                    cp_async<16>(x < slice_k ? k + r * pitch_k + x : v + r * pitch_v + x - slice_k,
                                 x < slice_k ? from_k + x : from_v + x);
            }
        }
    };
#pragma unroll 1
    for (int i = 0; i < N_STAGES - 1; i++) {
        if (stage_zero + i * keys_per_stage < step_end) ask(stage_zero + i * keys_per_stage, i);
        if constexpr (COPY == COPY_ASYNC) cp_async_commit();
    }

    WarpState<D, SETS> state;
    state.q_shared = fragments + warp * (WarpState<D, SETS>::SHARED * WARP_LANES);
    if (stage_zero < step_end) {
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            uint32_t query = own_query + s * SET + lane / 4;  // surplus lanes repeat the last one
            query = first_query + (query < n_queries ? query : n_queries - 1);
            const uint32_t row = row_of(query);
            const int2 keys = plane.seen(row);
            if (lane % 4 == 0) {
                own.start[s][lane / 4] = keys.x;
                own.end[s][lane / 4] = keys.y;
            }
            const size_t at =
                (size_t(first_row + row) * n_heads + kv_head * group + query - row * group) * D;
            load_query<D, SETS>(state, own, s, q + at, scale, softcap);
        }
        begin_part(state);
    }
    int32_t part_end = part_begin(part_of(first_key) + 1);
    int slot = 0, parity = 0;
    for (int32_t stage = stage_zero; stage < step_end; stage += keys_per_stage) {
        const int32_t next = stage + (N_STAGES - 1) * keys_per_stage;
        const int next_slot = slot == 0 ? N_STAGES - 1 : slot - 1;
        if constexpr (COPY == COPY_BULK) {
            mbar_wait(full + slot, parity);
        } else {
            cp_async_wait<N_STAGES - 2>();
            __syncthreads();
            if (next < step_end) ask(next, next_slot);
            cp_async_commit();
        }
        const uint8_t* k = shared + slot * stage_bytes + head * K_HEAD;
        const uint8_t* v = shared + slot * stage_bytes + keys_per_stage * pitch_k + head * V_HEAD;
        const int32_t stop = stage + keys_per_stage < step_end ? stage + keys_per_stage : step_end;
        for (int32_t key = stage; key < stop; key += STEP) {
            step<D, SETS>(state, own, k, pitch_k, v, pitch_v, key, softcap);
            k += STEP * pitch_k, v += STEP * pitch_v;
            if (key + STEP == part_end || key + STEP == step_end) {
                end_part<D, SETS>(state, own, Partials<D>(workspace, n_rows, n_heads, n_slots),
                                  part_of(key), n_rows, group, n_heads);
                begin_part(state);
                part_end = part_begin(part_of(part_end) + 1);
            }
        }
        if constexpr (COPY == COPY_BULK) {
            __syncwarp();
            if (lane == 0) mbar_arrive(empty + slot);
            // The room of the stage before, which the other warps have left, too, or soon will.
            if (next < step_end) {
                if (stage > stage_zero) mbar_wait(empty + next_slot, slot == 0 ? parity ^ 1 : parity);
                ask(next, next_slot);
            }
        }
        if (++slot == N_STAGES) slot = 0, parity ^= 1;
    }
}

// Joins the chunks of each row and head. Grid (n_heads, n_rows, D / 32), 256 threads; parameters,
// sinks, out and lse as in kv/attend.cu.
template <int D>
__global__ void __launch_bounds__(256)
    attend_mma_combine(float* __restrict__ workspace, const float* NULLABLE sinks,
                       float* __restrict__ out, float* NULLABLE lse, int32_t n_rows,
                       int32_t capacity, int32_t window, int32_t counted,
                       const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                       const uint64_t* NULLABLE table, int32_t n_slots) {
    constexpr int QUADS = 8, SPLITS = 32;  // chunk c belongs to split c % 32
    __shared__ float sums[SPLITS][4 * QUADS + 1];
    __shared__ float pivots[SPLITS], weights[SPLITS];
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x, quad = thread % QUADS, split = thread / QUADS;
    const int head = blockIdx.x, row = blockIdx.y, n_heads = gridDim.x;
    // A row of a table is its own first row.
    const Plane plane(nullptr, nullptr, len_d, base_d, table, row, window, counted, capacity);
    const int2 keys = plane.seen(0);
    const int32_t first = part_of(keys.x);
    const int32_t behind = keys.y > keys.x ? part_of(keys.y - 1) + 1 : first;
    const int32_t slot_zero = table != nullptr ? first : part_of(plane.seen(-row).x);
    const bool fits = behind - slot_zero <= n_slots;
    const int32_t last = fits ? behind : first;
    const Partials<D> partials(workspace, n_rows, n_heads, n_slots);
    const size_t column = (size_t(row) * n_heads + head) * n_slots;
    const float* marks = partials.marks + column * 2;
    const float* values = partials.sums + column * D + blockIdx.z * 32 + quad * 4;

    float pivot = NO_PIVOT, weight = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int32_t c = first + (split - first % SPLITS + SPLITS) % SPLITS; c < last; c += SPLITS) {
        const float2 mark = *reinterpret_cast<const float2*>(marks + size_t(c - slot_zero) * 2);
        const float4 value = *reinterpret_cast<const float4*>(values + size_t(c - slot_zero) * D);
        if (mark.y != 0.0f) {  // else the row sees no key of this chunk
            const float high = fmaxf(pivot, mark.x);
            const float old = power_of_two(int32_t(fmaxf(pivot - high, -1000.0f)));
            const float add = power_of_two(int32_t(fmaxf(mark.x - high, -1000.0f)));
            sum.x = fmaf(value.x, add, sum.x * old), sum.y = fmaf(value.y, add, sum.y * old);
            sum.z = fmaf(value.z, add, sum.z * old), sum.w = fmaf(value.w, add, sum.w * old);
            weight = fmaf(mark.y, add, weight * old);
            pivot = high;
        }
    }
    float* to = sums[split] + quad * 4;
    to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
    if (quad == 0) pivots[split] = pivot, weights[split] = weight;
    __syncthreads();
    if (thread < 32) {
        const float sink = sinks != nullptr ? sinks[head] * LOG2_E : -INF_F32;
        float high = fmaxf(NO_PIVOT, ceilf(sink));
#pragma unroll
        for (int s = 0; s < SPLITS; s++) high = fmaxf(high, pivots[s]);
        float joined = 0.0f, total = 0.0f;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            const float by = power_of_two(int32_t(fmaxf(pivots[s] - high, -1000.0f)));
            joined = fmaf(sums[s][thread], by, joined);
            total = fmaf(weights[s], by, total);
        }
        const bool empty = total == 0.0f;
        if (sinks != nullptr) total = total + exp2_fast(sink - high);
        const size_t at = size_t(row) * n_heads + head;
        out[at * D + blockIdx.z * 32 + thread] = !fits ? NAN_F32 : empty ? 0.0f : joined / total;
        if (thread == 0 && blockIdx.z == 0 && lse != nullptr)
            lse[at] = !fits   ? NAN_F32
                      : empty ? sinks != nullptr ? sinks[head] : -INF_F32
                              : high * LN_2 + logf(total);
    }
}
