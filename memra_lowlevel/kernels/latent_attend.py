"""Latent attention, dense and over lists of rows (``cuda_src/latent/attend.cu``).

Class ``exact``; class ``f16x2`` by name (:mod:`.latent_attend_mma`). Two launches: partial results
per chunk of keys, then their combination. Grids and workspace depend on the capacity of the plane
(or the length of the lists) and on the device only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import FormatUnsupported
from ..formats import F32, Format
from ..runtime.launch import LaunchConfig, launch
from . import latent_attend_mma, latent_rows, registry
from .kv_attend_simt import chunk_of
from .latent_refusal import refused
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Buffer, Device, Stream

__all__ = [
    "CLASSES",
    "LIST_CHUNK",
    "MAX_RANK",
    "MAX_ROPE",
    "Choice",
    "attend",
    "choose",
    "prepare",
    "rows_at_once",
    "workspace_bytes",
]

MAX_RANK = 1024
"""Widest latent part of a row."""

MAX_ROPE = 256
"""Widest positional part of a row."""

LIST_CHUNK = 32
"""Entries of a list that leave one partial result."""

CLASSES = ("exact", "f16x2")
"""Numeric classes, the default first; see the registry."""

_THREADS = 256
_TILE = 16
_SPLITS = 8

_refused = functools.partial(refused, "latent attend")

_TOLERANCE = Tolerance(
    "relative", 1e-5,
    "f32 scores over up to 1280 channels, weights and sums, against float64 over the same rows; "
    "exp2f differs by 2 ulp between devices",
)  # fmt: skip

registry.register(
    KernelSpec(
        name="latent_partial",
        source="latent/attend.cu",
        entry="latent_partial<{format}, {rank}, {rope}, {queries}, {stages}>",
        instances=tuple(
            {"format": f, "rank": 512, "rope": rope, "queries": queries, "stages": 1}
            for f in ("F32", "BF16", "Q8_0") for rope in (0, 64) for queries in (8, 16)
        ),
        oracle="memra_lowlevel.reference.latent:attend",
        tolerance=_TOLERANCE,
        edges=(
            "no key", "one key", "tile and chunk edges", "counted", "odd widths",
            "NaN in a row that is not seen", "poisoned workspace", "list with -1 anywhere",
            "list of rows not seen", "empty list", "row formats",
        ),
        hot=True,
    ),
    KernelSpec(
        name="latent_combine",
        source="latent/attend.cu",
        entry="latent_combine<{rank}>",
        instances=({"rank": 512},),
        oracle="memra_lowlevel.reference.latent:attend_listed",
        tolerance=_TOLERANCE,
        edges=("no chunk", "one chunk", "workspace too small", "log-sum-exp"),
        hot=True,
    ),
)  # fmt: skip


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
    format: Format = F32,
    indices: Buffer | None = None,
    lse: Buffer | None = None,
    counted: bool = False,
    first: int = 0,
    of: int | None = None,
    numeric: str = "exact",
) -> None:
    """Attend n rows of absorbed queries: row r sees the rows below ``len + r + 1``.

    Parameters
    ----------
    stream : Stream
    q, out : Buffer
        f32 ``[n, heads, kv_rank + d_rope]`` and ``[n, heads, kv_rank]``. A query without keys
        gives 0.
    plane : Buffer
        u8, at least ``rows`` rows of the format.
    len_d : Buffer
        i32[1].
    rows : int
        Rows that the plane holds.
    workspace : Buffer
        f32, at least :func:`workspace_bytes`; its content is never read before it is written.
    scale : float
        Factor of the scores: ``(d_nope + d_rope) ** -0.5`` of the heads before absorption.
    indices : Buffer, optional
        i32 ``[n, n_list]``: rows that all heads of a query attend. Entries below 0, and rows that
        the query may not see, are skipped.
    lse : Buffer, optional
        f32 ``[n, heads]``: log of the sum of exp(score); -inf without any.
    counted : bool
        ``len_d`` already counts the rows of the call.
    first, of : int
        The rows are rows ``first`` … of a call of ``of`` rows, which is made in parts.
    numeric : str
        Numeric class.

    Raises
    ------
    FormatUnsupported
        No kernel for this shape or numeric class.
    ArgumentError
        A shape does not fit. Nothing was launched in either case.
    """
    if len(q.shape) != 3 or len(out.shape) != 3 or q.shape[:2] != out.shape[:2]:
        raise _refused("q", f"f32 [n, heads, width] beside out {out.shape}", str(q.shape))
    n, heads, width = q.shape
    rank = out.shape[2]
    choice = choose(stream.device, rank, width - rank, numeric)
    latent_rows.check_format(format, width, "latent attend")
    need = rows * latent_rows.row_bytes(format, width)
    if plane.n_bytes < need or plane.ptr % 16:
        raise _refused("plane", f"at least {need} bytes ({rows} rows), aligned", f"{plane.n_bytes}")
    n_list = 0
    if indices is not None:
        if len(indices.shape) != 2 or indices.shape[0] != n or indices.shape[1] < 1:
            raise _refused("indices", f"i32 [{n}, at least 1]", str(indices.shape))
        n_list = indices.shape[1]
    if lse is not None and lse.size < n * heads:
        raise _refused("lse", f"f32[{n}, {heads}]", str(lse.shape))
    limits = stream.device.limits
    plan = _plan(
        n, heads, rank, width - rank, rows, n_list, limits.n_sms, limits.shared_optin_bytes,
        stream.device.kind,
    )  # fmt: skip
    need = workspace_bytes(n, heads, rank, rows, n_list, numeric)
    if workspace.n_bytes < need:
        raise _refused(
            "workspace", f"at least {need} bytes (workspace_bytes)", f"{workspace.n_bytes}"
        )
    if n == 0:
        return
    behind = ((n if of is None else of) if counted else 0) - first
    if choice.kernel == "mma":
        latent_attend_mma.attend(
            stream, q, plane, out, len_d=len_d, rows=rows, workspace=workspace, scale=scale,
            format=format, indices=indices, lse=lse, behind=behind,
        )  # fmt: skip
        return
    partial, combine = _kernels(stream.device, format, rank, width - rank, plan)
    launch(
        stream, plan.partial, partial,
        q, plane, n, heads, rows, indices, n_list, behind, scale, len_d, workspace, plan.n_slots,
    )  # fmt: skip
    launch(
        stream, plan.combine, combine,
        workspace, out, lse, rows, n_list, behind, len_d, plan.n_slots,
    )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The kernel for a plane, and why it is this one.

    Attributes
    ----------
    kernel : str
        ``"mma"`` (tensor cores, class ``f16x2``) or ``"simt"`` (class ``exact``, every shape).
    reason : str
    """

    kernel: str
    reason: str


