"""Several sequences in one launch: the bits of each alone."""

import numpy as np
import pytest

from memra_lowlevel.cache import KvBatch, KvLayer, KvRing
from memra_lowlevel.errors import ArgumentError, CapacityExceeded, PlaneError

HEAD = 64


def rows(device, stream, rng, *shape):
    return device.from_numpy(rng.normal(size=shape).astype(np.float32), stream)


def part(buffer, first, n):
    width = int(np.prod(buffer.shape[1:]))
    return buffer.view(4 * first * width, (n, *buffer.shape[1:]), np.float32)


def make(device, ring):
    if ring:
        return KvLayer.allocate(
            device, 900, 1, HEAD, window=24, ring=KvRing(80, 24, slack=0), check=False
        )
    return KvLayer.allocate(device, 400, 1, HEAD, check=False)


@pytest.mark.parametrize("ring", [False, True], ids=["flat", "ring"])
def test_each_sequence_gets_the_bits_it_gets_alone(device, stream, ring):
    rng = np.random.default_rng(0)
    counts, starts = (1, 3, 2), (0, 150, 37)
    batched, alone = ([make(device, ring) for _ in counts] for _ in range(2))
    for layers in (batched, alone):
        start_rng = np.random.default_rng(1)
        for layer, n in zip(layers, starts, strict=True):
            while layer.len < n:
                some = min(30, n - layer.len)
                layer.prepare(stream, some)
                k, v = (rows(device, stream, start_rng, some, HEAD) for _ in range(2))
                layer.append(stream, k, v)
                layer.advance(stream, some)
    batch = KvBatch(stream, batched, counts)
    total = sum(counts)
    k, v = (device.zeros((total, HEAD), np.float32, stream) for _ in range(2))
    q = device.zeros((total, 4, HEAD), np.float32, stream)
    out = device.empty((total, 4, HEAD), np.float32, stream)
    batch.append(stream, k, v)
    batch.attend(stream, q, out)
    with stream.capture("batch") as graph:
        batch.append(stream, k, v)
        batch.attend(stream, q, out)
        for layer, n in zip(batched, counts, strict=True):
            layer.advance(stream, n)
    exec_ = graph.instantiate()
    rebases = 0
    for _ in range(40):
        for buffer in (k, v, q):
            buffer.copy_from(stream, rng.normal(size=buffer.shape).astype(np.float32))
        out.fill(stream, 0xFF)
        rebases += sum([p.prepare(stream, n) for p, n in zip(batched, counts, strict=True)])
        exec_.launch(stream)
        got, first = out.to_numpy(stream), 0
        for layer, n in zip(alone, counts, strict=True):
            layer.prepare(stream, n)
            mine = device.empty((n, 4, HEAD), np.float32, stream)
            layer.append(stream, part(k, first, n), part(v, first, n))
            layer.attend(stream, part(q, first, n), mine)
            layer.advance(stream, n)
            want = mine.to_numpy(stream)
            assert np.isfinite(want).all()
            assert got[first : first + n].tobytes() == want.tobytes()
            first += n
        assert [p.len for p in batched] == [p.len for p in alone]
    assert (rebases >= 3) == ring
    exec_.close()
    batch.close()
    for layer in (*batched, *alone):
        layer.close()


def test_no_room_in_one_moves_nothing_in_any(device, stream):
    rng = np.random.default_rng(2)
    layers = [KvLayer.allocate(device, 8, 1, HEAD, check=False) for _ in range(2)]
    layers[1].set_len(stream, 8)
    batch = KvBatch(stream, layers)
    layers[0].k.fill(stream, 0)
    k, v = (rows(device, stream, rng, 2, HEAD) for _ in range(2))
    with pytest.raises(CapacityExceeded):
        batch.append(stream, k, v)
    assert not layers[0].k.to_numpy(stream).any()
    q, out = (device.zeros((2, 4, HEAD), np.float32, stream) for _ in range(2))
    with pytest.raises(CapacityExceeded, match=r"kv\.attend: 1 rows behind 8"):
        batch.attend(stream, q, out)
    layers[1].set_len(stream, 0)
    with pytest.raises(ArgumentError, match=r"^KvBatch\(kv, kv\)\.attend: out must be"):
        batch.attend(stream, q, k)
    with pytest.raises(ArgumentError):
        batch.append(stream, rows(device, stream, rng, 3, HEAD), v)
    with pytest.raises(PlaneError, match="differ"):
        KvBatch(stream, [layers[0], KvLayer.allocate(device, 9, 1, HEAD)])
    for bad in (([], 1), (layers, [1]), (layers, 0)):
        with pytest.raises(PlaneError):
            KvBatch(stream, *bad)


@pytest.mark.parametrize("kernel", ["mma", "f16", "simt"])
def test_a_kernel_may_be_named(device, stream, kernel):
    rng = np.random.default_rng(0)
    layers = [make(device, ring=False) for _ in range(2)]
    batch = KvBatch(stream, layers, (1, 3))
    k, v, q = (rows(device, stream, rng, 4, *shape) for shape in ((HEAD,), (HEAD,), (4, HEAD)))
    out = device.empty((4, 4, HEAD), np.float32, stream)
    batch.append(stream, k, v)
    batch.attend(stream, q, out, kernel=kernel)
    assert np.isfinite(out.to_numpy(stream)).all()
    with pytest.raises(ArgumentError, match=r"^KvBatch\(kv, kv\).attend: kernel got 'fast'"):
        batch.attend(stream, q, out, kernel="fast")
    for owned in (batch, *layers):
        owned.close()
