"""Fixtures shared by all tests, and the one rule for skipping.

A test that takes ``device`` runs on the host device and, where there is a GPU, on ``cuda:0`` too:
the same assertions on both. ``MEMRA_TEST_SCALE=10`` lengthens walks and property tests.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ON_BOTH_DEVICES = ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def _gpu_present() -> bool:
    try:
        from memra_lowlevel import driver

        return driver.get("cuda").cuDeviceGetCount() > 0
    except Exception:
        return False


def _compiler_present() -> bool:
    from memra_lowlevel.compile import nvrtc
    from memra_lowlevel.errors import MemraError

    try:
        return bool(nvrtc.library())
    except MemraError:
        return False


def _scale() -> int:
    return int(os.environ.get("MEMRA_TEST_SCALE", "1"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _scale() > 1:
        limit = float(config.getini("timeout") or 0)
        for item in items:
            item.add_marker(pytest.mark.timeout(limit * _scale()))
    # What only the host device can show has no case on a GPU: it is left out, not skipped.
    items[:] = [
        item
        for item in items
        if not (
            (item.get_closest_marker("host_only") or "host" in getattr(item, "fixturenames", ()))
            and item.get_closest_marker("gpu")
        )
    ]
    asking = [item for item in items if item.get_closest_marker("nvrtc")]
    if asking and not _compiler_present():
        for item in asking:
            item.add_marker(pytest.mark.skip(reason="no NVRTC of this major"))
    if not any(item.get_closest_marker("gpu") for item in items) or _gpu_present():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # Modules and collected tests live to the end. Tests that look for what was left behind collect
    # garbage; without this each would walk over a million objects that are none.
    gc.collect()
    gc.freeze()


@pytest.fixture
def scale() -> int:
    """Factor for the length of walks and property tests; 1 in CI."""
    return _scale()


@pytest.fixture(params=ON_BOTH_DEVICES, scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give an open Device; the test body is the same for both kinds."""
    from full_device import opened_device

    with opened_device(request.param) as opened:
        yield opened


@pytest.fixture
def stream(device: Any) -> Iterator[Any]:
    """Give a fresh named stream of ``device``, closed afterwards."""
    opened = device.stream(name="test")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder, but with the host runtime that other tests have built already."""
    from memra_lowlevel.paths import cache_root

    folder = tmp_path_factory.mktemp("cache")
    built = cache_root() / "host"
    built.mkdir(parents=True, exist_ok=True)
    (folder / "host").symlink_to(built)
    return folder


@pytest.fixture
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is neither read nor written."""
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(cache_folder))
