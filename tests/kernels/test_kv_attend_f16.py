"""Attention on tensor cores in f16: against float64, and bit for bit between ways."""

import re

import attend_bits
import numpy as np
import pytest
from rig import Planes, error, normal, reference, same

from memra_lowlevel import errors
from memra_lowlevel.compile import compile_file
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.formats import BF16, E4M3, F16, F32, Q4_0, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend, kv_attend_f16, registry
from memra_lowlevel.reference import attend as oracle

BOUND = registry.spec("attend_f16").tolerance.value
NEAR = 2e-6
"""What it keeps with ordinary inputs."""
SAME = [(F16, F16), (BF16, BF16), (E4M3, E4M3)]
PACKED = [(Q8_0, Q8_0), (Q8_0, Q4_0), (Q8_0, Q5_1), (Q8_0, F16), (F16, Q5_1)]
PAIRS = [*SAME, (F16, E4M3), (BF16, F16), (E4M3, BF16), *PACKED, (BF16, Q4_0), (E4M3, Q8_0)]
F16_KERNEL = {"kernel": "f16"}

pairs = pytest.mark.parametrize(("k_format", "v_format"), PAIRS, ids=str)
kinds = pytest.mark.parametrize(("k_format", "v_format"), [*SAME, *PACKED], ids=str)
two = pytest.mark.parametrize(("k_format", "v_format"), [(F16, F16), (Q8_0, Q8_0)], ids=str)
formats = pytest.mark.parametrize("fmt", [F16, BF16, E4M3], ids=lambda f: f.name)


def least_heads(k_format, v_format, head_dim):
    """Two kv heads, or as many as make rows of whole pieces of 16 bytes."""
    return max(2, kv_attend_f16._aligned_heads(k_format, v_format, head_dim))


def filled(
    stream, head_dim, rows, k_format=F16, v_format=None, *, heads=None, seed=0, n=None, **opts
):
    rng = np.random.default_rng(seed)
    v_format = v_format or k_format
    heads = heads or least_heads(k_format, v_format, head_dim)
    planes = Planes(stream, heads, head_dim, rows, k_format, v_format, **opts)
    n = rows if n is None else n
    planes.load(normal(rng, n, heads * head_dim), normal(rng, n, heads * head_dim))
    return planes, rng


def agree(planes, q, length, *, bound=NEAR, **options):
    """Run, compare with float64, return the output."""
    counted = options.pop("counted", False)
    planes.set_len(length + (q.shape[0] if counted else 0))
    got, lse = planes.attend(q, lse=True, counted=counted, **F16_KERNEL, **options)
    wanted, wanted_lse = reference(planes, q, length, **options)
    assert error(got, wanted) <= bound
    assert np.allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    early, early_lse = planes.attend(
        q, lse=True, counted=counted, settled=True, **F16_KERNEL, **options
    )
    assert same(early, got) and same(early_lse, lse)
    return got


@pairs
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_format_and_head_size(stream, k_format, v_format, head_dim):
    if k_format is BF16 and head_dim == 256:
        with pytest.raises(errors.FormatUnsupported, match="head_dim 256"):
            filled(stream, head_dim, 8, k_format, v_format)[0].attend(
                np.zeros((1, 2, head_dim), np.float32), **F16_KERNEL
            )
        return
    planes, rng = filled(stream, head_dim, 140, k_format, v_format, seed=head_dim)
    agree(planes, normal(rng, 2, 8, head_dim), 133)


@kinds
def test_lengths_around_every_edge(stream, k_format, v_format):
    planes, rng = filled(stream, 64, 140, k_format, v_format)
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 97, 140):
        agree(planes, normal(rng, 1, 4, 64), n - 1)


@two
@pytest.mark.parametrize("length", [4096, 8321])
def test_long_contexts(stream, length, k_format, v_format):
    planes, rng = filled(stream, 128, 8330, k_format, v_format)
    agree(planes, normal(rng, 1, 4, 128), length - 1)


