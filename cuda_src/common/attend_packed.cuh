// K and V in blocks of 32 elements (common/block32.cuh) as f16 fragments: K q8_0; V q8_0, q5_1, q4_0.
//
//   K  the codes as they are, against whole numbers of q; what tensor cores find of 32 channels is exact, and
//      times the block's scale in f32;
//   V  d * code in two f16 that hold it, the nearest and the rest. The minima of q5_1 are multiplied as they
//      are stored: those of a block are a row of a fragment of their own.
//
// Rows of V are read across as 16-bit words, piece by piece of 16 bytes, whatever the words are: a fragment
// has rows for the scales of q8_0 and q4_0 too, whose sums nobody looks at.
#pragma once
#include "common/attend_f16_parts.cuh"
#include "common/q8_codes.cuh"

// Which words of a head of V lie where. A head begins `shift` words behind a piece.
template <int F, int D>
struct Pieces {
    static constexpr int OF_BLOCK = block_bytes<F>() / 2;  // words
    static constexpr int WORDS = D / 32 * OF_BLOCK;
    static constexpr int EVEN = WORDS & -WORDS;
    static constexpr int N = (WORDS + (EVEN < 8 ? 8 - EVEN : 0)) / 8;
    // Fragments of 16 rows; row b of the last one of q5_1 has the minima of block b.
    static constexpr int TILES = F == Q8_0 ? N : F == Q4_0 ? 2 * N : D / 16;
    static constexpr int MINIMA = F == Q5_1 ? 1 : 0;

    static __device__ __forceinline__ int shift(int head) { return head * WORDS % 8; }
    // The block of word g of piece p; for what is not of the head the nearest.
    __host__ __device__ static constexpr int block(int p, int g, int shift) {
        const int word = 8 * p + g - shift;
        return (word < 0 ? 0 : word < WORDS ? word : WORDS - 1) / OF_BLOCK;
    }
    // The same, where there are two at most.
    template <int P>
    static __device__ __forceinline__ int block_of(int g, int shift) {
        constexpr int FIRST = block(P, 0, EVEN < 8 ? 8 - EVEN : 0), LAST = block(P, 7, 0);
        static_assert(LAST - FIRST <= 1, "a comparison tells two blocks apart");
        if constexpr (FIRST == LAST) return FIRST;
        else return g - shift >= LAST * OF_BLOCK - 8 * P ? LAST : FIRST;
    }
    // The channel of row g of a fragment, and before that of row g + 8; -1 if there is none.
    static __device__ __forceinline__ int channel(int tile, int g, int shift) {
        if constexpr (F == Q5_1) {  // see add_packed()
            return 32 * (tile / 2) + 2 * (tile / 2 % 2 ? g : g ^ 4) + 16 * (tile % 2);
        } else {
            const int piece = F == Q8_0 ? tile : tile / 2, word = 8 * piece + g - shift;
            const int of_block = word % OF_BLOCK;
            if (word < 0 || word >= WORDS || of_block == 0) return -1;
            return word / OF_BLOCK * 32 + 2 * (of_block - 1) + (F == Q8_0 ? 0 : 16 * (tile % 2));
        }
    }
};

// Rows lie 4 banks apart, 8 by 8.
__host__ __device__ constexpr int v_pitch(int bytes) { return (bytes + 31) / 32 * 32 + 16; }

// Bytes from row to row of a stage.
template <int F>
__host__ __device__ constexpr int stage_pitch_k(int bytes) {
    return is_packed<F>() ? k_pitch(bytes) : row_pitch(bytes);
}
template <int F>
__host__ __device__ constexpr int stage_pitch_v(int bytes) {
    return is_packed<F>() ? v_pitch(bytes) : row_pitch(bytes);
}

constexpr int OWN = STEP / 2;  // keys of a warp in a step

