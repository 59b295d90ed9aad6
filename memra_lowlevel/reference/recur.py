"""float64 oracles of linear attention: convolution, gated delta rule, and its per-channel variant.

Layouts: a convolution state is ``[conv_width, conv_kernel - 1]``, oldest column first, raw values;
a recurrent state is transposed per head, ``state[h, col, i] = S[i][col]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "conv_assemble_and_roll",
    "conv_keep",
    "gated_delta",
    "kda",
    "kda_decay",
    "l2_normalise",
    "sigmoid",
    "silu",
    "softplus",
]

F64 = NDArray[np.float64]


def _f64(x: ArrayLike) -> F64:
    return np.asarray(x, np.float64)


def sigmoid(x: ArrayLike) -> F64:
    """``1 / (1 + exp(-x))``."""
    return np.asarray(1.0 / (1.0 + np.exp(-_f64(x))))


def silu(x: ArrayLike) -> F64:
    """``x * sigmoid(x)``."""
    return _f64(x) * sigmoid(x)


def softplus(x: ArrayLike) -> F64:
    """``log(1 + exp(x))``, and ``x`` above 20."""
    x = _f64(x)
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def l2_normalise(x: ArrayLike, eps: float = 1e-6) -> F64:
    """``x / sqrt(sum x^2 + eps)`` over the last axis."""
    x = _f64(x)
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps))


def conv_assemble_and_roll(state: ArrayLike, new: ArrayLike, weights: ArrayLike) -> tuple[F64, F64]:
    """Short causal convolution of new rows behind a state.

    Parameters
    ----------
    state : (width, kernel - 1)
    new : (rows, width)
    weights : (width, kernel)

    Returns
    -------
    (rows, width), (rows, width, kernel - 1)
        ``silu`` of the convolution, and the state after each row.
    """
    current, rows, w = _f64(state), _f64(new), _f64(weights)
    out = np.empty(rows.shape)
    states = np.empty((len(rows), *current.shape))
    for r, row in enumerate(rows):
        window = np.concatenate([current, row[:, None]], axis=1)
        out[r] = silu(np.sum(window * w, axis=1))
        current = states[r] = window[:, 1:]
    return out, states


def conv_keep(old: ArrayLike, new: ArrayLike, keep: int) -> F64:
    """State after only the first ``keep`` of the new rows: rebuilt, not replayed.

    Parameters
    ----------
    old : (width, kernel - 1)
    new : (rows, width)
    """
    old, new = _f64(old), _f64(new)
    pad = old.shape[1]
    columns = [
        new[keep - pad + j] if keep - pad + j >= 0 else old[:, pad + (keep - pad + j)]
        for j in range(pad)
    ]
    return np.stack(columns, axis=1) if pad else old.copy()


def gated_delta(
    state: ArrayLike, q: Any, k: Any, v: Any, g: ArrayLike, beta: ArrayLike
) -> tuple[F64, F64]:
    """Gated delta rule: decay inside the read of the memory.

    Parameters
    ----------
    state : (heads, d, d), transposed
    q, k : (rows, heads, d)
        Already normalised; one k head per v head.
    v : (rows, heads, d)
    g : (rows, heads)
        The decay factor itself, ``exp(g_log)``.
    beta : (rows, heads)

    Returns
    -------
    (rows, heads, d), (rows, heads, d, d)
        Outputs, scaled by ``d ** -0.5``, and the state after each row.
    """
    gain = _f64(g)[..., None]
    return _delta(state, q, k, v, np.broadcast_to(gain, np.shape(k)), beta)


def kda(
    state: ArrayLike, q: Any, k: Any, v: Any, decay: ArrayLike, beta: ArrayLike
) -> tuple[F64, F64]:
    """Delta rule with a decay per key channel; the state is decayed first.

    Arguments as :func:`gated_delta`, ``decay`` (rows, heads, d) being ``exp(g)``.
    """
    return _delta(state, q, k, v, _f64(decay), beta)


def kda_decay(a_log: ArrayLike, f: ArrayLike, dt_bias: ArrayLike, lower_bound: float = -5.0) -> F64:
    """``exp(lower_bound * sigmoid(exp(a_log) * (f + dt_bias)))``."""
    return np.exp(lower_bound * sigmoid(np.exp(_f64(a_log)) * (_f64(f) + _f64(dt_bias))))


def _delta(state: Any, q: Any, k: Any, v: Any, decay: F64, beta: Any) -> tuple[F64, F64]:
    # With one decay per head this is the gated rule: (g S) k = g (S k), so decaying first and
    # decaying inside the read are the same number in exact arithmetic.
    s = np.swapaxes(_f64(state), -1, -2).copy()  # S[i][col]
    q, k, v, beta = _f64(q), _f64(k), _f64(v), _f64(beta)
    rows, heads, d = k.shape
    out = np.empty((rows, heads, s.shape[-1]))
    states = np.empty((rows, heads, s.shape[-1], d))
    for r in range(rows):
        s = s * decay[r][..., None]
        memory = np.einsum("hic,hi->hc", s, k[r])
        delta = (v[r] - memory) * beta[r][:, None]
        s = s + k[r][..., None] * delta[:, None, :]
        out[r] = d**-0.5 * np.einsum("hic,hi->hc", s, q[r])
        states[r] = np.swapaxes(s, -1, -2)
    return out, states
