// Tickets: which of some blocks is done last.
#pragma once
#include "common/device.cuh"

// Takes a number; behind `last` the count begins anew at 0. One thread of a block does it, between two barriers:
// what the blocks with lower numbers wrote before the first, all threads can read behind the second. One
// operation that releases and acquires stands for a full fence on either side.
__device__ __forceinline__ uint32_t take_ticket(uint32_t* next, uint32_t last) {
#if MEMRA_CUDA
    uint32_t number;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(number)
                 : "l"(next), "r"(last)
                 : "memory");
#else
    __threadfence();
    const uint32_t number = atomicInc(next, last);
    __threadfence();
#endif
    return number;
}
