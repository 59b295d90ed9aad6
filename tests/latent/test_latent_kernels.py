"""Rows, projections and attention of latent planes, on every device against float64."""

import numpy as np
import pytest
from latent_rig import error, f32, i32, normal, same
from test_latent_reference import golden_mla

from memra_lowlevel import errors
from memra_lowlevel.formats import BF16, F16, F32, Q8_0
from memra_lowlevel.kernels import latent_attend, latent_index, latent_rows, registry
from memra_lowlevel.reference import latent as oracle

ATOL = registry.spec("latent_append").tolerance.value
ATTEND = registry.spec("latent_partial").tolerance.value
PROJECT = registry.spec("latent_project").tolerance.value


# -- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "rope"), [(4, 2), (32, 0), (7, 6), (96, 32), (512, 64), (1, 2)])
@pytest.mark.parametrize("n", [1, 5])
def test_rows_are_normalised_rotated_and_written_behind_the_length(rig, rank, rope, n):
    rng = np.random.default_rng(rank + n)
    raw, weight = normal(rng, n, rank + rope), normal(rng, rank)
    table = oracle.angles(16, rope)
    plane = rig.append(raw, 3, 9, weight=weight, angles=table if rope else None)
    rows = plane.view(f32)
    wanted = oracle.latent_rows(raw, weight, table, 3)
    assert np.abs(rows[3 : 3 + n] - wanted).max() <= ATOL
    assert (plane[:3] == 0xFF).all() and (plane[3 + n :] == 0xFF).all()


def test_rows_may_come_finished(rig):
    raw = normal(np.random.default_rng(0), 3, 11)
    assert same(rig.append(raw, 2, 6).view(f32)[2:5], raw)


def test_many_rows_are_the_rows_alone(rig):
    rng = np.random.default_rng(1)
    raw, weight, table = normal(rng, 7, 40), normal(rng, 32), oracle.angles(20, 8)
    together = rig.append(raw, 4, 12, weight=weight, angles=table)
    for r in range(7):
        alone = rig.append(raw[r : r + 1], 4 + r, 12, weight=weight, angles=table)
        assert same(alone[4 + r], together[4 + r])


def test_rows_without_room_are_dropped_and_angles_past_the_table_are_nan(rig):
    rng = np.random.default_rng(2)
    raw, weight = normal(rng, 4, 8), normal(rng, 4)
    rows = rig.append(raw, 3, 5, weight=weight, angles=oracle.angles(4, 4)).view(f32)
    assert np.isfinite(rows[3]).all() and np.isnan(rows[4, 4:]).all()
    assert np.isfinite(rows[4, :4]).all()


@pytest.mark.parametrize("fmt", [BF16, Q8_0], ids=str)
def test_rows_in_other_formats_are_those_of_the_encoder(rig, fmt):
    rng = np.random.default_rng(3)
    raw, weight, table = normal(rng, 3, 96), normal(rng, 64), oracle.angles(9, 32)
    wide = rig.append(raw, 2, 6, weight=weight, angles=table).view(f32)[2:5]
    packed = rig.append(raw, 2, 6, format=fmt, weight=weight, angles=table)
    assert same(packed[2:5], fmt.encode(wide))


@pytest.mark.parametrize("counted", [False, True])
def test_queries_are_rotated_as_rows_are(rig, counted):
    q, table = normal(np.random.default_rng(4), 3, 5, 10), oracle.angles(12, 4)
    out = rig.poisoned((3, 5, 9))
    latent_rows.rotate(
        rig.stream, rig.up(q), out, rig.word(7 if counted else 4), d_rope=4,
        angles=rig.up(table), counted=counted,
    )  # fmt: skip
    got = rig.down(out)
    assert np.abs(got[..., 5:] - oracle.rotate(q[..., 6:], table, 4)).max() < 2e-6
    assert np.isnan(got[..., :5]).all()


