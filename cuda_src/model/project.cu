// A product added to the residual stream: h += W x. The end of both halves of a Llama block.
#include "common/product.cuh"

constexpr int OUTS = 8;  // 128 bytes of each piece of a tile; many small blocks of threads

// grid (ceil(n_out / 8), ceil(n_rows / group)); shared f32 [group, n_slices, 8].
//   w  tiles of [n_out, 32 * n_blocks], see common/tiles.cuh
//   x  f32 [n_rows, 32 * n_blocks]
//   h  f32 [n_rows, n_out], updated in place
// group rows are taken at a time.
template <class Tile>
__global__ void __launch_bounds__(512)
    add_product(const uint8_t* __restrict__ w, const float* x, float* h, int32_t n_rows,
                int32_t group, int32_t n_out, int32_t n_blocks, int32_t slice_blocks, int32_t n_slices) {
    DYN_SMEM(float, parts);
    const int first_out = blockIdx.x * OUTS;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    admit_successor();
    Product<OUTS, false, Tile> product(w, nullptr, first_out, cut, nullptr);

    // What is added to is asked for early; an output of a row is one thread's.
    const int outputs = rows * OUTS;
    const int mine = threadIdx.x;
    const int out = first_out + mine % OUTS;
    float* to = h + size_t(first_row + mine / OUTS) * n_out + out;
    float before = 0.0f;
    product.run(x + size_t(first_row) * n_blocks * TILE_COLS, rows, parts, nullptr, nullptr,
                [&] { if (mine < outputs && out < n_out) before = *to; });
    __syncthreads();
    fold_rows<OUTS>(parts, nullptr, cut, rows, rows);
    __syncthreads();
    if (mine < outputs && out < n_out) *to = before + row_sum<OUTS>(parts, cut, mine / OUTS, mine % OUTS);
#pragma unroll 1
    for (int i = mine + blockDim.x; i < outputs; i += blockDim.x) {
        const int other = first_out + i % OUTS;
        if (other < n_out) {
            float* at = h + size_t(first_row + i / OUTS) * n_out + other;
            *at = *at + row_sum<OUTS>(parts, cut, i / OUTS, i % OUTS);
        }
    }
}
