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
// neighbouring threads therefore touch neighbouring bytes. A thread that writes a quarter alone scans all
// 32 elements of its block for the scale; where whole rows are written, two threads share a block.
#pragma once
#include "common/convert.cuh"

constexpr int F32 = 0;
constexpr int F16 = 1;
constexpr int BF16 = 2;
constexpr int Q8_0 = 3;
constexpr int Q5_1 = 4;
constexpr int Q4_0 = 5;
constexpr int E4M3 = 6;

// The writers have two bodies with the same results: one for lanes that ask each other and count every
// instruction, one for the host. Tests run the first on the host too.
#ifndef BLOCK32_LANES
#define BLOCK32_LANES MEMRA_CUDA
#endif

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
    return fabsf(x) < INF_F32;
}

// 1 / d, or 0 where that is no finite number.
__device__ __forceinline__ float reciprocal_or_zero(float d) {
    const float inverse = 1.0f / d;
    return is_finite(inverse) ? inverse : 0.0f;
}

// x / N, N = 127 or 31, where nothing underflows: the product with the reciprocal, and its error made good,
// is the quotient, rounded once. 1 / d likewise, where the inverse is a normal number. The division itself
// costs checks and branches more. A test tries every mantissa.
template <int N>
__device__ __forceinline__ float quotient(float x) {
    constexpr float reciprocal = 1.0f / N;
    const float close = __fmul_rn(x, reciprocal);
    return fmaf(fmaf(-float(N), close, x), reciprocal, close);
}
__device__ __forceinline__ float inverse(float d) {
#if MEMRA_CUDA
    float close;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(close) : "f"(d));
    return fmaf(close, fmaf(-d, close, 1.0f), close);
#else
    return 1.0f / d;
#endif
}

// A scale and its reciprocal (0 where that is no finite number).
struct Scale {
    float d, id;
};

// x / N for x >= 0.
template <int N>
__device__ __forceinline__ Scale scale_by(float x) {
    constexpr uint32_t least = 0x0DA24260u, most = 0x7CF0BDC2u;  // 1e-30, 1e37
    if (__float_as_uint(x) - least <= most - least) {
        const float d = quotient<N>(x);
        return {d, inverse(d)};
    }
    const float d = x / float(N);
    return {d, reciprocal_or_zero(d)};
}

