// Products of a few rows of activations with weight matrices, a few outputs per block of threads.
//
// A block of threads owns OUTS neighbouring outputs and all columns of them. The columns are cut into
// slices at fixed places; a unit is one output of one slice, done by one thread for all rows, so each
// weight is read once. A unit's sum lies in shared memory,
//
//   parts[r][slice][out]   f32 [n_rows, n_slices, OUTS]
//   squares[r][block]      f32 [n_rows, n_blocks], of the activations, for a norm
//
// which are added up in one fixed order and two steps, with a barrier before each: four threads fold the
// terms of a sum into the first four, and any thread may add those. The number of threads decides only
// who does what: no bit depends on it, nor on the number of rows.
//
// Loops over rows and further units are not unrolled: most launches are of one row and one unit per
// thread.
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
// NORM: of a norm whose gain is part of the weights: once per weight, not once per row.
template <int OUTS, bool NORM, class A, class B = NoTile>
class Product {
  public:
    // a, b: tiles; the block's outputs begin at `first`, a multiple of OUTS.
    // gain: f32 [32 * n_blocks] of the norm
    __device__ __forceinline__ Product(const uint8_t* __restrict__ a,
                                       const uint8_t* __restrict__ b, int first, Cut cut,
                                       const float* __restrict__ gain)
        : a_(a + size_t(first / TILE_ROWS) * cut.n_blocks * A::BYTES),
          b_(b + size_t(first / TILE_ROWS) * cut.n_blocks * B::BYTES),
          lane_(first % TILE_ROWS),
          cut_(cut),
          gain_(gain) {
        if (int(threadIdx.x) < cut.n_slices * OUTS)
            fetch(threadIdx.x, int(threadIdx.x) / OUTS * cut.slice_blocks);
    }

    // Leaves the sums of all units, and with `squares` those of the activations. Waits for the
    // predecessor by itself, and calls `early` once, right after that.
    //   x  f32 [n_rows, 32 * n_blocks]
    template <class Early>
    __device__ __forceinline__ void run(const float* x, int n_rows, float* a_parts, float* b_parts,
                                        float* squares, const Early& early) {
        const int n_units = cut_.n_slices * OUTS;
        const size_t width = size_t(cut_.n_blocks) * TILE_COLS;
        int unit = threadIdx.x;
        int block = unit / OUTS * cut_.slice_blocks;
        bool first = true;
#pragma unroll 1
        while (true) {
            const bool works = unit < n_units;
            if (works) decode(block);
            await_predecessor();  // the first time; later it costs nothing
            if (first) early();
            first = false;
            if (!works) break;
            const int begin = unit / OUTS * cut_.slice_blocks;
            const bool goes_on = block + 1 < min(begin + cut_.slice_blocks, cut_.n_blocks);
            const int next_unit = goes_on ? unit : unit + blockDim.x;
            const int next_block = goes_on ? block + 1 : next_unit / OUTS * cut_.slice_blocks;
            // The next weights are under way while these are multiplied.
            if (AHEAD && next_unit < n_units) fetch(next_unit, next_block);
            const float* block_x = x + size_t(block) * TILE_COLS;
#pragma unroll 1
            for (int r = 0; r < n_rows; r++) {
                const Activations v(block_x + r * width);
                float* a = a_parts + size_t(r) * n_units + unit;
                *a = dot32(a_weights_, v) + (block == begin ? 0.0f : *a);
                if (BOTH) {
                    float* b = b_parts + size_t(r) * n_units + unit;
                    *b = dot32(b_weights_, v) + (block == begin ? 0.0f : *b);
                }
            }
            if (!AHEAD && next_unit < n_units) fetch(next_unit, next_block);
            unit = next_unit;
            block = next_block;
        }
        if (squares != nullptr) {  // from the last thread on: those have no unit, or the fewest
#pragma unroll 1
            for (int block = blockDim.x - 1 - threadIdx.x; block < cut_.n_blocks;
                 block += blockDim.x)
#pragma unroll 1
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

    __device__ __forceinline__ void fetch(int unit, int block) {
        stored_a_.fetch(a_ + size_t(block) * A::BYTES, lane_ + unit % OUTS);
        stored_b_.fetch(b_ + size_t(block) * B::BYTES, lane_ + unit % OUTS);
    }

    __device__ __forceinline__ void decode(int block) {
        const float* from = gain_ + size_t(block) * TILE_COLS;
        if constexpr (!NORM) {
            decode();
        } else if constexpr (AHEAD) {  // the gain is under way while decoding
            const Activations gain(from);
            decode();
            scale(gain);
        } else {
            decode();
            scale(Activations(from));
        }
    }

    __device__ __forceinline__ void decode() {
        stored_a_.decode(a_weights_);
        stored_b_.decode(b_weights_);
    }

    __device__ __forceinline__ void scale(const Activations& gain) {
#pragma unroll
        for (int i = 0; i < TILE_COLS; i++) {
            a_weights_[i] = a_weights_[i] * gain.v[i];
            if (BOTH) b_weights_[i] = b_weights_[i] * gain.v[i];
        }
    }

    const uint8_t* a_;
    const uint8_t* b_;
    int lane_;
    Cut cut_;
    const float* gain_;
    A stored_a_;
    B stored_b_;
    float a_weights_[TILE_COLS];
    float b_weights_[BOTH ? TILE_COLS : 1];
};

// First step, of sums of n terms that lie WIDTH apart, p[n_rows][n][WIDTH]: term j < 4 becomes the sum of
// the terms j, j + 4, ... `thread` counts the threads of the block, from either end.
template <int WIDTH>
__device__ __forceinline__ void fold_terms(float* p, int n, int n_rows, int thread) {
#pragma unroll 1
    for (int item = thread; item < n_rows * 4 * WIDTH; item += blockDim.x) {
        const int j = item / WIDTH % 4;
        float* first = p + size_t(item / (4 * WIDTH)) * n * WIDTH + item % WIDTH;
        if (j + 4 >= n) continue;
        float sum = first[j * WIDTH];
#pragma unroll 4
        for (int i = j + 4; i < n; i += 4) sum = sum + first[i * WIDTH];
        first[j * WIDTH] = sum;
    }
}

// First step of the sums of all rows, once all units are done, and of the squares for a norm.
template <int OUTS>
__device__ __forceinline__ void fold_rows(float* parts, float* squares, Cut cut, int n_sums,
                                          int n_rows) {
    fold_terms<OUTS>(parts, cut.n_slices, n_sums, threadIdx.x);
    if (squares != nullptr)
        fold_terms<1>(squares, cut.n_blocks, n_rows, blockDim.x - 1 - threadIdx.x);
}

// Second step.
__device__ __forceinline__ float sum_four(const float* p, int n, int stride) {
    const float b = n > 1 ? p[stride] : 0.0f;
    const float c = n > 2 ? p[2 * stride] : 0.0f;
    const float d = n > 3 ? p[3 * stride] : 0.0f;
    return (p[0] + c) + (b + d);
}

// Output `out` of row r.
template <int OUTS>
__device__ __forceinline__ float row_sum(const float* parts, Cut cut, int r, int out) {
    return sum_four(parts + size_t(r) * cut.n_slices * OUTS + out, cut.n_slices, OUTS);
}

// What the outputs of row r are multiplied by for its norm: 1 / sqrt(mean of squares + eps).
__device__ __forceinline__ float row_scale(const float* squares, Cut cut, int r, float eps) {
    const float total = sum_four(squares + r * cut.n_blocks, cut.n_blocks, 1);
    return 1.0f / sqrtf(total / float(cut.n_blocks * TILE_COLS) + eps);
}
