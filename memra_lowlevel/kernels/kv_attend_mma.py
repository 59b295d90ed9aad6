"""Decode attention on integer tensor cores (``cuda_src/kv/attend_mma.cu``), class ``exact``.

For K q8_0 with V q5_1, head sizes 64, 128 and 256, from sm_80 on.
:mod:`.kv_attend` decides between this kernel and the general one and checks the arguments.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats import Q5_1, Q8_0, Format
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .early import capability, starts_early
from .kv_attend_tiles import check_planes, combine_config, plane_maps
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Device, Stream
    from .kv_attend_call import AttendCall

__all__ = [
    "FEW_CHANNELS", "MOST_PARTS", "MOST_SLOTS", "N_PARTS", "attend", "chunk_keys", "n_parts",
    "n_slots", "prepare", "refusal", "workspace_bytes",
]  # fmt: skip

HEAD_DIMS = (64, 128, 256)

STEP = 32
"""Keys of one tensor-core step."""

N_PARTS = 132
"""Chunks that hold what a row sees: one for each multiprocessor of the GPUs it was made for."""

MOST_PARTS = 2 * N_PARTS
"""The same of planes whose heads keep half of a multiprocessor's warps busy."""

FEW_CHANNELS = 128
"""Channels of all kv heads up to which a row has twice the chunks: too few warps share its keys."""

MOST_SLOTS = 2 * (N_PARTS + 1)
"""Partial results that a row and head has at most, of any kernel on tensor cores; twice as many
where the channels are few."""

MOST_ROWS = (N_PARTS - 1) << 17
"""Rows of a plane: with more, a chunk could overflow the 32 bits of its sums."""

_CHANNELS = 64
_STAGES = 3
_ALIGNED_HEADS = {64: 4, 128: 2, 256: 1}
"""Neighbouring kv heads that a bulk copy wants: whole pieces of 16 bytes."""

_TOLERANCE = Tolerance(
    "relative",
    1e-5,
    "q in fixed point of 22 bits and p * scale of 23, their products with the codes exact, "
    "the rest in f32; against float64 over the decoded cache",
)  # fmt: skip

registry.register(
    KernelSpec(
        name="attend_mma",
        source="kv/attend_mma.cu",
        entry="attend_mma<{head_dim}, {queries}, {heads}>",
        instances=tuple(
            {"head_dim": d, "queries": queries, "heads": heads}
            for d, queries, heads in (
                (64, 4, 8), (64, 8, 4), (64, 4, 1), (128, 4, 4), (128, 4, 8), (128, 8, 8),
                (128, 8, 2), (128, 8, 1), (256, 8, 2), (256, 8, 1),
            )
        ),
        oracle="memra_lowlevel.reference.attend:attend",
        tolerance=_TOLERANCE,
        edges=(
            "no key", "one key", "step, stage and chunk edges", "masked row", "window", "ring base",
            "counted", "group 1 to 16", "NaN in another row's key", "poisoned workspace",
            "sinks", "softcap", "capacity", "table of sequences", "scales from 2^-24 to 2^15",
            "negative scales",
        ),
        hot=True,
        pdl="waits",
    ),
    KernelSpec(
        name="attend_mma_combine",
        source="kv/attend_mma.cu",
        entry="attend_mma_combine<{head_dim}>",
        instances=tuple({"head_dim": d} for d in HEAD_DIMS),
        oracle="memra_lowlevel.reference.attend:attend",
        tolerance=_TOLERANCE,
        edges=("no chunk", "one chunk", "workspace too small", "sinks", "log-sum-exp"),
        hot=True,
        pdl="waits",
    ),
)  # fmt: skip


def refusal(
    device: Device,
    k_format: Format,
    v_format: Format,
    head_dim: int,
    head_dim_v: int,
    rows: int = 0,
) -> str | None:
    """Say why this kernel does not do the work; None if it does.

    The answer depends on the device and the planes only, never on a launch: all launches over one
    plane give the same bits.
    """
    if (k_format, v_format) != (Q8_0, Q5_1):
        return f"K {k_format} with V {v_format} (it does K q8_0 with V q5_1)"
    if head_dim != head_dim_v or head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}/{head_dim_v} (it does {', '.join(map(str, HEAD_DIMS))})"
    if rows > MOST_ROWS:
        return f"planes of {rows} rows (it does up to {MOST_ROWS})"
    if device.kind != "host" and capability(device) < 80:
        return f"{device.arch} (it needs sm_80)"
    return None


