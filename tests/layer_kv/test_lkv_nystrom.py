"""The O(1) override: seal mathematics, steps, range fixes, lifecycle, constant work."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import (
    SCALE,
    close,
    fill,
    gen,
    mk,
    poisoned,
    refused,
    same_bits,
    softmax64,
    state_of,
    steps_done,
)  # fmt: skip

from memra_lowlevel.errors import KvShapeError, KvStateError
from memra_lowlevel.layer_kv import KvMode, LayerKvCache, NystromState, O1Rect, compiled
from memra_lowlevel.layer_kv.o1_plan import O1Plan, parse_layers
from memra_lowlevel.layer_kv.skeleton import m_effective, pinv_ridge, seal_floor, segments


def test_integers():
    cases = [((19, 4), 4), ((40, 32), 5), ((255, 32), 31), ((256, 32), 32), ((257, 64), 32),
             ((64, 4), 4)]  # fmt: skip
    assert [m_effective(*a) for a, _ in cases] == [m for _, m in cases]
    parts = segments(19, 4)
    assert parts == [(0, 4), (4, 9), (9, 14), (14, 19)]
    assert [np.mean(range(a, b)) for a, b in parts] == [1.5, 6, 11, 16]
    assert [seal_floor(*a) for a in ((8, 2), (128, 4), (1, 0))] == [19, 141, 10]


def test_ridge_inverse():
    a = np.array([[2, 1, 0, 0], [0.5, 3, 0, 0], [0, 0, 1, 0], [0, 0, 0, 4.0]])
    m, ridge, tries = pinv_ridge(a)
    assert abs(ridge - 7.8125e-6) < 1e-18 and tries == 1
    want = [[0.545453055, -0.181817384, 0, 0], [-0.090908498, 0.3636358, 0, 0],
            [0, 0, 0.999992188, 0], [0, 0, 0, 0.249999878]]  # fmt: skip
    close(m.ravel(), np.ravel(want), 1e-9)
    m, ridge, tries = pinv_ridge(np.ones((4, 4)))
    assert abs(ridge - 4e-6) < 1e-18 and tries == 1
    close(m.ravel(), np.full(16, 0.0624999844), 1e-10)
    m, _, tries = pinv_ridge(np.full((4, 4), 1e200))
    assert tries == 12 and not m.any()
    rng = np.random.default_rng(0)
    a = rng.standard_normal((9, 9))
    lam = pinv_ridge(a)[1]
    close(pinv_ridge(a)[0], np.linalg.solve(a.T @ a + lam * np.eye(9), a.T), 1e-8)


@pytest.mark.parametrize("path", compiled.available())
def test_group_vectors(path):
    k, v = mk(21, 46, 8), mk(22, 46, 8)
    q = np.stack([mk(23, 46, 8), mk(24, 46, 8)])
    with compiled.use(path):
        s = NystromState(k[None, :40], v[None, :40], q[:, :40], 4, 8, 2)
        fm = NystromState(k[None, :40], v[None, :40], q[:, :40], 4, 8, 2, O1Rect.FM)
        assert (s.far_len, s.n_bytes(), s.win_len) == (30, 1648, 8)
        close(s.mu[0], "0.161488498 0.144937756 0.114945165 0.169979079", 2e-5)
        close(s.z[0], "24.8904887 25.5726308 26.7680397 25.2117047", 2e-5)
        out = s.step(q[:, 40], k[None, 40], v[None, 40])
        close(out[0, :4], "0.059574325 0.191755376 -0.096900252 0.079354007", 2e-5)
        close(out[1, :4], "-0.009530581 0.020498878 -0.194116932 0.161985335", 2e-5)
        out = fm.step(q[:, 40], k[None, 40], v[None, 40])
        close(out[0, :4], "-0.026590003 0.054798006 -0.222189561 0.146381896", 2e-5)
        for t in range(41, 46):
            out = s.step(q[:, t], k[None, t], v[None, t])
        close(out[0, :4], "-0.209757931 -0.249660166 -0.415177294 0.233334683", 2e-5)
        assert s.far_len == 36 and s.far_len + 8 + 2 == 46


def reference(k, v, q, m, w, sink, fm, t, upto):
    """Float64 answers at steps t..upto-1 of one query head, in the unshifted form."""
    d = k.shape[1]
    k, v, q = k.astype(float), v.astype(float), q.astype(float)
    parts = segments(t, m_effective(t, m))
    kl = np.array([k[a:b].mean(0) for a, b in parts])
    ql = np.array([q[a:b].mean(0) for a, b in parts])
    pinv = pinv_ridge(np.exp(ql @ kl.T / np.sqrt(d)))[0]
    outs, drops = [], 0
    for p in range(t, upto):
        near = [*range(sink), *range(p - w + 1, p + 1)]
        far = np.arange(sink, p - w + 1)
        e = np.exp(k[near] @ q[p] / np.sqrt(d))
        num, den = e @ v[near], e.sum()
        u = np.exp(kl @ q[p] / np.sqrt(d)) @ pinv
        u = np.maximum(u, 0) if fm else u
        phi = np.exp(ql @ k[far].T / np.sqrt(d))
        mass = u @ phi.sum(1)
        if mass >= 0:
            num, den = num + u @ (phi @ v[far]), den + mass
        else:
            drops += 1
        outs.append(num / den)
    return np.array(outs), drops


@settings(max_examples=int(25 * SCALE), deadline=None)
@given(st.data())
def test_against_float64(data):
    draw = data.draw
    d, dv = draw(st.sampled_from([4, 8, 40])), draw(st.sampled_from([4, 9]))
    w, sink = draw(st.integers(1, 12)), draw(st.integers(0, 4))
    t = w + sink + 9 + draw(st.integers(0, 60))
    m, fm = draw(st.sampled_from([4, 8])), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = t + 15
    k, v = rng.standard_normal((n, d)).astype("f4"), rng.standard_normal((n, dv)).astype("f4")
    q = rng.standard_normal((2, n, d)).astype("f4") * np.float32(0.7)
    rect = O1Rect.FM if fm else O1Rect.AGGREGATE
    results = []
    for path in compiled.available():
        with compiled.use(path):
            s = NystromState(k[None, :t], v[None, :t], q[:, :t], m, w, sink, rect)
            results.append(np.array([s.step(q[:, p], k[None, p], v[None, p]) for p in range(t, n)]))
        assert s.far_len + w + sink == n
        same_bits(results[-1], results[0])
    for h in range(2):
        want, _ = reference(k, v, q[h], m, w, sink, fm, t, n)
        error = np.abs(results[0][:, h] - want).max(1)
        # a step whose far mass is within rounding of zero may drop it where float64 does not;
        # a denominator near zero multiplies the rounding of either form
        assert np.median(error) < 2e-5 and (error < 1e-3).mean() > 0.7, error


@pytest.mark.parametrize("rect", list(O1Rect))
def test_a_group_equals_single_heads(rect):
    k, v = mk(5, 60, 8), mk(6, 60, 8)
    q = np.stack([mk(7 + h, 60, 8) for h in range(3)])
    args = (4, 8, 2, rect)
    whole = NystromState(k[None, :40], v[None, :40], q[:, :40], *args)
    solo = [NystromState(k[None, :40], v[None, :40], q[h : h + 1, :40], *args) for h in range(3)]
    both = NystromState(
        np.stack([k, v])[:, :40], np.stack([v, k])[:, :40], np.concatenate([q, q])[:, :40], *args
    )
    for p in range(40, 60):
        out = whole.step(q[:, p], k[None, p], v[None, p])
        two = both.step(
            np.concatenate([q[:, p], q[:, p]]), np.stack([k[p], v[p]]), np.stack([v[p], k[p]])
        )
        same_bits(two[:3], out)
        for h in range(3):
            same_bits(solo[h].step(q[h : h + 1, p], k[None, p], v[None, p])[0], out[h])
        # one insertion per group eviction, whatever the number of heads
        assert whole.far_len + 8 + 2 == p + 1


def test_dropped_far_field_keeps_the_near_one():
    k, q, v = mk(1207, 60, 8) * np.float32(18), mk(1208, 60, 8) * np.float32(18), mk(1209, 60, 8)
    for path in compiled.available():
        with compiled.use(path):
            s = NystromState(k[None, :50], v[None, :50], q[None, :50], 4, 8, 2)
            for p in range(50, 58):
                out = s.step(q[None, p], k[None, p], v[None, p])
        close(
            out,
            "0.809866786 -0.484071136 0.313922405 0.32860744 0.978537798 -0.328467369 0.96939075 "
            "0.353350282",
            1e-5,
        )


@pytest.mark.parametrize("size", [1.0, 69.0, 104.0, 354.0, 2000.0])
def test_landmark_logits_of_any_size(size):
    """All keys and queries point the same way; plain softmax is the mean of the values."""
    d, t = 4, 60
    k = np.zeros((1, t + 5, d), np.float32)
    k[:, :, 0] = np.sqrt(size * 2)  # the logit of every pair is `size`
    v = mk(9, t + 5, d)[None]
    s = NystromState(k[:, :t], v[:, :t], k[:, :t], 4, 8, 2)
    assert np.isfinite(s.pinv).all() and s.pinv.any()
    for p in range(t, t + 5):
        out = s.step(k[:, p], k[:, p], v[:, p])
        close(out[0], v[0, : p + 1].astype(float).mean(0), 2e-4)


def test_bytes():
    def size(w, sink, d, dv, m, hpk, groups=1):
        t = max(8 * m, w + sink + 9)
        z = np.zeros((groups, t, d), np.float32)
        zv = np.zeros((groups, t, dv), np.float32)
        q = np.zeros((groups * hpk, t, d), np.float32)
        s = NystromState(z, zv, q, m, w, sink)
        assert s.m == m
        return s.n_bytes()

    assert size(128, 4, 128, 128, 32, 2) == 227616
    assert size(128, 4, 256, 256, 32, 4) == 586304
    assert size(8, 2, 4, 4, 4, 2) == 1008
    assert size(128, 4, 128, 128, 32, 1) == 189584
    assert 8 * size(128, 4, 256, 256, 32, 4, groups=4) == 18761728


@pytest.mark.parametrize("path", compiled.available())
def test_exact_only_equals_softmax(path):
    k, v, q = mk(31, 20, 16), mk(32, 20, 8), mk(33, 20, 16)
    with compiled.use(path):
        s = NystromState(k[None, :12], v[None, :12], q[None, :12], 4, 32, 4)
        assert s.exact_only and s.far_len == 0
        for p in range(12, 20):
            snap = s.snapshot()
            out = s.step(q[None, p], k[None, p], v[None, p])
            close(out[0], softmax64(q[p], k[: p + 1], v[: p + 1], 0.25)[0])
            s.restore(snap)
            same_bits(s.step(q[None, p], k[None, p], v[None, p]), out)
    close(out[0, :4], "0.140667439 0.122213822 -0.113465607 0.172130249")
    assert s.views()[0].far_len == 0


def test_rectifiers():
    k, q, v = mk(41, 320, 16) * np.float32(3), mk(42, 320, 16) * np.float32(3), mk(43, 320, 4) + 1
    v = v.astype(np.float32)

    def leaves(rect):
        s = NystromState(k[None, :256], v[None, :256], q[None, :256], 32, 16, 4, rect)
        worst = 0.0
        for p in range(256, 320):
            out = s.step(q[None, p], k[None, p], v[None, p])[0]
            low, high = v[: p + 1].min(0), v[: p + 1].max(0)
            worst = max(worst, float((low - out).max()), float((out - high).max()))
        return worst

    assert leaves(O1Rect.FM) < 1e-3
    assert leaves(O1Rect.AGGREGATE) > 1e-2


# -- lifecycle on the layer ---------------------------------------------------------------------


def token(p):
    return gen(7000 + p, 8), gen(7100 + p, 4), gen(7200 + p, 4)


def collecting(n, rect=O1Rect.AGGREGATE):
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    c.o1_begin(4, 8, 2, rect)
    for p in range(n):
        q, k, v = token(p)
        c.append(k, v)
        c.o1_push_q(q)
    return c


@pytest.mark.parametrize("path", compiled.available())
def test_lifecycle(path):
    with compiled.use(path):
        c = collecting(18)
        assert c.o1_seal(2) is False and not c.o1_sealed() and c.o1_views() is None
        assert c.o1.target == 19 and c.o1_reaches_target(1) and not c.o1_reaches_target(0)
        assert c.chunk_rows(5) == 1
        assert (c.o1_memory_bytes(), c.memory_bytes()) == (576, 576 + 576)
        q, k, v = token(18)
        c.append(k, v)
        c.o1_push_q(q)
        assert (c.o1_memory_bytes(), c.memory_bytes()) == (608, 608 + 608)
        assert c.o1_seal(2) is True and c.o1_sealed()
        assert (c.memory_bytes(), c.seq_len, c.imp.size) == (1008, 19, 0)
        (view,) = c.o1_views()
        assert (view.far_len, view.m_eff, view.win_len, len(view.heads)) == (9, 4, 8, 2)
        assert not view.win_k.flags.writeable and view.heads[0].pinv.shape == (4, 4)
        assert c.o1_seal(2) is True
        q, k, v = token(19)
        out = c.o1_step(q, k, v, 2)
        close(
            out,
            "0.085552612 0.173707168 -0.136100037 0.065083555 -0.057076377 0.2245321 -0.174574417 "
            "-0.096593998",
            2e-5,
        )
        assert (c.seq_len, c.o1_views()[0].far_len) == (20, 10)
        c.o1_step(*token(20), 2)
        close(
            c.o1_step(*token(21), 2),
            "-0.044912257 0.147187031 -0.103606288 -0.0511539 -0.08313605 0.114473204 -0.0580766 "
            "-0.021267165",
            2e-5,
        )
        fm = collecting(19, O1Rect.FM)
        assert fm.o1_seal(2)
        close(
            fm.o1_step(q, k, v, 2),
            "0.001842061 0.133417744 -0.194921771 -0.07852627 -0.056609831 0.144716104 "
            "-0.229035029 -0.148876335",
            2e-5,
        )


def test_collecting_attends_exactly():
    a, b = collecting(30), LayerKvCache(1, 4, mode=KvMode.F32)
    for p in range(30):
        b.append(*token(p)[1:])
    same_bits(a.attend(gen(1, 4), 0)[0], b.attend(gen(1, 4), 0)[0])


def test_plain_layer():
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    fill(c, 3)
    assert c.o1_seal(1) is False and c.o1_views() is None and c.o1_memory_bytes() == 0
    before = state_of(c)
    c.o1_push_q(gen(1, 4))
    assert state_of(c) == before
    refused(KvStateError, c, lambda: c.o1_step(gen(1, 4), gen(1, 4), gen(1, 4), 1))
    refused(KvStateError, c, c.o1_snapshot)
    assert not c.o1_reaches_target(5)


def test_begin_refusals():
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    for args in ((3, 8, 2), (4, 0, 2), (4, 8, -1)):
        refused(KvShapeError, c, lambda a=args: c.o1_begin(*a))
    refused(KvShapeError, c, lambda: c.o1_begin(4, 8, 2, "fm"))
    fill(c, 1)
    refused(KvStateError, c, lambda: c.o1_begin(4, 8, 2))
    q8 = LayerKvCache(1, 4, mode=KvMode.Q8(k=False))
    refused(KvStateError, q8, lambda: q8.o1_begin(4, 8, 2))
    ring = LayerKvCache(1, 4, mode=KvMode.F32)
    ring.install_bounded(4)
    refused(KvStateError, ring, lambda: ring.o1_begin(4, 8, 2))
    sunk = LayerKvCache(1, 4, mode=KvMode.F32)
    sunk.sinks = gen(1, 2)
    refused(KvStateError, sunk, lambda: sunk.o1_begin(4, 8, 2))
    c = collecting(3)
    refused(KvStateError, c, lambda: setattr(c, "sinks", gen(1, 2)))


def test_what_steps_would_ignore_is_refused_while_collecting():
    c = collecting(5)
    q = gen(1, 8)
    for kw in ({"scale": 0.4}, {"softcap": 30.0}, {"first": 2}, {"sinks": gen(1, 2)}):
        out, imp = poisoned(8), np.ones(5, np.float32)
        message = refused(KvStateError, c, lambda kw=kw, o=out, i=imp: c.attend_group(
            q, 0, o, i, **kw))  # fmt: skip
        assert next(iter(kw)) in message
        assert np.isnan(out).all() and imp.tolist() == [1] * 5
    c.attend_group(q, 0, poisoned(8), None, 0.5, 0, 0.0)


def aborts(c, nh=2):
    with pytest.raises(KvStateError):
        c.o1_seal(nh)
    assert (c.seq_len, c.o1, c.memory_bytes(), c.imp.size) == (0, None, 0, 0)
    assert c.o1_error and "aborted" in repr(c)
    assert c.o1_seal(nh) is False
    for call in (
        lambda: fill(c, 1), lambda: c.attend(gen(1, 4), 0), c.export_wire,
        lambda: c.install_bounded(3), lambda: c.trim_window(3), c.k_heads,
    ):  # fmt: skip
        refused(KvStateError, c, call)
    d = c.copy()
    assert d.o1_error == c.o1_error
    c.clear()
    fill(c, 1)
    d.o1_begin(4, 8, 2)
    assert d.o1_error is None


def test_seal_aborts_on_what_cannot_be_sealed():
    aborts(collecting(19), 0)
    aborts(collecting(19), 3)
    c = collecting(19)
    c.o1_push_q(token(19)[0])
    aborts(c)
    c = collecting(19)
    c.append(*token(19)[1:])
    aborts(c)
    two = LayerKvCache(2, 4, mode=KvMode.F32)
    two.o1_begin(4, 8, 2)
    for _ in range(19):
        two.append(gen(1, 8), gen(2, 8))
        two.o1_push_q(gen(1, 12))
    aborts(two, 3)  # heads that do not divide among the groups
    dead = LayerKvCache(2, 4, mode=KvMode.F32)
    dead.o1_begin(4, 8, 2)
    for _ in range(19):
        dead.append(gen(1, 8), gen(2, 8), [1, 0])
        dead.o1_push_q(gen(1, 8))
    aborts(dead)
    for which in range(3):
        c = collecting(0)
        for p in range(19):
            q, k, v = (x.copy() for x in token(p))
            if p == 7:
                (q, k, v)[which][1] = np.inf
            c.append(k, v)
            c.o1_push_q(q)
        aborts(c)


def test_push_shapes():
    c = collecting(2)
    for x in (gen(1, 7), gen(1, 4), gen(1, 0), gen(1, 8).astype(np.float64)):
        refused(KvShapeError, c, lambda x=x: c.o1_push_q(x))


def test_trace_follows_a_truncation():
    c, d = collecting(25), collecting(22)
    c.truncate_last(3)
    assert c.o1_memory_bytes() == d.o1_memory_bytes()
    assert c.o1_seal(2) and d.o1_seal(2)
    same_bits(c.o1_step(*token(22), 2), d.o1_step(*token(22), 2))


def test_sealed_refusals():
    c = collecting(25)
    assert c.o1_seal(2)
    c.o1_step(*token(25), 2)
    q, k, v = token(26)
    for call in (
        lambda: c.truncate_last(1), lambda: fill(c, 1), lambda: c.attend(k, 0), c.export_wire,
        lambda: c.o1_begin(4, 8, 2), lambda: c.head_keys(0),
    ):  # fmt: skip
        refused(KvStateError, c, call)
    c.truncate_last(0)
    for args in ((q[:7], k, v, 2), (q, k[:3], v, 2), (q, k, v[:3], 2), (q, k, v, 1), (q, k, v, 3)):
        refused(KvShapeError, c, lambda a=args: c.o1_step(*a))


@pytest.mark.parametrize("path", compiled.available())
def test_non_finite_steps_change_nothing(path):
    with compiled.use(path):
        c = collecting(25)
        assert c.o1_seal(2)
        huge = np.full(4, 3e38, np.float32)
        for which in range(3):
            for bad in (np.nan, np.inf):
                args = [x.copy() for x in token(26)]
                args[which][-1] = bad
                refused(KvStateError, c, lambda a=args: c.o1_step(*a, 2))
        q, k, v = token(26)
        refused(KvStateError, c, lambda: c.o1_step(np.tile(huge, 2), huge, v, 2))
        c.o1_step(q, k, v, 2)


def test_snapshot_and_restore():
    c = collecting(25)
    assert c.o1_seal(2)
    for p in range(25, 40):
        c.o1_step(*token(p), 2)
    snap = c.o1_snapshot()
    before = state_of(c.o1)
    outs = [c.o1_step(*token(p), 2) for p in range(40, 60)]
    c.o1_restore(snap)
    assert c.seq_len == 40 and state_of(c.o1) == before
    for p, out in zip(range(40, 60), outs, strict=True):
        same_bits(c.o1_step(*token(p), 2), out)
    other = LayerKvCache(1, 4, mode=KvMode.F32)
    other.o1_begin(4, 9, 2)
    for p in range(25):
        other.append(*token(p)[1:])
        other.o1_push_q(token(p)[0])
    assert other.o1_seal(2)
    refused(KvShapeError, other, lambda: other.o1_restore(snap))


def test_copies_step_alone():
    c = collecting(25)
    d = c.copy()
    assert c.o1_seal(2) and not d.o1_sealed() and d.o1_seal(2)
    e = d.copy()
    same_bits(c.o1_step(*token(25), 2), d.o1_step(*token(25), 2))
    assert (e.seq_len, d.seq_len) == (25, 26)
    before = state_of(e.o1)
    d.o1_step(*token(26), 2)
    assert state_of(e.o1) == before


def test_fewer_landmarks_than_asked_are_announced():
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    c.o1_begin(32, 8, 2)
    for p in range(40):
        c.append(*token(p)[1:])
        c.o1_push_q(token(p)[0])
    with pytest.warns(UserWarning, match="32 landmarks asked for, 5 used"):
        assert c.o1_seal(2)


# -- settings -----------------------------------------------------------------------------------


def test_layer_lists(monkeypatch):
    good = {"all": "all", "deep6": ("deep", 6), "1, 3,5": (1, 3, 5), "off": None, "0": None,
            "none": None, "": None}  # fmt: skip
    for text, want in good.items():
        assert parse_layers(text) == want
    for text in ("deepX", "deep0", "1,x", "on", "1,,2", "-1"):
        with pytest.raises(KvStateError):
            parse_layers(text)
    assert O1Plan(("deep", 2)).on(4) == [False, False, True, True]
    assert O1Plan((1, 99)).on(3) == [False, True, False]
    assert O1Plan("all").on(2) == [True] * 2 and O1Plan(None).on(2) == [False] * 2


def test_plan_priority(monkeypatch):
    monkeypatch.delenv("CMF_O1", raising=False)
    hint = json.loads('{"layers":[0,2]}')
    p = O1Plan.from_hint(hint)
    assert (p.layers, p.m, p.window, p.sink, p.rect) == ((0, 2), 32, 128, 4, O1Rect.AGGREGATE)
    p = O1Plan.from_hint(json.loads('{"layers":"all","m":8,"w":32,"sink":2}'))
    assert (p.layers, p.m, p.window, p.sink) == ("all", 8, 32, 2)
    p = O1Plan.from_hint({"layers": "all", "m": 1, "w": 0})
    assert (p.m, p.window) == (4, 1)
    with pytest.raises(KvStateError):
        O1Plan.from_hint({"layers": 5})
    assert O1Plan.resolve(hint=hint).layers == (0, 2)
    assert O1Plan.resolve().layers is None
    monkeypatch.setenv("CMF_O1", "deep2")
    assert O1Plan.resolve(hint=hint).layers == ("deep", 2)
    assert O1Plan.resolve(O1Plan("all"), hint).layers == "all"
    for kw in ({}, {"hint": hint}, {"explicit": O1Plan("all")}):
        with pytest.raises(KvStateError):
            O1Plan.resolve(bounded=True, **kw)
    monkeypatch.setenv("CMF_O1", "off")
    assert O1Plan.resolve(bounded=True).layers is None
    monkeypatch.setenv("CMF_O1", "deepX")
    with pytest.raises(KvStateError):
        O1Plan.resolve()


# -- the long walk ------------------------------------------------------------------------------


def test_long_walk_at_constant_work(capsys):
    n, d = int(100_000 * SCALE), 64
    c = LayerKvCache(1, d, mode=KvMode.F32)
    c.o1_begin(8, 16, 4, O1Rect.FM)
    rng = np.random.default_rng(0)
    pool = (rng.standard_normal((97, 3, d)) * 0.5).astype(np.float32)
    for t in range(100):
        q, k, v = pool[t % 97]
        c.append(k, v)
        c.o1_push_q(q)
    assert c.o1_seal(1)
    size = c.memory_bytes()
    state = c.o1.state
    arrays = [getattr(state, name).ctypes.data for name in NystromState._MOVING]

    def run(start, count):
        begin = time.perf_counter()
        for t in range(start, start + count):
            q, k, v = pool[t % 97]
            out = c.o1_step(q, k, v, 1)
        return time.perf_counter() - begin, out

    first = min(run(100 + 200 * i, 200)[0] for i in range(5))
    position = iter(range(1100, n - 1000))
    work = steps_done(lambda: run(next(position), 1), n - 2100)
    # 4 sinks, the 16 rows before the step, its own; 8 landmarks of the far field, 8 that absorb
    near, m = 4 + 16, 8
    scratch = 4 * (d + d + m + near + 2 * m)
    for scored, added, exponentials, bytes_ in work:
        assert (scored, added, bytes_) == (near + 1 + 2 * m, near + 2 * m, scratch)
        # one more where a landmark's maximum grows
        assert near + 3 * m <= exponentials <= near + 4 * m
    last = min(run(n - 1000 + 200 * i, 200)[0] for i in range(5))
    out = run(n, 1)[1]
    assert c.seq_len == n + 1
    assert state.far_len + 16 + 4 == n + 1  # every position is accounted for
    assert c.memory_bytes() == size == c.o1_memory_bytes()
    assert [getattr(state, name).ctypes.data for name in NystromState._MOVING] == arrays
    assert np.isfinite(out).all() and np.abs(out).max() <= np.abs(pool[:, 2]).max()
    with capsys.disabled():
        print(f" [override: last/first {last / first:.2f}]", end="")
