"""What a layer cache holds, and the rules that all of its operations share."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import KvShapeError, KvStateError

from .arith import F32
from .bounded import BoundedState
from .inputs import array_in, count, flags_in, read_only
from .modes import KvMode, WireKind
from .nystrom import O1State
from .store import Stores

__all__ = ["LayerBase"]

_generations = itertools.count(1)
_EMPTY: F32 = np.zeros(0, np.float32)


class LayerBase:
    """Fields of a layer; see :class:`~memra_lowlevel.layer_kv.LayerKvCache`."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        mode: KvMode | None = None,
        allow_ragged: bool = False,
    ):
        self._nkv = count(num_kv_heads, "num_kv_heads", 1)
        self._hd = count(head_dim, "head_dim", 1)
        for what, n in (("num_kv_heads", self._nkv), ("head_dim", self._hd)):
            if n >> 31:
                raise KvShapeError(f"{what}: {n} needs more than 31 bits")
        if mode is not None and not isinstance(mode, KvMode):
            raise KvShapeError(f"mode: {mode!r} is no KvMode")
        self._stores = Stores(self._nkv, self._hd, KvMode.from_env() if mode is None else mode)
        self.allow_ragged = bool(allow_ragged)
        self._seq_len = 0
        self._imp = _EMPTY
        self._n_imp = 0
        self._alive: npt.NDArray[np.bool_] | None = None
        self._linear_state = _EMPTY
        self._linear_scratch = _EMPTY
        self._scratch_positions = 0
        self._expected_state_len: int | None = None
        self._sinks: F32 | None = None
        self._bounded: BoundedState | None = None
        self._o1: O1State | None = None
        self._o1_error: str | None = None
        self._wire_kind = WireKind.FULL
        self._wire_layer = 0
        self._wire_identity = 0
        self._linear_wire_allowed = True
        self._base = 0
        self._tail = 0
        self._generation = next(_generations)
        self._cuts: list[tuple[int, int]] = []  # (serial, rows left) of cuts, both ascending
        self._cut_serial = self._cuts_forgotten = 0

    def __setattr__(self, name: str, value: Any) -> None:
        # A misspelt field would be set, and believed, without any effect.
        if not name.startswith("_") and name != "allow_ragged" and not hasattr(type(self), name):
            near = difflib.get_close_matches(name, dir(type(self)), 1)
            raise KvStateError(
                f"{name}: a layer has no such attribute"
                + (f"; did you mean {near[0]}" if near else "")
            )
        object.__setattr__(self, name, value)

    def __reduce__(self) -> str:
        raise KvStateError(
            "a layer cannot be pickled: its loops read its memory in place. Send export_wire() "
            "and import_wire() it there; copy() makes a copy here"
        )

    # -- geometry and counters ------------------------------------------------------------------

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self._nkv

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self._hd

    @property
    def mode(self) -> KvMode:
        """How rows are stored; survives :meth:`clear`, an import makes it ``KvMode.F32``."""
        return self._stores.mode

    @property
    def seq_len(self) -> int:
        """Positions appended and not cut, dead heads included."""
        return self._seq_len

    @seq_len.setter
    def seq_len(self, value: int) -> None:
        if self._wire_kind is not WireKind.LINEAR:
            raise KvStateError(
                "seq_len: only a layer of wire kind LINEAR, which keeps no rows, can be told its "
                "position; others count their appends"
            )
        self._seq_len = _unsigned(value, "seq_len", 63)
        self._scratch_positions = min(self._scratch_positions, self._seq_len)

    @property
    def base(self) -> int:
        """Absolute position of stored row 0; above 0 after :meth:`trim_window`."""
        return self._base

    @property
    def pos_len(self) -> int:
        """Absolute positions seen: ``base + seq_len``."""
        return self._base + self._seq_len

    @property
    def tail(self) -> int:
        """The window of the last :meth:`trim_window`; 0 where there was none."""
        return self._tail

    @property
    def generation(self) -> int:
        """A process-wide number, fresh after every change of rows other than append or truncate.

        A mirror of the rows is valid up to the fewest rows since it looked, while this number is
        the one it saw.
        """
        return self._generation

    @property
    def imp(self) -> F32:
        """Accumulated probability mass per row, read-only ``[rows]``."""
        return read_only(self._imp[: self._n_imp])

    # -- recurrent vectors ----------------------------------------------------------------------

    @property
    def linear_state(self) -> F32:
        """Recurrent state, float32; a core reads and writes it in place."""
        return self._linear_state

    @linear_state.setter
    def linear_state(self, value: Any) -> None:
        self._linear_state = self._state_vector(value, "linear_state").copy()

    @property
    def linear_scratch(self) -> F32:
        """State after the second lane of a speculative pair; empty when none is pending."""
        return self._linear_scratch

    @linear_scratch.setter
    def linear_scratch(self, value: Any) -> None:
        self._linear_scratch = array_in(value, "linear_scratch").copy()

    @property
    def expected_state_len(self) -> int | None:
        """Floats that `linear_state` must have, where a core has said so."""
        return self._expected_state_len

    @expected_state_len.setter
    def expected_state_len(self, value: int | None) -> None:
        want = None if value is None else count(value, "expected_state_len")
        if want is not None and self._linear_state.size not in (0, want):
            raise KvShapeError(
                f"expected_state_len: {want}, but the layer holds {self._linear_state.size} floats"
            )
        self._expected_state_len = want

    # -- sinks, ring, override ------------------------------------------------------------------

    @property
    def sinks(self) -> F32 | None:
        """Learned sink logits ``[num_heads]`` or None; weights, so :meth:`clear` keeps them."""
        return self._sinks

    @sinks.setter
    def sinks(self, value: Any) -> None:
        if value is None:
            self._sinks = None
            return
        sinks = array_in(value, "sinks").copy()
        if sinks.size == 0 or sinks.size % self._nkv:
            raise KvShapeError(
                f"sinks: {sinks.size} logits do not divide among {self._nkv} KV heads"
            )
        if np.isnan(sinks).any():
            raise KvStateError("sinks: a NaN would leave every weight un-normalised")
        if self._o1 is not None:
            raise KvStateError("sinks: the O(1) override of this layer would ignore them")
        sinks.flags.writeable = False
        self._sinks = sinks

    @property
    def bounded(self) -> BoundedState | None:
        """The ring of a bounded layer, else None."""
        return self._bounded

    @property
    def o1(self) -> O1State | None:
        """The O(1) override, collecting or sealed, else None."""
        return self._o1

    @property
    def o1_error(self) -> str | None:
        """Why a seal was aborted; the layer refuses work until :meth:`clear`."""
        return self._o1_error

    # -- wire fields ----------------------------------------------------------------------------

    @property
    def wire_kind(self) -> WireKind:
        """Record kind of exports, and the one imports must have."""
        return self._wire_kind

    @wire_kind.setter
    def wire_kind(self, value: int) -> None:
        try:
            kind = WireKind(value)
        except ValueError:
            kind = WireKind.FULL_TAIL
        if kind is WireKind.FULL_TAIL:
            raise KvStateError(f"wire_kind: {value!r}; a layer is FULL, LINEAR or BOUNDED")
        self._wire_kind = kind

    @property
    def wire_layer(self) -> int:
        """Layer index written to, and demanded of, the wire; below 2**32."""
        return self._wire_layer

    @wire_layer.setter
    def wire_layer(self, value: int) -> None:
        self._wire_layer = _unsigned(value, "wire_layer", 32)

    @property
    def wire_identity(self) -> int:
        """Hash of the operator's description; 0 where there is none; below 2**64."""
        return self._wire_identity

    @wire_identity.setter
    def wire_identity(self, value: int) -> None:
        self._wire_identity = _unsigned(value, "wire_identity", 64)

    def set_linear_wire_allowed(self, allowed: bool) -> None:
        """Say whether an unversioned state may be imported; delta layers say no."""
        self._linear_wire_allowed = bool(allowed)

    @property
    def linear_wire_allowed(self) -> bool:
        """Whether an unversioned state may be imported."""
        return self._linear_wire_allowed

    # -- shared rules ---------------------------------------------------------------------------

    def _usable(self, call: str) -> None:
        if self._o1_error is not None:
            raise KvStateError(
                f"{call}: the O(1) seal of this layer was aborted ({self._o1_error}); clear() it"
            )

    def _per_position(self, call: str) -> None:
        """Refuse what needs rows on a layer that keeps none."""
        self._usable(call)
        if self._bounded is not None:
            raise KvStateError(
                f"{call}: this layer is a bounded ring and keeps no rows; use bounded_step"
            )
        if self._o1 is not None and self._o1.sealed:
            raise KvStateError(f"{call}: this layer is sealed and keeps no rows; use o1_step")

    def _head(self, h: int) -> int:
        n = count(h, "kv_head")
        if n >= self._nkv:
            raise KvShapeError(f"kv_head: {n}, but the layer has {self._nkv} KV heads")
        return n

    def _liveness(self, alive: Sequence[Any] | Any | None) -> npt.NDArray[np.bool_] | None:
        """Return the mask of live heads, None when all are; missing entries mean alive."""
        if alive is None:
            return None
        given = flags_in(alive, "alive")
        if given.size > self._nkv:
            raise KvShapeError(f"alive: {given.size} entries for {self._nkv} KV heads")
        mask = np.ones(self._nkv, bool)
        mask[: given.size] = given
        return None if mask.all() else mask

    def _ragged(self, call: str) -> None:
        """Refuse what addresses rows by position where a head has fewer rows than positions."""
        rows = self._stores.rows
        if ((rows != 0) & (rows != self._n_imp)).any():
            raise KvStateError(
                f"{call}: heads have {rows.tolist()} rows for {self._n_imp} positions; rows of "
                "ragged heads have no common position"
            )

    def _state_vector(self, value: Any, name: str) -> F32:
        state = array_in(value, name)
        want = self._expected_state_len
        if want is not None and state.size not in (0, want):
            raise KvShapeError(f"{name}: {state.size} floats where the core needs {want}")
        return state

    def _drop_front(self, n: int) -> None:
        """Drop the oldest rows of every store and of the importance."""
        self._stores.drop_first(n)
        n = min(n, self._n_imp)
        self._imp = self._imp[n : self._n_imp].copy()
        self._n_imp -= n
        self._seq_len -= n

    def _note_cut(self) -> None:
        """Remember how short a truncation left the rows, for mirrors."""
        self._cut_serial += 1
        while self._cuts and self._cuts[-1][1] >= self._seq_len:
            self._cuts.pop()
        self._cuts.append((self._cut_serial, self._seq_len))
        if len(self._cuts) > 64:
            self._cuts_forgotten = self._cuts.pop(0)[0]

    def _rows_untouched_since(self, serial: int) -> int:
        """Return how many first rows no truncation has reached since the one of `serial`."""
        if serial < self._cuts_forgotten:
            return 0
        return next((rows for s, rows in self._cuts if s > serial), self._seq_len)

    def _touch(self) -> None:
        self._generation = next(_generations)


def _unsigned(value: int, name: str, bits: int) -> int:
    n = count(value, name)
    if n >> bits:
        raise KvShapeError(f"{name}: {n} needs more than {bits} bits")
    return n