// Joins of what is known of two runs of elements, the left run first. Of equal elements `smaller` and
// `larger` keep the first; `minimum` and `maximum` leave the sign of a zero open, and `maximum` is NaN
// if one of them is.
__device__ __forceinline__ float smaller(float a, float b) { return b < a ? b : a; }
__device__ __forceinline__ float larger(float a, float b) { return fabsf(b) > fabsf(a) ? b : a; }
__device__ __forceinline__ float maximum(float a, float b) {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a > b || a != a ? a : b;
#endif
}
__device__ __forceinline__ float minimum(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float magnitude(float a, float b) { return maximum(fabsf(a), fabsf(b)); }

typedef float (*Join)(float, float);

// Joined in a tree, so that no long chain of comparisons is waited for.
template <Join JOIN>
__device__ __forceinline__ float fold(const float4& v) {
    return JOIN(JOIN(v.x, v.y), JOIN(v.z, v.w));
}
template <Join JOIN>
__device__ __forceinline__ float fold_block(const float4* x) {
    return JOIN(JOIN(JOIN(fold<JOIN>(x[0]), fold<JOIN>(x[1])), JOIN(fold<JOIN>(x[2]), fold<JOIN>(x[3]))),
                JOIN(JOIN(fold<JOIN>(x[4]), fold<JOIN>(x[5])), JOIN(fold<JOIN>(x[6]), fold<JOIN>(x[7]))));
}

// What a block has in common.
struct BlockScale {
    float id, m;     // reciprocal of the scale and, in Q5_1, the minimum
    uint32_t head;   // scale in f16 and, in Q5_1, the minimum above it
    bool poison;     // an element or the scale is not finite
};

// From its minimum (Q5_1) and its largest element (Q5_1), largest magnitude (Q8_0) or the element that has
// it (Q4_0).
template <int F>
__device__ __forceinline__ BlockScale scale_of(float low, float top, bool nan) {
    Scale s;
    if constexpr (F == Q8_0) {
        s = scale_by<127>(top);
    } else if constexpr (F == Q5_1) {
        s = scale_by<31>(fabsf(top - low));
    } else {
        s.d = top / -8.0f;
        s.id = reciprocal_or_zero(s.d);
    }
    const bool poison = nan || !is_finite(s.d);
    const uint32_t head = finite_to_f16x2(s.d, low);
    return {s.id, low, poison ? (F == Q5_1 ? 0x7E007E00u : 0x7E00u) : head, poison};
}

// Read from all 32 elements, by a thread alone.
template <int F>
__device__ __forceinline__ BlockScale block_scale(const float* x) {
    const float4* all = reinterpret_cast<const float4*>(x);
    if constexpr (F == Q8_0) {
        return scale_of<F>(0.0f, fold_block<magnitude>(all), false);
    } else if constexpr (F == Q5_1) {
        return scale_of<F>(fold_block<smaller>(all), fold_block<maximum>(all), false);
    } else {
        const float most = fold_block<magnitude>(all);
        return scale_of<F>(0.0f, fold_block<larger>(all), most != most);
    }
}

// a + b > 0, cut off instead of rounded.
__device__ __forceinline__ float add_rz(float a, float b) {
#if MEMRA_CUDA
    return __fadd_rz(a, b);
#else
    const double sum = double(a) + double(b);
    const float nearest = float(sum);
    return double(nearest) > sum ? __uint_as_float(__float_as_uint(nearest) - 1) : nearest;
#endif
}

// Byte i of the result is floor(x[i]), or floor(x[i] + 0.5) of the exact sum, for x[i] in [0, 255).
template <bool HALF>
__device__ __forceinline__ uint32_t floor_bytes(float a, float b, float c, float d) {
#if BLOCK32_LANES
    // Cut off under the exponent of 2^15 the integer is byte 1 of the word: an add, no conversion.
    constexpr float shift = HALF ? 32768.5f : 32768.0f;
    const uint32_t low = __byte_perm(__float_as_uint(add_rz(a, shift)),
                                     __float_as_uint(add_rz(b, shift)), 0x0051u);
    const uint32_t high = __byte_perm(__float_as_uint(add_rz(c, shift)),
                                      __float_as_uint(add_rz(d, shift)), 0x5100u);
    return __byte_perm(low, high, 0x7610u);
#else
    const float x[4] = {a, b, c, d};
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        int32_t q = int32_t(x[i]);
        if (HALF) q += x[i] - float(q) >= 0.5f;  // the difference is exact, the sum would not be
        word |= (uint32_t(q) & 0xFFu) << 8 * i;
    }
    return word;
#endif
}

// 0xFF in the low (high) half, byte by byte, if the signs of a and b are set.
template <bool HIGH>
__device__ __forceinline__ uint32_t two_signs(float a, float b) {
#if MEMRA_CUDA
    uint32_t bytes;  // __byte_perm would drop the bits that ask for the sign of a byte
    asm("prmt.b32 %0, %1, %2, %3;"
        : "=r"(bytes)
        : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "n"(HIGH ? 0xFB00 : 0x00FB));
    return bytes;
#else
    const uint32_t signs =
        (__float_as_uint(a) >> 31) * 0xFFu | (__float_as_uint(b) >> 31) * 0xFF00u;
    return HIGH ? signs << 16 : signs;
#endif
}

