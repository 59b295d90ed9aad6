"""Decode attention on tensor cores in f16 (``cuda_src/kv/attend_f16.cu``).

Class ``exact``, for K of f16, bf16, e4m3 or q8_0 with V of these, q5_1 or q4_0, head sizes 64, 128
and 256, from sm_80 on. :mod:`.kv_attend` decides between this kernel and the others and checks the
arguments. Chunks, partial results and their combination are those of :mod:`.kv_attend_mma`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats import BF16, E4M3, F16, Q4_0, Q5_1, Q8_0, Format
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .early import capability, starts_early
from .kv_attend_mma import FEW_CHANNELS, N_PARTS, STEP, n_slots
from .kv_attend_tiles import check_planes, combine_config, plane_maps
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Device, Stream
    from .kv_attend_call import AttendCall

__all__ = [
    "HEAD_DIMS", "K_FORMATS", "V_FORMATS", "attend", "n_parts", "prepare", "refusal", "shares",
]  # fmt: skip

K_FORMATS = (F16, BF16, E4M3, Q8_0)
V_FORMATS = (F16, BF16, E4M3, Q8_0, Q5_1, Q4_0)
HEAD_DIMS = (64, 128, 256)

_STAGES = range(2, 7)
"""Tiles of keys in flight or in use."""

_SLICE = 1024
"""Bytes of a row of K or V that a thread block takes, if it can."""

_SET = 8  # queries

registry.register(
    KernelSpec(
        name="attend_f16",
        source="kv/attend_f16.cu",
        entry="attend_f16<{k_format}, {v_format}, {head_dim}, {sets}, {heads}, {stages}>",
        instances=tuple(
            {
                "k_format": k, "v_format": v, "head_dim": d, "sets": sets, "heads": heads,
                "stages": stages,
            }
            for k, v, d, sets, heads, stages in (
                ("F16", "F16", 64, 1, 8, 3), ("F16", "F16", 128, 1, 4, 3),
                ("F16", "F16", 128, 2, 4, 3), ("F16", "F16", 256, 1, 2, 3),
                ("BF16", "BF16", 128, 1, 4, 3), ("E4M3", "E4M3", 128, 1, 8, 3),
                ("E4M3", "E4M3", 128, 2, 4, 6), ("Q8_0", "Q8_0", 64, 1, 8, 6),
                ("Q8_0", "Q8_0", 128, 1, 8, 3), ("Q8_0", "Q8_0", 128, 2, 4, 6),
                ("Q8_0", "Q8_0", 128, 1, 1, 6), ("Q8_0", "Q8_0", 256, 1, 2, 6),
                ("Q8_0", "Q4_0", 64, 1, 8, 6), ("Q8_0", "Q4_0", 64, 1, 1, 6),
                ("Q8_0", "Q4_0", 128, 1, 8, 4), ("Q8_0", "Q4_0", 256, 1, 2, 6),
            )
        ),
        oracle="memra_lowlevel.reference.attend:attend",
        tolerance=Tolerance(
            "relative", 1e-5,
            "q and p in two parts of 11 bits (bf16: three of 8; q beside K q8_0: whole numbers of "
            "22) whose products with the stored numbers are exact (V: scale * code in two parts "
            "that hold it), summed by tensor cores over 128 channels or 32 keys, then in f32; "
            "against float64 over the decoded cache. Beside V with scales a weight is right to "
            "2^-29 (q5_1: 2^-31, q4_0: 2^-33) of the greatest one of its chunk: what is next to "
            "nothing beside a key whose value is nothing is off by more",
        ),
        edges=(
            "no key", "one key", "step, stage and chunk edges", "masked row", "window", "ring base",
            "counted", "group 1 to 16", "NaN in another row's key", "poisoned workspace",
            "sinks", "softcap", "capacity", "table of sequences", "values over the range of f16",
            "scales from 2^-24 to 2^15", "negative scales",
        ),
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
) -> str | None:
    """Say why this kernel does not do the work; None if it does.

    The answer depends on the device and the planes only, never on a launch: all launches over one
    plane give the same bits.
    """
    if k_format not in K_FORMATS or v_format not in V_FORMATS:
        does = (", ".join(map(str, formats)) for formats in (K_FORMATS, V_FORMATS))
        return f"K {k_format} with V {v_format} (it does K of {' with V of '.join(does)})"
    if head_dim != head_dim_v or head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}/{head_dim_v} (it does {', '.join(map(str, HEAD_DIMS))})"
    if k_format is BF16 and head_dim > 128:
        return f"K {k_format} with head_dim {head_dim} (it does up to 128)"
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
    k_format, v_format = call.k_format, call.v_format
    check_planes("f16", call.k_plane, call.v_plane)
    n_rows, n_heads, head_dim = call.q.shape
    group = n_heads // n_kv_heads
    per_row = group if call.table is not None else n_rows * group
    shape = _shape(
        k_format, v_format, head_dim, n_kv_heads, per_row, device.limits.shared_optin_bytes
    )
    kernel, combine = _kernels(device, k_format, v_format, head_dim, shape)
    parts = n_parts(k_format, v_format, head_dim, n_kv_heads)
    slots = n_slots(rows, parts)
    blocks = shape.query_blocks * (n_rows if call.table is not None else 1)
    slices = n_kv_heads // shape.heads

    k_row, v_row = (f.row_bytes(n_kv_heads * head_dim) for f in (k_format, v_format))
    k_pitch, v_pitch = _pitches(k_format, v_format, shape.heads * head_dim)
    widths = (k_row, k_pitch), (v_row, v_pitch)
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
        call.len_d, call.base_d, call.table, slots, parts, shares(k_format, v_format),
    )  # fmt: skip


def n_parts(k_format: Format, v_format: Format, head_dim: int, n_kv_heads: int) -> int:
    """Chunks that hold what a row sees: the fewer, the more blocks share the heads of a key.

    One more than there are blocks for: only rows that begin within a chunk need it.
    """
    if n_kv_heads * head_dim <= FEW_CHANNELS:
        return 2 * N_PARTS + 1
    row_bytes = max(f.row_bytes(n_kv_heads * head_dim) for f in (k_format, v_format))
    return N_PARTS // min(max(1, row_bytes // _SLICE), 8) + 1


def shares(k_format: Format, v_format: Format) -> int:
    """Partial results of a chunk: warps that share the keys of a step, halves_of of the source."""
    return 2 if k_format.scaled or v_format.scaled else 1


def prepare(
    device: Device,
    k_format: Format,
    v_format: Format,
    head_dim: int,
    n_kv_heads: int,
    *,
    n_queries: int = 1,
) -> None:
    """Compile and load what launches of up to ``n_queries`` (rows x group) need."""
    room = device.limits.shared_optin_bytes
    for n in range(1, n_queries + 1):
        shape = _shape(k_format, v_format, head_dim, n_kv_heads, n, room)
        _kernels(device, k_format, v_format, head_dim, shape)


@dataclass(frozen=True)
class _Shape:
    """How the queries of a launch lie on warps.

    Attributes
    ----------
    sets : int
        Sets of 8 queries of a warp.
    teams : int
        Warps per kv head.
    heads : int
        Neighbouring kv heads of a thread block.
    stages : int
        Tiles of keys of a thread block that are in flight or in use.
    query_blocks : int
    shared_bytes : int
    resident : int
        Thread blocks that a multiprocessor holds at once.
    warps : int
        Of a thread block.
    """

    sets: int
    teams: int
    heads: int
    stages: int
    query_blocks: int
    shared_bytes: int
    resident: int
    warps: int


@functools.lru_cache(maxsize=512)
def _shape(
    k_format: Format, v_format: Format, head_dim: int, n_kv_heads: int, n_queries: int, room: int
) -> _Shape:
    wanted = -(-n_queries // _SET)
    # As many sets as the registers of a warp hold.
    sets = min(wanted, _most_sets(k_format, head_dim))
    halves = shares(k_format, v_format)
    # most_warps of the source
    many = halves == 2 and _most_sets(k_format, head_dim) > 1 and head_dim * sets <= 128
    workers = 16 if many and room >= 200_000 else 8
    teams = min(-(-wanted // sets), workers // halves)

    def shared(heads: int, stages: int) -> int:
        pitches = _pitches(k_format, v_format, heads * head_dim)
        in_shared = head_dim * sets > 128 and not k_format.scaled
        fragments = 512 * sets * (head_dim // 64) if in_shared else 0
        own = _PLACE + fragments + _table_bytes(k_format, v_format, head_dim)
        return stages * (STEP * sum(pitches) + 16) + heads * teams * halves * own + _BLOCK

    # As many heads as three stages have room for, then as many stages.
    least = math.gcd(n_kv_heads, _aligned_heads(k_format, v_format, head_dim))
    teams = min(teams, max(1, workers // (halves * least)))
    choices = [
        h for h in (8, 4, 2, 1)
        if h % least == 0 and n_kv_heads % h == 0 and h * teams * halves <= workers
    ]  # fmt: skip
    heads = next((h for h in choices if shared(h, 3) <= room), least)
    stages = max(n for n in _STAGES if shared(heads, n) <= room)
    used = shared(heads, stages)
    warps = heads * teams * halves
    # And whose registers are as many as that leaves.
    bound = min(workers, 8) if many and sets == 1 and warps <= 8 else workers
    resident = max(1, min(bound // warps, (room + 1024) // (used + 1024)))
    return _Shape(sets, teams, heads, stages, -(-wanted // (sets * teams)), used, resident, warps)


_PLACE, _BLOCK = 144, 64
"""Bytes of Place and Block."""


def _most_sets(k_format: Format, head_dim: int) -> int:
    return 2 if head_dim <= (64 if k_format is BF16 else 128) else 1


def _pitches(k_format: Format, v_format: Format, n_elements: int) -> tuple[int, int]:
    """Bytes from row to row of a stage: stage_pitch_k and stage_pitch_v of the source."""
    k_bytes, v_bytes = k_format.row_bytes(n_elements), v_format.row_bytes(n_elements)
    return (
        (k_bytes + 31) // 64 * 64 + 32 if k_format.scaled else (k_bytes + 127) // 128 * 128 + 16,
        (v_bytes + 31) // 32 * 32 + 16 if v_format.scaled else (v_bytes + 127) // 128 * 128 + 16,
    )


def _table_bytes(k_format: Format, v_format: Format, head_dim: int) -> int:
    """Bytes of StepTables of the source; 0 where no format has scales."""
    if not (k_format.scaled or v_format.scaled):
        return 0
    blocks = head_dim // 32
    scaled = k_format.scaled, v_format.scaled, v_format is Q5_1
    of_k, of_v, minima = (blocks if there else 1 for there in scaled)
    n_bytes = STEP // 2 * (4 * of_k + 2 * of_v + 6 * minima + 4) + 4 * blocks
    return -(-n_bytes // 16) * 16


def _aligned_heads(k_format: Format, v_format: Format, head_dim: int) -> int:
    """Count the neighbouring kv heads that a bulk copy wants: whole pieces of 16 bytes."""
    slices = [f.row_bytes(head_dim) for f in (k_format, v_format)]
    return max(16 // math.gcd(16, n) for n in slices)


def _config(
    device: Device, kernel: Kernel, shape: _Shape, slices: int, blocks: int, slots: int,
    programmatic: bool,
) -> LaunchConfig:  # fmt: skip
    key = ("attend_f16", kernel.name, shape, slices, blocks, slots, programmatic)
    found: LaunchConfig | None = device.memo.get(key)
    if found is None:
        share = max(1, device.limits.n_sms * shape.resident // (slices * blocks))
        found = device.memo[key] = LaunchConfig(
            (min(slots, share), slices, blocks), (32 * shape.warps, 1, 1),
            shape.shared_bytes,
            programmatic=starts_early(device, programmatic),
        )  # fmt: skip
    return found


def _kernels(
    device: Device, k_format: Format, v_format: Format, head_dim: int, shape: _Shape
) -> tuple[Kernel, Kernel]:
    key = ("attend_f16", k_format.constant, v_format.constant, head_dim, shape)
    found: tuple[Kernel, Kernel] | None = device.memo.get(key)
    if found is None:
        instance = {
            "k_format": k_format.constant, "v_format": v_format.constant, "head_dim": head_dim,
            "sets": shape.sets, "heads": shape.heads, "stages": shape.stages,
        }  # fmt: skip
        kernel, combine = registry.kernels(
            device, [("attend_f16", instance), ("attend_mma_combine", {"head_dim": head_dim})]
        )
        found = device.memo[key] = (kernel, combine)
    return found
