"""The layer's side of the O(1) override: begin, collect, seal, step."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import numpy as np

from memra_lowlevel.errors import KvShapeError, KvStateError

from .base import LayerBase
from .inputs import array_in, count
from .modes import O1Rect
from .nystrom import NystromState, O1DeviceView, O1Snapshot, O1State
from .skeleton import m_effective, seal_floor

__all__ = ["O1Methods"]


class O1Methods(LayerBase):
    """A layer whose old rows become a skeleton of constant size."""

    def o1_begin(
        self, m: int = 32, w: int = 128, sink: int = 4, rect: O1Rect = O1Rect.AGGREGATE
    ) -> None:
        """Start to collect for the override; attention stays exact until the seal.

        Parameters
        ----------
        m : int
            Landmarks, at least 4; a prompt of t rows carries ``t // 8`` at most.
        w, sink : int
            Rows of the exact window (at least 1), first rows kept exactly for ever.
        rect : O1Rect

        Raises
        ------
        KvShapeError
            For m below 4, w below 1 or a negative sink.
        KvStateError
            On a layer with positions, a ring, a quantised mode or learned sinks, which the
            override would ignore.
        """
        count(m, "m", 4)
        count(w, "w", 1)
        count(sink, "sink")
        if not isinstance(rect, O1Rect):
            raise KvShapeError(f"rect: {rect!r} is no O1Rect")
        reasons = (
            (self._seq_len > 0, f"it holds {self._seq_len} positions; clear() it first"),
            (self._bounded is not None, "it is a bounded ring"),
            (self.mode.quantised, f"its mode is {self.mode}, and landmarks need float32 rows"),
            (self._sinks is not None, "it has learned sinks, which the override would ignore"),
        )
        for wrong, why in reasons:
            if wrong:
                raise KvStateError(f"o1_begin: not on this layer: {why}")
        self._o1_error = None
        self._o1 = O1State(int(m), int(w), int(sink), rect)
        self._touch()

    def o1_push_q(self, q_all: Any) -> None:
        """Collect the rotated queries ``[num_heads * head_dim]`` of the position being appended.

        Does nothing unless the layer collects.

        Raises
        ------
        KvShapeError
            If the size is no multiple of `head_dim` or differs from the first position's.
        """
        if self._o1 is not None and not self._o1.sealed:
            self._o1.push(q_all, self._hd)

    def o1_sealed(self) -> bool:
        """Return whether the skeleton answers."""
        return self._o1 is not None and self._o1.sealed

    def o1_reaches_target(self, n: int) -> bool:
        """Return whether `n` more positions would reach the row of a deferred seal.

        A batched caller splits its chunk there and seals.
        """
        waiting = self._o1 is not None and not self._o1.sealed and self._o1.target is not None
        return waiting and self._o1.target <= self._seq_len + count(n, "n")  # type: ignore[union-attr, operator]

    def o1_seal(self, num_heads: int) -> bool:
        """Seal the layer, or defer while it is too short for a far field.

        Returns
        -------
        bool
            True when the layer is sealed. False when it has fewer than ``w + sink + 9`` rows (it
            collects on, exactly), when it is plain, and when an earlier seal was aborted.

        Raises
        ------
        KvStateError
            When what was collected cannot be sealed: the trace does not have one query per
            position, a head lacks rows, heads do not divide, values are not finite. **The rows
            are dropped then** and the layer refuses work until :meth:`clear`.
        """
        nh = count(num_heads, "num_heads")
        if self._o1_error is not None:
            return False
        o1 = self._o1
        if o1 is None or o1.sealed:
            return self.o1_sealed()
        floor = seal_floor(o1.window, o1.sink)
        target = max(o1.target or floor, floor)
        t = self._seq_len
        if t < target:
            o1.target = target
            return False
        nkv, hd = self._nkv, self._hd
        if nh == 0 or nh % nkv:
            self._abort(f"{nh} query heads do not divide among {nkv} KV heads")
        if o1.trace.shape != (t, nh * hd):
            self._abort(
                f"the trace has {o1.trace.shape[0]} positions of {o1.trace.shape[-1]} elements, "
                f"where {t} of {nh * hd} are needed"
            )
        if self.mode.quantised or (self._stores.rows != t).any():
            self._abort(
                f"heads have {self._stores.rows.tolist()} rows of mode {self.mode}, where each "
                f"needs {t} of float32"
            )
        if m_effective(t, o1.m) < o1.m:
            warnings.warn(
                f"o1_seal: {o1.m} landmarks asked for, {m_effective(t, o1.m)} used: a prompt of "
                f"{t} rows carries {t} // 8",
                stacklevel=2,
            )
        q = np.ascontiguousarray(o1.trace.reshape(t, nh, hd).transpose(1, 0, 2))
        k, v = self._stores.k[:, :t], self._stores.v[:, :t]
        try:
            state = NystromState(k, v, q, o1.m, o1.window, o1.sink, o1.rect)
        except KvStateError as error:
            self._abort(str(error))
        o1.release(state)
        self._stores.clear()
        self._imp, self._n_imp = np.zeros(0, np.float32), 0
        self._touch()
        return True

    def o1_views(self) -> list[O1DeviceView] | None:
        """Return read-only views of each group; None unless sealed with a far field."""
        if self._o1 is None or self._o1.state is None or self._o1.state.exact_only:
            return None
        return self._o1.state.views()

    def o1_step(self, q_all: Any, k_new: Any, v_new: Any, num_heads: int) -> Any:
        """Insert one position in the sealed state and attend; advances `seq_len`.

        Parameters
        ----------
        q_all : float32 [num_heads * head_dim]
            Rotated; so is `k_new`.
        k_new, v_new : float32 [num_kv_heads * head_dim]
        num_heads : int

        Returns
        -------
        float32 [num_heads * head_dim]

        Raises
        ------
        KvShapeError
            For sizes that do not fit the sealed state.
        KvStateError
            On a layer that is not sealed, and if an input or a logit is not finite; the state is
            unchanged then.
        """
        state = self._sealed("o1_step")
        nh, nkv, hd = count(num_heads, "num_heads", 1), self._nkv, self._hd
        if nh != state.n_heads:
            raise KvShapeError(f"num_heads: {nh}, but the layer was sealed with {state.n_heads}")
        q = array_in(q_all, "q_all", nh * hd)
        k = array_in(k_new, "k_new", nkv * hd)
        v = array_in(v_new, "v_new", nkv * hd)
        out = state.step(q, k, v)
        self._seq_len += 1
        return out.reshape(-1)

    def o1_snapshot(self) -> O1Snapshot:
        """Copy what steps change, for a speculative round on a sealed layer."""
        return self._sealed("o1_snapshot").snapshot()

    def o1_restore(self, s: O1Snapshot) -> None:
        """Take a snapshot of this layer back, bit for bit; `seq_len` follows.

        Raises
        ------
        KvShapeError
            For a snapshot of another geometry.
        KvStateError
            On a layer that is not sealed.
        """
        state = self._sealed("o1_restore")
        before = state.win_len + state.far_len
        state.restore(s)
        self._seq_len += state.win_len + state.far_len - before
        self._touch()

    def o1_memory_bytes(self) -> int:
        """Return the bytes of the query trace or of the sealed state; 0 on a plain layer."""
        return 0 if self._o1 is None else self._o1.n_bytes()

    def _sealed(self, call: str) -> NystromState:
        self._usable(call)
        if self._o1 is None or self._o1.state is None:
            raise KvStateError(f"{call}: this layer is not sealed; call o1_seal first")
        return self._o1.state

    def _abort(self, why: str) -> NoReturn:
        """Drop everything and latch: a half-collected layer must not answer as if it were whole."""
        self._stores.clear()
        self._imp, self._n_imp, self._seq_len = np.zeros(0, np.float32), 0, 0
        self._alive, self._o1, self._o1_error = None, None, why
        self._touch()
        raise KvStateError(f"o1_seal: {why}; the rows were dropped, clear() the layer")
