"""Launches of the kernels of a draft chain (``cuda_src/speculative``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import expect
from ..errors import ArgumentError
from ..runtime.launch import LaunchConfig, launch
from . import registry
from .early import starts_early
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = [
    "CHAIN_WORDS",
    "STATE_WORDS",
    "chain_advance",
    "keep_hidden",
    "prepare",
    "round_advance",
    "take_hidden",
]

CHAIN_WORDS = 5
"""Words of a chain's block before its feed: token, position, step, n_feed, bad."""

STATE_WORDS = 7
"""Words of a loop's state: tokens, wanted, rounds, position, both ends, reason."""

registry.register(
    KernelSpec(
        name="chain_advance",
        source="speculative/chain.cu",
        entry="chain_advance",
        oracle="memra_lowlevel.reference.speculative:chain_advance",
        tolerance=Tolerance("bitwise", 0.0, "integer arithmetic"),
        edges=(
            "known token fed", "first draft", "last draft", "past the last draft",
            "sentinel token", "token at the edge of the vocabulary", "no planes",
            "more planes than threads", "vocabulary of its own",
        ),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="round_advance",
        source="speculative/loop.cu",
        entry="round_advance",
        oracle="memra_lowlevel.reference.speculative:round_advance",
        tolerance=Tolerance("bitwise", 0.0, "integer arithmetic"),
        edges=(
            "no draft right", "all drafts right", "end token accepted", "end token of the target",
            "enough tokens", "no room in the target", "no room in the draft", "sentinel token",
            "bad draft", "more planes than threads", "the target's pass wrote the draft's rows",
        ),
        hot=True,
    ),
    KernelSpec(
        name="keep_hidden",
        source="speculative/hidden.cu",
        entry="keep_hidden",
        oracle="memra_lowlevel.reference.speculative:keep_hidden",
        tolerance=Tolerance("relative", 2e-6, "f32 sum of squares, root and reciprocal"),
        edges=("one row", "several rows", "narrow and wide rows", "a row of zeros", "a row of NaN",
               "before the first row", "past the last row", "a known token"),
        hot=True,
        same_bits=True,
        pdl="waits",
    ),
    KernelSpec(
        name="take_hidden",
        source="speculative/hidden.cu",
        entry="take_hidden",
        oracle="memra_lowlevel.reference.speculative:take_hidden",
        tolerance=Tolerance("bitwise", 0.0, "a copy"),
        edges=("one row", "several rows", "before the first row", "past the last row"),
        hot=True,
        same_bits=True,
        pdl="waits",
    ),
)  # fmt: skip

_HIDDEN_THREADS = 128


def prepare(device: Device) -> None:
    """Load the kernels, so that later calls may be captured."""
    registry.kernels(
        device,
        [(name, {}) for name in ("chain_advance", "round_advance", "keep_hidden", "take_hidden")],
    )


def chain_advance(
    stream: Stream,
    block: Buffer,
    drafts: Buffer,
    counters: Buffer | None,
    *,
    n_vocab: int,
    k_max: int,
    token_map: Buffer | None = None,
) -> None:
    """Store a draft, put the next token in place, and move step, position and counters by one.

    Parameters
    ----------
    stream : Stream
    block : Buffer
        i32: token, position, step, n_feed, bad, then the known tokens.
    drafts : Buffer
        i32 ``[k_max + 1]``: the pending token, then the drafts.
    counters : Buffer or None
        i32, the lengths of the draft's planes.
    n_vocab, k_max : int
    token_map : Buffer, optional
        i32 ``[n_vocab]``: the target's token for each token of the draft, where those differ.
    """
    if token_map is not None and token_map.n_bytes != 4 * n_vocab:
        raise ArgumentError(
            f"chain_advance: a token map of {token_map.n_bytes} bytes for {n_vocab} tokens",
            kernel="chain_advance",
            name="token_map",
            expected=f"{4 * n_vocab} bytes",
            got=f"{token_map.n_bytes} bytes",
        )
    if block.n_bytes < 4 * (CHAIN_WORDS + 1) or drafts.n_bytes < 4 * (k_max + 1):
        raise ArgumentError(
            f"chain_advance: a block of {block.n_bytes} and drafts of {drafts.n_bytes} bytes are "
            f"too small for k_max {k_max}",
            kernel="chain_advance",
            name="drafts",
            expected=f">= {4 * (k_max + 1)} bytes",
            got=f"{drafts.n_bytes} bytes",
        )
    n = counters.n_bytes // 4 if counters is not None else 0
    launch(
        stream,
        LaunchConfig(1, 32),
        registry.kernel(stream.device, "chain_advance"),
        block,
        drafts,
        counters,
        n,
        token_map,
        n_vocab,
        k_max,
    )


