// The output layer: last norm, logits, and the greedy token of each row.
#include "common/dependent.cuh"
#include "common/weights.cuh"

constexpr int PICK_THREADS = 256;
constexpr int PICK_GROUPS = 16;
constexpr int32_t NO_TOKEN = 0x7FFFFFFF;

struct Best {
    float value;
    int32_t id;
};

// NaN never wins, a tie goes to the lower id; NO_TOKEN stands for "nothing but NaN so far".
__device__ __forceinline__ Best better(Best a, Best b) {
    if (b.id == NO_TOKEN) return a;
    if (a.id == NO_TOKEN) return b;
    return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

#if MEMRA_TENSOR
#include "common/tensor_tile.cuh"

// A tile of 32 outputs by all columns, done by one warp for up to eight rows: AHEAD blocks of columns are always
// under way.
template <class Tile>
class TileProduct {
  public:
    __device__ __forceinline__ TileProduct(const uint8_t* tile, int n_blocks)
        : weights_(of_matrix<Tile>(tile, 0, n_blocks)),
          n_blocks_(n_blocks),
          g_(threadIdx.x % WARP_LANES / 4),
          t_(threadIdx.x % 4) {
        ahead<0>();
    }

    // x f32 [rows, 32 * n_blocks] in shared memory; out f32 [rows, 32] likewise, the warp's own.
    __device__ __forceinline__ void run(const float* x, int rows, float* out) {
        const bool second = rows > ROWS_AT_ONCE;
        float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        const float* from[2];
#pragma unroll
        for (int i = 0; i < 2; i++)  // columns of rows that are not there are not looked at
            from[i] = x + min(g_ / 2 + ROWS_AT_ONCE * i, rows - 1) * (n_blocks_ * TILE_COLS) + 8 * t_;
#pragma unroll 1
        for (int block = 0; block < n_blocks_; block += AHEAD) steps<0>(block, from, second, sums);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = t_ + ROWS_AT_ONCE * i;
            if (r < rows)
#pragma unroll
                for (int k = 0; k < 4; k++) out[r * TILE_ROWS + g_ + 8 * k] = sums[i][k];
        }
    }

  private:
    typedef TensorTile<TILE_ROWS, Weights<Tile, Tile>> Piece;

    static constexpr int AHEAD = Tile::BYTES > 2048 ? 1 : Tile::BYTES > 1280 ? 3 : 4;

    template <int AT>
    __device__ __forceinline__ void ahead() {
        fetch<AT>(AT);
        if constexpr (AT + 1 < AHEAD) ahead<AT + 1>();
    }
    template <int AT>
    __device__ __forceinline__ void steps(int block, const float* const* from, bool second, float (*sums)[4]) {
        if (block >= n_blocks_) return;
        step<AT>(block, from, second, sums);
        if constexpr (AT + 1 < AHEAD) steps<AT + 1>(block + 1, from, second, sums);
    }
    template <int AT>
    __device__ __forceinline__ void fetch(int block) {
        if (block < n_blocks_) pieces_[AT].fetch(weights_, block, g_, t_);
    }
    template <int AT>
    __device__ __forceinline__ void step(int block, const float* const* from, bool second, float (*sums)[4]) {
        pieces_[AT].decode(t_);
        fetch<AT>(block + AHEAD);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (i == 1 && !second) continue;  // the same for the block of threads
            const float4* at = reinterpret_cast<const float4*>(from[i] + block * TILE_COLS);
            const float4 pieces[2] = {at[0], at[1]};
            float v[8];
            spread(pieces, v);
            typename Piece::Column column;
            Piece::take(v, g_, &column);
            typename Piece::Results c;
            pieces_[AT].multiply(column, &c);
#pragma unroll
            for (int k = 0; k < 4; k++) sums[i][k] = sums[i][k] + pieces_[AT].result(c, k);
        }
    }

    Weights<Tile, Tile> weights_;
    int n_blocks_, g_, t_;
    Piece pieces_[AHEAD];
};
#else
// A tile of 32 outputs by all columns, done by 32 threads, each of which has an output.
template <class Tile>
class TileProduct {
  public:
    __device__ __forceinline__ TileProduct(const uint8_t* tile, int n_blocks) : tile_(tile), n_blocks_(n_blocks) {}

