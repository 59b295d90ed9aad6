// Weight matrices in tiles of 32 rows, and the dot product that the model kernels use.
//
// A matrix [n_out, n_in] is cut into tiles of 32 output rows and blocks of 32 columns. Its blocks
// keep the bytes of the GGUF file; only their order changes, so that 32 neighbouring threads, each
// owner of one output row, read 16-byte pieces that lie side by side. Tile t, block b starts at
// (t * n_blocks + b) * Tile::BYTES; inside a block, in this order:
//
//   TileF32   8 x [32 rows][16 B = 4 values]
//   TileF16   4 x [32 rows][16 B = 8 values]
//   TileQ8_0  2 x [32 rows][16 B = 16 codes i8], then [32 rows][f16 d]
//   TileQ4_1  1 x [32 rows][16 B = 32 codes u4], then [32 rows][f16 d, f16 m]
//             (byte i holds element i in its low half and element i + 16 in its high half)
//
// Rows past n_out in the last tile are zero bytes.
#pragma once
#include "common/device.cuh"
#include "common/convert.cuh"

constexpr int TILE_ROWS = 32;
constexpr int TILE_COLS = 32;

// Codes to floats, exact on both devices, so the two decoders give the same bits.
// A byte under the exponent of 2^23 is the float 2^23 + byte: one permute and one add, where a
// conversion instruction runs at a fraction of that rate.
__device__ __forceinline__ float byte_to_f32(uint32_t word, uint32_t i, float bias) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7650u | i)) - bias;
}
#if MEMRA_CUDA
__device__ __forceinline__ void codes_i8(const uint4& v, float* c) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 16; i++) c[i] = byte_to_f32(words[i / 4] ^ 0x80808080u, i % 4, 8388736.0f);
}
__device__ __forceinline__ void codes_u4(const uint4& v, float* c) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        c[i] = byte_to_f32(words[i / 4] & 0x0F0F0F0Fu, i % 4, 8388608.0f);
        c[16 + i] = byte_to_f32((words[i / 4] >> 4) & 0x0F0F0F0Fu, i % 4, 8388608.0f);
    }
}
#else
// Vector types of the compiler, widened in steps that it has instructions for: without them -O2
// converts one code at a time, four times slower.
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

template <class Codes>
__device__ __forceinline__ void widen(const Codes codes, float* c) {
    const i16x16 wide = __builtin_convertvector(codes, i16x16);
    i16x8 half[2];
    __builtin_memcpy(half, &wide, 32);
    for (int i = 0; i < 2; i++) {
        const f32x8 values =
            __builtin_convertvector(__builtin_convertvector(half[i], i32x8), f32x8);
        __builtin_memcpy(c + 8 * i, &values, 32);
    }
}
__device__ __forceinline__ void codes_i8(const uint4& v, float* c) {
    i8x16 codes;
    __builtin_memcpy(&codes, &v, 16);
    widen(codes, c);
}
__device__ __forceinline__ void codes_u4(const uint4& v, float* c) {
    u8x16 bytes;
    __builtin_memcpy(&bytes, &v, 16);
    widen(bytes & uint8_t(15), c);
    widen(bytes >> uint8_t(4), c + 16);
}
#endif

// fetch(block, row): the stored 32 weights of one row of one block, in pieces of 16 bytes.
// decode(w): the same as floats.
// Quarter: columns 8 * q ... 8 * q + 7 of row `row + further` as factor * scale + offset; `further` is known when
// it is compiled. factors(v): the factors. Scaling, of scaling(): scale and offset in few registers; sum(f, x): what
// sums of factors and of ones, by activations, come to. One that is infinite leaves no number. SHORT: whether factors
// have 11 significant bits or fewer, as what tensor cores multiply; OFFSET: whether there is an offset.
struct Unscaled {
    __device__ __forceinline__ float sum(float factors, float) const { return factors; }
};
// Bits of an f16, NaN where it is infinite.
__device__ __forceinline__ uint32_t finite_half(uint32_t bits) {
    return (bits & 0x7FFFu) == 0x7C00u ? 0x7E00u : bits;
}