def round_advance(
    stream: Stream,
    block: Buffer,
    drafts: Buffer,
    argmax: Buffer,
    state: Buffer,
    target: Buffer,
    draft: Buffer,
    end_tokens: Buffer,
    tokens: Buffer,
    accepted: Buffer,
    *,
    k: int,
    n_vocab: int,
    goes_on: int,
    lags: int,
    followed: bool = False,
) -> None:
    """Accept the drafts of a round, commit its tokens, and set up the next round, or none.

    Parameters
    ----------
    stream : Stream
    block, drafts : Buffer
        As in :func:`chain_advance`.
    argmax : Buffer
        i32 ``[>= k + 1]``: the target's tokens.
    state : Buffer
        i32 ``[STATE_WORDS]``
    target, draft : Buffer
        i32: counters of the planes; the target's were not moved by the round, the draft's by k.
    end_tokens : Buffer
        i32 ``[n_end]``; one of -1 for none.
    tokens, accepted : Buffer
        i32 ``[wanted + k]`` and ``[wanted]``
    k, n_vocab : int
    goes_on, lags : int
        Conditions, of :meth:`Graph.condition`.
    followed : bool
        The target's pass wrote the draft's rows too, so the draft never lags.
    """
    for name, buffer, words in (
        ("block", block, CHAIN_WORDS + 2), ("drafts", drafts, k + 1), ("argmax", argmax, k + 1),
        ("state", state, STATE_WORDS), ("tokens", tokens, k + 1), ("accepted", accepted, 1),
    ):  # fmt: skip
        if buffer.n_bytes < 4 * words:
            raise ArgumentError(
                f"round_advance: {name} holds {buffer.n_bytes} bytes, k = {k} needs {4 * words}",
                kernel="round_advance", name=name, expected=f">= {4 * words} bytes",
                got=f"{buffer.n_bytes} bytes",
            )  # fmt: skip
    launch(
        stream, LaunchConfig(1, 32), registry.kernel(stream.device, "round_advance"),
        block, drafts, argmax, state, target, target.n_bytes // 4, draft, draft.n_bytes // 4,
        end_tokens, end_tokens.n_bytes // 4, tokens, accepted, k, n_vocab, int(followed), goes_on,
        lags,
    )  # fmt: skip


def keep_hidden(
    stream: Stream,
    h: Buffer,
    kept: Buffer,
    positions: Buffer,
    n_rows: int,
    eps: float,
    *,
    block: Buffer | None = None,
    programmatic: bool = False,
) -> None:
    """``kept[positions + 1 + r] = h[r] / sqrt(mean(h[r]^2) + eps)``; a row outside is dropped.

    Parameters
    ----------
    h : Buffer
        f32[≥ n_rows, width]
    kept : Buffer
        f32[n_kept, width]; its width is that of ``h``.
    positions : Buffer
        i32[1]: position of row 0, read on the device
    block : Buffer, optional
        Block of a chain: a step that is fed a known token keeps nothing.
    programmatic : bool
        Start while the predecessor still runs, on GPUs that can.
    """
    n_kept, width = _kept_shape("keep_hidden", kept, positions)
    n_rows = _rows("keep_hidden", "h", h, n_rows, width)
    if block is not None and block.n_bytes < 4 * CHAIN_WORDS:
        raise ArgumentError(
            f"keep_hidden: a block of {block.n_bytes} bytes is none of a chain; give ChainIo.block",
            kernel="keep_hidden", name="block", expected=f">= {4 * CHAIN_WORDS} bytes",
            got=f"{block.n_bytes} bytes",
        )  # fmt: skip
    launch(
        stream,
        _hidden_config(stream, n_rows, programmatic),
        registry.kernel(stream.device, "keep_hidden"),
        h, kept, positions, block, n_kept, width, 1.0 / width, eps,
    )  # fmt: skip


