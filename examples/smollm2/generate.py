"""One sequence on a model, and plain greedy decoding of it with one captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from memra_lowlevel.cache import Cache
from memra_lowlevel.errors import CapacityExceeded, MemraError, ModelError, TokenError

from .model import Model, Workspace

if TYPE_CHECKING:
    from memra_lowlevel.cache import KvLayer
    from memra_lowlevel.graph import GraphExec
    from memra_lowlevel.runtime import Buffer, Stream

#: Rows of a prompt that go through the model at a time.
PRIME_ROWS = 16


class Follower(Protocol):
    """What wants to see each pass of a session."""

    def follow(self, stream: Stream, ws: Workspace, tokens: Buffer, n_rows: int) -> None:
        """Launch what follows a pass over rows: ``ws.h`` holds their last hidden states."""
        ...


@dataclass
class Session:
    """A model with the planes of one sequence; what a speculative round calls its target.

    Attributes
    ----------
    model : Model
    planes : Cache
        All planes of the sequence, which move together.
    ws : Workspace
    follower : Follower or None
        Sees each pass before the planes' length moves; a draft head reads hidden states so.
    """

    model: Model
    planes: Cache
    ws: Workspace
    follower: Follower | None = None

    @classmethod
    def allocate(
        cls, model: Model, stream: Stream, max_ctx: int, *, n_rows_max: int = PRIME_ROWS
    ) -> Session:
        """Make the planes of up to ``max_ctx`` positions and the activations of some rows.

        Raises
        ------
        CapacityExceeded
            More positions than the model's rotation table has.
        FormatUnsupported
            No attention kernel for the model's head size.
        """
        if max_ctx > model.angles.shape[0]:
            raise CapacityExceeded(
                f"{model.name} takes {model.angles.shape[0]} positions, {max_ctx} were asked for; "
                "shorten the prompt or generate fewer tokens"
            )
        planes = Cache(model.device, stream, model.config.plan, max_ctx, name=model.name)
        return cls(model, planes, model.workspace(n_rows_max))

    @property
    def kv_layers(self) -> Sequence[KvLayer]:
        """The plane of each layer."""
        return tuple(self.planes.planes())

    def forward(self, stream: Stream, tokens: Buffer, n_rows: int, argmax: Buffer) -> None:
        """Launch the model over rows at the planes' length; greedy tokens go to ``argmax``.

        Raises
        ------
        MemraError
            ``argmax`` is where the tokens lie, and a follower wants to see them behind the pass.
        """
        if self.follower is not None and argmax.ptr == tokens.ptr:
            raise MemraError(
                "Session.forward: the tokens of this pass would be gone before the session's "
                "follower sees them; give another buffer for argmax"
            )
        self.model.forward(stream, self.ws, self.kv_layers, n_rows, tokens=tokens, argmax=argmax)
        self._followed(stream, tokens, n_rows)

    def prime(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Append rows of known tokens, without an output layer; moves the planes' length.

        Raises
        ------
        CapacityExceeded
            The planes have no room for them; nothing was appended.
        """
        self.check(tokens)
        if len(tokens) > self.planes.capacity - self.planes.len:
            raise CapacityExceeded(
                f"{len(tokens)} tokens behind {self.planes.len} do not fit in "
                f"{self.planes.capacity} positions; shorten the prompt or allocate longer planes"
            )
        for start in range(0, len(tokens), self.ws.n_rows_max):
            rows = np.array(tokens[start : start + self.ws.n_rows_max], np.uint32)
            self.planes.prepare(stream, len(rows))
            self.ws.tok_d.view(0, (len(rows),), np.uint32).copy_from(stream, rows)
            self.model.forward(stream, self.ws, self.kv_layers, len(rows), head=False)
            self._followed(stream, self.ws.tok_d, len(rows))
            self.planes.advance(stream, len(rows))

    def _followed(self, stream: Stream, tokens: Buffer, n_rows: int) -> None:
        if self.follower is not None:
            self.follower.follow(stream, self.ws, tokens, n_rows)

    def close(self) -> None:
        """Give planes and activations back; the model stays."""
        self.planes.close()
        self.ws.close()

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse tokens outside the vocabulary before they are embedded."""
        for token in tokens:
            if not 0 <= token < self.model.config.n_vocab:
                raise TokenError(
                    f"token {token} is outside the vocabulary of {self.model.config.n_vocab}"
                    + (": every logit of its row was NaN" if token == 0x7FFFFFFF else "")
                )


class GreedyStep:
    """One token of plain greedy decoding, captured once: it feeds itself through ``tok_d``."""

    def __init__(self, session: Session, stream: Stream):
        self.session = session
        ws, planes = session.ws, session.planes
        self.token = session.model.device.pinned((1,), np.uint32)
        tok_d = ws.tok_d.view(0, (1,), np.uint32)

        def body() -> None:
            if session.follower is None:
                session.forward(stream, tok_d, 1, tok_d)
            else:  # which sees the token before the next one takes its place
                chosen = ws.argmax_d.view(0, (1,), np.uint32)
                session.forward(stream, tok_d, 1, chosen)
                tok_d.copy_from(stream, chosen)
            planes.advance(stream, 1)
            tok_d.copy_to(stream, self.token)

        # A pass before the capture loads every kernel; its row is written again by the replay.
        length = planes.len
        planes.prepare(stream, 1)
        tok_d.fill(stream, 0)
        body()
        planes.set_len(stream, length)
        with stream.capture("greedy step") as graph:
            body()
        self.exec: GraphExec = graph.instantiate()

    def start(self, stream: Stream, token: int) -> None:
        """Put the first token in place."""
        self.session.check([token])
        self.session.ws.tok_d.view(0, (1,), np.uint32).copy_from(
            stream, np.array([token], np.uint32)
        )

    def __call__(self, stream: Stream) -> int:
        """Run the step and return the token that it chose, which is also the next one's input."""
        self.session.planes.prepare(stream, 1)
        self.exec.launch(stream)
        stream.sync()
        token = int(self.token.array[0])
        self.session.check([token])
        return token

    def close(self) -> None:
        """Close the executable graph."""
        self.exec.close()
        self.token.close()


