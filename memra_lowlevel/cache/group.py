"""Planes of several layers on one device, with one length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..closing import Closing
from ..errors import CaptureForbidden, PlaneError, RewindRefused
from ..formats import F32, Format
from . import policy
from .accounting import layer_formats
from .geometry import KvGeometry
from .index_ring import index_ring_rows, index_ring_rows_for
from .kv_layer import KvLayer
from .kvdev import StreamKvDev
from .latent import LatentKvLayer
from .latent_geometry import latent_bytes
from .plan import KvCache, LatentKvCache, ModelPlan, Recurrent, SlidingKvCache
from .planes import Lengths, Workspace
from .recurrent import RecurLayer
from .ring import PRIME_CHUNK_MAX_TOKENS, SWA_REWIND_SLACK_ROWS, KvRing, swa_ring_rows

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = ["CacheOptions", "PlaneGroup"]

_ALIGN = 256


@dataclass(frozen=True)
class CacheOptions:
    """How planes are made.

    Attributes
    ----------
    ring : bool or None
        Whether windowed layers get a ring; None asks the door ``MEMRA_SWA_RING``.
    ring_chunk, ring_slack : int
        Rows of a ring for one append, and kept for rewinds.
    round_rows : int
        Most rows of a round; recurrent layers keep a state for each.
    index_ring : int or None
        Rows of the ring under index rows, 0 for flat planes; None asks the door
        ``MEMRA_DSA_INDEX_RING``.
    latent_format : Format
        Of latent rows.
    check : bool or None
        Refuse rows that are not finite before an eager append; None: on the host device.
    """

    ring: bool | None = None
    ring_chunk: int = PRIME_CHUNK_MAX_TOKENS
    ring_slack: int = SWA_REWIND_SLACK_ROWS
    round_rows: int = 16
    index_ring: int | None = None
    latent_format: Format = F32
    check: bool | None = None


class PlaneGroup(Closing):
    """The planes of some layers, all of one length, moved by one launch.

    Attributes
    ----------
    device : Device
    stream : Stream
        Where work goes that names no stream of this device.
    kv, recur, latent : dict of int to KvLayer, RecurLayer or LatentKvLayer
        By layer.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        model: ModelPlan,
        layers: Iterable[int],
        max_ctx: int,
        options: CacheOptions,
        *,
        name: str,
    ):
        self.device, self.stream, self.name, self.capacity = device, stream, name, max_ctx
        ring_on = policy.swa_ring_on() if options.ring is None else options.ring
        kv: list[tuple[int, KvGeometry, int | None, KvRing | None]] = []
        recur: list[tuple[int, Recurrent]] = []
        latent: list[tuple[int, LatentKvCache]] = []
        for il in layers:
            state = model.layers[il].state
            if isinstance(state, Recurrent):
                recur.append((il, state))
            elif isinstance(state, (KvCache, SlidingKvCache)):
                window = state.window if isinstance(state, SlidingKvCache) else None
                ring = None
                if window is not None and ring_on:
                    chunk, slack = options.ring_chunk, options.ring_slack
                    rows = swa_ring_rows(window, max_ctx, chunk=chunk, slack=slack)
                    ring = KvRing(rows, window, slack=slack)
                geometry = _geometry(model, il)
                geometry.check(device, max_ctx, window, ring)
                kv.append((il, geometry, window, ring))
            else:
                latent.append((il, state))
        index_ring = (
            index_ring_rows(max_ctx)
            if options.index_ring is None
            else index_ring_rows_for(options.index_ring, max_ctx)
        )
        self.items = _Items(kv, recur, max_ctx, options.round_rows, len(latent))
        for _, state in latent:
            self.items.add_latent(
                latent_bytes(state, max_ctx, index_ring, model.index_pool, options.latent_format)
            )
        self._arena = device.arena(self.items.total, name=f"{name} planes")
        lengths = self.lengths = Lengths(
            self._arena, stream, len(kv) + len(latent), max_ctx, n_slots=len(recur), name=name
        )
        self.workspace = Workspace(device)
        self.kv = {
            il: KvLayer(
                geometry, max_ctx, arena=self._arena, lengths=lengths, index=index,
                workspace=self.workspace, window=window, ring=ring, check=options.check,
                name=f"{name}.{il}",
            )
            for index, (il, geometry, window, ring) in enumerate(kv)
        }  # fmt: skip
        self.recur = {
            il: RecurLayer(
                plan, options.round_rows, arena=self._arena, stream=stream,
                counter=lengths.slots, slot_d=lengths.slot(index), name=f"{name}.{il}",
            )
            for index, (il, plan) in enumerate(recur)
        }  # fmt: skip
        dev = StreamKvDev(device, stream)
        self.latent: dict[int, LatentKvLayer] = {}
        try:
            for index, (il, state) in enumerate(latent, len(kv)):
                self.latent[il] = LatentKvLayer(
                    dev, max_ctx, state.width, state.index_width, index_ring, model.index_pool,
                    lengths=lengths, index=index, workspace=self.workspace,
                    format=options.latent_format, name=f"{name}.{il}",
                )  # fmt: skip
        except BaseException:
            self.close()
            raise
        # The slot counter of length L is anchor[1] + (L - anchor[0]) as far back as the anchor.
        self.anchor = (0, 0)

    # -- as Planes --------------------------------------------------------------------------------
    @property
    def len(self) -> int:
        """Rows of every plane."""
        return self.lengths.value

    @property
    def counters(self) -> Buffer:
        """i32: lengths and slots, which a step of n rows moves by n."""
        return self.lengths.buffer

    def planes(self) -> Iterable[KvLayer]:
        """Return the KV planes in layer order."""
        return self.kv.values()

    def check_headroom(self, n: int) -> None:
        """Refuse unless ``n`` rows fit in every plane as it stands."""
        self.lengths.counter.note_need(self.stream, n)
        for layer in self.kv.values():
            layer.check_headroom(n)
        for latent in self.latent.values():
            latent.check_headroom(n)

    def check_room(self, n: int) -> None:
        """Refuse unless ``n`` rows fit in every plane, rebases allowed; moves nothing."""
        for layer in self.kv.values():
            if layer.ring is None or self.len + n > layer.max_ctx:
                layer.check_headroom(n)
            else:
                layer.ring.append_plan(self.len, layer.ring.retain_from(self.len), n)
        for latent in self.latent.values():
            latent.check_headroom(n)

    def prepare(self, stream: Stream, n: int) -> bool:
        """Make room for ``n`` rows; all planes are asked before any ring moves."""
        self.check_room(n)
        return any([layer.prepare(stream, n) for layer in self.kv.values() if layer.ring])

    def on(self, stream: Stream) -> Stream:
        """Return the stream that work on these planes goes to: the given one, on its device."""
        return stream if stream.device == self.device else self.stream

    def advance(self, stream: Stream, n: int, *, scanned: bool = False) -> None:
        """Move every length by ``n``, and every slot: by n, or after a scan by 1."""
        if scanned and self.recur and stream.recording is not None:
            raise CaptureForbidden(
                f"{self.name}.advance: a scan moves slots by 1 and lengths by {n}, which a graph "
                "cannot book; capture steps, or scan outside",
                call="advance",
            )
        self.check_advance(stream, n)
        self.lengths.advance(stream, n, 1 if scanned and self.recur else None)
        self._settle(stream)
        if scanned and self.recur:
            self.anchor = (self.len, self.slot_counter)

    def check_advance(self, stream: Stream, n: int) -> None:
        """Refuse an advance by more rows than lie in a ring, where the length is known."""
        for layer in self.kv.values():
            layer.check_advance(stream, n)

    def moved(self, stream: Stream, n: int) -> None:
        """Book that a kernel which was just issued on ``stream`` moved every counter by ``n``."""
        self.lengths.moved(stream, n)
        self._settle(stream)

    def guard(self, stream: Stream) -> None:
        """Under capture: the planes note their own checks when rows are appended to them."""

    def set_len(self, stream: Stream, n: int) -> None:
        """Set every length and slot; refused before anything moves."""
        self.check_len(n)
        self.lengths.set(stream, n, self.slot_at(n))
        if stream.recording is None:
            self.truncate_keys()

    def check_len(self, n: int) -> None:
        """Refuse a length that :meth:`set_len` would refuse."""
        for layer in self.kv.values():
            layer.check_len(n)
        for latent in self.latent.values():
            latent.check_len(n)
        if self.recur:
            slot = self.slot_at(n)
            if n < self.anchor[0]:
                raise RewindRefused(
                    f"{self.name}: length {n} lies within rows that were scanned; the recurrent "
                    f"states go back to {self.anchor[0]}",
                    plane=self.name,
                    asked=n,
                    possible=self.anchor[0],
                )
            for recur in self.recur.values():
                recur.check_counter(slot)

    # -- keys of latent layers --------------------------------------------------------------------
    def truncate_keys(self) -> None:
        """Clamp the final keys of every indexer to the length, after it was lowered."""
        for layer in self.latent.values():
            layer.truncate_index_pool_keys(layer.index_pool)

    def _settle(self, stream: Stream) -> None:
        if stream.recording is None:
            for layer in self.latent.values():
                layer.tail.settle()

    # -- recurrent states -------------------------------------------------------------------------
    @property
    def slot_counter(self) -> int:
        """Committed steps of the recurrent layers."""
        return self.lengths.slots.value if self.lengths.slots is not None else 0

    def slot_at(self, length: int) -> int:
        """Return the slot counter that belongs to a length."""
        return self.anchor[1] + (length - self.anchor[0])

    def anchor_at(self, length: int) -> None:
        """Say that the current slot holds the states of ``length`` rows, and no other does."""
        self.anchor = (length, self.slot_counter)
        for layer in self.recur.values():
            layer.restored(self.slot_counter)

    def reset(self, stream: Stream) -> None:
        """Empty all planes: lengths and bases 0, recurrent states zero."""
        for layer in self.kv.values():
            if layer.ring is not None:
                layer.set_base(stream, 0, reset=True)
        for recur in self.recur.values():
            recur.conv.fill(stream, 0)
            recur.ssm.fill(stream, 0)
        for latent in self.latent.values():
            latent.tail.reset()
        self.lengths.set(stream, 0, 0)
        self.anchor_at(0)

    @property
    def n_bytes(self) -> int:
        """Bytes that the allocator gave for the planes, without the attention workspace."""
        return self._arena.n_bytes + sum(layer.n_bytes for layer in self.latent.values())

    def describe(self) -> list[dict[str, Any]]:
        """Return a row per layer."""
        rows = [{"layer": il, **layer.describe()} for il, layer in self.kv.items()]
        rows += [{"layer": il, **layer.describe()} for il, layer in self.recur.items()]
        rows += [{"layer": il, **layer.describe()} for il, layer in self.latent.items()]
        return sorted(rows, key=lambda row: int(row["layer"]))

    def close(self) -> None:
        """Free all planes; idempotent."""
        for layer in self.latent.values():
            layer.close()
        self.workspace.close()
        self._arena.close()


