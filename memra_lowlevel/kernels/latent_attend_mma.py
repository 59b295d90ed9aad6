"""Latent attention on tensor cores (``cuda_src/latent/attend_mma.cu``), class ``f16x2``.

For ranks of a multiple of 128 and rows of a multiple of 64 elements, from sm_80 on.
:mod:`.latent_attend` decides between this kernel and the exact one and checks the arguments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import FormatUnsupported
from ..formats import F32, Q8_0, Format
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .early import capability
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Buffer, Device, Stream

__all__ = [
    "LIST_PART",
    "attend",
    "n_slots",
    "part_begin",
    "part_of",
    "prepare",
    "refusal",
    "workspace_bytes",
]

LIST_PART = 64
"""Entries of a list that leave one partial result."""

_STEP = 16
_SLICES = 4
_PLACE_BYTES = 32

_TOLERANCE = Tolerance(
    "relative", 1e-5,
    "queries, rows and weights as two f16 with a common power of two (22 bits), three products of "
    "four, summed in f32 by the tensor cores, which truncate; against float64 over the same rows",
)  # fmt: skip

registry.register(
    KernelSpec(
        name="latent_mma",
        source="latent/attend_mma.cu",
        entry="latent_mma<{format}, {rank}, {rope}, {sets}, {held}, {stages}, {warps}>",
        instances=tuple(
            {
                "format": f, "rank": 512, "rope": rope, "sets": sets, "held": held,
                "stages": stages, "warps": warps,
            }
            for f in ("F32", "BF16", "Q8_0")
            for rope in (0, 64)
            for sets, held, stages, warps in ((1, 0, 5, 16), (2, 0, 3, 8 if f == "Q8_0" else 16))
        ),
        oracle="memra_lowlevel.reference.latent:attend",
        tolerance=_TOLERANCE,
        edges=(
            "no key", "one key", "tile and chunk edges", "counted", "rows of every size",
            "NaN in a row that is not seen", "poisoned workspace", "list with -1 anywhere",
            "list of rows not seen", "empty list", "row formats",
        ),
        hot=True,
        numeric_class="f16x2",
        pdl="waits",
    ),
    KernelSpec(
        name="latent_mma_combine",
        source="latent/attend_mma.cu",
        entry="latent_mma_combine<{rank}>",
        instances=({"rank": 512},),
        oracle="memra_lowlevel.reference.latent:attend_listed",
        tolerance=_TOLERANCE,
        edges=("no chunk", "one chunk", "workspace too small", "log-sum-exp"),
        hot=True,
        numeric_class="f16x2",
        pdl="waits",
    ),
)  # fmt: skip


def refusal(device: Device, rank: int, rope: int) -> str | None:
    """Say why this kernel does not do the work; None if it does.

    The answer depends on the device and the shape of the rows only: all launches over a plane give
    the same bits.
    """
    if rank < 128 or rank % 128 or (rank + rope) % 64 or rank > 512:
        return (
            f"rank {rank} with {rope} (ranks are 128, 256, 384 or 512, rows a multiple of 64 wide)"
        )
    if device.kind != "host" and capability(device) < 80:
        return f"{device.arch} (it needs sm_80)"
    if not _fitting(rank, rope, 1, device.limits.shared_optin_bytes):
        return f"rows of {rank + rope} in {device.limits.shared_optin_bytes} bytes of shared memory"
    return None


def attend(
    stream: Stream,
    q: Buffer,
    plane: Buffer,
    out: Buffer,
    *,
    len_d: Buffer,
    rows: int,
    workspace: Buffer,
    scale: float,
    format: Format,
    indices: Buffer | None,
    lse: Buffer | None,
    behind: int,
) -> None:
    """Launch both kernels; :func:`.latent_attend.attend` has checked everything."""
    device = stream.device
    n, heads, width = q.shape
    rank = out.shape[2]
    n_list = 0 if indices is None else indices.shape[1]
    limits = device.limits
    plan = _plan(
        n, heads, rank, width - rank, rows, n_list, limits.n_sms, limits.shared_optin_bytes,
        format, capability(device) >= 90,
    )  # fmt: skip
    partial, combine = _kernels(device, format, rank, width - rank, plan.shape)
    launch(
        stream, plan.partial, partial,
        q, plane, n, heads, rows, indices, n_list, behind, scale, len_d, workspace, plan.n_slots,
    )  # fmt: skip
    launch(
        stream, plan.combine, combine,
        workspace, out, lse, rows, n_list, behind, len_d, plan.n_slots,
    )  # fmt: skip


def prepare(
    device: Device, heads: int, rank: int, rope: int, *, format: Format = F32, max_rows: int = 16
) -> None:
    """Load what launches of up to ``max_rows`` rows need, so that they may be captured."""
    limits = device.limits
    for n in (1, max_rows):
        for rows, n_list in ((1, 0), (1, 1), (1 << 20, 0)):
            plan = _plan(
                n, heads, rank, rope, rows, n_list, limits.n_sms, limits.shared_optin_bytes,
                format, False,
            )  # fmt: skip
            _kernels(device, format, rank, rope, plan.shape)


def workspace_bytes(n: int, heads: int, rank: int, rows: int, n_list: int = 0) -> int:
    """Bytes that :func:`attend` needs for n rows over a plane of ``rows``, or over lists."""
    return 4 * n * heads * n_slots(rows, n_list) * (rank + 2)


def n_slots(rows: int, n_list: int = 0) -> int:
    """Chunks of a plane of ``rows``, or of a list."""
    return -(-n_list // LIST_PART) if n_list else part_of(max(rows, 1) - 1) + 1


def part_of(key: int) -> int:
    """Return the chunk that holds an absolute key position."""
    if key < 4096:
        return key // 64
    if key < 32768:
        return 48 + key // 256
    if key < 65536:
        return 112 + key // 512
    return 176 + key // 1024


def part_begin(part: int) -> int:
    """Return the first key of a chunk."""
    if part < 64:
        return part * 64
    if part < 176:
        return (part - 48) * 256
    if part < 240:
        return (part - 112) * 512
    return (part - 176) * 1024


@dataclass(frozen=True)
class Shape:
    """How a thread block works.

    Attributes
    ----------
    sets : int
        Queries of a block, in 16.
    held : int
        Steps of 16 channels of each slice whose queries stay in registers.
    stages : int
        Tiles of 16 keys in flight or in use.
    warps : int
        8 or 16.
    """

    sets: int
    held: int
    stages: int
    warps: int


def shared_bytes(rank: int, rope: int, shape: Shape) -> int:
    """Dynamic shared memory of ``latent_mma``: MmaShape::BYTES of the source."""
    width, queries = rank + rope, 16 * shape.sets
    steps = width // 16 // _SLICES
    tiles = shape.stages * _STEP * (4 * width + 16)
    fragments = _SLICES * (steps - shape.held) * shape.sets * 1024
    return (
        tiles + fragments + _SLICES * queries * _STEP * 4 + shape.sets * 1024
        + shape.stages * _STEP * 16 + 12 * queries + _PLACE_BYTES + 64 * shape.stages
    )  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    shape: Shape
    n_slots: int
    partial: LaunchConfig
    combine: LaunchConfig


def _sets(queries: int, rows: int, n_list: int, format: Format) -> int:
    """Say how many queries a block takes, in 16: many share a tile where the tiles are many."""
    if n_list or queries <= 16:
        return 1
    few_tiles = queries <= 64 and rows <= 8192
    return 2 if queries <= 32 or few_tiles or format is Q8_0 else 4


def _fitting(rank: int, rope: int, wanted: int, shared: int, format: Format = F32) -> list[Shape]:
    """Shapes of at most ``wanted`` sets that fit, the best first.

    Queries in registers only where shared memory is short: it is the registers that are scarce.
    """
    steps = (rank + rope) // 16 // _SLICES
    shapes = [
        Shape(sets, held, stages, warps)
        for sets, held_most, stages_most, warps in (
            (4, 1, 2, 8),
            (2, 0, 3, 8 if format is Q8_0 else 16),
            (1, 0, 5, 16),
        )
        if sets <= wanted
        for stages in range(stages_most, 1 if warps == 8 else 2, -1)
        for held in range(held_most + 1)
    ]
    shapes += [Shape(2, 0, 2, 8)] if wanted > 1 else []
    shapes += [Shape(1, held, 2, 8) for held in range(steps + 1)]
    return [s for s in shapes if shared_bytes(rank, rope, s) <= shared]


@functools.lru_cache(maxsize=512)
def _plan(
    n: int, heads: int, rank: int, rope: int, rows: int, n_list: int, n_sms: int, shared: int,
    format: Format, early: bool,
) -> _Plan:  # fmt: skip
    queries = heads if n_list else n * heads
    fitting = _fitting(rank, rope, _sets(queries, rows, n_list, format), shared, format)
    if not fitting:
        raise FormatUnsupported(
            f"latent attend: rows of {rank} + {rope} do not fit in {shared} bytes of shared memory",
            op="latent attend", head_dim=rank, nearest=["exact"],
        )  # fmt: skip
    shape = fitting[0]
    blocks = max(1, -(-queries // (16 * shape.sets))) * (n if n_list else 1)
    slots = n_slots(rows, n_list)
    shares = max(1, min(slots, n_sms // blocks))
    return _Plan(
        shape,
        slots,
        LaunchConfig((blocks, shares, 1), 32 * shape.warps, shared_bytes(rank, rope, shape)),
        LaunchConfig((heads, max(1, n), rank // 128), 256, programmatic=early),
    )


def _kernels(
    device: Device, format: Format, rank: int, rope: int, shape: Shape
) -> tuple[Kernel, Kernel]:
    key = ("latent mma", format.constant, rank, rope, shape)
    found: tuple[Kernel, Kernel] | None = device.memo.get(key)
    if found is None:
        instance = {
            "format": format.constant, "rank": rank, "rope": rope, "sets": shape.sets,
            "held": shape.held, "stages": shape.stages, "warps": shape.warps,
        }  # fmt: skip
        partial, combine = registry.kernels(
            device, [("latent_mma", instance), ("latent_mma_combine", {"rank": rank})]
        )
        found = device.memo[key] = (partial, combine)
    return found
