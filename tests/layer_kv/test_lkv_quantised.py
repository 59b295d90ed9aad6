"""Quantised rows: the mode door, codes, the freeze of the columns, what they cannot keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import MODES, bits, close, fill, gen, ones, poisoned, refused, same_bits, state_of

from memra_lowlevel.errors import KvStateError
from memra_lowlevel.layer_kv import KvMode, LayerKvCache, compiled
from memra_lowlevel.layer_kv.arith import quantise
from memra_lowlevel.layer_kv.evict import evict_recent

F32 = KvMode.F32


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


def test_environment_mode_is_read_once(monkeypatch):
    monkeypatch.setenv("CMF_KV", "q8k")
    c = LayerKvCache(1, 4)
    monkeypatch.setenv("CMF_KV", "q8v")
    c.clear()
    assert c.mode == KvMode.Q8(v=False)
