"""The oracles against golden numbers and against each other."""

import math
from fractions import Fraction

import numpy as np
import pytest

from memra_lowlevel.reference import latent as oracle

F32 = np.float32


def fill(n, offset):
    return np.array([((i + offset) * 37 % 101 - 50) / 50 for i in range(n)])


def golden_mla():
    return (
        fill(6, 0).reshape(1, 2, 3), fill(4, 7).reshape(1, 2, 2), fill(24, 13).reshape(2, 4, 3),
        fill(24, 29).reshape(2, 3, 4), fill(18, 41).reshape(3, 6),
    )  # fmt: skip


def test_absorbed_attention_has_the_golden_values():
    q_nope, q_pe, wk, wv, rows = golden_mla()
    q = oracle.absorb(q_nope, q_pe, wk)
    scores = np.einsum("ihw,tw->iht", q, rows) / math.sqrt(5)
    wanted = [
        [-0.0818616, -0.7491758, -0.0256593],
        [-0.4046496, -0.4766689, 0.0847559],
    ]
    assert np.allclose(scores[0], wanted, atol=5e-8, rtol=0)
    latent = oracle.attend(q, rows, 2, 4, 5**-0.5)
    wanted = [
        [-0.5510052, 0.1889948, 0.0978530, -0.3510052],
        [-0.4890993, 0.2509007, 0.0657324, -0.2890993],
    ]
    assert np.allclose(latent[0], wanted, atol=1e-7, rtol=0)
    wanted = [[-0.1431278, 0.7189109, -0.0570050], [0.6682334, 0.1015825, -0.2551279]]
    assert np.allclose(oracle.mla(q_nope, q_pe, wk, wv, rows, 2)[0], wanted, atol=1e-7, rtol=0)


def test_absorbed_equals_expanded():
    golden = golden_mla()
    assert np.abs(oracle.mla(*golden, 2) - oracle.mla_expanded(*golden, 2)).max() < 1e-15
    rng = np.random.default_rng(0)
    for n, heads, rank, nope, rope, d_v, keys in ((3, 4, 16, 8, 4, 8, 40), (2, 3, 8, 8, 0, 5, 9)):
        args = [
            rng.standard_normal(s)
            for s in ((n, heads, nope), (n, heads, rope), (heads, rank, nope), (heads, d_v, rank),
                      (keys, rank + rope))
        ]  # fmt: skip
        a, b = oracle.mla(*args, keys - n), oracle.mla_expanded(*args, keys - n)
        assert np.abs(a - b).max() < 1e-13


def test_the_scale_is_that_of_the_original_head():
    q_nope, q_pe, wk, _, rows = golden_mla()
    wrong = oracle.attend(oracle.absorb(q_nope, q_pe, wk), rows, 2, 4, 6**-0.5)
    right = oracle.attend(oracle.absorb(q_nope, q_pe, wk), rows, 2, 4, 5**-0.5)
    assert np.abs(wrong - right).max() > 1e-3


def test_pool_key_has_the_golden_values():
    k, gate = np.array([[1.0, 2], [3, -1]]), np.array([[0, 1], [math.log(3), 1]])
    ape = np.array([[0, 0.5], [0, -0.5]])
    rows = np.concatenate([k, gate], 1)
    assert np.allclose(oracle.pool_keys(rows, ape, 2), [[2.5, 1.1931757]], atol=5e-8)
    assert len(oracle.pool_keys(rows, ape[:1], 1)) == 2
    assert len(oracle.pool_keys(np.concatenate([rows, rows[:1]]), ape, 2)) == 1


def test_scores_have_the_golden_values():
    q = np.array([[[1, 0, -1, 2], [0.5, 0.5, 0.5, 0.5]]], F32)
    keys = np.array([[1, 1, 0, 0], [-1, 0, 1, -1], [0, 0, 0, 2]], F32)
    got = oracle.scores(q, np.array([[1, -2]], F32), keys, 100, 4)
    assert np.allclose(got, [[-0.3535534, 0, 0.7071068]], atol=5e-8)


def test_scores_are_masked_by_whole_pools():
    keys = np.ones((5, 2), F32)
    got = oracle.scores(np.ones((6, 1, 2), F32), np.ones((6, 1), F32), keys, 6, 4)
    assert [int(np.isfinite(row).sum()) for row in got] == [1, 2, 2, 2, 2, 3]


def test_the_fused_multiply_add_rounds_once():
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(4000).astype(F32) for _ in range(2))
    c = -(a.astype(float) * b) * (1 + rng.standard_normal(4000) * 2.0 ** -rng.integers(1, 60, 4000))
    c = c.astype(F32)
    c[:500] *= F32(2.0**-30)
    got = oracle._fma(a, b, c)
    naive = (a * b) + c
    assert (got != naive).any()
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        low, high = np.nextafter(r, F32(-np.inf)), np.nextafter(r, F32(np.inf))
        for other in (low, high):
            near = abs(exact - Fraction(float(r)))
            far = abs(exact - Fraction(float(other)))
            assert near < far or (near == far and int(r.view(np.uint32)) % 2 == 0)


SELECTIONS = [
    ([0.5, 0, 0.5, 0.25, -0.0, 1, 0.5, 9], 12, 30,
     [*range(4), *range(8, 12), *range(20, 24), 28, 29, -1]),
    ([0.0] * 8, 8, 31, [*range(8), 28, 29, 30]),
    ([3, 1], 8, 3, [0, 1, 2] + [-1] * 8),
    ([], 8, 3, [0, 1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("scores", "top_k", "visible", "rows"), SELECTIONS)
def test_selections_have_the_golden_rows(scores, top_k, visible, rows):
    got = oracle.select(np.array(scores, F32), visible, top_k, 4)
    assert got.dtype == np.int32 and got.tolist() == rows


def test_scores_that_are_not_finite_are_never_chosen():
    got = oracle.select(np.array([np.nan, -np.inf, np.inf, -3.0], F32), 16, 16, 4)
    assert got.tolist() == [12, 13, 14, 15] + [-1] * 15


def test_latent_rows_are_normalised_and_rotated():
    raw = np.random.default_rng(2).standard_normal((3, 10))
    table = oracle.angles(9, 4)
    got = oracle.latent_rows(raw, np.full(6, 2.0), table, 5, eps=0.0)
    assert np.allclose((got[:, :6] ** 2).mean(1), 4)
    assert np.allclose((got[:, 6:] ** 2).sum(1), (raw[:, 6:] ** 2).sum(1))
    z = (raw[1, 8] + 1j * raw[1, 9]) * np.exp(1j * 6 * 10000.0**-0.5)
    assert np.allclose([got[1, 8], got[1, 9]], [z.real, z.imag])
