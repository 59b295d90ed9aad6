"""The layer's side of the bounded ring."""

from __future__ import annotations

from typing import Any

import numpy as np

from memra_lowlevel.errors import KvShapeError, KvStateError

from .base import LayerBase
from .bounded import BoundedRope, BoundedSnapshot, BoundedState, BoundedWeights, check_ring
from .inputs import array_in, array_inout, count, scalar
from .modes import WireKind

__all__ = ["BoundedMethods"]


class BoundedMethods(LayerBase):
    """A layer that serves a window from constant memory."""

    def install_bounded(self, window: int) -> None:
        """Make this layer a bounded ring; once, while it is empty. Its wire kind becomes BOUNDED.

        Raises
        ------
        KvShapeError
            If the window is below 1 or above 160.
        KvStateError
            On a second call, on a layer that has positions, and under an O(1) override.
        """
        w = count(window, "window", 1)
        if w > 160:
            raise KvShapeError(f"window: {w} exceeds the 160 scores of a step")
        self._usable("install_bounded")
        if self._bounded is not None:
            raise KvStateError(f"install_bounded: a ring of {self._bounded.window} is installed")
        if self._seq_len or self._o1 is not None:
            raise KvStateError("install_bounded: only an empty layer can become a ring")
        self._bounded = BoundedState(self._nkv, self._hd, w)
        if self._wire_kind is WireKind.FULL:
            self._wire_kind = WireKind.BOUNDED

    def bounded_step(
        self,
        q: Any,
        k: Any,
        v: Any,
        w: BoundedWeights,
        rope: BoundedRope,
        scale: float,
        num_heads: int,
        out: Any,
    ) -> None:
        """Insert one position, then attend to the sinks and the window; advances `seq_len`.

        Parameters
        ----------
        q : float32 [num_heads * head_dim]
            Raw, unrotated projection; so are `k` and `v`.
        k, v : float32 [num_kv_heads * head_dim]
        w : BoundedWeights
        rope : BoundedRope
        scale : float
        num_heads : int
            A multiple of the KV heads.
        out : float32 [num_heads * head_dim]
            Overwritten in place.

        Raises
        ------
        KvShapeError
            For sizes, or a window of `w` or `rope`, that do not fit the ring.
        KvStateError
            Without a ring, and if a score is not finite. Nothing has changed then.
        """
        ring = self._ring("bounded_step")
        nh = count(num_heads, "num_heads", 1)
        nkv, hd = self._nkv, self._hd
        if nh % nkv:
            raise KvShapeError(f"num_heads: {nh} does not divide among {nkv} KV heads")
        query = array_in(q, "q", nh * hd).reshape(nh, hd)
        key, value = array_in(k, "k", nkv * hd), array_in(v, "v", nkv * hd)
        target = array_inout(out, "out", nh * hd).reshape(nh, hd)
        check_ring(ring, w, rope)
        if np.may_share_memory(target, ring.ring_k) or np.may_share_memory(target, ring.ring_v):
            raise KvShapeError("out: must not lie in the ring")
        factor = scalar(scale, "scale")
        for name, x in (("q", query), ("k", key), ("v", value)):
            if not np.isfinite(x).all():
                raise KvStateError(f"bounded_step: {name} holds a NaN or an infinity")
        ring.step(query, key.reshape(nkv, hd), value.reshape(nkv, hd), w, rope, factor, target)
        self._seq_len += 1

    def bounded_state_bytes(self) -> int:
        """Return the bytes of the ring; 0 on a layer without one."""
        return 0 if self._bounded is None else self._bounded.state_bytes()

    def bounded_snapshot(self) -> BoundedSnapshot | None:
        """Return a copy of the ring; None on a layer without one."""
        return None if self._bounded is None else self._bounded.snapshot()

    def bounded_restore(self, s: BoundedSnapshot) -> None:
        """Take a snapshot back, `seq_len` with it; the undo history is dropped.

        Raises
        ------
        KvShapeError
            For a snapshot of another geometry.
        KvStateError
            Without a ring.
        """
        ring = self._ring("bounded_restore")
        ring.restore(s)
        self._seq_len = ring.seen
        self._touch()

    def _ring(self, call: str) -> BoundedState:
        self._usable(call)
        if self._bounded is None:
            raise KvStateError(f"{call}: no ring is installed; call install_bounded first")
        return self._bounded
