// Linear attention in one launch: short convolution, gates, and the delta rule over a few rows.
//
// A layer keeps n_slots states. The rows of a launch start from slot s = slot_d[0] % n_slots, which
// nobody writes, so blocks need no order among each other:
//   every row kept  row r leaves its state in slot (s + 1 + r) % n_slots
//   last row kept   only the last row leaves one, in slot (s + 1) % n_slots
#include "common/dependent.cuh"

constexpr int THREADS = 256;
constexpr int GROUPS = 8;                  // threads that share a column of the state
constexpr int COLS = THREADS / GROUPS;     // columns of a block
constexpr int TAPS = 8;                    // widest convolution; shorter ones are padded in front
constexpr int NORM_PARTS = 16;
constexpr int BATCH = 8;
static_assert(BATCH * 2 * NORM_PARTS <= THREADS, "a batch takes its norms at once");

enum { GATED = 0, KDA = 1 };

__device__ __forceinline__ float sigmoid_f(float x) { return 1.0f / (1.0f + expf(-x)); }

// The window of one channel: win[TAPS - 1] is the newest value.
struct Channel {
    float win[TAPS];
    float w[TAPS];

    __device__ __forceinline__ void load(const float* __restrict__ state,
                                         const float* __restrict__ weights, int taps) {
        const int pad = taps - 1;
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            const int own = j - (TAPS - taps);
            w[j] = own >= 0 ? weights[own] : 0.0f;
            const int old = j - 1 - (TAPS - taps);  // where it will be before the first shift
            win[j] = old >= 0 && old < pad ? state[old] : 0.0f;
        }
    }
    __device__ __forceinline__ float push(float x) {
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) win[j] = j + 1 < TAPS ? win[j + 1] : 0.0f;
        win[TAPS - 1] = x;
        float y = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; j++) y = fmaf(win[j], w[j], y);
        return y * sigmoid_f(y);
    }
    __device__ __forceinline__ void store(float* __restrict__ state, int taps) const {
        const int pad = taps - 1;
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            const int own = j - (TAPS - pad);
            if (own >= 0) state[own] = win[j];
        }
    }
};

// Grid (ceil(conv_width / THREADS)), THREADS threads: the convolution alone.
//   rows     f32 [n_rows, conv_width]          out  f32 [n_rows, conv_width]
//   weights  f32 [conv_width, taps]            conv f32 [n_slots, conv_width, taps - 1]
KERNEL void conv_roll(const float* __restrict__ rows, const float* __restrict__ weights,
                      float* conv, const int32_t* __restrict__ slot_d, float* __restrict__ out,
                      int32_t n_rows, int32_t conv_width, int32_t taps, int32_t n_slots,
                      int32_t keep_all) {
    admit_successor();
    await_predecessor();
    const int c = blockIdx.x * THREADS + threadIdx.x;
    if (c < conv_width) {
        const int pad = taps - 1;
        const int s = slot_d[0] % n_slots;
        Channel channel;
        channel.load(conv + (size_t(s) * conv_width + c) * pad, weights + size_t(c) * taps, taps);
        for (int r = 0; r < n_rows; r++) {
            out[size_t(r) * conv_width + c] = channel.push(rows[size_t(r) * conv_width + c]);
            if (keep_all || r == n_rows - 1) {
                const int slot = (s + 1 + (keep_all ? r : 0)) % n_slots;
                channel.store(conv + (size_t(slot) * conv_width + c) * pad, taps);
            }
        }
    }
}

// Sum over the lanes that share a column, the same in each of them.
__device__ __forceinline__ float column_sum(float value) {
#pragma unroll
    for (int offset = 1; offset < GROUPS; offset *= 2)
        value = value + __shfl_xor_sync(FULL_MASK, value, offset);
    return value;
}

// Four running sums, so that no long chain of additions is waited for.
__device__ __forceinline__ float sum_four(const float* s) { return (s[0] + s[2]) + (s[1] + s[3]); }

