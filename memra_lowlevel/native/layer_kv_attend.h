/* Attention over stored rows, once per instruction set: included by layer_kv_loops.h. The queries of a
 * group share each row: it is loaded, or its codes made floats, once for several of them. */
#define INLINE static inline __attribute__((always_inline))
#define NV (32 / VW)
#define AHEAD 16 /* rows that are asked for before their turn */

/* One step of 32 channels for nq queries and rows `at` to at + n - 1 of a block. */
INLINE void LKV_NAME(score_step)(const float *restrict q, int64_t q_step, int nq,
                                 const float *restrict rows, int64_t step, int at, int n,
                                 V (*restrict lanes)[4][NV])
{
    for (int j = 0; j < NV; j++) {
        V x[4];
        for (int r = 0; r < n; r++) x[r] = V_KEEP(V_LOAD(rows + r * step + j * VW));
        for (int i = 0; i < nq; i++) {
            V y = V_LOAD(q + i * q_step + j * VW);
            for (int r = 0; r < n; r++)
                lanes[i][at + r][j] = V_FMA(y, x[r], lanes[i][at + r][j]);
        }
    }
}

/* Scores of nq queries and nr rows, 4 or 1. q is padded to a multiple of 32 with -0, rows are with 0:
 * the product of a pad is -0 and leaves any sum alone. Several queries go through all rows at once;
 * one takes row after row, in the order of the memory. */
INLINE void LKV_NAME(score_block)(const float *restrict q, int64_t q_step, int nq,
                                  const float *restrict rows, int64_t hd, int nr, float scale,
                                  float *restrict out, int64_t out_step)
{
    V lanes[2][4][NV];
    int n = nq > 1 ? nr : 1;
    for (int i = 0; i < nq; i++)
        for (int r = 0; r < nr; r++)
            for (int j = 0; j < NV; j++) lanes[i][r][j] = V_ZERO();
#pragma GCC unroll 4
    for (int at = 0; at < nr; at += n) {
        const float *row = rows + at * hd;
        int64_t d = 0;
        for (; d + 32 <= hd; d += 32)
            LKV_NAME(score_step)(q + d, q_step, nq, row + d, hd, at, n, lanes);
        if (d < hd) {
            float edge[4][32];
            memset(edge, 0, sizeof edge);
            for (int r = 0; r < n; r++)
                memcpy(edge[r], row + r * hd + d, sizeof(float) * (size_t)(hd - d));
            LKV_NAME(score_step)(q + d, q_step, nq, edge[0], 32, at, n, lanes);
        }
    }
    for (int i = 0; i < nq; i++) {
        float dot[4];
        if (nr == 4)
            V_SUM32X4(lanes[i], dot);
        else
            dot[0] = V_SUM32(lanes[i][0]);
        for (int r = 0; r < nr; r++) out[i * out_step + r] = dot[r] * scale;
    }
}

/* Scores of a group, four rows at a time. While several queries work on them, nothing but a request
 * makes the memory go on; one query reads fast enough by itself. */
static void LKV_NAME(score_group)(const float *q, int64_t q_step, int64_t nq, const float *rows,
                                  int64_t hd, int64_t n, float scale, float *out, int64_t out_step)
{
    int64_t r = 0;
    LKV_COUNT(LKV_ROWS_SCORED, n * nq);
#define SCORE(m, nr)                                                                               \
    LKV_NAME(score_block)(q + i * q_step, q_step, m, rows + r * hd, hd, nr, scale,                 \
                          out + i * out_step + r, out_step)
    for (; r + 4 <= n; r += 4) {
        int64_t i = 0;
        if (nq > 1) lkv_ask_for(rows, 4 * (r + AHEAD) * hd, 16 * hd);
        for (; i + 2 <= nq; i += 2) SCORE(2, 4);
        if (i < nq) SCORE(1, 4);
    }
    for (; r < n; r++)
        for (int64_t i = 0; i < nq; i++) SCORE(1, 1);
#undef SCORE
}

static void LKV_NAME(score_rows)(const float *q, const float *rows, int64_t hd, int64_t n,
                                 float scale, float *out)
{
    LKV_NAME(score_group)(q, 0, 1, rows, hd, n, scale, out, 0);
}

