"""Checkpoints of a cache: lengths, and copies of what cannot be rewound by an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..closing import Closing
from ..errors import RestoreRefused, RewindRefused, SnapshotRefused

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream
    from .cache import Cache
    from .group import PlaneGroup
    from .recurrent import RecurLayer

__all__ = ["CacheSnapshot", "check_rollback", "retake", "roll_back", "take"]


@dataclass
class CacheSnapshot(Closing):
    """A point to which a cache can go back; made by ``Cache.snapshot``.

    KV planes need no copy: their rows stay until they are written over. Recurrent states are
    copied.

    Attributes
    ----------
    kv_len : list of int or None
        Rows of each layer's KV plane.
    tp_kv_len : list of int or None
        Committed rows of each tensor-parallel plane.
    conv, ssm : list of Buffer or None
        Device copies of each recurrent layer's states.
    pos : int
        Position of the next token.
    slot : int
        Committed steps of the recurrent layers.
    """

    kv_len: list[int | None]
    tp_kv_len: list[int | None]
    conv: list[Buffer | None]
    ssm: list[Buffer | None]
    pos: int
    slot: int = 0

    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(b.n_bytes for b in (*self.conv, *self.ssm) if b is not None)

    def close(self) -> None:
        """Free the copies; idempotent."""
        for buffer in (*self.conv, *self.ssm):
            if buffer is not None:
                buffer.close()


def take(cache: Cache, stream: Stream) -> CacheSnapshot:
    """Make a snapshot; see ``Cache.snapshot``."""
    cache._check_snapshot()
    conv: list[Buffer | None] = []
    ssm: list[Buffer | None] = []
    for layer in cache.recur:
        for out, state in ((conv, "conv_state"), (ssm, "ssm_state")):
            if layer is None:
                out.append(None)
                continue
            source: Buffer = getattr(layer, state)
            on = _group_of(cache, layer).on(stream)
            out.append(layer.device.empty(source.shape, source.dtype, on, f"{state} copy"))
    snap = CacheSnapshot([], [None] * len(cache.kv), conv, ssm, 0)
    _fill(cache, snap, stream)
    return snap


def retake(cache: Cache, stream: Stream, snap: CacheSnapshot) -> None:
    """Refresh a snapshot in place; see ``Cache.snapshot_into``."""
    cache._check_snapshot()
    for layer, conv, ssm in zip(cache.recur, snap.conv, snap.ssm, strict=False):
        for buffer, state in ((conv, "conv_state"), (ssm, "ssm_state")):
            want = None if layer is None else getattr(layer, state).shape
            if (None if buffer is None else buffer.shape) != want:
                raise SnapshotRefused(
                    f"{cache.name}.snapshot_into: a copy of shape {buffer!r} for a state of "
                    f"{want}; make a new snapshot"
                )
    if len(snap.conv) != len(cache.recur):
        raise SnapshotRefused(
            f"{cache.name}.snapshot_into: a snapshot of {len(snap.conv)} layers, the cache has "
            f"{len(cache.recur)}"
        )
    _fill(cache, snap, stream)


def check_rollback(cache: Cache, snap: CacheSnapshot, accept: int) -> int:
    """Refuse a rollback that is not possible; give the length that it goes to."""
    if cache.tainted:
        raise RestoreRefused(f"{cache.name}.rollback: the cache is tainted; reset it")
    target = snap.pos + accept
    mine = [None if layer is None else 0 for layer in cache.kv]
    theirs = [None if n is None else 0 for n in snap.kv_len]
    if mine != theirs or accept < 0 or target > cache.len:
        raise RestoreRefused(
            f"{cache.name}.rollback: to {snap.pos} + {accept} rows of {len(theirs)} layers, but "
            f"the cache holds {cache.len} rows of {len(mine)} layers"
        )
    for latent in cache.latent[: cache.model.n_layer]:
        if latent is not None:
            latent.check_len(target)
    for layer in cache.planes():
        if layer.ring is not None and not layer.ring.can_rewind_to(target):
            raise RewindRefused(
                f"{layer.name}: the ring begins at {layer.ring.base}, a rollback to {target} "
                "needs earlier rows: full re-prime required",
                plane=layer.name,
                asked=target,
                possible=layer.ring.shortest_rewind(),
            )
    return target


def roll_back(cache: Cache, stream: Stream, snap: CacheSnapshot, accept: int) -> int:
    """Go back to a snapshot; see ``Cache.rollback``. Gives the rows to replay."""
    target = check_rollback(cache, snap, accept)
    by_slot = all(_reaches(group, snap, accept) for group in cache.stages if group.recur)
    for group in cache.stages:
        on = group.on(stream)
        if not by_slot:
            for il, layer in group.recur.items():
                conv, ssm = snap.conv[il], snap.ssm[il]
                assert conv is not None and ssm is not None
                layer.conv_state.copy_from(on, conv)
                layer.ssm_state.copy_from(on, ssm)
        slot = snap.slot + accept if by_slot and group.recur else None
        group.lengths.set(on, target, slot)
        group.truncate_keys()
        if not by_slot:
            group.anchor_at(snap.pos)
    return 0 if by_slot else accept


def _fill(cache: Cache, snap: CacheSnapshot, stream: Stream) -> None:
    for layer, conv, ssm in zip(cache.recur, snap.conv, snap.ssm, strict=True):
        if layer is not None and conv is not None and ssm is not None:
            on = _group_of(cache, layer).on(stream)
            conv.copy_from(on, layer.conv_state)
            ssm.copy_from(on, layer.ssm_state)
    snap.kv_len = [None if layer is None else layer.len for layer in cache.kv]
    snap.pos = cache.pos
    snap.slot = next((g.slot_counter for g in cache.stages if g.recur), 0)


def _group_of(cache: Cache, layer: RecurLayer) -> PlaneGroup:
    return next(g for g in cache._groups() if layer in g.recur.values())


def _reaches(group: PlaneGroup, snap: CacheSnapshot, accept: int) -> bool:
    """Whether the slots of a group still hold the state of ``accept`` rows behind a snapshot."""
    if snap.pos < group.anchor[0] or group.slot_at(snap.pos) != snap.slot:
        return False
    return all(layer.holds(snap.slot + accept) for layer in group.recur.values())
