// States of constant size: the bounded ring, the phase cores, the O(1) override. Each kernel keeps
// the order of the C loops.
#include "common/device.cuh"

#include "common/lanes.cuh"

constexpr int RING_THREADS = 160;    // scores of a step: sinks and window
constexpr int PHASE_THREADS = 128;
constexpr int FAR_THREADS = 128;

// Grid (n_kv_heads), 160 threads, dynamic shared f32[hd]. Inserts one position, then attends.
//   ring_k, ring_v  f32 [n_kv_heads, window, hd]       seen_d  i32[1], positions before this one
//   sink_k, sink_v  f32 [n_kv_heads, n_sinks, hd]      cos, sin  f32 [window, half]
//   q, out  f32 [n_kv_heads * hpk, hd]                 k, v  f32 [n_kv_heads, hd]
KERNEL void __launch_bounds__(RING_THREADS, 1)
    lkv_ring_step(float* ring_k, float* ring_v, const int32_t* __restrict__ seen_d,
                  const float* NULLABLE sink_k, const float* NULLABLE sink_v,
                  const float* NULLABLE cos_t, const float* NULLABLE sin_t,
                  const float* __restrict__ q, const float* __restrict__ k,
                  const float* __restrict__ v, float* __restrict__ out, int32_t hd, int32_t hpk,
                  int32_t window, int32_t n_sinks, int32_t half, float scale) {
    DYN_SMEM(float, query);
    __shared__ float s[RING_THREADS];
    __shared__ float both[2];
    const int h = blockIdx.x, t = threadIdx.x;
    const int seen = seen_d[0], slot = seen % window;
    const int len = seen + 1 < window ? seen + 1 : window, n = n_sinks + len;
    float* rk = ring_k + size_t(h) * window * hd;
    float* rv = ring_v + size_t(h) * window * hd;
    for (int d = t; d < hd; d += RING_THREADS) {
        rk[size_t(slot) * hd + d] = k[size_t(h) * hd + d];
        rv[size_t(slot) * hd + d] = v[size_t(h) * hd + d];
    }
    for (int i = 0; i < hpk; i++) {
        const size_t head = size_t(h) * hpk + i;
        for (int d = t; d < hd; d += RING_THREADS) query[d] = q[head * hd + d];
        __syncthreads();
        if (t < n) {
            const int delta = t - n_sinks;
            const int at = slot - delta < 0 ? slot - delta + window : slot - delta;
            const float* row = t < n_sinks ? sink_k + (size_t(h) * n_sinks + t) * hd
                                           : rk + size_t(at) * hd;
            float acc[32];
#pragma unroll
            for (int j = 0; j < 32; j++) acc[j] = 0.0f;
            for (int d0 = 0; d0 < hd; d0 += 32) {
#pragma unroll
                for (int j = 0; j < 32; j++) {
                    const int d = d0 + j;
                    if (d < hd) {
                        float x = query[d];
                        if (t >= n_sinks && d < half)
                            x = query[d] * cos_t[delta * half + d] -
                                query[d + half] * sin_t[delta * half + d];
                        else if (t >= n_sinks && d < 2 * half)
                            x = query[d - half] * sin_t[delta * half + d - half] +
                                query[d] * cos_t[delta * half + d - half];
                        acc[j] = fmaf(x, row[d], acc[j]);
                    }
                }
            }
            s[t] = sum32(acc) * scale;
        }
        __syncthreads();
        if (t == 0) {
            float m = -INF_F32;
            for (int j = 0; j < n; j++) m = s[j] > m ? s[j] : m;
            both[0] = m;
        }
        __syncthreads();
        if (t < n) s[t] = lkv_exp(s[t] - both[0]);
        __syncthreads();
        if (t == 0) {
            float z = 0.0f;
            for (int j = 0; j < n; j++) z = z + s[j];
            both[1] = z;
        }
        __syncthreads();
        const float z = both[1];
        for (int d = t; d < hd; d += RING_THREADS) {
            float acc = 0.0f;
            for (int j = 0; j < n; j++) {
                const float w = z > 0.0f ? s[j] / z : s[j];
                if (w < 1e-12f && w > -1e-12f) continue;
                const int delta = j - n_sinks;
                const int at = slot - delta < 0 ? slot - delta + window : slot - delta;
                acc = fmaf(w, j < n_sinks ? sink_v[(size_t(h) * n_sinks + j) * hd + d]
                                          : rv[size_t(at) * hd + d], acc);
            }
            out[head * hd + d] = z == z ? acc : NAN_F32;
        }
    }
}

