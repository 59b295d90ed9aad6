"""What an append with a turn of heads asks of the turn, before anything is launched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .. import expect
from ..errors import ArgumentError
from ..formats import F32
from ..kernels import kv_append_heads
from ..kernels.kv_append_heads import HeadTurn
from ..runtime.memory import Buffer

if TYPE_CHECKING:
    from ..runtime import Stream

__all__ = ["check_turn", "turned_k"]


def check_turn(
    who: str, turn: HeadTurn | None, k: Buffer, v: Buffer, q: Buffer | None, positions: int
) -> None:
    """Refuse a turn that no launch can do, or that would make rows of NaN out of sound ones.

    Parameters
    ----------
    who : str
        The call, for messages.
    turn : HeadTurn or None
    k, v : Buffer
        Rows that are appended.
    q : Buffer or None
        Queries that are turned in place.
    positions : int
        That the table of angles must have.

    Raises
    ------
    ArgumentError
    """
    if turn is None:
        if q is not None:
            raise expect.refusal(f"{who}: q", q, "no q without a turn")
        return
    expect.kind(f"{who}: turn", turn, HeadTurn, "a HeadTurn")
    for name in ("angles", "k_norm", "q_norm"):
        if (buffer := getattr(turn, name)) is not None:
            expect.kind(f"{who}: {name} of the turn", buffer, Buffer, "a Buffer or None")
    if not isinstance(turn.halves, bool | np.bool_):
        raise expect.refusal(f"{who}: halves of the turn", turn.halves, "a bool")
    eps, number = turn.eps, (int, float, np.integer, np.floating)
    if isinstance(eps, bool) or not isinstance(eps, number) or not 0 <= eps < math.inf:
        raise expect.refusal(f"{who}: eps of the turn", eps, "a finite number of at least 0")
    if turn.angles is not None and (not turn.angles.shape or turn.angles.shape[0] < positions):
        raise expect.refusal(
            f"{who}: angles of shape {list(turn.angles.shape)}", turn.angles,
            f"a table of at least max_ctx = {positions} positions",
        )  # fmt: skip
    if q is None:
        return
    expect.kind(f"{who}: q", q, Buffer, "a Buffer or None")
    read = {"k": k, "v": v, "angles": turn.angles, "k_norm": turn.k_norm, "q_norm": turn.q_norm}
    for name, other in read.items():
        if other is not None and _overlap(q, other):
            raise ArgumentError(
                f"{who}: q shares memory with {name}, which the launch that turns q in place "
                "reads; give it memory of its own. Nothing was launched",
                kernel="append_heads", index=0, name="q", expected="memory of its own",
                got=f"memory of {name}",
            )  # fmt: skip


def turned_k(
    stream: Stream, k: Buffer, v: Buffer, turn: HeadTurn, len_d: Buffer, n_kv_heads: int
) -> Buffer:
    """Give K as the append will quantise it, f32 ``[n, kv_dim_k]``: the same kernel, kept whole."""
    k_plane, v_plane = (
        stream.device.empty(rows.n_bytes, np.uint8, stream, "turned") for rows in (k, v)
    )
    kv_append_heads.append(
        stream, k, v, k_plane, v_plane, len_d, turn, k_format=F32, v_format=F32, rows=k.shape[0],
        n_kv_heads=n_kv_heads, base_d=len_d,
    )  # fmt: skip
    return k_plane.view(0, k.shape, np.float32)


def _overlap(a: Buffer, b: Buffer) -> bool:
    return a.ptr < b.ptr + b.n_bytes and b.ptr < a.ptr + a.n_bytes
