"""LatentKvLayer: both planes, the ring, the keys, lists and attention, capture, refusals."""

import numpy as np
import pytest
from latent_layers import POOL, RANK, WIDTH, D, Sequence
from latent_rig import error, f32, same

from memra_lowlevel import errors
from memra_lowlevel.cache import (
    INDEX_RING_WORKING_ROWS,
    StreamKvDev,
    index_plane_physical_row,
    index_ring_default_rows,
    index_ring_rows,
    index_ring_take,
)
from memra_lowlevel.cache.latent import LatentKvLayer
from memra_lowlevel.formats import Q8_0
from memra_lowlevel.graph.counters import verify_counters
from memra_lowlevel.reference import latent as oracle

# -- rows and keys ----------------------------------------------------------------------------


def test_rows_go_behind_the_length_which_moves_by_itself(make):
    seq = Sequence(20)
    a = make(seq, 24)
    assert (a.layer.rows.to_numpy(a.stream) == 0).all()
    a.append(7, advance=False)
    assert a.layer.len == a.len_d() == 0
    a.layer.advance(a.stream, 7)
    a.append(5)
    assert a.layer.len == a.len_d() == 12 and a.layer.index_pools_ready == 3
    assert same(a.rows(), seq.rows[:12])
    assert error(a.keys(), oracle.pool_keys(seq.index[:12], seq.ape, POOL)) <= 2e-6


@pytest.mark.parametrize("ring", [4, 16, 18])
@pytest.mark.parametrize("chunks", [[7] * 9 + [1], [64], [1] * 64, [3, 61]], ids=str)
def test_a_ring_gives_the_keys_and_lists_of_a_flat_plane(make, ring, chunks):
    seq = Sequence(64)
    flat, ringed = make(seq, 64), make(seq, 64, ring=ring)
    flat.append(64)
    for n in chunks:
        ringed.append(n)
        got = ringed.select(n)
        assert same(got, _lists(flat, ringed.layer.len, n))
    assert same(ringed.keys(16), flat.keys(16))
    assert same(ringed.attend(3), flat.attend(3))