def test_planes_with_wide_rows_have_fewer_chunks():
    for fmt, head_dim, heads, parts in (
        (F16, 128, 8, 67), (F16, 128, 2, 133), (E4M3, 128, 8, 133), (F16, 128, 32, 17),
        (F16, 128, 64, 17), (F16, 256, 2, 133), (E4M3, 64, 1, 265), (Q8_0, 128, 1, 265),
    ):  # fmt: skip
        assert kv_attend_f16.n_parts(fmt, fmt, head_dim, heads) == parts


@two
def test_a_negative_scale(stream, k_format, v_format):
    planes, rng = filled(stream, 64, 90, k_format, v_format)
    q = normal(rng, 2, 4, 64)
    agree(planes, q, 80, scale=-0.2)
    agree(planes, q, 80, scale=-0.2, softcap=3.0)
    agree(planes, q, 80, scale=0.0, window=50)


@kinds
def test_sharp_distributions(stream, k_format, v_format):
    """Few keys have nearly all the weight."""
    planes, rng = filled(stream, 64, 400, k_format, v_format, seed=3)
    for size in (3.0, 8.0):
        agree(planes, normal(rng, 2, 8, 64) * np.float32(size), 390, bound=BOUND)


@two
def test_far_positions(stream, k_format, v_format):
    for first in (8100, 262_000, 2_000_000_000):
        planes, rng = filled(stream, 64, 512, k_format, v_format, ring=True)
        planes.set_len(first + 400, base=first)
        q = normal(rng, 1, 4, 64)
        got = planes.attend(q, window=300, **F16_KERNEL)
        assert error(got, reference(planes, q, first + 400, base=first, window=300)[0]) <= NEAR


@two
def test_rows_whose_chunks_differ(stream, k_format, v_format):
    """Rows on both sides of a length at which chunks grow, in one launch."""
    heads = least_heads(k_format, v_format, 64)
    edge = (kv_attend_f16.n_parts(k_format, v_format, 64, heads) - 1) * 32
    planes, rng = filled(stream, 64, edge + 16, k_format, v_format)
    q = normal(rng, 16, 4, 64)
    singles = []
    for r in range(16):
        planes.set_len(edge - 7 + r)
        singles.append(planes.attend(q[r : r + 1], **F16_KERNEL)[0])
    for n in (3, 9, 16):
        planes.set_len(edge - 7)
        out = planes.attend(q[:n], **F16_KERNEL)
        assert all(same(out[r], singles[r]) for r in range(n)), n
    assert error(out, reference(planes, q, edge - 7)[0]) <= NEAR


@pytest.mark.parametrize(("k_format", "v_format"), [(F16, F16), (Q8_0, Q4_0)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 9, 16])
def test_group_sizes(stream, group, k_format, v_format):
    planes, rng = filled(stream, 128, 90, k_format, v_format)
    agree(planes, normal(rng, 1, 2 * group, 128), 77)


