"""KvLayer on a ring: against flat planes bit for bit, rebases, and what a ring refuses."""

import numpy as np
import pytest
from test_kv_layer import HEAD, Pair, plane_rows, step, usable

from memra_lowlevel.cache import KvLayer, KvRing
from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    PlaneError,
    RewindRefused,
    RingLapped,
)


def ring_and_flat(device, window=40, chunk=16, slack=32, max_ctx=4000):
    from memra_lowlevel.cache import swa_ring_rows

    rows = swa_ring_rows(window, max_ctx, chunk=chunk, slack=slack)
    ring = KvRing(rows, window, slack=slack)
    return (
        KvLayer.allocate(device, max_ctx, 1, HEAD, window=window, ring=ring, name="ring"),
        KvLayer.allocate(device, max_ctx, 1, HEAD, window=window, name="flat"),
    )


def test_ring_equals_flat_bit_for_bit(device, stream, scale):
    """Random appends and rewinds; many rebases; outputs and rows equal to a flat plane's."""
    rng = np.random.default_rng(5)
    ring, flat = ring_and_flat(device, max_ctx=4000 * scale)
    assert ring.k.n_bytes < 200 * ring.k_tok_bytes
    counts = {"append": 0, "rebase": 0, "rewind": 0, "refused": 0, "rebase in draft": 0}
    while flat.len < 3000 * scale:
        base = ring.ring.base
        n = int(rng.integers(1, 17))
        if rng.random() < 0.3:
            target = max(0, flat.len - int(rng.integers(1, 60)))
            if ring.can_rewind_to(target):
                ring.set_len(stream, target)
                flat.set_len(stream, target)
                counts["rewind"] += 1
            else:
                with pytest.raises(RewindRefused):
                    ring.set_len(stream, target)
                counts["refused"] += 1
        pair = Pair(device, stream, rng, n, flat)
        other = device.empty(pair.out.shape, np.float32, stream)
        other.fill(stream, 0xFF)
        retain = ring.ring.retain_from(ring.len)
        write_row = ring.prepare_kv_append(stream, retain, n)
        assert write_row == ring.len - ring.ring.base
        assert ring.base_d.to_numpy(stream)[0] == ring.ring.base
        counts["rebase"] += ring.ring.base > base
        step(flat, stream, pair)
        pair.out, keep = other, pair.out
        step(ring, stream, pair)
        want = keep.to_numpy(stream)
        assert np.isfinite(want).all() and other.to_numpy(stream).tobytes() == want.tobytes()
        counts["append"] += 1
        if rng.random() < 0.4:  # a draft that is rejected, perhaps with a rebase in between
            keep_len, base = ring.len, ring.ring.base
            ring.prepare(stream, 8)
            ring.append(stream, *(getattr(Pair(device, stream, rng, 8, ring), x) for x in "kv"))
            ring.advance(stream, 8)
            ring.set_len(stream, keep_len)
            counts["rebase in draft"] += ring.ring.base > base
    start = ring.ring.base
    for side in "kv":
        assert plane_rows(ring, stream, side, start, ring.len) == plane_rows(
            flat, stream, side, start, flat.len
        )
    print(counts)
    assert counts["rebase"] >= 3 and counts["rebase in draft"] >= 1
    assert counts["rewind"] >= 20 and counts["refused"] >= 5
    for layer in (ring, flat):
        layer.close()


def test_overlapping_rebase_is_a_copy(device, stream):
    """Keep 600 rows from row 100 on: source and destination overlap by 500 rows."""
    layer = KvLayer.allocate(
        device, 5000, 1, HEAD, window=500, ring=KvRing(700, 500, slack=0), name="overlap"
    )
    rng = np.random.default_rng(6)
    for plane in (layer.k, layer.v):
        plane.copy_from(stream, rng.integers(0, 256, plane.n_bytes).astype(np.uint8))
    before = {"k": layer.k.to_numpy(stream), "v": layer.v.to_numpy(stream)}
    layer.set_len(stream, 700)
    assert layer.prepare_kv_append(stream, 100, 100) == 600
    for side, plane, tok in (("k", layer.k, layer.k_tok_bytes), ("v", layer.v, layer.v_tok_bytes)):
        got = plane.to_numpy(stream)[: 600 * tok]
        assert np.array_equal(got, before[side][100 * tok : 700 * tok])
    assert layer.ring.base == 100 == layer.base_d.to_numpy(stream)[0] and layer.len == 700
    layer.close()


