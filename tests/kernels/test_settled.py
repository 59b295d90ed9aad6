"""Attention that begins before its predecessor has ended leaves the launch's own rows for later.

On the host device a wait does nothing. Here the rows arrive at it, for each block anew, so whoever
reads them earlier sees what lay there before: no numbers.
"""

import re

import numpy as np
import pytest
from rig import normal, same

from memra_lowlevel import Device
from memra_lowlevel.cache import KvLayer
from memra_lowlevel.compile import compile_source, cuda_src_root
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.formats import F16, Q4_0, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend_f16, kv_attend_mma, kv_attend_simt

#: Of each kernel: its module, source and formats; what keeps it from its own rows, and two faults,
#: the second one of later blocks only.
KERNELS = {
    "simt": (
        kv_attend_simt, "kv/attend.cu", (Q8_0, Q5_1),
        ("min(int(view.slot) - counted, keys.end)", "keys.end",
         "min(int(view.slot) - counted + (blockIdx.z ? 64 : 0), keys.end)"),
    ),
    "mma": (
        kv_attend_mma, "kv/attend_mma.cu", (Q8_0, Q5_1),
        (">= place.plane.bound)", ">= 0x7FFFFFFF)",
         ">= place.plane.bound + (blockIdx.z ? 64 : 0))"),
    ),
    "f16": (
        kv_attend_f16, "kv/attend_f16.cu", (F16, F16),
        (">= block.plane.bound)", ">= 0x7FFFFFFF)",
         ">= block.plane.bound + (blockIdx.z ? 64 : 0))"),
    ),
}  # fmt: skip
WAIT = '    asm volatile("griddepcontrol.wait;" ::: "memory");\n#endif\n'
HEADS, DIM = 4, 64


@pytest.fixture(scope="module")
def device():
    with host_options(workers=1), Device("host:2") as opened:  # a block's rows are its own then
        yield opened


def changed(text, *pairs):
    for a, b in pairs:
        assert text.count(a) == 1, a
        text = text.replace(a, b)
    return text


def rows_that_arrive(monkeypatch, folder, name, planes, fault):
    """Let each block begin with other rows of ``planes``, and get the right ones where it waits.

    ``planes``: what is written, the right rows and the others.
    """
    module, source, _, _ = KERNELS[name]
    plain, root = module._kernels, cuda_src_root()

    def copied(place):
        lines = (
            f"    __builtin_memcpy((void*){p[0].ptr}ull, (void*){p[place].ptr}ull, {p[0].n_bytes});"
            for p in planes
        )
        return "\n".join(["    __syncthreads();", *lines, "    __syncthreads();\n"])

    # A block waits as one, and what it has asked for is there then.
    arrive = "    cp_async_wait<0>();\n" + copied(1)
    include = '#include "common/device.cuh"\n'
    (folder / "common").mkdir(exist_ok=True)
    waiting = (root / "common" / "dependent.cuh").read_text()
    (folder / "common" / "dependent.cuh").write_text(
        changed(
            waiting, (include, include + '#include "common/pipeline.cuh"\n'), (WAIT, WAIT + arrive)
        )
    )
    text = (root / source).read_text()
    (begin,) = re.findall(r"    DYN_SMEM\(\w+, shared\);\n", text)
    text = changed(text, (begin, begin + copied(2)), *fault)

    def kernels(device, *shape):
        kernel, combine = plain(device, *shape)
        image = compile_source(
            text, arch="host", name=source, name_expressions=(kernel.name,),
            include_dirs=(folder, root),
        )  # fmt: skip
        return device.module(image).kernel(kernel.name), combine

    monkeypatch.setattr(module, "_kernels", kernels)


