"""Appending rows whose heads are normalised and rotated first (``cuda_src/kv/append_heads.cu``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import expect
from ..errors import ArgumentError
from ..formats import BLOCK, Format
from ..runtime.launch import LaunchConfig, launch
from ..runtime.memory import Buffer
from ..runtime.stream import expect_stream
from . import registry
from .early import starts_early
from .kv_append import MAX_ROWS, check_planes
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Device, Stream

__all__ = ["HeadTurn", "append", "prepare"]

_WARPS, _WARP = 4, 32
_MAX_DIM = 512
_MOST_HEADS = 2**31 - 1

registry.register(
    KernelSpec(
        name="append_heads",
        source="kv/append_heads.cu",
        entry="append_heads<{k_format}, {v_format}>",
        instances=({"k_format": "Q8_0", "v_format": "Q5_1"},),
        oracle="memra_lowlevel.reference.kv:turn_heads",
        tolerance=Tolerance("relative", 1e-6, "f32 sum of squares in a fixed order; a row of f32"),
        edges=(
            "one row", "many rows", "no norm", "no rotation", "part of a head rotated",
            "neighbouring channels and halves", "queries beside K", "V of another width",
            "past the table", "no room", "base", "every format",
        ),
        hot=True,
        same_bits=True,
        pdl="waits",
    )
)  # fmt: skip


@dataclass(frozen=True)
class HeadTurn:
    """What an append does to the heads of K, and of queries beside them, before it stores them.

    Attributes
    ----------
    angles : Buffer or None
        f32 ``[n_positions, n_rot / 2, 2]`` of (cos, sin) as
        ``memra_lowlevel.reference.model.rope_angles`` makes them in float64. The row behind
        ``len_d`` stands at position ``len``, the next ones follow. The first ``n_rot`` channels of
        a head are rotated; past the table they become NaN. None: nothing is rotated.
    halves : bool
        Pairs are channels j and ``j + n_rot / 2`` (Qwen, weights of Hugging Face) instead of
        neighbours 2 j and 2 j + 1 (Llama weights in GGUF).
    k_norm, q_norm : Buffer or None
        f32 ``[head_dim]``: weights of an RMS norm of each head, before the rotation.
    eps : float
        Of the norms.
    """

    angles: Buffer | None = None
    halves: bool = False
    k_norm: Buffer | None = None
    q_norm: Buffer | None = None
    eps: float = 1e-6


def prepare(device: Device, k_format: Format, v_format: Format) -> None:
    """Compile and load the kernel now, not at its first launch."""
    _kernel(device, k_format, v_format)


def append(
    stream: Stream,
    k: Buffer,
    v: Buffer,
    k_plane: Buffer,
    v_plane: Buffer,
    len_d: Buffer,
    turn: HeadTurn,
    *,
    k_format: Format,
    v_format: Format,
    rows: int,
    n_kv_heads: int,
    q: Buffer | None = None,
    base_d: Buffer | None = None,
    programmatic: bool = False,
) -> None:
    """Write n rows of turned K, and V, behind the length, in one launch; the length stays.

    The bytes are those of :func:`.kv_append.append` over the turned rows, and each row gets those
    that it would get alone.

    Parameters
    ----------
    stream : Stream
    k, v : Buffer
        f32 ``[n, n_kv_heads * head_dim]`` and ``[n, n_kv_heads * head_dim_v]``; head sizes are
        multiples of 32 up to 512.
    k_plane, v_plane, len_d, k_format, v_format, rows, base_d
        As for :func:`.kv_append.append`.
    turn : HeadTurn
    n_kv_heads : int
    q : Buffer, optional
        f32 ``[n, n_heads, head_dim]``: normalised and rotated in place, for the attention that
        follows.
    programmatic : bool
        Start while the predecessor, a kernel of the stream, still runs, on GPUs that can.

    Raises
    ------
    ArgumentError
        A shape does not fit; nothing was launched.
    """
    expect_stream("append: stream", stream)
    rows = check_planes(k, v, k_plane, v_plane, k_format, v_format, rows)
    n_kv_heads = expect.integer("append: n_kv_heads", n_kv_heads, 1, _MOST_HEADS)
    expect.kind("append: turn", turn, HeadTurn, "a HeadTurn")
    for name, plane in (("k_plane", k_plane), ("v_plane", v_plane)):
        expect.kind(f"append: {name}", plane, Buffer, "a Buffer")
    for name, given in (
        ("q", q), ("k_norm", turn.k_norm), ("q_norm", turn.q_norm), ("angles", turn.angles),
    ):  # fmt: skip
        if type(given) is not Buffer and given is not None:
            expect.kind(f"append: {name}", given, Buffer, "a Buffer or None")
    kernel = _kernel(stream.device, k_format, v_format)
    n = k.shape[0] if len(k.shape) == 2 else -1
    dims = []
    for name, buffer in (("k", k), ("v", v)):
        dim, rest = divmod(buffer.shape[-1] if len(buffer.shape) == 2 else 0, n_kv_heads)
        fits = not rest and dim % BLOCK == 0 and 0 < dim <= _MAX_DIM and buffer.ptr % 16 == 0
        if not fits or buffer.shape[0] != n:
            expected = (
                f"f32 [n, {n_kv_heads} heads of a multiple of {BLOCK} up to {_MAX_DIM}], 16-byte "
                "aligned"
            )
            raise _refused(name, expected, str(list(buffer.shape)))
        dims.append(dim)
    if n > MAX_ROWS:
        raise _refused("k", f"at most {MAX_ROWS} rows", str(n))
    head_dim, head_dim_v = dims
    for name, plane, fmt, dim in (
        ("k_plane", k_plane, k_format, head_dim), ("v_plane", v_plane, v_format, head_dim_v),
    ):  # fmt: skip
        need = rows * fmt.row_bytes(n_kv_heads * dim)
        if plane.n_bytes < need:
            raise _refused(name, f"at least {need} bytes ({rows} rows)", f"{plane.n_bytes}")
    n_heads = 0
    if q is not None:
        if len(q.shape) != 3 or q.shape[0] != n or q.shape[2] != head_dim or q.ptr % 16:
            expected = f"f32 [{n}, n_heads, {head_dim}], 16-byte aligned"
            raise _refused("q", expected, str(list(q.shape)))
        n_heads = q.shape[1]
    for name, weight in (("k_norm", turn.k_norm), ("q_norm", turn.q_norm)):
        if weight is not None and (weight.size != head_dim or weight.ptr % 16):
            expected = f"f32 [{head_dim}], 16-byte aligned"
            raise _refused(name, expected, str(list(weight.shape)))
    n_positions, n_rot = _table(turn.angles, head_dim)
    if n == 0:
        return
    config = LaunchConfig(
        (-(-(n_heads + 2 * n_kv_heads) // _WARPS), n, 1), (_WARPS * _WARP, 1, 1),
        shared_bytes=_WARPS * 4 * head_dim,
        programmatic=starts_early(stream.device, programmatic),
    )  # fmt: skip
    launch(
        stream, config, kernel,
        q, k, v, turn.q_norm, turn.k_norm, turn.angles, k_plane, v_plane, n_heads, n_kv_heads,
        head_dim // BLOCK, head_dim_v // BLOCK, n_rot, n_positions, int(turn.halves), turn.eps,
        rows, len_d, base_d,
    )  # fmt: skip


def _table(angles: Buffer | None, head_dim: int) -> tuple[int, int]:
    """Positions of a table of angles, and channels that it rotates."""
    if angles is None:
        return 0, 0
    shape = angles.shape
    fits = len(shape) == 3 and shape[2] == 2 and 0 < 2 * shape[1] <= head_dim
    if not fits or angles.ptr % 8:
        expected = f"f32 [n_positions, up to {head_dim // 2}, 2] of (cos, sin), 8-byte aligned"
        raise _refused("angles", expected, str(list(shape)))
    return shape[0], 2 * shape[1]


def _kernel(device: Device, k_format: Format, v_format: Format) -> Kernel:
    key = ("append_heads", k_format.constant, v_format.constant)
    found: Kernel | None = device.memo.get(key)
    if found is None:
        found = device.memo[key] = registry.kernel(
            device, "append_heads", k_format=k_format.constant, v_format=v_format.constant
        )
    return found


def _refused(name: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"append: {name} must be {expected}, got {got}",
        kernel="append_heads", name=name, expected=expected, got=got,
    )  # fmt: skip
