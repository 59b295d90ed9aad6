"""Exact attention: vectors, the bit-identity laws, edges, refusals."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import (
    MODES,
    SCALE,
    bits,
    close,
    fill,
    gen,
    numbers,
    poisoned,
    refused,
    same_bits,
    softmax64,
    state_of,
)  # fmt: skip

from memra_lowlevel.errors import KvShapeError, KvStateError
from memra_lowlevel.layer_kv import KvMode, LayerKvCache, attention_head, compiled
from memra_lowlevel.layer_kv.arith import dot32, exp, fma, tanh, total
from memra_lowlevel.layer_kv.attend import default_scale

F32 = KvMode.F32


def small() -> LayerKvCache:
    c = LayerKvCache(1, 4, mode=F32)
    k = [(1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]
    v = [(1, 2, 3, 4), (10, 20, 30, 40), (-1, 0, 1, 0)]
    for a, b in zip(k, v, strict=True):
        c.append(np.array(a, np.float32), np.array(b, np.float32))
    return c


Q = np.array([2, 0, 0, 0], np.float32)


def group(c: LayerKvCache, q: Any, h: int = 0, **kw: Any) -> tuple[np.ndarray, np.ndarray]:
    out = poisoned(np.size(q))
    imp = np.zeros(c.seq_len, np.float32)
    c.attend_group_upto(q, h, out, imp, **kw)
    return out, imp


@pytest.mark.parametrize(
    "kw,probs,out",
    [
        ({}, "0.422318798 0.155362403 0.422318798",
         "1.553624035 3.951885666 6.350147298 7.903771333"),
        ({"sinks": [0.0]}, "0.365529289 0.134470711 0.365529289",
         "1.344707107 3.420472792 5.496238478 6.840945585"),
        ({"sinks": [3.0]}, "0.102491197 0.037704404 0.102491197",
         "0.377044042 0.959070477 1.541096912 1.918140954"),
        ({"softcap": 1.0}, "0.405363529 0.189272942 0.405363529",
         "1.89272942 4.596185898 7.299642377 9.192371797"),
        ({"softcap": 1.0, "sinks": [2.0]}, "0.16900369 0.078911455 0.16900369",
         "0.789114546 1.916236472 3.043358399 3.832472944"),
        ({"first": 1}, "0 0.268941421 0.731058579",
         "1.958355635 5.378828427 8.79930122 10.757656855"),
        ({"first": 2}, "0 0 1", "-1 0 1 0"),
        ({"first": 9}, "0 0 1", "-1 0 1 0"),
        ({"upto": 2}, "0.731058579 0.268941421 0",
         "3.420472792 6.840945585 10.261418377 13.681891169"),
        ({"upto": 2, "first": 5}, "0 1 0", "10 20 30 40"),
        ({"upto": 0}, "0 0 0", "0 0 0 0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", compiled.available())
def test_small_vectors(path, kw, probs, out):
    with compiled.use(path):
        got, imp = group(small(), Q, scale=0.5, **kw)
    # outputs up to 13 carry the probabilities' error times the largest value
    close(got, out, 2e-6 * max(1.0, np.abs(numbers(out)).max()))
    close(imp, probs)


def group_case() -> tuple[LayerKvCache, np.ndarray, np.ndarray]:
    c = LayerKvCache(2, 8, mode=F32)
    for r in range(9):
        c.append(gen(1000 + r, 16), gen(2000 + r, 16))
    return c, gen(3000, 48, 1.5), np.array([0.7, -1.3, 2.5, 0, -4, 6], np.float32)


def test_group_vectors():
    c, q, sinks = group_case()
    s = float(default_scale(8))
    out, imp = group(c, q[:24], 0, scale=s, upto=9, sinks=sinks[:3])
    close(
        out[:8],
        "0.229971636 -0.083730927 -0.151769316 0.079519003 -0.248349598 -0.006720902 "
        "-0.389274713 -0.057060963",
    )
    close(
        imp,
        "0.32023802 0.16840352 0.19888721 0.25820166 0.29658514 0.24787472 0.27774638 0.3079638 "
        "0.27769604",
    )
    _, one = group(c, q[:8], 0, scale=s, sinks=sinks[:1])
    close(
        one,
        "0.149829007 0.046844966 0.072126451 0.088155847 0.092100247 0.054714655 0.104980937 "
        "0.136872605 0.104380357",
    )
    close([one.sum(dtype=np.float64)], "0.850005072")
    out, imp = group(c, q[40:], 1, scale=s, sinks=sinks[5:])
    close([imp.sum(dtype=np.float64)], "0.019478757")
    close(
        out,
        "0.006425766 -0.00076971 -0.001815544 0.000384955 0.002456196 0.006779392 0.002905523 "
        "-0.003867967",
    )
    out, imp = group(c, q[16:24], 0, scale=s, upto=5, first=2, sinks=sinks[2:3])
    close(imp[2:5], "0.117054634 0.054517554 0.043437337")
    assert imp[[0, 1, 5, 6, 7, 8]].tolist() == [0] * 6
    close(
        out,
        "0.105742432 -0.090485765 -0.093433991 -0.071846237 -0.171928261 -0.039283607 0.006186313 "
        "-0.078710554",
    )


@pytest.mark.parametrize("mode", [F32, KvMode.Q8()])
def test_group_equals_the_head_loop(mode):
    c = LayerKvCache(2, 32, mode=mode)
    for p in range(70):
        c.append(gen(4000 + p, 64), gen(5000 + p, 64))
    q = gen(6000, 192)
    for h in range(2):
        out, imp = group(c, q[96 * h : 96 * h + 96], h)
        want_imp = np.zeros(70, np.float32)
        for i in range(3):
            o, p = c.attend(q[96 * h + 32 * i : 96 * h + 32 * i + 32], h)
            same_bits(out[32 * i : 32 * i + 32], o)
            want_imp += p
        same_bits(imp, want_imp)
        if mode is F32 and h == 1:
            close(out[64:68], "0.131786296 0.002184214 0.03777036 0.060535725")
            close(imp[[0, 1, 69]], "0.0540834 0.0444397 0.0440632")
            close([imp.sum(dtype=np.float64)], "3", 1e-5)


def test_skip_threshold():
    c = LayerKvCache(1, 1, mode=F32)
    for k, v in ((0, 1), (-27.7, 1e12), (-27.6, 1e12)):
        c.append(np.array([k], np.float32), np.array([v], np.float32))
    out, probs = c.attend(np.array([1], np.float32), 0)
    assert 9e-13 < probs[1] < 1e-12 < probs[2]
    close(out, "2.0315", 1e-4)


# -- the laws -----------------------------------------------------------------------------------


def naive(
    c: LayerKvCache, q: np.ndarray, h: int, rows: int, first: int, scale: Any, softcap: float,
    sink: float | None, mask: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Score every row and mask with -inf, one query; the definition written again from scratch."""
    s, hd = c._stores, c.head_dim
    if s.k_q8:
        qc = q * s.kcol[h] if s.kcol_on[h] else q
        score = np.zeros(rows, np.float32)
        for g in range(s.groups):
            b = slice(32 * g, min(32 * g + 32, hd))
            score += dot32(qc[b], s.kq[h, :rows, b].astype(np.float32)) * s.ks[h, :rows, g]
        score = score * scale
    else:
        score = dot32(q, s.k[h, :rows]) * scale
    if softcap > 0:
        score = np.float32(softcap) * tanh(score / np.float32(softcap))
    start = min(first, rows - 1)
    if mask:
        score[:start] = -np.inf
    else:
        score = score[start:]
    m = score.max() if sink is None else max(score.max(), np.float32(sink))
    e = exp(score - m)
    z = total(e[None])[0]
    if sink is not None:
        z = z + exp(np.float32(sink) - m)
    p = e / z
    offset = 0 if mask else start
    acc = np.zeros(hd, np.float32)
    for i, w in enumerate(p):
        w = w * s.vs[h, i + offset] if s.v_q8 else w
        if not abs(w) < np.float32(1e-12):
            acc = fma(w, (s.vq if s.v_q8 else s.v)[h, i + offset].astype(np.float32), acc)
    if s.v_q8 and s.vcol_on[h]:
        acc = acc * s.vcol[h]
    return acc, np.concatenate([np.zeros(offset, np.float32), p])


