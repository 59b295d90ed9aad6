"""Oracles of the kernels that write planes and counters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import Format

__all__ = ["add_counters", "append", "move_rows", "set_counters", "turn_heads"]


def append(
    plane: NDArray[np.uint8], rows: NDArray[np.float32], format: Format, slot: int, base: int = 0
) -> NDArray[np.uint8]:
    """Return ``plane`` (u8 ``[capacity, row_bytes]``) with ``rows`` encoded from ``slot`` on."""
    result: NDArray[np.uint8] = plane.copy()
    encoded = format.encode(rows, check=False)
    for r, row in enumerate(encoded):
        physical = slot + r - base
        if 0 <= physical < len(result):
            result[physical] = row
    return result


def turn_heads(
    x: NDArray[np.float32],
    position: int,
    *,
    weight: NDArray[Any] | None = None,
    angles: NDArray[Any] | None = None,
    halves: bool = False,
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """Return heads (``[n, n_heads, dim]``) after their RMS norm and rotation.

    Parameters
    ----------
    position : int
        Of row 0. Past the table heads rotate to NaN.
    weight : float[dim], optional
        None: no norm.
    angles : float[n_positions, n_rot / 2, 2], optional
        None: no rotation.
    halves : bool
        Pairs are channels j and ``j + n_rot / 2`` instead of neighbours.
    """
    y: NDArray[np.float64] = np.asarray(x, np.float64).copy()
    if weight is not None:
        y *= np.asarray(weight, np.float64) / np.sqrt((y**2).mean(-1, keepdims=True) + eps)
    if angles is not None:
        n_rot = 2 * angles.shape[1]
        first, second = np.arange(0, n_rot, 2), np.arange(1, n_rot, 2)
        if halves:
            first, second = np.arange(n_rot // 2), np.arange(n_rot // 2, n_rot)
        for r in range(len(y)):
            turn = np.full((n_rot // 2, 2), np.nan)
            if 0 <= position + r < len(angles):
                turn = np.asarray(angles[position + r], np.float64)
            a, b = y[r][:, first], y[r][:, second]
            y[r][:, first] = a * turn[:, 0] - b * turn[:, 1]
            y[r][:, second] = a * turn[:, 1] + b * turn[:, 0]
    return y


def move_rows(plane: NDArray[np.uint8], src_row: int, n_rows: int) -> NDArray[np.uint8]:
    """Return ``plane`` (u8 ``[capacity, row_bytes]``) with rows moved to its front."""
    result: NDArray[np.uint8] = plane.copy()
    result[:n_rows] = plane[src_row : src_row + n_rows]
    return result


def set_counters(counters: NDArray[np.int32], value: int) -> NDArray[np.int32]:
    """Return counters that all have one value."""
    return np.full_like(counters, value)


def add_counters(
    counters: NDArray[np.int32], delta: int, mask: NDArray[Any] | None = None
) -> NDArray[np.int32]:
    """Return counters moved by ``delta`` where the mask is not 0."""
    moved = counters.astype(np.int64) + delta
    if mask is not None:
        moved = np.where(mask != 0, moved, counters)
    return np.asarray(moved, dtype=np.int32)
