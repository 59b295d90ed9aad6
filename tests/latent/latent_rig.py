"""Latent kernels driven with NumPy arrays; outputs and scratch start as NaN bytes."""

from __future__ import annotations

import numpy as np

from memra_lowlevel.formats import F32
from memra_lowlevel.kernels import latent_attend, latent_index, latent_rows

POISON = 0xFF
f32, i32 = np.float32, np.int32


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=f32)


def same(a, b):
    """Bitwise equality, NaN included."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.array_equal(a.view(np.uint8), b.view(np.uint8))
    )


def error(got, wanted):
    """Largest difference over the largest magnitude of the row; NaN is infinite."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    top = np.maximum(np.abs(wanted).max(axis=-1), 1e-300)
    worst = np.abs(got - wanted).max(axis=-1) / top
    return np.inf if np.isnan(worst).any() else float(worst.max(initial=0))


class Rig:
    def __init__(self, stream):
        self.stream, self.device = stream, stream.device

    def up(self, array):
        return self.device.from_numpy(np.ascontiguousarray(array), self.stream)

    def poisoned(self, shape, dtype=f32):
        buffer = self.device.empty(shape, dtype, self.stream)
        buffer.fill(self.stream, POISON)
        return buffer

    def down(self, buffer):
        return buffer.to_numpy(self.stream)

    def word(self, value):
        return self.up(np.array([value], i32))

    def append(self, raw, length, capacity, format=F32, plane=None, **options):
        """Rows of the plane after an append at ``length``, as bytes [capacity, row bytes]."""
        row = latent_rows.row_bytes(format, raw.shape[1])
        if plane is None:
            plane = self.poisoned((capacity * row,), np.uint8)
        for key in ("weight", "angles"):
            if options.get(key) is not None:
                options[key] = self.up(options[key])
        latent_rows.append(
            self.stream, self.up(raw), plane, self.word(length), capacity=capacity, format=format,
            **options,
        )  # fmt: skip
        return self.down(plane).reshape(capacity, row)

    def attend(self, q, rows, length, rank, scale, *, format=F32, indices=None, lse=False,
               capacity=None, numeric="exact", **options):  # fmt: skip
        data = rows if format is F32 else format.encode(rows, check=False)
        plane = self.up(data).view(0, (data.nbytes,), np.uint8)
        n, heads, _ = q.shape
        capacity = capacity or len(rows)
        n_list = 0 if indices is None else indices.shape[1]
        size = latent_attend.workspace_bytes(n, heads, rank, capacity, n_list, numeric)
        out, sums = self.poisoned((n, heads, rank)), self.poisoned((n, heads))
        latent_attend.attend(
            self.stream, self.up(q), plane, out, len_d=self.word(length), rows=capacity,
            workspace=self.poisoned((max(1, size // 4),)), scale=scale, format=format,
            indices=None if indices is None else self.up(indices), lse=sums if lse else None,
            numeric=numeric, **options,
        )  # fmt: skip
        return (self.down(out), self.down(sums)) if lse else self.down(out)

    def score(self, q, weights, keys, first_pos, pool, counted=0):
        scores = self.poisoned((len(q), len(keys)))
        latent_index.score(
            self.stream, self.up(q), self.up(weights), self.up(keys), scores,
            self.word(first_pos), pool=pool, counted=counted,
        )  # fmt: skip
        return self.down(scores)

    def select(self, scores, first_pos, top_k, pool, width=None, counted=0):
        """Lists of rows; query r sees ``first_pos + r + 1`` rows. Also the published width."""
        n, n_pools = scores.shape
        if width is None:
            width = latent_index.list_width(top_k, pool, n_pools)
        out, width_d = self.poisoned((n, width), i32), self.poisoned((1,), i32)
        scratch = self.poisoned((latent_index.scratch_bytes(n, n_pools) // 4,), i32)
        latent_index.select(
            self.stream, self.up(scores), out, scratch, self.word(first_pos), top_k=top_k,
            pool=pool, width_d=width_d, counted=counted,
        )  # fmt: skip
        return self.down(out), int(self.down(width_d)[0])
