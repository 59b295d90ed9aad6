"""Oracles of the kernels that write planes and counters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import Format

__all__ = ["add_counters", "append", "move_rows", "set_counters"]


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
