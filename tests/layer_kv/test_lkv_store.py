"""Rows, modes, quantisation, freeze, cutting, eviction, views and copies."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import MODES, bits, close, fill, gen, poisoned, refused, same_bits, state_of

from memra_lowlevel.errors import KvShapeError, KvStateError
from memra_lowlevel.layer_kv import KvCache, KvMode, LayerKvCache, Mass, Recent, WireKind, compiled
from memra_lowlevel.layer_kv.arith import quantise
from memra_lowlevel.layer_kv.evict import evict_mass, evict_recent

F32 = KvMode.F32


def ones(n: int, value: float = 1.0) -> np.ndarray:
    return np.full(n, value, np.float32)


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


@pytest.mark.parametrize("hd,n,want", [(10, 3, 84)])
def test_q8_bytes(hd, n, want):
    c = LayerKvCache(1, hd, mode=KvMode.Q8())
    fill(c, n)
    assert c.memory_bytes() == want


@pytest.mark.parametrize("hd,ratio", [(32, 3.556), (64, 3.657), (128, 3.710), (256, 3.737)])
def test_bytes_per_row(hd, ratio):
    sizes = []
    for mode in MODES:
        c = LayerKvCache(1, hd, mode=mode)
        fill(c, 1)
        sizes.append(c.memory_bytes())
    g = -(-hd // 32)
    assert sizes == [8 * hd, 2 * hd + 4 * g + 4, hd + 4 * g + 4 * hd, 4 * hd + hd + 4]
    assert abs(sizes[0] / sizes[1] - ratio) < 5e-4


def test_scratch_counts_in_total_and_recurrent():
    c = LayerKvCache(1, 4, mode=F32)
    c.append(ones(4), ones(4))
    c.linear_state, c.linear_scratch = ones(8), ones(4)
    cache = KvCache([c])
    assert (cache.memory_bytes(), cache.recurrent_bytes(), cache.attention_bytes()) == (80, 48, 32)


@pytest.mark.parametrize(
    "w,slack,align,first,base,left,every",
    [(6, 2, 4, 13, 4, 9, 4), (10, 2, 4, 21, 8, 13, None), (512, 64, 64, 1025, 448, 577, None)],
)
def test_trim(w, slack, align, first, base, left, every):
    c = LayerKvCache(1, 1, mode=F32)
    dropped = {}
    for p in range(first + 8):
        c.append(ones(1, p), ones(1, -p))
        if c.seq_len + c.base <= first + 8 and (n := c.trim_window(w, slack, align)):
            dropped[p + 1] = n
            assert c.head_keys(0)[0, 0] == c.base
            assert c.pos_len == p + 1
        if p + 1 == first:
            assert (c.base, c.seq_len, dropped) == (base, left, {first: base})
            assert c.imp.size == left
    if every:
        assert dropped == {first: base, first + every: 4, first + 2 * every: 4}
    assert c.tail == w
    c.clear()
    assert (c.base, c.tail) == (0, w)


def test_trim_leaves_what_it_must():
    c = LayerKvCache(2, 2, mode=KvMode.Q8())
    fill(c, 30)
    assert c.trim_window(4) == 0 and c.seq_len == 30  # columns not frozen yet
    fill(c, 40)
    assert c.trim_window(4, 0, 1) == 66 and c.seq_len == 4
    assert c.trim_window(0) == 0
    rag = LayerKvCache(2, 2, mode=F32, allow_ragged=True)
    fill(rag, 3)
    fill(rag, 9, alive=[1, 0])
    refused(KvStateError, rag, lambda: rag.trim_window(2))


def test_mode_door(monkeypatch):
    want = {"q8": (1, 1), "q8_2f": (1, 1), "q8k": (1, 0), "q8v": (0, 1), "": (0, 0)}
    for text, (k, v) in want.items():
        monkeypatch.setenv("CMF_KV", text)
        assert KvMode.from_env() == KvMode(bool(k), bool(v))
        assert LayerKvCache(1, 1).mode == KvMode(bool(k), bool(v))
    monkeypatch.delenv("CMF_KV")
    assert LayerKvCache(1, 1).mode is KvMode.F32
    for text in ("Q8", "f32", "q4"):
        monkeypatch.setenv("CMF_KV", text)
        with pytest.raises(KvStateError, match=text):
            LayerKvCache(1, 1)
    with pytest.raises(KvStateError):
        KvMode.Q8(False, False)
    assert LayerKvCache(1, 1, mode=F32).mode is F32


# -- quantisation -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", compiled.available())
def test_quantise_vectors(path):
    from memra_lowlevel.layer_kv import loops

    def one(x, width):
        x = np.asarray(x, np.float32)[None]
        got = loops.quantise(x, np.zeros_like(x), np.zeros(1, np.uint8), width)
        assert got is not None
        return got[0][0].tolist(), bits(got[1])

    with compiled.use(path):
        assert one([0.5, -1, 0.25, 0.125], 32) == ([64, -127, 32, 16], ["3c010204"])
        assert one([0, 0, 0, 0], 32) == ([0, 0, 0, 0], ["2b8cbccc"])
        halves = one([127, 63.5, -63.5, 0.5, -0.5, 1.5, 2.5, -126.5], 8)
        assert halves == ([127, 64, -64, 1, -1, 2, 3, -127], ["3f800000"])
        codes, scales = one(gen(11, 40, 3.0), 32)
        assert scales == ["3cb87f12", "3c9ba15f"]
        assert codes == [
            int(t)
            for t in (
                "-33 -104 -23 45 32 106 -110 1 48 -105 12 -35 -48 86 -79 115 127 73 -90 28 -118 4 "
                "72 -81 -12 -108 -50 28 -19 -27 -73 125 30 45 127 17 87 61 9 -123"
            ).split()
        ]
        codes, scales = one(gen(11, 40, 3.0), 40)
        assert scales == ["3cb87f12"] and codes[-8:] == [25, 38, 107, 14, 73, 51, 8, -104]


def freeze_layer(mode: KvMode, n: int = 65) -> LayerKvCache:
    c = LayerKvCache(1, 4, mode=mode)
    for p in range(n):
        b = np.array([4, 0.25, 1, 2], np.float32)
        c.append(gen(300 + p, 4) * b, gen(400 + p, 4) * b)
    return c


def test_freeze_vectors():
    s = freeze_layer(KvMode.Q8(), 64)._stores
    assert not s.columns_frozen()
    assert s.kq[0, 0].tolist() == [-127, -8, 14, -10] and bits(s.ks[0, 0]) == ["3cb2a3bd"]
    assert s.vq[0, 0].tolist() == [-127, 4, -30, 25] and bits(s.vs[0, 0]) == ["3c5297d4"]
    s = freeze_layer(KvMode.Q8())._stores
    assert bits(s.kcol) == ["40226ec4", "3e139224", "3f20f2d3", "3f914b7e"]
    assert bits(s.vcol) == ["400a2840", "3e1a36fb", "3f20a033", "3f8e5885"]
    assert s.kq[0, 0].tolist() == [-114, -127, 51, -20] and bits(s.ks[0, 0]) == ["3c1c2b20"]
    assert s.vq[0, 0].tolist() == [-127, 57, -103, 49] and bits(s.vs[0, 0]) == ["3bc31c44"]
    assert s.kq[0, 63].tolist() == [127, 35, 20, -125] and bits(s.ks[0, 63]) == ["3c2dee50"]
    assert s.kq[0, 64].tolist() == [-40, -127, 112, 65] and bits(s.ks[0, 64]) == ["3c471574"]
    assert s.vq[0, 64].tolist() == [-98, -127, 8, 70] and bits(s.vs[0, 64]) == ["3c4fd724"]


@pytest.mark.parametrize(
    "mode,want,n_bytes",
    [
        (KvMode.Q8(), "0.62122639 0.04112226 -0.05138546 0.05050505", None),
        (F32, "0.62248798 0.04069349 -0.05202529 0.04985712", None),
        (KvMode.Q8(v=False), "0.6215932 0.04087377 -0.05191591 0.04981202", 1576),
        (KvMode.Q8(k=False), "0.62211806 0.04094049 -0.05150183 0.05055046", 1576),
    ],
)
def test_quantised_attention(mode, want, n_bytes):
    c = freeze_layer(mode)
    close(c.attend(gen(999, 4, 1.5), 0)[0], want)
    assert n_bytes is None or c.memory_bytes() == n_bytes
    s = c._stores
    assert (bool(s.kcol_on[0]), bool(s.vcol_on[0])) == (mode.k, mode.v)


def test_freeze_breaks_upto_and_chunk_rows_says_where():
    q = gen(999, 4, 1.5)
    a = freeze_layer(KvMode.Q8(), 64)
    assert a.chunk_rows(10) == 10 and freeze_layer(KvMode.Q8(), 60).chunk_rows(10) == 4
    close(a.attend(q, 0)[0], "0.64709145 0.04312914 -0.05264892 0.04253532")
    out = poisoned(4)
    freeze_layer(KvMode.Q8(), 66).attend_group_upto(q, 0, out, None, 0.5, 0, None, 64)
    close(out, "0.6455539 0.04321095 -0.05223241 0.04360769")
    a, b = freeze_layer(KvMode.Q8(), 63), freeze_layer(KvMode.Q8(), 64)
    x, y = poisoned(4), poisoned(4)
    a.attend_group_upto(q, 0, x, None, 0.5, 0, None, 63)
    b.attend_group_upto(q, 0, y, None, 0.5, 0, None, 63)
    same_bits(x, y)


def test_tiny_values_vanish_in_q8():
    for mode, want in ((KvMode.Q8(), 0.0), (F32, 1e-11)):
        c = LayerKvCache(1, 2, mode=mode)
        for _ in range(2):
            c.append(np.array([1, 0], np.float32), ones(2, 1e-11))
        out, _ = c.attend(np.array([1, 0], np.float32), 0)
        assert np.allclose(out, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", MODES[1:])
def test_freeze_sees_only_what_survived(mode):
    """A rejected draft row leaves no trace in the column fields."""
    plain, drafted = LayerKvCache(2, 40, mode=mode), LayerKvCache(2, 40, mode=mode)
    for c in (plain, drafted):
        fill(c, 63)
    drafted.append(gen(1, 80, 50), gen(2, 80, 50))
    drafted.truncate_last(1)
    for c in (plain, drafted):
        fill(c, 5, salt=7000)
    d1, d2 = state_of(plain), state_of(drafted)
    assert d1[1:] == d2[1:]


def test_freeze_happens_at_64_or_above_and_stays():
    c = LayerKvCache(1, 4, mode=KvMode.Q8())
    fill(c, 64)
    assert not c._stores.columns_frozen()
    evict_recent(c, 10)
    fill(c, 54)
    assert c.seq_len == 64 and not c._stores.columns_frozen()
    generation = c.generation
    fill(c, 1)
    assert c._stores.columns_frozen() and c.generation != generation
    c.truncate_last(60)
    column = c._stores.kcol.copy()
    fill(c, 100)
    assert (c._stores.kcol == column).all()
    c.clear()
    assert not c._stores.columns_frozen() and c.memory_bytes() == 0 and c.mode == KvMode.Q8()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", MODES[1:])
def test_q8_refuses_what_it_cannot_keep(mode, bad):
    for n in (3, 64):  # before the freeze, and in the append that would freeze
        c = LayerKvCache(2, 5, mode=mode)
        fill(c, n)
        x = gen(5, 10)
        x[7] = bad
        if mode.k:
            refused(KvStateError, c, lambda c=c, x=x: c.append(x, gen(6, 10)))
        if mode.v:
            refused(KvStateError, c, lambda c=c, x=x: c.append(gen(6, 10), x))
    dead = LayerKvCache(2, 5, mode=mode)
    dead.append(x, x, [1, 0])  # the bad value lies in the dead head
    assert dead.head_len(0) == 1


def test_q8_refuses_columns_that_overflow():
    c = LayerKvCache(1, 4, mode=KvMode.Q8())
    fill(c, 64, amp=3e38)
    refused(KvStateError, c, lambda: c.append(ones(4), ones(4)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_quantise_paths_agree(data):
    from memra_lowlevel.layer_kv import loops

    n, hd = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    width = data.draw(st.sampled_from([32, hd]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = (rng.standard_normal((n, hd)) * 10.0 ** rng.integers(-14, 6)).astype(np.float32)
    x[rng.random((n, hd)) < 0.1] = 0
    col = np.maximum(rng.random((n, hd)) * 4, 1e-6).astype(np.float32)
    on = rng.integers(0, 2, n).astype(np.uint8)
    want = quantise(x, col, on, width)
    assert want is not None
    r = np.where(on[:, None] != 0, x / col, x).astype(np.float64)
    scales = np.repeat(want[1], width, axis=1)[:, :hd].astype(np.float64)
    assert (np.abs(r - scales * want[0]) <= scales * 0.50001).all()
    assert want[0].min() >= -127
    for path in compiled.available():
        with compiled.use(path):
            got = loops.quantise(x, col, on, width)
        assert got is not None
        assert (got[0] == want[0]).all()
        same_bits(got[1], want[1])


# -- refusals of append -------------------------------------------------------------------------


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


def test_accumulate_imp():
    c = LayerKvCache(1, 2, mode=F32)
    fill(c, 3)
    c.accumulate_imp(np.array([1, 2], np.float32))
    c.accumulate_imp(np.array([1, 2, 3, 4], np.float32))
    assert c.imp.tolist() == [2, 4, 3]
    refused(KvStateError, c, lambda: c.accumulate_imp(np.array([np.nan], np.float32)))
    refused(KvShapeError, c, lambda: c.accumulate_imp(np.ones(3)))


# -- eviction -----------------------------------------------------------------------------------


def numbered(n: int, mode: KvMode = F32) -> LayerKvCache:
    c = LayerKvCache(1, 1, mode=mode)
    for p in range(n):
        c.append(ones(1, p + 1), ones(1, p + 1))
    return c


def kept(c: LayerKvCache) -> list[int]:
    return [int(x) - 1 for x in c.head_keys(0)[:, 0]]


def test_mass_vectors():
    c = numbered(8)
    imp = ones(8, 0.05)
    imp[3] = 5.05
    c.accumulate_imp(imp)
    assert evict_mass(c, 4, 1) == 4 and kept(c) == [0, 3, 6, 7]
    assert bits(c.imp) == bits([0.05, 5.05, 0.05, 0.05]) and c.seq_len == 4
    for keep, sink, recent, want in ((5, 1, 2, [0, 1, 2, 6, 7]), (3, 4, None, [0, 1, 2]),
                                     (1, 0, None, [7])):  # fmt: skip
        c = numbered(8)
        evict_mass(c, keep, sink, recent)
        assert kept(c) == want
    c = numbered(8)
    assert evict_recent(c, 4) == 4 and kept(c) == [4, 5, 6, 7]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30),
    st.integers(0, 12), st.integers(0, 6), st.integers(0, 8),
)  # fmt: skip
def test_mass_is_the_stable_choice(imp, keep, sink, recent):
    n = len(imp)
    c = numbered(n)
    c.accumulate_imp(np.array(imp, np.float32))
    evict_mass(c, keep, sink, recent)
    if n <= keep:
        assert kept(c) == list(range(n))
        return
    s = min(sink, keep)
    r = min(recent, keep - s)
    always = set(range(s)) | set(range(n - r, n))
    rest = sorted((i for i in range(n) if i not in always), key=lambda i: -imp[i])
    want = sorted(always | set(rest[: keep - len(always)]))
    assert kept(c) == want
    assert c.imp.tolist() == [imp[i] for i in want]


@pytest.mark.parametrize("mode", MODES)
def test_eviction_gathers_every_store(mode):
    c = LayerKvCache(2, 33, mode=mode)
    fill(c, 70)
    rows = [{p: getattr(c._stores, p)[h, :70].copy() for p in c._stores.planes()} for h in range(2)]
    imp = np.arange(70, dtype=np.float32) % 7
    c.accumulate_imp(imp)
    evict_mass(c, 20, 2, 5)
    keep = np.flatnonzero(np.isin(imp, c.imp))  # superset; check rows exactly below
    assert keep.size and c.head_len(0) == c.head_len(1) == c.seq_len == 20
    from memra_lowlevel.layer_kv.evict import mass_rows

    want = mass_rows(imp, 20, 2, 5)
    for h in range(2):
        for p in c._stores.planes():
            assert (getattr(c._stores, p)[h, :20] == rows[h][p][want]).all()


def test_cache_evicts_all_or_nothing():
    layers = [numbered(8) for _ in range(2)]
    cache = KvCache(layers, max_seq_len=8)
    assert [x.wire_layer for x in layers] == [0, 1] and cache.needs_eviction()
    with pytest.warns(UserWarning, match="cap of 8 rows"):
        assert cache.evict() == 4
    assert [kept(x) for x in layers] == [[0, 1, 2, 3]] * 2 and not cache.needs_eviction()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.evict(2)  # the warning comes once
    ragged = LayerKvCache(2, 1, mode=F32, allow_ragged=True)
    fill(ragged, 4)
    fill(ragged, 4, alive=[1, 0])
    cache = KvCache([numbered(8), ragged], 8, Mass(sink=1))
    before = [state_of(x) for x in cache]
    with pytest.raises(KvStateError, match="ragged"):
        cache.evict(3)
    assert [state_of(x) for x in cache] == before
    with pytest.warns(UserWarning):
        KvCache([ragged], 8, Recent()).evict(2)
    assert ragged._stores.rows.tolist() == [2, 0]


def test_eviction_leaves_alone_what_it_must():
    ring = LayerKvCache(1, 1, mode=F32)
    ring.install_bounded(4)
    collecting = numbered(0)
    collecting.o1_begin(4, 8, 2)
    fill(collecting, 10)
    trimmed = numbered(10)
    trimmed.trim_window(8)
    linear = LayerKvCache(1, 1, mode=F32)
    linear.wire_kind = WireKind.LINEAR
    linear.seq_len = 50
    cache = KvCache([ring, collecting, trimmed, linear], 8, Recent())
    assert not cache.needs_eviction()
    before = [state_of(x) for x in cache]
    assert cache.evict(1) == 0
    assert [state_of(x) for x in cache] == before


# -- views and copies ---------------------------------------------------------------------------


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


def test_environment_mode_is_read_once(monkeypatch):
    monkeypatch.setenv("CMF_KV", "q8k")
    c = LayerKvCache(1, 4)
    monkeypatch.setenv("CMF_KV", "q8v")
    c.clear()
    assert c.mode == KvMode.Q8(v=False)
