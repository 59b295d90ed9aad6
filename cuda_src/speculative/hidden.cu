// Hidden states by position, for a draft that reads the one before its token: kept by the target's passes
// and by the draft's own steps, taken by the step one position on.
//
// Row p + 1 of `kept` is the state at position p, divided by the root of its mean square; row 0 stands
// before the first position. Each block has one row.
#include "common/dependent.cuh"
#include "common/reduce.cuh"

constexpr int N_WARPS = 4;
constexpr int IO_STEP = 2, IO_N_FEED = 3;  // words of a chain's block; see speculative/chain.cu

// grid (n_rows), N_WARPS warps.
//   h      f32 [n_rows, width]: states at positions pos_d, pos_d + 1, ...
//   kept   f32 [n_kept, width]; a row outside is dropped
//   io     a chain's block, or null. A step that is fed a token that was known keeps nothing: the target's
//          own state is there.
KERNEL void keep_hidden(const float* h, float* kept, const int32_t* pos_d, const int32_t* NULLABLE io,
                        int32_t n_kept, int32_t width, float share, float eps) {
    __shared__ float squares[N_WARPS];
    admit_successor();
    await_predecessor();
    const float* x = h + size_t(blockIdx.x) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP_LANES == 0) squares[threadIdx.x / WARP_LANES] = sum;
    __syncthreads();
    const float total = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    const float scale = 1.0f / sqrtf(total * share + eps);
    const int64_t row = int64_t(pos_d[0]) + 1 + blockIdx.x;
    const bool known = io != nullptr && io[IO_STEP] + 1 < io[IO_N_FEED];
    if (known || row < 1 || row >= n_kept) return;
    for (int i = threadIdx.x; i < width; i += blockDim.x) kept[size_t(row) * width + i] = x[i] * scale;
}

// grid (n_rows).
//   out  f32 [n_rows, width]: the states before positions pos_d, pos_d + 1, ...; NaN for one outside
KERNEL void take_hidden(const float* kept, const int32_t* pos_d, float* out, int32_t n_kept,
                        int32_t width) {
    admit_successor();
    await_predecessor();
    const int64_t row = int64_t(pos_d[0]) + blockIdx.x;
    const bool inside = row >= 0 && row < n_kept;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[size_t(blockIdx.x) * width + i] = inside ? kept[size_t(row) * width + i] : NAN_F32;
}
