/* The loops, once per instruction set. layer_kv_base.h, layer_kv_avx2.h and layer_kv_avx512.h include
 * this file under a compiler target; it forgets their definitions at its end:
 *   LKV_NAME(f)  f with the set's suffix      LKV_FMA       fused multiply-add of scalars
 *   V, VW        a vector and its lanes       V_LOAD V_STORE V_LOAD_PART(p, n < VW)
 *   V_ZERO V_SET1 V_FMA V_SUM32 V_SUM32X4     V_CODES V_CODES_PART: int8 to float
 *   V_TURN(codes, stride, turned)             32 codes of VW rows, channel d's at V_TURNED(d)
 *   V_LEAVES     codes that registers hold as floats while queries use them
 *   V_QUERIES V_SUMS                          queries and sums of values side by side
 *   V_KEEP       hold a value in a register: compilers load an operand again for each use
 * Each result is fixed by the order written here, whatever the set: a dot product is 32 lanes of
 * fused steps and a butterfly (strides 16, 8, 4, 2, 1); everything else is plain IEEE arithmetic
 * that the compiler may vectorise but not reassociate. */
#include "common/elementary.cuh"

#include "layer_kv_attend.h"

static int LKV_NAME(quantise)(const float *x, const float *col, const uint8_t *col_on,
                              int64_t n_rows, int64_t hd, int64_t width, int8_t *codes,
                              float *scales)
{
    float *r = lkv_scratch(hd);
    if (!r) return LKV_NO_MEMORY;
    for (int64_t row = 0; row < n_rows; row++) {
        const float *c = col_on[row] ? col + row * hd : 0;
        for (int64_t d = 0; d < hd; d++) r[d] = c ? x[row * hd + d] / c[d] : x[row * hd + d];
        for (int64_t d = 0; d < hd; d += width) {
            int64_t end = d + width < hd ? d + width : hd;
            float a = 0.0f, poison = 0.0f;
            for (int64_t i = d; i < end; i++) {
                float m = fabsf(r[i]);
                a = m > a ? m : a;
                poison = poison + r[i] * 0.0f;
            }
            if (poison != 0.0f) { /* a NaN or an infinity in the block makes it NaN */
                free(r);
                return LKV_NOT_FINITE;
            }
            float s = a / 127.0f;
            s = s < 1e-12f ? 1e-12f : s;
            for (int64_t i = d; i < end; i++) {
                float q = LKV_NAME(lkv_round_away)(r[i] / s);
                q = q > 127.0f ? 127.0f : q;
                q = q < -127.0f ? -127.0f : q;
                codes[row * hd + i] = (int8_t)(int32_t)q;
            }
            *scales++ = s;
        }
    }
    free(r);
    return 0;
}

static int LKV_NAME(bounded_step)(float *ring_k, float *ring_v, float *undo_k, float *undo_v,
                                  int64_t nkv, int64_t hd, int64_t window, int64_t slot,
                                  int64_t len, const float *sink_k, const float *sink_v,
                                  int64_t n_sink, const float *cos_t, const float *sin_t,
                                  int64_t half, const float *q, const float *k, const float *v,
                                  int64_t nh, float scale, float *out)
{
    int64_t hdp = (hd + 31) / 32 * 32, n = n_sink + len, hpk = nh / nkv;
    float *work = lkv_scratch(2 * hdp + 2 * nkv * hd + nh * n);
    if (!work) return LKV_NO_MEMORY;
    float *qp = work, *acc = qp + hdp, *old_k = acc + hdp, *old_v = old_k + nkv * hd;
    float *p = old_v + nkv * hd;
    size_t bytes = sizeof(float) * (size_t)hd;
    int bad = 0;
    for (int64_t h = 0; h < nkv; h++) {
        float *at_k = ring_k + (h * window + slot) * hd, *at_v = ring_v + (h * window + slot) * hd;
        memcpy(old_k + h * hd, at_k, bytes);
        memcpy(old_v + h * hd, at_v, bytes);
        memcpy(at_k, k + h * hd, bytes);
        memcpy(at_v, v + h * hd, bytes);
    }
    for (int64_t i = 0; i < nh && !bad; i++) {
        const float *qi = q + i * hd, *rk = ring_k + i / hpk * window * hd;
        float *s = p + i * n;
        LKV_NAME(pad_query)(qi, 0, hd, hdp, qp);
        LKV_NAME(score_rows)(qp, sink_k + i / hpk * n_sink * hd, hd, n_sink, scale, s);
        for (int64_t delta = 0; delta < len; delta++) {
            const float *c = cos_t + delta * half, *sn = sin_t + delta * half;
            int64_t row = slot - delta < 0 ? slot - delta + window : slot - delta;
            for (int64_t d = 0; d < half; d++) {
                float a = qi[d], b = qi[d + half];
                qp[d] = a * c[d] - b * sn[d];
                qp[d + half] = a * sn[d] + b * c[d];
            }
            LKV_NAME(score_rows)(qp, rk + row * hd, hd, 1, scale, s + n_sink + delta);
        }
        bad = LKV_NAME(softmax)(s, n, 1, n, 0);
    }
    for (int64_t h = 0; h < nkv; h++) {
        float *at_k = ring_k + (h * window + slot) * hd, *at_v = ring_v + (h * window + slot) * hd;
        memcpy(bad ? at_k : undo_k + h * hd, old_k + h * hd, bytes);
        memcpy(bad ? at_v : undo_v + h * hd, old_v + h * hd, bytes);
    }
    for (int64_t i = 0; i < nh && !bad; i++) {
        const float *w = p + i * n, *rv = ring_v + i / hpk * window * hd;
        memset(acc, 0, sizeof(float) * (size_t)hdp);
        LKV_NAME(value_rows)(w, sink_v + i / hpk * n_sink * hd, hd, n_sink, acc);
        for (int64_t delta = 0; delta < len; delta++) {
            int64_t row = slot - delta < 0 ? slot - delta + window : slot - delta;
            LKV_NAME(value_rows)(w + n_sink + delta, rv + row * hd, hd, 1, acc);
        }
        memcpy(out + i * hd, acc, bytes);
    }
    free(work);
    return bad;
}

