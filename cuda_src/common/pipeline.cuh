// Asynchronous copies from global to shared memory (cp.async, from sm_80 on). On older GPUs the copy
// is an ordinary one; on the host it happens at the wait, and until then the target holds NaN bytes,
// so a missing wait shows. A wait makes the copies visible to the thread that issued them: other
// threads need a barrier after it.
#pragma once
#include "common/device.cuh"

#if MEMRA_CUDA

template <int N_BYTES>
static __device__ __forceinline__ void cp_async(void* shared_dst, const void* global_src,
                                                int n_valid = N_BYTES) {
  static_assert(N_BYTES == 4 || N_BYTES == 8 || N_BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  const unsigned dst = static_cast<unsigned>(__cvta_generic_to_shared(shared_dst));
  if constexpr (N_BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(global_src),
                 "r"(n_valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(global_src),
                 "n"(N_BYTES), "r"(n_valid)
                 : "memory");
  }
#else
  const unsigned char* from = static_cast<const unsigned char*>(global_src);
  unsigned char* to = static_cast<unsigned char*>(shared_dst);
  if (n_valid == N_BYTES) {
    if constexpr (N_BYTES == 16) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else if constexpr (N_BYTES == 8) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
    else *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
  } else {
    for (int i = 0; i < N_BYTES; ++i) to[i] = i < n_valid ? from[i] : 0;
  }
#endif
}

static __device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most N_PENDING of the newest committed groups are still in flight.
template <int N_PENDING>
static __device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N_PENDING) : "memory");
#endif
}

static __device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#else

// The line of the call travels as a default argument: a message about a copy points to its use.
template <int N_BYTES>
inline void cp_async(void* shared_dst, const void* global_src, int n_valid = N_BYTES,
                     const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(N_BYTES == 4 || N_BYTES == 8 || N_BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
  memra_copy_async(memra::context(), file, line, shared_dst, global_src, N_BYTES,
                   uint32_t(n_valid));
}

inline void cp_async_commit() { memra_copy_commit(memra::context()); }

template <int N_PENDING>
inline void cp_async_wait() {
  memra_copy_wait(memra::context(), N_PENDING);
}

inline void cp_async_wait_all() { memra_copy_wait(memra::context(), ~0u); }

#endif

// Asks for N rows of SLICE bytes, in pieces as large as their addresses allow; `from(r)` is where row r
// begins. All threads take part; thread: threadIdx.x.
template <int N, int SLICE, int PITCH, class From>
static __device__ __forceinline__ void copy_rows(uint8_t* to, uint32_t thread, From from) {
  constexpr int PIECE = SLICE % 16 == 0 ? 16 : SLICE % 8 == 0 ? 8 : 4, PIECES = SLICE / PIECE;
  static_assert(SLICE % PIECE == 0 && PITCH % PIECE == 0, "pieces are whole");
#pragma unroll 1
  for (uint32_t i = thread; i < N * PIECES; i += blockDim.x) {
    const int r = int(i / PIECES), x = int(i % PIECES) * PIECE;
    cp_async<PIECE>(to + r * PITCH + x, from(r) + x);
  }
}
