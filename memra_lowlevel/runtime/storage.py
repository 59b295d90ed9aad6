"""Allocations, and what every view of one has in common.

A :class:`Storage` owns an allocation and remembers every stream that used it, so that it can be
given back in order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import expect, native
from ..closing import Closing
from ..driver.trace import caller
from ..errors import ArgumentError, ClosedError
from .lifetime import Keepable

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .stream import Stream

__all__ = ["MemoryView", "PinnedStorage", "Shape", "Storage", "normal_shape", "note_use"]

Shape = int | Sequence[int]


class Storage(native.Storage, Keepable):
    """One allocation. Internal: buffers, arenas and interop make them.

    Attributes
    ----------
    ptr, n_bytes : int
    space : str
        ``"pool"``, ``"arena"``, ``"pinned"`` or ``"external"``.
    streams : set of Stream
        Streams whose work used it; it is given back after that work.
    users : weak set
        Prepared launches and executables that froze its address; told when it closes.
    """

    kind = "buffer"

    def __init__(
        self,
        context: Context,
        ptr: int,
        n_bytes: int,
        space: str,
        name: str,
        give_back: Callable[[set[Stream]], None],
    ) -> None:
        self.ptr, self.n_bytes, self.space = ptr, n_bytes, space
        self.open = True
        self.streams: set[Stream] = set()
        self.last: Stream | None = None  # one of them, noted without looking into the set
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holds = 0
        streams = self.streams
        super().__init__(context, name, lambda: give_back(streams))
        context.storages[self.serial] = self

    def hold(self) -> None:
        """Keep the memory even after ``close()``, until :meth:`release`."""
        self._holds += 1

    def release(self) -> None:
        """Undo one :meth:`hold`; the memory goes back if it was closed meanwhile."""
        self._holds -= 1
        if self._holds == 0 and not self.open:
            super().close()

    def close(self) -> None:
        """End its use; the memory goes back once no graph holds it and its work is done."""
        if self.open:
            self.open = False
            for user in list(self.users):
                user._operand_closed(self)
            if self._holds == 0:
                super().close()


class PinnedStorage(Storage):
    """Goes back when its last NumPy view is gone, not before: the views are plain arrays."""

    kind = "pinned buffer"

    def close(self) -> None:
        """End its use by name; the views go on."""
        if self.open:
            self.open = False
            for user in list(self.users):
                user._operand_closed(self)

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self._holds -= 1

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self.open or super().closed


class MemoryView(native.View, Closing):
    """What device and pinned buffers have in common: a place in a storage."""

    __slots__ = ("__weakref__", "_root", "n_bytes", "shape")
    _storage: Storage
    _closed: bool
    dtype: np.dtype[Any]
    ptr: int
    _what = "buffer"

    def __init__(
        self,
        storage: Storage,
        ptr: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        root: bool,
    ) -> None:
        self._storage, self._root, self._closed = storage, root, False
        self.ptr = ptr
        self.shape, self.dtype = shape, dtype
        self.n_bytes = math.prod(shape) * dtype.itemsize
        note = storage.context.note_view
        if note is not None:
            note(self)

    @property
    def name(self) -> str:
        """Name of the storage."""
        return self._storage.name

    @property
    def device(self) -> Device:
        """Device that the memory belongs to."""
        return self._storage.context.device

    @property
    def storage(self) -> Storage:
        """The allocation this is a view of."""
        return self._storage

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def closed(self) -> bool:
        """Whether this view or the memory below it was closed."""
        return self._closed or not self._storage.open

    def close(self) -> None:
        """End this view; the view that allocated the memory gives it back.

        Memory that a graph uses is given back when the last such graph closes.
        """
        if not self._closed:
            self._closed = True
            if self._root:
                self._storage.close()

    def _check_open(self, given_as: str = "") -> None:
        """Refuse a closed one; ``given_as`` names the parameter that it was given for."""
        if self._closed or not self._storage.open:
            raise ClosedError(
                f"{given_as}{': ' if given_as else ''}{self._what} {self.name!r} (made at "
                f"{self._storage.where or '?'}) is closed: used at {caller()}. Keep it open for as "
                "long as it is used."
            )

    def _slice(
        self, offset_bytes: int, shape: Shape, dtype: npt.DTypeLike
    ) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
        self._check_open()
        shape, kind = normal_shape(shape), expect.dtype("view", dtype)
        offset_bytes = expect.integer("view: offset_bytes", offset_bytes)
        end = offset_bytes + math.prod(shape) * kind.itemsize
        if offset_bytes < 0 or end > self.n_bytes or (self.ptr + offset_bytes) % kind.alignment:
            raise ArgumentError(
                f"view of {self._what} {self.name!r}: bytes [{offset_bytes}, {end}) as {kind} do "
                f"not lie, aligned to {kind.alignment}, inside its {self.n_bytes} bytes.",
                name=self.name,
                expected=f"at most {self.n_bytes} bytes",
                got=f"[{offset_bytes}, {end})",
            )
        return self.ptr + offset_bytes, shape, kind

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<{type(self).__name__} {self.name!r} {self.dtype}{list(self.shape)} "
            f"on {self._storage.context}{state}>"
        )


def note_use(stream: Stream, *storages: Storage) -> None:
    """Remember that work on ``stream`` uses ``storages``; a capture keeps them alive."""
    recording = stream.recording
    for storage in storages:
        storage.streams.add(stream)
        if recording is not None:
            recording.keeps.add(storage)
    if recording is not None:
        recording.tick(stream)
    else:
        native.note_issued(stream.cell)


def normal_shape(shape: Shape) -> tuple[int, ...]:
    """``shape`` as a tuple of non-negative ints."""
    if isinstance(shape, int | np.integer):
        shape = (shape,)
    elif not isinstance(shape, tuple | list):
        raise expect.refusal("shape", shape, "an int, or a tuple of ints")
    dims = tuple(expect.integer(f"shape {tuple(shape)}: an extent", d) for d in shape)
    if any(d < 0 for d in dims):
        raise ArgumentError(
            f"shape {dims} has a negative extent (from {caller()}). Extents are 0 or more.",
            name="shape",
            expected="extents >= 0",
            got=str(dims),
        )
    return dims
