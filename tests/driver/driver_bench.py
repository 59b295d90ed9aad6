"""Kernels and shorthands for the tests of the host driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from memra_lowlevel.driver.host import HostDriver

SOURCE = """#include "common/device.cuh"
KERNEL void empty() {}
KERNEL void __launch_bounds__(64) narrow() {}
KERNEL void add(int32_t* x, int32_t delta, int32_t n) {
    int32_t i = int32_t(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] += delta;
}
KERNEL void scale_add(int32_t* out, const int32_t* in, int32_t factor, int32_t n) {
    int32_t i = int32_t(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = out[i] * factor + in[i];
}
KERNEL void wide(int8_t* out, double value, int8_t tag) {
    if (threadIdx.x == 0) { out[0] = int8_t(value); out[1] = tag; }
}
KERNEL void stray(int32_t* x, int32_t at) { if (threadIdx.x == 0) x[at] = 1; }
KERNEL void shared(int32_t* out) {
    DYN_SMEM(int32_t, tile);
    tile[threadIdx.x] = int32_t(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
"""


def pack(*values: object) -> tuple[int, list[object]]:
    """Address of an array of pointers to ctypes values, and what keeps them alive."""
    array = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))  # type: ignore[arg-type]
    return ctypes.addressof(array), [array, *values]


class Bench:
    """A driver with a context, and shorthands."""

    def __init__(self, image: bytes):
        self.d = HostDriver()
        self.d.cuInit()
        self.ctx = self.d.cuDevicePrimaryCtxRetain(0)
        self.d.cuCtxSetCurrent(self.ctx)
        self.image = image
        self.module = self.d.cuModuleLoadData(image)

    def stream(self, flags: int = 1) -> int:
        return self.d.cuStreamCreateWithPriority(flags, 0)

    def event(self, flags: int = 0) -> int:
        return self.d.cuEventCreate(flags)

    def func(self, name: str) -> int:
        return self.d.cuModuleGetFunction(self.module, name)

    def ints(self, values: Sequence[int]) -> int:
        """Device memory that holds these values."""
        ptr = self.d.cuMemAlloc(4 * len(values))
        data = (ctypes.c_int32 * len(values))(*values)
        self.d.cuMemcpyHtoD(ptr, ctypes.addressof(data), 4 * len(values))
        return ptr

    def read(self, ptr: int, n: int) -> list[int]:
        out = (ctypes.c_int32 * n)(*([-1] * n))
        self.d.cuMemcpyDtoH(ctypes.addressof(out), ptr, 4 * n)
        return list(out)

    def launch(self, name: str, stream: int, *args: object, block: int = 32) -> None:
        address, keep = pack(*args)
        self.d.cuLaunchKernel(self.func(name), (1, 1, 1), (block, 1, 1), 0, stream, address)
        del keep

    def add(self, ptr: int, delta: int, n: int, stream: int) -> None:
        self.launch("add", stream, ctypes.c_void_p(ptr), ctypes.c_int32(delta), ctypes.c_int32(n))

    def scale_add(self, out: int, source: int, factor: int, n: int, stream: int) -> None:
        self.launch(
            "scale_add", stream, ctypes.c_void_p(out), ctypes.c_void_p(source),
            ctypes.c_int32(factor), ctypes.c_int32(n),
        )  # fmt: skip
