"""A kernel of one's own: compile, launch, check; then three planted faults and their reports.

``python -m memra_lowlevel.examples.own_kernel``. The second half needs no GPU: on the host device
divergent barriers and accesses that reach a page outside their allocation are always found. Bounds
to the byte, those of shared arrays, races and uninitialised reads are found where the kernel was
compiled for it (``CompileOptions(check=True)``, or ``host_options(check=True)`` for all kernels).
"""

from __future__ import annotations

import numpy as np

from memra_lowlevel import CompileOptions, Device, LaunchConfig, compile_source, launch
from memra_lowlevel.errors import HostCheckError

SOURCE = r"""
#include "common/device.cuh"  // CUDA's built-in names on the host device; harmless on a GPU

KERNEL void saxpy(const float* x, float* y, float a, int32_t n) {
    int32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaf(a, x[i], y[i]);  // products and sums fuse only where the source says so
}

template <int N>
__global__ void sum(const float* x, float* y) {  // fault 1: all threads add to one float
    __shared__ float total[1];
    if (threadIdx.x == 0) total[0] = 0.0f;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < N; i += blockDim.x) total[0] += x[i];
    __syncthreads();
    if (threadIdx.x == 0) y[0] = total[0];
}

KERNEL void shift(const float* x, float* y) {  // fault 2: the last thread reads behind the end
    y[threadIdx.x] = x[threadIdx.x + 1];
}

KERNEL void half_a_barrier(float* y) {  // fault 3: some threads never come to the barrier
    if (threadIdx.x < 8) __syncthreads();
    y[threadIdx.x] = 0.0f;
}
"""


def main() -> None:
    with Device() as device, device.stream(name="work") as stream:
        module = device.module(compile_source(SOURCE, arch=device.arch, name="own.cu"))
        n = 1000
        x, y = np.random.default_rng(0).standard_normal((2, n)).astype(np.float32)
        x_d, y_d = device.from_numpy(x, stream), device.from_numpy(y, stream)
        launch(stream, LaunchConfig(-(-n // 128), 128), module.kernel("saxpy"), x_d, y_d, 2.0, n)
        exact = np.array_equal(y_d.to_numpy(stream), np.float32(2) * x + y)  # times 2 is exact
        print(f"saxpy on {device}: {'right' if exact else 'WRONG'}")

    with Device("host") as device, device.stream(name="work") as stream:
        image = compile_source(
            SOURCE, arch=device.arch, name="own.cu", name_expressions=["sum<32>"],
            options=CompileOptions(check=True),
        )  # fmt: skip
        module = device.module(image)
        block = LaunchConfig(1, 32)
        x_d, y_d = device.zeros(32, np.float32, stream), device.zeros(32, np.float32, stream)
        for name, *args in (("sum<32>", x_d, y_d), ("shift", x_d, y_d), ("half_a_barrier", y_d)):
            launch(stream, block, module.kernel(name), *args)  # queued, as on a GPU
            try:
                stream.sync()  # errors of queued work surface here; the device stays usable
                print(f"{name}: no fault found")
            except HostCheckError as error:
                print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
