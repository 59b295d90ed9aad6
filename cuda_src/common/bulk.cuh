// Bulk copies from global to shared memory (cp.async.bulk, sm_90): one thread asks for many bytes,
// and a barrier of common/mbar.cuh counts them when they are there.
//
// A tile copy brings a box of a matrix that a TensorMap describes, a kernel parameter made by the
// driver: rows of the box lie close together in shared memory, what lies outside the matrix is zero.
#pragma once
#include "common/mbar.cuh"

struct alignas(64) TensorMap {
    uint64_t words[16];
};

// Addresses and n_bytes are multiples of 16; a tile's shared address of 128. `column` counts 8 bytes.
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bulk_copy(void* shared_dst, const void* global_src, int n_bytes,
                                          uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared_dst)),
        "l"(global_src), "r"(n_bytes), "r"(shared_address(bar))
        : "memory");
}
__device__ __forceinline__ void tile_copy(void* shared_dst, const TensorMap& map, int column, int row,
                                          uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(shared_address(shared_dst)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(bar))
        : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
#else
__device__ __forceinline__ void prefetch_map(const TensorMap&) { __trap(); }
__device__ __forceinline__ void tile_copy(void*, const TensorMap&, int, int, uint64_t*) { __trap(); }
__device__ __forceinline__ void bulk_copy(void*, const void*, int, uint64_t*) { __trap(); }
#endif
