"""Weight matrices in tiles of 32 rows, the layout that the kernels of ``cuda_src/model`` read.

A matrix ``[n_out, n_in]`` is cut into tiles of 32 rows and blocks of 32 columns. Inside a block the
bytes of the file are kept and only their order changes, so that 32 neighbouring threads, each the
owner of one output row, read 16-byte pieces that lie side by side. Bytes of one block of a tile:

======  =====  ================================================================================
format  bytes  order
======  =====  ================================================================================
f32     4096   8 x [32 rows][16 B, 4 values]
f16     2048   4 x [32 rows][16 B, 8 values]
q8_0    1088   2 x [32 rows][16 B, 16 codes i8], then [32 rows][2 B, d f16]
q4_1     640   1 x [32 rows][16 B, 32 codes u4], then [32 rows][4 B, d f16, m f16]
======  =====  ================================================================================

Block ``b`` of tile ``t`` starts at byte ``(t * n_in / 32 + b) * bytes``. Rows past ``n_out`` in the
last tile are zero bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import ModelError

__all__ = ["TILE_FORMATS", "TileFormat", "slice_blocks", "tile_rows"]

TILE_ROWS = 32
TILE_COLS = 32


@dataclass(frozen=True)
class TileFormat:
    """One weight format.

    Attributes
    ----------
    name : str
        As in GGUF, in lower case.
    tile : str
        Its class in ``cuda_src/common/tiles.cuh``.
    block_bytes : int
        Bytes of 32 columns of one row.
    scale_bytes : int
        Of these, the bytes of scale and offset, which stand first in the file and last in a tile.
    """

    name: str
    tile: str
    block_bytes: int
    scale_bytes: int

    @property
    def tile_block_bytes(self) -> int:
        """Bytes of one block of one tile."""
        return TILE_ROWS * self.block_bytes


#: The formats there are, by name.
TILE_FORMATS = {
    f.name: f
    for f in (
        TileFormat("f32", "TileF32", 128, 0),
        TileFormat("f16", "TileF16", 64, 0),
        TileFormat("q8_0", "TileQ8_0", 34, 2),
        TileFormat("q4_1", "TileQ4_1", 20, 4),
    )
}


def tile_rows(rows: npt.NDArray[Any], format: str) -> npt.NDArray[np.uint8]:
    """Put the bytes of a matrix into the order of its tiles.

    Parameters
    ----------
    rows : uint8[n_out, row_bytes]
        Rows as GGUF stores them.
    format : str
        A key of ``TILE_FORMATS``.

    Returns
    -------
    uint8[ceil(n_out / 32) * n_in / 32 * 32 * block_bytes]
        A new array.

    Raises
    ------
    ModelError
        An unknown format, or rows that are no whole number of blocks.
    """
    if format not in TILE_FORMATS:
        raise ModelError(
            f"weight format {format!r} is not supported; use one of {', '.join(TILE_FORMATS)}"
        )
    spec = TILE_FORMATS[format]
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] % spec.block_bytes:
        raise ModelError(
            f"{format} rows must be uint8[n_out, n * {spec.block_bytes}], "
            f"not {rows.dtype}{list(rows.shape)}"
        )
    n_out, n_blocks = rows.shape[0], rows.shape[1] // spec.block_bytes
    n_tiles = -(-n_out // TILE_ROWS)
    if n_out % TILE_ROWS:
        padding = np.zeros((n_tiles * TILE_ROWS - n_out, rows.shape[1]), np.uint8)
        rows = np.concatenate([rows, padding])
    blocks = rows.reshape(n_tiles, TILE_ROWS, n_blocks, spec.block_bytes).transpose(0, 2, 1, 3)
    out = np.empty((n_tiles, n_blocks, spec.tile_block_bytes), np.uint8)
    code_bytes = spec.block_bytes - spec.scale_bytes
    codes = out[:, :, : TILE_ROWS * code_bytes]
    pieces = codes.reshape(n_tiles, n_blocks, code_bytes // 16, TILE_ROWS, 16)
    for piece in range(code_bytes // 16):
        first = spec.scale_bytes + 16 * piece
        pieces[:, :, piece] = blocks[..., first : first + 16]
    if spec.scale_bytes:
        scales = out[:, :, TILE_ROWS * code_bytes :]
        scales.reshape(n_tiles, n_blocks, TILE_ROWS, spec.scale_bytes)[:] = blocks[
            ..., : spec.scale_bytes
        ]
    return out.reshape(-1)


def slice_blocks(n_in: int, most_slices: int, at_once: int = 1) -> int:
    """Blocks of 32 columns per slice of a product whose columns make up to ``most_slices``.

    A multiple of ``at_once``, the blocks that are multiplied at a time.

    A function of the shape alone, because the slices decide the order of additions: it must not
    follow the device or the number of rows.
    """
    return -(-(n_in // TILE_COLS) // (most_slices * at_once)) * at_once