    // x f32 [rows, 32 * n_blocks] in shared memory; out f32 [rows, 32] likewise, the warp's own.
    __device__ __forceinline__ void run(const float* x, int rows, float* out) {
        const int lane = threadIdx.x % WARP_LANES;
#pragma unroll 1
        for (int block = 0; block < n_blocks_; block++) {
            Tile stored;
            float w[TILE_COLS];
            stored.fetch(tile_ + size_t(block) * Tile::BYTES, lane);
            stored.decode(w);
#pragma unroll 1
            for (int r = 0; r < rows; r++) {
                const float sum = dot32(w, Activations(x + (r * n_blocks_ + block) * TILE_COLS));
                float* to = out + r * TILE_ROWS + lane;
                *to = block == 0 ? sum : *to + sum;
            }
        }
    }

  private:
    const uint8_t* tile_;
    int n_blocks_;
};
#endif

// grid (ceil(n_tiles / warps), ceil(n_rows / group)), warps of a block of threads; group is 8 or less. Shared
// f32 [group, 32 * n_blocks], [group, n_blocks], [warps, group, 33].
//   w        tiles of [n_vocab, 32 * n_blocks]
//   h, gain  f32 [n_rows, 32 * n_blocks], f32 [32 * n_blocks]
//   logits   f32 [n_rows, n_vocab]
//   values, ids  f32 and i32 [n_rows, n_tiles]: the best logit of each tile of 32
//   sums     f32 [n_rows, n_tiles] or null: sum of exp(logit - best) over the tile
// A tile is one warp's.
template <class Tile>
__global__ void __launch_bounds__(128, 3)
    logits_rows(const uint8_t* __restrict__ w, const float* h, const float* __restrict__ gain,
                float* logits, float* values, int32_t* ids, float* NULLABLE sums, int32_t n_rows,
                int32_t group, int32_t n_vocab, int32_t n_blocks, float share, float eps) {
    DYN_SMEM(float, gained);
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int n_tiles = (n_vocab + TILE_ROWS - 1) / TILE_ROWS;
    const int tile = blockIdx.x * (blockDim.x / WARP_LANES) + warp;
    const int first_row = blockIdx.y * group;
    const int rows = min(group, n_rows - first_row);
    const int width = n_blocks * TILE_COLS;
    const float* x = h + size_t(first_row) * width;
    float* squares = gained + rows * width;
    float* own = squares + rows * n_blocks + warp * rows * (TILE_ROWS + 1);  // the warp's
    float* scales = own + rows * TILE_ROWS;
    admit_successor();
    // A warp without a tile goes along with the last one, and writes nothing.
    TileProduct<Tile> product(w + size_t(min(tile, n_tiles - 1)) * n_blocks * Tile::BYTES, n_blocks);
    await_predecessor();
    // The gain is applied once for all tiles of the block.
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * n_blocks; i += blockDim.x) {
        const Activations v(x + size_t(i) * TILE_COLS), by(gain + i % n_blocks * TILE_COLS);
        squares[i] = dot32(v.v, v);
        float4* to = reinterpret_cast<float4*>(gained + i * TILE_COLS);
#pragma unroll
        for (int c = 0; c < TILE_COLS; c += 4)
            to[c / 4] = make_float4(v.v[c] * by.v[c], v.v[c + 1] * by.v[c + 1], v.v[c + 2] * by.v[c + 2],
                                    v.v[c + 3] * by.v[c + 3]);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = lane; r < rows; r += WARP_LANES) {
        const float* of = squares + r * n_blocks;
        float s[2] = {0.0f, 0.0f};
#pragma unroll 3
        for (int i = 0; i + 1 < n_blocks; i += 2) s[0] = s[0] + of[i], s[1] = s[1] + of[i + 1];
        if (n_blocks % 2 != 0) s[0] = s[0] + of[n_blocks - 1];
        scales[r] = rsqrtf((s[0] + s[1]) * share + eps);
    }
    product.run(gained, rows, own);
    __syncwarp();
    const int first_out = tile * TILE_ROWS;
