// Norm, the two products of the feed-forward block, and its activation: silu(gate) * up.
#include "common/product.cuh"

constexpr int OUTS = 8;
constexpr int ACROSS = 4;
// Whether a thread has an output of both products, so that it reads activations once for both; on the host one
// product follows the other.
constexpr bool PAIRED = MEMRA_CUDA;

// grid (ceil(n_ff / 8), ceil(n_rows / group)); shared f32 [2, group, n_slices, 8], [group, n_slices].
//   w_gate, w_up  tiles of [n_ff, 32 * n_blocks], each in its own format
//   h             f32 [n_rows, 32 * n_blocks]
//   gain          f32 [32 * n_blocks] of the norm
//   out           f32 [n_rows, n_ff]
template <class Gate, class Up>
__global__ void __maxnreg__(Gate::BYTES > 2048 || Up::BYTES > 2048 ? 128 : 120 + MORE_REGISTERS)
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

    if constexpr (PAIRED) {
        Product<OUTS, ACROSS, true, Gate, Up> product({w_gate, first_out}, {w_up, first_out}, cut, gain,
                                                      threadIdx.x, blockDim.x);
        product.run(x, rows, parts, parts + n_parts, squares, [] {});
    } else {
        Product<OUTS, ACROSS, true, Gate> gate({w_gate, first_out}, cut, gain, threadIdx.x, blockDim.x);
        gate.run(x, rows, parts, nullptr, squares, [] {});
        Product<OUTS, ACROSS, true, Up> up({w_up, first_out}, cut, gain, threadIdx.x, blockDim.x);
        up.run(x, rows, parts + n_parts, nullptr, nullptr, [] {});
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
