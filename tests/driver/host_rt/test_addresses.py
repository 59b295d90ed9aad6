"""Which buffer a stray access is said to have missed: the one it counted from, or the nearest."""

from __future__ import annotations

import re

import numpy as np
import pytest

from memra_lowlevel import errors

I32, I64 = np.int32, np.int64
STRAY = """
KERNEL void indexed(int* x, int* y, long long i) { y[0] = 1; x[i] = 5; }
KERNEL void alone(int* x, long long i) { x[i] = 5; }
KERNEL void fields(int* x, int* y, long long i) { y[i + 3] = x[1]; }
KERNEL void wide(float4* x, int* y, long long i) { y[0] = 1; x[i] = make_float4(1, 2, 3, 4); }
KERNEL void bytes(unsigned char* x, int* y, long long i) { y[0] = 1; x[i] = 1; }
KERNEL void walks(int* x, int* y, long long i) {
    int* p = x + i;
    y[0] = 1;
    y[1] = p != y;
    p[0] = 3;
}
"""


def said(run, *args, **kw):
    with pytest.raises(errors.OutOfBounds) as info:
        run(1, 1, 0, *args, **kw)
    return str(info.value)


@pytest.mark.parametrize(
    ("name", "size", "begin"),
    [("indexed", 4, 0), ("wide", 16, 0), ("bytes", 1, 0), ("fields", 4, 12)],
)
@pytest.mark.parametrize("i", [1000, 300_000, -300_000, 60_000_000])
def test_the_buffer_that_was_counted_from(kernel, name, size, begin, i):
    """However far away, and whatever lies nearer."""
    x, y = np.zeros(16, I32), np.zeros(16, I32)
    text = said(kernel(STRAY, name), x, y, I64(i))
    which = 1 if name == "fields" else 0
    assert f"offset {size * i + begin} of a buffer of 64 bytes at" in text, text
    assert f", parameter {which}" in text, text


@pytest.mark.parametrize("check", [False, True])
def test_the_only_buffer_is_meant(kernel, check):
    text = said(kernel(STRAY, "alone", check=check), np.zeros(16, I32), I64(17))
    assert "offset 68 of a buffer of 64 bytes" in text and ", parameter 0" in text


def test_in_check_mode_the_nearest_is_called_so(kernel):
    text = said(kernel(STRAY, "indexed", check=True), np.zeros(16, I32), np.zeros(16, I32), I64(17))
    assert "offset 68 of the nearest buffer, of 64 bytes" in text, text


def test_an_address_computed_before_is_never_a_wrong_name(kernel):
    """Where the base is gone, the message says nearest or names the right one."""
    x, y = np.zeros(16, I32), np.zeros(16, I32)
    text = said(kernel(STRAY, "walks"), x, y, I64(2000))
    named = re.search(r"of a buffer of 64 bytes at .*, parameter (\d)", text)
    assert named is None or named[1] == "0", text
    assert named or "nearest buffer" in text, text
