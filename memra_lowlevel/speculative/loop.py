"""Many rounds of greedy speculation in one driver call: the device decides when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .. import expect
from ..cache.planes import Planes
from ..closing import Closing
from ..errors import CapacityExceeded, ClosedError, MemraError, RingLapped, TokenError
from ..graph import Graph
from ..kernels import speculative as kernels
from ..runtime.stream import expect_stream
from .chain import DraftChain
from .round import Target
from .stats import SpecStats

if TYPE_CHECKING:
    from ..graph import GraphExec
    from ..runtime import Buffer, PinnedBuffer, Stream

__all__ = ["DeviceLoop", "LoopResult"]

_REASONS = {1: "enough", 2: "ended", 3: "no room", 4: "bad token"}
_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class LoopResult:
    """What one launch committed.

    Attributes
    ----------
    tokens : tuple of int
        New committed tokens of all rounds; up to ``k`` more than were asked for, and what its
        round committed behind an end token.
    accepted : tuple of int
        Accepted drafts of each round.
    reason : str
        ``"enough"``, ``"ended"`` (an end token), ``"no room"``.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    reason: str


class DeviceLoop(Closing):
    """Rounds of greedy speculation that follow each other on the device.

    One graph holds a loop whose body is a round: the draft step ``k`` times, the verify step, and a
    kernel that accepts, moves all counters and says whether there is another round. The host is
    needed once per launch: it sets up the first round and reads the tokens at the end. The tokens
    are those of :class:`SpecRound`, and so those of greedy decoding.

    Parameters
    ----------
    stream : Stream
        The step is captured on it; its kernels must have run before (they do in ``warm``).
    target : Target
    chain : DraftChain
        Without ``p_min``, which would ask the host.
    k : int
        Drafts per round, at least 1.
    n_max : int
        Most tokens of one launch.
    end_tokens : sequence of int
        Tokens that end the text.

    Attributes
    ----------
    exec : GraphExec
    stats : SpecStats

    Raises
    ------
    MemraError
        ``k`` or ``n_max`` do not fit the chain; a chain with ``p_min``, or one that follows another
        target.
    CapacityExceeded
        No room for one round; nothing was captured.
    """

    def __init__(
        self,
        stream: Stream,
        target: Target,
        chain: DraftChain,
        k: int,
        *,
        n_max: int = 256,
        end_tokens: Sequence[int] = (),
    ):
        expect_stream("DeviceLoop: stream", stream)
        expect.kind("DeviceLoop: chain", chain, DraftChain, "a DraftChain")
        if not hasattr(target, "planes") or not hasattr(target, "forward"):
            wanted = "an object with planes, forward"
            raise expect.refusal("DeviceLoop: target", target, wanted)
        k, n_max = expect.integer("DeviceLoop: k", k), expect.integer("DeviceLoop: n_max", n_max)
        if chain.exec.closed:
            raise ClosedError(f'DeviceLoop: chain "{chain.name}" was closed; capture a new one')
        low, high = -(2**31), 2**31 - 1
        end_tokens = [
            expect.integer("DeviceLoop: an end token", token, low, high) for token in end_tokens
        ]
        if not 1 <= k <= chain.k_max or n_max < 1 or chain.p_min is not None:
            raise MemraError(
                f"DeviceLoop: k {k} must lie in 1..{chain.k_max}, n_max {n_max} be at least 1, and "
                f"the chain must not stop at a probability (p_min {chain.p_min})"
            )
        if chain.io.n_feed_max < 2:
            raise MemraError("DeviceLoop: the io's feed must take 2 known tokens")
        chain.check_target(target.planes)
        self.target, self.chain, self.k, self.n_max = target, chain, k, n_max
        self.stats = SpecStats()
        device = chain.io.device
        ends = np.array(end_tokens or [-1], np.int32)
        words = {"state": kernels.STATE_WORDS, "tokens": n_max + k, "accepted": n_max}
        n_words = sum(words.values())
        self._arena = device.arena(4 * (n_words + k + 1 + len(ends)) + 1024, name="device loop")
        # State, tokens and accepted lie together: one copy brings them all.
        self._results: Buffer = self._arena.take((n_words,), np.int32, name="results")
        self._argmax: Buffer = self._arena.take((k + 1,), np.int32, name="argmax_d")
        self._ends: Buffer = self._arena.take(ends.shape, np.int32, name="end tokens")
        self._ends.copy_from(stream, ends)
        at, parts = 0, []
        for n in words.values():
            parts.append(self._results.view(4 * at, (n,), np.int32))
            at += n
        self._state, self._tokens, self._accepted = parts
        self._up: PinnedBuffer = device.pinned((kernels.STATE_WORDS,), np.int32)
        self._down: PinnedBuffer = device.pinned((n_words,), np.int32)
        self._done = device.event(name="device loop", blocking=True)
        kernels.prepare(device)
        self._warm(stream)
        self.exec: GraphExec = self._build(stream)

    def run(self, stream: Stream, committed: Sequence[int], n: int) -> LoopResult:
        """Commit at least ``n`` tokens, if nothing stops it before: one launch.

        Parameters
        ----------
        stream : Stream
        committed : sequence of int
            All committed tokens, the pending one last; ``target.planes`` holds all but that.
        n : int
            1 … ``n_max``.

        Raises
        ------
        CapacityExceeded, RingLapped
            No room for one round. Nothing was launched.
        TokenError
            A row of logits was all NaN. What was committed before stays: the message says how many.
        """
        planes, chain, k = self.target.planes, self.chain, self.k
        for what, exec_ in (("the loop", self.exec), (f'chain "{chain.name}"', chain.exec)):
            if exec_.closed:
                raise ClosedError(f"DeviceLoop.run: {what} was closed; make a new one")
        if not 1 <= n <= self.n_max:
            raise MemraError(f"DeviceLoop.run: n {n} must lie in 1..{self.n_max}")
        if not committed or planes.len != len(committed) - 1:
            raise MemraError(
                f"DeviceLoop.run: the target holds {planes.len} rows, {len(committed)} tokens are "
                "committed; prime it with all of them but the last"
            )
        most = n + 2 * k + 1
        self._catch_up(stream, committed, most)
        target_end = planes.len + _room(stream, planes, k + 1, most)
        # Followed, the draft's planes get a row for the last draft too.
        least = k + chain.followed
        draft_end = chain.planes.len + _room(stream, chain.planes, least, most) - chain.followed
        self._up.array[:] = (0, n, 0, planes.len, target_end, draft_end, 0)
        self._state.copy_from(stream, self._up)
        self.exec.launch(stream)
        stream.record(self._done)
        self._done.sync()  # asleep: the host has nothing to do
        return self._collect(stream, planes.len)

    def close(self) -> None:
        """Close the executable graph and the buffers; idempotent."""
        self.exec.close()
        for owned in (self._done, self._up, self._down, self._arena):
            owned.close()

    # -- inside -----------------------------------------------------------------------------------
    def _verify(self, stream: Stream) -> None:
        tokens = self.chain.io.draft_d.view(0, (self.k + 1,), np.int32)
        self.target.forward(stream, tokens, self.k + 1, self._argmax)

    def _warm(self, stream: Stream) -> None:
        """Load the kernels of a verify step: one pass, whose rows lie above the length."""
        self.target.planes.prepare(stream, self.k + 1)
        self.target.planes.check_headroom(self.k + 1)
        self.chain.io.begin(stream, [0], 0, [0] * self.k)
        self._verify(stream)
        stream.sync()

    def _build(self, stream: Stream) -> GraphExec:
        chain, io, k = self.chain, self.chain.io, self.k
        chain.planes.prepare(stream, k + 1)
        graph = Graph(io.device, "device loop")
        goes_on, lags = graph.condition(1), 0 if chain.followed else graph.condition(0)
        with stream.capture("draft step") as step:
            chain.step(stream)
        with stream.capture("round") as round_:
            for _ in range(k):
                chain.step(stream)
            self._verify(stream)
            kernels.round_advance(
                stream, io.block, io.draft_d, self._argmax, self._state,
                self.target.planes.counters, chain.planes.counters, self._ends, self._tokens,
                self._accepted, k=k, n_vocab=io.n_vocab, goes_on=goes_on, lags=lags,
                followed=chain.followed,
            )  # fmt: skip
        body = graph.loop(goes_on)
        if chain.followed:
            body.child(round_)
        else:
            lag = body.branch(lags)
            lag.child(step)
            body.child(round_, after=[lag.place])
        graph.copy(self._down, self._results, after=[body.place])
        exec_ = graph.instantiate()
        for made in (step, round_, graph):
            made.close()
        return exec_

    def _catch_up(self, stream: Stream, committed: Sequence[int], room: int) -> None:
        """Let the draft see all committed tokens but the pending one."""
        chain = self.chain
        have = chain.planes.len
        if have >= len(committed):
            raise MemraError(
                f'DeviceLoop: the planes of chain "{chain.name}" hold {have} rows but only '
                f"{len(committed) - 1} tokens are committed; rewind it first"
            )
        missing = committed[have:]
        if len(missing) > chain.io.n_feed_max:
            chain.fill(stream, missing[:-1])
            missing = missing[-1:]
        chain.planes.prepare(stream, min(room, len(missing) - 1 + self.k))
        chain.io.begin(stream, missing, len(committed) - len(missing))
        chain.replay(stream, len(missing) - 1)

    def _collect(self, stream: Stream, before: int) -> LoopResult:
        words = self._down.array
        n_tokens, _, n_rounds, position, *_, reason = (int(w) for w in words[: kernels.STATE_WORDS])
        at = kernels.STATE_WORDS
        tokens = tuple(int(t) for t in words[at : at + n_tokens])
        at += self.n_max + self.k
        accepted = tuple(int(a) for a in words[at : at + n_rounds])
        self.target.planes.moved(stream, position - before)
        # After a round whose drafts were all right the draft lags a row behind.
        draft = self.chain.planes
        all_right = bool(accepted) and accepted[-1] == self.k and reason != 4
        lag = all_right and not self.chain.followed
        draft.moved(stream, position - int(lag) - draft.len)
        for n in accepted:
            self.stats.add(self.k, n)
        if reason == 4:
            raise TokenError(
                f"DeviceLoop: after {n_tokens} tokens a row of logits was all NaN, or a draft was "
                f"no token of the vocabulary of {self.chain.io.n_vocab}. Those {n_tokens} stay "
                f"committed: {list(tokens)}"
            )
        return LoopResult(tokens, accepted, _REASONS[reason])


def _room(stream: Stream, planes: Planes, least: int, most: int) -> int:
    """Rows that fit behind the length as the planes stand; at least ``least``, at most ``most``."""
    planes.prepare(stream, least)
    most = max(least, min(most, planes.capacity - planes.len))
    planes.check_headroom(least)
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            planes.check_headroom(middle)
            low = middle
        except (CapacityExceeded, RingLapped):
            high = middle - 1
    return low
