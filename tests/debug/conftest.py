from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is neither read nor written."""
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(cache_folder))
