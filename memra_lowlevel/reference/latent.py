"""Oracles of latent attention (MLA), its indexer and the selection of rows.

Everything is float64 but the indexer's scores, whose rounding decides which of two rows is chosen:
:func:`scores` reproduces each float32 rounding of the contract.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "absorb",
    "angles",
    "attend",
    "attend_listed",
    "expand_heads",
    "latent_rows",
    "mla",
    "mla_expanded",
    "pool_keys",
    "rotate",
    "scores",
    "select",
    "select_width",
]

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]


def angles(n_positions: int, d_rope: int, base: float = 10000.0) -> F32:
    """Return (cos, sin) of ``position * base ** (-2j / d_rope)``, f32 ``[n_positions, d_rope]``.

    Pair j of a position lies at elements 2j (cosine) and 2j + 1 (sine).
    """
    turn = np.outer(np.arange(n_positions), base ** (-np.arange(0, d_rope, 2) / max(d_rope, 1)))
    return (
        np.stack([np.cos(turn), np.sin(turn)], -1).reshape(n_positions, d_rope).astype(np.float32)
    )


def rotate(x: NDArray[Any], table: NDArray[Any], first: int) -> F64:
    """Rotate pairs (2j, 2j + 1) of ``x[row, ..., d_rope]``; row r stands at ``first + r``."""
    wide = x.astype(np.float64)
    turn = table[first : first + len(x)].astype(np.float64)
    turn = turn.reshape(len(x), *([1] * (x.ndim - 2)), -1)
    a, b, cos, sin = wide[..., ::2], wide[..., 1::2], turn[..., ::2], turn[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def latent_rows(
    raw: NDArray[Any],
    weight: NDArray[Any],
    table: NDArray[Any] | None,
    first: int,
    eps: float = 1e-6,
) -> F64:
    """Return rows ``[rmsnorm(raw[:kv_rank]) * weight | rope(raw[kv_rank:])]``."""
    rank = len(weight)
    wide = raw.astype(np.float64)
    c = wide[:, :rank]
    c = c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * weight
    tail = wide[:, rank:]
    if table is not None and tail.shape[1]:
        tail = rotate(tail, table, first)
    return np.concatenate([c, tail], 1)


def expand_heads(x: NDArray[Any], weight: NDArray[Any]) -> F64:
    """Apply a matrix per head: ``y[i, h, o] = sum_c weight[h, o, c] * x[i, h, c]``."""
    y: F64 = np.einsum("hoc,ihc->iho", weight.astype(np.float64), x.astype(np.float64))
    return y


def absorb(q_nope: NDArray[Any], q_pe: NDArray[Any], wk_b: NDArray[Any]) -> F64:
    """Return queries ``[n, heads, kv_rank + d_rope]`` that meet latent rows directly."""
    return np.concatenate([expand_heads(q_nope, wk_b), q_pe.astype(np.float64)], -1)


def attend(
    q: NDArray[Any],
    rows: NDArray[Any],
    length: int,
    kv_rank: int,
    scale: float,
    indices: NDArray[np.int32] | None = None,
) -> F64:
    """Attend absorbed queries over latent rows.

    Parameters
    ----------
    q : array ``[n, heads, width]``
    rows : array ``[keys, width]``
        Row i of n sees those below ``length + i + 1``.
    indices : i32 ``[n, any]``, optional
        Rows that query i attends, for all heads; -1 and rows it may not see are skipped.

    Returns
    -------
    float64 ``[n, heads, kv_rank]``; 0 for a query without keys
    """
    n, heads, _ = q.shape
    out = np.zeros((n, heads, kv_rank))
    for i in range(n):
        end = length + i + 1
        seen = np.arange(min(end, len(rows)))
        if indices is not None:
            listed = indices[i]
            seen = listed[(listed >= 0) & (listed < min(end, len(rows)))]
        if seen.size == 0:
            continue
        keys = rows[seen].astype(np.float64)
        s = q[i].astype(np.float64) @ keys.T * scale
        w = np.exp(s - s.max(-1, keepdims=True))
        out[i] = w @ keys[:, :kv_rank] / w.sum(-1, keepdims=True)
    return out


def attend_listed(
    q: NDArray[Any],
    rows: NDArray[Any],
    indices: NDArray[np.int32],
    length: int,
    kv_rank: int,
    scale: float,
) -> F64:
    """:func:`attend` over a list of rows per query."""
    return attend(q, rows, length, kv_rank, scale, indices)


def mla(
    q_nope: NDArray[Any],
    q_pe: NDArray[Any],
    wk_b: NDArray[Any],
    wv_b: NDArray[Any],
    rows: NDArray[Any],
    length: int,
) -> F64:
    """Latent attention in its absorbed form, ``[n, heads, d_v]``.

    Parameters
    ----------
    q_nope, q_pe : arrays ``[n, heads, d_nope]``, ``[n, heads, d_rope]``
    wk_b : array ``[heads, kv_rank, d_nope]``
    wv_b : array ``[heads, d_v, kv_rank]``
    """
    scale = (q_nope.shape[2] + q_pe.shape[2]) ** -0.5
    o = attend(absorb(q_nope, q_pe, wk_b), rows, length, wk_b.shape[1], scale)
    return expand_heads(o, wv_b)


def mla_expanded(
    q_nope: NDArray[Any],
    q_pe: NDArray[Any],
    wk_b: NDArray[Any],
    wv_b: NDArray[Any],
    rows: NDArray[Any],
    length: int,
) -> F64:
    """Compute the same with keys and values made per head from the latent rows."""
    n, heads, d_nope = q_nope.shape
    rank = wk_b.shape[1]
    out = np.zeros((n, heads, wv_b.shape[1]))
    latent, tail = rows[:, :rank].astype(np.float64), rows[:, rank:].astype(np.float64)
    for h in range(heads):
        k = latent @ wk_b[h].astype(np.float64)
        v = latent @ wv_b[h].astype(np.float64).T
        for i in range(n):
            end = length + i + 1
            s = k[:end] @ q_nope[i, h].astype(np.float64)
            s = (s + tail[:end] @ q_pe[i, h].astype(np.float64)) / np.sqrt(d_nope + q_pe.shape[2])
            w = np.exp(s - s.max())
            out[i, h] = w @ v[:end] / w.sum()
    return out


def pool_keys(index_rows: NDArray[Any], ape: NDArray[Any], pool: int) -> F64:
    """Return the keys of all complete pools, ``[n // pool, d]``.

    Parameters
    ----------
    index_rows : array ``[n, 2 * d]``
        ``[k | gate]``.
    ape : array ``[pool, d]``
    """
    d = index_rows.shape[1] // 2
    n = len(index_rows) // pool
    k = index_rows[: n * pool, :d].astype(np.float64).reshape(n, pool, d)
    z = index_rows[: n * pool, d:].astype(np.float64).reshape(n, pool, d) + ape
    e = np.exp(z - z.max(1, keepdims=True))
    keys: F64 = (e / e.sum(1, keepdims=True) * k).sum(1)
    return keys


def _fma(a: F32, b: F32, c: F32) -> F32:
    """Round ``a * b + c`` once, to float32.

    The product is exact in float64. Their sum is rounded to odd there, after which a rounding to
    the 29 bits shorter float32 is the only one that counts.
    """
    p, w = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    s = p + w
    t = s - p
    rest = (p - (s - t)) + (w - t)
    bits = s.view(np.int64)
    inexact = np.isfinite(s) & (rest != 0) & (bits & 1 == 0)
    away = (rest > 0) == (s > 0)
    odd = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    rounded: F32 = odd.view(np.float64).astype(np.float32)
    return rounded


def scores(q: F32, hw: F32, keys: F32, first_pos: int, pool: int, *, masked: bool = True) -> F32:
    """Score pools bit for bit as every kernel must.

    A dot product is a chain of fused multiply-adds over ascending channels from +0; times
    ``d ** -0.5``; at least 0; times the separately rounded ``hw * heads ** -0.5``; added over
    ascending heads from +0.

    Parameters
    ----------
    q : f32 ``[n, heads, d]``
    hw : f32 ``[n, heads]``
    keys : f32 ``[n_pools, d]``
    first_pos : int
        Position of query 0; query i sees pools below ``(first_pos + i + 1) // pool``.

    Returns
    -------
    f32 ``[n, n_pools]``, -inf where not visible
    """
    n, heads, d = q.shape
    scale, weight = np.float32(d**-0.5), np.float32(heads**-0.5)
    total = np.zeros((n, len(keys)), np.float32)
    with np.errstate(all="ignore"):
        for h in range(heads):
            dot = np.zeros((n, len(keys)), np.float32)
            for c in range(d):
                a, b = np.broadcast_arrays(q[:, h, c, None], keys[None, :, c])
                dot = _fma(a, b, dot)
            scaled = dot * scale
            relu = np.where(scaled > 0, scaled, np.where(np.isnan(scaled), scaled, np.float32(0)))
            total = total + relu * (hw[:, h] * weight)[:, None]
    if masked:
        visible = (first_pos + np.arange(n) + 1) // pool
        total = np.where(np.arange(len(keys))[None] < visible[:, None], total, -np.inf)
    result: F32 = total.astype(np.float32)
    return result


def select_width(top_k: int, pool: int, n_pools: int) -> int:
    """Entries of a list: whole pools, and the longest raw tail."""
    return min(top_k // pool, n_pools) * pool + pool - 1


def select(
    score: F32, visible: int, top_k: int, pool: int, width: int | None = None
) -> NDArray[np.int32]:
    """Choose rows by sorting everything.

    Score descending, then pool ascending; -0 equals +0; a score that is no finite number is never
    chosen. The rows of the chosen pools follow in ascending order, then the rows of the pool that
    is not complete, then -1.
    """
    n_seen = min(visible // pool, len(score))
    wanted = min(top_k // pool, len(score))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        seen = score[:n_seen] + np.float32(0)  # -0 + 0 = +0
    finite = np.flatnonzero(np.isfinite(seen))
    order = finite[np.argsort(-seen[finite].astype(np.float64), kind="stable")]
    chosen = np.sort(order[:wanted])
    rows = [p * pool + s for p in chosen for s in range(pool)]
    rows += range(visible - visible % pool, visible)
    out = np.full(select_width(top_k, pool, len(score)) if width is None else width, -1, np.int32)
    out[: len(rows)] = rows
    return out
