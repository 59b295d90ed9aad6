// Splits the product of the joined q, k and v weights, and rotates q and k.
#include "common/tiles.cuh"

// grid (ceil((q_dim + 2 * kv_dim) / 2 / block), n_rows): a thread owns two neighbouring columns,
// which are one rotation pair (the pairing of Llama weights as GGUF stores them).
//   parts   f32 [n_parts, n_rows, q_dim + 2 * kv_dim]
//   angles  f32 [n_positions, n_rot / 2, 2], (cos, sin), made on the host in float64
//   pos_d   position of row 0; row r stands at pos_d + r
//   q       f32 [n_rows, q_dim]     k, v   f32 [n_rows, kv_dim]
// Past the table the rotated values are NaN: nothing is read out of bounds, nothing looks right.
KERNEL void split_rope(const float* __restrict__ parts, int32_t n_parts,
                       const float* __restrict__ angles, const int32_t* __restrict__ pos_d,
                       float* __restrict__ q, float* __restrict__ k, float* __restrict__ v,
                       int32_t n_rows, int32_t q_dim, int32_t kv_dim, int32_t head_dim,
                       int32_t n_rot, int32_t n_positions) {
    const int width = q_dim + 2 * kv_dim;
    const int col = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    const int row = blockIdx.y;
    if (col < width) {
        const size_t at = size_t(row) * width + col;
        float a = sum_parts(parts, n_parts, size_t(n_rows) * width, at);
        float b = sum_parts(parts, n_parts, size_t(n_rows) * width, at + 1);
        const int d = col % head_dim;  // q_dim and kv_dim are whole heads
        if (col < q_dim + kv_dim && d < n_rot) {
            const int position = pos_d[0] + row;
            float cosine = NAN_F32, sine = NAN_F32;
            if (position >= 0 && position < n_positions) {
                const float* pair = angles + size_t(position) * n_rot + d;
                cosine = pair[0];
                sine = pair[1];
            }
            const float rotated = a * cosine - b * sine;
            b = a * sine + b * cosine;
            a = rotated;
        }
        float* out = col < q_dim ? q + size_t(row) * q_dim + col
                     : col < q_dim + kv_dim ? k + size_t(row) * kv_dim + (col - q_dim)
                                            : v + size_t(row) * kv_dim + (col - q_dim - kv_dim);
        out[0] = a;
        out[1] = b;
    }
}
