"""A device with one kernel, and the check that follows every abuse: it still works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from abuse import CONFIG, SOURCE, N

from memra_lowlevel import compile_source, launch


@pytest.fixture(scope="module")
def module(device: Any) -> Iterator[Any]:
    image = compile_source(SOURCE, arch=device.arch, name_expressions=["scale", "first"])
    with device.module(image) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def scale(module: Any) -> Any:
    """The kernel y[:n] = x[:n] * f; this directory has no use for the scale of walks."""
    return module.kernel("scale")


@pytest.fixture
def healthy(device: Any, scale: Any) -> Iterator[Callable[[Any], None]]:
    """Check that a plain launch and a fresh capture succeed; done again at the end of the test."""

    def check(stream: Any) -> None:
        given = np.random.default_rng().standard_normal(N).astype(np.float32)
        x, y = device.from_numpy(given, stream), device.empty(N, np.float32, stream)
        y.fill(stream, 0xFF)
        launch(stream, CONFIG, scale, x, y, N, 2.0)
        assert (y.to_numpy(stream) == given * 2).all()
        y.fill(stream, 0xFF)
        with stream.capture("fresh") as graph:
            launch(stream, CONFIG, scale, x, y, N, 3.0)
        with graph.instantiate() as step:
            step.launch(stream)
            assert (y.to_numpy(stream) == given * np.float32(3)).all()
        for used in (graph, x, y):
            used.close()

    yield check
    with device.stream(name="after") as other:
        check(other)
