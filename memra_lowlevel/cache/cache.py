"""All planes of one sequence, in lock-step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import PlaneError
from . import policy
from .accounting import layer_formats
from .geometry import KvGeometry
from .kv_layer import KvLayer
from .plan import KvCache, ModelPlan, SlidingKvCache
from .planes import Lengths, Workspace
from .ring import PRIME_CHUNK_MAX_TOKENS, SWA_REWIND_SLACK_ROWS, KvRing, swa_ring_rows

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream
    from .kvdev import KvDev

__all__ = ["Cache"]

_SLICE_SLACK = 512


class Cache:
    """The planes of a model for one sequence, all of the same length.

    Attributes
    ----------
    kv : list of KvLayer or None
        By layer; None where a layer has no plane of its own.
    max_ctx : int
    lengths : Lengths
        ``len_d`` of every plane in one block, moved by one launch.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        model: ModelPlan,
        max_ctx: int,
        *,
        ring: bool | None = None,
        ring_chunk: int = PRIME_CHUNK_MAX_TOKENS,
        ring_slack: int = SWA_REWIND_SLACK_ROWS,
        name: str = "cache",
    ):
        self.device, self.model, self.max_ctx, self.name = device, model, max_ctx, name
        ring_on = policy.swa_ring_on() if ring is None else ring
        made: list[tuple[int, KvGeometry, int | None, KvRing | None]] = []
        for il, layer in enumerate(model.layers):
            if not model.owns_plane(il):
                continue
            if not isinstance(layer.state, (KvCache, SlidingKvCache)):
                raise PlaneError(f"Cache: layer {il} is {layer.state!r}, which is not built yet")
            window = layer.state.window if isinstance(layer.state, SlidingKvCache) else None
            kv_ring = None
            if window is not None and ring_on:
                rows = swa_ring_rows(window, max_ctx, chunk=ring_chunk, slack=ring_slack)
                kv_ring = KvRing(rows, window, slack=ring_slack)
            k_format, v_format = layer_formats(model, il)
            geometry = KvGeometry(
                layer.kv_dim_k // layer.head_dim_k, layer.head_dim_k, layer.head_dim_v,
                k_format, v_format,
            )  # fmt: skip
            geometry.check(device, max_ctx, window, kv_ring)
            made.append((il, geometry, window, kv_ring))
        n_bytes = sum(g.plane_bytes(max_ctx, r) + 2 * _SLICE_SLACK for _, g, _, r in made)
        self._arena = device.arena(
            n_bytes + 8 * len(made) + 2 * _SLICE_SLACK, name=f"{name} planes"
        )
        self.lengths = Lengths(self._arena, stream, max(1, len(made)), max_ctx, name=name)
        self._workspace = Workspace(device)
        self.kv: list[KvLayer | None] = [None] * len(model.layers)
        for index, (il, geometry, window, kv_ring) in enumerate(made):
            self.kv[il] = KvLayer(
                geometry, max_ctx, arena=self._arena, lengths=self.lengths, index=index,
                workspace=self._workspace, window=window, ring=kv_ring, name=f"{name}.{il}",
            )  # fmt: skip

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
            ``ring`` (whether windowed layers get one; default: the door), ``ring_chunk``,
            ``ring_slack`` (rows) and ``name``.
        """
        return cls(dev.device, dev.stream, model, max_ctx, **options)

    # -- as Planes --------------------------------------------------------------------------------
    @property
    def len(self) -> int:
        """Rows of every plane."""
        return self.lengths.value

    @property
    def pos(self) -> int:
        """Position of the next token."""
        return self.lengths.value

    @property
    def capacity(self) -> int:
        """Most rows."""
        return self.max_ctx

    @property
    def counters(self) -> Buffer:
        """i32[n_planes], all lengths on the device."""
        return self.lengths.buffer

    def planes(self) -> Iterable[KvLayer]:
        """Return the planes that exist, in layer order."""
        return (layer for layer in self.kv if layer is not None)

    def check_headroom(self, n: int) -> None:
        """Refuse unless ``n`` rows fit in every plane as it stands."""
        for layer in self.planes():
            layer.check_headroom(n)

    def prepare(self, stream: Stream, n: int) -> bool:
        """Make room for ``n`` rows in every plane; all are planned before any ring moves.

        Returns
        -------
        bool
            Whether a ring was rebased.
        """
        rings = [layer for layer in self.planes() if layer.ring is not None]
        for layer in self.planes():
            if layer.ring is None:
                layer.check_headroom(n)
                break  # flat planes are all alike
        for layer in rings:
            assert layer.ring is not None
            layer.ring.append_plan(self.len, layer.ring.retain_from(self.len), n)
        return any([layer.prepare(stream, n) for layer in rings])

    def advance(self, stream: Stream, n: int) -> None:
        """Move every length by ``n`` with one launch; captured, at every launch of the graph."""
        self.lengths.advance(stream, n)

    def moved(self, stream: Stream, n: int) -> None:
        """Book that a kernel which was just issued on ``stream`` moved every length by ``n``."""
        self.lengths.moved(stream, n)

    def guard(self, stream: Stream) -> None:
        """Under capture: the planes note their own checks when rows are appended to them."""

    def set_len(self, stream: Stream, n: int) -> None:
        """Set every length with one launch; refused before anything moves."""
        for layer in self.planes():
            layer.check_len(n)
        self.lengths.set(stream, n)

    # -- as a whole -------------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """Return a row per plane: rows, bytes, length, base and use of the ring."""
        return {
            "name": self.name,
            "len": self.len,
            "max_ctx": self.max_ctx,
            "planes": [layer.describe() for layer in self.planes()],
            "bytes": sum(layer.k.n_bytes + layer.v.n_bytes for layer in self.planes()),
        }

    def close(self) -> None:
        """Free all planes; idempotent."""
        self._workspace.close()
        self._arena.close()
