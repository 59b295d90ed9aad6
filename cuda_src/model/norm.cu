// Residual addition and RMS normalisation in one pass over a row.
#include "common/tiles.cuh"

constexpr int NORM_THREADS = 256;
constexpr int NORM_GROUPS = 16;

// One block of 256 threads per row. With parts: h += sum of the parts first.
//   h       f32 [n_rows, width], updated in place
//   parts   f32 [n_parts, n_rows, width] or null
//   weight  f32 [width]
//   out     f32 [n_rows, width] = h / sqrt(mean(h^2) + eps) * weight
KERNEL void add_norm(float* h, const float* NULLABLE parts, int32_t n_parts,
                     const float* __restrict__ weight, float* __restrict__ out, int32_t n_rows,
                     int32_t width, float eps) {
    __shared__ float squares[NORM_THREADS];
    __shared__ float groups[NORM_GROUPS];
    const int thread = threadIdx.x;
    const size_t row = size_t(blockIdx.x) * width;
    float sum = 0.0f;
    for (int c = thread; c < width; c += NORM_THREADS) {
        float value = h[row + c];
        if (parts != nullptr) {
            value = value + sum_parts(parts, n_parts, size_t(n_rows) * width, row + c);
            h[row + c] = value;
        }
        sum = fmaf(value, value, sum);
    }
    squares[thread] = sum;
    __syncthreads();
    if (thread < NORM_GROUPS) {
        float group = 0.0f;
        for (int i = 0; i < NORM_THREADS / NORM_GROUPS; i++)
            group = group + squares[thread + NORM_GROUPS * i];
        groups[thread] = group;
    }
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < NORM_GROUPS; i++) total = total + groups[i];
    const float scale = 1.0f / sqrtf(total / float(width) + eps);
    for (int c = thread; c < width; c += NORM_THREADS) out[row + c] = h[row + c] * scale * weight[c];
}
