"""Rows that go: trimmed tails, importance, eviction by mass and by age."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import MODES, bits, fill, ones, refused, state_of

from memra_lowlevel.errors import KvShapeError, KvStateError
from memra_lowlevel.layer_kv import KvCache, KvMode, LayerKvCache, Mass, Recent, WireKind
from memra_lowlevel.layer_kv.evict import evict_mass, evict_recent

F32 = KvMode.F32


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


def test_accumulate_imp():
    c = LayerKvCache(1, 2, mode=F32)
    fill(c, 3)
    c.accumulate_imp(np.array([1, 2], np.float32))
    c.accumulate_imp(np.array([1, 2, 3, 4], np.float32))
    assert c.imp.tolist() == [2, 4, 3]
    refused(KvStateError, c, lambda: c.accumulate_imp(np.array([np.nan], np.float32)))
    refused(KvShapeError, c, lambda: c.accumulate_imp(np.ones(3)))


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
