"""Launches of the kernels of a Llama block (``cuda_src/model``).

Activations are f32 rows. Every function only launches: nothing is allocated, nothing waits, so all
of it may be captured. Buffers may be longer than the rows used. Row r of n gets the bits that it
would get alone.

A pass over a block is four launches beside its attention::

    qkv_rows      norm, products, rotation, and the rows of k and v behind the plane's length
    add_product   h += W x of the attention's output
    gate_up_rows  norm, both products, silu(gate) * up
    add_product   h += W x of that

``logits_rows`` (norm, logits, the best of each tile) and ``pick_rows`` end it. All take
``programmatic``: start while the predecessor still runs, on GPUs that can. It needs a kernel of the
same stream as the predecessor, and one that ends only after everything before it, as every kernel
launched the ordinary way and every kernel here does. A pass that begins with an ordinary launch and
moves no counter may tell its attention so (``settled``, see :func:`.kv_attend.attend`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import ArgumentError
from ..formats import Format
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .early import starts_early
from .model_tiles import TILE_FORMATS, TILE_ROWS, slice_blocks, tile_rows
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..compile import Kernel
    from ..runtime import Buffer, Device, Stream

__all__ = [
    "KvRows",
    "TiledMatrix",
    "add_product",
    "embed_rows",
    "gate_up_rows",
    "logits_rows",
    "pick_rows",
    "prepare",
    "qkv_rows",
]


@dataclass(frozen=True)
class _Shape:
    """How a kernel divides its product among blocks of threads and their warps."""

    n_outs: int  # of a block
    n_slices: int  # of the columns at most, each of which is a warp's
    slice_floats: int  # shared memory of a row and slice; see PITCH in common/product.cuh
    row_floats: int = 0  # and of a row beside that
    at_once: int = 1  # blocks of columns that a warp multiplies at a time


_QKV = _Shape(32, 18, 32 + 8 + 1, row_floats=32)
_GATED = _Shape(16, 18, 32 + 8 + 1)
#: A warp multiplies one block of columns at a time; two, where it has several; two in a launch that
#: does not start early: nothing is read ahead of time then, so more multiprocessors take part.
_ADDED, _ADDED_TWO, _ADDED_LATE = (
    _Shape(16, 24, 16 + 8), _Shape(16, 24, 16 + 8, at_once=2), _Shape(8, 24, 8 + 8, at_once=2)
)  # fmt: skip

_TILES = tuple(f.tile for f in TILE_FORMATS.values())
#: Formats whose weights leave no registers for a second block of columns.
_WIDE = ("f32",)


def _added(shape: _Shape, tile: str) -> dict[str, str]:
    return {"tile": tile, "blocks": str(shape.at_once), "outs": str(shape.n_outs)}


_SUMS = tuple(
    _added(shape, f.tile)
    for f in TILE_FORMATS.values() for shape in (_ADDED, _ADDED_TWO, _ADDED_LATE)
    if shape.at_once == 1 or f.name not in _WIDE
)  # fmt: skip
_ROUNDING = (
    "activations to 2^-21 on tensor cores, f32 sums in a fixed order, for |w| of q4_1 read "
    "|scale (code - 8)| + |8 scale + offset|; "
)
_MATRIX_EDGES = (
    "1 to 17 rows and more", "a last tile that is not full", "one block of columns",
    "a row of NaN", "infinite activations", "infinite weights", "infinite and NaN scales",
)  # fmt: skip
_PRODUCT_EDGES = (
    *_MATRIX_EDGES, "slices of several blocks", "a slice that is not full",
    "more slices than warps",
)  # fmt: skip

registry.register(
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
        name="qkv_rows",
        source="model/qkv.cu",
        entry="qkv_rows<{tile}, {k_format}, {v_format}>",
        instances=tuple({"tile": t, "k_format": "Q8_0", "v_format": "Q5_1"} for t in _TILES),
        oracle="memra_lowlevel.reference.model:qkv_rows",
        tolerance=Tolerance("relative", 2e-6, _ROUNDING + "relative to the sum of |w g x| / rms"),
        edges=(*_PRODUCT_EDGES, "position 0", "positions past the table", "part of a head rotated",
               "q, k and v apart", "no room in the plane", "base of a ring"),
        hot=True,
        pdl="waits",
    ),
    KernelSpec(
        name="add_product",
        source="model/project.cu",
        entry="add_product<{tile}, {blocks}, {outs}>",
        instances=_SUMS,
        oracle="memra_lowlevel.reference.model:add_product",
        tolerance=Tolerance("relative", 2e-6, _ROUNDING + "relative to |h| + the sum of |w x|"),
        edges=(*_PRODUCT_EDGES, "one output"),
        hot=True,
        pdl="waits",
    ),
    KernelSpec(
        name="gate_up_rows",
        source="model/gated.cu",
        entry="gate_up_rows<{gate}, {up}>",
        instances=tuple({"gate": t, "up": t} for t in _TILES),
        oracle="memra_lowlevel.reference.model:gate_up_rows",
        tolerance=Tolerance("relative", 4e-6, _ROUNDING + "expf; relative to (1 + |gate|)(1 + |up|)"
                            " of the sums of |w g x| / rms"),
        edges=(*_PRODUCT_EDGES, "very large and very small gates", "two formats"),
        hot=True,
        pdl="waits",
    ),
    KernelSpec(
        name="logits_rows",
        source="model/logits.cu",
        entry="logits_rows<{tile}>",
        instances=tuple({"tile": t} for t in _TILES),
        oracle="memra_lowlevel.reference.model:logits_rows",
        tolerance=Tolerance("relative", 2e-6, _ROUNDING + "relative to the sum of |w g x| / rms"),
        edges=(*_MATRIX_EDGES, "more tiles than warps", "ties"),
        hot=True,
        pdl="waits",
    ),
    KernelSpec(
        name="pick_rows",
        source="model/logits.cu",
        entry="pick_rows",
        oracle="memra_lowlevel.reference.model:pick_rows",
        tolerance=Tolerance("bitwise", 0.0, "ids are exact; probabilities to 2e-5 (expf, f32 sum)"),
        edges=("ties", "NaN", "all NaN", "infinities", "+-0", "one column", "last column"),
        hot=True,
        pdl="waits",
    ),
)  # fmt: skip

#: Shared memory that the rows of one launch may take together; more rows go to further blocks.
_SHARED_BYTES = 48 << 10
#: Threads that keep a multiprocessor busy.
_BUSY_THREADS = 576
#: Rows that cost little more than one: see common/tensor_tile.cuh.
_ROWS_AT_ONCE = 4
#: Turns of as many rows that a block takes sooner than another one finds room beside a predecessor.
_FEW_TURNS = 3
#: Tiles of 32 logits that a block of threads has, a warp each.
_TILES_AT_ONCE = 4


class KvRows(Protocol):
    """What a kernel needs to write rows of keys and values; a ``KvLayer`` has it."""

    k: Buffer
    v: Buffer
    k_format: Format
    v_format: Format
    rows: int
    len_d: Buffer
    base_d: Buffer | None


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
    """

    format: str
    n_out: int
    n_in: int
    tiles: Buffer

    @classmethod
    def upload(
        cls, device: Device, stream: Stream, rows: npt.NDArray[np.uint8], format: str
    ) -> TiledMatrix:
        """Copy rows, as GGUF stores them, to a device.

        Parameters
        ----------
        rows : uint8[n_out, row_bytes]
        format : str

        Raises
        ------
        ModelError
            An unknown format, or rows that are no whole number of blocks.
        """
        tiles = tile_rows(rows, format)
        n_out, n_in = rows.shape[0], rows.shape[1] // TILE_FORMATS[format].block_bytes * 32
        return cls(format, n_out, n_in, device.from_numpy(tiles, stream))

    @property
    def tile(self) -> str:
        """Class of its tiles in ``cuda_src/common/tiles.cuh``."""
        return TILE_FORMATS[self.format].tile

    @property
    def n_tiles(self) -> int:
        """Tiles of 32 outputs."""
        return -(-self.n_out // TILE_ROWS)


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
    kernel = _kernel(stream.device, "embed_rows", tile=table.tile)
    launch(
        stream, LaunchConfig((-(-n_blocks // 32), n_rows, 1), (32, 1, 1)), kernel,
        table.tiles, tokens.view(0, (n_rows,), "u4"), h, n_blocks, table.n_out,
    )  # fmt: skip


def qkv_rows(
    stream: Stream,
    matrix: TiledMatrix,
    h: Buffer,
    gain: Buffer,
    angles: Buffer,
    positions: Buffer,
    q: Buffer,
    plane: KvRows,
    n_rows: int,
    eps: float,
    *,
    head_dim: int,
    q_dim: int,
    kv_dim: int,
    column: int = 0,
    programmatic: bool = False,
) -> None:
    """Norm, products, rotation; q to ``q``, rows of k and v behind the length of their plane.

    ``matrix`` holds the weights of q, k and v one below the other, or those of some of them.

    Parameters
    ----------
    matrix : TiledMatrix
        [n_out, width]: columns ``column … column + n_out`` of q | k | v.
    h : Buffer
        f32[≥ n_rows, width]
    gain : Buffer
        f32[width] of the norm
    angles : Buffer
        f32[n_positions, n_rot / 2, 2]: cosine and sine
    positions : Buffer
        i32[1]: position of row 0, read on the device
    q : Buffer
        f32[≥ n_rows, q_dim]
    plane : KvRows
        Its length is read on the device and stays as it is; rows without room are dropped.
    """
    for name, n in (
        ("n_out", matrix.n_out),
        ("q_dim", q_dim),
        ("kv_dim", kv_dim),
        ("column", column),
    ):
        if n % TILE_ROWS:
            raise ArgumentError(
                f"qkv_rows: {name} is {n}; blocks of cache rows ask for a multiple of {TILE_ROWS}",
                kernel="qkv_rows", name=name, expected=f"a multiple of {TILE_ROWS}", got=str(n),
            )  # fmt: skip
    _need("qkv_rows", "h", h, n_rows * matrix.n_in)
    _need("qkv_rows", "gain", gain, matrix.n_in)
    _need("qkv_rows", "q", q, n_rows * q_dim)
    for side, rows, row_format in (("k", plane.k, plane.k_format), ("v", plane.v, plane.v_format)):
        _need_bytes("qkv_rows", side, rows, plane.rows * row_format.row_bytes(kv_dim))
    n_columns, end = q_dim + 2 * kv_dim, column + matrix.n_out
    if column < 0 or end > n_columns:
        raise ArgumentError(
            f"qkv_rows: columns {column} to {end} are not all in q | k | v, which have "
            f"{n_columns}; move column, or give weights of fewer outputs",
            kernel="qkv_rows", name="column", got=f"{column} and {matrix.n_out} outputs",
            expected=f"0 <= column, column + n_out <= {n_columns}",
        )  # fmt: skip
    kernel = _kernel(
        stream.device, "qkv_rows", tile=matrix.tile,
        k_format=plane.k_format.constant, v_format=plane.v_format.constant,
    )  # fmt: skip
    cut = _Cut(stream.device, kernel, _QKV, matrix, n_rows, programmatic)
    launch(
        stream, cut.config, kernel,
        matrix.tiles, h, gain, angles, positions, q, plane.k, plane.v, plane.len_d, plane.base_d,
        n_rows, cut.group, column, q_dim, kv_dim, head_dim, 2 * angles.shape[1], angles.shape[0],
        plane.rows, cut.n_blocks, cut.slice_blocks, cut.n_slices, cut.share, eps,
    )  # fmt: skip


def add_product(
    stream: Stream,
    matrix: TiledMatrix,
    x: Buffer,
    h: Buffer,
    n_rows: int,
    *,
    programmatic: bool = False,
) -> None:
    """``h[r] += W x[r]``.

    Parameters
    ----------
    matrix : TiledMatrix
    x : Buffer
        f32[≥ n_rows, n_in]
    h : Buffer
        f32[≥ n_rows, n_out]
    """
    _need("add_product", "x", x, n_rows * matrix.n_in)
    _need("add_product", "h", h, n_rows * matrix.n_out)
    shape = _ADDED
    if matrix.n_in // 32 > shape.n_slices and matrix.format not in _WIDE:
        shape = _ADDED_TWO if starts_early(stream.device, programmatic) else _ADDED_LATE
    kernel = _kernel(stream.device, "add_product", _SUMS, **_added(shape, matrix.tile))
    cut = _Cut(stream.device, kernel, shape, matrix, n_rows, programmatic)
    launch(
        stream, cut.config, kernel,
        matrix.tiles, x, h, n_rows, cut.group, matrix.n_out, cut.n_blocks, cut.slice_blocks,
        cut.n_slices,
    )  # fmt: skip


def gate_up_rows(
    stream: Stream,
    gate: TiledMatrix,
    up: TiledMatrix,
    h: Buffer,
    gain: Buffer,
    out: Buffer,
    n_rows: int,
    eps: float,
    *,
    programmatic: bool = False,
) -> None:
    """``out[r] = silu(gate x) * (up x)``, x the norm of ``h[r]``.

    Parameters
    ----------
    gate, up : TiledMatrix
        [n_ff, width] each, in any two formats
    h, gain : Buffer
        f32[≥ n_rows, width] and f32[width]
    out : Buffer
        f32[≥ n_rows, n_ff]
    """
    if (gate.n_out, gate.n_in) != (up.n_out, up.n_in):
        raise ArgumentError(
            f"gate_up_rows: gate is [{gate.n_out}, {gate.n_in}], up [{up.n_out}, {up.n_in}]",
            kernel="gate_up_rows", name="up", expected="the shape of gate", got="another",
        )  # fmt: skip
    _need("gate_up_rows", "h", h, n_rows * gate.n_in)
    _need("gate_up_rows", "gain", gain, gate.n_in)
    _need("gate_up_rows", "out", out, n_rows * gate.n_out)
    kernel = _kernel(stream.device, "gate_up_rows", gate=gate.tile, up=up.tile)
    cut = _Cut(stream.device, kernel, _GATED, gate, n_rows, programmatic)
    launch(
        stream, cut.config, kernel,
        gate.tiles, up.tiles, h, gain, out, n_rows, cut.group, gate.n_out, cut.n_blocks,
        cut.slice_blocks, cut.n_slices, cut.share, eps,
    )  # fmt: skip


def logits_rows(
    stream: Stream,
    matrix: TiledMatrix,
    h: Buffer,
    gain: Buffer,
    logits: Buffer,
    values: Buffer,
    ids: Buffer,
    n_rows: int,
    eps: float,
    *,
    sums: Buffer | None = None,
    programmatic: bool = False,
) -> None:
    """Logits of the normed rows, and the best logit of each tile of 32.

    Parameters
    ----------
    matrix : TiledMatrix
        [n_vocab, width]
    h, gain : Buffer
        f32[≥ n_rows, width] and f32[width]
    logits : Buffer
        f32[≥ n_rows, n_vocab]
    values, ids : Buffer
        f32 and i32 [≥ n_rows, n_tiles], for :func:`pick_rows`
    sums : Buffer, optional
        f32[≥ n_rows, n_tiles]: what a probability needs
    """
    _need("logits_rows", "h", h, n_rows * matrix.n_in)
    _need("logits_rows", "gain", gain, matrix.n_in)
    _need("logits_rows", "logits", logits, n_rows * matrix.n_out)
    for name, buffer in (("values", values), ("ids", ids), ("sums", sums)):
        if buffer is not None:
            _need("logits_rows", name, buffer, n_rows * matrix.n_tiles)
    n_blocks = matrix.n_in // 32
    cuda = stream.device.kind == "cuda"
    n_warps = _TILES_AT_ONCE if cuda else 1
    floats = matrix.n_in + 4 + n_blocks + 33 * n_warps
    group = max(1, min(n_rows, _SHARED_BYTES // (4 * floats), 2 * _ROWS_AT_ONCE))
    config = LaunchConfig(
        (-(-matrix.n_tiles // n_warps), -(-n_rows // group), 1), (32 * n_warps, 1, 1),
        4 * floats * group, programmatic=starts_early(stream.device, programmatic),
    )  # fmt: skip
    launch(
        stream, config, _kernel(stream.device, "logits_rows", tile=matrix.tile),
        matrix.tiles, h, gain, logits, values, ids, sums, n_rows, group, matrix.n_out,
        n_blocks, 1.0 / matrix.n_in, eps,
    )  # fmt: skip


def pick_rows(
    stream: Stream,
    values: Buffer,
    ids: Buffer,
    out: Buffer,
    n_rows: int,
    n_tiles: int,
    *,
    sums: Buffer | None = None,
    probability: Buffer | None = None,
    programmatic: bool = False,
) -> None:
    """``out[r] =`` lowest id of the greatest logit of row r; ``0x7FFFFFFF`` if all are NaN.

    Parameters
    ----------
    values, ids, sums : Buffer
        As :func:`logits_rows` left them.
    out : Buffer
        i32[≥ n_rows] (or u32)
    probability : Buffer, optional
        f32[≥ n_rows]: softmax probability of that id, NaN where any logit is NaN; needs ``sums``.
    """
    _need("pick_rows", "values", values, n_rows * n_tiles)
    _need("pick_rows", "ids", ids, n_rows * n_tiles)
    _need("pick_rows", "out", out, n_rows)
    if probability is not None:
        _need("pick_rows", "probability", probability, n_rows)
        if sums is None:
            raise ArgumentError(
                "pick_rows: a probability needs the sums that logits_rows leaves",
                kernel="pick_rows", name="sums", expected="a buffer", got="None",
            )  # fmt: skip
        _need("pick_rows", "sums", sums, n_rows * n_tiles)
    early = starts_early(stream.device, programmatic)
    launch(
        stream, LaunchConfig((n_rows, 1, 1), (256, 1, 1), programmatic=early),
        _kernel(stream.device, "pick_rows"),
        values, ids, sums, out.view(0, (n_rows,), "i4"), probability, n_tiles,
    )  # fmt: skip


def prepare(device: Device, formats: Iterable[str]) -> None:
    """Load the kernels for weights of these formats, one compilation per source.

    ``qkv_rows``, which depends on the formats of a plane too, and ``gate_up_rows`` of two formats
    are compiled at their first launch, which cannot be in a capture.
    """
    tiles = [TILE_FORMATS[f].tile for f in formats]
    registry.kernels(
        device,
        [
            *((name, {"tile": t}) for name in ("embed_rows", "logits_rows") for t in tiles),
            *(("add_product", one) for one in _SUMS if one["tile"] in tiles),
            *(("gate_up_rows", {"gate": t, "up": t}) for t in tiles),
            ("pick_rows", {}),
        ],
    )  # fmt: skip


class _Cut:
    """How a product is cut for a launch; bits depend on ``slice_blocks`` alone."""

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        shape: _Shape,
        matrix: TiledMatrix,
        n_rows: int,
        programmatic: bool,
    ) -> None:
        self.n_blocks = matrix.n_in // 32
        self.share = 1.0 / matrix.n_in  # of a column in a mean
        self.slice_blocks = slice_blocks(matrix.n_in, shape.n_slices, shape.at_once)
        n_slices = self.n_slices = -(-self.n_blocks // self.slice_blocks)
        floats = shape.row_floats + n_slices * shape.slice_floats
        # A slice per warp where threads run side by side; on the host each costs its barriers.
        threads = 32
        if device.kind == "cuda":
            threads = min(32 * n_slices, kernel.attributes["max_threads_per_block"] // 32 * 32)
        blocks = -(-matrix.n_out // shape.n_outs)
        most_rows = _SHARED_BYTES // (4 * floats)
        self.group = max(1, min(n_rows, most_rows))
        if device.kind == "cuda":
            # A block takes its rows one after the other, some at a time: where multiprocessors have
            # nothing to do, other blocks read the same weights for some of them.
            rows = _ROWS_AT_ONCE // shape.at_once
            most = device.limits.n_sms * max(1, _BUSY_THREADS // threads)
            turns = -(-n_rows // rows)
            if turns <= _FEW_TURNS and starts_early(device, programmatic):
                most //= 2  # a predecessor is there still
            few = -(-turns // max(1, most // blocks)) * rows
            self.group = max(1, min(most_rows // rows * rows, few, n_rows))
        self.config = LaunchConfig(
            (blocks, -(-n_rows // self.group), 1),
            (threads, 1, 1),
            4 * floats * self.group,
            programmatic=starts_early(device, programmatic),
        )


def _kernel(
    device: Device, name: str, shapes: Sequence[dict[str, str]] = (), **template: str
) -> Kernel:
    """Give a kernel, loaded at its first use with those of ``shapes`` for the same tiles.

    So a launch of another shape finds its kernel loaded in a capture.
    """
    key = (name, *template.values())
    found: Kernel | None = device.memo.get(key)
    if found is None:
        wanted = [template]
        if not registry.loaded(device, name, **template):
            wanted += [s for s in shapes if s["tile"] == template["tile"]]
        found = device.memo[key] = registry.kernels(device, [(name, t) for t in wanted])[0]
    return found


def _need(kernel: str, name: str, buffer: Buffer, n_elements: int) -> None:
    _need_bytes(kernel, name, buffer, 4 * n_elements)


def _need_bytes(kernel: str, name: str, buffer: Buffer, n_bytes: int) -> None:
    if buffer.n_bytes < n_bytes:
        raise ArgumentError(
            f"{kernel}: {name} holds {buffer.n_bytes} bytes, {n_bytes} are needed for these "
            "rows; take a larger workspace",
            kernel=kernel,
            name=name,
            expected=f">= {n_bytes} bytes",
            got=f"{buffer.n_bytes} bytes",
        )
