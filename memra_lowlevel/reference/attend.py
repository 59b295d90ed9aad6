"""Attention in float64 over decoded planes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["attend", "visible"]

Array = NDArray[np.float64]


def visible(length: int, row: int, window: int | None, base: int = 0) -> range:
    """Return the absolute keys that row ``row`` of a launch at ``length`` sees."""
    end = length + row + 1
    start = max(0, end - window) if window else 0
    return range(max(start, base), max(end, start, base))


def attend(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    length: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: NDArray[np.float32] | None = None,
    softcap: float | None = None,
    base: int = 0,
) -> tuple[Array, Array]:
    """Attend in float64.

    Parameters
    ----------
    q : array ``[n, n_heads, head_dim]``
    k, v : arrays ``[keys, n_kv_heads, head_dim]``
        Decoded; row i holds absolute key ``base + i``.
    length : int
        Rows before this launch's own: row r sees keys below ``length + r + 1``.
    scale, window, sinks, softcap, base
        As in :func:`memra_lowlevel.kernels.kv_attend.attend`.

    Returns
    -------
    out : float64 ``[n, n_heads, head_dim_v]``
    lse : float64 ``[n, n_heads]``
    """
    n, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    factor = head_dim**-0.5 if scale is None else scale
    out = np.zeros((n, n_heads, v.shape[2]))
    lse = np.full((n, n_heads), -np.inf)
    for row in range(n):
        keys = visible(length, row, window, base)
        rows = slice(keys.start - base, keys.stop - base)
        for head in range(n_heads):
            wide_k = k[rows, head // group].astype(np.float64)
            wide_v = v[rows, head // group].astype(np.float64)
            scores = wide_k @ q[row, head].astype(np.float64) * factor
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            extra = [] if sinks is None else [float(sinks[head])]
            if scores.size == 0:  # the sink has all weight, be it -inf
                lse[row, head] = extra[0] if extra else -np.inf
                continue
            every = np.concatenate([scores, extra])
            top = every.max()
            weights = np.exp(every - top)
            total = weights.sum()
            out[row, head] = weights[: len(scores)] @ wide_v / total
            lse[row, head] = top + np.log(total)
    return out, lse
