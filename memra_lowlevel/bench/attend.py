"""Decode attention over quantised planes, in a graph over rotating planes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache.geometry import KvGeometry
from ..cache.kv_layer import KvLayer
from ..cache.planes import Lengths, Workspace
from ..cache.ring import KvRing, swa_ring_rows
from ..formats import E4M3, F16, Q4_0, Q5_1, Q8_0, Format
from .clock import n_sets
from .result import Row

if TYPE_CHECKING:
    from ..runtime.memory import Buffer
    from .run import Run

__all__ = [
    "CASES", "ROWS", "Case", "device_rows", "fill", "halves", "measure_attend", "measure_rows",
    "normal", "planes",
]  # fmt: skip

K = 1024
_FILL_ROWS = 4096
_ALIGN = 256
_HEAVY_BYTES = 100 << 20  # from here on a device without rest meets its power limit


@dataclass(frozen=True)
class Case:
    """One measurement of attention.

    Attributes
    ----------
    n_heads, n_kv_heads, head_dim : int
    ctx : int
        Keys that the last row sees, unless there is a window.
    n_rows : int
    k_format, v_format : Format
    window : int or None
        Newest keys that a row sees.
    ring : bool
        The plane is a ring that holds the window only, at absolute position ``ctx``.
    goal : float or None
        Time to reach, in µs; else a share of the floor is the goal.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    ctx: int
    n_rows: int = 1
    k_format: Format = Q8_0
    v_format: Format = Q5_1
    window: int | None = None
    ring: bool = False
    goal: float | None = None

    @property
    def work(self) -> str:
        """What any library may do: shape, rows, context, window."""
        seen = f" window {self.window}" if self.window else ""
        rows = f" rows {self.n_rows}" if self.n_rows > 1 else ""
        return f"{self.shape} ctx {self.ctx}{rows}{seen}"

    @property
    def shape(self) -> str:
        """Query heads / kv heads / head_dim."""
        return f"{self.n_heads}/{self.n_kv_heads}/{self.head_dim}"

    @property
    def what(self) -> str:
        """Name of our row."""
        return f"{self.work}, {self.k_format}/{self.v_format}{' ring' if self.ring else ''}"

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value, all kv heads."""
        kv_dim = self.n_kv_heads * self.head_dim
        return self.k_format.row_bytes(kv_dim) + self.v_format.row_bytes(kv_dim)

    @property
    def n_keys(self) -> int:
        """Keys that must be read: a window of each row, overlapping."""
        return min(self.ctx, self.window + self.n_rows - 1) if self.window else self.ctx


def _of(shape: tuple[int, int, int], goals: dict[int, float | None]) -> list[Case]:
    return [Case(*shape, ctx, goal=goal) for ctx, goal in goals.items()]


CASES = (
    *_of(
        (32, 8, 128),
        {512: None, 4 * K: 6.5, 32 * K: 20.0, 128 * K: 64.0, 512 * K: 240.0, 1024 * K: 475.0},
    ),
    *_of((64, 8, 128), {32 * K: 22.0, 128 * K: 68.0}),
    *_of((40, 8, 128), {128 * K: 66.0}),
    *_of((16, 2, 256), {4 * K: 6.0, 32 * K: 12.0, 128 * K: 35.0}),
    *_of((8, 1, 128), {4 * K: None, 32 * K: None, 128 * K: None}),
    *_of((9, 3, 64), {4 * K: None, 32 * K: None}),
    *(
        Case(32, 8, 128, ctx, k_format=k, v_format=v)
        for k, v in ((Q8_0, Q8_0), (Q8_0, Q4_0), (E4M3, E4M3), (F16, F16))
        for ctx in (32 * K, 128 * K)
    ),
    Case(32, 8, 128, 128 * K, window=4 * K),
    Case(32, 8, 128, 128 * K, window=4 * K, ring=True),
)
"""What ``bench attend`` measures."""

ROWS = (
    *(Case(32, 8, 128, ctx, n_rows) for ctx in (32 * K, 128 * K) for n_rows in (1, 2, 4, 8, 16)),
    *(
        Case(32, 8, 128, ctx, n_rows, k_format=fmt, v_format=fmt)
        for fmt in (Q8_0, F16)
        for ctx in (32 * K, 128 * K)
        for n_rows in (1, 8)
    ),
)
"""What ``bench rows`` measures."""

_SMALL = (
    Case(4, 2, 64, 256),
    Case(4, 2, 64, 256, k_format=F16, v_format=F16),
    Case(4, 2, 64, 320, window=128),
    Case(4, 2, 64, 320, window=128, ring=True),
)
_SMALL_ROWS = (Case(4, 2, 64, 256), Case(4, 2, 64, 256, n_rows=4))
_ROW_FACTORS = {1: 1.0, 2: 1.1, 4: 1.1, 8: 1.1, 16: 1.25}


def measure_attend(run: Run) -> None:
    """Time one row over each shape and context; the floor is the read of the planes' bytes."""
    plain: Case | None = None
    for case in _SMALL if run.small else CASES:
        measure_case(run, case)
        peers_see_it_too = case.window is None and (plain is None or case.work != plain.work)
        if peers_see_it_too and (case.k_format, case.v_format) == (Q8_0, Q5_1):
            run.later(partial(_others, run, case))
            plain = case


