// Reading what a kernel may have written that still ran when this one began: see common/dependent.cuh. A line
// that was read before the wait may lie in the L1 cache as it was then; these loads do not look there.
#pragma once
#include "common/block32.cuh"

__device__ __forceinline__ uint32_t load_fresh_u32(const void* p) {
#if MEMRA_CUDA
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
#else
    return *reinterpret_cast<const uint32_t*>(p);
#endif
}
__device__ __forceinline__ uint32_t load_fresh_u16(const void* p) {
#if MEMRA_CUDA
    uint16_t x;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
    return x;
#else
    return *reinterpret_cast<const uint16_t*>(p);
#endif
}

// As load_quarter.
template <int F>
__device__ __forceinline__ Packed<F> load_fresh_quarter(const uint8_t* block, int g) {
    const auto two_u16 = [](const uint8_t* p) {
        return load_fresh_u16(p) | load_fresh_u16(p + 2) << 16;
    };
    Packed<F> p;
    if constexpr (F == Q8_0) {
        p.words[0] = two_u16(block + 2 + 8 * g), p.words[1] = two_u16(block + 6 + 8 * g);
        p.words[2] = load_fresh_u16(block);
    } else if constexpr (F == Q4_0) {
        p.words[0] = two_u16(block + 2 + 4 * g);
        p.words[1] = load_fresh_u16(block);
    } else if constexpr (F == Q5_1) {
        p.words[0] = load_fresh_u32(block), p.words[1] = load_fresh_u32(block + 4);
        p.words[2] = load_fresh_u32(block + 8 + 4 * g);
    } else {  // words side by side
        constexpr int n = Packed<F>::WORDS;
#pragma unroll
        for (int i = 0; i < n; i++) p.words[i] = load_fresh_u32(block + (g * n + i) * 4);
    }
    return p;
}
