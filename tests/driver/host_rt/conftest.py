"""Shared by the tests of the host runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memra_lowlevel.driver.host import runner

HEAD = '#include "common/device.cuh"\n#include "common/pipeline.cuh"\n#include "common/mma.cuh"\n'
ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]


@pytest.fixture(scope="session")
def kernel() -> Callable[..., Callable[..., None]]:
    """Compile a kernel from a text: ``kernel(body, name, defines, check=…, sanitize=…)``."""

    def make(body: str, name: str, defines: Any = None, **options: Any) -> Callable[..., None]:
        return runner.quick(HEAD + body, name, defines, **options)

    return make
