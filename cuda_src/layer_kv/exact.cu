// Rows of a layer cache on a device: append, and attention in the order of its C loops.
//
// Stores as on the host, cap rows per head:
//   k, v   f32 [n_kv_heads, cap, hd]   or   kq, vq  i8 [n_kv_heads, cap, hd]
//   ks     f32 [n_kv_heads, cap, groups], groups = ceil(hd / 32);  vs  f32 [n_kv_heads, cap]
//   kcol, vcol  f32 [n_kv_heads, hd], used where kcol_on, vcol_on  u8 [n_kv_heads] is not 0
// rows_d i32[1] is the number of rows; nobody here writes it.
#include "common/device.cuh"

#include "common/lanes.cuh"

constexpr int APPEND_THREADS = 128;
constexpr int TILE_ROWS = 32;
constexpr int SCORE_THREADS = 256;
constexpr int VALUE_THREADS = 128;
constexpr int GROUP = 32;

// Grid (n_kv_heads, 2), 128 threads, dynamic shared f32[hd + groups of the side]; y chooses K or V.
//   x_k, x_v  f32 [n_kv_heads, hd]. Width of a scale: 32 channels of K, a whole row of V.
// A row with no room is dropped.
KERNEL void __launch_bounds__(APPEND_THREADS)
    lkv_append(const float* __restrict__ x_k, const float* __restrict__ x_v, float* NULLABLE k,
               float* NULLABLE v, int8_t* NULLABLE kq, int8_t* NULLABLE vq, float* NULLABLE ks,
               float* NULLABLE vs, const float* NULLABLE kcol, const float* NULLABLE vcol,
               const uint8_t* NULLABLE kcol_on, const uint8_t* NULLABLE vcol_on,
               const int32_t* __restrict__ rows_d, int32_t hd, int32_t cap) {
    DYN_SMEM(float, r);
    const int h = blockIdx.x;
    const bool side_v = blockIdx.y == 1;
    const int row = rows_d[0];
    const bool room = row < cap;
    const float* x = (side_v ? x_v : x_k) + size_t(h) * hd;
    int8_t* codes = side_v ? vq : kq;
    const size_t at = size_t(h) * cap + (room ? row : 0);
    if (codes == nullptr) {
        float* plane = side_v ? v : k;
        for (int d = threadIdx.x; d < hd; d += APPEND_THREADS)
            if (room) plane[at * hd + d] = x[d];
    } else {
        const int width = side_v ? hd : GROUP;
        const int groups = (hd + width - 1) / width;
        const float* col = side_v ? vcol : kcol;
        const bool on = (side_v ? vcol_on : kcol_on)[h] != 0;
        float* scale = r + hd;
        for (int d = threadIdx.x; d < hd; d += APPEND_THREADS)
            r[d] = on ? x[d] / col[size_t(h) * hd + d] : x[d];
        __syncthreads();
        for (int g = threadIdx.x; g < groups; g += APPEND_THREADS) {
            float a = 0.0f;
            for (int d = g * width; d < hd && d < (g + 1) * width; d++) {
                const float m = fabsf(r[d]);
                a = m > a ? m : a;
            }
            const float s = a / 127.0f;
            scale[g] = s < 1e-12f ? 1e-12f : s;
            if (room) (side_v ? vs : ks)[at * groups + g] = scale[g];
        }
        __syncthreads();
        for (int d = threadIdx.x; d < hd; d += APPEND_THREADS) {
            float q = lkv_round_away(r[d] / scale[d / width]);
            q = q > 127.0f ? 127.0f : q;
            q = q < -127.0f ? -127.0f : q;
            if (room) codes[at * hd + d] = int8_t(int32_t(q));
        }
    }
}

// First visible row of a window; the newest row is always visible.
__device__ __forceinline__ int first_row(int rows, int window) {
    const int first = window > 0 && rows > window ? rows - window : 0;
    return first;
}

