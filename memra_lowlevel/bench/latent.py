"""Latent attention, the scores of its indexer and the selection, in graphs over rotating planes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats import BF16, F32, Q8_0, Format
from ..kernels import latent_attend, latent_index, latent_rows
from .clock import n_sets
from .result import Row

if TYPE_CHECKING:
    from ..runtime.memory import Buffer
    from .run import Run

__all__ = ["measure_latent"]

K = 1024
RANK, ROPE = 512, 64
POOL, TOP_K, INDEX_HEADS, INDEX_DIM = 4, 2048, 32, 128

DENSE: dict[tuple[int, int], float | None] = {
    **{(heads, ctx): None for heads in (16, 64, 128) for ctx in (4 * K, 32 * K)},
    (16, 128 * K): 85.0, (64, 128 * K): 150.0, (128, 128 * K): 280.0,
}  # fmt: skip
"""Heads and context to the time to reach, in µs."""

OTHERS: dict[tuple[str, int], float | None] = {
    ("bf16", 16): 59.0, ("bf16", 64): 65.0, ("bf16", 128): 90.0,
    ("q8_0", 16): 45.0, ("q8_0", 64): 49.0, ("q8_0", 128): 69.0,
}  # fmt: skip
"""Row format and heads to the time to reach at 128 k."""

LISTED: dict[tuple[int, int], float | None] = {(64, 32 * K): 15.0, (64, 128 * K): 15.0}
SCORED: dict[int, float | None] = {32 * K: 6.0, 128 * K: 12.0, 1024 * K: 45.0}
CHOSEN: dict[int, float | None] = {8 * K: 7.0, 32 * K: 9.0, 256 * K: 14.0}


def measure_latent(run: Run) -> None:
    """Time one row of everything between the projections of a latent layer."""
    small = run.small
    for heads, ctx in [(4, 256)] if small else DENSE:
        _attend(run, heads, ctx, F32, 0, None if small else DENSE[heads, ctx])
    for fmt in () if small else (BF16, Q8_0):
        for heads in (16, 64, 128):
            _attend(run, heads, 128 * K, fmt, 0, OTHERS[fmt.name, heads])
    n_list = 64 if small else TOP_K + POOL - 1
    for heads, ctx in [(4, 256)] if small else LISTED:
        _attend(run, heads, ctx, F32, n_list, None if small else LISTED[heads, ctx])
    heads, ctx = (4, 256) if small else (64, 32 * K)
    _attend(run, heads, ctx, F32, 0, None, "exact")
    _attend(run, heads, ctx, F32, n_list, None, "exact")
    for ctx in [512] if small else SCORED:
        _score(run, ctx, None if small else SCORED[ctx])
    for n_pools in [300] if small else CHOSEN:
        _select(run, n_pools, None if small else CHOSEN[n_pools])
    for n in (1, 8) if small else (1, 8, 4096):
        _append(run, n)


class _Buffers:
    """Buffers of one measurement, closed together."""

    def __init__(self, run: Run, stack: ExitStack):
        self.run, self.stack = run, stack

    def up(self, array: np.ndarray[Any, Any]) -> Buffer:
        return self._kept(self.run.device.from_numpy(array, self.run.stream))

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Buffer:
        return self._kept(self.run.device.empty(shape, dtype, self.run.stream))

    def _kept(self, buffer: Buffer) -> Buffer:
        self.stack.callback(buffer.close)
        return buffer


def _finish(
    run: Run, what: str, calls: list[Callable[[], None]], n_bytes: int, goal: float | None,
    **numbers: Any,
) -> None:  # fmt: skip
    calls[0]()  # loads the kernels
    run.stream.sync()
    row = Row(what, "us", run.timed(calls), goal=goal,
              extra={"bytes": n_bytes, "sets": len(calls), **numbers})  # fmt: skip
    if not run.small:
        row.floor = run.ceilings.read_us(n_bytes)
    run.add(row)


def _normal(seed: int, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _attend(
    run: Run, heads: int, ctx: int, fmt: Format, n_list: int, goal: float | None,
    numeric: str = "f16x2",
) -> None:  # fmt: skip
    rank, rope = (128, 64) if run.small else (RANK, ROPE)
    width, stream = rank + rope, run.stream
    row_bytes = latent_rows.row_bytes(fmt, width)
    n_bytes = (n_list or ctx) * row_bytes
    with ExitStack() as stack:
        make = _Buffers(run, stack)
        piece = fmt.encode(_normal(0, min(ctx, 2 * K), width)).reshape(-1).view(np.uint8)
        one = make.up(piece)
        planes = []
        for _ in range(n_sets(n_bytes if not n_list else ctx * row_bytes, small=run.small)):
            plane = make.empty((ctx * row_bytes,), np.uint8)
            for at in range(0, plane.size, piece.size):
                n = min(piece.size, plane.size - at)
                part = plane.view(at, (n,), np.uint8)
                part.copy_from(stream, one.view(0, (n,), np.uint8))
            planes.append(plane)
        q, out = make.up(_normal(1, 1, heads, width)), make.empty((1, heads, rank))
        lists: Buffer | None = None
        if n_list:
            chosen = np.random.default_rng(2).choice(ctx, min(n_list, ctx), replace=False)
            lists = make.up(np.sort(chosen).astype(np.int32)[None])
        size = latent_attend.workspace_bytes(1, heads, rank, ctx, n_list, numeric)
        workspace, len_d = make.empty((size // 4,)), make.up(np.array([ctx - 1], np.int32))

        def attending(plane: Buffer) -> Callable[[], None]:
            return lambda: latent_attend.attend(
                stream, q, plane, out, len_d=len_d, rows=ctx, workspace=workspace,
                scale=width**-0.5, format=fmt, indices=lists, numeric=numeric,
            )  # fmt: skip

        kind = f"listed {n_list} of" if n_list else "dense"
        _finish(
            run, f"latent {kind} ctx {ctx}, {heads} heads, {rank}+{rope}, {fmt}, {numeric}",
            [attending(p) for p in planes], n_bytes, goal, ctx=ctx, heads=heads,
        )  # fmt: skip


def _score(run: Run, ctx: int, goal: float | None) -> None:
    n_pools, heads, d = ctx // POOL, (4 if run.small else INDEX_HEADS), INDEX_DIM
    n_bytes = 4 * n_pools * d
    with ExitStack() as stack:
        make = _Buffers(run, stack)
        sets = n_sets(n_bytes, small=run.small)
        keys = [make.up(_normal(i, n_pools, d)) for i in range(min(sets, 8))]
        q, w = make.up(_normal(1, 1, heads, d)), make.up(_normal(2, 1, heads))
        scores, len_d = make.empty((1, n_pools)), make.up(np.array([ctx - 1], np.int32))

        def scoring(key: Buffer) -> Callable[[], None]:
            return lambda: latent_index.score(run.stream, q, w, key, scores, len_d, pool=POOL)

        _finish(run, f"scores ctx {ctx}, {heads}x{d}, pools of {POOL}",
                [scoring(k) for k in keys], n_bytes, goal, ctx=ctx, heads=heads)  # fmt: skip


def _select(run: Run, n_pools: int, goal: float | None) -> None:
    with ExitStack() as stack:
        make = _Buffers(run, stack)
        scores = make.up(_normal(0, 1, n_pools))
        out = make.empty((1, latent_index.list_width(TOP_K, POOL, n_pools)), np.int32)
        scratch = make.empty((latent_index.scratch_bytes(1, n_pools) // 4,), np.int32)
        len_d = make.up(np.array([n_pools * POOL - 1], np.int32))

        def selecting() -> None:
            latent_index.select(run.stream, scores, out, scratch, len_d, top_k=TOP_K, pool=POOL)

        _finish(run, f"select {TOP_K // POOL} of {n_pools} pools", [selecting], 4 * n_pools, goal,
                pools=n_pools)  # fmt: skip


def _append(run: Run, n: int) -> None:
    """Time rows that complete a pool: one decode step, a verification, or a prompt."""
    width, d, stream, ctx = RANK + ROPE, INDEX_DIM, run.stream, n + POOL - 1
    with ExitStack() as stack:
        make = _Buffers(run, stack)
        raw, weight, angles = (
            make.up(_normal(i, *shape))
            for i, shape in enumerate(((n, width), (RANK,), (ctx, ROPE)))
        )
        index, ape, rows = (
            make.up(_normal(i, *shape))
            for i, shape in enumerate(((n, 2 * d), (POOL, d), (ctx, 2 * d)))
        )
        plane, keys = make.empty((ctx * 4 * width,), np.uint8), make.empty((ctx // POOL + 1, d))
        len_d = make.up(np.array([POOL - 1], np.int32))

        def latent() -> None:
            latent_rows.append(
                stream, raw, plane, len_d, capacity=ctx, weight=weight, angles=angles
            )

        def keyed() -> None:
            latent_index.append(stream, index, ape, rows, keys, len_d, pool=POOL, capacity=ctx)

        _finish(run, f"append {n} latent rows", [latent], 8 * n * width, None, n_rows=n)
        _finish(run, f"append {n} index rows with keys", [keyed], 16 * n * d, None, n_rows=n)
