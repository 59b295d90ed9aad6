// Tensor-core tiles: D = A B + C over one warp. Which lane holds which element is the PTX layout of
// mma.sync: with g = lane / 4 and t = lane % 4,
//
//   m16n8k16 (f16)  a[0] A[g][2t..2t+1]    a[1] A[g+8][2t..]   a[2] A[g][2t+8..]   a[3] A[g+8][2t+8..]
//                   b[0] B[2t..2t+1][g]    b[1] B[2t+8..2t+9][g]
//   m16n8k32 (s8)   a[0] A[g][4t..4t+3]    a[1] A[g+8][4t..]   a[2] A[g][4t+16..]  a[3] A[g+8][4t+16..]
//                   b[0] B[4t..4t+3][g]    b[1] B[4t+16..4t+19][g]
//   m16n8k8 (tf32)  a[0] A[g][t]   a[1] A[g+8][t]   a[2] A[g][t+4]   a[3] A[g+8][t+4]
//                   b[0] B[t][g]   b[1] B[t+4][g]
//   all             d[0] D[g][2t]   d[1] D[g][2t+1]   d[2] D[g+8][2t]   d[3] D[g+8][2t+1]
//
// The f16 and tf32 products are summed in no defined order on a GPU (the host sums exactly and rounds once):
// compare with a tolerance. The s8 products are exact in both worlds; mma_m16n8k32_s8u8 has B of u8. Needs sm_80; all 32 lanes take
// part.
#pragma once
#include "common/device.cuh"

#if MEMRA_CUDA

// d, c: float[4]; a: uint32_t[4], b: uint32_t[2], two f16 each, the lower index in the lower half.
static __device__ __forceinline__ void mma_m16n8k16_f16(float* d, const uint32_t* a,
                                                        const uint32_t* b, const float* c) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
#elif __CUDA_ARCH__ >= 750
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b[1]));
#else
#error "mma_m16n8k16_f16 needs sm_75"
#endif
}

// The same with bf16 inputs.
static __device__ __forceinline__ void mma_m16n8k16_bf16(float* d, const uint32_t* a,
                                                         const uint32_t* b, const float* c) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
#else
  __trap();
#endif
}

// a and b are f32 without their lower 13 bits, which are cut off here, not rounded.
static __device__ __forceinline__ void mma_m16n8k8_tf32(float* d, const uint32_t* a,
                                                        const uint32_t* b, const float* c) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
#else
  __trap();
#endif
}

// d, c: int32_t[4]; a: uint32_t[4], b: uint32_t[2], four s8 each, the lowest index in the lowest byte.
// The second has b of u8.
#if __CUDA_ARCH__ >= 800
#define MEMRA_MMA_M16N8K32(types)                                                                   \
  asm volatile(                                                                                     \
      "mma.sync.aligned.m16n8k32.row.col." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "        \
      "{%10,%11,%12,%13};"                                                                          \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),     \
        "r"(c[2]), "r"(c[3]))
#elif __CUDA_ARCH__ >= 750
// m8n8k16 twice along k and twice along m: its fragments are these registers.
#define MEMRA_MMA_M8N8K16(types, at, a_at, b_at, from)                                              \
  asm volatile("mma.sync.aligned.m8n8k16.row.col." types " {%0,%1}, {%2}, {%3}, {%4,%5};"           \
               : "=r"(d[at]), "=r"(d[at + 1])                                                       \
               : "r"(a[a_at]), "r"(b[b_at]), "r"(from[at]), "r"(from[at + 1]))
#define MEMRA_MMA_M16N8K32(types)                                                                   \
  MEMRA_MMA_M8N8K16(types, 0, 0, 0, c);                                                             \
  MEMRA_MMA_M8N8K16(types, 0, 2, 1, d);                                                             \
  MEMRA_MMA_M8N8K16(types, 2, 1, 0, c);                                                             \
  MEMRA_MMA_M8N8K16(types, 2, 3, 1, d)
#else
#error "mma_m16n8k32_s8 needs sm_75"
#endif
static __device__ __forceinline__ void mma_m16n8k32_s8(int32_t* d, const uint32_t* a,
                                                       const uint32_t* b, const int32_t* c) {
  MEMRA_MMA_M16N8K32("s32.s8.s8.s32");
}
static __device__ __forceinline__ void mma_m16n8k32_s8u8(int32_t* d, const uint32_t* a,
                                                         const uint32_t* b, const int32_t* c) {
  MEMRA_MMA_M16N8K32("s32.s8.u8.s32");
}

#else

namespace memra {

// Cells hold a (16 bytes) and b (8 bytes) of each lane; the last lane to arrive multiplies and leaves
// four sums of 8 bytes in every cell.
template <int K, int STEP, class Sum, class Decode, class DecodeB>
inline void multiply_tiles(uint8_t (*cells)[32], Decode decode, DecodeB decode_b) {
  Sum a[16][K], b[8][K];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    uint32_t words[6];
    __builtin_memcpy(words, cells[lane], 24);
    for (int e = 0; e < STEP; ++e) {
      for (int i = 0; i < 4; ++i) {
        a[g + (i & 1) * 8][STEP * t + e + (i >> 1) * (K / 2)] = decode(words[i], e);
      }
      for (int i = 0; i < 2; ++i) b[g][STEP * t + e + i * (K / 2)] = decode_b(words[4 + i], e);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i >> 1) * 8, column = 2 * (lane % 4) + (i & 1);
      Sum sum = 0;
      for (int k = 0; k < K; ++k) sum += a[row][k] * b[column][k];
      __builtin_memcpy(cells[lane] + 8 * i, &sum, 8);
    }
  }
}

