"""The registry, and what NVRTC makes of every ahead-of-time instance on every architecture."""

import dataclasses
import importlib

import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.compile import DEFAULT_ARCHS, compile_file
from memra_lowlevel.compile.signature import CTYPES
from memra_lowlevel.formats import BF16, F32
from memra_lowlevel.kernels import counters, kv_append, kv_attend_f16, kv_attend_mma, registry
from memra_lowlevel.kernels.registry import KernelSpec, Tolerance

KV = (
    "add_counters", "append_few", "append_heads", "append_kv", "attend_combine", "attend_partial",
    "move_rows", "set_counters",
)  # fmt: skip
TENSOR_MAP_BYTES = 128


def test_every_spec_is_complete():
    specs = registry.all_specs()
    assert {s.name for s in specs} >= set(KV)
    for s in specs:
        assert s.tolerance.reason and s.numeric_class
        assert s.edges or s.source.startswith("bench/"), s.name
        assert (s.tolerance.kind == "bitwise") == (s.tolerance.value == 0)
        module, _, function = s.oracle.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), s.name
        assert len(set(s.expressions)) == len(s.instances) >= 1


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_every_instance_compiles_and_hot_kernels_do_not_spill(arch):
    specs = [registry.spec(name) for name in KV]
    images = registry.images(arch, specs)
    for s in specs:
        image = images[s.source]
        for expression in s.expressions:
            used = image.resources[image.entries[expression]]
            assert used.registers > 0
            if s.hot:
                assert (used.spills_bytes, used.local_bytes) == (0, 0), (expression, used)


def test_templates_agree_with_their_signatures():
    """Every parameter of every hot instance has a name, and the size that the compiler gave it."""
    hot = [s for s in registry.all_specs() if s.hot]  # as those of the record, which the cache has
    n_checked = 0
    for image in registry.images("sm_90", hot).values():
        for name, symbol in image.entries.items():
            declared, layout = image.signatures[name].params, image.layouts[symbol]
            assert len(declared) == len(layout), name
            for p, (_, size) in zip(declared, layout, strict=True):
                by_value = TENSOR_MAP_BYTES if p.ctype == "TensorMap" else None
                assert p.name and size == (8 if p.pointer else by_value or CTYPES[p.ctype][0]), p
                n_checked += 1
    assert n_checked > 1500


ON_RECORD = ("sm_80", "sm_90")
"""Architectures for which the record of the hot kernels has every ahead-of-time instance built."""


