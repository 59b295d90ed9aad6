"""How things are timed: on the device by events around graphs, on the host by a monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.stream import Stream

__all__ = ["graph_us", "host_us"]


def graph_us(
    device: Device, stream: Stream, calls: Sequence[Callable[[], None]], n_samples: int = 21
) -> list[float]:
    """Time per call, in µs, of ``calls`` captured back to back in one graph.

    Parameters
    ----------
    device, stream
        Where to run; the stream must be idle.
    calls
        Each enqueues the same work on ``stream``, over another set of buffers, so that together
        they move more than the L2 holds.
    n_samples
        Replays timed, after three that are not.

    Returns
    -------
    list of float
        One value per replay: elapsed time of the graph over ``len(calls)``.
    """
    with stream.capture("bench") as graph:
        for call in calls:
            call()
    samples = []
    with (
        graph.instantiate() as step,
        device.event(timing=True) as begin,
        device.event(timing=True) as end,
    ):
        step.upload(stream)
        for i in range(n_samples + 3):
            stream.record(begin)
            step.launch(stream)
            stream.record(end)
            stream.sync()
            if i >= 3:
                samples.append(end.elapsed_ms(begin) * 1e3 / len(calls))
    return samples


def host_us(
    call: Callable[[], object],
    settle: Callable[[], object],
    n_calls: int = 200,
    n_samples: int = 31,
) -> list[float]:
    """Host time per call, in µs; ``settle`` drains the device between the samples."""
    for _ in range(n_calls):
        call()
    settle()
    samples = []
    for _ in range(n_samples):
        start = time.perf_counter_ns()
        for _ in range(n_calls):
            call()
        samples.append((time.perf_counter_ns() - start) / 1e3 / n_calls)
        settle()
    return samples