def take_hidden(
    stream: Stream,
    kept: Buffer,
    positions: Buffer,
    out: Buffer,
    n_rows: int,
    *,
    programmatic: bool = False,
) -> None:
    """``out[r] = kept[positions + r]``, the state one position before; NaN where that is outside.

    Parameters
    ----------
    kept : Buffer
        f32[n_kept, width]
    positions : Buffer
        i32[1]: position of row 0, read on the device
    out : Buffer
        f32[≥ n_rows, width]
    programmatic : bool
        Start while the predecessor still runs, on GPUs that can.
    """
    n_kept, width = _kept_shape("take_hidden", kept, positions)
    n_rows = _rows("take_hidden", "out", out, n_rows, width)
    if kept.ptr < out.ptr + out.n_bytes and out.ptr < kept.ptr + kept.n_bytes:
        raise ArgumentError(
            "take_hidden: out lies within what is kept, which other rows are read from; give "
            "another buffer",
            kernel="take_hidden", name="out", expected="memory apart from kept", got="part of it",
        )  # fmt: skip
    launch(
        stream,
        _hidden_config(stream, n_rows, programmatic),
        registry.kernel(stream.device, "take_hidden"),
        kept, positions, out, n_kept, width,
    )  # fmt: skip


def _hidden_config(stream: Stream, n_rows: int, programmatic: bool) -> LaunchConfig:
    early = starts_early(stream.device, programmatic)
    return LaunchConfig(n_rows, _HIDDEN_THREADS, programmatic=early)


def _kept_shape(kernel: str, kept: Buffer, positions: Buffer) -> tuple[int, int]:
    if positions.n_bytes < 4:
        raise ArgumentError(
            f"{kernel}: positions holds {positions.n_bytes} bytes; give an int32 on the device",
            kernel=kernel, name="positions", expected=">= 4 bytes",
            got=f"{positions.n_bytes} bytes",
        )  # fmt: skip
    if kept.dtype != "f4" or len(kept.shape) != 2:
        raise ArgumentError(
            f"{kernel}: kept is {kept.dtype}{list(kept.shape)}; it must be f32 [n_kept, width]",
            kernel=kernel, name="kept", expected="float32 [n_kept, width]",
            got=f"{kept.dtype}{list(kept.shape)}",
        )  # fmt: skip
    return kept.shape[0], kept.shape[1]


def _rows(kernel: str, name: str, rows: Buffer, n_rows: int, width: int) -> int:
    n_rows = expect.integer(f"{kernel}: n_rows", n_rows)
    if len(rows.shape) == 2 and rows.shape[1] != width:
        raise ArgumentError(
            f"{kernel}: {name} has rows of {rows.shape[1]}, those that are kept have {width}",
            kernel=kernel, name=name, expected=f"float32 [n, {width}]",
            got=f"{rows.dtype}{list(rows.shape)}",
        )  # fmt: skip
    if n_rows < 1 or rows.n_bytes < 4 * n_rows * width:
        raise ArgumentError(
            f"{kernel}: {name} holds {rows.n_bytes} bytes, {n_rows} rows of {width} f32 need "
            f"{4 * n_rows * width}; give 1 row or more, and a buffer that holds them",
            kernel=kernel, name=name, expected=f">= {4 * n_rows * width} bytes",
            got=f"{rows.n_bytes} bytes",
        )  # fmt: skip
    return n_rows
