/* Three builds of the loops (baseline, AVX2+FMA, AVX-512) and the choice among them at load. */
#include "layer_kv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    void (*map_exp)(const float *, float *, int64_t);
    void (*map_tanh)(const float *, float *, int64_t);
    void (*score_rows)(const float *, const float *, int64_t, int64_t, float, float *);
    int (*quantise)(const float *, const float *, const uint8_t *, int64_t, int64_t, int64_t,
                    int8_t *, float *);
    int (*attend)(const lkv_store *, int64_t, const float *, int64_t, int64_t, int64_t, float,
                  float, const float *, float *, float *, int64_t, float *);
    int (*bounded_step)(float *, float *, float *, float *, int64_t, int64_t, int64_t, int64_t,
                        int64_t, const float *, const float *, int64_t, const float *,
                        const float *, int64_t, const float *, const float *, const float *,
                        int64_t, float, float *);
    int (*nystrom_step)(const lkv_nystrom *, int64_t, int64_t, int64_t, const float *,
                        const float *, const float *, float *);
    int (*nystrom_replay)(const lkv_nystrom *, int64_t, int64_t, const float *, const float *,
                          int64_t, int64_t, int64_t);
    void (*phase)(const double *, const double *, const double *, const float *, const float *,
                  int64_t, int64_t, int64_t, float *, float *);
    int (*phase_delta)(const double *, const double *, const double *, const float *,
                       const float *, int64_t, int64_t, int64_t, float *, float *);
    float (*read_all)(const float *, int64_t);
} lkv_table;

static inline uint32_t lkv_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float lkv_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static __thread int64_t lkv_done[LKV_N_WORK];

#define LKV_COUNT(what, n) (lkv_done[what] += (n))

static float *lkv_scratch(int64_t floats)
{
    LKV_COUNT(LKV_SCRATCH_BYTES, (int64_t)sizeof(float) * floats);
    return malloc(sizeof(float) * (size_t)floats);
}

#define LKV_FN static inline
#define LKV_BITS lkv_bits
#define LKV_FLOAT lkv_float

/* ---- baseline: plain C ------------------------------------------------------------------- */
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

static inline float lkv_sum32(const float *a)
{
    float s[32];
    memcpy(s, a, sizeof s);
    for (int stride = 16; stride; stride /= 2)
        for (int j = 0; j < stride; j++) s[j] = s[j] + s[j + stride];
    return s[0];
}

static inline void lkv_sum32x4(float (*a)[32], float *out)
{
    for (int i = 0; i < 4; i++) out[i] = lkv_sum32(a[i]);
}

#define LKV_NAME(f) f##_base
#define LKV_FMA LKV_FMA_BASE
#define V float
#define VW 1
#define V_ZERO() 0.0f
#define V_SET1(x) (x)
#define V_LOAD(p) (*(p))
#define V_LOAD_PART(p, n) (*(p))
#define V_STORE(p, x) (*(p) = (x))
#define V_CODES(p) ((float)*(p))
#define V_CODES_PART(p, n) ((float)*(p))
#define V_FMA LKV_FMA_BASE
#define V_SUM32 lkv_sum32
#define V_SUM32X4 lkv_sum32x4
#include "layer_kv_loops.h"
#undef LKV_NAME
#undef LKV_FMA
#undef V
#undef VW
#undef V_ZERO
#undef V_SET1
#undef V_LOAD
#undef V_LOAD_PART
#undef V_STORE
#undef V_CODES
#undef V_CODES_PART
#undef V_FMA
#undef V_SUM32
#undef V_SUM32X4

#if defined(__x86_64__) && defined(__GNUC__)
#define LKV_X86 1
#include <immintrin.h>

/* ---- AVX2 + FMA -------------------------------------------------------------------------- */
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
#include "layer_kv_loops.h"
#undef LKV_NAME
#undef LKV_FMA
#undef V
#undef VW
#undef V_ZERO
#undef V_SET1
#undef V_LOAD
#undef V_LOAD_PART
#undef V_STORE
#undef V_CODES
#undef V_CODES_PART
#undef V_FMA
#undef V_SUM32
#undef V_SUM32X4
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* ---- AVX-512 ----------------------------------------------------------------------------- */
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
#include "layer_kv_loops.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* ---- the choice -------------------------------------------------------------------------- */
static const lkv_table *const tables[] = {
    &table_base,
#ifdef LKV_X86
    &table_avx2,
    &table_avx512,
#endif
};

