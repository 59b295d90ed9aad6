// Cache rows in blocks of 32 elements: the byte layouts, one reader and one writer per format.
//
//   format  bytes  layout (offset: content), little endian
//   F32     128    0: f32 x[32]
//   F16      64    0: f16 x[32]
//   BF16     64    0: bf16 x[32]
//   Q8_0     34    0: f16 d   2: i8 qs[32]                             value d * q
//   Q5_1     24    0: f16 d   2: f16 m   4: u32 qh   8: u8 qs[16]      value d * q + m
//   Q4_0     18    0: f16 d   2: u8 qs[16]                             value d * (q - 8)
//   E4M3     32    0: u8 x[32]
//
// A nibble byte i holds element i in its low half and element i + 16 in its high half; bit j of qh
// is bit 4 of element j. Blocks follow each other without padding, so a Q8_0 or Q4_0 block is only
// 2-byte aligned.
//
// The unit of work is a quarter of a block, 8 elements in two runs of 4, that one thread reads or
// writes: runs start at elements quarter_low<F>(g) and quarter_high<F>(g), g = 0 ... 3. Four
// neighbouring threads therefore touch neighbouring bytes. A writer scans all 32 elements of its
// block for the scale; that is cheaper than asking its neighbours, and the same on both devices.
#pragma once
#include "common/convert.cuh"

constexpr int F32 = 0;
constexpr int F16 = 1;
constexpr int BF16 = 2;
constexpr int Q8_0 = 3;
constexpr int Q5_1 = 4;
constexpr int Q4_0 = 5;
constexpr int E4M3 = 6;

constexpr int BLOCK_ELEMENTS = 32;
constexpr int BLOCK_QUARTERS = 4;

template <int F>
__device__ __forceinline__ constexpr int block_bytes() {
    return F == F32    ? 128
           : F == F16  ? 64
           : F == BF16 ? 64
           : F == Q8_0 ? 34
           : F == Q5_1 ? 24
           : F == Q4_0 ? 18
                       : 32;
}

template <int F>
__device__ __forceinline__ constexpr bool has_nibbles() {
    return F == Q5_1 || F == Q4_0;
}
template <int F>
__device__ __forceinline__ int quarter_low(int g) {
    return has_nibbles<F>() ? 4 * g : 8 * g;
}
template <int F>
__device__ __forceinline__ int quarter_high(int g) {
    return has_nibbles<F>() ? 4 * g + 16 : 8 * g + 4;
}

// -- reading ------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_u16(const uint8_t* p) {
    return *reinterpret_cast<const uint16_t*>(p);
}
__device__ __forceinline__ uint32_t load_two_u16(const uint8_t* p) {
    return load_u16(p) | load_u16(p + 2) << 16;
}

// The 8 bytes of two words as the floats byte - bias. Exact, so both bodies give the same bits.
__device__ __forceinline__ void bytes_to_f32(uint32_t low, uint32_t high, float bias, float* x) {
#if MEMRA_CUDA
    // Put under the exponent of 2^23: one permute and one add; conversions run at a quarter of that.
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = __uint_as_float(__byte_perm(i < 4 ? low : high, 0x4B000000u, 0x7650u | i % 4)) -
               (8388608.0f + bias);
#else
    // Vector types of the compiler; at -O2 it would convert one byte at a time.
    typedef uint8_t Bytes __attribute__((vector_size(4)));
    typedef int32_t Ints __attribute__((vector_size(16)));
    typedef float Floats __attribute__((vector_size(16)));
    const uint32_t words[2] = {low, high};
    for (int i = 0; i < 2; i++) {
        Bytes bytes;
        __builtin_memcpy(&bytes, &words[i], 4);
        const Ints ints = __builtin_convertvector(bytes, Ints);
        const Floats values = __builtin_convertvector(ints, Floats) - bias;
        __builtin_memcpy(x + 4 * i, &values, 16);
    }
#endif
}

