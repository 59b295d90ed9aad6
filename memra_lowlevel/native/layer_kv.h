/* Exact loops of LayerKvCache: the C side of memra_lowlevel/layer_kv/loops.py.
 * No function allocates for the caller, keeps a pointer or touches Python; each may run without the
 * interpreter's lock. Return value: 0, or one of LKV_NO_MEMORY and LKV_NOT_FINITE; then nothing that
 * belongs to the caller was written except the scratch outputs named so. */
#ifndef MEMRA_LAYER_KV_H
#define MEMRA_LAYER_KV_H
#include <stdint.h>

#define LKV_NO_MEMORY 1
#define LKV_NOT_FINITE 2

/* What the loops of the calling thread have done since it began: rows of keys multiplied with a
 * query, rows of values (or of a state) added to a sum, exponentials, bytes of scratch. A step that
 * costs more with every token shows here exactly, without a clock. */
#define LKV_ROWS_SCORED 0
#define LKV_ROWS_ADDED 1
#define LKV_EXPONENTIALS 2
#define LKV_SCRATCH_BYTES 3
#define LKV_N_WORK 4

/* The stores of a layer. Head h, row p: k[(h*cap + p)*hd], kq the same, ks[(h*cap + p)*groups],
 * vs[h*cap + p]; columns [nkv][hd], used where *_on[h] is not 0. */
typedef struct {
    const float *k, *v, *ks, *vs, *kcol, *vcol;
    const int8_t *kq, *vq;
    const uint8_t *kcol_on, *vcol_on;
    int64_t cap, hd, groups;
    int32_t k_q8, v_q8;
} lkv_store;

/* A sealed Nystrom state: G groups of hpk query heads, H = G * hpk.
 * win_k [G][w][d]  win_v [G][w][dv]  sink_k [G][sink][d]  sink_v [G][sink][dv]  kl [G][m][d]
 * ql [H][m][d]  pinv [H][m][m]  shift [H]  mu [H][m]  z [H][m]  t [H][m][dv] */
typedef struct {
    float *win_k, *win_v, *mu, *z, *t;
    const float *sink_k, *sink_v, *kl, *ql, *pinv, *shift;
    int64_t groups, hpk, m, w, sink, d, dv;
    float scale;
    int32_t fm;
} lkv_nystrom;

int lkv_isa_mask(void);
int lkv_isa(void);
int lkv_select_isa(int isa);
void lkv_work(int64_t *counts);

float lkv_read(const float *x, int64_t n);
void lkv_map_exp(const float *x, float *y, int64_t n);
void lkv_map_tanh(const float *x, float *y, int64_t n);
void lkv_dot_rows(const float *q, const float *rows, int64_t n_rows, int64_t hd, float *out);

int lkv_quantise(const float *x, const float *col, const uint8_t *col_on, int64_t n_rows,
                 int64_t hd, int64_t width, int8_t *codes, float *scales);

int lkv_attend(const lkv_store *s, int64_t head, const float *q, int64_t n, int64_t stored,
               int64_t first, float scale, float softcap, const float *sinks, float *out,
               float *imp, int64_t n_imp, float *probs);

int lkv_bounded_step(float *ring_k, float *ring_v, float *undo_k, float *undo_v, int64_t nkv,
                     int64_t hd, int64_t window, int64_t slot, int64_t len, const float *sink_k,
                     const float *sink_v, int64_t n_sink, const float *cos_t, const float *sin_t,
                     int64_t half, const float *q, const float *k, const float *v, int64_t nh,
                     float scale, float *out);

int lkv_nystrom_step(const lkv_nystrom *s, int64_t win_len, int64_t win_head, int64_t far_len,
                     const float *q, const float *k, const float *v, float *out);
int lkv_nystrom_replay(const lkv_nystrom *s, int64_t win_len, int64_t win_head, const float *k,
                       const float *v, int64_t k_stride, int64_t v_stride, int64_t n_rows);

void lkv_phase(const double *decay, const double *fk, const double *fq, const float *v,
               const float *kappa, int64_t nh, int64_t width, int64_t dv, float *state, float *out);
int lkv_phase_delta(const double *decay, const double *fk, const double *fq, const float *v,
                    const float *beta, int64_t nh, int64_t width, int64_t dv, float *state,
                    float *out);
#endif