@pytest.mark.parametrize("path", compiled.available())
@pytest.mark.parametrize("mode", MODES)
def test_groups_of_every_size(path, mode):
    """Queries share registers and tiles by their number; light weights lie in some tiles only."""
    hd, rows, largest = 72, 83, 9
    c = LayerKvCache(1, hd, mode=mode)
    for p in range(rows):
        # keys of rows 40 to 55 face away: their weights fall below 1e-12
        c.append(gen(2 * p, hd) - np.float32(9 * (40 <= p < 56)), gen(2 * p + 1, hd))
    q = gen(77, largest * hd) + np.float32(1)
    with compiled.use("numpy"):
        want = [group(c, q[: n * hd]) for n in range(1, largest + 1)]
    light = want[0][1][40:56]
    assert (light < 1e-12).all() and (want[0][1][:40] > 1e-12).all()
    with compiled.use(path):
        for n, (out, imp) in enumerate(want, 1):
            got, seen = group(c, q[: n * hd])
            same_bits(got, out)
            same_bits(seen, imp)
            alone = [c.attend(q[i * hd : (i + 1) * hd], 0)[0] for i in range(n)]
            same_bits(got, np.concatenate(alone))


@settings(max_examples=int(150 * SCALE), deadline=None)
@given(st.data())
def test_laws(data):
    """Group = head loop = masked full rows = NumPy = every instruction set, bit for bit."""
    draw = data.draw
    nkv, hpk = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    hd = draw(st.sampled_from([1, 4, 16, 31, 32, 33, 64, 80, 130]))
    rows = draw(st.integers(1, 75))
    mode = draw(st.sampled_from(MODES))
    softcap = draw(st.sampled_from([0.0, 1.0, 30.0]))
    first = draw(st.integers(0, 80))
    with_sinks = draw(st.booleans())
    amp = draw(st.sampled_from([0.1, 1.0, 6.0]))
    alive = [True] * nkv
    alive[draw(st.integers(0, nkv - 1))] = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    c = LayerKvCache(nkv, hd, mode=mode)
    for _ in range(rows):
        k, v = (rng.standard_normal((2, nkv * hd)) * amp).astype(np.float32)
        c.append(k, v, alive)
    upto = draw(st.one_of(st.none(), st.integers(1, rows + 5)))
    q = (rng.standard_normal((hpk, hd)) * amp).astype(np.float32)
    sinks = (rng.standard_normal(hpk) * 3).astype(np.float32) if with_sinks else None
    scale = draw(st.sampled_from([None, 0.37]))
    kw = {"scale": scale, "first": first, "softcap": softcap, "upto": upto, "sinks": sinks}
    for h in range(nkv):
        out, imp = group(c, q, h, **kw)
        for path in compiled.available():
            with compiled.use(path):
                o2, i2 = group(c, q, h, **kw)
            same_bits(out, o2)
            same_bits(imp, i2)
        want_imp = np.zeros(c.seq_len, np.float32)
        seen = min(c.head_len(h), rows if upto is None else upto)
        factor = default_scale(hd) if scale is None else np.float32(scale)
        for i in range(hpk):
            if not seen:
                assert out.tolist() == [0.0] * out.size
                continue
            sink = None if sinks is None else float(sinks[i])
            for mask in (False, True):
                o, p = naive(c, q[i], h, seen, first, factor, softcap, sink, mask)
                same_bits(out[hd * i : hd * i + hd], o)
            want_imp[:seen] += p
        same_bits(imp, want_imp)


