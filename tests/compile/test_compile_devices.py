"""The same source loaded on the host device and, where there is one, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from memra_lowlevel import driver as drivers
from memra_lowlevel.compile import CompileOptions, Module, compile_source
from memra_lowlevel.compile.arch import device_arch
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.driver.table import DeviceAttribute
from memra_lowlevel.errors import CompileError, HeaderNotFound

SOURCE = """#include "common/device.cuh"
struct Plan { int32_t rows; float scale; uint8_t flag; };
template <int D, typename T>
__global__ void scale(T* __restrict__ x, const float* NULLABLE y, int32_t n) {
  if ((int)threadIdx.x < n) x[threadIdx.x] = T(D) + (y ? T(y[0]) : T(0));
}
KERNEL void mixed(uint8_t a, Plan plan, uint64_t b, bool c, float* out) {
  out[0] = float(a) + plan.scale + float(b) + float(c);
}
"""
NAMES = ["scale<64, float>", "scale<32, int32_t>"]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Any, int, str]]:
    """Driver, context and architecture."""
    driver = drivers.get(request.param)
    driver.cuInit()
    device = driver.cuDeviceGet(0)
    arch = "host"
    if request.param == "cuda":
        major, minor = (
            driver.cuDeviceGetAttribute(a, device)
            for a in (
                DeviceAttribute.COMPUTE_CAPABILITY_MAJOR,
                DeviceAttribute.COMPUTE_CAPABILITY_MINOR,
            )
        )
        arch = device_arch((major, minor))
    ctx = driver.cuDevicePrimaryCtxRetain(device)
    yield driver, ctx, arch
    driver.cuDevicePrimaryCtxRelease(device)


def test_both_know_the_same_kernels(place: tuple[Any, int, str]) -> None:
    driver, ctx, arch = place
    image = compile_source(SOURCE, arch=arch, name_expressions=NAMES)
    reference = compile_source(SOURCE, arch="sm_80", name_expressions=NAMES)
    assert set(image.entries) == set(reference.entries) == {*NAMES, "mixed"}
    assert image.signatures == reference.signatures
    module = Module(driver, ctx, image)
    try:
        for name in image.entries:
            kernel = module.kernel(name)
            # The device's own answer against the layout that NVRTC compiled for another one.
            told = tuple((p.offset, p.size) for p in kernel.params)
            assert told == reference.layouts[reference.entries[name]]
        mixed = module.kernel("mixed").params
        assert [p.dtype for p in mixed] == ["uint8", "", "uint64", "bool", "float32"]
        assert module.kernel(NAMES[1]).params[0].dtype == "int32"
        resources = image.resources.get(image.entries["mixed"])
        if resources is not None:
            assert module.kernel("mixed").attributes["num_regs"] == resources.registers
    finally:
        module.close()


def test_host_images() -> None:
    image = compile_source(SOURCE, arch="host", name_expressions=NAMES)
    assert (image.kind, image.arch, image.rung) == ("host", "host", "host")
    assert image.data.decode().endswith(".so")
    again = compile_source(SOURCE, arch="host", name_expressions=NAMES)
    assert again.data == image.data and again.key == image.key
    guarded = (
        '#include "common/device.cuh"\nKERNEL void k(float* x) {\n#ifdef X\n#error X\n#endif\n}\n'
    )
    compile_source(guarded, arch="host", defines={"X": False})
    with pytest.raises(CompileError, match="X"):
        compile_source(guarded, arch="host", defines={"X": True})


def test_host_errors_are_data() -> None:
    with pytest.raises(CompileError) as caught:
        compile_source(SOURCE + "KERNEL void bad() {\n  lost = 1;\n}\n", arch="host", name="b.cu")
    first = caught.value.diagnostics[0]
    line = SOURCE.count("\n") + 2
    assert (first.severity, first.file, first.line, first.column) == ("error", "b.cu", line, 3)
    with pytest.raises(HeaderNotFound):
        compile_source('#include "nope.cuh"\n', arch="host")


def test_a_host_kernel_without_the_built_in_names_is_told_what_to_include() -> None:
    plain = "__global__ void f(int* p) { p[0] = 1; }"
    with pytest.raises(CompileError, match=r'include "common/device\.cuh"') as caught:
        compile_source(plain, arch="host", name="plain.cu")
    assert caught.value.diagnostics[0].line == 1
    with pytest.raises(CompileError) as caught:
        compile_source(f'#include "common/device.cuh"\n{plain[:-1]} q; }}', arch="host")
    assert "does not include" not in str(caught.value)


def test_check_mode_builds_with_checks() -> None:
    before = compile_source(SOURCE, arch="host", name_expressions=NAMES)
    with host_options(check=True):
        checked = compile_source(SOURCE, arch="host", name_expressions=NAMES)
    asked = compile_source(
        SOURCE, arch="host", name_expressions=NAMES, options=CompileOptions(check=True)
    )
    after = compile_source(SOURCE, arch="host", name_expressions=NAMES)
    assert checked.key == asked.key != before.key == after.key