def generate_greedy(
    session: Session,
    stream: Stream,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    on_token: Callable[[int], None] | None = None,
    step: GreedyStep | None = None,
) -> list[int]:
    """Plain greedy decoding.

    Parameters
    ----------
    session : Session
        Its planes are rewound to the start.
    stream : Stream
    prompt : sequence of int
        At least one token.
    n_tokens : int
        Most tokens; an end-of-text token ends early and is the last one returned.
    on_token : callable, optional
        Called with each token as it comes.
    step : GreedyStep, optional
        A captured step to use; left out, one is captured and closed again.

    Raises
    ------
    ModelError
        An empty prompt.
    CapacityExceeded
        Prompt and tokens do not fit in the planes; nothing was run.
    TokenError
        A token outside the vocabulary, or a row of logits that was all NaN.
    """
    if not prompt:
        raise ModelError("the prompt has no tokens; give at least one")
    if len(prompt) + n_tokens - 1 > session.planes.capacity:
        raise CapacityExceeded(
            f"{len(prompt)} prompt tokens and {n_tokens} new ones do not fit in "
            f"{session.planes.capacity} positions; ask for fewer or allocate longer planes"
        )
    session.planes.set_len(stream, 0)
    session.prime(stream, prompt[:-1])
    own = step or GreedyStep(session, stream)
    tokens: list[int] = []
    try:
        own.start(stream, prompt[-1])
        while len(tokens) < n_tokens:
            tokens.append(own(stream))
            if on_token is not None:
                on_token(tokens[-1])
            if tokens[-1] in session.model.tokenizer.end_tokens:
                break
    finally:
        if step is None:
            own.close()
    return tokens