def _lists(flat, length, n):
    """Lists that the flat layer gives at a shorter length; its keys are final."""
    flat.layer.lengths.set(flat.stream, length)
    flat.layer.tail.reset(length // POOL)
    lists = flat.select(n)
    flat.layer.lengths.set(flat.stream, 64)
    flat.layer.tail.reset(16)
    return lists


def test_one_call_may_be_far_longer_than_the_ring(make):
    seq = Sequence(256)
    flat, ringed = make(seq, 256), make(seq, 256, ring=16)
    flat.append(256)
    ringed.append(256)
    assert same(ringed.keys(64), flat.keys(64)) and ringed.layer.index_pools_ready == 64
    assert same(ringed.select(256), flat.select(256))


def test_a_ring_of_one_pool_is_enough_for_the_whole_context(make):
    seq = Sequence(41)
    a, flat = make(seq, 41, ring=POOL), make(seq, 41)
    a.append(41)
    flat.append(41)
    assert same(a.keys(), flat.keys()) and a.layer.len == 41
    with pytest.raises(errors.CapacityExceeded):
        a.append(1, at=0)


def test_scores_are_made_in_parts_that_fit_in_the_scratch(make):
    seq = Sequence(96)
    a = make(seq, 96, ring=16)
    a.append(96)
    whole = a.select(96)
    per_row = 4 * 24 + 4
    before = a.layer.workspace.n_bytes
    small = make(seq, 96, ring=16)
    small.append(96)
    assert same(small.select(96, scratch_bytes=5 * per_row), whole)
    assert small.layer.workspace.n_bytes <= 5 * per_row + 256 < before
    assert same(a.attend(96, scratch_bytes=4000), a.attend(96))


# -- end to end -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 16, 40, 64])
def test_listed_attention_is_dense_attention_under_the_mask(make, length):
    seq = Sequence(64, seed=3, d=8)
    a = make(seq, 64, ring=16)
    a.append(length)
    lists = a.select(1)
    got = a.attend(1, indices=lists)
    scores = oracle.scores(
        seq.index_q[length - 1 : length], seq.weights[length - 1 : length], a.keys(), length - 1, 4
    )
    wanted_rows = oracle.select(scores[0], length, 16, POOL)
    assert [r for r in lists[0] if r >= 0] == [r for r in wanted_rows if r >= 0]
    q = seq.q[length - 1 : length]
    wanted = oracle.attend(q, seq.rows, length - 1, RANK, 0.3, lists)
    assert np.abs(got - wanted).max() <= 1e-5
    unmasked = oracle.attend(q, seq.rows, length - 1, RANK, 0.3)
    if length > 16 + POOL:
        assert np.abs(got - unmasked).max() > 0.05
    else:
        assert np.abs(got - unmasked).max() <= 1e-5


def test_causal_without_and_with_the_counted_length(make):
    seq = Sequence(30)
    a = make(seq, 40)
    a.append(20)
    a.append(6, advance=False)
    before = a.select(6, at=20, counted=False), a.attend(6, at=20, counted=False)
    a.layer.advance(a.stream, 6)
    assert same(a.select(6), before[0]) and same(a.attend(6), before[1])
    assert np.abs(before[1] - oracle.attend(seq.q[20:26], seq.rows, 20, RANK, 0.3)).max() < 1e-5
    single = make(seq, 40)
    single.append(20)
    for r in range(6):
        single.append(1)
        assert same(single.select(1)[0], before[0][r])
        assert same(single.attend(1)[0], before[1][r])


def test_reads_that_the_length_rules_out_are_refused(make):
    a = make(Sequence(12), 8)
    a.append(4)
    q, out = (a.stream.device.zeros((5, 2, n), np.float32, a.stream) for n in (a.layer.width, RANK))
    for counted, refused in ((True, errors.PlaneError), (False, errors.CapacityExceeded)):
        with pytest.raises(refused, match=r"attend: .*Nothing was launched"):
            a.layer.attend(a.stream, q, out, scale=1.0, counted=counted)
    one = [a.stream.device.zeros((1, 2, n), np.float32, a.stream) for n in (a.layer.width, RANK)]
    with pytest.raises(errors.ArgumentError, match=rf"^{a.layer.name}\.attend: .*\.py:\d+"):
        a.layer.attend(a.stream, *one, scale=1.0, lse=one[0].view(0, (1, 1), np.float32))


def test_all_zero_scores_choose_the_first_pools(make):
    seq = Sequence(40)
    seq.weights[:] = 0
    a = make(seq, 40)
    a.append(39)
    assert a.select(1)[0].tolist() == [*range(16), 36, 37, 38]


def test_the_width_of_a_list_is_published(make):
    seq = Sequence(40)
    a = make(seq, 40)
    width_d = a.device.zeros(1, np.int32, a.stream)
    for n, wanted in ((3, 3), (6, 11), (31, 19)):
        a.append(n)
        a.select(1, width_d=width_d)
        assert int(width_d.to_numpy(a.stream)[0]) == wanted


# -- capture ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [None, 8])
def test_a_captured_step_is_the_eager_step_bit_for_bit(make, ring):
    seq = Sequence(60)
    eager, live = make(seq, 60, ring=ring), make(seq, 60, ring=ring, pool=POOL)
    for a in (eager, live):
        a.append(13)
    s, dev = live.stream, live.device
    rows, index, ape = (live.up(x) for x in (seq.rows[:2], seq.index[:2], seq.ape))
    q, iq, w = (live.up(x[:2]) for x in (seq.q, seq.index_q, seq.weights))
    width = live.layer.list_width(16)
    lists, out = dev.empty((2, width), np.int32, s), dev.empty((2, 2, RANK), f32, s)
    live.select(2)
    live.attend(2, indices=live.select(2))
    with s.capture("step") as graph:
        live.layer.append(s, rows, index=index, ape=ape)
        live.layer.select(s, iq, w, lists, top_k=16)
        live.layer.attend(s, q, out, scale=0.3, indices=lists)
        live.layer.advance(s, 2)
    step = graph.instantiate()
    assert live.layer.len == 13 == live.len_d()
    rng = np.random.default_rng(0)
    rewinds = 0
    for _ in range(30):
        at = live.layer.len
        if at + 2 > 60:
            back = at - 2
            for a in (eager, live):
                a.layer.set_len(a.stream, back)
            at, rewinds = back, rewinds + 1
        elif rng.random() < 0.3 and live.layer.can_rewind_to(at - 1):
            for a in (eager, live):
                a.layer.set_len(a.stream, at - 1)
            at, rewinds = at - 1, rewinds + 1
        for buffer, x in ((rows, seq.rows), (index, seq.index), (q, seq.q), (iq, seq.index_q),
                          (w, seq.weights)):  # fmt: skip
            buffer.copy_from(s, np.ascontiguousarray(x[at : at + 2]))
        out.fill(s, 0xFF)
        step.launch(s)
        eager.append(2)
        wanted = eager.select(2)
        assert same(lists.to_numpy(s), wanted)
        assert same(out.to_numpy(s), eager.attend(2, indices=wanted))
        assert live.layer.len == live.len_d() == at + 2
        assert live.layer.index_pools_ready == (at + 2) // POOL
        assert same(live.keys(), eager.keys())
        verify_counters(s, [live.layer.lengths.counter])
    assert rewinds >= 3
    step.close()


def test_a_launch_is_refused_before_the_plane_overflows(make):
    seq = Sequence(12)
    a = make(seq, 12, pool=POOL)
    rows, index, ape = a.up(seq.rows[:4]), a.up(seq.index[:4]), a.up(seq.ape)
    with a.stream.capture("step") as graph:
        a.layer.append(a.stream, rows, index=index, ape=ape)
        a.layer.advance(a.stream, 4)
    step = graph.instantiate()
    for _ in range(3):
        step.launch(a.stream)
    with pytest.raises(errors.CapacityExceeded):
        step.launch(a.stream)
    assert a.layer.len == a.len_d() == 12
    step.close()


def test_a_launch_from_a_contradicted_state_is_refused(make):
    seq = Sequence(40)
    a = make(seq, 40, ring=8, pool=POOL)
    a.append(22)
    rows, index, ape = a.up(seq.rows[:1]), a.up(seq.index[:1]), a.up(seq.ape)
    with a.stream.capture("step") as graph:
        a.layer.append(a.stream, rows, index=index, ape=ape)
        a.layer.advance(a.stream, 1)
    step = graph.instantiate()
    a.layer.index_pools_ready = 6
    with pytest.raises(errors.PlaneError, match="index_pools_ready"):
        step.launch(a.stream)
    a.layer.index_pools_ready = 5
    step.launch(a.stream)
    a.layer.lengths.set(a.stream, 9)  # behind the back of the layer: row 8 is gone
    with pytest.raises(errors.RingLapped, match="ring"):
        step.launch(a.stream)
    step.close()


def test_the_pool_must_be_known_before_a_capture(make):
    seq = Sequence(8)
    a = make(seq, 8)
    rows, index, ape = a.up(seq.rows[:1]), a.up(seq.index[:1]), a.up(seq.ape)
    with pytest.raises(errors.CaptureForbidden, match="prepare_index"), a.stream.capture("x"):
        a.layer.append(a.stream, rows, index=index, ape=ape, pool=POOL)
    a.layer.prepare_index(a.dev, POOL)
    with a.stream.capture("x") as graph:
        a.layer.append(a.stream, rows, index=index, ape=ape, pool=POOL)
    graph.instantiate().close()


def test_captured_calls_longer_than_the_ring_drain_too(make):
    seq = Sequence(40)
    flat, live = make(seq, 40, pool=POOL), make(seq, 40, ring=8, pool=POOL)
    rows, index, ape = live.up(seq.rows[3:33]), live.up(seq.index[3:33]), live.up(seq.ape)
    flat.append(33)
    live.append(3)
    with live.stream.capture("prime") as graph:
        live.layer.append(live.stream, rows, index=index, ape=ape)
        live.layer.advance(live.stream, 30)
    graph.instantiate().launch(live.stream)
    assert same(live.keys(), flat.keys()) and live.layer.len == 33
    for a in (flat, live):
        a.append(5)
    assert same(live.keys(), flat.keys())


# -- shortening -------------------------------------------------------------------------------


def test_a_rewound_layer_is_one_that_never_saw_the_rows(make):
    seq, other = Sequence(60), Sequence(60, seed=9)
    other.ape = seq.ape
    for ring in (None, 16):
        a, clean = make(seq, 60, ring=ring), make(seq, 60, ring=ring)
        a.append(21)
        clean.append(21)
        for keep in (1, 3, 8, 4):
            a.append(8, seq=other)
            a.layer.set_len(a.stream, a.layer.len - 8)
            a.append(keep)
            clean.append(keep)
            assert a.layer.index_pools_ready == clean.layer.index_pools_ready
            assert same(a.keys(), clean.keys()) and same(a.rows(), clean.rows())
            assert same(a.select(keep), clean.select(keep))


def test_keys_that_were_not_clamped_stop_the_next_call(make):
    seq = Sequence(30)
    a = make(seq, 30)
    a.append(20)
    a.layer.lengths.set(a.stream, 10)  # what a caller does that forgets the clamp
    with pytest.raises(errors.PlaneError, match="index_pools_ready is 5, but len 10 has 2"):
        a.append(1)
    a.layer.truncate_index_pool_keys(POOL)
    assert a.layer.index_pools_ready == 2
    a.append(1)
    b = make(seq, 30)
    b.append(11)
    assert same(a.keys(), b.keys())
    a.layer.index_pools_ready += 1
    with pytest.raises(errors.PlaneError, match="index_pools_ready"):
        a.append(1)
    a.layer.truncate_index_pool_keys(0)  # nothing
    assert a.layer.index_pools_ready == 3


def test_a_tail_that_was_written_over_cannot_be_gone_back_to(make):
    seq = Sequence(60)
    a = make(seq, 60, ring=8)
    a.append(30)  # rows 22 ... 29 lie in the ring; pool 5 = rows 20 ... 23 is torn
    assert a.layer.can_rewind_to(27) and a.layer.can_rewind_to(25)
    for gone in (23, 21, 1):
        assert not a.layer.can_rewind_to(gone)
        with pytest.raises(errors.RewindRefused, match="re-prime") as caught:
            a.layer.set_len(a.stream, gone)
        assert caught.value.possible == 24
    assert a.layer.len == 30
    a.layer.set_len(a.stream, 20)  # a boundary needs no rows
    a.append(3)
    a.layer.set_len(a.stream, 21)  # rows 20 ... are new
    clean = make(seq, 60, ring=8)
    clean.append(21)
    for b in (a, clean):
        b.append(9)
    assert same(a.keys(), clean.keys())
    a.layer.lengths.set(a.stream, 17)
    with pytest.raises(errors.RewindRefused):
        a.layer.truncate_index_pool_keys(POOL)


def test_a_call_that_fails_half_way_leaves_the_length_and_clamps_the_keys(make, monkeypatch):
    from memra_lowlevel.kernels import latent_index

    seq = Sequence(60)
    a = make(seq, 60, ring=16)
    a.append(6)
    real, calls = latent_index.append, []

    def failing(*args, **options):
        calls.append(options["first"])
        if len(calls) == 3:
            raise errors.MemraError("planted")
        real(*args, **options)

    monkeypatch.setattr(latent_index, "append", failing)
    with pytest.raises(errors.MemraError, match="planted"):
        a.append(50)
    monkeypatch.undo()
    assert len(calls) == 3 and a.layer.len == 6 and a.layer.index_pools_ready == 1
    with pytest.raises(errors.RingLapped, match="written over"):
        a.append(1)  # rows 4 and 5 are gone
    a.layer.set_len(a.stream, 4)
    a.append(50)
    clean = make(seq, 60)
    clean.append(54)
    assert same(a.keys(), clean.keys())


def test_an_advance_by_fewer_rows_than_were_appended(make):
    seq, other = Sequence(30), Sequence(30, seed=4)
    other.ape = seq.ape
    a, clean = make(seq, 30), make(seq, 30)
    a.append(6)
    a.append(10, advance=False)
    a.layer.advance(a.stream, 3)
    assert a.layer.index_pools_ready == 2
    a.append(5)
    clean.append(14)
    assert same(a.keys(), clean.keys()) and same(a.rows(), clean.rows())


# -- refusals ---------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_by_name(make, stream):
    dev = StreamKvDev(stream.device, stream)
    for args, match in (
        ((8, 0), "width 0"), ((0, 8), "0 rows"), ((8, 8, 3), "even"), ((8, 8, -2), "even"),
        ((8, 8, 4, -1), "index_ring_rows -1"), ((8, 8, 4, 3, 4), "less than a pool of 4"),
        ((8, 8, 4, None, 17), "1 to 16"), ((8, 8, 4, 1, 4), "not a switch"),
    ):  # fmt: skip
        with pytest.raises(errors.PlaneError, match=match):
            LatentKvLayer.allocate(dev, *args)
    with pytest.raises(errors.FormatUnsupported, match="whole blocks"):
        LatentKvLayer.allocate(dev, 8, 40, format=Q8_0)

    seq = Sequence(12)
    a = make(seq, 12, ring=3)
    with pytest.raises(errors.PlaneError, match="less than a pool of 4"):
        a.append(1)  # known only now
    assert (a.layer.rows.to_numpy(stream) == 0).all() and a.layer.index_pool == 0

    a = make(seq, 12)
    rows, index, ape = a.up(seq.rows[:2]), a.up(seq.index[:2]), a.up(seq.ape)
    up = a.up
    for options, match in (
        ({}, "index rows are missing"),
        ({"index": index, "ape": ape}, "not known"),
        ({"index": up(seq.index[:1]), "ape": ape, "pool": 4}, "index must be"),
        ({"index": index, "ape": up(seq.ape[:3]), "pool": 4}, "ape must be"),
        ({"index": index, "pool": 4}, "ape given"),
    ):
        with pytest.raises(errors.PlaneError, match=match):
            a.layer.append(stream, rows, **options)
    with pytest.raises(errors.PlaneError, match=r"rows must be f32 \[n, 10\]"):
        a.layer.append(stream, up(seq.rows[:, :9]), index=index, ape=ape, pool=4)
    assert (a.layer.rows.to_numpy(stream) == 0).all()
    a.append(4)
    with pytest.raises(errors.PlaneError, match="index_pool is 4, a call says 2"):
        a.layer.append(stream, rows, index=index, ape=ape, pool=2)
    with pytest.raises(errors.PlaneError, match="uses 4"):
        a.layer.truncate_index_pool_keys(2)
    with pytest.raises(errors.CapacityExceeded):
        a.append(9, at=0)
    with pytest.raises(errors.CapacityExceeded):
        a.layer.set_len(stream, 13)
    assert a.layer.len == 4 and same(a.rows(), seq.rows[:4])

    bare = make(seq, 12, index=False)
    with pytest.raises(errors.PlaneError, match="no index plane"):
        bare.layer.append(stream, rows, index=index, ape=ape, pool=4)
    with pytest.raises(errors.PlaneError, match="no indexer"):
        bare.layer.prepare_index(bare.dev, 4)
    bare.append(3)
    assert bare.layer.index_rows is None and bare.layer.index_pool_keys is None
    assert bare.layer.describe()["index_pools_ready"] == 0
    with pytest.raises(errors.PlaneError, match="no pool is known"):
        bare.layer.select(stream, rows, rows, rows, top_k=8)


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_ctx", [8192, 262_144, 1_048_576])
def test_a_configured_context_is_usable_whole(max_ctx):
    rows, pool, width = index_ring_rows(max_ctx), 4, 256
    assert rows == index_ring_default_rows(max_ctx) == INDEX_RING_WORKING_ROWS < max_ctx
    assert 4 * rows * width <= 16 << 20
    effective, cur, steps = rows // pool * pool, 0, 0
    while cur < max_ctx:
        take = index_ring_take(effective, pool, cur // pool, cur, max_ctx - cur)
        assert take is not None and (take >= rows - pool + 1 or cur + take == max_ctx)
        cur, steps = cur + take, steps + 1
    assert cur / max_ctx == 1 and steps == {8192: 2, 262_144: 52, 1_048_576: 205}[max_ctx]
    assert {index_plane_physical_row(rows, pool, a) for a in range(cur - rows, cur)} == set(
        range(rows)
    )


def test_the_allocation_is_what_was_asked_for(make):
    a = make(Sequence(4, d=128, width=16), 8192, ring=INDEX_RING_WORKING_ROWS, pool=POOL)
    layer = a.layer
    assert layer.rows.n_bytes == 4 * 8192 * 16
    assert layer.index_rows.n_bytes == 4 * 5120 * 256 <= 16 << 20
    assert layer.index_pool_keys.n_bytes == 4 * 8192 // POOL * 128
    assert layer.n_bytes == layer.describe()["bytes"]
    keys = layer.index_pool_keys.ptr
    a.append(4)
    assert layer.index_pool_keys.ptr == keys
    small = make(Sequence(4), 3, pool=POOL)
    assert small.layer.index_pool_keys.size == 1
    assert D and WIDTH


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"], indirect=True)
@pytest.mark.parametrize("max_ctx", [262_144, 1_048_576])
def test_a_whole_context_passes_in_one_call(make, max_ctx):
    seq = Sequence(8, d=128, width=8)
    a = make(seq, max_ctx, ring=INDEX_RING_WORKING_ROWS, pool=POOL)
    rng = np.random.default_rng(0)
    seq.rows = rng.random((max_ctx, 8), dtype=f32)
    seq.index = rng.random((max_ctx, 256), dtype=f32)
    a.append(max_ctx)
    assert a.layer.len == a.len_d() == max_ctx and a.layer.index_rows.n_bytes <= 16 << 20
    assert np.isfinite(a.keys()).all()
    first = max_ctx - 4096
    wanted = oracle.pool_keys(seq.index[first:], seq.ape, POOL)
    assert error(a.keys()[first // POOL :], wanted) <= 2e-6
