// Conversions between f32 and the small floating-point types, the same bits on both devices.
// A small float travels as its bits: uint16_t for f16 and bf16, uint8_t for e4m3 (OCP "fn").
//
// All round to nearest, ties to even. f16 and bf16 overflow to infinity; e4m3 has none and
// saturates at +-448. Every NaN becomes one pattern (0x7E00, 0x7FC0, 0x7F), so that outputs can be
// compared byte by byte.
#pragma once
#include "common/device.cuh"

__device__ __forceinline__ float f16_to_f32(uint16_t bits) {
#if MEMRA_CUDA
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#elif defined(__F16C__)
    typedef short Halves __attribute__((vector_size(16)));
    const Halves halves = {short(bits)};
    return __builtin_ia32_vcvtph2ps(halves)[0];
#else
    // The exponent field moved up is 112 too small; the product repairs it, subnormals included.
    const uint32_t magnitude = uint32_t(bits & 0x7FFFu) << 13;
    uint32_t word = __float_as_uint(__uint_as_float(magnitude) * 0x1p112f);
    word |= magnitude >= 0x0F800000u ? 0x7F800000u : 0u;
    return __uint_as_float(word | uint32_t(bits & 0x8000u) << 16);
#endif
}

__device__ __forceinline__ uint16_t f32_to_f16(float value) {
#if MEMRA_CUDA
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return value != value ? uint16_t(0x7E00) : bits;
#else
    const uint32_t word = __float_as_uint(value);
    const uint32_t magnitude = word & 0x7FFFFFFFu;
    const uint32_t sign = word >> 16 & 0x8000u;
    if (magnitude > 0x7F800000u) return 0x7E00;
    if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {
        // Adding 0.5 leaves the value in steps of 2^-24 in the low bits, rounded as wanted.
        const float shifted = __uint_as_float(magnitude) + 0.5f;
        return uint16_t(sign | (__float_as_uint(shifted) - 0x3F000000u));
    }
    const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    return uint16_t(sign | ((rounded >> 13) - (112u << 10)));
#endif
}

// Two that are no NaN, the first in the low half.
__device__ __forceinline__ uint32_t finite_to_f16x2(float low, float high) {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 800
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return f32_to_f16(low) | uint32_t(f32_to_f16(high)) << 16;
#endif
}

__device__ __forceinline__ float bf16_to_f32(uint16_t bits) {
    return __uint_as_float(uint32_t(bits) << 16);
}

__device__ __forceinline__ uint16_t f32_to_bf16(float value) {
    const uint32_t word = __float_as_uint(value);
    const uint32_t rounded = (word + 0x7FFFu + (word >> 16 & 1u)) >> 16;
    return value != value ? uint16_t(0x7FC0) : uint16_t(rounded);
}

__device__ __forceinline__ float e4m3_to_f32(uint8_t bits) {
    const uint32_t magnitude = uint32_t(bits & 0x7Fu) << 20;
    uint32_t word = __float_as_uint(__uint_as_float(magnitude) * 0x1p120f);
    word |= magnitude == 0x07F00000u ? 0x7FC00000u : 0u;
    return __uint_as_float(word | uint32_t(bits & 0x80u) << 24);
}

__device__ __forceinline__ uint8_t f32_to_e4m3(float value) {
    const uint32_t word = __float_as_uint(value);
    const uint32_t magnitude = word & 0x7FFFFFFFu;
    const uint32_t sign = word >> 24 & 0x80u;
    if (magnitude > 0x7F800000u) return 0x7F;
    if (magnitude >= 0x43E00000u) return uint8_t(sign | 0x7Eu);  // 448 and above
    if (magnitude < 0x3C800000u) {
        // Below 2^-6 in steps of 2^-9, which are the last bits of a sum with 2^14.
        const float shifted = __uint_as_float(magnitude) + 16384.0f;
        return uint8_t(sign | (__float_as_uint(shifted) - 0x46800000u));
    }
    const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1u);
    return uint8_t(sign | ((rounded >> 20) - (120u << 3)));
}

// Of four, one per byte.
__device__ __forceinline__ uint32_t f32_to_e4m3x4(const float4& v) {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 890
    // A NaN is made positive first: the instruction need not drop its sign.
    const float x = v.x != v.x ? NAN_F32 : v.x, y = v.y != v.y ? NAN_F32 : v.y;
    const float z = v.z != v.z ? NAN_F32 : v.z, w = v.w != v.w ? NAN_F32 : v.w;
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y), "f"(x));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(w), "f"(z));
    return uint32_t(low) | uint32_t(high) << 16;
#else
    return uint32_t(f32_to_e4m3(v.x)) | uint32_t(f32_to_e4m3(v.y)) << 8 |
           uint32_t(f32_to_e4m3(v.z)) << 16 | uint32_t(f32_to_e4m3(v.w)) << 24;
#endif
}
