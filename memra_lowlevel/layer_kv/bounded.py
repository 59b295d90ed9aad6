"""The bounded anchor ``swa_sink_v1``: a ring of raw keys and values, rotated by distance.

No absolute position exists here: the query is turned by its distance to each key, which equals
absolute rotary attention over the band ``(t - window, t]``, joined with trained sink vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memra_lowlevel.errors import KvShapeError, KvStateError

from . import loops
from .arith import F32
from .inputs import array_in, count, real

__all__ = [
    "BoundedRope",
    "BoundedSnapshot",
    "BoundedState",
    "BoundedWeights",
    "check_ring",
    "validate_anchor",
]

UNDO_ROWS = 64
SCORE_LANES = 160


@dataclass(frozen=True, eq=False)
class BoundedWeights:
    """Weights of a bounded layer; the step reads the sinks, projections are the caller's.

    Attributes
    ----------
    sink_k, sink_v : float32 [num_kv_heads, n_sinks, head_dim]
        Trained vectors with values; never rotated, never quantised.
    window : int
        Keys that a query sees, its own included. ``n_sinks + window <= 160``.
    wq, wk, wv, wo : float32 or None
        ``[num_heads * head_dim, width]``, ``[num_kv_heads * head_dim, width]`` twice,
        ``[width, num_heads * head_dim]``.

    Raises
    ------
    KvShapeError
        For a wrong dtype, rank or size.
    KvStateError
        For sinks that are not finite.
    """

    sink_k: F32
    sink_v: F32
    window: int
    wq: F32 | None = None
    wk: F32 | None = None
    wv: F32 | None = None
    wo: F32 | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count(self.window, "window", 1))
        shape = np.shape(self.sink_k)
        if len(shape) != 3 or np.shape(self.sink_v) != shape or 0 in (shape[0], shape[2]):
            raise KvShapeError(
                f"sink_k, sink_v: shapes {shape} and {np.shape(self.sink_v)} where both must be "
                "[num_kv_heads, n_sinks, head_dim]"
            )
        for name in ("sink_k", "sink_v"):
            sinks = array_in(getattr(self, name), name).reshape(shape)
            if not np.isfinite(sinks).all():
                raise KvStateError(f"{name}: sink vectors must be finite")
            object.__setattr__(self, name, sinks)
        if shape[1] + self.window > SCORE_LANES:
            raise KvShapeError(
                f"window {self.window} + {shape[1]} sinks exceed the {SCORE_LANES} scores of a step"
            )

    @property
    def n_sinks(self) -> int:
        """Sink vectors per KV head."""
        return int(self.sink_k.shape[1])


class BoundedRope:
    """Cosine and sine of each distance below the window.

    Parameters
    ----------
    window : int
    inv_freq : float32 [half]
        Frequencies of the rotated pairs ``(i, i + half)``; channels from ``2 * half`` on are left
        as they are.
    rope_scale : float
        YaRN's attention factor; squared in the tables, as only the query is turned.

    Attributes
    ----------
    cos, sin : float32 [window, half]
        Computed in float64 and rounded once; read-only.
    """

    def __init__(self, window: int, inv_freq: Any, rope_scale: float = 1.0):
        self.window = count(window, "window", 1)
        self.inv_freq = array_in(inv_freq, "inv_freq").copy()
        self.rope_scale = real(rope_scale, "rope_scale")
        if not np.isfinite(self.inv_freq).all():
            raise KvStateError("inv_freq: must be finite")
        if abs(self.rope_scale) > 1e18:
            raise KvStateError(f"rope_scale: {self.rope_scale} squared is too large for float32")
        angle = np.arange(self.window, dtype=np.float64)[:, None] * self.inv_freq.astype(np.float64)
        squared = self.rope_scale * self.rope_scale
        self.cos: F32 = (np.cos(angle) * squared).astype(np.float32)
        self.sin: F32 = (np.sin(angle) * squared).astype(np.float32)
        for table in (self.inv_freq, self.cos, self.sin):
            table.flags.writeable = False

    @classmethod
    def standard(
        cls, window: int, head_dim: int, base: float = 10000.0, rope_scale: float = 1.0
    ) -> BoundedRope:
        """Return the rope with ``inv_freq[i] = 1 / base ** (2 i / head_dim)``, in float32."""
        exponent = np.arange(0, head_dim - 1, 2, dtype=np.float32) / np.float32(head_dim)
        inv = np.float32(1.0) / np.power(np.float32(base), exponent)
        return cls(window, inv.astype(np.float32), rope_scale)

    @property
    def half(self) -> int:
        """Rotated pairs."""
        return int(self.cos.shape[1])


@dataclass(frozen=True, eq=False)
class BoundedSnapshot:
    """A copy of a ring: ``ring_k``, ``ring_v`` float32 ``[nkv, window, hd]`` and ``seen``."""

    ring_k: F32
    ring_v: F32
    seen: int


@dataclass(eq=False)
class BoundedState:
    """Ring of the newest `window` rows and an undo history of the last 64 inserts.

    Position ``j`` sits in slot ``j % window``.

    Attributes
    ----------
    ring_k, ring_v : float32 [num_kv_heads, window, head_dim]
        Raw, unrotated projections.
    seen : int
        Positions inserted and not rolled back.
    """

    num_kv_heads: int
    head_dim: int
    window: int
    ring_k: F32 = field(init=False)
    ring_v: F32 = field(init=False)
    seen: int = field(init=False, default=0)
    undo_k: F32 = field(init=False, repr=False)
    undo_v: F32 = field(init=False, repr=False)
    undo_len: int = field(init=False, default=0)
    undo_next: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        nkv, hd = count(self.num_kv_heads, "num_kv_heads", 1), count(self.head_dim, "head_dim", 1)
        self.window = count(self.window, "window", 1)
        self.ring_k = np.zeros((nkv, self.window, hd), np.float32)
        self.ring_v = np.zeros((nkv, self.window, hd), np.float32)
        self.undo_k = np.zeros((UNDO_ROWS, nkv, hd), np.float32)
        self.undo_v = np.zeros((UNDO_ROWS, nkv, hd), np.float32)

    @property
    def len(self) -> int:
        """Rows in the ring."""
        return min(self.seen, self.window)

    @property
    def head(self) -> int:
        """Slot of the next insert."""
        return self.seen % self.window

    def state_bytes(self) -> int:
        """Return the bytes of the state: both rings and the counter, constant for ever."""
        return self.ring_k.nbytes + self.ring_v.nbytes + 8

    def step(
        self,
        q: F32,
        k: F32,
        v: F32,
        w: BoundedWeights,
        rope: BoundedRope,
        scale: np.float32,
        out: F32,
    ) -> None:
        """Insert ``k, v [nkv, hd]``, then attend ``q [nh, hd]``; see the layer's `bounded_step`."""
        u = self.undo_next
        ok = loops.bounded_step(
            self.ring_k,
            self.ring_v,
            self.undo_k[u],
            self.undo_v[u],
            self.head,
            min(self.seen + 1, self.window),
            w.sink_k,
            w.sink_v,
            rope.cos,
            rope.sin,
            q,
            k,
            v,
            scale,
            out,
        )
        if not ok:
            raise KvStateError(
                "bounded_step: a score is NaN or infinite; the query or a key is not finite, or "
                "their product overflows float32"
            )
        self.seen += 1
        self.undo_next = (u + 1) % UNDO_ROWS
        self.undo_len = min(self.undo_len + 1, UNDO_ROWS)

    def rollback(self, n: int) -> int:
        """Undo up to `n` inserts exactly; return how many the history allowed."""
        done = min(count(n, "n"), self.undo_len, self.seen)
        for _ in range(done):
            self.undo_next = (self.undo_next - 1) % UNDO_ROWS
            self.seen -= 1
            slot = self.seen % self.window
            self.ring_k[:, slot] = self.undo_k[self.undo_next]
            self.ring_v[:, slot] = self.undo_v[self.undo_next]
        self.undo_len -= done
        return done

    def snapshot(self) -> BoundedSnapshot:
        """Return a copy of the ring, without the undo history."""
        return BoundedSnapshot(self.ring_k.copy(), self.ring_v.copy(), self.seen)

    def restore(self, s: BoundedSnapshot) -> None:
        """Take a snapshot back; the undo history is dropped, so no rollback can follow at once."""
        if not isinstance(s, BoundedSnapshot):
            raise KvShapeError(f"bounded_restore: {type(s).__name__} is no BoundedSnapshot")
        seen = count(s.seen, "seen")
        if s.ring_k.shape != self.ring_k.shape or s.ring_v.shape != self.ring_v.shape:
            raise KvShapeError(
                f"bounded_restore: snapshot of ring {s.ring_k.shape}, layer has {self.ring_k.shape}"
            )
        self.ring_k[...], self.ring_v[...] = s.ring_k, s.ring_v
        self.seen = seen
        self.undo_len = self.undo_next = 0

    def clear(self) -> None:
        """Zero the ring in place."""
        for a in (self.ring_k, self.ring_v, self.undo_k, self.undo_v):
            a[...] = 0
        self.seen = self.undo_len = self.undo_next = 0

    def copy(self) -> BoundedState:
        """Return a copy that shares nothing, undo history included."""
        other = BoundedState(self.num_kv_heads, self.head_dim, self.window)
        for name in ("ring_k", "ring_v", "undo_k", "undo_v"):
            getattr(other, name)[...] = getattr(self, name)
        other.seen, other.undo_len, other.undo_next = self.seen, self.undo_len, self.undo_next
        return other