inline double decode_f16(uint32_t word, int e) {
  const uint32_t h = (word >> (16 * e)) & 0xffff;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? double(__builtin_nanf("")) : sign * __builtin_inf();
  if (exponent == 0) return sign * double(mantissa) * 0x1p-24;
  return sign * double(mantissa | 1024) *
         bit_cast<double>(uint64_t(1023 + int(exponent) - 25) << 52);
}

inline double decode_bf16(uint32_t word, int e) {
  return double(bit_cast<float>(((word >> (16 * e)) & 0xffff) << 16));
}

inline double decode_tf32(uint32_t word, int) { return double(bit_cast<float>(word & 0xffffe000u)); }

inline int64_t decode_s8(uint32_t word, int e) { return int8_t(word >> (8 * e)); }
inline int64_t decode_u8(uint32_t word, int e) { return uint8_t(word >> (8 * e)); }

inline void combine_f16(uint8_t (*cells)[32], uint32_t) {
  multiply_tiles<16, 2, double>(cells, decode_f16, decode_f16);
}
inline void combine_bf16(uint8_t (*cells)[32], uint32_t) {
  multiply_tiles<16, 2, double>(cells, decode_bf16, decode_bf16);
}
inline void combine_tf32(uint8_t (*cells)[32], uint32_t) {
  multiply_tiles<8, 1, double>(cells, decode_tf32, decode_tf32);
}
inline void combine_s8u8(uint8_t (*cells)[32], uint32_t) {
  multiply_tiles<32, 4, int64_t>(cells, decode_s8, decode_u8);
}
inline void combine_s8(uint8_t (*cells)[32], uint32_t) {
  multiply_tiles<32, 4, int64_t>(cells, decode_s8, decode_s8);
}

template <class Sum, class T>
inline void mma(const Site* site, WarpCombine combine, T* d, const uint32_t* a, const uint32_t* b,
                const T* c) {
  Context* worker = context();
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  uint32_t took_part;
  auto cells = memra_warp_exchange(worker, site, WARP_MMA, 0xffffffffu, words, 24, combine, &took_part);
  const uint32_t lane = lane_of(worker);
  if (took_part != 0xffffffffu) {
    memra_fail(worker, site, FAIL_DIVERGENCE, "an mma needs all 32 lanes of the warp");
  }
  for (int i = 0; i < 4; ++i) {
    Sum sum;
    __builtin_memcpy(&sum, cells[lane] + 8 * i, 8);
    d[i] = T(sum + Sum(c[i]));
  }
}

}  // namespace memra

#define mma_m16n8k16_f16(d, a, b, c) \
  memra::mma<double, float>(MEMRA_SITE, memra::combine_f16, d, a, b, c)
#define mma_m16n8k16_bf16(d, a, b, c) \
  memra::mma<double, float>(MEMRA_SITE, memra::combine_bf16, d, a, b, c)
#define mma_m16n8k8_tf32(d, a, b, c) \
  memra::mma<double, float>(MEMRA_SITE, memra::combine_tf32, d, a, b, c)
#define mma_m16n8k32_s8(d, a, b, c) \
  memra::mma<int64_t, int32_t>(MEMRA_SITE, memra::combine_s8, d, a, b, c)
#define mma_m16n8k32_s8u8(d, a, b, c) \
  memra::mma<int64_t, int32_t>(MEMRA_SITE, memra::combine_s8u8, d, a, b, c)

#endif
