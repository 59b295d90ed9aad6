"""Exact attention over the stored rows of a layer."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from memra_lowlevel.errors import KvShapeError, KvStateError

from . import loops, plain
from .arith import F32, dot32
from .base import LayerBase
from .inputs import array_in, array_inout, count, scalar

__all__ = ["AttendMethods", "attention_head", "default_scale"]

_NO_ROWS: F32 = np.zeros(0, np.float32)


@functools.lru_cache(maxsize=64)
def default_scale(head_dim: int) -> np.float32:
    """Return ``1 / sqrt(head_dim)``: a float32 root, then a float32 division."""
    scale: np.float32 = np.float32(np.float32(1.0) / np.sqrt(np.float32(head_dim)))
    return scale


def attention_head(q: Any, k: Any, v: Any) -> tuple[F32, F32]:
    """Attend one query to the rows of one head: the reference that ``attend`` equals bit for bit.

    Parameters
    ----------
    q : float32 [head_dim]
    k, v : float32 [rows, head_dim]

    Returns
    -------
    out : float32 [head_dim]
    probs : float32 [rows]

    Raises
    ------
    KvShapeError
        For other shapes or dtypes.
    KvStateError
        If a score is not finite.
    """
    query = array_in(q, "q")
    hd = query.size
    if hd == 0:
        raise KvShapeError("q: 0 elements where at least one channel is needed")
    keys = array_in(k, "k")
    if keys.size % hd:
        raise KvShapeError(f"k: {keys.size} elements do not divide in rows of {hd}")
    rows = array_in(v, "v", keys.size).reshape(-1, hd)
    keys = keys.reshape(-1, hd)
    if not len(keys):
        return np.zeros(hd, np.float32), _NO_ROWS
    with np.errstate(all="ignore"):
        scores = dot32(query[None], keys) * default_scale(hd)
    probs = plain.softmax(scores[None], None)
    if probs is None:
        raise _not_finite("attention_head")
    return plain.values(probs, rows, np.zeros((1, hd), np.float32))[0], probs[0]


class AttendMethods(LayerBase):
    """Attention of a layer; reading only, so threads may attend to one layer at the same time."""

    def attend(self, q: Any, kv_head: int) -> tuple[F32, F32]:
        """Attend one query to every row of a head, scale ``1 / sqrt(head_dim)``.

        No window, no softcap and no sinks.

        Parameters
        ----------
        q : float32 [head_dim]
        kv_head : int

        Returns
        -------
        out : float32 [head_dim]
        probs : float32 [rows]

        Raises
        ------
        KvShapeError
            For a wrong shape, dtype or head.
        KvStateError
            On a bounded, sealed or latched layer, and if a score is not finite.
        """
        self._per_position("attend")
        h = self._head(kv_head)
        query = array_in(q, "q", self._hd)
        stored = int(self._stores.rows[h])
        out = np.zeros(self._hd, np.float32)
        probs = np.empty((1, stored), np.float32)
        if stored and not loops.attend(
            self._stores,
            h,
            query.reshape(1, -1),
            stored,
            0,
            default_scale(self._hd),
            np.float32(0),
            None,
            out,
            _NO_ROWS,
            probs,
        ):
            raise _not_finite("attend")
        return out, probs[0]

    def attend_group(
        self,
        q_group: Any,
        kv_head: int,
        out: Any,
        imp_acc: Any = None,
        scale: float | None = None,
        first: int = 0,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> None:
        """Attend a group of query heads to every row: :meth:`attend_group_upto` without a bound."""
        self._attend(
            "attend_group", q_group, kv_head, out, imp_acc, scale, first, softcap, None, sinks
        )

    def attend_group_upto(
        self,
        q_group: Any,
        kv_head: int,
        out: Any,
        imp_acc: Any = None,
        scale: float | None = None,
        first: int = 0,
        softcap: float | None = None,
        upto: int | None = None,
        sinks: Any = None,
    ) -> None:
        """Attend a group of query heads to rows ``[first, upto)`` of their KV head.

        In float32 mode, rows appended later change no bit of the result, so a chunk may be
        appended whole and attended row by row. In quantised mode that holds unless the chunk
        crosses the freeze of the columns; :meth:`chunk_rows` says how far it may go.

        Parameters
        ----------
        q_group : float32 [n * head_dim]
            Query heads that share the KV head.
        kv_head : int
        out : float32 [n * head_dim]
            Overwritten in place; zeros while the head has no rows.
        imp_acc : float32 [any length], optional
            The probabilities of row p, head by head, are added to element p.
        scale : float, optional
            None is ``1 / sqrt(head_dim)``.
        first : int
            First visible row; at least the newest row stays visible.
        softcap : float, optional
            Scores become ``softcap * tanh(score / softcap)``; None or 0 leaves them.
        upto : int, optional
            Rows that exist for this call; None, or more than there are, means all.
        sinks : float32 [n], optional
            Logits that take part in the normalisation only.

        Raises
        ------
        KvShapeError
            For wrong shapes, dtypes or heads.
        KvStateError
            On a bounded, sealed or latched layer; for a NaN sink or a negative softcap; if a score
            is not finite; if another thread changes the layer meanwhile; and
            while an O(1) override collects, for anything its later steps would ignore.
            `out` and `imp_acc` are untouched then.
        """
        self._attend(
            "attend_group_upto", q_group, kv_head, out, imp_acc, scale, first, softcap, upto, sinks
        )

    def _attend(
        self,
        call: str,
        q_group: Any,
        kv_head: int,
        out: Any,
        imp_acc: Any,
        scale: float | None,
        first: int,
        softcap: float | None,
        upto: int | None,
        sinks: Any,
    ) -> None:
        self._per_position(call)
        h = self._head(kv_head)
        hd = self._hd
        query = array_in(q_group, "q_group")
        if query.size % hd:
            raise KvShapeError(f"q_group: {query.size} elements do not divide in heads of {hd}")
        n = query.size // hd
        target = array_inout(out, "out", query.size)
        imp = _NO_ROWS if imp_acc is None else array_inout(imp_acc, "imp_acc")
        if imp.size and np.may_share_memory(imp, target):
            raise KvShapeError("out, imp_acc: must not overlap")
        standard = default_scale(hd)
        factor = standard if scale is None else scalar(scale, "scale")
        cap = np.float32(0) if softcap is None else scalar(softcap, "softcap")
        if cap < 0:
            raise KvStateError(f"{call}: softcap {softcap!r} is negative; 0 leaves the scores")
        logits = _NO_ROWS if sinks is None else array_in(sinks, "sinks")
        if logits.size not in (0, n):
            raise KvShapeError(f"sinks: {logits.size} logits for {n} query heads")
        if logits.size and np.isnan(logits).any():
            raise KvStateError(f"{call}: a NaN sink would leave every weight un-normalised")
        begin = count(first, "first")
        stored = int(self._stores.rows[h])
        if upto is not None:
            stored = min(stored, count(upto, "upto"))
        if self._o1 is not None:
            _refuse_ignored(
                call, bool(factor != standard), bool(cap > 0), begin > 0, logits.size > 0
            )
        if n == 0:
            return
        if stored == 0:
            target[:] = 0
            return
        if not loops.attend(
            self._stores,
            h,
            query.reshape(n, hd),
            stored,
            min(begin, stored - 1),
            factor,
            cap,
            logits if logits.size else None,
            target,
            imp,
            None,
        ):
            raise _not_finite(call)


def _refuse_ignored(call: str, scale: bool, softcap: bool, window: bool, sinks: bool) -> None:
    named = (("scale", scale), ("softcap", softcap), ("window (first)", window), ("sinks", sinks))
    ignored = [name for name, on in named if on]
    if ignored:
        raise KvStateError(
            f"{call}: this layer collects for an O(1) override, whose steps know no "
            f"{', '.join(ignored)}; attend without, or clear() the override"
        )


def _not_finite(call: str) -> KvStateError:
    return KvStateError(
        f"{call}: a score is NaN or infinite; the query or a stored key is not finite, or their "
        "product overflows float32"
    )
