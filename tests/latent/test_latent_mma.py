"""Latent attention on tensor cores: class f16x2, on every device against float64."""

import numpy as np
import pytest
from latent_rig import error, f32, i32, normal, same

from memra_lowlevel import errors
from memra_lowlevel.compile import compile_source, cuda_src_root
from memra_lowlevel.formats import BF16, F32, Q8_0
from memra_lowlevel.kernels import latent_attend, latent_attend_mma, registry
from memra_lowlevel.kernels.latent_attend_mma import Shape, part_begin, part_of
from memra_lowlevel.reference import latent as oracle

SPEC = registry.spec("latent_mma")
LIMIT = SPEC.tolerance.value
SHAPES = [  # heads, rank, rope, n, length
    (1, 128, 0, 1, 0), (3, 128, 64, 4, 14), (16, 128, 0, 1, 300), (20, 256, 64, 2, 129),
    (64, 128, 0, 1, 65), (40, 128, 64, 3, 15), (16, 512, 64, 1, 70), (64, 512, 0, 1, 33),
    (128, 512, 64, 1, 20),
]  # fmt: skip


@pytest.fixture
def tensor(rig):
    """``rig.attend`` of class f16x2."""

    def attend(*args, **options):
        return rig.attend(*args, numeric="f16x2", **options)

    return attend


@pytest.mark.parametrize(("heads", "rank", "rope", "n", "length"), SHAPES)
def test_dense_attention_against_float64(tensor, heads, rank, rope, n, length):
    rng = np.random.default_rng(rank + heads)
    q, rows = normal(rng, n, heads, rank + rope), normal(rng, length + n, rank + rope)
    scale = (rank + rope) ** -0.5
    got, lse = tensor(q, rows, length, rank, scale, lse=True)
    assert error(got, oracle.attend(q, rows, length, rank, scale)) <= LIMIT
    s = q[-1].astype(float) @ rows.T.astype(float) * scale
    assert np.allclose(lse[-1], np.log(np.exp(s).sum(-1)), rtol=1e-5, atol=1e-5)
    counted = tensor(q, rows, length + n, rank, scale, counted=True)
    assert same(counted, got)
    for r in range(n):
        alone = tensor(q[r : r + 1], rows, length + r, rank, scale, capacity=length + n)
        assert same(alone[0], got[r])


@pytest.mark.parametrize("rank", [512, 128])
def test_the_bound_holds_for_long_sequences(rig, tensor, rank):
    rng = np.random.default_rng(3)
    long = 70_000 if rig.device.kind == "cuda" else 4500
    q, rows = normal(rng, 2, 4, rank + 64), normal(rng, long + 2, rank + 64)
    rows[:, :rank] += 0.5  # a mean that does not cancel
    scale = (rank + 64) ** -0.5 * 3
    got = tensor(q, rows, long, rank, scale)
    assert error(got, oracle.attend(q, rows, long, rank, scale)) <= LIMIT
    alone = tensor(q[:1], rows, long, rank, scale, capacity=long + 2)
    assert same(alone[0], got[0])


@pytest.mark.parametrize(("heads", "rank", "rope", "n", "length"), SHAPES[1:8])
def test_listed_attention_against_float64(tensor, heads, rank, rope, n, length):
    rng = np.random.default_rng(rank + 1)
    q, rows = normal(rng, n, heads, rank + rope), normal(rng, length + n, rank + rope)
    rows[rng.integers(0, length, 2)] = np.nan  # rows that no list names
    good = np.flatnonzero(np.isfinite(rows[:, 0]))
    lists = rng.choice(good, (n, 150)).astype(i32)
    lists[rng.random(lists.shape) < 0.3] = -1
    lists[:, 3] = length + n + 5
    lists[:, 60:130] = -1
    got = tensor(q, rows, length, rank, 0.2, indices=lists)
    assert error(got, oracle.attend(q, rows, length, rank, 0.2, lists)) <= LIMIT
    for r in range(n):
        alone = tensor(q[r : r + 1], rows, length + r, rank, 0.2, indices=lists[r : r + 1])
        assert same(alone[0], got[r])
    nothing, lse = tensor(q, rows, length, rank, 0.2, indices=np.full((n, 2), -1, i32), lse=True)
    assert (nothing == 0).all() and (lse == -np.inf).all()


