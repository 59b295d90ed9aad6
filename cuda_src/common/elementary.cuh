/* Elementary float32 arithmetic of LayerKvCache, one source for every compiler.
 *
 * The including file defines four macros first, so that the C compiler, NVRTC and the host device
 * run the very same operations (compiled without implicit contraction: -ffp-contract=off,
 * --fmad=false):
 *   LKV_FN               qualifiers of a function, e.g. `static inline` or `__device__ inline`
 *   LKV_FMA(a, b, c)     fused multiply-add, rounded once
 *   LKV_BITS(x)          the bits of a float as uint32_t
 *   LKV_FLOAT(u)         the float of 32 bits
 * memra_lowlevel/layer_kv/arith.py repeats these lines in NumPy; a test compares all bits.
 */
#ifndef LKV_NAME
#define LKV_NAME(name) name
#endif

/* exp(x): n = round(x / ln 2), r = x - n ln 2, 1 + r + r^2 P(r), then 2^n in two exact steps (the
 * second may round once, into the subnormals). Below -104 the result is +0, above 89 infinity. */
LKV_FN float LKV_NAME(lkv_exp)(float x)
{
    float t = LKV_FMA(x, 0x1.715476p+0f, 12582912.0f);
    int32_t k = (int32_t)(LKV_BITS(t) - 0x4B400000u);
    float n = t - 12582912.0f;
    float r = LKV_FMA(n, -0x1.62e43p-1f, x);
    r = LKV_FMA(n, 0x1.05c61p-29f, r);
    float p = 0x1.9f0816p-13f;
    p = LKV_FMA(p, r, 0x1.6d8db2p-10f);
    p = LKV_FMA(p, r, 0x1.111272p-7f);
    p = LKV_FMA(p, r, 0x1.55548ep-5f);
    p = LKV_FMA(p, r, 0x1.555554p-3f);
    p = LKV_FMA(p, r, 0.5f);
    p = LKV_FMA(p, r * r, r) + 1.0f;
    int32_t a = k >> 1;
    uint32_t ua = ((uint32_t)a + 127u) << 23;
    uint32_t ub = ((uint32_t)k - (uint32_t)a + 127u) << 23;
    float y = p * LKV_FLOAT(ua) * LKV_FLOAT(ub);
    y = x < -104.0f ? 0.0f : y;
    y = x > 89.0f ? LKV_FLOAT(0x7F800000u) : y;
    return x != x ? x : y;
}

/* tanh(x): an odd polynomial below 0.625, else 1 - 2 / (exp(2|x|) + 1); +-1 from 9.5 on. */
LKV_FN float LKV_NAME(lkv_tanh)(float x)
{
    uint32_t sign = LKV_BITS(x) & 0x80000000u;
    float m = LKV_FLOAT(LKV_BITS(x) & 0x7FFFFFFFu);
    float z = m * m;
    float p = -0x1.7432e8p-8f;
    p = LKV_FMA(p, z, 0x1.51ceacp-6f);
    p = LKV_FMA(p, z, -0x1.b8305ep-5f);
    p = LKV_FMA(p, z, 0x1.1106d8p-3f);
    p = LKV_FMA(p, z, -0x1.555532p-2f);
    p = LKV_FMA(p, z * m, m);
    float q = 1.0f - 2.0f / (LKV_NAME(lkv_exp)(m + m) + 1.0f);
    float y = m < 0.625f ? p : q;
    y = m > 9.5f ? 1.0f : y;
    y = LKV_FLOAT(LKV_BITS(y) | sign);
    return x != x ? x : y;
}

/* Round half away from zero, for |x| < 2^23: exact, unlike floor(|x| + 0.5). */
LKV_FN float LKV_NAME(lkv_round_away)(float x)
{
    uint32_t sign = LKV_BITS(x) & 0x80000000u;
    float m = LKV_FLOAT(LKV_BITS(x) & 0x7FFFFFFFu);
    float t = (float)(int32_t)m;
    t = m - t >= 0.5f ? t + 1.0f : t;
    return LKV_FLOAT(LKV_BITS(t) | sign);
}
