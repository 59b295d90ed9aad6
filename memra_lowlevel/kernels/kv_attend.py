"""Decode attention over planes of K and V, class ``exact``: the checks, and which kernel does it.

:mod:`.kv_attend_mma` and :mod:`.kv_attend_f16` on tensor cores, :mod:`.kv_attend_simt` for every
format and shape. Lengths are read from device memory; grids and the workspace depend on the
capacity of the plane and on the device only, so that a captured launch serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .. import expect
from ..errors import ArgumentError, ClosedError, FormatUnsupported
from ..formats import Q5_1, Q8_0, Format
from ..runtime.memory import Buffer
from ..runtime.stream import expect_stream
from . import kv_attend_f16, kv_attend_mma, kv_attend_simt
from .kv_attend_call import AttendCall

if TYPE_CHECKING:
    from ..runtime import Device, Stream

__all__ = [
    "HEAD_DIMS",
    "MAX_GROUP",
    "TICKETS",
    "Choice",
    "attend",
    "check_supported",
    "choose",
    "prepare",
    "workspace_bytes",
]

HEAD_DIMS = (64, 96, 128, 256, 512)
"""Head sizes with a kernel; K and V may differ."""

MAX_GROUP = 16
"""Query heads that may share one kv head."""

CLASSES = ("exact",)
"""Numeric classes; see the registry."""

TICKETS = 1024
"""Tickets that are enough for any 16 rows of up to 64 kv heads."""

_KERNELS = ("mma", "f16", "simt")
_NEEDED = ("q", "out", "workspace")
_FLAGS = (bool, bool, bool)
_F32, _U32 = np.dtype(np.float32), np.dtype(np.uint32)
_MOST = 2**31 - 1
_F32_MAX, _LEAST_CAP = float(np.finfo(np.float32).max), 2.0**-149


def attend(
    stream: Stream,
    q: Buffer,
    k_plane: Buffer | None,
    v_plane: Buffer | None,
    out: Buffer,
    *,
    len_d: Buffer | None,
    k_format: Format,
    v_format: Format,
    rows: int,
    n_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    workspace: Buffer,
    tickets: Buffer | None = None,
    base_d: Buffer | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: Buffer | None = None,
    softcap: float | None = None,
    lse: Buffer | None = None,
    counted: bool = False,
    numeric: str = "exact",
    table: Buffer | None = None,
    kernel: str | None = None,
    programmatic: bool = False,
    settled: bool = False,
) -> None:
    """Attend n rows: row r sees the keys below ``len + r + 1``.

    Parameters
    ----------
    stream : Stream
    q, out : Buffer
        f32 ``[n, n_heads, head_dim]`` and ``[n, n_heads, head_dim_v]``. A row without keys gives 0.
    k_plane, v_plane : Buffer
        u8, at least ``rows`` rows. None with a table.
    len_d : Buffer
        i32[1]. None with a table.
    k_format, v_format : Format
    rows : int
        Rows that the planes hold.
    n_kv_heads, head_dim, head_dim_v : int
    workspace : Buffer
        f32, at least :func:`workspace_bytes`; its content is never read before it is written.
    tickets : Buffer, optional
        u32, all zero, and so again after each launch; as exclusive as the workspace. Makes it one
        launch of kernel ``"simt"`` if there are enough (:data:`TICKETS` always are, up to 16 rows)
        and the plane is not so long that many blocks join its chunks faster. The other kernels
        take them too, check them alike, and leave them alone.
    base_d : Buffer, optional
        i32[1]: absolute row that row 0 of a ring holds.
    window : int, optional
        Newest keys that a row sees; None: all.
    scale : float, optional
        Default ``head_dim ** -0.5``.
    sinks : Buffer, optional
        f32 ``[n_heads]``: a logit per head that takes weight and has no value.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    lse : Buffer, optional
        f32 ``[n, n_heads]``: log of the sum of exp(score), a sink included; -inf without any.
    counted : bool
        ``len_d`` already counts the n rows: row r sees ``len - n + r + 1``.
    numeric : str
        Numeric class.
    table : Buffer, optional
        u64 ``[n, 5]``: planes and counters of each row's sequence, as in ``kv_append.append``.
    kernel : str, optional
        ``"mma"`` or ``"f16"`` (tensor cores), or ``"simt"``; default: see :func:`choose`. Not bit
        for bit the same: keep to one kernel over a plane.
    programmatic : bool
        Start while the predecessor, a kernel of the stream, still runs, where kernel and device
        can; see :mod:`~memra_lowlevel.kernels.model`.
    settled : bool
        The counters, and the rows below the n, were written before the last launch of the stream
        that was not ``programmatic``, so a launch that starts early may read them before its
        predecessor has ended. The n rows themselves may be what the predecessor appends. Nothing
        checks the promise; with a table it is not made use of.

    Raises
    ------
    FormatUnsupported
        No kernel for this head size, group or numeric class; names the nearest.
    ArgumentError
        A buffer of another shape, dtype, device or alignment, or a number that is none.
    ClosedError
        A buffer was closed. Nothing was launched in any case.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    expect_stream("attend: stream", stream)
    _check_buffers(
        stream, ("q", q, None), ("out", out, _F32), ("workspace", workspace, None),
        ("sinks", sinks, _F32), ("lse", lse, _F32), ("table", table, None),
        ("tickets", tickets, _U32), ("k_plane", k_plane, None), ("v_plane", v_plane, None),
    )  # fmt: skip
    expect.kind("attend: numeric", numeric, str, "a numeric class")
    _check_planes("attend", k_format, v_format, head_dim, head_dim_v, n_kv_heads)
    rows = expect.integer("attend: rows", rows, 1, _MOST)
    choice = choose(
        stream.device, k_format, v_format, head_dim, head_dim_v,
        n_kv_heads=n_kv_heads, rows=rows, kernel=kernel,
    )  # fmt: skip
    if (type(counted), type(programmatic), type(settled)) != _FLAGS:
        _check_flags(counted=counted, programmatic=programmatic, settled=settled)
    window = _window(window)
    scale = _scalar("scale", head_dim**-0.5 if scale is None else scale)
    softcap = 0.0 if softcap is None else _softcap(softcap)
    if len(q.shape) != 3 or q.shape[2] != head_dim or q.shape[1] % n_kv_heads or q.ptr % 16:
        raise _refused("q", f"f32 [n, multiple of {n_kv_heads}, {head_dim}]", str(q.shape))
    n_rows, n_heads = q.shape[0], q.shape[1]
    group = n_heads // n_kv_heads
    if out.shape != (n_rows, n_heads, head_dim_v):
        raise _refused("out", f"f32 {(n_rows, n_heads, head_dim_v)}", str(out.shape))
    for name, written in (("out", out), ("workspace", workspace)):
        if written.ptr % 16:  # 16 bytes at a time
            raise _refused(name, "16-byte aligned", hex(written.ptr))
    check_supported(
        stream.device, k_format, v_format, head_dim, head_dim_v, group=group, numeric=numeric
    )
    plan = kv_attend_simt.plan(
        n_rows, n_kv_heads, group, head_dim, head_dim_v, rows, window, base_d is not None,
        table is not None, stream.device.limits.n_sms, stream.device.kind,
    )  # fmt: skip
    if table is None:
        if k_plane is None or v_plane is None or len_d is None:
            raise _refused("planes and len_d", "given unless there is a table", "None")
        for name, plane, fmt, d in (
            ("k_plane", k_plane, k_format, head_dim),
            ("v_plane", v_plane, v_format, head_dim_v),
        ):
            need = rows * fmt.row_bytes(n_kv_heads * d)
            if plane.n_bytes < need:
                raise _refused(name, f"at least {need} bytes ({rows} rows)", f"{plane.n_bytes}")
    elif table.n_bytes < n_rows * 40:
        raise _refused("table", f"u64[{n_rows}, 5]", f"{table.n_bytes} bytes")
    need = plan.workspace_bytes
    if choice.kernel != "simt":
        if choice.kernel == "f16":
            parts = kv_attend_f16.n_parts(k_format, v_format, head_dim, n_kv_heads)
            shares = kv_attend_f16.shares(k_format, v_format)
        else:
            parts, shares = kv_attend_mma.n_parts(head_dim, n_kv_heads), 1
        slots = kv_attend_mma.n_slots(rows, parts) * shares
        need = kv_attend_mma.workspace_bytes(n_rows, n_heads, head_dim, slots)
    if workspace.n_bytes < need:
        raise _refused(
            "workspace", f"at least {need} bytes (workspace_bytes)", f"{workspace.n_bytes}"
        )
    if sinks is not None and sinks.n_bytes < 4 * n_heads:
        raise _refused("sinks", f"f32[{n_heads}]", str(sinks.shape))
    if lse is not None and lse.n_bytes < 4 * n_rows * n_heads:
        raise _refused("lse", f"f32[{n_rows}, {n_heads}]", str(lse.shape))
    if n_rows == 0:
        return
    call = AttendCall(
        q=q, k_plane=k_plane, v_plane=v_plane, out=out, len_d=len_d, k_format=k_format,
        v_format=v_format, rows=rows, n_kv_heads=n_kv_heads, workspace=workspace,
        tickets=tickets, base_d=base_d, window=window, scale=scale, sinks=sinks,
        softcap=softcap, lse=lse, counted=n_rows if counted else 0, table=table,
        programmatic=programmatic, settled=settled,
    )  # fmt: skip
    try:
        if choice.kernel == "mma":
            kv_attend_mma.attend(stream, call)
        elif choice.kernel == "f16":
            kv_attend_f16.attend(stream, call)
        else:
            kv_attend_simt.attend(stream, plan, call)
    except ClosedError:
        # The launch asks for it anyway; here only its name is missing, for kernels have their own.
        for name, value in zip(call._fields, call, strict=True):
            if type(value) is Buffer:
                value._check_open(f"attend: {name}")
        raise


