"""Device mirrors: the bits of the host, on every device."""

from __future__ import annotations

import numpy as np
import pytest
from lkv_data import MODES, fill, gen, poisoned, same_bits

from memra_lowlevel.compile import DEFAULT_ARCHS
from memra_lowlevel.errors import ArgumentError, CapacityExceeded, KvStateError
from memra_lowlevel.kernels import counters, registry
from memra_lowlevel.kernels import layer_kv as launches
from memra_lowlevel.layer_kv import (
    BoundedRope,
    BoundedWeights,
    KvMode,
    LayerKvCache,
    O1Rect,
    PhaseCore,
    plain,
)
from memra_lowlevel.layer_kv.evict import evict_recent
from memra_lowlevel.layer_kv.mirror import FarMirror, RingMirror, RowMirror


def up(device, stream, a):
    return device.from_numpy(np.ascontiguousarray(a), stream)


def nans(device, stream, *shape):
    return up(device, stream, np.full(shape, np.nan, np.float32))


def device_attend(mirror, stream, q, hpk, **kw):
    device, rows = mirror.device, mirror.rows
    heads = rows.n_kv_heads * hpk
    out = nans(device, stream, heads, rows.hd)
    imp = device.zeros(rows.cap, np.float32, stream)
    scores = nans(device, stream, heads, rows.cap)
    sinks = kw.pop("sinks", None)
    mirror.attend(
        stream, up(device, stream, q), out, scores, n_heads=heads, imp=imp,
        sinks=None if sinks is None else up(device, stream, sinks), **kw,
    )  # fmt: skip
    return out.to_numpy(stream), imp.to_numpy(stream)


def host_attend(c, q, hpk, cap, window=0, softcap=0.0, sinks=None):
    out, imp = [], np.zeros(cap, np.float32)
    q = q.reshape(c.num_kv_heads, -1)
    for h in range(c.num_kv_heads):
        o = poisoned(q.shape[1])
        first = max(c.head_len(h) - window, 0) if window else 0
        own = None if sinks is None else sinks[h * hpk : h * hpk + hpk]
        c.attend_group(q[h], h, o, imp, None, first, softcap, own)
        out.append(o)
    return np.concatenate(out).reshape(-1, c.head_dim), imp


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hd", [32, 65])
def test_rows(device, stream, mode, hd):
    c = LayerKvCache(2, hd, mode=mode)
    mirror = RowMirror(device, c, 96, stream)
    q = gen(1, 2 * 3 * hd, 2.0)
    sent = []
    for n, kw in (
        (0, {}), (1, {}), (6, {"window": 3}), (40, {"softcap": 5.0}),
        (20, {"sinks": gen(9, 6, 3.0), "window": 33}),
    ):  # fmt: skip
        fill(c, n, salt=11 * n)
        sent.append(mirror.sync(stream))
        got, imp = device_attend(mirror, stream, q, 3, **kw)
        want, want_imp = host_attend(c, q, 3, 96, **kw)
        same_bits(got, want)
        same_bits(imp, want_imp)
    # the freeze rewrites every row, so that one sync sends all of them
    assert sent == [0, 1, 6, 40, 67 if mode.quantised else 20]


@pytest.mark.parametrize("mode", MODES)
def test_what_travels(device, stream, mode):
    c = LayerKvCache(1, 8, mode=mode)
    fill(c, 70)
    first, second = (RowMirror(device, c, 80, stream) for _ in range(2))
    q = gen(1, 8)

    def check(*counts):
        for mirror, count in zip((first, second), counts, strict=True):
            if count is not None:
                assert mirror.sync(stream) == count
                same_bits(device_attend(mirror, stream, q, 1)[0], host_attend(c, q, 1, 80)[0])

    check(70, 70)
    check(0, 0)
    c.truncate_last(5)
    fill(c, 5, salt=900)  # the old count, other rows
    check(5, None)
    c.truncate_last(2)
    fill(c, 4, salt=1900)
    check(4, 7)
    evict_recent(c, 72 - 10)
    fill(c, 10, salt=77)
    assert c.seq_len == 72
    check(72, 72)
    for i in range(100):
        c.truncate_last(1)
        fill(c, 1 + i % 2 * (c.seq_len < 75), salt=i)
    assert first.sync(stream) <= c.seq_len
    same_bits(device_attend(first, stream, q, 1)[0], host_attend(c, q, 1, 80)[0])
    fill(c, 81 - c.seq_len)
    with pytest.raises(CapacityExceeded):
        first.sync(stream)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [0, 66])
