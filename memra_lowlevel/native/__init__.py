"""The compiled launch path, where it was built; without it Python does the same, more slowly.

``available()`` tells whether it is used, ``reason()`` why not. The rest is for the runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..driver.table import Driver

__all__ = ["Gate", "StreamCell", "available", "note_context", "reason", "without"]

ffi: Any = None
lib: Any = None
_reason = ""
try:
    from ._launch import ffi, lib  # type: ignore[import-not-found,no-redef]
except ImportError as error:
    _reason = f"memra_lowlevel.native._launch was not built ({error})"

_VERSION = 8
if lib is not None and getattr(lib, "MLL_VERSION", 0) != _VERSION:
    _reason = "memra_lowlevel.native._launch is older than the sources; build it again"
    ffi = lib = None


class _Absent:
    """Stands for the compiled types where the module was not built."""


def _type(graph: bool) -> Any:
    """Type whose instances hold a plan or an executable."""
    if lib is None:
        return _Absent
    return ctypes.cast(int(lib.mll_object_type(graph)), ctypes.py_object).value


class _AbsentView:
    """Holds the attributes of a buffer that compiled code would read."""

    __slots__ = ("_closed", "_storage", "dtype", "ptr")


class _AbsentStorage:
    """Holds the attributes of an allocation that compiled code would read."""

    __slots__ = ("context", "last", "open")


def _held(storage: bool) -> Any:
    """Type that a buffer, or its allocation, has as base."""
    if lib is None:
        return _AbsentStorage if storage else _AbsentView
    return ctypes.cast(int(lib.mll_held_type(storage)), ctypes.py_object).value


Plan = _type(False)
Exec = _type(True)
if TYPE_CHECKING:

    class View:
        """Base of buffers."""

    class Storage:
        """Base of allocations."""

else:
    View, Storage = _held(False), _held(True)

_enabled = True
_ids = itertools.count(1)


def available() -> bool:
    """Whether the compiled launch path is there and not switched off."""
    return lib is not None and _enabled


def reason() -> str:
    """Why :func:`available` is false; empty if it is true."""
    return "" if available() else (_reason or "switched off by native.without()")


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Use the pure-Python path for everything prepared or instantiated inside the block."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def note_context(ctx: int) -> None:
    """Tell the compiled path which context is current in this thread."""
    if lib is not None:
        lib.mll_note_context(ctx)


def cell_of(owner: Any, kind: str) -> Any:
    """Give the ``mll_plan`` or ``mll_exec`` inside an instance of :data:`Plan` or :data:`Exec`."""
    return ffi.cast(f"{kind} *", lib.mll_object_address(id(owner)))


class Gate:
    """Device record of the compiled path: entry points, call counts, trace ring.

    Registers itself as a source of the driver's counts and trace.
    """

    def __init__(
        self, driver: Driver, ctx: int, make_entry: Callable[..., Any], capacity: int = 256
    ) -> None:
        self._make_entry = make_entry
        self.cell = cell = ffi.new("mll_device *")
        self._ring = ffi.new("mll_entry[]", capacity)
        cell.launch = ffi.cast("mll_launch_fn", driver.entry_point("cuLaunchKernel"))
        cell.graph_launch = ffi.cast("mll_graph_fn", driver.entry_point("cuGraphLaunch"))
        cell.ctx, cell.mask, cell.ring = ctx, capacity - 1, self._ring
        self._driver = driver
        self._names: dict[int, tuple[str, str]] = {}
        # One pair of (raw counter, nanoseconds); the second pair is taken when the ring is read.
        self._origin = (int(lib.mll_raw()), time.perf_counter_ns())
        for hook, source in (
            (getattr(driver, "add_count_source", None), self.counts),
            (getattr(driver.trace, "add_source", None), self.entries),
        ):
            if hook is not None:
                hook(source)

    def number(self, name: str, where: str) -> int:
        """Give a plan an id, under which the ring names it."""
        number = next(_ids)
        self._names[number] = (name, where)
        return number

    def forget(self, number: int) -> None:
        """Drop the name of a plan that is gone."""
        self._names.pop(number, None)

    def counts(self) -> Mapping[str, int]:
        """Driver calls made by the compiled path."""
        return {
            "cuLaunchKernel": int(self.cell.next) - int(self.cell.n_graph_launches),
            "cuGraphLaunch": int(self.cell.n_graph_launches),
        }

    @property
    def n_unlocked(self) -> int:
        """Launches around which the interpreter lock was given away."""
        return int(self.cell.n_unlocked)

    @property
    def n_refused(self) -> int:
        """Launches that the compiled path handed back to Python."""
        return int(self.cell.n_refused)

    def entries(self) -> Iterable[Any]:
        """Give the ring as trace entries, oldest first."""
        if self.cell.closed:
            return
        raw0, ns0 = self._origin
        raw1, ns1 = int(lib.mll_raw()), time.perf_counter_ns()
        scale = (ns1 - ns0) / max(1, raw1 - raw0)
        end, size = int(self.cell.next), int(self.cell.mask) + 1
        name_of = getattr(self._driver, "handle_name", hex)
        for i in range(max(0, end - size), end):
            e = self._ring[i % size]
            name, where = self._names.get(int(e.plan), ("?", ""))
            t_us = (ns0 + (int(e.raw) - raw0) * scale - self._driver.trace.start_ns) / 1000.0
            call = "cuGraphLaunch" if e.call else "cuLaunchKernel"
            yield self._make_entry(t_us, call, name_of(int(e.stream)), name, where)

    def close(self) -> None:
        """Refuse every later launch through plans of this device."""
        self.cell.closed = 1


def StreamCell(gate: Gate, handle: int, *, shared: bool = False) -> Any:
    """Record of a stream for the compiled path; ``shared`` where others put work on it too."""
    cell = ffi.new("mll_stream *")
    cell.handle, cell.device, cell.shared = ffi.cast("void *", handle), gate.cell, shared
    return cell


def address(cell: Any) -> int:
    """Address of a record, for the compiled methods that take one."""
    return int(ffi.cast("uintptr_t", cell))


def issued(cell: Any) -> int:
    """Count of the calls that put work on a stream so far."""
    return 0 if cell is None else int(cell.issued)


def note_issued(cell: Any) -> None:
    """Count a call that put work on a stream on another way than through the compiled path."""
    if cell is not None:
        cell.issued += 1


def note_seen(cell: Any, mark: int) -> None:
    """Tell the compiled path that everything up to ``mark`` of :func:`issued` is done."""
    if cell is not None and mark > cell.seen:
        cell.seen = mark
