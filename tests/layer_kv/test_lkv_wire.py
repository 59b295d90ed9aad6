"""The state wire: vectors, round trips, refusals, and bytes that are almost right."""

from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lkv_data import SCALE, fill, gen, poisoned, refused, same_bits, state_of

from memra_lowlevel.errors import KvStateError, KvWireError
from memra_lowlevel.layer_kv import (
    BoundedRope,
    BoundedWeights,
    KvMode,
    LayerKvCache,
    PhaseCore,
    WireKind,
    hash64,
    identity_of,
    wire,
)
from memra_lowlevel.layer_kv.wire import from_f16, pack_header, to_f16

F = np.float32


def test_hash_vectors():
    cases = {
        b"": "0000000000000000", b"\0": "b456bcfc34c2cb2c", b"CMFS": "bbfeecd787340732",
        b"abcdefgh": "47da24881d1e74a9", b"abcdefghi": "0a845f71003c71e6",
        bytes(range(16)): "2b19df6caaecd551", bytes(range(17)): "38069fbb2de94428",
        b'{"kind":"vmf_phase"}': "91028f4e56a7a6a8",
    }  # fmt: skip
    for data, want in cases.items():
        assert f"{hash64(data):016x}" == want
    assert hash64(bytearray(b"CMFS")) == hash64(np.frombuffer(b"CMFS", np.uint8))


def test_identity():
    anchor = {
        "anchor_core": {
            "window": 128, "far": None, "head_dim": 128, "kind": "swa_sink_v1",
            "num_kv_heads": 2, "rope": "relative_in_window", "sink": 4, "sink_scores": "nope",
        },
        "layer_types": ["BoundedAttention", "LinearAttention"],
    }  # fmt: skip
    assert f"{identity_of(anchor):016x}" == "06601951d2f4cbb8"
    assert identity_of(None) == 0


def test_header_vector():
    got = pack_header(0x1122334455667788, 7, WireKind.FULL, True, 300)
    assert got.hex() == "434d465302000000887766554433221107000000000100002c01000000000000"


def sample() -> LayerKvCache:
    c = LayerKvCache(2, 2, mode=KvMode.F32)
    c.wire_layer = 3
    for k, v in (((1, -2), (3, 4)), ((0.5, 0.25), (-1, 0.1))):
        c.append(F([*k, 9, 9]), F([*v, 9, 9]), [1, 0])
    c.accumulate_imp(F([0.75, 0.25]))
    return c


FULL = (
    "434d4653020000000000000000000000030000000000000002000000000000000000000002000000020000000200"
    "000000000000020000000000403f0000803e040000000000803f000000c00000003f0000803e0400000000004040"
    "00008040000080bfcdcccc3d0000000000000000"
)
HALF = (
    "434d4653020000000000000000000000030000000001000002000000000000000100000002000000020000000200"
    "000000000000020000000000403f0000803e04000000003c00c000380034040000000042004400bc662e00000000"
    "00000000"
)
LINEAR = (
    "434d465302000000eeffc00000000000000000000101000009000000000000000100000004000000040000000000"
    "003f000080be0000803f00006040"
)


@pytest.mark.parametrize(
    "f16,want,size,digest",
    [(False, FULL, 112, "e0cfed686c8c386b"), (True, HALF, 96, "58b0256afabdec16")],
)
def test_full_vectors(f16, want, size, digest):
    c = sample()
    got = c.export_wire(f16)
    assert got.hex() == want and len(got) == size and f"{hash64(got):016x}" == digest
    d = LayerKvCache(2, 2, mode=KvMode.Q8())
    d.wire_layer = 3
    d.import_wire(got)
    assert d.mode is KvMode.F32 and d._stores.rows.tolist() == [2, 0] and d.seq_len == 2
    assert d.export_wire(f16) == got
    legacy = LayerKvCache(2, 2, mode=KvMode.F32)
    legacy.import_wire(got[32:])
    assert state_of(legacy)[1:] == state_of(d)[1:]


def linear() -> LayerKvCache:
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    c.wire_kind, c.wire_identity = WireKind.LINEAR, 0xC0FFEE
    c.seq_len = 9
    c.linear_state = F([0.5, -0.25, 1, 3.5])
    return c


def test_linear_vector():
    got = linear().export_wire(True)
    assert got.hex() == LINEAR and len(got) == 60
    assert f"{hash64(got):016x}" == "53832daa840ab5e1"
    d = LayerKvCache(1, 4, mode=KvMode.F32)
    d.wire_kind, d.wire_identity = WireKind.LINEAR, 0xC0FFEE
    d.import_wire(got)
    assert d.seq_len == 9 and d.linear_state.tolist() == [0.5, -0.25, 1, 3.5]


