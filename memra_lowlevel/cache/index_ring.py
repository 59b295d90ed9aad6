"""Sizing and addressing of the tail ring under an indexer's rows: pure arithmetic.

Each index row is read once, when the key of its pool is built; rows of finished pools are dead.
So a ring of any whole number of pools is exact, and it does not bound the tokens of a call.
"""

from __future__ import annotations

from ..errors import PlaneError
from . import policy

__all__ = [
    "INDEX_RING_WORKING_ROWS",
    "index_plane_physical_row",
    "index_ring_default_rows",
    "index_ring_rows",
    "index_ring_rows_for",
    "index_ring_take",
]

INDEX_RING_WORKING_ROWS = 5120
"""Physical rows of the ring when nothing else is asked for."""


def index_ring_rows_for(explicit: int | None, max_ctx: int) -> int | None:
    """Physical rows of the index ring, or None for a flat plane.

    Parameters
    ----------
    explicit : int or None
        A row count; 0 asks for a flat plane, None for the default of 5120 rows.
    max_ctx : int
        Rows of the flat plane; a ring that is not smaller is pointless and dropped.
    """
    if explicit is not None and explicit < 0:
        raise PlaneError(f"index_ring_rows_for: {explicit} rows; give 0 for a flat plane")
    rows = INDEX_RING_WORKING_ROWS if explicit is None else explicit
    return rows if 0 < rows < max_ctx else None


def index_ring_default_rows(max_ctx: int) -> int | None:
    """:func:`index_ring_rows_for` with no explicit value; never reads the environment."""
    return index_ring_rows_for(None, max_ctx)


def index_ring_rows(max_ctx: int) -> int | None:
    """:func:`index_ring_rows_for` with the row count of the door ``MEMRA_DSA_INDEX_RING``."""
    return index_ring_rows_for(policy.index_ring_door(), max_ctx)


def index_plane_physical_row(ring_rows: int, pool: int, abs_row: int) -> int:
    """Physical row of absolute index row ``abs_row``.

    Parameters
    ----------
    ring_rows : int
        Physical rows of the ring, rounded down here to whole pools; 0 for a flat plane.
    pool : int
        Rows per pool key.
    """
    if pool < 1 or abs_row < 0 or ring_rows < 0:
        raise PlaneError(
            f"index_plane_physical_row: pool {pool} must be at least 1, ring_rows {ring_rows} and "
            f"row {abs_row} not negative"
        )
    if ring_rows == 0:
        return abs_row
    effective = ring_rows // pool * pool
    if effective == 0:
        raise PlaneError(
            f"index_plane_physical_row: a ring of {ring_rows} rows holds no whole pool of {pool}"
        )
    return abs_row % effective


def index_ring_take(ring: int, pool: int, ready: int, cur: int, remaining: int) -> int | None:
    """How many index rows may be appended before the next keys must be built.

    Parameters
    ----------
    ring : int
        Effective rows (whole pools); 0 for a flat plane.
    pool : int
        Rows per pool key.
    ready : int
        Pools whose keys are final.
    cur : int
        Absolute rows written so far.
    remaining : int
        Rows still to append.

    Returns
    -------
    int or None
        None when the rows that are still to be read do not leave room.
    """
    if pool < 1:
        raise PlaneError(f"index_ring_take: pool {pool} must be at least 1")
    if ring == 0:
        return remaining
    live = cur - ready * pool
    if live < 0 or ring <= live:
        return None
    return min(ring - live, remaining)