@pytest.mark.parametrize(
    ("k_format", "v_format", "head_dim", "heads", "group"),
    [
        (F16, F16, 64, 3, 4), (F16, F16, 128, 2, 4), (BF16, BF16, 64, 2, 3),
        (E4M3, E4M3, 128, 2, 5), (F16, F16, 256, 2, 8), (Q8_0, Q8_0, 64, 8, 2),
        (Q8_0, Q8_0, 128, 2, 4), (Q8_0, Q8_0, 256, 1, 5), (Q8_0, Q4_0, 64, 4, 5),
        (Q8_0, Q4_0, 128, 4, 3),
        (Q8_0, Q4_0, 256, 2, 2), (Q8_0, Q5_1, 64, 4, 1), (Q8_0, Q5_1, 128, 2, 8),
        (Q8_0, Q5_1, 256, 1, 3), (Q8_0, F16, 128, 2, 3), (F16, Q5_1, 64, 3, 3),
        (BF16, Q4_0, 128, 2, 4), (E4M3, Q8_0, 128, 8, 2),
        # Rows that no bulk copy takes.
        (Q8_0, Q8_0, 64, 1, 4), (Q8_0, Q8_0, 128, 3, 2), (F16, Q4_0, 64, 6, 2),
    ],
    ids=str,
)  # fmt: skip
def test_n_rows_are_n_single_rows(stream, k_format, v_format, head_dim, heads, group):
    """Alone, and beside others on the same warp, on other warps, in other blocks."""
    length = 117
    planes, rng = filled(stream, head_dim, length + 16, k_format, v_format, heads=heads, seed=group)
    q = normal(rng, 16, heads * group, head_dim)
    singles = []
    for r in range(16):
        planes.set_len(length + r)
        singles.append(planes.attend(q[r : r + 1], lse=True, **F16_KERNEL))
    for n in (1, 2, 3, 5, 8, 11, 16):
        planes.set_len(length)
        out, lse = planes.attend(q[:n], lse=True, **F16_KERNEL)
        for r in range(n):
            assert same(out[r], singles[r][0][0]) and same(lse[r], singles[r][1][0]), (n, r)
    assert error(out, reference(planes, q, length)[0]) <= NEAR


@two
def test_counted_lengths(stream, k_format, v_format):
    planes, rng = filled(stream, 128, 80, k_format, v_format)
    q = normal(rng, 3, 4, 128)
    assert same(agree(planes, q, 70), agree(planes, q, 70, counted=True))


@pytest.mark.parametrize(("k_format", "v_format"), [(E4M3, E4M3), *PACKED[:3]], ids=str)
@pytest.mark.parametrize("window", [1, 2, 31, 64, 100, 1000])
def test_windows(stream, window, k_format, v_format):
    planes, rng = filled(stream, 128, 200, k_format, v_format)
    for length in (0, 1, 64, 190):
        agree(planes, normal(rng, 3, 4, 128), length, window=window)


@kinds
def test_options_of_the_scores(stream, k_format, v_format):
    planes, rng = filled(stream, 64, 90, k_format, v_format)
    q = normal(rng, 2, 8, 64) * 3
    sinks = normal(rng, 8)
    agree(planes, q, 80, sinks=sinks)
    agree(planes, q, 80, softcap=5.0)
    agree(planes, q, 80, scale=0.3, bound=BOUND)
    agree(planes, q, 80, sinks=sinks * 20, softcap=2.0, scale=0.01, window=40)
    agree(planes, q, 80, sinks=np.full(8, -np.inf, np.float32))


@pytest.mark.parametrize("fmt", [F16, BF16], ids=str)
def test_magnitudes_from_tiny_to_huge(stream, fmt):
    """Values over the whole range of f16, in one context; q and K far from 1."""
    rng = np.random.default_rng(4)
    planes = Planes(stream, 2, 128, 200, fmt, fmt)
    k = normal(rng, 200, 256)
    for powers in ((-20, -20), (12, 12), (-14, 13), (13, -14)):
        sizes = 2.0 ** np.linspace(*powers, 200)[:, None]
        v = normal(rng, 200, 256) * sizes.astype(np.float32)
        planes.load(k, v)
        for q_size in (1e-30, 1e-3, 1.0, 6.0):
            agree(planes, normal(rng, 2, 8, 128) * np.float32(q_size), 190, bound=BOUND)
    planes.load(k * np.float32(1e3), v)
    agree(planes, normal(rng, 2, 8, 128) * np.float32(1e-3), 190, bound=BOUND)
    planes.load(k * np.float32(2.0**-22), v)  # below the normal range of f16
    agree(planes, normal(rng, 2, 8, 128) * np.float32(2.0**20), 190, bound=BOUND)
    planes.load(k, np.zeros_like(k))
    assert not planes.attend(normal(rng, 1, 8, 128), **F16_KERNEL).any()


