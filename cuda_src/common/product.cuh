// Products of a few rows of activations with weight matrices, a few outputs per block of threads.
//
// A block of threads owns OUTS neighbouring outputs and all columns of them. The columns are cut into
// slices at fixed places. A product leaves the sum of each slice in shared memory, where any thread may
// add up those of an output behind a barrier. Every sum has one fixed order. The number of threads decides
// only who does what: no bit depends on it, nor on the number of rows.
//
// There are two bodies, of which a device takes one: a warp's tensor cores multiply 16 outputs by four rows at a
// time, or eight by two (common/product_tensor.cuh), or, where there are none for floats, a thread multiplies one
// output by one row (common/product_lanes.cuh). Their bits differ.
#pragma once
#include "common/dependent.cuh"
#include "common/shared_floats.cuh"
#include "common/tiles.cuh"
#include "common/weights.cuh"

// Floats from the sums of a slice to those of the next, so that four slices of an output lie in four banks.
template <int OUTS>
constexpr int PITCH = OUTS + 8;

// Most threads of a block that would like to have n: on some GPUs the code needs more registers than there are
// for so many. A launch takes what the kernel allows.
#if MEMRA_CUDA && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1000)
template <int N>
constexpr int MOST_THREADS = N < 512 ? N : 512;
#else
template <int N>
constexpr int MOST_THREADS = N;
#endif

// Where the columns of a matrix are cut: a function of its shape alone.
struct Cut {
    unsigned n_blocks;      // of 32 columns
    unsigned slice_blocks;  // of a slice
    unsigned n_slices;
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
class Sums {
  public:
    // parts, squares: where a product left them
    __device__ __forceinline__ Sums(SharedFloats parts, SharedFloats squares, int n_slices)
        : parts_(parts), squares_(squares), n_slices_(n_slices), n_left_(n_slices - first()) {
        settle(n_left_);
    }

    // For n sums: numbers that the threads of a block take in turn, whole warps of them; the sum of a number,
    // n or more where there is none; and whether its lane is the first of those that share it.
    __device__ __forceinline__ static unsigned numbers(unsigned n) {
        return (n * SHARED + WARP_LANES - 1) / WARP_LANES * WARP_LANES;
    }
    __device__ __forceinline__ static unsigned sum_at(unsigned number) {
        return number / WARP_LANES * AT_ONCE + number % WARP_LANES % AT_ONCE;
    }
    __device__ __forceinline__ static bool leads(unsigned number) { return number % WARP_LANES < AT_ONCE; }

    // Where a lane begins to add up the slices of output `out` of row r, and of its squares.
    __device__ __forceinline__ SharedFloats output_at(unsigned r, unsigned out) const {
        return parts_.from((r * n_slices_ + first()) * PITCH<OUTS> + out);
    }
    __device__ __forceinline__ SharedFloats squares_at(unsigned r) const {
        return squares_.from(r * n_slices_ + first());
    }
    // N sums over all slices: RUNNING running sums, added in a tree. On a GPU the lanes of a sum ask together, and
    // all get it. load(i, v): the N terms of slice i behind the lane's first one.
    template <int N, class Load>
    __device__ __forceinline__ void total(const Load& load, float* sums) const {
#if MEMRA_CUDA
        running<N>(load, 0, n_left_, sums);
#pragma unroll
        for (int lanes = WARP_LANES / 2; lanes >= int(AT_ONCE); lanes /= 2)
#pragma unroll
            for (int i = 0; i < N; i++) sums[i] = sums[i] + __shfl_xor_sync(FULL_MASK, sums[i], lanes);
#else
        float s[RUNNING][N];
        for (int j = 0; j < RUNNING; j++) running<N>(load, j, n_left_ - j, s[j]);
        for (int n = RUNNING / 2; n >= 1; n /= 2)
            for (int j = 0; j < n; j++)
                for (int i = 0; i < N; i++) s[j][i] = s[j][i] + s[j + n][i];
        for (int i = 0; i < N; i++) sums[i] = s[0][i];
#endif
    }

  private:
    static constexpr unsigned SHARED = MEMRA_CUDA ? RUNNING : 1;  // lanes of a sum
    static constexpr unsigned AT_ONCE = WARP_LANES / SHARED;      // sums of a warp

    // The first slice that a lane adds up.
    __device__ __forceinline__ static int first() {
        return MEMRA_CUDA ? threadIdx.x % WARP_LANES / AT_ONCE : 0;
    }
    // Every RUNNING-th of n slices from the first on; of those that are not there, 0.
    template <int N, class Load>
    __device__ __forceinline__ static void running(const Load& load, int first, int n, float* sums) {
        float terms[MOST][N];
#pragma unroll
        for (int k = 0; k < MOST; k++) {
#pragma unroll
            for (int i = 0; i < N; i++) terms[k][i] = 0.0f;
            if (k * RUNNING < n) load(first + k * RUNNING, terms[k]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            sums[i] = terms[0][i];
#pragma unroll
            for (int k = 1; k < MOST; k++) sums[i] = sums[i] + terms[k][i];
        }
    }

    SharedFloats parts_, squares_;
    int n_slices_, n_left_;  // slices; from the lane's first one on
};

// What the outputs of a row are multiplied by for its norm: 1 / sqrt(mean of squares + eps); share is 1 / columns.
__device__ __forceinline__ float norm_scale(float square, float share, float eps) {
    return rsqrtf(square * share + eps);
}
