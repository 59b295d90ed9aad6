// The host's half of common/device.cuh: CUDA's vocabulary for a C++ compiler. Nothing of the
// standard library is included: kernels then build fast, and names that newer C libraries claim
// (rsqrtf, __expf, ...) stay free. Arithmetic must round as on a GPU without contraction: plain
// operators here, fused only where the source says fmaf.
#pragma once
#include "memra_abi.h"

static memra::Context* memra_context;  // this copy of the file belongs to one worker

namespace memra {

#if defined(MEMRA_CHECK)
// Reads of the context, and atomics, go through assembly so that the hooks never see them.
template <class T>
__attribute__((always_inline)) inline T raw_load(const T* at) {
  T value;
#if defined(__x86_64__)
  if constexpr (sizeof(T) == 8) __asm__("movq %1, %0" : "=r"(value) : "m"(*at));
  else if constexpr (sizeof(T) == 4) __asm__("movl %1, %0" : "=r"(value) : "m"(*at));
  else __asm__("movw %1, %0" : "=r"(value) : "m"(*at));
#else
  if constexpr (sizeof(T) == 8) __asm__("ldr %0, %1" : "=r"(value) : "m"(*at));
  else if constexpr (sizeof(T) == 4) __asm__("ldr %w0, %1" : "=r"(value) : "m"(*at));
  else __asm__("ldrh %w0, %1" : "=r"(value) : "m"(*at));
#endif
  return value;
}
template <class T>
__attribute__((always_inline)) inline void raw_store(T* at, T value) {
#if defined(__x86_64__)
  if constexpr (sizeof(T) == 8) __asm__("movq %1, %0" : "=m"(*at) : "r"(value));
  else if constexpr (sizeof(T) == 4) __asm__("movl %1, %0" : "=m"(*at) : "r"(value));
  else __asm__("movw %1, %0" : "=m"(*at) : "r"(value));
#else
  if constexpr (sizeof(T) == 8) __asm__("str %1, %0" : "=m"(*at) : "r"(value));
  else if constexpr (sizeof(T) == 4) __asm__("str %w1, %0" : "=m"(*at) : "r"(value));
  else __asm__("strh %w1, %0" : "=m"(*at) : "r"(value));
#endif
}
#else
template <class T>
__attribute__((always_inline)) inline T raw_load(const T* at) { return *at; }
#endif

__attribute__((always_inline)) inline Context* context() { return raw_load(&memra_context); }
__attribute__((always_inline)) inline uint8_t* dynamic_shared() {
  return raw_load(&context()->shared);
}

// What __launch_bounds__ says of a kernel; see launch_bounds in translate.py.
template <class... T>
constexpr uint32_t launch_bound(uint32_t max_threads, T...) { return max_threads; }

}  // namespace memra

#define MEMRA_SITE                                                               \
  ([]() __attribute__((always_inline)) {                                         \
    static const memra::Site memra_site = {__FILE__, __LINE__, __COUNTER__};     \
    return &memra_site;                                                          \
  }())

// ---- qualifiers ----------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __inline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static
#define __grid_constant__
// One copy of the file is loaded per worker, so a plain static is private to the block that runs.
// `used` keeps the compiler from reasoning about its contents: the runtime poisons them.
#define __shared__ static __attribute__((used))

#include "memra_vector.h"
#include "memra_math.h"
#include "memra_sync.h"