// Bits 0 ... 3 at bit 4 of bytes 0 ... 3.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits) {
    return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
}

// The bytes that quarter g of a block depends on. Reading is cut in two, so that a kernel can ask for
// many quarters, do other work, and unpack them when the memory has answered.
template <int F>
struct Packed {
    static constexpr int WORDS = F == F32                ? 8
                                 : F == F16 || F == BF16 ? 4
                                 : F == Q8_0 || F == Q5_1 ? 3
                                                         : 2;
    uint32_t words[WORDS];
};

template <int F>
__device__ __forceinline__ Packed<F> load_quarter(const uint8_t* block, int g) {
    Packed<F> p;
    if constexpr (F == F32) {
        const uint4* from = reinterpret_cast<const uint4*>(block) + 2 * g;
        const uint4 a = from[0], b = from[1];
        p.words[0] = a.x, p.words[1] = a.y, p.words[2] = a.z, p.words[3] = a.w;
        p.words[4] = b.x, p.words[5] = b.y, p.words[6] = b.z, p.words[7] = b.w;
    } else if constexpr (F == F16 || F == BF16) {
        const uint4 v = *(reinterpret_cast<const uint4*>(block) + g);
        p.words[0] = v.x, p.words[1] = v.y, p.words[2] = v.z, p.words[3] = v.w;
    } else if constexpr (F == E4M3) {
        const uint2 v = *(reinterpret_cast<const uint2*>(block) + g);
        p.words[0] = v.x, p.words[1] = v.y;
    } else if constexpr (F == Q8_0) {
        const uint8_t* qs = block + 2 + 8 * g;
        p.words[0] = load_two_u16(qs), p.words[1] = load_two_u16(qs + 4);
        p.words[2] = load_u16(block);
    } else if constexpr (F == Q5_1) {
        const uint2 head = *reinterpret_cast<const uint2*>(block);
        p.words[0] = head.x, p.words[1] = head.y;
        p.words[2] = *(reinterpret_cast<const uint32_t*>(block + 8) + g);
    } else {
        p.words[0] = load_two_u16(block + 2 + 4 * g);
        p.words[1] = load_u16(block);
    }
    return p;
}

