// A product by threads: a unit is one output of one slice, done by one thread for all rows, so each weight is
// read once. For devices that have no tensor cores for floats, the host among them.
// Included by common/product.cuh, which says what a product is.
#pragma once
#include "common/dependent.cuh"
#include "common/shared_floats.cuh"
#include "common/weights.cuh"

// The sum of w[i] * x[i] over 32 columns, in the order of dot32; on a GPU with few registers at a time.
__device__ __forceinline__ float dot_columns(const float* w, const float* x) {
#if MEMRA_CUDA
    float s[8];
#pragma unroll
    for (int b = 0; b < TILE_COLS; b += 8) {
        const float4 pieces[2] = {reinterpret_cast<const float4*>(x + b)[0],
                                  reinterpret_cast<const float4*>(x + b)[1]};
        const float v[8] = {pieces[0].x, pieces[0].y, pieces[0].z, pieces[0].w,
                            pieces[1].x, pieces[1].y, pieces[1].z, pieces[1].w};
#pragma unroll
        for (int j = 0; j < 8; j++) s[j] = b == 0 ? w[j] * v[j] : fmaf(w[b + j], v[j], s[j]);
        asm volatile("" ::: "memory");
    }
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
#else
    return dot32(w, Activations(x));
#endif
}

// OUTS outputs. NORM: of a norm whose gain is part of the weights: once per weight, not once per row.
template <int OUTS, bool NORM, class W>
class Product {
  public:
    // gain: f32 [32 * n_blocks] of the norm
    // thread of n_threads: a multiple of 32
    __device__ __forceinline__ Product(const W& weights, Cut cut, const float* __restrict__ gain, unsigned thread,
                                       unsigned n_threads)
        : weights_(weights), cut_(cut), gain_(gain), thread_(thread), n_threads_(n_threads) {}

    // Leaves the sums of the slices for Sums, and needs a barrier before that. Waits for the
    // predecessor by itself, and calls `then` once, right after that.
    //   x        f32 [n_rows, 32 * n_blocks]
    //   parts    f32 [n_rows, n_slices, PITCH]
    //   squares  f32 [n_rows, n_slices], of a norm: sums of the squares of x
    template <class Then>
    __device__ __forceinline__ void run(const float* x, unsigned n_rows, SharedFloats parts, SharedFloats squares,
                                        const Then& then) {
        await_predecessor();
        then();
#pragma unroll 1
        for (unsigned unit = thread_; unit < OUTS * cut_.n_slices; unit += n_threads_) {
            const unsigned slice = unit / OUTS, out = unit % OUTS;
            const unsigned first = slice * cut_.slice_blocks;
            const unsigned n = min(cut_.slice_blocks, cut_.n_blocks - first);
#pragma unroll 1
            for (unsigned i = 0; i < n; i++) {
                float w[TILE_COLS];
                decode(first + i, out, w);
                const auto put = [&](const SharedFloats& to, unsigned at, float sum) {
                    to.put(at, i == 0 ? sum : to.get(at) + sum);
                };
#pragma unroll 1
                for (unsigned r = 0; r < n_rows; r++) {
                    const float* v = x + (r * cut_.n_blocks + first + i) * TILE_COLS;
                    const unsigned at = r * cut_.n_slices + slice;
                    put(parts, at * PITCH<OUTS> + out, dot_columns(w, v));
                    if (NORM && out == 0) put(squares, at, dot_columns(v, v));
                }
            }
        }
    }

  private:
    __device__ __forceinline__ void decode(unsigned block, unsigned out, float* w) const {
        constexpr unsigned OUTS_OF_ROWS = 16 / W::BLOCKS;  // outputs of the rows that lie beside each other
        const unsigned row = weights_.row + out / OUTS_OF_ROWS * W::STEP + out % 8;
        if (out % OUTS_OF_ROWS < 8) decode_tile<typename W::Upper>(weights_.upper, block, row, w);
        else decode_tile<typename W::Lower>(weights_.lower, block, row + W::LOWER, w);
        if constexpr (NORM) {
            const Activations gain(gain_ + size_t(block) * TILE_COLS);
#pragma unroll
            for (int j = 0; j < TILE_COLS; j++) w[j] = w[j] * gain.v[j];
        }
    }
    template <class Tile>
    __device__ __forceinline__ static void decode_tile(const uint8_t* tiles, unsigned block, unsigned row, float* w) {
        Tile stored;
        stored.fetch(tiles + block * Tile::BYTES, row);
        stored.decode(w);
    }

    W weights_;
    Cut cut_;
    const float* gain_;
    unsigned thread_, n_threads_;
};
