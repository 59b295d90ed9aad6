"""How things are timed: on the device by events around graphs, on the host by a monotonic clock."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.stream import Stream

__all__ = [
    "ROTATION_BYTES", "graph_us", "host_us", "host_us_in_turn", "n_repeats", "n_sets",
    "rested_us", "spread", "sustained_us",
]  # fmt: skip

ROTATION_BYTES = 192 << 20
"""Bytes over which repeated work rotates: three times the largest L2, so that none serves it."""

_MAX_SETS = 512
_N_CALLS = 48
_SAMPLE_MS = 4.0
_REST = 3.0
_HEAVY_US = 40.0
_SUSTAINED_MS = 150.0
_N_WARM = 3
_STEADY = 0.01
_MOST_TURNS = 4


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range over the median, 0 for fewer than 4 samples."""
    ordered, n = sorted(samples), len(samples)
    if n < 4 or not median(ordered):
        return 0.0
    return (ordered[3 * n // 4] - ordered[n // 4]) / 2 / median(ordered)


def n_sets(n_bytes: int, *, small: bool = False) -> int:
    """Return how many sets of buffers of ``n_bytes`` a measurement rotates over."""
    return 2 if small else max(1, min(_MAX_SETS, -(-ROTATION_BYTES // n_bytes)))


def graph_us(
    device: Device,
    stream: Stream,
    calls: Sequence[Callable[[], None]],
    n_samples: int = 21,
    *,
    small: bool = False,
) -> list[float]:
    """Time per call, in µs, of ``calls`` captured back to back in one graph.

    Parameters
    ----------
    device, stream
        Where to run; the stream must be idle.
    calls
        Each enqueues the same work on ``stream``, over another set of buffers, so that together
        they move more than the L2 holds. Few of them are repeated until one replay is long enough
        that its own launch does not count: 48 calls, or fewer that take 4 ms.
    n_samples
        Replays timed, after some that are not; up to four times as many while their spread is above
        1 %, since what disturbs a machine passes.
    small
        Time three replays of the calls as they are: for devices where only the path matters.

    Returns
    -------
    list of float
        One value per replay: elapsed time of the graph over the number of calls; see
        :func:`rested_us`.
    """
    if small:
        with _replays(device, stream, calls) as replay:
            return [replay() * 1e3 / len(calls) for _ in range(1 + 3)][1:]
    calls = _enough(device, stream, calls)
    with _replays(device, stream, calls) as replay:
        return rested_us(replay, len(calls), n_samples)


def rested_us(replay: Callable[[], float], n_calls: int, n_samples: int) -> list[float]:
    """Time per call, in µs, of a graph of ``n_calls``, ours or another library's.

    Under load that fills it, a device reaches its power limit within some 50 ms and lowers its
    clocks by as much as its silicon and its temperature demand, another amount on each machine and
    at each hour. So where a call takes 40 µs and more, the device rests before each sample, three
    times as long as it worked for the last one; then a replay that does not count wakes it, and the
    sample is taken at full clocks. What a device does that gets no rest is told by
    :func:`sustained_us`. Shorter calls take their samples without rest: a device that has
    just rested is slower for a moment, and not always by as much.

    Parameters
    ----------
    replay
        Replays the graph once, waits, and returns how many ms that took.
    n_calls : int
    n_samples : int
        As for :func:`graph_us`.
    """
    samples: list[float] = []
    for _ in range(_MOST_TURNS):
        ms = 0.0
        for _ in range(_N_WARM):
            ms = replay()
        rests = ms * 1e3 / n_calls >= _HEAVY_US
        for _ in range(n_samples):
            if rests:
                time.sleep(_REST * 2 * ms / 1e3)
                replay()
            ms = replay()
            samples.append(ms * 1e3 / n_calls)
        if spread(samples) <= _STEADY:
            break
    return samples


def sustained_us(
    device: Device, stream: Stream, calls: Sequence[Callable[[], None]]
) -> list[float]:
    """Time per call, in µs, of a device that gets no rest: what its power limit leaves of it.

    Parameters
    ----------
    device, stream, calls
        As for :func:`graph_us`.

    Returns
    -------
    list of float
        One value per replay in the second half of 300 ms of work without a pause.
    """
    calls = _enough(device, stream, calls)
    samples: list[float] = []
    with _replays(device, stream, calls) as replay:
        busy_ms = 0.0
        while busy_ms < 2 * _SUSTAINED_MS:
            ms = replay()
            busy_ms += ms
            if busy_ms >= _SUSTAINED_MS:
                samples.append(ms * 1e3 / len(calls))
    return samples


def _enough(
    device: Device, stream: Stream, calls: Sequence[Callable[[], None]]
) -> list[Callable[[], None]]:
    """Repeat few calls until a replay of them lasts."""
    with _replays(device, stream, calls) as replay:
        replay()
        ms = replay()
    return list(calls) * n_repeats(ms, len(calls))


def n_repeats(ms: float, n_calls: int) -> int:
    """Return how often a graph repeats ``n_calls`` that take ``ms`` together."""
    most = _N_CALLS // n_calls
    return max(1, min(most, math.ceil(_SAMPLE_MS / ms) if ms else most))


@contextmanager
def _replays(
    device: Device, stream: Stream, calls: Sequence[Callable[[], None]]
) -> Iterator[Callable[[], float]]:
    """Capture calls; what it gives replays them once, waits, and tells how many ms that took."""
    with stream.capture("bench") as graph:
        for call in calls:
            call()
    with (
        graph,
        graph.instantiate() as step,
        device.event(timing=True) as begin,
        device.event(timing=True) as end,
    ):
        step.upload(stream)

        def replay() -> float:
            stream.record(begin)
            step.launch(stream)
            stream.record(end)
            stream.sync()
            return end.elapsed_ms(begin)

        yield replay


def host_us(
    call: Callable[..., object],
    settle: Callable[[], object],
    n_calls: int = 200,
    n_samples: int = 31,
    args: Sequence[object] = (),
) -> list[float]:
    """Host time per ``call(*args)``, in µs; ``settle`` drains the device between the samples."""
    return host_us_in_turn([(call, args, n_calls)], settle, n_samples)[0]


def host_us_in_turn(
    calls: Sequence[tuple[Callable[..., object], Sequence[object], int]],
    settle: Callable[[], object],
    n_samples: int = 31,
    *,
    best_of: int = 1,
    warm_s: float = 0.0,
) -> list[list[float]]:
    """Host time of several calls, in µs each, their samples taken in turn.

    Parameters
    ----------
    calls : sequence of (callable, arguments, count)
        A turn makes ``count`` calls; each stands in a loop by itself, with its arguments in local
        variables, so that neither a wrapper nor a look-up is measured with it.
    settle
        Drains the device after each turn.
    n_samples
        Per call. Each turn goes in the other direction. What drifts, such as a clock, then drifts
        for all calls alike, and so does what a call leaves behind for the next one; samples of one
        place may be compared one by one.
    best_of
        Turns of which a sample is the fastest: whatever else a machine does only adds.
    warm_s
        Seconds of turns that do not count, at least one: until processor and device have left
        their idle clocks.
    """
    turns: list[list[float]] = [[] for _ in calls]
    pairs = list(zip(calls, turns, strict=True))
    warm, turn = time.perf_counter() + warm_s, 0
    while turn == 0 or len(turns[0]) < n_samples * best_of:
        for (call, args, n_calls), found in pairs[:: 1 if turn % 2 else -1]:
            loop = _loop(len(args))
            start = time.perf_counter_ns()
            loop(range(n_calls), call, *args)
            elapsed = time.perf_counter_ns() - start
            settle()
            found.append(elapsed / 1e3 / n_calls)
        turn += 1
        if turn == 1 or time.perf_counter() < warm:
            for found in turns:
                found.clear()
    return [[min(found[i : i + best_of]) for i in range(0, len(found), best_of)] for found in turns]


@functools.cache
def _loop(n_args: int) -> Callable[..., None]:
    names = ", ".join(f"a{i}" for i in range(n_args))
    scope: dict[str, Callable[..., None]] = {}
    exec(f"def loop(turns, call, {names}):\n for _ in turns: call({names})", scope)
    return scope["loop"]
