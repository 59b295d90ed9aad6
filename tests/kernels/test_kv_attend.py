"""Attention of class exact: against float64, and bit for bit between ways to compute the same."""

import attend_bits
import numpy as np
import pytest
from rig import Planes, error, normal, reference, same

from memra_lowlevel import Device, errors
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.formats import BF16, E4M3, F16, F32, FORMATS, Q4_0, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend, kv_attend_simt, registry

LENGTHS = [
    1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257
]  # fmt: skip
BOUND = registry.spec("attend_partial").tolerance.value


def filled(stream, n_kv_heads, head_dim, rows, *formats, seed=0, n=None, **options):
    rng = np.random.default_rng(seed)
    planes = Planes(stream, n_kv_heads, head_dim, rows, *formats, **options)
    planes.kernel = "simt"
    n = rows if n is None else n
    planes.load(
        normal(rng, n, n_kv_heads * head_dim), normal(rng, n, n_kv_heads * planes.head_dim_v)
    )
    return planes, rng


def agree(planes, q, length, **options):
    """Run, compare with float64, return the output."""
    counted = options.pop("counted", False)
    planes.set_len(length + (q.shape[0] if counted else 0))
    got, lse = planes.attend(q, lse=True, counted=counted, **options)
    wanted, wanted_lse = reference(planes, q, length, **options)
    assert error(got, wanted) <= BOUND
    assert np.allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    early, early_lse = planes.attend(q, lse=True, counted=counted, settled=True, **options)
    assert same(early, got) and same(early_lse, lse)
    return got


@pytest.mark.parametrize(
    ("n_kv_heads", "head_dim"), [(2, 64), (1, 96), (2, 96), (2, 128), (2, 256)]
)
def test_lengths_around_every_edge(stream, n_kv_heads, head_dim):
    planes, rng = filled(stream, n_kv_heads, head_dim, 300, seed=head_dim)
    for length in LENGTHS:
        agree(planes, normal(rng, 1, 3 * n_kv_heads, head_dim), length - 1)


@pytest.mark.parametrize("length", [511, 512, 513, 2047, 2048, 2049, 4095, 4096, 4097])
def test_long_contexts(stream, length):
    planes, rng = filled(stream, 1, 64, 4200)
    agree(planes, normal(rng, 1, 3, 64), length - 1)


def test_contexts_around_16384(stream):
    planes, rng = filled(stream, 1, 64, 16_385)
    for length in (16_383, 16_384, 16_385):
        agree(planes, normal(rng, 1, 1, 64), length - 1)


def test_context_of_32768(stream):
    planes, rng = filled(stream, 1, 64, 32_768)
    agree(planes, normal(rng, 1, 1, 64), 32_767)


def test_chunks_widen_with_the_position(stream):
    for key in [0, 127, 128, 8191, 8192, 8447, 8448, 65_535, 65_536, 66_560, 1 << 20]:
        chunk = kv_attend_simt.chunk_of(key)
        assert kv_attend_simt.chunk_begin(chunk) <= key < kv_attend_simt.chunk_begin(chunk + 1)
    # A window at a far position of a ring: chunks of 256 and of 1024 keys.
    for first in (8100, 65_400):
        planes, rng = filled(stream, 1, 64, 512, ring=True)
        planes.set_len(first + 400, base=first)
        q = normal(rng, 1, 2, 64)
        got = planes.attend(q, window=300)
        assert error(got, reference(planes, q, first + 400, base=first, window=300)[0]) <= BOUND


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_group_sizes(stream, group):
    planes, rng = filled(stream, 2, 64, 150)
    agree(planes, normal(rng, 1, 2 * group, 64), 140)


