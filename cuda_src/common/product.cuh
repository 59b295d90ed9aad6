// Products of a few rows of activations with weight matrices, a few outputs per block of threads.
//
// A block of threads owns OUTS neighbouring outputs and all columns of them. The columns are cut into
// slices at fixed places; a unit is one output of one slice, done by one thread for all rows, so each
// weight is read once. A warp has ACROSS slices of 32 / ACROSS outputs and adds them, a term; terms lie in
// shared memory, where any thread may add those of an output behind a barrier. Every sum has one fixed
// order. The number of threads decides only who does what: no bit depends on it, nor on the number of
// rows.
//
// Loops over rows and further units are not unrolled: most launches are of one row and one unit per
// thread.
//
// Nothing but shared memory is written before the sums are there, and the first weights of a thread
// are asked for before the activations can be read: see common/dependent.cuh. What follows that is a
// chain of latencies, one launch after another, and every wait in it counts.
#pragma once
#include "common/dependent.cuh"
#include "common/tiles.cuh"

// Where the columns of a matrix are cut: a function of its shape alone.
struct Cut {
    int n_blocks;      // of 32 columns
    int slice_blocks;  // of a slice
    int n_slices;
};

// Whether the lanes of a warp add up what they have; a host's threads leave it all for later, since
// asking each other costs them more.
constexpr bool WARP_ADDS = MEMRA_CUDA;

// The sum of a slice and its neighbours in the warp: 0 + 1, or (0 + 1) + (2 + 3).
template <int ACROSS>
__device__ __forceinline__ float with_neighbours(float sum) {
#if MEMRA_CUDA
#pragma unroll
    for (int lanes = 32 / ACROSS; lanes < 32; lanes *= 2)
        sum = sum + __shfl_xor_sync(FULL_MASK, sum, lanes);
#endif
    return sum;
}

// Some outputs of one matrix, multiplied by a few rows.
// NORM: of a norm whose gain is part of the weights: once per weight, not once per row.
template <int OUTS, int ACROSS, bool NORM, class Tile>
class Product {
  public:
    // w: tiles; the block's outputs begin at `first`, a multiple of OUTS.
    // gain: f32 [32 * n_blocks] of the norm
    // thread of n_threads: a multiple of 32, as are the threads of the block before
    __device__ __forceinline__ Product(const uint8_t* __restrict__ w, int first, Cut cut,
                                       const float* __restrict__ gain, int thread, int n_threads)
        : w_(w + size_t(first / TILE_ROWS) * cut.n_blocks * Tile::BYTES),
          row_(first % TILE_ROWS),
          cut_(cut),
          gain_(gain),
          unit_(thread),
          n_threads_(n_threads) {
        if (unit_ < n_units(cut)) fetch(0);
    }

    // All units, with those without a slice that fill up the last warps.
    __device__ __forceinline__ static unsigned n_units(Cut cut) {
        return unsigned(cut.n_slices + ACROSS - 1) / ACROSS * ACROSS * OUTS;
    }

    // Leaves the sums of the slices for Sums, and needs a barrier before that. Waits for the
    // predecessor by itself, and calls `early` once, right after that.
    //   x        f32 [n_rows, 32 * n_blocks]
    //   parts    f32 [n_rows, n_slices, OUTS]
    //   squares  f32 [n_rows, n_slices] or null: sums of the squares of x
    template <class Early>
    __device__ __forceinline__ void run(const float* x, int n_rows, float* parts,
                                        float* NULLABLE squares, const Early& early) {
        bool works = unit_ < n_units(cut_);
        if (works) decode(0);
        const float* block_x = x + size_t(block(0)) * TILE_COLS;
        if (LONE) prefetch_line(block_x);  // if only to work the address out before the wait, not behind it
        await_predecessor();
        Activations v;
        if (LONE) v = Activations(block_x);  // under way before anything else is thought about
        early();
        int i = 0;  // block of the slice
#pragma unroll 1
        while (works) {
            const int at = slice() * OUTS + out(), square_at = slice();
            const bool has_slice = slice() < cut_.n_slices;
            const bool counts = has_slice && slice() * cut_.slice_blocks + i < cut_.n_blocks;
            const bool begins = i == 0, ends = i + 1 == cut_.slice_blocks;
            const bool leaves = !WARP_ADDS || !ends || slice() % ACROSS == 0;
            const bool squared = squares != nullptr && out() / NEAR == 0;  // the same for the warp
            const bool has_square = has_slice && out() == 0;
            i = ends ? 0 : i + 1;
            if (ends) unit_ += n_threads_;
            works = unit_ < n_units(cut_);
            // The next weights are under way while these are multiplied.
            if (AHEAD && works) fetch(i);
            const auto add = [&](float sum, float* to, bool owns) {
                sum = counts ? sum : 0.0f;
                if (owns && !begins) sum = *to + sum;
                if (ends) sum = with_neighbours<ACROSS>(sum);
                if (owns && leaves) *to = sum;
            };
#pragma unroll 1
            for (int r = 0; r < n_rows; r++) {
                if (!LONE || r > 0) v = Activations(block_x + size_t(r) * (cut_.n_blocks * TILE_COLS));
                add(dot32(weights_, v), parts + r * (cut_.n_slices * OUTS) + at, has_slice);
                if (squared) add(dot32(v.v, v), squares + r * cut_.n_slices + square_at, has_square);
            }
            if (works) {
                if (!AHEAD) fetch(i);
                decode(i);
                block_x = x + size_t(block(i)) * TILE_COLS;
                if (LONE) v = Activations(block_x);
            }
        }
    }