def attend(stream: Stream, call: AttendCall) -> None:
    """Launch both kernels.

    Raises
    ------
    ArgumentError
        A plane does not begin at a multiple of 16 bytes.
    """
    device, rows, n_kv_heads = stream.device, call.rows, call.n_kv_heads
    check_planes("mma", call.k_plane, call.v_plane)
    n_rows, n_heads, head_dim = call.q.shape
    group = n_heads // n_kv_heads
    per_row = group if call.table is not None else n_rows * group
    shape = _shape(
        head_dim, n_kv_heads, per_row, device.limits.shared_optin_bytes,
        _block_warps(head_dim, min(rows, call.window or rows)), _most_held(device),
    )  # fmt: skip
    kernel, combine = _kernels(device, head_dim, shape.queries, shape.heads)
    parts = n_parts(head_dim, n_kv_heads)
    slots = n_slots(rows, parts)
    blocks = shape.query_blocks * (n_rows if call.table is not None else 1)
    slices = n_kv_heads // shape.heads
    blocks_of_row = n_kv_heads * head_dim // 32
    pitch_k, pitch_v = _pitches(head_dim, shape.heads)
    widths = (blocks_of_row * 34, pitch_k), (blocks_of_row * 24, pitch_v)
    launch(
        stream, _config(device, kernel, shape, slices, blocks, slots, call.programmatic), kernel,
        call.q, call.k_plane, call.v_plane, n_rows, n_kv_heads, group, rows, call.window,
        call.counted, call.scale, call.softcap, call.len_d, call.base_d, call.table,
        call.workspace, slots, parts, shape.teams,
        *plane_maps(device, call.k_plane, call.v_plane, rows, STEP, widths),
        int(call.settled and call.table is None),
    )  # fmt: skip
    launch(
        stream, combine_config(n_heads, n_rows, head_dim, starts_early(device, True)), combine,
        call.workspace, call.sinks, call.out, call.lse, n_rows, rows, call.window, call.counted,
        call.len_d, call.base_d, call.table, slots, parts, 1,
    )  # fmt: skip


def prepare(device: Device, head_dim: int, n_kv_heads: int, *, n_queries: int = 1) -> None:
    """Compile and load what launches of up to ``n_queries`` (rows x group) need."""
    room = device.limits.shared_optin_bytes
    shapes = [
        _shape(head_dim, n_kv_heads, n, room, most, _most_held(device))
        for n in range(1, n_queries + 1)
        for most in {_block_warps(head_dim, seen) for seen in (1, _SHORT, MOST_ROWS)}
    ]
    for queries, heads in sorted({(s.queries, s.heads) for s in shapes}):
        _kernels(device, head_dim, queries, heads)


def workspace_bytes(n_rows: int, n_heads: int, head_dim: int, slots: int) -> int:
    """Bytes of the partial results of ``n_rows`` rows with so many chunks each."""
    return n_rows * n_heads * slots * (head_dim + 2) * 4