// The 8 elements, low run first.
template <int F>
__device__ __forceinline__ void unpack_quarter(const Packed<F>& p, int g, float* x) {
    if constexpr (F == F32) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = __uint_as_float(p.words[i]);
    } else if constexpr (F == F16 || F == BF16) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint16_t bits = uint16_t(p.words[i / 2] >> 16 * (i % 2));
            x[i] = F == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
        }
    } else if constexpr (F == E4M3) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = e4m3_to_f32(uint8_t(p.words[i / 4] >> 8 * (i % 4)));
    } else if constexpr (F == Q8_0) {
        const float d = f16_to_f32(uint16_t(p.words[2]));
        bytes_to_f32(p.words[0] ^ 0x80808080u, p.words[1] ^ 0x80808080u, 128.0f, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = d * x[i];
    } else if constexpr (F == Q5_1) {
        const float d = f16_to_f32(uint16_t(p.words[0]));
        const float m = f16_to_f32(uint16_t(p.words[0] >> 16));
        const uint32_t nibbles = p.words[2];
        bytes_to_f32((nibbles & 0x0F0F0F0Fu) | fifth_bits(p.words[1] >> 4 * g),
                     (nibbles >> 4 & 0x0F0F0F0Fu) | fifth_bits(p.words[1] >> (4 * g + 16)), 0.0f, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = __fadd_rn(__fmul_rn(d, x[i]), m);
    } else {
        const float d = f16_to_f32(uint16_t(p.words[1]));
        bytes_to_f32(p.words[0] & 0x0F0F0F0Fu, p.words[0] >> 4 & 0x0F0F0F0Fu, 8.0f, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = d * x[i];
    }
}

// -- writing ------------------------------------------------------------------------------------

__device__ __forceinline__ bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u;
}

// 1 / d, or 0 where that is no finite number.
__device__ __forceinline__ float reciprocal_or_zero(float d) {
    const float inverse = 1.0f / d;
    return is_finite(inverse) ? inverse : 0.0f;
}

// What a block has in common: the float32 scale, its reciprocal and, in Q5_1, the minimum.
struct BlockScale {
    float d, id, m;
    bool poison;  // an element or the scale is not finite
};

// What a run of elements contributes to the scale. Runs are joined in a tree, the left one before the
// right one, so that of equal elements the first is kept and no long chain of comparisons is waited for.
struct Extremes {
    float low, high;   // of equal minima the first, which decides the sign of a zero
    float attained;    // the element of largest magnitude, of equal ones the first
    bool nan;
};

__device__ __forceinline__ Extremes join(const Extremes& a, const Extremes& b) {
    return {b.low < a.low ? b.low : a.low, b.high > a.high ? b.high : a.high,
            fabsf(b.attained) > fabsf(a.attained) ? b.attained : a.attained, a.nan || b.nan};
}
__device__ __forceinline__ Extremes extremes(float x) { return {x, x, x, x != x}; }
__device__ __forceinline__ Extremes extremes(const float4& v) {
    return join(join(extremes(v.x), extremes(v.y)), join(extremes(v.z), extremes(v.w)));
}

template <int F>
__device__ __forceinline__ BlockScale block_scale(const float4* x) {
    const Extremes e = join(join(join(extremes(x[0]), extremes(x[1])), join(extremes(x[2]), extremes(x[3]))),
                            join(join(extremes(x[4]), extremes(x[5])), join(extremes(x[6]), extremes(x[7]))));
    BlockScale s = {0.0f, 0.0f, 0.0f, false};
    if constexpr (F == Q8_0) {
        s.d = fabsf(e.attained) / 127.0f;
    } else if constexpr (F == Q4_0) {
        s.d = e.attained / -8.0f;
    } else {
        s.m = e.low;
        s.d = (e.high - e.low) / 31.0f;
    }
    s.id = reciprocal_or_zero(s.d);
    s.poison = e.nan || !is_finite(s.d);
    return s;
}

__device__ __forceinline__ uint32_t code_q8_0(float x, float id) {
    const float scaled = __fmul_rn(x, id);
    const float magnitude = fabsf(scaled);
    int32_t q = int32_t(magnitude);
    q += magnitude - float(q) >= 0.5f;  // halves away from zero; the difference is exact
    q = q > 127 ? 127 : q;
    return uint32_t(scaled < 0.0f ? -q : q) & 0xFFu;
}
__device__ __forceinline__ uint32_t code_q5_1(float x, float m, float id) {
    const int32_t q = int32_t(__fadd_rn(__fmul_rn(__fsub_rn(x, m), id), 0.5f));
    return uint32_t(q > 31 ? 31 : q);
}
__device__ __forceinline__ uint32_t code_q4_0(float x, float id) {
    const int32_t q = int32_t(__fadd_rn(__fmul_rn(x, id), 8.5f));
    return uint32_t(q > 15 ? 15 : q);
}

__device__ __forceinline__ void store_u16(uint8_t* p, uint32_t bits) {
    *reinterpret_cast<uint16_t*>(p) = uint16_t(bits);
}
__device__ __forceinline__ void store_two_u16(uint8_t* p, uint32_t word) {
    store_u16(p, word);
    store_u16(p + 2, word >> 16);
}

// Encodes quarter g of the block of x[32] (16-byte aligned). Returns whether something of it is, or
// reads back as, no finite number. In Q5_1, words[1] is byte g of qh alone.
template <int F>
__device__ __forceinline__ bool pack_quarter(const float* x, int g, Packed<F>* p) {
    const float4* all = reinterpret_cast<const float4*>(x);
    const float4 a = all[quarter_low<F>(g) / 4], b = all[quarter_high<F>(g) / 4];
    const float own[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    bool bad = false;
    if constexpr (F == F32) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bad |= !is_finite(own[i]);
            p->words[i] = __float_as_uint(own[i]);
        }
        return bad;
    } else if constexpr (F == F16 || F == BF16) {
        constexpr uint32_t infinity = F == F16 ? 0x7C00u : 0x7F80u;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t bits = F == F16 ? f32_to_f16(own[i]) : f32_to_bf16(own[i]);
            bad |= (bits & infinity) == infinity;
            p->words[i / 2] = i % 2 == 0 ? bits : p->words[i / 2] | bits << 16;
        }
        return bad;
    } else if constexpr (F == E4M3) {
        p->words[0] = p->words[1] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bad |= !is_finite(own[i]);
            p->words[i / 4] |= uint32_t(f32_to_e4m3(own[i])) << 8 * (i % 4);
        }
        return bad;
    } else {
        const BlockScale s = block_scale<F>(all);
        const uint32_t d = s.poison ? 0x7E00u : f32_to_f16(s.d);
        const uint32_t m = s.poison ? 0x7E00u : f32_to_f16(s.m);
        if constexpr (F == Q8_0) {
            uint32_t words[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 8; i++) words[i / 4] |= code_q8_0(own[i], s.id) << 8 * (i % 4);
            p->words[0] = s.poison ? 0u : words[0];
            p->words[1] = s.poison ? 0u : words[1];
            p->words[2] = d;
        } else {
            uint32_t nibbles = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t q =
                    F == Q5_1 ? code_q5_1(own[i], s.m, s.id) : code_q4_0(own[i], s.id);
                nibbles |= (q & 15u) << (8 * (i % 4) + 4 * (i / 4));
            }
            if (s.poison) nibbles = 0;
            if constexpr (F == Q5_1) {
                // Byte g of qh belongs to elements 8g ... 8g + 7, not to the own runs.
                const float4 c = all[2 * g], e = all[2 * g + 1];
                const float column[8] = {c.x, c.y, c.z, c.w, e.x, e.y, e.z, e.w};
                uint32_t high = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) high |= code_q5_1(column[i], s.m, s.id) >> 4 << i;
                p->words[0] = d | m << 16;
                p->words[1] = s.poison ? 0u : high;
                p->words[2] = nibbles;
            } else {
                p->words[0] = nibbles;
                p->words[1] = d;
            }
        }
        return (d & 0x7C00u) == 0x7C00u || (m & 0x7C00u) == 0x7C00u;
    }
}

