"""Linear attention over a few rows, states kept in slots (``cuda_src/recur/delta.cu``)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..errors import ArgumentError, FormatUnsupported
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .early import starts_early
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream

__all__ = ["HEAD_DIMS", "MAX_TAPS", "RULES", "conv_roll", "delta_rows"]

HEAD_DIMS = (32, 64, 128)
"""Head sizes with a kernel."""

MAX_TAPS = 8
"""Widest convolution."""

RULES = ("gated", "kda")
"""``gated``: one decay per head; ``kda``: one per key channel, applied before the read."""

_THREADS, _COLS = 256, 32
_EXP = Tolerance(
    "relative", 2e-5, "f32 sums and expf, against float64; errors of the state add up over rows"
)

registry.register(
    KernelSpec(
        name="conv_roll",
        source="recur/delta.cu",
        entry="conv_roll",
        oracle="memra_lowlevel.reference.recur:conv_assemble_and_roll",
        tolerance=_EXP,
        edges=("1 to 8 taps", "one row", "every row kept", "last row kept", "slots wrap"),
    ),
    KernelSpec(
        name="delta_rows",
        source="recur/delta.cu",
        entry="delta_rows<{head_dim}, {rule}>",
        instances=tuple(
            {"head_dim": d, "rule": rule} for d in (64, 128) for rule in ("GATED", "KDA")
        ),
        oracle="memra_lowlevel.reference.recur:gated_delta",
        tolerance=_EXP,
        edges=(
            "one row", "rows one by one", "slots wrap", "fewer k heads than v heads",
            "convolved before", "last row kept", "softplus above 20",
        ),
        hot=True,
        pdl="waits",
    ),
)  # fmt: skip


def conv_roll(
    stream: Stream,
    rows: Buffer,
    weights: Buffer,
    conv: Buffer,
    slot_d: Buffer,
    out: Buffer,
    *,
    keep_all: bool = True,
) -> None:
    """Convolve rows behind the state of the current slot, and leave the states after them.

    Parameters
    ----------
    rows, out : Buffer
        f32 ``[n, width]``.
    weights : Buffer
        f32 ``[width, taps]``.
    conv : Buffer
        f32 ``[n_slots, width, taps - 1]``.
    slot_d : Buffer
        i32[1]; the slot is its value modulo ``n_slots``.
    keep_all : bool
        Row r leaves its state in slot ``s + 1 + r``; else only the last does, in ``s + 1``.
    """
    n, width = rows.shape
    taps = _taps(weights, width)
    _fits("conv_roll", "out", out, n * width)
    kernel = registry.kernel(stream.device, "conv_roll")
    launch(
        stream, LaunchConfig(-(-width // _THREADS), _THREADS), kernel,
        rows, weights, conv, slot_d, out, n, width, taps, conv.shape[0], int(keep_all),
    )  # fmt: skip


def delta_rows(
    stream: Stream,
    rows: Buffer,
    weights: Buffer | None,
    conv: Buffer | None,
    ssm: Buffer,
    slot_d: Buffer,
    alpha: Buffer,
    a: Buffer,
    dt_bias: Buffer,
    beta: Buffer,
    out: Buffer,
    *,
    rule: str = "gated",
    keep_all: bool = True,
    eps: float = 1e-6,
    lower_bound: float = -5.0,
    programmatic: bool = False,
) -> None:
    """Convolve (unless ``weights`` is None), gate and fold rows into the state.

    Parameters
    ----------
    rows : Buffer
        f32 ``[n, (2 * n_k_heads + n_v_heads) * d]``: q, k, v.
    weights, conv : Buffer or None
        As in :func:`conv_roll`; None for rows that are convolved already.
    ssm : Buffer
        f32 ``[n_slots, n_v_heads, d (column), d (row)]``.
    alpha, a, dt_bias : Buffer
        gated: f32 ``[n, n_v_heads]``, ``[n_v_heads]``, ``[n_v_heads]``: the decay is
        ``exp(a * softplus(alpha + dt_bias))``. kda: ``[n, n_v_heads, d]``, ``[n_v_heads]``,
        ``[n_v_heads, d]``: ``exp(lower_bound * sigmoid(exp(a) * (alpha + dt_bias)))``.
    beta : Buffer
        f32 ``[n, n_v_heads]``, before its sigmoid.
    out : Buffer
        f32 ``[n, n_v_heads, d]``.
    programmatic : bool
        Start while the predecessor, a kernel of the stream, still runs, on GPUs that can.

    Raises
    ------
    FormatUnsupported
        No kernel for this head size or rule.
    ArgumentError
        Shapes that do not fit together. Nothing was launched in either case.
    """
    if len(out.shape) != 3 or len(rows.shape) != 2:
        raise _refused("out", "f32 [n, n_v_heads, d]", str(out.shape))
    n, n_v, d = out.shape
    if d not in HEAD_DIMS or rule not in RULES:
        raise FormatUnsupported(
            f"no kernel for linear attention with head size {d} and rule {rule!r}; head sizes are "
            f"{', '.join(map(str, HEAD_DIMS))}, rules {' and '.join(RULES)}",
            op="delta_rows", head_dim=d, arch=stream.device.arch,
            nearest=[str(x) for x in sorted(HEAD_DIMS, key=lambda x: abs(x - d))[:2]],
        )  # fmt: skip
    width = rows.shape[1]
    n_k, left = divmod(width // d - n_v, 2)
    if rows.shape[0] != n or width % d or left or n_k < 1 or n_v % n_k:
        raise _refused("rows", f"f32 [{n}, (2 * k heads + {n_v}) * {d}]", str(rows.shape))
    taps, n_slots = 1, ssm.shape[0]
    if weights is not None:
        taps = _taps(weights, width)
        if conv is None or conv.n_bytes != 4 * n_slots * width * (taps - 1):
            raise _refused("conv", f"f32 [{n_slots}, {width}, {taps - 1}]", repr(conv))
    gates = n_v * d if rule == "kda" else n_v
    for name, buffer, size in (
        ("ssm", ssm, n_slots * n_v * d * d), ("alpha", alpha, n * gates), ("a", a, n_v),
        ("dt_bias", dt_bias, gates), ("beta", beta, n * n_v),
    ):  # fmt: skip
        _fits("delta_rows", name, buffer, size)
    kernel = registry.kernel(stream.device, "delta_rows", head_dim=d, rule=rule.upper())
    launch(
        stream, _config(d, n_v, starts_early(stream.device, programmatic)), kernel,
        rows, weights, conv, ssm, slot_d, alpha, a, dt_bias, beta, out,
        n, n_k, n_v, taps, n_slots, int(keep_all), eps, lower_bound,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _config(d: int, n_heads: int, early: bool) -> LaunchConfig:
    return LaunchConfig((d // _COLS, n_heads), _THREADS, programmatic=early)


def _taps(weights: Buffer, width: int) -> int:
    taps, left = divmod(weights.n_bytes // 4, width)
    if left or not 1 <= taps <= MAX_TAPS:
        raise _refused("weights", f"f32 [{width}, 1 … {MAX_TAPS}]", str(weights.shape))
    return taps


def _fits(kernel: str, name: str, buffer: Buffer, n_elements: int) -> None:
    if buffer.n_bytes < 4 * n_elements:
        raise _refused(name, f"at least {n_elements} f32", f"{buffer.n_bytes} bytes", kernel)


def _refused(name: str, expected: str, got: str, kernel: str = "delta_rows") -> ArgumentError:
    return ArgumentError(
        f"{kernel}: {name} must be {expected}, got {got}; nothing was launched",
        kernel=kernel, name=name, expected=expected, got=got,
    )  # fmt: skip
