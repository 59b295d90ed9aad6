"""The bounded ring: vectors, undo, constant memory, refusals."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import (
    SCALE,
    bits,
    close,
    gen,
    poisoned,
    refused,
    same_bits,
    state_of,
    steps_done,
)  # fmt: skip

from memra_lowlevel.errors import KvShapeError, KvStateError
from memra_lowlevel.layer_kv import (
    BoundedRope,
    BoundedState,
    BoundedWeights,
    KvMode,
    LayerKvCache,
    WireKind,
    compiled,
    validate_anchor,
)  # fmt: skip

F = np.float32


def make(nkv=2, hd=16, window=8, n_sinks=2, base=10000.0):
    c = LayerKvCache(nkv, hd, mode=KvMode.F32)
    c.install_bounded(window)
    shape = (nkv, n_sinks, hd)
    n = nkv * n_sinks * hd
    w = BoundedWeights(gen(7, n, 1.5).reshape(shape), gen(8, n, 1.5).reshape(shape), window)
    return c, w, BoundedRope.standard(window, hd, base)


def step(c, w, rope, t, nh=4, scale=0.25):
    hd, nkv = c.head_dim, c.num_kv_heads
    out = poisoned(nh * hd)
    c.bounded_step(
        gen(1000 + t, nh * hd, 1.5), gen(2000 + t, nkv * hd, 1.5), gen(3000 + t, nkv * hd, 1.5),
        w, rope, scale, nh, out,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("path", compiled.available())
def test_hand_vectors(path):
    with compiled.use(path):
        c = LayerKvCache(1, 2, mode=KvMode.F32)
        c.install_bounded(2)
        w = BoundedWeights(F([[[0.5, 0]]]), F([[[10, -10]]]), 2)
        rope = BoundedRope(2, F([1]))
        steps = [
            ((1, 0), (1, 0), (1, 0), "4.397866019 -3.775406688"),
            ((0, 1), (0, 1), (1, 0), "4.17015086 -3.547843412"),
            ((1, 1), (2, 2), (0, 1), "2.84031469 -0.523829157"),
        ]
        for k, v, q, want in steps:
            out = poisoned(2)
            c.bounded_step(F(q), F(k), F(v), w, rope, 1.0, 1, out)
            close(out, want, 4e-6)
        r = c.bounded
        assert r.ring_k.ravel().tolist() == [1, 1, 0, 1]
        assert (r.seen, r.len, r.head, c.seq_len) == (3, 2, 1, 3)


def test_walk_vectors():
    c, w, rope = make()
    want = "3f800000 3ea1e89b 3dcccccd 3d0186e3 3c23d70a 3b4f3e38 3a83126f 39a5cb60".split()
    ulps = rope.inv_freq.view(np.int32) - np.array([int(x, 16) for x in want], np.int32)
    assert np.abs(ulps).max() <= 1
    exact = BoundedRope(8, np.array([int(x, 16) for x in want], np.uint32).view(np.float32))
    assert bits(exact.cos[3][:3]) == ["bf7d7026", "3f152f57", "3f7490ef"]
    assert bits(exact.sin[3][:3]) == ["3e1081c3", "3f5009c2", "3e974e6d"]
    outs = {t: step(c, w, exact, t) for t in range(29)}
    close(outs[0][:4], "-0.229787387 0.335697096 0.264278336 1.152146208")
    close(outs[10][:4], "-0.178065605 -0.037499713 -0.085285463 -0.120591475")
    close(outs[10][60:64], "0.250476031 -0.036874968 0.583322433 -0.184298043")
    close(outs[28][:4], "-0.205668438 0.825201406 -0.016274052 0.349973086")
    assert c.bounded_state_bytes() == 2056


def test_state_bytes():
    assert BoundedState(2, 128, 128).state_bytes() == 262152
    c, w, rope = make()
    sizes = set()
    for t in range(20):
        step(c, w, rope, t)
        sizes.add((c.bounded_state_bytes(), c.memory_bytes()))
    assert sizes == {(2 * 2 * 8 * 16 * 4 + 8,) * 2}
    assert c._stores.cap == 0


def test_probabilities_of_the_walk():
    """Values that pick one probability each: the sinks first, then newest to oldest."""
    c, w, rope = make()
    picks = np.zeros((2, 2, 16), np.float32)
    picks[:, 0, 0], picks[:, 1, 1] = 1, 1
    w = BoundedWeights(w.sink_k, picks, 8)
    for t in range(11):
        v = np.zeros((2, 16), np.float32)
        v[:, 2 + (10 - t) % 8] = 1
        out = poisoned(64)
        c.bounded_step(gen(1000 + t, 64, 1.5), gen(2000 + t, 32, 1.5), v, w, rope, 0.25, 4, out)
    close(
        out[:10],
        "0.021238028 0.370845099 0.187979949 0.028614963 0.013666951 0.05739873 0.055671297 "
        "0.163237452 0.047831128 0.053516402",
    )


@settings(max_examples=int(30 * SCALE), deadline=None)
@given(st.data())
def test_equals_absolute_rotary_attention(data):
    """The served operator has no absolute position, and is the same as one that has."""
    draw = data.draw
    nkv, hpk = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    hd = draw(st.sampled_from([2, 10, 33, 64]))
    half = draw(st.integers(0, hd // 2))
    window, n_sinks = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    n = draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inv = rng.random(half).astype(np.float32)
    rope = BoundedRope(window, inv)
    sk, sv = rng.standard_normal((2, nkv, n_sinks, hd)).astype(np.float32)
    w = BoundedWeights(sk, sv, window)
    nh = nkv * hpk
    q = rng.standard_normal((n, nh, hd)).astype(np.float32)
    k, v = rng.standard_normal((2, n, nkv, hd)).astype(np.float32)
    scale = 1 / np.sqrt(hd)
    layers = {}
    for path in compiled.available():
        with compiled.use(path):
            c = LayerKvCache(nkv, hd, mode=KvMode.F32)
            c.install_bounded(window)
            outs = []
            for t in range(n):
                out = poisoned(nh * hd)
                c.bounded_step(q[t], k[t], v[t], w, rope, scale, nh, out)
                outs.append(out)
            layers[path] = (np.concatenate(outs), c)
    first = layers["numpy"]
    for out, c in layers.values():
        same_bits(out, first[0])
        same_bits(c.bounded.ring_k, first[1].bounded.ring_k)

    def turn(x, pos):
        x = x.astype(np.float64).copy()
        co, si = np.cos(pos * inv.astype(float)), np.sin(pos * inv.astype(float))
        a, b = x[:half].copy(), x[half : 2 * half].copy()
        x[:half], x[half : 2 * half] = a * co - b * si, a * si + b * co
        return x

    t = n - 1
    for h in range(nh):
        g = h // hpk
        band = range(max(t - window + 1, 0), t + 1)
        scores = [q[t, h].astype(float) @ sk[g, s] for s in range(n_sinks)]
        scores += [turn(q[t, h], t) @ turn(k[j, g], j) for j in band]
        p = np.exp(np.array(scores) * scale - max(scores) * scale)
        p /= p.sum()
        want = p @ np.concatenate([sv[g], v[list(band), g]])
        close(first[0].reshape(n, nh, hd)[t, h], want, 1e-5)


def test_rope_scale_is_squared():
    a, b = BoundedRope(4, F([0.5])), BoundedRope(4, F([0.5]), 3.0)
    close(b.cos.ravel(), 9 * np.cos(np.arange(4) * 0.5), 1e-6)
    assert a.cos[0, 0] == 1 and not a.cos.flags.writeable


# -- undo ---------------------------------------------------------------------------------------


def test_rollback_equals_the_snapshot():
    c, w, rope = make()
    for t in range(29):
        step(c, w, rope, t)
    snap = c.bounded_snapshot()
    for t in range(29, 34):
        step(c, w, rope, t)
    assert c.bounded.rollback(5) == 5 and c.bounded.seen == 29
    same_bits(c.bounded.ring_k, snap.ring_k)
    same_bits(c.bounded.ring_v, snap.ring_v)


def scalars(n: int) -> LayerKvCache:
    c = LayerKvCache(1, 1, mode=KvMode.F32)
    c.install_bounded(4)
    w = BoundedWeights(np.zeros((1, 0, 1), np.float32), np.zeros((1, 0, 1), np.float32), 4)
    rope = BoundedRope(4, np.zeros(0, np.float32))
    for t in range(n):
        c.bounded_step(F([1]), F([t]), F([t]), w, rope, 1.0, 1, poisoned(1))
    return c


def test_rollback_past_the_history():
    c = scalars(100)
    assert c.bounded.rollback(70) == 64
    assert c.bounded.seen == 36 and c.bounded.ring_k.ravel().tolist() == [32, 33, 34, 35]
    c = scalars(100)
    refused(KvStateError, c, lambda: c.truncate_last(65))
    c.truncate_last(64)
    assert (c.seq_len, c.bounded.ring_k.ravel().tolist()) == (36, [32, 33, 34, 35])
    refused(KvStateError, c, lambda: c.truncate_last(1))
    c = scalars(3)
    c.truncate_last(99)
    assert (c.seq_len, c.bounded.seen, c.bounded.len) == (0, 0, 0)


@settings(max_examples=int(30 * SCALE), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=8))
def test_rejected_positions_leave_no_trace(rounds):
    c, w, rope = make(1, 4, 5, 1)
    plain, _, _ = make(1, 4, 5, 1)
    t = 0
    for n, drop in rounds:
        drop = min(drop, n, c.bounded.undo_len + n)
        for i in range(n):
            step(c, w, rope, t + i, nh=1)
        c.truncate_last(drop)
        for i in range(n - drop):
            step(plain, w, rope, t + i, nh=1)
        t += n - drop
        same_bits(c.bounded.ring_k, plain.bounded.ring_k)
        same_bits(c.bounded.ring_v, plain.bounded.ring_v)
        assert c.seq_len == c.bounded.seen == plain.seq_len == t


def test_restore_drops_the_history():
    c, w, rope = make()
    for t in range(5):
        step(c, w, rope, t)
    snap = c.bounded_snapshot()
    other = c.copy()
    want = step(other, w, rope, 5)
    for t in range(20, 30):
        step(c, w, rope, t)
    c.bounded_restore(snap)
    assert (c.seq_len, c.bounded.seen, c.bounded.rollback(3)) == (5, 5, 0)
    refused(KvStateError, c, lambda: c.truncate_last(1))
    same_bits(step(c, w, rope, 5), want)
    small, _, _ = make(window=4)
    refused(KvShapeError, small, lambda: small.bounded_restore(snap))


def test_clear_zeroes_in_place():
    c, w, rope = make()
    at = c.bounded.ring_k.ctypes.data
    first = step(c, w, rope, 0)
    c.clear()
    assert c.bounded.ring_k.ctypes.data == at and not c.bounded.ring_k.any()
    assert (c.seq_len, c.bounded.seen) == (0, 0)
    same_bits(step(c, w, rope, 0), first)


def test_copy_takes_the_history():
    c, w, rope = make()
    for t in range(12):
        step(c, w, rope, t)
    d = c.copy()
    d.truncate_last(6)
    assert (c.seq_len, d.seq_len) == (12, 6)
    c.truncate_last(6)
    same_bits(c.bounded.ring_k, d.bounded.ring_k)


# -- refusals -----------------------------------------------------------------------------------


def test_install_once_on_an_empty_layer():
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    assert c.bounded_state_bytes() == 0 and c.bounded_snapshot() is None
    refused(KvShapeError, c, lambda: c.install_bounded(0))
    refused(KvShapeError, c, lambda: c.install_bounded(161))
    c.append(np.ones(4, np.float32), np.ones(4, np.float32))
    refused(KvStateError, c, lambda: c.install_bounded(4))
    c.clear()
    c.o1_begin(4, 4, 0)
    refused(KvStateError, c, lambda: c.install_bounded(4))
    c.clear()
    c.install_bounded(4)
    assert c.wire_kind is WireKind.BOUNDED
    refused(KvStateError, c, lambda: c.install_bounded(4))


def test_step_refusals():
    c, w, rope = make()
    for t in range(3):
        step(c, w, rope, t)
    q, k = gen(1, 64), gen(2, 32)
    out = poisoned(64)
    good = [q, k, k, w, rope, 0.25, 4, out]
    other = make(1)[1]
    narrow = make(window=7)
    bad = {
        0: [q[:63], q.astype(np.float64)], 1: [k[:31]], 2: [k[:31]], 3: [other, narrow[1]],
        4: [narrow[2], BoundedRope(8, np.ones(9, np.float32))], 6: [3, 0, 5, 2],
        7: [out[:60], out.astype(np.float64)],
    }  # fmt: skip
    for i, values in bad.items():
        for x in values:
            args = [*good[:i], x, *good[i + 1 :]]
            refused(KvShapeError, c, lambda a=args: c.bounded_step(*a))
    plain = LayerKvCache(2, 16, mode=KvMode.F32)
    refused(KvStateError, plain, lambda: plain.bounded_step(*good))
    refused(KvStateError, plain, lambda: plain.bounded_restore(c.bounded_snapshot()))
    assert np.isnan(out).all()


@pytest.mark.parametrize("path", compiled.available())
def test_non_finite_steps_change_nothing(path):
    with compiled.use(path):
        c, w, rope = make()
        for t in range(10):
            step(c, w, rope, t)
        for which in range(3):
            for bad in (np.nan, np.inf):
                args = [gen(1, 64), gen(2, 32), gen(3, 32)]
                args[which][-1] = bad
                out = poisoned(64)
                refused(
                    KvStateError, c, lambda a=args, o=out: c.bounded_step(*a, w, rope, 1.0, 4, o)
                )
                assert np.isnan(out).all()
        huge = np.full(64, 3e38, np.float32)  # finite, but the scores are not
        over = (huge, huge[:32], gen(3, 32), w, rope, 1.0, 4, poisoned(64))
        refused(KvStateError, c, lambda: c.bounded_step(*over))
        refused(
            KvStateError, c,
            lambda: c.bounded_step(gen(1, 64), gen(2, 32), gen(3, 32), w, rope, np.nan, 4, out),
        )  # fmt: skip


def test_weights_refusals():
    z = np.zeros((1, 2, 4), np.float32)
    for sk, sv, window in ((z, z[:, :1], 4), (z[0], z[0], 4), (z, z, 0), (z, z, 159),
                           (z.astype(np.float64), z, 4), (z[:0], z[:0], 4)):  # fmt: skip
        with pytest.raises(KvShapeError):
            BoundedWeights(sk, sv, window)
    with pytest.raises(KvStateError):
        BoundedWeights(z, z + np.float32(np.nan), 4)
    assert BoundedWeights(z, z, 158).n_sinks == 2
    with pytest.raises(KvStateError):
        BoundedRope(4, F([np.inf]))


RECORD = {
    "kind": "swa_sink_v1", "window": 128, "sink": 4, "rope": "relative_in_window",
    "sink_scores": "nope", "far": None, "num_kv_heads": 2, "head_dim": 128,
}  # fmt: skip


def test_anchor_record():
    types = ["BoundedAttention", "LinearAttention"]
    validate_anchor(RECORD, types)
    validate_anchor(None, types[1:])
    names = ["0.sink_k", "0.sink_v"]
    validate_anchor({**RECORD, "train_windows": [1, 128]}, types, tensors=names)
    bad = [
        {"kind": "swa"}, {"window": 0}, {"window": 157}, {"rope": "absolute"},
        {"sink_scores": "rope"}, {"far": {"m": 4}}, {"train_windows": [0]},
        {"train_windows": [129]}, {"sink": -1}, {"window": 12.5}, {"window": True},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises(KvStateError):
            validate_anchor({**RECORD, **change}, types)
    missing = {k: v for k, v in RECORD.items() if k != "window"}
    for record, kinds, tensors in (
        (missing, types, None), (None, types, None), (RECORD, types[1:], None),
        (RECORD, types, names[:1]), (RECORD, types, []),
    ):  # fmt: skip
        with pytest.raises(KvStateError):
            validate_anchor(record, kinds, tensors=tensors)


# -- the long walk ------------------------------------------------------------------------------


def test_long_walk_at_constant_memory(capsys):
    n = int(100_000 * SCALE)
    hd, window = 64, 16
    c, w, rope = make(1, hd, window, 4)
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((97, 3, hd)).astype(np.float32)
    out = poisoned(hd)
    arrays = [id(x) for x in (c.bounded.ring_k, c.bounded.ring_v, c.bounded.undo_k)]

    def run(count: int, start: int) -> float:
        begin = time.perf_counter()
        for t in range(start, start + count):
            q, k, v = pool[t % 97]
            c.bounded_step(q, k, v, w, rope, 0.125, 1, out)
        return time.perf_counter() - begin

    first = min(run(200, 200 * i) for i in range(5))
    tracemalloc.start()
    base, _ = tracemalloc.get_traced_memory()
    run(1000, 1000)
    tracemalloc.stop()
    position = iter(range(2000, n - 1000))
    work = steps_done(lambda: run(1, next(position)), n - 3000)
    # 4 sinks and 16 rows of the ring, each scored and added once, however long the walk
    assert work == {(20, 20, 20, 4 * (2 * hd + 2 * hd + 20))}
    before = compiled.work()
    last = min(run(200, n - 1000 + 200 * i) for i in range(5))
    after = compiled.work()
    assert [after[w] - before[w] for w in after] == [1000 * count for count in next(iter(work))]
    assert c.seq_len == c.bounded.seen == n
    assert c.bounded_state_bytes() == c.memory_bytes() == 2 * window * hd * 4 + 8
    assert [id(x) for x in (c.bounded.ring_k, c.bounded.ring_v, c.bounded.undo_k)] == arrays
    assert base < 1_000_000
    fresh, _, _ = make(1, hd, window, 4)
    for t in range(n - 2 * window, n):
        q, k, v = pool[t % 97]
        got = poisoned(hd)
        fresh.bounded_step(q, k, v, w, rope, 0.125, 1, got)
    same_bits(got, out)  # the window is all there is: 100,000 positions leave no other trace
    with capsys.disabled():
        print(f" [ring: last/first {last / first:.2f}]", end="")
    assert state_of(c)
