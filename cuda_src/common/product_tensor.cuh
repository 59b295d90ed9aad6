// A product by tensor cores: a unit is one slice of all outputs of a block, done by one warp for all rows, four
// at a time (common/tensor_tile.cuh).
//
// Nothing but shared memory is written before the sums are there, and the first weights of a warp are made
// factors before the activations can be read: see common/dependent.cuh. What follows that is a chain of
// latencies, one launch after another, and every wait in it counts.
// Included by common/product.cuh, which says what a product is.
#pragma once
#include "common/dependent.cuh"
#include "common/tensor_tile.cuh"

// Floats of shared memory by their number, whose address is known to be one.
class SharedFloats {
  public:
#if MEMRA_CUDA
    __device__ __forceinline__ explicit SharedFloats(float* p)
        : at_(static_cast<unsigned>(__cvta_generic_to_shared(p))) {
        settle(at_);
    }
    __device__ __forceinline__ float get(unsigned i) const {
        float v;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at_ + 4 * i) : "memory");
        return v;
    }
    __device__ __forceinline__ void put(unsigned i, float v) const {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at_ + 4 * i), "f"(v) : "memory");
    }

  private:
    uint32_t at_;
#else
    explicit SharedFloats(float* p) : p_(p) {}
    float get(unsigned i) const { return p_[i]; }
    void put(unsigned i, float v) const { p_[i] = v; }

  private:
    float* p_;
#endif
};

// OUTS outputs. NORM: of a norm whose gain is multiplied with the activations. AHEAD: whether the next weights of
// a warp are under way while it multiplies; without it, which saves registers, each block of a slice is waited for.
template <int OUTS, bool AHEAD, bool NORM, class W>
class Product {
  public:
    // gain: f32 [32 * n_blocks] of the norm
    // thread of n_threads: a multiple of 32
    __device__ __forceinline__ Product(const W& weights, Cut cut, const float* __restrict__ gain, int thread,
                                       int n_threads)
        : weights_(weights),
          cut_(cut),
          gain_(gain),
          n_warps_(n_threads / WARP_LANES),
          g_(thread % WARP_LANES / 4),
          t_(thread % 4) {
        now_ = {thread / WARP_LANES, 0};
        if (works(now_)) fetch(now_);
    }

    // Leaves the sums of the slices for Sums, and needs a barrier before that. Waits for the
    // predecessor by itself, and calls `early` once, right after that.
    //   x        f32 [n_rows, 32 * n_blocks]
    //   parts    f32 [n_rows, n_slices, PITCH]
    //   squares  f32 [n_rows, n_slices], of a norm: sums of the squares of x
    template <class Early>
    __device__ __forceinline__ void run(const float* x, int n_rows, float* parts, float* NULLABLE squares,
                                        const Early& early) {
        const float* from = place(x, now_, 0);
        settle(from);
        const SharedFloats sums_at(parts), squares_at(squares);
        uint32_t at = t_ * cut_.n_slices + now_.slice;  // of the lane's results, in slices of rows
        settle(at);
        if (works(now_)) decode();
        Place next = now_;
        if (AHEAD) {
            next = after(now_);
            if (works(next)) fetch(next);
        }
        await_predecessor();
        float4 v[2];
        if (works(now_)) load(global_pointer(from), 0, n_rows, v);
        early();
#pragma unroll 1
        while (works(now_)) {
            const bool goes_on = now_.block != 0;
#pragma unroll 1
            for (int r0 = 0; r0 < n_rows; r0 += ROWS_AT_ONCE) {
                typename Tile::Column b;
                take(v, &b);
                float square = NORM ? square_of(v) : 0.0f;
                const bool more = r0 + ROWS_AT_ONCE < n_rows;
                if (more || (AHEAD && works(next))) {
                    const int r = more ? r0 + ROWS_AT_ONCE : 0;
                    load(place(x, more ? now_ : next, r), r, n_rows, v);
                }
                typename Tile::Results c;
                tile_.multiply(b, &c);
                if (NORM) square = over_columns(square);  // while they are multiplied
                const auto put = [&](const SharedFloats& to, unsigned i, float sum) {
                    if (goes_on) sum = to.get(i) + sum;
                    to.put(i, sum);
                };
                if (r0 + t_ < n_rows) {
                    const unsigned to = at + r0 * cut_.n_slices;
#pragma unroll
                    for (int i = 0; i < OUTS / 8; i++)
                        put(sums_at, to * PITCH<OUTS> + g_ + 8 * i, tile_.result(c, i));
                    if (NORM && g_ == 2 * t_) put(squares_at, to, square);  // one lane that has that row's
                }
            }
            const int slice = now_.slice;
            now_ = AHEAD ? next : after(now_);
            if (works(now_)) {
                at += now_.slice - slice;
                if (!AHEAD) {
                    fetch(now_);
                    load(place(x, now_, 0), 0, n_rows, v);
                }
                decode();
                if (AHEAD) {
                    next = after(now_);
                    if (works(next)) fetch(next);
                }
            }
        }
    }

  private:
    typedef TensorTile<OUTS, W> Tile;

    // A block of a slice.
    struct Place {
        int slice, block;
    };
    __device__ __forceinline__ bool works(Place at) const { return at.slice < cut_.n_slices; }
    __device__ __forceinline__ int block(Place at) const { return at.slice * cut_.slice_blocks + at.block; }
    __device__ __forceinline__ Place after(Place at) const {
        const int i = at.block + 1;
        if (i < cut_.slice_blocks && block(at) + 1 < cut_.n_blocks) return {at.slice, i};
        return {at.slice + n_warps_, 0};
    }

    __device__ __forceinline__ void fetch(Place place) {
        const size_t at = block(place);
        tile_.fetch(weights_, at, g_, t_);
        if constexpr (NORM) {
            const float4* from = reinterpret_cast<const float4*>(gain_ + at * TILE_COLS + 8 * t_);
            gains_[0] = from[0], gains_[1] = from[1];
        }
    }
    __device__ __forceinline__ void decode() {
        tile_.decode(t_);
        gain_now_[0] = gains_[0], gain_now_[1] = gains_[1];
    }
    // Where the activations of row r0 + g / 2 lie.
    __device__ __forceinline__ const float* place(const float* x, Place at, int r0) const {
        return x + (size_t(r0 + g_ / 2) * cut_.n_blocks + block(at)) * TILE_COLS + 8 * t_;
    }
    // Zeros behind the last row.
    __device__ __forceinline__ void load(const float* from, int r0, int n_rows, float4* v) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            v[i] = r0 + g_ / 2 < n_rows ? reinterpret_cast<const float4*>(from)[i]
                                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __device__ __forceinline__ void take(const float4* now, typename Tile::Column* column) const {
        float v[8];
        spread(now, v);
        if constexpr (NORM) {
            float gain[8];
            spread(gain_now_, gain);
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
    int n_warps_, g_, t_;
    Place now_;
    Tile tile_;
    float4 gains_[2], gain_now_[2];
};
