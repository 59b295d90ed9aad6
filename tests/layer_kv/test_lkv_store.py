"""Rows of a layer: append, liveness, cutting, views and copies."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from lkv_data import MODES, bits, fill, gen, ones, refused, state_of

from memra_lowlevel.errors import KvShapeError, KvStateError
from memra_lowlevel.layer_kv import KvCache, KvMode, LayerKvCache

F32 = KvMode.F32


def test_generator_bits():
    assert bits(gen(1, 4)) == ["bddce550", "bf537aa6", "be9133b0", "becca9bc"]
    assert bits(gen(7, 3, 2.5)) == ["4002a1db", "bd0c9790", "bffd8fb3"]


def test_append_is_head_major():
    c = LayerKvCache(4, 8, mode=F32)
    c.append(np.arange(32, dtype=np.float32), ones(32, 2))
    assert (c.seq_len, c.head_len(1), c.memory_bytes()) == (1, 1, 256)
    assert c.head_keys(1).tolist() == [list(range(8, 16))]
    assert [h.tolist() for h in c.v_heads()] == [[[2.0] * 8]] * 4


def test_dead_head_keeps_nothing():
    c = LayerKvCache(2, 4, mode=F32)
    for _ in range(2):
        c.append(ones(8), ones(8), [1, 0])
    assert (c.seq_len, c.head_len(0), c.head_len(1), c.memory_bytes()) == (2, 2, 0, 64)
    assert c.head_keys(1).shape == (0, 4)
    out, probs = c.attend(ones(4), 1)
    assert out.tolist() == [0.0] * 4 and probs.size == 0


def test_scratch_counts_in_total_and_recurrent():
    c = LayerKvCache(1, 4, mode=F32)
    c.append(ones(4), ones(4))
    c.linear_state, c.linear_scratch = ones(8), ones(4)
    cache = KvCache([c])
    assert (cache.memory_bytes(), cache.recurrent_bytes(), cache.attention_bytes()) == (80, 48, 32)


def test_append_shapes():
    c = LayerKvCache(2, 4, mode=F32)
    fill(c, 2)
    good = ones(8)
    bad: list[Any] = [
        ones(7), ones(9), ones(0), good.astype(np.float64), good.astype(">f4"),
        good.astype(np.float16), np.arange(8), "text", None, object(), 3.0,
    ]  # fmt: skip
    for x in bad:
        refused(KvShapeError, c, lambda x=x: c.append(x, good))
        refused(KvShapeError, c, lambda x=x: c.append(good, x))
    refused(KvShapeError, c, lambda: c.append(good, good, [1, 1, 1]))
    for nkv, hd in ((0, 4), (4, 0), (-1, 4), (2.5, 4)):
        with pytest.raises(KvShapeError):
            LayerKvCache(nkv, hd, mode=F32)
    with pytest.raises(KvShapeError):
        LayerKvCache(1, 1, mode="q8")


def test_any_float32_buffer_is_accepted():
    class Foreign:
        def __array__(self, dtype=None, copy=None):
            return np.arange(8, dtype=np.float32)

    class Capsule:
        def __init__(self, a):
            self.a = a

        def __dlpack__(self, **kw):
            return self.a.__dlpack__(**kw)

        def __dlpack_device__(self):
            return self.a.__dlpack_device__()

    import array

    want = np.arange(8, dtype=np.float32)
    for x in (
        want, want.reshape(2, 4), np.arange(16, dtype=np.float32)[::2] / 2, Foreign(), list(want),
        Capsule(want.copy()), array.array("f", want), memoryview(want),
    ):  # fmt: skip
        c = LayerKvCache(2, 4, mode=F32)
        c.append(x, x)
        assert np.concatenate(c.k_heads(), axis=1)[0].tolist() == want.tolist()
    out = Capsule(np.zeros(4, np.float32))
    c.attend_group(ones(4), 0, out)
    assert out.a.tolist() == [0, 1, 2, 3]


def test_liveness_flip():
    c = LayerKvCache(3, 2, mode=F32)
    fill(c, 2, alive=[0, 1])
    for alive in (None, [1, 1, 1], [0, 0, 1], [0, 1, 0], []):
        refused(KvStateError, c, lambda a=alive: fill(c, 1, alive=a))
    fill(c, 1, alive=[False, True, True])
    c.truncate_last(3)
    fill(c, 1)  # an empty sequence may begin anew
    assert c._stores.rows.tolist() == [1, 1, 1]
    free = LayerKvCache(2, 2, mode=KvMode.Q8(), allow_ragged=True)
    fill(free, 65, alive=[1, 0])
    fill(free, 5)
    assert (free.seq_len, free._stores.rows.tolist()) == (70, [70, 5])
    assert free._stores.kcol_on.tolist() == [1, 0]  # late heads get no column in this sequence


# -- truncate, importance, clear ----------------------------------------------------------------


def test_truncate_vectors():
    c = LayerKvCache(2, 4, mode=F32)
    for p in range(5):
        c.append(ones(8, p), ones(8, p), [1, 0])
    c.linear_scratch = ones(3)
    c.truncate_last(2)
    assert (c.seq_len, c.head_len(0), c.head_len(1), c.imp.size) == (3, 3, 0, 3)
    assert c.head_keys(0)[-1, 0] == 2.0 and c.linear_scratch.size == 0
    c.truncate_last(99)
    assert (c.seq_len, c.head_len(0), c.memory_bytes()) == (0, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_truncate_treats_both_sides_alike(mode):
    c = LayerKvCache(1, 4, mode=mode)
    fill(c, 5)
    c.truncate_last(2)
    assert c.head_len(0) == 3
    if mode == KvMode.Q8(v=False):
        assert c.memory_bytes() == 72
    whole = LayerKvCache(1, 4, mode=mode)
    fill(whole, 3)
    assert state_of(c)[2] == state_of(whole)[2]


def test_truncate_zero_drops_the_scratch_only():
    c = LayerKvCache(1, 2, mode=F32)
    fill(c, 2)
    c.linear_state, c.linear_scratch = ones(4), ones(4, 2)
    c.truncate_last(0)
    assert c.seq_len == 2 and c.linear_scratch.size == 0 and c.linear_state.tolist() == [1] * 4
    for n in (-1, 1.5, "2"):
        refused(KvShapeError, c, lambda n=n: c.truncate_last(n))


def test_clear_keeps_what_is_not_the_sequence():
    c = LayerKvCache(2, 2, mode=F32)
    c.sinks = ones(4)
    c.wire_layer, c.wire_identity = 3, 77
    c.set_linear_wire_allowed(False)
    fill(c, 4)
    c.linear_state = ones(3)
    c.clear()
    assert (c.seq_len, c.imp.size, c.linear_state.size, c.memory_bytes()) == (0, 0, 0, 0)
    assert c.sinks.tolist() == [1] * 4 and (c.wire_layer, c.wire_identity) == (3, 77)
    assert not c.linear_wire_allowed


def test_views():
    c = LayerKvCache(2, 4, mode=F32)
    fill(c, 3)
    view = c.head_values(1)
    assert np.shares_memory(view, c._stores.v) and not view.flags.writeable
    assert not c.imp.flags.writeable and view.shape == (3, 4)
    for h in (2, -1):
        refused(KvShapeError, c, lambda h=h: c.head_keys(h))
        refused(KvShapeError, c, lambda h=h: c.head_len(h))
    q = LayerKvCache(2, 4, mode=KvMode.Q8(v=False))
    fill(q, 1)
    refused(KvStateError, q, lambda: q.k_heads())
    assert q.v_heads()[0].shape == (1, 4)
    assert "seq_len=3" in repr(c)


@pytest.mark.parametrize("mode", MODES)
def test_copies_share_nothing(mode):
    c = LayerKvCache(2, 4, mode=mode)
    fill(c, 70)
    c.linear_state = ones(5)
    c.sinks = ones(4)
    c.accumulate_imp(ones(70, 0.5))
    for other in (c.copy(), copy.copy(c), copy.deepcopy(c)):
        ignore = {"_generation": 0}
        a, b = state_of(c), state_of(other)
        a[0].update(ignore), b[0].update(ignore)
        assert a == b
        before = state_of(c)
        fill(other, 3)
        other.linear_state[:] = 9
        other.truncate_last(10)
        other.accumulate_imp(ones(5))
        assert state_of(c) == before
    twin = LayerKvCache(2, 4, mode=F32)
    twin.copy_from(c)
    assert twin.mode == mode
    refused(KvShapeError, twin, lambda: twin.copy_from(LayerKvCache(1, 4, mode=F32)))
    refused(KvShapeError, twin, lambda: twin.copy_from(3))


def test_fields_refuse_nonsense():
    c = LayerKvCache(2, 4, mode=F32)
    fill(c, 1)
    refused(KvStateError, c, lambda: setattr(c, "seq_len", 5))
    refused(KvStateError, c, lambda: setattr(c, "wire_kind", 3))
    refused(KvStateError, c, lambda: setattr(c, "wire_kind", 9))
    refused(KvShapeError, c, lambda: setattr(c, "wire_layer", 2**32))
    refused(KvShapeError, c, lambda: setattr(c, "wire_identity", -1))
    refused(KvShapeError, c, lambda: setattr(c, "sinks", ones(3)))
    refused(KvStateError, c, lambda: setattr(c, "sinks", ones(2, np.nan)))
    c.linear_state = ones(4)
    refused(KvShapeError, c, lambda: setattr(c, "expected_state_len", 5))
    c.expected_state_len = 4
    refused(KvShapeError, c, lambda: setattr(c, "linear_state", ones(5)))
