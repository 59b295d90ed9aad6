"""Which launches may start while their predecessor still runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime import Device

__all__ = ["starts_early"]


def starts_early(device: Device, programmatic: bool) -> bool:
    """Whether a launch that was asked to be programmatic will be: on GPUs from sm_90 on."""
    return programmatic and device.kind == "cuda" and int(device.arch[3:]) >= 90
