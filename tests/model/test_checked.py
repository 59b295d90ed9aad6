"""The model kernels under the host device's checks, in every order of threads, for every GPU."""

import re

import gguf
import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.compile import DEFAULT_ARCHS, cuda_src_root
from memra_lowlevel.driver.host import runner
from memra_lowlevel.kernels import registry
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS, chunk_blocks, n_chunks, tile_rows
from memra_lowlevel.reference import model as oracle

I, F = np.int32, np.float32  # noqa: E741
BARRIER = "__syncthreads();"
MODEL = ("add_norm", "argmax_rows", "embed_rows", "matmul_rows", "split_rope", "swiglu")
ORDERS = ("forward", "reverse", "random")


def normal(*shape):
    return np.random.default_rng(4).standard_normal(shape).astype(F)


def poisoned(*shape, dtype=F):
    return np.full(shape, -1, np.int32).view(dtype)


def run_norm(source="model/norm.cu", width=600, **options):
    h, parts, weight, out = normal(2, width), normal(3, 2, width), normal(width), poisoned(2, width)
    kernel = runner.quick(source, "add_norm", check=options.pop("check", True))
    kernel(
        (2, 1, 1), (256, 1, 1), 0, h, parts, I(3), weight, out, I(2), I(width), F(1e-5), **options
    )
    return out


def run_argmax(source="model/argmax.cu", n_cols=3000, **options):
    logits, out, prob = normal(2, n_cols), poisoned(2, dtype=I), poisoned(2)
    kernel = runner.quick(source, "argmax_rows", check=options.pop("check", True))
    kernel((2, 1, 1), (1024, 1, 1), 0, logits, out, prob, I(n_cols), **options)
    np.testing.assert_array_equal(out, logits.argmax(axis=1))
    return np.concatenate([out.view(F), prob])


def run_matmul(format, rows=4, **options):
    n_out, n_in, n = 40, 320, 3
    values = normal(n_out, n_in)
    stored = values.view(np.uint8)
    if format != "f32":
        stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[format.upper()])
    stored = stored.view(np.uint8).reshape(n_out, -1)
    parts = poisoned(n_chunks(n_out, n_in), n, n_out)
    kernel = runner.quick(
        "model/matmul.cu",
        f"matmul_rows<{TILE_FORMATS[format].tile}, {rows}>",
        check=options.pop("check", True),
    )
    kernel(
        (2, len(parts), 1), (32, 1, 1), 0, tile_rows(stored, format), normal(n, n_in), parts, I(n),
        I(n_out), I(n_in // 32), I(chunk_blocks(n_out, n_in)), I(n_out), **options,
    )  # fmt: skip
    return parts


def run_embed(format, **options):
    values = normal(40, 64)
    stored = values.view(np.uint8)
    if format != "f32":
        stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[format.upper()])
    tiles = tile_rows(stored.view(np.uint8).reshape(40, -1), format)
    h = poisoned(3, 64)
    kernel = runner.quick(
        "model/embed.cu",
        f"embed_rows<{TILE_FORMATS[format].tile}>",
        check=options.pop("check", True),
    )
    tokens = np.array([0, 39, 40], np.uint32)
    kernel((1, 3, 1), (32, 1, 1), 0, tiles, tokens, h, I(2), I(40), **options)
    return h


def run_rope(**options):
    parts, q, k, v = normal(2, 3, 320), poisoned(3, 192), poisoned(3, 64), poisoned(3, 64)
    angles = oracle.rope_angles(10, 64, 1e4).astype(F)
    kernel = runner.quick("model/rope.cu", "split_rope", check=options.pop("check", True))
    kernel(
        (2, 3, 1), (128, 1, 1), 0, parts, I(2), angles, np.array([8], I), q, k, v, I(3), I(192),
        I(64), I(64), I(64), I(10), **options,
    )  # fmt: skip
    return np.concatenate([q, k, v], axis=1)


def run_swiglu(**options):
    parts, out = normal(2, 3, 2 * 160), poisoned(3, 160)
    kernel = runner.quick("model/swiglu.cu", "swiglu", check=options.pop("check", True))
    kernel((2, 3, 1), (128, 1, 1), 0, parts, I(2), out, I(3), I(160), **options)
    return out


RUNS = {
    "norm": run_norm,
    "argmax": run_argmax,
    "rope": run_rope,
    "swiglu": run_swiglu,
    **{f"matmul {f}": lambda f=f, **o: run_matmul(f, **o) for f in TILE_FORMATS},
    **{f"embed {f}": lambda f=f, **o: run_embed(f, **o) for f in TILE_FORMATS},
}


@pytest.mark.parametrize("name", RUNS)
def test_clean_in_check_mode_and_the_same_bits_in_any_order(name):
    plain = RUNS[name](check=False, workers=1)
    for order in ORDERS:
        checked = RUNS[name](order=order, seed=5)
        assert checked.tobytes() == plain.tobytes(), order
    assert RUNS[name](check=False, workers=2).tobytes() == plain.tobytes()


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
    text = (cuda_src_root() / f"model/{name}.cu").read_text()
    return [m.start() for m in re.finditer(re.escape(BARRIER), text)]


MUTANTS = [(n, i) for n in ("norm", "argmax") for i in range(len(_barriers(n)))]


def test_there_are_barriers_to_take_away():
    assert len(MUTANTS) >= 6
    others = {p.stem for p in (cuda_src_root() / "model").glob("*.cu")} - {"norm", "argmax"}
    assert not any(_barriers(name) for name in others)


@pytest.mark.parametrize(("name", "which"), MUTANTS)
def test_every_barrier_is_needed(name, which):
    text = (cuda_src_root() / f"model/{name}.cu").read_text()
    place = _barriers(name)[which]
    source = text[:place] + text[place + len(BARRIER) :]
    with pytest.raises((errors.DataRace, errors.UninitialisedRead)):
        for order in ("forward", "reverse"):
            RUNS[name](source=source, order=order)


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
