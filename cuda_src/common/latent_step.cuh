// One step of latent attention on tensor cores: 16 keys, whose rows serve as K and as V.
//
// Rows, queries and weights are products of a power of two and two f16 each (22 bits): q k takes three
// products of f16 (coarse coarse, coarse fine, fine coarse), p v likewise, all summed in f32. The
// power of a row follows its largest element and is given to the weight of its key, so that a row
// of any size keeps its 22 bits and no sum leaves the range of f16 or f32.
//
// What is common to a warp's work lies here: bringing rows in, splitting them, fragments.
#pragma once
#include "common/block32.cuh"
#include "common/fragments.cuh"
#include "common/joined_chunks.cuh"
#include "common/mma.cuh"
#include "common/pipeline.cuh"

constexpr int STEP = 16;    // keys of a tile
constexpr int SLICES = 4;   // parts of the channels of a score, added at the end
constexpr int LIFTED = 15;  // a lifted value is less than 2^15
constexpr int LEAST_EXPONENT = -60, MOST_EXPONENT = 63;  // of rows: below it bits are lost
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// The larger one; a NaN wins. For values that are not negative.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a != a || b != b ? NAN_F32 : fmaxf(a, b);
#endif
}

// The bits of the largest magnitude of the warp's values, NaN above all.
__device__ __forceinline__ uint32_t warp_max_bits(float magnitude) {
    uint32_t bits = __float_as_uint(magnitude);
#if MEMRA_CUDA && __CUDA_ARCH__ < 800
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const uint32_t other = __shfl_xor_sync(FULL_MASK, bits, offset);
        bits = other > bits ? other : bits;
    }
    return bits;
#else
    return __reduce_max_sync(FULL_MASK, bits);
#endif
}

// The least e with magnitude < 2^e, or so; 129 for what is not finite.
__device__ __forceinline__ int exponent_above(uint32_t bits) { return int(bits >> 23) - 126; }

// A row of the plane: its bytes, the copy of it by a warp, and pieces of 4 channels.
template <int F, int WIDTH>
struct RawRow {
    static constexpr int BYTES = F == F32 ? 4 * WIDTH : WIDTH / BLOCK_ELEMENTS * block_bytes<F>();
    static constexpr int PIECE = BYTES % 16 == 0 ? 16 : 4;
    static constexpr int PIECES = BYTES / PIECE;

    static __device__ __forceinline__ void ask(uint8_t* to, const uint8_t* plane, int64_t row,
                                               int lane) {
        const uint8_t* from = plane + row * BYTES;
#pragma unroll
        for (int i = 0; i < PIECES; i += WARP_LANES)
            if (i + WARP_LANES <= PIECES || i + lane < PIECES)
                cp_async<PIECE>(to + (i + lane) * PIECE, from + (i + lane) * PIECE);
    }
    static __device__ __forceinline__ void clear(uint8_t* to, int lane) {
        for (int i = lane; i < PIECES; i += WARP_LANES) {
            if constexpr (PIECE == 16)
                *reinterpret_cast<uint4*>(to + i * PIECE) = make_uint4(0, 0, 0, 0);
            else
                *reinterpret_cast<uint32_t*>(to + i * PIECE) = 0;
        }
    }
    // Four channels as they are stored; q8_0: the scale, then the codes.
    static __device__ __forceinline__ auto load(const uint8_t* row, int piece) {
        if constexpr (F == F32) {
            return *reinterpret_cast<const float4*>(row + 16 * piece);
        } else if constexpr (F == BF16) {
            return *reinterpret_cast<const uint2*>(row + 8 * piece);
        } else {
            static_assert(F == Q8_0, "latent rows are f32, bf16 or q8_0");
            const uint16_t* block =
                reinterpret_cast<const uint16_t*>(row + piece / 8 * block_bytes<F>());
            const uint32_t low = block[1 + piece % 8 * 2], high = block[2 + piece % 8 * 2];
            return make_uint2(block[0], low | high << 16);
        }
    }
    static __device__ __forceinline__ float4 decoded(const float4& x) { return x; }
    static __device__ __forceinline__ float4 decoded(const uint2& x) {
        if constexpr (F == BF16)
            return make_float4(bf16_to_f32(uint16_t(x.x)), bf16_to_f32(uint16_t(x.x >> 16)),
                               bf16_to_f32(uint16_t(x.y)), bf16_to_f32(uint16_t(x.y >> 16)));
        const float d = f16_to_f32(uint16_t(x.x));
        return make_float4(d * float(int8_t(x.y)), d * float(int8_t(x.y >> 8)),
                           d * float(int8_t(x.y >> 16)), d * float(int8_t(x.y >> 24)));
    }
};

// A row that is split: units of 8 channels, 16 bytes of coarse and 16 of fine halves. Which come
// first changes every 4 units, so that neither the stores of a warp nor the loads of fragments meet
// in a bank.
__device__ __forceinline__ int coarse_first(int unit) { return unit >> 2 & 1 ? 16 : 0; }

// What is known of the key of a row: with e the exponent of its row, 2^(e - LIFTED), e and
// 2^(e + LIFTED), and what is added to its score: 0; -inf for a row that no query may see; NaN for one
// that is not finite or reaches 2^63.
typedef float4 KeyFactors;

