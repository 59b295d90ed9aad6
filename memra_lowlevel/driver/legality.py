"""The rules of stream capture as one data table."""

from __future__ import annotations

from dataclasses import dataclass

from .table import CaptureMode

__all__ = ["RULES", "Answer", "Rule", "forbidden", "prohibits", "rule"]

_UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
_INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


@dataclass(frozen=True)
class Answer:
    """What the driver answers, and whether the capture is lost by it."""

    result: str
    invalidates: bool
    after_invalid: str = _INVALIDATED


@dataclass(frozen=True)
class Rule:
    """How one call meets stream capture."""

    call: str
    named: Answer | None = None
    nearby: Answer | None = None
    why: str = ""
    remedy: str = ""


_U = Answer(_UNSUPPORTED, True)
_E = Answer("CUDA_ERROR_CAPTURED_EVENT", False, "")

_ROWS = [
    Rule("cuMemAlloc", None, _U),
    Rule("cuMemFree", None, _U),
    Rule("cuMemHostAlloc", None, _U),
    Rule("cuMemFreeHost", None, _U),
    Rule("cuMemcpyHtoD", None, _U),
    Rule("cuMemcpyDtoH", None, _U),
    Rule("cuModuleLoadData", None, _U),
    Rule("cuModuleUnload", None, _U),
    Rule("cuCtxSynchronize", None, _U),
    Rule("cuStreamSynchronize", _U, _U),
    Rule("cuStreamQuery", _U, _U),
    Rule("cuEventSynchronize", _E, _U),
    Rule("cuEventQuery", _E, _U),
]
RULES = {r.call: r for r in _ROWS}


def rule(call: str) -> Rule:
    """Return the rule of a call; calls without one are always allowed."""
    return RULES.get(call) or Rule(call)


def prohibits(capture: CaptureMode, thread: CaptureMode, *, same_thread: bool) -> bool:
    """Whether a capture forbids a thread the calls that might wait for captured work."""
    if thread == CaptureMode.RELAXED:
        return False
    if same_thread:
        return capture != CaptureMode.RELAXED
    return capture == CaptureMode.GLOBAL and thread == CaptureMode.GLOBAL


def forbidden(call: str, mode: CaptureMode = CaptureMode.THREAD_LOCAL) -> Rule | None:
    """Return the rule that forbids a call during a capture of the same thread, if there is one."""
    r = RULES.get(call)
    return r if r is not None and r.nearby is not None else None
