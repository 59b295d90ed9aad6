"""Rows into a latent layer: both planes behind one length, and the keys that become complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import PlaneError
from ..kernels import latent_index, latent_rows
from .kvdev import StreamKvDev

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream
    from .latent import LatentKvLayer

__all__ = ["append"]


def append(
    layer: LatentKvLayer,
    stream: Stream,
    rows: Buffer,
    *,
    weight: Buffer | None,
    eps: float,
    angles: Buffer | None,
    kv_rank: int | None,
    index: Buffer | None,
    ape: Buffer | None,
    pool: int | None,
) -> None:
    """:meth:`LatentKvLayer.append`: everything is checked before the first row is written."""
    if len(rows.shape) != 2 or rows.shape[1] != layer.width:
        raise PlaneError(
            f"{layer.name}.append: rows must be f32 [n, {layer.width}], got {list(rows.shape)}"
        )
    n = rows.shape[0]
    _check_index_rows(layer, n, index, ape)
    if stream.recording is None:
        layer.check_headroom(n)
    if index is not None:
        _fix_pool(layer, stream, pool)
        assert ape is not None
        layer.tail.check_ape(ape.size, layer.index_dim)
        if stream.recording is None:
            layer.tail.check()
    layer.lengths.need(stream, n)
    latent_rows.append(
        stream, rows, layer.plane, layer.len_d, capacity=layer.max_ctx, format=layer.format,
        weight=weight, eps=eps, angles=angles, kv_rank=kv_rank,
    )  # fmt: skip
    if index is None or ape is None:
        return
    assert layer.index_rows is not None and layer.index_pool_keys is not None
    with layer.tail.appending(stream, n) as pieces:
        for first, take in pieces:
            latent_index.append(
                stream,
                index.view(4 * first * layer.index_width, (take, layer.index_width), np.float32),
                ape, layer.index_rows, layer.index_pool_keys, layer.len_d, pool=layer.tail.pool,
                capacity=layer.max_ctx, ring=layer.tail.effective, first=first,
            )  # fmt: skip


def _fix_pool(layer: LatentKvLayer, stream: Stream, pool: int | None) -> None:
    if layer.tail.pool == 0 and pool is None:
        raise PlaneError(
            f"{layer.name}.append: the rows per key are not known; give pool=, index_pool= or "
            "call prepare_index"
        )
    if pool is not None and pool != layer.tail.pool:
        layer.prepare_index(StreamKvDev(layer.device, stream), pool)


def _check_index_rows(
    layer: LatentKvLayer, n: int, index: Buffer | None, ape: Buffer | None
) -> None:
    if (index is not None) != (layer.index_width > 0):
        raise PlaneError(
            f"{layer.name}.append: "
            + (
                "index rows are given, but the layer has no index plane (index_width 0)"
                if index is not None
                else "index rows are missing; both planes have one length"
            )
        )
    if index is None:
        return
    if ape is None or index.shape != (n, layer.index_width):
        raise PlaneError(
            f"{layer.name}.append: index must be f32 [{n}, {layer.index_width}] and ape given, "
            f"got {list(index.shape)}"
        )
