"""A sliding window on a ring: the same bits as a flat layer, in a sixth of the memory.

``python -m memra_lowlevel.examples.window_ring``. The step is captured once for each layer; between
steps ``prepare`` moves the rows that are still needed to the front when the ring is full.
"""

from __future__ import annotations

import numpy as np

from memra_lowlevel import Buffer, Device, GraphExec, Stream
from memra_lowlevel.cache import KvLayer, KvRing, swa_ring_rows
from memra_lowlevel.errors import RewindRefused

WINDOW, MAX_CTX, STEPS = 16, 512, 400
N_KV_HEADS, N_HEADS, HEAD_DIM = 1, 2, 64


def capture_step(
    stream: Stream, layer: KvLayer, q: Buffer, k: Buffer, v: Buffer, out: Buffer
) -> GraphExec:
    def step() -> None:
        layer.append(stream, k, v)
        layer.attend(stream, q, out)
        layer.advance(stream, 1)

    step()  # eagerly once, to load the kernels; a capture may not
    layer.set_len(stream, 0)
    with stream.capture(f"step of {layer.name}") as graph:
        step()
    executable: GraphExec = graph.instantiate()
    return executable


def main() -> None:
    random = np.random.default_rng(0)
    with Device() as device, device.stream(name="decode") as stream:
        # Rows: the window, one append, what a rewind may need, and up to 31 for alignment.
        rows = swa_ring_rows(WINDOW, MAX_CTX, chunk=1, slack=32)
        ring = KvLayer.allocate(
            device, MAX_CTX, N_KV_HEADS, HEAD_DIM,
            window=WINDOW, ring=KvRing(rows, WINDOW, slack=32), name="ring",
        )  # fmt: skip
        flat = KvLayer.allocate(device, MAX_CTX, N_KV_HEADS, HEAD_DIM, window=WINDOW, name="flat")
        k, v = (device.empty((1, N_KV_HEADS * HEAD_DIM), np.float32, stream) for _ in "kv")
        q = device.empty((1, N_HEADS, HEAD_DIM), np.float32, stream)
        outs = [device.empty(q.shape, np.float32, stream) for _ in range(2)]
        for buffer in (q, k, v):
            buffer.fill(stream, 0)
        steps = [
            capture_step(stream, x, q, k, v, out) for x, out in zip((ring, flat), outs, strict=True)
        ]

        rebases = different = 0
        for _ in range(STEPS):
            for buffer in (q, k, v):
                buffer.copy_from(stream, random.standard_normal(buffer.shape).astype(np.float32))
            rebases += ring.prepare(stream, 1)  # True where rows were moved
            for step in steps:
                step.launch(stream)
            of_ring, of_flat = (out.to_numpy(stream) for out in outs)
            different += not np.array_equal(of_ring, of_flat)
        bytes_of = {layer.name: layer.describe()["bytes"] for layer in (ring, flat)}
        print(f"{STEPS} steps, {rebases} rebases, {different} outputs differ; bytes {bytes_of}")

        ring.set_len(stream, ring.len - 32)  # within the slack: one counter write
        print(f"rewound to {ring.len}; the ring begins at row {ring.ring.base if ring.ring else 0}")
        try:
            ring.set_len(stream, 100)
        except RewindRefused as error:
            print(f"RewindRefused: {error}")
        for closing in (*steps, ring, flat):
            closing.close()


if __name__ == "__main__":
    main()