/* The codes of VW rows, channel by channel, in the places that V_TURNED names. */
static void LKV_NAME(turn_codes)(const int8_t *codes, int64_t hd, int64_t rows, int8_t *turned)
{
    for (int64_t d = 0; d < hd; d += 32) {
        int8_t edge[VW][32];
        if (rows == VW && d + 32 <= hd) {
            V_TURN(codes + d, hd, turned + d * VW);
            continue;
        }
        memset(edge, 0, sizeof edge);
        for (int64_t r = 0; r < rows; r++)
            memcpy(edge[r], codes + r * hd + d, (size_t)(hd - d < 32 ? hd - d : 32));
        V_TURN(edge[0], 32, turned + d * VW);
    }
}

/* Scores, but for the factor, of VW rows of codes. A row in each lane makes the butterfly over 32
 * channels a tree of plain sums: products come in the order in which it joins them (the bits of their
 * number reversed), and a sum as soon as both of its halves are there. Codes are made floats V_LEAVES
 * at a time, as many as registers hold while all queries use them; what waits for the next of them
 * lies in parts [2][n][VW]. scales [groups][VW], sums [n][VW]. */
static void LKV_NAME(score_turned)(const float *restrict q, int64_t q_step, int64_t n,
                                   const int8_t *restrict turned, const float *restrict scales,
                                   int64_t groups, float *restrict sums, float *restrict parts)
{
#define LEAF(t) (((t) & 1) << 4 | ((t) & 2) << 2 | ((t) & 4) | ((t) & 8) >> 2 | ((t) & 16) >> 4)
    for (int64_t i = 0; i < n; i++) V_STORE(sums + i * VW, V_ZERO());
    for (int64_t g = 0; g < groups; g++, turned += 32 * VW, q += 32, scales += VW) {
#pragma GCC unroll 4
        for (int block = 0; block < 32 / V_LEAVES; block++) {
            V x[V_LEAVES];
#pragma GCC unroll 16
            for (int t = 0; t < V_LEAVES; t++)
                x[t] = V_KEEP(V_CODES(turned + V_TURNED(LEAF(block * V_LEAVES + t))));
            for (int64_t i = 0; i < n; i++) {
                V waits[5], p;
#pragma GCC unroll 16
                for (int t = 0; t < V_LEAVES; t++) {
                    int level = 0;
                    p = x[t] * V_SET1(q[i * q_step + LEAF(block * V_LEAVES + t)]);
#pragma GCC unroll 4
                    for (int c = t; c & 1; c >>= 1) p = waits[level++] + p;
                    waits[level] = p;
                }
                int level = 0;
#pragma GCC unroll 2
                for (int c = block; c & 1; c >>= 1, level++)
                    p = V_LOAD(parts + (level * n + i) * VW) + p;
                if (block < 32 / V_LEAVES - 1)
                    V_STORE(parts + (level * n + i) * VW, p);
                else
                    V_STORE(sums + i * VW, V_LOAD(sums + i * VW) + p * V_LOAD(scales));
            }
        }
    }
#undef LEAF
}

/* Floats of scratch that score_codes needs. */
static int64_t LKV_NAME(turning_floats)(int64_t groups, int64_t n)
{
    return (groups + 3 * n + 8 * groups) * VW;
}

static void LKV_NAME(score_codes)(const float *q, int64_t q_step, int64_t nq, const int8_t *codes,
                                  const float *scales, int64_t hd, int64_t groups, int64_t n,
                                  float scale, float *out, int64_t out_step, float *work)
{
    float *sums = work, *parts = sums + nq * VW, *columns = parts + 2 * nq * VW;
    int8_t *turned = (int8_t *)(columns + groups * VW);
    LKV_COUNT(LKV_ROWS_SCORED, n * nq);
    for (int64_t r = 0; r < n; r += VW) {
        int64_t rows = n - r < VW ? n - r : VW;
        lkv_ask_for(codes, (r + AHEAD) * hd, VW * hd);
        LKV_NAME(turn_codes)(codes + r * hd, hd, rows, turned);
        for (int64_t g = 0; g < groups; g++)
            for (int64_t i = 0; i < VW; i++)
                columns[g * VW + i] = i < rows ? scales[(r + i) * groups + g] : 0.0f;
        LKV_NAME(score_turned)(q, q_step, nq, turned, columns, groups, sums, parts);
        for (int64_t i = 0; i < nq; i++)
            for (int64_t j = 0; j < rows; j++) out[i * out_step + r + j] = sums[i * VW + j] * scale;
    }
}

