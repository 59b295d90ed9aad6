"""Check mode: the kernels are clean in every order, and each barrier taken away is reported."""

import re

import numpy as np
import pytest
from latent_rig import f32, i32, normal

from memra_lowlevel import errors
from memra_lowlevel.compile import DEFAULT_ARCHS, cuda_src_root
from memra_lowlevel.driver.host import mutate, runner
from memra_lowlevel.formats import F32, Q8_0
from memra_lowlevel.kernels import latent_attend, latent_attend_mma, registry
from memra_lowlevel.reference import latent as oracle

ORDERS = ("forward", "reverse")
NAMES = (
    "index_append", "index_scores", "latent_append", "latent_combine", "latent_mma",
    "latent_mma_combine", "latent_partial", "latent_project", "latent_rotate", "select_choose",
    "select_filter", "select_maxima",
)  # fmt: skip


def nan(*shape):
    return np.full(shape, np.nan, f32)


def word(n):
    return np.array([n], i32)


def quick(source, name):
    return runner.quick(source, name, check=True)


def drive_append(source, orders=ORDERS, parts=("latent_append", "latent_rotate", "latent_project")):
    rng = np.random.default_rng(0)
    raw, weight, table = normal(rng, 2, 40), normal(rng, 32), oracle.angles(8, 8)
    x, w, y = normal(rng, 5, 2, 24), normal(rng, 2, 20, 24), nan(5, 2, 28)
    for order in orders:
        for norm in (weight, None) if "latent_append" in parts else ():
            plane = np.full(5 * 160, 0xFF, np.uint8)
            quick(source, "latent_append<F32>")(
                2, 128, 160, raw, norm, table, plane, i32(40), i32(32), i32(8), f32(1e-6), i32(5),
                word(2), order=order,
            )  # fmt: skip
            assert np.isfinite(plane.view(f32).reshape(5, 40)[2:4]).all()
        if "latent_project" in parts:
            quick(source, "latent_project<4>")(
                (2, 2, 2), 128, 0, x, w, y, i32(5), i32(24), i32(20), i32(24), i32(28),
                order=order,
            )  # fmt: skip
            assert np.isfinite(y[..., :20]).all()
        if "latent_rotate" in parts:
            quick(source, "latent_rotate")(
                (1, 5), 128, 0, x, table, y, i32(2), i32(24), i32(28), i32(8), i32(8), i32(0),
                word(1), order=order,
            )  # fmt: skip
            assert np.isfinite(y).all()


def drive_attend(source, orders=ORDERS, parts=("latent_partial", "latent_combine")):
    """Both numbers of stages, dense and listed, over more than one chunk; then the combination."""
    rng = np.random.default_rng(1)
    rank, rope, heads, n, length = 8, 4, 5, 2, 150
    q, rows = normal(rng, n, heads, rank + rope), normal(rng, length + n, rank + rope)
    lists = rng.integers(-1, length, (n, 70)).astype(i32)
    plane = rows.view(np.uint8).reshape(-1)
    partial_source, combine_source = (
        source if part in parts else CLEAN / "attend.cu"
        for part in ("latent_partial", "latent_combine")
    )
    combine = quick(combine_source, f"latent_combine<{rank}>")
    for stages in (1, 2) if "latent_partial" in parts else (1,):
        partial = quick(partial_source, f"latent_partial<F32, {rank}, {rope}, 8, {stages}>")
        shared = latent_attend.shared_bytes(rank, rope, 8, stages)
        for order in orders:
            for indices, slots in ((None, 2), (lists, 3)):
                parts_of = nan(n, heads, slots, rank + 2)
                n_list = 0 if indices is None else indices.shape[1]
                partial((1, 2), 256, shared, q, plane, i32(n), i32(heads), i32(length + n),
                        indices, i32(n_list), i32(0), f32(0.3), word(length), parts_of, i32(slots),
                        order=order, seed=3)  # fmt: skip
                out, lse = nan(n, heads, rank), nan(n, heads)
                combine((heads, n, 1), 256, 0, parts_of, out, lse, i32(length + n), i32(n_list),
                        i32(0), word(length), i32(slots), order=order)  # fmt: skip
                wanted = oracle.attend(q, rows, length, rank, 0.3, indices)
                assert np.abs(out - wanted).max() < 1e-5