def test_every_number_of_e4m3(stream):
    """All codes but NaN, as K and as V."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    planes = Planes(stream, 2, 64, 254, E4M3, E4M3)
    rng = np.random.default_rng(0)
    for buffer in (planes.k, planes.v):
        rows = np.stack([rng.permutation(codes) for _ in range(128)], axis=1)
        buffer.view(0, rows.shape, np.uint8).copy_from(stream, np.ascontiguousarray(rows))
    agree(planes, normal(rng, 1, 4, 64) * np.float32(0.01), 253)
    agree(planes, normal(rng, 1, 4, 64), 253, bound=BOUND)


def test_rows_without_keys(stream):
    planes, rng = filled(stream, 64, 200, ring=True)
    q = normal(rng, 2, 4, 64)
    planes.set_len(10, base=100)  # everything the rows could see was dropped
    out, lse = planes.attend(q, lse=True, **F16_KERNEL)
    assert same(out, np.zeros_like(out)) and (lse == -np.inf).all()
    sinks = normal(rng, 4)
    out, lse = planes.attend(q, lse=True, sinks=sinks, **F16_KERNEL)
    assert same(out, np.zeros_like(out)) and same(lse, np.stack([sinks, sinks]))
    sinks[1] = -np.inf
    out, lse = planes.attend(q, lse=True, sinks=sinks, **F16_KERNEL)
    wanted = oracle.attend(q, *np.zeros((2, 0, 2, 64)), -1, base=100, sinks=sinks)
    assert same(out, wanted[0].astype(np.float32)) and same(lse, wanted[1].astype(np.float32))
    planes.set_len(99, base=100)  # row 0 sees nothing, row 1 one key
    out, lse = planes.attend(q, lse=True, **F16_KERNEL)
    assert not out[0].any() and (lse[0] == -np.inf).all()
    assert error(out[1], np.repeat(planes.decoded(1)[1][0], 2, axis=0)) <= NEAR


@kinds
def test_a_ring_equals_a_flat_plane(stream, k_format, v_format):
    flat, rng = filled(stream, 64, 800, k_format, v_format)
    k, v = (plane.reshape(800, -1) for plane in flat.bytes())
    ring = Planes(stream, flat.n_kv_heads, 64, 300, k_format, v_format, ring=True)
    for length, base in ((290, 0), (400, 113), (790, 511)):
        for buffer, rows in ((ring.k, k), (ring.v, v)):
            part = np.ascontiguousarray(rows[base : length + 4])
            buffer.view(0, part.shape, np.uint8).copy_from(stream, part)
        q = normal(rng, 4, 4, 64)
        flat.set_len(length)
        ring.set_len(length, base=base)
        for window in (1, 50, 160):
            a, b = (p.attend(q, window=window, **F16_KERNEL) for p in (flat, ring))
            assert same(a, b), (length, base, window)


@kinds
def test_a_window_equals_masking(stream, k_format, v_format):
    attend_bits.a_window_equals_masking(*filled(stream, 128, 300, k_format, v_format), "f16")


@kinds
def test_a_poisoned_key_stays_with_the_rows_that_see_it(stream, k_format, v_format):
    planes, rng = filled(stream, 128, 200, k_format, v_format)
    attend_bits.a_poisoned_key_stays_with_the_rows_that_see_it(planes, rng, "f16")


@formats
@pytest.mark.parametrize("key", [40, 73], ids=["seen by all", "seen from row 3 on"])
def test_one_bad_value_spoils_its_channel_only(stream, fmt, key):
    planes, rng = filled(stream, 64, 100, fmt)
    q = normal(rng, 6, 4, 64)
    planes.set_len(70)
    clean = planes.attend(q, **F16_KERNEL)
    row = fmt.decode(planes.bytes()[1][key : key + 1])
    row[0, 64 + 37] = np.nan if fmt is E4M3 else np.inf  # of head 1
    data = fmt.encode(row, check=False)
    planes.v.view(key * planes.v_row, data.shape, np.uint8).copy_from(stream, data)
    bad = np.zeros((6, 4, 64), bool)
    bad[max(0, key - 70) :, 2:, 37] = True
    spoiled = planes.attend(q, **F16_KERNEL)
    assert same(spoiled[~bad], clean[~bad]) and np.isnan(spoiled[bad]).all()


def test_a_bad_query_spoils_itself_only(stream):
    planes, rng = filled(stream, 64, 100)
    attend_bits.a_bad_query_spoils_itself_only(planes, normal(rng, 3, 4, 64), "f16")


@pytest.mark.parametrize("fmt", [F16, E4M3], ids=str)
def test_queries_at_the_end_of_the_range(stream, fmt):
    planes, _ = filled(stream, 128, 64, fmt)
    attend_bits.queries_at_the_end_of_the_range(planes, "f16", BOUND)


@two
def test_workspace_content_is_irrelevant(stream, k_format, v_format):
    planes, rng = filled(stream, 64, 200, k_format, v_format)
    attend_bits.workspace_content_is_irrelevant(planes, normal(rng, 2, 4, 64), "f16")


@two
def test_capacity_changes_no_bit(stream, k_format, v_format):
    results = []
    for rows in (140, 1000, 20_000):
        planes, _ = filled(stream, 64, rows, k_format, v_format, n=140)
        planes.set_len(137)
        results.append(planes.attend(normal(np.random.default_rng(3), 2, 4, 64), **F16_KERNEL))
    assert same(results[0], results[1]) and same(results[0], results[2])


@two
def test_keys_beyond_the_capacity_are_never_read(stream, k_format, v_format):
    planes, rng = filled(stream, 64, 100, k_format, v_format)
    attend_bits.keys_beyond_the_capacity_are_never_read(planes, normal(rng, 1, 4, 64), "f16")


@two
def test_a_replay_equals_eager_launches(stream, k_format, v_format):
    planes, rng = filled(stream, 128, 200, k_format, v_format)
    kv_attend_f16.prepare(stream.device, k_format, v_format, 128, 2, n_queries=4)
    attend_bits.a_replay_equals_eager_launches(planes, normal(rng, 2, 4, 128), "f16")


@pytest.mark.parametrize("order", ["reverse", "random"])
@two
def test_order_and_threads_change_no_bit(order, k_format, v_format):
    from memra_lowlevel import Device

    with Device("host") as device:
        stream = device.stream(name="order")
        results = []
        for options in ({"thread_order": "forward", "workers": 1},
                        {"thread_order": order, "workers": 2, "seed": 5}):  # fmt: skip
            with host_options(**options):
                planes, rng = filled(stream, 128, 150, k_format, v_format)
                planes.set_len(130)
                results.append(planes.attend(normal(rng, 3, 6, 128), softcap=9.0, **F16_KERNEL))
        stream.close()
    assert same(*results)


@kinds
def test_sequences_of_a_table(stream, k_format, v_format):
    """Rows of several sequences, each with its own planes and counters, in one launch."""
    lengths, bases = (50, 131, 200), (0, 0, 60)
    planes, singles = [], []
    rng = np.random.default_rng(2)
    for length, base in zip(lengths, bases, strict=True):
        p, _ = filled(stream, 64, 220, k_format, v_format, seed=length, ring=base > 0)
        p.set_len(length, base=base if base else None)
        planes.append(p)
    of_row = [(0, 0), (1, 0), (1, 1), (2, 0), (0, 3)]
    q = normal(rng, 5, 20, 64)
    for r, (i, offset) in enumerate(of_row):
        planes[i].set_len(lengths[i] + offset)
        singles.append(planes[i].attend(q[r : r + 1], window=150, **F16_KERNEL))
        planes[i].set_len(lengths[i])
    table = np.array(
        [(planes[i].k.ptr, planes[i].v.ptr, planes[i].len_d.ptr,
          planes[i].base_d.ptr if planes[i].base_d else 0, offset) for i, offset in of_row],
        np.int64,
    ).view(np.uint64)  # fmt: skip
    size = kv_attend.workspace_bytes(
        stream.device, 5, 20, 64, 220, window=150, ring=True, kernel="f16"
    )
    out = planes[0].poisoned(5 * 20 * 64 * 4).view(0, (5, 20, 64), np.float32)
    kv_attend.attend(
        stream, planes[0].upload(q), None, None, out, len_d=None, k_format=k_format,
        v_format=v_format, rows=220, n_kv_heads=planes[0].n_kv_heads, head_dim=64, window=150,
        table=planes[0].upload(table),
        workspace=planes[0].poisoned(size).view(0, (size // 4,), np.float32), **F16_KERNEL,
    )  # fmt: skip
    got = out.to_numpy(stream)
    assert all(same(got[r], singles[r][0]) for r in range(5))


def test_the_choice_says_what_and_why(device):
    def choose(*args, **options):
        return kv_attend.choose(device, *args, **options)

    on_gpu = device.kind != "host"
    for k_format, v_format in PAIRS:
        free = choose(k_format, v_format, 128, n_kv_heads=6)
        own = "mma" if (k_format, v_format) == (Q8_0, Q5_1) else "f16"
        assert free.kernel == (own if on_gpu else "simt") and free.reason
        assert choose(k_format, v_format, 128, n_kv_heads=8, kernel="f16").kernel == "f16"
        assert choose(k_format, v_format, 128, n_kv_heads=8, kernel="simt").kernel == "simt"
    for args, why in (
        ((F16, F32, 128), "f32"),
        ((F32, F16, 128), "f32"),
        ((Q4_0, F16, 128), "q4_0"),
        ((Q5_1, Q5_1, 128), "q5_1"),
        ((F16, F16, 96), "head_dim 96"),
        ((F16, F16, 128, 64), "head_dim 128/64"),
        ((BF16, BF16, 256), "head_dim 256"),
    ):
        assert choose(*args, n_kv_heads=8).kernel == "simt"
        with pytest.raises(errors.FormatUnsupported, match=why):
            choose(*args, n_kv_heads=8, kernel="f16")


def test_a_plane_that_begins_between_two_pieces_is_refused(stream):
    planes, rng = filled(stream, 64, 20)
    planes.k = planes.k.view(8, (planes.k.n_bytes - 8,), np.uint8)
    planes.rows = 10
    with pytest.raises(errors.ArgumentError, match="multiple of 16 bytes for kernel 'f16'"):
        planes.attend(normal(rng, 1, 2, 64), **F16_KERNEL)


@pytest.mark.parametrize(
    ("k_format", "v_format", "head_dim", "heads", "n_queries"),
    [
        (BF16, Q4_0, 128, 2, 8), (BF16, Q4_0, 128, 2, 16), (BF16, Q8_0, 128, 8, 64),
        (BF16, Q5_1, 64, 8, 16), (BF16, BF16, 128, 8, 32), (Q8_0, Q8_0, 128, 8, 4),
        (Q8_0, Q8_0, 128, 2, 64), (Q8_0, Q4_0, 256, 2, 32), (F16, Q8_0, 64, 4, 9),
        (E4M3, E4M3, 128, 8, 64),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_are_not_larger_than_the_kernel_allows(
    k_format, v_format, head_dim, heads, n_queries
):
    shape = kv_attend_f16._shape(k_format, v_format, head_dim, heads, n_queries, 232_448)
    name = (
        f"attend_f16<{k_format.constant}, {v_format.constant}, {head_dim}, {shape.sets}, "
        f"{shape.heads}, {shape.stages}>"
    )
    image = compile_file("kv/attend_f16.cu", arch="compute_90", name_expressions=(name,))
    (most,) = re.findall(rb"\.maxntid (\d+)", image.data)
    assert 32 * shape.warps <= int(most)