// 0xFF in byte i if the sign of x[i] is set.
__device__ __forceinline__ uint32_t sign_bytes(const float4& v) {
#if BLOCK32_LANES
    return __byte_perm(two_signs<false>(v.x, v.y), two_signs<true>(v.z, v.w), 0x7610u);
#else
    return (__float_as_uint(v.x) >> 31) * 0xFFu | (__float_as_uint(v.y) >> 31) * 0xFF00u |
           (__float_as_uint(v.z) >> 31) * 0xFF0000u | (__float_as_uint(v.w) >> 31) * 0xFF000000u;
#endif
}

// Codes of four elements, one per byte. Only Q4_0 needs its upper limit: a scaled element is at most
// 127 or 31 but for three roundings, which are far from the next integer.
__device__ __forceinline__ uint32_t codes_q8_0(const float4& v, float id) {
    const uint32_t q = floor_bytes<true>(fabsf(__fmul_rn(v.x, id)), fabsf(__fmul_rn(v.y, id)),
                                         fabsf(__fmul_rn(v.z, id)), fabsf(__fmul_rn(v.w, id)));
    const uint32_t sign = sign_bytes(v);  // bytes negated without a carry between them
    return (((q ^ sign) & 0x7F7F7F7Fu) + (sign & 0x01010101u)) ^ (sign & 0x80808080u);
}
__device__ __forceinline__ float scaled_q5_1(float x, float m, float id) {
    return __fadd_rn(__fmul_rn(__fsub_rn(x, m), id), 0.5f);
}
__device__ __forceinline__ uint32_t codes_q5_1(const float4& v, float m, float id) {
    return floor_bytes<false>(scaled_q5_1(v.x, m, id), scaled_q5_1(v.y, m, id),
                              scaled_q5_1(v.z, m, id), scaled_q5_1(v.w, m, id));
}
__device__ __forceinline__ float scaled_q4_0(float x, float id) {
    const float scaled = __fadd_rn(__fmul_rn(x, id), 8.5f);
    return scaled < 15.5f ? scaled : 15.5f;
}
__device__ __forceinline__ uint32_t codes_q4_0(const float4& v, float id) {
    return floor_bytes<false>(scaled_q4_0(v.x, id), scaled_q4_0(v.y, id), scaled_q4_0(v.z, id),
                              scaled_q4_0(v.w, id));
}

// Bit 4 of bytes 0 ... 3 at bits 0 ... 3: the inverse of fifth_bits.
__device__ __forceinline__ uint32_t gather_fifth(uint32_t codes) {
    return (codes >> 4 & 0x01010101u) * 0x01020408u >> 24;
}

// Four elements of a format without a scale, in block_bytes / 32 words. Returns whether one of them is, or
// reads back as, no finite number.
template <int F>
__device__ __forceinline__ bool pack_run(const float4& v, uint32_t* words) {
    const float x[4] = {v.x, v.y, v.z, v.w};
    bool bad = false;
    if constexpr (F == F16 || F == BF16) {
        constexpr uint32_t infinity = F == F16 ? 0x7C00u : 0x7F80u;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t bits = F == F16 ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
            bad |= (bits & infinity) == infinity;
            words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bad |= !is_finite(x[i]);
            if constexpr (F == F32) words[i] = __float_as_uint(x[i]);
        }
        if constexpr (F == E4M3) words[0] = f32_to_e4m3x4(v);
    }
    return bad;
}

