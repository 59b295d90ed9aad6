"""Decode attention and append over quantised planes, in a graph over rotating planes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..cache import KvLayer
from .ceilings import Ceilings
from .clock import graph_us
from .result import Row

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.stream import Stream

__all__ = ["SHAPES", "measure_append", "measure_attend", "measure_rows"]

SHAPES = (
    (32, 8, 128, (512, 4096, 32768, 131072)),
    (64, 8, 128, (32768, 131072)),
    (16, 2, 256, (4096, 32768, 131072)),
    (9, 3, 64, (4096, 32768)),
)
"""Query heads, kv heads, head_dim, contexts."""


def measure_attend(
    device: Device, stream: Stream, ceilings: Ceilings, *, peers: bool = True
) -> list[Row]:
    """Time one row over each shape and context; the floor is the read of the planes' bytes."""
    rows = []
    for n_heads, n_kv_heads, head_dim, contexts in SHAPES:
        for ctx in contexts:
            rows.append(_one(device, stream, ceilings, n_heads, n_kv_heads, head_dim, ctx, 1))
            if peers and device.kind == "cuda":
                from .peers import attend_rows

                rows += attend_rows(device, n_heads, n_kv_heads, head_dim, ctx, 1)
    return rows


def measure_rows(device: Device, stream: Stream, ceilings: Ceilings) -> list[Row]:
    """Time 1 to 16 rows of one shape at 32 k."""
    return [_one(device, stream, ceilings, 32, 8, 128, 32768, n) for n in (1, 2, 4, 8, 16)]


def measure_append(device: Device, stream: Stream) -> list[Row]:
    """Time one append of K and V, and a bulk append."""
    rows = []
    for n_rows in (1, 4, 8, 16, 4096):
        layers = _layers(device, stream, 8, 128, max(n_rows, 64), 8)
        k = device.from_numpy(_normal((n_rows, 1024)), stream)
        calls = [_appending(stream, layer, k) for layer in layers]
        row = Row(f"append 8x128 rows {n_rows}", "us", graph_us(device, stream, calls * 8))
        n_bytes = n_rows * (8 * 1024 + 1024 // 32 * (34 + 24))
        row.extra["tb_per_s"] = round(n_bytes / row.median / 1e6, 4)
        rows.append(row)
        k.close()
        for layer in layers:
            layer.close()
    return rows


def _one(
    device: Device,
    stream: Stream,
    ceilings: Ceilings,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    ctx: int,
    n_rows: int,
) -> Row:
    n_bytes = ctx * n_kv_heads * head_dim // 32 * (34 + 24)
    n_sets = max(1, min(24, (256 << 20) // n_bytes + 1))
    layers = _layers(device, stream, n_kv_heads, head_dim, ctx, n_sets)
    _fill(device, stream, layers, n_kv_heads * head_dim, ctx, n_rows)
    q = device.from_numpy(_normal((n_rows, n_heads, head_dim)), stream)
    out = device.empty((n_rows, n_heads, head_dim), np.float32, stream)
    for layer in layers:
        layer.attend(stream, q, out)
    stream.sync()
    calls = [_attending(stream, layer, q, out) for layer in layers]
    calls *= max(1, 48 // len(calls))
    row = Row(
        f"attend {n_heads}/{n_kv_heads}/{head_dim} rows {n_rows} ctx {ctx} q8_0/q5_1",
        "us",
        graph_us(device, stream, calls, n_samples=12),
        floor=ceilings.read_us(n_bytes),
    )
    row.extra["bytes"] = n_bytes
    for buffer in (q, out):
        buffer.close()
    for layer in layers:
        layer.close()
    return row


def _normal(shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _layers(
    device: Device, stream: Stream, n_kv_heads: int, head_dim: int, ctx: int, n: int
) -> list[KvLayer]:
    return [
        KvLayer.allocate(device, ctx, n_kv_heads, head_dim, check=False, name=f"bench{i}")
        for i in range(n)
    ]


def _fill(
    device: Device, stream: Stream, layers: list[KvLayer], kv_dim: int, ctx: int, n_rows: int
) -> None:
    piece = min(ctx, 4096)
    k = device.from_numpy(_normal((piece, kv_dim)), stream)
    v = device.from_numpy(_normal((piece, kv_dim))[::-1].copy(), stream)
    for layer in layers:
        for start in range(0, ctx, piece):
            n = min(piece, ctx - start)
            layer.append(
                stream, k.view(0, (n, kv_dim), np.float32), v.view(0, (n, kv_dim), np.float32)
            )
            layer.advance(stream, n)
        layer.set_len(stream, ctx - n_rows)
    stream.sync()
    k.close()
    v.close()


def _attending(stream: Stream, layer: KvLayer, q: object, out: object) -> Callable[[], None]:
    return lambda: layer.attend(stream, q, out)  # type: ignore[arg-type]


def _appending(stream: Stream, layer: KvLayer, rows: object) -> Callable[[], None]:
    return lambda: layer.append(stream, rows, rows)  # type: ignore[arg-type]
