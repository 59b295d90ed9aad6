"""Attention on tensor cores in f16 over blocks with scales: what only these formats have."""

import attend_bits
import numpy as np
import pytest
from rig import error, normal, reference, same
from test_kv_attend_f16 import BOUND, F16_KERNEL, NEAR, PACKED, agree, filled

from memra_lowlevel import Device, errors
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.formats import F16, Q4_0, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend, kv_attend_f16, kv_attend_mma

of_values = pytest.mark.parametrize("fmt", [Q8_0, Q4_0, Q5_1], ids=str)
kinds = pytest.mark.parametrize(("k_format", "v_format"), PACKED, ids=str)
LIFTED = {Q8_0: 512.0, Q5_1: 2048.0, Q4_0: 8192.0}
"""Scales from which scale * code leaves the range of f16."""


def patched(planes, buffer, fmt, keys, blocks, *, scale=None, minimum=None):
    """Write scales, and minima, of the given blocks of the given keys."""
    size = fmt.row_bytes(32)
    row_bytes = planes.k_row if buffer is planes.k else planes.v_row
    raw = buffer.to_numpy(planes.stream).copy()
    rows = raw[: planes.rows * row_bytes].reshape(planes.rows, -1, size)
    for at, value in ((0, scale), (2, minimum)):
        if value is not None:
            halves = np.broadcast_to(np.float16(value), (len(keys), len(blocks))).copy()
            rows[np.ix_(keys, blocks, [at, at + 1])] = halves.view(np.uint8).reshape(
                *halves.shape, 2
            )
    buffer.copy_from(planes.stream, raw)


@kinds
@pytest.mark.parametrize("head_dim", [128, 256])
def test_lengths_around_halves_of_a_step(stream, k_format, v_format, head_dim):
    """Two warps share a step: one of them may see no key of it, or a single one."""
    planes, rng = filled(stream, head_dim, 70, k_format, v_format, seed=1)
    for n in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65):
        agree(planes, normal(rng, 1, 4, head_dim), n - 1)


@pytest.mark.parametrize(
    ("v_format", "head_dim", "heads"),
    [(Q8_0, 64, 8), (Q8_0, 128, 8), (Q8_0, 256, 2), (Q4_0, 64, 8), (Q4_0, 128, 8), (Q4_0, 256, 4),
     (Q5_1, 64, 8), (Q5_1, 128, 8)],
    ids=str,
)  # fmt: skip
def test_heads_begin_anywhere_in_a_piece(stream, v_format, head_dim, heads):
    """Pieces of 16 bytes have the ends of two heads, and a scale may be anywhere in them."""
    planes, rng = filled(stream, head_dim, 50, Q8_0, v_format, heads=heads, seed=2)
    agree(planes, normal(rng, 2, heads, head_dim), 45)


@of_values
def test_scales_from_tiny_to_huge(stream, fmt):
    """From the least f16 to the greatest power of 2, in one context and in one step."""
    planes, rng = filled(stream, 64, 200, Q8_0, fmt, seed=5)
    q = normal(rng, 2, 8, 64)
    blocks = np.arange(planes.n_kv_heads * 2)
    for powers in ((-24, -24), (-24, 15), (15, -24), (15, 15)):
        sizes = 2.0 ** np.round(np.linspace(*powers, 200))[:, None]
        minimum = sizes * rng.choice([-1.0, 1.0], (200, len(blocks))) if fmt is Q5_1 else None
        patched(planes, planes.v, fmt, np.arange(200), blocks, scale=sizes, minimum=minimum)
        for size in (1.0, 6.0):
            agree(planes, q * np.float32(size), 190, bound=BOUND)
        agree(planes, q, 190, bound=BOUND, window=70)
    steps = 2.0 ** rng.integers(-24, 16, (200, len(blocks)))  # any beside any
    patched(planes, planes.v, fmt, np.arange(200), blocks, scale=steps, minimum=minimum)
    agree(planes, q, 190, bound=BOUND)


def test_scales_of_keys_from_tiny_to_huge(stream):
    planes, rng = filled(stream, 128, 100, Q8_0, Q8_0, seed=6)
    q = normal(rng, 2, 4, 128)
    blocks = np.arange(planes.n_kv_heads * 4)
    for power in (-24, -14, 0, 15):
        patched(planes, planes.k, Q8_0, np.arange(100), blocks, scale=2.0**power)
        agree(planes, q * np.float32(2.0 ** (-6 - power)), 90, bound=BOUND)


