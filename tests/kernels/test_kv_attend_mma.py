"""Attention on tensor cores: against float64, and bit for bit between ways to compute the same."""

import dataclasses

import attend_bits
import numpy as np
import pytest
from rig import Planes, error, normal, reference, same

from memra_lowlevel import errors
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.formats import Q4_0, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend, kv_attend_mma, registry

BOUND = registry.spec("attend_mma").tolerance.value
HEADS = {64: 4, 128: 2, 256: 1}
MMA = {"kernel": "mma"}


def filled(stream, head_dim, rows, *, n_kv_heads=None, seed=0, n=None, **options):
    rng = np.random.default_rng(seed)
    heads = n_kv_heads or HEADS[head_dim]
    planes = Planes(stream, heads, head_dim, rows, **options)
    n = rows if n is None else n
    planes.load(normal(rng, n, heads * head_dim), normal(rng, n, heads * head_dim))
    return planes, rng


def agree(planes, q, length, **options):
    """Run, compare with float64, return the output."""
    counted = options.pop("counted", False)
    planes.set_len(length + (q.shape[0] if counted else 0))
    got, lse = planes.attend(q, lse=True, counted=counted, **MMA, **options)
    wanted, wanted_lse = reference(planes, q, length, **options)
    assert error(got, wanted) <= BOUND
    assert np.allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    early, early_lse = planes.attend(q, lse=True, counted=counted, settled=True, **MMA, **options)
    assert same(early, got) and same(early_lse, lse)
    return got


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_around_every_edge(stream, head_dim):
    planes, rng = filled(stream, head_dim, 140, seed=head_dim)
    group = 2 * planes.n_kv_heads
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 97, 140):
        agree(planes, normal(rng, 1, group, head_dim), n - 1)


@pytest.mark.parametrize(("head_dim", "heads"), [(64, 3), (64, 6), (128, 1)])
def test_rows_that_no_bulk_copy_takes(stream, head_dim, heads):
    """Any number of kv heads: a row of K is a multiple of 4 bytes, which need not be one of 16."""
    planes, rng = filled(stream, head_dim, 150, n_kv_heads=heads, seed=heads, ring=True)
    q = normal(rng, 9, 3 * heads, head_dim)
    for base in (0, 7):
        planes.set_len(base + 141, base=base)
        rows = planes.attend(q, **MMA)
        assert error(rows, reference(planes, q, base + 141, base=base)[0]) <= BOUND
        for r in (0, 4, 8):
            planes.set_len(base + 141 + r, base=base)
            assert same(planes.attend(q[r : r + 1], **MMA)[0], rows[r])


@pytest.mark.parametrize("length", [4096, 8191, 8321])
def test_long_contexts(stream, length):
    planes, rng = filled(stream, 256, 8330)
    agree(planes, normal(rng, 1, 3, 256), length - 1)


