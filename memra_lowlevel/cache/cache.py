"""All planes of one sequence: by layer, in lock-step, on one device or in stages over several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..closing import Closing
from ..errors import PlaneError, SnapshotRefused
from . import prefix as prefixes
from . import snapshot as snapshots
from .group import CacheOptions, PlaneGroup
from .kv_layer import KvLayer
from .latent import LatentKvLayer
from .plan import ModelPlan
from .recurrent import RecurLayer
from .snapshot import CacheSnapshot

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream
    from .kvdev import KvDev
    from .planes import Lengths
    from .prefix import CachePrefix
    from .taps import DflashTapSink, HcTapSink

__all__ = ["Cache"]


class Cache(Closing):
    """The planes of a model for one sequence, all of the same length.

    A cache is a set of ``Planes``: rounds and chains move it as a whole. Work that names a stream
    runs there; planes on another device use the stream of their stage.

    Parameters
    ----------
    device : Device
    stream : Stream
        Where lengths are zeroed, and where work goes that names no stream of this device.
    model : ModelPlan
        What the layers are.
    max_ctx : int
        Longest sequence, in rows.
    name : str
    **options
        Fields of :class:`CacheOptions`, by keyword.

    Attributes
    ----------
    kv : list of KvLayer or None
        By layer; None where a layer has no KV plane of its own.
    recur : list of RecurLayer or None
        By layer.
    latent : list of LatentKvLayer or None
        By layer.
    tp_kv, glm5_tp_recur, glm5_tp_latent_peer : list of None
        By layer; not built by this class.
    max_ctx : int
    tainted : bool
        A step failed half-way; see :meth:`mark_tainted`.
    last_logits_dev, dflash_taps, hc_taps
        Kept here for whoever runs the model; None until set.
    stages : list of PlaneGroup
        The trunk, by device.
    mtp : PlaneGroup or None
        Planes of the MTP blocks; they move by themselves.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        model: ModelPlan,
        max_ctx: int,
        *,
        name: str = "cache",
        **options: Any,
    ):
        self._build([(device, stream)], model, max_ctx, [0, model.n_layer], name, options)

    @classmethod
    def new(cls, dev: KvDev, model: ModelPlan, max_ctx: int, **options: Any) -> Cache:
        """Make the planes of ``model`` on the device of ``dev``.

        Parameters
        ----------
        dev : KvDev
        model : ModelPlan
        max_ctx : int
            Longest sequence, in rows.
        **options
            Fields of :class:`CacheOptions`, and ``name``.

        Raises
        ------
        PlaneError, FormatUnsupported
            A plane that cannot be; nothing stays allocated.
        """
        return cls(dev.device, dev.stream, model, max_ctx, **options)

    @classmethod
    def new_ppn(
        cls,
        devs: Sequence[KvDev],
        model: ModelPlan,
        max_ctx: int,
        fence: Sequence[int],
        *,
        name: str = "cache",
        **options: Any,
    ) -> Cache:
        """Make the planes in stages over several devices; sizes are those of one device.

        Parameters
        ----------
        devs : sequence of KvDev
        fence : sequence of int
            ``[0, c1, …, n_layer]``, one more than there are devices: layer il belongs to stage s
            iff ``fence[s] <= il < fence[s + 1]``. MTP blocks go to the last stage.

        Raises
        ------
        PlaneError
            A fence that is not of that form.
        """
        fence = list(fence)
        if (
            len(fence) != len(devs) + 1
            or not devs
            or fence[0] != 0
            or fence[-1] != model.n_layer
            or sorted(fence) != fence
        ):
            raise PlaneError(
                f"Cache.new_ppn: fence {fence} for {len(devs)} devices and {model.n_layer} layers; "
                "it must rise from 0 to the number of layers and have one entry more than devices"
            )
        cache = cls.__new__(cls)
        cache._build([(d.device, d.stream) for d in devs], model, max_ctx, fence, name, options)
        return cache

    def _build(
        self,
        places: Sequence[tuple[Device, Stream]],
        model: ModelPlan,
        max_ctx: int,
        fence: Sequence[int],
        name: str,
        options: dict[str, Any],
    ) -> None:
        self.model, self.max_ctx, self.name = model, max_ctx, name
        chosen = CacheOptions(**options)
        n_all, self.stages, self.mtp = len(model.layers), [], None
        try:
            for s, (device, stream) in enumerate(places):
                part = f"{name}.stage{s}" if len(places) > 1 else name
                owned = [il for il in range(fence[s], fence[s + 1]) if model.owns_plane(il)]
                self.stages.append(
                    PlaneGroup(device, stream, model, owned, max_ctx, chosen, name=part)
                )
            if model.n_mtp:
                device, stream = places[-1]
                blocks = range(model.n_layer, n_all)
                self.mtp = PlaneGroup(
                    device, stream, model, blocks, max_ctx, chosen, name=f"{name}.mtp"
                )
        except BaseException:
            self.close()
            raise
        groups = self._groups()
        self.kv: list[KvLayer | None] = [
            next((g.kv[il] for g in groups if il in g.kv), None) for il in range(n_all)
        ]
        self.recur: list[RecurLayer | None] = [
            next((g.recur[il] for g in groups if il in g.recur), None) for il in range(n_all)
        ]
        self.latent: list[LatentKvLayer | None] = [
            next((g.latent[il] for g in groups if il in g.latent), None) for il in range(n_all)
        ]
        self.tp_kv: list[None] = [None] * n_all
        self.glm5_tp_recur: list[None] = [None] * n_all
        self.glm5_tp_latent_peer: list[None] = [None] * n_all
        self.tainted = False
        self.last_logits_dev: Buffer | None = None
        self.dflash_taps: DflashTapSink | None = None
        self.hc_taps: HcTapSink | None = None
        self._replay = 0

    # -- as Planes --------------------------------------------------------------------------------
    @property
    def device(self) -> Device:
        """Device of the first stage."""
        return self.stages[0].device

    @property
    def lengths(self) -> Lengths:
        """Counters of the first stage."""
        return self.stages[0].lengths

    @property
    def len(self) -> int:
        """Rows of every KV plane of the trunk."""
        return self.lengths.value

    @property
    def pos(self) -> int:
        """Position of the next token: the length, less the rows that are still to be replayed."""
        return self.len - self._replay

    @property
    def capacity(self) -> int:
        """Most rows."""
        return self.max_ctx

    @property
    def counters(self) -> Buffer:
        """i32 counters of the trunk on its device.

        Raises
        ------
        PlaneError
            The trunk lies on several devices.
        """
        if len(self.stages) > 1:
            raise PlaneError(f"{self.name}: its counters lie on {len(self.stages)} devices")
        return self.stages[0].counters

    def planes(self) -> Iterable[KvLayer]:
        """Return the KV planes of the trunk in layer order."""
        return (layer for layer in self.kv[: self.model.n_layer] if layer is not None)

    def has_swa_ring(self) -> bool:
        """Whether any plane is a ring."""
        return any(layer is not None and layer.ring is not None for layer in self.kv)

    def check_headroom(self, n: int) -> None:
        """Refuse unless ``n`` rows fit in every plane as it stands."""
        for group in self.stages:
            group.check_headroom(n)

    def prepare(self, stream: Stream, n: int) -> bool:
        """Make room for ``n`` rows; every plane is asked before any ring is rebased.

        Returns
        -------
        bool
            Whether a ring was rebased.
        """
        for group in self.stages:
            group.check_room(n)
        return any([group.prepare(group.on(stream), n) for group in self.stages])

    def advance(
        self, stream: Stream, n: int, *, scanned: bool = False, replay: bool = False
    ) -> None:
        """Move every counter by ``n`` rows, with one launch per device.

        Parameters
        ----------
        scanned : bool
            Recurrent layers took the rows by ``scan``.
        replay : bool
            The rows are replayed through recurrent layers after a rollback; KV planes have them.
        """
        if replay:
            if n > self._replay:
                raise PlaneError(f"{self.name}: {n} rows replayed, {self._replay} are missing")
            for group in self.stages:
                if group.lengths.slots is not None:
                    group.lengths.slots.advance(group.on(stream), 1 if scanned else n)
                    if scanned:
                        group.anchor_at(self.pos + n)
            self._replay -= n
            return
        self._ready("advance")
        for group in self.stages:
            group.lengths.need(group.on(stream), n)
            group.check_advance(group.on(stream), n)
        for group in self.stages:
            group.advance(group.on(stream), n, scanned=scanned)

    def moved(self, stream: Stream, n: int) -> None:
        """Book that a kernel which was just issued on ``stream`` moved every counter by ``n``."""
        for group in self.stages:
            group.moved(group.on(stream), n)

    def guard(self, stream: Stream) -> None:
        """Under capture: the planes note their own checks when rows are appended to them."""

    def set_len(self, stream: Stream, n: int) -> None:
        """Set every length and slot; refused before anything moves. 0 empties the cache."""
        self._ready("set_len")
        if n == 0 and stream.recording is None:
            self.reset(stream)
            return
        for group in self.stages:
            group.check_len(n)
        for group in self.stages:
            group.set_len(group.on(stream), n)

    def reset(self, stream: Stream) -> None:
        """Empty every plane of the trunk and lift a taint."""
        for group in self.stages:
            group.reset(group.on(stream))
        self.tainted, self._replay = False, 0

    # -- trust ------------------------------------------------------------------------------------
    def mark_tainted(self) -> None:
        """Say that a step failed after some layers had moved; drops what depends on it."""
        self.tainted = True
        self.last_logits_dev = self.dflash_taps = None

    def ensure_usable(self, path: str) -> None:
        """Refuse a tainted cache; ``path`` says who asks.

        Raises
        ------
        PlaneError
        """
        if self.tainted:
            raise PlaneError(
                f"{path}: {self.name} is tainted: a step failed and may have moved some layers "
                "only. Reset it and prime the sequence again"
            )

    # -- snapshots --------------------------------------------------------------------------------
    def snapshot(self, stream: Stream) -> CacheSnapshot:
        """Make a point to go back to; recurrent states are copied.

        Raises
        ------
        SnapshotRefused
            The cache is tainted, or rows are still to be replayed.
        """
        return snapshots.take(self, stream)

    def snapshot_into(self, stream: Stream, snap: CacheSnapshot) -> None:
        """Refresh a snapshot in place; nothing is allocated.

        Raises
        ------
        SnapshotRefused
            As :meth:`snapshot`, or the snapshot is of another model; it is unchanged.
        """
        snapshots.retake(self, stream, snap)

    def can_rollback(self, snap: CacheSnapshot, accept: int = 0) -> bool:
        """Whether :meth:`rollback` would go through."""
        try:
            snapshots.check_rollback(self, snap, accept)
        except PlaneError:
            return False
        return True

    def rollback(self, stream: Stream, snap: CacheSnapshot, accept: int = 0) -> int:
        """Go back to a snapshot, keeping ``accept`` of the rows that came after it.

        Lengths, slots and ``pos`` become those of ``snap.pos + accept`` rows. Where a recurrent
        layer does not hold that state any more, the snapshot's copies are restored instead,
        ``pos`` becomes ``snap.pos``, and the caller replays ``accept`` rows through the recurrent
        layers alone (``advance(..., replay=True)``); KV planes have them.

        Returns
        -------
        int
            Rows to replay.

        Raises
        ------
        RestoreRefused
            A tainted cache, or a snapshot of another sequence or model.
        RewindRefused
            A ring has dropped rows that are needed. In all cases nothing has moved.
        """
        self._replay = snapshots.roll_back(self, stream, snap, accept)
        return self._replay

    def verify_rollback(self, stream: Stream, saved: int, rows: int, keep: int) -> None:
        """Keep the first ``keep`` of the ``rows`` rows that a verification put behind ``saved``.

        Nothing at all is done when every row is kept, which is the common outcome.

        Raises
        ------
        PlaneError
            ``keep`` does not lie in 1..rows (the anchor row always stays), or the cache does not
            hold ``saved + rows`` rows.
        RewindRefused
            Rows or states that are needed are gone. In all cases nothing has moved.
        """
        if not 1 <= keep <= rows or self.len != saved + rows:
            raise PlaneError(
                f"{self.name}.verify_rollback: keep {keep} of {rows} rows behind {saved}, the "
                f"cache holds {self.len}; keep 1 to {rows}"
            )
        if keep < rows:
            self.set_len(stream, saved + keep)

    def snapshot_prefix(self, stream: Stream) -> CachePrefix:
        """Copy the state of every layer; see :func:`~memra_lowlevel.cache.prefix.take`."""
        return prefixes.take(self, stream)

    def restore_prefix(self, stream: Stream, prefix: CachePrefix) -> None:
        """Take over a copied state; every layer is validated before the first byte moves."""
        prefixes.restore(self, stream, prefix)

    # -- as a whole -------------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """Return a row per layer (rows, bytes, len, base, use of the ring) and the bytes taken."""
        groups = self._groups()
        return {
            "name": self.name,
            "len": self.len,
            "pos": self.pos,
            "max_ctx": self.max_ctx,
            "tainted": self.tainted,
            "layers": [row for group in groups for row in group.describe()],
            "items": [group.items.as_dict() for group in groups],
            "bytes": sum(group.n_bytes for group in groups),
            "workspace_bytes": sum(group.workspace.n_bytes for group in groups),
        }

    def close(self) -> None:
        """Free all planes; idempotent."""
        for group in self._groups():
            group.close()

    # -- inside -----------------------------------------------------------------------------------
    def _groups(self) -> list[PlaneGroup]:
        return [*self.stages, *([self.mtp] if self.mtp is not None else [])]

    def _ready(self, action: str) -> None:
        if self._replay:
            raise PlaneError(
                f"{self.name}.{action}: {self._replay} rows are still to be replayed through the "
                "recurrent layers; advance(..., replay=True) first"
            )

    def _check_snapshot(self) -> None:
        if self.tainted or self._replay:
            state = "tainted" if self.tainted else f"missing {self._replay} replayed rows"
            raise SnapshotRefused(f"{self.name}: the cache is {state}, no point to go back to")
