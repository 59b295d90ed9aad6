"""What a GPU's generation allows: how it is numbered, and which launches may start early."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime import Device

__all__ = ["capability", "starts_early"]


def capability(device: Device) -> int:
    """Compute capability as 10 x major + minor, e.g. 90; 0 on the host device."""
    return _number(device.arch)


@functools.cache  # a launch asks several times
def _number(arch: str) -> int:
    return int("".join(c for c in arch if c.isdigit()) or 0)


def starts_early(device: Device, programmatic: bool) -> bool:
    """Whether a launch that was asked to be programmatic will be: on GPUs from sm_90 on."""
    return programmatic and capability(device) >= 90