struct TileF32 {
    static constexpr int BYTES = 4096;
    struct Quarter {
        static constexpr bool SHORT = false, OFFSET = false;
        typedef Unscaled Scaling;
        __device__ __forceinline__ Scaling scaling() const { return {}; }
        float4 pieces[2];
        __device__ __forceinline__ void fetch(const uint8_t* block, unsigned row, int further, unsigned q) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                pieces[i] = *reinterpret_cast<const float4*>(block + (1024 * q + 16 * row) + 512 * i + 16 * further);
        }
        __device__ __forceinline__ void factors(float* w, unsigned) const {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                w[4 * i] = pieces[i].x, w[4 * i + 1] = pieces[i].y;
                w[4 * i + 2] = pieces[i].z, w[4 * i + 3] = pieces[i].w;
            }
        }
    };
    const uint8_t* at;  // 128 bytes would crowd the registers: they are read when they are decoded
    __device__ __forceinline__ void fetch(const uint8_t* block, int row) { at = block + 16 * row; }
    __device__ __forceinline__ void decode(float* w) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 v = *reinterpret_cast<const float4*>(at + 512 * i);
            w[4 * i] = v.x;
            w[4 * i + 1] = v.y;
            w[4 * i + 2] = v.z;
            w[4 * i + 3] = v.w;
        }
    }
};

// Eight f16 of a piece as floats.
__device__ __forceinline__ void halves(const uint4& piece, float* w) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[2 * j] = f16_to_f32(uint16_t(words[j] & 0xFFFFu));
        w[2 * j + 1] = f16_to_f32(uint16_t(words[j] >> 16));
    }
}

struct TileF16 {
    static constexpr int BYTES = 2048;
    struct Quarter {
        static constexpr bool SHORT = true, OFFSET = false;
        typedef Unscaled Scaling;
        __device__ __forceinline__ Scaling scaling() const { return {}; }
        uint4 piece;
        __device__ __forceinline__ void fetch(const uint8_t* block, unsigned row, int further, unsigned q) {
            piece = *reinterpret_cast<const uint4*>(block + (512 * q + 16 * row) + 16 * further);
        }
        __device__ __forceinline__ void factors(float* w, unsigned) const { halves(piece, w); }
    };
    uint4 pieces[4];
    __device__ __forceinline__ void fetch(const uint8_t* block, int row) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            pieces[i] = *reinterpret_cast<const uint4*>(block + 512 * i + 16 * row);
    }
    __device__ __forceinline__ void decode(float* w) const {
#pragma unroll
        for (int i = 0; i < 4; i++) halves(pieces[i], w + 8 * i);
    }
};

struct TileQ8_0 {
    static constexpr int BYTES = 1088;
    struct Quarter {
        static constexpr bool SHORT = true, OFFSET = false;
        struct Scaling {
            uint32_t d;
            __device__ __forceinline__ float sum(float factors, float) const {
                return f16_to_f32(uint16_t(d)) * factors;
            }
        };
        __device__ __forceinline__ Scaling scaling() const { return {finite_half(d)}; }
        uint2 codes;
        uint16_t d;
        __device__ __forceinline__ void fetch(const uint8_t* block, unsigned row, int further, unsigned q) {
            codes = *reinterpret_cast<const uint2*>(block + (512 * (q / 2) + 8 * (q % 2) + 16 * row) + 16 * further);
            d = *reinterpret_cast<const uint16_t*>(block + 2 * row + (1024 + 2 * further));
        }
        __device__ __forceinline__ void factors(float* w, unsigned) const {
            const uint32_t words[2] = {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u};
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = byte_to_f32(words[i / 4], i % 4, 8388736.0f);
        }
    };
    uint4 codes[2];
    uint16_t d;
    __device__ __forceinline__ void fetch(const uint8_t* block, int row) {
        codes[0] = *reinterpret_cast<const uint4*>(block + 16 * row);
        codes[1] = *reinterpret_cast<const uint4*>(block + 512 + 16 * row);
        d = *reinterpret_cast<const uint16_t*>(block + 1024 + 2 * row);
    }
    __device__ __forceinline__ void decode(float* w) const {
        const float scale = f16_to_f32(d);
        float c[32];
        codes_i8(codes[0], c);
        codes_i8(codes[1], c + 16);
#pragma unroll
        for (int i = 0; i < 32; i++) w[i] = c[i] * scale;
    }
};

