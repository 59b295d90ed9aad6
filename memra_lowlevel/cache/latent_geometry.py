"""Sizes of the planes of a latent layer, and what cannot be."""

from __future__ import annotations

from ..errors import PlaneError
from ..formats import F32, Format
from ..kernels import latent_rows
from .geometry import MAX_ROWS
from .latent_tail import IndexTail
from .plan import LatentKvCache

__all__ = ["check_geometry", "latent_bytes"]


def check_geometry(
    max_ctx: int,
    width: int,
    index_width: int,
    index_ring_rows: int | None,
    index_pool: int | None,
    format: Format,
    name: str,
) -> None:
    """Refuse what no latent plane can be."""
    if width < 1 or index_width < 0 or index_width % 2 or not 1 <= max_ctx <= MAX_ROWS:
        raise PlaneError(
            f"{name}: width {width} must be at least 1, index_width {index_width} even and not "
            f"negative, and {max_ctx} rows lie in 1..{MAX_ROWS}"
        )
    if index_ring_rows is not None and index_ring_rows < 0:
        raise PlaneError(f"{name}: index_ring_rows {index_ring_rows}; None for a flat plane")
    latent_rows.check_format(format, width, name)
    if index_pool is not None:
        IndexTail.check_pool(index_pool, index_ring_rows or 0, name)


def latent_bytes(
    plan: LatentKvCache, max_ctx: int, ring: int | None, pool: int | None, format: Format = F32
) -> tuple[int, int, int]:
    """Bytes of the rows, the index rows and the keys of a layer."""
    rows = -(-max_ctx * latent_rows.row_bytes(format, plan.width) // 4) * 4
    if not plan.index_width:
        return rows, 0, 0
    keys = max(max_ctx // pool * (plan.index_width // 2), 1) if pool else 0
    return rows, 4 * (ring or max_ctx) * plan.index_width, 4 * keys