def test_chunks_hold_what_a_row_sees():
    for parts in (132, 264, 528):
        for seen in (0, 1, 32, 4191, 4192, 4193, 8384, 8385, 131_072, 1 << 20, 1 << 24):
            chunk = kv_attend_mma.chunk_keys(seen, parts)
            assert chunk % kv_attend_mma.STEP == 0
            # Wherever the first one begins.
            assert -(-(seen + chunk - 1) // chunk) <= parts
            finer = chunk - kv_attend_mma.STEP
            assert finer == 0 or -(-(seen + finer - 1) // finer) > parts - 1
        assert kv_attend_mma.n_slots(10, parts) == 2
        assert kv_attend_mma.n_slots(1 << 20, parts) == parts
    for shape, parts in (((128, 8), 132), ((256, 2), 264), ((128, 2), 264), ((128, 1), 528)):
        assert kv_attend_mma.n_parts(*shape) == parts


def test_far_positions(stream):
    for first in (8100, 65_400, 262_000, 2_000_000_000):
        planes, rng = filled(stream, 256, 512, ring=True)
        planes.set_len(first + 400, base=first)
        q = normal(rng, 1, 2, 256)
        got = planes.attend(q, window=300, **MMA)
        assert error(got, reference(planes, q, first + 400, base=first, window=300)[0]) <= BOUND


def test_rows_whose_chunks_differ(stream):
    """Rows on both sides of a length at which chunks grow, in one launch."""
    parts = kv_attend_mma.n_parts(64, 4)
    edge = (parts - 1) * 32
    planes, rng = filled(stream, 64, edge + 16, n_kv_heads=4)
    q = normal(rng, 16, 8, 64)
    singles = []
    for r in range(16):
        planes.set_len(edge - 7 + r)
        singles.append(planes.attend(q[r : r + 1], **MMA)[0])
    assert kv_attend_mma.chunk_keys(edge - 6, parts) != kv_attend_mma.chunk_keys(edge + 9, parts)
    for n in (3, 9, 16):
        planes.set_len(edge - 7)
        out = planes.attend(q[:n], **MMA)
        assert all(same(out[r], singles[r]) for r in range(n)), n
    assert error(out, reference(planes, q, edge - 7)[0]) <= BOUND


def test_scales_below_zero(stream):
    """No quantiser writes them, a foreign cache may."""
    planes, rng = filled(stream, 128, 100)
    raw = planes.v.to_numpy(stream).copy()
    blocks = raw[: 100 * planes.v_row].reshape(-1, 24)
    scales = blocks[::3, :2].copy().view(np.float16)
    blocks[::3, :2] = (-scales).view(np.uint8)
    planes.v.copy_from(stream, raw)
    planes.set_len(88)
    q = normal(rng, 4, 8, 128)
    agree(planes, q, 88)
    agree(planes, q, 88, window=40)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 9, 16])
def test_group_sizes(stream, group):
    planes, rng = filled(stream, 128, 90)
    agree(planes, normal(rng, 1, 2 * group, 128), 77)


@pytest.mark.parametrize(
    ("head_dim", "n_kv_heads", "group"), [(64, 4, 3), (128, 2, 4), (128, 6, 1), (256, 2, 5)]
)
def test_n_rows_are_n_single_rows(stream, head_dim, n_kv_heads, group):
    length = 117
    planes, rng = filled(stream, head_dim, length + 16, n_kv_heads=n_kv_heads, seed=group)
    q = normal(rng, 16, n_kv_heads * group, head_dim)
    singles = []
    for r in range(16):
        planes.set_len(length + r)
        singles.append(planes.attend(q[r : r + 1], lse=True, **MMA))
    for n in (1, 2, 3, 5, 8, 11, 16):
        planes.set_len(length)
        out, lse = planes.attend(q[:n], lse=True, **MMA)
        for r in range(n):
            assert same(out[r], singles[r][0][0]) and same(lse[r], singles[r][1][0]), (n, r)
    assert error(out, reference(planes, q, length)[0]) <= BOUND


def test_counted_lengths(stream):
    planes, rng = filled(stream, 128, 80)
    q = normal(rng, 3, 4, 128)
    assert same(agree(planes, q, 70), agree(planes, q, 70, counted=True))


@pytest.mark.parametrize("window", [1, 2, 31, 64, 100, 1000])
def test_windows(stream, window):
    planes, rng = filled(stream, 128, 200)
    for length in (0, 1, 64, 190):
        agree(planes, normal(rng, 3, 4, 128), length, window=window)


def test_options_of_the_scores(stream):
    planes, rng = filled(stream, 64, 90)
    q = normal(rng, 2, 8, 64) * 3
    sinks = normal(rng, 8)
    agree(planes, q, 80, sinks=sinks)
    agree(planes, q, 80, softcap=5.0)
    agree(planes, q, 80, scale=0.3)
    agree(planes, q, 80, sinks=sinks * 20, softcap=2.0, scale=0.01, window=40)
    agree(planes, q, 80, sinks=np.full(8, -np.inf, np.float32))