@pytest.mark.parametrize(
    ("head_dim", "n_kv_heads", "group"), [(64, 3, 3), (128, 2, 4), (256, 1, 16)]
)
def test_n_rows_are_n_single_rows(stream, head_dim, n_kv_heads, group):
    length = 250
    planes, rng = filled(stream, n_kv_heads, head_dim, length + 16, seed=group)
    q = normal(rng, 16, n_kv_heads * group, head_dim)
    singles = []
    for r in range(16):
        planes.set_len(length + r)
        singles.append(planes.attend(q[r : r + 1], lse=True))
    for n in range(1, 17):
        planes.set_len(length)
        out, lse = planes.attend(q[:n], lse=True)
        for r in range(n):
            assert same(out[r], singles[r][0][0]) and same(lse[r], singles[r][1][0]), (n, r)
    assert error(out, reference(planes, q, length)[0]) <= BOUND


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "group"), [(64, 64, 3), (96, 96, 9), (64, 512, 3), (256, 128, 6)]
)
def test_one_launch_equals_two(stream, head_dim, head_dim_v, group):
    """The block that finishes last joins the chunks to the bits of the second kernel."""
    planes, rng = filled(stream, 2, head_dim, 2300, head_dim_v=head_dim_v, n=1500)
    sinks = normal(rng, 2 * group)
    for n, length, options in (
        (1, 0, {}), (1, 63, {}), (3, 62, {}), (1, 200, {"sinks": sinks}), (4, 1490, {}),
        (3, 1490, {"window": 900, "softcap": 20.0}),
    ):  # fmt: skip
        q = normal(rng, n, 2 * group, head_dim)
        planes.set_len(length)
        one, two = (planes.attend(q, lse=True, joined=j, **options) for j in (True, False))
        assert same(one[0], two[0]) and same(one[1], two[1])
        assert not planes.tickets.to_numpy(stream).any()


def test_counted_lengths(stream):
    planes, rng = filled(stream, 1, 64, 80)
    q = normal(rng, 3, 2, 64)
    assert same(agree(planes, q, 70), agree(planes, q, 70, counted=True))


PAIRS = [
    (Q8_0, Q4_0), (E4M3, E4M3), (Q8_0, E4M3), (E4M3, Q5_1), (E4M3, Q4_0), (F16, F16),
    (BF16, BF16), (F32, F32), (Q5_1, Q8_0), (Q4_0, F16),
]  # fmt: skip


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS, ids=str)
def test_formats(stream, k_format, v_format):
    planes, rng = filled(stream, 2, 96, 140, k_format, v_format)
    agree(planes, normal(rng, 2, 4, 96), 130)


def test_every_format_has_a_pair_in_the_tests():
    assert {f for pair in PAIRS for f in pair} | {Q5_1} == set(FORMATS.values())


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 128), (128, 64), (96, 256)])
def test_heads_of_different_sizes(stream, head_dim, head_dim_v):
    planes, rng = filled(stream, 2, head_dim, 140, head_dim_v=head_dim_v)
    agree(planes, normal(rng, 2, 6, head_dim), 130)


def test_head_dim_512(stream):
    planes, rng = filled(stream, 1, 512, 140)
    agree(planes, normal(rng, 3, 4, 512), 130)
    agree(planes, normal(rng, 1, 4, 512), 17)


@pytest.mark.parametrize("window", [1, 2, 31, 64, 100, 129, 1000])
def test_windows(stream, window):
    planes, rng = filled(stream, 1, 64, 300)
    for length in (0, 1, 64, 199, 256):
        agree(planes, normal(rng, 3, 2, 64), length, window=window)


def test_options_of_the_scores(stream):
    planes, rng = filled(stream, 2, 64, 150)
    q = normal(rng, 2, 6, 64) * 3
    sinks = normal(rng, 6)
    agree(planes, q, 140, sinks=sinks)
    agree(planes, q, 140, softcap=5.0)
    agree(planes, q, 140, scale=0.3)
    agree(planes, q, 140, sinks=sinks * 20, softcap=2.0, scale=0.01, window=40)
    agree(planes, q, 140, sinks=np.full(6, -np.inf, np.float32))