def test_a_head_has_the_same_bits_in_every_company(rig, tensor, monkeypatch):
    """Whatever the other heads, the queries of a block, and what stays in registers."""
    rng = np.random.default_rng(4)
    q, rows = normal(rng, 1, 64, 192), normal(rng, 200, 192)
    full = tensor(q, rows, 199, 128, 0.1)
    for heads in (1, 16, 17, 33, 48):
        assert same(tensor(q[:, :heads], rows, 199, 128, 0.1)[0], full[0, :heads])
    every = latent_attend_mma._fitting
    for shape in (Shape(4, 1, 2, 8), Shape(2, 0, 3, 16), Shape(2, 1, 2, 8),
                  Shape(1, 0, 5, 16), Shape(1, 3, 2, 8)):  # fmt: skip
        monkeypatch.setattr(latent_attend_mma, "_fitting", lambda *_, shape=shape: [shape])
        latent_attend_mma._plan.cache_clear()
        assert same(tensor(q, rows, 199, 128, 0.1), full)
    monkeypatch.setattr(latent_attend_mma, "_fitting", every)
    latent_attend_mma._plan.cache_clear()


def test_a_list_of_every_row_is_nearly_dense_and_calls_may_be_parts(tensor):
    rng = np.random.default_rng(5)
    q, rows = normal(rng, 3, 5, 192), normal(rng, 200, 192)
    together = tensor(q, rows, 197, 128, 0.2)
    lists = np.arange(200, dtype=i32)[None].repeat(3, 0)
    assert same(tensor(q, rows, 197, 128, 0.2, indices=lists), together)  # chunks of 64 both
    assert same(tensor(q[1:], rows, 197, 128, 0.2, first=1, of=3), together[1:])
    part = tensor(q[1:], rows, 200, 128, 0.2, first=1, of=3, counted=True)
    assert same(part, together[1:])


def test_rows_that_are_not_seen_do_not_matter(tensor):
    rng = np.random.default_rng(6)
    q, rows = normal(rng, 2, 3, 128), normal(rng, 60, 128)
    wanted = tensor(q, rows, 37, 128, 0.3)
    rows[39:] = np.nan
    assert same(tensor(q, rows, 37, 128, 0.3), wanted)
    for bad in (np.nan, np.inf, 2.0**64):
        rows[38] = normal(rng, 128)
        rows[38, 100] = bad  # seen by the second row only
        got = tensor(q, rows, 37, 128, 0.3)
        assert same(got[0], wanted[0]) and np.isnan(got[1]).all()
    rows[38] = 2.0**50  # large, but a number
    assert same(tensor(q, rows, 37, 128, 0.3)[0], wanted[0])


def test_rows_and_queries_of_every_size(tensor):
    """Powers of two of a query and of single rows leave the relative error as it is."""
    rng = np.random.default_rng(7)
    q, rows = normal(rng, 1, 4, 192), normal(rng, 100, 192)
    sizes = np.exp2(rng.integers(-20, 4, 100)).astype(f32)[:, None]
    for q_by, rows_by, scale in (
        (1, sizes, 0.3), (2.0**-40, 2.0**30, 2.0**9), (2.0**60, 2.0**-58, 0.02), (1, 2.0**-55, 1),
        (1e-30, 1e10 * sizes, 1e16),
    ):  # fmt: skip
        a, b = (q * q_by).astype(f32), (rows * rows_by).astype(f32)
        got = tensor(a, b, 99, 128, scale)
        assert error(got, oracle.attend(a, b, 99, 128, scale)) <= LIMIT
    rows[:] = 0
    assert (tensor(q, rows, 99, 128, 1.0) == 0).all()
    q[0, 1, 7] = np.nan
    got = tensor(q, rows + 1, 99, 128, 1.0)
    assert np.isnan(got[0, 1]).all() and np.allclose(got[0, [0, 2, 3]], 1)