def test_append_on_the_device(device, stream, mode, n):
    c = LayerKvCache(2, 33, mode=mode)
    fill(c, n)
    mirror = RowMirror(device, c, n + 3, stream)
    mirror.sync(stream)
    for p in range(3):
        k, v = gen(40 + p, 66, 3.0), gen(50 + p, 66)
        if p == 1:
            k[:] = 0
        mirror.append(stream, up(device, stream, k), up(device, stream, v))
        c.append(k, v)
    for name in c._stores.planes():
        plane = getattr(mirror.rows, name).to_numpy(stream)
        assert (plane == getattr(c._stores, name)[:, : n + 3]).all(), name
    q = gen(1, 66)
    same_bits(device_attend(mirror, stream, q, 1)[0], host_attend(c, q, 1, n + 3)[0])
    with pytest.raises(CapacityExceeded):
        mirror.append(stream, up(device, stream, k), up(device, stream, v))
    before = mirror.rows.rows_d.to_numpy(stream)
    launches.append(stream, mirror.rows, up(device, stream, k), up(device, stream, v))
    assert before == mirror.rows.rows_d.to_numpy(stream)  # a row without room is dropped


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_every_architecture_compiles_without_spills(arch):
    for source, image in registry.images(arch, launches.SPECS).items():
        for name, used in image.resources.items():
            assert (used.spills_bytes, used.local_bytes) == (0, 0), (source, name, used)


def test_captured_steps(device, stream):
    c = LayerKvCache(1, 32, mode=KvMode.F32)
    fill(c, 3)
    mirror = RowMirror(device, c, 16, stream)
    mirror.sync(stream)
    launches.prepare(device)
    k, v, q = (up(device, stream, gen(s, 32)) for s in (60, 61, 62))
    out, scores = nans(device, stream, 1, 32), nans(device, stream, 1, 16)
    counters.prepare(device)

    with stream.capture("step") as graph:
        launches.append(stream, mirror.rows, k, v)
        counters.add_counters(stream, mirror.rows.rows_d, 1)
        mirror.attend(stream, q, out, scores, n_heads=1)
    step = graph.instantiate()
    for _ in range(5):
        step.launch(stream)
        c.append(gen(60, 32), gen(61, 32))
    same_bits(out.to_numpy(stream), host_attend(c, gen(62, 32), 1, 16)[0])
    step.close()


def test_a_softmax_that_does_not_exist(device, stream):
    c = LayerKvCache(1, 8, mode=KvMode.F32)
    fill(c, 4)
    mirror = RowMirror(device, c, 8, stream)
    mirror.sync(stream)
    q = gen(1, 16)
    q[9] = np.nan
    got, _ = device_attend(mirror, stream, q, 2)
    assert np.isnan(got[1]).all() and not np.isnan(got[0]).any()


def test_refusals(device, stream):
    c = LayerKvCache(1, 8, mode=KvMode.F32)
    ring = LayerKvCache(1, 8, mode=KvMode.F32)
    ring.install_bounded(4)
    with pytest.raises(KvStateError):
        RowMirror(device, ring, 8, stream)
    with pytest.raises(KvStateError):
        FarMirror(device, c, stream)
    mirror = RowMirror(device, c, 8, stream)
    mirror.sync(stream)
    q = up(device, stream, gen(1, 8))
    with pytest.raises(ArgumentError):
        mirror.attend(stream, q, q, q, n_heads=2)
    with pytest.raises(ArgumentError):
        mirror.append(stream, q.view(0, (4,), np.float32), q)
    quant = LayerKvCache(1, 8, mode=KvMode.Q8())
    fill(quant, 64)
    mirror = RowMirror(device, quant, 80, stream)
    mirror.sync(stream)
    with pytest.raises(KvStateError, match="freeze"):
        mirror.append(stream, q, q)
    ragged = LayerKvCache(2, 4, mode=KvMode.F32, allow_ragged=True)
    fill(ragged, 1)
    fill(ragged, 1, alive=[1, 0])
    with pytest.raises(KvStateError):
        RowMirror(device, ragged, 8, stream).sync(stream)


