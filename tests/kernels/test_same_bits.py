"""Kernels without transcendental functions or matrix units: the same bytes on both devices.

The drivers of check mode launch each kernel on NumPy arrays; every launch is kept with what it
changed on the host device, and then made again through a :class:`~memra_lowlevel.Device`. On the
host device that shows that the launches are complete, on a GPU that the bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from families import family

from memra_lowlevel import LaunchConfig, launch
from memra_lowlevel.compile import compile_file, cuda_src_root
from memra_lowlevel.driver.host import runner
from memra_lowlevel.formats import FORMATS
from memra_lowlevel.kernels import registry

ROOT = cuda_src_root()
SAME = [spec for spec in registry.all_specs() if spec.same_bits]


class Launch(NamedTuple):
    """One launch; arrays of ``before`` and ``after`` by their position in ``arrays``."""

    source: str
    expression: str
    grid: Any
    block: Any
    shared_bytes: int
    args: list[Any]
    before: list[np.ndarray]
    after: list[np.ndarray]


class Array(NamedTuple):
    """Place of an array argument in a launch's lists."""

    index: int


def counters() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 99, 70).astype(np.int32)
    mask = rng.integers(0, 2, 70).astype(np.int32)
    amount = (np.int32(70), np.int32(-3))
    runner.quick("kv/counters.cu", "add_counters")(3, 32, 0, values, mask, *amount)
    runner.quick("kv/counters.cu", "add_counters")(3, 32, 0, values, None, *amount)
    runner.quick("kv/counters.cu", "set_counters")(
        3, 32, 0, values[:65].copy(), np.int32(65), mask[0]
    )


def ceilings() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    out = np.full(4096, 7, np.uint32)
    n = np.uint64(1000)
    runner.quick("bench/ceiling.cu", "bench_empty")(2, 64, 0)
    runner.quick("bench/ceiling.cu", "bench_copy")(2, 64, 0, words, out.copy(), n)
    never = np.bitwise_xor.reduce(words[:4000])  # what one thread alone finds: it writes
    runner.quick("bench/ceiling.cu", "bench_read")(1, 1, 0, words, n, never, out)
    assert out[0] == never


def append() -> None:
    kv = family("kernels/test_kv_checked.py")
    for fmt in FORMATS.values():
        x = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
        x[1, :32], x[2, 40:60] = 0, -0.0
        kv.run_append(fmt, x)
        kv.run_append(fmt, x, few=True)


def append_heads() -> None:
    for fmt in FORMATS.values():
        family("kernels/test_kv_append_heads.py").run_heads(fmt)


def move() -> None:
    family("kernels/test_kv_move.py").test_no_order_between_threads_is_needed("random")


def chain() -> None:
    family("cache/test_recur_checked.py").test_chain_kernel_is_clean()


def hidden() -> None:
    family("speculative/test_hidden.py").run_hidden()


def latent(name: str) -> None:
    family("latent/test_latent_checked.py").DRIVES[name](ROOT / "latent" / name, ("random",))


def embed() -> None:
    for name, run in family("model/test_checked.py").RUNS.items():
        if name.startswith("embed"):
            run()


def layer_cache(name: str) -> None:
    family("layer_kv/test_lkv_checked.py").run(name, f"layer_kv/{name}.cu", "random")


DRIVES: dict[str, Callable[[], None]] = {
    "kv/counters.cu": counters,
    "bench/ceiling.cu": ceilings,
    "kv/append.cu": append,
    "kv/append_heads.cu": append_heads,
    "kv/move.cu": move,
    "speculative/chain.cu": chain,
    "speculative/hidden.cu": hidden,
    **{f"latent/{n}": functools.partial(latent, n) for n in ("append.cu", "index.cu", "select.cu")},
    **{f"layer_kv/{n}.cu": functools.partial(layer_cache, n) for n in ("exact", "states")},
    "model/embed.cu": embed,
}  # fmt: skip


@functools.cache
def launches(drive: Callable[[], None]) -> list[Launch]:
    """Drive kernels and keep every launch of theirs."""
    quick, kept = runner.quick, []

    def recording(file: Any, expression: str, *_: Any, **__: Any) -> Callable[..., None]:
        run = quick(file, expression)

        def call(grid: Any, block: Any, shared_bytes: int, *args: Any, **options: Any) -> None:
            options.pop("check", None)
            arrays: list[np.ndarray] = []
            places: list[Any] = []
            for arg in args:
                if not isinstance(arg, np.ndarray):
                    places.append(arg)
                    continue
                known = [i for i, have in enumerate(arrays) if have is arg]
                if not known:
                    arrays.append(arg)
                places.append(Array(known[0] if known else len(arrays) - 1))
            before = [a.copy() for a in arrays]
            run(grid, block, shared_bytes, *args, **options)
            after = [a.copy() for a in arrays]
            kept.append(
                Launch(str(file), expression, grid, block, shared_bytes, places, before, after)
            )

        return call

    with mock.patch.object(runner, "quick", recording):
        drive()
    return kept


def of(spec: registry.KernelSpec) -> list[Launch]:
    name = spec.entry.split("<")[0]
    return [
        one
        for one in launches(DRIVES[spec.source])
        if one.source.endswith(spec.source) and one.expression.split("<")[0] == name
    ]


def test_there_are_such_kernels():
    assert len(SAME) >= 25


@pytest.mark.parametrize("spec", SAME, ids=lambda spec: spec.name)
def test_each_is_driven(spec):
    found = of(spec)
    assert found
    changed = [
        a.tobytes() != b.tobytes()
        for one in found
        for a, b in zip(one.before, one.after, strict=True)
    ]
    assert any(changed) or spec.name == "bench_empty"


@pytest.mark.parametrize("spec", SAME, ids=lambda spec: spec.name)
def test_the_same_bits(device, stream, spec):
    found = of(spec)
    templates = sorted({one.expression for one in found if "<" in one.expression})
    module = device.module(
        compile_file(spec.source, arch=device.arch, name_expressions=tuple(templates))
    )
    for one in found:
        kernel = module.kernel(one.expression)
        buffers = [device.from_numpy(a.view(np.uint8).reshape(-1), stream) for a in one.before]
        args = []
        for param, arg in zip(kernel.params, one.args, strict=True):
            if isinstance(arg, Array):
                buffer = buffers[arg.index]
                size = np.dtype(param.dtype or np.uint8).itemsize
                arg = buffer.view(0, (buffer.n_bytes // size,), param.dtype or np.uint8)
            args.append(arg)
        launch(stream, LaunchConfig(one.grid, one.block, one.shared_bytes), kernel, *args)
        for i, (buffer, wanted) in enumerate(zip(buffers, one.after, strict=True)):
            got = buffer.to_numpy(stream)
            different = np.flatnonzero(got != wanted.view(np.uint8).reshape(-1))
            assert not different.size, (one.expression, f"array {i}", different[:8])
            buffer.close()
    module.close()
