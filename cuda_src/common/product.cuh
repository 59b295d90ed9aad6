// Products of a few rows of activations with a weight matrix, a few outputs per block of threads.
//
// A block of threads owns OUTS neighbouring outputs and all columns of them. The columns are cut into
// slices at fixed places; a unit is one output of one slice, done by one thread for all rows, so each
// weight is read once. A unit's sum lies in shared memory,
//
//   parts[r][slice][out]   f32 [n_rows, n_slices, OUTS]
//
// and after a barrier any thread may add up the slices of an output, in one fixed order. The number of
// threads decides only who does what: no bit depends on it, nor on the number of rows.
//
// Nothing but shared memory is written before the sums are there, and the first weights of a thread
// are asked for before the activations can be read: see common/dependent.cuh.
#pragma once
#include "common/dependent.cuh"
#include "common/tiles.cuh"

// Most threads of a block. They bound the registers, to 96 and 128: what 32 weights, 32 activations
// and the next weights need.
constexpr int TILE_THREADS = 576;  // 32 outputs by 18 slices
constexpr int FEW_THREADS = 512;   // 8 outputs by 64 slices

// Where the columns of a matrix are cut: a function of its shape alone.
struct Cut {
    int n_blocks;      // of 32 columns
    int slice_blocks;  // of a slice
    int n_slices;
};

// Thread `thread` of `n_threads` that share the work.
template <class Tile, int OUTS>
class Product {
  public:
    // w: tiles of the matrix; the block's outputs begin at `first`, a multiple of OUTS.
    __device__ __forceinline__ Product(const uint8_t* __restrict__ w, int first, Cut cut,
                                       const float* __restrict__ gain,  // null: no norm
                                       int thread, int n_threads)
        : tile_(w + size_t(first / TILE_ROWS) * cut.n_blocks * Tile::BYTES),
          lane_(first % TILE_ROWS),
          cut_(cut),
          gain_(gain),
          thread_(thread),
          n_threads_(n_threads) {
        if (thread_ < units()) {
            Tile stored;
            const int block = slice(thread_) * cut_.slice_blocks;
            fetch(&stored, thread_, block);
            take(stored, block);
        }
    }

    __device__ __forceinline__ int units() const { return cut_.n_slices * OUTS; }

    // Leaves the sums of the units; with squares, those of the activations of each slice too.
    //   x  f32 [n_rows, 32 * n_blocks]
    __device__ __forceinline__ void run(const float* x, int n_rows, float* parts, float* squares) {
        const int n_units = units();
        const size_t width = size_t(cut_.n_blocks) * TILE_COLS;
        for (int unit = thread_; unit < n_units; unit += n_threads_) {
            const int begin = slice(unit) * cut_.slice_blocks;
            const int end = min(begin + cut_.slice_blocks, cut_.n_blocks);
            for (int block = begin; block < end; block++) {
                // The next weights are under way while these are multiplied.
                Tile stored;
                const bool goes_on = block + 1 < end;
                const int next_unit = goes_on ? unit : unit + n_threads_;
                const int next_block = goes_on ? block + 1 : slice(next_unit) * cut_.slice_blocks;
                if (AHEAD && next_unit < n_units) fetch(&stored, next_unit, next_block);
                const float* block_x = x + size_t(block) * TILE_COLS;
                for (int r = 0; r < n_rows; r++) {
                    const Activations a(block_x + r * width);
                    add(parts + size_t(r) * n_units + unit, dot32(weights_, a), block == begin);
                    if (squares != nullptr && unit % OUTS == 0)
                        add(squares + r * cut_.n_slices + slice(unit), dot32(a.v, a),
                            block == begin);
                }
                if (!AHEAD && next_unit < n_units) fetch(&stored, next_unit, next_block);
                if (next_unit < n_units) take(stored, next_block);
            }
        }
    }

  private:
    // Wide weights would not fit beside those that are multiplied.
    static constexpr bool AHEAD = sizeof(Tile) <= 40;

    __device__ __forceinline__ static int slice(int unit) { return unit / OUTS; }

    __device__ __forceinline__ void fetch(Tile* stored, int unit, int block) const {
        stored->fetch(tile_ + size_t(block) * Tile::BYTES, lane_ + unit % OUTS);
    }

    // The gain of the norm is part of the weights: once per weight, not once per row.
    __device__ __forceinline__ void take(const Tile& stored, int block) {
        stored.decode(weights_);
        if (gain_ != nullptr) {
            const Activations gain(gain_ + size_t(block) * TILE_COLS);
#pragma unroll
            for (int i = 0; i < TILE_COLS; i++) weights_[i] = weights_[i] * gain.v[i];
        }
    }

    __device__ __forceinline__ static void add(float* to, float value, bool first) {
        *to = first ? value : *to + value;
    }

    const uint8_t* tile_;
    int lane_;
    Cut cut_;
    const float* gain_;
    int thread_, n_threads_;
    float weights_[TILE_COLS];
};

// Four running sums, then a tree.
__device__ __forceinline__ float sum_strided(const float* p, int n, int stride) {
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int i = 0;
#pragma unroll 4
    for (; i + 4 <= n; i += 4)
#pragma unroll
        for (int j = 0; j < 4; j++) s[j] = s[j] + p[(i + j) * stride];
#pragma unroll
    for (int j = 0; j < 3; j++)
        if (i + j < n) s[j] = s[j] + p[(i + j) * stride];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// Output `out` of row r, once all units are done.
template <int OUTS>
__device__ __forceinline__ float row_sum(const float* parts, Cut cut, int r, int out) {
    return sum_strided(parts + size_t(r) * cut.n_slices * OUTS + out, cut.n_slices, OUTS);
}

// What the outputs of row r are multiplied by for its norm: 1 / sqrt(mean of squares + eps).
__device__ __forceinline__ float row_scale(const float* squares, Cut cut, int r, float eps) {
    const float total = sum_strided(squares + r * cut.n_slices, cut.n_slices, 1);
    return 1.0f / sqrtf(total / float(cut.n_blocks * TILE_COLS) + eps);
}
