"""Dynamic shared memory, in CUDA's spelling and in the library's, on both devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import LaunchConfig, compile_file, compile_source, launch
from memra_lowlevel.driver.host.translate import dynamic_shared
from memra_lowlevel.errors import CompileError

BODY = """{
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
"""
HEAD = '#include "common/device.cuh"\n'
DECLARATIONS = (
    "extern __shared__ float s[];",
    "extern __shared__ __align__(16)\n float s[ ];",
    "/* extern __shared__ int s[]; */ extern __shared__ float s[];",
    "DYN_SMEM(float, s);",
)


@pytest.mark.parametrize("declaration", DECLARATIONS)
@pytest.mark.parametrize("from_file", [False, True])
def test_both_spellings(
    device: Any, stream: Any, tmp_path: Path, declaration: str, from_file: bool
) -> None:
    text = f"{HEAD}KERNEL void turn(const float* x, float* y) {{ {declaration}\n{BODY}}}\n"
    if from_file:
        (tmp_path / "beside.cuh").write_text("#pragma once\n")
        (tmp_path / "turn.cu").write_text('#include "beside.cuh"\n' + text)
        image = compile_file(tmp_path / "turn.cu", arch=device.arch)
    else:
        image = compile_source(text, arch=device.arch, name="turn.cu")
    x = np.arange(32, dtype=np.float32)
    x_d, y_d = device.from_numpy(x, stream), device.zeros(32, np.float32, stream)
    kernel = device.module(image).kernel("turn")
    launch(stream, LaunchConfig(1, 32, shared_bytes=128), kernel, x_d, y_d)
    assert np.array_equal(y_d.to_numpy(stream), x[::-1])


def test_in_a_template(device: Any, stream: Any) -> None:
    text = (
        f"{HEAD}template <class T> __global__ void turn(const T* x, T* y) {{\n"
        f"extern __shared__ T s[];\n{BODY}}}\n"
    )
    image = compile_source(text, arch=device.arch, name_expressions=["turn<float>"])
    x = np.arange(32, dtype=np.float32)
    x_d, y_d = device.from_numpy(x, stream), device.zeros(32, np.float32, stream)
    kernel = device.module(image).kernel("turn<float>")
    launch(stream, LaunchConfig(1, 32, shared_bytes=128), kernel, x_d, y_d)
    assert np.array_equal(y_d.to_numpy(stream), x[::-1])


def test_what_stands_elsewhere_is_told_how_to_write_it(tmp_path: Path) -> None:
    at_file_scope = f"{HEAD}extern __shared__ float s[];\nKERNEL void turn(float* y) {{}}\n"
    with pytest.raises(CompileError, match=r"source\.cu:2.*DYN_SMEM\(type, name\)"):
        compile_source(at_file_scope, arch="host")
    (tmp_path / "part.cuh").write_text(
        "__device__ void f(float* y) { extern __shared__ float s[]; y[0] = s[0]; }\n"
    )
    with pytest.raises(CompileError, match="DYN_SMEM"):
        compile_source(
            f'{HEAD}#include "part.cuh"\nKERNEL void turn(float* y) {{ f(y); }}\n',
            arch="host", include_dirs=[tmp_path],
        )  # fmt: skip


def test_lines_and_other_text_stay() -> None:
    text = f"{HEAD}namespace n {{ extern __shared__ int a[]; }}\nvoid f() {{\n{DECLARATIONS[1]}\n}}"
    got = dynamic_shared(text)
    assert got.count("\n") == text.count("\n") and "extern __shared__ int a[]" in got
    assert dynamic_shared('const char* t = "extern __shared__ float s[]";').count("extern") == 1
    with pytest.raises(CompileError, match=r"source\.cu:5: .*nowhere"):
        compile_source(
            f"{HEAD}KERNEL void f(float* y) {{\n{DECLARATIONS[1]}\n y[0] = nowhere;\n}}\n",
            arch="host",
        )
