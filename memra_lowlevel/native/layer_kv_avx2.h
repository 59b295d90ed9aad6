/* The loops for AVX2 and FMA: 8 lanes, 16 registers. */
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

static const int32_t lkv_lanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};

static inline __m256 lkv_load_part_avx2(const float *p, int64_t n)
{
    return _mm256_maskload_ps(p, _mm256_loadu_si256((const __m256i *)(lkv_lanes + 8 - n)));
}

static inline __m256 lkv_codes_avx2(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

static inline __m256 lkv_codes_part_avx2(const int8_t *p, int64_t n)
{
    int8_t t[8] = {0};
    memcpy(t, p, (size_t)n);
    return lkv_codes_avx2(t);
}

static inline float lkv_sum8(__m256 x)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline float lkv_sum32_avx2(const __m256 *a)
{
    return lkv_sum8(_mm256_add_ps(_mm256_add_ps(a[0], a[2]), _mm256_add_ps(a[1], a[3])));
}

static inline void lkv_sum32x4_avx2(__m256 (*a)[4], float *out)
{
    __m256 x[4];
    for (int i = 0; i < 4; i++)
        x[i] = _mm256_add_ps(_mm256_add_ps(a[i][0], a[i][2]), _mm256_add_ps(a[i][1], a[i][3]));
    __m256 p = _mm256_add_ps(_mm256_permute2f128_ps(x[0], x[2], 0x20),
                             _mm256_permute2f128_ps(x[0], x[2], 0x31));
    __m256 q = _mm256_add_ps(_mm256_permute2f128_ps(x[1], x[3], 0x20),
                             _mm256_permute2f128_ps(x[1], x[3], 0x31));
    p = _mm256_add_ps(_mm256_shuffle_ps(p, q, 0x44), _mm256_shuffle_ps(p, q, 0xEE));
    p = _mm256_add_ps(_mm256_shuffle_ps(p, p, 0x88), _mm256_shuffle_ps(p, p, 0xDD));
    __m128 low = _mm256_castps256_ps128(p), high = _mm256_extractf128_ps(p, 1);
    _mm_storeu_ps(out, _mm_movelh_ps(low, high));
}

static inline __m256 lkv_keep_avx2(__m256 x)
{
    __asm__("" : "+x"(x));
    return x;
}

/* Unpacking the bytes of register i with those of i + n/2 moves the top bit of the row's number to
 * the end of the byte's: as often as the number has bits, and 8 bytes are the rows of a channel. */
static inline void lkv_turn_avx2(const int8_t *codes, int64_t stride, int8_t *turned)
{
    __m256i x[8], y[8];
    for (int r = 0; r < 8; r++) x[r] = _mm256_loadu_si256((const __m256i *)(codes + r * stride));
#pragma GCC unroll 3
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 4; i++) {
            y[2 * i] = _mm256_unpacklo_epi8(x[i], x[i + 4]);
            y[2 * i + 1] = _mm256_unpackhi_epi8(x[i], x[i + 4]);
        }
        for (int i = 0; i < 8; i++) x[i] = y[i];
    }
    for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i *)(turned + 32 * i), x[i]);
}

#define LKV_NAME(f) f##_avx2
#define LKV_FMA(a, b, c) __builtin_fmaf(a, b, c)
#define V __m256
#define VW 8
#define V_ZERO _mm256_setzero_ps
#define V_SET1 _mm256_set1_ps
#define V_LOAD _mm256_loadu_ps
#define V_LOAD_PART lkv_load_part_avx2
#define V_STORE _mm256_storeu_ps
#define V_CODES lkv_codes_avx2
#define V_CODES_PART lkv_codes_part_avx2
#define V_FMA _mm256_fmadd_ps
#define V_SUM32 lkv_sum32_avx2
#define V_SUM32X4 lkv_sum32x4_avx2
#define V_TURN lkv_turn_avx2
#define V_TURNED(d) ((d) % 16 / 2 * 32 + (d) / 16 * 16 + (d) % 2 * 8)
#define V_LEAVES 8
#define V_QUERIES 2
#define V_SUMS 8
#define V_KEEP lkv_keep_avx2
#include "layer_kv_loops.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
