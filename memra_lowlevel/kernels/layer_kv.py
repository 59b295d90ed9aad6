"""Launches of the layer cache's kernels (``cuda_src/layer_kv``).

They keep the order of operations of the cache's own loops, so a device gives the bits of the host.
They are the exact path, not a fast one: sums that are sequential there are sequential here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = ["FarState", "Rows", "append", "attend", "far_step", "phase_step", "prepare", "ring_step"]

_SAME = Tolerance("bitwise", 0.0, "the operations and their order are those of the C loops")
_ORACLES = "memra_lowlevel.layer_kv.plain"
_TILE_ROWS = 32
_SHARED_BYTES = 48 * 1024


def _spec(name: str, source: str, oracle: str, *edges: str) -> KernelSpec:
    return KernelSpec(
        name=name,
        source=f"layer_kv/{source}.cu",
        entry=name,
        oracle=f"{_ORACLES}:{oracle}" if ":" not in oracle else oracle,
        tolerance=_SAME,
        edges=edges,
        same_bits=True,
    )


SPECS = (
    _spec("lkv_append", "exact", "memra_lowlevel.layer_kv.arith:quantise", "both sides", "columns",
          "one side", "no room", "33 channels"),
    _spec("lkv_scores", "exact", "attend", "no rows", "one row", "window", "softcap", "codes"),
    _spec("lkv_values", "exact", "attend", "no rows", "sinks", "skipped weights", "codes"),
    _spec("lkv_importance", "exact", "attend", "no rows", "window", "several heads"),
    _spec("lkv_ring_step", "states", "bounded_step", "first row", "wrap", "no sinks", "half pairs"),
    _spec("lkv_phase", "states", "phase", "classic", "delta", "gate"),
    _spec("lkv_far_absorb", "states", "nystrom_step", "window not full", "wrap"),
    _spec("lkv_far_push", "states", "nystrom_step", "window not full", "wrap"),
    _spec("lkv_far_attend", "states", "nystrom_step", "dropped far field", "clipped", "no sinks"),
    _spec("lkv_far_book", "states", "nystrom_step", "wrap"),
)  # fmt: skip
registry.register(*SPECS)


@dataclass(frozen=True)
class Rows:
    """Stores of a layer on a device; the unused ones of each side are None.

    Attributes
    ----------
    k, v : Buffer or None
        f32 ``[n_kv_heads, cap, hd]``.
    kq, vq, ks, vs : Buffer or None
        i8 codes of the same shape; f32 scales ``[n_kv_heads, cap, ceil(hd / 32)]`` and
        ``[n_kv_heads, cap]``.
    kcol, vcol, kcol_on, vcol_on : Buffer or None
        f32 ``[n_kv_heads, hd]``, u8 ``[n_kv_heads]``; with the codes of their side.
    rows_d : Buffer
        i32[1].
    n_kv_heads, hd, cap : int
    """

    k: Buffer | None
    v: Buffer | None
    kq: Buffer | None
    vq: Buffer | None
    ks: Buffer | None
    vs: Buffer | None
    kcol: Buffer | None
    vcol: Buffer | None
    kcol_on: Buffer | None
    vcol_on: Buffer | None
    rows_d: Buffer
    n_kv_heads: int
    hd: int
    cap: int


@dataclass(frozen=True)
class FarState:
    """A sealed override on a device; shapes as in :class:`memra_lowlevel.layer_kv.NystromState`.

    `book_d` is i32[3]: rows in the window, its oldest slot, far rows.
    """

    win_k: Buffer
    win_v: Buffer
    sink_k: Buffer | None
    sink_v: Buffer | None
    kl: Buffer
    ql: Buffer
    pinv: Buffer
    shift: Buffer
    mu: Buffer
    z: Buffer
    t: Buffer
    book_d: Buffer
    groups: int
    hpk: int
    m: int
    w: int
    sink: int
    d: int
    dv: int
    scale: float
    fm: int


def prepare(device: Device) -> None:
    """Compile and load all kernels of this family now."""
    registry.kernels(device, [(s.name, {}) for s in SPECS])


def append(stream: Stream, rows: Rows, k: Buffer, v: Buffer) -> None:
    """Write f32 ``[n_kv_heads, hd]`` at row ``rows_d``, which does not move; dropped if no room."""
    _elements("k", k, rows.n_kv_heads * rows.hd)
    _elements("v", v, rows.n_kv_heads * rows.hd)
    groups = max(-(-rows.hd // 32), 1)
    launch(
        stream,
        LaunchConfig((rows.n_kv_heads, 2, 1), (128, 1, 1), 4 * (rows.hd + groups)),
        registry.kernel(stream.device, "lkv_append"),
        k, v, rows.k, rows.v, rows.kq, rows.vq, rows.ks, rows.vs, rows.kcol, rows.vcol,
        rows.kcol_on, rows.vcol_on, rows.rows_d, rows.hd, rows.cap,
    )  # fmt: skip


def attend(
    stream: Stream,
    rows: Rows,
    q: Buffer,
    out: Buffer,
    scores: Buffer,
    *,
    n_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Buffer | None = None,
    imp: Buffer | None = None,
) -> None:
    """Attend f32 ``[n_heads, hd]`` to the rows, exactly as the host does.

    Parameters
    ----------
    q, out : Buffer
        f32 ``[n_heads, hd]``; a head without a finite softmax gets NaN.
    scores : Buffer
        f32 ``[n_heads, cap]``, workspace; holds the probabilities of visible rows afterwards.
    n_heads : int
        A multiple of the KV heads; heads of a group are neighbours.
    scale, softcap : float
        No softcap where 0.
    window : int
        Newest rows that are visible; 0 is all.
    sinks : Buffer, optional
        f32 ``[n_heads]``.
    imp : Buffer, optional
        f32 ``[cap]``; probabilities are added, head by head.

    Raises
    ------
    ArgumentError
        Sizes do not fit, or a group needs more shared memory than there is.
    """
    hd, nkv, cap = rows.hd, rows.n_kv_heads, rows.cap
    if n_heads % nkv:
        raise _refused("n_heads", f"a multiple of {nkv}", str(n_heads))
    hpk = n_heads // nkv
    _elements("q", q, n_heads * hd)
    _elements("out", out, n_heads * hd)
    _elements("scores", scores, n_heads * cap)
    if sinks is not None:
        _elements("sinks", sinks, n_heads)
    if imp is not None:
        _elements("imp", imp, cap)
    shared = 4 * (_TILE_ROWS * (hd + 1) + hpk * hd)
    if shared > _SHARED_BYTES:
        raise _refused("hd", f"at most {_SHARED_BYTES} bytes of a tile and queries", f"{shared}")
    device = stream.device
    launch(
        stream, LaunchConfig((-(-cap // _TILE_ROWS), nkv, 1), (256, 1, 1), shared),
        registry.kernel(device, "lkv_scores"),
        q, rows.k, rows.kq, rows.ks, rows.kcol, rows.kcol_on, rows.rows_d, scores, hd, hpk, cap,
        window, scale, softcap,
    )  # fmt: skip
    launch(
        stream, LaunchConfig((n_heads, 1, 1), (128, 1, 1)), registry.kernel(device, "lkv_values"),
        scores, rows.v, rows.vq, rows.vs, rows.vcol, rows.vcol_on, sinks, rows.rows_d, out, hd, hpk,
        cap, window,
    )  # fmt: skip
    if imp is not None:
        launch(
            stream, LaunchConfig((-(-cap // 128), 1, 1), (128, 1, 1)),
            registry.kernel(device, "lkv_importance"),
            scores, rows.rows_d, imp, n_heads, cap, window,
        )  # fmt: skip


def ring_step(
    stream: Stream,
    ring_k: Buffer,
    ring_v: Buffer,
    seen_d: Buffer,
    sink_k: Buffer | None,
    sink_v: Buffer | None,
    cos: Buffer | None,
    sin: Buffer | None,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    out: Buffer,
    *,
    hpk: int,
    n_sinks: int,
    half: int,
    scale: float,
) -> None:
    """Insert one position in a ring ``[n_kv_heads, window, hd]`` and attend; `seen_d` stays."""
    nkv, window, hd = ring_k.shape
    if n_sinks + window > 160:
        raise _refused("window", "at most 160 sinks and rows", f"{n_sinks} + {window}")
    for name, buffer, n in (
        ("q", q, nkv * hpk * hd), ("out", out, nkv * hpk * hd), ("k", k, nkv * hd),
        ("v", v, nkv * hd), ("ring_v", ring_v, nkv * window * hd),
    ):  # fmt: skip
        _elements(name, buffer, n)
    launch(
        stream, LaunchConfig((nkv, 1, 1), (160, 1, 1), 4 * hd),
        registry.kernel(stream.device, "lkv_ring_step"),
        ring_k, ring_v, seen_d, sink_k, sink_v, cos, sin, q, k, v, out, hd, hpk, window, n_sinks,
        half, scale,
    )  # fmt: skip


def phase_step(
    stream: Stream,
    decay: Buffer,
    fk: Buffer,
    fq: Buffer,
    v: Buffer,
    gate: Buffer,
    state: Buffer,
    out: Buffer,
    *,
    delta: bool,
) -> None:
    """Advance a phase core by one position; state f32 ``[n_heads, width, dv]``, features f64."""
    n_heads, width, dv = state.shape
    for name, buffer, n in (
        ("decay", decay, n_heads * width), ("fk", fk, n_heads * width),
        ("fq", fq, n_heads * width), ("v", v, n_heads * dv), ("gate", gate, n_heads),
        ("out", out, n_heads * dv),
    ):  # fmt: skip
        _elements(name, buffer, n)
    launch(
        stream, LaunchConfig((n_heads, 1, 1), (128, 1, 1)),
        registry.kernel(stream.device, "lkv_phase"),
        decay, fk, fq, v, gate, state, out, width, dv, int(delta),
    )  # fmt: skip


def far_step(stream: Stream, s: FarState, q: Buffer, k: Buffer, v: Buffer, out: Buffer) -> None:
    """Insert one position in a sealed override and attend: absorb, push, attend, book."""
    heads = s.groups * s.hpk
    for name, buffer, n in (
        ("q", q, heads * s.d), ("k", k, s.groups * s.d), ("v", v, s.groups * s.dv),
        ("out", out, heads * s.dv),
    ):  # fmt: skip
        _elements(name, buffer, n)
    device = stream.device
    per_head, per_group = (heads, 1, 1), (s.groups, 1, 1)
    threads = (128, 1, 1)
    launch(
        stream, LaunchConfig(per_head, threads, 12 * s.m),
        registry.kernel(device, "lkv_far_absorb"),
        s.win_k, s.win_v, s.ql, s.book_d, s.mu, s.z, s.t, s.hpk, s.m, s.w, s.d, s.dv, s.scale,
    )  # fmt: skip
    launch(
        stream, LaunchConfig(per_group, threads), registry.kernel(device, "lkv_far_push"),
        s.win_k, s.win_v, k, v, s.book_d, s.w, s.d, s.dv,
    )  # fmt: skip
    launch(
        stream, LaunchConfig(per_head, threads, 4 * (s.sink + s.w + 2 * s.m)),
        registry.kernel(device, "lkv_far_attend"),
        q, s.win_k, s.win_v, s.sink_k, s.sink_v, s.kl, s.pinv, s.shift, s.mu, s.z, s.t, s.book_d,
        out, s.hpk, s.m, s.w, s.sink, s.d, s.dv, s.scale, s.fm,
    )  # fmt: skip
    launch(
        stream, LaunchConfig((1, 1, 1), (1, 1, 1)), registry.kernel(device, "lkv_far_book"),
        s.book_d, s.w,
    )  # fmt: skip


def _elements(name: str, buffer: Buffer, n: int) -> None:
    have = 1
    for extent in buffer.shape:
        have *= extent
    if have != n:
        raise _refused(name, f"{n} elements", f"{buffer.shape}")


def _refused(name: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"layer_kv: {name} must be {expected}, got {got}",
        kernel="layer_kv", name=name, expected=expected, got=got,
    )  # fmt: skip