def test_f16_codes():
    cases = {
        0.1: 0x2E66, 65519.996: 0x7BFF, 65520: 0x7C00, 2.0**-25: 0x0001, 2.5 * 2.0**-24: 0x0003,
        3.5 * 2.0**-24: 0x0004, 2.0**-26: 0x0000, 1.00048828125: 0x3C00, 1.00146484375: 0x3C02,
        -0.0: 0x8000, np.inf: 0x7C00, -np.inf: 0xFC00,
    }  # fmt: skip
    for x, want in cases.items():
        assert to_f16(F([x]))[0] == want, x
    nans = np.array([0x7FC00001, 0xFF800001], np.uint32).view(np.float32)
    assert to_f16(nans).tolist() == [0x7E00, 0xFE00]
    codes = np.arange(65536, dtype=np.uint16)
    wide = from_f16(codes)
    ok = ~np.isnan(wide)
    assert (to_f16(wide)[ok] == codes[ok]).all()  # exact both ways, subnormals included


def test_f16_differs_from_ieee_on_exactly_512_ties():
    steps = np.arange(0, 2048) * 2.0**-25  # every code below 2**-14, and every midpoint
    x = steps.astype(np.float32)
    differ = to_f16(x) != x.astype(np.float16).view(np.uint16)
    assert differ.sum() == 512
    rng = np.random.default_rng(1)
    any_bits = rng.integers(0, 2**32, 200000, dtype=np.uint32).view(np.float32)
    big = any_bits[(np.abs(any_bits) >= 2.0**-14)]
    with np.errstate(over="ignore"):
        assert (to_f16(big) == big.astype(np.float16).view(np.uint16)).all()


def ring(window: int = 3, n: int = 5) -> LayerKvCache:
    c = LayerKvCache(2, 4, mode=KvMode.F32)
    c.install_bounded(window)
    for t in range(n):
        ring_step(c, t)
    return c


def ring_step(c: LayerKvCache, t: int) -> np.ndarray:
    w = c.bounded.window
    z = gen(1, 8).reshape(2, 1, 4)
    out = poisoned(16)
    c.bounded_step(
        gen(5 * t, 16), gen(5 * t + 1, 8), gen(5 * t + 2, 8), BoundedWeights(z, z, w),
        BoundedRope.standard(w, 4), 0.5, 4, out,
    )  # fmt: skip
    return out


def tail() -> LayerKvCache:
    c = LayerKvCache(2, 4, mode=KvMode.F32)
    fill(c, 30)
    c.trim_window(8, 2, 4)
    assert c.base == 20
    return c


def test_sizes():
    c = LayerKvCache(8, 128, mode=KvMode.F32)
    c._stores.reserve(1024)
    c._stores.k[...], c._stores.v[...] = 0.5, 0.25
    c._stores.rows[:] = 1024
    c._imp, c._n_imp, c._seq_len = np.zeros(1024, np.float32), 1024, 1024
    assert [len(c.export_wire(h)) for h in (False, True)] == [8392824, 4198520]
    r = LayerKvCache(2, 128, mode=KvMode.F32)
    r.install_bounded(128)
    assert [len(r.export_wire(h)) for h in (False, True)] == [262196, 131124]


def test_untrimmed_export_is_full():
    c = sample()
    c.trim_window(100)
    assert c.export_wire().hex() == FULL


# -- continuing ---------------------------------------------------------------------------------


def empty_like(c: LayerKvCache) -> LayerKvCache:
    d = LayerKvCache(c.num_kv_heads, c.head_dim, mode=KvMode.F32)
    if c.bounded is not None:
        d.install_bounded(c.bounded.window)
    d.wire_kind, d.wire_layer, d.wire_identity = c.wire_kind, c.wire_layer, c.wire_identity
    d.expected_state_len = c.expected_state_len
    return d


def rounded(c: LayerKvCache) -> None:
    """Make every value one that f16 keeps."""
    arrays = [c._stores.k, c._stores.v] if c.bounded is None else []
    if c.bounded is not None:
        arrays = [c.bounded.ring_k, c.bounded.ring_v]
    for a in arrays:
        with np.errstate(all="ignore"):
            a[...] = a.astype(np.float16)


