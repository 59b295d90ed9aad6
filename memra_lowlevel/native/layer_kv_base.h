/* The loops for every machine: 4 lanes in the compiler's own vectors, fused steps emulated where the
 * target has none. */
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float lkv_4f __attribute__((vector_size(16)));
typedef int32_t lkv_4i __attribute__((vector_size(16)));
typedef int8_t lkv_4c __attribute__((vector_size(4)));

#if defined(__aarch64__) || defined(__FMA__)
#define LKV_FMA_BASE(a, b, c) __builtin_fmaf(a, b, c)
#else
/* The product is exact in double; the sum is rounded to odd, so that the last rounding, to
 * float, is the only one. */
static inline float lkv_fmaf(float a, float b, float c)
{
    double p = (double)a * (double)b, s = p + (double)c;
    double t = s - p, err = (p - (s - t)) + ((double)c - t);
    uint64_t u;
    memcpy(&u, &s, sizeof u);
    if ((err > 0.0 || err < 0.0) && !(u & 1)) {
        u = (err > 0.0) == (s > 0.0) ? u + 1 : u - 1;
        memcpy(&s, &u, sizeof s);
    }
    return (float)s;
}
#define LKV_FMA_BASE lkv_fmaf
#endif

#if defined(__aarch64__)
static inline lkv_4f lkv_fma_base(lkv_4f a, lkv_4f b, lkv_4f c) { return vfmaq_f32(c, a, b); }
#elif defined(__FMA__)
static inline lkv_4f lkv_fma_base(lkv_4f a, lkv_4f b, lkv_4f c) { return _mm_fmadd_ps(a, b, c); }
#elif defined(__x86_64__)
/* lkv_fmaf of two lanes */
static inline __m128d lkv_fma_2d(__m128d a, __m128d b, __m128d c)
{
    __m128d p = _mm_mul_pd(a, b), s = _mm_add_pd(p, c), t = _mm_sub_pd(s, p);
    __m128d err = _mm_add_pd(_mm_sub_pd(p, _mm_sub_pd(s, t)), _mm_sub_pd(c, t));
    __m128d zero = _mm_setzero_pd(), more = _mm_cmpgt_pd(err, zero);
    __m128i inexact = _mm_castpd_si128(_mm_or_pd(more, _mm_cmplt_pd(err, zero)));
    __m128i down = _mm_castpd_si128(_mm_xor_pd(more, _mm_cmpgt_pd(s, zero)));
    __m128i u = _mm_castpd_si128(s);
    __m128i step = _mm_and_si128(_mm_andnot_si128(u, _mm_set1_epi64x(1)), inexact);
    step = _mm_sub_epi64(_mm_xor_si128(step, down), down); /* negated where it goes down */
    return _mm_castsi128_pd(_mm_add_epi64(u, step));
}

static inline lkv_4f lkv_fma_base(lkv_4f a, lkv_4f b, lkv_4f c)
{
    __m128d low = lkv_fma_2d(_mm_cvtps_pd(a), _mm_cvtps_pd(b), _mm_cvtps_pd(c));
    __m128d high = lkv_fma_2d(_mm_cvtps_pd(_mm_movehl_ps(a, a)), _mm_cvtps_pd(_mm_movehl_ps(b, b)),
                              _mm_cvtps_pd(_mm_movehl_ps(c, c)));
    return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
}
#else
static inline lkv_4f lkv_fma_base(lkv_4f a, lkv_4f b, lkv_4f c)
{
    for (int i = 0; i < 4; i++) c[i] = LKV_FMA_BASE(a[i], b[i], c[i]);
    return c;
}
#endif

static inline lkv_4f lkv_zero_base(void) { return (lkv_4f){0.0f, 0.0f, 0.0f, 0.0f}; }

static inline lkv_4f lkv_set1_base(float x) { return (lkv_4f){x, x, x, x}; }

static inline lkv_4f lkv_load_part_base(const float *p, int64_t n)
{
    lkv_4f x = {0.0f, 0.0f, 0.0f, 0.0f};
    memcpy(&x, p, sizeof(float) * (size_t)n);
    return x;
}

static inline lkv_4f lkv_load_base(const float *p) { return lkv_load_part_base(p, 4); }

static inline void lkv_store_base(float *p, lkv_4f x) { memcpy(p, &x, sizeof x); }

static inline lkv_4f lkv_codes_part_base(const int8_t *p, int64_t n)
{
    lkv_4c x = {0, 0, 0, 0};
    memcpy(&x, p, (size_t)n);
    return __builtin_convertvector(__builtin_convertvector(x, lkv_4i), lkv_4f);
}

static inline lkv_4f lkv_codes_base(const int8_t *p) { return lkv_codes_part_base(p, 4); }

static inline float lkv_sum32_base(const lkv_4f *a)
{
    lkv_4f x = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
    return (x[0] + x[2]) + (x[1] + x[3]);
}

static inline void lkv_sum32x4_base(lkv_4f (*a)[8], float *out)
{
    for (int i = 0; i < 4; i++) out[i] = lkv_sum32_base(a[i]);
}

static inline void lkv_turn_base(const int8_t *codes, int64_t stride, int8_t *turned)
{
    for (int d = 0; d < 32; d++)
        for (int r = 0; r < 4; r++) turned[4 * d + r] = codes[r * stride + d];
}

#define LKV_NAME(f) f##_base
#define LKV_FMA LKV_FMA_BASE
#define V lkv_4f
#define VW 4
#define V_ZERO lkv_zero_base
#define V_SET1 lkv_set1_base
#define V_LOAD lkv_load_base
#define V_LOAD_PART lkv_load_part_base
#define V_STORE lkv_store_base
#define V_CODES lkv_codes_base
#define V_CODES_PART lkv_codes_part_base
#define V_FMA lkv_fma_base
#define V_SUM32 lkv_sum32_base
#define V_SUM32X4 lkv_sum32x4_base
#define V_TURN lkv_turn_base
#define V_TURNED(d) ((d) * 4)
#define V_LEAVES 8
#define V_QUERIES 2
#define V_SUMS 8
#define V_KEEP(x) (x)
#include "layer_kv_loops.h"
