"""A checked call of :func:`.kv_attend.attend`: what each of its kernels takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..formats import Format
    from ..runtime import Buffer

__all__ = ["AttendCall"]


class AttendCall(NamedTuple):
    """Arguments as :func:`.kv_attend.attend` has checked them, with none left to default.

    Attributes
    ----------
    q, out, k_plane, v_plane, len_d, base_d, table : Buffer or None
        As there.
    workspace : Buffer
        As many bytes as the kernel that was chosen needs.
    tickets, sinks, lse : Buffer or None
        As there; only the general kernel uses tickets.
    k_format, v_format : Format
    rows, n_kv_heads : int
    window : int
        0 for all keys.
    scale : float
    softcap : float
        0 for none.
    counted : int
        The number of rows of q that ``len_d`` already counts: all or none.
    programmatic, settled : bool

    Notes
    -----
    No frozen dataclass, for one is made with each call: that would set every field by a call of
    its own.
    """

    q: Buffer
    k_plane: Buffer | None
    v_plane: Buffer | None
    out: Buffer
    len_d: Buffer | None
    k_format: Format
    v_format: Format
    rows: int
    n_kv_heads: int
    workspace: Buffer
    tickets: Buffer | None
    base_d: Buffer | None
    window: int
    scale: float
    sinks: Buffer | None
    softcap: float
    lse: Buffer | None
    counted: int
    table: Buffer | None
    programmatic: bool
    settled: bool
