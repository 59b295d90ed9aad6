"""Objects of the host driver and what all its parts share: handles, contexts, gates."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NoReturn, TypeVar

from ...errors import MemraError
from .. import legality
from ..calls import DriverBase
from ..table import CaptureMode, CaptureStatus, DeviceAttribute
from .options import current_options
from .schedule import Op, Schedule, Work

__all__ = [
    "Capture",
    "HostContext",
    "HostEvent",
    "HostGraph",
    "HostNode",
    "HostState",
    "HostStream",
]

T = TypeVar("T")


@dataclass(eq=False)
class HostContext:
    """The primary context of one host device."""

    handle: int
    device: int
    retained: int = 0


@dataclass(eq=False)
class HostNode:
    """A node of a graph: its work and the nodes before it."""

    handle: int
    graph: HostGraph
    work: Work
    deps: list[HostNode]


@dataclass(eq=False)
class HostGraph:
    """Nodes in the order of creation; the order of creation is a topological one."""

    handle: int
    nodes: list[HostNode] = field(default_factory=list)
    parent: HostGraph | None = None
    capturing: bool = False
    conditions: list[object] = field(default_factory=list)


@dataclass(eq=False)
class Capture:
    """A capture in progress: the graph it fills and the streams that take part."""

    id: int
    graph: HostGraph
    mode: CaptureMode
    thread: int
    origin: HostStream
    streams: list[HostStream] = field(default_factory=list)
    invalidated: bool = False

    @property
    def status(self) -> CaptureStatus:
        """Active or invalidated."""
        return CaptureStatus.INVALIDATED if self.invalidated else CaptureStatus.ACTIVE


@dataclass(eq=False)
class HostStream:
    """A stream: the last operation submitted to it, or its place in a capture."""

    handle: int
    ctx: HostContext
    priority: int
    blocking: bool
    tail: Op | None = None
    capture: Capture | None = None
    frontier: list[HostNode] = field(default_factory=list)


@dataclass(eq=False)
class HostEvent:
    """An event: the operation it was last recorded behind, or its place in a capture."""

    handle: int
    ctx: HostContext
    timing: bool
    op: Op | None = None
    time_ns: int | None = None
    capture: Capture | None = None
    frontier: list[HostNode] = field(default_factory=list)


class _ThreadState(threading.local):
    ctx: HostContext | None = None
    mode: CaptureMode = CaptureMode.GLOBAL
    error: MemraError | None = None


class HostState(DriverBase):
    """Handles, contexts and the rules that every call asks."""

    kind: Literal["cuda", "host"] = "host"
    _locks_calls = True

    def __init__(self) -> None:
        super().__init__()
        self._new_handle = itertools.count(0x10000, 0x10).__next__
        self._capture_ids = itertools.count(1).__next__
        self._schedule = Schedule()
        self._thread = _ThreadState()
        # By device: adds the names that only the layer above knows to an error that is told.
        self.describers: dict[int, Callable[[Exception], None]] = {}
        self._captures: list[Capture] = []
        self._streams: dict[int, HostStream] = {}
        self._events: dict[int, HostEvent] = {}
        self._graphs: dict[int, HostGraph] = {}
        self._nodes: dict[int, HostNode] = {}
        self._contexts = [
            HostContext(self._new_handle(), i) for i in range(current_options().n_devices)
        ]
        self._by_context = {c.handle: c for c in self._contexts}

    # -- look-ups ------------------------------------------------------------------------------
    def _find(self, table: dict[int, T], handle: int, call: str, what: str) -> T:
        found = table.get(handle)
        if found is None:
            detail = f"{handle:#x} is no open {what} of this driver"
            if what == "stream" and handle in (0, 1, 2):
                detail = "the default stream is not available here; pass a stream of your own"
            raise self._error("CUDA_ERROR_INVALID_HANDLE", call, detail)
        return found

    def _stream(self, handle: int, call: str) -> HostStream:
        return self._find(self._streams, handle, call, "stream")

    def _event(self, handle: int, call: str) -> HostEvent:
        return self._find(self._events, handle, call, "event")

    def _ctx(self, call: str) -> HostContext:
        ctx = self._thread.ctx
        if ctx is None:
            raise self._error(
                "CUDA_ERROR_INVALID_CONTEXT", call, "no context is current on this thread"
            )
        return ctx

    def _device_of(self, ordinal: int, call: str) -> HostContext:
        if not 0 <= ordinal < len(self._contexts):
            raise self._error(
                "CUDA_ERROR_INVALID_DEVICE", call,
                f"{ordinal} is not among the {len(self._contexts)} host devices",
            )  # fmt: skip
        return self._contexts[ordinal]

    # -- capture rules -------------------------------------------------------------------------
    def _invalidate(self, captures: list[Capture], call: str, result: str) -> None:
        for capture in captures:
            capture.invalidated = True
        if captures:
            self._note_offence(result, call)

    def _nearby(self) -> list[Capture]:
        """Return the captures that forbid this thread potentially unsafe calls."""
        mode = self._thread.mode
        if mode == CaptureMode.RELAXED:
            return []
        me = threading.get_ident()
        return [
            c
            for c in self._captures
            if legality.prohibits(c.mode, mode, same_thread=c.thread == me)
        ]

    def _in_context(self) -> list[Capture]:
        """Return the captures of streams of the current context."""
        ctx = self._thread.ctx
        return [c for c in self._captures if any(s.ctx is ctx for s in c.streams)]

    def _gate(self, call: str) -> None:
        """Refuse a call that a capture under way prohibits, as the table says."""
        if not self._captures:
            return
        rule = legality.rule(call)
        answer = rule.nearby
        if answer.result == legality.OK:
            return
        nearby = self._in_context() if rule.everywhere else self._nearby()
        if nearby:
            self._refuse(answer, nearby, call)

    def _refuse_named(self, capture: Capture, call: str, stream: int = 0) -> None:
        """Refuse a call that names a capturing stream or a captured event, as the table says."""
        answer = legality.rule(call).named
        if capture not in self._captures:  # an event of a capture that has ended
            detail = "the event was last recorded in a capture that has ended"
            raise self._error(legality.INVALID_VALUE, call, detail, stream=stream)
        if answer.at(capture.invalidated) != legality.OK:
            self._refuse(answer, [capture], call, stream)

    def _refuse(
        self, answer: legality.Answer, captures: list[Capture], call: str, stream: int = 0
    ) -> NoReturn:
        result = answer.at(all(c.invalidated for c in captures))
        if answer.invalidates:
            self._invalidate(captures, call, result)
        r = legality.rule(call)
        if result == legality.INVALIDATED:
            raise self._error(result, call, stream=stream)
        raise self._error(result, call, r.why, remedy=r.remedy, stream=stream)

    # -- synchronisation -----------------------------------------------------------------------
    def _raise_errors(self, device: int, call: str) -> None:
        errors = self._schedule.take_errors(device)
        if errors:
            first = errors[0]
            describe = self.describers.get(device)
            if describe is not None:
                describe(first)
            if len(errors) > 1 and hasattr(first, "add_note"):
                first.add_note(f"{len(errors) - 1} more operations failed; seen by {call}")
            raise first

    def unseen(self, device: int) -> tuple[list[str], list[Exception]]:
        """Name what nobody waited for: streams with work that has not run, errors not told.

        Runs nothing and takes no lock: it is asked when the process ends.
        """
        errors = [failure.error for failure in self._schedule.unseen(device)]
        if not self._schedule.pending.get(device, 0):
            return [], errors
        names = [
            f"stream {self.handle_name(s.handle)!r}"
            for s in list(self._streams.values())
            if s.ctx.device == device and s.tail is not None and not s.tail.done
        ]
        return names or ["closed streams"], errors

    def _finish(self, op: Op | None) -> None:
        if op is not None and not op.done:
            self._schedule.run_until(lambda: op.done)

    def _finish_device(self, device: int) -> None:
        pending = self._schedule.pending
        if pending.get(device, 0):
            self._schedule.run_until(lambda: pending[device] == 0)

    # -- what the device claims to be; launches are checked against it ---------------------------
    limits: ClassVar[dict[DeviceAttribute, int]] = {
        DeviceAttribute.MAX_THREADS_PER_BLOCK: 1024,
        DeviceAttribute.MAX_BLOCK_DIM_X: 1024,
        DeviceAttribute.MAX_BLOCK_DIM_Y: 1024,
        DeviceAttribute.MAX_BLOCK_DIM_Z: 64,
        DeviceAttribute.MAX_GRID_DIM_X: 2**31 - 1,
        DeviceAttribute.MAX_GRID_DIM_Y: 65535,
        DeviceAttribute.MAX_GRID_DIM_Z: 65535,
        DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK: 48 << 10,
        DeviceAttribute.WARP_SIZE: 32,
        DeviceAttribute.MAX_REGISTERS_PER_BLOCK: 65536,
        DeviceAttribute.CLOCK_RATE: 1_000_000,
        DeviceAttribute.MULTIPROCESSOR_COUNT: 8,
        DeviceAttribute.MEMORY_CLOCK_RATE: 1_000_000,
        DeviceAttribute.GLOBAL_MEMORY_BUS_WIDTH: 64,
        DeviceAttribute.L2_CACHE_SIZE: 4 << 20,
        DeviceAttribute.COMPUTE_CAPABILITY_MAJOR: 8,
        DeviceAttribute.COMPUTE_CAPABILITY_MINOR: 0,
        DeviceAttribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: 164 << 10,
        DeviceAttribute.COOPERATIVE_LAUNCH: 0,
        DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 99 << 10,
        DeviceAttribute.MEMORY_POOLS_SUPPORTED: 1,
        DeviceAttribute.CLUSTER_LAUNCH: 0,
    }
