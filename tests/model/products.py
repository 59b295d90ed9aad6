"""Weights, launches and comparisons that the tests of products share."""

import itertools

import gguf
import numpy as np

from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS
from memra_lowlevel.reference import model as oracle

FORMATS = sorted(TILE_FORMATS)
EPS = 1e-5
#: What makes the norm of a one-hot row of 32 the row itself: mean of squares + eps = 1.
ONE_HOT_EPS = 1 - 1 / 32


def stored(rng, n_out, n_in, format):
    """Random weights as the bytes that a GGUF file would hold."""
    values = rng.standard_normal((n_out, n_in)).astype(np.float32)
    if format == "f32":
        return values.view(np.uint8)
    if format == "f16":
        return values.astype(np.float16).view(np.uint8)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[format.upper()])


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8).tobytes()


def close(got, want, scale, tolerance):
    """Largest error against a scale per element; NaN must match NaN."""
    assert got.shape == want.shape
    assert (np.isnan(got) == np.isnan(want)).all()
    error = np.nanmax(np.abs(got - want) / scale, initial=0.0)
    assert error <= tolerance, f"error {error:.3g} above {tolerance:.3g}"


def upload(bench, rows, format):
    return ops.TiledMatrix.upload(bench.device, bench.stream, rows, format)


def run_logits(bench, matrix, h, gain, eps, probability=False):
    """Logits, ids and probabilities of rows; each output has a row more, which stays poisoned."""
    n, tiles = len(h), matrix.n_tiles
    logits, values = bench.out(n + 1, matrix.n_out), bench.out(n + 1, tiles)
    ids, out = bench.out(n + 1, tiles, dtype=np.int32), bench.out(n + 1, dtype=np.int32)
    sums = bench.out(n + 1, tiles) if probability else None
    prob = bench.out(n + 1) if probability else None
    ops.logits_rows(
        bench.stream, matrix, bench.put(h), bench.put(gain), logits, values, ids, n, eps, sums=sums
    )
    ops.pick_rows(bench.stream, values, ids, out, n, tiles, sums=sums, probability=prob)
    assert bench.get(out)[n] == -1 and np.isnan(bench.get(logits)[n]).all(), "a row too many"
    return bench.get(logits)[:n], bench.get(out)[:n], bench.get(prob)[:n] if probability else None


def same_infinities(got, want, size=None):
    """Where one is infinite or NaN the other is the same; ``size`` is the scale of other errors."""
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all()
    np.testing.assert_array_equal(got[~finite], want[~finite])
    if size is not None:
        assert finite.any()
        close(got[finite].astype(np.float64), want[finite], size[finite], 2e-6)


class Rows:
    """Planes of one layer, poisoned, whose rows start behind ``length``."""

    def __init__(self, bench, capacity, kv_dim, k_format, v_format, length=0, base=None):
        self.k_format, self.v_format, self.rows = k_format, v_format, capacity
        self.k = bench.out(capacity * k_format.row_bytes(kv_dim), dtype=np.uint8)
        self.v = bench.out(capacity * v_format.row_bytes(kv_dim), dtype=np.uint8)
        self.len_d = bench.put(np.array([length], np.int32))
        self.base_d = None if base is None else bench.put(np.array([base], np.int32))

    def get(self, bench):
        return [bench.get(p).reshape(self.rows, -1) for p in (self.k, self.v)]


class Qkv:
    """Random weights and rows: ``heads`` query heads, ``kv_heads`` kv heads of ``dim``."""

    def __init__(self, rng, format="q4_1", width=96, n=5, heads=3, kv_heads=1, dim=64, n_rot=64):
        self.q_dim, self.kv_dim, self.dim = heads * dim, kv_heads * dim, dim
        self.format, self.n, self.width = format, n, width
        self.rows = stored(rng, self.q_dim + 2 * self.kv_dim, width, format)
        self.h = rng.standard_normal((n, width)).astype(np.float32)
        self.gain = rng.uniform(0.5, 1.5, width).astype(np.float32)
        self.angles = oracle.rope_angles(100, n_rot, 1e4).astype(np.float32)

    def want(self, position):
        return oracle.qkv_rows(
            self.rows, self.format, self.h, self.gain, EPS, self.angles, position, self.q_dim,
            self.kv_dim, self.dim,
        )  # fmt: skip

    def size(self):
        """Sum of |w x| for each output."""
        x = np.abs(oracle.norm_rows(self.h, self.gain, EPS))
        return x @ np.abs(oracle.weight_rows(self.rows, self.format)).T

    def run(self, bench, plane, position, rows=slice(None), splits=None):
        """q of some of the rows; the weights may be cut into several matrices."""
        h = np.ascontiguousarray(self.h[rows])
        q = bench.out(len(h), self.q_dim)
        edges = [0, *(splits or []), len(self.rows)]
        for begin, end in itertools.pairwise(edges):
            ops.qkv_rows(
                bench.stream, upload(bench, self.rows[begin:end], self.format), bench.put(h),
                bench.put(self.gain), bench.put(self.angles),
                bench.put(np.array([position], np.int32)), q, plane, len(h), EPS,
                head_dim=self.dim, q_dim=self.q_dim, kv_dim=self.kv_dim, column=begin,
            )  # fmt: skip
        return bench.get(q)