@of_values
def test_negative_scales(stream, fmt):
    """q4_0 writes them; of the others a foreign cache may have them, in K too."""
    planes, rng = filled(stream, 128, 100, Q8_0, fmt, seed=7)
    for buffer, of_it in ((planes.k, Q8_0), (planes.v, fmt)):
        raw = buffer.to_numpy(stream).copy()
        row = planes.k_row if buffer is planes.k else planes.v_row
        blocks = raw[: 100 * row].reshape(-1, of_it.row_bytes(32))
        blocks[::3, 1] ^= 0x80  # the sign
        buffer.copy_from(stream, raw)
    q = normal(rng, 4, 8, 128)
    agree(planes, q, 88)
    agree(planes, q, 88, window=40)


@of_values
@pytest.mark.parametrize("key", [40, 73], ids=["seen by all", "seen from row 3 on"])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
def test_a_value_over_the_range_of_f16(stream, fmt, key, sign):
    """Rows that see it are right, the others have the bits that they had."""
    planes, rng = filled(stream, 128, 100, Q8_0, fmt, seed=8)
    q = normal(rng, 6, 4, 128)
    planes.set_len(70)
    clean = planes.attend(q, **F16_KERNEL)
    for scale in (LIFTED[fmt] * 0.999, LIFTED[fmt], 32768.0, 65504.0):
        minimum = 60000.0 if fmt is Q5_1 else None
        patched(planes, planes.v, fmt, [key], [5], scale=sign * scale, minimum=minimum)
        got = agree(planes, q, 70, bound=BOUND)
        first = max(0, key - 70)
        assert same(got[:first], clean[:first])
        assert np.abs(got[first:, 2:, 32:64]).max() > 10


@of_values
def test_weights_of_a_lifted_key_stay_in_range(stream, fmt):
    """The key with the greatest weight has the greatest scale."""
    planes, rng = filled(stream, 64, 64, Q8_0, fmt, seed=9)
    q = normal(rng, 1, 4, 64)
    k = normal(rng, 64, planes.n_kv_heads * 64) * np.float32(0.01)
    q_of_head = q.reshape(1, planes.n_kv_heads, -1, 64)[:, :, 0]
    k[37] = q_of_head.reshape(-1) * np.float32(8.0)
    planes.load(k, normal(rng, 64, planes.n_kv_heads * 64))
    patched(planes, planes.v, fmt, [37], np.arange(planes.n_kv_heads * 2), scale=65504.0)
    agree(planes, q, 60, bound=BOUND)


BAD = [(Q8_0, 0), (Q4_0, 0), (Q5_1, 0), (Q5_1, 2)]


@pytest.mark.parametrize(("fmt", "field"), BAD, ids=str)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("key", [40, 73, 85], ids=["seen by all", "from row 3 on", "by none"])
def test_one_bad_scale_or_minimum_spoils_its_block_only(stream, fmt, field, bits, key):
    """A V block whose scale (byte 0) or minimum (byte 2) is not finite: key, head 1, block 1."""
    planes, rng = filled(stream, 128, 100, Q8_0, fmt)
    q = normal(rng, 6, 4, 128)
    planes.set_len(70)
    clean = planes.attend(q, **F16_KERNEL)
    at = key * planes.v_row + 5 * fmt.row_bytes(32) + field
    planes.v.view(at, (1,), np.uint16).copy_from(stream, np.array([bits], np.uint16))
    spoiled = planes.attend(q, **F16_KERNEL)
    bad = np.zeros((6, 4, 128), bool)
    bad[max(0, key - 70) :, 2:, 32:64] = True
    assert same(spoiled[~bad], clean[~bad]) and np.isnan(spoiled[bad]).all()