// Grid (D / COLS, n_v_heads), THREADS threads; thread t owns column t / GROUPS of the block and the
// rows i = (GROUPS * j + t % GROUPS) * 4 + 0..3 of the state. Convolutions, norms and gates do not depend
// on the state: they are made for BATCH rows at a time, and the state then passes them without a barrier.
//   rows       f32 [n_rows, (2 * n_k_heads + n_v_heads) * D]: q, k, v before the convolution, or
//              after it where weights is null
//   weights    f32 [conv_width, taps] or null   conv  f32 [n_slots, conv_width, taps - 1] or null
//   ssm        f32 [n_slots, n_v_heads, D (col), D (i)]
//   alpha      GATED: f32 [n_rows, n_v_heads]   KDA: f32 [n_rows, n_v_heads, D]
//   a          f32 [n_v_heads]: GATED the factor of softplus, KDA the logarithm of the gate's scale
//   dt_bias    GATED: f32 [n_v_heads]           KDA: f32 [n_v_heads, D]
//   beta       f32 [n_rows, n_v_heads], before its sigmoid
//   out        f32 [n_rows, n_v_heads, D]
// The k head of v head h is h % n_k_heads.
template <int D, int RULE>
__global__ void __launch_bounds__(THREADS, 1)
    delta_rows(const float* __restrict__ rows, const float* NULLABLE weights, float* NULLABLE conv,
               float* ssm, const int32_t* __restrict__ slot_d, const float* __restrict__ alpha,
               const float* __restrict__ a, const float* __restrict__ dt_bias,
               const float* __restrict__ beta, float* __restrict__ out, int32_t n_rows,
               int32_t n_k_heads, int32_t n_v_heads, int32_t taps, int32_t n_slots,
               int32_t keep_all, float eps, float lower_bound) {
    constexpr int CHANNELS = 2 * D + COLS;
    constexpr int PER_THREAD = (CHANNELS + THREADS - 1) / THREADS;
    constexpr int OWN = D / GROUPS;
    __shared__ float4 channel_rows[BATCH][CHANNELS / 4];  // q [D], k [D], v of the block's columns
    __shared__ float4 decays[RULE == KDA ? BATCH : 1][D / 4];
    __shared__ float norms[BATCH][2][NORM_PARTS];
    __shared__ float scales[BATCH][2];  // of q and k
    __shared__ float gains[BATCH], rates[BATCH];
    __shared__ float answers[BATCH][GROUPS][COLS];
    admit_successor();
    await_predecessor();

    const int t = threadIdx.x;
    const int group = t % GROUPS;
    const int col = t / GROUPS;
    const int v_head = blockIdx.y;
    const int k_head = v_head % n_k_heads;
    const int first_col = blockIdx.x * COLS;
    const int width = (2 * n_k_heads + n_v_heads) * D;
    const int s = slot_d[0] % n_slots;
    const auto slot_of = [&](int row) {  // where the state after a row goes
        const int slot = s + 1 + (keep_all ? row : 0);
        return slot < n_slots ? slot : slot < 2 * n_slots ? slot - n_slots : slot % n_slots;
    };
    const size_t state_at = (size_t(v_head) * D + first_col + col) * D;
    const size_t state_size = size_t(n_v_heads) * D * D;

    float4 state[OWN / 4];
    {
        const float4* from = reinterpret_cast<const float4*>(ssm + s * state_size + state_at);
#pragma unroll
        for (int j = 0; j < OWN / 4; j++) state[j] = from[GROUPS * j + group];
    }
    Channel channels[PER_THREAD];
    int at[PER_THREAD];
    bool keeps[PER_THREAD];  // of the blocks that share a channel, one writes its state
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int c = t + i * THREADS;
        at[i] = c < D       ? k_head * D + c
                : c < 2 * D ? (n_k_heads + k_head) * D + c - D
                            : (2 * n_k_heads + v_head) * D + first_col + c - 2 * D;
        keeps[i] = c < CHANNELS && (c >= 2 * D || (blockIdx.x == 0 && v_head == k_head));
        if (c < CHANNELS && weights != nullptr)
            channels[i].load(conv + (size_t(s) * width + at[i]) * (taps - 1),
                             weights + size_t(at[i]) * taps, taps);
    }

