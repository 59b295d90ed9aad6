"""Builds with the compilers' own checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.driver.host import build

UNDEFINED = """
KERNEL void undefined(int* x, int n) {
  __shared__ int s[8];
  switch (CASE) {
    case 0: x[0] = x[1] << n; break;
    case 1: x[0] = x[2] + n; break;
    case 2: s[n & 15] = 1; x[0] = s[n & 15]; break;
    case 3: *reinterpret_cast<int2*>(x + n) = make_int2(1, 2); break;
    case 4: { int a[4] = {1, 2, 3, 4}; x[0] = a[n & 7]; break; }
    case 5: x[0] = x[1] / (n - 3); break;
  }
}
"""
CASES = {
    0: (31, 32, "shift by a negative amount or by the width"),
    1: (0, 5, "signed addition overflows"),
    2: (7, 8, "outside the array"),
    3: (0, 1, "not aligned to 8 bytes"),
    4: (3, 4, "outside the array"),
    5: (4, 3, "division by zero"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_undefined_behaviour_is_an_error_with_its_line(kernel, case, workers):
    good, bad, says = CASES[case]
    run = kernel(UNDEFINED, "undefined", {"CASE": case}, sanitize="undefined")
    x = np.array([0, 1, 0x7FFFFFFF, 0], np.int32)
    run(2, 1, 0, x, np.int32(good), workers=1)
    with pytest.raises(errors.HostCheckError, match=says) as caught:
        run(2, 1, 0, np.array([0, 1, 0x7FFFFFFF, 0], np.int32), np.int32(bad), workers=workers)
    assert caught.value.where == f"source.cu:{3 + 5 + case}"
    run(2, 1, 0, x, np.int32(good), workers=1)


ADDRESS = """
import sys
import numpy as np
from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner
text = '''#include "common/device.cuh"
KERNEL void f(float* x, int k, int out) {
  __shared__ float s[32];
  __shared__ float t[32];
  float* p = s;
  float a[4] = {1, 2, 3, 4};
  float* q = a;
  s[threadIdx.x] = x[threadIdx.x];
  t[threadIdx.x] = 1;
  __syncthreads();
  const float v = p[threadIdx.x + (sys == 0 ? k : 0)] + q[threadIdx.x % 4 + (sys == 1 ? k : 0)];
  __syncthreads();
  x[threadIdx.x + out] = v + __shfl_sync(FULL_MASK, t[threadIdx.x], 3);
}
'''.replace("sys", sys.argv[1])
run = runner.quick(text, "f", sanitize="address")
x = np.ones(32, np.float32)
run(4, 32, 0, x, np.int32(0), np.int32(0))
try:
    run(1, 32, 0, x, np.int32(0), np.int32(5000))
except errors.OutOfBounds:
    run(4, 32, 0, x, np.int32(0), np.int32(0))
    print("alive")
run(1, 32, 0, x, np.int32(4), np.int32(0))
print("not reached")
"""


@pytest.mark.parametrize(
    ("case", "says"), [(0, "global-buffer-overflow"), (1, "stack-buffer-overflow")]
)
def test_address_sanitizer_in_a_process_of_its_own(case, says):
    compiler = build.find_compiler()
    assert compiler.kind == "gcc" and shutil.which("c++")
    library = subprocess.run(
        [*compiler.command, "-print-file-name=libasan.so"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()
    environment = {
        **__import__("os").environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:allow_user_segv_handler=1",
    }
    done = subprocess.run(
        [sys.executable, "-u", "-c", textwrap.dedent(ADDRESS), str(case)], env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "alive" in done.stdout and "not reached" not in done.stdout
    assert says in done.stderr and "source.cu:" in done.stderr, done.stderr[:2000]
