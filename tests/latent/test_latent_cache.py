"""Latent layers inside a Cache: lock-step, accounting, rollback, prefixes in memory and on disk."""

import json
import subprocess
import sys

import numpy as np
import pytest
from latent_layers import HEADS, POOL, RANK, ROPE, WIDTH, D, Sequence
from latent_rig import f32, same

from memra_lowlevel import Device, errors
from memra_lowlevel.cache import (
    Cache,
    CachePrefix,
    KvCache,
    LatentKvCache,
    LayerPlan,
    ModelPlan,
    Recurrent,
    SlidingKvCache,
    StreamKvDev,
    cache_bytes_per_token,
    latent_kv_bytes_per_token_for_plan,
)
from memra_lowlevel.graph.counters import verify_counters

MLA = LayerPlan(LatentKvCache(WIDTH, 2 * D))
BARE = LayerPlan(LatentKvCache(WIDTH))
FULL = LayerPlan(KvCache(), 64, 64, 64, 64)
RECUR = LayerPlan(Recurrent(96, 4, 32 * 32))
MODEL = ModelPlan((MLA, FULL, BARE, RECUR, MLA), index_pool=POOL)
LATENTS = ModelPlan((MLA, FULL, BARE, MLA), index_pool=POOL)
SEQ = Sequence(64)
KV = np.random.default_rng(1).standard_normal((64, 64), dtype=f32)


