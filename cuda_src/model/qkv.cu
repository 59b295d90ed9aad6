// The beginning of a Llama block in one launch: norm, the products of q, k and v, rotation, and the
// quantised rows of k and v behind the length of their planes.
#include "common/block32.cuh"
#include "common/product.cuh"

constexpr int OUTS = 32;  // one block of a cache row
constexpr int PAIRS = OUTS / 2;

struct Turn {
    float cosine, sine;
};

struct Side {
    uint8_t* plane;
    int block, n_blocks;  // of the block's columns; of a row
};

template <int F>
__device__ __forceinline__ void store_block(const float* x, Side side, int64_t physical, int g) {
    Packed<F> packed;
    pack_quarter<F>(x, g, &packed);
    uint8_t* to = side.plane + (size_t(physical) * side.n_blocks + side.block) * block_bytes<F>();
    store_quarter<F>(packed, to, g);
}

// grid (n_out / 32, ceil(n_rows / group)); shared f32 [group, 32], [group, n_slices, 40],
// [group, n_slices].
//   w        tiles of [n_out, 32 * n_blocks]: columns column ... column + n_out of q | k | v
//   h, gain  f32 [n_rows, 32 * n_blocks], f32 [32 * n_blocks]
//   angles   f32 [n_positions, n_rot / 2, 2], (cos, sin), made on the host in float64
//   pos_d    position of row 0; row r stands at pos_d + r
//   q        f32 [n_rows, q_dim]
//   k_plane, v_plane  rows of kv_dim / 32 blocks; row r goes to physical row len + r - base, and is
//            dropped if that is outside [0, capacity). The counter is not moved.
// A rotation pair is two neighbouring columns, the pairing of Llama weights as GGUF stores them. Past
// the table the rotated values are NaN: nothing is read out of bounds, nothing looks right.
template <class Tile, int KF, int VF>
__global__ void __launch_bounds__(MOST_THREADS<576>)
    qkv_rows(const uint8_t* __restrict__ w, const float* h, const float* __restrict__ gain,
             const float* __restrict__ angles, const int32_t* pos_d, float* q, uint8_t* k_plane,
             uint8_t* v_plane, const int32_t* len_d, const int32_t* NULLABLE base_d,
             int32_t n_rows, int32_t group, int32_t column, int32_t q_dim, int32_t kv_dim,
             int32_t head_dim, int32_t n_rot, int32_t n_positions, int32_t capacity,
             int32_t n_blocks, int32_t slice_blocks, int32_t n_slices, float share, float eps) {
    DYN_SMEM(float, staged);  // first, for its alignment
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const Cut cut = {n_blocks, slice_blocks, n_slices};
    const float* x = h + size_t(first_row) * n_blocks * TILE_COLS;
    float* parts = staged + rows * OUTS;
    float* squares = parts + size_t(rows) * n_slices * PITCH<OUTS>;
    admit_successor();
    const int first = column + blockIdx.x * OUTS;  // q_dim and kv_dim are whole blocks
    const auto rotated = [&](int pair) {
        return first < q_dim + kv_dim && (first + pair) % head_dim < n_rot;
    };
    int position = 0;
    int slot = 0;  // physical row of row 0 of the group
    const auto early = [&] {
        position = pos_d[0] + first_row;
        slot = len_d[0] + first_row - (base_d == nullptr ? 0 : base_d[0]);
    };
    const auto turn_of = [&](int r, int pair) {
        if (!rotated(pair)) return Turn{1.0f, 0.0f};
        if (position + r < 0 || position + r >= n_positions) return Turn{NAN_F32, NAN_F32};
        const float* turn = angles + size_t(position + r) * n_rot + (first + pair) % head_dim;
        return Turn{turn[0], turn[1]};
    };

    Product<OUTS, false, true, Weights<Tile, Tile>> product(
        of_matrix<Tile>(w, blockIdx.x * OUTS, n_blocks), cut, gain, threadIdx.x, blockDim.x);
    product.run(x, rows, parts, squares, early);
    typedef Sums<OUTS, 2, 9> Adders;
    const Adders adders = {n_slices};
    const unsigned pairs = rows * PAIRS;
    const auto turn_at = [&](unsigned number) {
        const unsigned at = Adders::sum_at(number);
        return at < pairs ? turn_of(at / PAIRS, 2 * (at % PAIRS)) : Turn{1.0f, 0.0f};
    };
    // Its position has come with the activations; asked for any earlier, a turn would be waited for.
    Turn turn = turn_at(threadIdx.x);
    __syncthreads();

    // A row is one warp's on a GPU, which also stores its block of k or v.
#pragma unroll 1
    for (unsigned number = threadIdx.x; number < Adders::numbers(pairs); number += blockDim.x) {
        if (number >= blockDim.x) turn = turn_at(number);
        const unsigned at = min(Adders::sum_at(number), pairs - 1);
        const bool writes = Adders::leads(number) && Adders::sum_at(number) == at;
        const int r = at / PAIRS, pair = 2 * (at % PAIRS);
        const float scale = adders.scale(squares, r, share, eps);
        float a = adders.output(parts, r, pair) * scale;
        float b = adders.output(parts, r, pair + 1) * scale;
        if (rotated(pair)) {
            const float turned = a * turn.cosine - b * turn.sine;
            b = a * turn.sine + b * turn.cosine;
            a = turned;
        }
        float* out = first < q_dim ? q + size_t(first_row + r) * q_dim + first : staged + r * OUTS;
        if (writes) *reinterpret_cast<float2*>(out + pair) = make_float2(a, b);
        if (first < q_dim) continue;  // the same for all threads of the block
        __syncwarp();
        const bool is_k = first < q_dim + kv_dim;
        const int from = first - q_dim - (is_k ? 0 : kv_dim);
        const Side side = {is_k ? k_plane : v_plane, from / OUTS, kv_dim / OUTS};
        const int quarter = at % PAIRS;
        if (writes && quarter < BLOCK_QUARTERS && slot + r >= 0 && slot + r < capacity) {
            if (is_k) store_block<KF>(staged + r * OUTS, side, slot + r, quarter);
            else store_block<VF>(staged + r * OUTS, side, slot + r, quarter);
        }
    }
}
