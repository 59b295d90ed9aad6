"""Attention that begins before its predecessor has ended leaves the launch's own rows for later.

On the host device a wait does nothing. Here the rows arrive at it, so whoever reads them earlier
sees what lay there before.
"""

import numpy as np
import pytest
from rig import normal, same

from memra_lowlevel import Device
from memra_lowlevel.cache import KvLayer
from memra_lowlevel.compile import compile_source, cuda_src_root
from memra_lowlevel.formats import F16, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_attend_f16, kv_attend_mma, kv_attend_simt

#: Of each kernel: its module, source and formats; what keeps it from its own rows, and a fault.
KERNELS = {
    "simt": (
        kv_attend_simt, "kv/attend.cu", (Q8_0, Q5_1),
        ("min(int(view.slot) - counted, keys.end)", "keys.end"),
    ),
    "mma": (
        kv_attend_mma, "kv/attend_mma.cu", (Q8_0, Q5_1),
        (">= place.plane.bound)", ">= 0x7FFFFFFF)"),
    ),
    "f16": (
        kv_attend_f16, "kv/attend_f16.cu", (F16, F16),
        (">= block.plane.bound)", ">= 0x7FFFFFFF)"),
    ),
}  # fmt: skip
WAIT = '    asm volatile("griddepcontrol.wait;" ::: "memory");\n#endif\n'
HEADS, DIM = 4, 64


@pytest.fixture(scope="module")
def device():
    with Device("host") as opened:
        yield opened


def changed(text, *pairs):
    for a, b in pairs:
        assert text.count(a) == 1, a
        text = text.replace(a, b)
    return text


def rows_that_arrive(monkeypatch, folder, name, planes, fault):
    """Let the kernel copy ``planes``, pairs of what is written and whence, where it waits."""
    module, source, _, _ = KERNELS[name]
    plain, root = module._kernels, cuda_src_root()
    copies = "".join(
        f"    __builtin_memcpy((void*){to.ptr}ull, (const void*){whence.ptr}ull, {to.n_bytes});\n"
        for to, whence in planes
    )
    # A block waits as one, and what it has asked for is there then.
    arrive = f"    cp_async_wait<0>();\n    __syncthreads();\n{copies}    __syncthreads();\n"
    include = '#include "common/device.cuh"\n'
    (folder / "common").mkdir(exist_ok=True)
    waiting = (root / "common" / "dependent.cuh").read_text()
    (folder / "common" / "dependent.cuh").write_text(
        changed(
            waiting, (include, include + '#include "common/pipeline.cuh"\n'), (WAIT, WAIT + arrive)
        )
    )
    text = changed((root / source).read_text(), *fault)

    def kernels(device, *shape):
        kernel, combine = plain(device, *shape)
        image = compile_source(
            text, arch="host", name=source, name_expressions=(kernel.name,),
            include_dirs=(folder, root),
        )  # fmt: skip
        return device.module(image).kernel(kernel.name), combine

    monkeypatch.setattr(module, "_kernels", kernels)


def outputs(monkeypatch, tmp_path, device, name, length, n, fault=(), **options):
    """What attention over rows that arrive at the wait gives, and over rows that are there."""
    k_format, v_format = KERNELS[name][2]
    rng, outs = np.random.default_rng(length), []
    with (
        device.stream() as stream,
        KvLayer.allocate(device, 512, HEADS, DIM, k_format=k_format, v_format=v_format) as layer,
    ):
        k, v = (device.from_numpy(normal(rng, length + n, HEADS * DIM), stream) for _ in "kv")
        q = device.from_numpy(normal(rng, n, 2 * HEADS, DIM), stream)
        out = device.empty(q.shape, np.float32, stream)
        layer.append(stream, k, v)
        layer.set_len(stream, length)
        layer.attend(stream, q, out, kernel=name, **options)
        outs.append(out.to_numpy(stream))
        own = []
        for plane in (layer.k, layer.v):
            row_bytes = plane.n_bytes // layer.rows
            part = plane.view(length * row_bytes, (n * row_bytes,), np.uint8)
            own.append((part, device.from_numpy(part.to_numpy(stream), stream)))
            part.fill(stream, 0x3A)  # other numbers
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
    for options in ({}, {"window": 20}):
        there, arrived = outputs(monkeypatch, tmp_path, device, name, length, n, **options)
        assert np.isfinite(there).all() and same(arrived, there)


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
    fault = KERNELS[name][3]
    there, arrived = outputs(monkeypatch, tmp_path, device, name, 5, 3, (fault,))
    assert not same(arrived, there)
