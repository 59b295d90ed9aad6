"""The O(1) override: an exact near field and a rank-m skeleton of everything older.

``out = (sum_near e_j v_j + F M T) / (sum_near e_j + F M Z)`` with ``e_j = exp(q k_j / sqrt d)``,
``F_a = exp(q kl_a / sqrt d)``, ``M`` the ridge pseudo-inverse of ``A_ab = exp(ql_a kl_b / sqrt d)``
and ``T, Z`` running sums over the keys that left the window. ``A`` is built with its largest logit
taken out (``shift``), so that no landmark logit, however large, leaves the float range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_lowlevel.errors import KvShapeError, KvStateError

from . import compiled, loops
from .arith import F32
from .inputs import array_in, count, read_only
from .modes import O1Rect
from .skeleton import SLACK, m_effective, pinv_ridge, segments

__all__ = ["NystromState", "O1DeviceView", "O1HeadView", "O1Snapshot", "O1State"]


@dataclass(frozen=True, eq=False)
class O1HeadView:
    """One query head of a sealed group; arrays are read-only views.

    Attributes
    ----------
    rect_is_fm : bool
    t, z, mu : float32 [m, dv], [m], [m]
        Value sums, masses and running maxima of the far field.
    q_landmarks, pinv : float32 [m, d], [m, m]
    shift : float
        The logit taken out of ``A``; ``pinv`` is scaled by its exponential.
    """

    rect_is_fm: bool
    t: F32
    z: F32
    mu: F32
    q_landmarks: F32
    pinv: F32
    shift: float


@dataclass(frozen=True, eq=False)
class O1DeviceView:
    """One KV group of a sealed layer, as a device mirror needs it; arrays are read-only views.

    Attributes
    ----------
    m_eff, window, sink_len, d, dv : int
    scale : float
    win_len, win_head, far_len : int
        Rows in the window, its oldest slot, rows that left it.
    win_k, win_v : float32 [window, d], [window, dv]
    sink_k, sink_v : float32 [sink_len, d], [sink_len, dv]
    k_landmarks : float32 [m_eff, d]
    heads : tuple of O1HeadView
    """

    m_eff: int
    window: int
    sink_len: int
    d: int
    dv: int
    scale: float
    win_len: int
    win_head: int
    far_len: int
    win_k: F32
    win_v: F32
    sink_k: F32
    sink_v: F32
    k_landmarks: F32
    heads: tuple[O1HeadView, ...]


@dataclass(frozen=True, eq=False)
class O1Snapshot:
    """What a sealed state changes as it steps: rings, counters and far sums."""

    arrays: tuple[F32, ...]
    counters: tuple[int, int, int]


class NystromState:
    """A sealed state: `groups` KV groups of `hpk` query heads each.

    Parameters
    ----------
    k : float32 [groups, t, d]
        Rotated keys of the prompt.
    v : float32 [groups, t, dv]
    q : float32 [groups * hpk, t, d]
        Rotated queries of the prompt.
    m, window, sink : int
        Landmarks asked for, rows of the exact window, rows kept exactly for ever.
    rect : O1Rect

    Notes
    -----
    A prompt of at most ``window + sink + 8`` rows gives an `exact_only` state, whose window grows
    and which equals plain softmax.
    """

    _MOVING = ("win_k", "win_v", "mu", "z", "t")

    def __init__(
        self,
        k: F32,
        v: F32,
        q: F32,
        m: int,
        window: int,
        sink: int,
        rect: O1Rect = O1Rect.AGGREGATE,
    ):
        self.groups, t, self.d = (int(x) for x in k.shape)
        self.dv = int(v.shape[2])
        n_heads = int(q.shape[0])
        if v.shape[:2] != k.shape[:2] or q.shape[1:] != (t, self.d) or n_heads % self.groups:
            raise KvShapeError(f"k {k.shape}, v {v.shape}, q {q.shape} do not belong together")
        count(m, "m", 4)
        count(window, "window", 1)
        self.n_heads, self.hpk = n_heads, n_heads // self.groups
        self.window, self.sink, self.rect = window, min(count(sink, "sink"), t), rect
        self.fm = int(rect is O1Rect.FM)
        self.scale = np.float32(np.float32(1.0) / np.sqrt(np.float32(self.d)))
        self.exact_only = t <= window + sink + SLACK
        self.m = 0 if self.exact_only else m_effective(t, m)
        self.w = max(t - self.sink, 1) if self.exact_only else window
        self.win_len = self.win_head = self.far_len = 0
        g, h, m_eff = self.groups, n_heads, self.m
        self.win_k: F32 = np.zeros((g, self.w, self.d), np.float32)
        self.win_v: F32 = np.zeros((g, self.w, self.dv), np.float32)
        self.sink_k: F32 = k[:, : self.sink].copy()
        self.sink_v: F32 = v[:, : self.sink].copy()
        self.mu: F32 = np.full((h, m_eff), -np.inf, np.float32)
        self.z: F32 = np.zeros((h, m_eff), np.float32)
        self.t: F32 = np.zeros((h, m_eff, self.dv), np.float32)
        self.kl: F32 = np.zeros((g, m_eff, self.d), np.float32)
        self.ql: F32 = np.zeros((h, m_eff, self.d), np.float32)
        self.pinv: F32 = np.zeros((h, m_eff, m_eff), np.float32)
        self.shift: F32 = np.zeros(h, np.float32)
        if not self.exact_only:
            self._landmarks(k, q)
        self._bind()
        self._replay(k[:, self.sink :], v[:, self.sink :])

    def step(self, q: F32, k: F32, v: F32) -> F32:
        """Insert ``k [groups, d], v [groups, dv]`` and attend ``q [heads, d]``.

        Returns
        -------
        float32 [heads, dv]

        Raises
        ------
        KvStateError
            If an input or a logit is not finite; the state is unchanged then.
        """
        q = array_in(q, "q", self.n_heads * self.d).reshape(self.n_heads, self.d)
        k = array_in(k, "k", self.groups * self.d).reshape(self.groups, self.d)
        v = array_in(v, "v", self.groups * self.dv).reshape(self.groups, self.dv)
        if self.exact_only and self.win_len == self.w:
            self._grow()
        out = np.empty((self.n_heads, self.dv), np.float32)
        if not loops.nystrom_step(self, q, k, v, out):
            raise KvStateError(
                "o1_step: an input or a logit is NaN or infinite; the state is unchanged"
            )
        self._advance(1)
        return out

    def n_bytes(self) -> int:
        """Return the bytes of the state by the documented formula, scratch included."""
        d, dv, m, w, sink = self.d, self.dv, self.m, self.w, self.sink
        shared = (w + sink) * (d + dv) + m * d
        per_head = m * dv + 2 * m + m * d + m * m + (sink + w) + 3 * m
        return 4 * self.groups * (shared + self.hpk * per_head)

    def views(self) -> list[O1DeviceView]:
        """Return one read-only view per group."""
        return [self._view(g) for g in range(self.groups)]

    def snapshot(self) -> O1Snapshot:
        """Copy what steps change."""
        arrays = tuple(getattr(self, name).copy() for name in self._MOVING)
        return O1Snapshot(arrays, (self.win_len, self.win_head, self.far_len))

    def restore(self, s: O1Snapshot) -> None:
        """Take a snapshot of this state back, bit for bit."""
        if not isinstance(s, O1Snapshot):
            raise KvShapeError(f"o1_restore: {type(s).__name__} is no O1Snapshot")
        length, head, far = (count(n, "counters") for n in s.counters)
        full = length == self.w
        if length > self.w or head >= self.w or ((head or far) and not full):
            raise KvShapeError(
                f"o1_restore: {length} rows, oldest slot {head}, {far} gone do not fit a window of "
                f"{self.w}"
            )
        own = [getattr(self, name) for name in self._MOVING]
        grown = (0, 1) if self.exact_only else ()
        for i, (mine, theirs) in enumerate(zip(own, s.arrays, strict=True)):
            fits = mine.shape == theirs.shape or (
                i in grown and mine.shape[::2] == theirs.shape[::2] and s.counters[0] <= self.w
            )
            if not fits:
                raise KvShapeError(f"o1_restore: snapshot {theirs.shape}, state {mine.shape}")
        for mine, theirs in zip(own, s.arrays, strict=True):
            mine[:, : theirs.shape[1]] = theirs
        self.win_len, self.win_head, self.far_len = length, head, far

    def copy(self) -> NystromState:
        """Return a copy that shares nothing that steps change."""
        other = object.__new__(NystromState)
        other.__dict__.update(self.__dict__)
        for name in self._MOVING:
            setattr(other, name, getattr(self, name).copy())
        other._bind()
        return other

    # -- inner ----------------------------------------------------------------------------------

    def _landmarks(self, k: F32, q: F32) -> None:
        parts = segments(k.shape[1], self.m)
        kl = np.stack([k[:, a:b].mean(axis=1, dtype=np.float64) for a, b in parts], axis=1)
        ql = np.stack([q[:, a:b].mean(axis=1, dtype=np.float64) for a, b in parts], axis=1)
        self.kl[...], self.ql[...] = kl, ql
        if not (np.isfinite(kl).all() and np.isfinite(ql).all()):
            raise KvStateError("a key or a query of the prompt is not finite")
        for h in range(self.n_heads):
            logits = ql[h] @ kl[h // self.hpk].T / np.sqrt(float(self.d))
            self.shift[h] = logits.max()
            self.pinv[h] = pinv_ridge(np.exp(logits - float(self.shift[h])))[0]
        for made in (self.kl, self.ql, self.shift, self.pinv):
            if not np.isfinite(made).all():
                raise KvStateError("the landmarks of this prompt overflow float32")

    def _replay(self, k: F32, v: F32) -> None:
        ok = loops.nystrom_replay(self, np.ascontiguousarray(k), np.ascontiguousarray(v))
        if not (ok and np.isfinite(k).all() and np.isfinite(v).all()):
            raise KvStateError("a key, a value or a landmark logit is not finite")
        self._advance(k.shape[1])

    def _advance(self, n: int) -> None:
        new = min(n, self.w - self.win_len)
        self.win_len += new
        self.far_len += n - new
        self.win_head = (self.win_head + n - new) % self.w

    def _grow(self) -> None:
        for name in ("win_k", "win_v"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)], axis=1))
        self.w *= 2
        self._bind()

    def _bind(self) -> None:
        self.struct: Any = loops.nystrom_struct(self) if compiled.lib is not None else None

    def _view(self, g: int) -> O1DeviceView:
        heads = tuple(
            O1HeadView(
                bool(self.fm),
                read_only(self.t[h]),
                read_only(self.z[h]),
                read_only(self.mu[h]),
                read_only(self.ql[h]),
                read_only(self.pinv[h]),
                float(self.shift[h]),
            )
            for h in range(g * self.hpk, (g + 1) * self.hpk)
        )
        return O1DeviceView(
            self.m,
            self.w,
            self.sink,
            self.d,
            self.dv,
            float(self.scale),
            self.win_len,
            self.win_head,
            self.far_len,
            read_only(self.win_k[g]),
            read_only(self.win_v[g]),
            read_only(self.sink_k[g]),
            read_only(self.sink_v[g]),
            read_only(self.kl[g]),
            heads,
        )


class O1State:
    """The override of one layer: collecting queries, then sealed.

    Attributes
    ----------
    m, window, sink, rect
        As given to `o1_begin`.
    target : int or None
        Rows at which a deferred seal will succeed.
    state : NystromState or None
        None while collecting.
    """

    def __init__(self, m: int, window: int, sink: int, rect: O1Rect):
        self.m, self.window, self.sink, self.rect = m, window, sink, rect
        self.target: int | None = None
        self.state: NystromState | None = None
        self._trace: F32 = np.empty((0, 0), np.float32)
        self._n_trace = 0

    @property
    def sealed(self) -> bool:
        """Whether the skeleton answers."""
        return self.state is not None

    @property
    def trace(self) -> F32:
        """Queries collected, float32 ``[positions, num_heads * head_dim]``."""
        return self._trace[: self._n_trace]

    def push(self, q_all: Any, head_dim: int) -> None:
        """Collect the rotated queries of one position."""
        q = array_in(q_all, "q_all")
        width = self._trace.shape[1] if self._n_trace else q.size
        if q.size != width or q.size == 0 or q.size % head_dim:
            raise KvShapeError(
                f"q_all: {q.size} elements, where each position has a multiple of {head_dim} and "
                f"the first one {width}"
            )
        if self._n_trace == self._trace.shape[0] or self._trace.shape[1] != width:
            grown = np.empty((max(64, 2 * self._n_trace), width), np.float32)
            grown[: self._n_trace] = self.trace if self._n_trace else 0
            self._trace = grown
        self._trace[self._n_trace] = q
        self._n_trace += 1

    def drop_last(self, n: int) -> None:
        """Cut the newest `n` positions of the trace."""
        self._n_trace = max(self._n_trace - n, 0)

    def release(self, state: NystromState) -> None:
        """Become sealed; the trace is dropped."""
        self.state = state
        self._trace, self._n_trace = np.empty((0, 0), np.float32), 0
        self.target = None

    def n_bytes(self) -> int:
        """Return the bytes of the trace or of the sealed state."""
        return int(self.trace.nbytes) if self.state is None else self.state.n_bytes()

    def copy(self) -> O1State:
        """Return a copy that shares nothing."""
        other = O1State(self.m, self.window, self.sink, self.rect)
        other.target = self.target
        other.state = None if self.state is None else self.state.copy()
        other._trace, other._n_trace = self.trace.copy(), self._n_trace
        return other
