"""Refusals of a compilation name what the caller wrote."""

from __future__ import annotations

import pytest

from memra_lowlevel import CompileOptions, compile_source
from memra_lowlevel.errors import ArgumentError, CompileError

SOURCE = '#include "common/device.cuh"\nKERNEL void put(const float* x, float* y) { *y = *x; }\n'


@pytest.mark.parametrize("name", ["put<3>", "nothing"])
def test_a_name_expression_that_is_no_kernel(name: str) -> None:
    with pytest.raises(CompileError, match=f"^name_expressions: '{name}' is no kernel"):
        compile_source(SOURCE, arch="host", name_expressions=[name])


@pytest.mark.parametrize("options", [{"check": True}, {"sanitize": "undefined"}])
def test_what_only_the_host_device_can_do(options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=r"options for sm_90 got .*arch='host'"):
        compile_source(SOURCE, arch="sm_90", options=options)


def test_an_unknown_standard() -> None:
    with pytest.raises(ArgumentError, match=r"std got 'c\+\+98'"):
        CompileOptions(std="c++98")
