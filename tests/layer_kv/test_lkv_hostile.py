"""What a hostile caller tries: odd numbers, forged snapshots, overlaps, forbidden threads."""

from __future__ import annotations

import dataclasses
import threading
import warnings

import numpy as np
import pytest
from lkv_data import MODES, fill, gen, ones, refused, same_bits

from memra_lowlevel.errors import KvShapeError, KvStateError, KvWireError
from memra_lowlevel.layer_kv import (
    BoundedRope,
    BoundedSnapshot,
    BoundedWeights,
    KvCache,
    KvMode,
    LayerKvCache,
    O1Plan,
    PhaseCore,
    WireKind,
    compiled,
    decay_from_log,
    hash64,
    identity_of,
    validate_anchor,
)

F32 = KvMode.F32


def layer(rows: int = 3) -> LayerKvCache:
    c = LayerKvCache(1, 4, mode=F32)
    fill(c, rows)
    return c


def ring(half: int = 4) -> tuple[LayerKvCache, BoundedWeights, BoundedRope]:
    c = LayerKvCache(1, 8, mode=F32)
    c.install_bounded(4)
    sinks = gen(1, 8).reshape(1, 1, 8)
    return c, BoundedWeights(sinks, sinks, 4), BoundedRope(4, ones(half))


def sealed() -> LayerKvCache:
    c = LayerKvCache(1, 4, mode=F32)
    c.o1_begin(4, 4, 1)
    for p in range(40):
        c.append(gen(3 * p, 4), gen(3 * p + 1, 4))
        c.o1_push_q(gen(3 * p + 2, 4))
    assert c.o1_seal(1)
    return c


# -- numbers that are none ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize(
    "value", [np.ones(2), np.ones(1), [1.0], "0.5", b"1", 1j, True, np.True_, object()]
)
def test_a_factor_is_one_number(name, value):
    c, out = layer(), ones(4, 7.0)
    refused(KvShapeError, c, lambda: c.attend_group(ones(4), 0, out, **{name: value}))
    assert (out == 7).all()


@pytest.mark.parametrize("value", [-3.0, 1e39, float("nan"), 10**400])
def test_softcap_out_of_range(value):
    c, out = layer(), ones(4, 7.0)
    refused(KvStateError, c, lambda: c.attend_group(ones(4), 0, out, softcap=value))
    assert (out == 7).all()


def test_the_largest_factors_that_float32_holds():
    c, out = layer(), ones(4)
    limit = 2.0**128 - 2.0**103  # from here on float32 rounds to infinity
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(limit)) and np.isfinite(np.float32(np.nextafter(limit, 0)))
    c.attend_group(np.zeros(4, np.float32), 0, out, scale=np.nextafter(limit, 0))
    refused(KvStateError, c, lambda: c.attend_group(ones(4), 0, out, scale=limit))
    refused(KvStateError, c, lambda: c.attend_group(ones(4), 0, out, scale=-limit))


def test_a_truth_value_is_no_count():
    c = layer()
    refused(KvShapeError, c, lambda: c.attend_group(ones(4), False, ones(4)))
    refused(KvShapeError, c, lambda: c.truncate_last(True))


@pytest.mark.parametrize("row", [[None] * 4, ["1"] * 4, [True] * 4, [1j] * 4, [[1], [1, 2]]])
def test_lists_hold_numbers(row):
    c = layer()
    refused(KvShapeError, c, lambda: c.append(row, ones(4)))


def test_numbers_that_float32_cannot_hold():
    c = layer()
    refused(KvStateError, c, lambda: c.append([1e300] * 4, ones(4)))


def test_masked_elements_have_no_value():
    c = layer()
    whole, holed = (np.ma.masked_array(ones(4), [0, hole, 0, 0]) for hole in (0, 1))
    refused(KvShapeError, c, lambda: c.append(holed, ones(4)))
    c.append(whole, ones(4))


