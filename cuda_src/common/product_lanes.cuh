// A product by threads: a unit is one output of one slice, done by one thread for all rows, so each weight is
// read once. For devices that have no tensor cores for floats, the host among them.
// Included by common/product.cuh, which says what a product is.
#pragma once
#include "common/dependent.cuh"
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
template <int OUTS, bool, bool NORM, class W>
class Product {
  public:
    // gain: f32 [32 * n_blocks] of the norm
    // thread of n_threads: a multiple of 32
    __device__ __forceinline__ Product(const W& weights, Cut cut, const float* __restrict__ gain, int thread,
                                       int n_threads)
        : weights_(weights), cut_(cut), gain_(gain), thread_(thread), n_threads_(n_threads) {}

    // Leaves the sums of the slices for Sums, and needs a barrier before that. Waits for the
    // predecessor by itself, and calls `early` once, right after that.
    //   x        f32 [n_rows, 32 * n_blocks]
    //   parts    f32 [n_rows, n_slices, PITCH]
    //   squares  f32 [n_rows, n_slices], of a norm: sums of the squares of x
    template <class Early>
    __device__ __forceinline__ void run(const float* x, int n_rows, float* parts, float* NULLABLE squares,
                                        const Early& early) {
        await_predecessor();
        early();
#pragma unroll 1
        for (int unit = thread_; unit < OUTS * cut_.n_slices; unit += n_threads_) {
            const int slice = unit / OUTS, out = unit % OUTS;
            const int first = slice * cut_.slice_blocks;
            const int n = min(cut_.slice_blocks, cut_.n_blocks - first);
#pragma unroll 1
            for (int i = 0; i < n; i++) {
                float w[TILE_COLS];
                decode(first + i, out, w);
                const auto add = [&](float sum, float* to) { *to = i == 0 ? sum : *to + sum; };
#pragma unroll 1
                for (int r = 0; r < n_rows; r++) {
                    const float* v = x + (size_t(r) * cut_.n_blocks + first + i) * TILE_COLS;
                    const int at = r * cut_.n_slices + slice;
                    add(dot_columns(w, v), parts + at * PITCH<OUTS> + out);
                    if (NORM && out == 0) add(dot_columns(v, v), squares + at);
                }
            }
        }
    }

  private:
    __device__ __forceinline__ void decode(int block, int out, float* w) const {
        const int row = out / 16 * weights_.step + out % 8;
        if (out % 16 < 8) decode_tile<typename W::Upper>(weights_.upper, block, weights_.upper_row + row, w);
        else decode_tile<typename W::Lower>(weights_.lower, block, weights_.lower_row + row, w);
        if constexpr (NORM) {
            const Activations gain(gain_ + size_t(block) * TILE_COLS);
#pragma unroll
            for (int j = 0; j < TILE_COLS; j++) w[j] = w[j] * gain.v[j];
        }
    }
    template <class Tile>
    __device__ __forceinline__ static void decode_tile(const uint8_t* tiles, int block, int row, float* w) {
        Tile stored;
        stored.fetch(tiles + size_t(block) * Tile::BYTES, row);
        stored.decode(w);
    }

    W weights_;
    Cut cut_;
    const float* gain_;
    int thread_, n_threads_;
};
