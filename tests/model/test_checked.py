"""The model kernels under the host device's checks, in every order of threads, for every GPU."""

import functools
import re

import gguf
import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.compile import DEFAULT_ARCHS, compile_file, cuda_src_root
from memra_lowlevel.driver.host import mutate, runner
from memra_lowlevel.kernels import registry
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS, tile_rows
from memra_lowlevel.reference import model as oracle

I, F = np.int32, np.float32  # noqa: E741
BARRIER = re.compile(r"__sync(threads|warp)\(\);")
MODEL = (
    "add_product", "embed_rows", "gate_up_rows", "logits_rows", "pick_rows", "qkv_rows",
)  # fmt: skip
ORDERS = ("forward", "reverse", "random")
EPS = F(1e-5)
#: Threads of a block: some have several units, and some none.
THREADS = 96
#: Rows of a launch, and of a block of threads: more than the four that tensor cores take at a time.
ROWS, GROUP = 6, 5
#: Columns: a last slice that is not full, and more slices than warps and than running sums.
N_IN = 352
BLOCKS, SLICES, SHARE = N_IN // 32, 6, F(1 / N_IN)


def normal(*shape):
    return np.random.default_rng(4).standard_normal(shape).astype(F)


def poisoned(*shape, dtype=F):
    return np.full(shape, -1, np.int32).view(dtype)


def tiles(format, n_out, n_in):
    values = normal(n_out, n_in)
    stored = values.view(np.uint8)
    if format == "f16":
        stored = values.astype(np.float16).view(np.uint8)
    elif format != "f32":
        stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[format.upper()])
    return tile_rows(stored.view(np.uint8).reshape(n_out, -1), format)


def on_tensor_cores(source):
    """The text of a source whose products have the body of newer GPUs on the host device too."""
    text = source if "\n" in source else (cuda_src_root() / source).read_text()
    return f"#define MEMRA_TENSOR 1\n{text}"


