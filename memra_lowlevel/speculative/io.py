"""The buffers through which a draft chain talks to itself, to the verify step and to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..closing import Closing
from ..errors import CapacityExceeded, MemraError, TokenError

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, PinnedBuffer, Stream

__all__ = ["ChainIo"]

# Words of the block, shared with cuda_src/speculative/chain.cu.
_TOKEN, _POS, _STEP, _N_FEED, _BAD, _FEED = range(6)


class ChainIo(Closing):
    """Everything of a chain that has a fixed address, in one block of int32 words.

    =====================  ============================================================
    word                   content
    =====================  ============================================================
    0                      ``tok_d`` u32: the token that the next draft step embeds
    1                      ``pos_d`` i32: its position
    2                      steps done in this round
    3                      known tokens that the round begins with
    4                      index of the first draft outside the vocabulary, or -1
    5 … 5 + n_feed_max     those known tokens: the lag, then the pending token
    …                      ``draft_d`` i32[k_max + 1]: the pending token, then the drafts
    =====================  ============================================================

    Apart from it: ``hidden_d`` f32[width] and ``p_d`` f32[1]. The host writes a round's first
    words with one copy from pinned memory, and reads the block with one copy into pinned memory.

    Attributes
    ----------
    tok_d, pos_d, draft_d, hidden_d, p_d : Buffer
    block : Buffer
        i32, the whole block.
    host : PinnedBuffer
        Where :meth:`download` puts the block.
    k_max, n_feed_max, n_vocab : int
    """

    def __init__(
        self, device: Device, width: int, k_max: int, n_vocab: int, *, n_feed_max: int = 8
    ):
        if width < 1 or k_max < 1 or n_vocab < 1 or n_feed_max < 1:
            raise MemraError(
                f"ChainIo: width {width}, k_max {k_max}, n_vocab {n_vocab} and n_feed_max "
                f"{n_feed_max} must all be at least 1"
            )
        self.device = device
        self.k_max, self.n_vocab, self.n_feed_max = k_max, n_vocab, n_feed_max
        self._draft = _FEED + n_feed_max
        words = self._draft + k_max + 1
        self._arena = device.arena(4 * words + 4 * width + 1024, name="chain io")
        self.block: Buffer = self._arena.take((words,), np.int32, name="io")
        self.hidden_d: Buffer = self._arena.take((width,), np.float32, name="hidden_d")
        self.p_d: Buffer = self._arena.take((1,), np.float32, name="p_d")
        self.tok_d = self.block.view(4 * _TOKEN, (1,), np.uint32)
        self.pos_d = self.block.view(4 * _POS, (1,), np.int32)
        self.draft_d = self.block.view(4 * self._draft, (k_max + 1,), np.int32)
        self._head = self.block.view(0, (self._draft + 1,), np.int32)
        self._up: PinnedBuffer = device.pinned((words,), np.int32)
        self._up.array[:] = 0
        self._up_head = self._up.view(0, (self._draft + 1,), np.int32)
        self.host: PinnedBuffer = device.pinned((words,), np.int32)
        self.p_host: PinnedBuffer = device.pinned((1,), np.float32)

    def begin(
        self, stream: Stream, feed: Sequence[int], position: int, drafts: Sequence[int] = ()
    ) -> None:
        """Start a round: one copy of a few words, ordered on ``stream``.

        The work of the round before must have finished (its results were read).

        Parameters
        ----------
        feed : sequence of int
            Known tokens that the draft has not seen, the pending token last.
        position : int
            Position of the first of them.
        drafts : sequence of int
            Drafts that are known already (a look-up drafter); they land behind the pending token.
        """
        if not 1 <= len(feed) <= self.n_feed_max:
            raise CapacityExceeded(
                f"ChainIo.begin: {len(feed)} known tokens do not fit in the {self.n_feed_max} "
                "words of the feed; fill the draft's planes first"
            )
        if len(drafts) > self.k_max:
            raise CapacityExceeded(f"ChainIo.begin: {len(drafts)} drafts, k_max {self.k_max}")
        self.check_tokens(feed)
        self.check_tokens(drafts)
        up = self._up.array
        up[:_FEED] = (feed[0], position, 0, len(feed), -1)
        up[_FEED : _FEED + len(feed)] = feed
        up[self._draft] = feed[-1]
        if drafts:
            up[self._draft + 1 : self._draft + 1 + len(drafts)] = drafts
            self.block.copy_from(stream, self._up)
        else:
            self._head.copy_from(stream, self._up_head)

    def check_tokens(self, tokens: Sequence[int], whose: str = "token") -> None:
        """Refuse token ids outside the vocabulary before they can reach an embedding."""
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise TokenError(
                    f"{whose} {token} is outside the vocabulary of {self.n_vocab}; {_cause(token)}"
                )

    def download(self, stream: Stream) -> None:
        """Copy the block to :attr:`host`, asynchronously on ``stream``; legal under capture."""
        self.block.copy_to(stream, self.host)

    def drafts(self, k: int, whose: str = "the chain") -> list[int]:
        """Return the first ``k`` drafts of the last downloaded block; ``whose`` is for messages.

        Raises
        ------
        TokenError
            A draft step left no token of the vocabulary: all its logits were NaN, or its body
            wrote something else into ``tok_d``.
        """
        bad = int(self.host.array[_BAD])
        if 0 <= bad <= k:
            raise TokenError(
                f"draft {bad} of {k} by {whose} is no token of the vocabulary of {self.n_vocab}: "
                "either all logits of that draft step were NaN (an overflow in the draft model, or "
                "a damaged plane), or its body left another number in io.tok_d. Nothing was "
                "accepted and no counter moved"
            )
        at = self._draft + 1
        return [int(t) for t in self.host.array[at : at + k]]

    def close(self) -> None:
        """Free the buffers; idempotent."""
        for buffer in (self._up, self.host, self.p_host, self._arena):
            buffer.close()


def _cause(token: int) -> str:
    if token == 0x7FFFFFFF:
        return (
            "it is the sentinel of a row whose logits are all NaN: look for an overflow in the "
            "model or a damaged plane"
        )
    if token < 0:
        return (
            "an argmax that finds nothing but NaN often gives such a number: look for an overflow "
            "in the model or a damaged plane"
        )
    return "check the tokenizer, and the width of the output layer, against the model"
