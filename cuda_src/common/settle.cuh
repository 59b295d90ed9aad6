// Values that a compiler shall have ready at a point of its own choosing no longer.
#pragma once
#include "common/device.cuh"

// A value in a register at this point, and neither before nor behind it: a load is asked for by now, a sum is made.
#if MEMRA_CUDA
#define MEMRA_SETTLE(type, constraint) \
    __device__ __forceinline__ void settle(type& v) { asm volatile("" : "+" constraint(v)); }
#else
#define MEMRA_SETTLE(type, constraint) inline void settle(type&) {}
#endif
MEMRA_SETTLE(uint16_t, "h")
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
