"""Latent layers driven with NumPy arrays."""

from __future__ import annotations

import numpy as np
from latent_rig import f32, i32, normal

from memra_lowlevel.cache import StreamKvDev
from memra_lowlevel.cache.latent import LatentKvLayer

RANK, ROPE, D, POOL, HEADS = 8, 2, 6, 4, 2
WIDTH = RANK + ROPE


class Sequence:
    """Random rows of a sequence, the same for every layer that gets them."""

    def __init__(self, n, seed=0, pool=POOL, d=D, width=WIDTH):
        rng = np.random.default_rng(seed)
        self.rows = normal(rng, n, width)
        self.index = normal(rng, n, 2 * d)
        self.ape = normal(rng, pool, d)
        self.q = normal(rng, n, HEADS, width)
        self.index_q = normal(rng, n, HEADS, d)
        self.weights = normal(rng, n, HEADS)
        self.pool, self.d = pool, d


class Driver:
    """A layer and the sequence it holds."""

    def __init__(self, stream, sequence, max_ctx, *, ring=None, pool=None, index=True, **options):
        self.stream, self.device, self.seq = stream, stream.device, sequence
        self.dev = StreamKvDev(stream.device, stream)
        self.ring, self.max_ctx = ring, max_ctx
        self.layer = LatentKvLayer.allocate(
            self.dev, max_ctx, sequence.rows.shape[1], 2 * sequence.d if index else 0, ring, pool,
            **options,
        )  # fmt: skip

    def up(self, a):
        return self.device.from_numpy(np.ascontiguousarray(a), self.stream)

    def append(self, n, *, at=None, advance=True, seq=None):
        """The next n rows of the sequence (or rows ``at`` …), and the length."""
        seq, at = seq or self.seq, self.layer.len if at is None else at
        indexed = self.layer.index_width > 0
        self.layer.append(
            self.stream, self.up(seq.rows[at : at + n]),
            index=self.up(seq.index[at : at + n]) if indexed else None,
            ape=self.up(seq.ape) if indexed else None, pool=seq.pool if indexed else None,
        )  # fmt: skip
        if advance:
            self.layer.advance(self.stream, n)

    def select(self, n, *, top_k=16, at=None, counted=True, **options):
        at = self.layer.len - n if at is None else at
        width = self.layer.list_width(top_k)
        out = self.device.empty((n, width), i32, self.stream)
        out.fill(self.stream, 0xFF)
        self.layer.select(
            self.stream, self.up(self.seq.index_q[at : at + n]),
            self.up(self.seq.weights[at : at + n]), out, top_k=top_k, counted=counted, **options,
        )  # fmt: skip
        return out.to_numpy(self.stream)

    def attend(self, n, *, indices=None, at=None, counted=True, rank=RANK, **options):
        at = self.layer.len - n if at is None else at
        out = self.device.empty((n, HEADS, rank), f32, self.stream)
        out.fill(self.stream, 0xFF)
        self.layer.attend(
            self.stream, self.up(self.seq.q[at : at + n]), out, scale=0.3, counted=counted,
            indices=None if indices is None else self.up(indices), **options,
        )  # fmt: skip
        return out.to_numpy(self.stream)

    def keys(self, n=None):
        """Keys that are final, f32 [n, d]."""
        n = self.layer.index_pools_ready if n is None else n
        keys = self.layer.index_pool_keys.to_numpy(self.stream)
        return keys[: n * self.seq.d].reshape(n, self.seq.d)

    def rows(self):
        """Latent rows up to the length."""
        rows = self.layer.rows.to_numpy(self.stream)
        return rows[: self.layer.len * self.layer.width].reshape(self.layer.len, -1)

    def len_d(self):
        return int(self.layer.len_d.to_numpy(self.stream)[0])

    def close(self):
        self.layer.close()
