"""Speculative rounds with a draft of one's own: the tiny model's first layer on its own plane.

``python -m memra_lowlevel.examples.own_draft``. What a chain needs is a body that appends one row
and leaves its token in ``io.tok_d``; capture, feeding, positions and rewinds are the chain's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memra_lowlevel import Device, Stream
from memra_lowlevel.cache import KvLayer
from memra_lowlevel.examples.smollm2 import Model, Session, generate_greedy
from memra_lowlevel.speculative import ChainIo, DraftChain, SpecRound

TOKENS, DRAFTS, MAX_CTX, FILL_ROWS = 48, 4, 128, 16


def main() -> None:
    with Device() as device, device.stream(name="decode") as stream:
        model = Model.load(device, stream, "tiny")
        prompt = model.tokenizer.encode("Hello, my name is")
        target = Session.allocate(model, stream, MAX_CTX)
        plain = generate_greedy(target, stream, prompt, TOKENS)

        plane = KvLayer.allocate(
            device, MAX_CTX, model.config.n_kv_heads, model.config.head_dim, name="draft"
        )
        ws = model.workspace(FILL_ROWS)
        io = ChainIo(device, model.config.width, DRAFTS, model.config.n_vocab)

        def body(s: Stream) -> None:
            """One draft step: reads token and position on the device, moves no counter."""
            model.forward(
                s, ws, [plane], 1, last_layer=1,
                tokens=io.tok_d, positions=io.pos_d, argmax=io.tok_d,
            )  # fmt: skip

        def fill(s: Stream, tokens: Sequence[int], position: int) -> None:
            """Rows of known tokens, some at a launch; moves the counter."""
            for start in range(0, len(tokens), FILL_ROWS):
                rows = np.array(tokens[start : start + FILL_ROWS], np.uint32)
                ws.tok_d.view(0, rows.shape, np.uint32).copy_from(s, rows)
                model.forward(s, ws, [plane], len(rows), last_layer=1, head=False)
                plane.advance(s, len(rows))

        target.planes.set_len(stream, 0)
        target.prime(stream, prompt[:-1])  # all but the pending token
        with (
            DraftChain.capture(stream, body, io, plane, DRAFTS, fill=fill) as chain,
            SpecRound(target, chain, DRAFTS, prompt) as rounds,
        ):
            while len(rounds.tokens) < len(prompt) + len(plain):
                rounds.step(stream)
            tokens = rounds.tokens[len(prompt) :][: len(plain)]
            print(f"exact: {tokens == plain}, {rounds.stats.as_dict()}")
            print(f"{chain.exec.n_launches} draft steps, {chain.exec.n_updates} node updates")
        for closing in (io, ws, plane, target):
            closing.close()


if __name__ == "__main__":
    main()
