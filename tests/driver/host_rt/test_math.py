"""Intrinsics with a GPU's meaning: bit tricks, saturation, NaN, fusion, rounding."""

from __future__ import annotations

import numpy as np
import pytest

F32 = np.float32
SPECIAL = np.array(
    [0.0, -0.0, 1.5, -2.5, 0.5, 2.5, 3.5, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3e38,
     2147483647.0, 2147483648.0, -2147483648.0, -2147483904.0,
     4294967040.0, 4294967296.0, 16777217.0],
    F32,
)  # fmt: skip


def apply(kernel, expression, out_type, *columns, declare=""):
    """Run ``expression`` over a, b, c (one thread per element)."""
    names = "abc"[: len(columns)]
    types = {"float32": "float", "int32": "int", "uint32": "unsigned", "uint64": "uint64_t",
             "int64": "int64_t", "float64": "double"}  # fmt: skip
    parameters = "".join(
        f"const {types[c.dtype.name]}* {n}_, " for n, c in zip(names, columns, strict=True)
    )
    reads = "".join(f"const auto {n} = {n}_[i]; " for n in names)
    body = (
        f"{declare}\nKERNEL void apply({parameters}{types[np.dtype(out_type).name]}* out, "
        f"int n) {{"
        f"  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n"
        f"  {reads}out[i] = {expression};\n}}\n"
    )
    n = columns[0].size
    out = np.full(n, 0x5A, out_type)
    kernel(body, "apply")((n + 255) // 256, 256, 0, *columns, out, np.int32(n))
    return out


@pytest.fixture
def words():
    rng = np.random.default_rng(3)
    edges = np.array(
        [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FF00FF, 0x12345678], np.uint32
    )
    many = rng.integers(0, 1 << 32, 4000, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([edges, many])


def test_integer_intrinsics(kernel, words):
    a, b = words, np.roll(words, 7)
    text = [format(int(v), "032b") for v in a]
    assert list(apply(kernel, "__popc(a)", np.int32, a)) == [t.count("1") for t in text]
    clz = [len(t) - len(t.lstrip("0")) for t in text]
    assert list(apply(kernel, "__clz(int(a))", np.int32, a)) == clz
    ffs = [t[::-1].find("1") + 1 for t in text]
    assert list(apply(kernel, "__ffs(int(a))", np.int32, a)) == ffs
    assert list(apply(kernel, "__brev(a)", np.uint32, a)) == [int(t[::-1], 2) for t in text]
    wide = a.astype(np.uint64) * b
    np.testing.assert_array_equal(apply(kernel, "__umulhi(a, b)", np.uint32, a, b), wide >> 32)
    signed = (a.view(np.int32).astype(np.int64) * b.view(np.int32)) >> 32
    got = apply(kernel, "__mulhi(a, b)", np.int32, a.view(np.int32), b.view(np.int32))
    np.testing.assert_array_equal(got, signed)
    both = (b.astype(np.uint64) << 32) | a
    for shift in (0, 1, 31, 33):
        got = apply(kernel, f"__funnelshift_r(a, b, {shift})", np.uint32, a, b)
        np.testing.assert_array_equal(got, (both >> np.uint64(shift & 31)).astype(np.uint32))
        got = apply(kernel, f"__funnelshift_l(a, b, {shift})", np.uint32, a, b)
        want = ((both << np.uint64(shift & 31)) >> np.uint64(32)).astype(np.uint32)
        np.testing.assert_array_equal(got, want)
    eight = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], axis=1)
    got = apply(kernel, "__byte_perm(a, b, 0x7a30)", np.uint32, a, b).view(np.uint8).reshape(-1, 4)
    want = np.stack([eight[:, 0], eight[:, 3], eight[:, 2], eight[:, 7]], 1)
    np.testing.assert_array_equal(got, want)  # a pick's highest bit is ignored, as by NVRTC


def test_dp4a(kernel, words):
    a, b, c = words, np.roll(words, 3), np.roll(words, 5)
    bytes_of = lambda w, t: w[:, None].view(t).astype(np.int64)  # noqa: E731
    want = (bytes_of(a, np.int8) * bytes_of(b, np.int8)).sum(1) + c.view(np.int32)
    got = apply(kernel, "__dp4a(a, b, c)", np.int32, *(w.view(np.int32) for w in (a, b, c)))
    np.testing.assert_array_equal(got, want.astype(np.int32))  # wraps
    want = (bytes_of(a, np.uint8) * bytes_of(b, np.uint8)).sum(1) + c
    got = apply(kernel, "__dp4a(a, b, c)", np.uint32, a, b, c)
    np.testing.assert_array_equal(got, want.astype(np.uint32))


