"""Drafters: leaving the target early, and looking up what followed before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..cache.planes import Planes
from ..closing import Closing
from ..errors import MemraError
from .chain import DraftChain
from .io import ChainIo
from .ngram import NgramIndex

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = ["LayerRange", "NgramDrafter", "early_exit_chain"]


class LayerRange(Protocol):
    """The first layers of a model, with its output layer behind them."""

    def __call__(
        self,
        stream: Stream,
        n_rows: int,
        *,
        tokens: Buffer,
        positions: Buffer,
        argmax: Buffer | None,
        probability: Buffer | None,
    ) -> None:
        """Launch them over rows: token ids from ``tokens``, position of row 0 from ``positions``.

        Appends to the draft's planes, moves no counter. ``argmax`` None leaves the output layer
        out: only the planes are wanted.
        """
        ...


def early_exit_chain(
    stream: Stream,
    layers: LayerRange,
    io: ChainIo,
    planes: Planes,
    k_max: int,
    *,
    tokens: Buffer,
    p_min: float | None = None,
    token_map: Buffer | None = None,
    name: str = "early exit",
) -> DraftChain:
    """Capture a chain that drafts with the target's first layers, on planes of its own.

    Parameters
    ----------
    layers : LayerRange
    io, planes, k_max, p_min, token_map, name
        As in :meth:`DraftChain.capture`. The planes are the chain's own: the target writes the
        same rows to its own at a time of its own, and a rejected draft must not disturb it.
    tokens : Buffer
        i32 or u32 [n], n the most rows of one launch of ``layers``; known tokens are put there to
        fill the planes.
    """

    def body(stream: Stream) -> None:
        layers(
            stream, 1, tokens=io.tok_d, positions=io.pos_d, argmax=io.tok_d,
            probability=io.p_d if p_min is not None else None,
        )  # fmt: skip

    def fill(stream: Stream, known: Sequence[int], position: int) -> None:
        if position != planes.len:
            raise MemraError(f"{name}: fill at {position}, but the planes hold {planes.len} rows")
        for at in range(0, len(known), tokens.shape[0]):
            part = np.asarray(known[at : at + tokens.shape[0]], tokens.dtype)
            planes.prepare(stream, len(part))
            tokens.view(0, part.shape, part.dtype).copy_from(stream, part)
            layers(
                stream, len(part), tokens=tokens, positions=first_length, argmax=None,
                probability=None,
            )  # fmt: skip
            planes.advance(stream, len(part))

    first_length = planes.counters.view(0, (1,), np.int32)
    return DraftChain.capture(
        stream, body, io, planes, k_max, fill=fill, p_min=p_min, token_map=token_map, name=name
    )


class NgramDrafter(Closing):
    """Drafts what followed the last tokens the last time they were seen; no model, no planes.

    Attributes
    ----------
    io : ChainIo
    k_max : int
    index : NgramIndex
    """

    def __init__(
        self, device: Device, k_max: int, n_vocab: int, *, longest: int = 3, shortest: int = 1
    ):
        self.io, self.k_max = ChainIo(device, 1, k_max, n_vocab), k_max
        self.index = NgramIndex(longest, shortest)

    def propose(self, stream: Stream, committed: Sequence[int], k: int) -> int:
        """Leave the pending token and up to ``k`` looked-up tokens in ``io.draft_d``."""
        self.index.extend(committed[len(self.index) :])
        drafts = self.index.propose(min(k, self.k_max))
        self.io.begin(stream, committed[-1:], len(committed) - 1, drafts)
        return len(drafts)

    def settle(self, stream: Stream, k: int, accepted: int) -> None:
        """Nothing to drop: there are no planes."""

    def cancel(self, stream: Stream, k: int) -> None:
        """Nothing to drop: there are no planes."""

    def describe(self) -> dict[str, Any]:
        """Return what is known so far."""
        return {"name": "ngram", "tokens": len(self.index), "longest": self.index.longest}

    def close(self) -> None:
        """Free the buffers."""
        self.io.close()