def measure_rows(run: Run) -> None:
    """Time 1 to 16 rows; more rows are compared with one."""
    single: dict[tuple[int, Format, Format], Row] = {}
    for case in _SMALL_ROWS if run.small else ROWS:
        row = measure_case(run, case)
        if case.n_rows == 1:
            single[case.ctx, case.k_format, case.v_format] = row
        else:
            one = single[case.ctx, case.k_format, case.v_format]
            row.extra["over_one_row"] = round(row.median / one.median, 3)
            if not run.small:
                row.goal = round(_ROW_FACTORS[case.n_rows] * one.median, 2)
        peers_see_it_too = case.n_rows in (1, 4, 8) and case.v_format is Q5_1
        if peers_see_it_too:
            run.later(partial(_others, run, case))


def _others(run: Run, case: Case) -> None:
    from .peers import attend_rows

    attend_rows(run, case)


def measure_case(run: Run, case: Case) -> Row:
    """Time one case of attention, over planes that together outgrow every cache."""
    device, stream = run.device, run.stream
    n_bytes = case.n_keys * case.key_bytes
    with planes(run, case, n_sets(n_bytes, small=run.small)) as (layers, lengths):
        fill(run, case, layers, lengths)
        q = device.from_numpy(normal((case.n_rows, case.n_heads, case.head_dim), 1), stream)
        out = device.empty(q.shape, np.float32, stream)
        for layer in layers[:2]:
            layer.attend(stream, q, out)  # loads the kernels, sizes the workspace
        stream.sync()
        calls = [_attending(run, layer, q, out) for layer in layers]
        samples = run.timed(calls)
        row = Row(
            f"{run.group} {case.what}", "us", samples, work=f"{run.group} {case.work}",
            goal=case.goal,
            extra={"bytes": n_bytes, "sets": len(layers), **_numbers(case)},
        )  # fmt: skip
        if not run.small:
            row.floor = run.ceilings.read_us(n_bytes)
            if n_bytes >= _HEAVY_BYTES:
                row.extra["sustained"] = run.sustained(calls)
        for buffer in (q, out):
            buffer.close()
    return run.add(row)


def _numbers(case: Case) -> dict[str, Any]:
    """Tell what a table or a plot sorts by."""
    return {
        "shape": case.shape, "ctx": case.ctx, "n_rows": case.n_rows, "window": case.window or 0,
        "formats": f"{case.k_format}/{case.v_format}", "ring": case.ring,
    }  # fmt: skip


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Random rows."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def device_rows(run: Run, n: int, kv_dim: int, seed: int) -> Buffer:
    """Return K rows, then V rows: f32 [2, n, kv_dim]."""
    return run.device.from_numpy(normal((2, n, kv_dim), seed), run.stream)


@contextmanager
def planes(run: Run, case: Case, n: int) -> Iterator[tuple[list[KvLayer], Lengths]]:
    """Give n layers with one length and one workspace, as the layers of a model have them."""
    device, stream = run.device, run.stream
    geometry = KvGeometry(
        case.n_kv_heads, case.head_dim, case.head_dim, case.k_format, case.v_format
    )
    rings: list[KvRing | None] = [None] * n
    if case.ring and case.window:
        rows = swa_ring_rows(case.window, case.ctx, chunk=case.window, slack=0)
        rings = [KvRing(rows, case.window, slack=0) for _ in range(n)]
    geometry.check(device, case.ctx, case.window, rings[0])
    n_bytes = geometry.plane_bytes(case.ctx, rings[0]) + 4 * _ALIGN
    arena = device.arena(n * n_bytes + 8 * n + (1 << 16), name="bench planes")
    lengths = Lengths(arena, stream, n, case.ctx, name="bench")
    workspace = Workspace(device)
    yield (
        [
            KvLayer(
                geometry, case.ctx, arena=arena, lengths=lengths, workspace=workspace, index=i,
                window=case.window, ring=ring, check=False, name=f"bench{i}",
            )
            for i, ring in enumerate(rings)
        ],
        lengths,
    )  # fmt: skip
    stream.sync()
    workspace.close()
    arena.close()


def fill(run: Run, case: Case, layers: list[KvLayer], lengths: Lengths) -> None:
    """Write random rows wherever a query looks, and leave the length so that it sees ``ctx``."""
    stream, kv_dim = run.stream, case.n_kv_heads * case.head_dim
    first = case.ctx - case.n_keys
    piece = min(case.n_keys, _FILL_ROWS)
    both = device_rows(run, piece, kv_dim, 0)
    lengths.set(stream, first)
    for layer in layers:
        if layer.ring is not None:
            layer.set_base(stream, first)
    for start in range(first, case.ctx, piece):
        n = min(piece, case.ctx - start)
        for layer in layers:
            layer.append(stream, *halves(both, n))
        lengths.advance(stream, n)
    lengths.set(stream, case.ctx - case.n_rows)
    stream.sync()
    both.close()


def halves(both: Buffer, n: int) -> tuple[Buffer, Buffer]:
    """Give the first n rows of K and of V of :func:`device_rows`."""
    _, whole, kv_dim = both.shape
    k = both.view(0, (n, kv_dim), np.float32)
    return k, both.view(4 * whole * kv_dim, (n, kv_dim), np.float32)


def _attending(run: Run, layer: KvLayer, q: Buffer, out: Buffer) -> Callable[[], None]:
    # As in a model's chain: each kernel may start while the one before it ends.
    return lambda: layer.attend(run.stream, q, out, programmatic=True, settled=True)