// Stores what pack_quarter made; quarter 0 writes the scale too.
template <int F>
__device__ __forceinline__ void store_quarter(const Packed<F>& p, uint8_t* block, int g) {
    if constexpr (F == F32) {
        uint4* to = reinterpret_cast<uint4*>(block) + 2 * g;
        to[0] = make_uint4(p.words[0], p.words[1], p.words[2], p.words[3]);
        to[1] = make_uint4(p.words[4], p.words[5], p.words[6], p.words[7]);
    } else if constexpr (F == F16 || F == BF16) {
        reinterpret_cast<uint4*>(block)[g] =
            make_uint4(p.words[0], p.words[1], p.words[2], p.words[3]);
    } else if constexpr (F == E4M3) {
        reinterpret_cast<uint2*>(block)[g] = make_uint2(p.words[0], p.words[1]);
    } else if constexpr (F == Q8_0) {
        if (g == 0) store_u16(block, p.words[2]);
        store_two_u16(block + 2 + 8 * g, p.words[0]);
        store_two_u16(block + 6 + 8 * g, p.words[1]);
    } else if constexpr (F == Q5_1) {
        if (g == 0) *reinterpret_cast<uint32_t*>(block) = p.words[0];
        block[4 + g] = uint8_t(p.words[1]);
        *reinterpret_cast<uint32_t*>(block + 8 + 4 * g) = p.words[2];
    } else {
        if (g == 0) store_u16(block, p.words[1]);
        store_two_u16(block + 2 + 4 * g, p.words[0]);
    }
}
