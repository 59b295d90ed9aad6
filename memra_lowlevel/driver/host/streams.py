# ruff: noqa: D102  (the methods are the driver API, described there)
"""Streams, events and stream capture of the host device."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .. import legality
from ..calls import driver_call
from ..table import CaptureInfo, CaptureMode, CaptureStatus, NodeType
from .memory import HostMemory, PoolWork
from .schedule import Op, Work
from .state import Capture, HostContext, HostEvent, HostGraph, HostNode, HostStream

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HostStreams"]

_NON_BLOCKING = 1
_DISABLE_TIMING = 2


class _Stamp:
    """What an event record does when it runs: note the time."""

    node_type = NodeType.EVENT_RECORD
    label = "event record"
    __slots__ = ("_event", "_op")

    def __init__(self, event: HostEvent):
        self._event = event
        self._op: Op | None = None

    def run(self) -> None:
        if self._event.op is self._op:  # not recorded again meanwhile
            self._event.time_ns = time.perf_counter_ns()


class HostStreams(HostMemory):
    """Streams, events, capture."""

    # -- submission ----------------------------------------------------------------------------
    def _submit(self, call: str, stream: HostStream, work: Work, always: bool = False) -> None:
        """Run ``work`` behind all earlier work of the stream, or record it as a node."""
        if stream.capture is not None:
            self._record_node(call, stream, work)
            return
        self._enqueue(stream, work, always=always)

    def _enqueue(
        self,
        stream: HostStream,
        work: Work | None,
        after: Sequence[Op | None] = (),
        always: bool = False,
    ) -> Op:
        op = Op(work, stream.ctx.device, stream.handle, always)
        self._schedule.add(op, (stream.tail, *after))
        stream.tail = op
        self._schedule.relieve()
        return op

    def _live_capture(self, call: str, stream: HostStream) -> Capture:
        """Return the capture of a capturing stream; raise if it was invalidated."""
        capture = stream.capture
        assert capture is not None
        if capture.invalidated:
            raise self._error(legality.INVALIDATED, call, stream=stream.handle)
        return capture

    def _record_node(self, call: str, stream: HostStream, work: Work) -> HostNode:
        capture = self._live_capture(call, stream)
        node = self._new_node(capture.graph, work, stream.frontier)
        stream.frontier = [node]
        return node

    def _new_node(self, graph: HostGraph, work: Work, deps: Sequence[HostNode]) -> HostNode:
        node = HostNode(self._new_handle(), graph, work, list(dict.fromkeys(deps)))
        graph.nodes.append(node)
        self._nodes[node.handle] = node
        if isinstance(work, PoolWork) and work.take:
            work.block.holders += 1
        return node

    def _drop_node(self, node: HostNode) -> None:
        """Forget a node; memory that only it allocated goes with it."""
        self._nodes.pop(node.handle, None)
        self._names.pop(node.handle, None)
        if isinstance(node.work, PoolWork) and node.work.take:
            node.work.block.holders -= 1
            if node.work.block.holders == 0:
                self._release_graph_block(node.work.block)

    def _new_graph(self) -> HostGraph:
        graph = HostGraph(self._new_handle())
        self._graphs[graph.handle] = graph
        return graph

    def _sync_legacy(self, ctx: HostContext) -> None:
        """Act as the legacy stream does: wait for blocking streams, let others go on."""
        for st in self._streams.values():
            if st.ctx is ctx and st.blocking and st.capture is None:
                self._finish(st.tail)
        self._schedule.run_some()

    def _refuse_legacy(self, ctx: HostContext, call: str) -> None:
        """Refuse work on the legacy stream while a blocking stream of the context is captured."""
        captures = [
            st.capture
            for st in self._streams.values()
            if st.ctx is ctx and st.blocking and st.capture is not None
        ]
        if captures:
            self._invalidate(captures, call, legality.IMPLICIT)
            raise self._error(legality.IMPLICIT, call)

    # -- streams -------------------------------------------------------------------------------
    @driver_call
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> int:
        call = "cuStreamCreateWithPriority"
        ctx = self._ctx(call)
        if flags not in (0, _NON_BLOCKING):
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"flags {flags:#x}")
        st = HostStream(self._new_handle(), ctx, priority, blocking=not flags & _NON_BLOCKING)
        self._streams[st.handle] = st
        return st.handle

    @driver_call
    def cuStreamDestroy(self, stream: int) -> None:
        st = self._stream(stream, "cuStreamDestroy")
        if st.capture is not None:
            self._refuse_named(st.capture, "cuStreamDestroy", stream)
            st.capture.streams.remove(st)
            if st.capture.origin is st:
                self._drop_capture(st.capture)
        del self._streams[stream]
        self._names.pop(stream, None)

    @driver_call
    def cuStreamSynchronize(self, stream: int) -> None:
        st = self._stream(stream, "cuStreamSynchronize")
        if st.capture is not None:
            self._refuse_named(st.capture, "cuStreamSynchronize", stream)
        self._gate("cuStreamSynchronize")
        self._finish(st.tail)
        self._raise_errors(st.ctx.device, "cuStreamSynchronize")

    @driver_call
    def cuStreamQuery(self, stream: int) -> bool:
        st = self._stream(stream, "cuStreamQuery")
        if st.capture is not None:
            self._refuse_named(st.capture, "cuStreamQuery", stream)
        self._gate("cuStreamQuery")
        return self._poll(st.tail, st.ctx.device, "cuStreamQuery")

    def _poll(self, op: Op | None, device: int, call: str) -> bool:
        if self._is_done(op):
            self._raise_errors(device, call)
            return True
        self._schedule.run_some()
        if self._is_done(op):
            self._raise_errors(device, call)
            return True
        return False

    @staticmethod
    def _is_done(op: Op | None) -> bool:
        return op is None or op.done

    @driver_call
    def cuStreamWaitEvent(self, stream: int, event: int) -> None:
        call = "cuStreamWaitEvent"
        st, ev = self._stream(stream, call), self._event(event, call)
        if ev.capture is not None:
            self._join(call, st, ev)
            return
        if st.capture is not None:
            capture = self._live_capture(call, st)
            if ev.op is None:
                return  # never recorded: nothing to wait for
            self._invalidate([capture], call, legality.ISOLATION)
            raise self._error(legality.ISOLATION, call, stream=stream)
        if ev.op is not None and not ev.op.done:
            self._enqueue(st, None, (ev.op,))

    def _join(self, call: str, st: HostStream, ev: HostEvent) -> None:
        """Let a stream take part in the capture of the event it waits for."""
        capture = ev.capture
        assert capture is not None
        own = self._live_capture(call, st) if st.capture is not None else None
        if capture not in self._captures or capture.invalidated:
            detail = "the event was recorded in a capture that has ended or was invalidated"
            raise self._error(legality.INVALID_VALUE, call, detail, stream=st.handle)
        if own is None:
            st.capture, st.frontier = capture, list(ev.frontier)
            capture.streams.append(st)
            return
        if own is not capture:
            self._invalidate([own, capture], call, legality.MERGE)
            raise self._error(legality.MERGE, call, stream=st.handle)
        st.frontier = list(dict.fromkeys([*st.frontier, *ev.frontier]))

    # -- events --------------------------------------------------------------------------------
    @driver_call
    def cuEventCreate(self, flags: int) -> int:
        ctx = self._ctx("cuEventCreate")
        if flags & ~7:
            raise self._error("CUDA_ERROR_INVALID_VALUE", "cuEventCreate", f"flags {flags:#x}")
        ev = HostEvent(self._new_handle(), ctx, timing=not flags & _DISABLE_TIMING)
        self._events[ev.handle] = ev
        return ev.handle

    @driver_call
    def cuEventDestroy(self, event: int) -> None:
        self._event(event, "cuEventDestroy")
        del self._events[event]
        self._names.pop(event, None)

    @driver_call
    def cuEventRecord(self, event: int, stream: int) -> None:
        call = "cuEventRecord"
        st, ev = self._stream(stream, call), self._event(event, call)
        if st.ctx is not ev.ctx:
            raise self._error(
                "CUDA_ERROR_INVALID_HANDLE", call,
                f"the event belongs to device {ev.ctx.device}, the stream to {st.ctx.device}",
                stream=stream,
            )  # fmt: skip
        if st.capture is not None:
            ev.capture = self._live_capture(call, st)
            ev.frontier = list(st.frontier)
            ev.op, ev.time_ns = None, None
            return
        ev.capture, ev.frontier, ev.time_ns = None, [], None
        stamp = _Stamp(ev)
        op = Op(stamp, st.ctx.device, st.handle)
        stamp._op = ev.op = op
        self._schedule.add(op, (st.tail,))
        st.tail = op
        self._schedule.relieve()

    @driver_call
    def cuEventQuery(self, event: int) -> bool:
        ev = self._event(event, "cuEventQuery")
        if ev.capture is not None:
            self._refuse_named(ev.capture, "cuEventQuery")
        self._gate("cuEventQuery")
        return self._poll(ev.op, ev.ctx.device, "cuEventQuery")

    @driver_call
    def cuEventSynchronize(self, event: int) -> None:
        ev = self._event(event, "cuEventSynchronize")
        if ev.capture is not None:
            self._refuse_named(ev.capture, "cuEventSynchronize")
        self._gate("cuEventSynchronize")
        self._finish(ev.op)
        self._raise_errors(ev.ctx.device, "cuEventSynchronize")

    @driver_call
    def cuEventElapsedTime(self, start: int, end: int) -> float:
        call = "cuEventElapsedTime"
        a, b = self._event(start, call), self._event(end, call)
        for ev in (a, b):
            if not ev.timing:
                raise self._error(
                    "CUDA_ERROR_INVALID_HANDLE", call, "an event made without timing has no time"
                )
            if ev.capture is not None:
                self._refuse_named(ev.capture, call)
            if ev.op is None:
                raise self._error("CUDA_ERROR_INVALID_HANDLE", call, "an event was never recorded")
        if a.time_ns is None or b.time_ns is None:
            raise self._error("CUDA_ERROR_NOT_READY", call)
        return (b.time_ns - a.time_ns) / 1e6

    # -- capture -------------------------------------------------------------------------------
    @driver_call
    def cuStreamBeginCapture(self, stream: int, mode: CaptureMode) -> None:
        call = "cuStreamBeginCapture"
        st = self._stream(stream, call)
        if st.capture is not None:
            raise self._error(
                legality.ILLEGAL_STATE, call, "the stream is being captured", stream=stream
            )
        graph = self._new_graph()
        graph.capturing = True
        capture = Capture(
            self._capture_ids(), graph, CaptureMode(mode), threading.get_ident(), st, [st]
        )
        st.capture, st.frontier = capture, []
        self._captures.append(capture)
        self._capture_began(stream)

    @driver_call
    def cuStreamEndCapture(self, stream: int) -> int:
        call = "cuStreamEndCapture"
        st = self._stream(stream, call)
        capture = st.capture
        if capture is None:
            raise self._error(
                legality.ILLEGAL_STATE, call, "no capture is under way", stream=stream
            )
        if capture.mode != CaptureMode.RELAXED and capture.thread != threading.get_ident():
            alive = any(t.ident == capture.thread for t in threading.enumerate())
            why = "" if alive else "the thread that began the capture has ended without ending it"
            error = self._error(legality.WRONG_THREAD, call, why, stream=stream)
            self._drop_capture(capture)  # the capture is over all the same
            raise error
        if capture.origin is not st:
            self._invalidate([capture], call, legality.UNMATCHED)
            raise self._error(legality.UNMATCHED, call, stream=stream)
        if capture.invalidated:
            error = self._error(legality.INVALIDATED, call, stream=stream)
            self._drop_capture(capture)
            raise error
        open_streams = self._unjoined(capture)
        if open_streams:
            names = ", ".join(repr(self.handle_name(s.handle)) for s in open_streams)
            error = self._error(legality.UNJOINED, call, f"not joined: {names}", stream=stream)
            error.streams = tuple(self.handle_name(s.handle) for s in open_streams)  # type: ignore[attr-defined]
            self._drop_capture(capture)
            raise error
        self._end(capture)
        return capture.graph.handle

    @staticmethod
    def _unjoined(capture: Capture) -> list[HostStream]:
        """Return forked streams whose last work the origin does not wait for."""
        reached: set[int] = set()
        stack = list(capture.origin.frontier)
        while stack:
            node = stack.pop()
            if node.handle not in reached:
                reached.add(node.handle)
                stack.extend(node.deps)
        return [
            s
            for s in capture.streams
            if s is not capture.origin and any(n.handle not in reached for n in s.frontier)
        ]

    def _end(self, capture: Capture) -> None:
        for s in capture.streams:
            s.capture, s.frontier = None, []
        self._captures.remove(capture)
        self._capture_ended(capture.origin.handle)
        capture.graph.capturing = False

    def _drop_capture(self, capture: Capture) -> None:
        self._end(capture)
        for node in capture.graph.nodes:
            self._drop_node(node)
        self._graphs.pop(capture.graph.handle, None)

    @driver_call
    def cuStreamIsCapturing(self, stream: int) -> CaptureStatus:
        st = self._stream(stream, "cuStreamIsCapturing")
        return st.capture.status if st.capture is not None else CaptureStatus.NONE

    @driver_call
    def cuStreamGetCaptureInfo(self, stream: int) -> CaptureInfo:
        st = self._stream(stream, "cuStreamGetCaptureInfo")
        capture = st.capture
        if capture is None:
            return CaptureInfo(CaptureStatus.NONE)
        if capture.invalidated:
            return CaptureInfo(CaptureStatus.INVALIDATED)
        return CaptureInfo(
            capture.status,
            capture.id,
            capture.graph.handle,
            tuple(n.handle for n in st.frontier),
        )

    @driver_call
    def cuStreamUpdateCaptureDependencies(
        self, stream: int, deps: Sequence[int], flags: int
    ) -> None:
        call = "cuStreamUpdateCaptureDependencies"
        st = self._stream(stream, call)
        if st.capture is None:
            detail = "no capture is under way"
            raise self._error(legality.ILLEGAL_STATE, call, detail, stream=stream)
        capture = self._live_capture(call, st)
        nodes = [self._find(self._nodes, d, call, "graph node") for d in deps]
        if any(n.graph is not capture.graph for n in nodes) or flags not in (0, 1):
            detail = "a node does not belong to the captured graph, or the flags are unknown"
            raise self._error(legality.INVALID_VALUE, call, detail, stream=stream)
        st.frontier = list(dict.fromkeys([*(st.frontier if flags == 0 else ()), *nodes]))

    @driver_call
    def cuThreadExchangeStreamCaptureMode(self, mode: CaptureMode) -> CaptureMode:
        before = self._thread.mode
        self._thread.mode = CaptureMode(mode)
        return before

    # -- the whole context ---------------------------------------------------------------------
    @driver_call
    def cuCtxSynchronize(self) -> None:
        call = "cuCtxSynchronize"
        ctx: HostContext = self._ctx(call)
        self._gate(call)
        self._finish_device(ctx.device)
        self._raise_errors(ctx.device, call)
