"""A plane whose rows a kernel writes behind another length than the plane's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import expect
from ..runtime import Buffer
from .kv_layer import KvLayer

if TYPE_CHECKING:
    from ..formats import Format

__all__ = ["RowsAt"]


class RowsAt:
    """What a kernel needs to write rows of a plane behind a length that is not the plane's.

    A target's pass writes the rows of a draft that follows it so: behind the target's length,
    wherever the draft's own guesses have brought the plane's. Nothing is checked on the host; rows
    without room are dropped on the device.

    Parameters
    ----------
    plane : KvLayer
        It must outlive this.
    len_d : Buffer
        i32[1]: where row 0 goes, read on the device.

    Attributes
    ----------
    k, v : Buffer
    k_format, v_format : Format
    rows : int
    len_d, base_d : Buffer
        ``base_d`` is the plane's, None where it is no ring.

    Raises
    ------
    ArgumentError
        A plane that is no ``KvLayer``, or a length that is no buffer.
    """

    def __init__(self, plane: KvLayer, len_d: Buffer):
        expect.kind("RowsAt: plane", plane, KvLayer, "a KvLayer")
        expect.kind("RowsAt: len_d", len_d, Buffer, "a buffer of the device, as KvLayer.len_d")
        self.k: Buffer = plane.k
        self.v: Buffer = plane.v
        self.k_format: Format = plane.k_format
        self.v_format: Format = plane.v_format
        self.rows: int = plane.rows
        self.len_d: Buffer = len_d
        self.base_d: Buffer | None = plane.base_d
