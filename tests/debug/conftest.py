from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def apart(own_cache: None) -> None:
    """Every test here has the cache of tests."""
