// What one warp multiplies at a time on tensor cores: 32 columns of 16 outputs or more, by four rows.
//
// One instruction (m16n8k8, tf32) multiplies 16 outputs by the columns of B: for each of four rows what the
// upper 11 bits of its activations are, and the upper 11 bits of what is left of them; so a row is known to
// 2^-21 of each element. Weights of f32 are taken apart likewise, which makes it two instructions; of a block
// with a scale the codes are multiplied. A column of B does not see the others: a row gets the same bits
// whatever stands beside it.
//
// Lane (g, t) = (lane / 4, lane % 4) holds columns 8t ... 8t + 7 of a block, of outputs g and g + 8 of every 16
// and of row g / 2: both sides take k in that order. Its results are these outputs of row t.
#pragma once
#include "common/mma.cuh"
#include "common/tiles.cuh"
#include "common/weights.cuh"

constexpr int ROWS_AT_ONCE = 4;
constexpr uint32_t UPPER_BITS = 0xFFFFE000u;  // of a float: what tf32 keeps

// A value in a register at this point, and neither before nor behind it.
__device__ __forceinline__ void settle(uint32_t& v) {
#if MEMRA_CUDA
    asm volatile("" : "+r"(v));
#endif
}
template <class T>
__device__ __forceinline__ void settle(T*& p) {
#if MEMRA_CUDA
    asm volatile("" : "+l"(p));
#endif
}

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
// The sum over the four lanes that share a row.
__device__ __forceinline__ float over_columns(float sum) {
    sum = sum + __shfl_xor_sync(FULL_MASK, sum, 1);
    return sum + __shfl_xor_sync(FULL_MASK, sum, 2);
}

template <int OUTS, class W>
class TensorTile {
  public:
    static constexpr int N_RESULTS = OUTS / 8;  // of a lane

    // The lane's share of B.
    struct Column {
        uint32_t b[8];
    };
    // What the instructions give for each 16 outputs, for the rest of weights of f32, and for weights of 1,
    // by which offsets are multiplied.
    struct Results {
        float c[OUTS / 16][4], low[OUTS / 16][4], ones[4];
    };

    // Asks for a block of columns, while the one before may still be multiplied.
    __device__ __forceinline__ void fetch(const W& weights, size_t block, int g, int t) {
        const uint8_t* upper = weights.upper + block * W::Upper::BYTES;
        const uint8_t* lower = weights.lower + block * W::Lower::BYTES;
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
            upper_[s].fetch(upper, weights.upper_row + weights.step * s + g, t);
            lower_[s].fetch(lower, weights.lower_row + weights.step * s + g, t);
        }
    }
    // What was fetched becomes what is multiplied.
    __device__ __forceinline__ void decode(int t) {
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
            float w[16];
            upper_[s].factors(w, t);
            lower_[s].factors(w + 8, t);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                a_[s][i] = __float_as_uint(w[i]);
                settle(a_[s][i]);
            }
            upper_now_[s] = upper_[s], lower_now_[s] = lower_[s];
        }
    }
    // From the lane's activations.
    __device__ __forceinline__ static void take(const float* v, int g, Column* column) {
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
    // Output g + 8 * i of row t.
    __device__ __forceinline__ float result(const Results& of, int i) const {
        const float *c = of.c[i / 2] + i % 2 * 2, *low = of.low[i / 2] + i % 2 * 2;
        const float whole = SHORT ? joined(c[0], c[1]) : joined(joined(c[0], low[0]), joined(c[1], low[1]));
        const float sum = OFFSET ? joined(of.ones[0], of.ones[1]) : 0.0f;
        return i % 2 == 0 ? scaled(upper_now_[i / 2], whole, sum) : scaled(lower_now_[i / 2], whole, sum);
    }

  private:
    typedef typename W::Upper::Quarter Upper;
    typedef typename W::Lower::Quarter Lower;
    static constexpr int SUBS = OUTS / 16;
    // Whether weights are what tensor cores multiply, or have a rest; whether there are offsets.
    static constexpr bool SHORT = Upper::SHORT && Lower::SHORT;
    static constexpr bool OFFSET = Upper::OFFSET || Lower::OFFSET;

    // A scale or an offset that is not finite leaves no number.
    template <class Stored>
    __device__ __forceinline__ static float scaled(const Stored& stored, float sum, float of_row) {
        if constexpr (Stored::SCALED) {
            bool no_number = infinite(stored.scale());
            if constexpr (Stored::OFFSET) {
                no_number = no_number || infinite(stored.offset());
                sum = fmaf(stored.scale(), sum, stored.offset() * of_row);
            } else {
                sum = stored.scale() * sum;
            }
            if (no_number) sum = NAN_F32;
        }
        return sum;
    }

    Upper upper_[SUBS], upper_now_[SUBS];
    Lower lower_[SUBS], lower_now_[SUBS];
    uint32_t a_[SUBS][16];  // factors
};
