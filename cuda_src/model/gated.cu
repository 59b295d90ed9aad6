// Norm, the two products of the feed-forward block, and its activation: silu(gate) * up.
#include "common/product.cuh"

constexpr int OUTS = 8;

// One half of the threads multiplies with the gate, the other with up.
template <class Tile>
__device__ __forceinline__ void run_half(const uint8_t* __restrict__ w, const float* x,
                                         const float* __restrict__ gain, float* parts,
                                         float* squares, int first_out, int rows, Cut cut,
                                         int thread, int n_threads) {
    Product<Tile, OUTS> product(w, first_out, cut, gain, thread, n_threads);
    await_predecessor();
    product.run(x, rows, parts, squares);
}

template <class A, class B>
struct SameTile {
    static constexpr bool value = false;
};
template <class A>
struct SameTile<A, A> {
    static constexpr bool value = true;
};

// grid (ceil(n_ff / 8), ceil(n_rows / group)); shared f32 [2, group, n_slices, 8], then
// [group, n_slices].
//   w_gate, w_up  tiles of [n_ff, 32 * n_blocks], each in its own format
//   h             f32 [n_rows, 32 * n_blocks]
//   gain          f32 [32 * n_blocks] of the norm
//   out           f32 [n_rows, n_ff]
template <class Gate, class Up>
__global__ void __launch_bounds__(FEW_THREADS)
    gate_up_rows(const uint8_t* __restrict__ w_gate, const uint8_t* __restrict__ w_up,
                 const float* h, const float* __restrict__ gain, float* out, int32_t n_rows,
                 int32_t group, int32_t n_ff, int32_t n_blocks, int32_t slice_blocks, int32_t n_slices, float eps) {
    DYN_SMEM(float, gate_parts);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    const int first_out = blockIdx.x * OUTS;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const float* x = h + size_t(first_row) * n_blocks * TILE_COLS;
    float* up_parts = gate_parts + size_t(rows) * cut.n_slices * OUTS;
    float* squares = up_parts + size_t(rows) * cut.n_slices * OUTS;
    const int half = blockDim.x / 2;
    const bool is_up = int(threadIdx.x) >= half;
    admit_successor();
    if constexpr (SameTile<Gate, Up>::value) {  // one copy of the code
        run_half<Gate>(is_up ? w_up : w_gate, x, gain, is_up ? up_parts : gate_parts,
                       is_up ? nullptr : squares, first_out, rows, cut, int(threadIdx.x) - (is_up ? half : 0), half);
    } else if (is_up) {
        run_half<Up>(w_up, x, gain, up_parts, nullptr, first_out, rows, cut, threadIdx.x - half,
                     half);
    } else {
        run_half<Gate>(w_gate, x, gain, gate_parts, squares, first_out, rows, cut, threadIdx.x,
                       half);
    }
    __syncthreads();
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
