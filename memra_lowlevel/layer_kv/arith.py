"""The float32 arithmetic of LayerKvCache in NumPy, operation for operation that of the C loops.

Every function gives the bits of its twin in ``cuda_src/common/elementary.cuh`` and
``native/layer_kv_loops.h``. NumPy has no fused multiply-add, so :func:`fma` makes one from float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["dot32", "exp", "fma", "pad_query", "quantise", "round_away", "tanh", "total"]

F32 = npt.NDArray[np.float32]

_EXP = tuple(
    np.float32(float.fromhex(text))
    for text in (
        "0x1.9f0816p-13",
        "0x1.6d8db2p-10",
        "0x1.111272p-7",
        "0x1.55548ep-5",
        "0x1.555554p-3",
        "0x1p-1",
    )
)
_TANH = tuple(
    np.float32(float.fromhex(text))
    for text in (
        "-0x1.7432e8p-8",
        "0x1.51ceacp-6",
        "-0x1.b8305ep-5",
        "0x1.1106d8p-3",
        "-0x1.555532p-2",
    )
)
_LOG2E = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HIGH = np.float32(float.fromhex("-0x1.62e43p-1"))
_LN2_LOW = np.float32(float.fromhex("0x1.05c61p-29"))
_MAGIC = np.float32(12582912.0)


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """Return ``a * b + c`` rounded once, for float32 arrays that broadcast together.

    The product of two float32 is exact in float64. The sum is rounded to odd there, so that the
    step to float32 is the only rounding that shows.
    """
    with np.errstate(all="ignore"):
        p = np.multiply(a, b, dtype=np.float64)
        c64 = np.asarray(c, np.float64)
        s = np.atleast_1d(np.asarray(p + c64))
        t = s - p
        err = (p - (s - t)) + (c64 - t)
        up, down = err > 0.0, err < 0.0
        bits = s.view(np.int64)
        move = (up | down) & ((bits & 1) == 0)
        if move.any():
            away = up == (s > 0.0)
            s = np.where(move, bits + np.where(away, 1, -1), bits).view(np.float64)
        out: F32 = s.astype(np.float32)
    return out.reshape(np.broadcast_shapes(np.shape(p), np.shape(c)))


def total(x: F32, start: F32 | None = None) -> F32:
    """Return the sums over the last axis, terms added one by one in ascending order."""
    first = np.zeros(x.shape[:-1], np.float32) if start is None else start
    with np.errstate(all="ignore"):
        out: F32 = np.add.accumulate(
            np.concatenate([first[..., None], x], axis=-1), axis=-1, dtype=np.float32
        )[..., -1]
    return out


def dot32(q: F32, rows: F32) -> F32:
    """Return the canonical dot products of `q` with each row.

    Lane ``l`` of 32 runs ``acc = fma(q[d], row[d], acc)`` over ``d = l, l + 32, ...``; then the
    lanes are added pairwise with strides 16, 8, 4, 2, 1.

    Parameters
    ----------
    q : float32 [..., hd]
    rows : float32 [..., hd]
        Broadcast together.
    """
    shape = np.broadcast_shapes(q.shape, rows.shape)
    hd = shape[-1]
    acc = np.zeros((*shape[:-1], 32), np.float32)
    for d in range(0, hd, 32):
        lanes = min(32, hd - d)
        acc[..., :lanes] = fma(q[..., d : d + lanes], rows[..., d : d + lanes], acc[..., :lanes])
    with np.errstate(all="ignore"):
        for stride in (16, 8, 4, 2, 1):
            acc = acc[..., :stride] + acc[..., stride : 2 * stride]
    out: F32 = acc[..., 0]
    return out


def exp(x: npt.ArrayLike) -> F32:
    """Return ``exp(x)`` in float32, within 1 ulp; 0 below -104, infinity above 89."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        t = fma(x, _LOG2E, _MAGIC)
        k = np.asarray(t).view(np.int32) - np.int32(0x4B400000)
        n = t - _MAGIC
        r = fma(n, _LN2_LOW, fma(n, _LN2_HIGH, x))
        p: Any = _EXP[0]
        for c in _EXP[1:]:
            p = fma(p, r, c)
        p = fma(p, r * r, r) + np.float32(1.0)
        a = k >> np.int32(1)
        low = ((a + np.int32(127)).astype(np.uint32) << np.uint32(23)).view(np.float32)
        high = ((k - a + np.int32(127)).astype(np.uint32) << np.uint32(23)).view(np.float32)
        y = p * low * high
        y = np.where(x < np.float32(-104.0), np.float32(0.0), y)
        y = np.where(x > np.float32(89.0), np.float32(np.inf), y)
        out: F32 = np.where(np.isnan(x), x, y).astype(np.float32)
    return out


def tanh(x: npt.ArrayLike) -> F32:
    """Return ``tanh(x)`` in float32, within 2 ulp; exactly odd, exactly 1 from 9.5 on."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        m = np.abs(x)
        z = m * m
        p: Any = _TANH[0]
        for c in _TANH[1:]:
            p = fma(p, z, c)
        p = fma(p, z * m, m)
        q = np.float32(1.0) - np.float32(2.0) / (exp(m + m) + np.float32(1.0))
        y = np.where(m < np.float32(0.625), p, q)
        y = np.where(m > np.float32(9.5), np.float32(1.0), y)
        out: F32 = np.where(np.isnan(x), x, np.copysign(y, x)).astype(np.float32)
    return out


def round_away(x: F32) -> F32:
    """Round half away from zero (0.5 to 1, -2.5 to -3, 0.49999997 to 0), for ``|x| < 2**23``."""
    m = np.abs(x)
    t = np.trunc(m)
    t = np.where(m - t >= np.float32(0.5), t + np.float32(1.0), t)
    out: F32 = np.copysign(t, x).astype(np.float32)
    return out


def quantise(
    x: F32, column: F32, column_on: npt.NDArray[np.uint8], width: int
) -> tuple[npt.NDArray[np.int8], F32] | None:
    """Quantise rows to int8 with one scale per `width` channels.

    Parameters
    ----------
    x : float32 [n_rows, hd]
    column : float32 [n_rows, hd]
        Field that divides a row first, where ``column_on[row]``.
    width : int
        Channels that share a scale; the last group of a row may be short.

    Returns
    -------
    (int8 [n_rows, hd], float32 [n_rows, ceil(hd / width)]) or None
        None when a value is not finite.
    """
    n, hd = x.shape
    groups = -(-hd // width)
    with np.errstate(all="ignore"):
        r = np.where(column_on[:, None] != 0, x / column, x).astype(np.float32)
    if not np.isfinite(r).all():
        return None
    padded = np.zeros((n, groups * width), np.float32)
    padded[:, :hd] = r
    blocks = padded.reshape(n, groups, width)
    scales = np.maximum(np.abs(blocks).max(axis=2) / np.float32(127.0), np.float32(1e-12))
    codes = np.clip(round_away(blocks / scales[..., None]), -127, 127).astype(np.int8)
    return np.ascontiguousarray(codes.reshape(n, -1)[:, :hd]), scales.astype(np.float32)


def pad_query(q: F32) -> F32:
    """Pad the last axis with -0 to a multiple of 32; a pad's product leaves any sum alone."""
    hd = q.shape[-1]
    out = np.full((*q.shape[:-1], -(-hd // 32) * 32), -0.0, np.float32)
    out[..., :hd] = q
    return out
