"""Storage formats of cache rows: byte tables, sizes, and NumPy encoders and decoders.

A row holds one token's K (or V): ``n_kv_heads * head_dim`` elements, head major. Every format
cuts it into **blocks of 32 consecutive elements**, packed without padding; element ``e`` lies in
block ``e // 32`` at lane ``e % 32``. All multi-byte fields are little endian.

======  =====  ====  ==============================================================
format  bytes  bits  layout of one block (offset: content)
======  =====  ====  ==============================================================
F32     128    32    0: ``f32 x[32]``
F16     64     16    0: ``f16 x[32]``
BF16    64     16    0: ``bf16 x[32]``, the upper half of an f32
Q8_0    34     8.5   0: ``f16 d``; 2: ``int8 qs[32]``; value ``d * q``
Q5_1    24     6     0: ``f16 d``; 2: ``f16 m``; 4: ``u32 qh``, bit j = bit 4 of element j;
                     8: ``u8 qs[16]``, low nibble of byte i = element i, high nibble =
                     element i + 16; value ``d * q + m``
Q4_0    18     4.5   0: ``f16 d``; 2: ``u8 qs[16]``, nibbles as in Q5_1; value ``d * (q - 8)``
E4M3    32     8     0: ``u8 x[32]``: sign, 4 exponent bits (bias 7), 3 mantissa bits; no
                     infinity, NaN is 0x7F; no scale
======  =====  ====  ==============================================================

Rounding is that of ggml's reference quantisers, byte for byte. All arithmetic is float32, each
product and sum rounded by itself. ``d`` is the unrounded float32 scale, its float16 is stored,
``id = 1 / d`` or 0 where ``d`` is 0 or ``1 / d`` is not finite.

* Q8_0: ``d = max|x| / 127``; ``q = round(x * id)``, halves away from zero.
* Q5_1: ``m = min x`` (of equal ones the first), ``d = (max x - m) / 31``;
  ``q = trunc((x - m) * id + 0.5)``, at most 31.
* Q4_0: ``a`` = the signed element of largest magnitude (of equal ones the first),
  ``d = a / -8``; ``q = trunc(x * id + 8.5)``, at most 15.
* F16, BF16: to nearest, ties to even; overflow is infinity. E4M3: the same, saturating at ±448.

A block of Q8_0, Q5_1 or Q4_0 that contains a non-finite element, or whose float32 scale is not
finite, is *poison*: its float16 fields are NaN (0x7E00) and its codes 0, so it reads back as NaN
in every element, and its neighbours are untouched. In the other formats each element stands for
itself: NaN stays NaN, infinity stays infinity (in E4M3 it saturates).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError

__all__ = [
    "BF16",
    "BLOCK",
    "E4M3",
    "F16",
    "F32",
    "FORMATS",
    "Q4_0",
    "Q5_1",
    "Q8_0",
    "Format",
    "block_bytes",
    "by_name",
    "decode",
    "encode",
    "row_bytes",
]

BLOCK = 32
"""Elements of a block, in every format."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_NAN_F16 = np.uint16(0x7E00)


