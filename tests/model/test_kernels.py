"""The kernels of a Llama block against their float64 oracles, on fresh random input."""

import gguf
import numpy as np
import pytest
from conftest import Bench

from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS, chunk_blocks, tile_rows
from memra_lowlevel.reference import model as oracle

FORMATS = sorted(TILE_FORMATS)
SHAPES = [(32, 32), (33, 64), (1, 96), (192, 576), (576, 1536), (250, 160)]
NAN = np.float32(np.nan)


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


# -- products --------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(bench, rng, format, shape):
    n_out, n_in = shape
    rows = stored(rng, n_out, n_in, format)
    x = rng.standard_normal((3, n_in)).astype(np.float32)
    matrix = ops.TiledMatrix.upload(bench.device, bench.stream, rows, format)
    parts = bench.out(matrix.n_parts, 3, n_out)
    ops.matmul_rows(bench.stream, matrix, bench.put(x), parts, 3)
    got = bench.get(parts).astype(np.float64).sum(axis=0)
    size = np.abs(x).astype(np.float64) @ np.abs(oracle.weight_rows(rows, format)).T
    close(got, oracle.matmul_rows(rows, format, x), size, 2e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_each_row_gets_the_bits_it_gets_alone(bench, rng, format):
    n_out, n_in, most = 70, 576, 37
    rows = stored(rng, n_out, n_in, format)
    x = rng.standard_normal((most, n_in)).astype(np.float32)
    matrix = ops.TiledMatrix.upload(bench.device, bench.stream, rows, format)
    assert matrix.n_parts > 1

    def product(first, n):
        parts = bench.out(matrix.n_parts, n, n_out)
        ops.matmul_rows(bench.stream, matrix, bench.put(x[first : first + n]), parts, n)
        return bench.get(parts)

    alone = np.concatenate([product(r, 1) for r in range(most)], axis=1)
    assert not np.isnan(alone).any()
    for n in [*range(2, 18), 33, most]:
        assert bits(product(0, n)) == bits(alone[:, :n]), f"{n} rows"


def test_a_product_writes_its_columns_and_nothing_else(bench, rng):
    rows = stored(rng, 40, 64, "q4_1")
    matrix = ops.TiledMatrix.upload(bench.device, bench.stream, rows, "q4_1")
    x = bench.put(rng.standard_normal((2, 64)).astype(np.float32))
    whole, wide = bench.out(matrix.n_parts, 2, 40), bench.out(matrix.n_parts, 2, 100)
    ops.matmul_rows(bench.stream, matrix, x, whole, 2)
    ops.matmul_rows(bench.stream, matrix, x, wide, 2, width=100, column=30)
    got = bench.get(wide)
    assert bits(got[..., 30:70]) == bits(bench.get(whole))
    assert np.isnan(got[..., :30]).all() and np.isnan(got[..., 70:]).all()


def test_chunks_are_a_function_of_the_shape_and_cover_it():
    for n_out in (1, 32, 192, 576, 960, 3072, 49152):
        for n_in in (32, 64, 576, 1536, 8192):
            chunk = chunk_blocks(n_out, n_in)
            assert 1 <= chunk <= n_in // 32
            parts = -(-(n_in // 32) // chunk)
            assert (parts - 1) * chunk < n_in // 32 <= parts * chunk
    assert chunk_blocks(49152, 576) == 18, "the logits are one sum each"


def test_special_weights_and_activations(bench):
    rows = np.zeros((32, 34), np.uint8)
    rows[:, 2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    scales = np.array([0.0, -0.0, 6e-8, -1.0, 65504.0, np.inf, np.nan] + [1.0] * 25, np.float16)
    rows[:, :2] = scales[:, None].view(np.uint8)
    matrix = ops.TiledMatrix.upload(bench.device, bench.stream, rows, "q8_0")
    x = np.ones((2, 32), np.float32)
    x[1, 3] = np.inf
    parts = bench.out(1, 2, 32)
    ops.matmul_rows(bench.stream, matrix, bench.put(x), parts, 2)
    got = bench.get(parts)[0]
    with np.errstate(invalid="ignore"):
        want = oracle.matmul_rows(rows, "q8_0", x)
    np.testing.assert_array_equal(got[0], want[0].astype(np.float32))
    assert (np.isnan(got[1]) == np.isnan(want[1])).all()


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


# -- norm, rotation, activation --------------------------------------------------------------------
@pytest.mark.parametrize("width", [32, 64, 255, 256, 257, 576, 2048])
@pytest.mark.parametrize("n_parts", [0, 1, 5])
def test_add_norm(bench, rng, width, n_parts):
    n = 3
    h = rng.standard_normal((n, width)).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    parts = rng.standard_normal((n_parts, n, width)).astype(np.float32) if n_parts else None
    h_d, out = bench.put(h), bench.out(n, width)
    parts_d = None if parts is None else bench.put(parts)
    ops.add_norm(bench.stream, h_d, parts_d, n_parts, bench.put(weight), out, n, 1e-5)
    total, normed = oracle.add_norm(h, parts, weight, 1e-5)
    close(bench.get(h_d), total, 1 + np.abs(total), 1e-6)
    close(bench.get(out), normed, 1 + np.abs(normed), 2e-6)
    if parts is None:
        assert bits(bench.get(h_d)) == bits(h)


def test_add_norm_rows_do_not_see_each_other(bench, rng):
    h = rng.standard_normal((17, 576)).astype(np.float32)
    parts = rng.standard_normal((4, 17, 576)).astype(np.float32)
    weight = bench.put(rng.standard_normal(576).astype(np.float32))
    h[5, 7] = np.nan

    def run(first, n):
        h_d, out = bench.put(h[first : first + n]), bench.out(n, 576)
        ops.add_norm(
            bench.stream, h_d, bench.put(parts[:, first : first + n]), 4, weight, out, n, 1e-5
        )
        return np.concatenate([bench.get(h_d), bench.get(out)], axis=1)

    together = run(0, 17)
    alone = np.concatenate([run(r, 1) for r in range(17)])
    finite = np.arange(17) != 5
    assert bits(together[finite]) == bits(alone[finite])
    assert np.isnan(together[5, 576:]).all() and not np.isnan(together[finite]).any()


@pytest.mark.parametrize("position", [0, 1, 94, 97, 100])
@pytest.mark.parametrize("n_rot", [64, 32])
def test_split_rope(bench, rng, position, n_rot):
    n, heads, kv_heads, dim = 5, 3, 1, 64
    q_dim, kv_dim = heads * dim, kv_heads * dim
    parts = rng.standard_normal((2, n, q_dim + 2 * kv_dim)).astype(np.float32)
    angles = oracle.rope_angles(100, n_rot, 1e4).astype(np.float32)
    q, k, v = bench.out(n, q_dim), bench.out(n, kv_dim), bench.out(n, kv_dim)
    ops.split_rope(
        bench.stream, bench.put(parts), 2, bench.put(angles), bench.put(np.array([position], "i4")),
        q, k, v, n, head_dim=dim, q_dim=q_dim, kv_dim=kv_dim,
    )  # fmt: skip
    want = oracle.split_rope(parts, angles, position, q_dim, kv_dim, dim)
    for got, expected in zip((q, k, v), want, strict=True):
        close(bench.get(got), expected, 1 + np.abs(expected), 1e-6)
    past = position + np.arange(n) >= 100
    assert (np.isnan(bench.get(q)).any(axis=1) == past).all()
    assert not np.isnan(bench.get(v)).any()


def test_swiglu(bench, rng):
    parts = rng.standard_normal((3, 4, 2 * 160)).astype(np.float32) * 3
    parts[:, 0, :4] = [[-200], [0], [0]]
    parts[:, 1, :4] = [[200], [0], [0]]
    out = bench.out(4, 160)
    ops.swiglu(bench.stream, bench.put(parts), 3, out, 4, 160)
    want = oracle.swiglu(parts)
    size = np.abs(parts.astype(np.float64)).sum(axis=0)
    close(bench.get(out), want, 1 + size[:, :160] * size[:, 160:], 1e-6)


# -- argmax ----------------------------------------------------------------------------------------
def _argmax(bench, logits, probability=False):
    n, n_cols = logits.shape
    out = bench.out(n + 1, dtype=np.int32)
    prob = bench.out(n + 1) if probability else None
    ops.argmax_rows(bench.stream, bench.put(logits), out, n, n_cols, probability=prob)
    assert bench.get(out)[n] == -1, "a row too many was written"
    return bench.get(out)[:n], bench.get(prob)[:n] if probability else None


@pytest.mark.parametrize("n_cols", [1, 2, 31, 1023, 1024, 1025, 5000, 49152])
def test_argmax(bench, rng, n_cols):
    logits = rng.standard_normal((3, n_cols)).astype(np.float32)
    logits[1] = rng.integers(0, 3, n_cols)  # ties
    got, _ = _argmax(bench, logits)
    np.testing.assert_array_equal(got, oracle.argmax_rows(logits)[0])
    np.testing.assert_array_equal(got, logits.argmax(axis=1))


def test_argmax_edges(bench):
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
    logits = np.array([row for row, _ in rows.values()], np.float32)
    got, _ = _argmax(bench, logits)
    for (name, (_, want)), have in zip(rows.items(), got, strict=True):
        assert have == want, name
    np.testing.assert_array_equal(got, oracle.argmax_rows(logits)[0])


@pytest.mark.parametrize("n_cols", [1, 1000, 49152])
def test_probability(bench, rng, n_cols):
    logits = (rng.standard_normal((4, n_cols)) * 4).astype(np.float32)
    logits[2, 0] = np.nan
    logits[3, n_cols // 2 :] = -np.inf
    logits[3, 0] = 1.0
    ids, got = _argmax(bench, logits, probability=True)
    want_ids, want = oracle.argmax_rows(logits)
    np.testing.assert_array_equal(ids, want_ids)
    close(got.astype(np.float64), want, np.nan_to_num(want, nan=1.0), 2e-5)


# -- refusals --------------------------------------------------------------------------------------
def test_short_buffers_are_refused_before_anything_runs(bench, rng):
    from memra_lowlevel.errors import ArgumentError

    matrix = ops.TiledMatrix.upload(bench.device, bench.stream, stored(rng, 64, 64, "q4_1"), "q4_1")
    x, parts = bench.put(np.ones((2, 64), np.float32)), bench.out(1, 2, 64)
    with pytest.raises(ArgumentError, match="x holds"):
        ops.matmul_rows(bench.stream, matrix, x, bench.out(3, 3, 64), 3)
    with pytest.raises(ArgumentError, match="parts holds"):
        ops.matmul_rows(bench.stream, matrix, bench.put(np.ones((3, 64), "f4")), parts, 3)
    assert np.isnan(bench.get(parts)).all()
    with pytest.raises(ArgumentError, match="logits"):
        ops.argmax_rows(bench.stream, x, bench.out(3, dtype=np.int32), 3, 64)
    ops.matmul_rows(bench.stream, matrix, x, parts, 2)
    assert not np.isnan(bench.get(parts)).any()


# -- both devices ----------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_the_same_bits_on_both_devices(rng, format):
    """All kernels of a block but the two with an exponential."""
    from memra_lowlevel import Device

    n, rows = 5, stored(rng, 320, 576, format)
    x, h = (rng.standard_normal((n, 576)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(320).astype(np.float32)
    angles = oracle.rope_angles(20, 64, 1e4).astype(np.float32)
    tokens, positions = rng.integers(0, 320, n).astype("u4"), np.array([7], "i4")

    def run(name):
        with Device(name) as device:
            bench = Bench(device, device.stream(name="both"))
            s, matrix = bench.stream, ops.TiledMatrix.upload(device, bench.stream, rows, format)
            embedded, parts = bench.out(n, 576), bench.out(matrix.n_parts, n, 320)
            ops.embed_rows(s, matrix, bench.put(tokens), embedded, n)
            ops.matmul_rows(s, matrix, bench.put(x), parts, n)
            q, k, v = bench.out(n, 192), bench.out(n, 64), bench.out(n, 64)
            ops.split_rope(
                s, parts, matrix.n_parts, bench.put(angles), bench.put(positions), q, k, v, n,
                head_dim=64, q_dim=192, kv_dim=64,
            )  # fmt: skip
            sums, normed = bench.put(h[:, :320]), bench.out(n, 320)
            ops.add_norm(s, sums, parts, matrix.n_parts, bench.put(weight), normed, n, 1e-5)
            best = bench.out(n, dtype=np.int32)
            ops.argmax_rows(s, sums, best, n, 320)
            return [bench.get(b) for b in (embedded, parts, q, k, v, sums, normed, best)]

    for host, cuda in zip(run("host"), run("cuda:0"), strict=True):
        assert bits(host) == bits(cuda)