/* acc[d] = fma(w, v[d], acc[d]) for ascending rows, nv vectors of nq queries at a time; a weight
 * below 1e-12 leaves its row out, which costs a test only where there is one. */
INLINE void LKV_NAME(value_block)(const float *restrict w, int64_t w_step, int nq, int light,
                                  const float *restrict v, const int8_t *restrict vq,
                                  int64_t stride, int64_t n, int nv, int64_t part,
                                  float *restrict acc, int64_t acc_step)
{
    V a[4][8];
    for (int i = 0; i < nq; i++)
        for (int j = 0; j < nv; j++) a[i][j] = V_LOAD(acc + i * acc_step + j * VW);
    for (int64_t r = 0; r < n; r++) {
        if (light && w[r] < 1e-12f && w[r] > -1e-12f) continue;
        V wv[4];
        for (int i = 0; i < nq; i++) wv[i] = V_SET1(w[i * w_step + r]);
        for (int j = 0; j < nv; j++) {
            V b;
            if (vq) {
                const int8_t *p = vq + r * stride + j * VW;
                b = part ? V_CODES_PART(p, part) : V_CODES(p);
            } else {
                const float *p = v + r * stride + j * VW;
                b = part ? V_LOAD_PART(p, part) : V_LOAD(p);
            }
            for (int i = 0; i < nq; i++) a[i][j] = V_FMA(wv[i], b, a[i][j]);
        }
    }
    for (int i = 0; i < nq; i++)
        for (int j = 0; j < nv; j++) V_STORE(acc + i * acc_step + j * VW, a[i][j]);
}

INLINE void LKV_NAME(value_queries)(const float *w, int64_t w_step, int nq, int light,
                                    const float *v, const int8_t *vq, int64_t hd, int64_t n,
                                    float *acc, int64_t acc_step)
{
    int64_t d = 0;
#define CHUNK(nv, part)                                                                            \
    LKV_NAME(value_block)(w, w_step, nq, light, v ? v + d : 0, vq ? vq + d : 0, hd, n, nv, part,   \
                          acc + d, acc_step)
    for (; nq * 8 <= V_SUMS && d + 8 * VW <= hd; d += 8 * VW) CHUNK(8, 0);
    for (; d + 4 * VW <= hd; d += 4 * VW) CHUNK(4, 0);
    for (; d + VW <= hd; d += VW) CHUNK(1, 0);
    if (d < hd) CHUNK(1, hd - d);
#undef CHUNK
}

/* acc is padded to a multiple of 32; one of v and vq is given. */
static void LKV_NAME(value_group)(const float *w, int64_t w_step, int64_t nq, const float *v,
                                  const int8_t *vq, int64_t hd, int64_t n, float *acc,
                                  int64_t acc_step)
{
    LKV_COUNT(LKV_ROWS_ADDED, n * nq);
    int light = 0;
    for (int64_t i = 0; i < nq; i++)
        for (int64_t r = 0; r < n; r++) light |= fabsf(w[i * w_step + r]) < 1e-12f;
#define VALUES(m, light)                                                                           \
    do {                                                                                           \
        const float *w_ = w + i * w_step;                                                          \
        float *acc_ = acc + i * acc_step;                                                          \
        if (vq)                                                                                    \
            LKV_NAME(value_queries)(w_, w_step, m, light, 0, vq, hd, n, acc_, acc_step);           \
        else                                                                                       \
            LKV_NAME(value_queries)(w_, w_step, m, light, v, 0, hd, n, acc_, acc_step);            \
    } while (0)
    int64_t i = 0;
    for (; light && i < nq; i++) VALUES(1, 1);
    for (; V_QUERIES == 4 && i + 4 <= nq; i += 4) VALUES(4, 0);
    for (; i + 2 <= nq; i += 2) VALUES(2, 0);
    for (; i < nq; i++) VALUES(1, 0);
#undef VALUES
}

static void LKV_NAME(value_rows)(const float *w, const float *v, int64_t hd, int64_t n, float *acc)
{
    LKV_NAME(value_group)(w, 0, 1, v, 0, hd, n, acc, 0);
}