@pytest.mark.parametrize(
    ("n", "heads", "n_in", "n_out"), [(1, 3, 64, 40), (5, 2, 7, 18), (9, 1, 512, 16)]
)
def test_projection_per_head(rig, n, heads, n_in, n_out):
    rng = np.random.default_rng(n)
    x, w = normal(rng, n, heads, n_in + 3), normal(rng, heads, n_out, n_in)
    y = rig.poisoned((n, heads, n_out + 2))
    latent_rows.project(rig.stream, rig.up(x), rig.up(w), y)
    got = rig.down(y)
    assert error(got[..., :n_out], oracle.expand_heads(x[..., :n_in], w)) <= PROJECT
    assert np.isnan(got[..., n_out:]).all()
    for r in range(n):
        y = rig.poisoned((1, heads, n_out + 2))
        latent_rows.project(rig.stream, rig.up(x[r : r + 1]), rig.up(w), y)
        assert same(rig.down(y)[0], got[r])


# -- attention --------------------------------------------------------------------------------


def test_golden_attention_through_every_kernel(rig):
    q_nope, q_pe, wk, wv, rows = (a.astype(f32) for a in golden_mla())
    q = rig.poisoned((1, 2, 6))
    joined = rig.up(np.concatenate([q_nope, q_pe], -1))
    latent_rows.project(rig.stream, joined, rig.up(wk), q)
    latent_rows.rotate(rig.stream, joined, q, rig.word(2), d_rope=2)
    latent = rig.attend(rig.down(q), rows, 2, 4, 5**-0.5)
    out = rig.poisoned((1, 2, 3))
    latent_rows.project(rig.stream, rig.up(latent), rig.up(wv), out)
    wanted = [[-0.1431278, 0.7189109, -0.0570050], [0.6682334, 0.1015825, -0.2551279]]
    assert np.abs(rig.down(out)[0] - wanted).max() < 2e-6


SHAPES = [  # heads, rank, rope, n, length
    (1, 32, 0, 1, 0), (2, 4, 2, 3, 40), (5, 30, 6, 4, 17), (16, 64, 32, 1, 300),
    (24, 128, 0, 2, 129), (40, 64, 16, 3, 15), (3, 512, 64, 2, 150), (64, 512, 0, 1, 33),
    (2, 640, 64, 1, 20),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "rank", "rope", "n", "length"), SHAPES)
def test_dense_attention_against_float64(rig, heads, rank, rope, n, length):
    rng = np.random.default_rng(rank)
    q, rows = normal(rng, n, heads, rank + rope), normal(rng, length + n, rank + rope)
    scale = (rank + rope) ** -0.5
    got, lse = rig.attend(q, rows, length, rank, scale, lse=True)
    assert error(got, oracle.attend(q, rows, length, rank, scale)) <= ATTEND
    s = q[-1].astype(float) @ rows.T.astype(float) * scale
    assert np.allclose(lse[-1], np.log(np.exp(s).sum(-1)), rtol=1e-5, atol=1e-5)
    counted = rig.attend(q, rows, length + n, rank, scale, counted=True)
    assert same(counted, got)


@pytest.mark.parametrize(("heads", "rank", "rope", "n", "length"), SHAPES[1:8])
def test_listed_attention_against_float64(rig, heads, rank, rope, n, length):
    rng = np.random.default_rng(rank + 1)
    q, rows = normal(rng, n, heads, rank + rope), normal(rng, length + n, rank + rope)
    rows[rng.integers(0, length, 2)] = np.nan  # rows that no list names
    good = np.flatnonzero(np.isfinite(rows[:, 0]))
    lists = rng.choice(good, (n, 75)).astype(i32)
    lists[rng.random((n, 75)) < 0.3] = -1
    lists[:, 3] = length + n + 5
    lists[:, 40:60] = -1
    got = rig.attend(q, rows, length, rank, 0.2, indices=lists)
    assert error(got, oracle.attend(q, rows, length, rank, 0.2, lists)) <= ATTEND
    for r in range(n):
        alone = rig.attend(q[r : r + 1], rows, length + r, rank, 0.2, indices=lists[r : r + 1])
        assert same(alone[0], got[r])
    nothing, lse = rig.attend(
        q, rows, length, rank, 0.2, indices=np.full((n, 2), -1, i32), lse=True
    )
    assert (nothing == 0).all() and (lse == -np.inf).all()


