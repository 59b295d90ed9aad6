// A product by tensor cores: a unit is one slice of all outputs of a block, done by one warp for all rows, four
// or two at a time (common/tensor_tile.cuh).
//
// Nothing but shared memory is written before the sums are there, and the first weights of a warp are made
// factors before the activations can be read: see common/dependent.cuh. What follows that is a chain of
// latencies, one launch after another, and every wait and every instruction in it counts.
// Included by common/product.cuh, which says what a product is.
#pragma once
#include "common/dependent.cuh"
#include "common/neighbours.cuh"
#include "common/shared_floats.cuh"
#include "common/tensor_tile.cuh"

// OUTS outputs. NORM: of a norm whose gain is multiplied with the activations.
template <int OUTS, bool NORM, class W>
class Product {
  public:
    // gain: f32 [32 * n_blocks] of the norm
    // thread of n_threads: a multiple of 32
    __device__ __forceinline__ Product(const W& weights, Cut cut, const float* __restrict__ gain, unsigned thread,
                                       unsigned n_threads)
        : weights_(weights),
          cut_(cut),
          gain_(gain),
          n_warps_(n_threads / WARP_LANES),
          g_(thread % WARP_LANES / 4),
          t_(thread % 4) {
        now_ = {thread / WARP_LANES, 0}, next_ = after(now_);
        if (works(now_)) fetch();
    }

    // Leaves the sums of the slices for Sums, and needs a barrier before that. Waits for the
    // predecessor by itself, and calls `then` once, right after that.
    //   x        f32 [n_rows, 32 * n_blocks]
    //   parts    f32 [n_rows, n_slices, PITCH]
    //   squares  f32 [n_rows, n_slices], of a norm: sums of the squares of x
    template <class Then>
    __device__ __forceinline__ void run(const float* x, unsigned n_rows, SharedFloats parts, SharedFloats squares,
                                        const Then& then) {
        const float* from = place(x, now_, 0, n_rows);
        const unsigned row = t_ / W::BLOCKS;  // of the lane's results
        unsigned at = row * cut_.n_slices + now_.slice;  // of these, in slices of rows
        settle(at);
        float4 v[2];
        if (works(now_)) {
            tile_.template decode<true>(stored_, t_);
            address_of_line(from);
        }
        await_predecessor();
        if (works(now_)) load(global_pointer(from), v);
        then();
        if (!works(now_)) return;
        unsigned r0 = 0;
#pragma unroll 1
        while (true) {
            typename Tile::Column b;
            take(v, &b);
            float square = NORM ? square_of(v) : 0.0f;
            settle(square);
            typename Tile::Results c;
            tile_.multiply(b, &c);
            // The rest up to the results is done meanwhile.
            if (NORM) square = sum_of_neighbours<4>(square);  // of the lanes that share a row
            // The next rows, or the first ones of the next block.
            const unsigned r = r0 + ROWS_AT_ONCE<W>;
            const bool same = r < n_rows, more = same || works(next_);
            if (more) load(place(x, same ? now_ : next_, same ? r : 0, n_rows), v);
            float sums[Tile::N_RESULTS], others[Tile::N_RESULTS];
#pragma unroll
            for (int i = 0; i < Tile::N_RESULTS; i++) {
                sums[i] = tile_.result(c, i, t_);
                if (W::BLOCKS == 2) {  // of the second block, which the slice may lack
                    others[i] = __shfl_xor_sync(FULL_MASK, sums[i], 1);
                    if (!both(now_)) others[i] = 0.0f;
                }
            }
            if (t_ % W::BLOCKS == 0 && r0 + row < n_rows) {
                const bool goes_on = now_.block != 0;
                const unsigned to = at + r0 * cut_.n_slices;
#pragma unroll
                for (int i = 0; i < Tile::N_RESULTS; i++) {
                    const unsigned out = to * PITCH<OUTS> + g_ + 8 * i;
                    float sum = goes_on ? parts.get(out) + sums[i] : sums[i];
                    if (W::BLOCKS == 2) sum = sum + others[i];
                    parts.put(out, sum);
                }
                if (NORM && g_ == 2 * t_)  // one lane that has that row's
                    squares.put(to, goes_on ? squares.get(to) + square : square);
            }
            if (!more) break;
            r0 = same ? r : 0;
            if (same) continue;
            at += next_.slice - now_.slice;
            now_ = next_;
            next_ = after(now_);
            fetch();
            tile_.template decode<true>(stored_, t_);
        }
    }

  private:
    typedef TensorTile<OUTS, W> Tile;

    // A block of a slice.
    struct Place {
        unsigned slice, block;
    };
    __device__ __forceinline__ bool works(Place at) const { return at.slice < cut_.n_slices; }
    // Of a place, or `further` on; the last one where there is none.
    __device__ __forceinline__ unsigned block(Place at, unsigned further = 0) const {
        return min(at.slice * cut_.slice_blocks + at.block + further, cut_.n_blocks - 1);
    }
    // Whether the slice has both of two blocks.
    __device__ __forceinline__ bool both(Place at) const {
        return at.block + 1 < cut_.slice_blocks && at.slice * cut_.slice_blocks + at.block + 1 < cut_.n_blocks;
    }
    __device__ __forceinline__ Place after(Place at) const {
        const unsigned i = at.block + W::BLOCKS;
        if (i < cut_.slice_blocks && at.slice * cut_.slice_blocks + i < cut_.n_blocks) return {at.slice, i};
        return {at.slice + n_warps_, 0};
    }

    __device__ __forceinline__ void fetch() {
        stored_.fetch(weights_, block(now_), block(now_, W::BLOCKS - 1), g_, t_);
        if constexpr (NORM) {
            static_assert(W::BLOCKS == 1, "gains and squares are of one block");
            const float4* from = reinterpret_cast<const float4*>(gain_ + (block(now_) * TILE_COLS + 8 * t_));
            gains_[0] = from[0], gains_[1] = from[1];
        }
    }
    // The lane's activations, or those of the last row where there is none: nobody looks at what they give.
    __device__ __forceinline__ const float* place(const float* x, Place at, unsigned r0, unsigned n_rows) const {
        const unsigned r = min(r0 + g_ / (2 * W::BLOCKS), n_rows - 1);
        return x + ((r * cut_.n_blocks + block(at, g_ / 2 % W::BLOCKS)) * TILE_COLS + 8 * t_);
    }
    __device__ __forceinline__ static void load(const float* from, float4* v) {
        v[0] = reinterpret_cast<const float4*>(from)[0], v[1] = reinterpret_cast<const float4*>(from)[1];
    }
    __device__ __forceinline__ void take(const float4* now, typename Tile::Column* column) const {
        float v[8];
        spread(now, v);
        if constexpr (NORM) {
            float gain[8];
            spread(gains_, gain);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = v[i] * gain[i];
        }
        Tile::take(v, g_, column);
    }
    // Of the lane's columns.
    __device__ __forceinline__ static float square_of(const float4* now) {
        float v[8], s[2];
        spread(now, v);
        s[0] = v[0] * v[0], s[1] = v[1] * v[1];
#pragma unroll
        for (int i = 2; i < 8; i++) s[i % 2] = fmaf(v[i], v[i], s[i % 2]);
        return s[0] + s[1];
    }

    W weights_;
    Cut cut_;
    const float* gain_;
    unsigned n_warps_, g_, t_;
    Place now_, next_;
    typename Tile::Stored stored_;
    Tile tile_;
    float4 gains_[2];
};
