"""What the hardware allows beside reads and copies: nodes of a graph, memory sets, the L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..compile import compile_source
from ..runtime.launch import LaunchConfig, launch
from .result import Row

if TYPE_CHECKING:
    from ..runtime.memory import Buffer
    from .run import Run

__all__ = ["measure_nodes"]

_MIB = 1 << 20
_L2_BYTES = (8 * _MIB, 16 * _MIB, 32 * _MIB)
_SET_BYTES = 256 * _MIB
_NODES = 64

# A node that touches memory; the second form lets its successor start at once and waits itself.
_SOURCE = """#include "common/device.cuh"
KERNEL void bench_step(float* x) { x[threadIdx.x] += 1.0f; }
KERNEL void bench_step_early(float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    x[threadIdx.x] += 1.0f;
}
"""


def measure_nodes(
    run: Run, source: Buffer, reading: Callable[[Buffer], Callable[[], None]]
) -> None:
    """Time dependent nodes of a graph, a memory set, and reads that the L2 cache answers.

    Parameters
    ----------
    run : Run
    source : Buffer
        Random bytes; sizes that it does not hold are left out. A set writes over its beginning when
        all else is done.
    reading : callable
        Gives the call that reads a buffer.
    """
    device, stream = run.device, run.stream
    early = device.kind == "cuda" and int(device.arch[3:]) >= 90
    with device.module(compile_source(_SOURCE, arch=device.arch, name="bench_nodes.cu")) as module:
        x = device.zeros((32,), np.float32, stream)
        kernels = [("one small kernel", "bench_step", LaunchConfig(1, 32))]
        if early:
            kernels.append(
                ("one small kernel, starts early", "bench_step_early",
                 LaunchConfig(1, 32, programmatic=True))
            )  # fmt: skip
        for what, name, config in kernels:
            kernel = module.kernel(name)
            launch(stream, config, kernel, x)
            step = _stepping(run, config, kernel, x)
            run.add(_row(f"node of {what}", run.timed([step] * (4 if run.small else _NODES))))
        stream.sync()
        x.close()
    for n_bytes in (n for n in _L2_BYTES if n <= source.n_bytes):
        part = source.view(0, (n_bytes // 4,), np.uint32)
        row = _row(f"read {n_bytes // _MIB} MiB from the L2 cache", run.timed([reading(part)]))
        row.extra["bytes"] = n_bytes
        run.add(row)
    n_bytes = min(source.n_bytes, _MIB if run.small else _SET_BYTES)
    part = source.view(0, (n_bytes // 4,), np.uint32)
    row = _row(f"set {n_bytes // _MIB} MiB", run.timed([lambda: part.fill(stream, 0)]))
    row.extra["bytes"] = n_bytes
    run.add(row)


def _stepping(run: Run, config: LaunchConfig, kernel: object, x: Buffer) -> Callable[[], None]:
    return lambda: launch(run.stream, config, kernel, x)  # type: ignore[arg-type]


def _row(what: str, samples: list[float]) -> Row:
    return Row(what, "us", samples, group="ceilings")
