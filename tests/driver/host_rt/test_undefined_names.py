"""A kernel that calls what nobody defines: told by name when it is compiled."""

from __future__ import annotations

import numpy as np
import pytest

from memra_lowlevel import Device, compile_source, errors
from memra_lowlevel.driver.host import runner
from memra_lowlevel.driver.host.build import undefined_symbols

CALLS = """
template <class T> __device__ T weight(T x);
__device__ int bias(const int* x, unsigned n);
extern __device__ int table[4];
KERNEL void uses(int* x, float* y) {
    x[0] = bias(x, 2) + bias(x, 3) + table[1];
    y[0] = weight<float>(y[1]);
}
"""


@pytest.mark.parametrize("options", [{}, {"check": True}, {"sanitize": "undefined"}])
def test_every_missing_name_is_told(kernel, options):
    with pytest.raises(errors.CompileError) as info:
        kernel(CALLS, "uses", **options)
    said = str(info.value)
    assert "nothing defines" in said
    for name in ("bias(int const*, unsigned int)", "table", "weight<float>(float)"):
        assert said.count(name) == 1, said


def test_through_the_device():
    with Device("host") as device, pytest.raises(errors.CompileError, match="nothing defines bias"):
        source = '#include "common/device.cuh"\n' + CALLS
        device.module(compile_source(source, arch=device.arch))


def test_a_library_that_was_linked_elsewhere(tmp_path, kernel):
    """The loader's words name the symbol too."""
    import shutil
    import subprocess

    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler
    source, library = tmp_path / "x.cpp", tmp_path / "x.so"
    source.write_text('int absent(int); extern "C" int memra_module() { return absent(1); }\n')
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(errors.InvalidArgument, match="absent"):
        runner.load(library)


def test_words_of_linkers():
    gnu = "/usr/bin/ld: x.o: in function `f()':\nx.cu:5: undefined reference to `foo(int)'\n"
    lld = "ld.lld: error: undefined symbol: bar(int)\n>>> referenced by x.cu:5 (x.cu:5)\n"
    assert undefined_symbols(gnu + lld + gnu) == ["foo(int)", "bar(int)"]
    assert undefined_symbols("x.cu:1: error: expected ';'") == []


def test_functions_of_the_maths_library_still_link(kernel):
    x = np.array([0.0, 0.5, 2.0], np.float32)
    kernel("KERNEL void f(float* x) { x[0] = expf(x[1]) + powf(x[2], x[1]); }", "f")(1, 1, 0, x)
    assert abs(x[0] - (np.exp(0.5) + np.sqrt(2.0))) < 1e-6
