"""Cache: planes of a plan, all or nothing, snapshots, rollback, stages, bytes."""

import gc
import random

import numpy as np
import pytest

from memra_lowlevel import Device
from memra_lowlevel.cache import (
    Cache,
    CacheSnapshot,
    KvCache,
    LatentKvCache,
    LayerPlan,
    ModelPlan,
    Recurrent,
    SlidingKvCache,
    StreamKvDev,
    cache_bytes_per_token,
    cache_ring_bytes_per_token,
    cache_ring_row_cap,
    policy,
)
from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    CaptureForbidden,
    PlaneError,
    RestoreRefused,
    RewindRefused,
    SnapshotRefused,
)
from memra_lowlevel.graph import verify_counters

HEAD, D = 64, 32
FULL = LayerPlan(KvCache(), HEAD, HEAD, HEAD, HEAD)
SLIDE = LayerPlan(SlidingKvCache(40), HEAD, HEAD, HEAD, HEAD)
RECUR = LayerPlan(Recurrent(3 * D, 4, D * D))
MIXED = ModelPlan((FULL, SLIDE, RECUR, FULL, SLIDE, RECUR))
RING = {"ring": True, "ring_chunk": 24, "ring_slack": 32}


class Net:
    """A made-up model over a cache: what a row does depends on all rows before it."""

    def __init__(self, device, stream, seed=0):
        self.device, self.stream = device, stream
        rng = np.random.default_rng(seed)
        up = lambda *s: device.from_numpy(rng.normal(size=s).astype(np.float32), stream)  # noqa: E731
        self.k, self.v, self.rows = up(300, HEAD), up(300, HEAD), up(300, 3 * D)
        self.q = up(300, 2, HEAD)
        self.gates = [up(300, 1), up(300, 1)]
        self.fixed = [up(3 * D, 4), up(1), up(1)]
        self.a = device.from_numpy(np.array([-0.5], np.float32), stream)

    def cut(self, buffer, tokens):
        """Rows chosen by token ids, which must be consecutive: a view."""
        first, width = tokens[0], int(np.prod(buffer.shape[1:]))
        assert list(tokens) == list(range(first, first + len(tokens)))
        return buffer.view(4 * first * width, (len(tokens), *buffer.shape[1:]), np.float32)

    def forward(self, cache, tokens, *, scan=False, only_recur=False, outs=None):
        """Launch all layers; outputs per layer as buffers."""
        stream, n = self.stream, len(tokens)
        out = outs if outs is not None else self.buffers(cache, n)
        for il, (kv, recur) in enumerate(zip(cache.kv, cache.recur, strict=True)):
            if kv is not None and not only_recur:
                kv.append(stream, self.cut(self.k, tokens), self.cut(self.v, tokens))
                kv.attend(stream, self.cut(self.q, tokens), out[il])
            if recur is not None:
                alpha, beta = (self.cut(g, tokens) for g in self.gates)
                w, _, dt = self.fixed
                call = recur.scan if scan else recur.step
                call(stream, self.cut(self.rows, tokens), w, alpha, self.a, dt, beta, out[il])
        return out

    def buffers(self, cache, n):
        made = []
        for kv, recur in zip(cache.kv, cache.recur, strict=True):
            shape = (n, 2, HEAD) if kv is not None else (n, 1, D)
            buffer = self.device.empty(shape, np.float32, self.stream)
            buffer.fill(self.stream, 0xFF)
            made.append(buffer if kv is not None or recur is not None else None)
        return made

    def read(self, out):
        arrays = [b.to_numpy(self.stream) for b in out]
        assert all(np.isfinite(a).all() for a in arrays)
        return [[row.tobytes() for row in a] for a in arrays]

    def step(self, cache, tokens, **options):
        cache.prepare(self.stream, len(tokens))
        out = self.forward(cache, tokens, **options)
        cache.advance(self.stream, len(tokens), scanned=options.get("scan", False))
        return self.read(out)


def make(device, stream, model=MIXED, max_ctx=3000, **options):
    dev = StreamKvDev(device, stream)
    return Cache.new(dev, model, max_ctx, **{"round_rows": 8, **options})


def last_rows(steps):
    return [rows[-1] for rows in steps]


def check_mirrors(cache, stream):
    for group in cache.stages:
        counters = [group.lengths.counter]
        if group.lengths.slots is not None:
            counters.append(group.lengths.slots)
        verify_counters(stream, counters)
    for layer in cache.planes():
        if layer.ring is not None:
            assert layer.base_d.to_numpy(stream)[0] == layer.ring.base


