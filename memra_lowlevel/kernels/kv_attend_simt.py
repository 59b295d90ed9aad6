"""Decode attention of every format and shape (``cuda_src/kv/attend.cu``), class ``exact``.

Partial results per chunk of keys, then their combination: in the same launch where there are
tickets, by the block that finishes last, else in a second one; the bits are the same. Grids and
the workspace depend on the capacity of the plane and on the device only. :mod:`.kv_attend` decides
between this kernel and those on tensor cores and checks the arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats import Format
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .early import starts_early
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Device, Stream
    from .kv_attend_call import AttendCall

__all__ = [
    "THREADS", "Plan", "attend", "chunk_begin", "chunk_of", "n_slots", "plan", "prepare",
    "queries_at_once", "shared_bytes",
]  # fmt: skip

THREADS = 256
"""Of a block of ``attend_partial``."""

_JOINED_SLOTS = 160
_FEW = 4
"""Queries that a thread block takes at least."""
_RESIDENT = 2
"""Thread blocks of few queries that a multiprocessor mostly holds: RESIDENT of the source."""

registry.register(
    KernelSpec(
        name="attend_partial",
        source="kv/attend.cu",
        entry="attend_partial<{k_format}, {v_format}, {head_dim}, {head_dim_v}, {queries}>",
        instances=tuple(
            {
                "k_format": "Q8_0", "v_format": "Q5_1",
                "head_dim": d, "head_dim_v": d, "queries": queries,
            }
            for d, queries in ((64, 4), (64, 16), (96, 4), (128, 4), (128, 16), (256, 4))
        ),
        oracle="memra_lowlevel.reference.attend:attend",
        tolerance=Tolerance(
            "relative", 1e-5,
            "f32 scores, weights and sums over at most some 100,000 keys, against float64 over the "
            "decoded cache; exp2f differs by 2 ulp between devices",
        ),
        edges=(
            "no key", "one key", "tile and chunk edges", "masked row", "window", "ring base",
            "counted", "group 1 to 16", "NaN in another row's key", "poisoned workspace", "tickets",
            "sinks", "softcap", "capacity", "table of sequences",
        ),
        hot=True,
        pdl="waits",
    ),
    KernelSpec(
        name="attend_combine",
        source="kv/attend.cu",
        entry="attend_combine<{head_dim_v}>",
        instances=tuple({"head_dim_v": d} for d in (64, 96, 128, 256)),
        oracle="memra_lowlevel.reference.attend:attend",
        tolerance=Tolerance("relative", 1e-5, "as attend_partial"),
        edges=("no chunk", "one chunk", "workspace too small", "sinks", "log-sum-exp"),
        hot=True,
        pdl="waits",
    ),
)  # fmt: skip


def attend(stream: Stream, plan: Plan, call: AttendCall) -> None:
    """Launch one kernel or both."""
    (n_rows, n_heads, head_dim), head_dim_v = call.q.shape, call.out.shape[2]
    device, group = stream.device, n_heads // call.n_kv_heads
    partial, combine = _kernels(
        device, call.k_format, call.v_format, head_dim, head_dim_v, plan.queries
    )
    tickets = call.tickets
    joins = tickets is not None and tickets.n_bytes >= 4 * plan.n_tickets
    joins = joins and plan.n_slots <= _JOINED_SLOTS
    launch(
        stream, _starting(plan.partial, starts_early(device, call.programmatic)), partial,
        call.q, call.k_plane, call.v_plane, n_rows, call.n_kv_heads, group, call.rows, call.window,
        call.counted, call.scale, call.softcap, call.len_d, call.base_d, call.table,
        call.workspace, plan.n_slots, tickets if joins else None, call.sinks, call.out, call.lse,
        int(call.settled and call.table is None),
    )  # fmt: skip
    if joins:
        return
    launch(
        stream, _starting(plan.combine, starts_early(device, True)), combine,
        call.workspace, call.sinks, call.out, call.lse, call.rows, call.window, call.counted,
        call.len_d, call.base_d, call.table, plan.n_slots,
    )  # fmt: skip


def prepare(
    device: Device, k_format: Format, v_format: Format, head_dim: int, head_dim_v: int,
    n_queries: tuple[int, ...],
) -> None:  # fmt: skip
    """Compile and load what launches of so many queries (rows x group) need."""
    widest = max(head_dim, head_dim_v)
    needed = {queries_at_once(n, widest) for n in n_queries}
    if device.kind != "host":
        needed.add(_FEW)  # short planes; see plan()
    for queries in sorted(needed):
        _kernels(device, k_format, v_format, head_dim, head_dim_v, queries)


def chunk_of(key: int) -> int:
    """Return the chunk that holds an absolute key position."""
    if key < 8192:
        return key // 128
    if key < 65536:
        return 64 + (key - 8192) // 256
    return 288 + (key - 65536) // 1024


def chunk_begin(chunk: int) -> int:
    """Return the first key of a chunk."""
    if chunk < 64:
        return chunk * 128
    if chunk < 288:
        return 8192 + (chunk - 64) * 256
    return 65536 + (chunk - 288) * 1024


def n_slots(rows: int, n_rows: int, window: int, ring: bool) -> int:
    """Chunks that one row can need at most, counted from the first chunk of row 0."""
    flat = chunk_of(rows - 1) + 1
    seen = min(rows, window + n_rows - 1) if window > 0 else rows
    anywhere = -(-seen // 128) + 1  # a span of keys at the finest chunks, wherever it starts
    return anywhere if ring else min(flat, anywhere)


def queries_at_once(n_queries: int, widest: int) -> int:
    """Return how many queries a thread block takes: few, or as many as fit."""
    return _FEW if n_queries <= _FEW else 8 if widest > 256 else 16


@functools.lru_cache(maxsize=512)
def _starting(config: LaunchConfig, early: bool) -> LaunchConfig:
    """Give the configuration of a launch that starts while its predecessor runs, or not."""
    return dataclasses.replace(config, programmatic=True) if early else config


@dataclass(frozen=True)
class Plan:
    """How a launch over planes of one size lies on the device."""

    queries: int
    n_slots: int
    workspace_bytes: int
    n_tickets: int
    partial: LaunchConfig
    combine: LaunchConfig


@functools.lru_cache(maxsize=512)
def plan(
    n_rows: int,
    n_kv_heads: int,
    group: int,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    window: int,
    ring: bool,
    table: bool,
    n_sms: int,
    kind: str,
) -> Plan:
    """Plan a launch over planes of ``rows`` rows; ``window`` 0 for all keys."""
    widest = max(head_dim, head_dim_v)
    per_block = group if table else n_rows * group
    queries = queries_at_once(per_block, widest)
    sequences = n_rows if table else 1
    slots = n_slots(rows, 1 if table else n_rows, window, ring or table)
    # Where the device has room for all of them at once, blocks of few queries are done sooner,
    # though each decodes the keys anew; a host has no such room.
    in_few = -(-per_block // _FEW) * sequences * n_kv_heads * slots
    if kind != "host" and in_few <= _RESIDENT * n_sms:
        queries = _FEW
    blocks = -(-per_block // queries) * sequences
    # Enough blocks to fill the device, few enough that those without keys cost nothing.
    resident = 2 * n_sms if kind == "host" else 8 * n_sms
    share = max(1, -(-resident // (n_kv_heads * max(1, blocks))))
    n_heads = n_kv_heads * group
    return Plan(
        queries,
        slots,
        n_rows * n_heads * slots * (head_dim_v + 2) * 4,
        n_kv_heads * max(1, blocks),
        LaunchConfig(
            (min(slots, share), n_kv_heads, max(1, blocks)), (THREADS, 1, 1),
            shared_bytes(head_dim, head_dim_v, queries),
        ),
        LaunchConfig((n_heads, max(1, n_rows), 1), (2 * head_dim_v, 1, 1)),
    )  # fmt: skip


def shared_bytes(head_dim: int, head_dim_v: int, queries: int) -> int:
    """Dynamic shared memory of ``attend_partial``: AttendShape::FLOATS of the source."""
    widest = max(head_dim, head_dim_v)
    tile = 128 if widest <= 64 else 64 if widest <= 128 else 32 if widest <= 256 else 16
    fits = min(THREADS // 2 // (head_dim_v // 4), tile // 4)
    splits = next(s for s in (8, 4, 2, 1) if fits >= s)
    tile_floats = max(tile * (widest + 4), splits * queries * head_dim_v)
    scores = min(8, THREADS // tile) * queries * tile
    return 4 * (tile_floats + queries * head_dim + scores + queries)


def _kernels(
    device: Device, k_format: Format, v_format: Format, head_dim: int, head_dim_v: int, queries: int
) -> tuple[Kernel, Kernel]:
    key = ("attend", k_format.constant, v_format.constant, head_dim, head_dim_v, queries)
    found: tuple[Kernel, Kernel] | None = device.memo.get(key)
    if found is None:
        instance = {
            "k_format": k_format.constant, "v_format": v_format.constant,
            "head_dim": head_dim, "head_dim_v": head_dim_v, "queries": queries,
        }  # fmt: skip
        partial, combine = registry.kernels(
            device,
            [("attend_partial", instance), ("attend_combine", {"head_dim_v": head_dim_v})],
        )
        found = device.memo[key] = (partial, combine)
    return found