def test_magnitudes_from_tiny_to_huge(stream):
    """Scales of V over the whole range of f16, in one context; q and K far from 1."""
    rng = np.random.default_rng(4)
    planes = Planes(stream, 2, 128, 200)
    k = normal(rng, 200, 256)
    for powers in ((-20, -20), (12, 12), (-14, 14), (14, -14)):
        sizes = 2.0 ** np.linspace(*powers, 200)[:, None]
        v = normal(rng, 200, 256) * sizes.astype(np.float32)
        planes.load(k, v)
        for q_size in (1e-30, 1e-3, 1.0, 6.0):
            agree(planes, normal(rng, 2, 8, 128) * np.float32(q_size), 190)
    planes.load(k * np.float32(1e3), v)
    agree(planes, normal(rng, 2, 8, 128) * np.float32(1e-3), 190)
    planes.load(k, np.zeros_like(k))
    assert not planes.attend(normal(rng, 1, 8, 128), **MMA).any()


def test_scores_beyond_all_measure_are_never_wrong_in_silence(stream):
    """An answer lies among the values of the keys, or is NaN: nothing else that is finite."""
    planes, rng = filled(stream, 128, 200)
    q = normal(rng, 2, 4, 128)
    planes.set_len(198)
    values = planes.decoded(200)[1].transpose(1, 0, 2)  # [kv head, key, channel]
    low, high = (
        np.repeat(f(values, axis=1), 2, axis=0) - e for f, e in ((np.min, 1e-4), (np.max, -1e-4))
    )
    states = []
    for exponent in range(16, 40):
        got = planes.attend(q * np.float32(2.0**exponent), **MMA)
        finite = np.isfinite(got)
        assert ((got >= low) & (got <= high))[finite].all(), exponent
        states.append(finite.all())
    assert states[0] and not states[-1]


def test_rows_without_keys(stream):
    planes, rng = filled(stream, 64, 200, ring=True)
    q = normal(rng, 2, 8, 64)
    planes.set_len(10, base=100)  # everything the rows could see was dropped
    out, lse = planes.attend(q, lse=True, **MMA)
    assert same(out, np.zeros_like(out)) and (lse == -np.inf).all()
    sinks = normal(rng, 8)
    out, lse = planes.attend(q, lse=True, sinks=sinks, **MMA)
    assert same(out, np.zeros_like(out)) and same(lse, np.stack([sinks, sinks]))
    planes.set_len(99, base=100)  # row 0 sees nothing, row 1 one key
    out, lse = planes.attend(q, lse=True, **MMA)
    assert not out[0].any() and (lse[0] == -np.inf).all()
    wanted = np.repeat(planes.decoded(1)[1][0], 2, axis=0)
    assert error(out[1], wanted) <= BOUND


def test_a_ring_equals_a_flat_plane(stream):
    flat, rng = filled(stream, 128, 800)
    k, v = (plane.reshape(800, -1) for plane in flat.bytes())
    ring = Planes(stream, 2, 128, 300, ring=True)
    for length, base in ((290, 0), (400, 113), (790, 511)):
        for buffer, rows in ((ring.k, k), (ring.v, v)):
            part = np.ascontiguousarray(rows[base : length + 4])
            buffer.view(0, part.shape, np.uint8).copy_from(stream, part)
        q = normal(rng, 4, 4, 128)
        flat.set_len(length)
        ring.set_len(length, base=base)
        for window in (1, 50, 160):
            a, b = (p.attend(q, window=window, **MMA) for p in (flat, ring))
            assert same(a, b), (length, base, window)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_window_over_a_long_plane_is_launched_like_a_short_plane(stream, monkeypatch, head_dim):
    """And gives its bits: what a row sees decides, not what the plane could hold."""
    short, rng = filled(stream, head_dim, 300, n_kv_heads=4)
    long = Planes(stream, 4, head_dim, 40_000, ring=True)
    rows = rng.standard_normal((2, 300, 4 * head_dim)).astype(np.float32)
    short.load(*rows)
    long.load(*rows)
    q, seen, of = normal(rng, 2, 8, head_dim), [], kv_attend_mma._block_warps
    monkeypatch.setattr(kv_attend_mma, "_block_warps", lambda d, n: of(d, seen.append(n) or n))
    results = []
    for planes in (short, long):
        planes.set_len(280)
        results.append(planes.attend(q, window=100, **MMA))
    assert same(*results) and seen == [100, 100]
    long.set_len(280)
    long.attend(q, **MMA)
    assert seen[2] == 40_000


