// Rows of a latent plane: RMS normalisation of the latent part, rotation of the positional part, and
// the write to the plane, in one launch. Queries are rotated by the same rule.
#include "common/block32.cuh"

constexpr int APPEND_THREADS = 128;
constexpr int APPEND_GROUPS = 8;

// Pair (2j, 2j + 1) of a row at `position`. Past the table everything is NaN: nothing is read out of
// bounds, and nothing looks right.
__device__ __forceinline__ float2 rotated(float a, float b, const float* angles, int64_t position,
                                          int32_t n_positions, int32_t d_rope, int j) {
    float cosine = NAN_F32, sine = NAN_F32;
    if (position >= 0 && position < n_positions) {
        const float* pair = angles + position * d_rope + 2 * j;
        cosine = pair[0];
        sine = pair[1];
    }
    return make_float2(a * cosine - b * sine, a * sine + b * cosine);
}

// Grid (n_rows), 128 threads, 4 * width bytes of dynamic shared memory.
//   raw       f32 [n_rows, width], row = [latent: kv_rank | positional: width - kv_rank]
//   weight    f32 [kv_rank] or null: no normalisation
//   angles    f32 [n_positions, width - kv_rank] of (cos, sin) pairs, or null: no rotation
//   plane     u8 [capacity, row bytes]; row r goes to row len + r. F32 takes any width, other
//             formats multiples of 32.
// The counter is not moved. Rows past the capacity are dropped.
template <int F>
__global__ void __launch_bounds__(APPEND_THREADS)
    latent_append(const float* __restrict__ raw, const float* NULLABLE weight,
                  const float* NULLABLE angles, uint8_t* __restrict__ plane, int32_t width,
                  int32_t kv_rank, int32_t n_positions, float eps, int32_t capacity,
                  const int32_t* __restrict__ len_d) {
    DYN_SMEM(float, row);
    __shared__ float squares[APPEND_THREADS];
    __shared__ float groups[APPEND_GROUPS];
    const int thread = threadIdx.x;
    const int64_t slot = int64_t(len_d[0]) + blockIdx.x;
    const float* from = raw + size_t(blockIdx.x) * width;
    float sum = 0.0f;
    for (int c = thread; c < kv_rank; c += APPEND_THREADS) {
        const float value = from[c];
        row[c] = value;
        sum = fmaf(value, value, sum);
    }
    const int d_rope = width - kv_rank;
    if (angles != nullptr) {
        for (int j = thread; j < d_rope / 2; j += APPEND_THREADS) {
            const float2 pair = rotated(from[kv_rank + 2 * j], from[kv_rank + 2 * j + 1], angles,
                                        slot, n_positions, d_rope, j);
            row[kv_rank + 2 * j] = pair.x;
            row[kv_rank + 2 * j + 1] = pair.y;
        }
    } else {
        for (int c = kv_rank + thread; c < width; c += APPEND_THREADS) row[c] = from[c];
    }
    if (weight != nullptr) {
        squares[thread] = sum;
        __syncthreads();
        if (thread < APPEND_GROUPS) {
            float group = 0.0f;
            for (int i = 0; i < APPEND_THREADS / APPEND_GROUPS; i++)
                group = group + squares[thread + APPEND_GROUPS * i];
            groups[thread] = group;
        }
        __syncthreads();
        float total = 0.0f;
        for (int i = 0; i < APPEND_GROUPS; i++) total = total + groups[i];
        const float scale = 1.0f / sqrtf(total / float(kv_rank) + eps);
        for (int c = thread; c < kv_rank; c += APPEND_THREADS) row[c] = row[c] * scale * weight[c];
    }
    __syncthreads();
    if (slot >= 0 && slot < capacity) {
        if constexpr (F == F32) {
            float* to = reinterpret_cast<float*>(plane) + size_t(slot) * width;
            for (int c = thread; c < width; c += APPEND_THREADS) to[c] = row[c];
        } else {
            const int n_blocks = width / BLOCK_ELEMENTS;
            uint8_t* to = plane + size_t(slot) * n_blocks * block_bytes<F>();
            for (int unit = thread; unit < n_blocks * BLOCK_QUARTERS; unit += APPEND_THREADS) {
                const int block = unit / BLOCK_QUARTERS;
                const int quarter = unit % BLOCK_QUARTERS;
                Packed<F> packed;
                pack_quarter<F>(row + block * BLOCK_ELEMENTS, quarter, &packed);
                store_quarter<F>(packed, to + block * block_bytes<F>(), quarter);
            }
        }
    }
}

