/* The loops, once per instruction set. layer_kv.c includes this file under a compiler target and
 * defines before:
 *   LKV_NAME(f)  f with the set's suffix      LKV_FMA       fused multiply-add of scalars
 *   V, VW        a vector and its lanes (1, 8 or 16)
 *   V_ZERO V_SET1 V_LOAD V_STORE V_LOAD_PART V_CODES V_CODES_PART V_FMA V_SUM32 V_SUM32X4
 * Each result is fixed by the order written here, whatever the set: a dot product is 32 lanes of
 * fused steps and a butterfly (strides 16, 8, 4, 2, 1); everything else is plain IEEE arithmetic
 * that the compiler may vectorise but not reassociate. */
#include "common/elementary.cuh"

#define NV (32 / VW)

/* The 32 lanes of one row. q is padded to a multiple of 32 with -0: the product of a pad is -0 and
 * leaves any sum alone. */
static inline __attribute__((always_inline)) void LKV_NAME(lanes)(
    const float *restrict q, const float *restrict row, int64_t hd, V *restrict acc)
{
    int64_t d = 0;
    for (int j = 0; j < NV; j++) acc[j] = V_ZERO();
    for (; d + 32 <= hd; d += 32)
        for (int j = 0; j < NV; j++)
            acc[j] = V_FMA(V_LOAD(q + d + j * VW), V_LOAD(row + d + j * VW), acc[j]);
    for (int j = 0; j < NV && d + j * VW < hd; j++) {
        int64_t left = hd - d - j * VW;
        const float *p = row + d + j * VW;
        acc[j] = V_FMA(V_LOAD(q + d + j * VW), left >= VW ? V_LOAD(p) : V_LOAD_PART(p, left), acc[j]);
    }
}

/* The lanes of one group of codes, or of the same codes already made floats. */
static inline __attribute__((always_inline)) void LKV_NAME(code_lanes)(
    const float *restrict q, const int8_t *restrict codes, const float *restrict wide, int64_t left,
    V *restrict acc)
{
    for (int j = 0; j < NV; j++) {
        int64_t lanes = left - j * VW;
        V b = V_ZERO();
        acc[j] = b;
        if (lanes <= 0) continue;
        if (wide)
            b = lanes >= VW ? V_LOAD(wide + j * VW) : V_LOAD_PART(wide + j * VW, lanes);
        else
            b = lanes >= VW ? V_CODES(codes + j * VW) : V_CODES_PART(codes + j * VW, lanes);
        acc[j] = V_FMA(b, V_LOAD(q + j * VW), acc[j]);
    }
}

/* Four rows share the steps of their butterflies; each keeps its own order. */
static void LKV_NAME(score_rows)(const float *q, const float *rows, int64_t hd, int64_t n,
                                 float scale, float *out)
{
    V acc[4][NV];
    float d[4];
    int64_t r = 0;
    LKV_COUNT(LKV_ROWS_SCORED, n);
    for (; r + 4 <= n; r += 4) {
        for (int i = 0; i < 4; i++) LKV_NAME(lanes)(q, rows + (r + i) * hd, hd, acc[i]);
        V_SUM32X4(acc, d);
        for (int i = 0; i < 4; i++) out[r + i] = d[i] * scale;
    }
    for (; r < n; r++) {
        LKV_NAME(lanes)(q, rows + r * hd, hd, acc[0]);
        out[r] = V_SUM32(acc[0]) * scale;
    }
}

static inline __attribute__((always_inline)) void LKV_NAME(score_groups)(
    const float *q, const int8_t *codes, const float *wide, const float *scales, int64_t hd,
    int64_t groups, int64_t n, float scale, float *out)
{
    V acc[4][NV];
    float d[4];
    LKV_COUNT(LKV_ROWS_SCORED, n);
    for (int64_t r = 0; r < n; r++) {
        const int8_t *row = codes + r * hd;
        const float *w = wide ? wide + r * hd : 0, *s = scales + r * groups;
        float dot = 0.0f;
        int64_t g = 0;
        for (; g + 4 <= groups && g * 32 + 128 <= hd; g += 4) {
            for (int i = 0; i < 4; i++)
                LKV_NAME(code_lanes)(q + (g + i) * 32, row + (g + i) * 32,
                                     w ? w + (g + i) * 32 : 0, 32, acc[i]);
            V_SUM32X4(acc, d);
            for (int i = 0; i < 4; i++) dot = dot + d[i] * s[g + i];
        }
        for (; g < groups; g++) {
            LKV_NAME(code_lanes)(q + g * 32, row + g * 32, w ? w + g * 32 : 0, hd - g * 32, acc[0]);
            dot = dot + V_SUM32(acc[0]) * s[g];
        }
        out[r] = dot * scale;
    }
}