struct TileQ4_1 {
    static constexpr int BYTES = 640;
    struct Quarter {
        static constexpr bool SHORT = true, OFFSET = true;
        struct Scaling {
            uint32_t dm;
            __device__ __forceinline__ float sum(float factors, float ones) const {
                const float scale = f16_to_f32(uint16_t(dm & 0xFFFFu));
                return fmaf(scale, factors, fmaf(8.0f, scale, f16_to_f32(uint16_t(dm >> 16))) * ones);
            }
        };
        __device__ __forceinline__ Scaling scaling() const {
            return {finite_half(dm & 0xFFFFu) | finite_half(dm >> 16) << 16};
        }
        uint2 codes;
        uint32_t dm;
        __device__ __forceinline__ void fetch(const uint8_t* block, unsigned row, int further, unsigned q) {
            codes = *reinterpret_cast<const uint2*>(block + (16 * row + 8 * (q % 2)) + 16 * further);
            dm = *reinterpret_cast<const uint32_t*>(block + 4 * row + (512 + 4 * further));
        }
        // Codes about their middle, so that scale and offset cancel each other less.
        __device__ __forceinline__ void factors(float* w, unsigned q) const {
            const unsigned shift = 4 * (q / 2);
            const uint32_t words[2] = {(codes.x >> shift) & 0x0F0F0F0Fu, (codes.y >> shift) & 0x0F0F0F0Fu};
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = byte_to_f32(words[i / 4], i % 4, 8388616.0f);
        }
    };
    uint4 codes;
    uint32_t dm;
    __device__ __forceinline__ void fetch(const uint8_t* block, int row) {
        codes = *reinterpret_cast<const uint4*>(block + 16 * row);
        dm = *reinterpret_cast<const uint32_t*>(block + 512 + 4 * row);
    }
    __device__ __forceinline__ void decode(float* w) const {
        const float d = f16_to_f32(uint16_t(dm & 0xFFFFu));
        const float m = f16_to_f32(uint16_t(dm >> 16));
        float c[32];
        codes_u4(codes, c);
#pragma unroll
        for (int i = 0; i < 32; i++) w[i] = fmaf(c[i], d, m);
    }
};

// The 32 activations of a block. On a GPU they are fetched in 16-byte pieces, whose alignment the
// compiler cannot prove by itself; on the host they stay where they are, else -O2 finds no vectors.
struct Activations {
#if MEMRA_CUDA
    float v[TILE_COLS];
    Activations() = default;
    __device__ __forceinline__ explicit Activations(const float* p) {
#pragma unroll
        for (int i = 0; i < TILE_COLS / 4; i++) {
            const float4 f = reinterpret_cast<const float4*>(p)[i];
            v[4 * i] = f.x, v[4 * i + 1] = f.y, v[4 * i + 2] = f.z, v[4 * i + 3] = f.w;
        }
    }
#else
    const float* v;
    Activations() = default;
    explicit Activations(const float* p) : v(p) {}
#endif
};

// Dot product of 32 elements in one fixed order: eight running sums, then a tree.
__device__ __forceinline__ float dot32(const float* w, const Activations& x) {
    float s[8];
#pragma unroll
    for (int j = 0; j < 8; j++) s[j] = w[j] * x.v[j];
#pragma unroll
    for (int b = 8; b < TILE_COLS; b += 8)
#pragma unroll
        for (int j = 0; j < 8; j++) s[j] = fmaf(w[b + j], x.v[b + j], s[j]);
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
