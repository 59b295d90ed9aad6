"""Speculative rounds with a head of one's own, which reads what the target thought before it.

``python -m memra_lowlevel.examples.own_head``. The head is the tiny model's first block over its
token's embedding plus a tenth of the hidden state one position before: of the target where it has
been, else of the head itself. Each pass of the target keeps its states and writes the head's rows.
"""

from __future__ import annotations

import numpy as np

from memra_lowlevel import Buffer, Device, Stream
from memra_lowlevel.cache import KvLayer, RowsAt
from memra_lowlevel.examples.smollm2 import Model, Session, Workspace, generate_greedy
from memra_lowlevel.kernels import model as ops
from memra_lowlevel.speculative import ChainIo, DraftChain, HiddenRows, SpecRound

TOKENS, DRAFTS, MAX_CTX, ROWS = 48, 3, 128, 16


class OwnHead:
    """A follower of a session: sees each of its passes before the session's length moves."""

    def __init__(self, session: Session, stream: Stream):
        self.model, self.target = session.model, session
        config, device = self.model.config, self.model.device
        self.plane = KvLayer.allocate(
            device, MAX_CTX, config.n_kv_heads, config.head_dim, name="head"
        )
        self.hidden = HiddenRows(device, stream, MAX_CTX, config.width, eps=config.norm_eps)
        self.io = ChainIo(device, config.width, DRAFTS, config.n_vocab)
        self.ws = self.model.workspace(ROWS)
        self.before: Buffer = device.zeros((ROWS, config.width), np.float32, stream)
        tenth = (0.1 * np.eye(config.width)).astype(np.float16).view(np.uint8)
        self.mix = ops.TiledMatrix.upload(device, stream, tenth, "f16")

    def begin(self, stream: Stream, tokens: Buffer, positions: Buffer, n: int) -> None:
        ops.embed_rows(stream, self.model.table, tokens, self.ws.h, n)
        self.hidden.take(stream, positions, self.before, n)
        ops.add_product(stream, self.mix, self.before, self.ws.h, n)

    def step(self, stream: Stream) -> None:
        """One draft step: reads token and position on the device, moves no counter."""
        io, first = self.io, self.model.layers[:1]
        self.begin(stream, io.tok_d, io.pos_d, 1)
        self.model.run(stream, self.ws, first, [self.plane], 1, io.pos_d, programmatic=False)
        self.model.choose(stream, self.ws, 1, io.tok_d, programmatic=True)
        self.hidden.keep(stream, self.ws.h, io.pos_d, 1, block=io.block)

    def follow(self, stream: Stream, ws: Workspace, tokens: Buffer, n_rows: int) -> None:
        """Behind a pass of the target: keep its states, then write the head's rows from them."""
        at = self.target.kv_layers[0].len_d
        self.hidden.keep(stream, ws.h, at, n_rows)
        self.begin(stream, tokens, at, n_rows)
        self.model.project(
            stream, self.ws, self.model.layers[0], RowsAt(self.plane, at), n_rows, at,
            programmatic=False,
        )  # fmt: skip

    def close(self) -> None:
        for owned in (self.plane, self.hidden, self.io, self.ws, self.before, self.mix.tiles):
            owned.close()


def main() -> None:
    with Device() as device, device.stream(name="decode") as stream:
        model = Model.load(device, stream, "tiny")
        prompt = model.tokenizer.encode("Hello, my name is")
        target = Session.allocate(model, stream, MAX_CTX)
        plain = generate_greedy(target, stream, prompt, TOKENS)

        target.planes.set_len(stream, 0)
        target.follower = head = OwnHead(target, stream)
        with DraftChain.capture(
            stream, head.step, head.io, head.plane, DRAFTS, follows=target.planes, name="own head"
        ) as chain:
            target.prime(stream, prompt[:-1])  # all but the pending token
            chain.fill(stream, prompt[:-1])  # its rows are there: the head has followed
            with SpecRound(target, chain, DRAFTS, prompt) as rounds:
                while len(rounds.tokens) < len(prompt) + len(plain):
                    rounds.step(stream)
                tokens = rounds.tokens[len(prompt) :][: len(plain)]
                print(f"exact: {tokens == plain}, {rounds.stats.as_dict()}")
                print(f"target {target.planes.len} rows, head {head.plane.len}: no lag")
        target.close()
        head.close()


if __name__ == "__main__":
    main()