#pragma unroll 1
    for (int first = 0; first < n_rows; first += BATCH) {
        const int n = min(n_rows - first, BATCH);
        const int gate = THREADS - 1 - t;  // the last threads have the fewest channels
        if (gate < n) {
            const size_t head_row = size_t(first + gate) * n_v_heads + v_head;
            if (RULE == GATED) {
                const float x = alpha[head_row] + dt_bias[v_head];
                gains[gate] = expf(a[v_head] * (x > 20.0f ? x : log1pf(expf(x))));
            }
            rates[gate] = sigmoid_f(beta[head_row]);
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int c = t + i * THREADS;
            if (c >= CHANNELS) break;
            float* own = reinterpret_cast<float*>(channel_rows) + c;
            const float* from = rows + size_t(first) * width + at[i];
#pragma unroll 4
            for (int r = 0; r < n; r++) own[r * CHANNELS] = from[size_t(r) * width];
        }
        if (weights != nullptr) {
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                const int c = t + i * THREADS;
                if (c >= CHANNELS) break;
                float* own = reinterpret_cast<float*>(channel_rows) + c;
#pragma unroll 2
                for (int r = 0; r < n; r++) {
                    own[r * CHANNELS] = channels[i].push(own[r * CHANNELS]);
                    const int row = first + r;
                    if (keeps[i] && (keep_all || row == n_rows - 1))
                        channels[i].store(
                            conv + (size_t(slot_of(row)) * width + at[i]) * (taps - 1), taps);
                }
            }
        }
        if (RULE == KDA) {
            const float scale = expf(a[v_head]);
#pragma unroll 1
            for (int e = t; e < n * D; e += THREADS) {
                const size_t from = (size_t(first + e / D) * n_v_heads + v_head) * D + e % D;
                const float x = alpha[from] + dt_bias[v_head * D + e % D];
                reinterpret_cast<float*>(decays)[e] = expf(lower_bound * sigmoid_f(scale * x));
            }
        }
        __syncthreads();
        if (t < n * 2 * NORM_PARTS) {
            const int r = t / (2 * NORM_PARTS), which = t / NORM_PARTS % 2, part = t % NORM_PARTS;
            const float* x = reinterpret_cast<const float*>(channel_rows[r]) + which * D;
            float sum = 0.0f;
#pragma unroll 8
            for (int i = part; i < D; i += NORM_PARTS) sum = fmaf(x[i], x[i], sum);
            norms[r][which][part] = sum;
        }
        __syncthreads();
        if (t < n * 2) {
            const float* parts = norms[t / 2][t % 2];
            float sum = eps;
#pragma unroll
            for (int i = 0; i < NORM_PARTS; i++) sum = sum + parts[i];
            scales[t / 2][t % 2] = 1.0f / (t % 2 == 0 ? sqrtf(sum) * sqrtf(float(D)) : sqrtf(sum));
        }
        __syncthreads();

#pragma unroll 1
        for (int r = 0; r < n; r++) {
            const int row = first + r;
            const float4* q = channel_rows[r];
            const float4* k = q + D / 4;
            const float gain = RULE == GATED ? gains[r] : 1.0f;
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < OWN / 4; j++) {
                const int i = GROUPS * j + group;
                if (RULE == KDA) {
                    const float4 decay = decays[RULE == KDA ? r : 0][i];
                    state[j].x *= decay.x, state[j].y *= decay.y;
                    state[j].z *= decay.z, state[j].w *= decay.w;
                }
                sums[0] = fmaf(state[j].x, k[i].x, sums[0]);
                sums[1] = fmaf(state[j].y, k[i].y, sums[1]);
                sums[2] = fmaf(state[j].z, k[i].z, sums[2]);
                sums[3] = fmaf(state[j].w, k[i].w, sums[3]);
            }
            const float known = column_sum(sum_four(sums)) * scales[r][1];
            const float value = reinterpret_cast<const float*>(q)[2 * D + col];
            const float delta = (value - gain * known) * rates[r] * scales[r][1];
            sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
            for (int j = 0; j < OWN / 4; j++) {
                const int i = GROUPS * j + group;
                state[j].x = fmaf(k[i].x, delta, gain * state[j].x);
                state[j].y = fmaf(k[i].y, delta, gain * state[j].y);
                state[j].z = fmaf(k[i].z, delta, gain * state[j].z);
                state[j].w = fmaf(k[i].w, delta, gain * state[j].w);
                sums[0] = fmaf(state[j].x, q[i].x, sums[0]);
                sums[1] = fmaf(state[j].y, q[i].y, sums[1]);
                sums[2] = fmaf(state[j].z, q[i].z, sums[2]);
                sums[3] = fmaf(state[j].w, q[i].w, sums[3]);
            }
            if (keep_all || row == n_rows - 1) {
                float4* to =
                    reinterpret_cast<float4*>(ssm + slot_of(row) * state_size + state_at);
#pragma unroll
                for (int j = 0; j < OWN / 4; j++) to[GROUPS * j + group] = state[j];
            }
            answers[r][group][col] = sum_four(sums);
        }
        __syncthreads();
#pragma unroll 1
        for (int e = t; e < n * COLS; e += THREADS) {
            const int r = e / COLS, c = e % COLS;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < GROUPS; i++) sum = sum + answers[r][i][c];
            out[(size_t(first + r) * n_v_heads + v_head) * D + first_col + c] = sum * scales[r][0];
        }
    }
}
