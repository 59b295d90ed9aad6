"""Fixtures of the tests of runtime, graph and native: small kernels, both launch paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from memra_lowlevel import Device, compile_source, native
from memra_lowlevel.runtime import lifetime

SOURCE = """#include "common/device.cuh"
KERNEL void axpy(const float* x, float* y, const int32_t* NULLABLE len_d, float a, int32_t n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaf(a, x[i], y[i]) + (len_d != nullptr ? float(*len_d) : 0.0f);
}
KERNEL void put(int32_t* out, int32_t value) { if (threadIdx.x == 0) out[0] = value; }
KERNEL void shift(int32_t* out, int32_t by) {
    if (threadIdx.x == 0) out[0] = int32_t(uint32_t(out[0]) * 3u + uint32_t(by));
}
KERNEL void scalars(uint8_t* out, int8_t a, uint16_t b, int64_t c, double d, bool e) {
    if (threadIdx.x == 0) {
        out[0] = uint8_t(a); out[1] = uint8_t(b >> 8); out[2] = uint8_t(c >> 40);
        out[3] = uint8_t(d == 0.1); out[4] = uint8_t(e);
    }
}
KERNEL void shared_sum(float* out, int32_t n) {
    DYN_SMEM(float, tile);
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = float(i);
    __syncthreads();
    if (threadIdx.x == 0) { float s = 0.0f; for (int i = 0; i < n; ++i) s += tile[i]; out[0] = s; }
}
KERNEL void halves(const uint16_t* x, uint16_t* y, int32_t n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
"""

NAMES = ("axpy", "put", "shift", "scalars", "shared_sum", "halves")


class Kernels:
    """The test kernels on one device, by attribute."""

    axpy: Any
    put: Any
    shift: Any
    scalars: Any
    shared_sum: Any
    halves: Any

    def __init__(self, device: Device) -> None:
        self.image = compile_source(SOURCE, arch=device.arch, name="runtime_tests.cu")
        self.module = device.module(self.image)
        for name in NAMES:
            setattr(self, name, self.module.kernel(name))


@pytest.fixture
def kernels(device: Device) -> Kernels:
    found = device.memo.get("test kernels")
    if found is None:
        found = device.memo["test kernels"] = Kernels(device)
    return found


@pytest.fixture(params=["compiled", "python"] if native.available() else ["python"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test through the compiled launch path and through pure Python."""
    if request.param == "compiled":
        yield "compiled"
        return
    with native.without():
        yield "python"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test may leave open objects or a capture behind."""
    before = {leak.serial for leak in lifetime.census()}
    yield
    assert not lifetime.recordings
    import gc

    gc.collect()
    left = [str(leak) for leak in lifetime.census() if leak.serial not in before]
    # The stream fixture closes after this one.
    assert [text for text in left if "'test'" not in text] == []


def shifted(value: int, by: int) -> int:
    """What the kernel ``shift`` makes of ``value``, in 32 bits."""
    return (value * 3 + by + 2**31) % 2**32 - 2**31