def test_planes_of_a_plan(device, stream):
    model = ModelPlan((*MIXED.layers, FULL), n_mtp=1, shared_kv_layers=2)
    cache = make(device, stream, model, **RING)
    kinds = [
        "kv" if a else "recur" if b else "-" for a, b in zip(cache.kv, cache.recur, strict=True)
    ]
    assert kinds == ["kv", "kv", "recur", "kv", "-", "-", "kv"]
    assert cache.has_swa_ring() and cache.kv[1].ring.window == 40
    assert cache.latent == cache.tp_kv == [None] * 7
    assert len(list(cache.planes())) == 3 and cache.mtp is not None
    cache.advance(stream, 5)
    assert cache.pos == cache.len == 5 and cache.mtp.len == 0, "draft blocks move by themselves"
    cache.mtp.advance(stream, 2)
    assert cache.len == 5 and cache.mtp.len == 2
    table = cache.describe()["layers"]
    assert [row["layer"] for row in table] == [0, 1, 2, 3, 6]
    assert {"rows", "bytes", "len", "base", "ring_used"} <= set(table[1])
    with pytest.raises(PlaneError, match="group"):
        cache.kv[0].advance(stream, 1)
    with pytest.raises(PlaneError, match="cache"):
        cache.recur[2].select_slot(stream, 1)
    cache.close()
    cache.close()
    latent = make(device, stream, ModelPlan((LayerPlan(LatentKvCache(64)),)))
    assert latent.latent[0].width == 64 and latent.kv == [None]
    latent.close()
    with pytest.raises(PlaneError, match="V heads"):
        make(device, stream, ModelPlan((LayerPlan(KvCache(), 128, 64, 64, 64),)))


def test_one_launch_moves_every_counter(device, stream):
    cache = make(device, stream)
    gc.collect()  # what other tests dropped would free its buffers in between
    before = dict(device.driver.counts())
    cache.advance(stream, 3)
    moved = {k: n - before.get(k, 0) for k, n in device.driver.counts().items()}
    assert sum(moved.values()) == 1
    check_mirrors(cache, stream)
    assert cache.stages[0].slot_counter == 3
    cache.close()


def test_all_or_nothing(device, stream):
    cache = make(device, stream, max_ctx=200, **RING)
    net = Net(device, stream)
    net.step(cache, range(8))
    for refused in (
        lambda: cache.set_len(stream, 201),
        lambda: cache.set_len(stream, -1),
        lambda: cache.advance(stream, 193),
        lambda: cache.prepare(stream, 193),
        lambda: cache.prepare(stream, 120),
    ):
        with pytest.raises((CapacityExceeded, ArgumentError)):  # no length is below 0
            refused()
        assert cache.len == 8
        check_mirrors(cache, stream)
    with pytest.raises(CaptureForbidden), stream.capture("scan"):
        cache.advance(stream, 4, scanned=True)
    check_mirrors(cache, stream)
    cache.close()


@pytest.mark.parametrize("options", [{}, RING], ids=["flat", "ring"])
def test_verify_then_every_rollback_then_go_on(device, stream, options):
    """A round of K + 1 rows rolled back to each keep, then more: bits of a run without it."""
    net = Net(device, stream)
    for keep in range(1, 7):
        cache, plain = (make(device, stream, **options) for _ in range(2))
        for c in (cache, plain):
            net.step(c, range(20), scan=True)
            for t in range(20, 40):
                net.step(c, [t])
        snap = cache.snapshot(stream)
        assert cache.can_rollback(snap)
        net.step(cache, range(100, 106))
        assert cache.rollback(stream, snap, keep) == 0, "by slots, nothing is replayed"
        for t in range(100, 100 + keep):
            net.step(plain, [t])
        assert cache.pos == plain.pos == 40 + keep
        check_mirrors(cache, stream)
        for t in range(200, 212):
            assert net.step(cache, [t]) == net.step(plain, [t])
        for c in (cache, plain, snap):
            c.close()


def test_rollback_beyond_the_slots_replays(device, stream):
    """More steps than states are kept: the snapshot's copies come back, KV rows stay."""
    net = Net(device, stream)
    cache, plain = (make(device, stream, round_rows=2) for _ in range(2))
    for c in (cache, plain):
        for t in range(10):
            net.step(c, [t])
    snap = cache.snapshot(stream)
    assert snap.bytes() == 2 * 4 * (3 * D * 3 + D * D)
    for t in range(10, 25):
        net.step(cache, [t])
    assert cache.rollback(stream, snap, 5) == 5
    assert (cache.pos, cache.len) == (10, 15)
    with pytest.raises(PlaneError, match="replay"):
        cache.advance(stream, 1)
    with pytest.raises(SnapshotRefused):
        cache.snapshot(stream)
    for at in (10, 12, 14):
        n = min(2, 15 - at)
        net.forward(cache, range(at, at + n), only_recur=True)
        cache.advance(stream, n, replay=True)
    assert cache.pos == 15
    with pytest.raises(PlaneError):
        cache.advance(stream, 1, replay=True)
    for t in range(10, 15):
        net.step(plain, [t])
    for t in range(40, 46):
        assert net.step(cache, [t]) == net.step(plain, [t])
    check_mirrors(cache, stream)
    for c in (cache, plain, snap):
        c.close()


