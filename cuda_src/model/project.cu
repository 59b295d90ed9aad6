// A product added to the residual stream: h += W x. The end of both halves of a Llama block.
#include "common/product.cuh"

// grid (ceil(n_out / OUTS), ceil(n_rows / group)); shared f32 [group, n_slices, OUTS + 8].
//   w  tiles of [n_out, 32 * n_blocks], see common/tiles.cuh
//   x  f32 [n_rows, 32 * n_blocks]
//   h  f32 [n_rows, n_out], updated in place
// group rows are taken at a time. BLOCKS: blocks of columns that a warp multiplies at a time, 1 or 2. OUTS: 16, or 8
// too where BLOCKS is 2.
template <class Tile, int BLOCKS, int OUTS>
__global__ void __launch_bounds__(MOST_THREADS<768>, 1)
    add_product(const uint8_t* __restrict__ w, const float* x, float* h, int32_t n_rows,
                int32_t group, int32_t n_out, int32_t n_blocks, int32_t slice_blocks, int32_t n_slices) {
    DYN_SMEM(float, shared);
    const unsigned first_out = blockIdx.x * OUTS;
    const unsigned first_row = blockIdx.y * group;
    const unsigned rows = min(unsigned(group), n_rows - first_row);
    admit_successor();
    typedef OfMatrix<Tile, BLOCKS> Matrix;
    Product<OUTS, false, Matrix> product(of_matrix<Matrix>(w, first_out, n_blocks),
                                         Cut{unsigned(n_blocks), unsigned(slice_blocks), unsigned(n_slices)},
                                         nullptr, threadIdx.x, blockDim.x);

    typedef Sums<OUTS, 4, 6> Adders;
    const SharedFloats parts(shared);
    const Adders adders(parts, parts, n_slices);
    const unsigned outputs = rows * OUTS, n = Adders::numbers(outputs);
    // Everything of a thread's first output is known before the products, and its place read early.
    unsigned number = threadIdx.x;
    SharedFloats at = parts;
    float* to;  // of the output, where the lane writes one
    unsigned writes;
    float before = 0.0f;
    const auto take = [&] {
        const unsigned sum = Adders::sum_at(number), r = min(sum, outputs - 1) / OUTS, out = sum % OUTS;
        at = adders.output_at(r, out);
        to = h + size_t(first_row + r) * n_out + first_out + out;
        writes = sum < outputs && first_out + out < n_out && Adders::leads(number);
        settle(to), settle(writes);
    };
    const auto ask = [&] {
        if (writes) before = *global_pointer(to);
    };
    take();
    product.run(x + size_t(first_row) * n_blocks * TILE_COLS, rows, parts, parts, ask);
    __syncthreads();
#pragma unroll 1
    while (number < n) {
        float sum;
        adders.template total<1>([&](int i, float* v) { v[0] = at.get(i * PITCH<OUTS>); }, &sum);
        if (writes) *global_pointer(to) = before + sum;
        number += blockDim.x;
        if (number >= n) break;
        take();
        ask();
    }
}
