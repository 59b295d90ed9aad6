"""Host cost of a launch and of a replay, beside C and beside the libraries that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import native
from ..kernels import registry
from ..runtime.launch import LaunchConfig, launch, launch_many, prepare
from .clock import host_us_in_turn
from .result import Row

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime.memory import Buffer
    from .run import Run

__all__ = ["N_NODES", "measure_launch", "measure_replay"]

N_NODES = 60
"""Kernels of the chain that is replayed."""

_BATCH = 50
# Many short turns: a host is disturbed for milliseconds now and then, and its clock wanders.
_LAUNCHES, _REPLAYS, _WAITS = (_BATCH, 31), (20, 31), (10, 31)  # calls of a turn, samples
_SMALL = (2, 3)
_BEST_OF = 20  # turns of a sample
_WARM_S = 0.3
_C_LAUNCH, _BESIDE = "launch, C", " beside others"


def measure_launch(run: Run) -> None:
    """Time one launch of a kernel with four parameters, by every path there is."""
    with _reading(run) as (kernel, source, out):
        _measure_launch(run, kernel, source, out)
    run.later(partial(_others_launch, run))


def _measure_launch(run: Run, kernel: Kernel, source: Buffer, out: Buffer) -> None:
    device, stream = run.device, run.stream
    config, arguments = LaunchConfig(1, 32), (source, 0, 1, out)
    plan = prepare(device, config, kernel, *arguments)
    plan.launch(stream)
    stream.sync()
    n_calls, n_samples = (_BATCH, 3) if run.small else _LAUNCHES
    calls: dict[str, _Call] = {
        "launch, prepared": (plan.launch, (stream,), 1),
        "launch, many at once": (launch_many, (stream, [plan] * _BATCH), _BATCH),
        "launch, new arguments": (launch, (stream, config, kernel, *arguments), 1),
    }
    bare = _bare_launches(run, plan, n_calls)
    c_row = None if bare is None else _C_LAUNCH
    if bare is None or c_row is None:
        run.notes.append("C: the compiled launch path is missing, so nothing to compare with")
    else:
        calls = {c_row: bare, **calls}
    found = _in_turn(run, calls, stream.sync, n_calls, n_samples)
    for what, samples in found.items():
        row = _row(what, samples, "launch", c_row)
        if c_row is not None and what in ("launch, prepared", "launch, many at once"):
            row.goal = _goal(row, found[c_row], 1.05)
        run.add(row)
    _with_sync(run, plan, c_row)
    _overhead(run)


def _others_launch(run: Run) -> None:
    """Time other libraries, and C once more: beside them in the process it is not what it was."""
    from .peers import launch_rows

    with _reading(run) as (kernel, source, out):
        plan = prepare(run.device, LaunchConfig(1, 32), kernel, source, 0, 1, out)
        plan.launch(run.stream)
        bare = _bare_launches(run, plan, _LAUNCHES[0])
        n_rows, c_row = len(run.rows), None if bare is None else f"launch{_BESIDE}, C"
        launch_rows(run, kernel, source, out, c_row)
        if bare is not None and c_row is not None and len(run.rows) > n_rows:
            for what, samples in _in_turn(run, {c_row: bare}, run.stream.sync, *_LAUNCHES).items():
                run.add(_row(what, samples, "launch", c_row))


@contextmanager
def _reading(run: Run) -> Iterator[tuple[Kernel, Buffer, Buffer]]:
    """Give a kernel with four parameters, and the buffers that it takes."""
    kernel = registry.kernel(run.device, "bench_read")
    source = run.device.zeros((4,), np.uint32, run.stream)
    out = run.device.zeros((32,), np.uint32, run.stream)
    yield kernel, source, out
    for buffer in (source, out):
        buffer.close()


def _bare_launches(run: Run, plan: Any, n_calls: int) -> _Call | None:
    """Give the driver call alone, made ``n_calls`` times by C; None without the compiled path."""
    if plan._plan is None:
        return None
    return native.lib.mll_bare_launches, (plan._plan, run.stream.cell, n_calls), n_calls


def _with_sync(run: Run, plan: Any, c_row: str | None) -> None:
    """Time a launch and the wait for it: what one step costs that is not captured."""
    stream = run.stream

    def ours() -> None:
        plan.launch(stream)
        stream.sync()

    def bare() -> None:
        native.lib.mll_bare_launches(plan._plan, stream.cell, 1)
        stream.sync()

    calls: dict[str, _Call] = {"launch + sync": (ours, (), 1)}
    if c_row is not None:
        calls = {f"{c_row} + sync": (bare, (), 1), **calls}
    n_calls, n_samples = _SMALL if run.small else _WAITS
    for what, samples in _in_turn(run, calls, _nothing, n_calls, n_samples).items():
        run.add(_row(what, samples, "launch + sync", c_row and f"{c_row} + sync"))


def measure_replay(run: Run, n_nodes: int = N_NODES) -> None:
    """Time the replay of a chain of small kernels: host cost, and launch with sync."""
    with _reading(run) as (kernel, source, out):
        plan = prepare(run.device, LaunchConfig(1, 32), kernel, source, 0, 1, out)
        plan.launch(run.stream)
        _chain(run, plan, n_nodes, "")
        _chain(run, plan, 1, " 1 node")
    _replay_overhead(run)
    run.later(partial(_others_replay, run, n_nodes))


def _others_replay(run: Run, n_nodes: int) -> None:
    """Time the chain as other libraries replay it, and as we and C do beside them."""
    from .peers import replay_rows

    with _reading(run) as (kernel, source, out):
        plan = prepare(run.device, LaunchConfig(1, 32), kernel, source, 0, 1, out)
        plan.launch(run.stream)
        n_rows, c_row = len(run.rows), f"replay{_BESIDE}, C" if plan._plan is not None else None
        replay_rows(run, kernel, source, out, n_nodes, c_row)
        if len(run.rows) > n_rows:
            _chain(run, plan, n_nodes, _BESIDE)


def _chain(run: Run, plan: Any, n_nodes: int, which: str) -> None:
    """Add the rows of one chain, ``which`` behind their names."""
    stream = run.stream
    with stream.capture("chain") as graph:
        for _ in range(n_nodes):
            plan.launch(stream)
    counts = (_SMALL, _SMALL) if run.small else (_REPLAYS, _WAITS)
    with graph, graph.instantiate() as step:
        step.upload(stream)
        step.launch(stream)
        stream.sync()
        cell = step._cell

        def both() -> None:
            step.launch(stream)
            stream.sync()

        def c_both() -> None:
            native.lib.mll_bare_graph_launches(cell, stream.cell, 1)
            stream.sync()

        replay, synced, c_row = f"replay{which}", f"replay{which} + sync", f"replay{which}, C"
        hosts: dict[str, _Call] = {replay: (step.launch, (stream,), 1)}
        waits: dict[str, _Call] = {synced: (both, (), 1)}
        if cell is not None:
            bare, n_calls = native.lib.mll_bare_graph_launches, counts[0][0]
            hosts = {c_row: (bare, (cell, stream.cell, n_calls), n_calls), **hosts}
            waits = {f"{c_row} + sync": (c_both, (), 1), **waits}
        for calls, settle, how, factor, more in (
            (hosts, stream.sync, counts[0], 1.0, 0.1), (waits, _nothing, counts[1], 1.03, 0.0),
        ):  # fmt: skip
            found = _in_turn(run, calls, settle, *how)
            work, base = list(calls)[-1], None if cell is None else next(iter(calls))
            for what, samples in found.items():
                row = _row(what, samples, work, base)
                if base is not None and what == work:
                    row.goal = _goal(row, found[base], factor, more)
                run.add(row)


_Call = tuple[Callable[..., object], Sequence[object], int]
"""What to call, its arguments, and how many operations one call makes."""


def _in_turn(
    run: Run, calls: dict[str, _Call], settle: Callable[[], object], n_calls: int, n_samples: int
) -> dict[str, list[float]]:
    """Give samples per operation in µs, by name."""
    counted = [(call, words, max(1, n_calls // per)) for call, words, per in calls.values()]
    best_of, warm_s = (1, 0.0) if run.small else (_BEST_OF, _WARM_S)
    found = host_us_in_turn(counted, settle, n_samples, best_of=best_of, warm_s=warm_s)
    return {
        what: [s / per for s in samples]
        for (what, (_, _, per)), samples in zip(calls.items(), found, strict=True)
    }


def _row(what: str, samples: list[float], work: str, base: str | None) -> Row:
    if what == base:
        return Row(what, "us", samples, peer="C", work=work)
    return Row(what, "us", samples, work=work, baseline=base, in_turn=base is not None)


def _goal(row: Row, base: list[float], factor: float, more: float = 0.0) -> float:
    """Give ``factor`` times what C took, and ``more``; C's time is ours less what ours took longer.

    The median of the differences of each turn repeats better than the difference of the medians,
    where a time has two modes.
    """
    longer = median(ours - c for ours, c in zip(row.samples, base, strict=True))
    return round(factor * (row.median - longer) + more, 3)


def _overhead(run: Run) -> None:
    """Add what our side of a launch takes, over a driver that does nothing."""
    if not native.available():
        run.notes.append("overhead: needs the compiled launch path")
        return
    from ..runtime.overhead import launch_overhead

    goals = {"prepared": 100.0, "new_arguments": 1000.0}
    _over_stub(run, "launch", launch_overhead, goals)


def _replay_overhead(run: Run) -> None:
    if not native.available():
        run.notes.append("overhead: needs the compiled launch path")
        return
    from ..graph.overhead import replay_overhead

    _over_stub(run, "replay", replay_overhead, {"replay": 100.0, "replay_counter": 100.0})


def _over_stub(
    run: Run, work: str, measure: Callable[..., dict[str, float]], goals: dict[str, float]
) -> None:
    n_samples, repeats = (3, 3) if run.small else (7, 30)
    samples: dict[str, list[float]] = {}
    for _ in range(n_samples):
        for name, ns in measure(repeats=repeats).items():
            samples.setdefault(name, []).append(ns)
    for name, values in samples.items():
        what = f"{work} over a stub driver, {name.replace('_', ' ')}"
        run.add(
            Row(
                what, "ns", values, work=f"{work} over a stub", note="our side alone",
                goal=goals.get(name),
            )
        )  # fmt: skip


def _nothing() -> None:
    pass
