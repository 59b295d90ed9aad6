"""Eviction, and the cache of all layers that decides about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import KvShapeError

from .arith import F32
from .base import LayerBase
from .inputs import count
from .layer import LayerKvCache
from .modes import WireKind

__all__ = ["KvCache", "Mass", "Recent"]


@dataclass(frozen=True)
class Mass:
    """Keep the first rows, the newest rows and those that gathered the most probability.

    Attributes
    ----------
    keep : int or None
        Rows to keep; None leaves it to the cache.
    sink : int
        First rows kept always. With ``keep <= sink`` only they survive, the newest row does not.
    recent : int or None
        Newest rows kept always; None is ``max(keep // 2, 1)``.
    """

    keep: int | None = None
    sink: int = 4
    recent: int | None = None


@dataclass(frozen=True)
class Recent:
    """Keep the newest rows; `keep` None leaves the number to the cache."""

    keep: int | None = None


class KvCache:
    """The layers of a model, with one cap on their rows.

    Parameters
    ----------
    layers : iterable of LayerKvCache
        Layer i gets ``wire_layer = i``; each may be there once.
    max_seq_len : int
        Rows at which :meth:`needs_eviction` says yes.
    policy : Mass or Recent

    Raises
    ------
    KvShapeError
        For anything else among the layers, or the same layer twice: cuts would reach it twice.
    """

    def __init__(
        self,
        layers: Iterable[LayerKvCache],
        max_seq_len: int = 32768,
        policy: Mass | Recent | None = None,
    ):
        self.layers = list(layers)
        self.max_seq_len = count(max_seq_len, "max_seq_len", 1)
        self.policy = Mass() if policy is None else policy
        if not isinstance(self.policy, (Mass, Recent)):
            raise KvShapeError(f"policy: {policy!r} is neither Mass nor Recent")
        for layer in self.layers:
            if not isinstance(layer, LayerKvCache):
                raise KvShapeError(f"layers: {type(layer).__name__} is no LayerKvCache")
        if len({id(layer) for layer in self.layers}) < len(self.layers):
            raise KvShapeError("layers: one layer stands there twice")
        for i, layer in enumerate(self.layers):
            layer.wire_layer = i
        self._warned = False

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, i: int) -> LayerKvCache:
        return self.layers[i]

    def __iter__(self) -> Iterator[LayerKvCache]:
        return iter(self.layers)

    @property
    def seq_len(self) -> int:
        """Positions of the longest layer."""
        return max((layer.seq_len for layer in self.layers), default=0)

    def needs_eviction(self) -> bool:
        """Return whether a layer that eviction can shorten has reached the cap."""
        return any(_evictable(x) and x.seq_len >= self.max_seq_len for x in self.layers)

    def evict(self, keep: int | None = None) -> int:
        """Shorten every layer that grows, all or none; warns the first time.

        Rings, layers under an O(1) override, trimmed and recurrent layers are left alone.
        Positions run on: the caller owns the absolute ones.

        Parameters
        ----------
        keep : int, optional
            Rows to keep; None is the policy's number, else half the cap.

        Returns
        -------
        int
            Rows dropped, the largest number over the layers.

        Raises
        ------
        KvStateError
            For a layer with ragged heads under Mass.
        """
        policy = self.policy
        n = keep if keep is not None else policy.keep
        n = max(self.max_seq_len // 2, 1) if n is None else count(n, "keep")
        todo = [layer for layer in self.layers if _evictable(layer)]
        if isinstance(policy, Mass):
            for layer in todo:
                layer._ragged("evict")
            recent = policy.recent
            dropped = [evict_mass(layer, n, policy.sink, recent) for layer in todo]
        else:
            dropped = [evict_recent(layer, n) for layer in todo]
        most = max(dropped, default=0)
        if most and not self._warned:
            self._warned = True
            warnings.warn(
                f"KvCache: the cap of {self.max_seq_len} rows is reached; up to {most} rows of a "
                "layer were evicted, and what they said is lost",
                stacklevel=2,
            )
        return most

    def truncate_last(self, n: int) -> None:
        """Cut the newest `n` positions of every layer, all or none."""
        for layer in self.layers:
            layer._can_truncate(n)
        for layer in self.layers:
            layer.truncate_last(n)

    def clear(self) -> None:
        """Clear every layer."""
        for layer in self.layers:
            layer.clear()

    def memory_bytes(self) -> int:
        """Return the bytes of all layers, pending scratches included."""
        return sum(layer.memory_bytes() for layer in self.layers)

    def recurrent_bytes(self) -> int:
        """Return the bytes of recurrent states and pending scratches."""
        return 4 * sum(x.linear_state.size + x.linear_scratch.size for x in self.layers)

    def attention_bytes(self) -> int:
        """Return the bytes of everything else."""
        return self.memory_bytes() - self.recurrent_bytes()

    def __repr__(self) -> str:
        return f"KvCache({len(self.layers)} layers, max_seq_len={self.max_seq_len}, {self.policy})"


def mass_rows(imp: F32, keep: int, sink: int, recent: int) -> npt.NDArray[np.int64]:
    """Return the rows that Mass keeps, ascending; ties go to the older row."""
    n = imp.size
    sink_n = min(sink, keep)
    recent_n = min(recent, keep - sink_n)
    kept = np.zeros(n, bool)
    kept[:sink_n] = True
    kept[n - recent_n :] = recent_n > 0 or kept[n - recent_n :]
    free = np.flatnonzero(~kept)
    best = free[np.argsort(-imp[free], kind="stable")]
    kept[best[: max(keep - int(kept.sum()), 0)]] = True
    return np.flatnonzero(kept)


def evict_mass(layer: LayerBase, keep: int, sink: int = 4, recent: int | None = None) -> int:
    """Evict one layer by mass; see :class:`Mass`. Returns the rows dropped."""
    keep, sink = count(keep, "keep"), count(sink, "sink")
    newest = max(keep // 2, 1) if recent is None else count(recent, "recent")
    layer._ragged("evict")
    n = layer._n_imp
    if n <= keep or not _evictable(layer):
        return 0
    kept = mass_rows(layer.imp, keep, sink, newest)
    layer._stores.gather(kept)
    layer._imp = layer.imp[kept]
    layer._n_imp = layer._seq_len = kept.size
    layer._touch()
    return n - kept.size


def evict_recent(layer: LayerBase, keep: int) -> int:
    """Evict one layer's oldest rows; returns the rows dropped."""
    drop = layer._seq_len - count(keep, "keep")
    if drop <= 0 or not _evictable(layer):
        return 0
    layer._drop_front(drop)
    layer._touch()
    return drop


def _evictable(layer: LayerBase) -> bool:
    return (
        layer._bounded is None
        and layer._o1 is None
        and layer._tail == 0
        and layer._wire_kind is not WireKind.LINEAR
    )