@dataclass(frozen=True)
class Choice:
    """The kernel for a plane, and why it is this one.

    Attributes
    ----------
    kernel : str
        ``"mma"`` (tensor cores, whole numbers), ``"f16"`` (tensor cores, f16) or
        ``"simt"`` (every format and shape).
    reason : str
    """

    kernel: str
    reason: str


def choose(
    device: Device,
    k_format: Format,
    v_format: Format,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    n_kv_heads: int,
    rows: int = 0,
    kernel: str | None = None,
) -> Choice:
    """Say which kernel :func:`attend` takes.

    It depends on the device and the planes, not on a launch, so that all launches over a plane
    agree bit for bit. All kernels are of class ``exact``, but their bits differ. ``rows`` are
    those that the planes hold, 0 where that is not known yet.

    Raises
    ------
    FormatUnsupported
        ``kernel`` asks for one that cannot do it.
    """
    _check_kernel("attend", kernel)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    _check_planes("choose", k_format, v_format, head_dim, head_dim_v, n_kv_heads)
    rows = expect.integer("choose: rows", rows, 0)
    if kernel == "simt":
        return Choice("simt", "asked for")
    whole = (k_format, v_format) == (Q8_0, Q5_1)
    fitting = kernel or ("mma" if whole else "f16")
    if fitting == "f16":
        refusal = kv_attend_f16.refusal(device, k_format, v_format, head_dim, head_dim_v)
    else:
        refusal = kv_attend_mma.refusal(device, k_format, v_format, head_dim, head_dim_v, rows)
    if kernel is not None and refusal is not None:
        raise FormatUnsupported(
            f"the tensor-core kernel {kernel!r} does not do {refusal}; kernel='simt' does",
            op="attend", k_format=k_format.name, v_format=v_format.name, head_dim=head_dim,
            arch=device.arch, nearest=["simt"],
        )  # fmt: skip
    if kernel is not None:
        return Choice(kernel, "asked for")
    if refusal is not None:
        return Choice("simt", f"the tensor-core kernel does not do {refusal}")
    if device.kind == "host":
        return Choice("simt", "the host device emulates tensor cores, which is slow")
    return Choice(fitting, f"K {k_format}, V {v_format}, head_dim {head_dim} on {device.arch}")


