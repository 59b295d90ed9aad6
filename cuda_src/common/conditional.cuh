// Conditions of a graph's conditional nodes, set by kernels: cudaGraphSetConditional(handle, value). The
// handle is a u64 argument of the kernel. A body runs if, or as long as, the value is not 0.
#pragma once
#include "common/device.cuh"

#if MEMRA_CUDA

// The driver provides it; a cubin needs no further library.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

#else

// On the host device a handle is the address of the value, in no memory that kernels otherwise have.
inline void cudaGraphSetConditional(uint64_t handle, uint32_t value) {
    uint32_t* const at = reinterpret_cast<uint32_t*>(uintptr_t(handle));
#if defined(MEMRA_CHECK)
    memra::raw_store(at, value);
#else
    *at = value;
#endif
}

#endif
