// Norm, the two products of the feed-forward block, and its activation: silu(gate) * up.
#include "common/product.cuh"

constexpr int HALF = 16;  // outputs of each product in a block
constexpr int OUTS = 2 * HALF;

// Where the block's output i of the gate stands among all; 8 further on stands that of up.
__device__ __forceinline__ int column_at(int i) { return i / 8 * 16 + i % 8; }

// grid (ceil(n_ff / 16), ceil(n_rows / group)); shared f32 [group, n_slices, 40], [group, n_slices].
//   w_gate, w_up  tiles of [n_ff, 32 * n_blocks], each in its own format
//   h             f32 [n_rows, 32 * n_blocks]
//   gain          f32 [32 * n_blocks] of the norm
//   out           f32 [n_rows, n_ff]
template <class Gate, class Up>
__global__ void __launch_bounds__(MOST_THREADS<576>)
    gate_up_rows(const uint8_t* __restrict__ w_gate, const uint8_t* __restrict__ w_up,
                 const float* h, const float* __restrict__ gain, float* out, int32_t n_rows,
                 int32_t group, int32_t n_ff, int32_t n_blocks, int32_t slice_blocks,
                 int32_t n_slices, float share, float eps) {
    DYN_SMEM(float, parts);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    const int first_out = blockIdx.x * HALF;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const float* x = h + size_t(first_row) * n_blocks * TILE_COLS;
    float* squares = parts + size_t(rows) * n_slices * PITCH<OUTS>;
    admit_successor();

    Product<OUTS, false, true, Weights<Gate, Up>> product(
        of_pair<Gate, Up>(w_gate, w_up, first_out, n_blocks), cut, gain, threadIdx.x, blockDim.x);
    product.run(x, rows, parts, squares, [] {});
    __syncthreads();
    typedef Sums<OUTS, 4, 5> Adders;
    const Adders adders = {n_slices};
#pragma unroll 1
    for (unsigned number = threadIdx.x; number < Adders::numbers(rows * HALF); number += blockDim.x) {
        const unsigned at = min(Adders::sum_at(number), unsigned(rows * HALF - 1));
        const int r = at / HALF, column = first_out + at % HALF;
        const float scale = adders.scale(squares, r, share, eps);
        const float g = adders.output(parts, r, column_at(at % HALF)) * scale;
        const float u = adders.output(parts, r, column_at(at % HALF) + 8) * scale;
        const float product = __fdividef(g, 1.0f + __expf(-g)) * u;
        if (Adders::leads(number) && Adders::sum_at(number) == at && column < n_ff)
            out[size_t(first_row + r) * n_ff + column] = product;
    }
}