def test_rows_without_keys(stream):
    planes, rng = filled(stream, 1, 64, 200, ring=True)
    q = normal(rng, 2, 2, 64)
    planes.set_len(10, base=100)  # everything the rows could see was dropped
    out, lse = planes.attend(q, lse=True)
    assert same(out, np.zeros_like(out)) and (lse == -np.inf).all()
    out, lse = planes.attend(q, lse=True, sinks=np.array([0.5, 2], np.float32))
    assert same(out, np.zeros_like(out)) and same(lse, np.array([[0.5, 2]] * 2, np.float32))
    planes.set_len(99, base=100)  # row 0 sees nothing, row 1 one key
    out, lse = planes.attend(q, lse=True)
    assert not out[0].any() and (lse[0] == -np.inf).all()
    assert np.array_equal(out[1], np.repeat(planes.decoded(1)[1][0], 2, axis=0))


def test_a_ring_equals_a_flat_plane(stream):
    flat, rng = filled(stream, 2, 64, 1200)
    k, v = (plane.reshape(1200, -1) for plane in flat.bytes())
    ring = Planes(stream, 2, 64, 400, ring=True)
    ring.kernel = flat.kernel
    for length, base in ((390, 0), (500, 128), (777, 611), (1190, 800)):
        n = length + 4 - base
        for buffer, rows in ((ring.k, k), (ring.v, v)):
            part = np.ascontiguousarray(rows[base : length + 4])
            buffer.view(0, part.shape, np.uint8).copy_from(stream, part)
        assert n <= 400
        q = normal(rng, 4, 4, 64)
        flat.set_len(length)
        ring.set_len(length, base=base)
        for window in (1, 50, 160):
            a, b = flat.attend(q, window=window), ring.attend(q, window=window)
            assert same(a, b), (length, base, window)


def test_a_window_equals_masking(stream):
    """Keys outside the window have no influence: a plane in which they are poison agrees."""
    planes, rng = filled(stream, 2, 64, 400)
    q = normal(rng, 3, 4, 64)
    planes.set_len(380)
    plain = planes.attend(q, window=100)
    rows = normal(rng, 281, 128)
    rows[:] = np.nan
    planes.load(rows, rows)  # keys below the first window
    planes.load(rows[:10], rows[:10], first=383)  # and behind the last row
    assert same(planes.attend(q, window=100), plain)


def test_a_poisoned_key_stays_with_the_rows_that_see_it(stream):
    planes, rng = filled(stream, 1, 64, 200)
    q = normal(rng, 8, 2, 64)
    planes.set_len(100)
    clean = planes.attend(q)
    poison = np.full((1, 64), np.nan, np.float32)
    planes.load(poison, poison, first=104)
    spoiled = planes.attend(q)
    assert same(spoiled[:4], clean[:4])
    assert np.isnan(spoiled[4:]).all()


def test_workspace_content_is_irrelevant(stream):
    planes, rng = filled(stream, 2, 96, 500)
    q = normal(rng, 2, 4, 96)
    planes.set_len(300)
    size = kv_attend.workspace_bytes(stream.device, 2, 4, 96, 500)
    outs = []
    for byte in (0xFF, 0x00, 0x7F, 0x3F):
        workspace = stream.device.alloc(size, stream)
        workspace.fill(stream, byte)
        outs.append(planes.attend(q, workspace=workspace))
    assert all(same(outs[0], other) for other in outs[1:])