static float LKV_NAME(largest)(const float *restrict s, int64_t n)
{
    float lane[16], m = -INFINITY;
    int64_t r = 0;
    for (int j = 0; j < 16; j++) lane[j] = m;
    for (; r + 16 <= n; r += 16)
        for (int j = 0; j < 16; j++) lane[j] = s[r + j] > lane[j] ? s[r + j] : lane[j];
    for (int j = 0; j < 16; j++) m = lane[j] > m ? lane[j] : m;
    for (; r < n; r++) m = s[r] > m ? s[r] : m;
    return m;
}

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

/* Each sum is one chain of additions; up to four of them run side by side. */
INLINE void LKV_NAME(sums)(const float *s, int64_t step, int nq, int64_t n, float *restrict z)
{
    float a[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int64_t r = 0; r < n; r++)
        for (int i = 0; i < nq; i++) a[i] = a[i] + s[i * step + r];
    for (int i = 0; i < nq; i++) z[i] = a[i];
}

/* Scores of nq rows of weights to probabilities; the sink's term enters a sum last. */
static int LKV_NAME(softmax)(float *s, int64_t step, int64_t nq, int64_t n, const float *sinks)
{
    for (int64_t at = 0; at < nq; at += 4) {
        int64_t k = nq - at < 4 ? nq - at : 4;
        float m[4], z[4], *rows = s + at * step;
        for (int64_t i = 0; i < k; i++) {
            m[i] = LKV_NAME(largest)(rows + i * step, n);
            if (sinks && sinks[at + i] > m[i]) m[i] = sinks[at + i];
            LKV_NAME(exp_shifted)(rows + i * step, n, m[i]);
        }
        if (k == 4)
            LKV_NAME(sums)(rows, step, 4, n, z);
        else if (k == 3)
            LKV_NAME(sums)(rows, step, 3, n, z);
        else if (k == 2)
            LKV_NAME(sums)(rows, step, 2, n, z);
        else
            LKV_NAME(sums)(rows, step, 1, n, z);
        for (int64_t i = 0; i < k; i++) {
            if (z[i] != z[i]) return LKV_NOT_FINITE;
            if (sinks) z[i] = z[i] + LKV_NAME(lkv_exp)(sinks[at + i] - m[i]);
            if (z[i] > 0.0f) LKV_NAME(divide_rows)(rows + i * step, n, z[i]);
        }
    }
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
    int64_t turning = s->k_q8 ? LKV_NAME(turning_floats)(s->groups, n) : 0;
    float *work = lkv_scratch(2 * n * hdp + n * TILE + turning + (probs ? 0 : n * span));
    if (!work) return LKV_NO_MEMORY;
    float *qp = work, *acc = work + n * hdp, *wts = acc + n * hdp, *turn = wts + n * TILE;
    float *p = probs ? probs : turn + turning;
    const float *kcol = s->k_q8 && s->kcol_on[head] ? s->kcol + head * hd : 0;
    for (int64_t i = 0; i < n; i++)
        LKV_NAME(pad_query)(q + i * hd, kcol, hd, hdp, qp + i * hdp);
    for (int64_t r = 0; r < span; r += TILE) {
        int64_t rows = span - r < TILE ? span - r : TILE;
        if (s->k_q8)
            LKV_NAME(score_codes)(qp, hdp, n, s->kq + (at + r) * hd, s->ks + (at + r) * s->groups,
                                  hd, s->groups, rows, scale, p + r, span, turn);
        else
            LKV_NAME(score_group)(qp, hdp, n, s->k + (at + r) * hd, hd, rows, scale, p + r, span);
    }
    for (int64_t i = 0; i < n && softcap > 0.0f; i++)
        LKV_NAME(softcap_rows)(p + i * span, span, softcap);
    int bad = LKV_NAME(softmax)(p, span, n, span, sinks);
    if (bad) {
        free(work);
        return bad;
    }
    memset(acc, 0, sizeof(float) * (size_t)(n * hdp));
    for (int64_t r = 0; r < span; r += TILE) {
        int64_t rows = span - r < TILE ? span - r : TILE;
        if (s->v_q8) {
            const float *vs = s->vs + at + r;
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < rows; j++) wts[i * TILE + j] = p[i * span + r + j] * vs[j];
            LKV_NAME(value_group)(wts, TILE, n, 0, s->vq + (at + r) * hd, hd, rows, acc, hdp);
        } else
            LKV_NAME(value_group)(p + r, span, n, s->v + (at + r) * hd, 0, hd, rows, acc, hdp);
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
