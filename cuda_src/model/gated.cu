// Norm, the two products of the feed-forward block, and its activation: silu(gate) * up.
#include "common/product.cuh"

constexpr int OUTS = 8;
constexpr int ACROSS = 4;
// Whether each product has half the threads, so that a thread holds the weights of one and all blocks find
// room at once; on the host one product follows the other.
constexpr bool HALVES = MEMRA_CUDA;

template <class A, class B>
struct SameTile {
    static constexpr bool VALUE = false;
};
template <class A>
struct SameTile<A, A> {
    static constexpr bool VALUE = true;
};

template <class Tile>
__device__ __forceinline__ void multiply(const uint8_t* __restrict__ w, int first_out, Cut cut,
                                         const float* __restrict__ gain, int thread, int n_threads,
                                         const float* x, int rows, float* parts, float* squares) {
    Product<OUTS, ACROSS, true, Tile> product(w, first_out, cut, gain, thread, n_threads);
    product.run(x, rows, parts, squares, [] {});
}

// grid (ceil(n_ff / 8), ceil(n_rows / group)); shared f32 [2, group, n_slices, 8], [group, n_slices].
//   w_gate, w_up  tiles of [n_ff, 32 * n_blocks], each in its own format
//   h             f32 [n_rows, 32 * n_blocks]
//   gain          f32 [32 * n_blocks] of the norm
//   out           f32 [n_rows, n_ff]
template <class Gate, class Up>
__global__ void __launch_bounds__(320, 2)
    gate_up_rows(const uint8_t* __restrict__ w_gate, const uint8_t* __restrict__ w_up,
                 const float* h, const float* __restrict__ gain, float* out, int32_t n_rows,
                 int32_t group, int32_t n_ff, int32_t n_blocks, int32_t slice_blocks,
                 int32_t n_slices, float share, float eps) {
    DYN_SMEM(float, parts);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    const int first_out = blockIdx.x * OUTS;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const float* x = h + size_t(first_row) * n_blocks * TILE_COLS;
    const size_t n_parts = size_t(rows) * n_slices * OUTS;
    float* squares = parts + 2 * n_parts;
    admit_successor();

    const int n_threads = HALVES ? blockDim.x / 2 : blockDim.x;
    const bool second = int(threadIdx.x) >= n_threads;
    const int thread = second ? threadIdx.x - n_threads : threadIdx.x;
    if constexpr (HALVES && SameTile<Gate, Up>::VALUE) {  // one body for both
        multiply<Gate>(second ? w_up : w_gate, first_out, cut, gain, thread, n_threads, x, rows,
                       second ? parts + n_parts : parts, second ? nullptr : squares);
    } else {
        if (!second)
            multiply<Gate>(w_gate, first_out, cut, gain, thread, n_threads, x, rows, parts, squares);
        if (second || !HALVES)
            multiply<Up>(w_up, first_out, cut, gain, thread, n_threads, x, rows, parts + n_parts, nullptr);
    }
    __syncthreads();
    typedef Sums<OUTS, ACROSS, 4, 2> Adders;
    const Adders adders = {cut};
#pragma unroll 1
    for (unsigned number = threadIdx.x; number < Adders::numbers(rows * OUTS); number += blockDim.x) {
        const unsigned at = min(Adders::sum_at(number), unsigned(rows * OUTS - 1));
        const int r = at / OUTS, column = first_out + at % OUTS;
        const float scale = adders.scale(squares, r, share, eps);
        const float g = adders.output(parts, r, at % OUTS) * scale;
        const float u = adders.output(parts + n_parts, r, at % OUTS) * scale;
        const float product = g / (1.0f + expf(-g)) * u;
        if (Adders::leads(number) && Adders::sum_at(number) == at && column < n_ff)
            out[size_t(first_row + r) * n_ff + column] = product;
    }
}