def choose(device: Device, kv_rank: int, d_rope: int, numeric: str = "exact") -> Choice:
    """Say which kernel :func:`attend` takes for a numeric class; a class is never changed unasked.

    Raises
    ------
    FormatUnsupported
        No kernel of the class does this shape on this device.
    """
    check_supported(kv_rank, d_rope, numeric)
    refusal = latent_attend_mma.refusal(device, kv_rank, d_rope)
    if numeric == "f16x2":
        if refusal is not None:
            raise FormatUnsupported(
                f"latent attention of class f16x2 does not do {refusal}; numeric='exact' does",
                op="latent attend", head_dim=kv_rank, arch=device.arch, nearest=["exact"],
            )  # fmt: skip
        return Choice("mma", "class f16x2 was asked for")
    if refusal is not None:
        return Choice("simt", f"class exact; class f16x2 does not do {refusal}")
    return Choice("simt", "class exact, the default; numeric='f16x2' asks for tensor cores")


def check_supported(kv_rank: int, d_rope: int, numeric: str = "exact") -> None:
    """Refuse by name what no kernel does."""
    if 1 <= kv_rank <= MAX_RANK and 0 <= d_rope <= MAX_ROPE and numeric in CLASSES:
        return
    raise FormatUnsupported(
        f"no latent attention for kv_rank {kv_rank}, d_rope {d_rope}, numeric class {numeric!r}: "
        f"ranks are 1 to {MAX_RANK}, d_rope 0 to {MAX_ROPE}, classes {', '.join(CLASSES)}",
        op="latent attend",
        head_dim=kv_rank,
        nearest=[f"{min(max(kv_rank, 1), MAX_RANK)} + {min(max(d_rope, 0), MAX_ROPE)}"],
    )