@pytest.mark.parametrize(("head_dim", "sizes"), [(128, (8, 16)), (256, (4, 8))])
def test_no_bit_depends_on_the_size_of_a_block(stream, monkeypatch, head_dim, sizes):
    planes, rng = filled(stream, head_dim, 150, n_kv_heads=8)
    planes.set_len(140)
    q, shapes, of, results = normal(rng, 2, 16, head_dim), [], kv_attend_mma._shape, []
    monkeypatch.setattr(kv_attend_mma, "_shape", lambda *a: shapes.append(of(*a)) or shapes[-1])
    for n_warps in sizes:
        monkeypatch.setattr(kv_attend_mma, "_block_warps", lambda d, n, w=n_warps: w)
        results.append(planes.attend(q, **MMA))
    assert same(*results)
    if stream.device.limits.shared_optin_bytes > 200_000:  # else all are as small as can be
        assert len({shape.heads for shape in shapes}) > 1


def test_blocks_are_smaller_where_a_row_sees_few_keys():
    """On a GPU with room; each is a template instance that a window does not add to."""
    room, heads = 232_448, {}
    for head_dim in (128, 256):
        for seen in (4096, 1 << 14, 1 << 15):
            most = kv_attend_mma._block_warps(head_dim, seen)
            heads[head_dim, seen] = kv_attend_mma._shape(
                head_dim, 1024 // head_dim, 4, room, most
            ).heads
    assert list(heads.values()) == [4, 4, 8, 1, 2, 4]


def test_a_window_equals_masking(stream):
    attend_bits.a_window_equals_masking(*filled(stream, 128, 300), "mma")


def test_a_poisoned_key_stays_with_the_rows_that_see_it(stream):
    attend_bits.a_poisoned_key_stays_with_the_rows_that_see_it(*filled(stream, 128, 200), "mma")


@pytest.mark.parametrize("field", [0, 2])
def test_one_bad_scale_or_minimum_spoils_its_block_only(stream, field):
    """A V block with an infinite scale (byte 0) or minimum (byte 2): seen by the rows from 3 on."""
    planes, rng = filled(stream, 128, 100)
    q = normal(rng, 6, 4, 128)
    planes.set_len(70)
    clean = planes.attend(q, **MMA)
    at = 73 * planes.v_row + 5 * 24 + field  # key 73, head 1, block 1
    planes.v.view(at, (1,), np.uint16).copy_from(stream, np.array([0x7C00], np.uint16))
    spoiled = planes.attend(q, **MMA)
    bad = np.zeros((6, 4, 128), bool)
    bad[3:, 2:, 32:64] = True
    assert same(spoiled[~bad], clean[~bad]) and not np.isfinite(spoiled[bad]).any()


def test_workspace_content_is_irrelevant(stream):
    planes, rng = filled(stream, 64, 200)
    attend_bits.workspace_content_is_irrelevant(planes, normal(rng, 2, 8, 64), "mma")


def test_capacity_changes_no_bit(stream):
    results = []
    for rows in (140, 1000, 20_000):
        planes, _ = filled(stream, 64, rows, n=140)
        planes.set_len(137)
        results.append(planes.attend(normal(np.random.default_rng(3), 2, 8, 64), **MMA))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_keys_beyond_the_capacity_are_never_read(stream):
    planes, rng = filled(stream, 64, 100)
    attend_bits.keys_beyond_the_capacity_are_never_read(planes, normal(rng, 1, 4, 64), "mma")


