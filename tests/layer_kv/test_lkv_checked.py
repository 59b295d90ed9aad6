"""Check mode: the layer cache's kernels are clean in every order of threads."""

from __future__ import annotations

import numpy as np
import pytest
from lkv_data import gen

from memra_lowlevel.driver.host import runner

F32, I32 = np.float32, np.int32
SOURCES = ("exact", "states")


def nans(*shape):
    return np.full(shape, np.nan, F32)


def f(salt, *shape):
    return gen(salt, int(np.prod(shape))).reshape(shape)


def one(*values):
    return np.array(values, I32)


def run_append(source, order):
    nkv, hd, cap = 2, 40, 4
    kq, vq = np.full((2, nkv, cap, hd), 99, np.int8)
    ks, vs = nans(nkv, cap, 2), nans(nkv, cap)
    col, on = np.abs(f(3, nkv, hd)) + F32(0.1), np.array([1, 0], np.uint8)
    kernel = runner.quick(source, "lkv_append", check=True)
    kernel(
        (nkv, 2), 128, 4 * (hd + 2),
        f(1, nkv, hd), f(2, nkv, hd), None, None, kq, vq, ks, vs, col, col.copy(), on, on.copy(),
        one(1), I32(hd), I32(cap), order=order, seed=3,
    )  # fmt: skip
    assert (kq[:, 1] != 99).all() and (kq[:, 0] == 99).all() and np.isfinite(vs[:, 1]).all()
    k, v = nans(2, nkv, cap, hd)
    kernel(
        (nkv, 2), 128, 4 * (hd + 2),
        f(1, nkv, hd), f(2, nkv, hd), k, v, None, None, None, None, None, None, None, None,
        one(3), I32(hd), I32(cap), order=order, seed=3,
    )  # fmt: skip
    assert np.isfinite(k[:, 3]).all() and np.isnan(k[:, :3]).all()


def run_scores(source, order):
    nkv, hpk, hd, cap, rows = 2, 3, 40, 80, 70
    scores = nans(nkv * hpk, cap)
    q, k = f(1, nkv * hpk, hd), nans(nkv, cap, hd)
    k[:, :rows] = f(2, nkv, rows, hd)
    runner.quick(source, "lkv_scores", check=True)(
        (-(-cap // 32), nkv), 256, 4 * (32 * (hd + 1) + hpk * hd),
        q, k, None, None, None, None, one(rows), scores, I32(hd), I32(hpk), I32(cap), I32(50),
        F32(0.2), F32(30), order=order, seed=3,
    )  # fmt: skip
    assert np.isfinite(scores[:, 20:70]).all() and np.isnan(scores[:, :20]).all()
    v = nans(nkv, cap, hd)
    v[:, :rows] = f(4, nkv, rows, hd)
    return scores, v


def run_values(source, scores, v, order):
    nkv, cap, hd = v.shape
    heads, imp = scores.shape[0], np.zeros(cap, F32)
    out, probs = nans(heads, hd), scores.copy()
    runner.quick(source, "lkv_values", check=True)(
        heads, 128, 0,
        probs, v, None, None, None, None, f(5, heads), one(70), out, I32(hd), I32(heads // nkv),
        I32(cap), I32(50), order=order, seed=3,
    )  # fmt: skip
    runner.quick(source, "lkv_importance", check=True)(
        1, 128, 0, probs, one(70), imp, I32(heads), I32(cap), I32(50), order=order, seed=3
    )
    assert np.isfinite(out).all() and imp[20:70].all() and not imp[:20].any()


def run_ring(source, order, seen=9):
    nkv, hpk, hd, window, n_sinks, half = 2, 2, 40, 6, 2, 16
    ring_k, ring_v = f(1, nkv, window, hd), f(2, nkv, window, hd)
    sinks = f(3, 2, nkv, n_sinks, hd)
    table = f(4, 2, window, half)
    out = nans(nkv * hpk, hd)
    runner.quick(source, "lkv_ring_step", check=True)(
        nkv, 160, 4 * hd,
        ring_k, ring_v, one(seen), sinks[0].copy(), sinks[1].copy(), table[0].copy(),
        table[1].copy(), f(5, nkv * hpk, hd), f(6, nkv, hd), f(7, nkv, hd), out, I32(hd), I32(hpk),
        I32(window), I32(n_sinks), I32(half), F32(0.2), order=order, seed=3,
    )  # fmt: skip
    assert np.isfinite(out).all()


def run_phase(source, order):
    nh, width, dv = 2, 6, 130
    for delta in (0, 1):
        features = np.abs(gen(1, 3 * nh * width)).astype(np.float64).reshape(3, nh, width)
        out = nans(nh, dv)
        runner.quick(source, "lkv_phase", check=True)(
            nh, 128, 0,
            *(x.copy() for x in features), f(4, nh, dv), f(5, nh), f(6, nh, width, dv), out,
            I32(width), I32(dv), I32(delta), order=order, seed=3,
        )  # fmt: skip
        assert np.isfinite(out).all()


def run_far(source, order):
    groups, hpk, m, w, sink, d, dv = 2, 2, 4, 5, 1, 40, 36
    heads = groups * hpk
    win_k, win_v = f(1, groups, w, d), f(2, groups, w, dv)
    mu, z, t = f(3, heads, m), np.abs(f(4, heads, m)), f(5, heads, m, dv)
    book = one(w, 2, 7)
    runner.quick(source, "lkv_far_absorb", check=True)(
        heads, 128, 12 * m,
        win_k, win_v, f(6, heads, m, d), book, mu, z, t, I32(hpk), I32(m), I32(w), I32(d), I32(dv),
        F32(0.2), order=order, seed=3,
    )  # fmt: skip
    runner.quick(source, "lkv_far_push", check=True)(
        groups, 128, 0,
        win_k, win_v, f(7, groups, d), f(8, groups, dv), book, I32(w), I32(d), I32(dv),
        order=order, seed=3,
    )  # fmt: skip
    out = nans(heads, dv)
    runner.quick(source, "lkv_far_attend", check=True)(
        heads, 128, 4 * (sink + w + 2 * m),
        f(9, heads, d), win_k, win_v, f(10, groups, sink, d), f(11, groups, sink, dv),
        f(12, groups, m, d), f(13, heads, m, m), f(14, heads), mu, z, t, book, out, I32(hpk),
        I32(m), I32(w), I32(sink), I32(d), I32(dv), F32(0.2), I32(1), order=order, seed=3,
    )  # fmt: skip
    runner.quick(source, "lkv_far_book", check=True)(1, 1, 0, book, I32(w), order=order)
    assert np.isfinite(out).all() and book.tolist() == [w, 3, 8]


def run(name, source, order):
    if name == "exact":
        run_append(source, order)
        run_values(source, *run_scores(source, order), order)
    else:
        run_ring(source, order)
        run_phase(source, order)
        run_far(source, order)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("name", SOURCES)
def test_kernels_are_clean(name, order):
    run(name, f"layer_kv/{name}.cu", order)
