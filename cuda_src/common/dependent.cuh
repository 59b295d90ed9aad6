// Programmatic dependent launch: a kernel that is launched so starts while its predecessor still
// runs. Between its start and await_predecessor it may read what no kernel of the chain writes
// (weights, tables), what was written before its predecessor ran, if that one has waited before it
// admits a successor, and what was written before the last launch of the chain that did not start early;
// everything else, and every write, comes after. All threads of a kernel call
// both: then the predecessor's end means the end of everything before it, too.
//
// Launched the ordinary way, on an older GPU, or on the host device, both do nothing.
#pragma once
#include "common/device.cuh"

// Lets the successor start as soon as every block of this grid has got here.
__device__ __forceinline__ void admit_successor() {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the predecessor has ended and its writes can be read.
__device__ __forceinline__ void await_predecessor() {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings memory to the L2 cache, where a read of it will be faster; what it holds does not matter, so it
// may be done before the wait.
__device__ __forceinline__ void prefetch_line(const void* p) {
#if MEMRA_CUDA
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}
