"""Launches of the kernels of a Llama block (``cuda_src/model``).

Activations are f32 rows. Every function only launches: nothing is allocated, nothing waits, so all
of it may be captured. Buffers may be longer than the rows used. Row r of n gets the bits that it
would get alone.

A product leaves *partial sums*, ``parts`` f32[n_chunks, n_rows, width], one per chunk of columns
(``TiledMatrix.n_parts``); the kernel that reads them adds them in order. With one chunk they are
the product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .model_tiles import TILE_FORMATS, chunk_blocks, tile_rows
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..compile import Kernel
    from ..runtime import Buffer, Device, Stream

__all__ = [
    "TiledMatrix",
    "add_norm",
    "argmax_rows",
    "embed_rows",
    "matmul_rows",
    "prepare",
    "split_rope",
    "swiglu",
]

#: Instances of ``matmul_rows`` by rows taken at a time: one, a short draft, a draft of 16.
ROWS_AT_ONCE = (1, 4, 17)

_TILES = tuple(f.tile for f in TILE_FORMATS.values())
_ROUNDING = "f32 sums in a fixed order; "

registry.register(
    KernelSpec(
        name="matmul_rows",
        source="model/matmul.cu",
        entry="matmul_rows<{tile}, {rows}>",
        instances=tuple({"tile": t, "rows": r} for t in _TILES for r in ROWS_AT_ONCE),
        oracle="memra_lowlevel.reference.model:matmul_rows",
        tolerance=Tolerance("relative", 2e-6, _ROUNDING + "relative to the sum of |w x|"),
        edges=("1 to 17 rows and more", "one output", "a last tile that is not full",
               "one block of columns", "a chunk that is not full", "non-finite scales"),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="embed_rows",
        source="model/embed.cu",
        entry="embed_rows<{tile}>",
        instances=tuple({"tile": t} for t in _TILES),
        oracle="memra_lowlevel.reference.model:embed_rows",
        tolerance=Tolerance("absolute", 4e-7, "one rounding of code * scale + offset near 1"),
        edges=("first and last token", "a token twice", "a token outside the table"),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="add_norm",
        source="model/norm.cu",
        entry="add_norm",
        oracle="memra_lowlevel.reference.model:add_norm",
        tolerance=Tolerance("relative", 2e-6, _ROUNDING + "relative to 1 + |value|"),
        edges=("no parts", "widths around 256", "a row of NaN among others"),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="split_rope",
        source="model/rope.cu",
        entry="split_rope",
        oracle="memra_lowlevel.reference.model:split_rope",
        tolerance=Tolerance("relative", 1e-6, _ROUNDING + "relative to 1 + |value|"),
        edges=("position 0", "positions past the table", "part of a head rotated"),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="swiglu",
        source="model/swiglu.cu",
        entry="swiglu",
        oracle="memra_lowlevel.reference.model:swiglu",
        tolerance=Tolerance("relative", 1e-6, _ROUNDING + "expf; relative to 1 + |gate * up|"),
        edges=("very large and very small gates",),
        hot=True,
    ),
    KernelSpec(
        name="argmax_rows",
        source="model/argmax.cu",
        entry="argmax_rows",
        oracle="memra_lowlevel.reference.model:argmax_rows",
        tolerance=Tolerance("bitwise", 0.0, "ids are exact; probabilities to 2e-5 (expf, f32 sum)"),
        edges=("ties", "NaN", "all NaN", "infinities", "+-0", "one column", "last column"),
        hot=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class TiledMatrix:
    """A weight matrix on a device, in the tiles of :mod:`.model_tiles`.

    Attributes
    ----------
    format : str
        A key of ``TILE_FORMATS``.
    n_out, n_in : int
    tiles : Buffer
        uint8. The matrix keeps it alive.
    chunk_blocks : int
        Blocks of 32 columns per partial sum.
    """

    format: str
    n_out: int
    n_in: int
    tiles: Buffer
    chunk_blocks: int

    @classmethod
    def upload(
        cls,
        device: Device,
        stream: Stream,
        rows: npt.NDArray[np.uint8],
        format: str,
        *,
        chunk: int | None = None,
    ) -> TiledMatrix:
        """Copy rows, as GGUF stores them, to a device.

        Parameters
        ----------
        rows : uint8[n_out, row_bytes]
        format : str
        chunk : int, optional
            Blocks per partial sum; left out, what suits the shape.

        Raises
        ------
        ModelError
            An unknown format, or rows that are no whole number of blocks.
        """
        tiles = tile_rows(rows, format)
        n_out, n_in = rows.shape[0], rows.shape[1] // TILE_FORMATS[format].block_bytes * 32
        buffer = device.from_numpy(tiles, stream)
        return cls(format, n_out, n_in, buffer, chunk or chunk_blocks(n_out, n_in))

    @property
    def n_parts(self) -> int:
        """Partial sums that a product leaves per output."""
        return -(-(self.n_in // 32) // self.chunk_blocks)


def matmul_rows(
    stream: Stream,
    matrix: TiledMatrix,
    x: Buffer,
    parts: Buffer,
    n_rows: int,
    *,
    width: int | None = None,
    column: int = 0,
) -> None:
    """``parts[chunk, r, column : column + n_out] =`` partial products of row r.

    Parameters
    ----------
    matrix : TiledMatrix
    x : Buffer
        f32[≥ n_rows, n_in]
    parts : Buffer
        f32[≥ n_parts * n_rows * width]
    width, column : int
        Row length of ``parts`` and first column written; a whole product by default.
    """
    width = matrix.n_out if width is None else width
    _need("matmul_rows", "x", x, n_rows * matrix.n_in)
    _need("matmul_rows", "parts", parts, matrix.n_parts * n_rows * width)
    at_once = next((r for r in ROWS_AT_ONCE if r >= n_rows), ROWS_AT_ONCE[-1])
    kernel = _kernel(stream.device, "matmul_rows", tile=_tile(matrix), rows=at_once)
    n_tiles = -(-matrix.n_out // 32)
    # small matrices: one warp per block, so that every SM gets work
    block = 128 if n_tiles * matrix.n_parts >= 1024 else 32
    if column:
        parts = parts.view(4 * column, (parts.n_bytes // 4 - column,), "f4")
    launch(
        stream, LaunchConfig((-(-matrix.n_out // block), matrix.n_parts, 1), (block, 1, 1)), kernel,
        matrix.tiles, x, parts, n_rows, matrix.n_out, matrix.n_in // 32, matrix.chunk_blocks, width,
    )  # fmt: skip


def embed_rows(stream: Stream, table: TiledMatrix, tokens: Buffer, h: Buffer, n_rows: int) -> None:
    """``h[r] = table[tokens[r]]``; a row of NaN for a token outside the table.

    Parameters
    ----------
    table : TiledMatrix
        [n_vocab, width]
    tokens : Buffer
        u32[≥ n_rows] (or i32)
    h : Buffer
        f32[≥ n_rows, width]
    """
    _need("embed_rows", "tokens", tokens, n_rows)
    _need("embed_rows", "h", h, n_rows * table.n_in)
    n_blocks = table.n_in // 32
    kernel = _kernel(stream.device, "embed_rows", tile=_tile(table))
    launch(
        stream, LaunchConfig((-(-n_blocks // 32), n_rows, 1), (32, 1, 1)), kernel,
        table.tiles, tokens.view(0, (n_rows,), "u4"), h, n_blocks, table.n_out,
    )  # fmt: skip


def add_norm(
    stream: Stream,
    h: Buffer,
    parts: Buffer | None,
    n_parts: int,
    weight: Buffer,
    out: Buffer,
    n_rows: int,
    eps: float,
) -> None:
    """``h += sum(parts)``, then ``out = h / sqrt(mean(h²) + eps) * weight``.

    Parameters
    ----------
    h, out : Buffer
        f32[≥ n_rows, width]
    parts : Buffer or None
        f32[n_parts, n_rows, width]
    weight : Buffer
        f32[width]
    """
    width = weight.shape[0]
    _need("add_norm", "h", h, n_rows * width)
    _need("add_norm", "out", out, n_rows * width)
    if parts is not None:
        _need("add_norm", "parts", parts, n_parts * n_rows * width)
    launch(
        stream, LaunchConfig((n_rows, 1, 1), (256, 1, 1)), _kernel(stream.device, "add_norm"),
        h, parts, n_parts, weight, out, n_rows, width, eps,
    )  # fmt: skip


def split_rope(
    stream: Stream,
    parts: Buffer,
    n_parts: int,
    angles: Buffer,
    positions: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    n_rows: int,
    *,
    head_dim: int,
    q_dim: int,
    kv_dim: int,
) -> None:
    """Add up the joined product of q, k and v weights, rotate q and k, and split them.

    Parameters
    ----------
    parts : Buffer
        f32[n_parts, n_rows, q_dim + 2 * kv_dim]
    angles : Buffer
        f32[n_positions, n_rot / 2, 2]: cosine and sine
    positions : Buffer
        i32[1]: position of row 0, read on the device
    q, k, v : Buffer
        f32[≥ n_rows, q_dim], f32[≥ n_rows, kv_dim] twice
    """
    width = q_dim + 2 * kv_dim
    _need("split_rope", "parts", parts, n_parts * n_rows * width)
    for name, out, columns in (("q", q, q_dim), ("k", k, kv_dim), ("v", v, kv_dim)):
        _need("split_rope", name, out, n_rows * columns)
    launch(
        stream, LaunchConfig((-(-width // 2 // 128), n_rows, 1), (128, 1, 1)),
        _kernel(stream.device, "split_rope"),
        parts, n_parts, angles, positions, q, k, v, n_rows, q_dim, kv_dim, head_dim,
        2 * angles.shape[1], angles.shape[0],
    )  # fmt: skip


def swiglu(
    stream: Stream, parts: Buffer, n_parts: int, out: Buffer, n_rows: int, n_ff: int
) -> None:
    """``out = silu(gate) * up`` of f32[n_parts, n_rows, 2 * n_ff], gate columns first."""
    _need("swiglu", "parts", parts, n_parts * n_rows * 2 * n_ff)
    _need("swiglu", "out", out, n_rows * n_ff)
    launch(
        stream, LaunchConfig((-(-n_ff // 128), n_rows, 1), (128, 1, 1)),
        _kernel(stream.device, "swiglu"), parts, n_parts, out, n_rows, n_ff,
    )  # fmt: skip


def argmax_rows(
    stream: Stream,
    logits: Buffer,
    out: Buffer,
    n_rows: int,
    n_cols: int,
    *,
    probability: Buffer | None = None,
) -> None:
    """``out[r] =`` lowest id of the greatest of ``logits[r]``; ``0x7FFFFFFF`` if all are NaN.

    Parameters
    ----------
    logits : Buffer
        f32[≥ n_rows, n_cols]
    out : Buffer
        i32[≥ n_rows] (or u32)
    probability : Buffer, optional
        f32[≥ n_rows]: softmax probability of that id, NaN where any logit is NaN
    """
    _need("argmax_rows", "logits", logits, n_rows * n_cols)
    _need("argmax_rows", "out", out, n_rows)
    if probability is not None:
        _need("argmax_rows", "probability", probability, n_rows)
    launch(
        stream, LaunchConfig((n_rows, 1, 1), (1024, 1, 1)), _kernel(stream.device, "argmax_rows"),
        logits, out.view(0, (n_rows,), "i4"), probability, n_cols,
    )  # fmt: skip


def prepare(device: Device, formats: Iterable[str]) -> None:
    """Load the kernels for weights of these formats, one compilation per source.

    Without it each instance is compiled at its first launch, which cannot be in a capture.
    """
    tiles = [TILE_FORMATS[f].tile for f in formats]
    registry.kernels(
        device,
        [
            *(("matmul_rows", {"tile": t, "rows": r}) for t in tiles for r in ROWS_AT_ONCE),
            *(("embed_rows", {"tile": t}) for t in tiles),
            *((name, {}) for name in ("add_norm", "split_rope", "swiglu", "argmax_rows")),
        ],
    )


def _kernel(device: Device, name: str, tile: str = "", rows: int = 0) -> Kernel:
    key = (name, tile, rows)
    found: Kernel | None = device.memo.get(key)
    if found is None:
        template = {k: v for k, v in (("tile", tile), ("rows", rows)) if v}
        found = device.memo[key] = registry.kernel(device, name, **template)
    return found


def _tile(matrix: TiledMatrix) -> str:
    return TILE_FORMATS[matrix.format].tile


def _need(kernel: str, name: str, buffer: Buffer, n_elements: int) -> None:
    if buffer.n_bytes < 4 * n_elements:
        raise ArgumentError(
            f"{kernel}: {name} holds {buffer.n_bytes} bytes, {4 * n_elements} are needed for these "
            "rows; take a larger workspace",
            kernel=kernel,
            name=name,
            expected=f">= {4 * n_elements} bytes",
            got=f"{buffer.n_bytes} bytes",
        )
