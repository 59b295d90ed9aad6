"""Moving rows to the front of their planes, in place (``cuda_src/kv/move.cu``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = ["move_rows", "prepare"]

_THREADS = 256

registry.register(
    KernelSpec(
        name="move_rows",
        source="kv/move.cu",
        entry="move_rows",
        oracle="memra_lowlevel.reference.kv:move_rows",
        tolerance=Tolerance("bitwise", 0.0, "copies bytes"),
        edges=("no overlap", "overlap", "shift of one row", "rows of 102 bytes", "no rows"),
        same_bits=True,
    )
)


def prepare(device: Device) -> None:
    """Load the kernel."""
    registry.kernel(device, "move_rows")


def move_rows(
    stream: Stream,
    k_plane: Buffer,
    v_plane: Buffer,
    k_row_bytes: int,
    v_row_bytes: int,
    src_row: int,
    n_rows: int,
) -> None:
    """Move rows ``[src_row, src_row + n_rows)`` of both planes to row 0, in one launch.

    Source and destination may overlap; nothing else is written.

    Parameters
    ----------
    stream : Stream
    k_plane, v_plane : Buffer
        u8.
    k_row_bytes, v_row_bytes : int
    src_row, n_rows : int

    Raises
    ------
    ArgumentError
        The rows are not all inside the planes; nothing moved.
    """
    for name, plane, row_bytes in (("k", k_plane, k_row_bytes), ("v", v_plane, v_row_bytes)):
        need = (src_row + n_rows) * row_bytes
        if src_row < 0 or n_rows < 0 or plane.n_bytes < need or plane.ptr % 16 or row_bytes % 2:
            raise ArgumentError(
                f"move_rows: rows {src_row} to {src_row + n_rows} of {row_bytes} bytes are not "
                f"inside the {name} plane of {plane.n_bytes} bytes (or it is not 16-byte aligned)",
                kernel="move_rows",
                name=f"{name}_plane",
                expected=f"at least {need} bytes",
                got=str(plane.n_bytes),
            )
    if src_row == 0 or n_rows == 0:
        return
    widest = min(src_row, n_rows) * max(k_row_bytes, v_row_bytes)
    blocks = max(1, min(-(-widest // (16 * _THREADS)), 4 * stream.device.limits.n_sms))
    launch(
        stream, LaunchConfig((blocks, 2, 1), (_THREADS, 1, 1)),
        registry.kernel(stream.device, "move_rows"),
        k_plane, src_row * k_row_bytes, n_rows * k_row_bytes,
        v_plane, src_row * v_row_bytes, n_rows * v_row_bytes,
    )  # fmt: skip
