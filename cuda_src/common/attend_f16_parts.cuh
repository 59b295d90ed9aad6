// How attention on tensor cores takes numbers apart, and small floats from shared memory: the fragments of
// K and V of f16, bf16 and e4m3, the parts of q and p, their products.
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

// Whether a format has blocks with scales (common/attend_packed.cuh).
template <int F>
__host__ __device__ constexpr bool is_packed() { return F == Q8_0 || F == Q5_1 || F == Q4_0; }
// Warps that share the keys of a step: blocks with scales are much work, and registers for more keys few.
template <int KF, int VF>
__host__ __device__ constexpr int halves_of() { return is_packed<KF>() || is_packed<VF>() ? 2 : 1; }
template <int F>
__host__ __device__ constexpr int element_bytes() { return F == E4M3 ? 1 : 2; }
// Words of a fragment of q, and parts of p.
template <int F>
__host__ __device__ constexpr int query_words() { return F == BF16 ? 6 : 4; }
template <int F>
__host__ __device__ constexpr int weight_parts() { return F == BF16 ? 3 : 2; }
// A value whose scale an f16 holds is d * code < 2^(16 + LIFT): in a row with such a value scales are
// divided by 2^LIFT, and the row's weights multiplied with it.
template <int F>
__host__ __device__ constexpr int lift_of() { return F == Q8_0 ? 7 : F == Q5_1 ? 5 : F == Q4_0 ? 3 : 0; }
// p <= 2^TOP; a new reference leaves room for growth.
template <int F>
__host__ __device__ constexpr int top_of_weights() { return F == BF16 ? 0 : 15 - lift_of<F>(); }
constexpr int ROOM = 3;
// Where a row's scales are all subnormal f16 they are multiplied with 2^LOWER, and its weights divided: tensor
// cores line products up by their exponent fields, and cut off what then is low. The greatest weight stays
// above 1, and so both its parts in the range of f16.
template <int F>
__host__ __device__ constexpr int lower_of() { return top_of_weights<F>() - ROOM - 1; }

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

// Parts of two numbers, [part], the first number in the lower half; a second part of f16 is `finer` times
// as large.
template <int F>
__device__ __forceinline__ void split_two(float x0, float x1, uint32_t* parts, float finer = FINER) {
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
        parts[1] = pack_halves((x0 - c0) * finer, (x1 - c1) * finer);
    }
}
// Adds to a sum what tensor cores found of its parts.
template <int F>
__device__ __forceinline__ float add_parts(float sum, float first, float second) {
    return F == BF16 ? (sum + first) + second : fmaf(second, 1.0f / FINER, sum + first);
}

// The halves of a word that are not finite.
template <int F>
__device__ __forceinline__ uint32_t wild_halves(uint32_t two) {
    constexpr uint32_t EXPONENT = F == BF16 ? 0x7F80u : 0x7C00u;
    return ((two & EXPONENT) == EXPONENT ? 0xFFFFu : 0u) |
           ((two >> 16 & EXPONENT) == EXPONENT ? 0xFFFF0000u : 0u);
}
