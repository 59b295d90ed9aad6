"""Cases of stream capture that run against any driver, and the answers the table predicts.

A case begins a capture, makes one call twice (first and second offence), ends the capture, and
then tries whether life goes on: a new capture on the same stream, its launch, the result in
memory. Script cases cover forks, joins, threads and ends that a single call does not show.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..errors import MemraError
from . import legality
from .calls import result_of
from .legality import OK
from .table import (
    CaptureMode,
    CaptureStatus,
    DeviceAttribute,
    Driver,
    LaunchAttributes,
    MemsetNodeParams,
)

__all__ = ["CASES", "Case", "expected", "run_case"]

_N = 64  # bytes of every buffer
_ONE = (1, 1, 1)
_WARP = DeviceAttribute.WARP_SIZE
Answers = dict[str, str]


class Env:
    """Objects of one case, made before the capture begins."""

    def __init__(self, d: Driver, image: bytes, kernel: str):
        self.d, self.image = d, image
        self.ctx = d.cuDevicePrimaryCtxRetain(d.cuDeviceGet(0))
        d.cuCtxSetCurrent(self.ctx)

        def stream() -> int:
            return d.cuStreamCreateWithPriority(1, 0)

        def event() -> int:
            return d.cuEventCreate(0)

        self.s, self.t, self.u = stream(), stream(), stream()
        self.p, self.q = d.cuMemAlloc(_N), d.cuMemAlloc(_N)
        self.h = d.cuMemHostAlloc(_N)
        self.pageable = ctypes.create_string_buffer(_N)
        self.done0, self.done1, self.never = event(), event(), event()
        self.inside, self.inside1, self.fork = event(), event(), event()
        d.cuMemsetD32Async(self.p, 1, _N // 4, self.t)
        d.cuEventRecord(self.done0, self.t)
        d.cuEventRecord(self.done1, self.t)
        d.cuStreamSynchronize(self.t)
        self.module = d.cuModuleLoadData(image) if image else 0
        self.func = d.cuModuleGetFunction(self.module, kernel) if image else 0
        self.graph, self.node = self._graph()
        self.exec = d.cuGraphInstantiate(self.graph, 0)
        self.graph2, _ = self._graph()
        self.spare: dict[str, list[int]] = {
            "memory": [d.cuMemAlloc(_N), d.cuMemAlloc(_N)],
            "pinned": [d.cuMemHostAlloc(_N), d.cuMemHostAlloc(_N)],
            "pool": [d.cuMemAllocAsync(_N, self.t), d.cuMemAllocAsync(_N, self.t)],
            "stream": [stream(), stream()],
            "event": [event(), event()],
            "graph": [self._graph()[0], self._graph()[0]],
            "exec": [d.cuGraphInstantiate(self.graph, 0), d.cuGraphInstantiate(self.graph, 0)],
            "module": [d.cuModuleLoadData(image), d.cuModuleLoadData(image)] if image else [],
        }
        d.cuStreamSynchronize(self.t)

    def _graph(self) -> tuple[int, int]:
        g = self.d.cuGraphCreate()
        node = self.d.cuGraphAddMemsetNode(g, [], MemsetNodeParams(self.p, 7, 4, _N // 4), self.ctx)
        return g, node

    def close(self) -> None:
        """Release what can be released; a broken capture may keep some of it."""
        d = self.d
        for s in (self.s, self.t, self.u):
            _try(lambda s=s: d.cuStreamEndCapture(s))  # type: ignore[misc]
        undo: list[Callable[[], object]] = [lambda: d.cuGraphExecDestroy(self.exec)]
        release = {
            "memory": d.cuMemFree,
            "pinned": d.cuMemFreeHost,
            "stream": d.cuStreamDestroy,
            "event": d.cuEventDestroy,
            "graph": d.cuGraphDestroy,
            "exec": d.cuGraphExecDestroy,
            "module": d.cuModuleUnload,
        }
        for kind, free in release.items():
            undo += [lambda free=free, x=x: free(x) for x in self.spare[kind]]  # type: ignore[misc]
        undo += [lambda x=x: d.cuMemFreeAsync(x, self.t) for x in self.spare["pool"]]  # type: ignore[misc]
        undo += [lambda x=x: d.cuGraphDestroy(x) for x in (self.graph, self.graph2)]  # type: ignore[misc]
        events = (self.done0, self.done1, self.never, self.inside, self.inside1, self.fork)
        undo += [lambda x=x: d.cuEventDestroy(x) for x in events]  # type: ignore[misc]
        undo += [lambda: d.cuStreamSynchronize(self.t)]
        undo += [lambda x=x: d.cuStreamDestroy(x) for x in (self.s, self.t, self.u)]  # type: ignore[misc]
        undo += [lambda x=x: d.cuMemFree(x) for x in (self.p, self.q)]  # type: ignore[misc]
        undo += [lambda: d.cuMemFreeHost(self.h)]
        if self.module:
            undo.append(lambda: d.cuModuleUnload(self.module))
        undo.append(lambda: d.cuDevicePrimaryCtxRelease(d.cuDeviceGet(0)))
        for action in undo:
            _try(action)


def _try(action: Callable[[], object]) -> str:
    try:
        value = action()
    except MemraError as error:
        return result_of(error)
    return "CUDA_ERROR_NOT_READY" if value is False else OK


def _release(env: Env, kind: str, free: Callable[[int], None]) -> None:
    free(env.spare[kind][-1])
    env.spare[kind].pop()  # only if it went well


Action = Callable[[Env], object]
Situation = Literal["named", "nearby"]


def _nearby_actions() -> dict[str, Action]:
    """Return the calls that name nothing captured."""
    return {
        "cuMemAlloc": lambda e: e.spare["memory"].append(e.d.cuMemAlloc(_N)),
        "cuMemFree": lambda e: _release(e, "memory", e.d.cuMemFree),
        "cuMemHostAlloc": lambda e: e.spare["pinned"].append(e.d.cuMemHostAlloc(_N)),
        "cuMemFreeHost": lambda e: _release(e, "pinned", e.d.cuMemFreeHost),
        "cuMemcpyHtoD": lambda e: e.d.cuMemcpyHtoD(e.q, ctypes.addressof(e.pageable), _N),
        "cuMemcpyDtoH": lambda e: e.d.cuMemcpyDtoH(ctypes.addressof(e.pageable), e.q, _N),
        "cuMemGetInfo": lambda e: e.d.cuMemGetInfo(),
        "cuMemPoolTrimTo": lambda e: e.d.cuMemPoolTrimTo(e.d.cuDeviceGet(0), 0),
        "cuMemPoolGetUsage": lambda e: e.d.cuMemPoolGetUsage(e.d.cuDeviceGet(0)),
        "cuMemAllocAsync": lambda e: e.spare["pool"].append(e.d.cuMemAllocAsync(_N, e.t)),
        "cuMemFreeAsync": lambda e: _release(e, "pool", lambda x: e.d.cuMemFreeAsync(x, e.t)),
        "cuMemsetD32Async": lambda e: e.d.cuMemsetD32Async(e.q, 3, _N // 4, e.t),
        "cuMemcpyHtoDAsync": lambda e: e.d.cuMemcpyHtoDAsync(e.q, e.h, _N, e.t),
        "cuMemcpyDtoHAsync": lambda e: e.d.cuMemcpyDtoHAsync(e.h, e.q, _N, e.t),
        "cuCtxSynchronize": lambda e: e.d.cuCtxSynchronize(),
        "cuStreamSynchronize": lambda e: e.d.cuStreamSynchronize(e.t),
        "cuStreamQuery": lambda e: e.d.cuStreamQuery(e.t),
        "cuEventSynchronize": lambda e: e.d.cuEventSynchronize(e.done0),
        "cuEventQuery": lambda e: e.d.cuEventQuery(e.done0),
        "cuEventElapsedTime": lambda e: e.d.cuEventElapsedTime(e.done0, e.done1),
        "cuEventRecord": lambda e: e.d.cuEventRecord(e.never, e.t),
        "cuStreamWaitEvent": lambda e: e.d.cuStreamWaitEvent(e.t, e.done0),
        "cuModuleLoadData": lambda e: e.spare["module"].append(e.d.cuModuleLoadData(e.image)),
        "cuModuleUnload": lambda e: _release(e, "module", e.d.cuModuleUnload),
        "cuFuncGetParamInfo": lambda e: e.d.cuFuncGetParamInfo(e.func, 0),
        "cuLaunchKernel": lambda e: e.d.cuLaunchKernel(e.func, _ONE, _ONE, 0, e.t, 0),
        "cuStreamCreateWithPriority": lambda e: e.spare["stream"].append(
            e.d.cuStreamCreateWithPriority(1, 0)
        ),
        "cuStreamDestroy": lambda e: _release(e, "stream", e.d.cuStreamDestroy),
        "cuEventCreate": lambda e: e.spare["event"].append(e.d.cuEventCreate(0)),
        "cuEventDestroy": lambda e: _release(e, "event", e.d.cuEventDestroy),
        "cuCtxSetCurrent": lambda e: e.d.cuCtxSetCurrent(e.ctx),
        "cuDeviceGetAttribute": lambda e: e.d.cuDeviceGetAttribute(_WARP, e.d.cuDeviceGet(0)),
        "cuGraphCreate": lambda e: e.spare["graph"].append(e.d.cuGraphCreate()),
        "cuGraphDestroy": lambda e: _release(e, "graph", e.d.cuGraphDestroy),
        "cuGraphInstantiate": lambda e: e.spare["exec"].append(e.d.cuGraphInstantiate(e.graph, 0)),
        "cuGraphExecDestroy": lambda e: _release(e, "exec", e.d.cuGraphExecDestroy),
        "cuGraphExecUpdate": lambda e: e.d.cuGraphExecUpdate(e.exec, e.graph2),
        "cuGraphExecMemsetNodeSetParams": lambda e: e.d.cuGraphExecMemsetNodeSetParams(
            e.exec, e.node, MemsetNodeParams(e.p, 7, 4, _N // 4), e.ctx
        ),
        "cuGraphUpload": lambda e: e.d.cuGraphUpload(e.exec, e.t),
        "cuGraphLaunch": lambda e: e.d.cuGraphLaunch(e.exec, e.t),
    }


def _named_actions() -> dict[str, Action]:
    """Return the calls that name the capturing stream ``s``, or an event recorded on it."""
    return {
        "cuStreamSynchronize": lambda e: e.d.cuStreamSynchronize(e.s),
        "cuStreamQuery": lambda e: e.d.cuStreamQuery(e.s),
        "cuEventSynchronize": lambda e: e.d.cuEventSynchronize(e.inside),
        "cuEventQuery": lambda e: e.d.cuEventQuery(e.inside),
        "cuEventElapsedTime": lambda e: e.d.cuEventElapsedTime(e.inside, e.inside1),
        "cuEventRecord": lambda e: e.d.cuEventRecord(e.fork, e.s),
        "cuStreamWaitEvent": lambda e: e.d.cuStreamWaitEvent(e.s, e.inside),
        "cuMemsetD8Async": lambda e: e.d.cuMemsetD8Async(e.q, 3, _N, e.s),
        "cuMemsetD32Async": lambda e: e.d.cuMemsetD32Async(e.q, 3, _N // 4, e.s),
        "cuMemcpyHtoDAsync": lambda e: e.d.cuMemcpyHtoDAsync(e.q, e.h, _N, e.s),
        "cuMemcpyDtoHAsync": lambda e: e.d.cuMemcpyDtoHAsync(e.h, e.q, _N, e.s),
        "cuMemcpyDtoDAsync": lambda e: e.d.cuMemcpyDtoDAsync(e.q, e.p, _N, e.s),
        "cuMemcpyPeerAsync": lambda e: e.d.cuMemcpyPeerAsync(e.q, e.ctx, e.p, e.ctx, _N, e.s),
        "cuMemAllocAsync": lambda e: e.d.cuMemAllocAsync(_N, e.s),
        "cuGraphLaunch": lambda e: e.d.cuGraphLaunch(e.exec, e.s),
        "cuGraphUpload": lambda e: e.d.cuGraphUpload(e.exec, e.s),
        "cuLaunchKernel": lambda e: e.d.cuLaunchKernel(e.func, _ONE, _ONE, 0, e.s, 0),
        "cuLaunchKernelEx": lambda e: e.d.cuLaunchKernelEx(
            e.func, _ONE, _ONE, 0, e.s, 0, LaunchAttributes()
        ),
    }


_ON_OTHER_THREADS = (
    "cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuMemcpyHtoD", "cuMemcpyDtoH",
    "cuCtxSynchronize", "cuStreamSynchronize", "cuStreamQuery", "cuEventSynchronize",
    "cuEventQuery", "cuModuleLoadData", "cuModuleUnload", "cuGraphExecDestroy",
    "cuGraphInstantiate", "cuMemAllocAsync", "cuMemsetD32Async",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes
    ----------
    id : str
        ``call/situation/mode/thread``, or ``script/name/mode``.
    mode : CaptureMode
    call : str
        Driver call of a call case; empty for a script.
    situation : str
    other_thread : bool
        The call is made by another thread than the capture's.
    script : callable, optional
        Steps of a script case.
    answers : dict
        What a script case expects.
    """

    id: str
    mode: CaptureMode
    call: str = ""
    situation: Situation = "nearby"
    other_thread: bool = False
    script: Callable[[Env, CaptureMode, Answers], None] | None = None
    answers: Answers = field(default_factory=dict)
    needs_image: bool = False