def _geometry(model: ModelPlan, il: int) -> KvGeometry:
    layer = model.layers[il]
    k_format, v_format = layer_formats(model, il)
    heads = layer.kv_dim_k // layer.head_dim_k
    if layer.kv_dim_v // layer.head_dim_v != heads:
        raise PlaneError(
            f"layer {il}: {heads} K heads of {layer.head_dim_k}, but "
            f"{layer.kv_dim_v // layer.head_dim_v} V heads of {layer.head_dim_v}"
        )
    return KvGeometry(heads, layer.head_dim_k, layer.head_dim_v, k_format, v_format)


class _Items:
    """What a group takes from the allocator, item by item, in the order in which it is taken.

    Attributes
    ----------
    rows, pads, recurrent, counters, alignment : int
        Bytes: rows of KV planes; tail pads; recurrent states; lengths, slots, bases and fault
        words; padding between slices.
    total : int
        Bytes of all these, one arena.
    latent_rows, index_rows, index_keys : int
        Bytes that latent layers take beside it; keys count where the model says the pool.
    """

    def __init__(
        self,
        kv: list[tuple[int, KvGeometry, int | None, KvRing | None]],
        recur: list[tuple[int, Recurrent]],
        max_ctx: int,
        round_rows: int,
        n_latent: int = 0,
    ):
        self.rows = self.pads = self.recurrent = self.alignment = 0
        self.latent_rows = self.index_rows = self.index_keys = 0
        self.counters = 4 * Lengths.n_words(len(kv) + n_latent, len(recur))
        end = self.counters
        for _, geometry, _, ring in kv:
            for tok_bytes in geometry.tok_bytes():
                n_bytes = (ring.rows if ring else max_ctx) * tok_bytes
                self.rows += n_bytes
                self.pads += 8
                end = self._place(end, n_bytes + 8, _ALIGN)
            self.counters += 8
            end = self._place(end, 8, 8)
        for _, plan in recur:
            pad = plan.conv_kernel - 1
            for width in (plan.conv_width * pad, plan.state_width):
                n_bytes = 4 * (max(1, round_rows) + 1) * width
                self.recurrent += n_bytes
                end = self._place(end, n_bytes, _ALIGN)
        self.total = -(-end // _ALIGN) * _ALIGN
        self.alignment += self.total - end

    def _place(self, end: int, n_bytes: int, align: int) -> int:
        start = -(-end // align) * align
        self.alignment += start - end
        return start + n_bytes

    def add_latent(self, n_bytes: tuple[int, int, int]) -> None:
        """Count the rows, index rows and keys of a latent layer."""
        self.latent_rows += n_bytes[0]
        self.index_rows += n_bytes[1]
        self.index_keys += n_bytes[2]

    def as_dict(self) -> dict[str, int]:
        """Return the items and their sum."""
        apart = ("latent_rows", "index_rows", "index_keys")
        names = ("rows", "pads", "recurrent", "counters", "alignment", *apart)
        items: dict[str, int] = {name: getattr(self, name) for name in names}
        return {**items, "total": self.total + sum(items[name] for name in apart)}
