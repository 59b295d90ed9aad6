"""One entry per loop: the compiled one where it is built and in use, else NumPy's.

The compiled calls release the interpreter's lock. A result of None or False says that something
was not finite; then the caller's arrays are as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import KvStateError

from . import arith, compiled, plain
from .arith import F32

if TYPE_CHECKING:
    from .nystrom import NystromState
    from .store import Stores

__all__ = [
    "attend",
    "bounded_step",
    "nystrom_replay",
    "nystrom_step",
    "phase",
    "phase_delta",
    "quantise",
]

F64 = npt.NDArray[np.float64]


def quantise(
    x: F32, column: F32, column_on: npt.NDArray[np.uint8], width: int
) -> tuple[npt.NDArray[np.int8], F32] | None:
    """Quantise rows ``[n, hd]``; see :func:`memra_lowlevel.layer_kv.arith.quantise`."""
    if not compiled.native():
        return arith.quantise(x, column, column_on, width)
    n, hd = x.shape
    codes = np.empty((n, hd), np.int8)
    scales = np.empty((n, -(-hd // width)), np.float32)
    rc = compiled.lib.lkv_quantise(
        _f32(x),
        _f32(column),
        _at("uint8_t[]", column_on),
        n,
        hd,
        width,
        _at("int8_t[]", codes),
        _f32(scales),
    )
    return (codes, scales) if _finite(rc) else None


def attend(
    s: Stores,
    head: int,
    q: F32,
    stored: int,
    first: int,
    scale: np.float32,
    softcap: np.float32,
    sinks: F32 | None,
    out: F32,
    imp: F32,
    probs: F32 | None,
) -> bool:
    """Attend ``q [n, hd]`` to rows ``[first, stored)`` of a head."""
    if not compiled.native():
        return plain.attend(s, head, q, stored, first, scale, softcap, sinks, out, imp, probs)
    null = compiled.ffi.NULL
    held = s.struct  # keeps the rows, whatever another thread does with the layer meanwhile
    if stored > held[0].cap:
        raise KvStateError("attend: another thread dropped the rows meanwhile")
    return _finite(
        compiled.lib.lkv_attend(
            held[0],
            head,
            _f32(q),
            q.shape[0],
            stored,
            first,
            scale,
            softcap,
            null if sinks is None else _f32(sinks),
            _f32(out),
            _f32(imp) if imp.size else null,
            imp.size,
            null if probs is None else _f32(probs),
        )
    )


def bounded_step(
    ring_k: F32,
    ring_v: F32,
    undo_k: F32,
    undo_v: F32,
    slot: int,
    length: int,
    sink_k: F32,
    sink_v: F32,
    cos: F32,
    sin: F32,
    q: F32,
    k: F32,
    v: F32,
    scale: np.float32,
    out: F32,
) -> bool:
    """Insert one position in a ring and attend; rings ``[nkv, W, hd]``, undo rows ``[nkv, hd]``."""
    if not compiled.native():
        return plain.bounded_step(
            ring_k,
            ring_v,
            undo_k,
            undo_v,
            slot,
            length,
            sink_k,
            sink_v,
            cos,
            sin,
            q,
            k,
            v,
            scale,
            out,
        )
    nkv, window, hd = ring_k.shape
    return _finite(
        compiled.lib.lkv_bounded_step(
            _f32(ring_k),
            _f32(ring_v),
            _f32(undo_k),
            _f32(undo_v),
            nkv,
            hd,
            window,
            slot,
            length,
            _f32(sink_k),
            _f32(sink_v),
            sink_k.shape[1],
            _f32(cos),
            _f32(sin),
            cos.shape[1],
            _f32(q),
            _f32(k),
            _f32(v),
            q.shape[0],
            scale,
            _f32(out),
        )
    )


def nystrom_step(s: NystromState, q: F32, k: F32, v: F32, out: F32) -> bool:
    """Insert one position in a sealed state and attend."""
    if not compiled.native():
        return plain.nystrom_step(s, q, k, v, out)
    held = s.struct
    return _finite(
        compiled.lib.lkv_nystrom_step(
            held[0], s.win_len, s.win_head, s.far_len, _f32(q), _f32(k), _f32(v), _f32(out)
        )
    )


def nystrom_replay(s: NystromState, k: F32, v: F32) -> bool:
    """Insert rows ``[groups, n, ...]`` one after another; the state is spoilt on False."""
    if not compiled.native() or k.shape[1] == 0:
        return plain.nystrom_replay(s, k, v)
    held = s.struct
    return _finite(
        compiled.lib.lkv_nystrom_replay(
            held[0],
            s.win_len,
            s.win_head,
            _f32(k),
            _f32(v),
            k.shape[1] * s.d,
            v.shape[1] * s.dv,
            k.shape[1],
        )
    )


def phase(decay: F64, fk: F64, fq: F64, v: F32, kappa: F32, state: F32, out: F32) -> None:
    """Advance the classic phase core in place; ``state [nh, P, dv]``."""
    if not compiled.native():
        plain.phase(decay, fk, fq, v, kappa, state, out)
        return
    nh, width, dv = state.shape
    compiled.lib.lkv_phase(
        _f64(decay),
        _f64(fk),
        _f64(fq),
        _f32(v),
        _f32(kappa),
        nh,
        width,
        dv,
        _f32(state),
        _f32(out),
    )


def phase_delta(decay: F64, fk: F64, fq: F64, v: F32, beta: F32, state: F32, out: F32) -> None:
    """Advance the Phase-Delta core in place; ``state [nh, P, dv]``."""
    if not compiled.native():
        plain.phase_delta(decay, fk, fq, v, beta, state, out)
        return
    nh, width, dv = state.shape
    _finite(
        compiled.lib.lkv_phase_delta(
            _f64(decay),
            _f64(fk),
            _f64(fq),
            _f32(v),
            _f32(beta),
            nh,
            width,
            dv,
            _f32(state),
            _f32(out),
        )
    )


def store_struct(s: Stores) -> Any:
    """Describe the stores to the compiled loops; the arrays behind it live as long as it does."""
    struct = compiled.ffi.new("lkv_store *")
    held = _fill(struct, s, "float *", ("k", "v", "ks", "vs", "kcol", "vcol"))
    held += _fill(struct, s, "int8_t *", ("kq", "vq"))
    held += _fill(struct, s, "uint8_t *", ("kcol_on", "vcol_on"))
    struct.cap, struct.hd, struct.groups = s.cap, s.hd, s.groups
    struct.k_q8, struct.v_q8 = s.k_q8, s.v_q8
    return struct, held


def nystrom_struct(s: NystromState) -> Any:
    """Describe a sealed state to the compiled loops; its arrays live as long as it does."""
    struct = compiled.ffi.new("lkv_nystrom *")
    names = "win_k", "win_v", "mu", "z", "t", "sink_k", "sink_v", "kl", "ql", "pinv", "shift"
    held = _fill(struct, s, "float *", names)
    for name in ("groups", "hpk", "m", "w", "sink", "d", "dv"):
        setattr(struct, name, getattr(s, name))
    struct.scale, struct.fm = s.scale, s.fm
    return struct, held


def _fill(struct: Any, s: Any, kind: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    arrays = tuple(getattr(s, name) for name in names)
    for name, x in zip(names, arrays, strict=True):
        at = compiled.ffi.cast(kind, x.ctypes.data) if x.size else compiled.ffi.NULL
        setattr(struct, name, at)
    return arrays


def _at(kind: str, x: Any) -> Any:
    return compiled.ffi.from_buffer(kind, x)


def _f32(x: F32) -> Any:
    return compiled.ffi.from_buffer("float[]", x)


def _f64(x: F64) -> Any:
    return compiled.ffi.from_buffer("double[]", x)


def _finite(rc: int) -> bool:
    if rc == 1:
        raise MemoryError("no memory for the scratch of a layer cache loop")
    return rc == 0