def kernel(source, entry, check=True, threads=THREADS, **options):
    """A launch of all rows, GROUP at a time; columns in slices of two blocks."""
    run = runner.quick(source, entry, check=check)

    def launch(blocks, shared_floats, *args):
        grid = (blocks, -(-ROWS // GROUP), 1)
        run(grid, (threads, 1, 1), 4 * GROUP * shared_floats, *args, **options)

    return launch


def run_project(
    format, at_once=1, outs=16, source="model/project.cu", n_in=N_IN, blocks=2, **options
):
    """Of slices of so many blocks."""
    h, n_out = normal(ROWS, 20), 20
    entry = f"add_product<{TILE_FORMATS[format].tile}, {at_once}, {outs}>"
    launch = kernel(source, entry, **options)
    launch(
        -(-n_out // outs), (outs + 8) * SLICES, tiles(format, n_out, n_in), normal(ROWS, n_in), h,
        I(ROWS), I(GROUP), I(n_out), I(n_in // 32), I(blocks), I(-(-n_in // 32 // blocks)),
    )  # fmt: skip
    return h


def run_gated(gate, up, source="model/gated.cu", n_in=N_IN, **options):
    out, n_ff = poisoned(ROWS, 20), 20
    entry = f"gate_up_rows<{TILE_FORMATS[gate].tile}, {TILE_FORMATS[up].tile}>"
    kernel(source, entry, **options)(
        2, 41 * SLICES, tiles(gate, n_ff, n_in), tiles(up, n_ff, n_in), normal(ROWS, n_in),
        normal(n_in), out, I(ROWS), I(GROUP), I(n_ff), I(n_in // 32), I(2), I(SLICES), SHARE, EPS,
    )  # fmt: skip
    return out


def run_qkv(format, source="model/qkv.cu", n_in=N_IN, **options):
    q, k, v = poisoned(ROWS, 64), np.full((8, 68), 255, "u1"), np.full((8, 48), 255, "u1")
    angles = oracle.rope_angles(13, 64, 1e4).astype(F)
    entry = f"qkv_rows<{TILE_FORMATS[format].tile}, Q8_0, Q5_1>"
    kernel(source, entry, **options)(
        6, 32 + 41 * SLICES, tiles(format, 192, n_in), normal(ROWS, n_in), normal(n_in),
        angles, np.array([8], I), q, k, v, np.array([13], I), np.array([12], I), I(ROWS), I(GROUP),
        I(0), I(64), I(64), I(64), I(64), I(13), I(8), I(n_in // 32), I(2), I(SLICES), SHARE, EPS,
    )  # fmt: skip
    assert (k[[0, 7]] == 255).all() and (v[[0, 7]] == 255).all()
    return np.concatenate([a.view(np.uint8).reshape(-1) for a in (q, k, v)])


def run_logits(format, source="model/logits.cu", n_in=N_IN, threads=64, **options):
    logits, values = poisoned(ROWS, 70), poisoned(ROWS, 3)
    ids, sums = poisoned(ROWS, 3, dtype=I), poisoned(ROWS, 3)
    n_warps = threads // 32
    entry = f"logits_rows<{TILE_FORMATS[format].tile}>"
    kernel(source, entry, threads=threads, **options)(
        -(-3 // n_warps), n_in + 4 + BLOCKS + 33 * n_warps, tiles(format, 70, n_in),
        normal(ROWS, n_in), normal(n_in), logits, values, ids, sums, I(ROWS), I(GROUP), I(70),
        I(n_in // 32), SHARE, EPS,
    )  # fmt: skip
    assert not np.isnan(logits).any()
    return np.concatenate([logits, values, ids.view(F), sums], axis=1)


def run_pick(source="model/logits.cu", n_tiles=700, check=True, **options):
    values, sums = normal(2, n_tiles), np.abs(normal(2, n_tiles))
    ids = np.arange(2 * n_tiles, dtype=I).reshape(2, -1)
    out, prob = poisoned(2, dtype=I), poisoned(2)
    run = runner.quick(source, "pick_rows", check=check)
    run((2, 1, 1), (256, 1, 1), 0, values, ids, sums, out, prob, I(n_tiles), **options)
    np.testing.assert_array_equal(out, values.argmax(axis=1) + np.array([0, n_tiles]))
    return np.concatenate([out.view(F), prob])


def run_embed(format, check=True, **options):
    h = poisoned(3, 64)
    run = runner.quick("model/embed.cu", f"embed_rows<{TILE_FORMATS[format].tile}>", check=check)
    tokens = np.array([0, 39, 40], np.uint32)
    run((1, 3, 1), (32, 1, 1), 0, tiles(format, 40, 64), tokens, h, I(2), I(40), **options)
    return h


#: The products, which have two bodies.
PRODUCTS = {
    "gated f32 q4_1": lambda **o: run_gated("f32", "q4_1", **o),
    **{f"gated {f}": lambda f=f, **o: run_gated(f, f, **o) for f in TILE_FORMATS},
    **{
        f"project {f} of two blocks, {outs} outputs": (
            lambda f=f, outs=outs, **o: run_project(f, 2, outs, **o)
        )
        for f in TILE_FORMATS if f != "f32" for outs in (16, 8)
    },
    **{
        f"{name} {f}": lambda f=f, run=run, **o: run(f, **o)
        for f in TILE_FORMATS
        for name, run in (
            ("project", run_project), ("qkv", run_qkv), ("logits", run_logits)
        )
    },
}  # fmt: skip
FILES = {name: f"model/{name}.cu" for name in ("project", "gated", "qkv", "logits")}


def _tensor(name):
    def run(source=None, **options):
        text = on_tensor_cores(source or FILES[name.split()[0]])
        return PRODUCTS[name](source=text, **options)

    return run


RUNS = {
    "pick": run_pick,
    **{f"embed {f}": lambda f=f, **o: run_embed(f, **o) for f in TILE_FORMATS},
    **PRODUCTS,
    **{f"{name} tensor": _tensor(name) for name in PRODUCTS},
}


@pytest.mark.parametrize("name", RUNS)
def test_clean_in_check_mode_and_the_same_bits_in_any_order(name):
    plain = RUNS[name](check=False, workers=1)
    for order in ORDERS:
        checked = RUNS[name](order=order, seed=5)
        assert checked.tobytes() == plain.tobytes(), order
    assert RUNS[name](check=False, workers=2).tobytes() == plain.tobytes()


@pytest.mark.parametrize("name", [n for n in RUNS if n.split()[0] in FILES])
def test_the_number_of_threads_changes_no_bit(name):
    """One warp, several, and more than there is work for."""
    wanted = RUNS[name](check=False)
    for threads in (32, 64, 256) if "logits" not in name else (32, 96, 128):
        assert RUNS[name](check=False, threads=threads).tobytes() == wanted.tobytes(), threads


@pytest.mark.parametrize("body", ["", " tensor"], ids=["lanes", "tensor"])
@pytest.mark.parametrize("format", [f for f in TILE_FORMATS if f != "f32"])
def test_blocks_at_a_time_and_outputs_of_a_block_change_no_bit(format, body):
    """A launch may take another shape for starting early: the sums are the same."""
    for blocks in (2, 4, 6):
        one = RUNS[f"project {format}{body}"](check=False, blocks=blocks)
        for outs in (16, 8):
            name = f"project {format} of two blocks, {outs} outputs{body}"
            two = RUNS[name](check=False, blocks=blocks)
            assert two.tobytes() == one.tobytes(), (blocks, outs)


@pytest.mark.parametrize("name", RUNS)
def test_no_undefined_behaviour(name, monkeypatch):
    quick = runner.quick

    def sanitised(source, expression, **options):
        return quick(source, expression, sanitize="undefined")

    monkeypatch.setattr(runner, "quick", sanitised)
    plain = RUNS[name](check=False)
    monkeypatch.undo()
    assert plain.tobytes() == RUNS[name](check=False).tobytes()


def _barriers(name):
    return BARRIER.findall((cuda_src_root() / f"model/{name}.cu").read_text())


@functools.cache
def _without(name):
    """The source without each of its own barriers, in the words of tests/kernels.

    An equal text has been compiled already when the tests of every kernel drive it too.
    """
    path = (cuda_src_root() / f"model/{name}.cu").resolve()
    return [m.source for m in mutate.mutations(path) if m.file == str(path)]


#: What runs the barriers of a source, and how many of them it has.
SOURCES = {
    "project": (("project q4_1 of two blocks, 8 outputs",), 1),
    "gated": (("gated q4_1",), 1),
    "qkv": (("qkv q4_1",), 2),
    "logits": (("logits q4_1", "pick"), 5),
}
MUTANTS = [(name, i) for name, (_, n) in SOURCES.items() for i in range(n)]


def test_every_barrier_is_known():
    for path in (cuda_src_root() / "model").glob("*.cu"):
        n = SOURCES.get(path.stem, ((), 0))[1]
        assert len(_barriers(path.stem)) == len(_without(path.stem)) == n, path


@pytest.mark.parametrize("body", ["", " tensor"], ids=["lanes", "tensor"])
@pytest.mark.parametrize(("name", "which"), MUTANTS)
def test_every_barrier_is_needed(name, which, body):
    source = _without(name)[which]
    with pytest.raises((errors.DataRace, errors.UninitialisedRead)):
        for run in SOURCES[name][0]:
            for order in ("forward", "reverse"):
                RUNS.get(run + body, RUNS[run])(source=source, order=order)


WAITING = [name for name in MODEL if registry.spec(name).pdl == "waits"]
PTX = re.compile(r"\.entry (\w+)\(.*?\n}", re.DOTALL)
#: How a lane fetches eight weights: the width of a piece, and pieces.
FETCHES = {"TileF32": ("v4", 2), "TileF16": ("v4", 1), "TileQ8_0": ("v2", 1), "TileQ4_1": ("v2", 1)}
#: Times eight weights that a lane fetches before the wait, at least: for 16 outputs, or 32.
EIGHTS = {"add_product": 2, "gate_up_rows": 4, "qkv_rows": 4, "logits_rows": 4}


def test_kernels_that_may_start_early_wait_before_they_touch_what_moves():
    """In PTX: one admission, then the wait; before it weights are fetched, and nothing else."""
    assert len(WAITING) == 5
    for name in WAITING:
        spec = registry.spec(name)
        image = compile_file(
            spec.source,
            arch="compute_90",
            name_expressions=[e for e in spec.expressions if "<" in e],
        )
        bodies = {m[1]: m[0] for m in PTX.finditer(image.data.decode())}
        for expression in spec.expressions:
            body = bodies[image.entries[expression]]
            lines = [line.strip() for line in body.splitlines()]
            assert sum("griddepcontrol.launch_dependents" in line for line in lines) == 1
            assert not moves(before_wait(lines)), expression
            assert moves(before_wait([x for x in lines if "griddepcontrol.wait" not in x]))
            if name != "pick_rows":
                width, pieces = FETCHES[re.search("Tile[A-Z0-9_]+", expression)[0]]
                fetched = sum(f"ld.global.nc.{width}" in line for line in before_wait(lines))
                assert fetched >= EIGHTS[name] * pieces, expression


def moves(lines):
    """Instructions that write memory, or read what may change."""
    moving = re.compile(r"\b(ld|st|atom|red)\.(?!param|global\.nc|local)[\w.:]+")
    return [line for line in lines if moving.search(line)]


def before_wait(lines):
    """Instructions that can be reached without passing the wait."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    reached, at = set(), [next(i for i, line in enumerate(lines) if line.startswith("{")) + 1]
    while at:
        i = at.pop()
        if i in reached or i >= len(lines) or "griddepcontrol.wait" in lines[i]:
            continue
        reached.add(i)
        branch = re.match(r"(@!?%p\d+ +)?bra(?:\.uni)?[ \t]+(\S+);", lines[i])
        if branch:
            at.append(labels[branch[2]])
        if not (branch and not branch[1]) and not re.match(r"(ret|exit|trap);", lines[i]):
            at.append(i + 1)
    return [lines[i] for i in reached]


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_every_instance_compiles_for_every_gpu_without_spills(arch):
    specs = [registry.spec(name) for name in MODEL]
    images = registry.images(arch, specs)
    for spec in specs:
        image = images[spec.source]
        for expression in spec.expressions:
            used = image.resources[image.entries[expression]]
            assert used.registers > 0, expression
            assert (used.spills_bytes, used.local_bytes) == (0, 0), (expression, used)


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_a_gate_of_f32_beside_another_format_does_not_spill_either(arch):
    """No instance of the registry: compiled where it is asked for."""
    names = ["gate_up_rows<TileF32, TileQ4_1>", "gate_up_rows<TileF16, TileF32>"]
    image = compile_file("model/gated.cu", arch=arch, name_expressions=names)
    for name in names:
        used = image.resources[image.entries[name]]
        assert (used.spills_bytes, used.local_bytes) == (0, 0), (name, used)
