"""Snapshots of latent planes: rows, keys, and the tail of the index rows.

Keys travel, because the rows that made them are gone from the ring. Of the index rows only the open
pool's are needed: fewer than a pool, and one contiguous piece even in a ring. So a snapshot of a
flat layer fits a layer with a ring, and the other way round.

Planes only grow behind a captured boundary; so a capture may take just the tail, which further rows
would destroy, and the rest later (:func:`take_tail`, :func:`complete`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..closing import Closing
from ..errors import PlaneError, RestoreRefused, SnapshotRefused
from ..formats import by_name
from ..kernels import latent_rows
from .geometry import MAX_ROWS
from .index_ring import index_plane_physical_row

if TYPE_CHECKING:
    from ..runtime import Buffer
    from .kvdev import KvDev
    from .latent import LatentKvLayer

__all__ = [
    "LatentPlaneSnapshot",
    "LatentTailCapture",
    "complete",
    "restore",
    "take",
    "take_tail",
    "validate",
]


@dataclass
class LatentPlaneSnapshot(Closing):
    """The whole state of a latent layer at one length.

    Attributes
    ----------
    rows : Buffer
        f32 ``[len * width]`` (or the bytes of another format, in whole words).
    width, len, index_width, index_pool : int
    index_tail : Buffer or None
        f32 ``[len % index_pool * index_width]``: index rows of the open pool.
    index_pool_keys : Buffer or None
        f32 ``[index_pools_ready * index_width / 2]``.
    index_pools_ready : int
    format : str
        Format of the rows.
    """

    rows: Buffer
    width: int
    len: int
    index_width: int = 0
    index_pool: int = 0
    index_tail: Buffer | None = None
    index_pool_keys: Buffer | None = None
    index_pools_ready: int = 0
    format: str = "f32"

    def bytes(self) -> int:
        """Bytes of rows, tail and keys."""
        held = (self.rows, self.index_tail, self.index_pool_keys)
        return sum(b.n_bytes for b in held if b is not None)

    def close(self) -> None:
        """Free the copies; idempotent."""
        for buffer in (self.rows, self.index_tail, self.index_pool_keys):
            if buffer is not None:
                buffer.close()


@dataclass
class LatentTailCapture(Closing):
    """The part of a snapshot that further rows destroy; completed once by ``snapshot_plane_at``."""

    len: int
    width: int
    index_width: int = 0
    index_pool: int = 0
    index_pools_ready: int = 0
    index_tail: Buffer | None = None
    format: str = "f32"
    used: bool = field(default=False, compare=False)

    def bytes(self) -> int:
        """Bytes of the tail."""
        return self.index_tail.n_bytes if self.index_tail is not None else 0

    def close(self) -> None:
        """Free the tail, unless it went into a snapshot; idempotent."""
        if self.index_tail is not None and not self.used:
            self.index_tail.close()


# -- taking ---------------------------------------------------------------------------------------


def take(layer: LatentKvLayer, dev: KvDev) -> LatentPlaneSnapshot:
    """Copy the state of a layer on the stream of ``dev``.

    Raises
    ------
    SnapshotRefused
        The state cannot be captured faithfully; no copy was made.
    """
    _check_stream(layer, dev, SnapshotRefused)
    _check_state(layer)
    _check_rows(layer, layer.len)
    return _copy(layer, dev, take_tail(layer, dev))


def take_tail(layer: LatentKvLayer, dev: KvDev) -> LatentTailCapture:
    """Copy the index rows of the open pool, and note the rest.

    Raises
    ------
    SnapshotRefused
        As :func:`take`, but for the latent rows, which are not copied.
    """
    _check_stream(layer, dev, SnapshotRefused)
    tail_at, tail_rows = _check_state(layer)
    tail = None
    if tail_rows:
        assert layer.index_rows is not None
        tail = dev.uninit(tail_rows * layer.index_width)
        dev.copy_range_into(tail, 0, layer.index_rows, tail_at * layer.index_width, tail.size)
    indexed = layer.index_width > 0
    return LatentTailCapture(
        layer.len, layer.width, layer.index_width, layer.index_pool if indexed else 0,
        layer.index_pools_ready if indexed else 0, tail, layer.format.name,
    )  # fmt: skip


def complete(layer: LatentKvLayer, dev: KvDev, cap: LatentTailCapture) -> LatentPlaneSnapshot:
    """Make the snapshot of a captured boundary from the layer as it is now.

    Raises
    ------
    SnapshotRefused
        The capture is used up or of another layer, or the layer went back behind the boundary.
    """
    _check_stream(layer, dev, SnapshotRefused)
    d = layer.index_dim
    keys = cap.index_pools_ready * d
    held = layer.index_pool_keys
    wrong = [
        (cap.used, "the capture was completed before; take a new one"),
        (cap.len == 0, "the capture has no rows"),
        (cap.width != layer.width, f"width {cap.width}, the layer has {layer.width}"),
        (cap.format != layer.format.name, f"{cap.format} rows, the layer's are {layer.format}"),
        (layer.len < cap.len, f"the layer went back to {layer.len}, the capture is of {cap.len}"),
        (
            cap.index_width != layer.index_width,
            f"index_width {cap.index_width}, the layer has {layer.index_width}",
        ),
        (
            cap.index_width > 0 and cap.index_pool != layer.index_pool,
            f"index_pool {cap.index_pool}, the layer has {layer.index_pool}",
        ),
        (
            cap.index_width > 0 and layer.index_pools_ready < cap.index_pools_ready,
            f"index_pools_ready {layer.index_pools_ready}, the capture has {cap.index_pools_ready}",
        ),
        (keys > 0 and (held is None or held.size < keys), f"no keys of {keys} elements"),
    ]
    _refuse(SnapshotRefused, f"{layer.name}.snapshot_plane_at", wrong)
    _check_rows(layer, cap.len)
    return _copy(layer, dev, cap)


def _copy(layer: LatentKvLayer, dev: KvDev, cap: LatentTailCapture) -> LatentPlaneSnapshot:
    rows = dev.uninit(_words(layer.row_bytes * cap.len))
    dev.copy_range_into(rows, 0, layer.rows, 0, rows.size)
    keys = None
    if cap.index_pools_ready:
        assert layer.index_pool_keys is not None
        keys = dev.uninit(cap.index_pools_ready * layer.index_dim)
        dev.copy_range_into(keys, 0, layer.index_pool_keys, 0, keys.size)
    cap.used = True
    return LatentPlaneSnapshot(
        rows, cap.width, cap.len, cap.index_width, cap.index_pool, cap.index_tail, keys,
        cap.index_pools_ready, cap.format,
    )  # fmt: skip


def _check_state(layer: LatentKvLayer) -> tuple[int, int]:
    """Refuse a layer that is not at a drained boundary; physical row and length of the tail."""
    name, length = f"{layer.name}.snapshot", layer.len
    _refuse(SnapshotRefused, name, [(length == 0, "the layer has no rows; note it as absent")])
    if layer.index_width == 0:
        return 0, 0
    pool, ready, d = layer.index_pool, layer.index_pools_ready, layer.index_dim
    _refuse(
        SnapshotRefused, name, [(pool == 0, "index_pool is not known: no index row was appended")]
    )
    tail_rows = length % pool
    ring = layer.index_ring_rows or 0
    tail_at = index_plane_physical_row(ring, pool, length - tail_rows)
    held, plane = layer.index_pool_keys, layer.index_rows
    need = (tail_at + tail_rows) * layer.index_width
    wrong = [
        (
            ready != length // pool,
            f"index_pools_ready is {ready}, len {length} has {length // pool} whole pools: not at "
            "a drained boundary",
        ),
        (ready > 0 and (held is None or held.size < ready * d), f"no keys of {ready * d} elements"),
        (
            tail_rows > 0 and (plane is None or plane.size < need),
            f"the index plane has no {need} elements",
        ),
        (not layer.tail.has_tail_of(length), "index rows of the open pool were written over"),
    ]
    _refuse(SnapshotRefused, name, wrong)
    return tail_at, tail_rows


def _check_rows(layer: LatentKvLayer, length: int) -> None:
    need = _words(layer.row_bytes * length)
    _refuse(
        SnapshotRefused, f"{layer.name}.snapshot",
        [(layer.rows.size < need, f"rows has {layer.rows.size} elements, {need} are needed")],
    )  # fmt: skip


# -- restoring ------------------------------------------------------------------------------------


def validate(layer: LatentKvLayer, snap: LatentPlaneSnapshot, max_ctx: int) -> None:
    """Refuse a snapshot that does not fit a layer, by arithmetic alone.

    Raises
    ------
    RestoreRefused
        Names what differs.
    """
    name = f"{layer.name}.restore_plane"
    known = snap.width >= 1 and snap.format in {f.name for f in latent_rows.FORMATS}
    row_bytes = latent_rows.row_bytes(by_name(snap.format), snap.width) if known else 0
    words = _words(row_bytes * max(0, snap.len))
    wrong = [
        (layer.len != 0, f"the layer has {layer.len} rows; restore into an empty one"),
        (not known, f"a snapshot of {snap.format} rows of {snap.width}"),
        (snap.width != layer.width, f"width {snap.width}, the layer has {layer.width}"),
        (snap.format != layer.format.name, f"{snap.format} rows, the layer's are {layer.format}"),
        (
            not 0 < snap.len <= min(max_ctx, MAX_ROWS, layer.max_ctx),
            f"{snap.len} rows do not lie in 1..{min(max_ctx, layer.max_ctx)}",
        ),
        (snap.rows.size < words, f"the snapshot has {snap.rows.size} of {words} elements of rows"),
        (layer.rows.size < words, f"the layer has {layer.rows.size} of {words} elements of rows"),
        (
            snap.index_width != layer.index_width,
            f"index_width {snap.index_width}, the layer has {layer.index_width}",
        ),
    ]
    _refuse(RestoreRefused, name, wrong)
    if snap.index_width == 0:
        return
    pool, ready, d = snap.index_pool, snap.index_pools_ready, snap.index_width // 2
    _refuse(
        RestoreRefused,
        name,
        [
            (pool <= 0, "index_pool of the snapshot is 0"),
            (
                layer.index_pool not in (0, pool),
                f"index_pool {pool}, the layer has {layer.index_pool}",
            ),
        ],
    )
    ring, tail_rows = layer.index_ring_rows or 0, snap.len % pool
    _refuse(
        RestoreRefused, name,
        [(0 < ring < pool, f"the ring of {ring} rows is less than a pool of {pool}")],
    )  # fmt: skip
    tail_at = index_plane_physical_row(ring, pool, snap.len - tail_rows)
    keys, tail, plane = snap.index_pool_keys, snap.index_tail, layer.index_rows
    need = (tail_at + tail_rows) * snap.index_width
    wrong = [
        (
            ready != snap.len // pool,
            f"index_pools_ready {ready}, {snap.len} rows have {snap.len // pool} whole pools",
        ),
        (ready == 0 and keys is not None, "keys without a whole pool"),
        (ready > 0 and keys is None, f"no keys of {ready} pools"),
        (keys is not None and keys.size < ready * d, f"keys are short of {ready * d} elements"),
        (tail_rows == 0 and tail is not None, "a tail at a length of whole pools"),
        (tail_rows > 0 and tail is None, f"no tail of {tail_rows} rows"),
        (
            tail is not None and tail.size < tail_rows * snap.index_width,
            f"the tail is short of {tail_rows * snap.index_width} elements",
        ),
        (plane is None, "the layer has no index plane"),
        (
            plane is not None and tail_rows > 0 and plane.size < need,
            f"the index plane has no {need} elements for the tail",
        ),
    ]
    _refuse(RestoreRefused, name, wrong)


def restore(layer: LatentKvLayer, dev: KvDev, snap: LatentPlaneSnapshot) -> None:
    """Copy a validated snapshot into a layer; the caller sets the length behind it."""
    _check_stream(layer, dev, RestoreRefused)
    if snap.index_width:
        # Keys of the whole session at once: an allocation later would lose what came with the
        # snapshot, and the rows to build it again are gone.
        layer.prepare_index(dev, snap.index_pool)
        assert layer.index_pool_keys is not None
        layer.index_pool_keys.fill(dev.stream, 0)
    words = _words(layer.row_bytes * snap.len)
    dev.copy_range_into(layer.rows, 0, snap.rows, 0, words)
    if not snap.index_width:
        return
    if snap.index_pool_keys is not None:
        assert layer.index_pool_keys is not None
        n = snap.index_pools_ready * layer.index_dim
        dev.copy_range_into(layer.index_pool_keys, 0, snap.index_pool_keys, 0, n)
    tail_rows = snap.len % snap.index_pool
    first = snap.len - tail_rows
    if snap.index_tail is not None:
        assert layer.index_rows is not None
        at = index_plane_physical_row(layer.index_ring_rows or 0, snap.index_pool, first)
        n = tail_rows * layer.index_width
        dev.copy_range_into(layer.index_rows, at * layer.index_width, snap.index_tail, 0, n)
    layer.tail.reset(snap.index_pools_ready, first)


def _words(n_bytes: int) -> int:
    return -(-n_bytes // 4)


def _check_stream(layer: LatentKvLayer, dev: KvDev, refusal: type[PlaneError]) -> None:
    wrong = dev.device != layer.device
    _refuse(refusal, layer.name, [(wrong, f"dev is on {dev.device}, the layer on {layer.device}")])


def _refuse(refusal: type[PlaneError], name: str, wrong: list[tuple[bool, str]]) -> None:
    for is_wrong, what in wrong:
        if is_wrong:
            raise refusal(f"{name}: {what}. Nothing was copied")