// Splits the row in its place. A warp does a row; `factors.w` says whether it may be seen.
template <int F, int WIDTH>
__device__ __forceinline__ void split_row(uint8_t* row, int lane, KeyFactors& factors) {
    constexpr int PIECES = WIDTH / 4, PASSES = (PIECES + WARP_LANES - 1) / WARP_LANES;
    typedef RawRow<F, WIDTH> Raw;
    decltype(Raw::load(row, 0)) raw[PASSES];
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        if ((i + 1) * WARP_LANES <= PIECES || lane + i * WARP_LANES < PIECES) {
            raw[i] = Raw::load(row, lane + i * WARP_LANES);
            const float4 x = Raw::decoded(raw[i]);
            most = max_or_nan(most, max_or_nan(max_or_nan(fabsf(x.x), fabsf(x.y)),
                                               max_or_nan(fabsf(x.z), fabsf(x.w))));
        }
    }
    int exponent = exponent_above(warp_max_bits(most));
    const bool wild = exponent > MOST_EXPONENT;
    exponent = exponent < LEAST_EXPONENT ? LEAST_EXPONENT : wild ? 0 : exponent;
    const float lift = power_of_two(LIFTED - exponent);
    __syncwarp();  // every lane has read
    // A piece is half of a unit; its lane's units agree in what comes first.
    const int first = coarse_first(lane / 2);
    uint8_t* const to = row + lane / 2 * 32 + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        if ((i + 1) * WARP_LANES <= PIECES || lane + i * WARP_LANES < PIECES) {
            uint2 coarse = make_uint2(0, 0), fine = make_uint2(0, 0);
            const float4 x = Raw::decoded(raw[i]);
            split_pair(x.x * lift, x.y * lift, coarse.x, fine.x);
            split_pair(x.z * lift, x.w * lift, coarse.y, fine.y);
            *reinterpret_cast<uint2*>(to + i * (16 * WARP_LANES) + first) = coarse;
            *reinterpret_cast<uint2*>(to + i * (16 * WARP_LANES) + 16 - first) = fine;
        }
    }
    if (wild) {  // of the same lane's stores the last one counts
#pragma unroll 1
        for (int i = lane; i < PIECES; i += WARP_LANES) {
            uint8_t* const at = row + i / 2 * 32 + i % 2 * 8;
            *reinterpret_cast<uint2*>(at) = make_uint2(0, 0);
            *reinterpret_cast<uint2*>(at + 16) = make_uint2(0, 0);
        }
    }
    if (lane == 0) {
        const float hidden = factors.w;
        factors = make_float4(power_of_two(exponent - LIFTED), float(exponent),
                              power_of_two(exponent + LIFTED), hidden != 0.0f ? hidden
                                                               : wild         ? NAN_F32
                                                                              : 0.0f);
    }
}

// A query of WIDTH channels to the fragments of its set of 16, of which it is number `row`: lifted by
// a power of two, which `factor` takes back. A warp does a query; `to(step)` gives where the fragment
// of 16 channels lies (coarse, then fine, of 32 lanes).
template <int WIDTH, class To>
__device__ __forceinline__ void split_query(const float4* x, int lane, int row, float scale,
                                            float& factor, To to) {
    constexpr int PIECES = WIDTH / 4, PASSES = (PIECES + WARP_LANES - 1) / WARP_LANES;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < PASSES; i++)
        most = max_or_nan(most, max_or_nan(max_or_nan(fabsf(x[i].x), fabsf(x[i].y)),
                                           max_or_nan(fabsf(x[i].z), fabsf(x[i].w))));
    int exponent = exponent_above(warp_max_bits(most));
    exponent = exponent < -100 ? -100 : exponent;
    const float lift = power_of_two(LIFTED - exponent);
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int piece = lane + i * WARP_LANES;
        if ((i + 1) * WARP_LANES <= PIECES || piece < PIECES) {
            uint2 coarse, fine;
            split_pair(x[i].x * lift, x[i].y * lift, coarse.x, fine.x);
            split_pair(x[i].z * lift, x[i].w * lift, coarse.y, fine.y);
            // Channels 4p to 4p + 3 of a fragment are those of two neighbouring lanes.
            uint32_t* const at = to(piece / 4) + (row % 8 * 4 + piece % 2 * 2) * 4 +
                                 piece % 4 / 2 * 2 + row / 8;
            at[0] = coarse.x, at[4] = coarse.y;
            at[4 * WARP_LANES] = fine.x, at[4 * WARP_LANES + 4] = fine.y;
        }
    }
    if (lane == 0) factor = power_of_two(exponent - LIFTED) * scale * LOG2_E;
}

struct Halves {  // a fragment of A: 16 rows of 16, coarse and fine
    uint32_t coarse[4], fine[4];
};
__device__ __forceinline__ Halves load_halves(const uint4* at) {  // coarse, then fine, of 32 lanes
    const uint4 c = at[0], f = at[WARP_LANES];
    return {{c.x, c.y, c.z, c.w}, {f.x, f.y, f.z, f.w}};
}

// Between what a thread has seen others write to shared memory and its bulk copies to the same place.
__device__ __forceinline__ void order_before_bulk_copies() {
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