// Grid (n_heads), 128 threads. delta 0: the classic core, 1: Phase-Delta.
//   decay, fk, fq  f64 [n_heads, width]      gate  f32 [n_heads]
//   v, out  f32 [n_heads, dv]                state  f32 [n_heads, width, dv]
KERNEL void __launch_bounds__(PHASE_THREADS)
    lkv_phase(const double* __restrict__ decay, const double* __restrict__ fk,
              const double* __restrict__ fq, const float* __restrict__ v,
              const float* __restrict__ gate, float* __restrict__ state, float* __restrict__ out,
              int32_t width, int32_t dv, int32_t delta) {
    const int h = blockIdx.x;
    const double* g = decay + size_t(h) * width;
    const double* a = fk + size_t(h) * width;
    const double* b = fq + size_t(h) * width;
    const double strength = double(gate[h]);
    for (int d = threadIdx.x; d < dv; d += PHASE_THREADS) {
        float* s = state + size_t(h) * width * dv + d;
        const double value = double(v[size_t(h) * dv + d]);
        float o = 0.0f;
        if (delta == 0) {
            for (int f = 0; f < width; f++) {
                const double cell = g[f] * double(s[size_t(f) * dv]) + (a[f] * strength) * value;
                s[size_t(f) * dv] = float(cell);
                o = o + float(b[f] * cell);
            }
        } else {
            double r = 0.0;
            for (int f = 0; f < width; f++) r = r + a[f] * (g[f] * double(s[size_t(f) * dv]));
            for (int f = 0; f < width; f++) {
                const float cell = float(g[f] * double(s[size_t(f) * dv]) +
                                         (strength * a[f]) * (value - r));
                s[size_t(f) * dv] = cell;
                o = o + float(b[f] * double(cell));
            }
        }
        out[size_t(h) * dv + d] = o;
    }
}

// The override in four launches that share book_d i32[3]: rows in the window, its oldest slot, far
// rows; all as before the step until lkv_far_book moves them.
//   win_k f32 [groups, w, d]  win_v f32 [groups, w, dv]  ql f32 [heads, m, d]  kl f32 [groups, m, d]
//   mu, z f32 [heads, m]  t f32 [heads, m, dv]  pinv f32 [heads, m, m]  shift f32 [heads]

// Grid (groups * hpk), 128 threads, dynamic shared f32[3 * m]: takes the leaving row in.
KERNEL void __launch_bounds__(FAR_THREADS)
    lkv_far_absorb(const float* __restrict__ win_k, const float* __restrict__ win_v,
                   const float* __restrict__ ql, const int32_t* __restrict__ book_d,
                   float* __restrict__ mu, float* __restrict__ z, float* __restrict__ t, int32_t hpk,
                   int32_t m, int32_t w, int32_t d, int32_t dv, float scale) {
    DYN_SMEM(float, grow);
    float* shrink = grow + m;
    float* risen = grow + 2 * m;
    const int h = blockIdx.x, g = h / hpk, slot = book_d[1];
    const bool leaving = book_d[0] == w;
    const float* key = win_k + (size_t(g) * w + slot) * d;
    const float* value = win_v + (size_t(g) * w + slot) * dv;
    for (int b = threadIdx.x; b < m; b += FAR_THREADS) {
        const size_t at = size_t(h) * m + b;
        const float l = dot32(ql + at * d, d, [&](int j) { return key[j]; }) * scale;
        const float old = mu[at];
        const bool up = l > old;
        const float top = up ? l : old;
        shrink[b] = lkv_exp(old - l);
        grow[b] = lkv_exp(l - top);
        risen[b] = up ? 1.0f : 0.0f;
        if (leaving) {
            const float kept = up ? z[at] * shrink[b] : z[at];
            z[at] = kept + grow[b];
            mu[at] = top;
        }
    }
    __syncthreads();
    if (leaving)
        for (int i = threadIdx.x; i < m * dv; i += FAR_THREADS) {
            const int b = i / dv;
            float* cell = t + size_t(h) * m * dv + i;
            const float kept = risen[b] != 0.0f ? *cell * shrink[b] : *cell;
            *cell = fmaf(grow[b], value[i % dv], kept);
        }
}

// Grid (groups), 128 threads: the new row takes the slot.
KERNEL void __launch_bounds__(FAR_THREADS)
    lkv_far_push(float* __restrict__ win_k, float* __restrict__ win_v, const float* __restrict__ k,
                 const float* __restrict__ v, const int32_t* __restrict__ book_d, int32_t w,
                 int32_t d, int32_t dv) {
    const int g = blockIdx.x;
    const int slot = book_d[0] == w ? book_d[1] : book_d[0];
    for (int j = threadIdx.x; j < d; j += FAR_THREADS)
        win_k[(size_t(g) * w + slot) * d + j] = k[size_t(g) * d + j];
    for (int j = threadIdx.x; j < dv; j += FAR_THREADS)
        win_v[(size_t(g) * w + slot) * dv + j] = v[size_t(g) * dv + j];
}

