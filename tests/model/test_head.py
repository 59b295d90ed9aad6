"""The draft head on the tiny model: what it computes, what follows the target, what is refused."""

import gguf
import numpy as np
import pytest
from numpy_llama import matrix, norm, rotate

from memra_lowlevel.cache import Cache
from memra_lowlevel.errors import MemraError, ModelError
from memra_lowlevel.examples.smollm2 import (
    DraftHead,
    HeadDrafter,
    Model,
    Session,
    generate_greedy,
)
from memra_lowlevel.examples.smollm2.head import ARCHITECTURE, SMOLLM2_HEAD, read_head
from memra_lowlevel.examples.smollm2.tiny import TINY, made_up_head
from memra_lowlevel.speculative import ChainIo, DeviceLoop, DraftChain, HiddenRows, SpecRound

PROMPT = list(b"Hello, world")
N = 40


@pytest.fixture(scope="module")
def model(device):
    stream = device.stream(name="load")
    loaded = Model.load(device, stream, "tiny", max_ctx=256)
    stream.sync()
    return loaded


@pytest.fixture(scope="module")
def plain(model, device):
    stream = device.stream(name="plain")
    session = Session.allocate(model, stream, 128)
    tokens = generate_greedy(session, stream, PROMPT, N + 8)
    session.close()
    return tokens


class Drafted:
    """A session with a head that follows it, primed with some tokens."""

    def __init__(self, model, stream, tokens=PROMPT, k=3, n_known=None, max_ctx=128):
        self.stream = stream
        self.head = DraftHead(model, stream, *made_up_head(model.config, 5, n_known))
        self.session = Session.allocate(model, stream, max_ctx)
        self.drafter = HeadDrafter(self.session, self.head, stream, k)
        self.session.prime(stream, tokens[:-1])
        self.drafter.chain.fill(stream, tokens[:-1])

    def rows(self, n):
        """The first n rows of the head's plane, and of what was kept."""
        (plane,) = self.drafter.planes.planes()
        widths = (plane.k, plane.k_tok_bytes), (plane.v, plane.v_tok_bytes)
        stored = [b.view(0, (n, w), np.uint8).to_numpy(self.stream) for b, w in widths]
        return [*stored, self.drafter.hidden.rows.to_numpy(self.stream)[: n + 1].view(np.uint32)]

    def close(self):
        self.drafter.close()
        self.session.close()


@pytest.mark.parametrize(("k", "n_known"), [(1, None), (3, None), (4, 40)])
def test_rounds_are_greedy_decoding_and_leave_no_lag(model, stream, plain, k, n_known):
    made = Drafted(model, stream, k=k, n_known=n_known)
    rounds = SpecRound(made.session, made.drafter.chain, k, PROMPT)
    while len(rounds.tokens) < len(PROMPT) + N:
        rounds.step(stream)
        assert made.session.planes.len == made.drafter.planes.len == len(rounds.tokens) - 1
    assert rounds.tokens[len(PROMPT) :][:N] == plain[:N]
    rounds.close()
    made.close()


def test_many_rounds_in_one_launch(model, stream, plain):
    made = Drafted(model, stream)
    loop = DeviceLoop(stream, made.session, made.drafter.chain, 3, n_max=N)
    first = loop.run(stream, PROMPT, 5)
    second = loop.run(stream, [*PROMPT, *first.tokens], N - len(first.tokens))
    assert [*first.tokens, *second.tokens][:N] == plain[:N]
    assert made.session.planes.len == made.drafter.planes.len
    loop.close()
    made.close()


def test_rows_are_those_of_a_prompt_that_was_read_at_once(model, stream):
    """Guessed rows and states are gone after the pass that verified them: bit for bit."""
    made = Drafted(model, stream)
    rounds = SpecRound(made.session, made.drafter.chain, 3, PROMPT)
    while len(rounds.tokens) < len(PROMPT) + N:
        rounds.step(stream)
    tokens = list(rounds.tokens)
    fresh = Drafted(model, stream, tokens)
    n = len(tokens) - 1
    for got, want in zip(made.rows(n), fresh.rows(n), strict=True):
        assert np.array_equal(got, want)
    rounds.close()
    made.close()
    fresh.close()