def test_rows_alone_and_together_have_the_same_bits(rig):
    rng = np.random.default_rng(5)
    for heads, n in ((3, 9), (16, 4), (40, 2)):
        q, rows = normal(rng, n, heads, 40), normal(rng, 200 + n, 40)
        together = rig.attend(q, rows, 200, 32, 0.2)
        for r in range(n):
            alone = rig.attend(q[r : r + 1], rows, 200 + r, 32, 0.2, capacity=200 + n)
            assert same(alone[0], together[r])
        part = rig.attend(q[1:], rows, 200, 32, 0.2, first=1, of=n)
        assert same(part, together[1:])
        part = rig.attend(q[1:], rows, 200 + n, 32, 0.2, first=1, of=n, counted=True)
        assert same(part, together[1:])


def test_rows_that_are_not_seen_do_not_matter(rig):
    rng = np.random.default_rng(6)
    q, rows = normal(rng, 2, 3, 20), normal(rng, 60, 20)
    wanted = rig.attend(q, rows, 37, 16, 0.3)
    rows[39:] = np.nan
    assert same(rig.attend(q, rows, 37, 16, 0.3), wanted)
    rows[38] = np.nan  # seen by the second row only
    got = rig.attend(q, rows, 37, 16, 0.3)
    assert same(got[0], wanted[0]) and np.isnan(got[1]).all()


@pytest.mark.parametrize("fmt", [BF16, Q8_0], ids=str)
def test_attention_over_other_row_formats(rig, fmt):
    rng = np.random.default_rng(7)
    q, rows = normal(rng, 3, 5, 96), normal(rng, 70, 96)
    decoded = fmt.decode(fmt.encode(rows))
    got = rig.attend(q, rows, 67, 64, 0.1, format=fmt)
    assert error(got, oracle.attend(q, decoded, 67, 64, 0.1)) <= ATTEND
    assert same(got, rig.attend(q, decoded, 67, 64, 0.1))


def test_shapes_without_a_kernel_are_refused_by_name(rig):
    q, rows = np.zeros((1, 1, 1040), f32), np.zeros((4, 1040), f32)
    with pytest.raises(errors.FormatUnsupported, match="kv_rank 1030"):
        rig.attend(q, rows, 1, 1030, 1.0)
    with pytest.raises(errors.FormatUnsupported, match="d_rope 300"):
        rig.attend(q, rows, 1, 740, 1.0)
    with pytest.raises(errors.FormatUnsupported, match="fast"):
        rig.attend(q, rows, 1, 1024, 1.0, numeric="fast")
    with pytest.raises(errors.FormatUnsupported, match="f16"):
        rig.append(np.zeros((1, 64), f32), 0, 1, format=F16)
    with pytest.raises(errors.FormatUnsupported, match="whole blocks"):
        latent_rows.check_format(Q8_0, 40)
    with pytest.raises(errors.ArgumentError, match="even"):
        rig.append(np.zeros((1, 7), f32), 0, 1, weight=np.ones(4, f32), angles=np.ones((4, 3), f32))
    assert latent_rows.row_bytes(F32, 7) == 28 and latent_rows.row_bytes(Q8_0, 576) == 18 * 34


def test_shared_memory_of_the_wrapper_is_that_of_the_kernel():
    for rank, rope, queries, stages in ((512, 64, 32, 2), (4, 2, 8, 1), (30, 6, 16, 1)):
        width = rank + rope
        padded = width + -width % 4
        pitch = padded + -padded % 32 + 4
        floats = stages * 16 * pitch + queries * pitch + 8 * 16 * queries + 2 * 16 * queries
        assert latent_attend.shared_bytes(rank, rope, queries, stages) == 4 * (floats + 3 * queries)