// What a warp keeps of the heads of the blocks of its keys, in shared memory. Key 8 * tile + 2t + i stands
// at 4t + 2 * tile + i: one load gives a lane both tiles.
template <int KF, int VF, int D>
struct alignas(16) StepTables {
    static constexpr int BLOCKS = D / 32;
    static constexpr int K_BLOCKS = is_packed<KF>() ? BLOCKS : 1, V_BLOCKS = is_packed<VF>() ? BLOCKS : 1;
    static constexpr int WITH_MINIMA = VF == Q5_1 ? BLOCKS : 1;
    static constexpr bool USED = is_packed<KF>() || is_packed<VF>();
    float k[K_BLOCKS][OWN];               // scales
    uint16_t v[V_BLOCKS][OWN];            // scales, f16
    uint16_t minima[WITH_MINIMA][OWN];    // f16
    uint16_t fifth[WITH_MINIMA][2][OWN];  // bits of the first, and of the last 16 channels
    float lift[OWN];                      // of weights; not set unless one is not 1
    uint32_t wild[BLOCKS];                // keys whose scale or minimum is not finite; set where masked
};
enum Found : uint32_t { LIFTED_KEYS = 1, WILD_KEYS = 2 };

__device__ __forceinline__ bool is_wild(uint32_t half) { return (half & 0x7C00u) == 0x7C00u; }

// Fills the tables; a lane has the key lane % 16, and of its blocks the first or the last half. k, v: the
// head in the rows of the first key. masked: what is not finite counts as 0, and is noted. Returns a set of
// Found, the same for all lanes.
template <int KF, int VF, int D, int PITCH_K, int PITCH_V>
__device__ __forceinline__ uint32_t fill_tables(StepTables<KF, VF, D>& tables, const uint8_t* k,
                                                const uint8_t* v, int lane, bool masked) {
    constexpr int SHARE = D / 64;
    const uint32_t own = kept(lane);  // what it is good for is not worth registers from step to step
    const uint32_t key = own % OWN, first = own / OWN * SHARE;
    k = k + key * PITCH_K + first * Q8_BLOCK_BYTES, v = v + key * PITCH_V + first * block_bytes<VF>();
    const uint32_t place = first * OWN + key % 8 / 2 * 4 + key / 8 * 2 + key % 2;  // of the first block
    float* const of_k = tables.k[0] + place;
    uint16_t* const of_v = tables.v[0] + place;
    uint32_t found = 0u;
    uint16_t k_scales[SHARE];
    if constexpr (is_packed<KF>()) {
#pragma unroll
        for (int b = 0; b < SHARE; b++)
            k_scales[b] = *reinterpret_cast<const uint16_t*>(k + b * Q8_BLOCK_BYTES);
    }
    if constexpr (is_packed<VF>()) {
        uint32_t d[SHARE], m[SHARE], most = 0u;
#pragma unroll
        for (int b = 0; b < SHARE; b++) {
            const uint8_t* const block = v + b * block_bytes<VF>();
            if constexpr (VF == Q5_1) {
                const uint2 head = *reinterpret_cast<const uint2*>(block);
                d[b] = head.x & 0xFFFFu, m[b] = head.x >> 16;
                uint16_t* const bits = tables.fifth[b][0] + place + first * OWN;  // two a block
                bits[0] = uint16_t(head.y), bits[OWN] = uint16_t(head.y >> 16);
            } else {
                d[b] = *reinterpret_cast<const uint16_t*>(block), m[b] = 0u;
            }
            const uint32_t size = d[b] & 0x7FFFu;
            most = size > most ? size : most;
        }
        // From there on d * code would leave the range of f16; below, d has fewer bits than others.
        constexpr uint32_t LIMIT = VF == Q8_0 ? 0x6000u : VF == Q5_1 ? 0x6800u : 0x7000u, NORMAL = 0x0400u;
        if (__any_sync(FULL_MASK, most - NORMAL >= LIMIT - NORMAL || masked)) {
            int rank = 0;  // of the largest of the key: 0 too small, 1 as it should be, 2 too large
#pragma unroll
            for (int b = 0; b < SHARE; b++) {
                const uint32_t size = d[b] & 0x7FFFu;
                const int of_d = is_wild(size) ? 0 : size >= LIMIT ? 2 : size >= NORMAL ? 1 : 0;
                const int of_m = VF == Q5_1 && !is_wild(m[b]) && (m[b] & 0x7FFFu) >= NORMAL ? 1 : 0;
                rank = max(rank, max(of_d, of_m));
            }
            rank = max(rank, __shfl_xor_sync(FULL_MASK, rank, OWN));
            constexpr float LIFT = float(1 << lift_of<VF>()), LOWER = 1.0f / float(1 << lower_of<VF>());
            if (first == 0) tables.lift[place] = rank == 2 ? LIFT : rank == 1 ? 1.0f : LOWER;
            if (__any_sync(FULL_MASK, rank != 1)) found = LIFTED_KEYS;
            const float by = rank == 2 ? 1.0f / LIFT : 1.0f / LOWER;
#pragma unroll
            for (int b = 0; b < SHARE; b++) {
                const bool wild = is_wild(d[b]) || is_wild(m[b]);
                if (rank != 1) d[b] = f32_to_f16(f16_to_f32(uint16_t(d[b])) * by);
                if (rank != 1) m[b] = f32_to_f16(f16_to_f32(uint16_t(m[b])) * by);
                if (!masked) continue;
                const uint32_t keys = __ballot_sync(FULL_MASK, wild);
                if (lane == 0) tables.wild[b] = keys & 0xFFFFu, tables.wild[SHARE + b] = keys >> OWN;
                if (keys) found |= WILD_KEYS;
                if (wild) d[b] = m[b] = 0u;
            }
        }
#pragma unroll
        for (int b = 0; b < SHARE; b++) {
            of_v[b * OWN] = uint16_t(d[b]);
            if constexpr (VF == Q5_1) (tables.minima[0] + place)[b * OWN] = uint16_t(m[b]);
        }
    }
    if constexpr (is_packed<KF>()) {
#pragma unroll
        for (int b = 0; b < SHARE; b++) {
            const float d = f16_to_f32(k_scales[b]);
            of_k[b * OWN] = fmaf(d, 0.0f, d);  // NaN unless it is finite: -inf would hide the key
        }
    }
    return found;
}

