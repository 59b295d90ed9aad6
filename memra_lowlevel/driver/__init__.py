"""The bottom layer: one call surface, implemented over the CUDA driver and on the CPU.

Importing this package makes no CUDA call and does not import ``cuda.bindings``.
"""

from __future__ import annotations

import threading
from typing import Literal

from .table import Driver

__all__ = ["Driver", "get"]

_lock = threading.Lock()
_drivers: dict[str, Driver] = {}


def get(kind: Literal["cuda", "host"]) -> Driver:
    """Return the one driver of a kind, made at first use.

    Raises
    ------
    DriverNotFound
        ``"cuda"`` on a machine without a CUDA driver library or without a device.
    ToolkitMismatch
        The driver library is too old for the bindings.
    """
    with _lock:
        found = _drivers.get(kind)
        if found is None:
            found = _drivers[kind] = _make(kind)
        return found


def _make(kind: str) -> Driver:
    if kind == "host":
        from .host import HostDriver

        return HostDriver()
    if kind == "cuda":
        from .cuda import CudaDriver

        return CudaDriver()
    raise ValueError(f"kind must be 'cuda' or 'host', not {kind!r}")
