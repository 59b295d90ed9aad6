"""Check mode reports the removal of any barrier of any kernel of ``cuda_src``.

The tests of each family run its kernels in check mode; here every source is taken, whatever its
family. A source with a barrier that nothing drives fails. Of a kernel with two paths the host
device runs the one for older GPUs; barriers of the other can only be judged on a GPU.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from families import family

from memra_lowlevel import errors
from memra_lowlevel.compile import cuda_src_root
from memra_lowlevel.driver.host import mutate, runner
from memra_lowlevel.formats import F16, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend_f16, kv_attend_mma
from memra_lowlevel.reference import attend as oracle

F32, I32 = np.float32, np.int32
ORDERS = ("forward", "reverse")
ROOT = cuda_src_root()
SOURCES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.cu"))


def only_for_gpus(lines):
    """Whether the line behind these lies in the first branch of an ``#if MEMRA_CUDA``."""
    branches = []
    for line in lines:
        word, _, condition = line.strip().partition(" ")
        if word in ("#if", "#ifdef", "#ifndef"):
            branches.append(word == "#if" and condition.startswith("MEMRA_CUDA"))
        elif word in ("#else", "#elif"):
            branches[-1] = False
        elif word == "#endif":
            branches.pop()
    return any(branches)


def runs_on_the_host(mutation):
    """Whether no enclosing branch is that of a path for GPUs, or for newer ones."""
    lines = Path(mutation.file).read_text().splitlines()
    if only_for_gpus(lines[: mutation.line - 1]):
        return False
    inside = len(lines[mutation.line - 1]) - len(lines[mutation.line - 1].lstrip())
    for line in reversed(lines[: mutation.line - 1]):
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent < inside:
            if "COPY == COPY_BULK" in line:
                return False
            inside = indent
    return True


NEVER_CALLED = {"kv/attend_mma.cu": {"attend_walk.cuh"}}
"""Headers whose barriers a source brings along and never runs: another source answers for them."""


@functools.cache
def mutations(source):
    never = NEVER_CALLED.get(source, set())
    every = (m for m in mutate.mutations(ROOT / source) if runs_on_the_host(m))
    return [m for m in every if Path(m.file).name not in never]


MUTANTS = [(source, i) for source in SOURCES for i in range(len(mutations(source)))]


def attend(text):
    kv = family("kernels/test_kv_checked.py")
    for order in ORDERS:
        partial, length = kv.run_partial(text, length=300, order=order)
        kv.run_combine(text, partial, length, order=order)
        for n_blocks in (1, 3):  # which join their chunks themselves, 4 queries at a time
            joined = np.full((5, 2, 64), np.nan, F32)
            kv.run_partial(text, queries=16, n=5, length=300, order=order, n_blocks=n_blocks,
                           joined=joined)  # fmt: skip


