"""One run of the benchmark: where it measures, how, and what it has found so far."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from .clock import graph_us, sustained_us
from .result import Row

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.stream import Stream
    from .ceilings import Ceilings

__all__ = ["OTHERS", "SMALL_NOTE", "Run", "loaded"]

SMALL_NOTE = "host device: reduced sizes, shows that it runs"

OTHERS = ("cuda.core", "cupy", "torch", "triton", "numba", "flashinfer", "flash_attn_interface")
"""Modules of other libraries: what they leave in a context makes nodes of a graph slower."""


def loaded() -> list[str]:
    """Which of :data:`OTHERS` this process has imported."""
    return [name for name in OTHERS if name in sys.modules]


@dataclass
class Run:
    """What the measuring functions of all groups share.

    Attributes
    ----------
    device : Device
    stream : Stream
    peers : bool
        Measure other libraries too.
    small : bool
        Reduced sizes and few samples: the host device, where no time means anything.
    group : str
        Group that is being measured.
    rows : list of Row
    notes : list of str
        What was left out, and why.
    tell : callable
        Called with each new row.
    """

    device: Device
    stream: Stream
    peers: bool = True
    small: bool = False
    group: str = ""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tell: Callable[[Row], None] = lambda row: None
    _ceilings: Ceilings | None = None
    _later: list[tuple[str, Callable[[], None]]] = field(default_factory=list)

    @property
    def ceilings(self) -> Ceilings:
        """What the device allows, measured when it is first asked for."""
        if self._ceilings is None:
            from .ceilings import measure

            self._ceilings = measure(self)
        return self._ceilings

    def add(self, row: Row) -> Row:
        """Keep a row; on the host device one without a note says that its time means nothing."""
        row.group = row.group or self.group
        if row.loaded is None:
            row.loaded = loaded()
        if self.small and not row.note:
            row.note, row.floor, row.goal = SMALL_NOTE, None, None
        self.rows.append(row)
        self.tell(row)
        return row

    def later(self, measure: Callable[[], None]) -> None:
        """Measure other libraries when everything that needs none is done, on a GPU, if at all.

        What one of them leaves in the process is then in no row of ours.
        """
        if self.peers and self.device.kind == "cuda":
            self._later.append((self.group, measure))

    def take_later(self) -> list[tuple[str, Callable[[], None]]]:
        """Give what :meth:`later` put off, with the group that it belongs to, and forget it."""
        put_off, self._later = self._later, []
        return put_off

    def timed(self, calls: Sequence[Callable[[], None]], n_samples: int = 15) -> list[float]:
        """Time calls on the device, in µs each; see :func:`~.clock.graph_us`."""
        return graph_us(self.device, self.stream, calls, n_samples, small=self.small)

    def sustained(self, calls: Sequence[Callable[[], None]]) -> float:
        """Time calls on a device that gets no rest, in µs; see :func:`~.clock.sustained_us`."""
        return median(sustained_us(self.device, self.stream, calls))

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Turn the failure of another library into a note; our own are never guarded."""
        try:
            yield
        except ModuleNotFoundError as error:
            self.notes.append(f"{name}: not installed ({error.name})")
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.notes.append(f"{name}: {type(error).__name__}: {first}"[:200])
