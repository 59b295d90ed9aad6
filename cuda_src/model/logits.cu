// The output layer: last norm, logits, and the greedy token of each row.
#include "common/dependent.cuh"
#include "common/neighbours.cuh"
#include "common/reduce.cuh"
#include "common/weights.cuh"

constexpr int PICK_THREADS = 256;
constexpr int PICK_WARPS = PICK_THREADS / 32;
constexpr int PICK_AT_ONCE = 8;  // tiles of a thread
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

constexpr int OWN = TILE_ROWS + 1;  // floats of a row of a tile
constexpr int SHARE = 4;            // lanes of a row

// Over LANES lanes beside each other, of which each gets it.
template <int LANES>
__device__ __forceinline__ Best best_of_lanes(Best best) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2)
        best = better(best, Best{__shfl_xor_sync(FULL_MASK, best.value, lanes),
                                 __shfl_xor_sync(FULL_MASK, best.id, lanes)});
    return best;
}

#if MEMRA_TENSOR
#include "common/tensor_tile.cuh"

// A tile of 32 outputs by all columns, done by one warp for up to eight rows: AHEAD blocks of columns are always
// under way.
template <class Tile>
class TileProduct {
  public:
    __device__ __forceinline__ TileProduct(const uint8_t* tile, int n_blocks)
        : weights_(of_matrix<OfMatrix<Tile>>(tile, 0, n_blocks)),
          n_blocks_(n_blocks),
          g_(threadIdx.x % WARP_LANES / 4),
          t_(threadIdx.x % 4) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (i < n_blocks_) fetch(i, i);
    }

    // x f32 [rows, pitch] in shared memory; out f32 [rows, OWN] likewise, the warp's own.
    __device__ __forceinline__ void run(const float* x, int pitch, int rows, float* out) {
        const bool second = rows > AT_ONCE;
        float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        const float* from[2];
#pragma unroll
        for (int i = 0; i < 2; i++)  // columns of rows that are not there are not looked at
            from[i] = x + min(int(g_) / 2 + AT_ONCE * i, rows - 1) * pitch + 8 * t_;
        int block = 0;
        // Without a branch, so that one block is decoded while another is multiplied.
#pragma unroll 1
        for (; block + 2 * AHEAD <= n_blocks_; block += AHEAD)
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                pieces_[i].template decode<false>(stored_[i], t_);
                fetch(i, block + i + AHEAD);
                multiply(pieces_[i], block + i, from, second, sums);
            }
#pragma unroll 1
        for (; block < n_blocks_; block += AHEAD)
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (block + i >= n_blocks_) break;
                pieces_[i].template decode<false>(stored_[i], t_);
                if (block + i + AHEAD < n_blocks_) fetch(i, block + i + AHEAD);
                multiply(pieces_[i], block + i, from, second, sums);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = t_ + AT_ONCE * i;
            if (r < rows)
#pragma unroll
                for (int k = 0; k < 4; k++) out[r * OWN + g_ + 8 * k] = sums[i][k];
        }
    }

  private:
    typedef TensorTile<TILE_ROWS, OfMatrix<Tile>> Piece;

    static constexpr int AT_ONCE = ROWS_AT_ONCE<OfMatrix<Tile>>;
    static constexpr int AHEAD = Tile::BYTES > 2048 ? 1 : 3;

    __device__ __forceinline__ void fetch(int at, int block) { stored_[at].fetch(weights_, block, block, g_, t_); }
    __device__ __forceinline__ void multiply(const Piece& piece, int block, const float* const* from, bool second,
                                             float (*sums)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (i == 1 && !second) continue;  // the same for the block of threads
            const float4* x = reinterpret_cast<const float4*>(from[i] + block * TILE_COLS);
            const float4 pieces[2] = {x[0], x[1]};
            float v[8];
            spread(pieces, v);
            typename Piece::Column column;
            Piece::take(v, g_, &column);
            typename Piece::Results c;
            piece.multiply(column, &c);
#pragma unroll
            for (int k = 0; k < 4; k++) sums[i][k] = sums[i][k] + piece.result(c, k, t_);
        }
    }

    OfMatrix<Tile> weights_;
    int n_blocks_;
    unsigned g_, t_;
    typename Piece::Stored stored_[AHEAD];
    Piece pieces_[AHEAD];
};
#else
// A tile of 32 outputs by all columns, done by 32 threads, each of which has an output.
template <class Tile>
class TileProduct {
  public:
    __device__ __forceinline__ TileProduct(const uint8_t* tile, int n_blocks) : tile_(tile), n_blocks_(n_blocks) {}

