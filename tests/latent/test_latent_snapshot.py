"""Snapshots of latent planes: bit for bit onward, in every layout, and every refusal."""

import dataclasses

import numpy as np
import pytest
from latent_layers import POOL, D, Sequence
from latent_rig import same

from memra_lowlevel import errors
from memra_lowlevel.cache import StreamKvDev
from memra_lowlevel.formats import BF16, Q8_0

RefusedTake, RefusedRestore = errors.SnapshotRefused, errors.RestoreRefused


def equal(a, b, stream):
    """Bitwise equality of two snapshots."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if hasattr(x, "to_numpy") and hasattr(y, "to_numpy"):
            if not same(x.to_numpy(stream), y.to_numpy(stream)):
                return False
        elif x != y:
            return False
    return True


@pytest.mark.parametrize("length", [3, 4, 23, 24])
@pytest.mark.parametrize("donor_ring", [None, 8])
def test_a_restored_layer_goes_on_bit_for_bit(make, length, donor_ring):
    seq = Sequence(60)
    donor = make(seq, 60, ring=donor_ring)
    donor.append(length)
    snap = donor.layer.snapshot_plane(donor.dev)
    keys, tail = length // POOL * D, length % POOL * 2 * D
    assert snap.bytes() == 4 * (length * seq.rows.shape[1] + keys + tail)
    takers = [make(seq, 60, ring=donor_ring), make(seq, 60), make(seq, 60, ring=32, pool=POOL),
              make(seq, 48, ring=4)]  # fmt: skip
    for taker in takers:
        taker.layer.restore_plane(taker.dev, snap, taker.max_ctx)
        assert taker.layer.len == taker.len_d() == length
        assert taker.layer.index_pools_ready == length // POOL
        assert same(taker.rows(), donor.rows()) and same(taker.keys(), donor.keys())
    snap.close()  # the takers hold their own
    for n in (1, 1, 6, 9):
        donor.append(n)
        wanted = donor.select(n)
        for taker in takers:
            address = taker.layer.index_pool_keys.ptr
            taker.append(n)
            assert taker.layer.index_pool_keys.ptr == address
            if taker.max_ctx == 60:
                got = taker.select(n)
                assert same(got, wanted)
                assert same(taker.attend(n, indices=got), donor.attend(n, indices=wanted))
            assert same(taker.keys(), donor.keys())
    short = takers[3].layer
    assert short.index_pool_keys.size == 48 // POOL * D


@pytest.mark.parametrize("fmt", [BF16, Q8_0], ids=str)
def test_rows_of_other_formats_travel_as_bytes(make, fmt):
    seq = Sequence(20, width=32)
    donor = make(seq, 20, ring=8, format=fmt)
    donor.append(9)
    snap = donor.layer.snapshot_plane(donor.dev)
    taker = make(seq, 20, format=fmt)
    taker.layer.restore_plane(taker.dev, snap, 20)
    for a in (donor, taker):
        a.append(5)
    assert same(donor.attend(5, rank=16), taker.attend(5, rank=16))
    plain = make(seq, 20)
    with pytest.raises(RefusedRestore, match="rows, the layer's are f32"):
        plain.layer.validate_restore(snap, 20)


def test_a_layer_without_an_indexer(make):
    seq = Sequence(20)
    donor, taker = (make(seq, 20, index=False) for _ in range(2))
    donor.append(7)
    snap = donor.layer.snapshot_plane(donor.dev)
    assert snap.index_tail is None and snap.index_pool_keys is None and snap.index_pool == 0
    taker.layer.restore_plane(taker.dev, snap, 20)
    assert same(taker.attend(3), donor.attend(3))


def test_a_tail_taken_early_gives_the_snapshot_of_its_time(make):
    seq = Sequence(80)
    for ring in (None, 8, 16):
        a = make(seq, 80, ring=ring)
        a.append(23)
        wanted = a.layer.snapshot_plane(a.dev)
        cap = a.layer.snapshot_tail(a.dev)
        assert cap.bytes() == 4 * 3 * 2 * D
        for n in (1, 9, 30):
            a.append(n)
        a.layer.set_len(a.stream, 61)
        got = a.layer.snapshot_plane_at(a.dev, cap)
        assert equal(got, wanted, a.stream) and got.bytes() == wanted.bytes()
        with pytest.raises(RefusedTake, match="completed before"):
            a.layer.snapshot_plane_at(a.dev, cap)
        cap.close()
        assert got.index_tail.to_numpy(a.stream).size


def test_no_snapshot_of_what_cannot_be_captured_faithfully(make, stream):
    seq = Sequence(40)
    a = make(seq, 40, ring=8)
    with pytest.raises(RefusedTake, match="no rows"):
        a.layer.snapshot_plane(a.dev)
    a.append(22)
    layer = a.layer
    before = dict(a.device.driver.counts())

    def refused(match, *, tail=True):
        for take in (layer.snapshot_plane, *([layer.snapshot_tail] if tail else [])):
            with pytest.raises(RefusedTake, match=match):
                take(a.dev)

    layer.index_pools_ready += 1
    refused("not at a drained boundary")
    layer.index_pools_ready -= 2
    refused("not at a drained boundary")
    layer.index_pools_ready += 1

    rows = layer.rows
    layer.rows = rows.view(0, (22 * layer.width - 1,), np.float32)
    refused("rows has 219 elements, 220", tail=False)
    layer.rows = rows

    keys = layer.index_pool_keys
    for short in (None, keys.view(0, (5 * D - 1,), np.float32)):
        layer.index_pool_keys = short
        refused("no keys of 30 elements")
    layer.index_pool_keys = keys

    plane = layer.index_rows
    for short in (None, plane.view(0, ((20 % 8 + 2) * 2 * D - 1,), np.float32)):
        layer.index_rows = short
        refused("the index plane has no 72 elements")
    layer.index_rows = plane

    pool, layer.tail.pool = layer.tail.pool, 0
    refused("index_pool is not known")
    layer.tail.pool = pool
    intact, layer.tail.intact_from = layer.tail.intact_from, 21
    refused("written over")
    layer.tail.intact_from = intact
    counts = {k: n - before.get(k, 0) for k, n in a.device.driver.counts().items()}
    assert not any(n for k, n in counts.items() if "Memcpy" in k or "Alloc" in k)
    layer.snapshot_plane(a.dev).close()


def test_no_completion_of_a_capture_that_does_not_fit(make):
    seq = Sequence(40)
    a = make(seq, 40, ring=8)
    a.append(22)
    cap = a.layer.snapshot_tail(a.dev)
    for change, match in (
        ({"len": 0}, "no rows"), ({"width": 9}, "width 9"), ({"index_width": 2}, "index_width 2"),
        ({"index_pool": 2}, "index_pool 2"), ({"index_pools_ready": 6}, "index_pools_ready 5"),
        ({"len": 23}, "went back to 22"), ({"format": "bf16"}, "bf16 rows"),
    ):  # fmt: skip
        with pytest.raises(RefusedTake, match=match):
            a.layer.snapshot_plane_at(a.dev, dataclasses.replace(cap, **change))
    rows, keys = a.layer.rows, a.layer.index_pool_keys
    a.layer.rows = rows.view(0, (100,), np.float32)
    with pytest.raises(RefusedTake, match="rows has 100"):
        a.layer.snapshot_plane_at(a.dev, cap)
    a.layer.rows = rows
    a.layer.index_pool_keys = keys.view(0, (3,), np.float32)
    with pytest.raises(RefusedTake, match="no keys"):
        a.layer.snapshot_plane_at(a.dev, cap)
    a.layer.index_pool_keys = keys
    a.layer.set_len(a.stream, 21)
    with pytest.raises(RefusedTake, match="went back to 21"):
        a.layer.snapshot_plane_at(a.dev, cap)
    assert not cap.used
    cap.close()


def test_no_restore_of_what_does_not_fit(make):
    seq = Sequence(40)
    donor, aligned = make(seq, 40), make(seq, 40)
    donor.append(22)
    aligned.append(20)
    snap, even = (x.layer.snapshot_plane(x.dev) for x in (donor, aligned))
    three = donor.dev.uninit(3)
    taker = make(seq, 40, ring=8)

    def refused(match, base=snap, max_ctx=40, into=taker, **change):
        with pytest.raises(RefusedRestore, match=match):
            into.layer.validate_restore(dataclasses.replace(base, **change), max_ctx)
        with pytest.raises(RefusedRestore, match=match):
            into.layer.restore_plane(into.dev, dataclasses.replace(base, **change), max_ctx)
        assert into.layer.len == into.len_d()

    refused("the layer has 20 rows", into=aligned)
    refused("width 9", width=9)
    refused("0 rows", len=0)
    refused("22 rows do not lie in 1..21", max_ctx=21)
    refused("41 rows do not lie", len=41)
    refused("3 of 220 elements", rows=three)
    refused("index_width 4", index_width=4)
    refused("index_pool of the snapshot is 0", index_pool=0)
    refused("index_pools_ready 4", index_pools_ready=4)
    refused("index_pools_ready 6", index_pools_ready=6)
    refused("keys are short", index_pool_keys=three)
    refused("no keys of 5 pools", index_pool_keys=None)
    refused("no tail of 2 rows", index_tail=None)
    refused("the tail is short", index_tail=three)
    refused("a tail at a length of whole pools", base=even, index_tail=three)
    refused("keys without a whole pool", len=2, index_pools_ready=0, index_tail=snap.index_tail)
    other = make(seq, 40, pool=2)
    refused("index_pool 4, the layer has 2", into=other)
    tiny = make(seq, 40, ring=3)
    refused("less than a pool", into=tiny)
    plane = taker.layer.index_rows
    taker.layer.index_rows = None
    refused("no index plane")
    taker.layer.index_rows = plane.view(0, ((20 % 8 + 2) * 2 * D - 1,), np.float32)
    refused("no 72 elements for the tail")
    taker.layer.index_rows = plane
    rows = taker.layer.rows
    taker.layer.rows = rows.view(0, (219,), np.float32)
    refused("the layer has 219 of 220")
    taker.layer.rows = rows
    assert (rows.to_numpy(taker.stream) == 0).all() and taker.layer.index_pool == 0
    taker.layer.restore_plane(taker.dev, snap, 40)
    assert same(taker.rows(), donor.rows())


def test_a_forged_ready_trips_the_next_call(make):
    seq = Sequence(40)
    donor, taker = make(seq, 40, ring=8), make(seq, 40, ring=8)
    donor.append(22)
    taker.layer.restore_plane(taker.dev, donor.layer.snapshot_plane(donor.dev), 40)
    taker.layer.index_pools_ready += 1
    with pytest.raises(errors.PlaneError, match="index_pools_ready is 6"):
        taker.append(1)


def test_a_restored_ring_cannot_go_back_behind_its_tail(make):
    seq = Sequence(40)
    donor, taker = make(seq, 40), make(seq, 40, ring=16)
    donor.append(22)
    taker.layer.restore_plane(taker.dev, donor.layer.snapshot_plane(donor.dev), 40)
    assert taker.layer.can_rewind_to(21) and taker.layer.can_rewind_to(20)
    assert not taker.layer.can_rewind_to(19)
    assert taker.layer.can_rewind_to(16)


def test_snapshots_are_refused_under_capture(make):
    seq = Sequence(8)
    a = make(seq, 8)
    a.append(5)
    with pytest.raises(errors.CaptureForbidden), a.stream.capture("x"):
        a.layer.snapshot_plane(a.dev)


def test_the_eight_operations_are_all_that_a_snapshot_needs(make):
    """A fake that records what is asked of it."""
    seq = Sequence(20)
    a, taker = make(seq, 20, ring=8), make(seq, 20)
    a.append(10)
    asked = []

    class Recording(StreamKvDev):
        def uninit(self, n):
            asked.append(("uninit", n))
            return super().uninit(n)

        def copy_range_into(self, dst, dst_off, src, src_off, len):
            asked.append(("copy", dst_off, src_off, len))
            super().copy_range_into(dst, dst_off, src, src_off, len)

    dev = Recording(a.device, a.stream)
    snap = a.layer.snapshot_plane(dev)
    tail, rows, keys = 2 * 2 * D, 10 * seq.rows.shape[1], 2 * D
    assert asked == [
        ("uninit", tail), ("copy", 0, 8 % 8 * 2 * D, tail), ("uninit", rows),
        ("copy", 0, 0, rows), ("uninit", keys), ("copy", 0, 0, keys),
    ]  # fmt: skip
    asked.clear()
    taker.layer.restore_plane(dev, snap, 20)
    assert asked == [
        ("uninit", 20 // POOL * D), ("copy", 0, 0, rows), ("copy", 0, 0, keys),
        ("copy", 8 * 2 * D, 0, tail),
    ]  # fmt: skip