def test_a_rollback_that_is_left_out_shows(device, stream):
    """The red arm: without the rollback the outputs differ."""
    net = Net(device, stream)
    cache, plain = (make(device, stream) for _ in range(2))
    for c in (cache, plain):
        net.step(c, range(8))
    net.step(cache, range(100, 104))
    assert net.step(cache, [50]) != net.step(plain, [50])
    cache.close()
    plain.close()


def test_snapshots(device, stream):
    net = Net(device, stream)
    cache = make(device, stream, **RING)
    snap = cache.snapshot(stream)
    net.step(cache, range(8))
    calls = device.driver.counts()
    allocations = calls.get("cuMemAllocAsync", 0) + calls.get("cuMemAlloc", 0)
    cache.snapshot_into(stream, snap)
    calls = device.driver.counts()
    assert calls.get("cuMemAllocAsync", 0) + calls.get("cuMemAlloc", 0) == allocations
    assert snap.pos == 8 and snap.kv_len == [8, 8, None, 8, 8, None]
    assert snap.tp_kv_len == [None] * 6
    other = make(device, stream, ModelPlan((FULL, RECUR)))
    with pytest.raises(SnapshotRefused):
        other.snapshot_into(stream, snap)
    with pytest.raises(RestoreRefused):
        other.rollback(stream, snap)
    for accept in (-1, 1):
        with pytest.raises(RestoreRefused):
            cache.rollback(stream, snap, accept)
        assert not cache.can_rollback(snap, accept)
    while cache.kv[1].ring.base < 40:
        net.step(cache, range(8))
    length = cache.len
    with pytest.raises(RewindRefused, match="full re-prime"):
        cache.rollback(stream, snap)
    assert not cache.can_rollback(snap)
    assert cache.len == length
    check_mirrors(cache, stream)
    cache.mark_tainted()
    with pytest.raises(PlaneError, match="decode"):
        cache.ensure_usable("decode")
    with pytest.raises(SnapshotRefused):
        cache.snapshot(stream)
    with pytest.raises(SnapshotRefused):
        cache.snapshot_into(stream, snap)
    with pytest.raises(RestoreRefused):
        cache.rollback(stream, snap)
    cache.reset(stream)
    cache.ensure_usable("decode")
    assert cache.len == 0 == cache.kv[1].ring.base
    check_mirrors(cache, stream)
    first = net.step(cache, range(8))
    fresh = make(device, stream, **RING)
    assert first == net.step(fresh, range(8)), "a reset cache is a new one"
    for c in (cache, other, fresh, snap):
        c.close()


def test_a_captured_round_on_a_mixed_cache(device, stream):
    """Captured once; rebases, rejections and replays between; equal to eager steps."""
    net = Net(device, stream)
    cache, plain = (make(device, stream, **(RING if i else {})) for i in (1, 0))
    for c in (cache, plain):
        net.step(c, range(3))
    out = net.buffers(cache, 4)
    tokens = range(60, 64)
    cache.prepare(stream, 4)
    length = cache.len
    net.forward(cache, tokens, outs=out)
    with stream.capture("round") as graph:
        net.forward(cache, tokens, outs=out)
        cache.advance(stream, 4)
    exec_ = graph.instantiate()
    assert cache.len == length
    rng, rebases, rejected = random.Random(1), 0, 0
    before = dict(device.driver.counts())
    for _ in range(120):
        rebases += cache.prepare(stream, 4)
        exec_.launch(stream)
        got = net.read(out)
        assert got == net.step(plain, tokens)
        drop = rng.choice([0, 0, 1, 2, 3])
        rejected += drop > 0
        for c in (cache, plain):
            c.set_len(stream, c.len - drop)
        check_mirrors(cache, stream)
    calls = {k: n - before.get(k, 0) for k, n in device.driver.counts().items()}
    assert rebases >= 3 and rejected >= 30
    assert not any(n for k, n in calls.items() if "SetParams" in k or k == "cuGraphExecUpdate")
    assert not calls.get("cuStreamBeginCapture")
    exec_.close()
    cache.close()
    plain.close()


