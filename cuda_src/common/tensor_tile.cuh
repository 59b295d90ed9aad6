// What one warp multiplies at a time on tensor cores: one or two blocks of 32 columns, by four rows or two.
//
// One instruction (m16n8k8, tf32) multiplies 16 rows of weights by the columns of B: for each row of activations
// what the upper 11 bits of its values are, and the upper 11 bits of what is left of them; so a row is known to
// 2^-21 of each element. Weights of f32 are taken apart likewise, which makes it two instructions; of a block
// with a scale the codes are multiplied. A column of B does not see the others: a row gets the same bits
// whatever stands beside it.
//
// Lane (g, t) = (lane / 4, lane % 4) holds columns 8t ... 8t + 7 of a block; both sides take k in that order.
//   one block   four rows: the lane has that of row g / 2, and the results are 16 outputs of row t, of which it
//               has g and g + 8
//   two blocks  two rows: the lane has block g / 2 % 2 of row g / 4, and the results are eight outputs of row
//               t / 2 over block t % 2, of which it has g; the others, of weights by the other block's
//               activations, nobody looks at
#pragma once
#include "common/mma.cuh"
#include "common/settle.cuh"
#include "common/tiles.cuh"
#include "common/weights.cuh"

template <class W>
constexpr unsigned ROWS_AT_ONCE = 4 / W::BLOCKS;
constexpr uint32_t UPPER_BITS = 0xFFFFE000u;  // of a float: what tf32 keeps

__device__ __forceinline__ bool infinite(float v) { return fabsf(v) == INF_F32; }
// The sum of what two parts of the same values gave: an infinity leaves nothing behind itself but NaN.
__device__ __forceinline__ float joined(float upper, float rest) {
    return infinite(upper) ? upper : upper + rest;
}

// Eight floats from two pieces.
__device__ __forceinline__ void spread(const float4* pieces, float* v) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v[4 * i] = pieces[i].x, v[4 * i + 1] = pieces[i].y;
        v[4 * i + 2] = pieces[i].z, v[4 * i + 3] = pieces[i].w;
    }
}
template <int OUTS, class W>
class TensorTile {
    static constexpr int SUBS = OUTS * W::BLOCKS / 16;  // instructions beside each other

  public:
    static constexpr int N_RESULTS = OUTS / 8;  // of a lane

    // The lane's share of B.
    struct Column {
        uint32_t b[8];
    };
    // What the instructions give for each 16 rows, for the rest of weights of f32, and for weights of 1, by which
    // offsets are multiplied.
    struct Results {
        float c[SUBS][4], low[SUBS][4], ones[4];
    };
    // Weights as they are stored.
    struct Stored {
        typename W::Upper::Quarter upper[SUBS];
        typename W::Lower::Quarter lower[SUBS];

        // Asks for a block of columns, and for another where an instruction takes two.
        __device__ __forceinline__ void fetch(const W& weights, unsigned block, unsigned other, unsigned g,
                                              unsigned t) {
            const uint8_t* from = weights.upper + block * W::Upper::BYTES;
            const uint8_t* lower_from = weights.lower + other * W::Lower::BYTES;
#pragma unroll
            for (int s = 0; s < SUBS; s++) {
                upper[s].fetch(from, weights.row + g, W::STEP * s, t);
                lower[s].fetch(lower_from, weights.row + g, W::STEP * s + W::LOWER, t);
            }
        }
    };
    // What is stored becomes what is multiplied. HELD: here, and not where it is needed.
    template <bool HELD>
    __device__ __forceinline__ void decode(const Stored& stored, unsigned t) {
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
            float w[16];
            stored.upper[s].factors(w, t);
            stored.lower[s].factors(w + 8, t);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                // Its payload may be in the bits that are cut off.
                if (!SHORT && w[i] != w[i]) w[i] = NAN_F32;
                a_[s][i] = __float_as_uint(w[i]);
                if (HELD) settle(a_[s][i]);
            }
            if constexpr (W::BLOCKS == 1) {
                upper_[s] = stored.upper[s].scaling(), lower_[s] = stored.lower[s].scaling();
            } else {
                upper_[s] = t % 2 == 0 ? stored.upper[s].scaling() : stored.lower[s].scaling();
            }
        }
    }
    // From the lane's activations.
    __device__ __forceinline__ static void take(const float* v, unsigned g, Column* column) {
        // Of odd g the rest is wanted; tensor cores cut the lower bits of the others off by themselves.
        const uint32_t taken = g % 2 != 0 ? UPPER_BITS : 0u;
#pragma unroll
        for (int i = 0; i < 8; i++)
            column->b[i] = __float_as_uint(v[i] - __uint_as_float(__float_as_uint(v[i]) & taken));
    }
    __device__ __forceinline__ void multiply(const Column& column, Results* out) const {
        const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t* b = column.b + 2 * j;
            if constexpr (OFFSET) {
                const uint32_t one = __float_as_uint(1.0f), a[4] = {one, one, one, one};
                mma_m16n8k8_tf32(out->ones, a, b, j == 0 ? zeros : out->ones);
            }
#pragma unroll
            for (int s = 0; s < SUBS; s++) {
                const uint32_t* w = a_[s] + 2 * j;
                const uint32_t a[4] = {w[0], w[8], w[1], w[9]};
                mma_m16n8k8_tf32(out->c[s], a, b, j == 0 ? zeros : out->c[s]);
                if constexpr (!SHORT) {
                    uint32_t rest[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float whole = __uint_as_float(a[i]);
                        rest[i] = infinite(whole) ? 0u
                                                  : __float_as_uint(whole - __uint_as_float(a[i] & UPPER_BITS));
                    }
                    mma_m16n8k8_tf32(out->low[s], rest, b, j == 0 ? zeros : out->low[s]);
                }
            }
        }
    }
    // Output g + 8 * i of the lane's row.
    __device__ __forceinline__ float result(const Results& of, int i, unsigned t) const {
        const bool upper = W::BLOCKS == 1 ? i % 2 == 0 : t % 2 == 0;
        const int s = W::BLOCKS == 1 ? i / 2 : i;
        const float *c = of.c[s], *low = of.low[s];
        const float c0 = upper ? c[0] : c[2], c1 = upper ? c[1] : c[3];
        const float sum = SHORT ? joined(c0, c1)
                                : joined(joined(c0, upper ? low[0] : low[2]), joined(c1, upper ? low[1] : low[3]));
        const float ones = OFFSET ? joined(of.ones[0], of.ones[1]) : 0.0f;
        if (W::BLOCKS == 1 && i % 2 != 0) return lower_[s].sum(sum, ones);
        return upper_[s].sum(sum, ones);
    }

  private:
    typedef typename W::Upper::Quarter Upper;
    typedef typename W::Lower::Quarter Lower;
    // Whether weights are what tensor cores multiply, or have a rest; whether there are offsets.
    static constexpr bool SHORT = Upper::SHORT && Lower::SHORT;
    static constexpr bool OFFSET = Upper::OFFSET || Lower::OFFSET;

    uint32_t a_[SUBS][16];  // factors
    // Of the results; of two blocks, which are of one format, the lane's.
    typename Upper::Scaling upper_[SUBS];
    typename Lower::Scaling lower_[W::BLOCKS == 1 ? SUBS : 1];
};