def check_ring(ring: BoundedState, w: BoundedWeights, rope: BoundedRope) -> None:
    """Check that weights and rope are some, and fit a ring.

    Raises
    ------
    KvShapeError
        Naming what does not fit.
    """
    nkv, hd = ring.num_kv_heads, ring.head_dim
    if not (isinstance(w, BoundedWeights) and isinstance(rope, BoundedRope)):
        raise KvShapeError(
            f"w, rope: {type(w).__name__} and {type(rope).__name__} where BoundedWeights and "
            "BoundedRope are needed"
        )
    if w.sink_k.shape[0] != nkv or w.sink_k.shape[2] != hd:
        raise KvShapeError(f"w: sinks of shape {w.sink_k.shape} for {nkv} heads of {hd}")
    if w.window != ring.window or rope.window != ring.window:
        raise KvShapeError(
            f"window: weights {w.window} and rope {rope.window}, but the ring has {ring.window}"
        )
    if 2 * rope.half > hd:
        raise KvShapeError(f"rope: {rope.half} pairs for {hd} channels")


def validate_anchor(
    record: Mapping[str, Any] | None,
    layer_types: Sequence[str],
    *,
    tensors: Sequence[str] | None = None,
) -> None:
    """Check a file's anchor record against its layers.

    Parameters
    ----------
    record : mapping or None
        ``kind``, ``window``, ``sink``, ``rope``, ``sink_scores``, ``far``, ``num_kv_heads``,
        ``head_dim``, optionally ``train_windows``.
    layer_types : sequence of str
        A bounded layer is ``"BoundedAttention"``.
    tensors : sequence of str, optional
        Names of the sink tensors found, to check that each bounded layer has ``sink_k`` and
        ``sink_v`` as ``"<layer>.sink_k"`` and ``"<layer>.sink_v"``.

    Raises
    ------
    KvStateError
        Naming the first thing that is wrong.
    """
    bounded = [i for i, kind in enumerate(layer_types) if kind == "BoundedAttention"]
    if record is None:
        if bounded:
            raise KvStateError(f"layers {bounded} are bounded, but the file has no anchor record")
        return
    if not bounded:
        raise KvStateError("the file has an anchor record, but no bounded layer")
    if not isinstance(record, Mapping):
        raise KvStateError(f"anchor record: {type(record).__name__} is no mapping")
    wanted = {"kind": "swa_sink_v1", "rope": "relative_in_window", "sink_scores": "nope"}
    for key, value in wanted.items():
        if record.get(key) != value:
            raise KvStateError(f"anchor record: {key} is {record.get(key)!r}, not {value!r}")
    if record.get("far") is not None:
        raise KvStateError("anchor record: a far field is declared, which nothing executes")
    window, sink = _whole(record, "window", 1), _whole(record, "sink", 0)
    if window + sink > SCORE_LANES:
        raise KvStateError(
            f"anchor record: window {window} + sink {sink} exceed the {SCORE_LANES} scores"
        )
    for trained in record.get("train_windows") or ():
        if type(trained) is not int or not 1 <= trained <= window:
            raise KvStateError(f"anchor record: train window {trained!r} is not in 1..{window}")
    if tensors is not None and sink:
        for name in (f"{layer}.{part}" for layer in bounded for part in ("sink_k", "sink_v")):
            if name not in tensors:
                raise KvStateError(f"the sink tensor {name} is missing")


def _whole(record: Mapping[str, Any], key: str, low: int) -> int:
    value = record.get(key, low - 1 if low else 0)
    if type(value) is not int or value < low:
        raise KvStateError(f"anchor record: {key} is {value!r}, where at least {low} is needed")
    return value
