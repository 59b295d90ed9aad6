"""Appending quantised rows of K and V to their planes (``cuda_src/kv/append.cu``)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import expect
from ..errors import ArgumentError, CapacityExceeded
from ..formats import BLOCK, Format
from ..runtime.launch import LaunchConfig, launch
from ..runtime.memory import Buffer
from ..runtime.stream import expect_stream
from . import registry
from .early import starts_early
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Device, Stream

__all__ = [
    "MAX_ROWS", "append", "check_finite", "check_planes", "fault_buffer", "prepare",
    "raise_if_faulty",
]  # fmt: skip

MAX_ROWS = 65_535
"""Rows of one launch: the extent of a grid."""

_THREADS = 128
_WARP = 32
_MAX_GRID_Y = 65535
_RUN = 16  # blocks of a row that a warp takes
_FEW_ROWS = 1024  # up to which eight threads a block end sooner than two
_EIGHTHS = 8
_I32_MAX = 2**31 - 1

registry.register(
    *(
        KernelSpec(
            name=name,
            source="kv/append.cu",
            entry=f"{name}<{{k_format}}, {{v_format}}>",
            instances=(
                {"k_format": "Q8_0", "v_format": "Q5_1"},
                {"k_format": "Q8_0", "v_format": "Q4_0"},
                {"k_format": "E4M3", "v_format": "E4M3"},
                {"k_format": "F16", "v_format": "F16"},
            ),
            oracle="memra_lowlevel.reference.kv:append",
            tolerance=Tolerance("bitwise", 0.0, "rounding is pinned to ggml's reference"),
            edges=(
                "one row", "many rows", "K and V of different widths", "96 and 192 elements",
                "ties", "zeros", "subnormal scales", "non-finite elements", "no room", "base",
                "table of sequences",
            ),
            hot=True,
            same_bits=True,
            pdl="waits",
        )
        for name in ("append_kv", "append_few")
    )
)  # fmt: skip


def prepare(device: Device, k_format: Format, v_format: Format) -> None:
    """Compile and load the kernels now, not at their first launch."""
    _kernels(device, k_format, v_format)


def append(
    stream: Stream,
    k: Buffer,
    v: Buffer,
    k_plane: Buffer | None,
    v_plane: Buffer | None,
    len_d: Buffer | None,
    *,
    k_format: Format,
    v_format: Format,
    rows: int,
    base_d: Buffer | None = None,
    table: Buffer | None = None,
    fault: Buffer | None = None,
    programmatic: bool = False,
) -> None:
    """Write n rows of K and V behind the length; the length itself does not move.

    Parameters
    ----------
    stream : Stream
    k, v : Buffer
        f32 ``[n, kv_dim_k]`` and ``[n, kv_dim_v]``; widths are multiples of 32.
    k_plane, v_plane : Buffer
        u8, at least ``rows`` rows of the format. Row r of n goes to row ``len + r - base``. None
        with a table.
    len_d : Buffer
        i32[1]; None with a table.
    k_format, v_format : Format
    rows : int
        Rows that the planes hold; a row with no room is dropped (and noted in ``fault``).
    base_d : Buffer, optional
        i32[1]: absolute row that row 0 of a ring holds.
    table : Buffer, optional
        u64 ``[n, 5]``: planes and counters of each row's sequence (K, V, len, base or 0, offset);
        ``rows`` holds for all. What it points to must be kept alive by the caller.
    fault : Buffer, optional
        i32[2] of :func:`fault_buffer`; keeps the first block that does not read back finite.
    programmatic : bool
        Start while the predecessor, a kernel of the stream, still runs, on GPUs that can; see
        :mod:`~memra_lowlevel.kernels.model`.

    Raises
    ------
    ArgumentError
        A shape does not fit; nothing was launched.
    """
    expect_stream("append: stream", stream)
    rows = check_planes(k, v, k_plane, v_plane, k_format, v_format, rows)
    kernels = _kernels(stream.device, k_format, v_format)
    n, width_k, width_v = _widths(k, v)
    if table is None:
        if k_plane is None or v_plane is None or len_d is None:
            raise _refused("planes and len_d", "given unless there is a table", "None")
        for name, plane, fmt, width in (
            ("k_plane", k_plane, k_format, width_k),
            ("v_plane", v_plane, v_format, width_v),
        ):
            need = rows * fmt.row_bytes(width)
            if plane.n_bytes < need:
                raise _refused(name, f"at least {need} bytes ({rows} rows)", f"{plane.n_bytes}")
    elif expect.kind("append: table", table, Buffer, "a Buffer or None").n_bytes < n * 40:
        raise _refused("table", f"u64[{n}, 5]", f"{table.n_bytes} bytes")
    _launch(
        stream, kernels, k, v, k_plane, v_plane, rows, len_d, base_d, table, fault,
        programmatic=programmatic,
    )  # fmt: skip


def check_planes(
    k: Buffer,
    v: Buffer,
    k_plane: Buffer | None,
    v_plane: Buffer | None,
    k_format: Format,
    v_format: Format,
    rows: int,
) -> int:
    """Refuse what are no rows, no planes or no formats; give ``rows``, of which there is one."""
    for name, buffer in (("k", k), ("v", v), ("k_plane", k_plane), ("v_plane", v_plane)):
        if type(buffer) is not Buffer and (buffer is not None or name in ("k", "v")):
            expect.kind(f"append: {name}", buffer, Buffer, "a Buffer")
    for name, fmt in (("k_format", k_format), ("v_format", v_format)):
        if type(fmt) is not Format:
            expect.kind(f"append: {name}", fmt, Format, "one of memra_lowlevel.formats")
    return expect.integer("append: rows", rows, 1, _I32_MAX)


def check_finite(
    stream: Stream, k: Buffer, v: Buffer, *, k_format: Format, v_format: Format, fault: Buffer
) -> None:
    """Examine rows as :func:`append` would write them, writing nothing but ``fault``."""
    kernels = _kernels(stream.device, k_format, v_format)
    _widths(k, v)
    _launch(stream, kernels, k, v, None, None, 1, None, None, None, fault)


def fault_buffer(device: Device, stream: Stream) -> Buffer:
    """Return an i32[2] that says "no fault"."""
    return device.zeros(2, np.int32, stream, "append fault")


def raise_if_faulty(
    stream: Stream, fault: Buffer, k_width: int, v_width: int, *, head_dim: int = 0, name: str = ""
) -> None:
    """Read ``fault`` (synchronising the stream) and raise what it says.

    Parameters
    ----------
    k_width, v_width : int
        Elements of a K and of a V row of the append.
    head_dim : int
        Elements of a head, for the message.
    name : str
        Of the plane, for the message.

    Raises
    ------
    ArgumentError
        A row holds something that does not read back finite; names row, side, elements, head.
    CapacityExceeded
        A row found no room.
    """
    stream.sync()
    code, dropped = (int(i) for i in fault.to_numpy(stream))
    what = f"append to {name}" if name else "append"
    if dropped:
        raise CapacityExceeded(
            f"{what}: up to {dropped} rows found no room in the plane and were dropped; check the "
            "room before the launch (GraphExec.launch does)"
        )
    if code:
        blocks = max(k_width, v_width) // BLOCK
        row_side, block = divmod(0x7FFFFFFF - code, blocks)
        row, side = divmod(row_side, 2)
        head = f", head {block * BLOCK // head_dim}" if head_dim else ""
        where = (
            f"row {row} of {'v' if side else 'k'}, elements {block * BLOCK} to "
            f"{block * BLOCK + BLOCK - 1}{head}"
        )
        raise ArgumentError(
            f"{what}: {where} are not finite, or too large for the format. Find what made them; "
            "without the check only this block is poisoned",
            kernel="append_kv",
            index=1 if side else 0,
            name="v" if side else "k",
            expected="finite values",
            got=where,
        )


def _launch(
    stream: Stream,
    kernels: _Kernels,
    k: Buffer,
    v: Buffer,
    k_plane: Buffer | None,
    v_plane: Buffer | None,
    rows: int,
    len_d: Buffer | None,
    base_d: Buffer | None,
    table: Buffer | None,
    fault: Buffer | None,
    *,
    programmatic: bool = False,
) -> None:
    n, width_k, width_v = k.shape[0], k.shape[1], v.shape[1]
    if n == 0:
        return
    early = starts_early(stream.device, programmatic)
    config, group = _plan(n, max(width_k, width_v), early)
    shape = (n, group) if group else ()
    launch(
        stream, config, kernels.many if group else kernels.few,
        k, v, k_plane, v_plane, *shape, width_k, width_v, rows, len_d, base_d, table, fault,
    )  # fmt: skip


class _Kernels(NamedTuple):
    few: Kernel
    many: Kernel


@functools.lru_cache(maxsize=256)
def _plan(n: int, width: int, early: bool) -> tuple[LaunchConfig, int]:
    """Choose the grid, and the rows that a warp takes: 0 for the kernel of few rows.

    For many rows it is as few as a grid can have blocks for.
    """
    if n <= _FEW_ROWS:
        most = _THREADS if n <= 128 else 2 * _THREADS
        threads = min(most, -(-width // BLOCK * _EIGHTHS // _WARP) * _WARP)
        grid = (-(-width // BLOCK * _EIGHTHS // threads), n, 2)
        return LaunchConfig(grid, (threads, 1, 1), programmatic=early), 0
    runs = -(-width // (BLOCK * _RUN))
    warps = min(_THREADS // _WARP, runs)
    group = -(-n // _MAX_GRID_Y)
    config = LaunchConfig(
        (-(-runs // warps), -(-n // group), 2), (warps * _WARP, 1, 1), programmatic=early
    )
    return config, group


def _widths(k: Buffer, v: Buffer) -> tuple[int, int, int]:
    for name, rows in (("k", k), ("v", v)):
        if len(rows.shape) != 2 or rows.shape[1] == 0 or rows.shape[1] % BLOCK or rows.ptr % 16:
            raise _refused(name, f"f32 [n, multiple of {BLOCK}], 16-byte aligned", str(rows.shape))
    n = k.shape[0]
    if v.shape[0] != n or n > MAX_ROWS:
        raise _refused("v", f"as many rows as k, at most {MAX_ROWS}", f"{v.shape[0]} and {n}")
    return n, k.shape[1], v.shape[1]


def _kernels(device: Device, k_format: Format, v_format: Format) -> _Kernels:
    key = ("append_kv", k_format.constant, v_format.constant)
    found: _Kernels | None = device.memo.get(key)
    if found is None:
        instance = {"k_format": k_format.constant, "v_format": v_format.constant}
        names = ("append_few", "append_kv")
        made = registry.kernels(device, [(name, instance) for name in names])
        found = device.memo[key] = _Kernels(*made)
    return found


def _refused(name: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"append: {name} must be {expected}, got {got}",
        kernel="append_kv", name=name, expected=expected, got=got,
    )  # fmt: skip
