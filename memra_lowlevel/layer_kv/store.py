"""Rows of a layer: float32 or int8 stores, growth, the column freeze, cutting and gathering.

Layout, head-major; row ``p``, channel ``d`` of head ``h`` (``cap`` rows reserved per head)::

    k, v     float32 [nkv][cap][hd]      where the side is not quantised
    kq, vq   int8    [nkv][cap][hd]      where it is
    ks       float32 [nkv][cap][groups]  one scale per 32 channels, groups = ceil(hd / 32)
    vs       float32 [nkv][cap]          one scale per row
    kcol, vcol  float32 [nkv][hd]        frozen column fields, used where kcol_on[h], vcol_on[h]

A head has one row count for all its stores, so no cut can make them disagree.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import KvStateError

from . import compiled, loops
from .arith import F32
from .inputs import read_only
from .modes import KvMode

__all__ = ["K_GROUP", "WARM_ROWS", "Frozen", "Stores"]

K_GROUP = 32
WARM_ROWS = 64

#: Per quantised side: codes, scales and columns of every head after the freeze.
Frozen = dict[str, tuple[npt.NDArray[np.int8], F32, F32, npt.NDArray[np.uint8]]]

_FIRST_ROWS = 64
_LINE = 64


class Stores:
    """The rows of all heads of a layer.

    Parameters
    ----------
    nkv, hd : int
        Heads and channels per head.
    mode : KvMode
    """

    def __init__(self, nkv: int, hd: int, mode: KvMode):
        self.nkv, self.hd, self.mode = nkv, hd, mode
        self.groups = -(-hd // K_GROUP)
        self.k_q8, self.v_q8 = mode.k, mode.v
        self.rows: npt.NDArray[np.int64] = np.zeros(nkv, np.int64)
        self.kcol: F32 = np.zeros((nkv, hd), np.float32)
        self.vcol: F32 = np.zeros((nkv, hd), np.float32)
        self.kcol_on: npt.NDArray[np.uint8] = np.zeros(nkv, np.uint8)
        self.vcol_on: npt.NDArray[np.uint8] = np.zeros(nkv, np.uint8)
        self.cap = 0
        self._allocate(0)

    # -- growth and writing ---------------------------------------------------------------------

    def reserve(self, n_rows: int) -> None:
        """Make room for `n_rows` rows per head; doubles, so that appends cost a constant each."""
        if n_rows > self.cap:
            old = {name: getattr(self, name) for name in self.planes()}
            keep = int(self.rows.max(initial=0))
            self._allocate(max(n_rows, 2 * self.cap, _FIRST_ROWS))
            for name, plane in old.items():
                getattr(self, name)[:, :keep] = plane[:, :keep]

    def planes(self) -> tuple[str, ...]:
        """Return the names of the row stores in use."""
        return (("kq", "ks") if self.k_q8 else ("k",)) + (("vq", "vs") if self.v_q8 else ("v",))

    def encode(self, k: F32, v: F32, frozen: Frozen | None) -> dict[str, Any]:
        """Return one position ``k, v [nkv, hd]`` as the stores keep it.

        Raises
        ------
        KvStateError
            If a quantised side is not finite.
        """
        row: dict[str, Any] = {}
        for side, x, q8 in (("k", k, self.k_q8), ("v", v, self.v_q8)):
            if not q8:
                row[side] = x
                continue
            if frozen is None:
                col, on = getattr(self, side + "col"), getattr(self, side + "col_on")
            else:
                _, _, col, on = frozen[side]
            made = loops.quantise(x, col, on, K_GROUP if side == "k" else self.hd)
            if made is None:
                raise KvStateError(
                    f"append: {'keys' if side == 'k' else 'values'} hold a NaN, an infinity or a "
                    "value too large for an int8 scale, which the quantised store cannot keep"
                )
            row[side + "q"] = made[0]
            row[side + "s"] = made[1] if side == "k" else made[1][:, 0]
        return row

    def write(self, row: dict[str, Any], alive: npt.NDArray[np.bool_] | None) -> None:
        """Add an encoded position to the live heads (None: all)."""
        if alive is None and (self.rows == self.rows[0]).all():
            at = int(self.rows[0])
            self.reserve(at + 1)
            for name, x in row.items():
                getattr(self, name)[:, at] = x
            self.rows += 1
            return
        heads = np.arange(self.nkv) if alive is None else np.flatnonzero(alive)
        if heads.size:
            at_rows = self.rows[heads]
            self.reserve(int(at_rows.max()) + 1)
            for name, x in row.items():
                getattr(self, name)[heads, at_rows] = x[heads]
            self.rows[heads] += 1

    def columns_frozen(self) -> bool:
        """Return whether any head has a column field."""
        return bool(self.kcol_on.any() or self.vcol_on.any())

    def freeze(self) -> Frozen:
        """Compute the column fields and the rows quantised against them; changes nothing.

        The field of a channel is the root mean square of its stored rows, at least 1e-6. Rows are
        rebuilt from their first codes: the float32 originals are gone.

        Raises
        ------
        KvStateError
            If a field is not finite.
        """
        frozen: Frozen = {}
        for side, q8, width in (("k", self.k_q8, K_GROUP), ("v", self.v_q8, self.hd)):
            if not q8:
                continue
            codes = getattr(self, side + "q").copy()
            scales = getattr(self, side + "s").copy()
            col = np.zeros((self.nkv, self.hd), np.float32)
            on = np.zeros(self.nkv, np.uint8)
            for h in range(self.nkv):
                n = int(self.rows[h])
                if n == 0:
                    continue
                per = scales[h, :n].reshape(n, -1)
                wide = np.repeat(per, width, axis=1)[:, : self.hd]
                rows = codes[h, :n].astype(np.float32) * wide
                with np.errstate(over="ignore"):
                    squares = np.add.accumulate(rows * rows, axis=0, dtype=np.float32)[-1]
                    field = np.maximum(np.sqrt(squares / np.float32(n)), np.float32(1e-6))
                if not np.isfinite(field).all():
                    raise KvStateError(
                        f"append: the column field of head {h} overflows float32; rows this large "
                        "cannot be quantised"
                    )
                fields = np.repeat(field[None], n, axis=0)
                made = loops.quantise(rows, fields, np.ones(n, np.uint8), width)
                if made is None:
                    raise KvStateError(f"append: head {h} cannot be quantised by its column field")
                codes[h, :n] = made[0]
                scales[h, :n] = made[1].reshape(scales[h, :n].shape)
                col[h], on[h] = field, 1
            frozen[side] = (codes, scales, col, on)
        return frozen

    def apply(self, frozen: Frozen) -> None:
        """Adopt what :meth:`freeze` computed."""
        for side, (codes, scales, col, on) in frozen.items():
            getattr(self, side + "q")[...] = codes
            getattr(self, side + "s")[...] = scales
            getattr(self, side + "col")[...] = col
            getattr(self, side + "col_on")[...] = on

    # -- cutting --------------------------------------------------------------------------------

    def drop_last(self, n: int) -> None:
        """Cut the newest `n` rows of each head, as far as it has them."""
        np.maximum(self.rows - n, 0, out=self.rows)

    def drop_first(self, n: int) -> None:
        """Cut the oldest `n` rows of each head, as far as it has them."""
        for h in range(self.nkv):
            have = int(self.rows[h])
            cut = min(n, have)
            if cut:
                for name in self.planes():
                    plane = getattr(self, name)
                    plane[h, : have - cut] = plane[h, cut:have].copy()
                self.rows[h] = have - cut

    def gather(self, kept: npt.NDArray[np.int64]) -> None:
        """Keep the rows `kept` (ascending) of every head that has rows."""
        for h in range(self.nkv):
            if self.rows[h]:
                for name in self.planes():
                    plane = getattr(self, name)
                    plane[h, : kept.size] = plane[h, kept]
                self.rows[h] = kept.size

    def clear(self, mode: KvMode | None = None) -> None:
        """Drop every row and column field and the memory; adopt another mode if one is given."""
        if mode is not None:
            self.mode, self.k_q8, self.v_q8 = mode, mode.k, mode.v
        self.rows[:] = 0
        self.kcol_on[:] = 0
        self.vcol_on[:] = 0
        self._allocate(0)

    # -- reading --------------------------------------------------------------------------------

    def view(self, side: str, h: int) -> F32:
        """Return the float32 rows ``[rows, hd]`` of one side of a head, read-only."""
        return read_only(getattr(self, side)[h, : int(self.rows[h])])

    def n_bytes(self) -> int:
        """Return the bytes of the rows and column fields, by length and not by capacity."""
        hd, g = self.hd, self.groups
        per_row = (hd + 4 * g if self.k_q8 else 4 * hd) + (hd + 4 if self.v_q8 else 4 * hd)
        columns = int(self.kcol_on.sum()) + int(self.vcol_on.sum())
        return per_row * int(self.rows.sum()) + 4 * hd * columns

    def copy(self) -> Stores:
        """Return a copy that shares nothing."""
        other = Stores(self.nkv, self.hd, self.mode)
        other._allocate(self.cap)
        other.rows[:] = self.rows
        used = int(self.rows.max(initial=0))
        for name in self.planes():
            getattr(other, name)[:, :used] = getattr(self, name)[:, :used]
        for name in ("kcol", "vcol", "kcol_on", "vcol_on"):
            getattr(other, name)[...] = getattr(self, name)
        return other

    # -- inner ----------------------------------------------------------------------------------

    def _allocate(self, cap: int) -> None:
        shape = (self.nkv, cap)
        self.cap = cap
        self.k: F32 = _lines((*shape, 0 if self.k_q8 else self.hd), np.float32)
        self.v: F32 = _lines((*shape, 0 if self.v_q8 else self.hd), np.float32)
        self.kq: npt.NDArray[np.int8] = _lines((*shape, self.hd if self.k_q8 else 0), np.int8)
        self.vq: npt.NDArray[np.int8] = _lines((*shape, self.hd if self.v_q8 else 0), np.int8)
        self.ks: F32 = _lines((*shape, self.groups if self.k_q8 else 0), np.float32)
        self.vs: F32 = _lines(shape if self.v_q8 else (self.nkv, 0), np.float32)
        self.struct: Any = loops.store_struct(self) if compiled.lib is not None else None


def _lines(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an uninitialised array that begins on a cache line, as wide loads like it."""
    n_bytes = prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(n_bytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + n_bytes].view(dtype).reshape(shape)