// Rotates the positional part of queries and puts it behind their absorbed part.
// Grid (ceil(n_heads * d_rope / 2 / 128), n_rows), 128 threads.
//   q      f32 [n_rows, n_heads, d_q], positional part from element d_q - d_rope on
//   out    f32 [n_rows, n_heads, width], written from element width - d_rope on
//   angles as above, of d_rope; null: copied as it is
// Row r stands at position len + r - counted.
KERNEL void __launch_bounds__(APPEND_THREADS)
    latent_rotate(const float* __restrict__ q, const float* NULLABLE angles,
                  float* __restrict__ out, int32_t n_heads, int32_t d_q, int32_t width,
                  int32_t d_rope, int32_t n_positions, int32_t counted,
                  const int32_t* __restrict__ len_d) {
    const int unit = blockIdx.x * APPEND_THREADS + threadIdx.x;
    const int row = blockIdx.y;
    const int pairs = d_rope / 2;
    if (unit < n_heads * pairs) {
        const int head = unit / pairs;
        const int j = unit % pairs;
        const size_t query = size_t(row) * n_heads + head;
        const float* from = q + query * d_q + (d_q - d_rope) + 2 * j;
        float2 pair = make_float2(from[0], from[1]);
        if (angles != nullptr)
            pair = rotated(pair.x, pair.y, angles, int64_t(len_d[0]) + row - counted, n_positions,
                           d_rope, j);
        float* to = out + query * width + (width - d_rope) + 2 * j;
        to[0] = pair.x;
        to[1] = pair.y;
    }
}

constexpr int PROJECT_THREADS = 128;
constexpr int PROJECT_PARTS = 8;  // neighbouring threads that share an output
constexpr int PROJECT_OUTPUTS = PROJECT_THREADS / PROJECT_PARTS;

// A matrix per head: y[r, h, o] = sum over c of weight[h, o, c] * x[r, h, c]. Absorbs queries into
// the latent space (o = latent, c = nope) and takes values out of it (o = value, c = latent).
// Grid (ceil(n_out / 16), n_heads, ceil(n_rows / ROWS)), 128 threads.
//   x       f32 [n_rows, n_heads, x_stride], elements [0, n_in) of each head
//   weight  f32 [n_heads, n_out, n_in], 16-byte aligned where n_in is a multiple of 4
//   y       f32 [n_rows, n_heads, y_stride], elements [0, n_out) of each head are written
// The order of a sum depends on n_in alone.
template <int ROWS>
__global__ void __launch_bounds__(PROJECT_THREADS)
    latent_project(const float* __restrict__ x, const float* __restrict__ weight,
                   float* __restrict__ y, int32_t n_rows, int32_t n_in, int32_t n_out,
                   int32_t x_stride, int32_t y_stride) {
    __shared__ float sums[ROWS][PROJECT_OUTPUTS][PROJECT_PARTS + 1];
    const int thread = threadIdx.x;
    const int part = thread % PROJECT_PARTS;
    const int own = thread / PROJECT_PARTS;
    const int o = blockIdx.x * PROJECT_OUTPUTS + own;
    const int head = blockIdx.y;
    const int n_heads = gridDim.y;
    const int first = blockIdx.z * ROWS;
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
    if (o < n_out) {
        const float* w = weight + (size_t(head) * n_out + o) * n_in;
        const float* from = x + (size_t(first) * n_heads + head) * x_stride;
        const size_t pitch = size_t(n_heads) * x_stride;
        if (n_in % 4 == 0) {
#pragma unroll 4
            for (int c = 4 * part; c < n_in; c += 4 * PROJECT_PARTS) {
                const float4 a = *reinterpret_cast<const float4*>(w + c);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    if (first + r < n_rows) {
                        const float* b = from + r * pitch + c;
                        sum[r] = fmaf(a.x, b[0], sum[r]);
                        sum[r] = fmaf(a.y, b[1], sum[r]);
                        sum[r] = fmaf(a.z, b[2], sum[r]);
                        sum[r] = fmaf(a.w, b[3], sum[r]);
                    }
                }
            }
        } else {
            for (int c = part; c < n_in; c += PROJECT_PARTS) {
                const float a = w[c];
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    if (first + r < n_rows) sum[r] = fmaf(a, from[r * pitch + c], sum[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r][own][part] = sum[r];
    __syncthreads();
    for (int i = thread; i < ROWS * PROJECT_OUTPUTS; i += PROJECT_THREADS) {
        const int r = i / PROJECT_OUTPUTS;
        const int out = blockIdx.x * PROJECT_OUTPUTS + i % PROJECT_OUTPUTS;
        if (first + r < n_rows && out < n_out) {
            float total = 0.0f;
#pragma unroll
            for (int p = 0; p < PROJECT_PARTS; p++)
                total = total + sums[r][i % PROJECT_OUTPUTS][p];
            y[(size_t(first + r) * n_heads + head) * y_stride + out] = total;
        }
    }
}
