// Norm, the two products of the feed-forward block, and its activation: silu(gate) * up.
#include "common/product.cuh"

constexpr int OUTS = 8;

// grid (ceil(n_ff / 8), ceil(n_rows / group)); shared f32 [2, group, n_slices, 8], [group, n_blocks].
//   w_gate, w_up  tiles of [n_ff, 32 * n_blocks], each in its own format
//   h             f32 [n_rows, 32 * n_blocks]
//   gain          f32 [32 * n_blocks] of the norm
//   out           f32 [n_rows, n_ff]
template <class Gate, class Up>
__global__ void __launch_bounds__(288)
    gate_up_rows(const uint8_t* __restrict__ w_gate, const uint8_t* __restrict__ w_up,
                 const float* h, const float* __restrict__ gain, float* out, int32_t n_rows,
                 int32_t group, int32_t n_ff, int32_t n_blocks, int32_t slice_blocks,
                 int32_t n_slices, float eps) {
    DYN_SMEM(float, gate_parts);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    const int first_out = blockIdx.x * OUTS;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const float* x = h + size_t(first_row) * n_blocks * TILE_COLS;
    float* up_parts = gate_parts + size_t(rows) * cut.n_slices * OUTS;
    float* squares = up_parts + size_t(rows) * cut.n_slices * OUTS;
    admit_successor();
    Product<OUTS, true, Gate, Up> product(w_gate, w_up, first_out, cut, gain);
    product.run(x, rows, gate_parts, up_parts, squares, [] {});
    __syncthreads();
    fold_rows<OUTS>(gate_parts, squares, cut, 2 * rows, rows);  // those of up lie behind them
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * OUTS; i += blockDim.x) {
        const int r = i / OUTS;
        const int column = first_out + i % OUTS;
        if (column < n_ff) {
            const float scale = row_scale(squares, cut, r, eps);
            const float g = row_sum<OUTS>(gate_parts, cut, r, i % OUTS) * scale;
            const float u = row_sum<OUTS>(up_parts, cut, r, i % OUTS) * scale;
            out[size_t(first_row + r) * n_ff + column] = g / (1.0f + expf(-g)) * u;
        }
    }
}
