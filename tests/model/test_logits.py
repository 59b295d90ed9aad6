"""The output layer against its float64 oracle: logits, tokens, probabilities."""

import numpy as np
import pytest
from products import EPS, FORMATS, ONE_HOT_EPS, bits, close, run_logits, stored, upload

from memra_lowlevel.reference import model as oracle


def held(logits):
    """Values that a product by one gives bit for bit: of the 11 bits that tensor cores take."""
    bits = np.ascontiguousarray(logits, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def choose(bench, logits, probability=False):
    """Token and probability of rows that are the logits themselves, bit for bit."""
    found = []
    gain = np.ones(32, np.float32)
    for row in logits:
        weights = np.zeros((len(row), 32), np.float32)
        weights[:, 0] = row
        matrix = upload(bench, weights.view(np.uint8), "f32")
        x = np.eye(1, 32, dtype=np.float32)
        got, ids, prob = run_logits(bench, matrix, x, gain, ONE_HOT_EPS, probability)
        np.testing.assert_array_equal(got[0], row)
        found.append((ids[0], prob[0] if probability else None))
    ids, probs = zip(*found, strict=True)
    return np.array(ids), np.array(probs)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(272, 64), (1000, 576), (33, 1216)], ids=str)
def test_logits_rows(bench, rng, format, shape):
    rows = stored(rng, *shape, format)
    h = rng.standard_normal((4, shape[1])).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, shape[1]).astype(np.float32)
    matrix = upload(bench, rows, format)
    got, ids, prob = run_logits(bench, matrix, h, gain, EPS, True)
    size = np.abs(oracle.norm_rows(h, gain, EPS)) @ np.abs(oracle.weight_rows(rows, format)).T
    close(got, oracle.logits_rows(rows, format, h, gain, EPS), size, 2e-6)
    want_ids, want_prob = oracle.pick_rows(got)
    np.testing.assert_array_equal(ids, want_ids)
    close(prob, want_prob, want_prob, 2e-5)
    for r in range(4):
        alone = run_logits(bench, matrix, h[r : r + 1], gain, EPS, True)
        assert [bits(a) for a in alone] == [bits(a[r : r + 1]) for a in (got, ids, prob)]


@pytest.mark.parametrize("width", [576, 1216])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_logits_do_not_see_each_other(bench, rng, format, width):
    """The wider rows are taken fewer at a time."""
    matrix = upload(bench, stored(rng, 70, width, format), format)
    h = rng.standard_normal((19, width)).astype(np.float32)
    h[6, 7] = np.nan
    gain = rng.uniform(0.5, 1.5, width).astype(np.float32)
    alone = [run_logits(bench, matrix, h[r : r + 1], gain, EPS, True) for r in range(19)]
    wanted = [np.concatenate(parts) for parts in zip(*alone, strict=True)]
    assert np.isnan(wanted[0][6]).all() and np.isnan(wanted[0]).sum() == 70
    for n in (*range(2, 10), 19):
        got = run_logits(bench, matrix, h[:n], gain, EPS, True)
        assert [bits(a) for a in got] == [bits(a[:n]) for a in wanted], n


@pytest.mark.parametrize("n_cols", [1, 2, 31, 1023, 1024, 1025, 5000, 49152])
def test_token(bench, rng, n_cols):
    logits = held(rng.standard_normal((2, n_cols)))
    logits[1] = rng.integers(0, 3, n_cols)  # ties
    got, _ = choose(bench, logits)
    np.testing.assert_array_equal(got, oracle.pick_rows(logits)[0])
    np.testing.assert_array_equal(got, logits.argmax(axis=1))


def test_token_edges(bench):
    rows = {
        "all NaN": ([np.nan] * 3000, 0x7FFFFFFF),
        "NaN beside -inf": ([np.nan] * 2999 + [-np.inf], 2999),
        "all -inf": ([-np.inf] * 3000, 0),
        "NaN first": ([np.nan, 1.0] + [0.0] * 2998, 1),
        "NaN around the best": ([0.0] * 1500 + [np.nan, 5.0, np.nan] + [5.0] * 1497, 1501),
        "-0 ties with 0": ([-1.0, -0.0, 0.0] + [-1.0] * 2997, 1),
        "0 ties with -0": ([-1.0, 0.0, -0.0] + [-1.0] * 2997, 1),
        "inf": ([1.0] * 2000 + [np.inf] + [3e38] * 999, 2000),
        "tie across threads": ([0.0] * 1027 + [9.0] + [0.0] * 1023 + [9.0] + [0.0] * 948, 1027),
        "last": ([0.0] * 2999 + [1.0], 2999),
    }
    logits = held([row for row, _ in rows.values()])
    got, _ = choose(bench, logits)
    for (name, (_, want)), have in zip(rows.items(), got, strict=True):
        assert have == want, name
    np.testing.assert_array_equal(got, oracle.pick_rows(logits)[0])


@pytest.mark.parametrize("n_cols", [1, 1000, 49152])
def test_probability(bench, rng, n_cols):
    logits = held(rng.standard_normal((5, n_cols)) * 4)
    logits[2, 0] = np.nan
    logits[3, n_cols // 2 :] = -np.inf
    logits[3, 0] = 1.0
    logits[4] = -np.inf
    ids, got = choose(bench, logits, probability=True)
    with np.errstate(invalid="ignore"):
        want_ids, want = oracle.pick_rows(logits)
    np.testing.assert_array_equal(ids, want_ids)
    close(got.astype(np.float64), want, np.nan_to_num(want, nan=1.0), 2e-5)
