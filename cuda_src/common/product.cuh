// Products of a few rows of activations with weight matrices, a few outputs per block of threads.
//
// A block of threads owns OUTS neighbouring outputs and all columns of them. The columns are cut into
// slices at fixed places. A product leaves the sum of each slice in shared memory, where any thread may
// add up those of an output behind a barrier. Every sum has one fixed order. The number of threads decides
// only who does what: no bit depends on it, nor on the number of rows.
//
// There are two bodies, of which a device takes one: a warp's tensor cores multiply 16 outputs by four rows
// at a time (common/product_tensor.cuh), or, where there are none for floats, a thread multiplies one output
// by one row (common/product_lanes.cuh). Their bits differ.
#pragma once
#include "common/dependent.cuh"
#include "common/tiles.cuh"
#include "common/weights.cuh"

// Floats from the sums of a slice to those of the next, so that four slices of an output lie in four banks.
template <int OUTS>
constexpr int PITCH = OUTS + 8;

// Most threads of a block that would like to have n: on some GPUs the code needs more registers than there are
// for so many. See also _most_threads in kernels/model.py.
#if MEMRA_CUDA && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1200)
template <int N>
constexpr int MOST_THREADS = N < 512 ? N : 512;
#else
template <int N>
constexpr int MOST_THREADS = N;
#endif

// Where the columns of a matrix are cut: a function of its shape alone.
struct Cut {
    int n_blocks;      // of 32 columns
    int slice_blocks;  // of a slice
    int n_slices;
};

#if MEMRA_TENSOR
#include "common/product_tensor.cuh"
#else
#include "common/product_lanes.cuh"
#endif

// Who adds up the slices of an output: on a GPU RUNNING lanes share a sum, so that the chain behind the
// barrier is short; on the host, where asking each other costs more, a sum is one thread's.
//   OUTS of a block; MOST slices that a running sum can have
template <int OUTS, int RUNNING, int MOST>
struct Sums {
    static constexpr unsigned SHARED = MEMRA_CUDA ? RUNNING : 1;  // lanes of a sum
    static constexpr unsigned AT_ONCE = WARP_LANES / SHARED;      // sums of a warp
    int n_slices;

    // For n sums: numbers that the threads of a block take in turn, whole warps of them; the sum of a number,
    // n or more where there is none; and whether its lane is the first of those that share it.
    __device__ __forceinline__ static unsigned numbers(unsigned n) {
        return (n * SHARED + WARP_LANES - 1) / WARP_LANES * WARP_LANES;
    }
    __device__ __forceinline__ static unsigned sum_at(unsigned number) {
        return number / WARP_LANES * AT_ONCE + number % WARP_LANES % AT_ONCE;
    }
    __device__ __forceinline__ static bool leads(unsigned number) { return number % WARP_LANES < AT_ONCE; }

    // Of all slices, APART of each other: RUNNING sums of every RUNNING-th, added in a tree. On a GPU the
    // lanes of a sum ask together, and all get it.
    template <int APART>
    __device__ __forceinline__ float total(const float* p) const {
        float s[RUNNING];
        const auto running = [&](int j) {
            const float* from = p + j * APART;
            float terms[MOST];
#pragma unroll
            for (int k = 0; k < MOST; k++)
                terms[k] = j + k * RUNNING < n_slices ? from[k * RUNNING * APART] : 0.0f;
            float sum = terms[0];
#pragma unroll
            for (int k = 1; k < MOST; k++)
                if (j + k * RUNNING < n_slices) sum = sum + terms[k];
            return sum;
        };
#if MEMRA_CUDA
        s[0] = running(threadIdx.x % WARP_LANES / AT_ONCE);
#pragma unroll
        for (int lanes = WARP_LANES / 2; lanes >= int(AT_ONCE); lanes /= 2)
            s[0] = s[0] + __shfl_xor_sync(FULL_MASK, s[0], lanes);
#else
        for (int j = 0; j < RUNNING; j++) s[j] = running(j);
        for (int n = RUNNING / 2; n >= 1; n /= 2)
            for (int j = 0; j < n; j++) s[j] = s[j] + s[j + n];
#endif
        return s[0];
    }

    // Output `out` of row r.
    __device__ __forceinline__ float output(const float* parts, int r, int out) const {
        return total<PITCH<OUTS>>(parts + (r * n_slices) * PITCH<OUTS> + out);
    }
    // What the outputs of row r are multiplied by for its norm: 1 / sqrt(mean of squares + eps); share is
    // 1 / columns.
    __device__ __forceinline__ float scale(const float* squares, int r, float share, float eps) const {
        return rsqrtf(total<1>(squares + r * n_slices) * share + eps);
    }
};
