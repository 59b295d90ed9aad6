"""Float64 oracles of the kernels in ``cuda_src/model``, named like them.

They take weights as GGUF stores them, rows of bytes, and know nothing of tiles and slices.
NumPy only; nothing here is shared with the kernels or their wrappers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

__all__ = [
    "NO_TOKEN",
    "add_product",
    "embed_rows",
    "gate_up_rows",
    "logits_rows",
    "norm_rows",
    "pick_rows",
    "product",
    "qkv_rows",
    "rope_angles",
    "weight_rows",
]

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]

NO_TOKEN = 0x7FFFFFFF
"""What argmax gives for a row of nothing but NaN."""


def weight_rows(rows: Array, format: str) -> F64:
    """Decode stored weights.

    Parameters
    ----------
    rows : uint8[n_out, row_bytes]
    format : str
        ``"f32"``, ``"f16"``, ``"q8_0"`` or ``"q4_1"``.

    Returns
    -------
    float64[n_out, n_in]
    """
    rows = np.ascontiguousarray(rows)
    n_out = rows.shape[0]
    if format in ("f32", "f16"):
        stored = rows.view(np.float32 if format == "f32" else np.float16)
        decoded: F64 = stored.astype(np.float64)
        return decoded
    block_bytes = {"q8_0": 34, "q4_1": 20}[format]
    blocks = rows.reshape(n_out, -1, block_bytes)
    d = blocks[..., 0:2].copy().view(np.float16).astype(np.float64)
    if format == "q8_0":
        values = blocks[..., 2:].view(np.int8) * d
    else:
        m = blocks[..., 2:4].copy().view(np.float16).astype(np.float64)
        codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
        values = codes * d + m
    return np.asarray(values, np.float64).reshape(n_out, -1)


def product(rows: Array, format: str, x: Array) -> F64:
    """``x @ W.T`` of stored weights: float64[n_rows, n_out] from x[n_rows, n_in]."""
    out: F64 = np.asarray(x, np.float64) @ weight_rows(rows, format).T
    return out


def add_product(rows: Array, format: str, x: Array, h: Array) -> F64:
    """``h + x @ W.T``."""
    return np.asarray(h, np.float64) + product(rows, format, x)


def norm_rows(h: Array, gain: Array, eps: float) -> F64:
    """RMS norm of each row: ``h / sqrt(mean(h²) + eps) * gain``."""
    x = np.asarray(h, np.float64)
    scale = 1.0 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return np.asarray(x * scale * np.asarray(gain, np.float64), np.float64)


def embed_rows(rows: Array, format: str, tokens: Array) -> F64:
    """Rows of the table; NaN for a token past its end."""
    tokens = np.asarray(tokens).astype(np.int64)
    inside = (tokens >= 0) & (tokens < rows.shape[0])
    table = weight_rows(rows[np.where(inside, tokens, 0)], format)
    return np.where(inside[:, None], table, np.nan)


def rope_angles(n_positions: int, n_rot: int, theta: float, factors: Array | None = None) -> F64:
    """Cosines and sines, float64[n_positions, n_rot / 2, 2]; ``factors`` divide the frequencies.

    Raises
    ------
    ArgumentError
        An odd ``n_rot``, a size below 0, or a ``theta`` that is no finite number above 0.
    """
    if n_positions < 0 or n_rot < 0 or n_rot % 2 or not 0 < theta < np.inf:
        raise ArgumentError(
            f"rope_angles: {n_positions} positions, {n_rot} channels, theta {theta}; expected "
            "sizes of at least 0, pairs of channels, and a finite theta above 0"
        )
    frequency = float(theta) ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
    if factors is not None:
        frequency = frequency / np.asarray(factors, np.float64)
    angle = np.arange(n_positions, dtype=np.float64)[:, None] * frequency
    turns: F64 = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return turns


def qkv_rows(
    rows: Array,
    format: str,
    h: Array,
    gain: Array,
    eps: float,
    angles: Array,
    position: int,
    q_dim: int,
    kv_dim: int,
    head_dim: int,
) -> tuple[F64, F64, F64]:
    """Query, key and value of rows at ``position``, ``position + 1``, …; q and k rotated.

    A pair is two neighbouring channels. Rows past the angle table rotate to NaN.

    Parameters
    ----------
    rows : uint8[q_dim + 2 * kv_dim, row_bytes]
        Weights of q, k and v.
    h : float[n_rows, width]
    gain : float[width]
    angles : float[n_positions, n_rot / 2, 2]
    """
    joined = product(rows, format, norm_rows(h, gain, eps))
    n_rows, n_positions, n_rot = joined.shape[0], angles.shape[0], 2 * angles.shape[1]
    at = position + np.arange(n_rows)
    inside = (at >= 0) & (at < n_positions)
    turn = np.asarray(angles, np.float64)[np.where(inside, at, 0)]
    turn = np.where(inside[:, None, None], turn, np.nan)
    unit = (turn[..., 0] + 1j * turn[..., 1])[:, None, :]

    def rotate(x: F64) -> F64:
        heads = x.reshape(n_rows, -1, head_dim).copy()
        pairs = np.ascontiguousarray(heads[..., :n_rot]).view(np.complex128) * unit
        heads[..., :n_rot] = pairs.view(np.float64)
        rows: F64 = heads.reshape(n_rows, -1)
        return rows

    q, k, v = np.split(joined, [q_dim, q_dim + kv_dim], axis=-1)
    return rotate(q), rotate(k), v


def gate_up_rows(
    gate: tuple[Array, str], up: tuple[Array, str], h: Array, gain: Array, eps: float
) -> F64:
    """``silu(gate x) * (up x)`` of normed rows; a matrix is its rows of bytes and its format."""
    x = norm_rows(h, gain, eps)
    g, u = product(*gate, x), product(*up, x)
    with np.errstate(over="ignore"):
        return np.asarray(g / (1.0 + np.exp(-g)) * u, np.float64)


def logits_rows(rows: Array, format: str, h: Array, gain: Array, eps: float) -> F64:
    """Logits of normed rows."""
    return product(rows, format, norm_rows(h, gain, eps))


def pick_rows(logits: Array) -> tuple[npt.NDArray[np.int32], F64]:
    """Lowest id of the greatest value of each row, and its softmax probability.

    NaN never wins; a row of NaN gives ``NO_TOKEN``. The probability of a row with a NaN is NaN.
    """
    values = np.asarray(logits, np.float64)
    ids = np.full(len(values), NO_TOKEN, np.int32)
    probability = np.full(len(values), np.nan)
    for i, row in enumerate(values):
        if not np.isnan(row).all():
            ids[i] = int(np.flatnonzero(row == np.nanmax(row))[0])
            with np.errstate(invalid="ignore"):
                probability[i] = 1.0 / np.exp(row - np.nanmax(row)).sum()
    return ids, probability
