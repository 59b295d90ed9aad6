// Products of a few rows of activations with weight matrices, a few outputs per block of threads.
//
// A block of threads owns OUTS neighbouring outputs and all columns of them. The columns are cut into
// slices at fixed places; a unit is one output of one slice, done by one thread for all rows, so each
// weight is read once. A unit's sum lies in shared memory,
//
//   parts[r][slice][out]   f32 [n_rows, n_slices, OUTS]
//   squares[r][block]      f32 [n_rows, n_blocks], of the activations, for a norm
//
// and after a barrier any thread may add up the slices of an output, in one fixed order. The number of
// threads decides only who does what: no bit depends on it, nor on the number of rows.
//
// Nothing but shared memory is written before the sums are there, and the first weights of a thread
// are asked for before the activations can be read: see common/dependent.cuh.
#pragma once
#include "common/dependent.cuh"
#include "common/tiles.cuh"

// Where the columns of a matrix are cut: a function of its shape alone.
struct Cut {
    int n_blocks;      // of 32 columns
    int slice_blocks;  // of a slice
    int n_slices;
};

// No second matrix.
struct NoTile {
    static constexpr int BYTES = 0;
    __device__ __forceinline__ void fetch(const uint8_t*, int) {}
    __device__ __forceinline__ void decode(float*) const {}
};

// The same outputs of two matrices A and B (or of A alone) of one shape, multiplied by the same rows.
template <int OUTS, class A, class B = NoTile>
class Product {
  public:
    // a, b: tiles; the block's outputs begin at `first`, a multiple of OUTS. gain: f32 [32 * n_blocks]
    // of a norm, or null.
    __device__ __forceinline__ Product(const uint8_t* __restrict__ a,
                                       const uint8_t* __restrict__ b, int first, Cut cut,
                                       const float* __restrict__ gain)
        : a_(a + size_t(first / TILE_ROWS) * cut.n_blocks * A::BYTES),
          b_(b + size_t(first / TILE_ROWS) * cut.n_blocks * B::BYTES),
          lane_(first % TILE_ROWS),
          cut_(cut),
          gain_(gain) {
        if (int(threadIdx.x) < cut.n_slices * OUTS) {
            const int block = int(threadIdx.x) / OUTS * cut.slice_blocks;
            Stored stored;
            fetch(&stored, threadIdx.x, block);
            take(stored, block);
        }
    }

    // Leaves the sums of all units, and with `squares` those of the activations.
    //   x  f32 [n_rows, 32 * n_blocks]
    __device__ __forceinline__ void run(const float* x, int n_rows, float* a_parts, float* b_parts,
                                        float* squares) {
        const int n_units = cut_.n_slices * OUTS;
        const size_t width = size_t(cut_.n_blocks) * TILE_COLS;
        for (int unit = threadIdx.x; unit < n_units; unit += blockDim.x) {
            const int begin = unit / OUTS * cut_.slice_blocks;
            const int end = min(begin + cut_.slice_blocks, cut_.n_blocks);
            for (int block = begin; block < end; block++) {
                // The next weights are under way while these are multiplied.
                Stored stored;
                const bool goes_on = block + 1 < end;
                const int next_unit = goes_on ? unit : unit + blockDim.x;
                const int next_block = goes_on ? block + 1 : next_unit / OUTS * cut_.slice_blocks;
                if (AHEAD && next_unit < n_units) fetch(&stored, next_unit, next_block);
                const float* block_x = x + size_t(block) * TILE_COLS;
                for (int r = 0; r < n_rows; r++) {
                    const Activations v(block_x + r * width);
                    add(a_parts + size_t(r) * n_units + unit, dot32(a_weights_, v), block == begin);
                    if (BOTH)
                        add(b_parts + size_t(r) * n_units + unit, dot32(b_weights_, v),
                            block == begin);
                }
                if (!AHEAD && next_unit < n_units) fetch(&stored, next_unit, next_block);
                if (next_unit < n_units) take(stored, next_block);
            }
        }
        if (squares != nullptr) {  // from the last thread on: those have no unit, or the fewest
            for (int block = blockDim.x - 1 - threadIdx.x; block < cut_.n_blocks;
                 block += blockDim.x)
                for (int r = 0; r < n_rows; r++) {
                    const Activations v(x + r * width + size_t(block) * TILE_COLS);
                    squares[r * cut_.n_blocks + block] = dot32(v.v, v);
                }
        }
    }

  private:
    static constexpr bool BOTH = B::BYTES > 0;
    // Wide weights would not fit into the registers beside those that are multiplied.
    static constexpr bool AHEAD = A::BYTES + B::BYTES <= 1280;

    struct Stored {
        A a;
        B b;
    };

    __device__ __forceinline__ void fetch(Stored* stored, int unit, int block) const {
        stored->a.fetch(a_ + size_t(block) * A::BYTES, lane_ + unit % OUTS);
        stored->b.fetch(b_ + size_t(block) * B::BYTES, lane_ + unit % OUTS);
    }

    // The gain of the norm is part of the weights: once per weight, not once per row.
    __device__ __forceinline__ void take(const Stored& stored, int block) {
        stored.a.decode(a_weights_);
        stored.b.decode(b_weights_);
        if (gain_ != nullptr) {
            const Activations gain(gain_ + size_t(block) * TILE_COLS);
#pragma unroll
            for (int i = 0; i < TILE_COLS; i++) {
                a_weights_[i] = a_weights_[i] * gain.v[i];
                if (BOTH) b_weights_[i] = b_weights_[i] * gain.v[i];
            }
        }
    }

    __device__ __forceinline__ static void add(float* to, float value, bool first) {
        *to = first ? value : *to + value;
    }

    const uint8_t* a_;
    const uint8_t* b_;
    int lane_;
    Cut cut_;
    const float* gain_;
    float a_weights_[TILE_COLS];
    float b_weights_[BOTH ? TILE_COLS : 1];
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
    const float total = sum_strided(squares + r * cut.n_blocks, cut.n_blocks, 1);
    return 1.0f / sqrtf(total / float(cut.n_blocks * TILE_COLS) + eps);
}