@pytest.mark.parametrize("d", kv_attend_mma.HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_attention_on_tensor_cores_does_not_spill(arch, d):
    """All shapes that an architecture's shared memory lets a launch take."""
    room = {"sm_80": 166_912, "sm_120": 101_376}.get(arch, 232_448)
    wanted = {
        (shape := kv_attend_mma._shape(d, n_kv_heads, n_queries, room, block_warps))
        and (d, shape.queries, shape.heads)
        for n_kv_heads in (1, kv_attend_mma._ALIGNED_HEADS[d], 3, 8)
        for n_queries in (4, 8, 32)
        for block_warps in (4, 8, 16)
    }
    names = [f"attend_mma<{d}, {queries}, {heads}>" for d, queries, heads in sorted(wanted)]
    images = []
    if arch in ON_RECORD:  # in one image, which the cache then has for either test
        specs = [s for s in registry.all_specs() if s.hot and s.source == "kv/attend_mma.cu"]
        images += registry.images(arch, specs).values()
    others = [name for name in names if not any(name in image.entries for image in images)]
    if others:
        images += [compile_file("kv/attend_mma.cu", arch=arch, name_expressions=tuple(others))]
    entries = {name: (image, image.entries[name]) for image in images for name in image.entries}
    for name in names:
        image, symbol = entries[name]
        used = image.resources[symbol]
        # For sm_120 the compiler clears a word of stack around each copy, and never reads it.
        local = 0 if arch == "sm_120" else used.local_bytes
        assert (used.spills_bytes, local) == (0, 0), (name, used)


@pytest.mark.parametrize("d", kv_attend_f16.HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_100", "sm_120"])
def test_attention_over_small_floats_compiles(arch, d):
    """That it does not spill on sm_80 and sm_90 is on record (``kernel_budgets.json``)."""
    spec = registry.spec("attend_f16")
    names = tuple(spec.expression(**i) for i in spec.instances if i["head_dim"] == d)
    image = compile_file(spec.source, arch=arch, name_expressions=names)
    for expression in names:
        used = image.resources[image.entries[expression]]
        assert used.registers > 0, expression
        if arch != "sm_75":  # which does not run it
            assert used.spills_bytes <= 128, (expression, used)


def test_instances_are_named_by_their_fields():
    s = registry.spec("append_kv")
    assert s.expression(k_format="F16", v_format="Q4_0") == "append_kv<F16, Q4_0>"
    for bad in ({}, {"k_format": "F16"}, {"k_format": "F16", "v_format": "F16", "d": 1}):
        with pytest.raises(errors.ArgumentError, match="k_format, v_format"):
            s.expression(**bad)
    with pytest.raises(errors.ArgumentError, match="append_kv"):
        registry.spec("no_such_kernel")


def test_a_name_is_registered_once():
    s = registry.spec("set_counters")
    registry.register(s)
    other = KernelSpec(
        name=s.name, source="elsewhere.cu", entry=s.entry, oracle=s.oracle,
        tolerance=Tolerance("bitwise", 0.0, "x"),
    )  # fmt: skip
    with pytest.raises(errors.ArgumentError, match="two different kernels"):
        registry.register(other)


def test_kernels_are_loaded_once_per_device(device):
    first = registry.kernel(device, "set_counters")
    again, other = registry.kernels(device, [("set_counters", {}), ("add_counters", {})])
    assert first is again and other is not first
    assert [p.name for p in first.params] == ["counters", "n_counters", "value"]
    assert np.dtype(first.params[0].dtype) == np.int32


def test_loading_is_refused_under_capture_and_works_before(device, stream):
    kv_append.prepare(device, BF16, BF16)
    counters.prepare(device)
    x = device.from_numpy(np.arange(64, dtype=np.float32).reshape(1, 64), stream)
    k, v = (device.zeros(128 + 8, np.uint8, stream) for _ in range(2))
    length = device.zeros(1, np.int32, stream)
    with pytest.raises(errors.CaptureForbidden), stream.capture("late"):
        kv_append.prepare(device, BF16, F32)
    with stream.capture("early") as graph:
        kv_append.append(
            stream, x, x, k, v, length, k_format=BF16, v_format=BF16, rows=1
        )  # fmt: skip
        counters.add_counters(stream, length, 3)
    step = graph.instantiate()
    assert not k.to_numpy(stream).any()
    step.launch(stream)
    for plane in (k, v):
        assert np.array_equal(plane.to_numpy(stream)[:128], BF16.encode(x.to_numpy(stream))[0])
    assert length.to_numpy(stream) == 3
    step.close()


def test_preload_leaves_nothing_to_load(device, stream, monkeypatch):
    specs = [registry.spec(name) for name in ("set_counters", "add_counters", "append_kv")]
    for key in [k for k in device.memo if k[0] == registry.__name__]:
        del device.memo[key]
    assert registry.preload(device, specs) == 2  # one module per source
    assert registry.preload(device, specs) == 0

    def refused(*args, **more):
        raise AssertionError("compiled again")

    monkeypatch.setattr(registry, "compile_each", refused)
    with stream.capture("first use") as graph:  # loading would be refused here
        for s in specs:
            for instance in s.instances:
                assert registry.kernel(device, s.name, **instance).name
    graph.close()


@pytest.mark.nvrtc
def test_a_source_is_divided_and_every_instance_is_compiled_once():
    """As a start does it: no thread gets most of the work."""
    spec = registry.spec("append_few")
    pairs = [(k, v) for k in ("F16", "BF16", "F32", "E4M3") for v in ("F16", "BF16")]
    spec = dataclasses.replace(
        spec, instances=tuple({"k_format": k, "v_format": v} for k, v in pairs)
    )
    images = registry.compiled("sm_90", [spec, registry.spec("move_rows")])
    asked = [sorted(set(image.entries) & set(spec.expressions)) for image in images]
    assert sorted(map(len, asked)) == [0, 4, 4] and len(images) == 3
    assert sorted(name for names in asked for name in names) == sorted(spec.expressions)


@pytest.mark.nvrtc
def test_a_source_that_does_not_compile_is_raised(device):
    bad = KernelSpec(
        name="bad", source="kv/counters.cu", entry="no_such_template<{n}>", oracle="a:b",
        tolerance=Tolerance("bitwise", 0.0, "x"), instances=({"n": 1},),
    )  # fmt: skip
    with pytest.raises(errors.CompileError):
        registry.preload(device, [registry.spec("move_rows"), bad])
