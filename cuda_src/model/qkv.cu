// The beginning of a Llama block in one launch: norm, the products of q, k and v, rotation, and the
// quantised rows of k and v behind the length of their planes.
#include "common/block32.cuh"
#include "common/product.cuh"

constexpr int OUTS = 32;  // one block of a cache row
constexpr int PAIRS = OUTS / 2;
constexpr unsigned STAYS = 0xFFFFFFFFu;  // channel of what is not rotated

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
    const unsigned first_row = blockIdx.y * group;
    const unsigned rows = min(unsigned(group), n_rows - first_row);
    const Cut cut = {unsigned(n_blocks), unsigned(slice_blocks), unsigned(n_slices)};
    admit_successor();
    Product<OUTS, true, OfMatrix<Tile>> product(of_matrix<OfMatrix<Tile>>(w, blockIdx.x * OUTS, n_blocks), cut,
                                                       gain, threadIdx.x, blockDim.x);

    typedef Sums<OUTS, 2, 9> Adders;
    const SharedFloats parts(staged + rows * OUTS), squares(staged + rows * (OUTS + n_slices * PITCH<OUTS>));
    const Adders adders(parts, squares, n_slices);
    const int first = column + blockIdx.x * OUTS;  // q_dim and kv_dim are whole blocks
    const bool is_q = first < q_dim, is_k = !is_q && first < q_dim + kv_dim;
    const int from = first - q_dim - (is_k ? 0 : kv_dim);
    const Side side = {is_k ? k_plane : v_plane, from / OUTS, kv_dim / OUTS};
    const unsigned pairs = rows * PAIRS, n = Adders::numbers(pairs);
    // Everything of a thread's first pair is known before the products but for its turn, which is asked for early.
    unsigned number = threadIdx.x, r, pair, channel;
    SharedFloats at = parts, squares_at = squares;
    unsigned writes;
    float* to;  // of its row
    const auto take = [&] {
        const unsigned sum = Adders::sum_at(number);
        writes = sum < pairs && Adders::leads(number);
        r = min(sum, pairs - 1) / PAIRS, pair = sum % PAIRS * 2;
        at = adders.output_at(r, pair), squares_at = adders.squares_at(r);
        channel = unsigned(first + pair) % unsigned(head_dim);
        if (!is_q && !is_k || channel >= unsigned(n_rot)) channel = STAYS;
        to = is_q ? q + size_t(first_row + r) * q_dim + first : staged + r * OUTS;
        settle(channel);
    };
    int position = 0;
    int slot = 0;  // physical row of row 0 of the group
    Turn turn;
    const auto ask = [&] {
        turn = {NAN_F32, NAN_F32};
        const unsigned p = position + r;
        if (channel != STAYS && p < unsigned(n_positions))
            turn = *reinterpret_cast<const Turn*>(angles + (size_t(p) * n_rot + channel));
    };
    take();
    product.run(h + size_t(first_row) * n_blocks * TILE_COLS, rows, parts, squares, [&] {
        if (number >= n) return;
        position = pos_d[0] + first_row;
        slot = len_d[0] + first_row - (base_d == nullptr ? 0 : base_d[0]);
    });
    // Its position has come with the activations; asked for any earlier, a turn would be waited for.
    if (number < n) ask();
    __syncthreads();

    // A row is one warp's on a GPU, which also stores its block of k or v.
#pragma unroll 1
    while (number < n) {
        float sums[3];
        adders.template total<3>(
            [&](int i, float* v) {
                const float2 both = at.pair(i * PITCH<OUTS>);
                v[0] = both.x, v[1] = both.y, v[2] = squares_at.get(i);
            },
            sums);
        const float scale = norm_scale(sums[2], share, eps);
        float a = sums[0] * scale, b = sums[1] * scale;
        if (channel != STAYS) {
            const float turned = a * turn.cosine - b * turn.sine;
            b = a * turn.sine + b * turn.cosine;
            a = turned;
        }
        if (writes) *reinterpret_cast<float2*>(to + pair) = make_float2(a, b);
        if (!is_q) {  // the same for all threads of the block
            __syncwarp();
            const unsigned quarter = pair / 2;
            const int64_t physical = int64_t(slot) + r;
            if (writes && quarter < BLOCK_QUARTERS && physical >= 0 && physical < capacity) {
                if (is_k) store_block<KF>(to, side, physical, quarter);
                else store_block<VF>(to, side, physical, quarter);
            }
        }
        number += blockDim.x;
        if (number >= n) break;
        take();
        ask();
    }
}
