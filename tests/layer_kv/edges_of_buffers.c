/* Every loop on buffers of exactly the size it may touch, for many widths: built with the address
 * and undefined-behaviour checks, any step over an edge ends the program. */
#include "layer_kv.c"

#include <stdio.h>

static void *kept[128];
static int n_kept;

static void *keep(size_t bytes)
{
    return kept[n_kept++] = malloc(bytes ? bytes : 1);
}

static float *floats(int64_t n)
{
    float *p = keep((size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) p[i] = (float)(rand() % 2001 - 1000) / 500.0f;
    return p;
}

static int8_t *codes(int64_t n)
{
    int8_t *p = keep((size_t)n);
    for (int64_t i = 0; i < n; i++) p[i] = (int8_t)(rand() % 255 - 127);
    return p;
}

static double *doubles(int64_t n)
{
    double *p = keep((size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) p[i] = (double)(rand() % 1000) / 1000.0;
    return p;
}

static int attention(int64_t hd, int64_t rows, int64_t n)
{
    int64_t g = (hd + 31) / 32, first = rows / 3;
    uint8_t on = 1, *off = keep((size_t)rows);
    int bad = 0;
    memset(off, 0, (size_t)rows);
    float *k = floats(rows * hd), *v = floats(rows * hd), *ks = floats(rows * g);
    float *vs = floats(rows), *kcol = floats(hd), *vcol = floats(hd);
    float *q = floats(n * hd), *out = floats(n * hd), *imp = floats(rows), *sinks = floats(n);
    float *probs = floats(n * (rows - first)), *scales = floats(rows * g);
    int8_t *kq = codes(rows * hd), *vq = codes(rows * hd), *made = codes(rows * hd);
    for (int m = 0; m < 4; m++) {
        lkv_store s = {m & 1 ? 0 : k, m & 2 ? 0 : v, ks, vs, kcol, vcol, kq, vq, &on, &on,
                       rows, hd, g, m & 1, m >> 1};
        bad |= lkv_attend(&s, 0, q, n, rows, first, 0.2f, m ? 5.0f : 0.0f, sinks, out, imp, rows, 0);
        bad |= lkv_attend(&s, 0, q, n, rows, first, 0.2f, 0.0f, 0, out, 0, 0, probs);
    }
    bad |= lkv_quantise(k, k, off, rows, hd, 32, made, scales);
    bad |= lkv_quantise(k, k, off, rows, hd, hd, made, scales);
    return bad;
}

static int ring(int64_t hd, int64_t n_sinks, int64_t hpk)
{
    int64_t nkv = 2, w = 5, half = hd / 2;
    int bad = 0;
    float *rk = floats(nkv * w * hd), *rv = floats(nkv * w * hd), *uk = floats(nkv * hd);
    float *uv = floats(nkv * hd), *sk = floats(nkv * n_sinks * hd), *sv = floats(nkv * n_sinks * hd);
    float *c = floats(w * half), *s = floats(w * half), *q = floats(nkv * hpk * hd);
    float *k = floats(nkv * hd), *v = floats(nkv * hd), *out = floats(nkv * hpk * hd);
    for (int64_t t = 0; t < 7; t++)
        bad |= lkv_bounded_step(rk, rv, uk, uv, nkv, hd, w, t % w, t + 1 < w ? t + 1 : w, sk, sv,
                                n_sinks, c, s, half, q, k, v, nkv * hpk, 0.2f, out);
    return bad;
}

static int far_field(int64_t d, int64_t dv, int64_t sink, int64_t hpk)
{
    int64_t g = 2, m = 4, w = 5, h = g * hpk, n = 9;
    int bad = 0;
    lkv_nystrom s = {floats(g * w * d), floats(g * w * dv), floats(h * m), floats(h * m),
                     floats(h * m * dv), floats(g * sink * d), floats(g * sink * dv),
                     floats(g * m * d), floats(h * m * d), floats(h * m * m), floats(h),
                     g, hpk, m, w, sink, d, dv, 0.2f, (int32_t)(sink & 1)};
    float *q = floats(h * d), *k = floats(g * d), *v = floats(g * dv), *out = floats(h * dv);
    float *rk = floats(g * n * d), *rv = floats(g * n * dv);
    for (int64_t t = 0; t < 8; t++)
        bad |= lkv_nystrom_step(&s, t < w ? t : w, t < w ? 0 : (t - w) % w, t < w ? 0 : t - w, q, k,
                                v, out);
    return bad | lkv_nystrom_replay(&s, 0, 0, rk, rv, n * d, n * dv, n);
}

static int phases(int64_t width, int64_t dv)
{
    double *decay = doubles(2 * width), *fk = doubles(2 * width), *fq = doubles(2 * width);
    float *v = floats(2 * dv), *gate = floats(2), *s = floats(2 * width * dv), *out = floats(2 * dv);
    lkv_phase(decay, fk, fq, v, gate, 2, width, dv, s, out);
    return lkv_phase_delta(decay, fk, fq, v, gate, 2, width, dv, s, out);
}

int main(void)
{
    int bad = 0, sets = 0;
    for (int isa = 0; isa < 3; isa++) {
        if (lkv_select_isa(isa) < 0) continue;
        sets++;
        for (int64_t hd = 1; hd <= 140; hd += hd < 40 ? 1 : 7)
            for (int64_t rows = 1; rows <= 70; rows += 23)
                for (int64_t n = 1; n <= 3; n++) {
                    bad |= attention(hd, rows, n) | attention(hd, rows, n + 3);
                    bad |= ring(hd, rows % 3, n);
                    bad |= far_field(hd, hd % 5 + 1, rows % 3, n) | phases(hd % 6 + 2, hd % 5 + 1);
                    while (n_kept) free(kept[--n_kept]);
                }
    }
    printf("%d sets, %s\n", sets, bad ? "refused" : "clean");
    return bad;
}
