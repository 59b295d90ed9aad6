"""Formats: gguf and ml_dtypes as independent oracles, fixed vectors, ties, edges, refusals."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from memra_lowlevel import errors, formats
from memra_lowlevel.formats import BF16, E4M3, F16, F32, FORMATS, Q4_0, Q5_1, Q8_0

GGUF = {
    Q8_0: gguf.GGMLQuantizationType.Q8_0,
    Q5_1: gguf.GGMLQuantizationType.Q5_1,
    Q4_0: gguf.GGMLQuantizationType.Q4_0,
}
SCALED = sorted(GGUF, key=str)


def oracle_bytes(fmt, x):
    # gguf walks groups of 16 rows in Python, so rows are made long.
    wide = x.reshape(-1, 32 * 1024) if x.size % (32 * 1024) == 0 else x
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(wide, GGUF[fmt]).reshape(x.shape[0], -1)


def padded(*head):
    row = np.zeros(32, np.float32)
    row[: len(head)] = head
    return row


def random_blocks(rng, n):
    x = rng.standard_normal((n, 32), dtype=np.float32)
    return x * np.exp2(rng.integers(-20, 20, (n, 1))).astype(np.float32)


@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_a_million_random_blocks_equal_gguf_byte_for_byte(fmt):
    rng = np.random.default_rng(fmt.block_bytes)
    for _ in range(8):
        x = random_blocks(rng, 131_072)
        ours = fmt.encode(x)
        assert np.array_equal(ours, oracle_bytes(fmt, x))
        head = ours[:4096]
        with np.errstate(invalid="ignore"):
            theirs = gguf.quants.dequantize(head, GGUF[fmt])
        assert np.array_equal(fmt.decode(head).view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_ties_zeros_and_tiny_scales_equal_gguf(fmt):
    rng = np.random.default_rng(7)
    halves = rng.integers(-254, 255, (2048, 32)).astype(np.float32) / 2
    halves[:, rng.integers(0, 32)] = 127
    fifths = rng.integers(0, 63, (2048, 32)).astype(np.float32) / 2
    fifths[:, 0], fifths[:, 1] = 0, 31
    eighths = rng.integers(-32, 33, (2048, 32)).astype(np.float32) / 4
    eighths[:, 5] = 8
    eighths[::2, 9] = -8
    zeros = rng.choice(np.array([0.0, -0.0, 1.0, -1.0], np.float32), (512, 32))
    zeros[:64] = 0
    # float16 subnormal and zero scales; 1 / d stays finite down to about 2.9e-39.
    tiny = random_blocks(rng, 2048) * np.exp2(rng.integers(-60, -14, (2048, 1))).astype(np.float32)
    constant = np.repeat(rng.standard_normal((256, 1), dtype=np.float32), 32, axis=1)
    huge = random_blocks(rng, 256) * np.float32(1e30)
    for x in (halves, fifths, eighths, tiny, constant, huge):
        assert np.array_equal(fmt.encode(x), oracle_bytes(fmt, x))
    ours, theirs = fmt.encode(zeros), oracle_bytes(fmt, zeros)
    if fmt is Q5_1:  # the sign of a zero minimum is free in gguf (SIMD order); ours is the first
        ours, theirs = ours.copy(), theirs.copy()
        ours[:, 3] &= np.where(ours[:, 2] | (ours[:, 3] & 0x7F), 0xFF, 0x7F).astype(np.uint8)
        theirs[:, 3] &= np.where(theirs[:, 2] | (theirs[:, 3] & 0x7F), 0xFF, 0x7F).astype(np.uint8)
    assert np.array_equal(ours, theirs)


RAMP = np.arange(32, dtype=np.float32) - 16
SINE = (3 * np.sin(0.7 * np.arange(32, dtype=np.float64))).astype(np.float32)
VECTORS = [
    (Q8_0, RAMP, "083081899199a1a9b1b9c0c8d0d8e0e8f0f8000810182028303840474f575f676f77"),
    (Q5_1, RAMP, "003c00cc0000ffff00112233445566778899aabbccddeeff"),
    (Q4_0, RAMP, "0040809191a2a2b3b3c4c4d5d5e6e6f7f7f8"),
    (Q8_0, SINE, "012600527e6e2bd39182af02547e6d29d18f83b104567f6c27cf8e83b306577f6b25"),
    (Q5_1, SINE, "1e32e5c11e3e7cf80f6a0fadf5da429016006a0fadf4da42"),
    (Q4_0, SINE, "f5b5f8d38031051b6fbffdf8d38031051b6f"),
    (
        Q8_0,
        padded(127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5),
        "003c7f010203fffefd04" + "00" * 24,
    ),
    (
        Q5_1,
        padded(31, 0.5, 1.5, 2.5, 3.5, 15.5, 16.5, 30.5),
        "003c0000e10000000f0102030400010f" + "00" * 8,
    ),
    (Q4_0, padded(8, -8, 7.49, -7.5, 0.5, -0.5), "00bc808f818f8889" + "88" * 10),
    (Q4_0, padded(-8, 8, 7.49, -7.5, 0.5, -0.5), "003c808f8f818988" + "88" * 10),
    (Q8_0, padded(), "00" * 34),
    (Q4_0, padded(), "0080" + "88" * 16),
    (Q5_1, np.full(32, 3.25, np.float32), "00008042" + "00" * 20),
    (Q8_0, np.full(32, 1e-6, np.float32), "0000" + "7f" * 32),
]


@pytest.mark.parametrize(("fmt", "x", "expected"), VECTORS)
def test_fixed_vectors(fmt, x, expected):
    assert fmt.encode(x).tobytes().hex() == expected


def test_q5_1_walks_its_fifth_bit():
    x = np.array([15, 16, 31, 0] * 8, np.float32)
    assert np.array_equal(Q5_1.decode(Q5_1.encode(x)), x)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_round_trip_error_is_bounded_by_half_a_step(fmt):
    x = np.random.default_rng(3).standard_normal((4096, 96), dtype=np.float32)
    back = fmt.decode(fmt.encode(x))
    assert back.shape == x.shape and back.dtype == np.float32
    blocks = np.abs(x.reshape(-1, 32))
    span = x.reshape(-1, 32).max(1) - x.reshape(-1, 32).min(1)
    error = np.abs(back - x).reshape(-1, 32)
    relative = {F32: 0.0, F16: 2.0**-11, BF16: 2.0**-8, E4M3: 2.0**-4}
    if fmt is Q8_0:
        bound = 0.51 * blocks.max(1)[:, None] / 127 + 2.0**-11 * blocks
    elif fmt is Q5_1:
        bound = 0.51 * span[:, None] / 31 + 2.0**-11 * (blocks.max(1) + span)[:, None]
    elif fmt is Q4_0:
        bound = 1.01 * blocks.max(1)[:, None] / 8 + 2.0**-11 * blocks
    else:
        bound = relative[fmt] * blocks + (2.0**-10 if fmt is E4M3 else 2.0**-25)
    assert (error <= bound).all()


def all_float16_neighbours():
    half = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    x = half[np.isfinite(half)].astype(np.float32)
    middle = ((x[:-1].astype(np.float64) + x[1:]) / 2).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), middle, -middle])
    return np.resize(x, (x.size // 32 + 1, 32))


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(F16, np.float16), (BF16, ml_dtypes.bfloat16)], ids=["f16", "bf16"]
)
def test_halves_equal_their_oracle(fmt, dtype):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, (1 << 15, 32), dtype=np.uint32)
    for x in (all_float16_neighbours(), bits.view(np.float32)):
        keep = np.where(np.isnan(x), np.float32(0), x)
        with np.errstate(over="ignore"):
            expected = keep.astype(dtype)
        got = fmt.encode(keep, check=False)
        assert np.array_equal(got.reshape(-1, 2), expected.view(np.uint8).reshape(-1, 2))
        back = fmt.decode(got)
        assert np.array_equal(back.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_e4m3_equals_its_oracle_and_saturates():
    rng = np.random.default_rng(0)
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(E4M3.decode(codes), theirs, equal_nan=True)
    grid = np.sort(theirs[np.isfinite(theirs)])
    middle = ((grid[:-1].astype(np.float64) + grid[1:]) / 2).astype(np.float32)
    edges = [grid, middle, np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, -9e9)]
    x = np.concatenate([*edges, rng.uniform(-460, 460, 1 << 16)]).astype(np.float32)
    x = np.concatenate([x, (rng.standard_normal(1 << 16) * 2.0**-7).astype(np.float32)])
    x = np.resize(x, (x.size // 32 + 1, 32)).astype(np.float32)
    expected = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(E4M3.encode(x), expected)  # all below 464, where both agree
    big = padded(500, -500, 464, 1e30, -1e30, np.inf, -np.inf, np.nan, -0.0, 2.0**-9, 2.0**-10, 1)
    got = E4M3.encode(big, check=False)[:12]
    assert got.tobytes().hex() == "7efe7e7efe7efe7f80010038"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_element_spoils_its_block_alone(fmt, bad):
    x = np.random.default_rng(1).standard_normal((3, 128), dtype=np.float32)
    clean = fmt.encode(x)
    x[1, 70] = bad
    with pytest.raises(errors.ArgumentError, match=r"\(1, 70\)"):
        fmt.encode(x)
    dirty = fmt.encode(x, check=False)
    bb = fmt.block_bytes
    changed = (dirty != clean).reshape(3, 4, bb).any(axis=2)
    assert changed.sum() == 1 and changed[1, 2]
    back = fmt.decode(dirty)
    if fmt.scaled:
        assert np.isnan(back[1, 64:96]).all() and np.isfinite(back).sum() == 3 * 128 - 32
    elif fmt is E4M3 and not np.isnan(bad):
        assert back[1, 70] == np.copysign(448, bad)
    else:
        assert np.array_equal(back[1, 70], np.float32(bad), equal_nan=True)


def test_scales_whose_reciprocal_overflows_encode_as_zero_codes():
    x = np.full(32, 1e-38, np.float32)
    assert Q8_0.encode(x).tobytes() == bytes(34)
    assert Q4_0.encode(x).tobytes().hex() == "0080" + "88" * 16
    spread = padded(1e-38)
    assert Q5_1.encode(spread).tobytes() == bytes(24)


def test_the_first_of_zeros_of_both_signs_is_the_minimum():
    x = np.zeros((2, 32), np.float32)
    x[0, 1::2], x[1, ::2] = -0.0, -0.0
    assert Q5_1.encode(x)[:, :4].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0x80]]


def test_a_float32_range_beyond_float32_is_poison():
    x = padded(3e38, -3e38)
    assert np.isnan(Q5_1.decode(Q5_1.encode(x))).all()


def test_sizes_names_and_refusals():
    assert [f.block_bytes for f in FORMATS.values()] == [128, 64, 64, 34, 24, 18, 32]
    assert [f.bits for f in (Q8_0, Q5_1, Q4_0, E4M3)] == [8.5, 6, 4.5, 8]
    assert Q8_0.row_bytes(96) == 102 and Q8_0.row_bytes(192) == 204
    assert Q8_0.row_bytes(1024) + Q5_1.row_bytes(1024) == 1856
    assert formats.block_bytes(Q5_1) == 24 and formats.row_bytes(Q4_0, 64) == 36
    assert formats.by_name("FP8") is E4M3 and formats.by_name(" q8_0 ") is Q8_0
    for call in (
        lambda: formats.by_name("q3_k"),
        lambda: Q8_0.row_bytes(80),
        lambda: Q8_0.row_bytes(0),
        lambda: Q8_0.encode(np.zeros(33, np.float32)),
        lambda: Q8_0.decode(np.zeros(35, np.uint8)),
        lambda: Q8_0.encode(np.float32(1)),
    ):
        with pytest.raises(errors.ArgumentError):
            call()
    assert formats.decode(F32, formats.encode(F32, SINE)).tobytes() == SINE.tobytes()
