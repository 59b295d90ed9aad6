"""Weights, launches and comparisons that the tests of products share."""

import gguf
import numpy as np

from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS

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
