"""Rows and queries of latent attention (``cuda_src/latent/append.cu``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import FormatUnsupported
from ..formats import BF16, F32, Q8_0, Format
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .latent_refusal import refused
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Buffer, Device, Stream

__all__ = ["FORMATS", "append", "check_format", "prepare", "project", "rotate", "row_bytes"]

FORMATS = (F32, BF16, Q8_0)
"""Formats of latent rows."""

_THREADS = 128
_OUTPUTS = 16

registry.register(
    KernelSpec(
        name="latent_append",
        source="latent/append.cu",
        entry="latent_append<{format}>",
        instances=tuple({"format": f.constant} for f in FORMATS),
        oracle="memra_lowlevel.reference.latent:latent_rows",
        tolerance=Tolerance(
            "absolute", 4e-6,
            "an f32 sum of squares over up to 1024 elements, a root and three products per element "
            "of magnitude up to about 10",
        ),
        edges=(
            "one row", "many rows", "odd widths", "no normalisation", "no rotation",
            "past the table of angles", "no room", "row formats",
        ),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="latent_rotate",
        source="latent/append.cu",
        entry="latent_rotate",
        oracle="memra_lowlevel.reference.latent:rotate",
        tolerance=Tolerance("absolute", 2e-6, "two products and a sum per element"),
        edges=("no rotation", "counted", "past the table of angles"),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="latent_project",
        source="latent/append.cu",
        entry="latent_project<{rows}>",
        instances=({"rows": 1}, {"rows": 4}),
        oracle="memra_lowlevel.reference.latent:expand_heads",
        tolerance=Tolerance("relative", 3e-6, "f32 sums over up to 1024 products, in 8 parts"),
        edges=("widths that are no multiple of 4", "one row", "rows alone and together"),
        hot=True,
        same_bits=True,
    ),
)  # fmt: skip


def check_format(format: Format, width: int, op: str = "LatentKvLayer") -> None:
    """Refuse by name a format that rows of this width cannot take."""
    names = [f.name for f in FORMATS]
    if format not in FORMATS:
        raise FormatUnsupported(
            f"{op}: latent rows cannot be {format}; they are {', '.join(names)}",
            op=op, k_format=format.name, nearest=names,
        )  # fmt: skip
    if format is not F32 and width % 32:
        raise FormatUnsupported(
            f"{op}: rows of {width} elements are no whole blocks of 32 in {format}; use f32",
            op=op, k_format=format.name, head_dim=width, nearest=["f32"],
        )  # fmt: skip


def row_bytes(format: Format, width: int) -> int:
    """Bytes of a row; unlike other planes an f32 row may have any width."""
    return 4 * width if format is F32 else format.row_bytes(width)


def prepare(device: Device, format: Format = F32) -> None:
    """Load the kernels, so that later calls may be captured."""
    registry.kernels(
        device,
        [
            ("latent_append", {"format": format.constant}), ("latent_rotate", {}),
            ("latent_project", {"rows": 1}), ("latent_project", {"rows": 4}),
        ],
    )  # fmt: skip


def append(
    stream: Stream,
    raw: Buffer,
    plane: Buffer,
    len_d: Buffer,
    *,
    capacity: int,
    format: Format = F32,
    weight: Buffer | None = None,
    eps: float = 1e-6,
    angles: Buffer | None = None,
    kv_rank: int | None = None,
) -> None:
    """Write n rows behind the length, normalised and rotated; the length does not move.

    Parameters
    ----------
    stream : Stream
    raw : Buffer
        f32 ``[n, width]``.
    plane : Buffer
        u8, ``capacity`` rows of the format; row r of n goes to row ``len + r``.
    len_d : Buffer
        i32[1].
    weight : Buffer, optional
        f32 ``[kv_rank]``: the first ``kv_rank`` elements are RMS normalised. None: as they are.
    angles : Buffer, optional
        f32 ``[n_positions, width - kv_rank]``, (cos, sin) per pair: the rest is rotated to
        position ``len + r``. None: as it is.
    kv_rank : int, optional
        Default: the size of ``weight``, else ``width``.

    Raises
    ------
    ArgumentError, FormatUnsupported
        Nothing was launched.
    """
    if len(raw.shape) != 2 or raw.shape[1] < 1:
        raise refused("latent_append", "raw", "f32 [n, width]", str(raw.shape))
    n, width = raw.shape
    check_format(format, width, "latent_append")
    rank = kv_rank if kv_rank is not None else weight.size if weight is not None else width
    if not 1 <= rank <= width:
        raise refused("latent_append", "kv_rank", f"1 to {width}", str(rank))
    if weight is not None and weight.size != rank:
        raise refused("latent_append", "weight", f"f32[{rank}]", str(weight.shape))
    positions = 0
    if angles is not None and rank < width:
        positions = _positions("latent_append", angles, width - rank)
    if plane.n_bytes < capacity * row_bytes(format, width):
        raise refused(
            "latent_append", "plane",
            f"at least {capacity * row_bytes(format, width)} bytes ({capacity} rows)",
            f"{plane.n_bytes}",
        )  # fmt: skip
    if n == 0:
        return
    launch(
        stream, LaunchConfig(n, _THREADS, 4 * (width + width % 2)),
        _kernel(stream.device, "latent_append", format=format.constant),
        raw, weight, angles if positions else None, plane, width, rank, positions, eps, capacity,
        len_d,
    )  # fmt: skip


def rotate(
    stream: Stream,
    q: Buffer,
    out: Buffer,
    len_d: Buffer,
    *,
    d_rope: int,
    angles: Buffer | None = None,
    counted: bool = False,
) -> None:
    """Rotate the last ``d_rope`` elements of queries into the last ones of absorbed queries.

    Parameters
    ----------
    stream : Stream
    q, out : Buffer
        f32 ``[n, heads, d_q]`` and ``[n, heads, width]``; the rest of ``out`` is left alone.
    len_d : Buffer
        i32[1]; row r stands at ``len + r``.
    angles : Buffer, optional
        As in :func:`append`.
    counted : bool
        ``len_d`` already counts the n rows.
    """
    if len(q.shape) != 3 or len(out.shape) != 3 or q.shape[:2] != out.shape[:2]:
        raise refused("latent_rotate", "q", f"f32 [n, heads, d_q] beside {out.shape}", str(q.shape))
    n, heads, d_q = q.shape
    width = out.shape[2]
    if d_rope % 2 or not 0 <= d_rope <= min(d_q, width):
        raise refused("latent_rotate", "d_rope", f"even, at most {min(d_q, width)}", str(d_rope))
    positions = _positions("latent_rotate", angles, d_rope) if angles is not None and d_rope else 0
    if n == 0 or d_rope == 0:
        return
    launch(
        stream, LaunchConfig((-(-heads * d_rope // 2 // _THREADS), n, 1), _THREADS),
        _kernel(stream.device, "latent_rotate"),
        q, angles, out, heads, d_q, width, d_rope, positions, n if counted else 0, len_d,
    )  # fmt: skip


def project(stream: Stream, x: Buffer, weight: Buffer, y: Buffer) -> None:
    """Apply a matrix per head: queries into the latent space, or latent results out of it.

    Parameters
    ----------
    stream : Stream
    x : Buffer
        f32 ``[n, heads, at least n_in]``; the first ``n_in`` elements of each head are read.
    weight : Buffer
        f32 ``[heads, n_out, n_in]``.
    y : Buffer
        f32 ``[n, heads, at least n_out]``; the first ``n_out`` are written, the rest left alone.
    """
    if len(x.shape) != 3 or len(weight.shape) != 3 or len(y.shape) != 3:
        raise refused("latent_project", "x, weight, y", "three axes each", str(weight.shape))
    n, heads, x_stride = x.shape
    _, n_out, n_in = weight.shape
    if weight.shape[0] != heads or y.shape[:2] != (n, heads):
        raise refused(
            "latent_project", "weight", f"f32 [{heads}, n_out, n_in], and y alike",
            f"{weight.shape}, y {y.shape}",
        )  # fmt: skip
    if n_in > x_stride or n_out > y.shape[2] or (n_in % 4 == 0 and weight.ptr % 16):
        raise refused(
            "latent_project", "weight", f"at most [{y.shape[2]}, {x_stride}], 16-byte aligned",
            str(weight.shape),
        )  # fmt: skip
    if n == 0:
        return
    rows = 1 if n == 1 else 4
    launch(
        stream, LaunchConfig((-(-n_out // _OUTPUTS), heads, -(-n // rows)), _THREADS),
        _kernel(stream.device, "latent_project", rows=rows),
        x, weight, y, n, n_in, n_out, x_stride, y.shape[2],
    )  # fmt: skip


def _positions(kernel: str, angles: Buffer, d_rope: int) -> int:
    if d_rope % 2:
        raise refused(kernel, "d_rope", "even: it is rotated in pairs", str(d_rope))
    if len(angles.shape) != 2 or angles.shape[1] != d_rope:
        raise refused(kernel, "angles", f"f32 [n_positions, {d_rope}]", str(angles.shape))
    return angles.shape[0]


def _kernel(device: Device, name: str, **template: object) -> Kernel:
    key = (name, *template.values())
    found: Kernel | None = device.memo.get(key)
    if found is None:
        found = device.memo[key] = registry.kernel(device, name, **template)
    return found
