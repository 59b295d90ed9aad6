"""Long walks on a ring of window 512: 40,000 tokens, and a captured step through 20,000."""

import numpy as np
import pytest

from memra_lowlevel import formats
from memra_lowlevel.cache import KvLayer, KvRing, swa_ring_rows
from memra_lowlevel.errors import RewindRefused
from memra_lowlevel.reference import attend as oracle

HEAD, WINDOW = 64, 512


def layers(device, max_ctx, rows):
    ring = KvRing(rows, WINDOW)
    return (
        KvLayer.allocate(device, max_ctx, 1, HEAD, window=WINDOW, ring=ring, name="ring"),
        KvLayer.allocate(device, max_ctx, 1, HEAD, window=WINDOW, name="flat"),
    )


class Feed:
    """Rows that are drawn once; every step takes other ones."""

    def __init__(self, device, stream, n, seed):
        rng = np.random.default_rng(seed)
        self.n, self.total = n, 997
        up = lambda *s: device.from_numpy(rng.normal(size=s).astype(np.float32), stream)  # noqa: E731
        self.k, self.v, self.q = up(self.total + n, HEAD), up(self.total + n, HEAD), up(n, 1, HEAD)
        self.outs = [device.zeros((n, 1, HEAD), np.float32, stream) for _ in range(2)]

    def rows(self, step):
        at = step * 31 % self.total
        return (x.view(4 * at * HEAD, (self.n, HEAD), np.float32) for x in (self.k, self.v))


@pytest.mark.slow
def test_forty_thousand_tokens(device, stream, scale):
    rows = swa_ring_rows(WINDOW, 1 << 20)
    total = 40_960 * scale
    ring, flat = layers(device, total, rows)
    assert ring.k.n_bytes == 5151 * ring.k_tok_bytes + 8 and ring.rows == 5151
    feed, steps, rebases = Feed(device, stream, 32, 0), 0, []
    while flat.len < total:
        base = ring.ring.base
        ring.prepare(stream, feed.n)
        if ring.ring.base != base:
            rebases.append((ring.len, ring.len - ring.ring.base))
        k, v = feed.rows(steps)
        for layer, out in zip((ring, flat), feed.outs, strict=True):
            layer.append(stream, k, v)
            layer.attend(stream, feed.q, out)
            layer.advance(stream, feed.n)
        got, want = (out.to_numpy(stream) for out in feed.outs)
        assert np.isfinite(want).all() and got.tobytes() == want.tobytes(), flat.len
        steps += 1
    print(f"{steps} steps, rebases (at, kept): {rebases}")
    # Full at 5120 of 5151 rows; each rebase keeps the window, its alignment and 512 rows more.
    assert [at for at, _ in rebases[:2]] == [5120, 9216] and len(rebases) >= 8 * scale
    assert {kept for _, kept in rebases} == {1024}
    ring.close()
    flat.close()


def test_a_step_captured_at_100_replays_through_20000(device, stream, scale):
    """One capture, no node update, rejections and rebases in between, equal to eager."""
    total = 20_000 * scale
    rows = swa_ring_rows(WINDOW, 1 << 20, chunk=512, slack=64)
    ring, flat = layers(device, total + 100, rows)
    start, feed = Feed(device, stream, 100, 1), Feed(device, stream, 40, 2)
    for layer, out in zip((ring, flat), start.outs, strict=True):
        layer.append(stream, *start.rows(0))
        layer.attend(stream, start.q, out)
        layer.advance(stream, 100)
    k, v = (device.zeros((40, HEAD), np.float32, stream) for _ in range(2))
    ring.append(stream, k, v)
    ring.attend(stream, feed.q, feed.outs[0])
    before = dict(device.driver.counts())
    with stream.capture("long step") as graph:
        ring.append(stream, k, v)
        ring.attend(stream, feed.q, feed.outs[0])
        ring.advance(stream, 40)
    exec_ = graph.instantiate()
    rng, steps, rebases, rejections = np.random.default_rng(3), 0, 0, 0
    while flat.len + 40 <= total:
        rebases += ring.prepare(stream, 40)
        new_k, new_v = feed.rows(steps)
        k.copy_from(stream, new_k)
        v.copy_from(stream, new_v)
        exec_.launch(stream)
        flat.append(stream, new_k, new_v)
        flat.attend(stream, feed.q, feed.outs[1])
        flat.advance(stream, 40)
        got, want = (out.to_numpy(stream) for out in feed.outs)
        assert got.tobytes() == want.tobytes(), flat.len
        drop = int(rng.integers(0, 2)) * int(rng.integers(1, 30))
        if drop:
            for layer in (ring, flat):
                layer.set_len(stream, layer.len - drop)
            rejections += 1
        steps += 1
    calls = {name: n - before.get(name, 0) for name, n in device.driver.counts().items()}
    print(f"{steps} steps, {rebases} rebases, {rejections} rejections")
    assert rebases >= 20 and rejections >= 100
    assert calls["cuStreamBeginCapture"] == calls["cuGraphInstantiate"] == 1
    assert calls["cuGraphLaunch"] == steps == exec_.n_launches
    assert not any(n for name, n in calls.items() if "SetParams" in name or "ExecUpdate" in name)
    exec_.close()
    ring.close()
    flat.close()