def test_stages_over_devices(device, stream):
    """The same outputs in two stages as in one; every stage has its layers and its counters."""
    net = Net(device, stream)
    one = make(device, stream, **RING)
    second = Device("host:1") if device.kind == "host" else device
    far = second.stream(name="second")
    devs = [StreamKvDev(device, stream), StreamKvDev(second, far)]
    two = Cache.new_ppn(devs, MIXED, 3000, [0, 3, 6], round_rows=8, **RING)
    assert [sorted([*g.kv, *g.recur]) for g in two.stages] == [[0, 1, 2], [3, 4, 5]]
    assert two.kv[3].device == second and two.kv[0].device == device
    other = Net(second, far)
    for step in range(40):
        tokens = range(step, step + 4)
        want = net.step(one, tokens)
        two.prepare(stream, 4)
        got = []
        for il in range(6):
            near = il < 3
            part = net if near else other
            view = _OneLayer(two, il)
            got += part.read(b for b in part.forward(view, tokens) if b is not None)
        two.advance(stream, 4)
        assert got == want
    assert two.len == one.len == 160
    assert all(layer.ring is None or layer.ring.base > 0 for layer in two.planes())
    snap = two.snapshot(stream)
    two.advance(stream, 3)
    with pytest.raises(RewindRefused):
        two.rollback(stream, snap, 4) if two.can_rollback(snap, 4) else two.set_len(stream, 1)
    assert two.rollback(stream, snap, 0) == 0 and two.len == 160
    check_mirrors_of_stages(two, stream, far)
    if second is not device:
        with pytest.raises(PlaneError):
            _ = two.counters
    for fence in ([0, 6], [0, 4, 3], [1, 3, 6], [0, 3, 5]):
        with pytest.raises(PlaneError, match="fence"):
            Cache.new_ppn(devs, MIXED, 100, fence)
    for c in (one, two, snap):
        c.close()
    far.close()
    if second is not device:
        second.close()


class _OneLayer:
    """A cache of which only one layer is run."""

    def __init__(self, cache, il):
        self.kv = [k if i == il else None for i, k in enumerate(cache.kv)]
        self.recur = [r if i == il else None for i, r in enumerate(cache.recur)]


def check_mirrors_of_stages(cache, *streams):
    for group, stream in zip(cache.stages, streams, strict=True):
        verify_counters(stream, [group.lengths.counter, group.lengths.slots])


def random_model(rng):
    def layer():
        heads = rng.randint(1, 3)
        kind = rng.choice(["full", "full", "gemma_global", "gemma_window"])
        state = rng.choice([KvCache(), SlidingKvCache(rng.randint(1, 90)), None])
        if state is None:
            return LayerPlan(Recurrent(32 * rng.randint(1, 4), rng.randint(1, 8), 64))
        return LayerPlan(state, 64 * heads, 128 * heads, 64, 128, kind)

    layers = tuple(layer() for _ in range(rng.randint(1, 6)))
    return ModelPlan(layers, 0, rng.randint(0, len(layers) - 1))


def test_bytes_are_what_the_allocator_gave(device, stream):
    """For random plans: accounting of rows, plus an itemised rest, is the memory that is gone."""
    rng = random.Random(2)
    policy.set_swa_ring_default(True)
    for _ in range(25):
        model = random_model(rng)
        max_ctx = rng.randint(100, 9000)
        free = device.memory_bytes()[0]
        cache = make(device, stream, model, max_ctx)
        report = cache.describe()
        items = report["items"][0]
        total, ring = cache_bytes_per_token(model), cache_ring_bytes_per_token(model)
        windows = {
            p.state.window for i, p in enumerate(model.layers)
            if isinstance(p.state, SlidingKvCache) and model.owns_plane(i)
        }  # fmt: skip
        if len(windows) <= 1:
            cap = cache_ring_row_cap(model)
            want = (total - ring) * max_ctx + ring * min(max_ctx, cap)
            assert items["rows"] == want
        planes = list(cache.planes())
        recurs = [r for r in cache.recur if r is not None]
        assert items["rows"] + items["pads"] == sum(p.k.n_bytes + p.v.n_bytes for p in planes)
        assert items["pads"] == 16 * len(planes)
        assert items["recurrent"] == sum(r.conv.n_bytes + r.ssm.n_bytes for r in recurs)
        parts = ("rows", "pads", "recurrent", "counters", "alignment")
        assert sum(items[p] for p in parts) == items["total"] == report["bytes"]
        assert cache.stages[0]._arena.used_bytes <= items["total"]
        assert items["alignment"] < 256 * (3 * len(planes) + 2 * len(recurs) + 2)
        if device.kind == "host":
            assert free - device.memory_bytes()[0] == report["bytes"]
        cache.close()


def test_snapshot_is_a_plain_record():
    snap = CacheSnapshot([None], [None], [None], [None], 3)
    assert snap.bytes() == 0
    snap.close()
