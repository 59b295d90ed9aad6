"""Where the library keeps files on this machine. Imports nothing of ours."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_root"]

CACHE_VARIABLE = "MEMRA_CACHE_DIR"
"""Environment variable that moves every cache of the library to another folder."""


def cache_root() -> Path:
    """Folder under which compiled kernels, the host runtime and fetched models are cached.

    ``MEMRA_CACHE_DIR`` where it is set and not empty, else the user's cache folder by the
    platform's own rules. The folder is not created here.
    """
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen:
        return Path(chosen).expanduser()
    try:
        import platformdirs
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "memra_lowlevel"
    return Path(platformdirs.user_cache_dir("memra_lowlevel", appauthor=False))