@pytest.mark.parametrize("f16", [False, True])
@pytest.mark.parametrize("kind", ["full", "tail", "bounded", "young ring", "linear"])
def test_continuing_equals_uninterrupted(kind, f16):
    core = PhaseCore(2, 3, 4, np.full(12, 0.9), taps=gen(4, 6).reshape(3, 2))

    def linear_step(c, t):
        x = core.convolve(c, gen(t, 3))
        return np.concatenate([x, core.step(c, gen(t, 6), gen(t + 1, 6), gen(t + 2, 8))])

    def row_step(c, t):
        c.append(gen(t, 8), gen(t + 900, 8))
        out, imp = poisoned(8), np.zeros(c.seq_len, np.float32)
        c.attend_group(gen(t + 5, 8), 1, out, imp)
        c.accumulate_imp(imp)
        c.trim_window(c.tail, 2, 4)
        return out

    if kind == "linear":
        a, step = LayerKvCache(1, 4, mode=KvMode.F32), linear_step
        a.wire_kind = WireKind.LINEAR
        for t in range(5):
            step(a, t)
    elif "ring" in kind or kind == "bounded":
        a, step = ring(3, 2 if kind == "young ring" else 7), ring_step
    else:
        a, step = tail() if kind == "tail" else LayerKvCache(2, 4, mode=KvMode.F32), row_step
        for t in range(9):
            step(a, t)
    a.wire_layer, a.wire_identity = 5, 2**63 + 1
    if f16:
        rounded(a)
    b = empty_like(a)
    b.import_wire(a.export_wire(f16))
    if kind == "tail":
        b.trim_window(8, 2, 4)  # the window is the layer's, not the state's
    assert (b.seq_len, b.base) == (a.seq_len, a.base)
    assert b.export_wire() == a.export_wire()
    for t in range(50, 70):
        same_bits(step(b, t), step(a, t))
    assert b.export_wire() == a.export_wire()
    assert b.export_wire()[20] == {"full": 0, "tail": 3, "linear": 1}.get(kind, 2)


def test_import_replaces_everything():
    a = LayerKvCache(2, 2, mode=KvMode.F32)
    a.wire_layer = 3
    a.o1_begin(4, 8, 2)
    fill(a, 4)
    a.linear_scratch = gen(1, 3)
    a.import_wire(bytes.fromhex(FULL))
    assert a.o1 is None and a.linear_scratch.size == 0
    a.sinks = gen(1, 4)
    a.import_wire(bytes.fromhex(FULL))
    assert a.sinks.size == 4 and a.wire_layer == 3
    fill(a, 1, alive=[1, 0])
    refused(KvStateError, a, lambda: fill(a, 1))
    c = ring()
    other = ring(n=2)
    other.import_wire(c.export_wire())
    refused(KvStateError, other, lambda: other.truncate_last(1))  # no undo history travels


# -- refusals -----------------------------------------------------------------------------------


def test_export_refusals():
    q8 = LayerKvCache(1, 4, mode=KvMode.Q8())
    refused(KvStateError, q8, q8.export_wire)
    o1 = LayerKvCache(1, 4, mode=KvMode.F32)
    o1.o1_begin(4, 8, 2)
    refused(KvStateError, o1, o1.export_wire)
    c = sample()
    c.linear_scratch = gen(1, 3)
    refused(KvStateError, c, c.export_wire)
    c = sample()
    c._stores.kcol_on[0] = 1
    refused(KvStateError, c, c.export_wire)
    c = sample()
    c.wire_kind = WireKind.BOUNDED
    refused(KvStateError, c, c.export_wire)
    c.wire_kind = WireKind.LINEAR
    refused(KvStateError, c, c.export_wire)
    r = ring()
    r.bounded.rollback(1)
    refused(KvStateError, r, r.export_wire)
    r.wire_kind = WireKind.FULL
    refused(KvStateError, r, r.export_wire)
    for bad, half in ((np.nan, False), (np.inf, False), (65520.0, True), (-1e6, True)):
        c = LayerKvCache(1, 2, mode=KvMode.F32)
        c.append(F([1, bad]), F([1, 1]))
        refused(KvStateError, c, lambda c=c, h=half: c.export_wire(h))
        c = LayerKvCache(1, 2, mode=KvMode.F32)
        c.append(F([1, 1]), F([bad, 1]))
        refused(KvStateError, c, lambda c=c, h=half: c.export_wire(h))
    c = sample()
    c.linear_state = F([np.inf])
    refused(KvStateError, c, c.export_wire)
    big = LayerKvCache(1, 2, mode=KvMode.F32)
    core = PhaseCore(1, 1, 1, [1, 1])
    core.step(big, F([0]), F([0]), F([1]))
    refused(KvStateError, big, big.export_wire)  # a position without a row: kind LINEAR is meant