static void LKV_NAME(score_codes)(const float *q, const int8_t *codes, const float *scales,
                                  int64_t hd, int64_t groups, int64_t n, float scale, float *out)
{
    LKV_NAME(score_groups)(q, codes, 0, scales, hd, groups, n, scale, out);
}

static void LKV_NAME(score_wide)(const float *q, const float *wide, const float *scales, int64_t hd,
                                 int64_t groups, int64_t n, float scale, float *out)
{
    LKV_NAME(score_groups)(q, (const int8_t *)wide, wide, scales, hd, groups, n, scale, out);
}

static void LKV_NAME(widen)(const int8_t *restrict codes, int64_t n, float *restrict out)
{
    for (int64_t i = 0; i < n; i++) out[i] = (float)codes[i];
}

/* acc[d] = fma(w, v[d], acc[d]) for ascending rows; nv vectors of one head at a time. */
static inline __attribute__((always_inline)) void LKV_NAME(value_chunk)(
    const float *restrict w, const float *restrict v, const int8_t *restrict vq, int64_t stride,
    int64_t n, int nv, int64_t part, float *restrict acc)
{
    V a[8];
    for (int j = 0; j < nv; j++) a[j] = V_LOAD(acc + j * VW);
    for (int64_t r = 0; r < n; r++) {
        float weight = w[r];
        if (weight < 1e-12f && weight > -1e-12f) continue;
        V wv = V_SET1(weight);
        for (int j = 0; j < nv; j++) {
            V b;
            if (vq) {
                const int8_t *p = vq + r * stride + j * VW;
                b = part ? V_CODES_PART(p, part) : V_CODES(p);
            } else {
                const float *p = v + r * stride + j * VW;
                b = part ? V_LOAD_PART(p, part) : V_LOAD(p);
            }
            a[j] = V_FMA(wv, b, a[j]);
        }
    }
    for (int j = 0; j < nv; j++) V_STORE(acc + j * VW, a[j]);
}

#define CHUNK(count, part)                                                                         \
    do {                                                                                           \
        if (vq)                                                                                    \
            LKV_NAME(value_chunk)(w, v, vq + d, hd, n, count, part, acc + d);                      \
        else                                                                                       \
            LKV_NAME(value_chunk)(w, v + d, 0, hd, n, count, part, acc + d);                       \
    } while (0)

/* acc is padded to a multiple of 32; one of v and vq is given. */
static void LKV_NAME(value_rows)(const float *w, const float *v, const int8_t *vq, int64_t hd,
                                 int64_t n, float *acc)
{
    int64_t d = 0;
    LKV_COUNT(LKV_ROWS_ADDED, n);
    for (; d + 8 * VW <= hd; d += 8 * VW) CHUNK(8, 0);
    for (; d + 4 * VW <= hd; d += 4 * VW) CHUNK(4, 0);
    for (; d + VW <= hd; d += VW) CHUNK(1, 0);
    if (d < hd) CHUNK(1, hd - d);
}
#undef CHUNK

static void LKV_NAME(exp_shifted)(float *restrict s, int64_t n, float m)
{
    LKV_COUNT(LKV_EXPONENTIALS, n);
    for (int64_t r = 0; r < n; r++) s[r] = LKV_NAME(lkv_exp)(s[r] - m);
}

static void LKV_NAME(softcap_rows)(float *restrict s, int64_t n, float cap)
{
    for (int64_t r = 0; r < n; r++) s[r] = cap * LKV_NAME(lkv_tanh)(s[r] / cap);
}

static void LKV_NAME(divide_rows)(float *restrict s, int64_t n, float z)
{
    for (int64_t r = 0; r < n; r++) s[r] = s[r] / z;
}

/* Scores of one row of weights to probabilities; the sink's term enters the sum last. */
static int LKV_NAME(softmax)(float *s, int64_t n, const float *sink)
{
    float m = -INFINITY, z = 0.0f;
    for (int64_t r = 0; r < n; r++) m = s[r] > m ? s[r] : m;
    if (sink && *sink > m) m = *sink;
    LKV_NAME(exp_shifted)(s, n, m);
    for (int64_t r = 0; r < n; r++) z = z + s[r];
    if (z != z) return LKV_NOT_FINITE;
    if (sink) z = z + LKV_NAME(lkv_exp)(*sink - m);
    if (z > 0.0f) LKV_NAME(divide_rows)(s, n, z);
    return 0;
}

static void LKV_NAME(pad_query)(const float *q, const float *col, int64_t hd, int64_t hdp, float *to)
{
    for (int64_t d = 0; d < hd; d++) to[d] = col ? q[d] * col[d] : q[d];
    for (int64_t d = hd; d < hdp; d++) to[d] = -0.0f;
}