    // x f32 [rows, pitch] in shared memory; out f32 [rows, OWN] likewise, the warp's own.
    __device__ __forceinline__ void run(const float* x, int pitch, int rows, float* out) {
        const int lane = threadIdx.x % WARP_LANES;
#pragma unroll 1
        for (int block = 0; block < n_blocks_; block++) {
            Tile stored;
            float w[TILE_COLS];
            stored.fetch(tile_ + size_t(block) * Tile::BYTES, lane);
            stored.decode(w);
#pragma unroll 1
            for (int r = 0; r < rows; r++) {
                const float sum = dot32(w, Activations(x + r * pitch + block * TILE_COLS));
                float* to = out + r * OWN + lane;
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
// f32 [group, 32 * n_blocks + 4], [group, n_blocks], [warps, group, 33].
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
    const int width = n_blocks * TILE_COLS, pitch = width + 4;  // rows begin in banks of their own
    const float* x = h + size_t(first_row) * width;
    float* squares = gained + rows * pitch;
    float* own = squares + rows * n_blocks + warp * rows * OWN;  // the warp's
    admit_successor();
    // A warp without a tile goes along with the last one, and writes nothing.
    TileProduct<Tile> product(w + size_t(min(tile, n_tiles - 1)) * n_blocks * Tile::BYTES, n_blocks);
    await_predecessor();
    // The gain is applied once for all tiles of the block.
    for (int r = 0; r < rows; r++)
#pragma unroll 1
        for (int i = threadIdx.x; i < width / 4; i += blockDim.x) {
            const float4 v = reinterpret_cast<const float4*>(x + r * width)[i];
            const float4 by = reinterpret_cast<const float4*>(gain)[i];
            reinterpret_cast<float4*>(gained + r * pitch)[i] =
                make_float4(v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w);
        }
#pragma unroll 1
    for (int i = blockDim.x - 1 - threadIdx.x; i < rows * n_blocks; i += blockDim.x) {
        const Activations v(x + size_t(i) * TILE_COLS);
        squares[i] = dot32(v.v, v);
    }
    __syncthreads();
    product.run(gained, pitch, rows, own);
    // SHARE lanes have a row, of which there are eight at most.
    const int r_own = lane / SHARE, q = lane % SHARE;
    float square = 0.0f;
    if (r_own < rows)
        for (int i = q; i < n_blocks; i += SHARE) square = square + squares[r_own * n_blocks + i];
    square = sum_of_neighbours<SHARE>(square);
    const bool leads = q == 0 && r_own < rows;
    if (leads) own[r_own * OWN + TILE_ROWS] = rsqrtf(square * share + eps);
    __syncwarp();
    const int first_out = tile * TILE_ROWS;
#pragma unroll 1
    for (int r = 0; r < rows; r++) {
        const float logit = own[r * OWN + lane] * own[r * OWN + TILE_ROWS];
        own[r * OWN + lane] = first_out + lane < n_vocab ? logit : NAN_F32;
        if (first_out + lane < n_vocab) logits[size_t(first_row + r) * n_vocab + first_out + lane] = logit;
    }
    __syncwarp();
    if (tile >= n_tiles) return;
    const float* row = own + min(r_own, rows - 1) * OWN;
    Best best = {NAN_F32, NO_TOKEN};
#pragma unroll
    for (int c = 0; c < TILE_ROWS; c += SHARE)
        if (row[q + c] > best.value || (row[q + c] == row[q + c] && best.id == NO_TOKEN))
            best = Best{row[q + c], first_out + q + c};
    best = best_of_lanes<SHARE>(best);
    const size_t at = size_t(first_row + r_own) * n_tiles + tile;
    if (leads) values[at] = best.value, ids[at] = best.id;
    if (sums == nullptr) return;
    float sum = 0.0f;  // an infinite best differs from itself by NaN
#pragma unroll
    for (int c = 0; c < TILE_ROWS; c += SHARE)
        if (first_out + q + c < n_vocab)
            sum = sum + (row[q + c] == best.value ? 1.0f : expf(row[q + c] - best.value));
    sum = sum_of_neighbours<SHARE>(sum);
    if (leads) sums[at] = sum;
}

// One block of 256 threads per row: the best of the tiles' best.
//   out     i32 [n_rows]: lowest id of the greatest logit, NO_TOKEN where all are NaN
//   prob_d  f32 [n_rows] or null: softmax probability of that id, NaN where any logit is NaN
KERNEL void pick_rows(const float* values, const int32_t* ids, const float* NULLABLE sums,
                      int32_t* out, float* NULLABLE prob_d, int32_t n_tiles) {
    __shared__ Best bests[PICK_WARPS];
    __shared__ float totals[PICK_WARPS];
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x, warp = thread / WARP_LANES;
    const size_t row = size_t(blockIdx.x) * n_tiles;
    Best best = {NAN_F32, NO_TOKEN};
#pragma unroll 1
    for (int first = thread; first < n_tiles; first += PICK_AT_ONCE * PICK_THREADS) {
        Best tiles[PICK_AT_ONCE];  // all under way at a time
#pragma unroll
        for (int i = 0; i < PICK_AT_ONCE; i++) {
            const int t = first + i * PICK_THREADS;
            tiles[i] = t < n_tiles ? Best{values[row + t], ids[row + t]} : Best{NAN_F32, NO_TOKEN};
        }
#pragma unroll
        for (int i = 0; i < PICK_AT_ONCE; i++) best = better(best, tiles[i]);
    }
    best = best_of_lanes<WARP_LANES>(best);
    if (thread % WARP_LANES == 0) bests[warp] = best;
    __syncthreads();
    best = bests[0];
#pragma unroll
    for (int i = 1; i < PICK_WARPS; i++) best = better(best, bests[i]);
    if (thread == 0) out[blockIdx.x] = best.id;

    if (prob_d == nullptr || sums == nullptr) return;  // the same for all threads of the launch
    float sum = 0.0f;
    for (int t = thread; t < n_tiles; t += PICK_THREADS)
        sum = sum + sums[row + t] * expf(values[row + t] - best.value);
    sum = warp_sum(sum);
    if (thread % WARP_LANES == 0) totals[warp] = sum;
    __syncthreads();
    if (thread == 0) {
        float total = 0.0f;
        for (int i = 0; i < PICK_WARPS; i++) total = total + totals[i];
        prob_d[blockIdx.x] = 1.0f / total;
    }
}