def test_ring_refusals(device, stream):
    layer = KvLayer.allocate(
        device, 5000, 1, HEAD, window=40, ring=KvRing(100, 40, slack=0), name="small"
    )
    rng = np.random.default_rng(7)
    pair = Pair(device, stream, rng, 60, layer)
    step(layer, stream, pair)
    layer.prepare(stream, 40)
    pair = Pair(device, stream, rng, 40, layer)
    step(layer, stream, pair)
    assert layer.len == 100 and layer.ring.base == 0
    small = Pair(device, stream, rng, 1, layer)
    with pytest.raises(RingLapped, match="prepare_kv_append"):
        layer.append(stream, small.k, small.v)
    with pytest.raises(CapacityExceeded, match="prepare_kv_append"):
        layer.prepare_kv_append(stream, 0, 1)
    with pytest.raises(RingLapped):
        layer.prepare_kv_append(stream, 101, 1)
    assert layer.ring.base == 0 == layer.base_d.to_numpy(stream)[0]
    layer.prepare(stream, 1)
    with pytest.raises(RingLapped):
        layer.set_base(stream, 0)
    with pytest.raises(RewindRefused) as info:
        layer.set_len(stream, 0)
    assert info.value.asked == 0 and 0 < info.value.possible <= 100
    layer.set_base(stream, 0, reset=True)
    layer.set_len(stream, 0)
    assert layer.base_d.to_numpy(stream)[0] == 0
    usable(device, stream, layer)
    layer.close()


def test_a_ring_attends_no_more_than_its_window(device, stream):
    layer = KvLayer.allocate(device, 500, 1, HEAD, window=16, ring=KvRing(64, 16, slack=0))
    pair = Pair(device, stream, np.random.default_rng(8), 1, layer)
    for _ in range(70):
        layer.prepare(stream, 1)
        step(layer, stream, pair)
    assert layer.ring.base > 0
    q = device.zeros((1, 1, HEAD), np.float32, stream)
    out = device.from_numpy(np.full((1, 1, HEAD), np.nan, np.float32), stream)
    for window in (0, 17, 500):  # how many rows these found would depend on the last rebase
        with pytest.raises(PlaneError, match="keeps rows for a window of 16"):
            layer.attend(stream, q, out, window=window)
    with pytest.raises(ArgumentError, match="window"):
        layer.attend(stream, q, out, window=-1)
    assert np.isnan(out.to_numpy(stream)).all()
    for window in (1, 16, None):
        layer.attend(stream, q, out, window=window)
        assert np.isfinite(out.to_numpy(stream)).all()
    layer.close()