def test_conversions_saturate_and_nan_is_zero(kernel, words):
    x = np.concatenate([SPECIAL, words.view(F32)])
    with np.errstate(invalid="ignore"):
        for name, rounding in (
            ("rn", np.rint),
            ("rz", np.trunc),
            ("rd", np.floor),
            ("ru", np.ceil),
        ):
            got = apply(kernel, f"__float2int_{name}(a)", np.int32, x)
            want = np.nan_to_num(
                np.clip(rounding(x.astype(float)), -(2.0**31), 2.0**31 - 1), nan=0.0
            )
            np.testing.assert_array_equal(got, want.astype(np.int64))
        for name, rounding in (("rn", np.rint), ("rz", np.trunc)):
            got = apply(kernel, f"__float2uint_{name}(a)", np.uint32, x)
            want = np.nan_to_num(np.clip(rounding(x.astype(float)), 0, 2.0**32 - 1), nan=0.0)
            np.testing.assert_array_equal(got, want.astype(np.int64))


def test_nan_loses_in_minimum_and_maximum(kernel):
    a, b = (m.ravel() for m in np.meshgrid(SPECIAL, SPECIAL))
    keep = ~((a == 0) & (b == 0))  # which zero is not specified
    a, b = a[keep], b[keep]
    for name, want in (("fminf", np.fmin), ("min", np.fmin), ("fmaxf", np.fmax), ("max", np.fmax)):
        np.testing.assert_array_equal(apply(kernel, f"{name}(a, b)", F32, a, b), want(a, b))


def test_mixed_minimum_and_maximum(kernel, words):
    a, b = words, np.roll(words, 1).view(np.int32)
    np.testing.assert_array_equal(
        apply(kernel, "max(a, b)", np.uint32, a, b), np.maximum(a, b.view(np.uint32))
    )
    wide = np.array([-5, 3, 1 << 40], np.int64)
    np.testing.assert_array_equal(apply(kernel, "min(a, int64_t(7))", np.int64, wide), [-5, 3, 7])
    np.testing.assert_array_equal(apply(kernel, "abs(a)", np.int32, b[:99]), np.abs(b[:99]))


def test_nothing_is_fused_but_fmaf(kernel):
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(20000).astype(F32) for _ in range(3))
    c = (-(a.astype(float) * b) * (1 + 1e-7 * rng.standard_normal(20000))).astype(F32)
    apart = (a * b) + c
    exact = a.astype(np.longdouble) * b + c
    np.testing.assert_array_equal(apply(kernel, "a * b + c", F32, a, b, c), apart)
    np.testing.assert_array_equal(apply(kernel, "c + __fmul_rn(a, b)", F32, a, b, c), apart)
    fused = apply(kernel, "fmaf(a, b, c)", F32, a, b, c)
    np.testing.assert_array_equal(fused, exact.astype(F32))
    np.testing.assert_array_equal(apply(kernel, "__fmaf_rn(a, b, c)", F32, a, b, c), fused)
    assert (fused != apart).sum() > 10000


def test_fmaf_is_right_without_the_instruction(kernel, monkeypatch):
    from memra_lowlevel.driver.host import cxx

    monkeypatch.setattr(cxx, "cpu_flags", lambda: ())
    test_nothing_is_fused_but_fmaf(kernel)


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("sqrtf(a)", np.sqrt), ("__fsqrt_rn(a)", np.sqrt), ("1.f / a", lambda x: F32(1) / x),
        ("fabsf(a)", np.abs), ("floorf(a)", np.floor), ("ceilf(a)", np.ceil),
        ("truncf(a)", np.trunc),
        ("rintf(a)", np.rint), ("copysignf(3.f, a)", lambda x: np.copysign(F32(3), x)),
        ("__uint_as_float(__float_as_uint(a))", lambda x: x),
        ("__saturatef(a)", lambda x: np.where(np.isnan(x), F32(0), np.clip(x, 0, 1))),
        ("a == a ? float(isinf(a)) : -1.f", lambda x: np.where(np.isnan(x), F32(-1), np.isinf(x))),
    ],
)  # fmt: skip
def test_exact_functions(kernel, words, expression, want):
    x = np.concatenate([SPECIAL, words.view(F32)])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(apply(kernel, expression, F32, x), want(x))


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("expf(a)", np.exp), ("__expf(a)", np.exp), ("exp2f(a)", np.exp2), ("logf(a)", np.log),
        ("sinf(a)", np.sin), ("cosf(a)", np.cos), ("tanhf(a)", np.tanh),
        ("rsqrtf(a)", lambda x: 1 / np.sqrt(x)), ("powf(a, 1.5f)", lambda x: x**1.5),
    ],
)  # fmt: skip
def test_transcendental_functions(kernel, expression, want):
    x = np.random.default_rng(2).uniform(0.01, 20, 5000).astype(F32)
    got = apply(kernel, expression, F32, x)
    np.testing.assert_allclose(got, want(x.astype(float)), rtol=3e-7, atol=1e-7)


def test_constants(kernel):
    x = np.zeros(1, F32)
    assert np.isposinf(apply(kernel, "a + INF_F32", F32, x))[0]
    assert np.isnan(apply(kernel, "a + NAN_F32", F32, x))[0]