static void LKV_NAME(absorb)(const lkv_nystrom *s, int64_t h, const float *l, const float *v)
{
    LKV_COUNT(LKV_ROWS_ADDED, s->m);
    LKV_COUNT(LKV_EXPONENTIALS, s->m);
    for (int64_t b = 0; b < s->m; b++) {
        float *mu = s->mu + h * s->m + b, *z = s->z + h * s->m + b;
        float *restrict t = s->t + (h * s->m + b) * s->dv;
        if (l[b] > *mu) {
            float r = LKV_NAME(lkv_exp)(*mu - l[b]);
            LKV_COUNT(LKV_EXPONENTIALS, 1);
            *z = *z * r;
            for (int64_t d = 0; d < s->dv; d++) t[d] = t[d] * r;
            *mu = l[b];
        }
        float e = LKV_NAME(lkv_exp)(l[b] - *mu);
        *z = *z + e;
        for (int64_t d = 0; d < s->dv; d++) t[d] = LKV_FMA(e, v[d], t[d]);
    }
}

static int LKV_NAME(finite)(const float *x, int64_t n)
{
    float poison = 0.0f;
    for (int64_t i = 0; i < n; i++) poison = poison + x[i] * 0.0f;
    return poison == 0.0f;
}

static int LKV_NAME(nystrom_step)(const lkv_nystrom *s, int64_t win_len, int64_t win_head,
                                  int64_t far_len, const float *q, const float *k, const float *v,
                                  float *out)
{
    int64_t d = s->d, dv = s->dv, m = s->m, w = s->w, sink = s->sink, n_heads = s->groups * s->hpk;
    int64_t dp = (d + 31) / 32 * 32, evict = win_len == w, slot = evict ? win_head : win_len;
    int64_t len = evict ? w : win_len + 1, near = sink + len, far = far_len + evict;
    int64_t per = near + 2 * m;
    float *work = lkv_scratch(dp + dv + m + n_heads * per);
    if (!work) return LKV_NO_MEMORY;
    float *qp = work, *u = qp + dp, *acc = u + m, *logits = acc + dv;
    int ok = 1;
    for (int64_t h = 0; h < n_heads; h++) { /* every logit before anything moves */
        int64_t g = h / s->hpk;
        const float *ring = s->win_k + g * w * d;
        float *nl = logits + h * per, *fl = nl + near, *al = fl + m;
        LKV_NAME(pad_query)(q + h * d, 0, d, dp, qp);
        LKV_NAME(score_rows)(qp, s->sink_k + g * sink * d, d, sink, s->scale, nl);
        LKV_NAME(score_rows)(qp, ring, d, len, s->scale, nl + sink);
        LKV_NAME(score_rows)(qp, k + g * d, d, 1, s->scale, nl + sink + slot);
        ok = ok && LKV_NAME(finite)(nl, near);
        if (far > 0) {
            LKV_NAME(score_rows)(qp, s->kl + g * m * d, d, m, s->scale, fl);
            ok = ok && LKV_NAME(finite)(fl, m);
        }
        if (evict) {
            LKV_NAME(pad_query)(ring + slot * d, 0, d, dp, qp);
            LKV_NAME(score_rows)(qp, s->ql + h * m * d, d, m, s->scale, al);
            ok = ok && LKV_NAME(finite)(al, m);
        }
    }
    ok = ok && LKV_NAME(finite)(k, s->groups * d) && LKV_NAME(finite)(v, s->groups * dv);
    if (!ok) {
        free(work);
        return LKV_NOT_FINITE;
    }
    for (int64_t g = 0; g < s->groups; g++) {
        float *at_v = s->win_v + (g * w + slot) * dv;
        for (int64_t i = 0; i < s->hpk && evict; i++) {
            int64_t h = g * s->hpk + i;
            LKV_NAME(absorb)(s, h, logits + h * per + near + m, at_v);
        }
        memcpy(s->win_k + (g * w + slot) * d, k + g * d, sizeof(float) * (size_t)d);
        memcpy(at_v, v + g * dv, sizeof(float) * (size_t)dv);
    }
    for (int64_t h = 0; h < n_heads; h++) {
        int64_t g = h / s->hpk;
        float *nl = logits + h * per;
        const float *fl = nl + near, *mu = s->mu + h * m, *z = s->z + h * m;
        float c = nl[0], top, den = 0.0f;
        for (int64_t j = 1; j < near; j++) c = nl[j] > c ? nl[j] : c;
        top = c;
        for (int64_t j = 0; j < dv; j++) acc[j] = 0.0f;
        if (far > 0) {
            float f = fl[0];
            for (int64_t a = 1; a < m; a++) f = fl[a] > f ? fl[a] : f;
            for (int64_t b = 0; b < m; b++) u[b] = 0.0f;
            LKV_COUNT(LKV_EXPONENTIALS, 2 * m);
            for (int64_t a = 0; a < m; a++) {
                float phi = LKV_NAME(lkv_exp)(fl[a] - f);
                const float *row = s->pinv + (h * m + a) * m;
                for (int64_t b = 0; b < m; b++) u[b] = LKV_FMA(phi, row[b], u[b]);
            }
            for (int64_t b = 0; b < m; b++) {
                float e = (f + mu[b]) - s->shift[h];
                if (s->fm && u[b] < 0.0f) u[b] = 0.0f;
                top = e > top ? e : top;
            }
            for (int64_t b = 0; b < m; b++) {
                u[b] = u[b] * LKV_NAME(lkv_exp)(((f + mu[b]) - s->shift[h]) - top);
                den = LKV_FMA(u[b], z[b], den);
            }
            if (den >= 0.0f) {
                LKV_COUNT(LKV_ROWS_ADDED, m);
                for (int64_t b = 0; b < m; b++) {
                    const float *t = s->t + (h * m + b) * dv;
                    for (int64_t j = 0; j < dv; j++) acc[j] = LKV_FMA(u[b], t[j], acc[j]);
                }
            } else { /* the skeleton's mass is negative: the near field answers alone */
                den = 0.0f;
                top = c;
            }
        }
        LKV_COUNT(LKV_ROWS_ADDED, near);
        LKV_COUNT(LKV_EXPONENTIALS, near);
        for (int64_t j = 0; j < near; j++) {
            float e = LKV_NAME(lkv_exp)(nl[j] - top);
            const float *row = j < sink ? s->sink_v + (g * sink + j) * dv
                                        : s->win_v + (g * w + j - sink) * dv;
            den = den + e;
            for (int64_t i = 0; i < dv; i++) acc[i] = LKV_FMA(e, row[i], acc[i]);
        }
        den = den > 1e-30f ? den : 1e-30f;
        for (int64_t j = 0; j < dv; j++) out[h * dv + j] = acc[j] / den;
    }
    free(work);
    return 0;
}