// Grid (groups * hpk), 128 threads, dynamic shared f32[sink + w + 2 * m].
KERNEL void __launch_bounds__(FAR_THREADS)
    lkv_far_attend(const float* __restrict__ q, const float* __restrict__ win_k,
                   const float* __restrict__ win_v, const float* NULLABLE sink_k,
                   const float* NULLABLE sink_v, const float* __restrict__ kl,
                   const float* __restrict__ pinv, const float* __restrict__ shift,
                   const float* __restrict__ mu, const float* __restrict__ z,
                   const float* __restrict__ t, const int32_t* __restrict__ book_d,
                   float* __restrict__ out, int32_t hpk, int32_t m, int32_t w, int32_t sink,
                   int32_t d, int32_t dv, float scale, int32_t fm) {
    DYN_SMEM(float, s);
    float* phi = s + sink + w;
    float* u = phi + m;
    __shared__ float board[3];                   // top of the far field, shift of all, denominator
    const int h = blockIdx.x, g = h / hpk;
    const bool leaving = book_d[0] == w;
    const int len = leaving ? w : book_d[0] + 1, near = sink + len;
    const bool far = leaving || book_d[2] > 0;
    const float* own = q + size_t(h) * d;
    for (int j = threadIdx.x; j < near; j += FAR_THREADS) {
        const float* row = j < sink ? sink_k + (size_t(g) * sink + j) * d
                                    : win_k + (size_t(g) * w + j - sink) * d;
        s[j] = dot32(own, d, [&](int i) { return row[i]; }) * scale;
    }
    for (int a = threadIdx.x; a < m; a += FAR_THREADS) {
        const float* row = kl + (size_t(g) * m + a) * d;
        phi[a] = dot32(own, d, [&](int i) { return row[i]; }) * scale;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float f = phi[0], c = s[0];
        for (int a = 1; a < m; a++) f = phi[a] > f ? phi[a] : f;
        for (int j = 1; j < near; j++) c = s[j] > c ? s[j] : c;
        board[0] = f;
        board[1] = c;
    }
    __syncthreads();
    const float f = board[0], c = board[1];
    for (int a = threadIdx.x; a < m; a += FAR_THREADS) phi[a] = lkv_exp(phi[a] - f);
    __syncthreads();
    for (int b = threadIdx.x; b < m; b += FAR_THREADS) {
        float sum = 0.0f;
        for (int a = 0; a < m; a++) sum = fmaf(phi[a], pinv[(size_t(h) * m + a) * m + b], sum);
        u[b] = fm != 0 && sum < 0.0f ? 0.0f : sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float top = c, den = 0.0f;
        if (far) {
            for (int b = 0; b < m; b++) {
                const float e = (f + mu[size_t(h) * m + b]) - shift[h];
                top = e > top ? e : top;
            }
            for (int b = 0; b < m; b++) {
                const size_t at = size_t(h) * m + b;
                u[b] = u[b] * lkv_exp(((f + mu[at]) - shift[h]) - top);
                den = fmaf(u[b], z[at], den);
            }
        }
        const bool kept = far && den >= 0.0f;    // else the near field answers alone
        if (!kept) {
            den = 0.0f;
            top = c;
        }
        for (int j = 0; j < near; j++) {
            s[j] = lkv_exp(s[j] - top);
            den = den + s[j];
        }
        board[2] = den > 1e-30f ? den : 1e-30f;
        board[0] = kept ? 1.0f : 0.0f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < dv; i += FAR_THREADS) {
        float acc = 0.0f;
        if (board[0] != 0.0f)
            for (int b = 0; b < m; b++)
                acc = fmaf(u[b], t[(size_t(h) * m + b) * dv + i], acc);
        for (int j = 0; j < near; j++)
            acc = fmaf(s[j], j < sink ? sink_v[(size_t(g) * sink + j) * dv + i]
                                      : win_v[(size_t(g) * w + j - sink) * dv + i], acc);
        out[size_t(h) * dv + i] = acc / board[2];
    }
}

// One thread: one more row.
KERNEL void lkv_far_book(int32_t* book_d, int32_t w) {
    if (book_d[0] == w) {
        book_d[1] = (book_d[1] + 1) % w;
        book_d[2] = book_d[2] + 1;
    } else {
        book_d[0] = book_d[0] + 1;
    }
}