def guess(head, weights, hidden, tokens, rows):
    """Logits behind the last token, in NumPy: hidden states before each token, stored k and v."""
    c = head.config
    one = {name: matrix(t) for name, t in weights.items() if len(t.shape) == 2}
    gain = {name: t.rows for name, t in weights.items() if len(t.shape) == 1}
    table = matrix(head.model.weights["token_embd.weight"])
    h = table[tokens[-1]] + one["features.weight"] @ hidden[-1]
    x = norm(h, gain["blk.0.attn_norm.weight"], c.norm_eps)
    q = one["blk.0.attn_q.weight"] @ x
    at = np.zeros((len(tokens), c.n_heads, c.head_dim), np.float32)
    at[-1] = q.reshape(c.n_heads, -1)
    q = rotate(at, c.rope_theta, c.n_rot)[-1]
    kinds = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_1
    keys, values = (
        gguf.quants.dequantize(r, kind).reshape(len(tokens), c.n_kv_heads, -1)
        for r, kind in zip(rows, kinds, strict=True)
    )
    out = []
    for i in range(c.n_heads):
        kv = i // (c.n_heads // c.n_kv_heads)
        p = np.exp((s := keys[:, kv] @ q[i] / c.head_dim**0.5) - s.max())
        out.append(p / p.sum() @ values[:, kv])
    h = h + one["blk.0.attn_output.weight"] @ np.concatenate(out)
    x = norm(h, gain["blk.0.ffn_norm.weight"], c.norm_eps)
    gate, up = one["blk.0.ffn_gate.weight"] @ x, one["blk.0.ffn_up.weight"] @ x
    h = h + one["blk.0.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return matrix(head.model.weights["output.weight"]) @ norm(
        h, gain["output_norm.weight"], c.norm_eps
    )


@pytest.mark.parametrize("n_known", [None, 64])
def test_a_guess_is_what_numpy_makes_of_it(model, stream, n_known):
    weights, known = made_up_head(model.config, 5, n_known)
    made = Drafted(model, stream, n_known=n_known, k=1)
    rounds = SpecRound(made.session, made.drafter.chain, 1, PROMPT)
    compared = 0
    for _ in range(12):
        tokens = list(rounds.tokens)
        made.drafter.chain.propose(stream, tokens, 1)
        drafted = int(made.drafter.io.draft_d.to_numpy(stream)[1])
        k_rows, v_rows, states = made.rows(len(tokens))
        made.drafter.chain.cancel(stream, 1)
        hidden = states.view(np.float32)[: len(tokens)]
        logits = guess(made.head, weights, hidden, tokens, (k_rows, v_rows))[known]
        assert logits.max() - logits[np.searchsorted(known, drafted)] < 2e-3
        compared += len(np.unique(logits.round(2)))
        rounds.step(stream)
    assert compared > 100
    rounds.close()
    made.close()


def test_sessions_without_a_head_stay_as_they_were(model, stream, plain):
    made = Drafted(model, stream)
    made.drafter.close()
    made.drafter.close()
    assert made.session.follower is None
    assert generate_greedy(made.session, stream, PROMPT, N) == plain[:N]
    made.session.close()


def test_a_head_is_for_a_session_without_rows_and_without_another(model, stream):
    made = Drafted(model, stream)
    head = DraftHead.load(model, stream)
    with pytest.raises(MemraError, match="has a follower"):
        HeadDrafter(made.session, head, stream, 2)
    made.drafter.close()
    with pytest.raises(MemraError, match="before the session is primed"):
        HeadDrafter(made.session, head, stream, 2)
    assert made.session.follower is None
    made.close()


def test_heads_of_other_models_are_refused(model, stream):
    tensors, tokens = made_up_head(TINY, 5)
    for name in ("features.weight", "blk.0.attn_k.weight", "output_norm.weight"):
        with pytest.raises(ModelError, match=f"{name} is missing"):
            DraftHead(model, stream, {k: v for k, v in tensors.items() if k != name}, tokens)
    wrong = {**tensors, "features.weight": tensors["blk.0.ffn_up.weight"]}
    with pytest.raises(ModelError, match=r"features.weight is \(160, 64\)"):
        DraftHead(model, stream, wrong, tokens)
    inner = np.array([3, 9999, 7], np.int32), np.array([3, -5, 7], np.int32)
    kinds = tokens.astype(np.float32), tokens[None], tokens[[0, 0, 1]]
    for bad in (tokens + 1, tokens - 1, tokens[:0], *inner, *kinds):
        with pytest.raises(ModelError, match="vocabulary of 272"):
            DraftHead(model, stream, tensors, bad)
    with pytest.raises(ModelError, match="cannot draft for 'tiny'"):
        DraftHead.load(model, stream, SMOLLM2_HEAD)


