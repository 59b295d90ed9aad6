"""What the tests of the model kernels share."""

import numpy as np
import pytest


class Bench:
    """Buffers on one device, outputs poisoned with NaN."""

    def __init__(self, device, stream):
        self.device, self.stream = device, stream

    def put(self, array):
        return self.device.from_numpy(np.ascontiguousarray(array), self.stream)

    def out(self, *shape, dtype=np.float32):
        buffer = self.device.empty(shape, dtype, self.stream)
        buffer.fill(self.stream, 0xFF)
        return buffer

    def get(self, buffer):
        return buffer.to_numpy(self.stream)


@pytest.fixture
def bench(device, stream):
    return Bench(device, stream)


@pytest.fixture
def rng():
    return np.random.default_rng()