def test_a_chain_on_a_ring_replays_across_rebases(device, stream, scale):
    """Captured once; rebases are made between rounds; no node is updated; equal to eager."""
    rng = np.random.default_rng(8)
    ring, flat = ring_and_flat(device, window=64, chunk=8, slack=32, max_ctx=3000 * scale)
    slot = Pair(device, stream, rng, 1, ring)
    step(ring, stream, slot)
    ring.set_len(stream, 0)
    with stream.capture("ring step") as graph:
        step(ring, stream, slot)
    exec_ = graph.instantiate()
    before = dict(device.driver.counts())
    pairs = [Pair(device, stream, rng, 1, ring) for _ in range(64)]
    rebases = rejections = refused = 0
    while flat.len < 1500 * scale:
        base = ring.ring.base
        ring.prepare(stream, 4)
        rebases += ring.ring.base > base
        for _ in range(4):
            pair = pairs[int(rng.integers(64))]
            step(flat, stream, pair)
            for name in ("k", "v", "q"):
                getattr(slot, name).copy_from(stream, getattr(pair, name))
            exec_.launch(stream)
            assert slot.out.to_numpy(stream).tobytes() == pair.out.to_numpy(stream).tobytes()
        drop = int(rng.integers(0, 4))
        rejections += drop > 0
        for layer in (ring, flat):
            layer.set_len(stream, flat.len - drop if layer is ring else ring.len)
        assert ring.len == flat.len == ring.len_d.to_numpy(stream)[0]
        if ring.len - ring.ring.base > ring.rows - 1 and not refused:
            with pytest.raises(RingLapped):
                exec_.launch(stream)
            refused += 1
    counts = {k: n - before.get(k, 0) for k, n in device.driver.counts().items()}
    print(f"rebases {rebases}, rounds with a rejection {rejections}")
    assert rebases >= 3 and rejections >= 50
    assert not any(n for k, n in counts.items() if "SetParams" in k or k == "cuGraphExecUpdate")
    assert not counts.get("cuStreamBeginCapture") and not counts.get("cuGraphInstantiate")
    exec_.close()
    ring.close()
    flat.close()


def test_the_smallest_ring_takes_rows_for_ever(device, stream):
    layer = KvLayer.allocate(device, 256, 1, HEAD, window=16, ring=KvRing(51, 16, slack=4))
    pair = Pair(device, stream, np.random.default_rng(11), 1, layer)
    for _ in range(200):
        layer.prepare(stream, 1)
        layer.append(stream, pair.k, pair.v)
        layer.advance(stream, 1)
    layer.close()


@pytest.fixture
def ringed(device, stream):
    """A ring of 83 rows at base 0 that holds 60."""
    ring = KvRing(83, 16, slack=32)
    layer = KvLayer.allocate(device, 256, 1, HEAD, window=16, ring=ring, name="ringed")
    step(layer, stream, Pair(device, stream, np.random.default_rng(12), 60, layer))
    yield layer
    layer.close()


def test_a_ring_takes_no_length_that_it_cannot_hold(device, stream, ringed):
    for n in (84, 200, 256):
        with pytest.raises(RingLapped, match=r"ringed.*\[0, 83\).*prepare"):
            ringed.set_len(stream, n)
        with pytest.raises(RingLapped, match=r"ringed.*\[0, 83\).*prepare"):
            ringed.advance(stream, n - 60)
        assert ringed.len == 60 == ringed.len_d.to_numpy(stream)[0]
        assert not ringed.can_rewind_to(n)
    ringed.set_len(stream, 83)
    usable(device, stream, ringed)


def test_attend_is_refused_rows_that_cannot_be(device, stream, ringed):
    flat = KvLayer.allocate(device, 64, 1, HEAD, name="flat")
    step(flat, stream, Pair(device, stream, np.random.default_rng(13), 60, flat))

    def ask(layer, n, **options):
        pair = Pair(device, stream, np.random.default_rng(14), n, layer)
        if layer.len + n <= layer.rows and not options:
            layer.append(stream, pair.k, pair.v)
        return pair.out, lambda: layer.attend(stream, pair.q, pair.out, **options)

    for layer, n, options, error in (
        (flat, 5, {}, CapacityExceeded),
        (flat, 61, {"counted": True}, PlaneError),
        (ringed, 24, {}, RingLapped),
    ):
        out, call = ask(layer, n, **options)
        with pytest.raises(error, match=rf"{layer.name}\.attend.*Nothing was") as info:
            call()
        assert type(info.value) is error
        assert np.isnan(out.to_numpy(stream)).all(), "nothing was launched"
    for layer, n, options in (
        (flat, 4, {}), (flat, 60, {"counted": True}), (ringed, 23, {}),
    ):  # fmt: skip
        out, call = ask(layer, n, **options)
        call()
        assert np.isfinite(out.to_numpy(stream)).all()
    out, call = ask(flat, 5)
    with stream.capture("later") as graph:  # where it starts is known only when it is launched
        call()
    graph.close()
    flat.close()