// Codes of four elements, one per byte.
template <int F>
__device__ __forceinline__ uint32_t codes(const float4& v, const BlockScale& s) {
    return F == Q8_0 ? codes_q8_0(v, s.id) : F == Q5_1 ? codes_q5_1(v, s.m, s.id) : codes_q4_0(v, s.id);
}
__device__ __forceinline__ uint32_t join_nibbles(uint32_t low, uint32_t high) {
    return (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4;
}
template <int F>
__device__ __forceinline__ bool reads_endless(const BlockScale& s) {
    return (s.head & 0x7C00u) == 0x7C00u || (F == Q5_1 && (s.head & 0x7C000000u) == 0x7C000000u);
}

// Encodes quarter g of the block of x[32] (16-byte aligned), alone. Returns whether something of it is, or
// reads back as, no finite number. In Q5_1, words[1] is byte g of qh alone.
template <int F>
__device__ __forceinline__ bool pack_quarter(const float* x, int g, Packed<F>* p) {
    const float4* all = reinterpret_cast<const float4*>(x);
    const float4 low = all[quarter_low<F>(g) / 4], high = all[quarter_high<F>(g) / 4];
    if constexpr (F == Q8_0) {
        const BlockScale s = block_scale<F>(x);
        p->words[0] = s.poison ? 0u : codes<F>(low, s);
        p->words[1] = s.poison ? 0u : codes<F>(high, s);
        p->words[2] = s.head;
        return reads_endless<F>(s);
    } else if constexpr (has_nibbles<F>()) {
        const BlockScale s = block_scale<F>(x);
        const uint32_t nibbles = s.poison ? 0u : join_nibbles(codes<F>(low, s), codes<F>(high, s));
        if constexpr (F == Q5_1) {
            // Byte g of qh belongs to elements 8g ... 8g + 7, not to the own runs.
            const uint32_t fifth = gather_fifth(codes<F>(all[2 * g], s)) |
                                   gather_fifth(codes<F>(all[2 * g + 1], s)) << 4;
            p->words[0] = s.head;
            p->words[1] = s.poison ? 0u : fifth;
            p->words[2] = nibbles;
        } else {
            p->words[0] = nibbles;
            p->words[1] = s.head;
        }
        return reads_endless<F>(s);
    } else {
        const bool bad = pack_run<F>(low, p->words);
        return pack_run<F>(high, p->words + block_bytes<F>() / 32) || bad;
    }
}

__device__ __forceinline__ void store_u16(uint8_t* p, uint32_t bits) {
    *reinterpret_cast<uint16_t*>(p) = uint16_t(bits);
}
__device__ __forceinline__ void store_two_u16(uint8_t* p, uint32_t word) {
    store_u16(p, word);
    store_u16(p + 2, word >> 16);
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

// -- writing whole rows --------------------------------------------------------------------------
// Two neighbouring threads share a block; each loads and packs the quarters 2h and 2h + 1, h = 0, 1, and
// on a GPU asks the other for what it has not read. On the host a question costs more than the reading.

// Runs of 4 elements, in order: those of the low half of the block, or of the own half, first.
struct Half {
    float4 runs[4];
};

template <int F>
__device__ __forceinline__ Half load_half(const float* x, int h) {
    const float4* from = reinterpret_cast<const float4*>(x) + (has_nibbles<F>() ? 2 : 4) * h;
    constexpr int second = has_nibbles<F>() ? 4 : 2;
    return {{from[0], from[1], from[second], from[second + 1]}};
}

// What the threads h = 0, 1 store: Q8_0 16 codes; Q5_1 and Q4_0 8 bytes of nibbles, and bytes h and 2 + h
// of qh at fifth; else 16 elements.
template <int F>
struct PackedHalf {
    static constexpr int WORDS = F == Q8_0 ? 4 : has_nibbles<F>() ? 2 : block_bytes<F>() / 8;
    uint32_t words[WORDS];
    uint32_t head, fifth;
};

#if BLOCK32_LANES
template <Join JOIN>
__device__ __forceinline__ float fold_pair(const Half& own) {
    const float value = JOIN(JOIN(fold<JOIN>(own.runs[0]), fold<JOIN>(own.runs[1])),
                             JOIN(fold<JOIN>(own.runs[2]), fold<JOIN>(own.runs[3])));
    return JOIN(value, __shfl_xor_sync(FULL_MASK, value, 1));
}

// The same where the order of equal elements matters: low runs of both threads before high ones.
template <Join JOIN>
__device__ __forceinline__ float fold_pair_in_order(const Half& own, int h) {
    const float low = JOIN(fold<JOIN>(own.runs[0]), fold<JOIN>(own.runs[1]));
    const float high = JOIN(fold<JOIN>(own.runs[2]), fold<JOIN>(own.runs[3]));
    const float other_low = __shfl_xor_sync(FULL_MASK, low, 1);
    const float other_high = __shfl_xor_sync(FULL_MASK, high, 1);
    return JOIN(h == 0 ? JOIN(low, other_low) : JOIN(other_low, low),
                h == 0 ? JOIN(high, other_high) : JOIN(other_high, high));
}
#endif

// All threads of the warp call it, also those whose block is nobody's.
template <int F>
__device__ __forceinline__ BlockScale block_scale(const float* x, const Half& own, int h) {
#if BLOCK32_LANES
    if constexpr (F == Q8_0) {
        return scale_of<F>(0.0f, fold_pair<magnitude>(own), false);
    } else if constexpr (F == Q5_1) {
        const float top = fold_pair<maximum>(own);
        float low = fold_pair<minimum>(own);
        if (__any_sync(FULL_MASK, low == 0.0f)) low = fold_pair_in_order<smaller>(own, h);
        return scale_of<F>(low, top, false);
    } else {
        const float most = fold_pair<magnitude>(own);
        return scale_of<F>(0.0f, fold_pair_in_order<larger>(own, h), most != most);
    }
#else
    return block_scale<F>(x);
#endif
}

// Encodes half a block; `own` is what load_half read of x[32]. Returns whether something of the block (or
// of the half, without a scale) is, or reads back as, no finite number.
template <int F>
__device__ __forceinline__ bool pack_half(const float* x, const Half& own, int h, PackedHalf<F>* p) {
    if constexpr (F == Q8_0) {
        const BlockScale s = block_scale<F>(x, own, h);
#pragma unroll
        for (int i = 0; i < 4; i++) p->words[i] = s.poison ? 0u : codes<F>(own.runs[i], s);
        p->head = s.head;
        return reads_endless<F>(s);
    } else if constexpr (has_nibbles<F>()) {
        const BlockScale s = block_scale<F>(x, own, h);
        uint32_t fifth = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t low = codes<F>(own.runs[i], s), high = codes<F>(own.runs[2 + i], s);
            p->words[i] = s.poison ? 0u : join_nibbles(low, high);
            fifth |= gather_fifth(low) << 4 * i | gather_fifth(high) << (8 + 4 * i);
        }
        p->head = s.head;
        p->fifth = s.poison ? 0u : fifth;
        return reads_endless<F>(s);
    } else {
        constexpr int words = block_bytes<F>() / 32;
        bool bad = false;
#pragma unroll
        for (int i = 0; i < 4; i++) bad |= pack_run<F>(own.runs[i], p->words + i * words);
        return bad;
    }
}

template <int F>
__device__ __forceinline__ void store_half(const PackedHalf<F>& p, uint8_t* block, int h) {
    constexpr int words = PackedHalf<F>::WORDS;
    if constexpr (F == Q8_0 || F == Q4_0) {
        if (h == 0) store_u16(block, p.head);
#pragma unroll
        for (int i = 0; i < words; i++) store_two_u16(block + 2 + 4 * (words * h + i), p.words[i]);
    } else if constexpr (F == Q5_1) {
        if (h == 0) *reinterpret_cast<uint32_t*>(block) = p.head;
        block[4 + h] = uint8_t(p.fifth);
        block[6 + h] = uint8_t(p.fifth >> 8);
        *reinterpret_cast<uint2*>(block + 8 + 8 * h) = make_uint2(p.words[0], p.words[1]);
    } else {
        uint4* to = reinterpret_cast<uint4*>(block) + words / 4 * h;
#pragma unroll
        for (int i = 0; i < words; i += 4)
            to[i / 4] = make_uint4(p.words[i], p.words[i + 1], p.words[i + 2], p.words[i + 3]);
    }
}