def attend_mma(text):
    """Two warps per team, two teams per head, several chunks, more steps than stages."""
    d, n, group, heads, length = 128, 9, 1, kv_attend_mma._ALIGNED_HEADS[128], 186
    rng, used = np.random.default_rng(0), length + n
    x = rng.standard_normal((2, used, heads * d), np.float32)
    k, v = Q8_0.encode(x[0]), Q5_1.encode(x[1])
    q = rng.standard_normal((n, heads * group, d), np.float32)
    shape = kv_attend_mma._shape(d, heads, n * group, 200_000)
    assert shape.queries == 8 and shape.teams == 2
    slots, len_d = kv_attend_mma.n_slots(used), np.array([length], I32)
    parts, no_map = 3, np.void(bytes(128))  # chunks of 96 keys, and for the last rows of 128
    for blocks, order in ((1, "forward"), (1, "reverse"), (4, "reverse")):
        partial = np.full(n * heads * group * slots * (d + 2), np.nan, F32)
        out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, F32)
        runner.quick(text, f"attend_mma<{d}, {shape.queries}, {shape.heads}, 0>", check=True)(
            (blocks, heads // shape.heads, shape.query_blocks), 32 * shape.warps(d),
            shape.shared_bytes, q, k, v, I32(n), I32(heads), I32(group), I32(used), I32(0), I32(0),
            F32(d**-0.5), F32(0), len_d, None, None, partial, I32(slots), I32(parts),
            I32(shape.teams), no_map, no_map, I32(0), I32(blocks > 1), order=order, seed=3,
        )  # fmt: skip
        runner.quick(text, f"attend_mma_combine<{d}>", check=True)(
            (heads * group, n, d // 32), 256, 0, partial, None, out, lse, I32(n), I32(used), I32(0),
            I32(0), len_d, None, None, I32(slots), I32(parts), I32(1), order=order, seed=3,
        )  # fmt: skip
        seen = (f.decode(b).reshape(used, heads, d) for f, b in ((Q8_0, k), (Q5_1, v)))
        wanted, _ = oracle.attend(q, *seen, length)
        assert np.abs(out - wanted).max() <= 1e-5 * np.abs(wanted).max()


def attend_f16(text):
    """Teams of one warp, and of two that share the keys of a step."""
    attend_f16_pair(text, F16, F16, 9, 2, 2)
    attend_f16_pair(text, Q8_0, Q5_1, 5, 4, 4)


def attend_f16_pair(text, k_format, v_format, n, heads, group):
    """Two teams per head, several chunks, more steps than stages, rows whose chunks differ."""
    d, length = 64, 186
    rng, used = np.random.default_rng(0), length + n
    x = rng.standard_normal((2, used, heads * d), np.float32)
    k, v = k_format.encode(x[0]), v_format.encode(x[1])
    q = rng.standard_normal((n, heads * group, d), np.float32)
    shape = kv_attend_f16._shape(k_format, v_format, d, heads, n * group, 200_000)
    shares = kv_attend_f16.shares(k_format, v_format)
    assert shape.sets == shape.teams == 2 and shape.warps == 2 * heads * shares
    slots, len_d = kv_attend_mma.n_slots(used), np.array([length], I32)
    parts, no_map = 3, np.void(bytes(128))  # chunks of 96 keys, and for the last rows of 128
    formats = f"{k_format.constant}, {v_format.constant}"
    name = f"attend_f16<{formats}, {d}, {shape.sets}, {shape.heads}, 3, 0>"
    for blocks, order in ((1, "forward"), (1, "reverse"), (4, "reverse")):
        partial = np.full(n * heads * group * slots * shares * (d + 2), np.nan, F32)
        out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, F32)
        runner.quick(text, name, check=True)(
            (blocks, 1, shape.query_blocks), 32 * shape.warps,
            shape.shared_bytes, q, k, v, I32(n), I32(heads), I32(group), I32(used), I32(0), I32(0),
            F32(d**-0.5), F32(0), len_d, None, None, partial, I32(slots), I32(parts),
            I32(shape.teams), no_map, no_map, I32(0), I32(blocks > 1), order=order, seed=3,
        )  # fmt: skip
        runner.quick("kv/attend_mma.cu", f"attend_mma_combine<{d}>")(
            (heads * group, n, d // 32), 256, 0, partial, None, out, lse, I32(n), I32(used), I32(0),
            I32(0), len_d, None, None, I32(slots), I32(parts), I32(shares),
        )  # fmt: skip
        seen = (f.decode(b).reshape(used, heads, d) for f, b in ((k_format, k), (v_format, v)))
        wanted, _ = oracle.attend(q, *seen, length)
        assert np.abs(out - wanted).max() <= 1e-5 * np.abs(wanted).max()


def append(text):
    kv = family("kernels/test_kv_checked.py")
    x = np.random.default_rng(0).standard_normal((3, 96), np.float32)
    for order in ORDERS:
        kv.run_append(Q8_0, x, text, order=order, check=True)


def delta(text):
    for order in ORDERS:
        family("cache/test_recur_checked.py").run(text, n_rows=10, order=order)  # two batches


def loop(text):
    for order in ORDERS:
        family("cache/test_recur_checked.py").run_round(text, order)


def hidden(text):
    for order in ORDERS:
        family("speculative/test_hidden.py").run_hidden(text, order)


def layer_cache(name):
    def drive(text):
        for order in ORDERS:
            family("layer_kv/test_lkv_checked.py").run(name, text, order)

    return drive


def latent(name):
    return lambda text: family("latent/test_latent_checked.py").DRIVES[name](text)


def model(name):
    def drive(text):
        checked = family("model/test_checked.py")
        for run in checked.SOURCES[name][0]:
            for order in ORDERS:
                checked.RUNS[run](source=text, order=order)

    return drive


def append_heads(text):
    for fmt in (Q8_0, Q5_1):
        for order in ORDERS:
            family("kernels/test_kv_append_heads.py").run_heads(fmt, text, order)


DRIVES = {
    "kv/append.cu": append,
    "kv/append_heads.cu": append_heads,
    "kv/attend.cu": attend,
    "kv/attend_f16.cu": attend_f16,
    "kv/attend_mma.cu": attend_mma,
    "recur/delta.cu": delta,
    "speculative/hidden.cu": hidden,
    "speculative/loop.cu": loop,
    **{f"layer_kv/{name}.cu": layer_cache(name) for name in ("exact", "states")},
    **{
        f"latent/{name}": latent(name)
        for name in ("append.cu", "attend.cu", "attend_mma.cu", "index.cu", "select.cu")
    },
    **{f"model/{name}.cu": model(name) for name in ("gated", "logits", "project", "qkv")},
}  # fmt: skip


def test_all_sources_are_known():
    """Nothing waits for other threads in a way that the list of mutations does not see."""
    assert len(SOURCES) >= 15 and len(MUTANTS) >= 50
    assert {source for source, _ in MUTANTS} == set(DRIVES)
    for source in set(SOURCES) - set(DRIVES):
        text = mutate.flatten(ROOT / source)
        assert "__syncthreads" not in text and "cp_async" not in text, source


@pytest.mark.parametrize("source", NEVER_CALLED)
def test_what_one_source_never_runs_another_one_does(source):
    files = {m.file for other in set(DRIVES) - {source} for m in mutations(other)}
    assert {Path(file).name for file in files} >= NEVER_CALLED[source]


@pytest.mark.parametrize("source", DRIVES)
def test_whole_kernels_are_clean(source):
    DRIVES[source](mutate.flatten(ROOT / source))


@pytest.mark.parametrize(
    ("source", "which"), MUTANTS, ids=[f"{source} {which}" for source, which in MUTANTS]
)
def test_removed(source, which):
    mutation = mutations(source)[which]
    with pytest.raises((errors.DataRace, errors.UninitialisedRead)), np.errstate(all="ignore"):
        try:
            DRIVES[source](mutation.source)
        except AssertionError:  # a wrong value is no report of a missing barrier
            pytest.fail(f"{mutation}: wrong values, and nothing reported")
