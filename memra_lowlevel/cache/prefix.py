"""The state of a whole cache at the end of a prompt, to start other sequences from."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..closing import Closing
from ..errors import RestoreRefused, SnapshotRefused
from .kvdev import StreamKvDev
from .latent_snapshot import restore as restore_latent
from .plan import LatentKvCache, Recurrent

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream
    from .cache import Cache
    from .group import PlaneGroup
    from .latent_snapshot import LatentPlaneSnapshot

__all__ = ["CachePrefix", "geometry", "restore", "take"]


@dataclass
class CachePrefix(Closing):
    """Copies of every layer's state; made by ``Cache.snapshot_prefix``.

    Attributes
    ----------
    pos : int
        Rows of the trunk.
    mtp_len : int
        Rows of the MTP blocks, which move by themselves.
    latent : dict of int to LatentPlaneSnapshot
        By layer; a layer without rows is absent.
    kv : dict of int to (Buffer, Buffer)
        Bytes of the K and V rows, by layer.
    recur : dict of int to (Buffer, Buffer)
        Convolution and recurrent state, by layer.
    geometry : list of dict
        What a cache must have to take it over, by layer.
    streams : list of Stream
        Where layers lie on several devices: the streams of the cache behind which the copies on
        its other devices are there.
    """

    pos: int
    mtp_len: int
    geometry: list[dict[str, Any]]
    latent: dict[int, LatentPlaneSnapshot] = field(default_factory=dict)
    kv: dict[int, tuple[Buffer, Buffer]] = field(default_factory=dict)
    recur: dict[int, tuple[Buffer, Buffer]] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)

    def stream_of(self, buffer: Buffer, stream: Stream) -> Stream:
        """Return ``stream``, or the one that serves a copy on another device than its."""
        for on in (stream, *self.streams):
            if on.device == buffer.device:
                return on
        raise RestoreRefused(
            f"a copy of the prefix lies on {buffer.device}, for which no stream is known; give a "
            "stream of that device"
        )

    def bytes(self) -> int:
        """Bytes of the copies."""
        pairs = (*self.kv.values(), *self.recur.values())
        return sum(s.bytes() for s in self.latent.values()) + sum(
            buffer.n_bytes for pair in pairs for buffer in pair
        )

    def save(self, stream: Stream, path: str | PathLike[str]) -> Path:
        """Write the prefix to one file; see :mod:`memra_lowlevel.cache.prefix_file`."""
        from . import prefix_file

        return prefix_file.save(self, stream, path)

    @staticmethod
    def load(path: str | PathLike[str], cache: Cache, stream: Stream) -> CachePrefix:
        """Read a prefix for ``cache``; ``Cache.restore_prefix`` then takes it over.

        Raises
        ------
        RestoreRefused
            A damaged or foreign file, or one of another model.
        """
        from . import prefix_file

        return prefix_file.load(path, cache, stream)

    def close(self) -> None:
        """Free the copies; idempotent."""
        for snap in self.latent.values():
            snap.close()
        for pair in (*self.kv.values(), *self.recur.values()):
            for buffer in pair:
                buffer.close()


def geometry(cache: Cache) -> list[dict[str, Any]]:
    """Say what every layer of a cache is, in numbers and names; nothing that may differ safely.

    The capacity and the layout of index planes may differ between giver and taker.
    """
    rows: list[dict[str, Any]] = []
    for il, layer in enumerate(cache.model.layers):
        state, kv, latent = layer.state, cache.kv[il], cache.latent[il]
        row: dict[str, Any] = {"state": type(state).__name__, "owns": cache.model.owns_plane(il)}
        if kv is not None:
            row |= {"kv_dims": [kv.kv_dim_k, kv.kv_dim_v], "heads": kv.n_kv_heads}
            row |= {"formats": [kv.k_format.name, kv.v_format.name]}
        if latent is not None and isinstance(state, LatentKvCache):
            row |= {"widths": [latent.width, latent.index_width], "format": latent.format.name}
            row |= {"index_pool": cache.model.index_pool}
        if isinstance(state, Recurrent):
            row |= {"recurrent": [state.conv_width, state.conv_kernel, state.state_width]}
        rows.append(row)
    return rows


def take(cache: Cache, stream: Stream) -> CachePrefix:
    """Copy the state of every layer.

    Raises
    ------
    SnapshotRefused
        The cache is tainted, empty or in the middle of a replay; a plane is a ring, whose older
        rows are gone; or a latent layer refuses. No copy stays.
    """
    name = f"{cache.name}.snapshot_prefix"
    cache._check_snapshot()
    if cache.pos == 0:
        raise SnapshotRefused(f"{name}: the cache is empty")
    if any(layer is not None for layer in (*cache.tp_kv, *cache.glm5_tp_latent_peer)):
        raise SnapshotRefused(f"{name}: planes of other ranks are not carried")
    for layer in cache.kv:
        if layer is not None and layer.ring is not None:
            raise SnapshotRefused(
                f"{name}: {layer.name} is a ring; its rows are not carried, and a hit without them "
                "would attend an empty history. Snapshot a cache without rings"
            )
    mtp_len = cache.mtp.len if cache.mtp is not None else 0
    prefix = CachePrefix(cache.pos, mtp_len, geometry(cache))
    try:
        for group in cache._groups():
            if group.len == 0 and group is cache.mtp:
                continue
            on = stream_for(group, stream, prefix)
            dev = StreamKvDev(group.device, on)
            for il, latent in group.latent.items():
                prefix.latent[il] = latent.snapshot_plane(dev)
            for il, kv in group.kv.items():
                sizes = (group.len * kv.k_tok_bytes, group.len * kv.v_tok_bytes)
                k, v = (dev.alloc_u8(n) for n in sizes)
                prefix.kv[il] = k, v
                for copy, plane in ((k, kv.k), (v, kv.v)):
                    copy.copy_from(on, plane.view(0, copy.shape, np.uint8))
            for il, recur in group.recur.items():
                conv, ssm = dev.clone_dtod(recur.conv_state), dev.clone_dtod(recur.ssm_state)
                prefix.recur[il] = conv, ssm
    except BaseException:
        prefix.close()
        raise
    return prefix


def stream_for(group: PlaneGroup, stream: Stream, prefix: CachePrefix) -> Stream:
    """Return the stream that copies for a group go to; the prefix remembers another than ours."""
    if stream.device == group.device:
        return stream
    if group.stream not in prefix.streams:
        prefix.streams.append(group.stream)
    return group.stream


def restore(cache: Cache, stream: Stream, prefix: CachePrefix) -> None:
    """Take over a prefix into an empty cache.

    Raises
    ------
    RestoreRefused
        The prefix is of another model or does not fit; nothing has moved in any layer.
    """
    check(cache, prefix)
    for group in cache._groups():
        length = prefix.mtp_len if group is cache.mtp else prefix.pos
        if length == 0:
            continue
        on = stream if stream.device == group.device else group.stream
        dev = StreamKvDev(group.device, on)
        for il, latent in group.latent.items():
            restore_latent(latent, dev, prefix.latent[il])
        for il, kv in group.kv.items():
            for copy, plane in zip(prefix.kv[il], (kv.k, kv.v), strict=True):
                plane.view(0, copy.shape, np.uint8).copy_from(on, copy)
        for il, recur in group.recur.items():
            conv, ssm = prefix.recur[il]
            recur.conv_state.copy_from(on, conv)
            recur.ssm_state.copy_from(on, ssm)
        group.lengths.set(on, length)
        group.anchor_at(length)


def check(cache: Cache, prefix: CachePrefix) -> None:
    """Refuse a prefix that does not fit; touches no device."""
    name = f"{cache.name}.restore_prefix"

    def refuse(why: str) -> None:
        raise RestoreRefused(f"{name}: {why}. Nothing was copied")

    if cache.tainted or cache._replay:
        refuse("the cache is tainted or replaying; reset it")
    mine = geometry(cache)
    if len(mine) != len(prefix.geometry):
        refuse(f"the prefix has {len(prefix.geometry)} layers, the cache {len(mine)}")
    for il, (have, want) in enumerate(zip(mine, prefix.geometry, strict=True)):
        if have != want:
            refuse(f"layer {il} of the prefix is {want}, of the cache {have}")
    for group in cache._groups():
        length = prefix.mtp_len if group is cache.mtp else prefix.pos
        if group.len != 0:
            refuse(f"{group.name} holds {group.len} rows; restore into an empty cache")
        if not 0 <= length <= cache.max_ctx or (length == 0 and group is not cache.mtp):
            refuse(f"{length} rows do not lie in 1..{cache.max_ctx}")
        if length:
            _check_group(cache, group, length, prefix, refuse)


def _check_group(
    cache: Cache, group: PlaneGroup, length: int, prefix: CachePrefix, refuse: Any
) -> None:
    copies = {**prefix.kv, **prefix.recur}
    for il in (*group.latent, *group.kv, *group.recur):
        part = copies[il][0] if il in copies else getattr(prefix.latent.get(il), "rows", None)
        if part is not None and part.device != group.device:
            refuse(
                f"layer {il} of the prefix lies on {part.device}, of the cache on {group.device}; "
                "save the prefix and load it for this cache"
            )
    for il, latent in group.latent.items():
        snap = prefix.latent.get(il)
        if snap is None or snap.len != length:
            refuse(f"layer {il} has {snap.len if snap else 'no'} rows, the prefix {length}")
        else:
            latent.validate_restore(snap, cache.max_ctx)
    for il, kv in group.kv.items():
        if kv.ring is not None:
            refuse(f"{kv.name} is a ring, and the prefix has rows of flat planes")
        want = (length * kv.k_tok_bytes, length * kv.v_tok_bytes)
        if il not in prefix.kv or tuple(b.n_bytes for b in prefix.kv[il]) != want:
            refuse(f"layer {il} lacks K and V rows of {want} bytes")
    for il, recur in group.recur.items():
        shapes = (recur.conv_state.shape, recur.ssm_state.shape)
        if il not in prefix.recur or tuple(b.shape for b in prefix.recur[il]) != shapes:
            refuse(f"layer {il} lacks recurrent states of {shapes}")
