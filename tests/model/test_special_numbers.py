"""Products of numbers that are none, of infinities, and of weights far below their scale."""

import numpy as np
import pytest
from products import EPS, FORMATS, Qkv, Rows, close, run_logits, same_infinities, stored, upload

from memra_lowlevel import formats
from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS
from memra_lowlevel.reference import model as oracle


def test_special_weights_and_activations(bench):
    rows = np.zeros((32, 34), np.uint8)
    rows[:, 2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    scales = np.array([0.0, -0.0, 6e-8, -1.0, 65504.0, np.inf, np.nan] + [1.0] * 25, np.float16)
    rows[:, :2] = scales[:, None].view(np.uint8)
    x = np.ones((2, 32), np.float32)
    x[1, 3] = np.inf
    h = bench.put(np.zeros((2, 32), np.float32))
    ops.add_product(bench.stream, upload(bench, rows, "q8_0"), bench.put(x), h, 2)
    got = bench.get(h)
    with np.errstate(invalid="ignore"):
        want = oracle.product(rows, "q8_0", x)
    np.testing.assert_array_equal(got[0], want[0].astype(np.float32))
    assert (np.isnan(got[1]) == np.isnan(want[1])).all()


@pytest.mark.parametrize("format", FORMATS)
def test_infinite_activations(bench, rng, format):
    """A row of their own gets what the oracle gives; the rows beside it do not notice."""
    n_out, n_in = 40, 96
    rows = stored(rng, n_out, n_in, format)
    if format in ("f32", "f16"):
        rows.view(np.float32 if format == "f32" else np.float16)[7, 40] = 0  # times inf is NaN
    x = rng.standard_normal((9, n_in)).astype(np.float32)
    x[1, 40], x[2, 3], x[4, [5, 70]], x[6, [0, 95]] = np.inf, -np.inf, np.inf, (np.inf, -np.inf)
    x[7, 33], x[7, 40] = np.nan, np.inf
    h = np.zeros((9, n_out), np.float32)
    h_d = bench.put(h)
    ops.add_product(bench.stream, upload(bench, rows, format), bench.put(x), h_d, 9)
    got = bench.get(h_d)
    with np.errstate(invalid="ignore"):
        want = oracle.add_product(rows, format, x, h)
        size = np.abs(x).astype(np.float64) @ np.abs(oracle.weight_rows(rows, format)).T
    if format == "q4_1":  # scale and offset meet the activations apart: infinities may meet too
        assert not np.isfinite(got[~np.isfinite(want)]).any() and np.isnan(got[7]).all()
        got = np.where(np.isfinite(want), got, want)
    same_infinities(got, want, size)


@pytest.mark.parametrize("format", ["f32", "f16"])
def test_infinite_weights(bench, rng, format):
    """In all products; activations have a rest beside what tensor cores take at once, and none."""
    dtype, ones = np.float32 if format == "f32" else np.float16, np.ones(96, np.float32)
    n, case = 6, Qkv(rng, format, 96, n=6)
    case.gain = ones
    case.h[1], case.h[2, ::2] = 1, 0
    weights = case.rows.view(dtype)
    for first in (0, case.q_dim + case.kv_dim):  # q and v
        at = weights[first : first + 64]
        at[3, 40], at[5, 41], at[9, [0, 95]] = np.inf, -np.inf, (np.inf, -np.inf)
        at[20, [7, 8]], at[33, 6] = np.inf, np.nan
    matrix = upload(bench, case.rows, format)
    with np.errstate(invalid="ignore"):
        (_, _, v), size = case.want(3), case.size()
        rows = oracle.product(case.rows, format, case.h)
        logits = oracle.logits_rows(case.rows, format, case.h, ones, EPS)
        pair = (case.rows, format), (case.rows[::-1], format)
        gated = oracle.gate_up_rows(*pair, case.h, ones, EPS)
    plane = Rows(bench, n, case.kv_dim, formats.F32, formats.F32)
    case.run(bench, plane, 3)
    same_infinities(plane.get(bench)[1].view(np.float32), v, size[:, -case.kv_dim :])
    h, out = bench.put(np.zeros(rows.shape, np.float32)), bench.out(n, matrix.n_out)
    x = bench.put(case.h)
    ops.add_product(bench.stream, matrix, x, h, n)
    same_infinities(bench.get(h), rows, np.abs(rows) + 10)
    same_infinities(run_logits(bench, matrix, case.h, ones, EPS)[0], logits, size)
    up = upload(bench, np.ascontiguousarray(case.rows[::-1]), format)
    ops.gate_up_rows(bench.stream, matrix, up, x, bench.put(ones), out, n, EPS)
    same_infinities(bench.get(out), gated)


def test_a_weight_that_is_no_number_in_its_lower_bits(bench):
    """Tensor cores cut the bits off that tell such a weight of f32 from an infinity."""
    weights = np.ones((40, 64), np.float32)
    weights.view(np.uint32)[[3, 39], [0, 63]] = 0x7F800001, 0xFF801000
    matrix = upload(bench, weights.view(np.uint8), "f32")
    h = bench.put(np.zeros((2, 40), np.float32))
    ops.add_product(bench.stream, matrix, bench.put(np.ones((2, 64), np.float32)), h, 2)
    got, want = bench.get(h), np.full((2, 40), 64, np.float32)
    want[:, [3, 39]] = np.nan
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_a_scale_that_is_not_finite_leaves_no_number(bench, rng, format):
    n_in, block_bytes = 96, TILE_FORMATS[format].block_bytes
    rows = stored(rng, 40, n_in, format)
    scales = rows.reshape(40, 3, block_bytes)[..., :2].view(np.float16)
    scales[[2, 12, 22], [0, 1, 2]] = [[np.inf], [-np.inf], [np.nan]]
    x = rng.standard_normal((5, n_in)).astype(np.float32)
    h = bench.put(np.zeros((5, 40), np.float32))
    ops.add_product(bench.stream, upload(bench, rows, format), bench.put(x), h, 5)
    with np.errstate(invalid="ignore"):
        want = oracle.product(rows, format, x)
        size = np.abs(x).astype(np.float64) @ np.abs(oracle.weight_rows(rows, format)).T
    assert np.isnan(want[:, [2, 12, 22]]).all(), "codes and activations of both signs"
    same_infinities(bench.get(h), want, size)


def test_weights_that_are_small_beside_their_scale(bench, rng):
    """q4_1 about the middle of its codes: scale and offset cancel, and errors are theirs."""
    rows = np.zeros((32, 20), np.uint8)
    rows[:, :4] = np.array([10.0, 0.01], np.float16).view(np.uint8)
    rows[:, 4] = 15  # of the first column; the others are the offset
    x = rng.standard_normal((5, 32)).astype(np.float32)
    x[:, 0] = 0.0
    h = bench.put(np.zeros((5, 32), np.float32))
    ops.add_product(bench.stream, upload(bench, rows, "q4_1"), bench.put(x), h, 5)
    codes = np.array([15] + [0] * 31)
    d, m = (float(np.float16(v)) for v in (10.0, 0.01))
    size = np.abs(x).astype(np.float64) @ (np.abs(d * (codes - 8)) + abs(8 * d + m))
    close(bench.get(h), oracle.product(rows, "q4_1", x), size[:, None], 2e-6)


@pytest.mark.parametrize("n_in", [32, 96, 576])
def test_small_weights_about_the_middle_of_their_codes(bench, rng, n_in):
    """q4_1 of which nothing is left but a few steps: sums of whole codes would drown them."""
    d = rng.uniform(0.5, 1.0, (40, n_in // 32)).astype(np.float16)
    codes = rng.integers(7, 10, (40, n_in // 32, 32)).astype(np.uint8)
    rows = np.zeros((40, n_in // 32, 20), np.uint8)
    rows[:, :, :2] = d[..., None].view(np.uint8)
    rows[:, :, 2:4] = (-8 * d)[..., None].view(np.uint8)
    rows[:, :, 4:] = codes[:, :, :16] | codes[:, :, 16:] << 4
    rows = rows.reshape(40, -1)
    x = rng.uniform(0.5, 1.0, (5, n_in)).astype(np.float32)
    h = bench.put(np.zeros((5, 40), np.float32))
    ops.add_product(bench.stream, upload(bench, rows, "q4_1"), bench.put(x), h, 5)
    steps = np.abs(codes.astype(np.float64) - 8) * d.astype(np.float64)[..., None]
    size = x.astype(np.float64) @ steps.reshape(40, n_in).T
    close(bench.get(h), oracle.product(rows, "q4_1", x), size, 2e-6)


def test_an_offset_that_is_infinite_leaves_no_number(bench, rng):
    rows = stored(rng, 40, 96, "q4_1")
    rows.reshape(40, 3, -1)[[2, 12], [0, 2], 2:4] = np.float16([[np.inf], [-np.inf]]).view(np.uint8)
    x = rng.standard_normal((5, 96)).astype(np.float32)
    h = bench.put(np.zeros((5, 40), np.float32))
    ops.add_product(bench.stream, upload(bench, rows, "q4_1"), bench.put(x), h, 5)
    missing = np.zeros((5, 40), bool)
    missing[:, [2, 12]] = True  # an infinity times activations of both signs
    assert (np.isnan(bench.get(h)) == missing).all()