  private:
    static constexpr int NEAR = 32 / ACROSS;  // outputs of a warp
    // Slices are short, mostly one block, and activations far away; or they are long and the activations near
    // (weights in f32 leave no registers to hold them early).
    static constexpr bool LONE = ACROSS > 1 && Tile::BYTES <= 2048;
    // Wide weights would not fit into the registers beside those that are multiplied.
    static constexpr bool AHEAD = !LONE && Tile::BYTES <= 1280;

    __device__ __forceinline__ int slice() const {
        return unit_ / (ACROSS * OUTS) * ACROSS + unit_ / NEAR % ACROSS;
    }
    __device__ __forceinline__ int out() const {
        return unit_ / 32 % (OUTS / NEAR) * NEAR + unit_ % NEAR;
    }
    // Block i of the unit's slice; where there is none, one that does no harm.
    __device__ __forceinline__ int block(int i) const {
        return min(slice() * cut_.slice_blocks + i, cut_.n_blocks - 1);
    }
    __device__ __forceinline__ void fetch(int i) {
        stored_.fetch(w_ + size_t(block(i)) * Tile::BYTES, row_ + out());
    }
    __device__ __forceinline__ void decode(int i) {
        if constexpr (NORM) {  // the gain is under way while decoding
            const Activations gain(gain_ + size_t(block(i)) * TILE_COLS);
            stored_.decode(weights_);
#pragma unroll
            for (int j = 0; j < TILE_COLS; j++) weights_[j] = weights_[j] * gain.v[j];
        } else {
            stored_.decode(weights_);
        }
    }

    const uint8_t* w_;
    int row_;
    Cut cut_;
    const float* gain_;
    unsigned unit_, n_threads_;
    Tile stored_;
    float weights_[TILE_COLS];
};

// Of n terms, RUNNING sums of every RUNNING-th, added in a tree.
template <int RUNNING, class Term>
__device__ __forceinline__ float sum_of(int n, const Term& term) {
    static_assert(RUNNING == 2 || RUNNING == 4, "two running sums, or four");
    float s[RUNNING];
#pragma unroll
    for (int j = 0; j < RUNNING; j++) s[j] = j < n ? term(j) : 0.0f;
#pragma unroll 1
    for (int i = RUNNING; i < n; i += RUNNING)
#pragma unroll
        for (int j = 0; j < RUNNING; j++)
            if (i + j < n) s[j] = s[j] + term(i + j);
    if constexpr (RUNNING == 2) return s[0] + s[1];
    else return (s[0] + s[2]) + (s[1] + s[3]);
}

// Who adds up the terms that the units have left: on a GPU RUNNING lanes share a sum, so that the chain
// behind the barrier is short; on the host a sum is one thread's.
//   OUTS of a block; ACROSS slices are a term; MOST terms that a running sum can have
template <int OUTS, int ACROSS, int RUNNING, int MOST>
struct Sums {
    static constexpr unsigned SHARED = WARP_ADDS ? RUNNING : 1;  // lanes of a sum
    static constexpr unsigned AT_ONCE = WARP_LANES / SHARED;     // sums of a warp
    Cut cut;

    // For n sums: numbers that the threads of a block take in turn, whole warps of them; the sum of a number,
    // n or more where there is none; and whether its lane is the first of those that share it.
    __device__ __forceinline__ static unsigned numbers(unsigned n) {
        return (n * SHARED + WARP_LANES - 1) / WARP_LANES * WARP_LANES;
    }
    __device__ __forceinline__ static unsigned sum_at(unsigned number) {
        return number / WARP_LANES * AT_ONCE + number % WARP_LANES % AT_ONCE;
    }
    __device__ __forceinline__ static bool leads(unsigned number) { return number % WARP_LANES < AT_ONCE; }

    // Of all slices, APART of each other. On a GPU the lanes of a sum ask together, and all get it.
    template <int APART>
    __device__ __forceinline__ float total(const float* p) const {
        const int n = unsigned(cut.n_slices + ACROSS - 1) / ACROSS;
#if MEMRA_CUDA
        const int j = threadIdx.x % WARP_LANES / AT_ONCE;
        const float* from = p + j * ACROSS * APART;
        float terms[MOST];
#pragma unroll
        for (int k = 0; k < MOST; k++)
            terms[k] = j + k * RUNNING < n ? from[k * RUNNING * ACROSS * APART] : 0.0f;
        float sum = terms[0];
#pragma unroll
        for (int k = 1; k < MOST; k++)
            if (j + k * RUNNING < n) sum = sum + terms[k];
#pragma unroll
        for (int lanes = WARP_LANES / 2; lanes >= int(AT_ONCE); lanes /= 2)
            sum = sum + __shfl_xor_sync(FULL_MASK, sum, lanes);
        return sum;
#else
        return sum_of<RUNNING>(n, [&](int i) {
            const auto slice = [&](int k) {
                const int s = i * ACROSS + k;
                return s < cut.n_slices ? p[s * APART] : 0.0f;
            };
            const float first = slice(0) + slice(1);
            return ACROSS == 2 ? first : first + (slice(2) + slice(3));
        });
#endif
    }

    // Output `out` of row r.
    __device__ __forceinline__ float output(const float* parts, int r, int out) const {
        return total<OUTS>(parts + r * cut.n_slices * OUTS + out);
    }
    // What the outputs of row r are multiplied by for its norm: 1 / sqrt(mean of squares + eps); share is
    // 1 / columns.
    __device__ __forceinline__ float scale(const float* squares, int r, float share, float eps) const {
        return 1.0f / sqrtf(total<1>(squares + r * cut.n_slices) * share + eps);
    }
};