static int chosen = -1;

int lkv_isa_mask(void)
{
    int mask = 1;
#ifdef LKV_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        mask |= 2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
            mask |= 4;
    }
#endif
    return mask;
}

int lkv_select_isa(int isa)
{
    if (isa < 0 || isa > 2 || !(lkv_isa_mask() >> isa & 1)) return -1;
    chosen = isa;
    return isa;
}

int lkv_isa(void)
{
    if (chosen < 0) {
        int mask = lkv_isa_mask();
        chosen = mask & 4 ? 2 : mask & 2 ? 1 : 0;
    }
    return chosen;
}

void lkv_work(int64_t *counts) { memcpy(counts, lkv_done, sizeof lkv_done); }

#define T (tables[lkv_isa()])

float lkv_read(const float *x, int64_t n) { return T->read_all(x, n); }
void lkv_map_exp(const float *x, float *y, int64_t n) { T->map_exp(x, y, n); }
void lkv_map_tanh(const float *x, float *y, int64_t n) { T->map_tanh(x, y, n); }

/* q must be padded to a multiple of 32 floats with -0 */
void lkv_dot_rows(const float *q, const float *rows, int64_t n_rows, int64_t hd, float *out)
{
    T->score_rows(q, rows, hd, n_rows, 1.0f, out);
}

int lkv_quantise(const float *x, const float *col, const uint8_t *col_on, int64_t n_rows,
                 int64_t hd, int64_t width, int8_t *codes, float *scales)
{
    return T->quantise(x, col, col_on, n_rows, hd, width, codes, scales);
}

int lkv_attend(const lkv_store *s, int64_t head, const float *q, int64_t n, int64_t stored,
               int64_t first, float scale, float softcap, const float *sinks, float *out,
               float *imp, int64_t n_imp, float *probs)
{
    return T->attend(s, head, q, n, stored, first, scale, softcap, sinks, out, imp, n_imp, probs);
}

int lkv_bounded_step(float *ring_k, float *ring_v, float *undo_k, float *undo_v, int64_t nkv,
                     int64_t hd, int64_t window, int64_t slot, int64_t len, const float *sink_k,
                     const float *sink_v, int64_t n_sink, const float *cos_t, const float *sin_t,
                     int64_t half, const float *q, const float *k, const float *v, int64_t nh,
                     float scale, float *out)
{
    return T->bounded_step(ring_k, ring_v, undo_k, undo_v, nkv, hd, window, slot, len, sink_k,
                           sink_v, n_sink, cos_t, sin_t, half, q, k, v, nh, scale, out);
}

int lkv_nystrom_step(const lkv_nystrom *s, int64_t win_len, int64_t win_head, int64_t far_len,
                     const float *q, const float *k, const float *v, float *out)
{
    return T->nystrom_step(s, win_len, win_head, far_len, q, k, v, out);
}

int lkv_nystrom_replay(const lkv_nystrom *s, int64_t win_len, int64_t win_head, const float *k,
                       const float *v, int64_t k_stride, int64_t v_stride, int64_t n_rows)
{
    return T->nystrom_replay(s, win_len, win_head, k, v, k_stride, v_stride, n_rows);
}

void lkv_phase(const double *decay, const double *fk, const double *fq, const float *v,
               const float *kappa, int64_t nh, int64_t width, int64_t dv, float *state, float *out)
{
    T->phase(decay, fk, fq, v, kappa, nh, width, dv, state, out);
}

int lkv_phase_delta(const double *decay, const double *fk, const double *fq, const float *v,
                    const float *beta, int64_t nh, int64_t width, int64_t dv, float *state,
                    float *out)
{
    return T->phase_delta(decay, fk, fq, v, beta, nh, width, dv, state, out);
}
