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
    /* whole cache lines: a vector that straddles two costs two loads */
    return aligned_alloc(64, (sizeof(float) * (size_t)floats + 63) / 64 * 64);
}

static inline void lkv_ask_for(const void *from, int64_t offset, int64_t bytes)
{
    for (int64_t b = 0; b < bytes; b += 64)
        __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)(offset + b)));
}

#define LKV_FN static inline
#define LKV_BITS lkv_bits
#define LKV_FLOAT lkv_float

#include "layer_kv_base.h"
#if defined(__x86_64__) && defined(__GNUC__)
#define LKV_X86 1
#include "layer_kv_avx2.h"
#include "layer_kv_avx512.h"
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
