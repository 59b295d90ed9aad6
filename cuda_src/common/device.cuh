// The one header that every kernel includes first. Kernels are written once and compiled twice: by
// NVRTC for a GPU (which brings no headers at all), and by a C++ compiler for the host device. What
// both worlds share is named here; the host's share of the work is in memra_host.h of its runtime.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define MEMRA_CUDA 1
#else
#define MEMRA_CUDA 0
#endif

#if MEMRA_CUDA

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;

// A dynamic shared array of T. Every use in a kernel names the same bytes, as extern __shared__ does.
#define DYN_SMEM(T, name)                                             \
  extern __shared__ __align__(128) unsigned char memra_dyn_smem[]; \
  T* const name = reinterpret_cast<T*>(memra_dyn_smem)

#else

#include "memra_host.h"

#define DYN_SMEM(T, name) T* const name = reinterpret_cast<T*>(memra::dynamic_shared())

#endif

#define KERNEL extern "C" __global__

// Marks a pointer parameter that may be null; read by the parameter parser, nothing to a compiler.
#define NULLABLE

#define INF_F32 __int_as_float(0x7f800000)
#define NAN_F32 __int_as_float(0x7fffffff)

// The same pointer, known to point to global memory: of one that was itself read from memory the compiler
// cannot tell, and generic loads are slower.
template <class T>
__device__ __forceinline__ T* global_pointer(T* p) {
#if MEMRA_CUDA
    __builtin_assume(__isGlobal(p));
#endif
    return p;
}

constexpr int WARP_LANES = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;
