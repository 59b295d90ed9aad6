// Values that are ready where the code says so, not where a compiler finds it best.
#pragma once
#include "common/device.cuh"

// A value in a register at this point: what it is made of comes before, and what follows from it behind.
#if MEMRA_CUDA
#define MEMRA_SETTLE(type, constraint) \
    __device__ __forceinline__ void settle(type& v) { asm volatile("" : "+" constraint(v)); }
#else
#define MEMRA_SETTLE(type, constraint) inline void settle(type&) {}
#endif
MEMRA_SETTLE(uint32_t, "r")
MEMRA_SETTLE(int32_t, "r")
MEMRA_SETTLE(float, "f")
template <class T>
MEMRA_SETTLE(T*, "l")
#undef MEMRA_SETTLE

// An address in its registers at this point, for an assembler may still put off what nothing uses: a line of the
// L2 cache is asked for, which does no harm where it is there already.
__device__ __forceinline__ void address_of_line(const float*& p) {
#if MEMRA_CUDA
    asm volatile("prefetch.global.L2 [%0];" : "+l"(p));
#endif
}