// Two f16 of the lower two of four s8, and two of the upper two; ACROSS: of the first and third, and of
// the second and fourth.
template <bool ACROSS>
__device__ __forceinline__ void codes_to_halves(uint32_t four, uint32_t& low, uint32_t& high) {
    const uint32_t x = four ^ 0x80808080u;  // below the exponent of 2^10: 1024 + 128 + code
    low = add_halves(__byte_perm(x, 0x64646464u, ACROSS ? 0x4240 : 0x4140), 0xE480E480u);
    high = add_halves(__byte_perm(x, 0x64646464u, ACROSS ? 0x4341 : 0x4342), 0xE480E480u);
}

constexpr int DIGITS = 22;  // |q| <= 2^22

// What this lane holds of a set of queries as whole numbers in three digits from -128 to 127: of the query of
// its lane group, of each block, the channels 8t to 8t + 3 and 8t + 4 to 8t + 7.
template <int D>
struct DigitSet {
    uint32_t high[D / 32][4];  // digit 2, digit 1 of the first four, then of the others
    uint32_t low[D / 32][2];   // digit 0
    float factor;              // of a raw score, above 0: the sign is with q; NaN if q is not finite

    __device__ __forceinline__ void load(const float* q, int lane, float scale, float softcap) {
        float4 x[D / 32][2];
        float most = 0.0f, bad = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const float4 v = x[i / 2][i % 2] =
                *reinterpret_cast<const float4*>(q + 32 * (i / 2) + 8 * (lane % 4) + i % 2 * 4);
            most = fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
            bad = bad + 0.0f * (v.x + v.y + v.z + v.w);
        }
#pragma unroll
        for (int apart = 1; apart <= 2; apart *= 2) {
            most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, apart));
            bad = bad + __shfl_xor_sync(FULL_MASK, bad, apart);
        }
        int32_t above = int32_t(__float_as_uint(most) >> 23) - 126;  // |q| < 2^above
        above = above < -90 ? -90 : above > 128 ? 128 : above;
        const float lift = scale < 0.0f ? -power_of_two(DIGITS - above) : power_of_two(DIGITS - above);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const float4 v = x[i / 2][i % 2];
            const Digits digits(v, lift);
            low[i / 2][i % 2] = digits.of[0];
            high[i / 2][i % 2 * 2] = digits.of[2], high[i / 2][i % 2 * 2 + 1] = digits.of[1];
        }
        const float natural = power_of_two(above - DIGITS + 16) * fabsf(scale);
        factor = fmaxf(softcap > 0.0f ? natural : natural * LOG2_E, LEAST_FACTOR) + bad;
    }
};

