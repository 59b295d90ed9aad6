"""The layer cache itself: append, cut, trim, count, copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_lowlevel.errors import KvShapeError, KvStateError

from .arith import F32
from .attend import AttendMethods
from .inputs import array_in, count
from .o1_layer import O1Methods
from .recurrent import RecurrentMethods
from .ring_layer import BoundedMethods
from .store import WARM_ROWS
from .wire_layer import WireMethods

__all__ = ["LayerKvCache"]


class LayerKvCache(AttendMethods, RecurrentMethods, BoundedMethods, O1Methods, WireMethods):
    """Attention state of one layer in host memory: rows, or what stands for them.

    Parameters
    ----------
    num_kv_heads, head_dim : int
    mode : KvMode, optional
        How rows are stored; None reads the door ``CMF_KV``.
    allow_ragged : bool
        Whether a head may change between live and dead within a sequence. Row p of such a head is
        not position p.

    Notes
    -----
    One layer serves one thread at a time, except that any number of threads may attend to it or
    read it while none changes it. Layers are independent of each other. The loops run without the
    interpreter's lock.

    A refused call changes nothing; the one exception is an aborted :meth:`o1_seal`.
    """

    # -- rows -----------------------------------------------------------------------------------

    def append(self, k_new: Any, v_new: Any, alive: Sequence[Any] | None = None) -> None:
        """Add one position.

        Parameters
        ----------
        k_new, v_new : float32 [num_kv_heads * head_dim]
            Position-major: head h at ``h * head_dim``. Keys are already rotated.
        alive : sequence of bool, optional
            Heads that store the position; missing entries mean alive. The mask of a sequence stays
            the one of its first position unless `allow_ragged`.

        Raises
        ------
        KvShapeError
            For wrong sizes or dtypes.
        KvStateError
            On a bounded, sealed or latched layer; for a mask that changes; in quantised mode for
            values that are not finite or too large.
        """
        self._per_position("append")
        width = self._nkv * self._hd
        k = array_in(k_new, "k_new", width).reshape(self._nkv, self._hd)
        v = array_in(v_new, "v_new", width).reshape(self._nkv, self._hd)
        mask = self._liveness(alive)
        self._same_heads(mask)
        if mask is not None:
            k, v = np.where(mask[:, None], k, 0), np.where(mask[:, None], v, 0)
        frozen = self._stores.freeze() if self._freeze_due() else None
        row = self._stores.encode(k, v, frozen)
        if frozen is not None:
            self._stores.apply(frozen)
            self._touch()
        self._stores.write(row, mask)
        if self._seq_len == 0:
            self._alive = np.ones(self._nkv, bool) if mask is None else mask
        self._push_imp()
        self._seq_len += 1

    def chunk_rows(self, n: int) -> int:
        """Return how many of `n` positions may be appended before they are attended.

        A chunk must not hold both sides of the column freeze, whose rows change, and must end where
        a deferred seal becomes possible.
        """
        room = count(n, "n")
        warm = WARM_ROWS - self._seq_len
        if self.mode.quantised and warm > 0 and not self._stores.columns_frozen():
            room = min(room, warm)
        if self._o1 is not None and self._o1.target is not None:
            room = min(room, max(self._o1.target - self._seq_len, 1))
        return room

    def truncate_last(self, n_drop: int) -> None:
        """Cut the newest positions, as far as there are; a pending scratch is dropped always.

        A recurrent state is not rolled back: it holds exactly the positions up to the scratch.

        Raises
        ------
        KvStateError
            On a sealed layer, and on a ring whose undo history is shorter; nothing has moved then.
        """
        n = self._can_truncate(n_drop)
        held = self._scratch_positions
        self.discard_linear_scratch()
        d = min(max(n - held, 0), self._seq_len)
        if self._bounded is not None:
            self._bounded.rollback(d)
            self._seq_len = self._bounded.seen
            return
        self._stores.drop_last(d)
        self._n_imp = max(self._n_imp - d, 0)
        self._seq_len -= d
        if d:
            self._note_cut()
        if self._o1 is not None:
            self._o1.drop_last(d)

    def accumulate_imp(self, probs: Any) -> None:
        """Add probabilities to the importance of the rows, over the shorter of the two.

        Raises
        ------
        KvShapeError
            For another dtype.
        KvStateError
            For a NaN, or a sum that becomes one, which eviction could not order.
        """
        p = array_in(probs, "probs")
        n = min(p.size, self._n_imp)
        with np.errstate(invalid="ignore", over="ignore"):
            total = self._imp[:n] + p[:n]
        if np.isnan(total).any():
            raise KvStateError("accumulate_imp: a NaN cannot be ordered at the next eviction")
        self._imp[:n] = total

    def trim_window(self, w: int, slack: int = 0, align: int = 1) -> int:
        """Drop rows that a sliding window has left behind; returns how many.

        Does nothing for ``w = 0``, on rings and under an O(1) override; and, beyond remembering the
        window, while there are at most ``2 w`` rows or the columns of a quantised layer are not
        frozen. The first kept position is a multiple of `align`.

        Parameters
        ----------
        w : int
            Window of the layer.
        slack, align : int
            Rows kept beyond it; alignment of the new base.

        Raises
        ------
        KvShapeError
            For negative numbers.
        KvStateError
            On a layer with ragged heads.
        """
        w, slack, align = count(w, "w"), count(slack, "slack"), max(count(align, "align"), 1)
        self._usable("trim_window")
        if w == 0 or self._o1 is not None or self._bounded is not None:
            return 0
        self._ragged("trim_window")
        self._tail = w
        warming = self.mode.quantised and not self._stores.columns_frozen()
        if self._seq_len <= 2 * w or (warming and self._stores.rows.any()):
            return 0
        drop = (self.pos_len - (w + slack)) // align * align - self._base
        if drop <= 0:
            return 0
        self._drop_front(drop)
        self._base += drop
        self._touch()
        return drop

    def clear(self) -> None:
        """Forget the sequence; mode, sinks, ring geometry, window and wire fields stay."""
        self._stores.clear()
        self._imp, self._n_imp = np.zeros(0, np.float32), 0
        self._linear_state = np.zeros(0, np.float32)
        self._linear_scratch = np.zeros(0, np.float32)
        self._scratch_positions = 0
        self._alive, self._o1, self._o1_error = None, None, None
        if self._bounded is not None:
            self._bounded.clear()
        self._seq_len = self._base = 0
        self._touch()

    # -- views ----------------------------------------------------------------------------------

    def k_heads(self) -> list[F32]:
        """Return the keys of every head; see :meth:`head_keys`."""
        return [self.head_keys(h) for h in range(self._nkv)]

    def v_heads(self) -> list[F32]:
        """Return the values of every head; see :meth:`head_keys`."""
        return [self.head_values(h) for h in range(self._nkv)]

    def head_keys(self, h: int) -> F32:
        """Return a read-only float32 view ``[rows, head_dim]``, valid until the next change.

        Raises
        ------
        KvShapeError
            For a head that the layer does not have.
        KvStateError
            Where the rows are not float32, and on bounded or sealed layers.
        """
        return self._view("head_keys", "k", h)

    def head_values(self, h: int) -> F32:
        """Return the values of a head; see :meth:`head_keys`."""
        return self._view("head_values", "v", h)

    def head_len(self, h: int) -> int:
        """Return the rows stored for a head; 0 for a dead one."""
        return int(self._stores.rows[self._head(h)])

    def memory_bytes(self) -> int:
        """Return the bytes of rows, columns, recurrent vectors, override and ring.

        By length, not by capacity; importance, sinks and the ring's undo history do not count.
        """
        vectors = self._linear_state.size + self._linear_scratch.size
        return (
            self._stores.n_bytes()
            + 4 * vectors
            + self.o1_memory_bytes()
            + self.bounded_state_bytes()
        )

    # -- copies ---------------------------------------------------------------------------------

    def copy(self) -> LayerKvCache:
        """Return a copy that shares nothing: rows, columns, ring undo, override, latch, scratch."""
        other = LayerKvCache(self._nkv, self._hd, mode=self.mode, allow_ragged=self.allow_ragged)
        other.copy_from(self)
        return other

    def copy_from(self, other: LayerKvCache) -> None:
        """Become equal to another layer of this geometry, bit for bit.

        Raises
        ------
        KvShapeError
            If heads or channels differ.
        """
        if not isinstance(other, LayerKvCache):
            raise KvShapeError(f"copy_from: {type(other).__name__} is no LayerKvCache")
        if (other._nkv, other._hd) != (self._nkv, self._hd):
            raise KvShapeError(
                f"copy_from: {other._nkv} heads of {other._hd}, but this layer has {self._nkv} of "
                f"{self._hd}"
            )
        fresh = dict(other.__dict__)
        fresh["_stores"] = other._stores.copy()
        fresh["_imp"] = other.imp.copy()
        for name in ("_linear_state", "_linear_scratch", "_cuts"):
            fresh[name] = fresh[name].copy()
        for name in ("_bounded", "_o1", "_alive"):
            fresh[name] = None if fresh[name] is None else fresh[name].copy()
        self.__dict__.update(fresh)
        self._touch()

    def __copy__(self) -> LayerKvCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerKvCache:
        return self.copy()

    def __repr__(self) -> str:
        what = f"seq_len={self._seq_len}"
        if self._base:
            what += f", base={self._base}"
        if self._bounded is not None:
            what += f", ring of {self._bounded.window}"
        if self._o1 is not None:
            what += ", O(1) sealed" if self._o1.sealed else ", O(1) collecting"
        if self._o1_error is not None:
            what += ", seal aborted"
        return (
            f"LayerKvCache({self._nkv} heads of {self._hd}, {self.mode}, {what}, "
            f"{self.memory_bytes()} bytes)"
        )

    # -- inner ----------------------------------------------------------------------------------

    def _freeze_due(self) -> bool:
        return (
            self.mode.quantised
            and self._seq_len >= WARM_ROWS
            and not self._stores.columns_frozen()
            and bool(self._stores.rows.any())
        )

    def _same_heads(self, mask: Any) -> None:
        if self._seq_len == 0 or self.allow_ragged or self._alive is None:
            return
        now = np.ones(self._nkv, bool) if mask is None else mask
        if (now != self._alive).any():
            raise KvStateError(
                f"append: live heads {now.tolist()}, but the sequence began with "
                f"{self._alive.tolist()}; rows would no longer be positions (allow_ragged=True "
                "permits that)"
            )

    def _can_truncate(self, n_drop: int) -> int:
        n = count(n_drop, "n_drop")
        d = min(n, self._seq_len)
        if d and self._o1 is not None and self._o1.sealed:
            raise KvStateError(
                "truncate_last: a sealed layer cannot forget; take o1_snapshot before the round "
                "and o1_restore it"
            )
        if self._bounded is not None and d > self._bounded.undo_len:
            raise KvStateError(
                f"truncate_last: {d} positions, but the ring can undo {self._bounded.undo_len}"
            )
        return n

    def _push_imp(self) -> None:
        if self._n_imp == self._imp.size:
            grown = np.zeros(max(64, 2 * self._n_imp), np.float32)
            grown[: self._n_imp] = self._imp
            self._imp = grown
        self._imp[self._n_imp] = 0
        self._n_imp += 1

    def _view(self, call: str, side: str, h: int) -> F32:
        head = self._head(h)
        self._per_position(call)
        if getattr(self._stores, side + "_q8"):
            raise KvStateError(f"{call}: the rows are int8 codes in mode {self.mode}")
        return self._stores.view(side, head)
