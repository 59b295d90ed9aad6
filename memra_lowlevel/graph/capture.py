"""Stream capture as a context manager."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import expect
from ..driver.table import CaptureMode, CaptureStatus
from ..driver.trace import caller
from ..errors import (
    CaptureError,
    CaptureForbidden,
    CaptureInvalidated,
    CaptureUnjoined,
    CaptureWrongThread,
    MemraError,
)
from ..runtime import lifetime
from ..runtime.recording import Recording
from ..runtime.stream import Stream, expect_stream
from .effects import Effect
from .graph import Graph

if TYPE_CHECKING:
    from .counters import DeviceCounter
    from .executable import GraphExec

__all__ = ["Capture"]


class Capture(Recording):
    """A capture in progress; made by :meth:`Stream.capture`, found as ``stream.recording``.

    Entering begins the capture and gives the :class:`Graph` that it fills; leaving always ends it,
    so the stream is usable afterwards whatever happened. Work issued to the stream, and to streams
    that wait for its events, is recorded instead of run.

    Attributes
    ----------
    graph : Graph
    effects : dict
        What the recorded work does to device counters.
    checks : list of callable
        Called with the executable before each launch; raise to refuse it.
    """

    def __init__(self, stream: Stream, name: str, mode: CaptureMode) -> None:
        if not isinstance(mode, CaptureMode):
            raise expect.refusal("capture: mode", mode, "a CaptureMode")
        if not isinstance(name, str):
            raise expect.refusal("capture: name", name, "a str")
        self._args = (stream, name, mode)
        # Nothing is to be ended before it has begun.
        self.ended = True
        self.effects: dict[int, Effect] = {}
        self.checks: list[Callable[[GraphExec], None]] = []

    def __enter__(self) -> Graph:
        stream, name, mode = self._args
        stream._check_open()
        if stream.recording is not None:
            stream.recording.refuse_abandoned()
            raise CaptureForbidden(
                f'cuStreamBeginCapture on stream "{stream.name}", which is being captured into '
                f'"{stream.recording.name}" already (from {caller()}). End that capture first.',
                call="cuStreamBeginCapture",
            )
        context = stream.context
        context.reap()
        with lifetime.gate:
            context.ensure()
            context.driver.cuStreamBeginCapture(stream.handle, mode)
            super().__init__(context, name, stream, mode)
            lifetime.recordings.append(self)
        self.graph = Graph(context.device, name, _recording=self)
        return self.graph

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.ended:
            return
        if self.mode is not CaptureMode.RELAXED and threading.get_ident() != self.thread:
            self.refuse_abandoned()
            raise CaptureWrongThread(
                f'capture "{self.name}" was begun at {self.where} by another thread and can be '
                f"ended only there (from {caller()}). Leave the with block on the thread that "
                "entered it."
            )
        handle, refusal = self._end()
        if error is not None or refusal is not None:
            self.graph._fail(handle)
        else:
            self.graph._complete(handle, self)
        self.context.reap()
        if error is None and refusal is not None:
            raise refusal

    # -- what the work does to counters ---------------------------------------------------------
    def effect_on(self, counter: DeviceCounter) -> Effect:
        """Give the effect noted so far on a counter."""
        found = self.effects.get(counter.serial)
        if found is None:
            found = self.effects[counter.serial] = Effect(counter)
            self.keeps.add(counter)
        return found

    def note_need(self, counter: DeviceCounter, n: int) -> None:
        """Note that the work touches ``n`` rows from the counter on."""
        self.effect_on(counter).note_need(n)

    def note_advance(
        self, counter: DeviceCounter, n: int, need: int | None = None, *, at_most: int | None = None
    ) -> None:
        """Note that the work moves the counter by ``n``, or by ``n … at_most`` as a kernel decides.

        ``need`` rows from the counter on must have room; by default as many as it moves.
        """
        self.effect_on(counter).note_advance(n, n if at_most is None else at_most, need)

    def note_set(self, counter: DeviceCounter, value: int) -> None:
        """Note that the work sets the counter."""
        self.effect_on(counter).note_set(value)

    def note_unbounded(self, counter: DeviceCounter) -> None:
        """Note that the work moves the counter by an amount without a known bound."""
        self.effect_on(counter).note_unbounded()

    def note_effects(self, effects: dict[int, Effect]) -> None:
        """Note that the work launches another graph, with these effects."""
        for effect in effects.values():
            self.effect_on(effect.counter).then(effect)

    def add_check(self, check: Callable[[GraphExec], None]) -> None:
        """Call ``check(executable)`` before each launch of the graph; it raises to refuse."""
        self.checks.append(check)

    def drop(self) -> None:
        """End the capture without a graph, on whatever thread."""
        handle, _ = self._end()
        self.graph._fail(handle)
        self.context.reap()

    # -- below ------------------------------------------------------------------------------------
    def _end(self) -> tuple[int, MemraError | None]:
        """End the capture whatever its state; the graph's handle, or why there is none."""
        driver, handle = self.context.driver, 0
        refusal: MemraError | None = None
        with lifetime.gate:
            unjoined = [s.name for s in self.unjoined()]
            try:
                self.context.ensure()
                handle = driver.cuStreamEndCapture(self.origin.handle)
            except MemraError as error:
                refusal = self._explain(error, unjoined)
            finally:
                self.ended = True
                lifetime.recordings.remove(self)
                self.release_streams()
        stuck = [s.name for s in self.streams if not s.closed and not self._healthy(s)]
        if stuck and refusal is not None:
            refusal.args = (f"{refusal} Streams still capturing: {', '.join(stuck)}.",)
        return handle, refusal

    def _healthy(self, stream: Stream) -> bool:
        status = self.context.driver.cuStreamIsCapturing(stream.handle)
        return status is CaptureStatus.NONE

    def _explain(self, error: MemraError, unjoined: list[str]) -> MemraError:
        where = f'capture "{self.name}" on stream "{self.origin.name}" (begun at {self.where})'
        cause = getattr(error, "cause", "")
        made: MemraError
        if isinstance(error, CaptureInvalidated) and cause:
            made = CaptureInvalidated(
                f"{where} was invalidated by {cause}. There is no graph; the stream is usable.",
                cause=cause,
            )
        elif unjoined:
            made = CaptureUnjoined(
                f"{where} ended with work on {', '.join(unjoined)} that nobody waits for. Record "
                f'an event there and let "{self.origin.name}" wait for it before the end.',
                streams=unjoined,
            )
        elif isinstance(error, CaptureError):
            made = error
        else:
            made = CaptureInvalidated(f"{where} could not end: {error}", cause=str(error))
        made.__cause__ = None if made is error else error
        return made


def capture_of(stream: Stream) -> Capture | None:
    """Give the capture that ``stream`` takes part in, if any."""
    if type(stream) is not Stream:
        expect_stream("stream", stream)
    recording: Any = stream.recording
    return recording if isinstance(recording, Capture) else None
