"""The few row operations that this model needs beside the library's kernels.

Each row is one thread block and its sums have a fixed order, so a row has the same bits alone and
among others: what verification of drafts rests on.
"""

from __future__ import annotations

from memra_lowlevel.compile import Kernel, compile_source
from memra_lowlevel.kernels import latent_rows
from memra_lowlevel.runtime import Buffer, Device, LaunchConfig, Stream, launch

THREADS = 64

SOURCE = r"""
#include "common/device.cuh"

constexpr int THREADS = 64;

// Sum over the block, in the order of the threads.
__device__ __forceinline__ float sum_block(float value, float* scratch) {
    __syncthreads();
    scratch[threadIdx.x] = value;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < THREADS; i++) total = total + scratch[i];
    return total;
}

// h[row] = table[tokens[row]]
KERNEL void embed(const float* table, const int32_t* tokens, float* h, int32_t width) {
    const size_t row = blockIdx.x;
    for (int c = threadIdx.x; c < width; c += THREADS)
        h[row * width + c] = table[size_t(tokens[row]) * width + c];
}

// out = h / rms(h) * weight
KERNEL void rms_rows(const float* h, const float* weight, float* out, int32_t width) {
    __shared__ float scratch[THREADS];
    const float* own = h + size_t(blockIdx.x) * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += THREADS) sum = fmaf(own[c], own[c], sum);
    const float scale = 1.0f / sqrtf(sum_block(sum, scratch) / float(width) + 1e-6f);
    for (int c = threadIdx.x; c < width; c += THREADS)
        out[size_t(blockIdx.x) * width + c] = own[c] * scale * weight[c];
}

// Layer normalisation, mean and bias included, of the first d elements of each row, in place.
KERNEL void norm_front(float* rows, const float* weight, const float* bias, int32_t d,
                       int32_t width) {
    __shared__ float scratch[THREADS];
    float* own = rows + size_t(blockIdx.x) * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < d; c += THREADS) sum = sum + own[c];
    const float mean = sum_block(sum, scratch) / float(d);
    sum = 0.0f;
    for (int c = threadIdx.x; c < d; c += THREADS) sum = fmaf(own[c] - mean, own[c] - mean, sum);
    const float scale = 1.0f / sqrtf(sum_block(sum, scratch) / float(d) + 1e-5f);
    for (int c = threadIdx.x; c < d; c += THREADS)
        own[c] = (own[c] - mean) * scale * weight[c] + bias[c];
}

// h += x
KERNEL void add_rows(float* h, const float* x, int32_t width) {
    for (int c = threadIdx.x; c < width; c += THREADS) {
        const size_t at = size_t(blockIdx.x) * width + c;
        h[at] = h[at] + x[at];
    }
}

// out = silu(both[:half]) * both[half:]
KERNEL void gate_rows(const float* both, float* out, int32_t half) {
    for (int c = threadIdx.x; c < half; c += THREADS) {
        const float* own = both + size_t(blockIdx.x) * 2 * half;
        out[size_t(blockIdx.x) * half + c] = own[c] / (1.0f + expf(-own[c])) * own[half + c];
    }
}

// The token of the greatest logit, the lowest id on a tie; 0x7FFFFFFF if none is a number.
KERNEL void greedy_rows(const float* logits, int32_t* tokens, int32_t n_vocab) {
    __shared__ float best[THREADS];
    __shared__ int32_t ids[THREADS];
    float high = -INF_F32;
    int32_t id = 0x7FFFFFFF;
    for (int c = threadIdx.x; c < n_vocab; c += THREADS) {
        const float value = logits[size_t(blockIdx.x) * n_vocab + c];
        if (value > high || (value == high && c < id)) high = value, id = c;
    }
    best[threadIdx.x] = high;
    ids[threadIdx.x] = id;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS; i++)
            if (best[i] > high || (best[i] == high && ids[i] < id)) high = best[i], id = ids[i];
        tokens[blockIdx.x] = id;
    }
}
"""


class Ops:
    """The kernels above, loaded for a device."""

    def __init__(self, device: Device):
        module = device.module(compile_source(SOURCE, arch=device.arch, name="hybrid.cu"))
        self._kernels: dict[str, Kernel] = {
            name: module.kernel(name)
            for name in (
                "embed", "rms_rows", "norm_front", "add_rows", "gate_rows", "greedy_rows",
            )
        }  # fmt: skip

    def __call__(self, stream: Stream, name: str, n_rows: int, *args: Buffer | int) -> None:
        """Launch one of them over rows."""
        launch(stream, LaunchConfig(n_rows, THREADS), self._kernels[name], *args)


def linear(stream: Stream, x: Buffer, weight: Buffer, y: Buffer) -> None:
    """``y[r] = weight @ x[r]``: the library's product per head, with one head.

    ``x`` f32 ``[n, n_in]``, ``weight`` f32 ``[1, n_out, n_in]``, ``y`` f32 ``[n, n_out]``.
    """
    rows, cols = (b.view(0, (b.shape[0], 1, b.shape[1]), b.dtype) for b in (x, y))
    latent_rows.project(stream, rows, weight, cols)
