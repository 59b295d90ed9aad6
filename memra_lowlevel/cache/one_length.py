"""What layers whose planes have one length share: the length, its limits, who may move it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import expect
from ..closing import Closing
from ..errors import CapacityExceeded, PlaneError
from .geometry import MAX_ROWS

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream
    from .planes import Lengths

__all__ = ["OneLength"]


class OneLength(Closing):
    """A layer with one length, here and on the device.

    Attributes
    ----------
    name : str
    max_ctx : int
    lengths : Lengths
    owns_counters : bool
        False in a group of planes, which moves the counters of all.
    """

    name: str
    max_ctx: int
    lengths: Lengths
    owns_counters: bool = False

    @property
    def len(self) -> int:
        """Valid rows; raises ``CounterUnknown`` while only the device knows."""
        return self.lengths.value

    @property
    def capacity(self) -> int:
        """Longest length, in rows."""
        return self.max_ctx

    @property
    def counters(self) -> Buffer:
        """i32[1], as :class:`~memra_lowlevel.cache.planes.Planes` has it."""
        return self.lengths.buffer

    # -- moving it --------------------------------------------------------------------------------
    def advance(self, stream: Stream, n: int) -> None:
        """Add ``n`` to the length, on the device and here; captured, at every launch.

        Raises
        ------
        PlaneError
            The layer belongs to a group, whose counters move together.
        """
        self._alone("advance")
        self.lengths.advance(stream, n)
        self._settle(stream)

    def moved(self, stream: Stream, n: int) -> None:
        """Book that a kernel which was just issued on ``stream`` moved the length by ``n``."""
        self._alone("moved")
        self.lengths.moved(stream, n)
        self._settle(stream)

    def set_len(self, stream: Stream, n: int) -> None:
        """Set the length, on the device in place and here: a rewind, or rows filled otherwise.

        Raises
        ------
        CapacityExceeded
            ``n`` is more than the plane can hold.
        RewindRefused
            Rows that are needed at ``n`` were written over.
        """
        self._alone("set_len")
        self.check_len(n)
        self.lengths.set(stream, n)

    # -- its limits -------------------------------------------------------------------------------
    def check_len(self, n: int) -> None:
        """Refuse a length that :meth:`set_len` would refuse."""
        n = expect.integer(f"{self.name}: length", n, high=None)
        if n < 0 or n > min(self.max_ctx, MAX_ROWS):
            raise CapacityExceeded(f"{self.name}: length {n} does not lie in 0..{self.max_ctx}")

    def check_headroom(self, n: int) -> None:
        """Refuse unless ``n`` more rows fit as the planes stand."""
        length, n = self.len, expect.integer(f"{self.name}: rows", n, high=None)
        if n < 0 or length + n > self.max_ctx:
            raise CapacityExceeded(
                f"{self.name}: {n} rows behind {length} do not fit in {self.max_ctx}; nothing was "
                "written. Start a longer plane or drop tokens"
            )

    # -- inside -----------------------------------------------------------------------------------
    def _settle(self, stream: Stream) -> None:
        """Follow a length that has grown; for layers that keep books beside it."""

    def _alone(self, action: str) -> None:
        if not self.owns_counters:
            raise PlaneError(
                f"{self.name}.{action}: the layer shares its counters with a group of planes; "
                f"call {action} of the group, so that all of them move together"
            )
