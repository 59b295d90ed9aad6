"""The kernels of a Llama block against their float64 oracles, on fresh random input."""

import itertools
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from conftest import Bench
from products import EPS, FORMATS, ONE_HOT_EPS, bits, close, run_logits, stored, upload

from memra_lowlevel import formats
from memra_lowlevel.errors import ArgumentError
from memra_lowlevel.kernels import kv_append
from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS, slice_blocks, tile_rows
from memra_lowlevel.reference import model as oracle

#: (outputs, columns): tiles and slices that are full and not, slices of one block and of several.
SHAPES = [(32, 32), (33, 64), (1, 96), (192, 576), (576, 1536), (250, 160), (40, 2400)]


# -- weights ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS)
def test_the_oracle_decodes_as_the_gguf_package_does(rng, format):
    rows = stored(rng, 40, 96, format)
    kind = gguf.GGMLQuantizationType[format.upper()]
    want = gguf.quants.dequantize(rows, kind)
    np.testing.assert_allclose(oracle.weight_rows(rows, format), want, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("format", FORMATS)
def test_tiles_keep_every_byte(rng, format):
    rows = stored(rng, 40, 96, format)
    spec = TILE_FORMATS[format]
    tiles = tile_rows(rows, format).reshape(2, 3, -1)
    code_bytes = spec.block_bytes - spec.scale_bytes
    for row in (0, 1, 31, 32, 39):
        for block in range(3):
            tile = tiles[row // 32, block]
            want = rows[row].reshape(3, -1)[block]
            codes = tile[: 32 * code_bytes].reshape(-1, 32, 16)[:, row % 32].reshape(-1)
            scales = tile[32 * code_bytes :].reshape(32, -1)[row % 32]
            assert bits(scales) + bits(codes) == bits(want)
    padding = tiles[1].reshape(3, -1)[:, : 32 * code_bytes].reshape(3, -1, 32, 16)[:, :, 8:]
    assert not padding.any()


# -- h += W x -------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_product(bench, rng, format, shape):
    n_out, n_in = shape
    rows = stored(rng, n_out, n_in, format)
    x = rng.standard_normal((3, n_in)).astype(np.float32)
    h = rng.standard_normal((4, n_out)).astype(np.float32)
    h_d = bench.put(h)
    ops.add_product(bench.stream, upload(bench, rows, format), bench.put(x), h_d, 3)
    got = bench.get(h_d)
    size = np.abs(h[:3]) + np.abs(x).astype(np.float64) @ np.abs(oracle.weight_rows(rows, format)).T
    close(got[:3], oracle.add_product(rows, format, x, h[:3]), size, 2e-6)
    assert bits(got[3]) == bits(h[3]), "a row too many was written"


@pytest.mark.parametrize("n_in", [576, 2400])
@pytest.mark.parametrize("format", FORMATS)
def test_each_row_gets_the_bits_it_gets_alone(bench, rng, format, n_in):
    """More rows than shared memory takes at once, too; a row of NaN harms no other."""
    n_out, most = 70, 37
    matrix = upload(bench, stored(rng, n_out, n_in, format), format)
    x = rng.standard_normal((most, n_in)).astype(np.float32)
    h = rng.standard_normal((most, n_out)).astype(np.float32)
    x[20, 5] = np.nan

    def product(first, n):
        h_d = bench.put(h[first : first + n])
        ops.add_product(bench.stream, matrix, bench.put(x[first : first + n]), h_d, n)
        return bench.get(h_d)

    alone = np.concatenate([product(r, 1) for r in range(most)])
    assert np.isnan(alone[20]).all() and np.isnan(alone).sum() == n_out
    for n in [*range(2, 18), 33, most]:
        assert bits(product(0, n)) == bits(alone[:n]), f"{n} rows"


@pytest.mark.parametrize(
    "wrong",
    [(4, 63, 1e4), (-1, 64, 1e4), (4, -2, 1e4)]
    + [(4, 64, theta) for theta in (0.0, -1.0, np.nan, np.inf)],
)
def test_angles_of_no_table(wrong):
    with pytest.raises(ArgumentError, match=r"^rope_angles: "):
        oracle.rope_angles(*wrong)
    assert oracle.rope_angles(0, 64, 1.0).shape == (0, 32, 2)


def test_slices_are_a_function_of_the_shape_and_cover_it():
    for shape in (ops._QKV, ops._GATED, ops._ADDED, ops._ADDED_TWO, ops._ADDED_LATE):
        for n_in in (32, 64, 576, 1536, 2400, 8192):
            size = slice_blocks(n_in, shape.n_slices, shape.at_once)
            n = -(-(n_in // 32) // size)
            assert 1 <= n <= shape.n_slices and (n - 1) * size < n_in // 32 <= n * size
            assert size % shape.at_once == 0
        assert slice_blocks(576, shape.n_slices) == 1, "a block per warp"
    assert slice_blocks(1536, 24) == slice_blocks(1536, 24, 2) == 2


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


def same_infinities(got, want, size=None):
    """Where one is infinite or NaN the other is the same; ``size`` is the scale of other errors."""
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all()
    np.testing.assert_array_equal(got[~finite], want[~finite])
    if size is not None:
        assert finite.any()
        close(got[finite].astype(np.float64), want[finite], size[finite], 2e-6)


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


def test_a_sum_loads_its_kernels_of_every_shape(rng):
    """A step is run once before it is captured, where its launches may start early or not."""
    from memra_lowlevel import Device

    registry = ops.registry
    with Device("host") as device:
        bench = Bench(device, device.stream(name="once"))
        matrix = upload(bench, stored(rng, 32, 32, "q8_0"), "q8_0")
        h = bench.put(np.zeros((1, 32), np.float32))
        ops.add_product(bench.stream, matrix, bench.put(np.ones((1, 32), np.float32)), h, 1)
        loaded = {key[2] for key in device.memo if key[0] == registry.__name__}
    assert {e for e in registry.spec("add_product").expressions if "Q8_0" in e} <= loaded


@pytest.mark.parametrize("format", FORMATS)
def test_a_sum_that_starts_early_has_the_same_bits(bench, rng, format, monkeypatch):
    """Other blocks of threads do it then, where a warp has several blocks of columns."""

    def run(n, early):
        h = bench.put(np.zeros((n, 40), np.float32))
        ops.add_product(bench.stream, matrix, x, h, n, programmatic=early)
        return bits(bench.get(h))

    for n_in in (96, 1536, 2400):
        matrix = upload(bench, stored(rng, 40, n_in, format), format)
        x = bench.put(rng.standard_normal((5, n_in)).astype(np.float32))
        for n in (1, 2, 3, 5):
            late = run(n, False)
            with (
                monkeypatch.context() as patch
            ):  # the shape of an early launch, where there is none
                patch.setattr(ops, "_ADDED_LATE", ops._ADDED_TWO)
                assert run(n, False) == late, (n_in, n)
            assert run(n, True) == late, (n_in, n)


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


# -- embedding -------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS)
def test_embedding(bench, rng, format):
    rows = stored(rng, 70, 96, format)
    table = ops.TiledMatrix.upload(bench.device, bench.stream, rows, format)
    tokens = np.array([0, 69, 31, 32, 33, 5, 5], np.uint32)
    h = bench.out(8, 96)
    ops.embed_rows(bench.stream, table, bench.put(tokens), h, 7)
    got = bench.get(h)
    close(got[:7], oracle.embed_rows(rows, format, tokens), 1.0, 4e-7)
    assert np.isnan(got[7]).all(), "a row too many was written"


def test_a_token_outside_the_table_gives_nan_and_no_neighbour_suffers(bench, rng):
    rows = stored(rng, 70, 64, "q8_0")
    table = ops.TiledMatrix.upload(bench.device, bench.stream, rows, "q8_0")
    tokens = np.array([3, 70, -1, 0x7FFFFFFF, 4], np.int32)
    h = bench.out(5, 64)
    ops.embed_rows(bench.stream, table, bench.put(tokens), h, 5)
    got = bench.get(h)
    assert np.isnan(got[1:4]).all()
    close(got, oracle.embed_rows(rows, "q8_0", tokens), 1.0, 4e-7)


# -- norm, q, k, v, rotation, rows of the cache ----------------------------------------------------
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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", [32, 576, 1216])
def test_qkv_rows(bench, rng, format, width):
    case = Qkv(rng, format, width)
    plane = Rows(bench, 12, case.kv_dim, formats.F32, formats.F32, length=3)
    got = [case.run(bench, plane, 3), *(p.view(np.float32) for p in plane.get(bench))]
    size = np.split(case.size(), [case.q_dim, case.q_dim + case.kv_dim], axis=1)
    for have, want, scale in zip(got, case.want(3), size, strict=True):
        if have is not got[0]:
            assert np.isnan(have[:3]).all() and np.isnan(have[8:]).all(), "a row too many"
            have = have[3:8]
        # a rotated pair shares its error
        pair = scale.reshape(len(scale), -1, 2).max(axis=2).repeat(2, axis=1)
        close(have, want, pair, 2e-6)


@pytest.mark.parametrize("position", [0, 1, 94, 97, 100])
@pytest.mark.parametrize("n_rot", [64, 32])
def test_rotation(bench, rng, position, n_rot):
    case = Qkv(rng, n_rot=n_rot)
    plane = Rows(bench, 5, case.kv_dim, formats.F32, formats.F32)
    got = [case.run(bench, plane, position), *(p.view(np.float32) for p in plane.get(bench))]
    for have, want in zip(got, case.want(position), strict=True):
        close(have, want, case.size().max(), 2e-6)
    past = position + np.arange(5) >= 100
    assert (np.isnan(got[0]).any(axis=1) == past).all() and not np.isnan(got[2]).any()


@pytest.mark.parametrize(
    "pair", [("Q8_0", "Q5_1"), ("Q8_0", "Q4_0"), ("E4M3", "E4M3"), ("F16", "BF16")], ids="/".join
)
def test_stored_rows_are_those_of_append(bench, rng, pair):
    """The bytes are what append_kv makes of the same f32 rows."""
    k_format, v_format = (getattr(formats, name) for name in pair)
    case = Qkv(rng, width=576, kv_heads=3)
    plain = Rows(bench, 5, case.kv_dim, formats.F32, formats.F32)
    case.run(bench, plain, 7)
    k, v = (
        bench.put(p.view(np.float32).reshape(5, case.kv_dim)) for p in plain.get(bench)
    )  # fmt: skip
    fused = Rows(bench, 9, case.kv_dim, k_format, v_format, length=2)
    apart = Rows(bench, 9, case.kv_dim, k_format, v_format, length=2)
    case.run(bench, fused, 7)
    kv_append.append(
        bench.stream, k, v, apart.k, apart.v, apart.len_d,
        k_format=k_format, v_format=v_format, rows=9,
    )  # fmt: skip
    for one, other in zip(fused.get(bench), apart.get(bench), strict=True):
        assert bits(one) == bits(other)
        assert (one[2:7] != 0xFF).any(axis=1).all()


@pytest.mark.parametrize(("length", "base"), [(6, None), (6, 0), (20, 14), (20, 15), (20, 21)])
def test_rows_without_room_are_dropped(bench, rng, length, base):
    case = Qkv(rng)
    want = Rows(bench, 5, case.kv_dim, formats.Q8_0, formats.Q5_1)
    q = case.run(bench, want, 9)
    plane = Rows(bench, 9, case.kv_dim, formats.Q8_0, formats.Q5_1, length=length, base=base)
    assert bits(case.run(bench, plane, 9)) == bits(q)
    at = length - (base or 0) + np.arange(5)
    kept = (at >= 0) & (at < 9)
    assert not kept.all() or base in (15,), "the case should drop a row or fit exactly"
    for rows, wanted in zip(plane.get(bench), want.get(bench), strict=True):
        assert bits(rows[at[kept]]) == bits(wanted[kept])
        others = np.setdiff1d(np.arange(9), at[kept])
        assert (rows[others] == 0xFF).all()


def test_q_k_and_v_may_come_apart_and_rows_do_not_see_each_other(bench, rng):
    case = Qkv(rng, width=576, n=33)
    case.h[5, 7] = np.nan
    kinds = (case.kv_dim, formats.Q8_0, formats.Q5_1)
    whole, apart = (Rows(bench, 33, *kinds) for _ in range(2))
    q = case.run(bench, whole, 2)
    assert bits(case.run(bench, apart, 2, splits=[case.q_dim, case.q_dim + case.kv_dim])) == bits(q)
    for one, other in zip(whole.get(bench), apart.get(bench), strict=True):
        assert bits(one) == bits(other)
    assert np.isnan(q[5]).all() and not np.isnan(np.delete(q, 5, axis=0)).any()
    for n in (1, 2, 5, 17):
        rows = [slice(r, min(r + n, 33)) for r in range(0, 33, n)]
        pieces, planes = [], []
        for piece in rows:
            plane = Rows(bench, 33, *kinds, length=piece.start)
            pieces.append(case.run(bench, plane, 2 + piece.start, piece))
            planes.append([p[piece] for p in plane.get(bench)])
        assert bits(np.concatenate(pieces)) == bits(q), n
        for side, want in enumerate(whole.get(bench)):
            assert bits(np.concatenate([p[side] for p in planes])) == bits(want), n


# -- norm, gate, up, activation --------------------------------------------------------------------
MIXED = [(f, f) for f in FORMATS] + [("f32", "q4_1"), ("q8_0", "f16")]


@pytest.mark.parametrize("pair", MIXED, ids="/".join)
@pytest.mark.parametrize("shape", [(160, 64), (33, 576), (40, 1216)], ids=str)
def test_gate_up_rows(bench, rng, pair, shape):
    n_ff, width = shape
    gate, up = (stored(rng, n_ff, width, f) for f in pair)
    h = rng.standard_normal((4, width)).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, width).astype(np.float32)
    out = bench.out(5, n_ff)
    ops.gate_up_rows(
        bench.stream, upload(bench, gate, pair[0]), upload(bench, up, pair[1]), bench.put(h),
        bench.put(gain), out, 4, EPS,
    )  # fmt: skip
    want = oracle.gate_up_rows((gate, pair[0]), (up, pair[1]), h, gain, EPS)
    x = np.abs(oracle.norm_rows(h, gain, EPS))
    sizes = [
        1 + x @ np.abs(oracle.weight_rows(w, f)).T for w, f in zip((gate, up), pair, strict=True)
    ]
    close(bench.get(out)[:4], want, sizes[0] * sizes[1], 4e-6)
    assert np.isnan(bench.get(out)[4]).all(), "a row too many was written"


def test_extreme_gates(bench):
    """One column of weights: gates of -200, 0, 200 beside an up of 3."""
    gates = np.zeros((32, 32), np.float32)
    gates[:3, 0] = (-200, 0, 200)
    ups = np.zeros((32, 32), np.float32)
    ups[:, 0] = 3
    x = np.eye(1, 32, dtype=np.float32)
    out = bench.out(1, 32)
    ops.gate_up_rows(
        bench.stream, upload(bench, gates.view(np.uint8), "f32"),
        upload(bench, ups.view(np.uint8), "f32"), bench.put(x), bench.put(np.ones(32, "f4")), out,
        1, ONE_HOT_EPS,
    )  # fmt: skip
    got = bench.get(out)[0]
    assert got[2] == 600 and (got[3:] == 0).all() and abs(got[0]) < 1e-30 and got[1] == 0


@pytest.mark.parametrize("width", [576, 1216])
def test_gated_rows_do_not_see_each_other(bench, rng, width):
    matrices = [upload(bench, stored(rng, 40, width, "q4_1"), "q4_1") for _ in range(2)]
    h = rng.standard_normal((40, width)).astype(np.float32)
    gain = bench.put(rng.uniform(0.5, 1.5, width).astype(np.float32))
    h[5, 7] = np.nan

    def run(first, n):
        out = bench.out(n, 40)
        ops.gate_up_rows(
            bench.stream, *matrices, bench.put(h[first : first + n]), gain, out, n, EPS
        )
        return bench.get(out)

    alone = np.concatenate([run(r, 1) for r in range(40)])
    assert np.isnan(alone[5]).all() and np.isnan(alone).sum() == 40
    for n in (2, 5, 17, 40):
        assert bits(run(0, n)) == bits(alone[:n]), n


# -- refusals --------------------------------------------------------------------------------------
def test_short_buffers_are_refused_before_anything_runs(bench, rng):
    matrix = upload(bench, stored(rng, 64, 64, "q4_1"), "q4_1")
    s, ones = bench.stream, np.ones((2, 64), np.float32)
    x, h, gain = bench.put(ones), bench.put(ones), bench.put(np.ones(64, "f4"))
    long = bench.out(3, 64)
    tiles = [bench.out(3, 2), bench.out(3, 2, dtype=np.int32)]
    plane = Rows(bench, 1, 32, formats.Q8_0, formats.Q5_1)
    angles, at = bench.put(np.ones((4, 16, 2), "f4")), bench.put(np.array([0], "i4"))
    small = upload(bench, stored(rng, 40, 64, "q4_1"), "q4_1")

    def qkv(matrix, plane=plane, q_dim=64, column=0):
        ops.qkv_rows(
            s, matrix, h, gain, angles, at, x, plane, 2, EPS,
            head_dim=32, q_dim=q_dim, kv_dim=32, column=column,
        )  # fmt: skip

    plane_too_short = Rows(bench, 1, 32, formats.Q8_0, formats.Q5_1)
    plane_too_short.rows = 2
    two_bytes_short = Rows(bench, 1, 32, formats.Q8_0, formats.Q5_1)
    two_bytes_short.k = two_bytes_short.k.view(0, (32,), np.uint8)
    refused = {
        "x holds": lambda: ops.add_product(s, matrix, x, long, 3),
        "h holds": lambda: ops.add_product(s, matrix, long, h, 3),
        "out holds": lambda: ops.gate_up_rows(s, matrix, matrix, long, gain, h, 3, EPS),
        "gate is": lambda: ops.gate_up_rows(s, matrix, small, h, gain, long, 2, EPS),
        "gain holds": lambda: ops.gate_up_rows(s, matrix, matrix, h, at, long, 2, EPS),
        "logits holds": lambda: ops.logits_rows(s, matrix, long, gain, h, *tiles, 3, EPS),
        "values holds": lambda: ops.logits_rows(s, matrix, h, gain, long, at, tiles[1], 2, EPS),
        "needs the sums": lambda: ops.pick_rows(s, *tiles, at, 1, 2, probability=at),
        "n_out is 40": lambda: qkv(small),
        "q_dim is 20": lambda: qkv(matrix, q_dim=20),
        "column is 8": lambda: qkv(matrix, column=8),
        "columns 96 to 160 of": lambda: qkv(matrix, column=96),
        "k holds": lambda: qkv(matrix, plane_too_short),
        "k holds 32 bytes, 34 are": lambda: qkv(matrix, two_bytes_short),
    }
    for text, call in refused.items():
        with pytest.raises(ArgumentError, match=text):
            call()
    assert np.isnan(bench.get(long)).all() and bits(bench.get(h)) == bits(ones)


# -- both devices ----------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_the_same_bits_on_both_devices(format):
    """Of what multiplies no matrices: those that do may have another body there."""
    from memra_lowlevel import Device

    def run(name):
        rng = np.random.default_rng(11)
        with Device(name) as device:
            bench = Bench(device, device.stream(name="both"))
            table = upload(bench, stored(rng, 320, 576, format), format)
            tokens, embedded = bench.put(rng.integers(0, 321, 50).astype("u4")), bench.out(50, 576)
            ops.embed_rows(bench.stream, table, tokens, embedded, 50)
            return bench.get(embedded)

    assert bits(run("host")) == bits(run("cuda:0"))


def test_rows_go_to_more_blocks_where_multiprocessors_have_nothing_to_do():
    """SmolLM2 on 132 multiprocessors: outputs in 30, 36, 96 and 36 blocks; see _BUSY_THREADS."""
    limits = SimpleNamespace(n_sms=132)
    gpu = SimpleNamespace(kind="cuda", arch="sm_90", limits=limits)
    host = SimpleNamespace(kind="host", arch="host", limits=limits)

    kernel = SimpleNamespace(attributes={"max_threads_per_block": 1024})

    def cut_of(device, shape, n_out, n_in, n):
        return ops._Cut(device, kernel, shape, ops.TiledMatrix("f16", n_out, n_in, None), n, False)

    def groups(shape, n_out, n_in, device=gpu):
        cuts = {n: cut_of(device, shape, n_out, n_in, n) for n in (1, 2, 5, 16)}
        for n, cut in cuts.items():
            assert cut.config.grid[1] == -(-n // cut.group)
            assert cut.config.shared_bytes // cut.group == cuts[1].config.shared_bytes
        return [cut.group for cut in cuts.values()]

    # No row is refused by the launch, in its words, as on the host device.
    for device in (gpu, host):
        none = cut_of(device, ops._ADDED, 64, 64, 0)
        assert none.group == 1 and none.config.grid[1] == 0
    # As many more blocks as there is room for, but four rows cost one of them as much as one.
    assert groups(ops._QKV, 960, 576) == [1, 2, 4, 4]
    assert groups(ops._ADDED, 576, 576) == [1, 2, 4, 8]
    assert groups(ops._ADDED_TWO, 576, 1536) == [1, 2, 2, 6]  # two rows cost as much as one
    assert groups(ops._GATED, 1536, 576) == [1, 2, 5, 16]  # there are blocks enough
    assert groups(ops._QKV, 4800, 576) == [1, 2, 5, 12]  # shared memory takes 15 rows
    assert groups(ops._ADDED, 576, 576, host) == [1, 2, 5, 16]
