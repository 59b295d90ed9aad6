"""What one launch of a graph does to a device counter, and the host's picture of the counter.

The picture is an interval: a counter moved by amounts the host knows has ``lower == upper``; where
a kernel decides, the interval widens until the counter is read back. Room is checked against its
upper end, so a launch that passes cannot run over whatever the device decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import native
from ..errors import CapacityExceeded, CounterUnknown

if TYPE_CHECKING:
    from .counters import DeviceCounter

__all__ = ["Effect", "Mirror", "new_mirror"]

SYNC_REMEDY = (
    "Call sync_counters(stream, [counter]) (the counter of a KvLayer or a Cache is its "
    "lengths.counter)"
)
"""What to do where only the device knows a counter."""


@dataclass
class Mirror:
    """Host picture of a counter; the compiled path has a structure of the same fields.

    Attributes
    ----------
    lower, upper : int
        The value lies between them, both included.
    capacity : int
        Largest value that is allowed; negative for none.
    known : int
        1 if ``lower`` is the value.
    bounded : int
        1 if ``upper`` means anything.
    """

    lower: int = 0
    upper: int = 0
    capacity: int = -1
    known: int = 1
    bounded: int = 1


def new_mirror(capacity: int) -> Any:
    """Make a :class:`Mirror`, or the compiled path's structure where that exists."""
    if native.lib is None:
        return Mirror(capacity=capacity)
    cell = native.ffi.new("mll_counter *")
    cell.capacity, cell.known, cell.bounded = capacity, 1, 1
    return cell


@dataclass
class Effect:
    """What the work recorded in a graph does to one counter, in order.

    Attributes
    ----------
    counter : DeviceCounter
    need : int
        Rows beyond the value at launch that the work touches before the first recorded set.
    low : int
        Deepest excursion below the value at launch before the first recorded set.
    has_set, set_to
        Whether the work sets the counter, and to what.
    add_lower, add_upper : int
        Amounts added after the set, or after the launch; they differ where a kernel decides.
    bounded : bool
        Whether ``add_upper`` is an upper bound.
    """

    counter: DeviceCounter
    need: int = 0
    low: int = 0
    has_set: bool = False
    set_to: int = 0
    add_lower: int = 0
    add_upper: int = 0
    bounded: bool = True
    known: bool = True

    @property
    def advance(self) -> int | None:
        """Amount that one launch adds; None if it sets the counter or a kernel decides."""
        return self.add_lower if self.known and not self.has_set else None

    def note_need(self, n: int) -> None:
        """Note that rows ``[value, value + n)`` are touched at this point of the work."""
        if not self.has_set:
            self.need = max(self.need, self.add_upper + n)
            return
        capacity = int(self.counter.mirror.capacity)
        if 0 <= capacity < self.set_to + self.add_upper + n:
            raise _no_room(self.counter, self.set_to + self.add_upper, n, capacity)

    def note_advance(self, lower: int, upper: int, need: int | None = None) -> None:
        """Note a move by an amount in ``[lower, upper]``; ``need`` rows must have room."""
        self.note_need(upper if need is None else need)
        self.add_lower += lower
        self.add_upper += upper
        self.known = self.known and lower == upper
        if not self.has_set:
            self.low = min(self.low, self.add_lower)

    def note_set(self, value: int) -> None:
        """Note that the counter is set to ``value``."""
        self.has_set, self.set_to = True, value
        self.add_lower = self.add_upper = 0
        self.known = self.bounded = True

    def note_unbounded(self) -> None:
        """Note that the device decides and the host knows no bound."""
        self.known = self.bounded = False

    def then(self, other: Effect) -> None:
        """Append what another piece of work does."""
        if not other.has_set or other.need or other.low:
            self.note_need(other.need)
            if not self.has_set:
                self.low = min(self.low, self.add_lower + other.low)
        if other.has_set:
            self.note_set(other.set_to)
        self.add_lower += other.add_lower
        self.add_upper += other.add_upper
        self.known = self.known and other.known
        self.bounded = self.bounded and other.bounded
        if not self.has_set:
            self.low = min(self.low, self.add_lower)

    def check(self) -> None:
        """Refuse a launch for which the counter has no room; by the counter's name."""
        c = self.counter.mirror
        if self.need > 0 and c.capacity >= 0:
            if not c.bounded:
                raise CounterUnknown(
                    f"counter {self.counter.name!r}: the device decided its value and no bound is "
                    f"known, so room cannot be checked. {SYNC_REMEDY} first."
                )
            if c.upper + self.need > c.capacity:
                raise _no_room(self.counter, int(c.upper), self.need, int(c.capacity))
        if c.lower + self.low < 0:
            raise CapacityExceeded(
                f"counter {self.counter.name!r}: at {c.lower}, the work takes it {-self.low} "
                "lower, below zero. Nothing was launched."
            )

    def apply(self) -> None:
        """Move the host's picture by one launch."""
        c = self.counter.mirror
        if self.has_set:
            c.lower = c.upper = self.set_to
            c.known = c.bounded = 1
        c.lower = max(0, c.lower + self.add_lower)
        c.upper += self.add_upper
        c.known = int(c.known and self.known)
        c.bounded = int(c.bounded and self.bounded)

    def fill(self, cell: Any) -> None:
        """Write the effect into the compiled path's structure."""
        cell.counter = self.counter.mirror
        cell.need, cell.low = self.need, self.low
        cell.has_set, cell.set_to = self.has_set, self.set_to
        cell.add_lower, cell.add_upper = self.add_lower, self.add_upper
        cell.known, cell.bounded = self.known, self.bounded

    def __str__(self) -> str:
        parts = []
        if self.has_set:
            parts.append(f"= {self.set_to}")
        if not self.bounded:
            parts.append("+ ?")
        elif self.add_lower != self.add_upper:
            parts.append(f"+ {self.add_lower} … {self.add_upper}")
        elif self.add_lower or not parts:
            parts.append(f"{'-' if self.add_lower < 0 else '+'} {abs(self.add_lower)}")
        return f"{self.counter.name} {' '.join(parts)}, needs {self.need}"


def _no_room(counter: DeviceCounter, at: int, n: int, capacity: int) -> CapacityExceeded:
    return CapacityExceeded(
        f"counter {counter.name!r}: at {at} of {capacity}, {n} more do not fit. Nothing was "
        "launched; rewind, or allocate a larger plane."
    )