@dataclass(frozen=True, repr=False)
class Format:
    """One storage format. The instances of this module are the only ones.

    Attributes
    ----------
    name : str
        Lower-case name, as in options and messages: ``"q8_0"``.
    constant : str
        Name of the constant in the kernel sources: ``"Q8_0"``.
    block_bytes : int
        Bytes of 32 elements.
    scaled : bool
        Whether a block has a scale, so that one bad element spoils all 32.
    """

    name: str
    constant: str
    block_bytes: int
    scaled: bool
    _encode: Callable[[Floats], Bytes] = field(compare=False)
    _decode: Callable[[Bytes], Floats] = field(compare=False)

    def __repr__(self) -> str:
        return self.constant

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> float:
        """Bits per element."""
        return self.block_bytes * 8 / BLOCK

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of a row of ``n_elements``.

        Raises
        ------
        ArgumentError
            If ``n_elements`` is not a positive multiple of 32.
        """
        if n_elements <= 0 or n_elements % BLOCK:
            raise ArgumentError(
                f"a {self.name} row needs a positive multiple of {BLOCK} elements, got "
                f"{n_elements}; pad the head dimension to the next multiple of {BLOCK}",
                kernel="row_bytes",
                index=0,
                name="n_elements",
                expected=f"multiple of {BLOCK}",
                got=str(n_elements),
            )
        return n_elements // BLOCK * self.block_bytes

    def encode(self, x: Any, *, check: bool = True) -> Bytes:
        """Encode float32 rows.

        Parameters
        ----------
        x : array of shape (..., n)
            Converted to float32; ``n`` a positive multiple of 32.
        check : bool
            Refuse non-finite elements. Without it they are encoded as the module says.

        Returns
        -------
        uint8 array of shape (..., n // 32 * block_bytes)

        Raises
        ------
        ArgumentError
            For a wrong ``n``, or with ``check`` for a non-finite element; it names the first one.
        """
        values = np.ascontiguousarray(x, dtype=np.float32)
        n = values.shape[-1] if values.ndim else 0
        n_bytes = self.row_bytes(n)
        if check and not np.isfinite(values).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
            raise ArgumentError(
                f"cannot encode {values[where]} at index {where} as {self.name}; find what made "
                "it, or pass check=False to poison only its block",
                kernel="encode",
                index=0,
                name="x",
                expected="finite values",
                got=f"{values[where]} at {where}",
            )
        blocks = self._encode(values.reshape(-1, BLOCK))
        return blocks.reshape(*values.shape[:-1], n_bytes)

    def decode(self, data: Any) -> Floats:
        """Decode rows back to float32.

        Parameters
        ----------
        data : uint8 array of shape (..., n_blocks * block_bytes)

        Returns
        -------
        float32 array of shape (..., n_blocks * 32)

        Raises
        ------
        ArgumentError
            If the last axis is not a positive multiple of ``block_bytes``.
        """
        raw = np.ascontiguousarray(data, dtype=np.uint8)
        n = raw.shape[-1] if raw.ndim else 0
        if n == 0 or n % self.block_bytes:
            raise ArgumentError(
                f"{n} bytes are no whole number of {self.name} blocks of {self.block_bytes}",
                kernel="decode",
                index=0,
                name="data",
                expected=f"multiple of {self.block_bytes} bytes",
                got=str(n),
            )
        values = self._decode(raw.reshape(-1, self.block_bytes))
        return values.reshape(*raw.shape[:-1], n // self.block_bytes * BLOCK)


def encode(format: Format, x: Any, *, check: bool = True) -> Bytes:
    """Encode float32 rows; see :meth:`Format.encode`."""
    return format.encode(x, check=check)


def decode(format: Format, data: Any) -> Floats:
    """Decode rows to float32; see :meth:`Format.decode`."""
    return format.decode(data)


def block_bytes(format: Format) -> int:
    """Bytes of 32 elements."""
    return format.block_bytes


def row_bytes(format: Format, n_elements: int) -> int:
    """Bytes of a row; see :meth:`Format.row_bytes`."""
    return format.row_bytes(n_elements)


def by_name(name: str) -> Format:
    """Return the format of a name, as in ``"q8_0"``, ``"Q8_0"`` or ``"fp8"``.

    Raises
    ------
    ArgumentError
        If there is no such format; the message lists the names.
    """
    key = name.strip().lower()
    found = FORMATS.get("e4m3" if key in ("fp8", "fp8_e4m3", "e4m3fn") else key)
    if found is None:
        raise ArgumentError(
            f"there is no format named {name!r}; known are {', '.join(FORMATS)}",
            kernel="by_name",
            index=0,
            name="name",
            expected=" | ".join(FORMATS),
            got=name,
        )
    return found


# -- encoders and decoders over blocks: float32 (n, 32) <-> uint8 (n, block_bytes) ---------------


def _bytes_of(a: NDArray[Any]) -> Bytes:
    raw: Bytes = np.ascontiguousarray(a).view(np.uint8)
    return raw.reshape(a.shape[0], -1)


def _half(x: Floats) -> NDArray[np.uint16]:
    with np.errstate(over="ignore"):
        bits = x.astype(np.float16).view(np.uint16)
    return np.asarray(np.where(np.isnan(x), _NAN_F16, bits), dtype=np.uint16)


def _float(bits: NDArray[np.uint16]) -> Floats:
    return np.asarray(bits.view(np.float16), dtype=np.float32)


def _reciprocal(d: Floats) -> Floats:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = (np.float32(1) / d).astype(np.float32)
    usable = (d != 0) & np.isfinite(inverse)
    return np.asarray(np.where(usable, inverse, 0), dtype=np.float32)


def _finite_blocks(x: Floats, d: Floats) -> NDArray[np.bool_]:
    return np.isfinite(x).all(axis=1, keepdims=True) & np.isfinite(d)


def _codes(v: Floats, top: int) -> NDArray[np.uint8]:
    with np.errstate(invalid="ignore"):
        clipped = np.clip(np.trunc(v), 0, top)
    return np.asarray(np.nan_to_num(clipped, nan=0.0), dtype=np.uint8)


def _pack_nibbles(q: NDArray[np.uint8]) -> Bytes:
    return np.asarray((q[:, :16] & 15) | ((q[:, 16:] & 15) << 4), dtype=np.uint8)


def _unpack_nibbles(qs: Bytes) -> NDArray[np.uint8]:
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _encode_f32(x: Floats) -> Bytes:
    return np.array(_bytes_of(x))


def _decode_f32(b: Bytes) -> Floats:
    return np.array(np.ascontiguousarray(b).view(np.float32))


def _encode_f16(x: Floats) -> Bytes:
    return _bytes_of(_half(x))


def _decode_f16(b: Bytes) -> Floats:
    return _float(np.ascontiguousarray(b).view(np.uint16))


def _encode_bf16(x: Floats) -> Bytes:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return _bytes_of(np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16))


def _decode_bf16(b: Bytes) -> Floats:
    return (np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _encode_e4m3(x: Floats) -> Bytes:
    sign = np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    magnitude = np.abs(np.where(np.isnan(x), np.float32(0), x)).astype(np.float64)
    # Steps of 2^-9 below 2^-6, of an eighth of the power of two above it; rint is half to even.
    exponent = np.clip(np.frexp(magnitude)[1] - 1, -6, 9)
    exponent = np.where(magnitude == 0, -6, np.where(np.isinf(magnitude), 9, exponent))
    steps = np.rint(np.ldexp(np.minimum(magnitude, 1024.0), 3 - exponent)).astype(np.int64)
    # A mantissa that rounds up to 16 carries into the exponent field by itself.
    code = np.where(exponent == -6, steps, ((exponent + 7) << 3) + (steps - 8))
    code = np.minimum(code, 0x7E).astype(np.uint8) | sign
    return np.asarray(np.where(np.isnan(x), 0x7F, code), dtype=np.uint8)


def _e4m3_values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0)
    )
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3_VALUES = _e4m3_values()


def _decode_e4m3(b: Bytes) -> Floats:
    return np.asarray(_E4M3_VALUES[b])


def _encode_q8_0(x: Floats) -> Bytes:
    with np.errstate(invalid="ignore", over="ignore"):
        d = (np.abs(x).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
        scaled = np.abs(x * _reciprocal(d))
        whole = np.trunc(scaled)
        q = np.minimum(whole + (scaled - whole >= np.float32(0.5)), np.float32(127))
    ok = _finite_blocks(x, d)
    codes = np.where(ok, np.copysign(np.where(ok, q, 0), x), 0).astype(np.int8)
    return np.concatenate([_bytes_of(np.where(ok, _half(d), _NAN_F16)), _bytes_of(codes)], axis=1)


def _decode_q8_0(b: Bytes) -> Floats:
    d = _float(_u16(b, 0))
    with np.errstate(invalid="ignore"):
        return d * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _encode_q5_1(x: Floats) -> Bytes:
    with np.errstate(invalid="ignore", over="ignore"):
        # The first of equal extremes decides the sign of a zero; min and max take any.
        m = np.take_along_axis(x, x.argmin(axis=1)[:, None], axis=1)
        top = np.take_along_axis(x, x.argmax(axis=1)[:, None], axis=1)
        d = ((top - m) / np.float32(31)).astype(np.float32)
        q = _codes((x - m) * _reciprocal(d) + np.float32(0.5), 31)
    ok = _finite_blocks(x, d)
    q = np.where(ok, q, np.uint8(0))
    return np.concatenate(
        [
            _bytes_of(np.where(ok, _half(d), _NAN_F16)),
            _bytes_of(np.where(ok, _half(m), _NAN_F16)),
            np.packbits(q >> 4, axis=1, bitorder="little"),
            _pack_nibbles(q),
        ],
        axis=1,
    )


def _decode_q5_1(b: Bytes) -> Floats:
    high = np.unpackbits(np.ascontiguousarray(b[:, 4:8]), axis=1, bitorder="little")
    q = (_unpack_nibbles(b[:, 8:]) | (high << 4)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return _float(_u16(b, 0)) * q + _float(_u16(b, 2))


def _encode_q4_0(x: Floats) -> Bytes:
    with np.errstate(invalid="ignore", over="ignore"):
        a = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
        d = (a / np.float32(-8)).astype(np.float32)
        q = _codes(x * _reciprocal(d) + np.float32(8.5), 15)
    ok = _finite_blocks(x, d)
    q = np.where(ok, q, np.uint8(0))
    return np.concatenate([_bytes_of(np.where(ok, _half(d), _NAN_F16)), _pack_nibbles(q)], axis=1)


def _decode_q4_0(b: Bytes) -> Floats:
    q = _unpack_nibbles(b[:, 2:]).astype(np.float32) - np.float32(8)
    with np.errstate(invalid="ignore"):
        return np.asarray(_float(_u16(b, 0)) * q)


def _u16(b: Bytes, offset: int) -> NDArray[np.uint16]:
    return np.ascontiguousarray(b[:, offset : offset + 2]).view(np.uint16)


F32 = Format("f32", "F32", 128, False, _encode_f32, _decode_f32)
F16 = Format("f16", "F16", 64, False, _encode_f16, _decode_f16)
BF16 = Format("bf16", "BF16", 64, False, _encode_bf16, _decode_bf16)
Q8_0 = Format("q8_0", "Q8_0", 34, True, _encode_q8_0, _decode_q8_0)
Q5_1 = Format("q5_1", "Q5_1", 24, True, _encode_q5_1, _decode_q5_1)
Q4_0 = Format("q4_0", "Q4_0", 18, True, _encode_q4_0, _decode_q4_0)
E4M3 = Format("e4m3", "E4M3", 32, False, _encode_e4m3, _decode_e4m3)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {f.name: f for f in (F32, F16, BF16, Q8_0, Q5_1, Q4_0, E4M3)}
)
"""All formats by name."""