def test_queries_at_the_end_of_the_range(stream):
    planes, _ = filled(stream, 128, 64)
    attend_bits.queries_at_the_end_of_the_range(planes, "mma", BOUND)


def test_a_replay_equals_eager_launches(stream):
    planes, rng = filled(stream, 128, 200)
    kv_attend_mma.prepare(stream.device, 128, 2, n_queries=4)
    attend_bits.a_replay_equals_eager_launches(planes, normal(rng, 2, 4, 128), "mma")


@pytest.mark.parametrize("order", ["reverse", "random"])
def test_order_and_threads_change_no_bit(order):
    from memra_lowlevel import Device

    with Device("host") as device:
        stream = device.stream(name="order")
        results = []
        for options in ({"thread_order": "forward", "workers": 1},
                        {"thread_order": order, "workers": 2, "seed": 5}):  # fmt: skip
            with host_options(**options):
                planes, rng = filled(stream, 128, 150)
                planes.set_len(130)
                results.append(planes.attend(normal(rng, 3, 6, 128), softcap=9.0, **MMA))
        stream.close()
    assert same(*results)


def test_sequences_of_a_table(stream):
    """Rows of several sequences, each with its own planes and counters, in one launch."""
    lengths, bases = (50, 131, 200), (0, 0, 60)
    planes, singles = [], []
    rng = np.random.default_rng(2)
    for length, base in zip(lengths, bases, strict=True):
        p, _ = filled(stream, 128, 220, seed=length, ring=base > 0)
        p.set_len(length, base=base if base else None)
        planes.append(p)
    of_row = [(0, 0), (1, 0), (1, 1), (2, 0), (0, 3)]
    q = normal(rng, 5, 20, 128)
    for r, (i, offset) in enumerate(of_row):
        planes[i].set_len(lengths[i] + offset)
        singles.append(planes[i].attend(q[r : r + 1], window=150, **MMA))
        planes[i].set_len(lengths[i])
    table = np.array(
        [(planes[i].k.ptr, planes[i].v.ptr, planes[i].len_d.ptr,
          planes[i].base_d.ptr if planes[i].base_d else 0, offset) for i, offset in of_row],
        np.int64,
    ).view(np.uint64)  # fmt: skip
    size = kv_attend.workspace_bytes(
        stream.device, 5, 20, 128, 220, window=150, ring=True, kernel="mma"
    )
    out = planes[0].poisoned(5 * 20 * 128 * 4).view(0, (5, 20, 128), np.float32)
    kv_attend.attend(
        stream, planes[0].upload(q), None, None, out, len_d=None, k_format=Q8_0, v_format=Q5_1,
        rows=220, n_kv_heads=2, head_dim=128, window=150, table=planes[0].upload(table),
        workspace=planes[0].poisoned(size).view(0, (size // 4,), np.float32), **MMA,
    )  # fmt: skip
    got = out.to_numpy(stream)
    assert all(same(got[r], singles[r][0]) for r in range(5))


def test_the_choice_says_what_and_why(device):
    def choose(*args, **options):
        return kv_attend.choose(device, *args, **options)

    free = choose(Q8_0, Q5_1, 128, n_kv_heads=8)
    assert free.kernel == ("simt" if device.kind == "host" else "mma") and free.reason
    assert choose(Q8_0, Q5_1, 128, n_kv_heads=8, kernel="mma").kernel == "mma"
    assert choose(Q8_0, Q5_1, 128, n_kv_heads=8, kernel="simt").kernel == "simt"
    other = choose(Q8_0, Q4_0, 128, n_kv_heads=8)
    assert other.kernel == ("simt" if device.kind == "host" else "f16")
    with pytest.raises(errors.FormatUnsupported, match="q4_0"):
        choose(Q8_0, Q4_0, 128, n_kv_heads=8, kernel="mma")
    for args, heads, why in (
        ((Q8_0, Q5_1, 96), 8, "head_dim 96"),
        ((Q8_0, Q5_1, 128, 64), 8, "head_dim 128/64"),
    ):
        choice = choose(*args, n_kv_heads=heads)
        assert choice.kernel == "simt" and why in choice.reason
        with pytest.raises(errors.FormatUnsupported, match=why):
            choose(*args, n_kv_heads=heads, kernel="mma")
    with pytest.raises(errors.ArgumentError, match="kernel"):
        choose(Q8_0, Q5_1, 128, n_kv_heads=8, kernel="fast")


def test_planes_whose_sums_could_overflow_are_left_to_the_other_kernel(device):
    most = kv_attend_mma.MOST_ROWS
    assert kv_attend_mma.chunk_keys(most) * 255 * 62 < 2**31  # digits times doubled codes
    for rows, kernel in ((most, "mma"), (most + 1, "simt")):
        refusal = kv_attend_mma.refusal(device, Q8_0, Q5_1, 128, 128, rows)
        assert (refusal is None) == (kernel == "mma")
    for wrong in ("5", 2.5, -1):
        with pytest.raises(errors.ArgumentError, match="choose: rows"):
            kv_attend.choose(device, Q8_0, Q5_1, 128, n_kv_heads=8, rows=wrong)
    with pytest.raises(errors.FormatUnsupported, match=f"planes of {most + 1} rows"):
        kv_attend.choose(device, Q8_0, Q5_1, 128, n_kv_heads=8, rows=most + 1, kernel="mma")


def test_a_workspace_of_the_other_kernel_is_too_small(stream):
    planes, rng = filled(stream, 128, 1000)
    small = kv_attend.workspace_bytes(stream.device, 1, 4, 128, 1000, kernel="simt")
    with pytest.raises(errors.ArgumentError, match="workspace"):
        kv_attend.attend(
            stream, planes.upload(normal(rng, 1, 4, 128)), planes.k, planes.v,
            planes.poisoned(2048).view(0, (1, 4, 128), np.float32), len_d=planes.len_d,
            k_format=Q8_0, v_format=Q5_1, rows=1000, n_kv_heads=2, head_dim=128,
            workspace=planes.poisoned(small), **MMA,
        )  # fmt: skip


@pytest.mark.parametrize(("head_dim", "parts"), [(64, 16), (64, 5), (128, 16), (256, 8)])
def test_a_block_asks_for_its_chunks_in_their_order(stream, monkeypatch, head_dim, parts):
    """One block, two, or as many as fit: chunks of one step and of several, rounds of two sizes."""
    monkeypatch.setattr(kv_attend_mma, "n_parts", lambda head_dim, n_kv_heads: parts)
    planes, rng = filled(stream, head_dim, 500, ring=True)
    q = normal(rng, 5, 2 * planes.n_kv_heads, head_dim)
    n_blocks, of = [0], kv_attend_mma._config

    def config(*args):
        found = of(*args)
        return dataclasses.replace(found, grid=(n_blocks[0] or found.grid[0], *found.grid[1:]))

    monkeypatch.setattr(kv_attend_mma, "_config", config)
    edge = (parts - 1) * kv_attend_mma.STEP  # from here on chunks are longer
    for base, length, window in ((0, edge - 3, 0), (0, 490, 0), (7, 470, 300), (0, 20, 0)):
        planes.set_len(length, base=base)
        results = []
        for n_blocks[0] in (0, 1, 2):
            results.append(planes.attend(q, window=window or None, **MMA))
        assert same(*results[:2]) and same(*results[1:])
        wanted = reference(planes, q, length, base=base, window=window or None)[0]
        assert error(results[0], wanted) <= BOUND
