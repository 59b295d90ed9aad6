"""Sizes of the planes of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import expect
from ..errors import PlaneError
from ..formats import BLOCK, Format
from ..kernels import kv_attend
from . import policy
from .ring import SWA_VIEW_ALIGNMENT_ROWS, KvRing

if TYPE_CHECKING:
    from ..runtime import Device

__all__ = ["MAX_ROWS", "TAIL_PAD_BYTES", "KvGeometry"]

TAIL_PAD_BYTES = 8
"""Bytes behind the last row of a plane: kernels read whole words and may touch a few more."""

MAX_ROWS = 2**31 - 1
"""Longest plane: lengths are i32 on the device."""


class KvGeometry:
    """Sizes of a layer before anything is allocated."""

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        head_dim_v: int,
        k_format: Format | None,
        v_format: Format | None,
    ):
        for what, fmt in (("k_format", k_format), ("v_format", v_format)):
            if fmt is not None:
                expect.kind(
                    f"KvLayer: {what}", fmt, Format, "a Format", "see memra_lowlevel.formats"
                )
        n_kv_heads = expect.integer("KvLayer: n_kv_heads", n_kv_heads, high=MAX_ROWS)
        head_dim = expect.integer("KvLayer: head_dim", head_dim, high=MAX_ROWS)
        head_dim_v = expect.integer("KvLayer: head_dim_v", head_dim_v, high=MAX_ROWS)
        selected = policy.kv_cache_formats()
        self.k_format, self.v_format = k_format or selected[0], v_format or selected[1]
        self.n_kv_heads, self.head_dim, self.head_dim_v = n_kv_heads, head_dim, head_dim_v

    def check(self, device: Device, max_ctx: int, window: int | None, ring: KvRing | None) -> None:
        """Refuse what no plane can be.

        Raises
        ------
        PlaneError, FormatUnsupported
        """
        expect.integer("KvLayer: max_ctx", max_ctx, high=None)
        if window is not None:
            expect.integer("KvLayer: window", window, high=None)
        if ring is not None:
            expect.kind("KvLayer: ring", ring, KvRing, "a KvRing")
        for what, value in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if value < BLOCK or value % BLOCK:
                raise PlaneError(
                    f"KvLayer: {what} {value} must be a positive multiple of {BLOCK}, so that no "
                    "block straddles two heads; pad the heads"
                )
        if self.n_kv_heads < 1 or not 1 <= max_ctx <= MAX_ROWS:
            raise PlaneError(
                f"KvLayer: {self.n_kv_heads} kv heads and {max_ctx} rows; at least one of each, "
                f"and at most {MAX_ROWS} rows"
            )
        if window is not None and not 1 <= window <= MAX_ROWS:
            raise PlaneError(
                f"KvLayer: window {window} must lie in 1..{MAX_ROWS}, or be None for all rows"
            )
        if ring is not None and ring.rows < min(ring.window, max_ctx):
            raise PlaneError(
                f"KvLayer: a ring of {ring.rows} rows cannot hold its window of {ring.window}; "
                "take swa_ring_rows(window, max_ctx, chunk=rows of an append, slack=…)"
            )
        if ring is not None and ring.rows < min(ring.least_rows, max_ctx):
            raise PlaneError(
                f"KvLayer: a ring of {ring.rows} rows would be full for good: a rebase keeps up to "
                f"{ring.least_rows - 1} rows (window {ring.window}, slack {ring.slack}, alignment "
                f"{SWA_VIEW_ALIGNMENT_ROWS}). Give it {ring.least_rows} rows and more for appends "
                f"of several (swa_ring_rows), max_ctx = {max_ctx} rows, or less slack"
            )
        if ring is not None and ring.window != window:
            raise PlaneError(
                f"KvLayer: the ring keeps rows for a window of {ring.window}, but the layer "
                f"attends {'all rows' if window is None else window}; give window={ring.window}"
            )
        kv_attend.check_supported(
            device, self.k_format, self.v_format, self.head_dim, self.head_dim_v
        )

    def tok_bytes(self) -> tuple[int, int]:
        """Bytes of a K row and of a V row."""
        return (
            self.k_format.row_bytes(self.n_kv_heads * self.head_dim),
            self.v_format.row_bytes(self.n_kv_heads * self.head_dim_v),
        )

    def plane_bytes(self, max_ctx: int, ring: KvRing | None) -> int:
        """Bytes of both planes, tail pads included."""
        rows = ring.rows if ring else max_ctx
        return sum(rows * b + TAIL_PAD_BYTES for b in self.tok_bytes())