static int LKV_NAME(nystrom_replay)(const lkv_nystrom *s, int64_t win_len, int64_t win_head,
                                    const float *k, const float *v, int64_t k_stride,
                                    int64_t v_stride, int64_t n_rows)
{
    int64_t d = s->d, dv = s->dv, m = s->m, w = s->w, dp = (d + 31) / 32 * 32;
    float *work = lkv_scratch(dp + m);
    if (!work) return LKV_NO_MEMORY;
    float *old = work, *l = work + dp;
    int ok = 1;
    for (int64_t r = 0; r < n_rows; r++) {
        int64_t evict = win_len == w, slot = evict ? win_head : win_len;
        for (int64_t g = 0; g < s->groups; g++) {
            float *at_k = s->win_k + (g * w + slot) * d, *at_v = s->win_v + (g * w + slot) * dv;
            if (evict) LKV_NAME(pad_query)(at_k, 0, d, dp, old);
            for (int64_t i = 0; i < s->hpk && evict; i++) {
                int64_t h = g * s->hpk + i;
                LKV_NAME(score_rows)(old, s->ql + h * m * d, d, m, s->scale, l);
                ok = ok && LKV_NAME(finite)(l, m);
                LKV_NAME(absorb)(s, h, l, at_v);
            }
            memcpy(at_k, k + g * k_stride + r * d, sizeof(float) * (size_t)d);
            memcpy(at_v, v + g * v_stride + r * dv, sizeof(float) * (size_t)dv);
        }
        if (evict)
            win_head = (win_head + 1) % w;
        else
            win_len++;
    }
    free(work);
    return ok ? 0 : LKV_NOT_FINITE;
}