// Grid (ceil(cap / 32), n_kv_heads), 256 threads, dynamic shared f32[32 * (hd + 1) + hpk * hd].
//   q  f32 [n_kv_heads * hpk, hd]      scores  f32 [n_kv_heads * hpk, cap]
KERNEL void __launch_bounds__(SCORE_THREADS)
    lkv_scores(const float* __restrict__ q, const float* NULLABLE k, const int8_t* NULLABLE kq,
               const float* NULLABLE ks, const float* NULLABLE kcol,
               const uint8_t* NULLABLE kcol_on, const int32_t* __restrict__ rows_d,
               float* __restrict__ scores, int32_t hd, int32_t hpk, int32_t cap, int32_t window,
               float scale, float softcap) {
    DYN_SMEM(float, shared);
    float* tile = shared;                        // one row per stride of hd + 1: no bank conflicts
    float* query = shared + TILE_ROWS * (hd + 1);
    const int h = blockIdx.y, start = blockIdx.x * TILE_ROWS;
    const int rows = rows_d[0], first = first_row(rows, window);
    const int groups = (hd + GROUP - 1) / GROUP;
    const size_t at = size_t(h) * cap + start;
    const bool columns = kq != nullptr && kcol_on[h] != 0;
    for (int i = threadIdx.x; i < hpk * hd; i += SCORE_THREADS) {
        const float x = q[size_t(h) * hpk * hd + i];
        query[i] = columns ? x * kcol[size_t(h) * hd + i % hd] : x;
    }
    for (int i = threadIdx.x; i < TILE_ROWS * hd; i += SCORE_THREADS) {
        const int r = i / hd, d = i % hd;
        if (start + r < rows)
            tile[r * (hd + 1) + d] = kq != nullptr ? float(kq[at * hd + i]) : k[at * hd + i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_ROWS * hpk; i += SCORE_THREADS) {
        const int r = i % TILE_ROWS, head = i / TILE_ROWS;
        if (start + r >= first && start + r < rows) {
            const float* row = tile + r * (hd + 1);
            const float* own = query + head * hd;
            float s = 0.0f;
            if (kq == nullptr) {
                s = dot32(own, hd, [&](int d) { return row[d]; });
            } else {
                for (int g = 0; g < groups; g++) {
                    const int left = hd - g * GROUP < GROUP ? hd - g * GROUP : GROUP;
                    const float* part = row + g * GROUP;
                    const float dot = dot32(own + g * GROUP, left, [&](int d) { return part[d]; });
                    s = s + dot * ks[(at + r) * groups + g];
                }
            }
            s = s * scale;
            if (softcap > 0.0f) s = softcap * lkv_tanh(s / softcap);
            scores[(size_t(h) * hpk + head) * cap + start + r] = s;
        }
    }
}

// Grid (n_kv_heads * hpk), 128 threads. Scores become probabilities in place.
//   sinks  f32 [n_kv_heads * hpk] or null      out  f32 [n_kv_heads * hpk, hd]
// Scores without a finite softmax give NaN in every channel of their head.
KERNEL void __launch_bounds__(VALUE_THREADS)
    lkv_values(float* __restrict__ scores, const float* NULLABLE v, const int8_t* NULLABLE vq,
               const float* NULLABLE vs, const float* NULLABLE vcol,
               const uint8_t* NULLABLE vcol_on, const float* NULLABLE sinks,
               const int32_t* __restrict__ rows_d, float* __restrict__ out, int32_t hd, int32_t hpk,
               int32_t cap, int32_t window) {
    __shared__ float part[VALUE_THREADS];
    __shared__ float total[2];
    const int i = blockIdx.x, h = i / hpk, t = threadIdx.x;
    const int rows = rows_d[0], first = first_row(rows, window);
    float* s = scores + size_t(i) * cap;
    float m = -INF_F32;
    for (int r = first + t; r < rows; r += VALUE_THREADS) m = s[r] > m ? s[r] : m;
    part[t] = m;
    __syncthreads();
    if (t == 0) {
        for (int j = 1; j < VALUE_THREADS; j++) m = part[j] > m ? part[j] : m;
        if (sinks != nullptr && sinks[i] > m) m = sinks[i];
        total[0] = m;
    }
    __syncthreads();
    m = total[0];
    for (int r = first + t; r < rows; r += VALUE_THREADS) s[r] = lkv_exp(s[r] - m);
    __syncthreads();
    if (t == 0) {
        float z = 0.0f;
        for (int r = first; r < rows; r++) z = z + s[r];
        total[1] = z;
        total[0] = sinks != nullptr ? z + lkv_exp(sinks[i] - m) : z;
    }
    __syncthreads();
    const bool finite = total[1] == total[1];
    const float z = total[0];
    if (z > 0.0f)
        for (int r = first + t; r < rows; r += VALUE_THREADS) s[r] = s[r] / z;
    __syncthreads();
    for (int d = t; d < hd; d += VALUE_THREADS) {
        float acc = 0.0f;
        for (int r = first; r < rows; r++) {
            const size_t at = size_t(h) * cap + r;
            const float w = vq != nullptr ? s[r] * vs[at] : s[r];
            if (w < 1e-12f && w > -1e-12f) continue;
            acc = fmaf(w, vq != nullptr ? float(vq[at * hd + d]) : v[at * hd + d], acc);
        }
        if (vq != nullptr && vcol_on[h] != 0) acc = acc * vcol[size_t(h) * hd + d];
        out[size_t(i) * hd + d] = finite ? acc : NAN_F32;
    }
}

// Grid (ceil(cap / 128)), 128 threads: probabilities added head by head.
//   probs  f32 [n_heads, cap]      imp  f32 [cap]
KERNEL void __launch_bounds__(VALUE_THREADS)
    lkv_importance(const float* __restrict__ probs, const int32_t* __restrict__ rows_d,
                   float* __restrict__ imp, int32_t n_heads, int32_t cap, int32_t window) {
    const int r = blockIdx.x * VALUE_THREADS + threadIdx.x;
    const int rows = rows_d[0];
    if (r >= first_row(rows, window) && r < rows) {
        float sum = imp[r];
        for (int i = 0; i < n_heads; i++) sum = sum + probs[size_t(i) * cap + r];
        imp[r] = sum;
    }
}
