"""A kernel, streams and buffers over a driver that notes what it is given and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, compile_source, native
from memra_lowlevel.runtime.overhead import stub_device

SOURCE = """#include "common/device.cuh"
KERNEL void mixed(float* a, int32_t b, int64_t c, float d, const float* NULLABLE e) {
    if (a == nullptr) a[0] = float(b) + float(c) + d + (e ? e[0] : 0.0f);
}"""
CONFIG = LaunchConfig((3, 4, 5), (32, 2, 1), 1024)

KEEP = 256 if not native.available() else int(native.lib.MLL_KEEP)


@pytest.fixture
def stub() -> Any:
    return native.lib.mll_stub_state


@pytest.fixture
def dev() -> Iterator[Device]:
    with stub_device(1) as device:
        yield device


@pytest.fixture
def rig(dev: Device) -> Iterator[Any]:
    module = dev.module(compile_source(SOURCE, arch=dev.arch, name="stubbed.cu"))
    s, t = dev.stream(name="one"), dev.stream(name="two")
    a, e = dev.empty(4, np.float32, s, name="a"), dev.empty(4, np.float32, s, name="e")
    yield module.kernel("mixed"), s, t, a, e
    for thing in (a, e, s, t):
        thing.close()
    module.close()


def seen(stub: Any, n: int = 5) -> list[int]:
    return [int(stub.params[i]) for i in range(n)]


def unlocked(stream: Any) -> int:
    return int(stream.context.native.n_unlocked)
