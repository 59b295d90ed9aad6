"""Host cost of a launch and of a replay, beside C and beside the libraries that are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import native
from ..kernels import registry
from ..runtime.launch import LaunchConfig, launch, launch_many, prepare
from .clock import host_us
from .result import Row

if TYPE_CHECKING:
    from .run import Run

__all__ = ["N_NODES", "measure_launch", "measure_replay"]

N_CALLS = 200
N_NODES = 60
"""Kernels of the chain that is replayed."""

_BATCH = 50
_C_LAUNCH, _C_REPLAY = "launch, C", "replay, C"


def measure_launch(run: Run) -> None:
    """Time one launch of a kernel with four parameters, by every path there is."""
    device, stream = run.device, run.stream
    kernel = registry.kernel(device, "bench_read")
    config = LaunchConfig(1, 32)
    source = device.zeros((4,), np.uint32, stream)
    out = device.zeros((32,), np.uint32, stream)
    arguments = (source, 0, 1, out)
    plan = prepare(device, config, kernel, *arguments)
    plan.launch(stream)
    stream.sync()
    n_calls, n_samples = (_BATCH, 3) if run.small else (N_CALLS, 31)
    baseline = _C_LAUNCH if plan._plan is not None else None

    def add(
        what: str,
        call: Callable[..., Any],
        *words: Any,
        per: int = 1,
        goal: float | None = None,
        **more: Any,
    ) -> Row:
        samples = host_us(call, stream.sync, max(1, n_calls // per), n_samples, words)
        return run.add(
            Row(
                what, "us", [s / per for s in samples], work="launch", baseline=baseline,
                goal=goal, **more,
            )
        )  # fmt: skip

    c_us: float | None = None
    if baseline is not None:
        lib, cell = native.lib, stream.cell
        raw, baseline = baseline, None
        c_us = add(
            _C_LAUNCH, lib.mll_bare_launches, plan._plan, cell, n_calls, per=n_calls, peer="C"
        ).median
        baseline = raw
    else:
        run.notes.append("C: the compiled launch path is missing, so nothing to compare with")
    goal = None if c_us is None else round(1.05 * c_us, 3)
    add("launch, prepared", plan.launch, stream, goal=goal)
    add("launch, new arguments", launch, stream, config, kernel, *arguments)
    add("launch, many at once", launch_many, stream, [plan] * _BATCH, per=_BATCH, goal=goal)
    _overhead(run)
    if run.peers and device.kind == "cuda":
        from .peers import launch_rows

        launch_rows(run, kernel, source, out, baseline)
    for buffer in (source, out):
        buffer.close()


def measure_replay(run: Run, n_nodes: int = N_NODES) -> None:
    """Time the replay of a chain of small kernels: host cost, and launch with sync."""
    device, stream = run.device, run.stream
    kernel = registry.kernel(device, "bench_read")
    source = device.zeros((4,), np.uint32, stream)
    out = device.zeros((32,), np.uint32, stream)
    plan = prepare(device, LaunchConfig(1, 32), kernel, source, 0, 1, out)
    with stream.capture("chain") as graph:
        for _ in range(n_nodes):
            plan.launch(stream)
    n_calls, n_samples = (2, 3) if run.small else (20, 31)
    with graph, graph.instantiate() as step:
        step.upload(stream)
        step.launch(stream)
        stream.sync()

        def both() -> None:
            step.launch(stream)
            stream.sync()

        has_c = step._cell is not None
        if has_c:
            lib, cell, exe = native.lib, stream.cell, step._cell

            def c_both() -> None:
                lib.mll_bare_graph_launches(exe, cell, 1)
                stream.sync()

            bare = lib.mll_bare_graph_launches
            samples = host_us(bare, stream.sync, 1, n_samples, (exe, cell, n_calls))
            samples = [s / n_calls for s in samples]
            run.add(Row(_C_REPLAY, "us", samples, peer="C", work="replay"))
            samples = host_us(c_both, _nothing, n_calls, n_samples)
            run.add(Row(f"{_C_REPLAY} + sync", "us", samples, peer="C", work="replay + sync"))
        medians = {row.what: row.median for row in run.rows if has_c}
        for work, call, words, settle, factor, more in (
            ("replay", step.launch, (stream,), stream.sync, 1.0, 0.1),
            ("replay + sync", both, (), _nothing, 1.03, 0.0),
        ):
            c_row = work.replace("replay", _C_REPLAY) if has_c else None
            run.add(
                Row(
                    work, "us", host_us(call, settle, n_calls, n_samples, words), baseline=c_row,
                    goal=None if c_row is None else round(factor * medians[c_row] + more, 3),
                )
            )  # fmt: skip
    _replay_overhead(run)
    if run.peers and device.kind == "cuda":
        from .peers import replay_rows

        replay_rows(run, kernel, source, out, n_nodes, _C_REPLAY if has_c else None)
    for buffer in (source, out):
        buffer.close()


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
