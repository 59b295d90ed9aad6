"""Streams: named queues of device work. Every operation of the library names one."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .. import expect, native
from ..driver.table import CaptureMode
from ..driver.trace import caller
from ..errors import ArgumentError, CaptureForbidden
from . import lifetime
from .event import Event
from .lifetime import Owned
from .recording import Recording, forbid

if TYPE_CHECKING:
    from ..graph import Graph  # the type that capture() gives; for type checkers only
    from .context import Context
    from .device import Device

__all__ = ["Stream", "expect_stream"]

_NON_BLOCKING = 1


class Stream(Owned):
    """A queue of work on one device; made by :meth:`Device.stream`.

    Attributes
    ----------
    handle : int
        Driver handle.
    name : str
    priority : int
        Lower numbers run first, clamped to the device's range.
    recording : Recording or None
        The capture that this stream takes part in.
    """

    kind = "stream"

    def __init__(
        self,
        context: Context,
        *,
        name: str | None = None,
        priority: int = 0,
        foreign: int | None = None,
        owner: Any = None,
    ) -> None:
        driver = context.driver
        expect.name("stream", name)
        priority = expect.integer("stream: priority", priority, high=None)
        context.activate()
        if foreign is None:
            least, greatest = driver.cuCtxGetStreamPriorityRange()
            priority = max(greatest, min(least, priority))
            handle = driver.cuStreamCreateWithPriority(_NON_BLOCKING, priority)
        else:
            handle = foreign
        self.handle, self.priority = handle, priority
        self.recording: Recording | None = None
        self._owner = owner
        self._shared = foreign is not None  # other libraries may use it
        gate = context.native
        self.cell: Any = None
        if gate is not None:
            self.cell = native.StreamCell(gate, handle, shared=foreign is not None)
            self.address = native.address(self.cell)

        alive = self.alive = [handle]

        def reclaim() -> None:
            # Buffers last used here may be freed later: let the housekeeping stream end after
            # this one, so that such a free can be ordered on it.
            alive.clear()
            context.chain(handle, context.keeper())
            if foreign is None:
                driver.cuStreamDestroy(handle)
                driver.name_handle(handle, "")

        super().__init__(context, name or f"stream-{handle:x}", reclaim)
        driver.name_handle(handle, self.name)

    @property
    def device(self) -> Device:
        """Device of the stream."""
        return self.context.device

    # -- order ------------------------------------------------------------------------------------
    def record(self, event: Event) -> Event:
        """Mark the present end of this stream's work in ``event`` and return it.

        Raises
        ------
        CaptureForbidden
            For a timing event while the stream is being captured.
        """
        self._check_open()
        expect.kind("record", event, Event, "an Event", "make one with device.event()")
        event._check_open()
        if event.context is not self.context:
            raise ArgumentError(
                f"record: event {event.name!r} is on {event.context}, stream {self.name!r} on "
                f"{self.context}; make the event on the stream's device.",
                name=event.name,
                expected=str(self.context),
                got=str(event.context),
            )
        if event.timing and self.recording is not None:
            raise CaptureForbidden(
                f'cuEventRecord of timing event "{event.name}" while stream "{self.name}" is being '
                f'captured into "{self.recording.name}" (from {caller()}). Inside a graph an event '
                "is only an edge and has no time; record timing events around the launch.",
                call="cuEventRecord",
            )
        self.context.ensure()
        self.context.driver.cuEventRecord(event.handle, self.handle)
        native.note_issued(self.cell)
        event._note_record(self)
        return event

    def wait(self, event: Event | Stream) -> None:
        """Let later work here wait for ``event``, or for the present work of another stream.

        Waiting for an event that was recorded in a capture brings this stream into that capture.
        """
        self._check_open()
        if not isinstance(event, Event | Stream):
            raise expect.refusal("wait", event, "an Event or a Stream")
        event._check_open()
        if isinstance(event, Stream):
            marker = event.device.event(name=f"{event.name} -> {self.name}")
            event.record(marker)
            self.wait(marker)
            marker.close()
            return
        theirs, mine = event._recording, self.recording
        if theirs is None and mine is not None and event._recorded:
            raise CaptureForbidden(
                f'cuStreamWaitEvent for event "{event.name}", recorded outside the capture, while '
                f'stream "{self.name}" is being captured into "{mine.name}" (from {caller()}). A '
                "graph cannot depend on earlier work; order the launch of the graph instead.",
                call="cuStreamWaitEvent",
            )
        if theirs is not None and (theirs.ended or (mine is not None and mine is not theirs)):
            state = "which has ended" if theirs.ended else "which is another one"
            raise CaptureForbidden(
                f'cuStreamWaitEvent on stream "{self.name}" for event "{event.name}", recorded in '
                f'the capture "{theirs.name}", {state} (from {caller()}). '
                "Record the event again where it is needed.",
                call="cuStreamWaitEvent",
            )
        self.context.ensure()
        self.context.driver.cuStreamWaitEvent(self.handle, event.handle)
        native.note_issued(self.cell)
        if theirs is not None:
            theirs.note_wait(self, event)

    def sync(self) -> None:
        """Block until all work on this stream is done; errors of that work surface here."""
        self._check_open()
        forbid("cuStreamSynchronize", stream=self)
        # What was dropped before is given back behind its last work, so that it is free after.
        self.context.reap()
        self.context.ensure()
        mark = native.issued(self.cell)
        try:
            self.context.driver.cuStreamSynchronize(self.handle)
        except Exception as error:
            self.context.note_error(error)
            raise
        native.note_seen(self.cell, mark)
        self.context.poll()

    def done(self) -> bool:
        """Whether all work on this stream is done."""
        self._check_open()
        forbid("cuStreamQuery", stream=self)
        self.context.ensure()
        mark = native.issued(self.cell)
        done = self.context.driver.cuStreamQuery(self.handle)
        if done:
            native.note_seen(self.cell, mark)
        return done

    def close(self) -> None:
        """Give the stream back without waiting; its work goes on. Idempotent.

        What the driver already knows of a failure that nobody waited for is raised, once the
        stream is closed; while another exception is under way, the logger ``memra_lowlevel``
        reports it. Failures that come later are told at the next synchronisation, or by the
        close of the last :class:`Device`.
        """
        error = None if self.closed else self._known_error()
        super().close()
        self.context.tell(error)

    def _known_error(self) -> BaseException | None:
        """Ask for errors of unseen work; never of a stream that others may be capturing."""
        if self._shared or (self.cell is not None and self.cell.issued == self.cell.seen):
            return None
        if lifetime.recordings or self.context.lost or not self.context.handle:
            return None

        def query() -> None:
            self.context.ensure()
            self.context.driver.cuStreamQuery(self.handle)

        return self.context.ask(query)

    # -- capture ----------------------------------------------------------------------------------
    def capture(
        self, name: str = "graph", mode: CaptureMode = CaptureMode.THREAD_LOCAL
    ) -> AbstractContextManager[Graph]:
        """Record the work issued in the ``with`` block into a graph instead of running it.

        Returns
        -------
        context manager giving a :class:`memra_lowlevel.graph.Graph`
            Complete after the block; instantiate it then.
        """
        # The one door upwards: captures belong to the graph layer, which imports this one.
        graph_layer = importlib.import_module("memra_lowlevel.graph.capture")
        manager: AbstractContextManager[Graph] = graph_layer.Capture(self, name, mode)
        return manager

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol of the CUDA libraries: version 0 and the handle."""
        if self.context.driver.kind != "cuda":
            raise ArgumentError(
                f"__cuda_stream__: stream {self.name!r} is on {self.context}, which has no CUDA "
                "stream; use a stream of a cuda device.",
                name=self.name,
                expected="cuda",
                got="host",
            )
        self._check_open()
        self._shared = True
        if self.cell is not None:
            self.cell.shared = 1
        return 0, self.handle

    # -- for the library --------------------------------------------------------------------------
    def _enter_recording(self, recording: Recording) -> None:
        self.recording = recording
        if self.cell is not None:
            self.cell.recording = 1

    def _leave_recording(self, recording: Recording) -> None:
        if self.recording is recording:
            self.recording = None
            if self.cell is not None:
                self.cell.recording = 0

    def _before_close(self) -> None:
        if self.recording is not None and self.recording.abandoned():
            self.recording.drop()
        if self.recording is not None:
            raise CaptureForbidden(
                f'cuStreamDestroy of stream "{self.name}" while it is being captured into '
                f'"{self.recording.name}" (from {caller()}). Close it after the capture.',
                call="cuStreamDestroy",
            )
        if self.cell is not None:
            self.cell.closed = 1


def expect_stream(what: str, value: Any) -> Stream:
    """Give ``value`` if it is a stream; else refuse it in words that begin with ``what``."""
    return expect.kind(what, value, Stream, "a Stream", "make one with device.stream()")