// The bits of a float from which on whole numbers count up, in 2^22 to either side.
constexpr int32_t WHOLE_BITS = 0x4B400000;
constexpr float WHOLE = 12582912.0f;

// Adds the blocks from B on to the raw scores of two keys of a tile, [set][i]. k: the row of key g, from its
// codes 8t on; scales: of both keys.
template <int D, int SETS, int B>
__device__ __forceinline__ void score_blocks(const uint8_t* k, const float* scales,
                                             const DigitSet<D> (&q)[SETS], float (&scores)[SETS][2]) {
    // The sums begin at floats, which makes them floats; a subtraction takes away where they began.
    constexpr int32_t BEGIN[4] = {WHOLE_BITS, WHOLE_BITS, WHOLE_BITS, WHOLE_BITS};
    constexpr float BEGUN = WHOLE + WHOLE / 256.0f + WHOLE / 65536.0f;
    uint32_t codes[2];
    load_codes<D, B>(k, codes);
    const float2 two = *reinterpret_cast<const float2*>(scales + B * OWN);
    // Digit 0 of two sets is a fragment, or that of two blocks, of whose rows one half is of use.
    const uint32_t(&first)[2] = q[0].low[SETS == 2 ? B : B / 2 * 2];
    const uint32_t(&other)[2] = SETS == 2 ? q[SETS - 1].low[B] : q[0].low[B / 2 * 2 + 1];
    const uint32_t digit0[4] = {first[0], other[0], first[1], other[1]};
    int32_t low[4], high[4];
    mma_m16n8k32_s8(low, digit0, codes, BEGIN);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        mma_m16n8k32_s8(high, q[s].high[B], codes, BEGIN);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float raw = __int_as_float(high[i]) - BEGUN;
            raw = fmaf(__int_as_float(high[2 + i]), 1.0f / 256.0f, raw);
            raw = fmaf(__int_as_float(low[(SETS == 2 ? s : B % 2) * 2 + i]), 1.0f / 65536.0f, raw);
            const float d = i == 0 ? two.x : two.y;
            scores[s][i] = B == 0 ? raw * d : fmaf(raw, d, scores[s][i]);
        }
    }
    if constexpr (B + 1 < D / 32) score_blocks<D, SETS, B + 1>(k, scales, q, scores);
}
// Raw scores of a warp's keys, [set][tile of 8 keys][i]. k: the rows, at the head; scales: StepTables::k.
template <int D, int SETS, int PITCH>
__device__ __forceinline__ void score_packed(const uint8_t* k, const float (*scales)[OWN], int lane,
                                             const DigitSet<D> (&q)[SETS], float (&scores)[SETS][2][2]) {
    const uint8_t* row = k + (lane >> 2) * PITCH + 8 * (lane & 3);
    const float* own = scales[0] + 4 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 2 * SETS; i++) scores[i / 2][1][i % 2] = 0.0f;
#pragma unroll 1
    for (int tile = 0; tile < 2; tile++, row += 8 * PITCH, own += 2) {  // in turn: both want too many registers
        float found[SETS][2];
        score_blocks<D, SETS, 0>(row, own, q, found);
#pragma unroll
        for (int i = 0; i < 2 * SETS; i++)
            scores[i / 2][0][i % 2] = scores[i / 2][1][i % 2], scores[i / 2][1][i % 2] = found[i / 2][i % 2];
    }
}

// Words of a piece, of both tiles of 8 keys, and of the next piece. The offset is across_offset().
template <int PITCH>
__device__ __forceinline__ void load_two(const uint8_t* rows, int lane, uint32_t (&words)[2][2]) {
    load_across_x4(words[0], rows, (lane & 15) * PITCH + (lane & 16), PITCH, 8 * PITCH, 16);
}
template <int PITCH>
__device__ __forceinline__ void load_one(const uint8_t* rows, int lane, uint32_t (&words)[2]) {
    load_across_x2(words, rows, (lane & 15) * PITCH + (lane & 16), PITCH, 8 * PITCH);
}

