"""Bytes of a cache per token, from the plan of a model.

What is counted is what grows with the tokens: rows of KV planes in the formats that the allocator
will use, latent rows, pool keys, and index rows where they are flat. Fixed parts are itemised by
``Cache.describe()`` instead: 8-byte tail pads, counters, recurrent slots, the index ring.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import PlaneError
from ..formats import Format
from . import policy
from .index_ring import index_ring_rows
from .plan import (
    KvCache,
    LatentKvCache,
    ModelPlan,
    SlidingKvCache,
    StatePlan,
    compile_plan,
)
from .ring import swa_ring_rows

__all__ = [
    "cache_bytes_per_token",
    "cache_bytes_per_token_for_layers",
    "cache_bytes_per_token_for_plan",
    "cache_ring_bytes_per_token",
    "cache_ring_bytes_per_token_for_layers",
    "cache_ring_bytes_per_token_for_plan",
    "cache_ring_row_cap",
    "cache_ring_row_cap_for_plan",
    "latent_kv_bytes_per_token_for_plan",
    "layer_formats",
    "layer_row_bytes",
]


def layer_formats(model: ModelPlan, il: int) -> tuple[Format, Format]:
    """K and V formats of layer ``il``; draft blocks keep the base formats of the process."""
    if il >= model.n_layer:
        return policy.kv_cache_formats()
    return policy.class_formats(model.layers[il].kind)


def layer_row_bytes(model: ModelPlan, il: int) -> tuple[int, int]:
    """Bytes of one token's K row and V row of layer ``il``."""
    k_bytes, v_bytes = policy.kv_blk_bytes(*layer_formats(model, il))
    layer = model.layers[il]
    return layer.kv_dim_k // 32 * k_bytes, layer.kv_dim_v // 32 * v_bytes


def _family(state: StatePlan) -> type:
    return KvCache if isinstance(state, SlidingKvCache) else type(state)


def _check(
    name: str, model: ModelPlan, plan: Sequence[StatePlan], lo: int, hi: int, top: int
) -> None:
    if not 0 <= lo <= hi <= top:
        raise PlaneError(f"{name}: layers [{lo}, {hi}) are not within [0, {top})")
    if len(plan) < hi:
        raise PlaneError(f"{name}: the plan has {len(plan)} layers, {hi} are asked for")
    for il in range(lo, hi):
        if _family(plan[il]) is not _family(model.layers[il].state):
            raise PlaneError(
                f"{name}: layer {il} is {plan[il]!r} in the plan but {model.layers[il].state!r} "
                "in the model"
            )


def cache_bytes_per_token_for_plan(
    model: ModelPlan, plan: Sequence[StatePlan], lo: int, hi: int
) -> int:
    """Bytes per token of the KV and latent planes of layers ``[lo, hi)`` of the trunk.

    Raises
    ------
    PlaneError
        Unless ``0 <= lo <= hi <= n_layer``.
    """
    _check("cache_bytes_per_token", model, plan, lo, hi, model.n_layer)
    kv = sum(
        sum(layer_row_bytes(model, il))
        for il in range(lo, hi)
        if isinstance(plan[il], (KvCache, SlidingKvCache)) and model.owns_plane(il)
    )
    return kv + latent_kv_bytes_per_token_for_plan(model, plan, lo, hi)


def cache_bytes_per_token_for_layers(model: ModelPlan, lo: int, hi: int) -> int:
    """:func:`cache_bytes_per_token_for_plan` with the model's own plan."""
    return cache_bytes_per_token_for_plan(model, compile_plan(model), lo, hi)


def cache_bytes_per_token(model: ModelPlan) -> int:
    """Bytes per token of the whole trunk."""
    return cache_bytes_per_token_for_layers(model, 0, model.n_layer)


def cache_ring_bytes_per_token_for_plan(
    model: ModelPlan, plan: Sequence[StatePlan], lo: int, hi: int
) -> int:
    """Bytes per token of those layers in ``[lo, hi)`` that have a ring; 0 with the door closed.

    The range may reach into the MTP blocks.
    """
    _check("cache_ring_bytes_per_token", model, plan, lo, hi, len(model.layers))
    if not policy.swa_ring_on():
        return 0
    return sum(
        sum(layer_row_bytes(model, il))
        for il in range(lo, hi)
        if isinstance(plan[il], SlidingKvCache) and model.owns_plane(il)
    )


def cache_ring_bytes_per_token_for_layers(model: ModelPlan, lo: int, hi: int) -> int:
    """:func:`cache_ring_bytes_per_token_for_plan` with the model's own plan."""
    return cache_ring_bytes_per_token_for_plan(model, compile_plan(model), lo, hi)


def cache_ring_bytes_per_token(model: ModelPlan) -> int:
    """Bytes per token of the ring planes of the trunk."""
    return cache_ring_bytes_per_token_for_layers(model, 0, model.n_layer)


def cache_ring_row_cap_for_plan(model: ModelPlan, plan: Sequence[StatePlan]) -> int:
    """Most rows that any ring of the model takes, MTP blocks included; 0 when no ring is used.

    A session of ``ctx`` tokens takes ``(total - ring) * ctx + ring * min(ctx, cap)`` bytes and
    the fixed parts.
    """
    if not policy.swa_ring_on():
        return 0
    return max(
        (
            swa_ring_rows(state.window, sys.maxsize)
            for il, state in enumerate(plan[: len(model.layers)])
            if isinstance(state, SlidingKvCache) and model.owns_plane(il)
        ),
        default=0,
    )


def cache_ring_row_cap(model: ModelPlan) -> int:
    """:func:`cache_ring_row_cap_for_plan` with the model's own plan."""
    return cache_ring_row_cap_for_plan(model, compile_plan(model))


def latent_kv_bytes_per_token_for_plan(
    model: ModelPlan,
    plan: Sequence[StatePlan],
    lo: int,
    hi: int,
    *,
    max_ctx: int | None = None,
) -> int:
    """Bytes per token of the latent planes of layers ``[lo, hi)`` of the trunk.

    Parameters
    ----------
    max_ctx : int, optional
        Rows of the session. Where it is given, index rows are charged per token exactly when
        their plane will be flat; where it is not, only when the door asks for a flat plane.
    """
    _check("latent_kv_bytes_per_token", model, plan, lo, hi, model.n_layer)
    flat = index_ring_rows(sys.maxsize if max_ctx is None else max_ctx) is None
    pool = model.index_pool or 1
    total = 0
    for il in range(lo, hi):
        state = plan[il]
        if isinstance(state, LatentKvCache) and model.owns_plane(il):
            total += 4 * state.width
            if state.index_width:
                total += state.index_width // 2 * 4 // pool
                total += 4 * state.index_width if flat else 0
    return total
