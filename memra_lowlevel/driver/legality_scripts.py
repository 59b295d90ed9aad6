# ruff: noqa: D401
"""Script cases of stream capture: forks, joins, threads, ends, events that outlive a capture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from . import legality
from .legality import OK
from .table import CaptureMode

if TYPE_CHECKING:
    from .legality_cases import Answers, Case, Env

__all__ = ["scripts"]

Script = Callable[["Env", CaptureMode, "Answers"], None]
_ALL = tuple(CaptureMode)
_ROWS: list[
    tuple[str, Script, Callable[[CaptureMode], dict[str, str]], tuple[CaptureMode, ...]]
] = []


def _case(
    expect: dict[str, str] | Callable[[CaptureMode], dict[str, str]],
    modes: tuple[CaptureMode, ...] = _ALL,
) -> Callable[[Script], Script]:
    """Register a script under its name with the answers the rules of capture predict."""

    def register(script: Script) -> Script:
        predict = expect if callable(expect) else (lambda _mode: expect)
        _ROWS.append((script.__name__, script, predict, modes))
        return script

    return register


def scripts() -> Iterator[Case]:
    """Yield the script cases."""
    from .legality_cases import Case

    for name, script, predict, modes in _ROWS:
        for mode in modes:
            yield Case(
                f"script/{name}/{mode.name.lower()}", mode, script=script, answers=predict(mode)
            )


def _step(out: Answers, name: str, action: Callable[[], object]) -> None:
    from .legality_cases import _try

    out[name] = _try(action)


def _status(env: Env, stream: int, out: Answers, name: str) -> None:
    from .legality_cases import _status as status

    out[name] = status(env, stream)


def _end(env: Env, out: Answers) -> None:
    from .legality_cases import _end as end

    end(env, env.s, out)


@_case({"end": OK, "nodes": "0"})
def empty(env: Env, mode: CaptureMode, out: Answers) -> None:
    env.d.cuStreamBeginCapture(env.s, mode)
    _end(env, out)


@_case({"fork": OK, "fork_status": "ACTIVE", "join": OK, "end": OK, "nodes": "3"})
def fork_and_join(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.fork, env.s)
    _step(out, "fork", lambda: d.cuStreamWaitEvent(env.u, env.fork))
    d.cuMemsetD32Async(env.q, 1, 4, env.u)
    _status(env, env.u, out, "fork_status")
    d.cuEventRecord(env.inside, env.u)
    _step(out, "join", lambda: d.cuStreamWaitEvent(env.s, env.inside))
    d.cuMemsetD32Async(env.p, 2, 4, env.s)
    _end(env, out)


@_case({"end": legality.UNJOINED, "nodes": "-", "after": "NONE", "after_fork": "NONE"})
def fork_not_joined(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.fork, env.s)
    d.cuStreamWaitEvent(env.u, env.fork)
    d.cuMemsetD32Async(env.q, 1, 4, env.u)
    _end(env, out)
    _status(env, env.s, out, "after")
    _status(env, env.u, out, "after_fork")


@_case({"end": OK, "nodes": "1", "after_fork": "NONE"})
def fork_without_work(env: Env, mode: CaptureMode, out: Answers) -> None:
    """A fork that recorded nothing has nothing to join."""
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.fork, env.s)
    d.cuStreamWaitEvent(env.u, env.fork)
    _end(env, out)
    _status(env, env.u, out, "after_fork")


@_case({"end": legality.UNJOINED, "nodes": "-"})
def work_after_join(env: Env, mode: CaptureMode, out: Answers) -> None:
    """Work recorded on the fork after the join is open again."""
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.fork, env.s)
    d.cuStreamWaitEvent(env.u, env.fork)
    d.cuMemsetD32Async(env.q, 1, 4, env.u)
    d.cuEventRecord(env.inside, env.u)
    d.cuStreamWaitEvent(env.s, env.inside)
    d.cuMemsetD32Async(env.q, 2, 4, env.u)
    _end(env, out)


@_case(
    {
        "end_of_fork": legality.UNMATCHED,
        "status": "INVALIDATED",
        "end": legality.INVALIDATED,
        "nodes": "-",
    }
)
def end_on_fork(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.fork, env.s)
    d.cuStreamWaitEvent(env.u, env.fork)
    _step(out, "end_of_fork", lambda: d.cuStreamEndCapture(env.u))
    _status(env, env.s, out, "status")
    _end(env, out)


@_case({"first": legality.ILLEGAL_STATE, "status": "NONE", "second": legality.ILLEGAL_STATE})
def end_without_begin(env: Env, mode: CaptureMode, out: Answers) -> None:
    _step(out, "first", lambda: env.d.cuStreamEndCapture(env.s))
    _status(env, env.s, out, "status")
    _step(out, "second", lambda: env.d.cuStreamEndCapture(env.s))


@_case(
    {"again": legality.ILLEGAL_STATE, "status": "ACTIVE", "end": OK, "nodes": "1"},
)
def begin_twice(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    _step(out, "again", lambda: d.cuStreamBeginCapture(env.s, mode))
    _status(env, env.s, out, "status")
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    _end(env, out)


@_case({"again": legality.ILLEGAL_STATE, "status": "ACTIVE", "end": OK, "nodes": "1"})
def begin_on_fork(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.fork, env.s)
    d.cuStreamWaitEvent(env.u, env.fork)
    _step(out, "again", lambda: d.cuStreamBeginCapture(env.u, mode))
    _status(env, env.s, out, "status")
    _end(env, out)


@_case({"second": OK, "end_second": OK, "end": OK, "nodes": "1"})
def two_captures(env: Env, mode: CaptureMode, out: Answers) -> None:
    """Two streams of one thread may be captured side by side."""
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    _step(out, "second", lambda: d.cuStreamBeginCapture(env.u, mode))
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuMemsetD32Async(env.q, 1, 4, env.u)
    _step(out, "end_second", lambda: d.cuGraphDestroy(d.cuStreamEndCapture(env.u)))
    _end(env, out)


@_case(
    {
        "wait": legality.MERGE,
        "status": "INVALIDATED",
        "status_other": "INVALIDATED",
        "end_other": legality.INVALIDATED,
        "end": legality.INVALIDATED,
        "nodes": "-",
    }
)
def merge(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuStreamBeginCapture(env.u, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuMemsetD32Async(env.q, 1, 4, env.u)
    d.cuEventRecord(env.inside, env.u)
    _step(out, "wait", lambda: d.cuStreamWaitEvent(env.s, env.inside))
    _status(env, env.s, out, "status")
    _status(env, env.u, out, "status_other")
    _step(out, "end_other", lambda: d.cuStreamEndCapture(env.u))
    _end(env, out)


@_case(
    {
        "wait": legality.ISOLATION,
        "status": "INVALIDATED",
        "again": legality.INVALIDATED,
        "end": legality.INVALIDATED,
        "nodes": "-",
    }
)
def isolation(env: Env, mode: CaptureMode, out: Answers) -> None:
    """A captured stream waits for an event recorded outside."""
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    _step(out, "wait", lambda: d.cuStreamWaitEvent(env.s, env.done0))
    _status(env, env.s, out, "status")
    _step(out, "again", lambda: d.cuStreamWaitEvent(env.s, env.done0))
    _end(env, out)


@_case({"wait": OK, "status": "ACTIVE", "end": OK, "nodes": "1"})
def event_never_recorded(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    _step(out, "wait", lambda: d.cuStreamWaitEvent(env.s, env.never))
    _status(env, env.s, out, "status")
    _end(env, out)


@_case(
    lambda mode: (
        {"other": OK, "status": "NONE", "end": legality.ILLEGAL_STATE, "nodes": "-"}
        if mode == CaptureMode.RELAXED
        else {
            "other": legality.WRONG_THREAD,
            "status": "NONE",
            "end": legality.ILLEGAL_STATE,
            "nodes": "-",
        }
    )
)
def end_on_other_thread(env: Env, mode: CaptureMode, out: Answers) -> None:
    from .legality_cases import _on_thread, _try

    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    out["other"] = _on_thread(
        env, lambda: _try(lambda: d.cuGraphDestroy(d.cuStreamEndCapture(env.s))), True
    )
    _status(env, env.s, out, "status")
    _end(env, out)


@_case({"other": OK, "end": OK, "nodes": "2"})
def work_from_other_thread(env: Env, mode: CaptureMode, out: Answers) -> None:
    from .legality_cases import _on_thread, _try

    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    out["other"] = _on_thread(
        env, lambda: _try(lambda: d.cuMemsetD32Async(env.q, 1, 4, env.s)), True
    )
    _end(env, out)


@_case({"exchanged": "GLOBAL", "alloc": OK, "back": "RELAXED", "end": OK, "nodes": "1"})
def relaxed_thread(env: Env, mode: CaptureMode, out: Answers) -> None:
    """A thread that set itself to relaxed may allocate during its own capture."""
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    out["exchanged"] = d.cuThreadExchangeStreamCaptureMode(CaptureMode.RELAXED).name
    try:
        _step(out, "alloc", lambda: env.spare["memory"].append(d.cuMemAlloc(64)))
    finally:
        out["back"] = d.cuThreadExchangeStreamCaptureMode(CaptureMode.GLOBAL).name
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    _end(env, out)


@_case(
    {
        "query": legality.INVALID_VALUE,
        "sync": legality.INVALID_VALUE,
        "wait": legality.INVALID_VALUE,
        "record": OK,
        "query_again": OK,
    }
)
def event_of_ended_capture(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.inside, env.s)
    d.cuGraphDestroy(d.cuStreamEndCapture(env.s))
    _step(out, "query", lambda: d.cuEventQuery(env.inside))
    _step(out, "sync", lambda: d.cuEventSynchronize(env.inside))
    _step(out, "wait", lambda: d.cuStreamWaitEvent(env.t, env.inside))
    d.cuStreamSynchronize(env.t)
    _step(out, "record", lambda: d.cuEventRecord(env.inside, env.t))
    d.cuStreamSynchronize(env.t)
    _step(out, "query_again", lambda: d.cuEventQuery(env.inside))


@_case(
    {
        "join": legality.INVALID_VALUE,
        "fork_status": "NONE",
        "record": legality.INVALIDATED,
        "end": legality.INVALIDATED,
        "nodes": "-",
    }
)
def fork_from_lost_capture(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    d.cuEventRecord(env.inside, env.s)
    _step({}, "lose", lambda: d.cuStreamSynchronize(env.s))
    _step(out, "join", lambda: d.cuStreamWaitEvent(env.u, env.inside))
    _status(env, env.u, out, "fork_status")
    _step(out, "record", lambda: d.cuEventRecord(env.fork, env.s))
    _end(env, out)


@_case({"end": legality.INVALIDATED, "end_again": legality.ILLEGAL_STATE, "status": "NONE"})
def end_twice_after_loss(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    _step({}, "lose", lambda: d.cuStreamSynchronize(env.s))
    _step(out, "end", lambda: d.cuStreamEndCapture(env.s))
    _step(out, "end_again", lambda: d.cuStreamEndCapture(env.s))
    _status(env, env.s, out, "status")


@_case(
    {
        "copy": legality.IMPLICIT,
        "status": "INVALIDATED",
        "end": legality.INVALIDATED,
        "nodes": "-",
    }
)
def legacy_copy_beside_blocking_stream(env: Env, mode: CaptureMode, out: Answers) -> None:
    """A synchronous copy runs on the legacy stream, which would wait for the captured one."""
    from .legality_cases import _end as end

    d = env.d
    blocking = d.cuStreamCreateWithPriority(0, 0)
    d.cuStreamBeginCapture(blocking, mode)
    d.cuMemsetD32Async(env.p, 1, 4, blocking)
    _step(out, "copy", lambda: d.cuMemcpyHtoD(env.q, ctypes.addressof(env.pageable), 64))
    _status(env, blocking, out, "status")
    end(env, blocking, out)
    d.cuStreamDestroy(blocking)


@_case({"record": OK, "end": OK, "nodes": "1"})
def pageable_copy_is_recorded(env: Env, mode: CaptureMode, out: Answers) -> None:
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    _step(
        out,
        "record",
        lambda: d.cuMemcpyHtoDAsync(env.q, ctypes.addressof(env.pageable), 64, env.s),
    )
    _end(env, out)


@_case({"destroy": OK, "end": OK, "nodes": "1"})
def destroy_event_of_capture(env: Env, mode: CaptureMode, out: Answers) -> None:
    """An event may go once its edge is recorded."""
    d = env.d
    d.cuStreamBeginCapture(env.s, mode)
    d.cuMemsetD32Async(env.p, 1, 4, env.s)
    event = d.cuEventCreate(2)
    d.cuEventRecord(event, env.s)
    _step(out, "destroy", lambda: d.cuEventDestroy(event))
    _end(env, out)
