"""The loops of LayerKvCache in NumPy: the path without the compiled module, and its bits.

Each function repeats one of ``native/layer_kv_loops.h`` in the same order of operations. They are
slow (a fused multiply-add costs a dozen array operations) but exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .arith import F32, dot32, exp, fma, pad_query, tanh, total

if TYPE_CHECKING:
    from .nystrom import NystromState
    from .store import Stores

__all__ = ["attend", "bounded_step", "nystrom_replay", "nystrom_step", "phase", "phase_delta"]

F64 = npt.NDArray[np.float64]
_SKIP = np.float32(1e-12)


def softmax(s: F32, sinks: F32 | None) -> F32 | None:
    """Turn scores ``[n, span]`` to probabilities; None where they have no finite softmax."""
    with np.errstate(all="ignore"):
        m = np.fmax.reduce(s, axis=1, initial=np.float32(-np.inf))
        if sinks is not None:
            m = np.where(sinks > m, sinks, m)
        e = exp(s - m[:, None])
        z = total(e)
        if np.isnan(z).any():
            return None
        if sinks is not None:
            z = z + exp(sinks - m)
        ok = z > 0
        return np.where(ok[:, None], e / np.where(ok, z, np.float32(1))[:, None], e)


def values(w: F32, rows: F32, acc: F32) -> F32:
    """Add ``w[:, p] * rows[p]`` for ascending p to ``acc [n, hd]``; weights below 1e-12 skip."""
    for p in range(rows.shape[0]):
        keep = ~(np.abs(w[:, p]) < _SKIP)
        if keep.any():
            acc[keep] = fma(w[keep, p, None], rows[p], acc[keep])
    return acc


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
    """Attend ``q [n, hd]`` to rows ``[first, stored)`` of a head; False when nothing is finite."""
    n, hd = q.shape
    span = slice(first, stored)
    with np.errstate(all="ignore"):
        if s.k_q8:
            if s.kcol_on[head]:
                q = q * s.kcol[head]
            dot = np.zeros((n, stored - first), np.float32)
            for g in range(s.groups):
                block = slice(32 * g, min(32 * g + 32, hd))
                codes = s.kq[head, span, block].astype(np.float32)
                dot = dot + dot32(q[:, None, block], codes[None]) * s.ks[head, span, g]
        else:
            dot = dot32(q[:, None], s.k[head, span][None])
        scores = (dot * scale).astype(np.float32)
        if softcap > 0:
            scores = softcap * tanh(scores / softcap)
        p = softmax(scores, sinks)
        if p is None:
            return False
        if probs is not None:
            probs[:] = p
        if s.v_q8:
            acc = values(
                p * s.vs[head, span], s.vq[head, span].astype(np.float32), np.zeros_like(q)
            )
            if s.vcol_on[head]:
                acc = acc * s.vcol[head]
        else:
            acc = values(p, s.v[head, span], np.zeros_like(q))
        out[:] = acc.reshape(out.shape)
        end = min(imp.shape[0], stored)
        for i in range(n):
            imp[first:end] = imp[first:end] + p[i, : max(end - first, 0)]
    return True


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
    """Insert ``k, v [nkv, hd]`` at `slot` and attend ``q [nh, hd]``; False: nothing was changed."""
    nkv, window, _ = ring_k.shape
    nh, half = q.shape[0], cos.shape[1]
    hpk = nh // nkv
    old_k, old_v = ring_k[:, slot].copy(), ring_v[:, slot].copy()
    ring_k[:, slot], ring_v[:, slot] = k, v
    order = (slot - np.arange(length)) % window
    bad = False
    weights = []
    with np.errstate(all="ignore"):
        for i in range(nh):
            x, g = q[i], i // hpk
            turned = np.repeat(x[None], length, axis=0)
            a, b = x[:half], x[half : 2 * half]
            c, s = cos[:length], sin[:length]
            turned[:, :half] = a * c - b * s
            turned[:, half : 2 * half] = a * s + b * c
            scores = np.concatenate(
                [dot32(x[None], sink_k[g]) * scale, dot32(turned, ring_k[g, order]) * scale]
            )
            p = softmax(scores[None], None)
            if p is None:
                bad = True
                break
            weights.append(p)
    if bad:
        ring_k[:, slot], ring_v[:, slot] = old_k, old_v
        return False
    undo_k[:], undo_v[:] = old_k, old_v
    for i, p in enumerate(weights):
        rows = np.concatenate([sink_v[i // hpk], ring_v[i // hpk, order]])
        out[i] = values(p, rows, np.zeros((1, q.shape[1]), np.float32))[0]
    return True


def _absorb(s: NystromState, h: int, logits: F32, v: F32) -> None:
    mu, z, t = s.mu[h], s.z[h], s.t[h]
    with np.errstate(all="ignore"):
        up = logits > mu
        r = exp(mu - logits)
        z[up] = z[up] * r[up]
        t[up] = t[up] * r[up, None]
        mu[up] = logits[up]
        e = exp(logits - mu)
        z[:] = z + e
        t[:] = fma(e[:, None], v, t)


def nystrom_step(s: NystromState, q: F32, k: F32, v: F32, out: F32) -> bool:
    """Insert ``k, v [groups, ...]`` and attend ``q [heads, d]``; False: nothing was changed."""
    evict = s.win_len == s.w
    slot = s.win_head if evict else s.win_len
    length = s.w if evict else s.win_len + 1
    far = s.far_len + evict
    near, skeleton, leaving = [], [], []
    with np.errstate(all="ignore"):
        for h in range(s.n_heads):
            g = h // s.hpk
            ring = s.win_k[g, :length].copy()
            ring[slot] = k[g]
            near.append(dot32(q[h], np.concatenate([s.sink_k[g], ring])) * s.scale)
            skeleton.append(dot32(q[h], s.kl[g]) * s.scale if far else near[-1][:0])
            leaving.append(dot32(s.win_k[g, slot], s.ql[h]) * s.scale if evict else near[-1][:0])
    checked = [k.ravel(), v.ravel(), *near, *skeleton, *leaving]
    if not all(np.isfinite(x).all() for x in checked):
        return False
    for g in range(s.groups):
        for h in range(g * s.hpk, (g + 1) * s.hpk):
            if evict:
                _absorb(s, h, leaving[h], s.win_v[g, slot])
        s.win_k[g, slot], s.win_v[g, slot] = k[g], v[g]
    for h in range(s.n_heads):
        out[h] = _answer(s, h, near[h], skeleton[h], length)
    return True


def _answer(s: NystromState, h: int, near: F32, skeleton: F32, length: int) -> F32:
    g = h // s.hpk
    c = top = near.max()
    den = np.float32(0)
    acc = np.zeros(s.dv, np.float32)
    with np.errstate(all="ignore"):
        if skeleton.size:
            f = skeleton.max()
            phi = exp(skeleton - f)
            u = np.zeros(s.m, np.float32)
            for a in range(s.m):
                u = fma(phi[a], s.pinv[h, a], u)
            e = (f + s.mu[h]) - s.shift[h]
            if s.fm:
                u = np.where(u < 0, np.float32(0), u)
            top = np.maximum(c, e.max())
            u = u * exp(e - top)
            for b in range(s.m):
                den = np.float32(fma(u[b], s.z[h, b], den))
            if den >= 0:
                for b in range(s.m):
                    acc = fma(u[b], s.t[h, b], acc)
            else:
                den, top = np.float32(0), c
        w = exp(near - top)
        rows = np.concatenate([s.sink_v[g], s.win_v[g, :length]])
        den = total(w[None], np.asarray([den], np.float32))[0]
        for j in range(near.size):
            acc = fma(w[j], rows[j], acc)
        out: F32 = acc / np.maximum(den, np.float32(1e-30))
    return out


def nystrom_replay(s: NystromState, k: F32, v: F32) -> bool:
    """Insert rows ``k, v [groups, n, ...]`` one after another; False when a logit is not finite."""
    length, head, ok = s.win_len, s.win_head, True
    for r in range(k.shape[1]):
        evict = length == s.w
        slot = head if evict else length
        for g in range(s.groups):
            for h in range(g * s.hpk, (g + 1) * s.hpk):
                if evict:
                    with np.errstate(all="ignore"):
                        logits = dot32(s.win_k[g, slot], s.ql[h]) * s.scale
                    ok = ok and bool(np.isfinite(logits).all())
                    _absorb(s, h, logits, s.win_v[g, slot])
            s.win_k[g, slot], s.win_v[g, slot] = k[g, r], v[g, r]
        if evict:
            head = (head + 1) % s.w
        else:
            length += 1
    return ok


def phase(decay: F64, fk: F64, fq: F64, v: F32, kappa: F32, state: F32, out: F32) -> None:
    """Advance the classic phase core: ``state [nh, P, dv]``, features ``[nh, P]``."""
    with np.errstate(all="ignore"):
        out[:] = 0
        write = fk * kappa[:, None].astype(np.float64)
        for f in range(state.shape[1]):
            cell = decay[:, f, None] * state[:, f] + write[:, f, None] * v.astype(np.float64)
            state[:, f] = cell
            out[:] = out + (fq[:, f, None] * cell).astype(np.float32)


def phase_delta(decay: F64, fk: F64, fq: F64, v: F32, beta: F32, state: F32, out: F32) -> None:
    """Advance the Phase-Delta core: read what the key holds, then write the difference."""
    with np.errstate(all="ignore"):
        r = np.zeros(v.shape, np.float64)
        for f in range(state.shape[1]):
            r = r + fk[:, f, None] * (decay[:, f, None] * state[:, f])
        out[:] = 0
        write = beta[:, None].astype(np.float64) * fk
        for f in range(state.shape[1]):
            held = decay[:, f, None] * state[:, f]
            state[:, f] = held + write[:, f, None] * (v.astype(np.float64) - r)
            out[:] = out + (fq[:, f, None] * state[:, f].astype(np.float64)).astype(np.float32)


def padded(q: F32) -> F32:
    """Return a contiguous query padded as the compiled loops expect it."""
    return np.ascontiguousarray(pad_query(q))
