"""A draft step that is captured once and replayed for every drafted token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import expect
from ..cache.planes import Planes
from ..closing import Closing
from ..errors import CapacityExceeded, CaptureError, ClosedError, MemraError, RewindRefused
from ..kernels import speculative as kernels
from .accept import rewind_amounts
from .io import ChainIo

if TYPE_CHECKING:
    from ..graph import GraphExec
    from ..runtime import Buffer, Stream

__all__ = ["DraftChain"]

Body = Callable[["Stream"], None]
Fill = Callable[["Stream", Sequence[int], int], None]


class DraftChain(Closing):
    """One captured draft step that feeds itself; made by :meth:`capture`.

    A step reads its token and position from :class:`ChainIo`, appends a row to each of the chain's
    planes, and leaves the next token where the next step finds it. So ``k`` drafts are ``k``
    launches of one executable graph: no node is updated and the host reads nothing in between.

    Attributes
    ----------
    io : ChainIo
    planes : Planes
        The chain's own planes; nobody else may write them.
    exec : GraphExec
        The captured step.
    k_max : int
    follows : Planes or None
        The target's planes, where its passes write the rows of the chain's planes too.
    step : callable
        ``step(stream)`` launches the work of one step, without booking that the counters move.
    sections : callable or None
        ``sections(name, units)`` gives a context manager around ``replay``, as a ``CallMeter``.
    """

    def __init__(
        self,
        io: ChainIo,
        planes: Planes,
        exec_: GraphExec,
        k_max: int,
        *,
        step: Body,
        fill: Fill | None,
        p_min: float | None,
        follows: Planes | None,
        name: str,
    ):
        self.io, self.planes, self.exec, self.k_max = io, planes, exec_, k_max
        self.name, self.p_min, self.follows = name, p_min, follows
        self.sections: Any = None
        self.step, self._fill = step, fill

    @classmethod
    def capture(
        cls,
        stream: Stream,
        body: Body,
        io: ChainIo,
        planes: Planes,
        k_max: int,
        *,
        fill: Fill | None = None,
        p_min: float | None = None,
        token_map: Buffer | None = None,
        follows: Planes | None = None,
        warmups: int = 1,
        name: str = "draft",
    ) -> DraftChain:
        """Capture one draft step.

        Parameters
        ----------
        stream : Stream
        body : callable
            Launches one step on the stream it is given: reads ``io.tok_d`` and ``io.pos_d``,
            appends one row to every plane (without moving a counter), leaves its token in
            ``io.tok_d``, and the probability of that token in ``io.p_d`` where ``p_min`` is used.
            It may not allocate.
        io : ChainIo
        planes : Planes
            The planes that the body appends to.
        k_max : int
            Most drafts of a round.
        fill : callable, optional
            ``fill(stream, tokens, position)`` appends rows of known tokens and moves the counters;
            used for a prompt, and for a lag that is longer than the feed. A chain that follows a
            target needs none: the rows are there, and only the counters are moved.
        p_min : float, optional
            Stop drafting at a token that is less probable; costs one read per step.
        token_map : Buffer, optional
            i32[n]: the target's token for each of the n tokens that the draft's output layer
            knows; for a draft whose vocabulary is a part of the target's.
        follows : Planes, optional
            Planes of a target (``session.planes``) each of whose passes, those over a prompt too,
            also writes these planes' rows of its tokens, behind the target's length and before
            that moves, as it does for a head that reads its hidden states. Then a round whose
            drafts were all right leaves no lag. The chain drafts for no other target. It cannot
            see whether the passes do so: where they do not, drafts are made from other rows, and
            seldom right.
        warmups : int
            Steps run before the capture, so that every kernel is loaded. Their rows lie above the
            planes' length and are overwritten; all counters are restored.
        name : str
            Of the graph, in messages.

        Raises
        ------
        CapacityExceeded
            The planes have no room for a warm-up step, or fewer rows than those that they follow.
        CaptureError
            The captured step holds a memory node.
        MemraError, TokenError
            ``k_max`` does not fit the io; the map holds a token that the target does not know; the
            body records nothing on the stream that it is given.
        """
        if not 1 <= k_max <= io.k_max:
            raise MemraError(f"DraftChain: k_max {k_max} must lie in 1..{io.k_max}, that of its io")
        if follows is not None:
            _check_follows(planes, follows, name)
            fill = fill or _advancing(planes, follows, name)
        if follows is not None and planes.capacity < follows.capacity:
            raise CapacityExceeded(
                f'DraftChain "{name}": its planes of {planes.capacity} rows follow a target of '
                f"{follows.capacity}; allocate them as long as the target's"
            )
        n_vocab = io.n_vocab
        if token_map is not None:
            if token_map.dtype != np.int32 or len(token_map.shape) != 1 or not token_map.shape[0]:
                raise MemraError(
                    f"DraftChain: the token map is {token_map.dtype}{list(token_map.shape)}; it "
                    "must be int32 with one token of the target for each of the draft's"
                )
            io.check_tokens([int(token) for token in token_map.to_numpy(stream)])
            n_vocab = token_map.shape[0]
        length = planes.len
        planes.prepare(stream, 1)
        kernels.prepare(io.device)

        def advance(stream: Stream) -> None:
            kernels.chain_advance(
                stream, io.block, io.draft_d, planes.counters, n_vocab=n_vocab, k_max=k_max,
                token_map=token_map,
            )  # fmt: skip

        def step(stream: Stream) -> None:
            body(stream)
            advance(stream)

        try:
            for _ in range(warmups):
                io.begin(stream, [0], length)
                body(stream)
                if planes.len != length:
                    raise MemraError(
                        f'DraftChain: the body of "{name}" moved the length of its planes from '
                        f"{length} to {planes.len}, which is for the chain to do; leave advance "
                        "out of it. The length was restored"
                    )
                advance(stream)
                planes.moved(stream, 1)
                planes.set_len(stream, length)
                stream.sync()
            with stream.capture(name) as graph:
                begun = _work_of(stream)
                body(stream)
                if _work_of(stream) == begun:
                    raise MemraError(
                        f'DraftChain: the body of "{name}" recorded nothing on stream '
                        f'"{stream.name}"; it must launch its step on the stream that it is given'
                    )
                advance(stream)
                planes.moved(stream, 1)
            exec_ = graph.instantiate()
            memory_nodes = exec_.describe().memory_nodes
            if memory_nodes:
                exec_.close()
                raise CaptureError(
                    f'DraftChain: the step "{name}" allocates memory in {memory_nodes} nodes; take '
                    "its buffers from an Arena before the capture"
                )
            exec_.upload(stream)
        finally:
            if stream.recording is None:
                planes.set_len(stream, length)
        return cls(
            io,
            planes,
            exec_,
            k_max,
            step=step,
            fill=fill,
            p_min=p_min,
            follows=follows,
            name=name,
        )

    @property
    def followed(self) -> bool:
        """Whether the target's passes write the rows of these planes too."""
        return self.follows is not None

    # -- the low level: replay and rewind --------------------------------------------------------
    def replay(self, stream: Stream, k: int) -> int:
        """Launch the captured step ``k`` times; one driver call each.

        Raises
        ------
        CapacityExceeded, RingLapped
            The planes have no room for ``k`` more rows without moving any: call
            ``planes.prepare(stream, k)`` between rounds. Nothing was launched.
        """
        self._check_open("replay")
        self.planes.check_headroom(k)
        launch = self.exec.launch
        with self.sections("replay", k) if self.sections else nullcontext():
            for _ in range(k):
                launch(stream)
        return k

    def fill(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Append rows of known tokens behind the planes' length, several at a launch.

        Raises
        ------
        MemraError
            The chain was captured without ``fill``.
        """
        if self._fill is None:
            raise MemraError(f'DraftChain "{self.name}" was captured without a fill')
        self.io.check_tokens(tokens)
        self._fill(stream, tokens, self.planes.len)

    def rewind(self, stream: Stream, to: int) -> None:
        """Shorten the chain's planes to ``to`` rows: one counter write, no copy.

        Raises
        ------
        RewindRefused
            ``to`` is longer than the planes, or rows that it needs were dropped.
        """
        if to > self.planes.len:
            raise RewindRefused(
                f'DraftChain "{self.name}": cannot rewind from {self.planes.len} to {to} rows, '
                "which is forward; feed the tokens instead",
                plane=self.name,
                asked=to,
                possible=self.planes.len,
            )
        if to < self.planes.len:
            self.planes.set_len(stream, to)

    # -- a round ----------------------------------------------------------------------------------
    def propose(self, stream: Stream, committed: Sequence[int], k: int) -> int:
        """Draft up to ``k`` tokens behind ``committed``, whose last token is pending.

        Tokens that the chain has not seen yet (its lag) are fed first. The drafts are left in
        ``io.draft_d``; without ``p_min`` the host waits for nothing.

        Returns
        -------
        int
            How many were drafted.
        """
        self._check_open("propose")
        k = min(k, self.k_max)
        have = self.planes.len
        if have >= len(committed):
            raise MemraError(
                f'DraftChain "{self.name}": its planes hold {have} rows but only '
                f"{len(committed) - 1} tokens are committed; rewind it first"
            )
        excess = len(committed) - have - self.io.n_feed_max
        if k and excess > 0:
            if self._fill is None:
                raise CapacityExceeded(
                    f'DraftChain "{self.name}" lags {len(committed) - 1 - have} tokens behind and '
                    f"has no fill; the feed takes {self.io.n_feed_max - 1}"
                )
            self._fill(stream, committed[have : have + excess], have)
            have = self.planes.len
        if k == 0:
            if self.followed:  # the target's pass writes a row all the same
                self.planes.prepare(stream, len(committed) - have)
            self.io.begin(stream, committed[-1:], len(committed) - 1)
            return 0
        feed = committed[have:]
        steps = len(feed) - 1 + k
        self.planes.prepare(stream, steps + self.followed)
        self.io.begin(stream, feed, have)
        if self.p_min is None:
            self.replay(stream, steps)
            return k
        self.replay(stream, len(feed) - 1)
        for drafted in range(1, k + 1):
            self.replay(stream, 1)
            self.io.p_d.copy_to(stream, self.io.p_host)
            stream.sync()
            if not self.io.p_host.array[0] >= self.p_min:
                return drafted
        return k

    def settle(self, stream: Stream, k: int, accepted: int) -> None:
        """Drop the rows of rejected drafts, after a round of ``k`` drafts."""
        amounts = rewind_amounts(k, accepted)
        if self.followed and amounts.lag:  # the row of the last token that the target has seen
            self.planes.advance(stream, 1)
        else:
            self.rewind(stream, self.planes.len - amounts.draft)

    def cancel(self, stream: Stream, k: int) -> None:
        """Drop all rows of a round of ``k`` drafts; rows of a lag that was fed stay."""
        self.rewind(stream, self.planes.len - k)

    def describe(self) -> dict[str, Any]:
        """Return what the chain is: its graph's description, its planes' lengths and limits."""
        return {
            "name": self.name,
            "k_max": self.k_max,
            "len": self.planes.len,
            "capacity": self.planes.capacity,
            "followed": self.followed,
            "graph": self.exec.describe(),
        }

    def check_target(self, planes: Planes) -> None:
        """Refuse to draft for another target than the one whose passes write these planes.

        Raises
        ------
        MemraError
            The chain follows other planes.
        """
        if self.follows is not None and planes is not self.follows:
            raise MemraError(
                f'DraftChain "{self.name}" follows the passes of another target, which write its '
                "rows; draft for that one, or capture a chain that follows this one's planes"
            )

    def _check_open(self, call: str) -> None:
        if self.exec.closed:
            raise ClosedError(f'DraftChain "{self.name}".{call}: it was closed; capture a new one')

    def close(self) -> None:
        """Close the executable graph; the planes and the io belong to whoever made them."""
        self.exec.close()


def _check_follows(planes: Planes, follows: Planes, name: str) -> None:
    """Refuse what are no planes of a target, and a target whose rows the chain's planes lack."""
    if not all(hasattr(follows, word) for word in ("len", "capacity", "counters")):
        raise expect.refusal("DraftChain: follows", follows, "the target's planes, session.planes")
    if follows is planes:
        raise MemraError(
            f'DraftChain "{name}": its planes cannot follow themselves; give the target\'s planes'
        )
    if follows.len != planes.len:
        raise MemraError(
            f'DraftChain "{name}": the target that it follows holds {follows.len} rows, its own '
            f"planes {planes.len}; capture the chain before the target is primed, so that every "
            "pass writes its rows"
        )


def _advancing(planes: Planes, follows: Planes, name: str) -> Fill:
    """Return a fill for rows that the target's passes have written."""

    def fill(stream: Stream, tokens: Sequence[int], position: int) -> None:
        if position + len(tokens) > follows.len:
            raise MemraError(
                f'DraftChain "{name}": rows up to {position + len(tokens)} are to be there, but '
                f"the passes of its target have written {follows.len}; prime the target first"
            )
        planes.advance(stream, len(tokens))

    return fill


def _work_of(stream: Stream) -> dict[int, int]:
    """Return what the capture of a stream has seen on it so far."""
    recording = stream.recording
    return {} if recording is None else recording.clock_of(stream)