def n_parts(head_dim: int, n_kv_heads: int) -> int:
    """Chunks that hold what a row sees: the more, the fewer warps its heads keep busy."""
    few = 2 if n_kv_heads * head_dim <= FEW_CHANNELS else 1
    return N_PARTS if n_kv_heads * (head_dim // _CHANNELS) > 8 else few * MOST_PARTS


def chunk_keys(seen: int, n_parts: int = N_PARTS) -> int:
    """Keys of a chunk of a row that sees so many."""
    return max(1, -(-seen // ((n_parts - 1) * STEP))) * STEP


def n_slots(rows: int, n_parts: int = N_PARTS) -> int:
    """Chunks that a row over a plane of ``rows`` rows can have at most."""
    return min(n_parts, -(-rows // STEP) + 1)


@dataclass(frozen=True)
class _Shape:
    """How the queries of a launch lie on warps.

    Attributes
    ----------
    queries : int
        Queries of a team of warps: 4 or 8.
    teams : int
        Teams per kv head.
    heads : int
        Neighbouring kv heads of a thread block.
    query_blocks : int
    shared_bytes : int
    resident : int
        Thread blocks that a multiprocessor holds at once.
    """

    queries: int
    teams: int
    heads: int
    query_blocks: int
    shared_bytes: int
    resident: int

    def warps(self, head_dim: int) -> int:
        return self.heads * self.teams * (head_dim // _CHANNELS)


@functools.lru_cache(maxsize=512)
def _shape(
    head_dim: int, n_kv_heads: int, n_queries: int, room: int, block_warps: int = 16,
    most_held: int = 3,
) -> _Shape:  # fmt: skip
    queries = 4 if n_queries <= 4 and head_dim <= 128 else 8
    aligned, team = math.gcd(n_kv_heads, _ALIGNED_HEADS[head_dim]), head_dim // _CHANNELS
    wanted, most = -(-n_queries // queries), 16 if room >= 200_000 else 8  # WORKERS

    def shared(heads: int, teams: int) -> int:
        tables = (28 if team == 1 else 26) * STEP + 32 + 20 * queries  # WarpTables
        warps = heads * teams * team
        exchange = 2 * (144 * queries + 16)
        held = most_held if head_dim > 128 else head_dim // 32
        rest = max(16, (head_dim // 32 - held) * 1024)
        high = head_dim // 32 * 256 if queries == 8 and head_dim <= 128 else 8
        kept = -(-(rest + high) // 16) * 16  # QueryTables
        return (
            _STAGES * STEP * sum(_pitches(head_dim, heads))
            + warps * (tables + _PLACE)
            + heads * teams * (exchange + kept)
            + 1024
            + 2 * _STAGES * 8
        )

    def resident(heads: int, teams: int) -> int:
        blocks = (room + 1024) // (shared(heads, teams) + 1024)
        return min(most // (heads * teams * team), blocks)

    def busy(heads: int, teams: int) -> int:
        return resident(heads, teams) * heads * teams * team

    # Few instances: for one team the heads that keep most warps busy, else as few as can be.
    teams = 1
    choices = [aligned << i for i in range(5) if n_kv_heads % (aligned << i) == 0]
    choices = [h for h in choices if h * team <= block_warps * most // 16] or choices[:1]
    heads = max(choices, key=lambda h: (busy(h, teams), h if busy(h, teams) else -h))
    if wanted > teams:
        teams, heads = wanted, aligned
    while teams > 1 and not resident(heads, teams):
        teams = -(-teams // 2)
    used = shared(heads, teams)
    return _Shape(queries, teams, heads, -(-wanted // teams), used, max(1, resident(heads, teams)))


_SHORT = 1 << 14


def _block_warps(head_dim: int, seen: int) -> int:
    """Say how many of 16 warps a thread block of one team a head has at most.

    Where a row sees few keys, for the plane is short or the window is, the start and the end of a
    block are the time: one of several loads while another one ends. No bit depends on it.
    """
    if seen > _SHORT:
        return 16
    return 4 if head_dim > 128 and seen <= _SHORT // 2 else 8


_PLACE = 96
"""Bytes of Place."""


def _most_held(device: Device) -> int:
    """Blocks of a query of 256 channels that a warp holds in registers: MOST_HELD of the source."""
    return 1 if capability(device) >= 100 else 3


def _config(
    device: Device, kernel: Kernel, shape: _Shape, slices: int, blocks: int, slots: int,
    programmatic: bool,
) -> LaunchConfig:  # fmt: skip
    key = ("attend_mma", kernel.name, shape, slices, blocks, slots, programmatic)
    found: LaunchConfig | None = device.memo.get(key)
    if found is None:
        head_dim = int(kernel.name.partition("<")[2].partition(",")[0])
        share = max(1, device.limits.n_sms * shape.resident // (slices * blocks))
        found = LaunchConfig(
            (min(slots, share), slices, blocks), (32 * shape.warps(head_dim), 1, 1),
            shape.shared_bytes, programmatic=starts_early(device, programmatic),
        )  # fmt: skip
        device.memo[key] = found
    return found


def _pitches(head_dim: int, heads: int) -> tuple[int, int]:
    """Bytes from row to row of a stage: k_pitch and v_pitch of the source."""
    slice_k, slice_v = heads * head_dim // 32 * 34, heads * head_dim // 32 * 24
    return (slice_k + 31) // 64 * 64 + 32, (slice_v + 31) // 32 * 32 + 16


def _kernels(device: Device, head_dim: int, queries: int, heads: int) -> tuple[Kernel, Kernel]:
    key = ("attend_mma", head_dim, queries, heads)
    found: tuple[Kernel, Kernel] | None = device.memo.get(key)
    if found is None:
        instance = {"head_dim": head_dim, "queries": queries, "heads": heads}
        kernel, combine = registry.kernels(
            device, [("attend_mma", instance), ("attend_mma_combine", {"head_dim": head_dim})]
        )
        found = device.memo[key] = (kernel, combine)
    return found
