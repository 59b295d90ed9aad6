"""What both attention kernels on tensor cores need of a launch: tile copies, the combination."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..runtime.launch import LaunchConfig
from .early import capability

if TYPE_CHECKING:
    from ..runtime import Buffer, Device

__all__ = ["check_planes", "combine_config", "plane_maps"]

_NO_MAP = bytes(128)
_MOST_MAPS = 4096


def check_planes(kernel: str, k_plane: Buffer | None, v_plane: Buffer | None) -> None:
    """Refuse planes that do not begin at a multiple of 16 bytes."""
    for name, plane in (("k_plane", k_plane), ("v_plane", v_plane)):
        if plane is not None and plane.ptr % 16:
            raise ArgumentError(
                f"attend: {name} must begin at a multiple of 16 bytes for kernel {kernel!r}, "
                f"got {plane.ptr:#x}",
                kernel=f"attend_{kernel}", name=name, expected="a multiple of 16",
                got=hex(plane.ptr),
            )  # fmt: skip


@functools.lru_cache(maxsize=64)
def combine_config(n_heads: int, n_rows: int, head_dim: int, programmatic: bool) -> LaunchConfig:
    """Launch of ``attend_mma_combine``."""
    return LaunchConfig((n_heads, n_rows, head_dim // 32), (256, 1, 1), programmatic=programmatic)


def plane_maps(
    device: Device, k_plane: Buffer | None, v_plane: Buffer | None, rows: int, step: int,
    widths: tuple[tuple[int, int], tuple[int, int]],
) -> tuple[bytes, bytes, int]:  # fmt: skip
    """Describe both planes for tile copies of ``step`` rows, and say whether they are.

    ``widths`` are the bytes of a row, and those from row to row of a stage, of K and of V.
    """
    if k_plane is None or v_plane is None or capability(device) < 90:
        return _NO_MAP, _NO_MAP, 0
    if any(row % 16 for row, _ in widths):  # a map cannot describe it; the kernel copies in pieces
        return _NO_MAP, _NO_MAP, 0
    maps: dict[tuple[int, ...], tuple[bytes, bytes, int]]
    maps = device.memo.setdefault("attend maps", {})
    key = (k_plane.ptr, v_plane.ptr, rows, step, *widths[0], *widths[1])
    found = maps.get(key)
    if found is None:
        if len(maps) >= _MOST_MAPS:  # of planes that are closed, mostly
            maps.clear()
        k_map, v_map = (
            device.driver.cuTensorMapEncodeTiled(plane.ptr, rows, row, step, pitch)
            for plane, (row, pitch) in zip((k_plane, v_plane), widths, strict=True)
        )
        found = maps[key] = (k_map, v_map, 1)
    return found
