"""The plane of a latent-attention (MLA) layer, with the rows and keys of its indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import expect
from ..errors import (
    ArgumentError,
    CaptureForbidden,
    FormatUnsupported,
    PlaneError,
    RewindRefused,
)
from ..formats import F32, Format
from ..kernels import latent_index, latent_rows
from . import latent_reads, latent_snapshot, latent_writes
from .latent_geometry import check_geometry
from .latent_tail import IndexTail
from .one_length import OneLength
from .planes import Lengths, Workspace

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream
    from .kvdev import KvDev
    from .latent_snapshot import LatentPlaneSnapshot, LatentTailCapture

__all__ = ["LatentKvLayer"]

SCRATCH_BYTES = 64 << 20
"""Scratch of one call unless it says otherwise: partial results, or scores of pools."""


class LatentKvLayer(OneLength):
    """Latent rows of one layer, which serve as keys and values of all heads.

    ====================  =========================================  ============================
    buffer                shape                                      content
    ====================  =========================================  ============================
    ``rows``              f32 ``[max_ctx * width]``, zero at first   ``[rmsnorm(c) | rope(k_pe)]``
    ``index_rows``        f32 ``[(ring or max_ctx) * index_width]``  ``[k_norm(k) | gate]``
    ``index_pool_keys``   f32 ``[max_ctx // pool * d]``              key of pool p at ``p * d``
    ====================  =========================================  ============================

    The value of a row is its first ``kv_rank`` elements. In another format than f32, ``rows`` has
    the same number of rows in that format's bytes. Both planes have one length, ``len`` here and
    ``len_d`` on the device: ``append`` writes behind it without moving it, ``advance`` moves it.

    An index row is read once, when its pool is complete and its key is built; so the index plane
    may be the ring of its tail, of any size from one pool on, and does not bound a call.

    Attributes
    ----------
    rows : Buffer
    width : int
        ``kv_rank + d_rope``.
    len_d : Buffer
        i32[1].
    index_rows : Buffer or None
        None without an indexer.
    index_width : int
        ``2 * d``; 0 without an indexer.
    index_ring_rows : int or None
        Physical rows of the ring; None for a flat index plane.
    index_pool_keys : Buffer or None
        None until the pool is known.
    index_pool : int
        Rows per key; 0 until it is known.
    """

    def __init__(
        self,
        dev: KvDev,
        max_ctx: int,
        width: int,
        index_width: int = 0,
        index_ring_rows: int | None = None,
        index_pool: int | None = None,
        *,
        lengths: Lengths,
        index: int = 0,
        workspace: Workspace,
        format: Format = F32,
        name: str = "latent",
    ):
        check_geometry(max_ctx, width, index_width, index_ring_rows, index_pool, format, name)
        self.device: Device = dev.device
        self.name, self.max_ctx, self.format = name, max_ctx, format
        self.width, self.index_width = width, index_width
        self.row_bytes = latent_rows.row_bytes(format, width)
        self.lengths, self.len_d = lengths, lengths.view(index)
        self.rows: Buffer = dev.zeros(-(-max_ctx * self.row_bytes // 4))
        ring = index_ring_rows if index_width and index_ring_rows else None
        self.index_ring_rows = ring
        self.index_rows: Buffer | None = None
        if index_width:
            self.index_rows = dev.uninit((ring or max_ctx) * index_width)
        self.index_pool_keys: Buffer | None = None
        self.tail = IndexTail(lengths, ring or 0, name)
        self.workspace = workspace
        self._arena: Any = None
        latent_rows.prepare(self.device, format)
        if index_width:
            latent_index.prepare(self.device)
        if index_pool is not None and index_width:
            self.prepare_index(dev, index_pool)

    @classmethod
    def allocate(
        cls,
        dev: KvDev,
        max_ctx: int,
        width: int,
        index_width: int = 0,
        index_ring_rows: int | None = None,
        index_pool: int | None = None,
        *,
        format: Format = F32,
        name: str = "latent",
    ) -> LatentKvLayer:
        """Make a layer of its own, with ``len`` 0.

        Parameters
        ----------
        dev : KvDev
        max_ctx : int
            Longest sequence, in rows.
        width : int
            Elements of a latent row.
        index_width : int
            Elements of an index row, twice the head size of the indexer; 0 without one.
        index_ring_rows : int, optional
            Rows of the ring under the index rows (``index_ring_rows(max_ctx)`` says what is
            usual); None or 0 for a flat plane.
        index_pool : int, optional
            Rows per key; else the first append says it.
        format : Format
            Of the latent rows; what the indexer holds is f32 always.

        Raises
        ------
        PlaneError, FormatUnsupported
            A plane that cannot be; nothing was allocated.
        """
        check_geometry(max_ctx, width, index_width, index_ring_rows, index_pool, format, name)
        arena = dev.device.arena(4 * Lengths.n_words(1, 0) + 512, name=f"{name} counters")
        layer = cls(
            dev, max_ctx, width, index_width, index_ring_rows, index_pool,
            lengths=Lengths(arena, dev.stream, 1, max_ctx, name=name),
            workspace=Workspace(dev.device), format=format, name=name,
        )  # fmt: skip
        layer._arena, layer.owns_counters = arena, True
        return layer

    # -- what it holds ----------------------------------------------------------------------------
    @property
    def index_pool(self) -> int:
        """Rows per key; 0 until it is known."""
        return self.tail.pool

    @property
    def index_pools_ready(self) -> int:
        """Pools whose keys are final: ``len // index_pool`` whenever no call is under way."""
        return self.tail.ready

    @index_pools_ready.setter
    def index_pools_ready(self, n: int) -> None:
        self.tail.ready = n

    @property
    def index_dim(self) -> int:
        """Head size of the indexer."""
        return self.index_width // 2

    def prepare_index(self, dev: KvDev, pool: int) -> None:
        """Fix the rows per key and allocate the keys; needed before a capture.

        Raises
        ------
        PlaneError
            No indexer, a pool that differs from the one in use, or a ring without a whole pool.
        CaptureForbidden
        """
        if not self.index_width:
            raise PlaneError(f"{self.name}.prepare_index: the layer has no indexer")
        if self.tail.pool == pool:
            return
        if dev.stream.recording is not None:
            raise CaptureForbidden(
                f"{self.name}: the first call that uses the indexer comes during a capture; give "
                "index_pool= or call prepare_index before",
                call="prepare_index",
            )
        self.tail.fix_pool(pool)
        self.index_pool_keys = dev.uninit(max(self.max_ctx // pool * self.index_dim, 1))

    # -- rows in ----------------------------------------------------------------------------------
    def append(
        self,
        stream: Stream,
        rows: Buffer,
        *,
        weight: Buffer | None = None,
        eps: float = 1e-6,
        angles: Buffer | None = None,
        kv_rank: int | None = None,
        index: Buffer | None = None,
        ape: Buffer | None = None,
        pool: int | None = None,
    ) -> None:
        """Write rows of both planes behind the length, which does not move, and build their keys.

        Parameters
        ----------
        stream : Stream
        rows : Buffer
            f32 ``[n, width]``.
        weight, eps, angles, kv_rank
            Normalisation and rotation, as in :func:`~memra_lowlevel.kernels.latent_rows.append`;
            without them the rows are written as they are.
        index : Buffer
            f32 ``[n, index_width]``, where there is an indexer.
        ape : Buffer
            f32 ``[pool, d]``, added to the gates.
        pool : int, optional
            Rows per key, where ``index_pool=`` or ``prepare_index`` did not fix it.

        Raises
        ------
        CapacityExceeded
            ``len + n`` is more than the plane holds.
        PlaneError
            Index rows are missing or have no plane, the pool differs, or ``index_pools_ready`` is
            not what ``len`` says. Nothing was written in any of these cases.
        CaptureForbidden
            The pool is not fixed yet.
        """
        latent_writes.append(
            self, stream, rows, weight=weight, eps=eps, angles=angles, kv_rank=kv_rank,
            index=index, ape=ape, pool=pool,
        )  # fmt: skip

    # -- attention --------------------------------------------------------------------------------
    def select(
        self,
        stream: Stream,
        q: Buffer,
        weights: Buffer,
        out: Buffer,
        *,
        top_k: int,
        counted: bool = False,
        width_d: Buffer | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """List the rows that each query attends: those of its best pools, and the open pool's.

        Row r of n sees ``len + r + 1`` rows. Queries are taken so many at a time that their scores
        fit in ``scratch_bytes`` (or one at a time); no bit depends on it.

        Parameters
        ----------
        stream : Stream
        q, weights : Buffer
            f32 ``[n, heads, d]`` and ``[n, heads]``.
        out : Buffer
            i32 ``[n, at least list_width(top_k)]``; see
            :func:`~memra_lowlevel.kernels.latent_index.select`.
        top_k : int
            Rows to choose, in whole pools.
        counted : bool
            The length already includes the n rows.
        width_d : Buffer, optional
            i32[1]: receives the entries of the last list that can differ from -1.
        """
        latent_reads.select(
            self, stream, q, weights, out, top_k=top_k, counted=counted, width_d=width_d,
            scratch_bytes=scratch_bytes,
        )  # fmt: skip

    def list_width(self, top_k: int) -> int:
        """Entries that a list of :meth:`select` must have room for."""
        return latent_index.list_width(
            top_k, self.tail.pool, max(1, self.max_ctx // self.tail.pool)
        )

    def attend(
        self,
        stream: Stream,
        q: Buffer,
        out: Buffer,
        *,
        scale: float,
        indices: Buffer | None = None,
        lse: Buffer | None = None,
        counted: bool = False,
        numeric: str = "exact",
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """Attend absorbed queries over the rows, or over the rows that ``indices`` lists.

        Parameters
        ----------
        stream : Stream
        q, out : Buffer
            f32 ``[n, heads, width]`` and ``[n, heads, kv_rank]``; row r of n sees ``len + r + 1``
            rows.
        scale, indices, lse, counted, numeric
            As in :func:`~memra_lowlevel.kernels.latent_attend.attend`.
        scratch_bytes : int
            Queries are taken so many at a time that their partial results fit (or one at a time).
        """
        try:
            latent_reads.attend(
                self, stream, q, out, scale=scale, indices=indices, lse=lse, counted=counted,
                numeric=numeric, scratch_bytes=scratch_bytes,
            )  # fmt: skip
        except (ArgumentError, CaptureForbidden, FormatUnsupported) as error:
            expect.asked_by(f"{self.name}.attend", "attend_latent", error)
            raise

    # -- the length -------------------------------------------------------------------------------
    def set_len(self, stream: Stream, n: int) -> None:
        """Set the length, and clamp the keys; see :meth:`OneLength.set_len`."""
        super().set_len(stream, n)
        if stream.recording is None:
            self.truncate_index_pool_keys(self.tail.pool)

    def check_len(self, n: int) -> None:
        """Refuse a length that :meth:`set_len` would refuse."""
        super().check_len(n)
        if not self.tail.has_tail_of(n):
            pool = self.tail.pool
            raise RewindRefused(
                f"{self.name}: a rewind to {n} needs index rows from {n // pool * pool} on, but "
                f"the ring of {self.tail.effective} rows was written over below "
                f"{self.tail.intact_from}: full re-prime required",
                plane=self.name,
                asked=n,
                possible=-(-self.tail.intact_from // pool) * pool,
            )

    def can_rewind_to(self, n: int) -> bool:
        """Whether :meth:`set_len` to a shorter length is possible."""
        return 0 <= n <= self.len and self.tail.has_tail_of(n)

    def truncate_index_pool_keys(self, pool: int) -> None:
        """Clamp the final keys to ``len // pool``; to be called by whoever lowers the length.

        Raises
        ------
        RewindRefused
            The tail of the present length is not in the ring any more.
        """
        if pool == 0:
            return
        if pool != self.tail.pool:
            raise PlaneError(
                f"{self.name}.truncate_index_pool_keys: pool {pool}, the layer uses "
                f"{self.tail.pool}"
            )
        self.check_len(self.len)
        self.tail.truncate()

    def prepare(self, stream: Stream, n: int) -> bool:
        """As ``Planes`` has it; a latent plane never has to be rebased."""
        self.check_headroom(n)
        return False

    def guard(self, stream: Stream) -> None:
        """As ``Planes`` has it; an append notes its own checks."""

    # -- snapshots --------------------------------------------------------------------------------
    def snapshot_plane(self, dev: KvDev) -> LatentPlaneSnapshot:
        """Copy the whole state; see :func:`~memra_lowlevel.cache.latent_snapshot.take`."""
        return latent_snapshot.take(self, dev)

    def snapshot_tail(self, dev: KvDev) -> LatentTailCapture:
        """Copy what further rows would destroy; ``snapshot_plane_at`` completes it later."""
        return latent_snapshot.take_tail(self, dev)

    def snapshot_plane_at(self, dev: KvDev, cap: LatentTailCapture) -> LatentPlaneSnapshot:
        """Complete a capture from the live layer, which has only grown since; consumes it."""
        return latent_snapshot.complete(self, dev, cap)

    def validate_restore(self, snap: LatentPlaneSnapshot, max_ctx: int) -> None:
        """Refuse a snapshot that does not fit; touches no device."""
        latent_snapshot.validate(self, snap, max_ctx)

    def restore_plane(self, dev: KvDev, snap: LatentPlaneSnapshot, max_ctx: int) -> None:
        """Validate, then take over the state of a snapshot."""
        self._alone("restore_plane")
        latent_snapshot.validate(self, snap, max_ctx)
        latent_snapshot.restore(self, dev, snap)
        self.lengths.set(dev.stream, snap.len)

    # -- end --------------------------------------------------------------------------------------
    @property
    def n_bytes(self) -> int:
        """Bytes of the planes and keys."""
        held = (self.rows, self.index_rows, self.index_pool_keys)
        return sum(b.n_bytes for b in held if b is not None)

    def describe(self) -> dict[str, Any]:
        """Return geometry, bytes and lengths."""
        return {
            "name": self.name,
            "width": self.width,
            "format": self.format.name,
            "rows": self.max_ctx,
            "bytes": self.n_bytes,
            "len": self.len,
            "index_width": self.index_width,
            "index_ring_rows": self.index_ring_rows,
            "index_pool": self.tail.pool,
            "index_pools_ready": self.tail.ready,
        }

    def close(self) -> None:
        """Free planes and keys; idempotent."""
        for buffer in (self.rows, self.index_rows, self.index_pool_keys):
            if buffer is not None:
                buffer.close()
        if self._arena is not None:
            self.workspace.close()
            self._arena.close()

    # -- inside -----------------------------------------------------------------------------------
    def _settle(self, stream: Stream) -> None:
        if stream.recording is None:
            self.tail.settle()

    @property
    def plane(self) -> Buffer:
        """The bytes of the rows."""
        return self.rows.view(0, (self.rows.n_bytes,), np.uint8)
