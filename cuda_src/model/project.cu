// A product added to the residual stream: h += W x. The end of both halves of a Llama block.
#include "common/product.cuh"

constexpr int OUTS = 16;  // many small blocks of threads

// grid (ceil(n_out / 16), ceil(n_rows / group)); shared f32 [group, n_slices, 24].
//   w  tiles of [n_out, 32 * n_blocks], see common/tiles.cuh
//   x  f32 [n_rows, 32 * n_blocks]
//   h  f32 [n_rows, n_out], updated in place
// group rows are taken at a time.
template <class Tile>
__global__ void __launch_bounds__(MOST_THREADS<768>)
    add_product(const uint8_t* __restrict__ w, const float* x, float* h, int32_t n_rows,
                int32_t group, int32_t n_out, int32_t n_blocks, int32_t slice_blocks, int32_t n_slices) {
    DYN_SMEM(float, parts);
    const int first_out = blockIdx.x * OUTS;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    admit_successor();
    Product<OUTS, Tile::Quarter::SHORT, false, Weights<Tile, Tile>> product(
        of_matrix<Tile>(w, first_out, n_blocks), cut, nullptr, threadIdx.x, blockDim.x);

    typedef Sums<OUTS, 4, 6> Adders;
    const unsigned outputs = rows * OUTS;
    float* to = nullptr;  // of the output of a number, where its lane writes one
    float before = 0.0f;
    const auto take = [&](unsigned number) {
        const unsigned sum = Adders::sum_at(number);
        const int out = first_out + sum % OUTS;
        to = h + size_t(first_row + sum / OUTS) * n_out + out;
        if (sum >= outputs || out >= n_out || !Adders::leads(number)) to = nullptr;
        if (to != nullptr) before = *to;
    };
    // What is added to is asked for early.
    product.run(x + size_t(first_row) * n_blocks * TILE_COLS, rows, parts, nullptr,
                [&] { take(threadIdx.x); });
    __syncthreads();
#pragma unroll 1
    for (unsigned number = threadIdx.x; number < Adders::numbers(outputs); number += blockDim.x) {
        if (number >= blockDim.x) take(number);
        const unsigned at = min(Adders::sum_at(number), outputs - 1);
        const float sum = Adders{n_slices}.output(parts, at / OUTS, at % OUTS);
        if (to != nullptr) *to = before + sum;
    }
}