def prepare(
    device: Device, heads: int, kv_rank: int, d_rope: int, *, format: Format = F32,
    max_rows: int = 16, numeric: str = "exact",
) -> None:  # fmt: skip
    """Load what launches of up to ``max_rows`` rows need, so that they may be captured."""
    if choose(device, kv_rank, d_rope, numeric).kernel == "mma":
        latent_attend_mma.prepare(device, heads, kv_rank, d_rope, format=format, max_rows=max_rows)
        return
    limits = device.limits
    for n in (1, max_rows):
        for n_list in (0, 1):
            plan = _plan(
                n, heads, kv_rank, d_rope, 1, n_list, limits.n_sms, limits.shared_optin_bytes,
                device.kind,
            )  # fmt: skip
            _kernels(device, format, kv_rank, d_rope, plan)


def workspace_bytes(
    n: int, heads: int, kv_rank: int, rows: int, n_list: int = 0, numeric: str = "exact"
) -> int:
    """Bytes that :func:`attend` needs for n rows over a plane of ``rows``, or over lists."""
    if numeric == "f16x2":
        return latent_attend_mma.workspace_bytes(n, heads, kv_rank, rows, n_list)
    return 4 * n * heads * _slots(rows, n_list) * (kv_rank + 2)


def rows_at_once(
    heads: int, kv_rank: int, rows: int, n_list: int, max_bytes: int, numeric: str = "exact"
) -> int:
    """Rows of queries whose partial results fit in ``max_bytes``; at least one."""
    return max(1, max_bytes // workspace_bytes(1, heads, kv_rank, rows, n_list, numeric))


def shared_bytes(rank: int, rope: int, queries: int, stages: int) -> int:
    """Dynamic shared memory of ``latent_partial``: LatentShape::FLOATS of the source."""
    padded = -(-(rank + rope) // 4) * 4
    pitch = -(-padded // 32) * 32 + 4
    floats = (stages * _TILE + queries) * pitch + (_SPLITS + 2) * _TILE * queries + 3 * queries
    return 4 * floats


@dataclass(frozen=True)
class _Plan:
    queries: int
    stages: int
    n_slots: int
    partial: LaunchConfig
    combine: LaunchConfig


def _slots(rows: int, n_list: int) -> int:
    return -(-n_list // LIST_CHUNK) if n_list else chunk_of(rows - 1) + 1


@functools.lru_cache(maxsize=512)
def _plan(
    n: int, heads: int, rank: int, rope: int, rows: int, n_list: int, n_sms: int, shared: int,
    kind: str,
) -> _Plan:  # fmt: skip
    per_block = heads if n_list else n * heads
    wanted = 8 if per_block <= 8 else 16 if per_block <= 16 or rank > 512 else 32
    shapes = [(q, s) for q in (32, 16, 8) if q <= wanted for s in (2, 1)]
    fitting = [(q, s) for q, s in shapes if shared_bytes(rank, rope, q, s) + 1024 <= shared]
    if not fitting:
        raise FormatUnsupported(
            f"latent attend: kv_rank {rank} + {rope} needs {shared_bytes(rank, rope, 8, 1)} bytes "
            f"of shared memory, the device has {shared}",
            op="latent attend", head_dim=rank,
        )  # fmt: skip
    queries, stages = fitting[0]
    blocks = max(1, -(-per_block // queries) * (n if n_list else 1))
    slots = _slots(rows, n_list)
    resident = n_sms if kind == "host" else 2 * n_sms
    return _Plan(
        queries,
        stages,
        slots,
        LaunchConfig(
            (min(slots, max(1, -(-resident // blocks))), blocks, 1), _THREADS,
            shared_bytes(rank, rope, queries, stages),
        ),
        LaunchConfig((heads, max(1, n), -(-rank // 128)), _THREADS),
    )  # fmt: skip


def _kernels(
    device: Device, format: Format, rank: int, rope: int, plan: _Plan
) -> tuple[Kernel, Kernel]:
    key = ("latent attend", format.constant, rank, rope, plan.queries, plan.stages)
    found: tuple[Kernel, Kernel] | None = device.memo.get(key)
    if found is None:
        instance = {
            "format": format.constant, "rank": rank, "rope": rope, "queries": plan.queries,
            "stages": plan.stages,
        }  # fmt: skip
        partial, combine = registry.kernels(
            device, [("latent_partial", instance), ("latent_combine", {"rank": rank})]
        )
        found = device.memo[key] = (partial, combine)
    return found
