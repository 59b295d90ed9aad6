"""What layers whose planes have one length share: the length, its limits, who may move it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import expect
from ..closing import Closing
from ..errors import CapacityExceeded, ClosedError, PlaneError
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
        self.check_open("advance")
        self.check_advance(stream, n)
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
        CapacityExceeded, RingLapped
            ``n`` is more than the plane can hold, at the present base of a ring.
        RewindRefused
            Rows that are needed at ``n`` were written over.
        """
        self._alone("set_len")
        self.check_open("set_len")
        self.check_len(n)
        self.lengths.set(stream, n)

    # -- its limits -------------------------------------------------------------------------------
    def check_len(self, n: int) -> None:
        """Refuse a length that :meth:`set_len` would refuse."""
        n = expect.integer(f"{self.name}: length", n, 0, None)
        if n > min(self.max_ctx, MAX_ROWS):
            raise CapacityExceeded(
                f"{self.name}: length {n} does not lie in 0..{self.max_ctx}; nothing was written. "
                "Set a length that the plane holds, or start a longer plane (max_ctx)"
            )

    def check_open(self, call: str) -> None:
        """Refuse to go on with a layer whose planes are closed."""
        if self.lengths.buffer.closed:
            raise ClosedError(
                f"{self.name}.{call}: the planes of the layer were closed; make a new one"
            )

    def check_advance(self, stream: Stream, n: int) -> None:
        """Refuse an advance by more rows than lie in the planes, where the length is known."""

    def check_reads(self, stream: Stream, call: str, n: int, counted: bool) -> None:
        """Refuse to attend ``n`` rows that the planes cannot hold at the length that is known.

        Captured work is not looked at: the length that counts is that of each launch.
        """
        self.check_open(call)
        counter = self.lengths.counter
        if stream.recording is not None or not counter.known:
            return
        length = counter.value
        if counted and length < n:
            raise PlaneError(
                f"{self.name}.{call}: counted=True says that the length counts the {n} rows, but "
                f"it is {length}; advance first, or leave counted out. Nothing was launched"
            )
        end = length if counted else length + n
        if end > self.max_ctx:
            raise CapacityExceeded(
                f"{self.name}.{call}: {n} rows behind {length} lie beyond the {self.max_ctx} rows "
                "of the plane. Say counted=True if the length counts them already, or start a "
                "longer plane. Nothing was launched"
            )
        self.check_end(call, end)

    def check_end(self, call: str, end: int) -> None:
        """Refuse an exclusive end up to which the planes cannot hold rows; for rings."""

    def check_headroom(self, n: int) -> None:
        """Refuse unless ``n`` more rows fit as the planes stand."""
        self.check_open("check_headroom")
        length, n = self.len, expect.integer(f"{self.name}: rows", n, 0, None)
        if length + n > self.max_ctx:
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