// The codes of a word as f16, of row g and of row g + 8 of a fragment; `half` of the nibbles of a byte.
// fifth: bits of the two halves of the channels, turned to where they belong.
template <int F>
__device__ __forceinline__ void codes_of(uint32_t word, int half, const uint32_t (&fifth)[2],
                                         uint32_t& row, uint32_t& upper) {
    if constexpr (F == Q8_0) {
        codes_to_halves<true>(word, row, upper);
    } else if constexpr (F == Q4_0) {
        const uint32_t mask = half ? 0x00F000F0u : 0x000F000Fu, base = half ? 0x54005400u : 0x64006400u;
        const uint32_t less = half ? 0xD480D480u : 0xE408E408u;  // the base, and 8
        row = add_halves((word & mask) | base, less);
        upper = add_halves((word >> 8 & mask) | base, less);
    } else if (half) {  // codes of the bits 4 to 8, and 5 to 9
        row = add_halves((word & 0x00F000F0u) | (fifth[1] & 0x01000100u) | 0x54005400u, 0xD400D400u);
        upper = add_halves((word >> 7 & 0x01E001E0u) | (fifth[1] & 0x02000200u) | 0x50005000u, 0xD000D000u);
    } else {  // of the bits 0 to 4, and 1 to 5
        row = add_halves((word & 0x000F000Fu) | (fifth[0] & 0x00100010u) | 0x64006400u, 0xE400E400u);
        upper = add_halves((word >> 7 & 0x001E001Eu) | (fifth[0] & 0x00200020u) | 0x60006000u, 0xE000E000u);
    }
}

// Adds a step to one fragment's sums; p: [part][0][tile].
template <class Sums, class Parts>
__device__ __forceinline__ void add_product(Sums& sums, const uint32_t (&value)[4],
                                            const uint32_t (&rest)[4], const Parts& p) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // the smallest first
    mma_m16n8k16_f16(sum, rest, p[0][0], sum);
    mma_m16n8k16_f16(sum, value, p[1][0], sum);
    mma_m16n8k16_f16(sum, value, p[0][0], sum);
#pragma unroll
    for (int r = 0; r < 4; r++) sums[r] = sums[r] + sum[r];
}

// Adds the fragments of the words of a piece, or of a block of q5_1, from the fragment `tile` on; scales and
// bits of the lane's keys. turn: of the bits.
template <int F, int SETS, class Sums, class Parts>
__device__ __forceinline__ void add_words(Sums& sums, int tile, const uint32_t (&words)[2],
                                          const uint16_t* scales, const uint16_t* bits, int turn,
                                          const Parts& p) {
    const uint2 two = *reinterpret_cast<const uint2*>(scales);
    const uint32_t d[2] = {two.x, two.y};
    uint32_t fifth[2][2] = {};
    if constexpr (F == Q5_1) {
        const uint2 first = *reinterpret_cast<const uint2*>(bits);
        const uint2 last = *reinterpret_cast<const uint2*>(bits + OWN);
        // Bit 2h of a half word goes to bit 4, and to bit 8.
        fifth[0][0] = __funnelshift_r(first.x, first.x, turn - 4);
        fifth[1][0] = __funnelshift_r(first.y, first.y, turn - 4);
        fifth[0][1] = __funnelshift_r(last.x, last.x, turn - 8);
        fifth[1][1] = __funnelshift_r(last.y, last.y, turn - 8);
    }
#pragma unroll
    for (int half = 0; half < (F == Q8_0 ? 1 : 2); half++) {
        uint32_t value[4], rest[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t codes[2];
            codes_of<F>(words[j], half, fifth[j], codes[0], codes[1]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                value[2 * j + r] = multiply_halves(codes[r], d[j]);
                rest[2 * j + r] = rest_of_product(codes[r], d[j], value[2 * j + r]);
            }
        }
#pragma unroll
        for (int s = 0; s < SETS; s++) add_product(sums[s][tile + half], value, rest, p[s]);
    }
}