def test_a_cut_off_header():
    c = sample()
    for n in range(32):
        data = bytes.fromhex("434d465302000000") + bytes(max(n - 8, 0))
        refused(KvWireError, c, lambda d=data[:n]: c.import_wire(d))
    assert "header" in refused(
        KvWireError, c, lambda: c.import_wire(bytes.fromhex("434d465302000000") + bytes(23))
    )


SOURCES = {"full": sample, "tail": tail, "bounded": ring, "linear": linear}


@pytest.mark.parametrize("f16", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_field_is_checked(kind, f16):
    good = SOURCES[kind]()
    raw = good.export_wire(f16)
    good.import_wire(raw)
    fields = {"version": 4, "identity": 8, "layer": 16, "kind": 20, "f16": 21, "reserved": 22,
              "reserved high": 23, "position": 24}  # fmt: skip
    at = {"full": 32, "tail": 40, "bounded": 32, "linear": 32}[kind]
    if kind in ("full", "tail"):
        names = ["body f16", "seq_len", "nkv", "hd", "n_lin", "n_imp"]
    else:
        names = {"bounded": ["nkv", "hd", "W", "len", "head"], "linear": ["nkv", "hd", "n"]}[kind]
    fields |= {name: at + 4 * i for i, name in enumerate(names)}
    if kind == "tail":
        fields["base"] = 32
    if kind in ("full", "tail"):
        fields["n_k"] = at + 24 + 4 * good.seq_len
    for name, offset in fields.items():
        if kind == "linear" and name in ("f16", "position"):
            continue  # a recurrent state is float32 whatever the flag, and any position may be
        for bit in range(8):
            data = bytearray(raw)
            data[offset] ^= 1 << bit
            refused(KvWireError, good, lambda d=data: good.import_wire(d))
    for data in (raw[:-1], raw + b"\0", raw[:-1] + b"", raw + raw, b"", raw[:33]):
        refused(KvWireError, good, lambda d=data: good.import_wire(d))
    for x in (None, 5, "text", [1, 2]):
        refused(KvWireError, good, lambda x=x: good.import_wire(x))


def test_values_must_be_finite():
    for kind, source in SOURCES.items():
        c = source()
        for f16 in (False, True):
            if kind == "linear" and f16:
                continue
            raw = bytearray(c.export_wire(f16))
            raw[-2 if f16 else -4 :] = struct.pack("<e" if f16 else "<f", np.nan)
            if kind == "full":  # the last head is empty; spoil the importance instead
                raw = bytearray(c.export_wire(f16))
                raw[56:60] = struct.pack("<f", np.inf)
            refused(KvWireError, c, lambda d=raw, c=c: c.import_wire(d))


def test_wrong_layers():
    full, bounded, lin = sample().export_wire(), ring().export_wire(), linear().export_wire()
    for make in (sample, ring, linear):
        c = make()
        for raw in (full, bounded, lin):
            if raw != c.export_wire():
                refused(KvWireError, c, lambda c=c, r=raw: c.import_wire(r))
    r = ring()
    r.wire_kind = WireKind.FULL
    plain = LayerKvCache(2, 4, mode=KvMode.F32)
    fill(plain, 2)
    refused(KvWireError, r, lambda: r.import_wire(plain.export_wire()))
    bare = LayerKvCache(2, 4, mode=KvMode.F32)
    bare.wire_kind = WireKind.BOUNDED
    refused(KvWireError, bare, lambda: bare.import_wire(bounded))


def test_legacy_bodies():
    body = bytes.fromhex(FULL)[32:]
    c = sample()
    c.import_wire(body)
    assert c.export_wire().hex() == FULL
    c.set_linear_wire_allowed(False)
    refused(KvWireError, c, lambda: c.import_wire(body))
    c.import_wire(bytes.fromhex(FULL))  # a versioned record says who wrote it
    r = LayerKvCache(2, 2, mode=KvMode.F32)
    r.install_bounded(4)
    refused(KvWireError, r, lambda: r.import_wire(body))
    half = LayerKvCache(2, 2, mode=KvMode.F32)
    half.import_wire(bytes.fromhex(HALF)[32:])
    assert half.seq_len == 2
    state = sample()
    state.linear_state = gen(1, 5)
    d = LayerKvCache(2, 2, mode=KvMode.F32)
    d.import_wire(state.export_wire()[32:])
    same_bits(d.linear_state, gen(1, 5))


def test_expected_state_length():
    raw = linear().export_wire()
    d = linear()
    d.clear()
    d.expected_state_len = 5
    refused(KvWireError, d, lambda: d.import_wire(raw))
    c = sample()
    c.linear_state = gen(1, 4)
    raw = c.export_wire()
    d = sample()
    d.expected_state_len = 3
    refused(KvWireError, d, lambda: d.import_wire(raw))


# -- fuzz ---------------------------------------------------------------------------------------

SEEN = {"all": 0, "record": 0, "accepted": 0}


@st.composite
def mutated(draw):
    """A valid export with a few changes: bytes, cuts, growth, words made huge."""
    kind = draw(st.sampled_from(sorted(SOURCES)))
    f16 = draw(st.booleans())
    raw = bytearray(SOURCES[kind]().export_wire(f16))
    if kind in ("full", "tail") and draw(st.booleans()) and draw(st.booleans()):
        raw = raw[32 if kind == "full" else 40 :]
    for _ in range(draw(st.integers(0, 4))):
        how = draw(st.sampled_from(["flip", "word", "cut", "grow", "copy"]))
        # changes mostly behind the header, or nothing would reach the record
        low = 32 if len(raw) > 40 and draw(st.integers(0, 4)) else 0
        at = draw(st.integers(low, max(len(raw) - 1, low)))
        if how == "flip" and at < len(raw):
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "word":
            at -= at % 4
            raw[at : at + 4] = struct.pack(
                "<I", draw(st.sampled_from([0, 1, 2, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 1 << 24]))
            )
        elif how == "cut":
            raw = raw[:at]
        elif how == "grow":
            raw += draw(st.binary(max_size=40))
        elif how == "copy":
            raw[at:at] = raw[at : at + 8]
    return kind, bytes(raw)


@settings(max_examples=int(5000 * SCALE), deadline=2000)
@given(mutated())
def _fuzz(case):
    kind, raw = case
    c = SOURCES[kind]()
    before = state_of(c)
    SEEN["all"] += 1
    if raw[:4] != wire.MAGIC or (len(raw) > 32 and raw[:32] == c.export_wire(bool(raw[21]))[:32]):
        SEEN["record"] += 1
    try:
        c.import_wire(raw)
    except KvWireError as error:
        assert len(str(error)) < 300
        assert state_of(c) == before
    else:
        SEEN["accepted"] += 1
        again = c.export_wire()
        d = empty_like(c)
        d.expected_state_len = None
        d.import_wire(again)
        assert d.export_wire() == again


def test_fuzz():
    """Nothing but KvWireError, nothing changed on refusal, and what is accepted can be sent on."""
    SEEN.update(dict.fromkeys(SEEN, 0))
    _fuzz()
    print(SEEN)
    assert SEEN["record"] >= 0.2 * SEEN["all"], SEEN
    assert SEEN["accepted"] >= 10, SEEN


@settings(max_examples=int(300 * SCALE), deadline=2000)
@given(st.binary(max_size=300))
def test_any_bytes(raw):
    for make in (sample, ring, linear):
        c = make()
        before = state_of(c)
        for data in (raw, c.export_wire()[:32] + raw):
            try:
                c.import_wire(data)
            except KvWireError:
                assert state_of(c) == before


def test_sizes_are_believed_only_as_far_as_there_are_bytes():
    """A record that claims gigabytes is refused before anything is allocated."""
    import tracemalloc

    head = pack_header(0, 3, WireKind.FULL, False, 2**31)
    body = struct.pack("<6I", 0, 2**31, 2, 2, 2**32 - 1, 2**31)
    c = sample()
    tracemalloc.start()
    refused(KvWireError, c, lambda: c.import_wire(head + body))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_refusals_say_what_to_do():
    c = LayerKvCache(1, 32, mode=KvMode.Q8())
    with pytest.raises(KvStateError, match=r"made with mode=KvMode\.F32"):
        c.export_wire()
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    c.append(gen(1, 4), gen(2, 4))
    data = bytearray(c.export_wire())
    data[0] ^= 4
    with pytest.raises(KvWireError, match=r"do not begin with b'CMFS'"):
        c.import_wire(data)
    with pytest.raises(KvStateError, match=r"export_wire\(\)"):
        pickle.dumps(c)


def test_a_misspelt_field_is_refused():
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    with pytest.raises(KvStateError, match=r"wire_idenity.*did you mean wire_identity"):
        c.wire_idenity = 5
    assert not hasattr(c, "wire_idenity") and c.wire_identity == 0
    c.wire_identity, c.allow_ragged = 5, True
    assert c.wire_identity == 5 and c.allow_ragged
