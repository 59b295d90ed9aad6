"""One round: draft, verify on the target, accept, rewind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .. import expect
from ..cache.planes import Planes
from ..closing import Closing
from ..errors import CapacityExceeded, ClosedError, MemraError
from . import accept
from .chain import DraftChain
from .io import ChainIo
from .stats import SpecStats

if TYPE_CHECKING:
    from ..graph import GraphExec
    from ..runtime import Buffer, Stream

__all__ = ["Drafter", "RoundResult", "SpecRound", "Target"]


class Target(Protocol):
    """What a round needs of the model that decides.

    Attributes
    ----------
    planes : Planes
        The planes that ``forward`` appends to.
    """

    planes: Planes

    def forward(self, stream: Stream, tokens: Buffer, n_rows: int, argmax: Buffer) -> None:
        """Launch the model over ``n_rows`` rows.

        Row r embeds ``tokens[r]`` (i32 token ids on the device) at position ``planes.len + r``,
        read from the planes' counters on the device; its greedy token goes to ``argmax[r]``.
        Appends to the planes, moves no counter, allocates nothing. Where a chain follows these
        planes, it writes the chain's rows of the same tokens as well.
        """
        ...


class Drafter(Protocol):
    """What a round needs of a drafter: :class:`DraftChain` is one, a look-up another."""

    io: ChainIo
    k_max: int

    def propose(self, stream: Stream, committed: Sequence[int], k: int) -> int:
        """Leave the pending token and up to ``k`` drafts in ``io.draft_d``; return how many."""
        ...

    def settle(self, stream: Stream, k: int, accepted: int) -> None:
        """Take note that of ``k`` drafts the first ``accepted`` were right."""
        ...

    def cancel(self, stream: Stream, k: int) -> None:
        """Forget a round of ``k`` drafts, as if it had not begun."""
        ...


@dataclass(frozen=True)
class RoundResult:
    """What a round committed.

    Attributes
    ----------
    tokens : tuple of int
        New committed tokens: the accepted drafts and the target's own token behind them.
    accepted : int
    drafted : int
    rebased : bool
        Whether a ring of the target was rebased between the drafts and their verification.
    """

    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    rebased: bool = False


class SpecRound(Closing):
    """Rounds of greedy speculation over one sequence.

    The verify step over n rows is captured once per n and then replayed; it reads the drafts where
    the chain left them. The newest committed token is always *pending*: no plane of the target has
    its row yet.

    Parameters
    ----------
    target : Target
        Primed with all tokens but the last: ``target.planes.len == len(tokens) - 1``.
    chain : Drafter
    k : int
        Drafts per round; a round may ask for another number.
    tokens : sequence of int
        The committed tokens so far, the pending one last.
    sections : callable, optional
        ``sections(name)`` gives a context manager around ``draft``, ``rebase``,
        ``capture verify N``, ``verify N`` and ``rewind``; used to count driver calls from outside.

    Attributes
    ----------
    tokens : list of int
        All committed tokens.
    stats : SpecStats

    Raises
    ------
    MemraError
        ``k`` does not fit the chain, or the chain follows another target; a target or a chain that
        is none; a token that is none.
    """

    def __init__(
        self,
        target: Target,
        chain: Drafter,
        k: int,
        tokens: Sequence[int] = (),
        *,
        sections: Any = None,
    ):
        for what, given, names in (
            ("target", target, ("planes", "forward")),
            ("chain", chain, ("io", "k_max", "propose", "settle", "cancel")),
        ):
            if not all(hasattr(given, name) for name in names):
                raise expect.refusal(
                    f"SpecRound: {what}", given, f"an object with {', '.join(names)}"
                )
        if isinstance(chain, DraftChain):
            chain.check_target(target.planes)
        k = expect.integer("SpecRound: k", k)
        if not 0 <= k <= chain.k_max:
            raise MemraError(f"SpecRound: k {k} must lie in 0..{chain.k_max}, the chain's k_max")
        self.target, self.chain, self.k = target, chain, k
        self.tokens = [expect.integer("SpecRound: a token", t) for t in tokens]
        chain.io.check_tokens(self.tokens, "SpecRound: token")
        self.stats = SpecStats()
        self._section = sections or (lambda name: nullcontext())
        device = chain.io.device
        self._arena = device.arena(4 * (chain.k_max + 1) + 256, name="verify")
        self.argmax_d: Buffer = self._arena.take((chain.k_max + 1,), np.int32, name="argmax_d")
        self.argmax = device.pinned((chain.k_max + 1,), np.int32)
        self._execs: dict[int, GraphExec] = {}

    @property
    def execs(self) -> dict[int, GraphExec]:
        """The captured verify steps by number of rows."""
        return dict(self._execs)

    def step(self, stream: Stream, k: int | None = None) -> RoundResult:
        """Run one round.

        Parameters
        ----------
        stream : Stream
        k : int, optional
            Drafts to ask for in this round, zero included; fewer are used near the end of the
            planes.

        Raises
        ------
        CapacityExceeded
            The target has no room for another row.
        TokenError
            A row of logits was all NaN; lengths are as before the round.
        """
        planes, chain = self.target.planes, self.chain
        if self.argmax.closed:
            raise ClosedError("SpecRound.step: the round was closed; make a new one")
        if not self.tokens or planes.len != len(self.tokens) - 1:
            raise MemraError(
                f"SpecRound: the target holds {planes.len} rows for {len(self.tokens)} committed "
                "tokens; prime it with all of them but the last"
            )
        room = planes.capacity - planes.len
        if room < 1:
            raise CapacityExceeded(
                f"SpecRound: the target is full at {planes.len} rows; nothing was moved"
            )
        wish = self.k if k is None else expect.integer("SpecRound.step: k", k)
        if not 0 <= wish <= chain.k_max:
            raise MemraError(f"SpecRound: k {wish} must lie in 0..{chain.k_max}")
        with self._section("draft"):
            drafted = chain.propose(stream, self.tokens, min(wish, room - 1))
        with self._cancelling(stream, drafted):
            with self._section("rebase"):
                rebased = planes.prepare(stream, drafted + 1)
            exec_ = self._verify_step(stream, drafted + 1)
        with self._section(f"verify {drafted + 1}"):
            with self._cancelling(stream, drafted):
                exec_.launch(stream)
            stream.sync()
        return self._commit(stream, drafted, rebased)

    def describe(self) -> dict[str, Any]:
        """Return the descriptions of all captured graphs and the counts so far."""
        return {
            "verify": {n: e.describe() for n, e in sorted(self._execs.items())},
            "stats": self.stats.as_dict(),
        }

    def close(self) -> None:
        """Close the captured verify steps and their buffers; idempotent."""
        for exec_ in self._execs.values():
            exec_.close()
        self._execs.clear()
        self.argmax.close()
        self._arena.close()

    # -- inside -----------------------------------------------------------------------------------
    @contextmanager
    def _cancelling(self, stream: Stream, drafted: int) -> Iterator[None]:
        """Take the drafts back where what verifies them is refused."""
        try:
            yield
        except MemraError:
            self.chain.cancel(stream, drafted)
            raise

    def _verify_step(self, stream: Stream, n: int) -> GraphExec:
        exec_ = self._execs.get(n)
        if exec_ is None:
            with self._section(f"capture verify {n}"):
                exec_ = self._execs[n] = self._capture(stream, n)
        return exec_

    def _capture(self, stream: Stream, n: int) -> GraphExec:
        planes, io = self.target.planes, self.chain.io
        length = planes.len
        tokens = io.draft_d.view(0, (n,), np.int32)

        def body() -> None:
            self.target.forward(stream, tokens, n, self.argmax_d)
            planes.advance(stream, n)
            self.argmax_d.copy_to(stream, self.argmax)
            io.download(stream)

        # A real pass first, so that every kernel is loaded; its rows are written again by the
        # replay, from the same tokens.
        body()
        moved = planes.len - length - n
        planes.set_len(stream, length)
        if moved:
            raise MemraError(
                f"SpecRound: the target's forward over {n} rows moved its planes' length by "
                f"{moved} (from {length}), which is for the round to do; leave advance out of it. "
                "The length was restored"
            )
        with stream.capture(f"verify {n}") as graph:
            body()
        exec_: GraphExec = graph.instantiate()
        return exec_

    def _commit(self, stream: Stream, drafted: int, rebased: bool) -> RoundResult:
        planes, io = self.target.planes, self.chain.io
        try:
            drafts = io.drafts(drafted, f'"{getattr(self.chain, "name", "the drafter")}"')
            argmax = [int(t) for t in self.argmax.array[: drafted + 1]]
            accepted, new = accept.accept_greedy(drafts, argmax)
            io.check_tokens(new, "SpecRound: the target's token")
        except MemraError:
            planes.set_len(stream, planes.len - (drafted + 1))
            self.chain.cancel(stream, drafted)
            raise
        with self._section("rewind"):
            amounts = accept.rewind_amounts(drafted, accepted)
            if amounts.target:
                planes.set_len(stream, planes.len - amounts.target)
            # Committed with the target's length: whatever a drafter says, both go together.
            self.tokens += new
            self.stats.add(drafted, accepted, rebased)
            self.chain.settle(stream, drafted, accepted)
        return RoundResult(tuple(new), accepted, drafted, rebased)