@pytest.mark.parametrize("at", [0, 2], ids=["scale", "minimum"])
def test_a_bad_block_does_not_lift_its_neighbours(stream, at):
    """What is not finite says nothing about the size of the other scales, which are subnormal."""
    planes, rng = filled(stream, 128, 60, Q8_0, Q5_1, seed=11)
    blocks = np.arange(planes.n_kv_heads * 4)
    patched(planes, planes.v, Q5_1, np.arange(60), blocks, scale=2.0**-20, minimum=-(2.0**-17))
    q = normal(rng, 4, 8, 128)
    planes.set_len(50)
    clean = planes.attend(q, **F16_KERNEL)
    wild = {"scale": np.inf} if at == 0 else {"minimum": np.inf}
    patched(planes, planes.v, Q5_1, [33], [1], **wild)
    spoiled = planes.attend(q, **F16_KERNEL)
    bad = np.zeros(clean.shape, bool)
    bad[:, : 8 // planes.n_kv_heads, 32:64] = True
    assert same(spoiled[~bad], clean[~bad]) and np.isnan(spoiled[bad]).all()


@pytest.mark.parametrize(
    ("k_format", "v_format", "head_dim", "heads"),
    [(Q8_0, Q8_0, 128, 1), (Q8_0, Q8_0, 64, 2), (F16, Q4_0, 64, 3)],
    ids=str,
)
def test_rows_that_no_bulk_copy_takes_are_clean(k_format, v_format, head_dim, heads):
    """In check mode: nothing is read that nobody wrote, behind a slice of V neither."""
    with host_options(check=True, thread_order="reverse"), Device("host") as device:
        stream = device.stream(name="checked")
        planes, rng = filled(stream, head_dim, 44, k_format, v_format, heads=heads)
        agree(planes, normal(rng, 2, heads, head_dim), 40)
        stream.close()


@pytest.mark.parametrize(
    ("head_dim", "fmt"), [(64, Q8_0), (256, Q8_0), (64, Q4_0), (256, Q5_1)], ids=str
)
def test_a_bad_scale_spoils_its_block_of_any_head(stream, head_dim, fmt):
    """Wherever in a piece the head begins: each block of each head in turn."""
    planes, rng = filled(stream, head_dim, 50, Q8_0, fmt)
    heads, blocks = planes.n_kv_heads, head_dim // 32
    q = normal(rng, 2, heads, head_dim)
    planes.set_len(40)
    clean = planes.attend(q, **F16_KERNEL)
    for head in range(heads):
        for block in range(blocks):
            at = 41 * planes.v_row + (head * blocks + block) * fmt.row_bytes(32)
            own = planes.v.view(at, (1,), np.uint16)
            before = own.to_numpy(stream)
            own.copy_from(stream, np.array([0x7C00], np.uint16))
            spoiled = planes.attend(q, **F16_KERNEL)
            bad = np.zeros(clean.shape, bool)
            bad[1, head, block * 32 : block * 32 + 32] = True
            assert same(spoiled[~bad], clean[~bad]), (head, block)
            assert np.isnan(spoiled[bad]).all(), (head, block)
            own.copy_from(stream, before)


def test_a_bad_scale_of_a_key_spoils_the_rows_that_see_it(stream):
    planes, rng = filled(stream, 128, 100, Q8_0, Q8_0)
    q = normal(rng, 6, 4, 128)
    planes.set_len(70)
    clean = planes.attend(q, **F16_KERNEL)
    for bits in (0x7C00, 0x7E00):
        at = 73 * planes.k_row + 5 * 34
        planes.k.view(at, (1,), np.uint16).copy_from(stream, np.array([bits], np.uint16))
        spoiled = planes.attend(q, **F16_KERNEL)
        assert same(spoiled[:3], clean[:3]) and same(spoiled[:, :2], clean[:, :2])
        assert np.isnan(spoiled[3:, 2:]).all()


@kinds
def test_a_bad_query_spoils_itself_only(stream, k_format, v_format):
    planes, rng = filled(stream, 64, 100, k_format, v_format)
    q = normal(rng, 3, 2 * planes.n_kv_heads, 64)
    for options in ({}, {"softcap": 4.0}):
        attend_bits.a_bad_query_spoils_itself_only(planes, q, "f16", **options)


@kinds
def test_queries_of_any_size(stream, k_format, v_format):
    planes, rng = filled(stream, 64, 100, k_format, v_format)
    q = normal(rng, 2, 8, 64)
    for size in (0.0, 1e-30, 1e-3, 1e3):
        agree(planes, q * np.float32(size), 90, bound=NEAR if size <= 1 else BOUND)
    q[:, :, 0] *= 2.0**12  # one channel far above the others
    agree(planes, q * np.float32(2.0**-10), 90, bound=BOUND)


def test_queries_at_the_end_of_the_range(stream):
    planes, _ = filled(stream, 128, 64, Q8_0, Q8_0)
    attend_bits.queries_at_the_end_of_the_range(planes, "f16", BOUND)


@pytest.mark.parametrize(("fmt", "part"), [(Q8_0, 29), (Q5_1, 31), (Q4_0, 33)], ids=str)
def test_a_weight_is_right_to_a_part_of_the_greatest(stream, fmt, part):
    """One key has nearly all weight and no value: what is left are the others, of equal weights."""
    planes, rng = filled(stream, 128, 32, Q8_0, fmt)
    heads = planes.n_kv_heads
    k, v = np.zeros((32, heads, 128), np.float32), normal(rng, 32, heads, 128)
    k[1:, :, 0] = k[0, :, 1] = 1.0
    v[0] = 0.0
    planes.load(k.reshape(32, -1), v.reshape(32, -1))
    sizes = np.abs(planes.decoded(32)[1]).sum(0).max()
    q = np.zeros((1, heads, 128), np.float32)
    planes.set_len(31)
    for power in np.arange(2.0, 38.0, 0.4):
        q[..., 0], q[..., 1] = 0.3, 0.3 + power * np.log(2.0)
        got, wanted = (
            planes.attend(q, scale=1.0, **F16_KERNEL),
            reference(planes, q, 31, scale=1.0)[0],
        )
        assert np.abs(got - wanted).max() <= NEAR * np.abs(wanted).max() + 2.0**-part * sizes


def test_scores_beyond_all_measure_are_never_wrong_in_silence(stream):
    """An answer lies among the values of the keys, or is NaN: nothing else that is finite."""
    planes, rng = filled(stream, 128, 200, Q8_0, Q8_0)
    q = normal(rng, 2, 4, 128)
    planes.set_len(198)
    values = planes.decoded(200)[1].transpose(1, 0, 2)  # [kv head, key, channel]
    low, high = (
        np.repeat(f(values, axis=1), 2, axis=0) - e for f, e in ((np.min, 1e-4), (np.max, -1e-4))
    )
    for exponent in range(0, 120, 7):
        got = planes.attend(q * np.float32(2.0**exponent), **F16_KERNEL)
        finite = np.isfinite(got)
        assert ((got >= low) & (got <= high))[finite].all(), exponent


@pytest.mark.parametrize(
    ("k_format", "v_format", "shares"),
    [(Q8_0, Q8_0, 2), (Q8_0, F16, 2), (F16, Q5_1, 2), (F16, F16, 1)],
    ids=str,
)
def test_each_of_two_warps_leaves_its_own_share(stream, k_format, v_format, shares):
    """A workspace that is a float too small for all shares is refused."""
    assert kv_attend_f16.shares(k_format, v_format) == shares
    planes, rng = filled(stream, 128, 300, k_format, v_format)
    parts = kv_attend_f16.n_parts(k_format, v_format, 128, planes.n_kv_heads)
    slots = kv_attend_mma.n_slots(300, parts) * shares
    planes.set_len(298)
    q = planes.upload(normal(rng, 1, 4, 128))
    out = planes.poisoned(2048).view(0, (1, 4, 128), np.float32)
    options = {
        "len_d": planes.len_d, "k_format": k_format, "v_format": v_format, "rows": 300,
        "n_kv_heads": planes.n_kv_heads, "head_dim": 128, **F16_KERNEL,
    }  # fmt: skip
    n_floats = 4 * slots * 130
    exact = planes.poisoned(n_floats * 4).view(0, (n_floats,), np.float32)
    kv_attend.attend(stream, q, planes.k, planes.v, out, workspace=exact, **options)
    wanted = reference(planes, q.to_numpy(stream), 298)[0]
    assert error(out.to_numpy(stream), wanted) <= NEAR
    small = exact.view(0, (n_floats - 1,), np.float32)
    with pytest.raises(errors.ArgumentError, match="workspace"):
        kv_attend.attend(stream, q, planes.k, planes.v, out, workspace=small, **options)
