"""What both drivers share: counting and tracing of calls, names of handles, capture causes."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, Literal, ParamSpec, TypeVar

from ..errors import CaptureError, DriverError, MemraError
from . import explain
from .trace import TraceRing, caller

__all__ = ["ActiveCapture", "DriverBase", "driver_call"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="DriverBase")


@dataclass
class ActiveCapture:
    """A capture that was begun through this driver and has not ended.

    Attributes
    ----------
    stream : int
        The stream on which it was begun.
    thread : int
        Identity of the thread that began it.
    cause : str
        The first call that the driver refused meanwhile; empty while there is none.
    """

    stream: int
    thread: int
    cause: str = ""


class DriverBase:
    """Counting, tracing, names and error making for a driver.

    The lock is taken around every call of the host driver (its state is Python objects), and only
    around the counting of the CUDA driver (whose library is thread-safe itself).
    """

    kind: Literal["cuda", "host"]
    _locks_calls = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._count_sources: list[Callable[[], Mapping[str, int]]] = []
        self._names: dict[int, str] = {}
        self.trace = TraceRing(names=self._names)
        self._active: dict[int, ActiveCapture] = {}
        self.told_sticky = False  # an error that ended a context was handed to somebody

    # -- book-keeping --------------------------------------------------------------------------
    def counts(self) -> Mapping[str, int]:
        """Return the calls made so far by name.

        Calls made through :meth:`entry_point` are counted by whoever makes them and merged here
        through :meth:`add_count_source`.
        """
        with self._lock:
            total = Counter(self._counts)
        for source in self._count_sources:
            total.update(source())
        return total

    def add_count_source(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Add the counters of native code, which calls entry points without this object."""
        self._count_sources.append(source)

    def name_handle(self, handle: int, name: str) -> None:
        """Give a stream, event, kernel, graph or buffer a name for messages and the trace."""
        if name:
            self._names[handle] = name
        else:
            self._names.pop(handle, None)

    def handle_name(self, handle: int) -> str:
        """Name of a handle, or the handle in hexadecimal."""
        return self._names.get(handle, f"0x{handle:x}")

    def error_from(self, code: int, call: str, stream: int = 0, kernel: int = 0) -> MemraError:
        """Make the exception for a result code that native code received from an entry point."""
        return self._error(explain.result_name(code), call, stream=stream, kernel=kernel)

    # -- errors --------------------------------------------------------------------------------
    def _error(
        self,
        result: str,
        call: str,
        detail: str = "",
        *,
        remedy: str = "",
        stream: int = 0,
        kernel: int = 0,
    ) -> MemraError:
        """Make the exception for a result; knows the stream, the kernel and a capture's cause."""
        if explain.is_capture_result(result):
            self._note_offence(result, call)
        cause = next((c.cause for c in self._active.values() if c.cause), "")
        own = self._active.get(stream)
        if own is not None and own.cause:
            cause = own.cause
        error = explain.make_error(
            result,
            call,
            detail,
            remedy=remedy,
            stream=self.handle_name(stream) if stream else None,
            kernel=self.handle_name(kernel) if kernel else None,
            where=caller(),
            recent=self.trace.recent(),
            cause=cause,
        )
        self.told_sticky |= isinstance(error, DriverError) and error.sticky
        return error

    def _note_offence(self, result: str, call: str) -> None:
        text = ""
        for capture in list(self._active.values()):
            if not capture.cause and result != "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED":
                text = text or f"{call} ({explain.short(result)}) at {caller()}"
                capture.cause = text

    # -- captures ------------------------------------------------------------------------------
    def _capture_began(self, stream: int) -> None:
        self._active[stream] = ActiveCapture(stream, threading.get_ident())

    def _capture_ended(self, stream: int) -> None:
        self._active.pop(stream, None)

    def active_captures(self) -> list[ActiveCapture]:
        """Return the captures begun through this driver that have not ended, on any thread."""
        return list(self._active.values())


def driver_call(fn: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Count and trace a method of a driver; take the lock where the driver asks for it."""
    name = fn.__name__
    order = list(inspect.signature(fn).parameters)[1:]
    i_stream = order.index("stream") if "stream" in order else -1
    i_kernel = order.index("func") if "func" in order else -1

    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        stream = kernel = 0
        if i_stream >= 0:
            stream = args[i_stream] if i_stream < len(args) else kwargs.get("stream", 0)  # type: ignore[assignment]
        if i_kernel >= 0:
            kernel = args[i_kernel] if i_kernel < len(args) else kwargs.get("func", 0)  # type: ignore[assignment]
        self.trace.record(name, stream, kernel)
        if self._locks_calls:
            with self._lock:
                self._counts[name] += 1
                return fn(self, *args, **kwargs)
        with self._lock:
            self._counts[name] += 1
        return fn(self, *args, **kwargs)

    functools.update_wrapper(wrapper, fn)
    wrapper.__is_driver_call__ = True  # type: ignore[attr-defined]
    return wrapper


def result_of(error: BaseException) -> str:
    """Return the result name behind an exception; its class name where it has none."""
    if isinstance(error, DriverError | CaptureError):
        return error.result or type(error).__name__
    return getattr(error, "result", "") or type(error).__name__
