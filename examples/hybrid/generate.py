"""Plain greedy decoding, speculation, and a prompt that is kept and taken up again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memra_lowlevel.cache import Cache, CachePrefix
from memra_lowlevel.runtime import Buffer, Device, Stream
from memra_lowlevel.speculative import ChainIo, SpecRound, early_exit_chain

from .model import HybridModel, Workspace

PROMPT = tuple(b"latent rows, linear states; latent rows, linear states; latent")
ROUND_ROWS = 16
INDEX_RING = 24


@dataclass
class Session:
    """A model with the planes of one sequence; what a speculative round calls its target."""

    model: HybridModel
    planes: Cache
    ws: Workspace

    @classmethod
    def allocate(
        cls, model: HybridModel, stream: Stream, max_ctx: int, *, n_layers: int | None = None,
        name: str = "target",
    ) -> Session:  # fmt: skip
        """Planes and activations for a sequence; ``n_layers`` for the first layers only."""
        planes = Cache(
            model.device, stream, model.config.plan(n_layers), max_ctx, index_ring=INDEX_RING,
            round_rows=ROUND_ROWS, name=name,
        )  # fmt: skip
        return cls(model, planes, model.workspace(ROUND_ROWS))

    def forward(self, stream: Stream, tokens: Buffer, n_rows: int, argmax: Buffer | None) -> None:
        """Launch the model over rows at the planes' length."""
        self.model.forward(stream, self.ws, self.planes, n_rows, tokens=tokens, argmax=argmax)

    def prime(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Append rows of known tokens, and move the length."""
        for at in range(0, len(tokens), ROUND_ROWS):
            part = tokens[at : at + ROUND_ROWS]
            self.forward(stream, self.ws.put(stream, part), len(part), None)
            self.planes.advance(stream, len(part))

    def close(self) -> None:
        """Give planes and activations back."""
        self.planes.close()
        self.ws.close()


def generate_greedy(session: Session, stream: Stream, token: int, n_tokens: int) -> list[int]:
    """Decode token by token behind what the planes hold; ``token`` is the next input."""
    out: list[int] = []
    while len(out) < n_tokens:
        argmax = session.ws.argmax_d.view(0, (1,), session.ws.argmax_d.dtype)
        session.forward(stream, session.ws.put(stream, [token]), 1, argmax)
        session.planes.advance(stream, 1)
        token = int(argmax.to_numpy(stream)[0])
        out.append(token)
    return out


def speculate(
    session: Session, draft: Session, stream: Stream, prompt: Sequence[int], n_tokens: int,
    draft_len: int,
) -> tuple[list[int], SpecRound]:  # fmt: skip
    """Decode in rounds; the draft is the model left early, on planes of its own."""
    io = ChainIo(session.model.device, 1, draft_len, session.model.config.n_vocab)

    def first_layers(
        stream: Stream, n_rows: int, *, tokens: Buffer, positions: Buffer,
        argmax: Buffer | None, probability: Buffer | None,
    ) -> None:  # fmt: skip
        draft.forward(stream, tokens, n_rows, argmax)

    with ExitStack() as stack:
        chain = early_exit_chain(
            stream, first_layers, io, draft.planes, draft_len, tokens=draft.ws.tok_d
        )
        chain.fill(stream, prompt[:-1])
        rounds = SpecRound(session, chain, draft_len, prompt)
        for thing in (io, chain, rounds):
            stack.callback(thing.close)
        out: list[int] = []
        while len(out) < n_tokens:
            k = min(draft_len, n_tokens - len(out) - 1)
            out += rounds.step(stream, k).tokens
        return out, rounds


def run(
    device: Device, *, n_tokens: int = 48, draft_len: int = 4, prompt: Sequence[int] = PROMPT,
    say: Callable[[str], None] = lambda text: None, seed: int = 4,
) -> dict[str, Any]:  # fmt: skip
    """Generate three times and compare.

    Plain greedy decoding; speculation, with the prompt's state kept before it begins; and plain
    decoding again from that state, read from disk into a fresh cache.

    Returns
    -------
    dict
        ``exact``: speculation gave the tokens of plain decoding. ``restored_exact``: so did the
        restored prompt. And the counts behind them.
    """
    stream = device.stream(name="hybrid")
    max_ctx = len(prompt) + n_tokens + draft_len + 2
    model = HybridModel(device, stream, max_ctx, seed=seed)
    with ExitStack() as stack:

        def session(name: str, n_layers: int | None = None) -> Session:
            made = Session.allocate(model, stream, max_ctx, n_layers=n_layers, name=name)
            stack.callback(made.close)
            return made

        plain = session("plain")
        plain.prime(stream, prompt[:-1])
        wanted = generate_greedy(plain, stream, prompt[-1], n_tokens)

        target, draft = session("target"), session("draft", len(model.config.kinds) // 2)
        target.prime(stream, prompt[:-1])
        prefix = target.planes.snapshot_prefix(stream)
        stack.callback(prefix.close)
        say("speculative decoding …")
        begin = time.perf_counter()
        got, rounds = speculate(target, draft, stream, prompt, n_tokens, draft_len)
        seconds = time.perf_counter() - begin

        say("the prompt again, from disk …")
        with tempfile.TemporaryDirectory() as folder:
            path = prefix.save(stream, Path(folder) / "prompt.safetensors")
            size = path.stat().st_size
            again = session("restored")
            loaded = CachePrefix.load(path, again.planes, stream)
            stack.callback(loaded.close)
            again.planes.restore_prefix(stream, loaded)
        restored = generate_greedy(again, stream, prompt[-1], n_tokens)
        stats = rounds.stats
        latent = [layer for layer in target.planes.latent if layer is not None]
        report = {
            "device": str(device),
            "model": f"hybrid {model.config.kinds}",
            "tokens": len(got),
            "token_ids": got,
            "exact": got == wanted,
            "restored_exact": restored == wanted,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "rejected": stats.rejected,
            "tokens_per_target_pass": round(stats.tokens_per_target_pass, 4),
            "prompt_tokens": len(prompt),
            "prefix_bytes": prefix.bytes(),
            "prefix_file_bytes": size,
            "index_rings_wrapped": latent[0].len // INDEX_RING,
            "tokens_per_s": round(len(got) / seconds, 3) if seconds else 0.0,
        }
    stream.close()
    return report