def test_the_head_of_smollm2_is_whole():
    target, tensors, tokens = read_head(SMOLLM2_HEAD)
    assert "smollm2" in target.lower() and len(tokens) == 16384
    assert (np.diff(tokens) > 0).all() and 0 <= tokens[0] and tokens[-1] < 49152
    assert tensors["blk.0.ffn_gate.weight"].shape == (3072, 576) and len(tensors) == 11
    for tensor in tensors.values():
        values = matrix(tensor) if len(tensor.shape) == 2 else tensor.rows
        assert np.isfinite(values).all() and np.ptp(values) > 0


def test_other_files_are_refused(tmp_path):
    def file(name, architecture, *, tokens):
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        writer.add_string("head.target", "tiny")
        writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
        if tokens:
            writer.add_tensor("tokens", np.arange(4, dtype=np.int32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    assert read_head(file("good", ARCHITECTURE, tokens=True))[0] == "tiny"
    with pytest.raises(ModelError, match="the architecture is 'llama'"):
        read_head(file("llama", "llama", tokens=True))
    with pytest.raises(ModelError, match="the tensor tokens is missing"):
        read_head(file("bare", ARCHITECTURE, tokens=False))
    (tmp_path / "text").write_text("no file of tensors")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        read_head(tmp_path / "text")
    with pytest.raises(ModelError, match="no such file"):
        read_head(tmp_path / "nothing")


def test_other_targets_are_refused(model, stream):
    made, other = Drafted(model, stream), Session.allocate(model, stream, 128)
    other.prime(stream, PROMPT[:-1])
    for make in (
        lambda: SpecRound(other, made.drafter.chain, 2, PROMPT),
        lambda: DeviceLoop(stream, other, made.drafter.chain, 2),
    ):
        with pytest.raises(MemraError, match="follows the passes of another target"):
            make()
    other.close()
    made.close()


def test_heads_for_another_session_are_refused(model, device, stream):
    head = DraftHead.load(model, stream)
    twin = Model.load(device, stream, "tiny", max_ctx=64)
    session = Session.allocate(twin, stream, 32)
    with pytest.raises(MemraError, match="loaded twice"):
        HeadDrafter(session, head, stream, 2)
    session.close()
    session = Session.allocate(model, stream, 32, n_rows_max=3)
    for k in (3, 0):
        with pytest.raises(MemraError, match=rf"{k} drafts are verified with {k + 1} rows"):
            HeadDrafter(session, head, stream, k)
    drafter = HeadDrafter(session, head, stream, 2)
    with pytest.raises(MemraError, match="prime the target first"):
        drafter.chain.fill(stream, PROMPT)
    assert drafter.planes.len == 0
    drafter.close()
    session.close()


def test_a_construction_that_fails_leaves_nothing(model, stream, monkeypatch):
    session, head = Session.allocate(model, stream, 32), DraftHead.load(model, stream)
    closed = []

    def fails(*_, **__):
        raise MemraError("no capture today")

    monkeypatch.setattr(DraftChain, "capture", fails)
    for owner in (HiddenRows, ChainIo, Cache):
        close = owner.close
        monkeypatch.setattr(
            owner, "close", lambda self, c=close: (closed.append(type(self).__name__), c(self))
        )
    with pytest.raises(MemraError, match="no capture today"):
        HeadDrafter(session, head, stream, 2)
    assert {"HiddenRows", "ChainIo", "Cache"} <= set(closed) and session.follower is None
    session.close()


def test_greedy_steps_are_followed_too(model, stream, plain):
    """The step puts the next token where this one lies; the head's row is of this one."""
    made = Drafted(model, stream)
    tokens = generate_greedy(made.session, stream, PROMPT, N)
    assert tokens == plain[:N]
    fresh = Drafted(model, stream, [*PROMPT, *tokens])
    n = len(PROMPT) + N - 1
    for got, want in zip(made.rows(n), fresh.rows(n), strict=True):
        assert np.array_equal(got, want)
    tok = made.session.ws.tok_d.view(0, (1,), np.uint32)
    with pytest.raises(MemraError, match="give another buffer for argmax"):
        made.session.forward(stream, tok, 1, tok)
    made.close()
    fresh.close()