@pytest.mark.parametrize(
    "alive", ["abc", {}, [float("nan")], object(), ["a"], [[1]], [1j], [None], 3, [[1], [1, 2]]]
)
def test_liveness_is_a_sequence_of_truth_values(alive):
    c = layer()
    refused(KvShapeError, c, lambda: c.append(ones(4), ones(4), alive))


@pytest.mark.parametrize("heads,width", [(2**31, 1), (1, 2**62), (10**30, 1)])
def test_sizes_beyond_all_memory(heads, width):
    with pytest.raises(KvShapeError):
        LayerKvCache(heads, width)


# -- state that others would trip over ----------------------------------------------------------


def test_importance_never_becomes_nan():
    c = layer()
    c.accumulate_imp(ones(3, np.inf))
    refused(KvStateError, c, lambda: c.accumulate_imp(ones(3, -np.inf)))


def test_a_cache_holds_each_layer_once():
    c = layer()
    for layers in ([c, c], [c, None], [3]):
        with pytest.raises(KvShapeError):
            KvCache(layers)


def test_positions_stay_within_the_wire():
    c = LayerKvCache(1, 4, mode=F32)
    c.wire_kind = WireKind.LINEAR
    for position in (2**63, 2**64, -1):
        with pytest.raises(KvShapeError):
            c.seq_len = position
    c.seq_len = 2**63 - 1
    record = bytearray(c.export_wire())
    record[24:32] = (2**64 - 1).to_bytes(8, "little")
    c.import_wire(record)
    PhaseCore(1, 1, 4, ones(2)).step(c, ones(1), ones(1), ones(4))
    refused(KvStateError, c, c.export_wire)


def test_a_told_position_takes_the_scratch_along():
    c, core = LayerKvCache(1, 4, mode=F32), PhaseCore(1, 2, 4, ones(4))
    c.wire_kind = WireKind.LINEAR
    core.prepare(c)
    c.fork_linear()
    core.step(c, ones(2), ones(2), ones(4), scratch=True)
    c.seq_len = 0
    c.discard_linear_scratch()
    assert c.seq_len == 0


@pytest.mark.parametrize(
    "data",
    [None, "CMFS", 5, [1], np.zeros(3, "M8[s]"), np.zeros((0, 3), np.uint8),
     np.zeros((8, 8), np.uint8)[:, ::2]],
)  # fmt: skip
def test_what_holds_no_bytes(data):
    c = layer()
    refused(KvWireError, c, lambda: c.import_wire(data))
    with pytest.raises(KvWireError):
        hash64(data)


@pytest.mark.parametrize("what", [{"a": object()}, {"a": float("nan")}, {1: 2, "a": 1}])
def test_descriptions_that_json_cannot_hold(what):
    with pytest.raises(KvWireError):
        identity_of(what)


def test_views_stay_read_only():
    c, far = layer(), sealed()
    view = far.o1_views()[0]
    arrays = [c.head_keys(0), c.head_values(0), c.imp, view.win_k, view.sink_v, view.k_landmarks]
    for array in [*arrays, view.heads[0].t, view.heads[0].pinv]:
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    assert np.shares_memory(c.head_keys(0), c._stores.k) and c.head_keys(0).shape == (3, 4)


# -- forged or foreign objects ------------------------------------------------------------------


def test_forged_ring_snapshots():
    c, w, rope = ring()
    c.bounded_step(ones(8), ones(8), ones(8), w, rope, 0.3, 1, ones(8))
    good = c.bounded_snapshot()
    for seen in (-5, 2.5, True, None):
        bad = BoundedSnapshot(good.ring_k, good.ring_v, seen)
        refused(KvShapeError, c, lambda bad=bad: c.bounded_restore(bad))
    refused(KvShapeError, c, lambda: c.bounded_restore(None))


def test_forged_snapshots_of_a_sealed_layer():
    c = sealed()
    good = c.o1_snapshot()
    for counters in ((999, 0, 0), (4, 4, 1), (3, 1, 0), (3, 0, 1), (-1, 0, 0), (4, 0, 0.5)):
        bad = dataclasses.replace(good, counters=counters)
        refused(KvShapeError, c, lambda bad=bad: c.o1_restore(bad))
    refused(KvShapeError, c, lambda: c.o1_restore(None))
    c.o1_restore(good)


