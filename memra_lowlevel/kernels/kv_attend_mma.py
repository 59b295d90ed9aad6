"""Decode attention on tensor cores (``cuda_src/kv/attend_mma.cu``), class ``f16x2``.

For K q8_0 with V q5_1, head sizes 64, 128 and 256, rows of a multiple of 16 bytes, from sm_80 on.
:mod:`.kv_attend` decides between this kernel and the general one and checks the arguments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..formats import Q5_1, Q8_0, Format
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Buffer, Device, Stream

__all__ = [
    "attend",
    "n_slots",
    "part_begin",
    "part_of",
    "prepare",
    "refusal",
    "slots_of",
    "workspace_bytes",
]

HEAD_DIMS = (64, 128, 256)

SET = 8
"""Queries of one tensor-core tile."""

_STAGES = 3
_WARPS = 8
_ALIGNED_HEADS = {64: 4, 128: 2, 256: 1}
"""Neighbouring kv heads whose slices of a row are a multiple of 16 bytes."""

registry.register(
    KernelSpec(
        name="attend_mma",
        source="kv/attend_mma.cu",
        entry="attend_mma<{head_dim}, {sets}>",
        instances=tuple(
            {"head_dim": d, "sets": sets}
            for d, sets in ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1))
        ),
        oracle="memra_lowlevel.reference.attend:attend",
        tolerance=Tolerance(
            "relative", 1e-5,
            "q and p * scale as two f16 (22 bits), products summed in f32 by the tensor cores, "
            "which truncate: up to 3e-6 in a model of that, against float64 over the decoded "
            "cache; a class of its own until a GPU has confirmed the model",
        ),
        edges=(
            "no key", "one key", "step, stage and chunk edges", "masked row", "window", "ring base",
            "counted", "group 1 to 16", "NaN in another row's key", "poisoned workspace",
            "sinks", "softcap", "capacity", "table of sequences", "scales from 2^-24 to 2^15",
        ),
        hot=True,
        numeric_class="f16x2",
        pdl="waits",
    ),
    KernelSpec(
        name="attend_mma_combine",
        source="kv/attend_mma.cu",
        entry="attend_mma_combine<{head_dim}>",
        instances=tuple({"head_dim": d} for d in HEAD_DIMS),
        oracle="memra_lowlevel.reference.attend:attend",
        tolerance=Tolerance("relative", 1e-5, "as attend_mma"),
        edges=("no chunk", "one chunk", "workspace too small", "sinks", "log-sum-exp"),
        hot=True,
        numeric_class="f16x2",
        pdl="waits",
    ),
)  # fmt: skip


def refusal(
    device: Device,
    k_format: Format,
    v_format: Format,
    head_dim: int,
    head_dim_v: int,
    n_kv_heads: int,
) -> str | None:
    """Say why this kernel does not do the work; None if it does.

    The answer depends on the device and the planes only, never on a launch: all launches over one
    plane give the same bits.
    """
    if (k_format, v_format) != (Q8_0, Q5_1):
        return f"K {k_format} with V {v_format} (it does K q8_0 with V q5_1)"
    if head_dim != head_dim_v or head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}/{head_dim_v} (it does {', '.join(map(str, HEAD_DIMS))})"
    if n_kv_heads % _ALIGNED_HEADS[head_dim]:
        return (
            f"{n_kv_heads} kv heads of {head_dim} (rows must be a multiple of 16 bytes: "
            f"a multiple of {_ALIGNED_HEADS[head_dim]} heads)"
        )
    if device.kind != "host" and _capability(device.arch) < 80:
        return f"{device.arch} (it needs sm_80)"
    return None


def attend(
    stream: Stream,
    q: Buffer,
    k_plane: Buffer | None,
    v_plane: Buffer | None,
    out: Buffer,
    *,
    len_d: Buffer | None,
    rows: int,
    n_kv_heads: int,
    workspace: Buffer,
    base_d: Buffer | None,
    window: int,
    scale: float,
    sinks: Buffer | None,
    softcap: float,
    lse: Buffer | None,
    counted: int,
    table: Buffer | None,
    programmatic: bool = False,
) -> None:
    """Launch both kernels; :func:`.kv_attend.attend` has checked everything else.

    Raises
    ------
    ArgumentError
        A plane does not begin at a multiple of 16 bytes.
    """
    device = stream.device
    for name, plane in (("k_plane", k_plane), ("v_plane", v_plane)):
        if plane is not None and plane.ptr % 16:
            raise ArgumentError(
                f"attend: {name} must begin at a multiple of 16 bytes for kernel 'mma', "
                f"got {plane.ptr:#x}",
                kernel="attend_mma", name=name, expected="a multiple of 16", got=hex(plane.ptr),
            )  # fmt: skip
    n_rows, n_heads, head_dim = q.shape
    group = n_heads // n_kv_heads
    queries = group if table is not None else n_rows * group
    shape = _shape(head_dim, n_kv_heads, queries, device.limits.shared_optin_bytes)
    kernel, combine = _kernels(device, head_dim, shape.sets)
    slots = slots_of(rows, n_rows, window, base_d is not None, table is not None)
    blocks = shape.query_blocks * (n_rows if table is not None else 1)
    slices = n_kv_heads // shape.heads
    launch(
        stream, _config(device, kernel, shape, slices, blocks, slots, programmatic), kernel,
        q, k_plane, v_plane, n_rows, n_kv_heads, group, rows, window, counted, scale, softcap,
        len_d, base_d, table, workspace, slots, shape.heads, shape.warps, shape.keys,
    )  # fmt: skip
    launch(
        stream, _combine_config(n_heads, n_rows, head_dim, _waits(device)), combine,
        workspace, sinks, out, lse, n_rows, rows, window, counted, len_d, base_d, table, slots,
    )  # fmt: skip


def prepare(device: Device, head_dim: int, *, n_queries: int = 1) -> None:
    """Compile and load what launches of up to ``n_queries`` rows x group need."""
    for sets in {1, _sets(head_dim, n_queries)}:
        _kernels(device, head_dim, sets)


def workspace_bytes(n_rows: int, n_heads: int, head_dim: int, slots: int) -> int:
    """Bytes of the partial results of ``n_rows`` rows with so many chunks each."""
    return n_rows * n_heads * slots * (head_dim + 2) * 4


def part_of(key: int) -> int:
    """Return the chunk that holds an absolute key position."""
    if key < 8192:
        return key // 32
    if key < 65536:
        return 256 + (key - 8192) // 128
    if key < 262144:
        return 704 + (key - 65536) // 256
    return 1472 + (key - 262144) // 512


def part_begin(part: int) -> int:
    """Return the first key of a chunk."""
    if part < 256:
        return part * 32
    if part < 704:
        return 8192 + (part - 256) * 128
    if part < 1472:
        return 65536 + (part - 704) * 256
    return 262144 + (part - 1472) * 512


def n_slots(rows: int, n_rows: int, window: int, ring: bool) -> int:
    """Chunks that a launch can need at most, counted from the first chunk of row 0."""
    seen = min(rows, window + n_rows - 1) if window > 0 else rows
    anywhere = part_of(seen - 1) + 2  # chunks are finest at the beginning
    return anywhere if ring else min(part_of(rows - 1) + 1, anywhere)


def slots_of(rows: int, n_rows: int, window: int, ring: bool, table: bool) -> int:
    """Return the chunks per row of a launch."""
    return n_slots(rows, 1 if table else n_rows, window, ring or table)


@dataclass(frozen=True)
class _Shape:
    """How the queries of a launch lie on warps.

    Attributes
    ----------
    sets : int
        Tiles of 8 queries per warp.
    warps : int
        Warps per kv head.
    heads : int
        Neighbouring kv heads of a thread block.
    query_blocks : int
    keys : int
        Keys of a stage.
    shared_bytes : int
    resident : int
        Thread blocks that a multiprocessor holds at once.
    """

    sets: int
    warps: int
    heads: int
    query_blocks: int
    keys: int
    shared_bytes: int
    resident: int


def _sets(head_dim: int, n_queries: int) -> int:
    return 1 if n_queries <= SET or head_dim > 128 else 2


@functools.lru_cache(maxsize=512)
def _shape(head_dim: int, n_kv_heads: int, n_queries: int, room: int) -> _Shape:
    sets = _sets(head_dim, n_queries)
    aligned = _ALIGNED_HEADS[head_dim]
    warps = min(-(-n_queries // (sets * SET)), _WARPS // aligned)
    resident = 16 if head_dim * sets <= 128 else 8  # warps, by their registers

    def shared(heads: int, keys: int) -> int:
        slice_k, slice_v = heads * head_dim // 32 * 34, heads * head_dim // 32 * 24
        row = (slice_k + 63) // 64 * 64 + 32 + (slice_v + 31) // 32 * 32 + 16  # k_pitch, v_pitch
        tables = head_dim // 64 * 512 + sets * (head_dim + 96) + 64  # WarpTables
        held = 0 if sets > 1 or head_dim > 128 else 5 if head_dim == 128 else 4
        fragments = (sets * head_dim // 16 - held) * 512  # WarpState::SHARED
        return _STAGES * keys * row + heads * warps * (tables + fragments) + 1024 + 2 * _STAGES * 8

    def fits(heads: int, keys: int) -> bool:
        blocks = max(1, resident // (heads * warps))
        return n_kv_heads % heads == 0 and blocks * (shared(heads, keys) + 1024) <= room + 1024

    while warps > 1 and shared(aligned, 16) > room:
        warps = -(-warps // 2)
    heads = _WARPS // warps
    heads = 1 << (heads.bit_length() - 1)
    while heads > aligned and not fits(heads, 16):
        heads //= 2
    keys = 16
    while keys < 64 and fits(heads, 2 * keys):
        keys *= 2
    used = shared(heads, keys)
    most = max(1, min(resident // (heads * warps), (room + 1024) // (used + 1024)))
    return _Shape(sets, warps, heads, -(-n_queries // (sets * SET * warps)), keys, used, most)


def _config(
    device: Device, kernel: Kernel, shape: _Shape, slices: int, blocks: int, slots: int,
    programmatic: bool,
) -> LaunchConfig:  # fmt: skip
    key = ("attend_mma", kernel.name, shape, slices, blocks, slots, programmatic)
    found: LaunchConfig | None = device.memo.get(key)
    if found is None:
        block = (32 * shape.heads * shape.warps, 1, 1)
        share = max(1, device.limits.n_sms * shape.resident // (slices * blocks))
        found = LaunchConfig(
            (min(slots, share), slices, blocks), block, shape.shared_bytes,
            programmatic=programmatic and _waits(device),
        )  # fmt: skip
        device.memo[key] = found
    return found


@functools.lru_cache(maxsize=64)
def _combine_config(n_heads: int, n_rows: int, head_dim: int, programmatic: bool) -> LaunchConfig:
    return LaunchConfig((n_heads, n_rows, head_dim // 32), (256, 1, 1), programmatic=programmatic)


def _waits(device: Device) -> bool:
    return device.kind == "cuda" and _capability(device.arch) >= 90


def _kernels(device: Device, head_dim: int, sets: int) -> tuple[Kernel, Kernel]:
    key = ("attend_mma", head_dim, sets)
    found: tuple[Kernel, Kernel] | None = device.memo.get(key)
    if found is None:
        instance = {"head_dim": head_dim, "sets": sets}
        kernel, combine = registry.kernels(
            device, [("attend_mma", instance), ("attend_mma_combine", {"head_dim": head_dim})]
        )
        found = device.memo[key] = (kernel, combine)
    return found


def _capability(arch: str) -> int:
    return int("".join(c for c in arch if c.isdigit()) or 0)
