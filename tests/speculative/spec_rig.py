"""The tiny model with planes, a draft chain and rounds, as the tests use them."""

from __future__ import annotations

import importlib
from unittest import mock

import numpy as np

from memra_lowlevel.cache import Cache, LayerPlan, ModelPlan, SlidingKvCache, policy
from memra_lowlevel.demo import engine
from memra_lowlevel.speculative import (
    CallMeter,
    ChainIo,
    NgramDrafter,
    SpecRound,
    early_exit_chain,
)

smollm2 = engine()
tiny = importlib.import_module(f"{smollm2.__name__}.tiny")

PROMPT = list(b"hello world, this")
_GAINS = (1.0, 1.0, 0.2, 0.2)


def lively_weights(seed=3, order=None):
    """The tiny model with layers that matter and an output layer of its own.

    Its text does not settle into one token, so a wrong row shows at once. ``order`` gives the
    output layer its rows in another order: token ``order[i]`` is its number i.
    """

    def gain(name, n_layers):
        last = name.endswith(("attn_output.weight", "ffn_down.weight"))
        return _GAINS[int(name.split(".")[1])] if last else 1.0

    with mock.patch.object(tiny, "_gain", gain):
        weights = tiny.tiny_weights(seed)
    shape = weights["token_embd.weight"].shape
    rows = tiny._q8_0(np.random.default_rng(seed), shape, spread=0.02)
    rows = rows if order is None else rows.reshape(shape[0], -1)[order].reshape(rows.shape)
    weights.tensors["output.weight"] = tiny.Tensor("output.weight", "q8_0", shape, rows)
    return weights


class Rig:
    """One tiny model on a device; plain and speculative generations over fresh planes."""

    def __init__(self, device, stream, max_ctx=160):
        self.device, self.stream, self.max_ctx = device, stream, max_ctx
        self.model = smollm2.Model(device, stream, lively_weights(), max_ctx=max_ctx)
        self.meter = CallMeter(device.driver)
        self.window: int | None = None
        self.ring: dict[str, int] | None = None

    def planes(self, n_layers, name):
        plan = self.model.config.plan
        if self.window:
            layers = tuple(
                LayerPlan(
                    SlidingKvCache(self.window), p.kv_dim_k, p.kv_dim_v, p.head_dim_k, p.head_dim_v
                )
                for p in plan.layers[:n_layers]
            )
        else:
            layers = plan.layers[:n_layers]
        policy.set_swa_ring_default(self.ring is not None)
        try:
            return Cache(
                self.device, self.stream, ModelPlan(layers), self.max_ctx, name=name,
                **(self.ring or {}),
            )  # fmt: skip
        finally:
            policy.set_swa_ring_default(False)

    def session(self, rows=17):
        planes = self.planes(self.model.config.n_layers, "target")
        return smollm2.Session(self.model, planes, self.model.workspace(rows))

    def plain(self, prompt, n):
        session = self.session()
        tokens = smollm2.generate_greedy(session, self.stream, prompt, n)
        session.close()
        assert len(tokens) == n
        return tokens

    def chain(
        self, layers=2, k_max=4, p_min=None, model=None, n_feed_max=8, token_map=None
    ):  # fmt: skip
        model = model or self.model
        planes = self.planes(layers, "draft")
        ws = model.workspace(16)
        kv = list(planes.planes())

        def first_layers(stream, n_rows, **buffers):
            head = buffers["argmax"] is not None
            model.forward(stream, ws, kv, n_rows, 0, layers, head, **buffers)

        io = ChainIo(
            self.device, model.config.width, k_max, model.config.n_vocab, n_feed_max=n_feed_max
        )
        return early_exit_chain(
            self.stream, first_layers, io, planes, k_max, tokens=ws.tok_d, p_min=p_min,
            token_map=token_map,
        )  # fmt: skip

    def rounds(self, prompt, drafter, k, prime=True):
        session = self.session()
        session.prime(self.stream, prompt[:-1])
        if prime and hasattr(drafter, "fill") and len(prompt) > 1:
            drafter.fill(self.stream, prompt[:-1])
        return SpecRound(session, drafter, k, prompt, sections=self.meter)

    def speculate(self, prompt, n, k=4, drafter=None, ks=None, **chain):
        """Tokens of n or a few more, cut to n, and the rounds."""
        drafter = drafter or self.chain(k_max=max(k, 4), **chain)
        rounds = self.rounds(prompt, drafter, k)
        out: list[int] = []
        while len(out) < n:
            out += rounds.step(self.stream, next(ks) if ks else None).tokens
        return out[:n], rounds

    def ngram(self, k_max=4):
        return NgramDrafter(self.device, k_max, self.model.config.n_vocab)


def poison(buffer, stream):
    """NaN in every element; returns what was there."""
    before = buffer.to_numpy(stream)
    buffer.copy_from(stream, np.full(before.shape, np.nan, np.float32))
    return before
