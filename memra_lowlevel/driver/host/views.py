"""What check mode knows of views: which part of an allocation a launch was given.

An allocation is often cut into slices and views, and a kernel only gets addresses. The layer above
tells the host device of each view that it makes; a pointer parameter then stands for the largest
living view that begins there, and an allocation of which a launch was given some views only is
closed elsewhere. Where a launch may reach an allocation on another way, through a pointer that
nobody told of, one inside a larger parameter or one in memory, all of it stays open.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = ["Fence", "Given", "Table", "View", "Views", "given", "still_closed"]

_WORD = 8
_TABLE_BYTES = 1 << 20  # memory up to which a parameter is searched for pointers
_SWEEP = 4096


class View(Protocol):
    """A part of an allocation, as the layer above has it."""

    ptr: int
    n_bytes: int

    @property
    def closed(self) -> bool:
        """Whether it was ended."""


class Block(Protocol):
    """An allocation."""

    @property
    def ptr(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    @property
    def live(self) -> bool: ...


class Fence(NamedTuple):
    """A part of an allocation that a launch may touch."""

    block: Block
    begin: int
    end: int
    parameter: int


class Table(NamedTuple):
    """Memory that a launch was given and that may hold pointers."""

    block: Block
    ptr: int
    n_words: int


class Given(NamedTuple):
    """What a launch was given: parts of allocations, and where it may find other addresses."""

    fences: list[Fence]
    tables: list[Table]


class Views:
    """The living views, by where they begin."""

    def __init__(self) -> None:
        self.on = False
        self._at: dict[int, weakref.WeakSet[Any]] = {}
        self._sweep = _SWEEP

    def note(self, view: View) -> None:
        """Remember a view for as long as it lives."""
        self._at.setdefault(view.ptr, weakref.WeakSet()).add(view)
        if len(self._at) > self._sweep:
            self._at = {ptr: views for ptr, views in self._at.items() if views}
            self._sweep = 2 * len(self._at) + _SWEEP

    def extent(self, ptr: int) -> int | None:
        """Bytes of the largest open view that begins at an address; None if none does."""
        views = self._at.get(ptr, ())
        return max((view.n_bytes for view in views if not view.closed), default=None)


class _Blocks(Protocol):
    def __call__(self, ptr: int) -> Block | None: ...


def given(values: Sequence[bytes], views: Views, block_at: _Blocks) -> Given:
    """Say which parts of which allocations a launch with these parameters was given.

    Allocations that it was given whole, or may reach otherwise, are left out. Asked when the work
    is issued: its views need not live until it runs.
    """
    found: dict[int, list[Fence]] = {}
    tables: list[Table] = []
    opened = set()
    for i, value in enumerate(values):
        words = [value[at : at + _WORD] for at in range(0, len(value) - _WORD + 1, _WORD)]
        for word in words:
            ptr = int.from_bytes(word, "little")
            block = block_at(ptr)
            if block is None:
                continue
            n_bytes = views.extent(ptr) if len(words) == 1 else None
            rest = block.ptr + block.n_bytes - ptr
            held = rest if n_bytes is None else min(n_bytes, rest)
            if len(words) == 1 and ptr % _WORD == 0 and _WORD <= held <= _TABLE_BYTES:
                tables.append(Table(block, ptr, held // _WORD))
            if n_bytes is None or n_bytes == block.n_bytes:
                opened.add(block.ptr)
            else:
                found.setdefault(block.ptr, []).append(Fence(block, ptr, ptr + n_bytes, i))
    fences = [fence for ptr, parts in found.items() if ptr not in opened for fence in parts]
    return Given(fences, tables if fences else [])


def still_closed(given: Given) -> list[Fence]:
    """Leave out allocations to which memory of the launch holds pointers, as tables do."""
    blocks = {fence.block.ptr: fence.block for fence in given.fences}
    for table in given.tables:
        if not blocks or not table.block.live:
            continue  # what touches freed memory is found by the kernel
        words = np.ctypeslib.as_array((ctypes.c_uint64 * table.n_words).from_address(table.ptr))
        for block in list(blocks.values()):
            if ((words >= block.ptr) & (words <= block.ptr + block.n_bytes)).any():
                del blocks[block.ptr]
    return [fence for fence in given.fences if fence.block.ptr in blocks]
