"""What the device at hand allows, measured in the same process as everything that is compared."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import log
from typing import TYPE_CHECKING

import numpy as np

from ..kernels import registry
from ..runtime.launch import LaunchConfig, launch
from .clock import graph_us
from .result import Row

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.memory import Buffer
    from ..runtime.stream import Stream

__all__ = ["Ceilings", "measure"]

READ_MIB = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROTATION_BYTES = 256 << 20


class Ceilings:
    """Pure-read times by size, as a function of bytes.

    Attributes
    ----------
    rows : list of Row
    """

    def __init__(self, rows: list[Row], read_us: dict[int, float]) -> None:
        self.rows = rows
        self._sizes = sorted(read_us)
        self._us = [read_us[size] for size in self._sizes]

    def read_us(self, n_bytes: int) -> float:
        """Time in which a kernel that only reads takes ``n_bytes``, in µs.

        Between two measured sizes the time is interpolated over the logarithm of the size; above
        the largest the rate of the largest holds, below the smallest its time.
        """
        if n_bytes <= self._sizes[0]:
            return self._us[0]
        if n_bytes >= self._sizes[-1]:
            return self._us[-1] * n_bytes / self._sizes[-1]
        i = bisect_left(self._sizes, n_bytes)
        low, high = self._sizes[i - 1], self._sizes[i]
        part = log(n_bytes / low) / log(high / low)
        return float(self._us[i - 1] * (self._us[i] / self._us[i - 1]) ** part)


def measure(device: Device, stream: Stream, sizes_mib: tuple[int, ...] = READ_MIB) -> Ceilings:
    """Time empty nodes, pure reads and copies."""
    rows, read_us = [], {}
    n_ctas = device.limits.n_sms * 4
    empty = registry.kernel(device, "bench_empty")
    read = registry.kernel(device, "bench_read")
    copy = registry.kernel(device, "bench_copy")
    one = LaunchConfig(1, 32)
    rows.append(
        Row("empty node", "us", graph_us(device, stream, [lambda: launch(stream, one, empty)] * 64))
    )
    wide = LaunchConfig(n_ctas, 512)
    largest = max(sizes_mib) << 20
    source = device.alloc(max(largest, ROTATION_BYTES), stream, name="bench source")
    target = device.alloc(max(largest, ROTATION_BYTES), stream, name="bench target")
    out = device.empty((n_ctas * 512,), np.uint32, stream)
    # Random bytes: a memory full of one value is read faster than real data.
    chunk = np.random.default_rng(0).integers(0, 2**32, (32 << 20) // 4, np.uint32)
    for offset in range(0, source.n_bytes, chunk.nbytes):
        n = min(chunk.nbytes, source.n_bytes - offset)
        source.view(offset, (n // 4,), np.uint32).copy_from(stream, chunk[: n // 4])
    for mib in sizes_mib:
        n_bytes = mib << 20
        slots = max(1, source.n_bytes // n_bytes)
        parts = [source.view(i * n_bytes, (n_bytes // 4,), np.uint32) for i in range(slots)]
        targets = [target.view(i * n_bytes, (n_bytes // 4,), np.uint32) for i in range(slots)]

        def reading(part: Buffer, n: int = n_bytes) -> Callable[[], None]:
            return lambda: launch(stream, wide, read, part, n // 16, 0x9E3779B9, out)

        def copying(part: Buffer, to: Buffer, n: int = n_bytes) -> Callable[[], None]:
            return lambda: launch(stream, wide, copy, part, to, n // 16)

        samples = graph_us(device, stream, [reading(part) for part in parts])
        row = Row(f"read {mib} MiB", "us", samples)
        row.extra["tb_per_s"] = round(n_bytes / row.median / 1e6, 3)
        read_us[n_bytes] = row.median
        rows.append(row)
        samples = graph_us(
            device, stream, [copying(a, b) for a, b in zip(parts, targets, strict=True)]
        )
        row = Row(f"copy {mib} MiB", "us", samples)
        row.extra["tb_per_s"] = round(2 * n_bytes / row.median / 1e6, 3)
        rows.append(row)
    for buffer in (source, target, out):
        buffer.close()
    return Ceilings(rows, read_us)
