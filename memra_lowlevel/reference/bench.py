"""Oracles of the benchmark kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["copy", "empty", "read"]


def empty() -> None:
    """Do nothing."""


def read(words: npt.NDArray[np.uint32], n_threads: int) -> npt.NDArray[np.uint32]:
    """Give the xor of the words that each thread reads: vectors of four, strided by threads."""
    vectors = np.bitwise_xor.reduce(words.reshape(-1, 4), axis=1)
    padded = np.zeros(-(-len(vectors) // n_threads) * n_threads, np.uint32)
    padded[: len(vectors)] = vectors
    per_thread: npt.NDArray[np.uint32] = np.bitwise_xor.reduce(
        padded.reshape(-1, n_threads), axis=0
    ).astype(np.uint32)
    return per_thread


def copy(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Copy."""
    copied: npt.NDArray[np.uint32] = words.copy()
    return copied