@pytest.mark.parametrize("n_sinks,half", [(2, 16), (0, 10), (1, 0)])
def test_ring(device, stream, n_sinks, half):
    nkv, hpk, hd, window = 2, 2, 33, 6
    c = LayerKvCache(nkv, hd, mode=KvMode.F32)
    c.install_bounded(window)
    z = gen(7, 2 * nkv * n_sinks * hd, 1.5).reshape(2, nkv, n_sinks, hd)
    w, rope = BoundedWeights(z[0], z[1], window), BoundedRope(window, np.abs(gen(8, half)))
    mirror = None
    for t in range(16):
        q, k, v = gen(t, nkv * hpk * hd, 1.5), gen(t + 99, nkv * hd, 1.5), gen(t + 199, nkv * hd)
        if t in (0, 9):  # from the start, and from the middle of a walk
            mirror = RingMirror(device, c, w, rope, stream)
        out = poisoned(q.size)
        c.bounded_step(q, k, v, w, rope, 0.3, nkv * hpk, out)
        got = nans(device, stream, q.size)
        mirror.step(
            stream, *(up(device, stream, x) for x in (q, k, v)), got, scale=0.3, num_heads=nkv * hpk
        )
        same_bits(got.to_numpy(stream), out)
        same_bits(mirror.ring_k.to_numpy(stream), c.bounded.ring_k)
        assert mirror.seen_d.to_numpy(stream) == t + 1


@pytest.mark.parametrize("delta", [False, True])
def test_phase(device, stream, delta):
    nh, n_phase, dv = 3, 2, 130
    core = PhaseCore(nh, n_phase, dv, np.full(nh * 4, 0.9), delta=delta)
    state = gen(1, nh * 4 * dv).reshape(nh, 4, dv)
    state_d = up(device, stream, state)
    run = plain.phase_delta if delta else plain.phase
    for t in range(3):
        fk, fq = (core._features(gen(s + t, nh * n_phase, 3.0).reshape(nh, -1)) for s in (5, 25))
        v, gate = gen(t + 40, nh * dv).reshape(nh, dv), np.abs(gen(t, nh))
        want = np.empty((nh, dv), np.float32)
        run(core.decay, fk, fq, v, gate, state, want)
        out = nans(device, stream, nh, dv)
        launches.phase_step(
            stream, *(up(device, stream, x) for x in (core.decay, fk, fq, v, gate)), state_d, out,
            delta=delta,
        )  # fmt: skip
        same_bits(out.to_numpy(stream), want)
        same_bits(state_d.to_numpy(stream), state)


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("rect", list(O1Rect))
def test_override(device, stream, rect, sink):
    c = LayerKvCache(2, 8, mode=KvMode.F32)
    c.o1_begin(4, 5, sink, rect)
    for p in range(30):
        c.append(gen(p, 16, 4.0), gen(p + 500, 16))
        c.o1_push_q(gen(p + 900, 32, 4.0))
    assert c.o1_seal(4)
    mirror = FarMirror(device, c, stream)
    for p in range(30, 45):
        q, k, v = gen(p + 900, 32, 4.0), gen(p, 16, 4.0), gen(p + 500, 16)
        want = c.o1_step(q, k, v, 4)
        out = nans(device, stream, 32)
        mirror.step(stream, *(up(device, stream, x) for x in (q, k, v)), out)
        same_bits(out.to_numpy(stream), want)
    s = c.o1.state
    for name in ("mu", "z", "t", "win_k", "win_v"):
        same_bits(getattr(mirror.state, name).to_numpy(stream), getattr(s, name))
    assert mirror.state.book_d.to_numpy(stream).tolist() == [s.win_len, s.win_head, s.far_len]
