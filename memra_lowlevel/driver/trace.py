"""The last driver calls, kept for error messages and for ``doctor``.

A ring of tuples, written without formatting: the text of an entry is made only when somebody
reads it. Recording costs well under a microsecond and allocates one small tuple.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType

__all__ = ["TraceEntry", "TraceRing", "caller"]

_PACKAGE = "memra_lowlevel"
_PREFIX = "memra_lowlevel."
_Raw = tuple[int, str, int, int, CodeType | None, int]


@dataclass(frozen=True)
class TraceEntry:
    """One recorded driver call.

    Attributes
    ----------
    t_us : float
        Microseconds since the ring was made.
    call : str
        Driver call, e.g. ``"cuLaunchKernel"``.
    stream, kernel : str
        Names (or handles in hex); empty where the call has none.
    where : str
        ``file:line`` of the innermost Python frame outside this package; empty if not recorded.
    """

    t_us: float
    call: str
    stream: str = ""
    kernel: str = ""
    where: str = ""

    def __str__(self) -> str:
        parts = [f"{self.t_us:.1f} us", self.call]
        if self.kernel:
            parts.append(self.kernel)
        if self.stream:
            parts.append(f"on {self.stream}")
        if self.where:
            parts.append(f"({self.where})")
        return " ".join(parts)


def _frame(depth: int) -> tuple[CodeType | None, int]:
    """Code object and line of the first frame outside the package."""
    try:
        frame = sys._getframe(depth)
    except ValueError:
        return None, 0
    outermost = frame
    current = frame
    while True:
        module = current.f_globals.get("__name__", "")
        if module != _PACKAGE and not module.startswith(_PREFIX):
            return current.f_code, current.f_lineno
        back = current.f_back
        if back is None:
            # A program inside the package (python -m memra_lowlevel): its outermost frame.
            return outermost.f_code, outermost.f_lineno
        outermost = current = back


def caller(depth: int = 1) -> str:
    """``file:line`` of the innermost Python frame outside this package."""
    code, line = _frame(depth + 1)
    return f"{code.co_filename}:{line}" if code is not None else ""


class TraceRing:
    """Ring of the last ``capacity`` driver calls.

    Parameters
    ----------
    capacity : int
        Entries kept; rounded up to a power of two.
    lines : bool
        Whether to look up the Python line of each call (about 0.2 us).
    names : mapping of int to str, optional
        Names of handles, shared with the driver; read when an entry is formatted.

    Notes
    -----
    Threads may record at the same time: the position comes from one atomic counter.
    """

    def __init__(
        self,
        capacity: int = 256,
        *,
        lines: bool = True,
        names: Mapping[int, str] | None = None,
    ):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        size = 1 << (capacity - 1).bit_length()
        self.capacity = size
        self.lines = lines
        self.enabled = True
        self._mask = size - 1
        self._ring: list[tuple[int, _Raw] | None] = [None] * size
        self._next = itertools.count().__next__
        self._names: Mapping[int, str] = names if names is not None else {}
        self._start_ns = time.perf_counter_ns()
        self._sources: list[Callable[[], Iterable[TraceEntry]]] = []

    def record(self, call: str, stream: int = 0, kernel: int = 0, *, depth: int = 1) -> None:
        """Note a call; ``stream`` and ``kernel`` are handles, 0 for none."""
        if not self.enabled:
            return
        code, line = _frame(depth + 1) if self.lines else (None, 0)
        i = self._next()
        self._ring[i & self._mask] = (
            i,
            (time.perf_counter_ns(), call, stream, kernel, code, line),
        )

    def add_source(self, source: Callable[[], Iterable[TraceEntry]]) -> None:
        """Merge the entries of another ring (that of the compiled module) when reading.

        The source gives entries whose ``t_us`` counts from :attr:`start_ns` on the monotonic
        clock of :func:`time.perf_counter_ns`.
        """
        self._sources.append(source)

    @property
    def start_ns(self) -> int:
        """Zero of ``t_us``, on the clock of :func:`time.perf_counter_ns`."""
        return self._start_ns

    def entries(self, last: int | None = None) -> list[TraceEntry]:
        """Return the recorded calls, oldest first; at most the ``last`` ones."""
        kept = sorted((e for e in list(self._ring) if e is not None), key=lambda e: e[0])
        out = [self._entry(raw) for _, raw in kept]
        for source in self._sources:
            out.extend(source())
        if self._sources:
            out.sort(key=lambda e: e.t_us)
        return out if last is None else out[max(0, len(out) - last) :]

    def recent(self, last: int = 8) -> tuple[str, ...]:
        """Return the last entries as text, newest last."""
        return tuple(str(e) for e in self.entries(last))

    def clear(self) -> None:
        """Forget everything recorded here (not in merged sources)."""
        for i in range(len(self._ring)):
            self._ring[i] = None

    def _name(self, handle: int) -> str:
        return self._names.get(handle, f"0x{handle:x}") if handle else ""

    def _entry(self, raw: _Raw) -> TraceEntry:
        t_ns, call, stream, kernel, code, line = raw
        where = f"{code.co_filename}:{line}" if code is not None else ""
        return TraceEntry(
            (t_ns - self._start_ns) / 1000.0, call, self._name(stream), self._name(kernel), where
        )