def test_weights_and_rope_of_another_kind():
    c, w, rope = ring()
    for pair in ((None, rope), (w, None), (rope, w)):
        refused(
            KvShapeError, c,
            lambda pair=pair: c.bounded_step(
                ones(8), ones(8), ones(8), *pair, 0.3, 1, ones(8)
            ),
        )  # fmt: skip


@pytest.mark.parametrize("scale,error", [("x", KvShapeError), (1e200, KvStateError)])
def test_rope_scale(scale, error):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error):
            BoundedRope(4, ones(2), scale)


def test_records_are_mappings():
    for call in (lambda: validate_anchor([], ["BoundedAttention"]), lambda: O1Plan.from_hint([])):
        with pytest.raises(KvStateError, match="no mapping"):
            call()


def test_core_parameters_are_numbers():
    with pytest.raises(KvShapeError):
        decay_from_log("x")
    for kw in ({"decay": ["a", "b"]}, {"decay": ones(2), "mass": "x"}):
        with pytest.raises(KvShapeError):
            PhaseCore(1, 1, 1, **kw)


# -- memory that overlaps -----------------------------------------------------------------------


def test_an_output_inside_the_ring():
    c, w, rope = ring()
    for plane in (c.bounded.ring_k, c.bounded.ring_v):
        refused(
            KvShapeError, c,
            lambda plane=plane: c.bounded_step(
                ones(8), ones(8), ones(8), w, rope, 0.3, 1, plane[0, 1]
            ),
        )  # fmt: skip


def test_a_key_that_lies_in_the_ring():
    c, w, rope = ring()
    for i in range(6):
        c.bounded_step(gen(i, 8), gen(20 + i, 8), gen(40 + i, 8), w, rope, 0.3, 1, ones(8))
    other, out, want = c.copy(), ones(8), ones(8)
    slot = c.bounded.head
    for key in (slot, slot - 1):
        k, v = c.bounded.ring_k[0, key], c.bounded.ring_v[0, key]
        other.bounded_step(ones(8), k.copy(), v.copy(), w, rope, 0.3, 1, want)
        c.bounded_step(ones(8), k, v, w, rope, 0.3, 1, out)
        same_bits(out, want)
        same_bits(c.bounded.ring_k, other.bounded.ring_k)


@pytest.mark.parametrize("path", compiled.available())
@pytest.mark.parametrize("delta", [False, True])
def test_a_value_that_lies_in_the_state(path, delta):
    """The value read is the one that was handed in, not what the step makes of it."""
    core = PhaseCore(2, 2, 4, ones(8, 0.5), delta=delta)
    a, b = (LayerKvCache(1, 4, mode=F32) for _ in range(2))
    for c in (a, b):
        core.prepare(c)
        c.linear_state[:] = gen(3, core.state_len)
    with compiled.use(path):
        want = core.step(a, gen(1, 4), gen(2, 4), a.linear_state[3:11].copy())
        got = core.step(b, gen(1, 4), gen(2, 4), b.linear_state[3:11])
    same_bits(got, want)
    same_bits(b.linear_state, a.linear_state)


# -- threads against the rule -------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_attention_while_another_thread_changes_the_layer(mode):
    """The rule forbids it; the answer is lost then, the process is not."""
    c = LayerKvCache(1, 32, mode=mode)
    stop, odd = threading.Event(), []

    def attend() -> None:
        out = np.empty(3 * 32, np.float32)
        while not stop.is_set():
            try:
                c.attend_group(gen(1, 96), 0, out)
            except KvStateError:
                pass
            except Exception as error:
                odd.append(error)
                return

    workers = [threading.Thread(target=attend) for _ in range(2)]
    for w in workers:
        w.start()
    for _ in range(4):
        fill(c, 200)
        c.clear()
    stop.set()
    for w in workers:
        w.join()
    assert odd == []
