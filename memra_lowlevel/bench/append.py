"""Appends to quantised planes and rebases of rings, in a graph over rotating planes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..cache.kv_layer import KvLayer
from ..formats import Q5_1, Q8_0
from ..kernels import kv_move
from ..kernels.early import starts_early
from ..kernels.kv_append_heads import HeadTurn
from .attend import Case, device_rows, fill, halves, normal, planes
from .clock import n_sets
from .result import Row

if TYPE_CHECKING:
    from ..runtime.memory import Buffer
    from .run import Run

__all__ = ["measure_append"]

_Q_PER_KV = 4  # query heads that are turned with a head of K


def measure_append(run: Run) -> None:
    """Time one append of K and V, from one row to a bulk; with norm and rotation; a ring's rebase.

    The floor is a copy of the bytes.
    """
    for n_rows in (1, 4) if run.small else (1, 4, 8, 16, 512, 4096):
        _measure(run, n_rows, None)
    for n_rows in (1,) if run.small else (1, 4, 8, 16):
        _measure(run, n_rows, _Q_PER_KV)
    _measure_rebase(run)


def _measure(run: Run, n_rows: int, q_per_kv: int | None) -> None:
    """Time one number of rows, where asked with ``q_per_kv`` times as many query heads, turned."""
    n_kv_heads, head_dim = (2, 64) if run.small else (8, 128)
    kv_dim, device = n_kv_heads * head_dim, run.device
    case = Case(n_kv_heads, n_kv_heads, head_dim, n_rows)
    n_heads = n_kv_heads * (q_per_kv or 0)
    n_bytes = n_rows * (8 * kv_dim + 8 * n_heads * head_dim + case.key_bytes)
    kept: list[Buffer] = []
    words: list[dict[str, Any]] = [{}]
    with planes(run, case, n_sets(n_bytes, small=run.small)) as (layers, _):
        rows = [device_rows(run, n_rows, kv_dim, i) for i in range(len(layers))]
        name = f"append {n_kv_heads}x{head_dim}, {n_rows} rows, {Q8_0}/{Q5_1}"
        if q_per_kv:
            name += f", norm and rotation with {n_heads} query heads"
            angles = device.from_numpy(normal((n_rows, head_dim // 2, 2), 1), run.stream)
            norm = device.from_numpy(normal((head_dim,), 2), run.stream)
            turn = HeadTurn(angles, k_norm=norm, q_norm=norm)
            queries = [
                device.from_numpy(normal((n_rows, n_heads, head_dim), i), run.stream)
                for i in range(len(layers))
            ]
            words = [{"turn": turn, "q": q} for q in queries]
            kept = [angles, norm, *queries]
        words *= len(layers) // len(words)
        _appending(run, layers[0], rows[0], words[0])()  # loads the kernel
        for early in (True, False) if starts_early(device, True) else (False,):
            samples = run.timed(
                [
                    _appending(run, layer, both, {**how, "programmatic": early})
                    for layer, both, how in zip(layers, rows, words, strict=True)
                ]
            )
            row = Row(name + ", starts early" * early, "us", samples, extra={"bytes": n_bytes})
            if not run.small:
                row.floor = run.ceilings.copy_us(n_bytes // 2)
                if not q_per_kv:
                    row.goal = 1.6 if n_rows <= 16 else round(row.floor / 0.8, 2)
            run.add(row)
        for buffer in (*rows, *kept):
            buffer.close()


def _measure_rebase(run: Run) -> None:
    """Time moving a ring's rows to its beginning, overlapping; the floor is a copy of them."""
    n_kv_heads, head_dim = (2, 64) if run.small else (8, 128)
    for n_rows, src_row in ((60, 30),) if run.small else ((1055, 2048), (40_000, 8192)):
        case = Case(n_kv_heads, n_kv_heads, head_dim, src_row + n_rows)
        k_row = case.k_format.row_bytes(n_kv_heads * head_dim)
        n_bytes = n_rows * case.key_bytes
        with planes(run, case, n_sets(2 * n_bytes, small=run.small)) as (layers, lengths):
            fill(run, case, layers, lengths)
            calls = [
                functools.partial(
                    kv_move.move_rows, run.stream, layer.k, layer.v, k_row,
                    case.key_bytes - k_row, src_row, n_rows,
                )
                for layer in layers
            ]  # fmt: skip
            calls[0]()  # loads the kernel
            samples = run.timed(calls)
            row = Row(
                f"rebase {n_kv_heads}x{head_dim}, {n_rows} rows by {src_row}, {Q8_0}/{Q5_1}", "us",
                samples, extra={"bytes": 2 * n_bytes},
            )  # fmt: skip
            if not run.small:
                row.floor = run.ceilings.copy_us(n_bytes)
                row.goal = round(row.floor / 0.8, 2) if n_rows > 10_000 else None
            run.add(row)


def _appending(run: Run, layer: KvLayer, both: Buffer, words: dict[str, Any]) -> Callable[[], None]:
    k, v = halves(both, both.shape[1])
    return lambda: layer.append(run.stream, k, v, **words)