@pytest.mark.parametrize("fmt", [BF16, Q8_0], ids=str)
def test_attention_over_other_row_formats(tensor, fmt):
    rng = np.random.default_rng(8)
    for heads, rank in ((5, 128), (40, 512)):
        q, rows = normal(rng, 2, heads, rank + 64), normal(rng, 70, rank + 64)
        decoded = fmt.decode(fmt.encode(rows))
        got = tensor(q, rows, 68, rank, 0.1, format=fmt)
        assert error(got, oracle.attend(q, decoded, 68, rank, 0.1)) <= LIMIT
        assert same(got, tensor(q, decoded, 68, rank, 0.1))


def test_chunks_widen_with_the_position_and_a_short_workspace_gives_nan(rig):
    edges = [part_begin(p) for p in range(400)]
    for key in [0, 63, 64, 4095, 4096, 32767, 32768, 65535, 65536, 131071, *edges]:
        assert part_begin(part_of(key)) <= key < part_begin(part_of(key) + 1)
    assert np.unique(np.diff(edges)).tolist() == [64, 256, 512, 1024]
    assert all(edge % 16 == 0 for edge in edges)
    assert latent_attend_mma.n_slots(131072) == 304 and latent_attend_mma.n_slots(1, 65) == 2


def test_a_class_is_chosen_by_name_and_says_why(rig):
    choose = latent_attend.choose
    assert choose(rig.device, 512, 64).kernel == "simt"
    assert "asks for tensor cores" in choose(rig.device, 512, 64).reason
    assert choose(rig.device, 512, 64, "f16x2").kernel == "mma"
    assert "does not do rank 96" in choose(rig.device, 96, 0).reason
    for rank, rope in ((96, 0), (512, 32), (1024, 0)):
        with pytest.raises(errors.FormatUnsupported, match="f16x2 does not do rank"):
            choose(rig.device, rank, rope, "f16x2")
    with pytest.raises(errors.FormatUnsupported, match="numeric class 'fast'"):
        choose(rig.device, 512, 64, "fast")


def test_what_was_prepared_serves_a_capture(rig):
    """Every shape that a launch over any plane may take is there before."""
    for heads in (4, 64):
        latent_attend_mma.prepare(rig.device, heads, 128, 0, max_rows=4)
        loaded = len(rig.device.memo)
        for n, rows in ((1, 100), (4, 100), (1, 300)):
            q, plane = np.ones((n, heads, 128), f32), np.ones((rows, 128), f32)
            rig.attend(q, plane, 50, 128, 1.0, numeric="f16x2")
        assert len(rig.device.memo) == loaded


