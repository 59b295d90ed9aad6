"""Device mirrors against what does not fit them: refused before anything is launched."""

from __future__ import annotations

import numpy as np
import pytest
from lkv_data import fill, gen, ones

from memra_lowlevel.errors import ArgumentError, KvShapeError, KvStateError, MemraError
from memra_lowlevel.layer_kv import BoundedRope, BoundedWeights, KvMode, LayerKvCache
from memra_lowlevel.layer_kv.mirror import FarMirror, RingMirror, RowMirror

F32 = KvMode.F32


def zeros(device, stream, *shape):
    return device.zeros(shape, np.float32, stream)


def launched(device):
    return sum(n for call, n in device.driver.counts().items() if call.startswith("cuLaunchKernel"))


@pytest.fixture
def rows(device, stream):
    layer = LayerKvCache(2, 8, mode=F32)
    fill(layer, 5)
    mirror = RowMirror(device, layer, 16, stream)
    mirror.sync(stream)
    return mirror


@pytest.mark.parametrize(
    "change,error",
    [
        ({"q": (2, 8)}, ArgumentError), ({"out": (2, 8)}, ArgumentError),
        ({"scores": (4, 4)}, ArgumentError), ({"n_heads": 3}, ArgumentError),
        ({"n_heads": 0}, KvShapeError), ({"n_heads": 4.0}, KvShapeError),
        ({"sinks": (2,)}, ArgumentError), ({"imp": (3,)}, ArgumentError),
        ({"window": -3}, KvShapeError), ({"scale": float("nan")}, KvStateError),
        ({"softcap": -1}, KvStateError), ({"softcap": "1"}, KvShapeError),
    ],
)  # fmt: skip
def test_attention_of_other_shapes(device, stream, rows, change, error):
    def buffer(value):
        return zeros(device, stream, *value) if isinstance(value, tuple) else value

    given = {"q": (4, 8), "out": (4, 8), "scores": (4, 16), "n_heads": 4}
    call = {name: buffer(value) for name, value in {**given, **change}.items()}
    before = launched(device)
    with pytest.raises(error):
        rows.attend(stream, **call)
    assert launched(device) == before
    rows.attend(stream, **{name: buffer(value) for name, value in given.items()})
    stream.sync()


@pytest.mark.parametrize("cap", [0, -1, "4", 2.0])
def test_capacities_that_are_none(device, stream, cap):
    with pytest.raises(KvShapeError):
        RowMirror(device, LayerKvCache(1, 8, mode=F32), cap, stream)


def test_other_objects_than_layers(device, stream):
    for layer in (None, "layer", np.zeros(3)):
        for make in (
            lambda layer=layer: RowMirror(device, layer, 4, stream),
            lambda layer=layer: RingMirror(device, layer, None, None, stream),
            lambda layer=layer: FarMirror(device, layer, stream),
        ):
            with pytest.raises(KvShapeError, match="is no LayerKvCache"):
                make()


def weights(nkv=1, hd=8, window=4):
    sinks = gen(1, nkv * hd).reshape(nkv, 1, hd)
    return BoundedWeights(sinks, sinks, window)


@pytest.mark.parametrize(
    "w,rope",
    [
        (weights(nkv=2), BoundedRope(4, ones(4))), (weights(hd=4), BoundedRope(4, ones(4))),
        (weights(window=3), BoundedRope(4, ones(4))), (weights(), BoundedRope(5, ones(4))),
        (weights(), BoundedRope(4, ones(5))), (None, BoundedRope(4, ones(4))), (weights(), None),
    ],
)  # fmt: skip
def test_rings_that_do_not_fit(device, stream, w, rope):
    layer = LayerKvCache(1, 8, mode=F32)
    layer.install_bounded(4)
    with pytest.raises(KvShapeError):
        RingMirror(device, layer, w, rope, stream)


@pytest.mark.parametrize(
    "change",
    [{"q": 8}, {"k": 4}, {"v": 4}, {"out": 8}, {"num_heads": 0}, {"num_heads": True},
     {"scale": float("inf")}, {"scale": None}],
)  # fmt: skip
def test_ring_steps_of_other_shapes(device, stream, change):
    layer = LayerKvCache(1, 8, mode=F32)
    layer.install_bounded(4)
    mirror = RingMirror(device, layer, weights(), BoundedRope(4, ones(4)), stream)
    sizes = {"q": 16, "k": 8, "v": 8, "out": 16}
    given = {name: zeros(device, stream, change.get(name, n)) for name, n in sizes.items()}
    more = {"scale": 0.3, "num_heads": 2}
    more |= {k: v for k, v in change.items() if k in more}
    with pytest.raises(MemraError):
        mirror.step(stream, **given, **more)
    stream.sync()
    assert mirror.seen_d.to_numpy(stream).tolist() == [0]
