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
    from ..runtime.device import Device
    from ..runtime.stream import Stream

__all__ = ["measure_launch", "measure_replay"]

N_CALLS = 200


def measure_launch(device: Device, stream: Stream) -> list[Row]:
    """Time one launch of a kernel with four parameters, by every path there is."""
    kernel = registry.kernel(device, "bench_read")
    config = LaunchConfig(1, 32)
    source = device.zeros((4,), np.uint32, stream)
    out = device.zeros((32,), np.uint32, stream)
    arguments = (source, 0, 1, out)
    plan = prepare(device, config, kernel, *arguments)
    stream.sync()
    rows: list[Row] = []

    def add(what: str, call: Callable[[], Any], *, peer: str | None = None, per: int = 1) -> None:
        samples = host_us(call, stream.sync, n_calls=N_CALLS // per)
        rows.append(Row(what, "us", [s / per for s in samples], peer=peer))

    plan.launch(stream)
    if plan._plan is not None:
        cell, n = stream.cell, N_CALLS
        add(
            "launch, C",
            lambda: native.lib.mll_bare_launches(plan._plan, cell, n),
            peer="C",
            per=n,
        )
    add("launch, prepared", lambda: plan.launch(stream))
    add("launch, new arguments", lambda: launch(stream, config, kernel, *arguments))
    many = [plan] * 50
    add("launch, many at once", lambda: launch_many(stream, many), per=50)
    rows += _launch_peers(device, stream, kernel, source, out)
    return rows


def measure_replay(device: Device, stream: Stream, n_nodes: int = 60) -> list[Row]:
    """Time the replay of a chain of small kernels: host cost, and launch with sync."""
    kernel = registry.kernel(device, "bench_read")
    config = LaunchConfig(1, 32)
    source = device.zeros((4,), np.uint32, stream)
    out = device.zeros((32,), np.uint32, stream)
    plan = prepare(device, config, kernel, source, 0, 1, out)
    with stream.capture("chain") as graph:
        for _ in range(n_nodes):
            plan.launch(stream)
    rows: list[Row] = []
    with graph.instantiate() as step:
        step.upload(stream)
        step.launch(stream)
        stream.sync()

        def both() -> None:
            step.launch(stream)
            stream.sync()

        if step._cell is not None:
            cell = stream.cell
            lib = native.lib
            rows.append(
                Row(
                    f"replay of {n_nodes} nodes, C",
                    "us",
                    [
                        s / 20
                        for s in host_us(
                            lambda: lib.mll_bare_graph_launches(step._cell, cell, 20),
                            stream.sync,
                            n_calls=1,
                        )
                    ],
                    peer="C",
                )
            )

            def c_both() -> None:
                lib.mll_bare_graph_launches(step._cell, cell, 1)
                stream.sync()

            rows.append(
                Row(
                    f"replay of {n_nodes} nodes + sync, C",
                    "us",
                    host_us(c_both, lambda: None, n_calls=20),
                    peer="C",
                )
            )
        rows.append(
            Row(
                f"replay of {n_nodes} nodes",
                "us",
                host_us(lambda: step.launch(stream), stream.sync, n_calls=20),
            )
        )
        rows.append(
            Row(
                f"replay of {n_nodes} nodes + sync",
                "us",
                host_us(both, lambda: None, n_calls=20),
            )
        )
    return rows


def _launch_peers(device: Device, stream: Stream, kernel: Any, source: Any, out: Any) -> list[Row]:
    if device.kind != "cuda":
        return []
    from . import peers

    return peers.launch_rows(device, stream, kernel, source, out)
