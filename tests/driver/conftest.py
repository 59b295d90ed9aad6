"""A fresh host driver for each test, with small kernels loaded."""

from __future__ import annotations

import pytest
from driver_bench import SOURCE, Bench

from memra_lowlevel.compile.hostcxx import compile_host
from memra_lowlevel.driver.host import runner


@pytest.fixture(scope="session")
def image() -> bytes:
    """Path of the compiled kernels, as an image."""
    built = compile_host(SOURCE, [], [str(runner.cuda_src())], {})
    return str(built.path).encode()


@pytest.fixture
def bench(image: bytes) -> Bench:
    return Bench(image)