def prepare(
    device: Device,
    k_format: Format,
    v_format: Format,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    group: int = 1,
    max_rows: int = 16,
    n_kv_heads: int | None = None,
) -> None:
    """Compile and load what launches of up to ``max_rows`` rows need, not at the first of them.

    With ``n_kv_heads`` that is what :func:`choose` says, else the general kernel.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    one = 1 if n_kv_heads is None else n_kv_heads
    _check_planes("prepare", k_format, v_format, head_dim, head_dim_v, one)
    group = expect.integer("prepare: group", group)
    max_rows = expect.integer("prepare: max_rows", max_rows, 1, _MOST)
    check_supported(device, k_format, v_format, head_dim, head_dim_v, group=group)
    if n_kv_heads is not None:
        choice = choose(device, k_format, v_format, head_dim, head_dim_v, n_kv_heads=n_kv_heads)
        if choice.kernel == "mma":
            kv_attend_mma.prepare(device, head_dim, n_kv_heads, n_queries=max_rows * group)
            return
        if choice.kernel == "f16":
            kv_attend_f16.prepare(
                device, k_format, v_format, head_dim, n_kv_heads, n_queries=max_rows * group
            )
            return
    n_queries = group, max_rows * group
    kv_attend_simt.prepare(device, k_format, v_format, head_dim, head_dim_v, n_queries)


def check_supported(
    device: Device,
    k_format: Format,
    v_format: Format,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    group: int = 1,
    numeric: str = "exact",
) -> None:
    """Refuse by name what no kernel does."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if head_dim in HEAD_DIMS and head_dim_v in HEAD_DIMS and 1 <= group <= MAX_GROUP:
        if numeric in CLASSES:
            return
    wrong = next((d for d in (head_dim, head_dim_v) if d not in HEAD_DIMS), None)
    faults, nearest = [], []
    if wrong is not None:
        nearest = [str(d) for d in sorted(HEAD_DIMS, key=lambda d: abs(d - wrong))[:2]]
        faults.append(
            f"head_dim {head_dim}/{head_dim_v}: head sizes are {', '.join(map(str, HEAD_DIMS))} "
            f"(nearest: {' and '.join(nearest)}); pad the heads"
        )
    if not 1 <= group <= MAX_GROUP:
        nearest = nearest or [str(min(max(group, 1), MAX_GROUP))]
        faults.append(f"{group} query heads per kv head: groups are 1 to {MAX_GROUP}")
    if numeric not in CLASSES:
        nearest = nearest or list(CLASSES)
        faults.append(f"numeric class {numeric!r}: it is {' or '.join(CLASSES)}")
    raise FormatUnsupported(
        f"no attention kernel for {'; nor for '.join(faults)} (K {k_format}, V {v_format} on "
        f"{device.arch})",
        op="attend",
        k_format=k_format.name,
        v_format=v_format.name,
        head_dim=head_dim if wrong is None else wrong,
        arch=device.arch,
        nearest=nearest,
    )


