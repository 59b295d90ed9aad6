/* The loops for AVX-512 (F, VL, BW, DQ): 16 lanes, 32 registers. */
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
#endif

static inline __m512 lkv_load_part_avx512(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}

static inline __m512 lkv_codes_avx512(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

static inline __m512 lkv_codes_part_avx512(const int8_t *p, int64_t n)
{
    __m128i c = _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1u), p);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c));
}

static inline float lkv_sum32_avx512(const __m512 *a)
{
    __m512 x = _mm512_add_ps(a[0], a[1]);
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline void lkv_sum32x4_avx512(__m512 (*a)[2], float *out)
{
    __m512 x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm512_add_ps(a[i][0], a[i][1]);
    __m512 p = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44),
                             _mm512_shuffle_f32x4(x[0], x[1], 0xEE));
    __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44),
                             _mm512_shuffle_f32x4(x[2], x[3], 0xEE));
    p = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xDD));
    p = _mm512_add_ps(p, _mm512_permute_ps(p, 0x4E));
    p = _mm512_add_ps(p, _mm512_permute_ps(p, 0xB1));
    p = _mm512_permutexvar_ps(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), p);
    _mm_storeu_ps(out, _mm512_castps512_ps128(p));
}

static inline __m512 lkv_keep_avx512(__m512 x)
{
    __asm__("" : "+v"(x));
    return x;
}

/* As for AVX2, with four bits of a row's number. */
static inline void lkv_turn_avx512(const int8_t *codes, int64_t stride, int8_t *turned)
{
    __m256i x[16], y[16];
    for (int r = 0; r < 16; r++) x[r] = _mm256_loadu_si256((const __m256i *)(codes + r * stride));
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 8; i++) {
            y[2 * i] = _mm256_unpacklo_epi8(x[i], x[i + 8]);
            y[2 * i + 1] = _mm256_unpackhi_epi8(x[i], x[i + 8]);
        }
        for (int i = 0; i < 16; i++) x[i] = y[i];
    }
    for (int i = 0; i < 16; i++) _mm256_storeu_si256((__m256i *)(turned + 32 * i), x[i]);
}

#define LKV_NAME(f) f##_avx512
#define LKV_FMA(a, b, c) __builtin_fmaf(a, b, c)
#define V __m512
#define VW 16
#define V_ZERO _mm512_setzero_ps
#define V_SET1 _mm512_set1_ps
#define V_LOAD _mm512_loadu_ps
#define V_LOAD_PART lkv_load_part_avx512
#define V_STORE _mm512_storeu_ps
#define V_CODES lkv_codes_avx512
#define V_CODES_PART lkv_codes_part_avx512
#define V_FMA _mm512_fmadd_ps
#define V_SUM32 lkv_sum32_avx512
#define V_SUM32X4 lkv_sum32x4_avx512
#define V_TURN lkv_turn_avx512
#define V_TURNED(d) ((d) % 16 * 32 + (d) / 16 * 16)
#define V_LEAVES 16
#define V_QUERIES 4
#define V_SUMS 16
#define V_KEEP lkv_keep_avx512
#include "layer_kv_loops.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
