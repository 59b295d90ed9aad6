"""Reads of a latent layer, in parts whose scratch is bounded: lists of rows, and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import PlaneError
from ..kernels import latent_attend, latent_index

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream
    from .latent import LatentKvLayer

__all__ = ["attend", "select"]


def select(
    layer: LatentKvLayer,
    stream: Stream,
    q: Buffer,
    weights: Buffer,
    out: Buffer,
    *,
    top_k: int,
    counted: bool,
    width_d: Buffer | None,
    scratch_bytes: int,
) -> None:
    """:meth:`LatentKvLayer.select`: scores of some queries at a time, then their lists."""
    if layer.index_pool_keys is None:
        raise PlaneError(f"{layer.name}.select: no pool is known yet; append index rows first")
    pool, d = layer.tail.pool, layer.index_dim
    if len(q.shape) != 3 or q.shape[2] != d:
        raise PlaneError(f"{layer.name}.select: q must be f32 [n, heads, {d}], got {q.shape}")
    layer.check_reads(stream, "select", q.shape[0], counted)
    n, heads, n_pools = q.shape[0], q.shape[1], max(1, layer.max_ctx // pool)
    per_row = 4 * n_pools + latent_index.scratch_bytes(1, n_pools)
    at_once = max(1, min(n, scratch_bytes // per_row))
    space = layer.workspace.take(stream, at_once * per_row)
    for first in range(0, n, at_once):
        m = min(at_once, n - first)
        scores = space.view(0, (m, n_pools), np.float32)
        scratch = space.view(4 * m * n_pools, (m * (per_row // 4 - n_pools),), np.int32)
        behind = (n if counted else 0) - first
        latent_index.score(
            stream, _part(q, first, m), _part(weights, first, m, heads), layer.index_pool_keys,
            scores, layer.len_d, pool=pool, counted=behind,
        )  # fmt: skip
        latent_index.select(
            stream, scores, _part(out, first, m), scratch, layer.len_d, top_k=top_k, pool=pool,
            counted=behind, width_d=width_d,
        )  # fmt: skip


def attend(
    layer: LatentKvLayer,
    stream: Stream,
    q: Buffer,
    out: Buffer,
    *,
    scale: float,
    indices: Buffer | None,
    lse: Buffer | None,
    counted: bool,
    numeric: str,
    scratch_bytes: int,
) -> None:
    """:meth:`LatentKvLayer.attend`: partial results of some queries at a time, then their sums."""
    if len(q.shape) != 3 or len(out.shape) != 3 or q.shape[2] != layer.width:
        raise PlaneError(
            f"{layer.name}.attend: q must be f32 [n, heads, {layer.width}] and out [n, heads, "
            f"kv_rank], got {q.shape} and {out.shape}"
        )
    n, heads, rank = out.shape
    layer.check_reads(stream, "attend", n, counted)
    n_list = 0 if indices is None else indices.shape[-1]
    at_once = latent_attend.rows_at_once(heads, rank, layer.max_ctx, n_list, scratch_bytes, numeric)
    at_once = max(1, min(n, at_once))
    space = layer.workspace.take(
        stream, latent_attend.workspace_bytes(at_once, heads, rank, layer.max_ctx, n_list, numeric)
    )
    for first in range(0, n, at_once):
        m = min(at_once, n - first)
        latent_attend.attend(
            stream, _part(q, first, m), layer.plane, _part(out, first, m), len_d=layer.len_d,
            rows=layer.max_ctx, workspace=space, scale=scale, format=layer.format,
            indices=None if indices is None else _part(indices, first, m),
            lse=None if lse is None else _part(lse, first, m, heads), counted=counted,
            first=first, of=n, numeric=numeric,
        )  # fmt: skip


def _part(buffer: Buffer, first: int, n: int, width: int | None = None) -> Buffer:
    """Rows [first, first + n) of a buffer whose first axis is rows (or of ``width`` elements)."""
    shape = buffer.shape[1:] if width is None else (width,)
    row = buffer.dtype.itemsize * int(np.prod(shape))
    return buffer.view(first * row, (n, *shape), buffer.dtype)