// Adds the values of a warp's keys, of the pieces from P on. v: the piece in which the head begins, shift words
// before it; p: [set][part][0][tile].
template <int P, int KF, int VF, int D, int SETS, int PITCH, class Sums, class Parts>
__device__ __forceinline__ void add_pieces(Sums& sums, const StepTables<KF, VF, D>& tables,
                                           const uint8_t* v, int shift, int lane, const Parts& p) {
    using Shape = Pieces<VF, D>;
    constexpr int OF_PIECE = VF == Q8_0 ? 1 : 2;  // fragments
    constexpr bool TWO = P + 1 < Shape::N;
    uint32_t words[2][2];
    if constexpr (TWO) load_two<PITCH>(v + 16 * P, lane, words);
    else load_one<PITCH>(v + 16 * P, lane, words[0]);
    const int g = lane >> 2, t = lane & 3;
    add_words<VF, SETS>(sums, P * OF_PIECE, words[0], tables.v[Shape::template block_of<P>(g, shift)] + 4 * t,
                        nullptr, 0, p);
    if constexpr (TWO)
        add_words<VF, SETS>(sums, (P + 1) * OF_PIECE, words[1],
                            tables.v[Shape::template block_of<P + 1>(g, shift)] + 4 * t, nullptr, 0, p);
    if constexpr (P + 2 < Shape::N) add_pieces<P + 2, KF, VF, D, SETS, PITCH>(sums, tables, v, shift, lane, p);
}

// Adds the values of a warp's keys; as add_pieces().
template <int KF, int VF, int D, int SETS, int PITCH, class Sums, class Parts>
__device__ __forceinline__ void add_packed(Sums& sums, const StepTables<KF, VF, D>& tables,
                                           const uint8_t* v, int shift, int lane, const Parts& p) {
    lane = kept(lane);  // as in fill_tables()
    if constexpr (VF == Q5_1) {
        const int g = lane >> 2, t = lane & 3;
        const uint2 two = *reinterpret_cast<const uint2*>(tables.minima[g % (D / 32)] + 4 * t);
        const uint32_t minima[4] = {two.x, 0u, two.y, 0u};
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_m16n8k16_f16(sum, minima, p[s][1][0], sum);
            mma_m16n8k16_f16(sum, minima, p[s][0][0], sum);
            float* const kept = sums[s][D / 16];
            kept[0] = kept[0] + sum[0], kept[1] = kept[1] + sum[1];
        }
        // Of two blocks, which are three pieces, the words of the first one's codes are halves of two.
#pragma unroll
        for (int pair = 0; pair < D / 64; pair++) {
            uint32_t outer[2][2], words[2][2];
            load_two<PITCH>(v + 48 * pair, lane, outer);
            load_one<PITCH>(v + 48 * pair + 32, lane, words[1]);
#pragma unroll
            for (int j = 0; j < 2; j++) words[0][j] = lane < 16 ? outer[1][j] : outer[0][j];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int b = 2 * pair + i;
                add_words<VF, SETS>(sums, 2 * b, words[i], tables.v[b] + 4 * t,
                                    tables.fifth[b][0] + 4 * t, 2 * (i ? g : g ^ 4), p);
            }
        }
    } else {
        add_pieces<0, KF, VF, D, SETS, PITCH>(sums, tables, v, shift, lane, p);
    }
}

// Makes NaN of the sums that see a scale or minimum which is not finite. shift: of the head (Pieces); keys: that
// the lane group's query of each set sees of the step, a bit each.
template <int KF, int VF, int D, int SETS, class Sums>
__device__ __forceinline__ void spoil_packed(Sums& sums, const StepTables<KF, VF, D>& tables, int lane,
                                             int shift, const uint32_t (&keys)[SETS]) {
    for (int s = 0; s < SETS; s++)
        for (int i = 0; i < 2; i++) {
            const uint32_t seen = __shfl_sync(FULL_MASK, keys[s], lane % 4 * 8 + 4 * i);
#pragma unroll
            for (int tile = 0; tile < Pieces<VF, D>::TILES; tile++) {
                const int piece = VF == Q8_0 ? tile : tile / 2;
                const int b = VF == Q5_1 ? piece : Pieces<VF, D>::block(piece, lane / 4, shift);
                if (tables.wild[b] & seen) sums[s][tile][i] = sums[s][tile][2 + i] = NAN_F32;
            }
        }
}

// The keys from `key` on that a query sees, a bit each.
__device__ __forceinline__ uint32_t seen_bits(int2 keys, int32_t key) {
    const int32_t from = keys.x > key ? keys.x - key : 0, behind = keys.y - key;
    if (from >= 32 || behind <= from) return 0u;
    return (behind >= 32 ? 0xFFFFFFFFu : (1u << behind) - 1u) & ~((1u << from) - 1u);
}
