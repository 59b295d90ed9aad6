"""What the device at hand allows, measured in the same process as everything that is compared."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from math import log
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from ..kernels import registry
from ..runtime.launch import LaunchConfig, launch
from .clock import ROTATION_BYTES, n_sets
from .nodes import measure_nodes
from .result import Row

if TYPE_CHECKING:
    from ..runtime.memory import Buffer
    from .run import Run

__all__ = ["Ceilings", "measure"]

_KIB, _MIB = 1 << 10, 1 << 20
READ_BYTES = (
    *(n * _KIB for n in (16, 64, 256)),
    *(n * _MIB for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)),
)
COPY_BYTES = (*(n * _KIB for n in (16, 64, 256)), *(n * _MIB for n in (1, 4, 16, 64, 256)))
_THREADS = 512
_CHUNK_BYTES = 32 << 20
_WAKE_S = 0.5
_TURNS = 3
_BRIEF_BYTES = 32 * _MIB  # up to here whatever disturbs a device for a moment shows


class Ceilings:
    """Pure-read and copy times as functions of bytes.

    Parameters
    ----------
    read_us : dict of int to float
        Time in µs by bytes read; at least one size.
    copy_us : dict of int to float, optional
        By bytes copied (read and written once each).
    """

    def __init__(self, read_us: dict[int, float], copy_us: dict[int, float] | None = None) -> None:
        self._read, self._copy = (
            dict(sorted(read_us.items())),
            dict(sorted((copy_us or {}).items())),
        )

    def read_us(self, n_bytes: int) -> float:
        """Time in which a kernel that only reads takes ``n_bytes``, in µs.

        Between two measured sizes the time is interpolated over the logarithm of the size; above
        the largest the rate of the largest holds, below the smallest its time.
        """
        return _between(self._read, n_bytes)

    def copy_us(self, n_bytes: int) -> float:
        """Time in which a kernel copies ``n_bytes`` (moves twice as many), in µs."""
        return _between(self._copy, n_bytes)


class _Best:
    """The fastest turn of each size: what disturbs a device for a while only adds."""

    def __init__(self) -> None:
        self._turns: dict[int, list[list[float]]] = {}

    def take(self, n_bytes: int, samples: list[float]) -> None:
        self._turns.setdefault(n_bytes, []).append(samples)

    def row(self, what: str, n_bytes: int, moved_bytes: int) -> Row:
        turns = self._turns[n_bytes]
        best = min(turns, key=median)
        row = Row(f"{what} {_size(n_bytes)}", "us", best, group="ceilings")
        row.extra.update(bytes=moved_bytes, turns=[round(median(turn), 4) for turn in turns])
        return row


def _between(table: dict[int, float], n_bytes: int) -> float:
    sizes, times = list(table), list(table.values())
    if n_bytes <= sizes[0]:
        return times[0]
    if n_bytes >= sizes[-1]:
        return times[-1] * n_bytes / sizes[-1]
    i = bisect_left(sizes, n_bytes)
    part = log(n_bytes / sizes[i - 1]) / log(sizes[i] / sizes[i - 1])
    return float(times[i - 1] * (times[i] / times[i - 1]) ** part)


def measure(run: Run) -> Ceilings:
    """Time empty nodes, pure reads and copies; the rows go to ``run`` under ``ceilings``.

    Up to 32 MiB each is measured in three turns, of which the fastest counts.
    Below half a MiB the sets that are rotated over fit in the L2: there the start of a kernel is
    the time, not the memory.
    """
    device, stream = run.device, run.stream
    reads, copies = ((_MIB,), (_MIB,)) if run.small else (READ_BYTES, COPY_BYTES)
    empty, read, copy = (registry.kernel(device, f"bench_{n}") for n in ("empty", "read", "copy"))
    one = LaunchConfig(1, 32)
    samples = run.timed([lambda: launch(stream, one, empty)] * (4 if run.small else 64))
    run.add(Row("empty node", "us", samples, group="ceilings"))
    n_ctas = 2 if run.small else device.limits.n_sms * 4
    rotation = 2 * _MIB if run.small else ROTATION_BYTES
    source = device.alloc(max((*reads, rotation)), stream, name="bench source")
    target = device.alloc(max((*copies, rotation)), stream, name="bench target")
    out = device.empty((n_ctas * _THREADS,), np.uint32, stream)
    # Random bytes: a memory full of one value is read faster than real data.
    chunk = np.random.default_rng(0).integers(0, 2**32, _CHUNK_BYTES // 4, np.uint32)
    for offset in range(0, source.n_bytes, chunk.nbytes):
        n = min(chunk.nbytes, source.n_bytes - offset)
        source.view(offset, (n // 4,), np.uint32).copy_from(stream, chunk[: n // 4])

    def parts(whole: Buffer, n_bytes: int) -> list[Buffer]:
        n = n_sets(n_bytes, small=run.small)
        return [whole.view(i * n_bytes, (n_bytes // 4,), np.uint32) for i in range(n)]

    def wide(part: Buffer) -> LaunchConfig:
        return LaunchConfig(min(n_ctas, -(-part.n_bytes // (16 * _THREADS))), _THREADS)

    def reading(part: Buffer) -> Callable[[], None]:
        return lambda: launch(stream, wide(part), read, part, part.n_bytes // 16, 0x9E3779B9, out)

    def copying(part: Buffer, to: Buffer) -> Callable[[], None]:
        return lambda: launch(stream, wide(part), copy, part, to, part.n_bytes // 16)

    if not run.small:
        _wake(run, reading(source))

    def all_reads(n_bytes: int) -> list[Callable[[], None]]:
        return [reading(part) for part in parts(source, n_bytes)]

    def all_copies(n_bytes: int) -> list[Callable[[], None]]:
        pairs = zip(parts(source, n_bytes), parts(target, n_bytes), strict=True)
        return [copying(a, b) for a, b in pairs]

    of_reads, of_copies = _Best(), _Best()
    for turn in range(1 if run.small else _TURNS):
        for n_bytes in (n for n in reads if turn == 0 or n <= _BRIEF_BYTES):
            of_reads.take(n_bytes, run.timed(all_reads(n_bytes)))
        for n_bytes in (n for n in copies if turn == 0 or n <= _BRIEF_BYTES):
            of_copies.take(n_bytes, run.timed(all_copies(n_bytes)))
    read_us = {n: run.add(of_reads.row("read", n, n)).median for n in reads}
    copy_us = {n: run.add(of_copies.row("copy", n, 2 * n)).median for n in copies}
    measure_nodes(run, source, reading)
    for buffer in (source, target, out):
        buffer.close()
    return Ceilings(read_us, copy_us)


def _wake(run: Run, read: Callable[[], None]) -> None:
    """Keep an idle device busy until its clocks have settled."""
    end = time.perf_counter() + _WAKE_S
    while time.perf_counter() < end:
        for _ in range(16):
            read()
        run.stream.sync()


def _size(n_bytes: int) -> str:
    return f"{n_bytes // _MIB} MiB" if n_bytes >= _MIB else f"{n_bytes // _KIB} KiB"
