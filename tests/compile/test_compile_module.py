from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memra_lowlevel.compile import CompiledImage, Module, compile_source
from memra_lowlevel.driver.table import FuncAttribute
from memra_lowlevel.errors import ArgumentError, ClosedError, DriverError

NAME = "scale<64, float>"


class StubDriver:
    """The few calls that a module makes, with the answers of a driver."""

    def __init__(self, image: CompiledImage, *, lacks_info: bool = False):
        self.image, self.lacks_info = image, lacks_info
        self.calls: list[str] = []
        self.layouts = dict(image.layouts)
        self.symbols: list[str] = []

    def cuCtxSetCurrent(self, ctx: int) -> None:
        assert ctx == 7

    def cuModuleLoadData(self, image: bytes) -> int:
        assert image == self.image.data
        self.calls.append("load")
        return 70

    def cuModuleUnload(self, module: int) -> None:
        self.calls.append(f"unload {module}")

    def cuModuleGetFunction(self, module: int, name: str) -> int:
        self.calls.append(f"get {name}")
        self.symbols.append(name)
        return 700 + len(self.symbols)

    def cuFuncGetParamInfo(self, func: int, index: int) -> tuple[int, int] | None:
        if self.lacks_info:
            raise DriverError("no such function", result="CUDA_ERROR_NOT_FOUND")
        layout = self.layouts[self.symbols[func - 701]]
        return layout[index] if index < len(layout) else None

    def cuFuncGetAttribute(self, attribute: FuncAttribute, func: int) -> int:
        if attribute == FuncAttribute.NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            raise DriverError("unknown attribute")
        return 100 + attribute

    def cuFuncSetAttribute(self, func: int, attribute: FuncAttribute, value: int) -> None:
        self.calls.append(f"set {attribute.name} {value}")

    def name_handle(self, handle: int, name: str) -> None:
        self.calls.append(f"name {name}")


@pytest.fixture
def image(sample: str) -> CompiledImage:
    return compile_source(sample, arch="sm_90", name_expressions=[NAME])


def load(image: CompiledImage, **more: Any) -> tuple[Module, StubDriver]:
    driver = StubDriver(image, **more)
    return Module(driver, 7, image), driver  # type: ignore[arg-type]


def test_parameters_join_driver_and_source(image: CompiledImage) -> None:
    module, driver = load(image)
    kernel = module.kernel(NAME)
    assert [(p.name, p.ctype, p.offset, p.size, p.pointer, p.dtype) for p in kernel.params] == [
        ("x", "float*", 0, 8, True, "float32"),
        ("y", "float*", 8, 8, True, "float32"),
        ("n", "int", 16, 4, False, "int32"),
    ]
    assert [p.nullable for p in kernel.params] == [False, True, False]
    assert [p.const for p in kernel.params] == [False, True, False]
    assert kernel.param_bytes == 20 and kernel.handle == 701 and kernel.module is module
    assert kernel.symbol == image.entries[NAME] and f"name {NAME}" in driver.calls
    # One object per kernel, however its name is spelled; one look-up in the driver.
    assert module.kernel(NAME) is kernel and module.kernel("scale<64,float>") is kernel
    assert module.kernel("plain").params[0].dtype == "uint64"
    assert sum(c.startswith("get") for c in driver.calls) == 2


def test_old_drivers(image: CompiledImage) -> None:
    """Without cuFuncGetParamInfo the cubin tells; for PTX the rule of C does."""
    whole = load(image)[0].kernel(NAME).params
    assert load(image, lacks_info=True)[0].kernel(NAME).params == whole
    ptx = dataclasses.replace(image, layouts={})
    assert load(ptx, lacks_info=True)[0].kernel(NAME).params == whole
    bare = dataclasses.replace(image, layouts={}, signatures={})
    with pytest.raises(ArgumentError, match=r"12\.4"):
        load(bare, lacks_info=True)[0].kernel(NAME)


def test_rule_of_c_equals_the_compiler() -> None:
    text = """extern "C" __global__ void k(char a, double b, short c, bool d, int* e, unsigned f,
        unsigned char g, long long h) { *e = a + b + c + d + f + g + h; }"""
    image = compile_source(text, arch="sm_90")
    told = load(image)[0].kernel("k").params
    ruled = load(dataclasses.replace(image, layouts={}), lacks_info=True)[0].kernel("k").params
    assert ruled == told and [p.size for p in told] == [1, 8, 2, 1, 8, 4, 1, 8]
    struct = 'struct P { int a[3]; }; extern "C" __global__ void s(P p, int* x) { *x = p.a[1]; }'
    image = compile_source(struct, arch="sm_90")
    kernel = load(image)[0].kernel("s")
    assert (kernel.params[0].size, kernel.params[0].dtype, kernel.params[1].offset) == (12, "", 16)
    with pytest.raises(ArgumentError, match="size of parameter 'p'"):
        load(dataclasses.replace(image, layouts={}), lacks_info=True)[0].kernel("s")


def test_contradictions_are_refused(image: CompiledImage) -> None:
    symbol = image.entries[NAME]
    module, driver = load(image)
    driver.layouts[symbol] = ((0, 8), (8, 8))
    with pytest.raises(ArgumentError, match="2 parameters as loaded and 3 in its source"):
        module.kernel(NAME)
    driver.layouts[symbol] = ((0, 8), (8, 8), (16, 8))
    with pytest.raises(ArgumentError) as caught:
        module.kernel(NAME)
    assert (caught.value.index, caught.value.name) == (2, "n")
    driver.layouts[symbol] = image.layouts[symbol]
    assert module.kernel(NAME).params


def test_kernels_that_a_macro_spells(image: CompiledImage) -> None:
    text = '#define MAKE(n) extern "C" __global__ void n(int* a, short b) { *a = b; }\nMAKE(made)'
    made = compile_source(text, arch="sm_90")
    kernel = load(made)[0].kernel("made")
    assert [(p.name, p.ctype, p.size) for p in kernel.params] == [
        ("arg0", "?", 8),
        ("arg1", "?", 2),
    ]


def test_unknown_kernel_and_closed_module(image: CompiledImage) -> None:
    module, driver = load(image)
    with pytest.raises(ArgumentError, match=r"no kernel 'scale<9, int>'; it has plain, scale<64"):
        module.kernel("scale<9, int>")
    assert not module.closed and module.handle == 70
    module.close()
    module.close()
    assert module.closed and driver.calls.count("unload 70") == 1
    with pytest.raises(ClosedError):
        module.kernel("plain")
    assert "closed" in repr(module)


def test_attributes(image: CompiledImage) -> None:
    module, driver = load(image)
    kernel = module.kernel("plain")
    assert (
        kernel.attributes["num_regs"] == 104 and kernel.attributes["max_threads_per_block"] == 100
    )
    assert "non_portable_cluster_size_allowed" not in kernel.attributes
    kernel.set_attribute(FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, 99)
    assert kernel.attributes["max_dynamic_shared_size_bytes"] == 99
    assert driver.calls[-1] == "set MAX_DYNAMIC_SHARED_SIZE_BYTES 99"
    assert repr(kernel).startswith("<Kernel plain(unsigned long long n, float* out) sm_90 exact")