#pragma unroll 1
    for (int r = 0; r < rows; r++) {
        const float logit = own[r * TILE_ROWS + lane] * scales[r];
        own[r * TILE_ROWS + lane] = first_out + lane < n_vocab ? logit : NAN_F32;
        if (first_out + lane < n_vocab) logits[size_t(first_row + r) * n_vocab + first_out + lane] = logit;
    }
    __syncwarp();
    if (tile >= n_tiles) return;
#pragma unroll 1
    for (int r = lane; r < rows; r += WARP_LANES) {
        const float* row = own + r * TILE_ROWS;
        Best best = {NAN_F32, NO_TOKEN};
#pragma unroll
        for (int c = 0; c < TILE_ROWS; c++)
            if (row[c] > best.value || (row[c] == row[c] && best.id == NO_TOKEN))
                best = Best{row[c], first_out + c};
        const size_t at = size_t(first_row + r) * n_tiles + tile;
        values[at] = best.value;
        ids[at] = best.id;
        if (sums != nullptr) {
            float sum = 0.0f;  // an infinite best differs from itself by NaN
            for (int c = 0; c < min(TILE_ROWS, n_vocab - first_out); c++)
                sum = sum + (row[c] == best.value ? 1.0f : expf(row[c] - best.value));
            sums[at] = sum;
        }
    }
}

// One block of 256 threads per row: the best of the tiles' best.
//   out     i32 [n_rows]: lowest id of the greatest logit, NO_TOKEN where all are NaN
//   prob_d  f32 [n_rows] or null: softmax probability of that id, NaN where any logit is NaN
KERNEL void pick_rows(const float* values, const int32_t* ids, const float* NULLABLE sums,
                      int32_t* out, float* NULLABLE prob_d, int32_t n_tiles) {
    __shared__ float thread_values[PICK_THREADS];
    __shared__ int32_t thread_ids[PICK_THREADS];
    __shared__ float group_values[PICK_GROUPS];
    __shared__ int32_t group_ids[PICK_GROUPS];
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x;
    const size_t row = size_t(blockIdx.x) * n_tiles;
    Best best = {NAN_F32, NO_TOKEN};  // unrolled below, so that eight loads are under way at a time
#pragma unroll 8
    for (int t = thread; t < n_tiles; t += PICK_THREADS)
        best = better(best, Best{values[row + t], ids[row + t]});
    thread_values[thread] = best.value;
    thread_ids[thread] = best.id;
    __syncthreads();
    if (thread < PICK_GROUPS) {
#pragma unroll
        for (int k = 1; k < PICK_THREADS / PICK_GROUPS; k++) {
            const int i = thread + PICK_GROUPS * k;
            best = better(best, Best{thread_values[i], thread_ids[i]});
        }
        group_values[thread] = best.value;
        group_ids[thread] = best.id;
    }
    __syncthreads();
    best = Best{group_values[0], group_ids[0]};
#pragma unroll
    for (int i = 1; i < PICK_GROUPS; i++) best = better(best, Best{group_values[i], group_ids[i]});
    if (thread == 0) out[blockIdx.x] = best.id;

    if (prob_d != nullptr && sums != nullptr) {  // the same for all threads of the launch
        float sum = 0.0f;
        for (int t = thread; t < n_tiles; t += PICK_THREADS)
            sum = sum + sums[row + t] * expf(values[row + t] - best.value);
        thread_values[thread] = sum;  // last read before the second barrier
        __syncthreads();
        if (thread < PICK_GROUPS) {
            float group = 0.0f;
            for (int i = thread; i < PICK_THREADS; i += PICK_GROUPS)
                group = group + thread_values[i];
            thread_ids[thread] = __float_as_int(group);
        }
        __syncthreads();
        if (thread == 0) {
            float total = 0.0f;
            for (int i = 0; i < PICK_GROUPS; i++) total = total + __int_as_float(thread_ids[i]);
            prob_d[blockIdx.x] = 1.0f / total;
        }
    }
}
