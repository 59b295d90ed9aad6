// Small tools around tensor-core fragments (common/mma.cuh): transposed loads from shared memory,
// pairs of f16, splitting a float into two f16, powers of two.
#pragma once
#include "common/convert.cuh"
#include "common/device.cuh"

// 2^n for integers n <= 127; 0 below the normal range. Exact, so scaling with it is exact.
__device__ __forceinline__ float power_of_two(int32_t n) {
    return n < -126 ? 0.0f : __int_as_float((n + 127) << 23);
}

// 2^x for x <= 0 and whole, however small.
__device__ __forceinline__ float exp2_whole(float x) {
    return power_of_two(int32_t(fmaxf(x, -1000.0f)));
}

// 2^x, within 2 ulp; a result below the normal range is 0 on a GPU.
__device__ __forceinline__ float exp2_fast(float x) {
#if MEMRA_CUDA
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// Two f16, rounded to nearest: `low` in the lower half.
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return uint32_t(f32_to_f16(low)) | uint32_t(f32_to_f16(high)) << 16;
#endif
}

// x = coarse + rest, coarse with the 11 leading bits that an f16 keeps; the rest is exact.
__device__ __forceinline__ float coarse_part(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);
}

// Two pairs of f16 with x0 = coarse[0] + fine[0] to 22 bits, likewise x1, for |x| < 65504.
__device__ __forceinline__ void split_pair(float x0, float x1, uint32_t& coarse, uint32_t& fine) {
    const float c0 = coarse_part(x0), c1 = coarse_part(x1);
    coarse = pack_halves(c0, c1);
    fine = pack_halves(x0 - c0, x1 - c1);
}

// Four tiles of 8 rows of 16 bytes in shared memory, row r of tile i at base + (i & 1) * odd +
// (i >> 1) * upper + r * pitch (all multiples of 16), read across: with g = lane / 4, t = lane % 4,
// out[i] holds the 16-bit words number g of the rows 2t (lower half) and 2t + 1 of tile i. Each lane
// names one row: `own` is across_offset() of its lane.
__device__ __forceinline__ int across_offset(int lane, int pitch, int odd, int upper) {
    return (lane % 8) * pitch + (lane / 8 % 2) * odd + (lane / 16) * upper;
}
__device__ __forceinline__ void load_across_x4(uint32_t* out, const uint8_t* base, int own,
                                               int pitch, int odd, int upper) {
#if MEMRA_CUDA
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(base + own));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
#else
    const int lane = threadIdx.x % WARP_LANES;
    const uint8_t* word = base + (lane % 4) * 2 * pitch + (lane / 4) * 2;
    for (int i = 0; i < 4; ++i) {
        const uint8_t* at = word + (i & 1) * odd + (i >> 1) * upper;
        out[i] = uint32_t(*reinterpret_cast<const uint16_t*>(at)) |
                 uint32_t(*reinterpret_cast<const uint16_t*>(at + pitch)) << 16;
    }
#endif
}

// Four tiles of 8 rows of 16 bytes in shared memory, as those of load_across_x4, but read
// along the rows: with g = lane / 4 and t = lane % 4, out[i] is the 32-bit word number t of row g of tile i.
__device__ __forceinline__ void load_along_x4(uint32_t* out, const uint8_t* base, int own, int pitch,
                                              int odd, int upper) {
#if MEMRA_CUDA
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(base + own));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
#else
    const int lane = threadIdx.x % WARP_LANES;
    const uint8_t* word = base + (lane / 4) * pitch + (lane % 4) * 4;
    for (int i = 0; i < 4; ++i)
        out[i] = *reinterpret_cast<const uint32_t*>(word + (i & 1) * odd + (i >> 1) * upper);
#endif
}

// As load_across_x4 for two tiles; the rows that the upper 16 lanes name do not count.
__device__ __forceinline__ void load_across_x2(uint32_t* out, const uint8_t* base, int own,
                                               int pitch, int odd) {
#if MEMRA_CUDA
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(base + own));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(at)
                 : "memory");
#else
    const int lane = threadIdx.x % WARP_LANES;
    const uint8_t* word = base + (lane % 4) * 2 * pitch + (lane / 4) * 2;
    for (int i = 0; i < 2; ++i) {
        const uint8_t* at = word + i * odd;
        out[i] = uint32_t(*reinterpret_cast<const uint16_t*>(at)) |
                 uint32_t(*reinterpret_cast<const uint16_t*>(at + pitch)) << 16;
    }
#endif
}

// x, held in a register: a compiler short of registers would else compute it anew from threadIdx, at
// the latency of a special register.
__device__ __forceinline__ int kept(int x) {
#if MEMRA_CUDA
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Arithmetic of two pairs of f16. The sum with `other` must be exact; the product is rounded to
// nearest; the rest of a product is what that rounding took away, exact where f16 holds it.
__device__ __forceinline__ uint32_t add_halves(uint32_t x, uint32_t other) {
#if MEMRA_CUDA
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(other));
    return sum;
#else
    return pack_halves(f16_to_f32(uint16_t(x)) + f16_to_f32(uint16_t(other)),
                       f16_to_f32(uint16_t(x >> 16)) + f16_to_f32(uint16_t(other >> 16)));
#endif
}
__device__ __forceinline__ uint32_t multiply_halves(uint32_t x, uint32_t y) {
#if MEMRA_CUDA
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
#else
    return pack_halves(f16_to_f32(uint16_t(x)) * f16_to_f32(uint16_t(y)),
                       f16_to_f32(uint16_t(x >> 16)) * f16_to_f32(uint16_t(y >> 16)));
#endif
}
__device__ __forceinline__ uint32_t rest_of_product(uint32_t x, uint32_t y, uint32_t product) {
#if MEMRA_CUDA
    uint32_t rest;
    asm("{\n.reg .b32 below;\nneg.f16x2 below, %3;\nfma.rn.f16x2 %0, %1, %2, below;\n}"
        : "=r"(rest)
        : "r"(x), "r"(y), "r"(product));
    return rest;
#else
    float rest[2];
    for (int i = 0; i < 2; i++)
        rest[i] = f16_to_f32(uint16_t(x >> 16 * i)) * f16_to_f32(uint16_t(y >> 16 * i)) -
                  f16_to_f32(uint16_t(product >> 16 * i));
    return pack_halves(rest[0], rest[1]);
#endif
}