def test_a_replay_equals_eager_launches(rig):
    """Captured once, replayed at other lengths by the device's counter."""
    rng, heads, rank, capacity = np.random.default_rng(5), 20, 128, 200
    q, rows = normal(rng, 2, heads, rank), normal(rng, capacity, rank)
    size = latent_attend.workspace_bytes(2, heads, rank, capacity, 0, "f16x2")
    queries, plane = rig.up(q), rig.up(rows).view(0, (rows.nbytes,), np.uint8)
    workspace, length = rig.poisoned((size // 4,)), rig.word(0)
    outs = [rig.poisoned(q.shape) for _ in range(2)]

    def attend(out):
        latent_attend.attend(
            rig.stream, queries, plane, out, len_d=length, rows=capacity, workspace=workspace,
            scale=0.1, numeric="f16x2",
        )  # fmt: skip

    attend(outs[0])
    with rig.stream.capture("latent") as graph:
        attend(outs[1])
    with graph.instantiate() as step:
        for n in (0, 15, 120, 198):
            length.copy_from(rig.stream, np.array([n], i32))
            attend(outs[0])
            step.launch(rig.stream)
            eager, replayed = (rig.down(out) for out in outs)
            assert same(eager, replayed)
            assert error(eager, oracle.attend(q, rows, n, rank, 0.1)) <= LIMIT


def test_shared_memory_of_the_wrapper_is_that_of_the_kernel():
    for rank, rope, shape in (
        (512, 64, Shape(4, 1, 2, 8)), (512, 0, Shape(2, 0, 3, 16)), (128, 0, Shape(1, 1, 5, 16)),
    ):  # fmt: skip
        width, m = rank + rope, shape.sets
        steps = width // 64 - shape.held
        want = shape.stages * 16 * (4 * width + 16) + 4 * steps * m * 1024
        want += 4 * 16 * m * 16 * 4 + m * 1024 + 3 * 16 * m * 4 + shape.stages * (256 + 64) + 32
        assert latent_attend_mma.shared_bytes(rank, rope, shape) == want
    assert latent_attend_mma._fitting(512, 64, 4, 232_448)[0] == Shape(4, 1, 2, 8)
    assert latent_attend_mma._fitting(512, 64, 4, 166_912)[0].sets == 1
    assert latent_attend_mma._fitting(512, 64, 4, 101_376)[0].sets == 1
    assert latent_attend_mma._fitting(512, 64, 4, 60_000) == []
    assert F32 in (F32,) and SPEC.numeric_class == "f16x2"


FAULTS = (
    ("no fine halves of rows", "mma_m16n8k16_f16(rest[m][n], a.coarse, b[n] + 2, rest",
     "mma_m16n8k16_f16(rest[m][n], a.fine, b[n] + 2, rest"),
    ("no fine halves of weights", "product == 2 ? p[m].fine", "product == 2 ? p[m].coarse"),
    ("a slice of the channels is missing", "from[3 * S::QUERIES * STEP + j]", "0.0f"),
    ("later keys are seen", "score[j] = j < behind ? score[j] : -INF_F32;", ""),
    ("the power of a row is forgotten", "lifted[j] = score[j] * up[j];",
     "lifted[j] = score[j] * 0x1p15f;"),
    ("sums do not follow the reference", "acc[m][n][j] *= old[m][j / 2];", "acc[m][n][j] *= 1.0f;"),
    ("a chunk is lost", "own, warp, behind, COMBINE_WARPS", "own, warp, behind - 1, COMBINE_WARPS"),
    ("chunks follow the share of a block", "int32_t edge = edge_behind(place.begin);",
     "int32_t edge = place.begin + 48;"),
)  # fmt: skip


def holds(attend):
    """Rows of several sizes, alone and together, over several chunks, against float64."""
    rng = np.random.default_rng(9)
    q, rows = normal(rng, 2, 3, 192), normal(rng, 1030, 192)
    rows *= np.exp2(rng.integers(-6, 1, 1030)).astype(f32)[:, None]
    got = attend(q, rows, 1028, 128, 0.2)
    alone = attend(q[:1], rows, 1028, 128, 0.2, capacity=1030)
    return error(got, oracle.attend(q, rows, 1028, 128, 0.2)) <= LIMIT and same(alone[0], got[0])


@pytest.mark.parametrize(("old", "new"), [pytest.param(*f[1:], id=f[0]) for f in FAULTS])
@pytest.mark.parametrize("device", ["host"], indirect=True)
def test_a_fault_in_the_kernels_is_noticed(rig, tensor, monkeypatch, old, new):
    text = (cuda_src_root() / "latent" / "attend_mma.cu").read_text()
    assert text.count(old) == 1

    def kernels(device, format, rank, rope, shape):
        numbers = (rank, rope, shape.sets, shape.held, shape.stages, shape.warps)
        names = (f"latent_mma<F32, {', '.join(map(str, numbers))}>", f"latent_mma_combine<{rank}>")
        image = compile_source(
            text.replace(old, new), arch="host", name="attend_mma.cu", name_expressions=names,
            include_dirs=(cuda_src_root(),),
        )  # fmt: skip
        module = device.module(image)
        return module.kernel(names[0]), module.kernel(names[1])

    assert holds(tensor)
    monkeypatch.setattr(latent_attend_mma, "_kernels", kernels)
    assert not holds(tensor)