def test_appends_of_up_to_4096_rows(device, stream, scale):
    """Appends and rewinds of any size; ring = flat bit for bit, and both near float64."""
    total, n_q = 60_000 * scale, 4
    ring, flat = layers(device, total, swa_ring_rows(WINDOW, 1 << 20))
    rng = np.random.default_rng(11)
    k, v = (rng.standard_normal((5000, HEAD), dtype=np.float32) for _ in range(2))
    k_d, v_d = device.from_numpy(k, stream), device.from_numpy(v, stream)
    k_seen, v_seen = (f.decode(f.encode(x)) for f, x in ((formats.Q8_0, k), (formats.Q5_1, v)))
    q = rng.standard_normal((n_q, 1, HEAD), dtype=np.float32)
    q_d = device.from_numpy(q, stream)
    outs = [device.zeros(q.shape, np.float32, stream) for _ in range(2)]
    history = np.zeros(0, np.int64)  # which row each position holds
    counts = dict.fromkeys(("append", "large", "rebase", "rewind", "refused"), 0)
    while len(history) + 4096 <= total:
        n = int(np.exp(rng.uniform(0, np.log(4096.99))))
        if rng.random() < 0.3:
            far = 6000 if rng.random() < 0.5 else 600
            target = max(0, len(history) - int(rng.integers(1, far)))
            try:
                ring.set_len(stream, target)
            except RewindRefused:
                counts["refused"] += 1
            else:
                flat.set_len(stream, target)
                history = history[:target]
                counts["rewind"] += 1
        counts["rebase"] += ring.prepare(stream, n)
        counts["append"] += 1
        counts["large"] += n >= 2048
        at = int(rng.integers(0, 5000 - n))
        for layer, out in zip((ring, flat), outs, strict=True):
            cut = (x.view(4 * at * HEAD, (n, HEAD), np.float32) for x in (k_d, v_d))
            layer.append(stream, *cut)
            layer.advance(stream, n)
            rows = min(n, n_q)
            part = out.view(0, (rows, 1, HEAD), np.float32)
            part.fill(stream, 0xFF)
            layer.attend(stream, q_d.view(0, part.shape, np.float32), part, counted=True)
        history = np.concatenate([history, np.arange(at, at + n)])
        got, want = (out.to_numpy(stream)[:rows] for out in outs)
        assert got.tobytes() == want.tobytes(), len(history)
        assert ring.len == flat.len == len(history) == ring.len_d.to_numpy(stream)[0]
        first = max(0, len(history) - WINDOW - n_q)
        near = history[first:]
        model, _ = oracle.attend(
            q[:rows], k_seen[near][:, None], v_seen[near][:, None], len(history) - rows,
            base=first, window=WINDOW,
        )  # fmt: skip
        top = np.abs(model).max(axis=-1, keepdims=True)
        assert (np.abs(got - model) <= 1e-5 * top).all(), len(history)
    print(counts)
    assert counts["append"] >= 50 and counts["large"] >= 5 and counts["rebase"] >= 8
    assert counts["rewind"] >= 3 and counts["refused"] >= 3
    ring.close()
    flat.close()


def test_a_wide_layer_rebases_once_at_5148(device, stream):
    """8 kv heads of 128, 64 query heads: captured at 5,100, 60 steps in rounds of 4."""
    ring = KvLayer.allocate(
        device, 1 << 20, 8, 128, window=WINDOW, ring=KvRing(5151, WINDOW), name="wide ring"
    )
    flat = KvLayer.allocate(device, 5200, 8, 128, window=WINDOW, name="wide flat")
    rng = np.random.default_rng(12)
    up = lambda *s: device.from_numpy(rng.standard_normal(s, dtype=np.float32), stream)  # noqa: E731
    k, v = up(1020, 1024), up(1020, 1024)
    for layer in (ring, flat):
        for _ in range(5):
            layer.append(stream, k, v)
            layer.advance(stream, 1020)
    one = [x.view(0, (1, 1024), np.float32) for x in (up(1, 1024), up(1, 1024))]
    q, out, other = up(1, 64, 128), *(device.zeros((1, 64, 128), np.float32, stream) for _ in "ab")

    def step(layer, out):
        layer.append(stream, *one)
        layer.attend(stream, q, out)
        layer.advance(stream, 1)

    step(ring, out)
    ring.set_len(stream, 5100)
    with stream.capture("wide") as graph:
        step(ring, out)
    exec_ = graph.instantiate()
    rebases = []
    for i in range(60):
        if i % 4 == 0 and ring.prepare(stream, 4):
            rebases.append((ring.len, ring.len - ring.ring.base))
        at = 4 * 1024 * (17 * i)
        for mine, rows in zip(one, (k, v), strict=True):
            mine.copy_from(stream, rows.view(at, (1, 1024), np.float32))
        exec_.launch(stream)
        step(flat, other)
        got, want = out.to_numpy(stream), other.to_numpy(stream)
        assert np.isfinite(want).all() and got.tobytes() == want.tobytes(), i
    assert rebases == [(5148, 1052)]
    assert ring.ring.base == 4096 == ring.base_d.to_numpy(stream)[0]
    assert exec_.describe().node_updates == 0
    exec_.close()
    ring.close()
    flat.close()
