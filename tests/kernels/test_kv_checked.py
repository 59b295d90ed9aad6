"""Check mode: the kernels of planes are clean in every order of threads."""

import numpy as np
import pytest
from rig import normal

from memra_lowlevel.driver.host import runner
from memra_lowlevel.formats import FORMATS, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend_simt

I32, F32 = np.int32, np.float32
PARTIAL = "attend_partial<Q8_0, Q5_1, {d}, {d}, {queries}>"


def run_partial(
    source, d=64, queries=4, n=2, group=2, length=150, window=0, order="forward", n_blocks=1,
    joined=None, settled=False, **how
):  # fmt: skip
    """The first kernel over a plane of 1 kv head, whose last rows are never written.

    With an array ``joined`` of the results its blocks join the chunks too.
    """
    rng = np.random.default_rng(0)
    used = length + n
    k, v = Q8_0.encode(normal(rng, used, d)), Q5_1.encode(normal(rng, used, d))
    q = normal(rng, n, group, d)
    slots = kv_attend_simt.n_slots(used, n, window, False)
    partial = np.full((n, group, slots, d + 2), np.nan, F32)
    tickets = None if joined is None else np.zeros(-(-n * group // queries), np.uint32)
    how = how or {"check": True}
    kernel = runner.quick(source, PARTIAL.format(d=d, queries=queries), **how)
    kernel(
        (n_blocks, 1, -(-n * group // queries)), kv_attend_simt.THREADS,
        kv_attend_simt.shared_bytes(d, d, queries),
        q, k, v, I32(n), I32(1), I32(group), I32(used), I32(window), I32(0), F32(d**-0.5), F32(0),
        np.array([length], I32), None, None, partial, I32(slots), tickets, np.zeros(group, F32),
        joined, None, I32(settled), order=order, seed=3,
    )  # fmt: skip
    assert tickets is None or not tickets.any()
    return partial, length


def run_combine(source, partial, length, window=0, order="forward", **how):
    n, heads, slots, width = partial.shape
    out, lse = np.full((n, heads, width - 2), np.nan, F32), np.full((n, heads), np.nan, F32)
    how = how or {"check": True}
    kernel = runner.quick(source, f"attend_combine<{width - 2}>", **how)
    kernel(
        (heads, n), 2 * (width - 2), 0,
        partial, np.zeros(heads, F32), out, lse, I32(length + n), I32(window), I32(0),
        np.array([length], I32), None, None, I32(slots), order=order, seed=3,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize(("d", "queries", "n", "group"), [(64, 4, 2, 2), (128, 16, 5, 3)])
def test_attention_is_clean(d, queries, n, group, order):
    options = {"window": 70, "order": order}
    partial, length = run_partial("kv/attend.cu", d, queries, n, group, **options)
    apart = run_combine("kv/attend.cu", partial, length, **options)
    assert np.isfinite(apart).all()
    joined = np.full_like(apart, np.nan)
    run_partial("kv/attend.cu", d, queries, n, group, n_blocks=3, joined=joined, **options)
    assert np.array_equal(joined, apart)
    early = np.full_like(apart, np.nan)
    options |= {"n_blocks": 3, "joined": early, "settled": True}
    run_partial("kv/attend.cu", d, queries, n, group, **options)
    assert np.array_equal(early, apart)


def run_append(fmt, x, source="kv/append.cu", order="random", few=False, **how):
    """Append n rows behind the first of a plane; returns the rows, of K and V.

    ``few`` takes the kernel of few rows.
    """
    n, width = x.shape
    planes = [np.full((n + 2, fmt.row_bytes(width)), 0xFF, np.uint8) for _ in range(2)]
    name = "append_few" if few else "append_kv"
    kernel = runner.quick(source, f"{name}<{fmt.constant}, {fmt.constant}>", **how)
    grid, shape = (-(-width // 512), -(-n // 2), 2), (I32(n), I32(2))
    if few:
        grid, shape = (-(-width // 128), n, 2), ()
    kernel(
        grid, 32, 0,
        x, x.copy(), *planes, *shape, I32(width), I32(width), I32(n + 2),
        np.array([1], I32), None, None, np.zeros(2, I32), order=order,
    )  # fmt: skip
    assert all((plane[[0, -1]] == 0xFF).all() for plane in planes)
    return [plane[1:-1] for plane in planes]


LANES = {"BLOCK32_LANES": "1"}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("width", [96, 544])
def test_append_is_clean(fmt, width):
    x = normal(np.random.default_rng(0), 3, width)
    for defines in ({}, LANES):
        for few in (False, True):
            for rows in run_append(fmt, x, few=few, check=True, defines=defines):
                assert np.array_equal(rows, fmt.encode(x))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_append_has_no_undefined_behaviour(fmt):
    x = normal(np.random.default_rng(0), 3, 96)
    x[1, 3], x[2, 5], x[0, 40] = np.nan, 3e38, -np.inf
    for few in (False, True):
        for rows in run_append(fmt, x, few=few, sanitize="undefined"):
            assert np.array_equal(rows, fmt.encode(x, check=False))


def hard_blocks(n):
    """Blocks with ties, equal extremes, zeros of both signs, tiny and huge scales, no numbers."""
    rng = np.random.default_rng(2)
    blocks = normal(rng, n, 9, 32)
    blocks[:, 1] = rng.integers(-254, 255, (n, 32)) / 2
    blocks[:, 1, rng.integers(32)] = 127
    blocks[:, 2] = rng.integers(0, 63, (n, 32)) / 2
    blocks[:, 2, 0], blocks[:, 2, 17] = 0, 31
    blocks[:, 3] = rng.integers(-32, 33, (n, 32)) / 4
    blocks[:, 4] = rng.choice([0.0, -0.0, 1.0, -1.0], (n, 32), p=[0.45, 0.45, 0.05, 0.05])
    blocks[:, 5] = rng.choice([0.0, -0.0], (n, 32))
    blocks[:, 6] *= np.exp2(rng.integers(-145, 126, (n, 1)).astype(F32))
    blocks[:, 7] = np.nextafter(np.float32(0.5), rng.choice([0, 1], (n, 32)).astype(F32))
    blocks[:, 7, 5] = 127
    bad = rng.choice(np.array([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38], F32), n)
    blocks[np.arange(n), 8, rng.integers(0, 32, n)] = bad
    return blocks.reshape(n, -1)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_lanes_that_ask_each_other_find_what_one_reads(fmt):
    """The body of the GPU, run here: questions, bytes without conversions, rare branches."""
    x = hard_blocks(150)
    for few in (False, True):
        for rows in run_append(fmt, x, few=few, defines=LANES):
            assert np.array_equal(rows, fmt.encode(x, check=False))


def test_attention_has_no_undefined_behaviour():
    for d in (96, 128):
        partial, length = run_partial("kv/attend.cu", d, 16, 5, 3, sanitize="undefined")
        out = run_combine("kv/attend.cu", partial, length, sanitize="undefined")
        assert np.isfinite(out).all()
