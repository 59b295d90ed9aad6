// Norm, the two products of the feed-forward block, and its activation: silu(gate) * up.
#include "common/product.cuh"

constexpr int HALF = 16;  // outputs of each product in a block
constexpr int OUTS = 2 * HALF;

// Where the block's output i of the gate stands among all; 8 further on stands that of up.
__device__ __forceinline__ unsigned column_at(unsigned i) { return i / 8 * 16 + i % 8; }

// grid (ceil(n_ff / 16), ceil(n_rows / group)); shared f32 [group, n_slices, 40], [group, n_slices].
//   w_gate, w_up  tiles of [n_ff, 32 * n_blocks], each in its own format
//   h             f32 [n_rows, 32 * n_blocks]
//   gain          f32 [32 * n_blocks] of the norm
//   out           f32 [n_rows, n_ff]
template <class Gate, class Up>
__global__ void __launch_bounds__(MOST_THREADS<Gate::Quarter::SHORT == Up::Quarter::SHORT ? 576 : 512>)
    gate_up_rows(const uint8_t* __restrict__ w_gate, const uint8_t* __restrict__ w_up,
                 const float* h, const float* __restrict__ gain, float* out, int32_t n_rows,
                 int32_t group, int32_t n_ff, int32_t n_blocks, int32_t slice_blocks,
                 int32_t n_slices, float share, float eps) {
    DYN_SMEM(float, shared);
    const Cut cut = {unsigned(n_blocks), unsigned(slice_blocks), unsigned(n_slices)};
    const unsigned first_out = blockIdx.x * HALF;
    const unsigned first_row = blockIdx.y * group;
    const unsigned rows = min(unsigned(group), n_rows - first_row);
    admit_successor();
    Product<OUTS, true, OfPair<Gate, Up>> product(
        of_pair<Gate, Up>(w_gate, w_up, first_out, n_blocks), cut, gain, threadIdx.x, blockDim.x);

    typedef Sums<OUTS, 4, 5> Adders;
    const SharedFloats parts(shared), squares(shared + rows * n_slices * PITCH<OUTS>);
    const Adders adders(parts, squares, n_slices);
    const unsigned outputs = rows * HALF, n = Adders::numbers(outputs);
    // Everything of a thread's first output is known before the products.
    unsigned number = threadIdx.x;
    SharedFloats at = parts, squares_at = squares;
    float* to;  // of the output, where the lane writes one
    unsigned writes;
    const auto take = [&] {
        const unsigned sum = Adders::sum_at(number), r = min(sum, outputs - 1) / HALF, i = sum % HALF;
        at = adders.output_at(r, column_at(i)), squares_at = adders.squares_at(r);
        to = out + size_t(first_row + r) * n_ff + first_out + i;
        writes = sum < outputs && first_out + i < n_ff && Adders::leads(number);
        settle(to), settle(writes);
    };
    take();
    product.run(h + size_t(first_row) * n_blocks * TILE_COLS, rows, parts, squares, [] {});
    __syncthreads();
#pragma unroll 1
    while (number < n) {
        float sums[3];
        adders.template total<3>(
            [&](int i, float* v) {
                v[0] = at.get(i * PITCH<OUTS>), v[1] = at.get(i * PITCH<OUTS> + 8), v[2] = squares_at.get(i);
            },
            sums);
        const float scale = norm_scale(sums[2], share, eps), g = sums[0] * scale, u = sums[1] * scale;
        const float product = __fdividef(g, 1.0f + __expf(-g)) * u;
        if (writes) *global_pointer(to) = product;
        number += blockDim.x;
        if (number >= n) break;
        take();
    }
}