# -- the indexer ------------------------------------------------------------------------------


def append_index(rig, rows, ape, pool, ring, capacity, pieces):
    """Append in pieces of at most what a ring takes; returns plane and keys."""
    d = rows.shape[1] // 2
    plane, keys = rig.poisoned((ring or capacity, 2 * d)), rig.poisoned((capacity // pool + 1, d))
    at = 0
    for n in pieces:
        latent_index.append(
            rig.stream, rig.up(rows[at : at + n]), rig.up(ape), plane, keys, rig.word(at),
            pool=pool, capacity=capacity, ring=ring,
        )  # fmt: skip
        at += n
    return rig.down(plane), rig.down(keys)


def test_golden_pool_key(rig):
    k, gate = [[1.0, 2], [3, -1]], [[0, 1], [np.log(3), 1]]
    rows = np.concatenate([k, gate], 1).astype(f32)
    _, keys = append_index(rig, rows, np.array([[0, 0.5], [0, -0.5]], f32), 2, 0, 2, [2])
    assert np.allclose(keys[0], [2.5, 1.1931757], atol=3e-7)


@pytest.mark.parametrize(("pool", "d"), [(1, 3), (4, 8), (3, 5), (16, 130)])
def test_keys_do_not_depend_on_how_rows_arrive(rig, pool, d):
    rng = np.random.default_rng(pool)
    n = 5 * pool + 2
    rows, ape = normal(rng, n, 2 * d) * 3, normal(rng, pool, d)
    plane, keys = append_index(rig, rows, ape, pool, 0, n + 3, [n])
    assert error(keys[:5], oracle.pool_keys(rows, ape, pool)[:5]) <= 2e-6
    assert same(plane[:n], rows) and np.isnan(plane[n:]).all()
    assert np.isnan(keys[n // pool :]).all()
    ring = 2 * pool
    for pieces in ([1] * n, [pool + 1] * 4 + [n - 4 * pool - 4] if n > 4 * pool + 4 else [1] * n):
        ringed, again = append_index(rig, rows, ape, pool, ring, n + 3, pieces)
        assert same(again, keys)
        for a in range(n // pool * pool, n):
            assert same(ringed[a % ring], rows[a])


def test_index_rows_without_room_are_dropped(rig):
    rows = normal(np.random.default_rng(8), 9, 4)
    plane, keys = append_index(rig, rows, np.zeros((4, 2), f32), 4, 0, 6, [9])
    assert same(plane, rows[:6]) and np.isfinite(keys[0]).all() and np.isnan(keys[1:]).all()


def test_golden_scores(rig):
    q = np.array([[[1, 0, -1, 2], [0.5, 0.5, 0.5, 0.5]]], f32)
    keys = np.array([[1, 1, 0, 0], [-1, 0, 1, -1], [0, 0, 0, 2]], f32)
    got = rig.score(q, np.array([[1, -2]], f32), keys, 100, 4)
    assert np.allclose(got, [[-0.3535534, 0, 0.7071068]], atol=5e-8)


@pytest.mark.parametrize(
    ("t", "n_pools", "d", "heads"),
    [(1, 700, 128, 32), (3, 300, 128, 32), (8, 140, 64, 8), (40, 17, 8, 2), (5, 3, 8, 2),
     (2, 129, 256, 3), (2, 70, 30, 5), (1, 33, 7, 33), (9, 600, 12, 20)],
)  # fmt: skip
def test_scores_are_those_of_the_plain_loop_bit_for_bit(rig, t, n_pools, d, heads):
    rng = np.random.default_rng(n_pools)
    q, w, keys = normal(rng, t, heads, d), normal(rng, t, heads), normal(rng, n_pools, d)
    keys[rng.integers(0, n_pools, 3)] = 0
    full = oracle.scores(q, w, keys, 10**6, 4)
    assert ((full == 0).any() and (full < 0).any()) or n_pools < 10
    for first_pos in sorted({0, 2 * n_pools, 4 * n_pools - t, 4 * n_pools + 9} - {-1, -2}):
        got = rig.score(q, w, keys, max(0, first_pos), 4)
        wanted = oracle.scores(q, w, keys, max(0, first_pos), 4)
        seen = min(n_pools, (max(0, first_pos) + t) // 4)
        assert same(got[:, :seen], wanted[:, :seen])
        assert np.isnan(got[:, seen:]).all()  # left alone


SCORED = [  # queries, pools, d, heads; the large ones on a GPU only
    (1, 4097, 128, 32), (3, 1024, 128, 32), (64, 17, 8, 2), (5, 3, 8, 2), (33, 129, 256, 3),
    *(pytest.param(*shape, marks=pytest.mark.gpu)
      for shape in ((8, 300, 128, 32), (100, 4097, 128, 32), (128, 1000, 128, 32),
                    (512, 4097, 128, 32))),
]  # fmt: skip


@pytest.mark.parametrize(("t", "n_pools", "d", "heads"), SCORED)
def test_scores_of_large_planes_are_those_of_the_plain_loop(rig, t, n_pools, d, heads):
    rng = np.random.default_rng(t + n_pools)
    q, w, keys = normal(rng, t, heads, d), normal(rng, t, heads), normal(rng, n_pools, d)
    rows = np.unique(rng.integers(0, t, 6))
    pools = np.unique(np.r_[0, n_pools - 1, rng.integers(0, n_pools, 60)])
    wanted = oracle.scores(q[rows], w[rows], keys[pools], 0, 4, masked=False)
    for first_pos in {0, 2 * n_pools, max(0, 4 * n_pools - t)}:
        got = rig.score(q, w, keys, first_pos, 4)[np.ix_(rows, pools)]
        visible = (first_pos + rows[:, None] + 1) // 4
        seen = pools[None] < visible
        assert same(got[seen], wanted[seen])
        written = pools[None] < (first_pos + t) // 4
        assert (got[~seen & written] == -np.inf).all() and np.isnan(got[~seen & ~written]).all()


def test_a_key_that_is_nan_poisons_its_score_only(rig):
    rng = np.random.default_rng(9)
    q, w, keys = normal(rng, 1, 4, 8), normal(rng, 1, 4), normal(rng, 9, 8)
    wanted = rig.score(q, w, keys, 40, 4)[0]
    keys[3] = np.nan
    got = rig.score(q, w, keys, 40, 4)[0]
    assert np.isnan(got[3]) and same(np.delete(got, 3), np.delete(wanted, 3))


# -- selection --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "top_k", "visible", "rows"),
    [
        ([0.5, 0, 0.5, 0.25, -0.0, 1, 0.5, 9], 12, 30,
         [*range(4), *range(8, 12), *range(20, 24), 28, 29, -1]),
        ([0.0] * 8, 8, 31, [*range(8), 28, 29, 30]),
        ([3, 1], 8, 3, [0, 1, 2] + [-1] * 8),
    ],
)  # fmt: skip
def test_golden_selections(rig, scores, top_k, visible, rows):
    got, width = rig.select(np.array([scores], f32), visible - 1, top_k, 4)
    assert got[0].tolist() == rows
    assert width == oracle.select_width(top_k, 4, min(visible // 4, len(scores)))


def score_planes(rng, n, n_pools, kind):
    if kind == "relu":
        return np.maximum(normal(rng, n, n_pools), 0)
    if kind == "levels":
        return rng.integers(-3, 4, (n, n_pools)).astype(f32) * f32(0.25)
    if kind == "zero":
        return np.where(rng.random((n, n_pools)) < 0.5, f32(-0.0), f32(0.0))
    if kind == "masked":
        x = normal(rng, n, n_pools)
        x[rng.random((n, n_pools)) < 0.97] = -np.inf
        return x
    if kind == "nothing":
        return np.full((n, n_pools), -np.inf, f32)
    if kind == "wild":
        bits = rng.integers(0, 2**32, (n, n_pools), dtype=np.uint64).astype(np.uint32)
        return bits.view(f32)
    return rng.random((n, n_pools), dtype=f32)


KINDS = ("relu", "levels", "zero", "masked", "nothing", "wild", "uniform")


@pytest.mark.parametrize("at_once", [16384, 0])
def test_selection_is_that_of_a_sort_for_a_thousand_planes(rig, scale, at_once, monkeypatch):
    monkeypatch.setattr(latent_index, "_AT_ONCE", at_once)  # one launch, or three
    rng = np.random.default_rng(10)
    tried, ties = 0, 0
    for kind in KINDS:
        for n_pools, top, n in ((37, 5, 64), (300, 40, 64), (300, 400, 16)):
            scores = score_planes(rng, n * scale, n_pools, kind)
            first = int(rng.integers(0, 4 * n_pools))
            got, _ = rig.select(scores, first, 4 * top + 1, 4)
            for r, row in enumerate(scores):
                wanted = oracle.select(row, first + r + 1, 4 * top + 1, 4)
                assert got[r].tolist() == wanted.tolist(), (kind, n_pools, r)
                tried += 1
                ties += len(np.unique(row[np.isfinite(row)])) < np.isfinite(row).sum()
    assert tried >= 1000 and ties >= 300


@pytest.mark.parametrize(
    ("n_pools", "at_once"), [(4096, 0), (8192, 0), (8192, 16384), (20001, 16384)]
)
def test_selection_over_several_segments(rig, n_pools, at_once, monkeypatch):
    monkeypatch.setattr(latent_index, "_AT_ONCE", at_once)
    rng = np.random.default_rng(n_pools)
    for kind in KINDS:
        scores = score_planes(rng, 1, n_pools, kind)
        got, width = rig.select(scores, 4 * n_pools + 2, 2048, 4)
        assert width == 2051 == got.shape[1]
        assert got[0].tolist() == oracle.select(scores[0], 4 * n_pools + 3, 2048, 4).tolist(), kind


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"], indirect=True)
def test_selection_over_262144_pools(rig):
    rng = np.random.default_rng(11)
    for kind in KINDS:
        scores = score_planes(rng, 2, 262_144, kind)
        got, _ = rig.select(scores, 4 * 262_144, 2048, 4)
        for r in range(2):
            wanted = oracle.select(scores[r], 4 * 262_144 + r + 1, 2048, 4)
            assert got[r].tolist() == wanted.tolist(), kind


@pytest.mark.parametrize("at_once", [16384, 0])
def test_selection_does_not_depend_on_the_capacity(rig, at_once, monkeypatch):
    monkeypatch.setattr(latent_index, "_AT_ONCE", at_once)
    rng = np.random.default_rng(12)
    for n_pools in (5, 64, 300):
        scores = score_planes(rng, 3, n_pools, "levels")
        wide = np.full((3, 512), np.nan, f32)
        wide[:, :n_pools] = scores
        first = 16 * n_pools + 3
        a, _ = rig.select(scores, first, 128, 16)
        # As many pools are visible as there are scores, whatever the plane could hold.
        b, width = rig.select(wide, first, 128, 16)
        assert width == min(8, n_pools) * 16 + 15
        assert same(a, b[:, : a.shape[1]]) and (b[:, a.shape[1] :] == -1).all()


def test_selections_that_cannot_be_are_refused(rig):
    scores = np.zeros((1, 8), f32)
    with pytest.raises(errors.ArgumentError, match="at least 11 entries wide"):
        rig.select(scores, 30, 8, 4, width=10)
    with pytest.raises(errors.ArgumentError, match="always_tail"):
        latent_index.select(
            rig.stream, rig.up(scores), rig.poisoned((1, 11), i32), rig.poisoned((9000,), i32),
            rig.word(0), top_k=8, pool=4, always_tail=False,
        )  # fmt: skip
    with pytest.raises(errors.ArgumentError, match="1 to 16"):
        rig.select(scores, 30, 34, 17)
