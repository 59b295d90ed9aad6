// Bulk copies from global to shared memory (cp.async.bulk, sm_90): one thread asks for many bytes,
// and a barrier of common/mbar.cuh counts them when they are there.
#pragma once
#include "common/mbar.cuh"

// Addresses and n_bytes are multiples of 16.
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bulk_copy(void* shared_dst, const void* global_src, int n_bytes,
                                          uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared_dst)),
        "l"(global_src), "r"(n_bytes), "r"(shared_address(bar))
        : "memory");
}
#else
__device__ __forceinline__ void bulk_copy(void*, const void*, int, uint64_t*) { __trap(); }
#endif
