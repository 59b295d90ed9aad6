"""What the runtime knows of a capture in progress, and the refusals that protect it.

The graph layer makes the captures; streams, memory and launches only ask here whether a call is
allowed, and leave behind what the captured work uses, so that the graph can keep it alive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..driver import legality
from ..driver.table import CaptureMode
from ..driver.trace import caller
from ..errors import CaptureError, CaptureForbidden
from . import lifetime
from .lifetime import Keepable

if TYPE_CHECKING:
    from .context import Context
    from .event import Event
    from .stream import Stream

__all__ = ["Keeps", "Recording", "forbid"]

# Calls that the driver allows during a capture and this library does not, because what they do is
# hardly ever meant: a graph would replay them from stale memory, or they make a capture slow.
_POLICY = {
    "cuMemAllocAsync": (
        "it would add a memory node, whose address and lifetime nobody plans",
        "take the buffer from an Arena before the capture",
    ),
    "cuMemcpyHtoD": (
        "a graph would read pageable memory, or a staging copy of it, again at each launch",
        "copy from a PinnedBuffer, which the graph keeps alive",
    ),
    "cuMemcpyDtoH": (
        "it would have to wait for work that is only being recorded",
        "copy into a PinnedBuffer and read it after the launch",
    ),
    "cuModuleLoadData": (
        "compiling and loading in the middle of a capture blocks it, and a cold kernel was not "
        "tried before it is frozen",
        "load modules and look up their kernels before the capture",
    ),
}


class Keeps:
    """Operands and kernels held for a graph or an executable."""

    def __init__(self, operands: Iterable[Any] = (), kernels: Iterable[Any] = ()) -> None:
        self.operands: dict[int, Any] = {}
        self.kernels: dict[int, Any] = {}
        for operand in operands:
            self.add(operand)
        for kernel in kernels:
            self.add_kernel(kernel)

    def add(self, operand: Any) -> None:
        """Hold one more operand."""
        if id(operand) not in self.operands:
            self.operands[id(operand)] = operand
            if isinstance(operand, Keepable):
                operand.hold()

    def add_kernel(self, kernel: Any) -> None:
        """Hold one more kernel, and its module."""
        if kernel.handle not in self.kernels:
            self.kernels[kernel.handle] = kernel
            hold = getattr(kernel.module, "hold", None)
            if hold is not None:
                hold()

    def release(self) -> None:
        """Let go of everything."""
        operands, kernels = self.operands, self.kernels
        self.operands, self.kernels = {}, {}
        for operand in operands.values():
            if isinstance(operand, Keepable):
                operand.release()
        for kernel in kernels.values():
            release = getattr(kernel.module, "release", None)
            if release is not None:
                release()


class Recording:
    """State of one capture.

    Attributes
    ----------
    name : str
    context : Context
    origin : Stream
        The stream on which the capture began.
    mode : CaptureMode
    thread : int
        Identity of the thread that began it.
    where : str
        ``file:line`` of its beginning.
    keeps : Keeps
        Everything that the captured work uses; the graph takes it over.
    """

    def __init__(self, context: Context, name: str, origin: Stream, mode: CaptureMode) -> None:
        self.context, self.name, self.origin, self.mode = context, name, origin, mode
        self.thread = threading.get_ident()
        self._owner = threading.current_thread()
        self.where = caller(2)
        self.ended = False
        self.keeps = Keeps()
        self.streams: list[Stream] = []
        # Vector clocks: how much of each stream's work every stream has waited for. They find the
        # forks that nobody joined without asking the driver.
        self._clocks: dict[int, dict[int, int]] = {}
        self.join_stream(origin, {})

    # -- a thread that died ---------------------------------------------------------------------
    def abandoned(self) -> bool:
        """Whether the thread that began the capture has ended without ending it."""
        if self.ended or threading.current_thread() is self._owner:
            return False
        return not self._owner.is_alive()

    def drop(self) -> None:
        """End the capture without a graph, on whatever thread."""
        raise NotImplementedError

    def refuse_abandoned(self) -> None:
        """Drop the capture of a thread that has ended, and say so."""
        if not self.abandoned():
            return
        self.drop()
        raise CaptureError(
            f'the thread "{self._owner.name}", which began the capture "{self.name}" at '
            f"{self.where}, has ended without ending it (from {caller()}). The capture was dropped "
            "and its streams are usable again: repeat the call, or capture anew."
        )

    # -- forks and joins ------------------------------------------------------------------------
    def join_stream(self, stream: Stream, clock: dict[int, int]) -> None:
        """Make ``stream`` part of the capture, or let it wait for ``clock``."""
        mine = self._clocks.get(stream.serial)
        if mine is None:
            mine = self._clocks[stream.serial] = {}
            self.streams.append(stream)
            stream._enter_recording(self)
        for serial, ticks in clock.items():
            if ticks > mine.get(serial, 0):
                mine[serial] = ticks
        self.tick(stream)

    def tick(self, stream: Stream) -> None:
        """Count one operation on ``stream``."""
        self.refuse_abandoned()
        clock = self._clocks[stream.serial]
        clock[stream.serial] = clock.get(stream.serial, 0) + 1

    def clock_of(self, stream: Stream) -> dict[int, int]:
        """Copy of what ``stream`` has seen so far."""
        return dict(self._clocks[stream.serial])

    def unjoined(self) -> list[Stream]:
        """Forked streams whose last work the origin has not waited for."""
        seen = self._clocks[self.origin.serial]
        return [
            s
            for s in self.streams
            if s is not self.origin
            and self._clocks[s.serial].get(s.serial, 0) > seen.get(s.serial, 0)
        ]

    def note_wait(self, stream: Stream, event: Event) -> None:
        """``stream`` waits for ``event``, which was recorded in this capture."""
        self.join_stream(stream, event._clock)

    def release_streams(self) -> None:
        """Let all streams leave the capture."""
        for stream in self.streams:
            stream._leave_recording(self)


def _concerned(call: str, stream: Stream | None) -> Recording | None:
    """Find the capture that a call on this thread and ``stream`` would disturb."""
    if legality.rule(call).everywhere:
        return lifetime.recordings[0]
    if stream is not None and stream.recording is not None:
        return stream.recording
    me = threading.get_ident()
    for recording in lifetime.recordings:
        if recording.mode is CaptureMode.GLOBAL:
            return recording
        if recording.mode is CaptureMode.THREAD_LOCAL and recording.thread == me:
            return recording
    return None


def forbid(call: str, *, stream: Stream | None = None, what: str = "") -> None:
    """Refuse ``call`` if a capture in progress does not allow it; before the driver is asked.

    Parameters
    ----------
    call : str
        Driver call, looked up in :mod:`memra_lowlevel.driver.legality`.
    stream : Stream, optional
        The stream that it names.
    what : str
        Shown in the message.
    """
    if not lifetime.recordings:
        return
    recording = _concerned(call, stream)
    if recording is None:
        return
    recording.refuse_abandoned()
    named = stream is not None and stream.recording is not None
    if call in _POLICY:
        why, remedy = _POLICY[call]
    else:
        rule = legality.forbidden(call, recording.mode, on_captured=named)
        if rule is None:
            return
        why, remedy = rule.why, rule.remedy
    on = stream if named and stream is not None else recording.origin
    action = f"{call} ({what})" if what else call
    raise CaptureForbidden(
        f'{action} while stream "{on.name}" is being captured into "{recording.name}" '
        f"(from {caller()}): {why}. Remedy: {remedy}.",
        call=call,
    )
