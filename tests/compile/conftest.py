from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memra_lowlevel.compile import KernelCache, compiler

SAMPLE = """
#define NULLABLE
template <int D, typename T>
__global__ void __launch_bounds__(128) scale(T* __restrict__ x, const float* NULLABLE y, int n) {
  if ((int)threadIdx.x < n) x[threadIdx.x] = T(D) + (y ? T(y[0]) : T(0));
}
extern "C" __global__ void plain(unsigned long long n, float* out) { out[0] = float(n); }
"""


@pytest.fixture
def sample() -> str:
    return SAMPLE


@pytest.fixture(autouse=True)
def fresh_memory(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image survives from one test to the next inside this process."""
    compiler.clear_memory()
    monkeypatch.setattr(compiler, "_told", set())


@pytest.fixture
def disk(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


@pytest.fixture
def unprivileged() -> Callable[[], contextlib.AbstractContextManager[None]]:
    return _unprivileged


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that others may enter; pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextlib.contextmanager
def _unprivileged() -> Iterator[None]:
    """File permissions mean nothing to root; act as somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