static int LKV_NAME(attend)(const lkv_store *s, int64_t head, const float *q, int64_t n,
                            int64_t stored, int64_t first, float scale, float softcap,
                            const float *sinks, float *out, float *imp, int64_t n_imp, float *probs)
{
    enum { TILE = 32 };
    int64_t hd = s->hd, hdp = (hd + 31) / 32 * 32, span = stored - first;
    int64_t at = head * s->cap + first;
    float *work = lkv_scratch(2 * n * hdp + TILE + TILE * hd + (probs ? 0 : n * span));
    if (!work) return LKV_NO_MEMORY;
    float *qp = work, *acc = work + n * hdp, *wts = acc + n * hdp, *wide = wts + TILE;
    float *p = probs ? probs : wide + TILE * hd;
    int share = n > 1; /* several queries read a tile: make its codes floats once */
    const float *kcol = s->k_q8 && s->kcol_on[head] ? s->kcol + head * hd : 0;
    int bad = 0;
    for (int64_t i = 0; i < n; i++)
        LKV_NAME(pad_query)(q + i * hd, kcol, hd, hdp, qp + i * hdp);
    for (int64_t r = 0; r < span; r += TILE) {
        int64_t rows = span - r < TILE ? span - r : TILE;
        if (s->k_q8 && share) LKV_NAME(widen)(s->kq + (at + r) * hd, rows * hd, wide);
        for (int64_t i = 0; i < n; i++)
            if (s->k_q8 && share)
                LKV_NAME(score_wide)(qp + i * hdp, wide, s->ks + (at + r) * s->groups, hd,
                                     s->groups, rows, scale, p + i * span + r);
            else if (s->k_q8)
                LKV_NAME(score_codes)(qp + i * hdp, s->kq + (at + r) * hd,
                                      s->ks + (at + r) * s->groups, hd, s->groups, rows, scale,
                                      p + i * span + r);
            else
                LKV_NAME(score_rows)(qp + i * hdp, s->k + (at + r) * hd, hd, rows, scale,
                                     p + i * span + r);
    }
    for (int64_t i = 0; i < n && !bad; i++) {
        if (softcap > 0.0f) LKV_NAME(softcap_rows)(p + i * span, span, softcap);
        bad = LKV_NAME(softmax)(p + i * span, span, sinks ? sinks + i : 0);
    }
    if (bad) {
        free(work);
        return bad;
    }
    memset(acc, 0, sizeof(float) * (size_t)(n * hdp));
    for (int64_t r = 0; r < span; r += TILE) {
        int64_t rows = span - r < TILE ? span - r : TILE;
        if (s->v_q8 && share) LKV_NAME(widen)(s->vq + (at + r) * hd, rows * hd, wide);
        for (int64_t i = 0; i < n; i++) {
            const float *w = p + i * span + r;
            if (s->v_q8) {
                const float *vs = s->vs + at + r;
                for (int64_t j = 0; j < rows; j++) wts[j] = w[j] * vs[j];
                const int8_t *codes = s->vq + (at + r) * hd;
                LKV_NAME(value_rows)(wts, wide, share ? 0 : codes, hd, rows, acc + i * hdp);
            } else
                LKV_NAME(value_rows)(w, s->v + (at + r) * hd, 0, hd, rows, acc + i * hdp);
        }
    }
    const float *vcol = s->v_q8 && s->vcol_on[head] ? s->vcol + head * hd : 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < hd; d++)
            out[i * hd + d] = vcol ? acc[i * hdp + d] * vcol[d] : acc[i * hdp + d];
    int64_t end = n_imp < stored ? n_imp : stored;
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = first; r < end; r++) imp[r] = imp[r] + p[i * span + r - first];
    free(work);
    return 0;
}

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
        bad = LKV_NAME(softmax)(s, n, 0);
    }
    for (int64_t h = 0; h < nkv; h++) {
        float *at_k = ring_k + (h * window + slot) * hd, *at_v = ring_v + (h * window + slot) * hd;
        memcpy(bad ? at_k : undo_k + h * hd, old_k + h * hd, bytes);
        memcpy(bad ? at_v : undo_v + h * hd, old_v + h * hd, bytes);
    }
    for (int64_t i = 0; i < nh && !bad; i++) {
        const float *w = p + i * n, *rv = ring_v + i / hpk * window * hd;
        memset(acc, 0, sizeof(float) * (size_t)hdp);
        LKV_NAME(value_rows)(w, sink_v + i / hpk * n_sink * hd, 0, hd, n_sink, acc);
        for (int64_t delta = 0; delta < len; delta++) {
            int64_t row = slot - delta < 0 ? slot - delta + window : slot - delta;
            LKV_NAME(value_rows)(w + n_sink + delta, rv + row * hd, 0, hd, 1, acc);
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
#undef NV
