"""What a model asks of its cache: one state plan per layer, with that layer's own geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..errors import PlaneError

__all__ = [
    "KvCache",
    "LatentKvCache",
    "LayerKind",
    "LayerPlan",
    "ModelPlan",
    "Recurrent",
    "SlidingKvCache",
    "StatePlan",
    "compile_plan",
]

LayerKind: TypeAlias = Literal["full", "gemma_global", "gemma_window"]


@dataclass(frozen=True)
class KvCache:
    """Full attention: every row is kept."""


@dataclass(frozen=True)
class SlidingKvCache:
    """Sliding-window attention.

    Attributes
    ----------
    window : int
        Rows that a query attends, itself included.
    """

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise PlaneError(f"SlidingKvCache: window {self.window} must be at least 1")


@dataclass(frozen=True)
class Recurrent:
    """Linear attention: a short convolution and a state of fixed size.

    Attributes
    ----------
    conv_width : int
        Channels of the convolution.
    conv_kernel : int
        Taps; the state keeps ``conv_kernel - 1`` raw columns.
    state_width : int
        Elements of the recurrent state (heads * d * d).
    """

    conv_width: int
    conv_kernel: int
    state_width: int

    def __post_init__(self) -> None:
        if self.conv_width < 1 or self.state_width < 1 or not 1 <= self.conv_kernel <= 8:
            raise PlaneError(
                f"Recurrent: conv_width {self.conv_width} and state_width {self.state_width} must "
                f"be at least 1 and conv_kernel {self.conv_kernel} in 1..8"
            )


@dataclass(frozen=True)
class LatentKvCache:
    """Latent attention: one row per token for keys and values, optionally with an indexer.

    Attributes
    ----------
    width : int
        Elements of a row.
    index_width : int
        Elements of an index row; 0 without an indexer.
    """

    width: int
    index_width: int = 0

    def __post_init__(self) -> None:
        if self.width < 1 or self.index_width < 0 or self.index_width % 2:
            raise PlaneError(
                f"LatentKvCache: width {self.width} must be at least 1 and index_width "
                f"{self.index_width} even and not negative"
            )


StatePlan: TypeAlias = KvCache | SlidingKvCache | Recurrent | LatentKvCache


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes
    ----------
    state : StatePlan
    kv_dim_k, kv_dim_v : int
        Elements of a token's K and V row (kv heads * head size); 0 where there is no KV plane.
    head_dim_k, head_dim_v : int
    kind : {"full", "gemma_global", "gemma_window"}
        The class whose format door applies.
    """

    state: StatePlan
    kv_dim_k: int = 0
    kv_dim_v: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    kind: LayerKind = "full"

    def __post_init__(self) -> None:
        if not isinstance(self.state, (KvCache, SlidingKvCache, Recurrent, LatentKvCache)):
            raise PlaneError(f"LayerPlan: {self.state!r} is no state plan")
        if self.kind not in ("full", "gemma_global", "gemma_window"):
            raise PlaneError(f"LayerPlan: unknown kind {self.kind!r}")
        if isinstance(self.state, (KvCache, SlidingKvCache)):
            for name in ("kv_dim_k", "kv_dim_v", "head_dim_k", "head_dim_v"):
                value = getattr(self, name)
                if value < 32 or value % 32:
                    raise PlaneError(
                        f"LayerPlan: {name} {value} must be a positive multiple of 32, the length "
                        "of a quantised block"
                    )
            if self.kv_dim_k % self.head_dim_k or self.kv_dim_v % self.head_dim_v:
                raise PlaneError(
                    f"LayerPlan: kv_dim ({self.kv_dim_k}, {self.kv_dim_v}) must be a multiple of "
                    f"head_dim ({self.head_dim_k}, {self.head_dim_v})"
                )


@dataclass(frozen=True)
class ModelPlan:
    """All layers: the trunk, then the MTP blocks.

    Attributes
    ----------
    layers : tuple of LayerPlan
    n_mtp : int
        How many of the last layers are MTP blocks.
    shared_kv_layers : int
        How many of the last layers of the trunk read another layer's plane and own none.
    index_pool : int or None
        Tokens per pool key of the indexer, where the model has one.
    """

    layers: tuple[LayerPlan, ...]
    n_mtp: int = 0
    shared_kv_layers: int = 0
    index_pool: int | None = None
    n_layer: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        n_layer = len(self.layers) - self.n_mtp
        if self.n_mtp < 0 or n_layer < 0 or not 0 <= self.shared_kv_layers <= n_layer:
            raise PlaneError(
                f"ModelPlan: {self.n_mtp} MTP blocks and {self.shared_kv_layers} shared layers do "
                f"not fit in {len(self.layers)} layers"
            )
        if self.index_pool is not None and self.index_pool < 1:
            raise PlaneError(f"ModelPlan: index_pool {self.index_pool} must be at least 1")
        object.__setattr__(self, "n_layer", n_layer)

    def owns_plane(self, il: int) -> bool:
        """Whether layer ``il`` has state of its own (a shared-KV layer has none)."""
        return not self.n_layer - self.shared_kv_layers <= il < self.n_layer


def compile_plan(model: ModelPlan) -> Sequence[StatePlan]:
    """Return the state plan of every layer, MTP blocks included."""
    return tuple(layer.state for layer in model.layers)