class Run:
    """A cache whose latent and KV layers all take the rows of one sequence."""

    def __init__(self, stream, model=MODEL, max_ctx=64, **options):
        self.stream, self.device, self.model = stream, stream.device, model
        options.setdefault("index_ring", 8)
        options.setdefault("round_rows", 8)
        self.cache = Cache.new(StreamKvDev(self.device, stream), model, max_ctx, **options)

    def up(self, a):
        return self.device.from_numpy(np.ascontiguousarray(a), self.stream)

    def append(self, n, at=None, seq=SEQ, advance=True):
        at = self.cache.len if at is None else at
        rows, index, ape = (self.up(x) for x in (seq.rows[at : at + n], seq.index[at : at + n],
                                                 seq.ape))  # fmt: skip
        for latent in self.cache.latent:
            if latent is not None:
                indexed = latent.index_width > 0
                latent.append(
                    self.stream, rows, index=index if indexed else None,
                    ape=ape if indexed else None,
                )  # fmt: skip
        kv = self.up(KV[at : at + n])
        for layer in self.cache.kv:
            if layer is not None:
                layer.append(self.stream, kv, kv)
        if advance:
            self.cache.advance(self.stream, n)

    def outputs(self, n=2):
        """Lists and attention of every latent layer for the last n rows."""
        at, found = self.cache.len - n, []
        for latent in self.cache.latent:
            if latent is None:
                continue
            lists = None
            if latent.index_width:
                lists = self.device.empty((n, latent.list_width(16)), np.int32, self.stream)
                latent.select(
                    self.stream, self.up(SEQ.index_q[at : at + n]),
                    self.up(SEQ.weights[at : at + n]), lists, top_k=16, counted=True,
                )  # fmt: skip
                found.append(lists.to_numpy(self.stream))
            out = self.device.empty((n, HEADS, RANK), f32, self.stream)
            latent.attend(
                self.stream, self.up(SEQ.q[at : at + n]), out, scale=0.3, indices=lists,
                counted=True,
            )  # fmt: skip
            found.append(out.to_numpy(self.stream))
        return found

    def check(self):
        group = self.cache.stages[0]
        verify_counters(self.stream, [group.lengths.counter])
        for latent in group.latent.values():
            assert int(latent.len_d.to_numpy(self.stream)[0]) == self.cache.len
            assert latent.index_pools_ready == (self.cache.len // POOL if latent.index_width else 0)


@pytest.fixture
def make(stream):
    made = []

    def build(*args, **options):
        made.append(Run(stream, *args, **options))
        return made[-1]

    yield build
    for run in made:
        run.cache.close()


def alike(a, b):
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def test_latent_planes_are_planes_of_the_cache(make):
    run = make()
    cache = run.cache
    kinds = [None if x is None else x.index_width for x in cache.latent]
    assert kinds == [2 * D, None, 0, None, 2 * D]
    assert cache.latent[0].index_pool == POOL and cache.latent[0].index_pool_keys is not None
    before = dict(run.device.driver.counts())
    cache.advance(run.stream, 0)
    calls = {k: n - before.get(k, 0) for k, n in run.device.driver.counts().items()}
    assert sum(n for k, n in calls.items() if "Launch" in k) == 1
    run.append(13)
    run.check()
    with pytest.raises(errors.PlaneError, match="group"):
        cache.latent[0].advance(run.stream, 1)
    with pytest.raises(errors.PlaneError, match="group"):
        cache.latent[0].set_len(run.stream, 1)
    with pytest.raises(errors.CapacityExceeded):
        cache.prepare(run.stream, 52)
    cache.reset(run.stream)
    run.append(9)
    fresh = make()
    fresh.append(9)
    assert alike(run.outputs(), fresh.outputs())


@pytest.mark.parametrize("ring", [0, 8])
def test_bytes_are_the_accounting_and_itemised_fixed_parts(make, ring, monkeypatch):
    monkeypatch.setenv("MEMRA_DSA_INDEX_RING", str(ring))
    from memra_lowlevel.cache import policy

    policy.forget_environment()
    run = make(ModelPlan((MLA, BARE, MLA), index_pool=POOL), index_ring=None)
    report = run.cache.describe()
    items, taken = report["items"][0], report["bytes"]
    per_token = cache_bytes_per_token(run.model)
    plan = [layer.state for layer in run.model.layers]
    assert per_token == latent_kv_bytes_per_token_for_plan(run.model, plan, 0, 3)
    fixed = items["counters"] + items["alignment"] + (items["index_rows"] if ring else 0)
    assert taken == 64 * per_token + fixed == items["total"]
    layers = run.cache.latent
    assert items["index_rows"] == 2 * 4 * (ring or 64) * 2 * D
    assert sum(x.n_bytes for x in layers) == taken - items["counters"] - items["alignment"]
    assert layers[0].index_ring_rows == (ring or None)


def test_rollback_takes_latent_planes_along(make):
    other = Sequence(64, seed=8)
    other.ape = SEQ.ape
    run, clean = make(LATENTS, index_ring=16), make(LATENTS, index_ring=16)
    run.append(14)
    clean.append(14)
    for accept in (0, 1, 5, 8, 3):
        snap = run.cache.snapshot(run.stream)
        at = run.cache.len
        run.append(8, seq=other)
        if accept:  # what is accepted are the true rows
            run.cache.rollback(run.stream, snap)
            run.append(8)
        assert run.cache.can_rollback(snap, accept)
        assert run.cache.rollback(run.stream, snap, accept) == 0
        run.check()
        assert run.cache.len == at + accept
        if accept:
            clean.append(accept)
        assert alike(run.outputs(), clean.outputs())


def test_rollback_is_refused_before_anything_moves(make):
    run = make()
    run.append(9)
    snap = run.cache.snapshot(run.stream)
    run.append(14)  # the ring of 8 has been written over down to row 15
    assert not run.cache.can_rollback(snap) and not run.cache.can_rollback(snap, 1)
    with pytest.raises(errors.RewindRefused, match="re-prime"):
        run.cache.rollback(run.stream, snap, 1)
    run.check()
    assert run.cache.len == 23
    with pytest.raises(errors.RewindRefused):
        run.cache.set_len(run.stream, 10)
    run.check()


def test_verify_rollback_for_every_keep(make):
    other = Sequence(64, seed=8)
    other.ape = SEQ.ape
    for keep in range(1, 6):
        run, clean = make(LATENTS, index_ring=16), make(LATENTS, index_ring=16)
        run.append(10)
        mixed = Sequence(64)
        mixed.rows[10 + keep :] = other.rows[10 + keep :]
        mixed.index[10 + keep :] = other.index[10 + keep :]
        run.append(5, seq=mixed)
        before = dict(run.device.driver.counts())
        run.cache.verify_rollback(run.stream, 10, 5, keep)
        calls = {k: n - before.get(k, 0) for k, n in run.device.driver.counts().items()}
        assert (sum(calls.values()) == 0) == (keep == 5)
        run.check()
        clean.append(10 + keep)
        for n in (1, 3, 2, 7):
            for r in (run, clean):
                r.append(n)
            assert alike(run.outputs(1), clean.outputs(1))
    for keep in (0, 6):
        with pytest.raises(errors.PlaneError, match="keep 1 to 5"):
            run.cache.verify_rollback(run.stream, run.cache.len - 5, 5, keep)
    with pytest.raises(errors.PlaneError, match="holds"):
        run.cache.verify_rollback(run.stream, 3, 5, 2)


def test_without_the_clamp_the_next_step_names_it(make):
    run = make(ModelPlan((MLA,), index_pool=POOL), index_ring=16)
    run.append(13)
    run.cache.lengths.set(run.stream, 9)
    with pytest.raises(errors.PlaneError, match="index_pools_ready"):
        run.append(1)


# -- prefixes ---------------------------------------------------------------------------------


def test_a_restored_prefix_goes_on_bit_for_bit(make, tmp_path):
    donor = make()
    donor.append(22)
    donor.cache.recur[3].conv.fill(donor.stream, 0x3C)
    prefix = donor.cache.snapshot_prefix(donor.stream)
    path = prefix.save(donor.stream, tmp_path / "prompt.safetensors")
    for ring in (8, 0, 32):
        for source in ("memory", "disk"):
            taker = make(index_ring=ring)
            found = prefix
            if source == "disk":
                found = CachePrefix.load(path, taker.cache, taker.stream)
                assert found.bytes() == prefix.bytes()
            taker.cache.restore_prefix(taker.stream, found)
            taker.check()
            assert taker.cache.pos == 22
            state = taker.cache.recur[3].conv_state.to_numpy(taker.stream)
            assert same(state, donor.cache.recur[3].conv_state.to_numpy(donor.stream))
            twin = make()
            twin.append(22)
            for n in (1, 7):
                taker.append(n)
                twin.append(n)
                assert alike(taker.outputs(1), twin.outputs(1))
            got, want = taker.cache.kv[1], twin.cache.kv[1]
            n = 30 * got.k_tok_bytes
            assert same(got.k.to_numpy(taker.stream)[:n], want.k.to_numpy(twin.stream)[:n])
    prefix.close()
    prefix.close()


def content(path):
    """All that a file says: the digests of its tensors are part of it."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return file.metadata(), sorted(file.keys())


def spread(device, stream, fence):
    """A cache in stages over two devices (one, where there is no second), and how to end it."""
    second = Device("host:1") if device.kind == "host" else device
    far = second.stream(name="far")
    devs = [StreamKvDev(device, stream), StreamKvDev(second, far)]
    cache = Cache.new_ppn(devs, MODEL, 64, fence, index_ring=8, round_rows=8)
    for latent in cache.latent:  # rows that no other layer holds
        if latent is not None:
            on = stream if latent.device == device else far
            rows = latent.device.from_numpy(SEQ.rows[:22], on)
            index, ape = (latent.device.from_numpy(x, on) for x in (SEQ.index[:22], SEQ.ape))
            indexed = latent.index_width > 0
            latent.append(on, rows, index=index if indexed else None, ape=ape if indexed else None)
    kv = cache.kv[1]
    on = stream if kv.device == device else far
    rows = kv.device.from_numpy(KV[:22], on)
    kv.append(on, rows, rows)
    recur = cache.recur[3]
    recur.conv.fill(stream if recur.device == device else far, 0x3C)
    cache.advance(stream, 22)

    def end():
        cache.close()
        far.close()
        if second is not device:
            second.close()

    return cache, end


def test_layers_of_several_devices_share_one_prefix_file(device, stream, make, tmp_path):
    donor, end = spread(device, stream, [0, 2, 5])
    path = donor.snapshot_prefix(stream).save(stream, tmp_path / "spread")
    alone = make()
    alone.append(22)
    alone.cache.recur[3].conv.fill(stream, 0x3C)
    one = alone.cache.snapshot_prefix(stream).save(stream, tmp_path / "one")
    assert content(path) == content(one)
    # Another cut, one device, and the same cut: all go on alike.
    taker = make()
    taker.cache.restore_prefix(stream, CachePrefix.load(path, taker.cache, stream))
    alone.append(5)
    taker.append(5)
    assert alike(taker.outputs(), alone.outputs())
    for fence in ([0, 4, 5], [0, 2, 5]):
        other, stop = spread(device, stream, fence)
        other.reset(stream)
        prefix = CachePrefix.load(path, other, stream)
        other.restore_prefix(stream, prefix)
        assert other.len == 22
        again = other.snapshot_prefix(stream)
        assert content(again.save(stream, tmp_path / "again")) == content(path)
        if device.kind == "host" and fence == [0, 4, 5]:
            donor.reset(stream)
            with pytest.raises(errors.RestoreRefused, match="save the prefix and load it"):
                donor.restore_prefix(stream, again)
            assert donor.len == 0
        again.close()
        prefix.close()
        stop()
    end()


def test_a_prefix_is_validated_in_every_layer_before_the_first_byte_moves(make):
    donor = make()
    donor.append(11)
    prefix = donor.cache.snapshot_prefix(donor.stream)
    taker = make()

    def refused(match):
        before = dict(taker.device.driver.counts())
        with pytest.raises(errors.RestoreRefused, match=match):
            taker.cache.restore_prefix(taker.stream, prefix)
        assert dict(taker.device.driver.counts()) == before
        assert taker.cache.len == 0

    last = prefix.latent[4]
    last.index_pools_ready += 1
    refused("index_pools_ready 3")
    last.index_pools_ready -= 1
    del prefix.latent[4]
    refused("layer 4 has no rows")
    prefix.latent[4] = last
    kv = prefix.kv.pop(1)
    refused("layer 1 lacks K and V")
    prefix.kv[1] = kv
    recur = prefix.recur.pop(3)
    refused("layer 3 lacks recurrent")
    prefix.recur[3] = recur
    prefix.pos = 12
    refused("layer 0 has 11 rows, the prefix 12")
    prefix.pos = 11
    prefix.geometry[0]["widths"][0] += 1
    refused("layer 0 of the prefix")
    prefix.geometry[0]["widths"][0] -= 1
    taker.cache.mark_tainted()
    refused("tainted")
    taker.cache.reset(taker.stream)
    taker.cache.restore_prefix(taker.stream, prefix)
    with pytest.raises(errors.RestoreRefused, match="holds 11 rows"):
        taker.cache.restore_prefix(taker.stream, prefix)
    small = make(max_ctx=10)
    with pytest.raises(errors.RestoreRefused, match=r"1\.\.10"):
        small.cache.restore_prefix(small.stream, prefix)


def test_no_prefix_of_what_is_not_carried(make):
    run = make()
    with pytest.raises(errors.SnapshotRefused, match="empty"):
        run.cache.snapshot_prefix(run.stream)
    run.append(5)
    run.cache.mark_tainted()
    with pytest.raises(errors.SnapshotRefused, match="tainted"):
        run.cache.snapshot_prefix(run.stream)
    window = LayerPlan(SlidingKvCache(32), 64, 64, 64, 64)
    ringed = make(ModelPlan((MLA, window), index_pool=POOL), ring=True, ring_chunk=8, ring_slack=0,
                  max_ctx=64)  # fmt: skip
    ringed.append(3)
    with pytest.raises(errors.SnapshotRefused, match="is a ring"):
        ringed.cache.snapshot_prefix(ringed.stream)
    latent = make(ModelPlan((MLA, MLA), index_pool=POOL))
    latent.append(9)
    latent.cache.latent[1].index_pools_ready += 1
    with pytest.raises(errors.SnapshotRefused, match="drained"):
        latent.cache.snapshot_prefix(latent.stream)


def test_damaged_and_foreign_files_are_refused(make, tmp_path):
    from safetensors.numpy import load_file, save_file

    model = ModelPlan((MLA, MLA), index_pool=POOL)
    donor = make(model)
    donor.append(11)
    path = donor.cache.snapshot_prefix(donor.stream).save(donor.stream, tmp_path / "p")
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    good, taker = path.read_bytes(), make(model)
    header = int.from_bytes(good[:8], "little")
    described = json.loads(good[8 : 8 + header])["__metadata__"]

    def refused(data, match):
        path.write_bytes(data)
        with pytest.raises(errors.RestoreRefused, match=match):
            CachePrefix.load(path, taker.cache, taker.stream)
        assert taker.cache.len == 0

    rng = np.random.default_rng(0)
    for _ in range(40):
        at = int(rng.integers(8, len(good)))
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(0, 8))
        refused(bytes(bad), "p: ")
    at = 8 + header + 5
    refused(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], "is damaged")
    refused(good[:-1], "cannot be read")
    refused(b"", "cannot be read")
    path.write_bytes(good)
    tensors = load_file(path)

    def rewritten(match, drop=None, **change):
        kept = {k: v for k, v in tensors.items() if k != drop}
        save_file(kept, path, {**described, **change})
        refused(path.read_bytes(), match)

    rewritten("version '2'", version="2")
    rewritten("is no prefix", format="model")
    rewritten("description is damaged", state=described["state"].replace("11", "12"))
    rewritten("missing or strange", drop="latent.1.rows")
    with pytest.raises(errors.RestoreRefused, match="cannot be read"):
        CachePrefix.load(tmp_path / "absent", taker.cache, taker.stream)
    path.write_bytes(good)
    for other in (ModelPlan((MLA,), index_pool=POOL), ModelPlan((MLA, MLA), index_pool=2)):
        wrong = make(other)
        with pytest.raises(errors.RestoreRefused, match="of a model with"):
            CachePrefix.load(path, wrong.cache, wrong.stream)
    taker.cache.restore_prefix(taker.stream, CachePrefix.load(path, taker.cache, taker.stream))
    assert taker.cache.len == 11


OTHER_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from memra_lowlevel import Device
from memra_lowlevel.cache import CachePrefix
from test_latent_cache import Run
with Device(sys.argv[2]) as device:
    stream = device.stream(name="other")
    run = Run(stream, index_ring=0)
    run.cache.restore_prefix(stream, CachePrefix.load(sys.argv[3], run.cache, stream))
    run.append(6)
    np.savez(sys.argv[4], *run.outputs(3))
    run.cache.close()
"""


def test_another_process_goes_on_bit_for_bit(make, tmp_path):
    donor = make()
    donor.append(22)
    path = donor.cache.snapshot_prefix(donor.stream).save(donor.stream, tmp_path / "p")
    donor.append(6)
    wanted = donor.outputs(3)
    here = str(__file__).rsplit("/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, here, str(donor.device), str(path),
         str(tmp_path / "out.npz")], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as found:
        got = [found[name] for name in found.files]
    assert alike(got, wanted)


def test_what_an_entry_costs():
    """34 recurrent and 11 latent layers of the large geometry, planes only."""
    mla = LayerPlan(LatentKvCache(512, 256))
    recur = LayerPlan(Recurrent(24_576, 4, 1_048_576))
    model = ModelPlan((*[mla] * 11, *[recur] * 34), index_pool=4)
    fixed = 34 * 4 * (24_576 * 3 + 1_048_576)
    assert fixed == 152_633_344 and cache_bytes_per_token(model) == 23_936
    assert fixed + 8192 * cache_bytes_per_token(model) == 348_717_056
    assert RANK + ROPE == WIDTH
