"""Landmarks of the O(1) override and the ridge inverse of their kernel matrix, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SLACK", "m_effective", "pinv_ridge", "seal_floor", "segments"]

SLACK = 8
RIDGE = 1e-6
F64 = npt.NDArray[np.float64]


def m_effective(t: int, m: int) -> int:
    """Return the landmarks that a prompt of `t` rows can carry: ``clamp(t // 8, 4, m)``."""
    return max(4, min(t // 8, m))


def seal_floor(window: int, sink: int) -> int:
    """Return the fewest rows of a seal: window, sinks, slack and one far row."""
    return window + sink + SLACK + 1


def segments(t: int, m: int) -> list[tuple[int, int]]:
    """Return the row ranges whose means are the landmarks: ``[i t // m, (i + 1) t // m)``."""
    return [(i * t // m, (i + 1) * t // m) for i in range(m)]


def pinv_ridge(a: F64) -> tuple[F64, float, int]:
    """Return ``(A^T A + lambda I)^-1 A^T``, the lambda, and the attempts it took.

    Lambda starts at 1e-6 of the mean diagonal of ``A^T A`` and grows tenfold while Cholesky fails,
    12 attempts at most; then the result is the identity over the mean diagonal.

    Parameters
    ----------
    a : float64 [m, m]
    """
    m = a.shape[0]
    with np.errstate(all="ignore"):
        gram = a.T @ a
        mean = float(np.trace(gram)) / m
        ridge = RIDGE * max(mean, float(np.finfo(np.float64).tiny))
        for attempt in range(1, 13):
            low = _cholesky(gram + ridge * np.eye(m))
            if low is not None:
                return _solve(low, a.T), ridge, attempt
            ridge *= 10.0
        return np.eye(m) / mean, ridge, 12


def _cholesky(a: F64) -> F64 | None:
    """Return the lower factor; None when a pivot is not positive and finite."""
    low = a.copy()
    m = a.shape[0]
    for j in range(m):
        pivot = low[j, j]
        if not (pivot > 0.0 and np.isfinite(pivot)):
            return None
        low[j:, j] /= np.sqrt(pivot)
        low[j + 1 :, j + 1 :] -= np.outer(low[j + 1 :, j], low[j + 1 :, j])
    out: F64 = np.tril(low)
    return out


def _solve(low: F64, right: F64) -> F64:
    """Solve ``L L^T X = right`` by two triangular solves, all columns at once."""
    m = low.shape[0]
    y = np.array(right, np.float64)
    for i in range(m):
        y[i] = (y[i] - low[i, :i] @ y[:i]) / low[i, i]
    for i in range(m - 1, -1, -1):
        y[i] = (y[i] - low[i + 1 :, i] @ y[i + 1 :]) / low[i, i]
    return y
