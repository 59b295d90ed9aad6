"""Every kernel once, on small sizes: what compute-sanitizer watches.

``python tools/small_run.py [--device cuda:0]`` ends with status 1 if a registered kernel never ran.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memra_lowlevel import Device, LaunchConfig, formats, launch
from memra_lowlevel.cache import HeadTurn, KvLayer, KvRing, RecurLayer, Recurrent, swa_retain_from
from memra_lowlevel.kernels import (
    kv_attend,
    latent_attend,
    latent_index,
    registry,
    speculative,
)
from memra_lowlevel.runtime import Stream

PAIRS = [
    (formats.Q8_0, formats.Q5_1), (formats.Q8_0, formats.Q4_0), (formats.E4M3, formats.E4M3),
    (formats.F16, formats.BF16), (formats.F32, formats.F32),
]  # fmt: skip


def random(device: Device, stream: Stream, *shape: int):
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    return device.from_numpy(values, stream)


def planes(device: Device, stream: Stream) -> None:
    """Append and attend on flat planes and on a ring that is rebased."""
    for (k_format, v_format), head_dim in zip(PAIRS, (64, 128, 128, 96, 256), strict=True):
        with closing(
            KvLayer.allocate(
                device, 300, 2, head_dim, k_format=k_format, v_format=v_format, check=False
            )
        ) as layer:
            for n in (1, 7, 65):
                layer.append(
                    stream, random(device, stream, n, 2 * head_dim),
                    random(device, stream, n, 2 * head_dim),
                )  # fmt: skip
                layer.advance(stream, n)
            q = random(device, stream, 3, 8, head_dim)
            out = device.empty((3, 8, head_dim), np.float32, stream)
            layer.set_len(stream, 70)
            layer.attend(stream, q, out)
            layer.attend(stream, q, out, window=40, sinks=random(device, stream, 8), softcap=30.0)
            stream.sync()
    tensor_cores(device, stream)
    turned(device, stream)
    ring = KvRing(640, 32)
    with closing(KvLayer.allocate(device, 4096, 2, 64, window=32, ring=ring, check=False)) as layer:
        q, out = random(device, stream, 1, 8, 64), device.empty((1, 8, 64), np.float32, stream)
        for _ in range(100):
            rows = random(device, stream, 8, 128)
            layer.prepare_kv_append(stream, swa_retain_from(layer.len, 32, layer.ring.base), 8)
            layer.append(stream, rows, rows)
            layer.advance(stream, 8)
            layer.set_len(stream, layer.len - 1)
            layer.attend(stream, q, out)
            layer.advance(stream, 1)
        stream.sync()


def turned(device: Device, stream: Stream) -> None:
    """Append with norm and rotation, queries beside K."""
    with closing(KvLayer.allocate(device, 50, 2, 64, check=False)) as layer:
        norm = random(device, stream, 64)
        turn = HeadTurn(random(device, stream, 50, 16, 2), k_norm=norm, q_norm=norm)
        q = random(device, stream, 5, 8, 64)
        layer.append(
            stream, random(device, stream, 5, 128), random(device, stream, 5, 128), turn=turn, q=q
        )
        stream.sync()


def model(device: Device, name: str) -> None:
    """Decode with a made-up model: its kernels, its drafts and the verify step."""
    from memra_lowlevel import demo

    words = ["--model", name, "--tokens", "8", "--device", str(device), "--json"]
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    if demo.run(parser.parse_args(words)):
        raise SystemExit(f"small_run: the demo of {name} failed")


def a_round(device: Device, stream: Stream) -> None:
    """End a round of two drafts as the device does it, outside a loop."""
    words = {
        "block": [5, 9, 3, 1, -1, 3, 0, 0], "drafts": [4, 7, 8], "argmax": [7, 1, 2],
        "state": [0, 9, 0, 20, 60, 60, 0], "target": [20] * 40, "draft": [22] * 3,
        "end_tokens": [-1], "tokens": [0] * 11, "accepted": [0] * 9,
    }  # fmt: skip
    buffers = [device.from_numpy(np.array(w, np.int32), stream) for w in words.values()]
    speculative.round_advance(stream, *buffers, k=2, n_vocab=50, goes_on=0, lags=0)
    stream.sync()


def two_launches(device: Device, stream: Stream) -> None:
    """Attend without tickets: the chunks are joined by a kernel of their own."""
    with closing(KvLayer.allocate(device, 300, 4, 64, check=False)) as layer:
        rows = random(device, stream, 200, 256)
        layer.append(stream, rows, rows)
        q, out = random(device, stream, 2, 8, 64), device.empty((2, 8, 64), np.float32, stream)
        size = kv_attend.workspace_bytes(device, 2, 8, 64, 300, kernel="simt")
        layer.advance(stream, 200)
        kv_attend.attend(
            stream, q, layer.k, layer.v, out, len_d=layer.len_d, k_format=layer.k_format,
            v_format=layer.v_format, rows=300, n_kv_heads=4, head_dim=64, counted=True,
            workspace=device.empty((size // 4,), np.float32, stream), kernel="simt",
        )  # fmt: skip
        stream.sync()


def tensor_cores(device: Device, stream: Stream) -> None:
    """Attend by the kernels that have to be asked for."""
    for kernel, k_format, v_format in (
        ("mma", formats.Q8_0, formats.Q5_1), ("f16", formats.F16, formats.E4M3),
    ):  # fmt: skip
        with closing(
            KvLayer.allocate(device, 300, 4, 64, k_format=k_format, v_format=v_format, check=False)
        ) as layer:
            rows = random(device, stream, 70, 256)
            layer.append(stream, rows, rows)
            q, out = random(device, stream, 2, 8, 64), device.empty((2, 8, 64), np.float32, stream)
            size = kv_attend.workspace_bytes(device, 2, 8, 64, 300, kernel=kernel)
            kv_attend.attend(
                stream, q, layer.k, layer.v, out, len_d=layer.len_d, k_format=k_format,
                v_format=v_format, rows=300, n_kv_heads=4, head_dim=64, counted=False,
                workspace=device.empty((size // 4,), np.float32, stream), kernel=kernel,
            )  # fmt: skip
            stream.sync()


def latent_tensor_cores(device: Device, stream: Stream) -> None:
    """Attend latent rows by the class that has to be asked for, dense and over a list."""
    plane = random(device, stream, 90, 192).view(0, (90 * 768,), np.uint8)
    len_d = device.from_numpy(np.array([80], np.int32), stream)
    lists = device.from_numpy(np.arange(-1, 69, dtype=np.int32)[None].repeat(2, 0), stream)
    for heads in (5, 40):
        q = random(device, stream, 2, heads, 192)
        out = device.empty((2, heads, 128), np.float32, stream)
        for indices, n_list in ((None, 0), (lists, 70)):
            size = latent_attend.workspace_bytes(2, heads, 128, 90, n_list, "f16x2")
            latent_attend.attend(
                stream, q, plane, out, len_d=len_d, rows=90, scale=0.1, indices=indices,
                workspace=device.empty((size // 4,), np.float32, stream), numeric="f16x2",
            )  # fmt: skip
    stream.sync()


def selection(device: Device, stream: Stream) -> None:
    """Choose of so many pools that several launches share the work."""
    n_pools = 17_000
    size = latent_index.scratch_bytes(1, n_pools)
    latent_index.select(
        stream, random(device, stream, 1, n_pools), device.empty((1, 67), np.int32, stream),
        device.empty((size // 4,), np.int32, stream),
        device.from_numpy(np.array([4 * n_pools], np.int32), stream), top_k=64, pool=4,
    )  # fmt: skip
    stream.sync()


def convolution(device: Device, stream: Stream) -> None:
    """Convolve rows apart from the step that usually does it."""
    plan = Recurrent(96, 4, 2 * 32 * 32)
    with RecurLayer.allocate(device, plan, 4) as layer:
        out = device.empty((3, 96), np.float32, stream)
        layer.conv_assemble_and_roll(
            stream, random(device, stream, 3, 96), random(device, stream, 96, 4), out
        )
        stream.sync()


def layer_cache(device: Device, stream: Stream) -> None:
    """Mirror layers of the layer cache: rows of two modes, a ring, an override, a phase core."""
    from memra_lowlevel.kernels import layer_kv as launches
    from memra_lowlevel.layer_kv import BoundedRope, BoundedWeights, KvMode, LayerKvCache
    from memra_lowlevel.layer_kv.mirror import FarMirror, RingMirror, RowMirror

    def host(*shape: int) -> np.ndarray:
        return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)

    def send(*shape: int):
        return device.from_numpy(host(*shape), stream)

    for mode in (KvMode.F32, KvMode.Q8()):
        layer = LayerKvCache(2, 40, mode=mode)
        for _ in range(70):
            layer.append(host(80), host(80))
        mirror = RowMirror(device, layer, 96, stream)
        mirror.sync(stream)
        mirror.append(stream, send(2, 40), send(2, 40))
        mirror.attend(
            stream, send(4, 40), send(4, 40), send(4, 96), n_heads=4, sinks=send(4), imp=send(96)
        )
    layer = LayerKvCache(2, 40, mode=KvMode.F32)
    layer.install_bounded(8)
    weights = BoundedWeights(host(2, 2, 40), host(2, 2, 40), 8)
    ring = RingMirror(device, layer, weights, BoundedRope.standard(8, 40), stream)
    for _ in range(10):
        ring.step(
            stream, send(4, 40), send(2, 40), send(2, 40), send(4, 40), scale=0.2, num_heads=4
        )
    layer = LayerKvCache(2, 40, mode=KvMode.F32)
    layer.o1_begin(4, 8, 2)
    for _ in range(40):
        layer.append(host(80), host(80))
        layer.o1_push_q(host(160))
    layer.o1_seal(4)
    far = FarMirror(device, layer, stream)
    for _ in range(10):
        far.step(stream, send(4, 40), send(2, 40), send(2, 40), send(4, 40))
    wide = [device.from_numpy(np.full((2, 6), 0.5), stream) for _ in range(3)]
    for delta in (False, True):
        launches.phase_step(
            stream, *wide, send(2, 9), send(2), send(2, 6, 9), send(2, 9), delta=delta
        )
    stream.sync()


def ceilings(device: Device, stream: Stream) -> None:
    """Run the kernels of the benchmark."""
    source = device.zeros((4096,), np.uint32, stream)
    target = device.empty((4096,), np.uint32, stream)
    config = LaunchConfig(2, 64)
    launch(stream, config, registry.kernel(device, "bench_empty"))
    launch(stream, config, registry.kernel(device, "bench_read"), source, 1000, 1, target)
    launch(stream, config, registry.kernel(device, "bench_copy"), source, target, 1000)
    stream.sync()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    with Device(arguments.device) as device, device.stream(name="small") as stream:
        planes(device, stream)
        a_round(device, stream)
        two_launches(device, stream)
        convolution(device, stream)
        latent_tensor_cores(device, stream)
        selection(device, stream)
        model(device, "tiny")
        model(device, "hybrid")
        layer_cache(device, stream)
        ceilings(device, stream)
        loaded = {
            (key[1], key[2].split("<")[0]) for key in device.memo if key[0] == registry.__name__
        }
        missed = [
            spec.name
            for spec in registry.all_specs()
            if (spec.source, spec.entry.split("<")[0]) not in loaded
        ]
        print(f"small_run on {device}: {len(loaded)} kernels ran; never: {missed or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