def test_capacity_changes_no_bit(stream):
    results = []
    for rows in (140, 1000, 20_000):
        planes, _ = filled(stream, 1, 64, rows, n=140)
        planes.set_len(137)
        results.append(planes.attend(normal(np.random.default_rng(3), 2, 3, 64)))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_keys_beyond_the_capacity_are_never_read(stream):
    planes, rng = filled(stream, 1, 64, 100)
    attend_bits.keys_beyond_the_capacity_are_never_read(planes, normal(rng, 1, 1, 64), "simt")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_order_and_threads_change_no_bit(workers, order):
    from memra_lowlevel import Device

    with Device("host") as device:
        stream = device.stream(name="order")
        results = []
        for options in ({"thread_order": "forward", "workers": 1},
                        {"thread_order": order, "workers": workers, "seed": 5}):  # fmt: skip
            with host_options(**options):
                planes = Planes(stream, 2, 64, 300)
                rng = np.random.default_rng(1)
                planes.append(normal(rng, 290, 128), normal(rng, 290, 128))
                planes.set_len(280)
                out = planes.attend(normal(rng, 3, 6, 64), softcap=9.0)
                results.append([out, *planes.bytes()])
        stream.close()
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_sequences_of_a_table(stream):
    """Rows of several sequences, each with its own planes and counters, in one launch."""
    lengths, bases = (50, 131, 300), (0, 0, 60)
    planes, singles = [], []
    rng = np.random.default_rng(2)
    for length, base in zip(lengths, bases, strict=True):
        p, _ = filled(stream, 2, 64, 320, seed=length, ring=base > 0)
        p.set_len(length, base=base if base else None)
        planes.append(p)
    of_row = [(0, 0), (1, 0), (1, 1), (2, 0), (0, 3)]
    q = normal(rng, 5, 10, 64)
    for r, (i, offset) in enumerate(of_row):
        planes[i].set_len(lengths[i] + offset)
        singles.append(planes[i].attend(q[r : r + 1], window=150))
        planes[i].set_len(lengths[i])
    table = np.array(
        [(planes[i].k.ptr, planes[i].v.ptr, planes[i].len_d.ptr,
          planes[i].base_d.ptr if planes[i].base_d else 0, offset) for i, offset in of_row],
        np.int64,
    ).view(np.uint64)  # fmt: skip
    size = kv_attend.workspace_bytes(stream.device, 5, 10, 64, 320, window=150, ring=True)
    out = planes[0].poisoned(5 * 10 * 64 * 4).view(0, (5, 10, 64), np.float32)
    kv_attend.attend(
        stream, planes[0].upload(q), None, None, out, len_d=None, k_format=Q8_0, v_format=Q5_1,
        rows=320, n_kv_heads=2, head_dim=64, window=150, table=planes[0].upload(table),
        workspace=planes[0].poisoned(size).view(0, (size // 4,), np.float32), kernel="simt",
    )  # fmt: skip
    got = out.to_numpy(stream)
    assert all(same(got[r], singles[r][0]) for r in range(5))


def test_replayed_steps_equal_eager_ones(stream):
    """One captured step (append, attend, count) replayed, against the same launches one by one."""
    from memra_lowlevel.kernels import counters, kv_append

    rng = np.random.default_rng(6)
    rows = [[normal(rng, 1, 128), normal(rng, 1, 128), normal(rng, 1, 6, 64)] for _ in range(9)]
    results = []
    for captured in (False, True):
        planes, _ = filled(stream, 2, 64, 140, seed=4, n=125)
        planes.set_len(125)
        k, v, q = (planes.upload(x) for x in rows[0])
        out = planes.poisoned(6 * 64 * 4).view(0, (1, 6, 64), np.float32)
        size = kv_attend.workspace_bytes(stream.device, 1, 6, 64, 140)
        workspace = planes.poisoned(size).view(0, (size // 4,), np.float32)
        formats = {"k_format": Q8_0, "v_format": Q5_1, "rows": 140, "len_d": planes.len_d}

        def step(planes=planes, k=k, v=v, q=q, out=out, workspace=workspace, formats=formats):
            kv_append.append(stream, k, v, planes.k, planes.v, **formats)
            kv_attend.attend(
                stream, q, planes.k, planes.v, out, n_kv_heads=2, head_dim=64,
                workspace=workspace, **formats,
            )  # fmt: skip
            counters.add_counters(stream, planes.len_d, 1)

        graph = None
        if captured:
            with stream.capture("step") as recorded:
                step()
            graph = recorded.instantiate()
        outs = []
        for new in rows:
            for buffer, x in zip((k, v, q), new, strict=True):
                buffer.copy_from(stream, x)
            graph.launch(stream) if graph else step()
            outs.append(out.to_numpy(stream).copy())
        results.append([*outs, *planes.bytes(), planes.len_d.to_numpy(stream)])
        if graph:
            graph.close()
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert results[0][-1] == 134


def test_refusals(stream):
    planes, rng = filled(stream, 2, 64, 50)
    planes.set_len(40)
    q = normal(rng, 1, 4, 64)
    before = planes.attend(q)
    for head_dim, head_dim_v, group, numeric in (
        (80, 80, 1, "exact"), (64, 1024, 1, "exact"), (64, 64, 17, "exact"), (64, 64, 1, "int8q"),
    ):  # fmt: skip
        with pytest.raises(errors.FormatUnsupported) as caught:
            kv_attend.check_supported(
                stream.device, Q8_0, Q5_1, head_dim, head_dim_v, group=group, numeric=numeric
            )
        assert caught.value.nearest
    out = planes.poisoned(4 * 64 * 4).view(0, (1, 4, 64), np.float32)
    small = planes.poisoned(64).view(0, (16,), np.float32)
    big = planes.poisoned(1 << 20).view(0, (1 << 18,), np.float32)

    queries = planes.upload(q)

    def call(q=queries, out=out, workspace=big, rows=50, **more):
        kv_attend.attend(
            stream, q, planes.k, planes.v, out, len_d=planes.len_d, k_format=Q8_0, v_format=Q5_1,
            rows=rows, n_kv_heads=2, head_dim=64, workspace=workspace,
            **{"kernel": planes.kernel, **more},
        )  # fmt: skip

    for bad in (
        {"workspace": small},
        {"rows": 51},
        {"q": planes.upload(np.zeros((1, 3, 64), np.float32))},
        {"q": planes.upload(np.zeros((1, 4, 32), np.float32))},
        {"out": small},
        {"sinks": small.view(0, (2,), np.float32)},
        {"lse": small.view(0, (2,), np.float32)},
    ):
        with pytest.raises(errors.ArgumentError):
            call(**bad)
    call()
    assert same(out.to_numpy(stream), before)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n_kv_heads", (0, -1, None, "2", 2.0, True)),
        ("rows", (0, -5, None, "x", 2.5, 2**31)),
        ("head_dim", (0, -64, None, "64", 64.0, True)),
        ("head_dim_v", (0, -64, "64", 64.0, True)),
        ("counted", (None, 1, "yes", [], np.zeros(3))),
        ("programmatic", (None, 1, "yes", [], np.zeros(3))),
        ("settled", (None, 1, "yes", [], np.zeros(3))),
        ("k_format", (None, "q8_0", 5, np.zeros(3))),
        ("v_format", (None, "q5_1", 5)),
        ("k_plane", (None, 5, np.zeros(4096, np.uint8))),
        ("v_plane", (None, 5, np.zeros(4096, np.uint8))),
        ("len_d", (None, 5, np.zeros(1, np.int32))),
        ("q", (None, np.zeros((1, 4, 64), np.float32))),
        ("out", (None, np.zeros((1, 4, 64), np.float32))),
        ("workspace", (None, np.zeros(1 << 18, np.float32))),
        ("tickets", (5, np.zeros(64, np.uint32))),
        ("table", (5, np.zeros((1, 5), np.uint64))),
        ("lse", (5, np.zeros((1, 4), np.float32))),
        ("softcap", (0.0, -1.0, 7e-46, 1e-45, 1e-300, 1e39, 10**400, "1", True, float("nan"))),
        ("scale", (1e39, 10**400, float("inf"), "1")),
        ("kernel", ("cuda", 5, np.zeros(3), ["simt"])),
    ],
)
def test_what_is_none_of_an_argument(stream, name, values):
    """Refused with the name of the argument, before any launch."""
    planes, rng = filled(stream, 2, 64, 50)
    planes.set_len(40)
    out, space = (planes.poisoned(n) for n in (4 * 64 * 4, 1 << 20))
    given = {
        "q": planes.upload(normal(rng, 1, 4, 64)), "out": out.view(0, (1, 4, 64), np.float32),
        "k_plane": planes.k, "v_plane": planes.v, "len_d": planes.len_d, "k_format": Q8_0,
        "v_format": Q5_1, "rows": 50, "n_kv_heads": 2, "head_dim": 64,
        "workspace": space.view(0, (1 << 18,), np.float32),
    }  # fmt: skip
    kv_attend.attend(stream, **given)
    clean = out.to_numpy(stream), space.to_numpy(stream)
    launched = stream.device.driver.counts().get("cuLaunchKernel", 0)
    for value in values:
        with pytest.raises(errors.ArgumentError, match=f"{name}|planes and len_d"):
            kv_attend.attend(stream, **{**given, name: value})
    assert stream.device.driver.counts().get("cuLaunchKernel", 0) == launched
    assert all(same(a.to_numpy(stream), b) for a, b in zip((out, space), clean, strict=True))


def test_the_least_cap_is_one(stream):
    """The smallest number of f32 caps: every score that is not 0 weighs the same."""
    planes, rng = filled(stream, 2, 64, 50)
    planes.set_len(40)
    q = normal(rng, 1, 4, 64)
    assert not same(planes.attend(q, softcap=2.0**-149), planes.attend(q))
    assert same(planes.attend(q, softcap=2.0**-149), planes.attend(q, softcap=2.0**-140))


def test_results_and_workspace_that_lie_askew(stream):
    """Both are written 16 bytes at a time, on whatever kernel."""
    planes, rng = filled(stream, 2, 64, 50)
    q = planes.upload(normal(rng, 1, 4, 64))
    wide, space = planes.poisoned(4 * 64 * 4 + 16), planes.poisoned((1 << 20) + 16)
    for at, space_at, name in ((4, 0, "out"), (8, 0, "out"), (0, 8, "workspace"), (0, 0, None)):
        out = wide.view(at, (1, 4, 64), np.float32)
        workspace = space.view(space_at, (1 << 18,), np.float32)

        def call(out=out, workspace=workspace):
            kv_attend.attend(
                stream, q, planes.k, planes.v, out, len_d=planes.len_d, k_format=Q8_0,
                v_format=Q5_1, rows=50, n_kv_heads=2, head_dim=64, workspace=workspace,
            )  # fmt: skip

        if name is None:
            call()
            continue
        with pytest.raises(errors.ArgumentError, match=f"{name} must be 16-byte aligned"):
            call()
        assert (wide.to_numpy(stream) == 0xFF).all()


@pytest.mark.parametrize("name", ["out", "sinks", "lse", "tickets"])
@pytest.mark.parametrize("kernel", ["simt", "mma", "f16"])
def test_what_a_first_launch_does_not_take_is_checked_before_it(stream, kernel, name):
    """Nor do tickets pass unchecked where a kernel needs none, or there are too few."""
    planes, rng = filled(stream, 4, 64, 50)
    planes.set_len(40)
    q, space = planes.upload(normal(rng, 1, 4, 64)), planes.poisoned(1 << 20)
    out, lse = planes.poisoned(4 * 64 * 4), planes.poisoned(16)
    good = {
        "out": out.view(0, (1, 4, 64), np.float32), "lse": lse.view(0, (1, 4), np.float32),
        "sinks": planes.upload(normal(rng, 4)), "tickets": planes.tickets,
    }  # fmt: skip

    def call(**given):
        kv_attend.attend(
            stream, q, planes.k, planes.v, len_d=planes.len_d, k_format=Q8_0, v_format=Q5_1,
            rows=50, n_kv_heads=4, head_dim=64, kernel=kernel,
            workspace=space.view(0, (1 << 18,), np.float32), **{**good, **given},
        )  # fmt: skip

    whole = good[name]
    closed = whole.view(0, whole.shape, whole.dtype)
    closed.close()
    with Device("host:1") as other:
        elsewhere = other.stream(name="elsewhere")
        bad = [
            (whole.view(0, whole.shape, np.int32), errors.ArgumentError, f"{name} must be of"),
            (closed, errors.ClosedError, f"attend: {name}: buffer '.*' .*is closed"),
            (other.zeros(whole.shape, whole.dtype, elsewhere), errors.ArgumentError,
             f"{name} must be a buffer of {stream.context}, got one of host:1"),
        ]  # fmt: skip
        if name == "tickets":
            bad.append((whole.view(0, (1,), np.int32), errors.ArgumentError, "tickets must be of"))
        launched = stream.device.driver.counts().get("cuLaunchKernel", 0)
        for buffer, refusal, words in bad:
            with pytest.raises(refusal, match=words):
                call(**{name: buffer})
        assert stream.device.driver.counts().get("cuLaunchKernel", 0) == launched
        elsewhere.close()
    assert all((b.to_numpy(stream) == 0xFF).all() for b in (space, out, lse))
    call()
    assert np.isfinite(good["out"].to_numpy(stream)).all()
    assert not planes.tickets.to_numpy(stream).any()


@pytest.mark.parametrize("kernel", ["simt", "mma", "f16"])
def test_a_closed_buffer_is_refused_by_the_name_of_its_parameter(stream, kernel):
    planes, rng = filled(stream, 4, 64, 50)
    planes.set_len(40)
    space = planes.poisoned(1 << 20)
    good = {
        "q": planes.upload(normal(rng, 1, 4, 64)), "k_plane": planes.k, "v_plane": planes.v,
        "len_d": planes.len_d, "base_d": planes.upload(np.zeros(1, np.int32)),
        "workspace": space.view(0, (1 << 18,), np.float32),
        "out": planes.poisoned(4 * 64 * 4).view(0, (1, 4, 64), np.float32),
    }  # fmt: skip

    def call(**given):
        kv_attend.attend(
            stream, k_format=Q8_0, v_format=Q5_1, rows=50, n_kv_heads=4, head_dim=64,
            kernel=kernel, **{**good, **given},
        )  # fmt: skip

    launched = stream.device.driver.counts().get("cuLaunchKernel", 0)
    for name, whole in good.items():
        closed = whole.view(0, whole.shape, whole.dtype)
        closed.close()
        with pytest.raises(errors.ClosedError) as caught:
            call(**{name: closed})
        assert str(caught.value).startswith(f"attend: {name}: buffer {whole.name!r}")
        assert "test_kv_attend.py" in str(caught.value).partition("used at ")[2]
    assert stream.device.driver.counts().get("cuLaunchKernel", 0) == launched
    assert (space.to_numpy(stream) == 0xFF).all() and planes.len_d.to_numpy(stream) == 40
    call()
    assert np.isfinite(good["out"].to_numpy(stream)).all()


def test_extents_that_no_launch_has(stream):
    device = stream.device
    good = {"n_rows": 1, "n_heads": 4, "head_dim_v": 64, "rows": 50}
    assert kv_attend.workspace_bytes(device, **good) > 0
    assert kv_attend.workspace_bytes(device, **{**good, "n_rows": 0}) == 0
    for name in good:
        for value in (-1, None, "4", 2.5, True, 2**31, *([] if name == "n_rows" else [0])):
            with pytest.raises(errors.ArgumentError, match=name):
                kv_attend.workspace_bytes(device, **{**good, name: value})
    for bad in (0, -1, None, "8", 8.0, True):
        with pytest.raises(errors.ArgumentError, match="choose: n_kv_heads"):
            kv_attend.choose(device, Q8_0, Q5_1, 128, n_kv_heads=bad)
    for formats in ((None, Q5_1), (Q8_0, "q5_1")):
        with pytest.raises(errors.ArgumentError, match=r"choose: ._format"):
            kv_attend.choose(device, *formats, 128, n_kv_heads=8)
    for options in ({"group": None}, {"max_rows": 0}, {"max_rows": "x"}, {"n_kv_heads": 0}):
        with pytest.raises(errors.ArgumentError, match=f"prepare: {next(iter(options))}"):
            kv_attend.prepare(device, Q8_0, Q5_1, 64, **options)
