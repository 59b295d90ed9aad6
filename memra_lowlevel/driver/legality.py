"""The rules of stream capture as one data table.

For each driver call: what happens when it meets a capture. The host device obeys the table, the
runtime asks it before it calls a driver, and the answers of a real driver, recorded with
``tools/legality_record.py``, are compared with it.

Three situations are told apart:

``named``
    The call names a stream that is being captured, or an event recorded in a capture.
``nearby``
    The call names nothing captured, but a capture under way *prohibits* this thread from
    potentially unsafe calls: its own one unless that is relaxed, or a global one of another
    thread. A thread that set itself to relaxed is never prohibited.
``free``
    Anything else; every call is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .table import CaptureMode

if TYPE_CHECKING:
    from .table import Driver

__all__ = [
    "RULES",
    "Answer",
    "Rule",
    "forbidden",
    "prohibits",
    "rule",
    "run_cases",
]

OK = "CUDA_SUCCESS"
UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"
CAPTURED_EVENT = "CUDA_ERROR_CAPTURED_EVENT"
ILLEGAL_STATE = "CUDA_ERROR_ILLEGAL_STATE"
ISOLATION = "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
IMPLICIT = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
MERGE = "CUDA_ERROR_STREAM_CAPTURE_MERGE"
UNJOINED = "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
UNMATCHED = "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"
WRONG_THREAD = "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"


@dataclass(frozen=True)
class Answer:
    """What a driver answers to a call in one situation.

    Attributes
    ----------
    result : str
        Result name; ``CUDA_SUCCESS`` where the call is allowed.
    invalidates : bool
        Whether the capture is lost by it.
    again : str
        Result once the capture is invalidated.
    """

    result: str
    invalidates: bool = False
    again: str = ""

    def at(self, invalidated: bool) -> str:
        """Return the result for a capture that is, or is not yet, invalidated."""
        return (self.again or self.result) if invalidated else self.result


@dataclass(frozen=True)
class Rule:
    """How one driver call meets stream capture.

    Attributes
    ----------
    call : str
    named, nearby : Answer
        Answers in these situations.
    nodes : int
        Nodes that the call adds to the graph when it names a capturing stream.
    everywhere : bool
        The call concerns the whole context: ``nearby`` holds for every capture in it, whatever its
        mode and thread.
    why, remedy : str
        Clauses for messages, where the call can be refused.
    """

    call: str
    named: Answer
    nearby: Answer
    nodes: int = 0
    why: str = ""
    remedy: str = ""
    everywhere: bool = False


_ALLOWED = Answer(OK)
_REFUSED = Answer(UNSUPPORTED, True, UNSUPPORTED)
_RECORDED = Answer(OK, False, INVALIDATED)
_EVENT = Answer(CAPTURED_EVENT, True, INVALID_VALUE)
_EVENT_TIME = Answer(CAPTURED_EVENT, False, INVALID_VALUE)

_WAITS = "it would have to wait for work that is only being recorded"
_MAY_WAIT = "it may wait for the whole device, and with it for work that is only being recorded"
_BEFORE = "do it before the capture or after it"
_ARENA = "take the memory from an Arena before the capture"
_KEEP = "keep the object until the capture has ended; finalisers of this library do"
_CHILD = "launch it after the capture, or add its graph to the capture as a child node"
_PLAIN = "use cuMemcpyDtoDAsync, which takes pointers of two devices as well"
_RECORD = "order work with events inside the graph; wait for the stream after the launch"


def _unsafe(call: str, why: str, remedy: str) -> Rule:
    return Rule(call, _ALLOWED, _REFUSED, why=why, remedy=remedy)


def _recorded(call: str, nodes: int = 1) -> Rule:
    return Rule(call, _RECORDED, _ALLOWED, nodes)


def _free(call: str) -> Rule:
    return Rule(call, _ALLOWED, _ALLOWED)


_ROWS: tuple[Rule, ...] = (
    # Memory and synchronous copies.
    _unsafe("cuMemAlloc", _MAY_WAIT, _ARENA),
    _unsafe("cuMemFree", _MAY_WAIT, _KEEP),
    _unsafe("cuMemHostAlloc", _MAY_WAIT, _ARENA),
    _unsafe("cuMemFreeHost", _MAY_WAIT, _KEEP),
    _free("cuMemcpyHtoD"),  # refused only beside a captured blocking stream
    _free("cuMemcpyDtoH"),
    _unsafe("cuMemPoolTrimTo", _MAY_WAIT, _BEFORE),
    _unsafe("cuMemPoolGetUsage", _MAY_WAIT, _BEFORE),
    _free("cuMemGetInfo"),
    # Waiting.
    Rule("cuCtxSynchronize", _ALLOWED, _REFUSED, 0, _WAITS, _RECORD, everywhere=True),
    Rule("cuStreamSynchronize", _REFUSED, _REFUSED, 0, _WAITS, _RECORD),
    Rule("cuStreamQuery", _REFUSED, _REFUSED, 0, _WAITS, _RECORD),
    Rule("cuEventSynchronize", _EVENT, _REFUSED, 0, _WAITS, _RECORD),
    Rule("cuEventQuery", _EVENT, _REFUSED, 0, _WAITS, _RECORD),
    Rule("cuEventElapsedTime", _EVENT_TIME, _ALLOWED, 0, _WAITS, _RECORD),
    # Modules and executable graphs.
    _free("cuModuleLoadData"),
    _unsafe("cuModuleUnload", _MAY_WAIT, _KEEP),
    _free("cuModuleGetFunction"),
    _free("cuFuncGetAttribute"),
    _free("cuGraphCreate"),
    _free("cuGraphDestroy"),
    _unsafe("cuGraphInstantiate", _MAY_WAIT, _BEFORE),
    _unsafe("cuGraphExecDestroy", _MAY_WAIT, _KEEP),
    _free("cuGraphExecUpdate"),
    _free("cuGraphExecMemsetNodeSetParams"),
    Rule("cuGraphUpload", _REFUSED, _ALLOWED, 0, "an upload cannot be recorded", _BEFORE),
    Rule("cuGraphLaunch", _REFUSED, _ALLOWED, 0, "a launch cannot be recorded", _CHILD),
    # Streams, events, contexts.
    _free("cuStreamCreateWithPriority"),
    _free("cuStreamDestroy"),
    _free("cuEventCreate"),
    _free("cuEventDestroy"),
    _free("cuDeviceGetAttribute"),
    _free("cuCtxSetCurrent"),
    _free("cuDevicePrimaryCtxRetain"),
    # Recorded on a capturing stream.
    _recorded("cuLaunchKernel"),
    _recorded("cuLaunchKernelEx"),
    _recorded("cuMemcpyHtoDAsync"),
    _recorded("cuMemcpyDtoHAsync"),
    _recorded("cuMemcpyDtoDAsync"),
    Rule("cuMemcpyPeerAsync", _REFUSED, _ALLOWED, 0, "this copy cannot be recorded", _PLAIN),
    _recorded("cuMemsetD8Async"),
    _recorded("cuMemsetD32Async"),
    Rule("cuMemAllocAsync", _RECORDED, _REFUSED, 1, _MAY_WAIT, _ARENA),
    Rule("cuMemFreeAsync", _RECORDED, _REFUSED, 1, _MAY_WAIT, _KEEP),
    _recorded("cuStreamUpdateCaptureDependencies", 0),
    _recorded("cuEventRecord", 0),
    _recorded("cuStreamWaitEvent", 0),
)

RULES: Mapping[str, Rule] = {r.call: r for r in _ROWS}
"""The table, by call. A call that is missing is always allowed."""


def rule(call: str) -> Rule:
    """Return the rule of a call."""
    return RULES.get(call) or _free(call)


def prohibits(capture: CaptureMode, thread: CaptureMode, *, same_thread: bool) -> bool:
    """Whether a capture prohibits a thread from potentially unsafe calls.

    Parameters
    ----------
    capture : CaptureMode
        Mode with which the capture was begun.
    thread : CaptureMode
        Mode of the thread that makes the call (``cuThreadExchangeStreamCaptureMode``).
    same_thread : bool
        Whether that thread began the capture.
    """
    if thread == CaptureMode.RELAXED:
        return False
    if same_thread:
        return capture != CaptureMode.RELAXED
    return capture == CaptureMode.GLOBAL and thread == CaptureMode.GLOBAL


def forbidden(
    call: str, mode: CaptureMode = CaptureMode.THREAD_LOCAL, *, on_captured: bool = False
) -> Rule | None:
    """Return the rule that forbids a call while this thread captures, or None if it is allowed.

    Parameters
    ----------
    call : str
        Driver call, e.g. ``"cuMemAlloc"``.
    mode : CaptureMode
        Mode of the capture.
    on_captured : bool
        Whether the call names a captured stream or event.
    """
    r = rule(call)
    if on_captured and r.named.result != OK:
        return r
    prohibited = r.everywhere or prohibits(mode, CaptureMode.GLOBAL, same_thread=True)
    return r if prohibited and r.nearby.result != OK else None


def run_cases(driver: Driver, *, image: bytes, kernel: str, only: str = "") -> list[dict[str, Any]]:
    """Run every case of :mod:`~memra_lowlevel.driver.legality_cases` against a driver.

    Parameters
    ----------
    driver : Driver
    image : bytes
        A module to load, with a kernel without parameters.
    kernel : str
        Name of that kernel.
    only : str
        Run the cases whose id contains this.

    Returns
    -------
    list of dict
        ``case`` (id) and ``answers`` (what each step gave, in order).
    """
    from .legality_cases import CASES, run_case

    return [
        {"case": c.id, "answers": run_case(driver, c, image=image, kernel=kernel)}
        for c in CASES
        if only in c.id
    ]
