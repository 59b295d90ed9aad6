"""Devices that are full for a moment."""

from __future__ import annotations

import time
from typing import Any


def opened_device(name: str, rest_s: float = 1.0, attempts: int = 5) -> Any:
    """Open a device that may be full for a moment.

    A test beside this one asks a GPU for more memory than there is, and while the driver finds out
    there may be none left for the context of another process.
    """
    from memra_lowlevel import Device
    from memra_lowlevel.errors import OutOfMemory

    for _ in range(attempts - 1):
        try:
            return Device(name)
        except OutOfMemory as full:
            if "cuDevicePrimaryCtxRetain" not in str(full):
                raise
            time.sleep(rest_s)
    return Device(name)