@settings(max_examples=int(40 * SCALE), deadline=None)
@given(st.data())
def test_chunk_append_equals_token_by_token(data):
    """Append all, attend with upto; in quantised mode within the bound of chunk_rows."""
    draw = data.draw
    hd, mode = draw(st.sampled_from([4, 33, 64])), draw(st.sampled_from(MODES))
    start, n = draw(st.integers(0, 70)), draw(st.integers(1, 10))
    first = draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.standard_normal((start + n, 2, hd)).astype(np.float32)
    q = rng.standard_normal((n, 2 * hd)).astype(np.float32)
    one, chunk = LayerKvCache(1, hd, mode=mode), LayerKvCache(1, hd, mode=mode)
    for k, v in rows[:start]:
        one.append(k, v)
        chunk.append(k, v)
    at = 0
    while at < n:
        step = chunk.chunk_rows(n - at)
        assert step > 0
        for k, v in rows[start + at : start + at + step]:
            chunk.append(k, v)
        for i in range(at, at + step):
            one.append(*rows[start + i])
            a, b = poisoned(2 * hd), poisoned(2 * hd)
            ia, ib = np.zeros(99, np.float32), np.zeros(99, np.float32)
            one.attend_group(q[i], 0, a, ia, None, first)
            chunk.attend_group_upto(q[i], 0, b, ib, None, first, None, start + i + 1)
            same_bits(a, b)
            same_bits(ia, ib)
        at += step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [1, 7, 39, 40, 100])