def workspace_bytes(
    device: Device,
    n_rows: int,
    n_heads: int,
    head_dim_v: int,
    rows: int,
    *,
    window: int | None = None,
    ring: bool = False,
    kernel: str | None = None,
) -> int:
    """Bytes that :func:`attend` needs for ``n_rows`` rows over a plane of ``rows``.

    Parameters
    ----------
    device : Device
    n_rows, n_heads, head_dim_v, rows : int
    window : int, optional
    ring : bool
        The plane has a ``base_d``.
    kernel : str, optional
        As for :func:`attend`; default enough for any that it may choose on this device.

    Raises
    ------
    ArgumentError
        An extent that no launch has.
    """
    n_rows = expect.integer("workspace_bytes: n_rows", n_rows, 0, _MOST)
    n_heads = expect.integer("workspace_bytes: n_heads", n_heads, 1, _MOST)
    head_dim_v = expect.integer("workspace_bytes: head_dim_v", head_dim_v, 1, _MOST)
    rows = expect.integer("workspace_bytes: rows", rows, 1, _MOST)
    _check_kernel("workspace_bytes", kernel)
    slots = kv_attend_simt.n_slots(rows, n_rows, _window(window), ring)
    if kernel in ("mma", "f16") or (kernel is None and device.kind != "host"):
        mma = kv_attend_mma
        few = 2 if n_heads * head_dim_v <= MAX_GROUP * mma.FEW_CHANNELS else 1
        most = 2 * mma.n_slots(rows, few * mma.MOST_PARTS)
        slots = max(slots, min(most, few * mma.MOST_SLOTS))
    return n_rows * n_heads * slots * (head_dim_v + 2) * 4


