"""The tests of products once more, with the body for tensor cores on the host device."""

import inspect

import numpy as np
import pytest
import tensor_cores
import test_kernels
import test_logits
import test_shapes
import test_special_numbers
from conftest import Bench
from products import FORMATS, bits, stored, upload

from memra_lowlevel import Device
from memra_lowlevel.kernels import model as ops

_MODULES = (test_kernels, test_logits, test_shapes, test_special_numbers)
for _name, _value in {
    k: v for m in _MODULES for k, v in vars(m).items()
}.items():  # every test that launches kernels
    if _name.startswith("test_") and "bench" in inspect.signature(_value).parameters:
        globals()[_name] = _value


@pytest.fixture(scope="module")
def device():
    with Device("host") as opened:
        yield opened


@pytest.fixture
def bench(device, stream, monkeypatch):
    tensor_cores.take(monkeypatch)
    return Bench(device, stream)


@pytest.mark.parametrize("format", FORMATS)
def test_the_other_body_is_taken_here(bench, rng, format, monkeypatch):
    matrix = upload(bench, stored(rng, 40, 96, format), format)
    x = bench.put(rng.standard_normal((3, 96)).astype(np.float32))

    def product():
        h = bench.put(np.zeros((3, 40), np.float32))
        ops.add_product(bench.stream, matrix, x, h, 3)
        return bits(bench.get(h))

    here = product()
    monkeypatch.undo()
    assert product() != here