def test_windows_equal_masked_rows(mode, window):
    c = LayerKvCache(1, 32, mode=mode)
    fill(c, 40)
    q = gen(3, 64)
    first = max(40 - window, 0)
    out, imp = group(c, q, first=first)
    want = np.zeros(40, np.float32)
    for i in range(2):
        o, p = naive(c, q[32 * i : 32 * i + 32], 0, 40, first, default_scale(32), 0.0, None, True)
        same_bits(out[32 * i : 32 * i + 32], o)
        want += p
    same_bits(imp, want)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_single_head_reference(rows, hd, seed):
    rng = np.random.default_rng(seed)
    c = LayerKvCache(1, hd, mode=F32)
    k, v = rng.standard_normal((2, rows, hd)).astype(np.float32)
    q = rng.standard_normal(hd).astype(np.float32)
    for p in range(rows):
        c.append(k[p], v[p])
    out, probs = c.attend(q, 0)
    o, p = attention_head(q, k, v)
    same_bits(out, o)
    same_bits(probs, p)
    want, wide = softmax64(q, k, v, 1 / np.sqrt(hd))
    close(out, want, 4e-6)
    close(probs, wide)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_against_float64(data):
    draw = data.draw
    hd, rows = draw(st.sampled_from([8, 64, 96])), draw(st.integers(1, 120))
    softcap = draw(st.sampled_from([0.0, 5.0]))
    sink = draw(st.sampled_from([None, -1.0, 2.0]))
    first = draw(st.integers(0, 130))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    c = LayerKvCache(1, hd, mode=F32)
    k, v = rng.standard_normal((2, rows, hd)).astype(np.float32)
    q = rng.standard_normal(hd).astype(np.float32)
    for p in range(rows):
        c.append(k[p], v[p])
    out, imp = group(
        c, q, first=first, softcap=softcap, sinks=None if sink is None else [sink], scale=None
    )
    want, probs = softmax64(q, k, v, 1 / np.sqrt(hd), softcap=softcap, sink=sink, first=first)
    close(out, want, 4e-6)
    close(imp, probs)


def test_trimmed_rows_change_nothing():
    """Rows outside the window may be dropped."""
    whole, cut = LayerKvCache(1, 16, mode=F32), LayerKvCache(1, 16, mode=F32)
    for p in range(60):
        for c in (whole, cut):
            c.append(gen(p, 16), gen(500 + p, 16))
        cut.trim_window(8, 2, 4)
        q = gen(900 + p, 32)
        a, _ = group(whole, q, first=max(whole.seq_len - 8, 0))
        b, _ = group(cut, q, first=max(cut.seq_len - 8, 0))
        same_bits(a, b)
    assert cut.base > 40


# -- edges --------------------------------------------------------------------------------------


def test_sink_edges():
    plain, _ = group(small(), Q)
    out, imp = group(small(), Q, sinks=[-np.inf])
    same_bits(out, plain)
    out, imp = group(small(), Q, sinks=[40.0])
    assert out.tolist() == [0] * 4 and 0 < imp.sum() < 1e-15
    out, imp = group(small(), Q, sinks=[np.inf])
    assert out.tolist() == [0] * 4 and imp.tolist() == [0] * 3
    c = small()
    out, imp = poisoned(4), np.ones(3, np.float32)
    refused(KvStateError, c, lambda: c.attend_group(Q, 0, out, imp, sinks=[np.nan]))
    assert np.isnan(out).all() and imp.tolist() == [1] * 3


@pytest.mark.parametrize("path", compiled.available())
@pytest.mark.parametrize("mode", MODES)
def test_scores_that_are_not_finite(path, mode):
    """Refused whole, also when only the last query of a group is at fault."""
    with compiled.use(path):
        c = LayerKvCache(1, 4, mode=mode)
        fill(c, 3)
        before = state_of(c)
        for bad in (np.nan, np.inf):
            q = np.ones(8, np.float32)
            q[7] = bad
            out, imp = poisoned(8), np.ones(3, np.float32)
            assert "score" in refused(KvStateError, c, partial(c.attend_group, q, 0, out, imp))
            assert np.isnan(out).all() and imp.tolist() == [1] * 3
            refused(KvStateError, c, partial(c.attend, q[4:], 0))
        if not mode.k:
            c.append(np.full(4, 3e38, np.float32), np.ones(4, np.float32))
            huge = np.full(4, 3e38, np.float32)
            assert "score" in refused(KvStateError, c, partial(c.attend, huge, 0))
            c.truncate_last(1)
        assert state_of(c)[1:] == before[1:]


def test_importance_of_any_length():
    c = small()
    for n in (0, 1, 2, 3, 7):
        imp = np.full(n, 5, np.float32)
        c.attend_group(Q, 0, poisoned(4), imp, 0.5, 1)
        want = (5 + np.array([0, 0.26894143, 0.7310586], np.float32))[:n]
        assert np.allclose(imp[:3], want, atol=1e-6) and (imp[3:] == 5).all()
    c.attend_group(Q, 0, poisoned(4))


