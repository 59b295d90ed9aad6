// Appends rows of K and V to their planes, quantised, in one launch that normalises and rotates the heads
// of K, and of the queries beside them, before.
#include "common/block32_eighth.cuh"
#include "common/dependent.cuh"
#include "common/reduce.cuh"

constexpr int HEAD_THREADS = 128;
constexpr int HEAD_PIECES = 4;    // heads of up to 512 channels
constexpr int PIECE = 4 * WARP_LANES;

// A head of `dim` channels, a multiple of 32, in the registers of a warp: channels 4 * lane ... of each
// piece of 128, zeros behind the end. So eight lanes have a block.
struct Head {
    float4 pieces[HEAD_PIECES];
};

__device__ __forceinline__ Head load_head(const float* from, int dim, int lane) {
    Head head;
#pragma unroll
    for (int p = 0; p < HEAD_PIECES; p++) {
        const int c = PIECE * p + 4 * lane;
        head.pieces[p] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (c < dim) head.pieces[p] = *reinterpret_cast<const float4*>(from + c);
    }
    return head;
}

__device__ __forceinline__ void store_floats(const Head& head, float* to, int dim, int lane) {
#pragma unroll
    for (int p = 0; p < HEAD_PIECES; p++) {
        const int c = PIECE * p + 4 * lane;
        if (c < dim) *reinterpret_cast<float4*>(to + c) = head.pieces[p];
    }
}

// What is done to the heads of a row at `position`.
struct Turning {
    const float* angles;  // null: nothing is rotated
    int32_t n_rot, n_positions, halves;
    float eps;
    int64_t position;

    __device__ __forceinline__ float2 of(int pair) const {
        if (position < 0 || position >= n_positions) return make_float2(NAN_F32, NAN_F32);
        return *reinterpret_cast<const float2*>(angles + position * n_rot + 2 * pair);
    }
};

__device__ __forceinline__ void norm_head(Head* head, const float* weight, float eps, int dim, int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < HEAD_PIECES; p++) {
        const float4& x = head->pieces[p];
        sum = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, sum))));
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum) / float(dim) + eps);
    const Head w = load_head(weight, dim, lane);
#pragma unroll
    for (int p = 0; p < HEAD_PIECES; p++) {
        float4& x = head->pieces[p];
        x = make_float4(x.x * scale * w.pieces[p].x, x.y * scale * w.pieces[p].y,
                        x.z * scale * w.pieces[p].z, x.w * scale * w.pieces[p].w);
    }
}

// Channel c < n_rot of a head whose pairs lie n_rot / 2 apart; the other one is read from `own`.
__device__ __forceinline__ float rotated_half(float x, int c, const float* own, const Turning& t) {
    const int half = t.n_rot / 2;
    if (c >= t.n_rot) return x;
    const bool is_first = c < half;
    const float2 turn = t.of(is_first ? c : c - half);
    const float other = own[is_first ? c + half : c - half];
    return is_first ? x * turn.x - other * turn.y : other * turn.y + x * turn.x;
}

// Normalises and rotates; leaves the head in `own` too, shared memory of the warp.
__device__ __forceinline__ void turn_head(Head* head, const float* weight, const Turning& t, int dim,
                                          float* own, int lane) {
    if (weight != nullptr) norm_head(head, weight, t.eps, dim, lane);  // the same for all lanes
    if (t.angles != nullptr && t.halves) {
        store_floats(*head, own, dim, lane);
        __syncwarp();
#pragma unroll
        for (int p = 0; p < HEAD_PIECES; p++) {
            const int c = PIECE * p + 4 * lane;
            float4& x = head->pieces[p];
            if (c < t.n_rot)
                x = make_float4(rotated_half(x.x, c, own, t), rotated_half(x.y, c + 1, own, t),
                                rotated_half(x.z, c + 2, own, t), rotated_half(x.w, c + 3, own, t));
        }
        __syncwarp();
    } else if (t.angles != nullptr) {
#pragma unroll
        for (int p = 0; p < HEAD_PIECES; p++) {
            const int c = PIECE * p + 4 * lane;
            float4& x = head->pieces[p];
            if (c < t.n_rot) {
                const float2 turn = t.of(c / 2);
                const float a = x.x * turn.x - x.y * turn.y;
                x.y = x.x * turn.y + x.y * turn.x;
                x.x = a;
            }
            if (c + 2 < t.n_rot) {
                const float2 turn = t.of(c / 2 + 1);
                const float a = x.z * turn.x - x.w * turn.y;
                x.w = x.z * turn.y + x.w * turn.x;
                x.z = a;
            }
        }
    }
    store_floats(*head, own, dim, lane);
    __syncwarp();
}

// `x` are the channels of the head in memory.
template <int F>
__device__ __forceinline__ void store_head(const Head& head, const float* x, uint8_t* to, int n_blocks,
                                           int lane) {
#pragma unroll
    for (int p = 0; p < HEAD_PIECES; p++) {
        const int first = p * (PIECE / BLOCK_ELEMENTS);
        if (first >= n_blocks) break;  // the same for all lanes
        const int block = first + lane / BLOCK_EIGHTHS;
        const int inside = min(block, n_blocks - 1);
        PackedEighth<F> packed;
        pack_eighth<F>(x + inside * BLOCK_ELEMENTS, head.pieces[p], lane % BLOCK_EIGHTHS, &packed);
        if (block < n_blocks)
            store_eighth<F>(packed, to + block * block_bytes<F>(), lane % BLOCK_EIGHTHS);
    }
}

// Grid (ceil((n_heads + 2 * n_kv_heads) / 4), n_rows), 128 threads, a warp a head; dynamic shared memory
// f32 [4, 32 * blocks_k]. All rows 16-byte aligned.
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
    float* own = staged + warp * blocks_k * BLOCK_ELEMENTS;
    await_predecessor();
    const int64_t position = int64_t(len_d[0]) + row;
    const int64_t physical = position - (base_d == nullptr ? 0 : base_d[0]);
    const bool has_room = physical >= 0 && physical < capacity;
    const Turning turning = {angles, n_rot, n_positions, halves, eps, position};
    const int dim = blocks_k * BLOCK_ELEMENTS;
    if (unit < n_heads) {  // the same for all lanes of a warp, here and below
        float* from = q + (size_t(row) * n_heads + unit) * dim;
        Head head = load_head(from, dim, lane);
        turn_head(&head, q_weight, turning, dim, own, lane);
        store_floats(head, from, dim, lane);
    } else if (unit < n_heads + n_kv_heads) {
        const size_t at = size_t(row) * n_kv_heads + unit - n_heads;
        Head head = load_head(k + at * dim, dim, lane);
        turn_head(&head, k_weight, turning, dim, own, lane);
        const size_t to = (size_t(physical) * n_kv_heads + unit - n_heads) * blocks_k;
        if (has_room) store_head<KF>(head, own, k_plane + to * block_bytes<KF>(), blocks_k, lane);
    } else if (unit < n_heads + 2 * n_kv_heads) {
        const int which = unit - n_heads - n_kv_heads;
        const int dim_v = blocks_v * BLOCK_ELEMENTS;
        const float* from = v + (size_t(row) * n_kv_heads + which) * dim_v;
        const Head head = load_head(from, dim_v, lane);
        const size_t to = (size_t(physical) * n_kv_heads + which) * blocks_v;
        if (has_room) store_head<VF>(head, from, v_plane + to * block_bytes<VF>(), blocks_v, lane);
    }
}
