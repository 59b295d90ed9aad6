"""What the tests of abuse share: a kernel, its launch, and values of the wrong kind."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from memra_lowlevel import LaunchConfig

SOURCE = """#include "common/device.cuh"
KERNEL void scale(const float* x, float* y, int32_t n, float f) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * f;
}
KERNEL void first(const float* NULLABLE x, float* y) {
  if (threadIdx.x == 0) y[0] = x ? x[0] : 7.0f;
}
"""
N = 64
CONFIG = LaunchConfig(2, 32)

ARRAYS = [
    np.zeros(3, np.float32),
    np.zeros(0),
    np.zeros(3, ">f4"),
    np.array([None, 1]),
    np.zeros(2, [("a", "f4")]),
]
NOT_TEXT = [5, 1.5, b"x", [], {}, object(), *ARRAYS]
NOT_INT = [None, "3", 1.5, 2.0, math.nan, math.inf, True, [], (1,), {}, object(), *ARRAYS]
NOT_NUMBER = [v for v in NOT_INT if not isinstance(v, float)]
THINGS: list[Any] = [None, "x", 5, 1.5, True, b"x", [], (1, 2), {}, object(), int, *ARRAYS]
NOT_SHAPE = [None, "3", 1.5, True, (2.0,), (None,), (-1,), -1, 2**70, {}, object(), *ARRAYS]
NOT_DTYPE = [
    None, object, "O", ">f4", "S", "U", "nonsense", 5, 1.5, object(),
    np.dtype([("a", "O"), ("b", "f4")]), *ARRAYS[:1],
]  # fmt: skip