def test_no_rows_and_no_queries():
    c = LayerKvCache(1, 4, mode=F32)
    out, imp = poisoned(8), np.ones(2, np.float32)
    c.attend_group(np.ones(8, np.float32), 0, out, imp)
    assert out.tolist() == [0] * 8 and imp.tolist() == [1, 1]
    c.attend_group(np.zeros(0, np.float32), 0, np.zeros(0, np.float32))
    o, p = attention_head(Q, np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))
    assert o.tolist() == [0] * 4 and p.size == 0


def test_refusals():
    c = small()
    out, imp = poisoned(4), np.zeros(3, np.float32)
    good: dict[str, Any] = {"q_group": Q, "kv_head": 0, "out": out, "imp_acc": imp}
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    both = np.zeros(8, np.float32)
    bad: list[dict[str, Any]] = [
        {"q_group": Q[:3], "out": out[:3]}, {"q_group": Q.astype(np.float64)}, {"q_group": None},
        {"kv_head": 1}, {"kv_head": -1}, {"kv_head": 0.5}, {"out": out[:3]},
        {"out": np.zeros(4)}, {"out": read_only}, {"out": both[::2]}, {"out": [0.0] * 4},
        {"imp_acc": np.zeros(3)}, {"imp_acc": [0.0]}, {"sinks": [1.0, 2.0]}, {"first": -1},
        {"upto": -1}, {"upto": 1.5}, {"scale": "x"}, {"out": both[:4], "imp_acc": both[2:6]},
        {"sinks": np.zeros(1)},
    ]  # fmt: skip
    for change in bad:
        refused(KvShapeError, c, lambda ch=change: c.attend_group_upto(**{**good, **ch}))
    for change in ({"scale": np.inf}, {"scale": 1e60}, {"softcap": np.nan}):
        refused(KvStateError, c, lambda ch=change: c.attend_group_upto(**{**good, **ch}))
    assert np.isnan(out).all() and not imp.any() and not both.any()
    refused(KvShapeError, c, lambda: c.attend(Q[:3], 0))
    refused(KvShapeError, c, lambda: attention_head(Q, np.zeros(5, np.float32), Q))
    refused(KvShapeError, c, lambda: attention_head(Q, np.zeros(8, np.float32), Q))
    ring = LayerKvCache(1, 4, mode=F32)
    ring.install_bounded(3)
    refused(KvStateError, ring, lambda: ring.attend(Q, 0))
    refused(KvStateError, ring, lambda: ring.append(Q, Q))


def test_outputs_may_be_the_query():
    c = small()
    q = Q.copy()
    c.attend_group(q, 0, q)
    same_bits(q, group(small(), Q)[0])


def test_the_interpreter_runs_on_meanwhile():
    """The loops let go of the lock, and threads may attend to one layer at a time."""
    c = LayerKvCache(1, 128, mode=F32)
    fill(c, 64)
    for _ in range(8):
        block = c._stores.k[:, : c.seq_len]
        n = c.seq_len
        c._stores.reserve(2 * n)
        c._stores.k[:, n : 2 * n], c._stores.v[:, n : 2 * n] = block, c._stores.v[:, :n]
        c._stores.rows[:] = 2 * n
        c._imp, c._n_imp, c._seq_len = np.zeros(2 * n, np.float32), 2 * n, 2 * n
    q = gen(1, 128 * 64)
    want, _ = group(c, q)
    results: list[np.ndarray] = []
    workers = [threading.Thread(target=lambda: results.append(group(c, q)[0])) for _ in range(2)]
    ticks = 0
    for w in workers:
        w.start()
    while any(w.is_alive() for w in workers):
        ticks += 1
        time.sleep(0.0002)
    assert ticks >= 3
    for r in results:
        same_bits(r, want)
    assert len(results) == 2


def test_bits_of_a_committed_case():
    """Guards the order of operations itself: these bits are what every later build must give."""
    c = LayerKvCache(1, 80, mode=KvMode.Q8())
    for p in range(70):
        c.append(gen(1 + p, 80), gen(1000 + p, 80))
    out, imp = group(c, gen(7, 160), softcap=20.0, sinks=[0.5, -1.0], first=3)
    assert bits(out[:4]) == COMMITTED[:4]
    assert bits(imp[3:7]) == COMMITTED[4:]


COMMITTED = "3e1ca69d bda4c0b9 3d2751c1 be08fffa 3cfdef39 3cc266ec 3d13d3b1 3e4b481b".split()
