"""Arenas: one block of device memory with fixed addresses, handed out in slices.

What a graph captures must stay where it is; an arena is allocated once, before the capture, and
its slices keep their addresses for as long as it lives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy.typing as npt

from .. import expect
from ..closing import Closing
from ..driver.trace import caller
from ..errors import ArgumentError, ClosedError, OutOfMemory
from .memory import Buffer
from .pool import with_retry
from .recording import forbid
from .storage import Shape, Storage, normal_shape

if TYPE_CHECKING:
    from .context import Context
    from .device import Device

__all__ = ["Arena"]


class Arena(Closing):
    """A block of device memory; made by :meth:`Device.arena`.

    Attributes
    ----------
    n_bytes : int
    used_bytes : int
        Handed out so far, padding included.

    Notes
    -----
    The slices keep the block alive; :meth:`close` ends all of them at once. Slices are never given
    back one by one: :meth:`reset` forgets them all.
    """

    def __init__(self, context: Context, n_bytes: int, *, name: str) -> None:
        n_bytes = expect.integer(f"arena {name!r}: n_bytes", n_bytes, high=None)
        forbid("cuMemAlloc", what=f"{n_bytes} bytes for arena {name!r}")
        if n_bytes <= 0:
            raise ArgumentError(
                f"arena {name!r} of {n_bytes} bytes; give a positive size.",
                name=name, expected="> 0", got=str(n_bytes),
            )  # fmt: skip
        context.reap()
        context.activate()
        driver = context.driver
        ptr = with_retry(context, lambda: driver.cuMemAlloc(n_bytes), n_bytes, name)
        # cuMemFree waits for the device, so no order with streams is needed.
        self._storage = Storage(
            context, ptr, n_bytes, "arena", name, lambda streams: driver.cuMemFree(ptr)
        )
        self._storage.kind = "arena"
        driver.name_handle(ptr, name)
        self.n_bytes, self.used_bytes = n_bytes, 0
        self._slices: list[tuple[str, int, int]] = []

    @property
    def name(self) -> str:
        """Name of the arena."""
        return self._storage.name

    @property
    def ptr(self) -> int:
        """Device address of the block."""
        return self._storage.ptr

    @property
    def device(self) -> Device:
        """Device of the memory."""
        return self._storage.context.device

    @property
    def storage(self) -> Storage:
        """The allocation; buffers taken from the arena are views of it."""
        return self._storage

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._storage.open

    @property
    def free_bytes(self) -> int:
        """Bytes that are left, before padding."""
        return self.n_bytes - self.used_bytes

    def take(
        self, shape: Shape, dtype: npt.DTypeLike, align: int = 256, name: str | None = None
    ) -> Buffer:
        """Hand out the next slice.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype-like
        align : int
            Alignment of the slice in bytes, a power of two.
        name : str, optional
            Shown by :meth:`layout` and in the audit of graphs.

        Raises
        ------
        OutOfMemory
            If the slice does not fit; nothing is handed out.
        """
        if not self._storage.open:
            raise ClosedError(f"arena {self.name!r} is closed: used at {caller()}.")
        align = expect.integer(f"arena {self.name!r}: align", align)
        if align <= 0 or align & (align - 1):
            raise ArgumentError(
                f"arena {self.name!r}: alignment {align} is no power of two.",
                name=self.name, expected="a power of two", got=str(align),
            )  # fmt: skip
        dims, kind = normal_shape(shape), expect.dtype(f"arena {self.name!r}", dtype)
        expect.name(f"arena {self.name!r}", name)
        n_bytes = math.prod(dims) * kind.itemsize
        base = self._storage.ptr
        start = -(-(base + self.used_bytes) // align) * align - base
        if start + n_bytes > self.n_bytes:
            raise OutOfMemory(
                f"arena {self.name!r}: {n_bytes} bytes for {name or 'a slice'!r} at offset {start} "
                f"do not fit in {self.n_bytes} (from {caller()}). Plan a larger arena.",
                call="Arena.take",
            )
        self.used_bytes = start + n_bytes
        self._slices.append((name or f"slice-{len(self._slices)}", start, n_bytes))
        return Buffer(self._storage, base + start, dims, kind, root=False)

    def reset(self) -> None:
        """Start handing out from the beginning again; earlier slices alias the new ones."""
        self.used_bytes = 0
        self._slices.clear()

    def layout(self) -> list[tuple[str, int, int]]:
        """Name, offset and size in bytes of each slice."""
        return list(self._slices)

    def slice_name(self, ptr: int) -> str:
        """Name of the slice that holds an address; empty if none does."""
        offset = ptr - self._storage.ptr
        for name, start, n_bytes in self._slices:
            if start <= offset < start + n_bytes:
                return name
        return ""

    def close(self) -> None:
        """End all slices; the block goes back when no graph holds it."""
        self._storage.close()

    def __repr__(self) -> str:
        used = f"{self.used_bytes} of {self.n_bytes} bytes"
        return f"<Arena {self.name!r} {used} on {self._storage.context}>"