def _on_thread(env: Env, action: Callable[[], str], other: bool) -> str:
    if not other:
        return action()
    out: list[str] = []

    def body() -> None:
        env.d.cuCtxSetCurrent(env.ctx)
        out.append(action())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return out[0] if out else "no answer"


def _status(env: Env, stream: int) -> str:
    try:
        return env.d.cuStreamIsCapturing(stream).name
    except MemraError as error:
        return result_of(error)


def _end(env: Env, stream: int, out: Answers) -> None:
    """End the capture and count the nodes of its graph."""
    try:
        graph = env.d.cuStreamEndCapture(stream)
    except MemraError as error:
        out["end"], out["nodes"] = result_of(error), "-"
        return
    out["end"], out["nodes"] = OK, str(len(env.d.cuGraphGetNodes(graph)))
    _try(lambda: env.d.cuGraphDestroy(graph))


def _life(env: Env, mode: CaptureMode) -> str:
    """Capture again on the same stream, launch, and look at the result."""
    d, exec_ = env.d, 0
    host = (ctypes.c_uint32 * (_N // 4))()
    try:
        # What the case itself put there must not overtake us: its stream, and a copy from pageable
        # memory, which the driver may still carry out when the call has returned.
        d.cuStreamSynchronize(env.t)
        d.cuMemcpyDtoH(ctypes.addressof(host), env.q, _N)
        d.cuStreamBeginCapture(env.s, mode)
        d.cuMemsetD32Async(env.q, 0xC0FFEE, _N // 4, env.s)
        graph = d.cuStreamEndCapture(env.s)
        exec_ = d.cuGraphInstantiate(graph, 0)
        d.cuGraphLaunch(exec_, env.s)
        d.cuGraphLaunch(env.exec, env.s)
        d.cuStreamSynchronize(env.s)
        d.cuMemcpyDtoH(ctypes.addressof(host), env.q, _N)
        if list(host) != [0xC0FFEE] * (_N // 4):
            return "wrong bytes"
        d.cuMemcpyDtoH(ctypes.addressof(host), env.p, _N)
        if list(host) != [7] * (_N // 4):
            return "wrong bytes of the older graph"
        d.cuGraphExecDestroy(exec_)
        d.cuGraphDestroy(graph)
    except MemraError as error:
        return result_of(error)
    return OK


def run_case(d: Driver, case: Case, *, image: bytes, kernel: str) -> Answers:
    """Run one case; return the answers by step. Needs nothing, leaves nothing behind."""
    env = Env(d, image, kernel)
    out: Answers = {}
    try:
        if case.script is not None:
            try:
                case.script(env, case.mode, out)
            except MemraError as error:
                out["stopped"] = result_of(error)
        else:
            table = _NAMED if case.situation == "named" else _NEARBY
            action = table[case.call]
            d.cuStreamBeginCapture(env.s, case.mode)
            d.cuMemsetD32Async(env.p, 5, _N // 4, env.s)
            d.cuEventRecord(env.inside, env.s)
            d.cuEventRecord(env.inside1, env.s)
            for step in ("first", "second"):
                out[step] = _on_thread(env, lambda: _try(lambda: action(env)), case.other_thread)
                out[step + "_status"] = _status(env, env.s)
            _end(env, env.s, out)
        out["life"] = _life(env, case.mode)
    finally:
        env.close()
    return out


def expected(case: Case) -> Answers:
    """Return the answers that the table predicts."""
    if case.script is not None:
        return {**case.answers, "life": case.answers.get("life", OK)}
    rule = legality.rule(case.call)
    if case.situation == "named":
        answer, nodes = rule.named, rule.nodes
    elif rule.everywhere or legality.prohibits(
        case.mode, CaptureMode.GLOBAL, same_thread=not case.other_thread
    ):
        answer, nodes = rule.nearby, 0
    else:
        answer, nodes = legality.Answer(OK), 0
    lost = answer.invalidates
    status = (CaptureStatus.INVALIDATED if lost else CaptureStatus.ACTIVE).name
    n_nodes = 1 + 2 * nodes if answer.result == OK else 1
    return {
        "first": answer.result,
        "first_status": status,
        "second": answer.at(lost),
        "second_status": status,
        "end": legality.INVALIDATED if lost else OK,
        "nodes": "-" if lost else str(n_nodes),
        "life": OK,
    }


_NAMED = _named_actions()
_NEARBY = _nearby_actions()
_IMAGE_CALLS = ("cuModule", "cuLaunchKernel", "cuFunc")


def _cases() -> Iterator[Case]:
    for mode in CaptureMode:
        name = mode.name.lower()
        for call in _NEARBY:
            needs = call.startswith(_IMAGE_CALLS)
            yield Case(f"{call}/nearby/{name}/same", mode, call, needs_image=needs)
            if call in _ON_OTHER_THREADS:
                yield Case(
                    f"{call}/nearby/{name}/other", mode, call, other_thread=True, needs_image=needs
                )
        for call in _NAMED:
            needs = call.startswith(_IMAGE_CALLS)
            yield Case(f"{call}/named/{name}/same", mode, call, "named", needs_image=needs)
    from .legality_scripts import scripts

    yield from scripts()


CASES: tuple[Case, ...] = tuple(_cases())
