// The gated activation of the feed-forward block: silu(gate) * up.
#include "common/tiles.cuh"

// grid (ceil(n_ff / block), n_rows).
//   parts  f32 [n_parts, n_rows, 2 * n_ff], gate columns first, then up
//   out    f32 [n_rows, n_ff]
KERNEL void swiglu(const float* __restrict__ parts, int32_t n_parts, float* __restrict__ out,
                   int32_t n_rows, int32_t n_ff) {
    const int col = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y;
    if (col < n_ff) {
        const size_t stride = size_t(n_rows) * 2 * n_ff;
        const size_t at = size_t(row) * 2 * n_ff + col;
        const float gate = sum_parts(parts, n_parts, stride, at);
        const float up = sum_parts(parts, n_parts, stride, at + n_ff);
        out[size_t(row) * n_ff + col] = gate / (1.0f + expf(-gate)) * up;
    }
}
