"""Elementary arithmetic: accuracy, and equal bits on every path."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import bits, gen, same_bits

from memra_lowlevel.layer_kv import arith, compiled
from memra_lowlevel.layer_kv.attend import default_scale

COMPILED = compiled.available()[1:]


def test_the_compiled_module_is_built():
    """Without it every path test here would compare NumPy with itself."""
    assert "baseline" in COMPILED, "run: python memra_lowlevel/native/build_layer_kv.py"
    assert compiled.backend() == COMPILED[-1]
    with pytest.raises(ValueError), compiled.use("sse9"):
        pass


def mapped(name: str, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    at = compiled.ffi.from_buffer
    getattr(compiled.lib, name)(at("float[]", x), at("float[]", y), x.size)
    return y


def equal_or_nan(a: np.ndarray, b: np.ndarray) -> bool:
    same = a.view(np.uint32) == b.view(np.uint32)
    return bool((same | (np.isnan(a) & np.isnan(b))).all())


EDGES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -104.0, -103.97, -103.9, 88.72, 88.8, 89.0,
         90.0, 0.625, 0.6249999, 9.5, 9.6, 1e-30, -1e-40, 3e38, -3e38]  # fmt: skip


def samples() -> np.ndarray:
    rng = np.random.default_rng(5)
    any_bits = rng.integers(0, 2**32, 40000, dtype=np.uint32).view(np.float32)
    x = [rng.uniform(-106, 90, 100000), rng.standard_normal(20000), np.array(EDGES)]
    return np.concatenate([any_bits, *(v.astype(np.float32) for v in x)])


def test_exp_and_tanh():
    x = samples()
    with np.errstate(all="ignore"):
        exp, tanh = arith.exp(x), arith.tanh(x)
        wide = x.astype(np.float64)
        ok = (wide > -87.3) & (wide < 88.7)
        ulp = np.abs(exp - np.exp(wide))[ok] / np.spacing(exp[ok])
        assert ulp.max() < 1.0
        ok = np.isfinite(wide) & (np.abs(wide) > 1e-37)
        ulp = np.abs(tanh - np.tanh(wide))[ok] / np.spacing(np.abs(tanh[ok]))
        assert ulp.max() < 2.0
    assert np.abs(tanh[~np.isnan(tanh)]).max() == 1.0
    for path in COMPILED:
        with compiled.use(path):
            assert equal_or_nan(mapped("lkv_map_exp", x), exp), path
            assert equal_or_nan(mapped("lkv_map_tanh", x), tanh), path


def test_exp_points():
    x = np.array([0.0, -0.0, -np.inf, np.inf, -104.5, 1000], np.float32)
    assert bits(arith.exp(x)) == bits([1.0, 1.0, 0.0, np.inf, 0.0, np.inf])
    assert bits(arith.tanh(np.array([-0.0, 0.0], np.float32))) == ["80000000", "00000000"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3))
def test_fma_rounds_once(words):
    """Exact rational arithmetic is the judge."""
    from fractions import Fraction

    a, b, c = np.array(words, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        got = float(arith.fma(a, b, c))
        if not np.isfinite([a, b, c]).all():
            return
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        near = np.float32(float(exact)) if abs(exact) < 2**120 else None
    if near is None or not np.isfinite(got):
        return
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    best = min(abs(Fraction(float(x)) - exact) for x in around)
    assert abs(Fraction(got) - exact) == best
    ties = [x for x in around if abs(Fraction(float(x)) - exact) == best]
    if len(ties) == 2 and exact != 0:
        assert int(np.float32(got).view(np.uint32)) % 2 == 0


def test_fma_at_ties():
    """Sums that a plain float64 sum would round twice."""
    one = np.float32(1)
    c = np.float32(2.0**-24)
    tiny = np.float32(2.0**-60)
    assert arith.fma(c, one, one) == 1.0
    with_tail = np.float32(1 + 2.0**-23)
    assert arith.fma(np.float32(2.0**-24), with_tail, one) == with_tail
    assert arith.fma(tiny, tiny, with_tail) == with_tail
    a = np.float32(1 + 2.0**-12)
    got = arith.fma(a, a, np.float32(-(1 + 2.0**-11)))
    assert got == np.float32(2.0**-24)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("path", COMPILED)
def test_vectors_fuse_at_ties(path, sign):
    """Lane by lane, the second step of a dot rounds once too: up, down, and to even."""
    tail = 1 + 2.0**-23
    steps = [(2.0**-24, 1.0, 1.0), (2.0**-24, tail, 1.0), (2.0**-24, -1.0, tail),
             (2.0**-60, 2.0**-60, tail), (1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11)),
             (-(2.0**-24), tail, tail), (2.0**-24, 1 - 2.0**-24, 1.0)]  # fmt: skip
    at = compiled.ffi.from_buffer
    for a, b, c in steps:
        want = arith.fma(np.float32(sign * a), np.float32(b), np.float32(sign * c))
        for lane in range(32):
            q, k, out = np.zeros(64, np.float32), np.ones(64, np.float32), np.zeros(1, np.float32)
            q[lane], q[lane + 32], k[lane + 32] = sign * c, sign * a, b
            with compiled.use(path):
                compiled.lib.lkv_dot_rows(
                    at("float[]", q), at("float[]", k), 1, 64, at("float[]", out)
                )
            assert bits(out) == bits(want), (a, b, c, lane)


@pytest.mark.parametrize(
    "a,b,n,want",
    [(501, 502, 8, "bfda7647"), (503, 504, 32, "c0219584"), (505, 506, 80, "402f04ac"),
     (507, 508, 128, "c081ffaa")],
)  # fmt: skip
def test_dot_vectors(a, b, n, want):
    q, k = gen(a, n), gen(b, n)
    assert bits(arith.dot32(q, k)) == [want]
    at = compiled.ffi.from_buffer
    for path in COMPILED:
        out = np.full(1, np.nan, np.float32)
        with compiled.use(path):
            compiled.lib.lkv_dot_rows(
                at("float[]", arith.pad_query(q)), at("float[]", k), 1, n, at("float[]", out)
            )
        assert bits(out) == [want], path


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_dot_paths_agree(hd, n, seed):
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal(hd) * 10.0 ** rng.integers(-22, 20, hd)).astype(np.float32)
    rows = rng.standard_normal((n, hd)).astype(np.float32)
    want = arith.dot32(q[None], rows)
    at = compiled.ffi.from_buffer
    for path in COMPILED:
        out = np.full(n, np.nan, np.float32)
        with compiled.use(path):
            compiled.lib.lkv_dot_rows(
                at("float[]", arith.pad_query(q)), at("float[]", rows), n, hd, at("float[]", out)
            )
        same_bits(out, want)


@pytest.mark.parametrize(
    "hd,want",
    [(8, "3eb504f3"), (16, "3e800000"), (32, "3e3504f3"), (64, "3e000000"), (80, "3de4f92e"),
     (96, "3dd105eb"), (128, "3db504f3"), (192, "3d93cd3a"), (256, "3d800000")],
)  # fmt: skip
def test_scale_bits(hd, want):
    assert bits([default_scale(hd)]) == [want]


def test_round_away():
    x = np.array([0.5, -0.5, 2.5, -2.5, 0.49999997, 1.5, -0.0, 126.5], np.float32)
    assert bits(arith.round_away(x)) == bits([1, -1, 3, -3, 0, 2, -0.0, 127])


def test_it_works_without_the_compiled_module(tmp_path):
    """A process in which the module cannot be imported gives the same bits."""
    code = (
        "import sys; sys.modules['memra_lowlevel.native._layer_kv'] = None\n"
        "import numpy as np\n"
        "from memra_lowlevel.layer_kv import LayerKvCache, compiled\n"
        "assert compiled.available() == ('numpy',) and compiled.backend() == 'numpy'\n"
        "c = LayerKvCache(1, 40)\n"
        "x = np.arange(40, dtype=np.float32) / 37\n"
        "[c.append(x * p, -x * p) for p in range(5)]\n"
        "print(c.attend(x, 0)[0].tobytes().hex())\n"
    )
    env = {**os.environ, "CMF_KV": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    from memra_lowlevel.layer_kv import KvMode, LayerKvCache

    c = LayerKvCache(1, 40, mode=KvMode.F32)
    x = np.arange(40, dtype=np.float32) / 37
    for p in range(5):
        c.append(x * p, -x * p)
    assert c.attend(x, 0)[0].tobytes().hex() == run.stdout.strip()
