"""Long walks on a ring of window 512: 40,000 tokens, and a captured step through 20,000."""

import numpy as np
import pytest

from memra_lowlevel.cache import KvLayer, KvRing, swa_ring_rows

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
