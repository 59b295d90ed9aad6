from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder, but with the host runtime that other tests have built already."""
    from memra_lowlevel.paths import cache_root

    folder = tmp_path_factory.mktemp("cache")
    built = cache_root() / "host"
    built.mkdir(parents=True, exist_ok=True)
    (folder / "host").symlink_to(built)
    return folder


@pytest.fixture(autouse=True)
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is neither read nor written."""
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(cache_folder))