def _check_buffers(
    stream: Stream, *buffers: tuple[str, Buffer | None, np.dtype[np.generic] | None]
) -> None:
    """Refuse what is no buffer; with a dtype also what a launch would refuse.

    With one are those that some kernels leave to the second launch, which must not refuse behind
    the first, or do without.
    """
    context = stream.context
    for name, buffer, dtype in buffers:
        if type(buffer) is not Buffer:
            if buffer is None and name not in _NEEDED:
                continue
            buffer = expect.kind(f"attend: {name}", buffer, Buffer, "a Buffer")
        if dtype is None:
            continue
        if buffer.dtype is not dtype and buffer.dtype != dtype:
            raise _refused(name, f"of {dtype}", str(buffer.dtype))
        if buffer.closed:
            buffer._check_open(f"attend: {name}")
        if buffer.storage.context is not context:
            raise _refused(name, f"a buffer of {context}", f"one of {buffer.storage.context}")


def _check_planes(
    call: str, k_format: Format, v_format: Format, head_dim: int, head_dim_v: int, n_kv_heads: int
) -> None:
    """Refuse planes of no format, head size or number of heads; what is right costs no call."""
    if type(k_format) is not Format or type(v_format) is not Format:
        for name, fmt in (("k_format", k_format), ("v_format", v_format)):
            expect.kind(f"{call}: {name}", fmt, Format, "one of memra_lowlevel.formats")
    if not (
        type(head_dim) is type(head_dim_v) is type(n_kv_heads) is int
        and min(head_dim, head_dim_v, n_kv_heads) > 0
    ):
        expect.integer(f"{call}: head_dim", head_dim, 1, _MOST)
        expect.integer(f"{call}: head_dim_v", head_dim_v, 1, _MOST)
        expect.integer(f"{call}: n_kv_heads", n_kv_heads, 1, _MOST)


def _check_kernel(call: str, kernel: str | None) -> None:
    if kernel is not None and (type(kernel) is not str or kernel not in _KERNELS):
        raise expect.refusal(f"{call}: kernel", kernel, "'mma', 'f16', 'simt' or None")


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise expect.refusal(f"attend: {name}", flag, "True or False")


def _window(window: int | None) -> int:
    """Give the window as the kernels have it: 0 for all keys."""
    return 0 if window is None else expect.integer("attend: window", window, 0, _MOST)


def _scalar(name: str, value: float) -> float:
    """Give a number that cannot turn every score into NaN."""
    expected = "a finite number of f32"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise expect.refusal(f"attend: {name}", value, expected)
    if not -_F32_MAX <= value <= _F32_MAX:  # NaN neither
        raise expect.refusal(f"attend: {name}", value, expected)
    return float(value)


def _softcap(value: float) -> float:
    """Give a cap that is still one as f32: a kernel takes 0 for none."""
    cap = _scalar("softcap", value)
    if cap < _LEAST_CAP:
        raise expect.refusal("attend: softcap", value, f"at least {_LEAST_CAP:g}, or None")
    return cap


def _refused(name: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"attend: {name} must be {expected}, got {got}",
        kernel="attend_partial", name=name, expected=expected, got=got,
    )  # fmt: skip