def drive_attend_mma(source, orders=ORDERS, parts=("latent_mma", "latent_mma_combine")):
    """Queries in registers and in shared memory, rows that are copied whole and in words."""
    rng = np.random.default_rng(4)
    rank, heads, n, length = 128, 20, 2, 150
    q, rows = normal(rng, n, heads, rank), normal(rng, length + n, rank)
    lists = rng.integers(-1, length, (n, 70)).astype(i32)
    combine = quick(
        source if "latent_mma_combine" in parts else CLEAN / "attend_mma.cu",
        f"latent_mma_combine<{rank}>",
    )
    shapes = (
        (F32, latent_attend_mma.Shape(2, 1, 3, 16)), (F32, latent_attend_mma.Shape(1, 2, 2, 8)),
        (Q8_0, latent_attend_mma.Shape(1, 0, 3, 8)),
    )  # fmt: skip
    for fmt, shape in shapes if "latent_mma" in parts else shapes[:1]:
        partial = quick(
            source if "latent_mma" in parts else CLEAN / "attend_mma.cu",
            f"latent_mma<{fmt.constant}, {rank}, 0, {shape.sets}, {shape.held}, {shape.stages}, "
            f"{shape.warps}>",
        )
        plane = fmt.encode(rows).reshape(-1).view(np.uint8)
        seen = fmt.decode(fmt.encode(rows))
        shared = latent_attend_mma.shared_bytes(rank, 0, shape)
        for order in orders:
            for indices in (None, lists):
                n_list = 0 if indices is None else indices.shape[1]
                slots = latent_attend_mma.n_slots(length + n, n_list)
                per_block = heads if n_list else n * heads
                blocks = -(-per_block // (16 * shape.sets)) * (n if n_list else 1)
                space = nan(n * heads * slots * (rank + 2))
                partial((blocks, 2), 32 * shape.warps, shared, q, plane, i32(n), i32(heads),
                        i32(length + n), indices, i32(n_list), i32(0), f32(0.3), word(length),
                        space, i32(slots), order=order, seed=3)  # fmt: skip
                out, lse = nan(n, heads, rank), nan(n, heads)
                combine((heads, n, 1), 256, 0, space, out, lse, i32(length + n), i32(n_list),
                        i32(0), word(length), i32(slots), order=order)  # fmt: skip
                wanted = oracle.attend(q, seen, length, rank, 0.3, indices)
                assert np.abs(out - wanted).max() < 1e-5


def drive_index(source, orders=ORDERS, parts=("index_append", "index_scores")):
    rng = np.random.default_rng(2)
    n, d, pool, heads = 11, 40, 4, 3
    rows, ape = normal(rng, n, 2 * d), normal(rng, pool, d)
    q, w, keys = normal(rng, 2, heads, d), normal(rng, 2, heads), normal(rng, 150, d)
    score = quick(source, "index_scores<2, 2, 4, 16>")
    for order in orders:
        if "index_append" in parts:
            plane, made = normal(rng, 16, 2 * d), nan(8, d)
            quick(source, "index_append")(
                n // pool + 2, 128, 0, rows, ape, plane, made, i32(n), i32(0), i32(d), i32(pool),
                i32(16), i32(32), word(2), order=order,
            )  # fmt: skip
            assert np.isfinite(made[:3]).all() and np.isnan(made[3:]).all()
        scores = nan(2, 150)
        score((1, 2), 128, 12800, q, w, keys, scores, i32(2), i32(heads), i32(d), i32(pool),
              i32(150), i32(150), i32(0), f32(d**-0.5), f32(heads**-0.5), word(600),
              order=order)  # fmt: skip
        assert np.array_equal(scores, oracle.scores(q, w, keys, 600, pool))


SELECT = ("select_maxima", "select_filter", "select_choose")


def drive_select(source, orders=ORDERS, parts=SELECT):
    """One launch over few pools; three over many, whose lists are short, and long."""
    rng = np.random.default_rng(3)
    n, pool, top_k = 1, 2, 200
    width = top_k + pool - 1
    kernel = {
        part: quick(
            source if part in parts else CLEAN / "select.cu",
            part + ("<8>" if part == "select_choose" else ""),
        )
        for part in SELECT
    }
    for n_pools, ties, many in ((1300, False, False), (2300, False, True), (5000, True, True)):
        if not many and "select_choose" not in parts:
            continue
        scores = normal(rng, n, n_pools)
        if ties:
            scores = np.where(scores > 2.8, scores, f32(0))
        segments = -(-n_pools // 2048)
        some = (i32(pool), i32(n_pools), i32(n_pools))
        seen = word(2 * n_pools)
        for order in orders:
            maxima, counts = np.zeros(-(-n_pools // 32), np.uint32), np.zeros(segments, np.uint32)
            lists, out = np.zeros(n_pools, np.uint32), np.full((n, width), 9, i32)
            if many:
                kernel["select_maxima"]((segments, n), 256, 0, scores, maxima, *some, i32(0), seen,
                                        order=order)  # fmt: skip
                kernel["select_filter"]((segments, n), 256, 0, scores, maxima, counts, lists, *some,
                                        i32(top_k), i32(0), seen, order=order)  # fmt: skip
                assert top_k // pool <= counts.sum() and (counts.sum() > 4096) == ties
            kernel["select_choose"](
                n, 1024, 0, scores, counts if many else None, lists if many else None,
                i32(segments), out, word(0), *some, i32(top_k), i32(width), i32(0), seen,
                order=order,
            )  # fmt: skip
            for r in range(n):
                wanted = oracle.select(scores[r], 2 * n_pools + 1 + r, top_k, pool)
                assert out[r].tolist() == wanted.tolist()


DRIVES = {
    "append.cu": drive_append, "attend.cu": drive_attend, "attend_mma.cu": drive_attend_mma,
    "index.cu": drive_index, "select.cu": drive_select,
}  # fmt: skip


CLEAN = cuda_src_root() / "latent"
LEAST = {"append.cu": 4, "attend.cu": 9, "attend_mma.cu": 8, "index.cu": 2, "select.cu": 8}
SHARED = {name: ("select_choose",) for name in ("sum_below", "digit", "bound")}
"""Device functions with barriers, and a kernel that shows them."""


def enclosing(text, line):
    """Name of the function that holds a line of a source."""
    before = "\n".join(text.splitlines()[:line])
    pattern = r"^(?: {4}|[^\s/][^/\n]*?\b)([a-z]\w+)\((?:const|float|int32_t|uint8_t)\b"
    return re.findall(pattern, before, re.M)[-1]


@pytest.mark.parametrize("name", DRIVES)
def test_the_kernels_are_clean_in_every_order(name):
    DRIVES[name](CLEAN / name, ("forward", "reverse", "random"))


@pytest.mark.parametrize("name", DRIVES)
def test_every_barrier_is_needed(name):
    own, text = str((CLEAN / name).resolve()), (CLEAN / name).read_text()
    found = [m for m in mutate.mutations(CLEAN / name) if m.file == own]
    assert len(found) >= LEAST[name]
    missed = []
    for mutation in found:
        kernel = enclosing(text, mutation.line)
        parts = SHARED.get(kernel, (kernel,))
        try:
            DRIVES[name](mutation.source, parts=parts)
        except errors.HostCheckError:
            continue
        except AssertionError:
            pass  # wrong values are no report: the barrier itself must be missed
        missed.append(f"{mutation} in {kernel}")
    assert missed == []


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_every_instance_compiles_and_hot_kernels_do_not_spill(arch):
    specs = [registry.spec(name) for name in NAMES]
    images = registry.images(arch, specs)
    for s in specs:
        for expression in s.expressions:
            used = images[s.source].resources[images[s.source].entries[expression]]
            assert used.registers > 0
            assert not s.hot or (used.spills_bytes, used.local_bytes) == (0, 0), (expression, used)


LARGE = [
    registry.spec("latent_partial").expression(
        format=f, rank=512, rope=rope, queries=queries, stages=2
    )
    for f in ("F32", "Q8_0") for rope in (0, 64) for queries in (16, 32)
]  # fmt: skip


LARGE_MMA = [
    registry.spec("latent_mma").expression(
        format=f, rank=512, rope=rope, sets=4, held=held, stages=2, warps=8
    )
    for f in ("F32", "BF16") for rope, held in ((0, 0), (64, 1))
]  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_instances_for_much_shared_memory_do_not_spill(arch):
    from memra_lowlevel.compile import compile_file

    for source, expressions in (("attend.cu", LARGE), ("attend_mma.cu", LARGE_MMA)):
        image = compile_file(f"latent/{source}", arch=arch, name_expressions=tuple(expressions))
        for expression in expressions:
            used = image.resources[image.entries[expression]]
            assert (used.spills_bytes, used.local_bytes) == (0, 0), (expression, used)


def test_the_registry_knows_the_kernels():
    assert {s.name for s in registry.all_specs()} >= set(NAMES)
