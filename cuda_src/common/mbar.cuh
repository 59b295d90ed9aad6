// Barriers in shared memory that count arrivals and bytes (mbarrier, sm_90): what a bulk copy signals
// when its bytes are there, and how its reader hands the room back. A barrier completes phase after
// phase; who waits names the parity (0, 1, 0 ...) of the phase that must be over.
//
// For kernels with a second path: on the host device and on older GPUs these trap.
#pragma once
#include "common/device.cuh"

#if MEMRA_CUDA && __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// A phase is over after so many arrivals, and when all expected bytes have come.
__device__ __forceinline__ void mbar_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals));
}

// After the inits, before a __syncthreads(): copies will see the barriers, too.
__device__ __forceinline__ void mbar_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbar_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

__device__ __forceinline__ void mbar_arrive_expecting(uint64_t* bar, int n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
                 "r"(n_bytes)
                 : "memory");
}

__device__ __forceinline__ void mbar_wait(uint64_t* bar, int parity) {
    unsigned over = 0;
#ifdef MEMRA_SPIN_BOUND
    int spins = 0;
#endif
    do {
        asm volatile(
            "{\n.reg .pred over;\n"
            "mbarrier.try_wait.parity.shared.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n}"
            : "=r"(over)
            : "r"(shared_address(bar)), "r"(parity)
            : "memory");
#ifdef MEMRA_SPIN_BOUND
        if (++spins > MEMRA_SPIN_BOUND) __trap();
#endif
    } while (!over);
}

#else

__device__ __forceinline__ void mbar_init(uint64_t*, int) { __trap(); }
__device__ __forceinline__ void mbar_publish() { __trap(); }
__device__ __forceinline__ void mbar_arrive(uint64_t*) { __trap(); }
__device__ __forceinline__ void mbar_arrive_expecting(uint64_t*, int) { __trap(); }
__device__ __forceinline__ void mbar_wait(uint64_t*, int) { __trap(); }

#endif