def outputs(
    monkeypatch, tmp_path, device, name, length, n, fault=(), *,
    heads=HEADS, dim=DIM, group=2, formats=None, counted=False, **options,
):  # fmt: skip
    """What attention over rows that arrive at the wait gives, and over rows that are there."""
    k_format, v_format = formats or KERNELS[name][2]
    rng, outs = np.random.default_rng(length), []
    options["counted"] = counted
    with (
        device.stream() as stream,
        KvLayer.allocate(device, 512, heads, dim, k_format=k_format, v_format=v_format) as layer,
    ):
        k, v = (device.from_numpy(normal(rng, length + n, heads * dim), stream) for _ in "kv")
        q = device.from_numpy(normal(rng, n, group * heads, dim), stream)
        out = device.empty(q.shape, np.float32, stream)
        layer.append(stream, k, v)
        layer.set_len(stream, length + (n if counted else 0))
        layer.attend(stream, q, out, kernel=name, **options)
        outs.append(out.to_numpy(stream))
        own = []
        for plane in (layer.k, layer.v):
            row_bytes = plane.n_bytes // layer.rows
            part = plane.view(length * row_bytes, (n * row_bytes,), np.uint8)
            right = part.to_numpy(stream)
            others = np.full_like(right, 0xFF)  # scales, or values, that are no numbers
            own.append((part, *(device.from_numpy(x, stream) for x in (right, others))))
        stream.sync()
        rows_that_arrive(monkeypatch, tmp_path, name, own, fault)
        layer.attend(stream, q, out, kernel=name, settled=True, **options)
        outs.append(out.to_numpy(stream))
        monkeypatch.undo()
    return outs


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("length", "n"), [(0, 2), (1, 1), (5, 3), (30, 4), (64, 1), (127, 2), (300, 16)]
)
def test_own_rows_are_read_behind_the_wait(monkeypatch, tmp_path, device, name, length, n):
    for options in ({}, {"window": 20}, {"counted": True}):
        there, arrived = outputs(monkeypatch, tmp_path, device, name, length, n, **options)
        assert np.isfinite(there).all() and same(arrived, there)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("simt", {"dim": 96, "heads": 2}), ("simt", {"dim": 128, "heads": 2, "group": 5}),
        ("simt", {"dim": 256, "heads": 1}), ("simt", {"formats": (F16, Q4_0)}),
        ("mma", {"dim": 128, "heads": 2, "group": 16}), ("mma", {"dim": 256, "heads": 1}),
        ("f16", {"dim": 128, "heads": 2}), ("f16", {"formats": (Q8_0, Q5_1), "group": 16}),
    ],
    ids=str,
)  # fmt: skip
def test_own_rows_of_other_shapes(monkeypatch, tmp_path, device, name, shape):
    for length, n, options in ((33, 2, {}), (130, 7, {"window": 150}), (200, 40, {})):
        there, arrived = outputs(monkeypatch, tmp_path, device, name, length, n, **shape, **options)
        assert np.isfinite(there).all() and same(arrived, there), (length, n)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("length", "n"), [(31, 2), (63, 1), (126, 5)])
def test_rows_of_a_predecessor_are_seen_in_a_chain(stream, name, length, n):
    """Rows that share sectors with older ones: what was read early must not hide what came then."""
    device, rng, n_layers = stream.device, np.random.default_rng(length), 12
    k_format, v_format = KERNELS[name][2]
    heads = kv_attend_f16._aligned_heads(k_format, v_format, DIM) if name == "f16" else 3
    layers = [
        KvLayer.allocate(device, 512, heads, DIM, k_format=k_format, v_format=v_format)
        for _ in range(n_layers)
    ]
    old, new, other = (
        [device.from_numpy(normal(rng, rows, heads * DIM), stream) for _ in "kv"]
        for rows in (length, n, n)
    )
    q = device.from_numpy(normal(rng, n, 3 * heads, DIM), stream)
    outs = [device.empty(q.shape, np.float32, stream) for _ in layers]

    def chain(rows, **how):
        for i, (layer, out) in enumerate(zip(layers, outs, strict=True)):
            layer.append(stream, *rows, programmatic=bool(how) and i > 0)
            layer.attend(stream, q, out, kernel=name, **how)

    for layer in layers:
        layer.append(stream, *old)
        layer.advance(stream, length)
    chain(new)
    wanted = [out.to_numpy(stream) for out in outs]
    chain(other)
    others = [out.to_numpy(stream) for out in outs]
    stream.sync()
    with stream.capture("chain") as graph:
        chain(new, programmatic=True, settled=True)
    with graph, graph.instantiate() as step:
        for _ in range(8):
            step.launch(stream)
            assert all(same(o.to_numpy(stream), w) for o, w in zip(outs, wanted, strict=True))
            chain(other)
            assert all(same(o.to_numpy(stream), w) for o, w in zip(outs, others, strict=True))
            stream.sync()
    for layer in layers:
        layer.close()


@pytest.mark.parametrize("name", KERNELS)
def test_own_rows_that_are_read_before_it_are_noticed(monkeypatch, tmp_path, device, name):
    """The gate of the test above."""
    guard, early, later = KERNELS[name][3]
    for n, fault in ((3, early), (40, later)):
        planted = ((guard, fault),)
        there, arrived = outputs(monkeypatch, tmp_path, device, name, 5, n, planted, group=8)
        assert not same(arrived, there), fault
