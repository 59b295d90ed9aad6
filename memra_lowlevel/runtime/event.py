"""Events: points on a stream that other streams, or the host, wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import expect, native
from ..driver.trace import caller
from ..errors import ArgumentError, CaptureForbidden
from .lifetime import Owned
from .recording import Recording, forbid

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .stream import Stream

__all__ = ["Event"]

_BLOCKING, _NO_TIMING = 1, 2


class Event(Owned):
    """A point of a stream's work; made by :meth:`Device.event`.

    Attributes
    ----------
    handle : int
        Driver handle.
    timing : bool
        Whether it can be used with :meth:`elapsed_ms`; such events are refused inside a capture.
    blocking : bool
        Whether :meth:`sync` sleeps instead of asking again and again: later by some microseconds,
        and at no cost to the processor.
    """

    kind = "event"

    def __init__(
        self,
        context: Context,
        *,
        timing: bool = False,
        blocking: bool = False,
        name: str | None = None,
    ) -> None:
        driver = context.driver
        expect.name("event", name)
        timing = bool(timing) if isinstance(timing, int) else expect.kind(
            "event: timing", timing, bool, "a bool"
        )  # fmt: skip
        blocking = expect.kind("event: blocking", blocking, bool, "a bool")
        context.activate()
        flags = (0 if timing else _NO_TIMING) | (_BLOCKING if blocking else 0)
        handle = driver.cuEventCreate(flags)
        self.handle, self.timing, self.blocking = handle, timing, blocking
        self._recording: Recording | None = None
        self._clock: dict[int, int] = {}
        self._recorded = False
        # What the stream had been given when the event was last recorded on it.
        self._mark: tuple[Any, int] = (None, 0)

        def reclaim() -> None:
            driver.cuEventDestroy(handle)
            driver.name_handle(handle, "")

        super().__init__(context, name or f"event-{handle:x}", reclaim)
        driver.name_handle(handle, self.name)

    @property
    def device(self) -> Device:
        """Device of the event."""
        return self.context.device

    def done(self) -> bool:
        """Whether the work before the event is finished; an event never recorded is done."""
        self._check_free("cuEventQuery")
        self.context.ensure()
        mark = self._mark
        done = self.context.driver.cuEventQuery(self.handle)
        if done:
            native.note_seen(*mark)
        return done

    def sync(self) -> None:
        """Block until the work before the event is finished."""
        self._check_free("cuEventSynchronize")
        self.context.ensure()
        mark = self._mark
        self.context.driver.cuEventSynchronize(self.handle)
        native.note_seen(*mark)

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds from ``start`` to this event; both with ``timing`` and both done."""
        expect.kind("elapsed_ms", start, Event, "an Event")
        for event in (start, self):
            event._check_free("cuEventElapsedTime")
            if not event.timing or not event._recorded:
                why = "was never recorded" if event.timing else "was made without timing=True"
                raise ArgumentError(
                    f"elapsed_ms: event {event.name!r} {why}; make both with "
                    "device.event(timing=True) and record them on a stream.",
                    name=event.name,
                    expected="a recorded event with timing",
                    got=why,
                )
        self.context.ensure()
        return self.context.driver.cuEventElapsedTime(start.handle, self.handle)

    def _check_free(self, call: str) -> None:
        self._check_open()
        if self._recording is not None:
            raise CaptureForbidden(
                f'{call} of event "{self.name}", last recorded in the capture '
                f'"{self._recording.name}" (from {caller()}). A captured event marks a place in '
                "a graph, not a moment; record it again on a plain stream.",
                call=call,
            )
        forbid(call)

    def _note_record(self, stream: Stream) -> None:
        recording = stream.recording
        self._recorded = True
        self._recording = recording
        if recording is None:
            self._mark = (stream.cell, native.issued(stream.cell))
        else:
            recording.keeps.add(self)
            recording.tick(stream)
            self._clock = recording.clock_of(stream)
