"""The kernels of a Llama block against their float64 oracles, on fresh random input."""

import gguf
import numpy as np
import pytest
from conftest import Bench
from products import EPS, FORMATS, ONE_HOT_EPS, Qkv, Rows, bits, close, stored, upload

from memra_lowlevel import formats
from memra_lowlevel.errors import ArgumentError
from memra_lowlevel.kernels import kv_append
from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS, tile_rows
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
        "columns 96 to 160 are not all": lambda: qkv(matrix, column=96),
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
