// Linear attention in one launch: short convolution, gates, and the delta rule over a few rows.
//
// A layer keeps n_slots states. The rows of a launch start from slot s = slot_d[0] % n_slots, which
// nobody writes, so blocks need no order among each other:
//   every row kept  row r leaves its state in slot (s + 1 + r) % n_slots
//   last row kept   only the last row leaves one, in slot (s + 1) % n_slots
#include "common/device.cuh"

constexpr int THREADS = 128;
constexpr int GROUPS = 4;                  // threads that share a column of the state
constexpr int COLS = THREADS / GROUPS;     // columns of a block
constexpr int TAPS = 8;                    // widest convolution; shorter ones are padded in front
constexpr int NORM_PARTS = 8;

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

// Grid (D / COLS, n_v_heads), THREADS threads; thread t owns column t / GROUPS of the block and the
// rows i = (GROUPS * j + t % GROUPS) * 4 + 0..3 of the state.
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
__global__ void __launch_bounds__(THREADS)
    delta_rows(const float* __restrict__ rows, const float* NULLABLE weights, float* NULLABLE conv,
               float* ssm, const int32_t* __restrict__ slot_d, const float* __restrict__ alpha,
               const float* __restrict__ a, const float* __restrict__ dt_bias,
               const float* __restrict__ beta, float* __restrict__ out, int32_t n_rows,
               int32_t n_k_heads, int32_t n_v_heads, int32_t taps, int32_t n_slots,
               int32_t keep_all, float eps, float lower_bound) {
    constexpr int CHANNELS = 2 * D + COLS;
    constexpr int PER_THREAD = (CHANNELS + THREADS - 1) / THREADS;
    constexpr int OWN = D / GROUPS;
    __shared__ float qkv[CHANNELS];  // q [D], k [D], v of the block's columns
    __shared__ float decay[D];
    __shared__ float norm[2 * NORM_PARTS];
    __shared__ float memory[GROUPS][COLS];
    __shared__ float answer[GROUPS][COLS];

    const int t = threadIdx.x;
    const int group = t % GROUPS;
    const int col = t / GROUPS;
    const int v_head = blockIdx.y;
    const int k_head = v_head % n_k_heads;
    const int first_col = blockIdx.x * COLS;
    const int width = (2 * n_k_heads + n_v_heads) * D;
    const int s = slot_d[0] % n_slots;
    const size_t state_at = (size_t(v_head) * D + first_col + col) * D;
    const size_t state_size = size_t(n_v_heads) * D * D;

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
    float state[OWN];
    {
        const float* from = ssm + s * state_size + state_at;
#pragma unroll
        for (int j = 0; j < OWN / 4; j++) {
            const float4 four =
                *reinterpret_cast<const float4*>(from + (GROUPS * j + group) * 4);
            state[4 * j] = four.x;
            state[4 * j + 1] = four.y;
            state[4 * j + 2] = four.z;
            state[4 * j + 3] = four.w;
        }
    }

    for (int r = 0; r < n_rows; r++) {
        const bool keep = keep_all || r == n_rows - 1;
        const int slot = (s + 1 + (keep_all ? r : 0)) % n_slots;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int c = t + i * THREADS;
            if (c < CHANNELS) {
                const float x = rows[size_t(r) * width + at[i]];
                if (weights != nullptr) {
                    qkv[c] = channels[i].push(x);
                    if (keep && keeps[i])
                        channels[i].store(conv + (size_t(slot) * width + at[i]) * (taps - 1), taps);
                } else {
                    qkv[c] = x;
                }
            }
        }
        const size_t head_row = size_t(r) * n_v_heads + v_head;
        float gain = 1.0f;
        if (RULE == GATED) {
            const float x = alpha[head_row] + dt_bias[v_head];
            gain = expf(a[v_head] * (x > 20.0f ? x : log1pf(expf(x))));
        } else {
            const float scale = expf(a[v_head]);
            for (int i = t; i < D; i += THREADS) {
                const float x = alpha[head_row * D + i] + dt_bias[v_head * D + i];
                decay[i] = expf(lower_bound * sigmoid_f(scale * x));
            }
        }
        const float rate = sigmoid_f(beta[head_row]);
        __syncthreads();

        if (t < 2 * NORM_PARTS) {
            const float* x = qkv + (t / NORM_PARTS) * D;
            float sum = 0.0f;
            for (int i = t % NORM_PARTS; i < D; i += NORM_PARTS) sum = fmaf(x[i], x[i], sum);
            norm[t] = sum;
        }
        __syncthreads();
        float q_sum = 0.0f, k_sum = 0.0f;
#pragma unroll
        for (int i = 0; i < NORM_PARTS; i++) {
            q_sum = q_sum + norm[i];
            k_sum = k_sum + norm[NORM_PARTS + i];
        }
        const float q_scale = 1.0f / (sqrtf(q_sum + eps) * sqrtf(float(D)));
        const float k_scale = 1.0f / sqrtf(k_sum + eps);

        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int i = (GROUPS * (j / 4) + group) * 4 + j % 4;
            if (RULE == KDA) state[j] = state[j] * decay[i];
            sum = fmaf(state[j], qkv[D + i] * k_scale, sum);
        }
        memory[group][col] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) sum = sum + memory[i][col];
        const float delta = (qkv[2 * D + col] - gain * sum) * rate;
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int i = (GROUPS * (j / 4) + group) * 4 + j % 4;
            state[j] = fmaf(qkv[D + i] * k_scale, delta, gain * state[j]);
            part = fmaf(state[j], qkv[i] * q_scale, part);
        }
        answer[group][col] = part;
        if (keep) {
            float* to = ssm + slot * state_size + state_at;
#pragma unroll
            for (int j = 0; j < OWN / 4; j++)
                *reinterpret_cast<float4*>(to + (GROUPS * j + group) * 4) = make_float4(
                    state[4 * j], state[4 * j + 1], state[4 * j + 2], state[4 * j + 3]);
        }
        __syncthreads();
        if (group == 0) {
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < GROUPS; i++) total = total + answer[i][col];
            out[head_row * D + first_col + col] = total;
        }
    }
}
