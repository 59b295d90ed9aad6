// Appends rows of K and V to their planes, quantised, in one launch that normalises and rotates the heads
// of K, and of the queries beside them, before.
#include "common/block32.cuh"
#include "common/dependent.cuh"
#include "common/reduce.cuh"

constexpr int HEAD_THREADS = 128;

// What is done to the heads of a row at `position`.
struct Turning {
    const float* angles;  // null: nothing is rotated
    int32_t n_rot, n_positions, halves;
    float eps;
    int64_t position;
};

// A head of 32 * n_blocks channels, normalised and rotated, by the lanes of a warp, in shared memory.
// `from` is read once before `to` is written, so both may be one.
__device__ __forceinline__ void turn_head(const float* from, const float* weight, const Turning& t,
                                          int n_blocks, float* to, int lane) {
    const int dim = n_blocks * BLOCK_ELEMENTS;
    float sum = 0.0f;
    for (int c = lane; c < dim; c += WARP_LANES) {
        const float x = from[c];
        to[c] = x;
        sum = fmaf(x, x, sum);
    }
    if (weight != nullptr) {  // the same for all lanes
        const float scale = 1.0f / sqrtf(warp_sum(sum) / float(dim) + t.eps);
        for (int c = lane; c < dim; c += WARP_LANES) to[c] = to[c] * scale * weight[c];
    }
    __syncwarp();
    if (t.angles != nullptr) {
        const bool inside = t.position >= 0 && t.position < t.n_positions;
        const float* turns = t.angles + (inside ? t.position : 0) * t.n_rot;
        for (int j = lane; j < t.n_rot / 2; j += WARP_LANES) {
            const float cosine = inside ? turns[2 * j] : NAN_F32;
            const float sine = inside ? turns[2 * j + 1] : NAN_F32;
            const int first = t.halves ? j : 2 * j;
            const int second = t.halves ? j + t.n_rot / 2 : 2 * j + 1;
            const float a = to[first], b = to[second];
            to[first] = a * cosine - b * sine;
            to[second] = a * sine + b * cosine;
        }
    }
    __syncwarp();
}

template <int F>
__device__ __forceinline__ void store_head(const float* x, uint8_t* to, int n_blocks, int lane) {
    for (int unit = lane; unit < n_blocks * BLOCK_QUARTERS; unit += WARP_LANES) {
        const int block = unit / BLOCK_QUARTERS;
        Packed<F> packed;
        pack_quarter<F>(x + block * BLOCK_ELEMENTS, unit % BLOCK_QUARTERS, &packed);
        store_quarter<F>(packed, to + block * block_bytes<F>(), unit % BLOCK_QUARTERS);
    }
}

// Grid (ceil((n_heads + 2 * n_kv_heads) / 4), n_rows), 128 threads, a warp a head; dynamic shared memory
// f32 [4, 32 * the larger of blocks_k and blocks_v].
//   q          f32 [n_rows, n_heads, head_dim] or null (n_heads = 0), turned in place
//   k, v       f32 [n_rows, n_kv_heads, head_dim], [n_rows, n_kv_heads, head_dim_v]
//   q_weight, k_weight  f32 [head_dim], or null: no normalisation
//   angles     f32 [n_positions, n_rot / 2, 2] of (cos, sin), or null: no rotation. The pairs are
//              neighbouring channels or, with `halves`, channels j and j + n_rot / 2.
//   k_plane, v_plane    u8 [capacity, row bytes]; row r stands at position len + r, its K and V go to
//              physical row len + r - base and are dropped where that is outside [0, capacity).
// The counter is not moved. Past the table heads rotate to NaN: nothing is read out of bounds, nothing
// looks right.
template <int KF, int VF>
__global__ void __launch_bounds__(HEAD_THREADS)
    append_heads(float* NULLABLE q, const float* __restrict__ k, const float* __restrict__ v,
                 const float* NULLABLE q_weight, const float* NULLABLE k_weight,
                 const float* NULLABLE angles, uint8_t* __restrict__ k_plane,
                 uint8_t* __restrict__ v_plane, int32_t n_heads, int32_t n_kv_heads,
                 int32_t blocks_k, int32_t blocks_v, int32_t n_rot, int32_t n_positions,
                 int32_t halves, float eps, int32_t capacity, const int32_t* __restrict__ len_d,
                 const int32_t* NULLABLE base_d) {
    DYN_SMEM(float, staged);
    admit_successor();
    const int lane = threadIdx.x % WARP_LANES;
    const int warp = threadIdx.x / WARP_LANES;
    const int unit = blockIdx.x * (HEAD_THREADS / WARP_LANES) + warp;
    const int row = blockIdx.y;
    float* own = staged + warp * max(blocks_k, blocks_v) * BLOCK_ELEMENTS;
    await_predecessor();
    const int64_t position = int64_t(len_d[0]) + row;
    const int64_t physical = position - (base_d == nullptr ? 0 : base_d[0]);
    const bool has_room = physical >= 0 && physical < capacity;
    const Turning turning = {angles, n_rot, n_positions, halves, eps, position};
    const int dim = blocks_k * BLOCK_ELEMENTS;
    if (unit < n_heads) {  // the same for all lanes of a warp, here and below
        float* head = q + (size_t(row) * n_heads + unit) * dim;
        turn_head(head, q_weight, turning, blocks_k, own, lane);
        for (int c = lane; c < dim; c += WARP_LANES) head[c] = own[c];
    } else if (unit < n_heads + n_kv_heads) {
        const int head = unit - n_heads;
        turn_head(k + (size_t(row) * n_kv_heads + head) * dim, k_weight, turning, blocks_k, own, lane);
        const size_t at = (size_t(physical) * n_kv_heads + head) * blocks_k;
        if (has_room) store_head<KF>(own, k_plane + at * block_bytes<KF>(), blocks_k, lane);
    } else if (unit < n_heads + 2 * n_kv_heads && has_room) {
        const int head = unit - n_heads - n_kv_heads;
        const float* from = v + (size_t(row) * n_kv_heads + head) * blocks_v * BLOCK_ELEMENTS;
        const size_t at = (size_t(physical) * n_kv_heads + head) * blocks_v;
        store_head<VF>(from, v_plane + at * block_bytes<VF>(), blocks_v, lane);
    }
}
