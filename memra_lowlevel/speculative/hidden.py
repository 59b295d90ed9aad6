"""The hidden states of a sequence by position: what a draft head reads besides its token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .. import expect
from ..closing import Closing
from ..errors import PlaneError
from ..kernels import speculative as kernels
from ..runtime import Buffer

if TYPE_CHECKING:
    from ..runtime import Device, Stream

__all__ = ["HiddenRows"]


class HiddenRows(Closing):
    """The last hidden state of a model at each position, for a head that reads the one before.

    The target keeps the states of its rows in every pass, the head that of each guess. Both find
    their place by a position on the device, so that what a pass knows better overwrites what was
    guessed, whichever drafts were right: nothing is selected and nothing is copied back. A pass of
    the target keeps first and takes then, for each of its rows reads the one before it.

    Parameters
    ----------
    device : Device
    stream : Stream
        Where row 0 is cleared.
    n_positions, width : int
        Positions of the sequence, at least as many as the target's planes have rows; and elements
        of a state. Of a position beyond nothing is kept, and NaN is taken.
    eps : float
        Added to the mean square before the root.

    Attributes
    ----------
    rows : Buffer
        f32[n_positions + 1, width]. Row p + 1 is the state at position p over the root of its mean
        square; row 0, before the first position, is zero.
    """

    def __init__(
        self, device: Device, stream: Stream, n_positions: int, width: int, *, eps: float = 1e-5
    ):
        n_positions = expect.integer("HiddenRows: n_positions", n_positions)
        width = expect.integer("HiddenRows: width", width)
        if isinstance(eps, bool) or not isinstance(eps, (int, float, np.floating)):
            raise expect.refusal("HiddenRows: eps", eps, "a number")
        if n_positions < 1 or width < 1 or not 0 <= eps < math.inf:
            raise PlaneError(
                f"HiddenRows: n_positions {n_positions} and width {width} must be at least 1, and "
                f"eps {eps} finite and not negative"
            )
        self.eps = eps
        self.rows: Buffer = device.zeros((n_positions + 1, width), np.float32, stream, "hidden")

    @property
    def n_positions(self) -> int:
        """Positions that a state can be kept for."""
        return int(self.rows.shape[0]) - 1

    def keep(
        self,
        stream: Stream,
        h: Buffer,
        positions: Buffer,
        n_rows: int,
        *,
        block: Buffer | None = None,
        programmatic: bool = False,
    ) -> None:
        """Keep the states of rows; those of positions outside are dropped.

        Parameters
        ----------
        h : Buffer
            f32[≥ n_rows, width], behind the last layer and before the output norm.
        positions : Buffer
            i32[1]: position of row 0, read on the device.
        block : Buffer, optional
            ``ChainIo.block``, for a step of a chain: one that is fed a token that was known keeps
            nothing, for the target has seen that token.
        programmatic : bool
            Start while the kernel before still runs, on GPUs that can.
        """
        for name, buffer in (("h", h), ("positions", positions), ("block", block)):
            if buffer is not None or name != "block":
                expect.kind(f"HiddenRows.keep: {name}", buffer, Buffer, "a buffer of the device")
        kernels.keep_hidden(
            stream, h, self.rows, positions, n_rows, self.eps, block=block,
            programmatic=programmatic,
        )  # fmt: skip

    def take(
        self,
        stream: Stream,
        positions: Buffer,
        out: Buffer,
        n_rows: int,
        *,
        programmatic: bool = False,
    ) -> None:
        """Copy the states, as they are kept, one position before those of rows.

        NaN for a position outside.

        Parameters
        ----------
        positions : Buffer
            i32[1]: position of row 0, read on the device.
        out : Buffer
            f32[≥ n_rows, width]
        """
        for name, buffer in (("positions", positions), ("out", out)):
            expect.kind(f"HiddenRows.take: {name}", buffer, Buffer, "a buffer of the device")
        kernels.take_hidden(stream, self.rows, positions, out, n_rows, programmatic=programmatic)

    def close(self) -> None:
        """Free the buffer; idempotent."""
        self.rows.close()