static void LKV_NAME(phase)(const double *decay, const double *fk, const double *fq, const float *v,
                            const float *kappa, int64_t nh, int64_t width, int64_t dv, float *state,
                            float *out)
{
    for (int64_t h = 0; h < nh; h++) {
        float *restrict o = out + h * dv;
        for (int64_t d = 0; d < dv; d++) o[d] = 0.0f;
        for (int64_t f = 0; f < width; f++) {
            double g = decay[h * width + f], a = fk[h * width + f] * (double)kappa[h];
            double b = fq[h * width + f];
            float *restrict s = state + (h * width + f) * dv;
            LKV_COUNT(LKV_ROWS_ADDED, 1);
            for (int64_t d = 0; d < dv; d++) {
                double cell = g * (double)s[d] + a * (double)v[h * dv + d];
                s[d] = (float)cell;
                o[d] = o[d] + (float)(b * cell);
            }
        }
    }
}

static int LKV_NAME(phase_delta)(const double *decay, const double *fk, const double *fq,
                                 const float *v, const float *beta, int64_t nh, int64_t width,
                                 int64_t dv, float *state, float *out)
{
    double *restrict r = malloc(sizeof(double) * (size_t)dv);
    if (!r) return LKV_NO_MEMORY;
    LKV_COUNT(LKV_SCRATCH_BYTES, (int64_t)sizeof(double) * dv);
    for (int64_t h = 0; h < nh; h++) {
        float *restrict o = out + h * dv;
        for (int64_t d = 0; d < dv; d++) o[d] = 0.0f, r[d] = 0.0;
        for (int64_t f = 0; f < width; f++) {
            double g = decay[h * width + f], a = fk[h * width + f];
            const float *s = state + (h * width + f) * dv;
            LKV_COUNT(LKV_ROWS_SCORED, 1);
            for (int64_t d = 0; d < dv; d++) r[d] = r[d] + a * (g * (double)s[d]);
        }
        for (int64_t f = 0; f < width; f++) {
            double g = decay[h * width + f], a = (double)beta[h] * fk[h * width + f];
            double b = fq[h * width + f];
            float *restrict s = state + (h * width + f) * dv;
            LKV_COUNT(LKV_ROWS_ADDED, 1);
            for (int64_t d = 0; d < dv; d++) {
                s[d] = (float)(g * (double)s[d] + a * ((double)v[h * dv + d] - r[d]));
                o[d] = o[d] + (float)(b * (double)s[d]);
            }
        }
    }
    free(r);
    return 0;
}

/* What reading costs by itself: the yardstick of the benchmark. */
static float LKV_NAME(read_all)(const float *x, int64_t n)
{
    V one = V_SET1(1.0f), acc[4 * NV];
    float sum = 0.0f;
    for (int j = 0; j < 4 * NV; j++) acc[j] = V_ZERO();
    for (int64_t i = 0; i + 128 <= n; i += 128)
        for (int j = 0; j < 4 * NV; j++) acc[j] = V_FMA(V_LOAD(x + i + j * VW), one, acc[j]);
    for (int j = 0; j < 4; j++) sum += V_SUM32(acc + j * NV);
    return sum;
}

static void LKV_NAME(map_exp)(const float *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = LKV_NAME(lkv_exp)(x[i]);
}

static void LKV_NAME(map_tanh)(const float *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = LKV_NAME(lkv_tanh)(x[i]);
}

static const lkv_table LKV_NAME(table) = {
    LKV_NAME(map_exp),      LKV_NAME(map_tanh),     LKV_NAME(score_rows),     LKV_NAME(quantise),
    LKV_NAME(attend),       LKV_NAME(bounded_step), LKV_NAME(nystrom_step),   LKV_NAME(nystrom_replay),
    LKV_NAME(phase),        LKV_NAME(phase_delta),  LKV_NAME(read_all),
};

#undef LKV_NAME
#undef LKV_FMA
#undef V
#undef VW
#undef NV
#undef AHEAD
#undef INLINE
#undef V_ZERO
#undef V_SET1
#undef V_LOAD
#undef V_LOAD_PART
#undef V_STORE
#undef V_CODES
#undef V_CODES_PART
#undef V_FMA
#undef V_KEEP
#undef V_SUM32
#undef V_SUM32X4
#undef V_TURN
#undef V_TURNED
#undef V_LEAVES
#undef V_QUERIES
#undef V_SUMS
