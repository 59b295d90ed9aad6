"""The state wire: version 2 records, the unversioned body, the f16 rule and the hash.

All integers little-endian. Header, 32 bytes::

    0  4s  "CMFS"            16 u32 layer            22 u16 0
    4  u32 2                 20 u8  kind (WireKind)  24 u64 position
    8  u64 identity          21 u8  f16 (0 or 1)

Records::

    FULL       u32 f16, seq_len, nkv, hd, n_lin, n_imp; f32 linear[n_lin], imp[n_imp];
               per head: u32 n_k, payload K, u32 n_v, payload V         (payload f32 or f16)
    LINEAR     u32 nkv, hd, n; f32 state[n]
    BOUNDED    u32 nkv, hd, W, len, head; payload ring_k, ring_v
    FULL_TAIL  u64 base, then the body of FULL

The unversioned form is the body of FULL alone. Parsing touches no layer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import KvWireError

from .arith import F32
from .modes import WireKind

__all__ = [
    "MAGIC",
    "Record",
    "from_f16",
    "hash64",
    "identity_of",
    "pack_bounded",
    "pack_full",
    "pack_header",
    "pack_linear",
    "parse",
    "to_f16",
]

MAGIC = b"CMFS"
HEADER = struct.Struct("<4sIQIBBHQ")
VERSION = 2


@dataclass
class Record:
    """A state read from the wire; `legacy` where it had no header."""

    kind: WireKind
    position: int
    base: int = 0
    legacy: bool = False
    linear: F32 = field(default_factory=lambda: np.zeros(0, np.float32))
    imp: F32 = field(default_factory=lambda: np.zeros(0, np.float32))
    heads: list[tuple[F32, F32]] = field(default_factory=list)
    ring_k: F32 | None = None
    ring_v: F32 | None = None


def to_f16(x: F32) -> npt.NDArray[np.uint16]:
    """Return the f16 codes of a float32 array.

    Normals round to nearest even; below 2**-14 half rounds up in magnitude, where IEEE would round
    to even; from 65520 on infinity; NaN is 0x7e00 with the sign.
    """
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    sign = ((bits >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)
    magnitude = np.abs(x)
    with np.errstate(over="ignore", invalid="ignore"):
        code = magnitude.astype(np.float16).view(np.uint16)
        small = magnitude < np.float32(2.0**-14)
        steps = np.floor(np.where(small, magnitude, 0).astype(np.float64) * 2.0**24 + 0.5)
    code = np.where(small, steps.astype(np.uint16), code)
    code = np.where(np.isnan(x), np.uint16(0x7E00), code)
    out: npt.NDArray[np.uint16] = (code | sign).astype(np.uint16)
    return out


def from_f16(codes: npt.NDArray[np.uint16]) -> F32:
    """Return the float32 values of f16 codes; exact, subnormals included."""
    return np.asarray(codes, np.uint16).view(np.float16).astype(np.float32)


def hash64(data: Any) -> int:
    """Return the 64-bit hash of bytes: an exclusive or of mixed words, mixed once more.

    Word i (8 bytes, the last one zero-padded) contributes ``fmix(w) ^ (i * 0x9E3779B97F4A7C15)``;
    the byte length enters before the last mix.

    Raises
    ------
    KvWireError
        For an object that holds no contiguous bytes.
    """
    raw = _bytes_of("hash64", data)
    n = raw.nbytes
    words = np.zeros(-(-n // 8), "<u8")
    words.view(np.uint8)[:n] = np.frombuffer(raw, np.uint8)
    index = np.arange(words.size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _fmix(words.astype(np.uint64)) ^ (index * np.uint64(0x9E3779B97F4A7C15))
        acc = np.bitwise_xor.reduce(mixed) if mixed.size else np.uint64(0)
        return int(_fmix(np.asarray([acc ^ np.uint64(n)], np.uint64))[0])


def identity_of(description: Mapping[str, Any] | None) -> int:
    """Return the wire identity of an operator's description; 0 for None.

    The description is hashed as compact JSON with sorted keys.

    Raises
    ------
    KvWireError
        If it is nothing that JSON can hold.
    """
    if description is None:
        return 0
    try:
        text = json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise KvWireError(f"identity_of: the description is no JSON: {error}") from None
    return hash64(text.encode())


def pack_header(identity: int, layer: int, kind: WireKind, f16: bool, position: int) -> bytes:
    """Return the 32 bytes of a header."""
    return HEADER.pack(MAGIC, VERSION, identity, layer, kind, f16, 0, position)


def pack_full(
    heads: list[tuple[F32, F32]], seq_len: int, hd: int, linear: F32, imp: F32, f16: bool
) -> bytes:
    """Return the body of FULL for per-head rows ``(K [rows, hd], V [rows, hd])``."""
    parts = [
        struct.pack("<6I", f16, seq_len, len(heads), hd, linear.size, imp.size),
        linear.astype("<f4").tobytes(),
        imp.astype("<f4").tobytes(),
    ]
    for pair in heads:
        for rows in pair:
            parts += [struct.pack("<I", rows.size), _payload(rows, f16)]
    return b"".join(parts)


def pack_linear(nkv: int, hd: int, state: F32) -> bytes:
    """Return the body of LINEAR; always float32."""
    return struct.pack("<3I", nkv, hd, state.size) + state.astype("<f4").tobytes()


def pack_bounded(ring_k: F32, ring_v: F32, length: int, head: int, f16: bool) -> bytes:
    """Return the body of BOUNDED for rings ``[nkv, W, hd]``."""
    nkv, window, hd = ring_k.shape
    fixed = struct.pack("<5I", nkv, hd, window, length, head)
    return fixed + _payload(ring_k, f16) + _payload(ring_v, f16)


def parse(
    data: Any,
    *,
    nkv: int,
    hd: int,
    kind: WireKind,
    layer: int,
    identity: int,
    window: int | None,
    state_len: int | None,
) -> Record:
    """Read a whole export, checking everything against the layer it is for.

    Parameters
    ----------
    data : bytes-like
    nkv, hd, kind, layer, identity
        Of the layer.
    window : int or None
        Of its ring.
    state_len : int or None
        Floats its recurrent state must have, where known.

    Raises
    ------
    KvWireError
        For anything that is not exactly such an export.
    """
    raw = _bytes_of("import_wire", data)
    reader = _Reader(raw)
    if bytes(raw[:4]) != MAGIC:
        try:
            record = _parse_full(reader, nkv, hd, None, None, state_len)
        except KvWireError as error:
            raise KvWireError(
                f"{error}. The bytes do not begin with {MAGIC!r}, so they were read as an "
                "unversioned state; are they an export, and whole?"
            ) from None
        record.legacy = True
        reader.done()
        return record
    if raw.nbytes < HEADER.size:
        raise KvWireError(f"import_wire: header cut off after {raw.nbytes} of {HEADER.size} bytes")
    _, version, ident, index, code, f16, reserved, position = HEADER.unpack(
        reader.take(HEADER.size, "header")
    )
    _equal("version", version, VERSION)
    if code not in list(WireKind):
        raise KvWireError(f"import_wire: record kind {code} is unknown")
    _equal("identity", ident, identity)
    _equal("layer", index, layer)
    found = WireKind(code)
    if found is not kind and not (found is WireKind.FULL_TAIL and kind is WireKind.FULL):
        raise KvWireError(f"import_wire: record kind {found.name}, but the layer is {kind.name}")
    if f16 not in (0, 1):
        raise KvWireError(f"import_wire: f16 flag {f16} is neither 0 nor 1")
    _equal("reserved field", reserved, 0)
    if found is WireKind.LINEAR:
        record = _parse_linear(reader, nkv, hd, position, state_len)
    elif found is WireKind.BOUNDED:
        record = _parse_bounded(reader, nkv, hd, position, bool(f16), window)
    else:
        base = reader.number("<Q", "base") if found is WireKind.FULL_TAIL else 0
        if base > position:
            raise KvWireError(f"import_wire: base {base} lies behind position {position}")
        record = _parse_full(reader, nkv, hd, bool(f16), position - base, state_len)
        record.kind, record.base, record.position = found, base, position
    reader.done()
    return record


class _Reader:
    """Bytes consumed in order; never hands out more than there is."""

    def __init__(self, raw: memoryview):
        self.raw, self.at = raw, 0

    def take(self, n: int, what: str) -> memoryview:
        left = self.raw.nbytes - self.at
        if n > left:
            raise KvWireError(f"import_wire: {what} needs {n} bytes, {left} are left")
        self.at += n
        return self.raw[self.at - n : self.at]

    def number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def floats(self, n: int, what: str, f16: bool = False) -> F32:
        data = self.take(n * (2 if f16 else 4), what)
        if f16:
            values = from_f16(np.frombuffer(data, "<u2").astype(np.uint16))
        else:
            values = np.frombuffer(data, "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise KvWireError(f"import_wire: {what} holds a NaN or an infinity")
        return values

    def done(self) -> None:
        if self.at != self.raw.nbytes:
            raise KvWireError(f"import_wire: {self.raw.nbytes - self.at} bytes after the record")


def _parse_full(
    reader: _Reader, nkv: int, hd: int, f16: bool | None, rows: int | None, state_len: int | None
) -> Record:
    flag, seq_len, got_nkv, got_hd, n_lin, n_imp = struct.unpack(
        "<6I", reader.take(24, "record head")
    )
    if flag not in (0, 1) or (f16 is not None and bool(flag) != f16):
        raise KvWireError(f"import_wire: the record's f16 flag {flag} does not fit")
    _equal("KV heads", got_nkv, nkv)
    _equal("head_dim", got_hd, hd)
    if rows is not None:
        _equal("rows", seq_len, rows)
    _equal("importance length", n_imp, seq_len)
    if state_len is not None and n_lin not in (0, state_len):
        raise KvWireError(f"import_wire: recurrent state of {n_lin} floats, not {state_len}")
    linear = reader.floats(n_lin, "recurrent state")
    imp = reader.floats(n_imp, "importance")
    heads = []
    for h in range(nkv):
        n_k = reader.number("<I", f"key count of head {h}")
        if n_k % hd or n_k // hd > seq_len:
            raise KvWireError(f"import_wire: head {h} has {n_k} key elements for {seq_len} rows")
        k = reader.floats(n_k, f"keys of head {h}", bool(flag))
        _equal(f"value count of head {h}", reader.number("<I", f"value count of head {h}"), n_k)
        v = reader.floats(n_k, f"values of head {h}", bool(flag))
        heads.append((k.reshape(-1, hd), v.reshape(-1, hd)))
    return Record(WireKind.FULL, seq_len, linear=linear, imp=imp, heads=heads)


def _parse_linear(
    reader: _Reader, nkv: int, hd: int, position: int, state_len: int | None
) -> Record:
    _equal("KV heads", reader.number("<I", "KV heads"), nkv)
    _equal("head_dim", reader.number("<I", "head_dim"), hd)
    n = reader.number("<I", "state length")
    if state_len is not None and n not in (0, state_len):
        raise KvWireError(f"import_wire: recurrent state of {n} floats, not {state_len}")
    return Record(WireKind.LINEAR, position, linear=reader.floats(n, "recurrent state"))


def _parse_bounded(
    reader: _Reader, nkv: int, hd: int, position: int, f16: bool, window: int | None
) -> Record:
    if window is None:
        raise KvWireError("import_wire: a ring's record, but no ring is installed")
    wanted = (
        ("KV heads", nkv),
        ("head_dim", hd),
        ("window", window),
        ("ring length", min(position, window)),
        ("ring head", position % window),
    )
    for what, want in wanted:
        _equal(what, reader.number("<I", what), want)
    shape = (nkv, window, hd)
    ring_k = reader.floats(nkv * window * hd, "ring keys", f16).reshape(shape)
    ring_v = reader.floats(nkv * window * hd, "ring values", f16).reshape(shape)
    return Record(WireKind.BOUNDED, position, ring_k=ring_k, ring_v=ring_v)


def _bytes_of(call: str, data: Any) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise KvWireError(f"{call}: {type(data).__name__} holds no bytes: {error}") from None


def _equal(what: str, got: int, want: int) -> None:
    if got != want:
        raise KvWireError(f"import_wire: {what} is {got}, but the layer has {want}")


def _payload(x: F32, f16: bool) -> bytes:
    return to_f16(x).astype("<u2").tobytes() if f16 else x.astype("<f4").tobytes()


def _fmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    shift = np.uint64(33)
    x = x ^ (x >> shift)
    x = x * np.uint64(0xFF51AFD7ED558CCD)
    x = x ^ (x >> shift)
    x = x * np.uint64(0xC4CEB9FE1A85EC53)
    out: npt.NDArray[np.uint64] = x ^ (x >> shift)
    return out
