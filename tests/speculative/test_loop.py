"""Rounds that follow each other on the device: greedy decoding in one driver call."""

import numpy as np
import pytest
from spec_rig import PROMPT, Rig, poison

from memra_lowlevel.errors import ArgumentError, CapacityExceeded, MemraError, TokenError
from memra_lowlevel.graph import counters
from memra_lowlevel.kernels import registry
from memra_lowlevel.kernels import speculative as kernels
from memra_lowlevel.speculative import DeviceLoop, SpecRound

N = 40


@pytest.fixture(scope="module")
def rig(device):
    stream = device.stream(name="loop")
    made = Rig(device, stream)
    made.expected = made.plain(PROMPT, N)
    return made


class Looped:
    """A device loop over fresh planes, and the committed tokens."""

    def __init__(self, rig, k=3, layers=2, prime=True, **options):
        self.rig, self.stream = rig, rig.stream
        self.session, self.chain = rig.session(), rig.chain(layers=layers, k_max=max(k, 4))
        self.session.prime(self.stream, PROMPT[:-1])
        if prime:
            self.chain.fill(self.stream, PROMPT[:-1])
        self.loop = DeviceLoop(self.stream, self.session, self.chain, k, **options)
        self.tokens = list(PROMPT)

    def run(self, n):
        result = self.loop.run(self.stream, self.tokens, n)
        self.tokens += result.tokens
        return result

    @property
    def new(self):
        return self.tokens[len(PROMPT) :]

    def check(self):
        """Lengths, mirrors and device agree with the committed tokens."""
        target, draft = self.session.planes, self.chain.planes
        assert target.len == len(self.tokens) - 1
        assert 0 <= target.len - draft.len <= 1
        for planes in (target, draft):
            mirrors = [c for c in (planes.lengths.counter, planes.lengths.slots) if c is not None]
            counters.verify_counters(self.stream, mirrors)

    def close(self):
        self.loop.close()
        self.session.close()


@pytest.mark.parametrize(("k", "layers"), [(1, 2), (2, 1), (3, 2), (4, 3), (4, 4)])
def test_equals_plain_greedy_in_one_launch(rig, k, layers):
    made = Looped(rig, k, layers)
    before = dict(rig.device.driver.counts())
    result = made.run(N)
    spent = {c: n - before.get(c, 0) for c, n in rig.device.driver.counts().items()}
    assert made.new[:N] == rig.expected and result.reason == "enough"
    assert spent["cuGraphLaunch"] == 1 and not spent.get("cuLaunchKernel")
    assert sum(a + 1 for a in result.accepted) == len(result.tokens) < N + k + 1
    assert made.loop.stats.rounds == len(result.accepted) < N
    if layers < 4:
        assert made.loop.stats.accepted > 0 and made.loop.stats.rejected > 0
    else:
        assert made.loop.stats.rejected == 0  # the whole model drafts: it always lags by one
    made.check()
    made.close()


def test_rounds_are_those_of_the_step_by_step_path(rig):
    made = Looped(rig, 3)
    result = made.run(N)
    rounds = rig.rounds(PROMPT, rig.chain(layers=2, k_max=4), 3)
    steps = [rounds.step(rig.stream) for _ in result.accepted]
    assert [s.accepted for s in steps] == list(result.accepted)
    assert rounds.tokens == made.tokens
    made.close()


def test_launch_after_launch_and_rounds_in_between(rig):
    made = Looped(rig, 2, prime=False)  # the draft has seen nothing: the first launch fills it
    for n in (1, 7, 3):
        result = made.run(n)
        assert len(result.tokens) >= n
        made.check()
    rounds = SpecRound(made.session, made.chain, 2, made.tokens)
    rounds.step(rig.stream)
    made.tokens = rounds.tokens
    made.check()
    made.run(5)
    made.check()
    assert made.new == rig.expected[: len(made.new)] and len(made.new) > 16
    rounds.close()
    made.close()


def test_an_end_token_ends_the_text(rig):
    end = rig.expected[11]
    first = rig.expected.index(end)
    made = Looped(rig, 3, end_tokens=[end, 271])
    result = made.run(N)
    assert result.reason == "ended" and first < len(made.new) <= first + 4
    assert made.new == rig.expected[: len(made.new)]
    made.check()
    made.close()


def test_it_stops_where_the_planes_end(device):
    rig = Rig(device, device.stream(name="short"), max_ctx=len(PROMPT) + 12)
    expected = rig.plain(PROMPT, 13)
    made = Looped(rig, 3)
    result = made.run(50)
    assert result.reason == "no room" and made.new == expected[: len(made.new)]
    assert made.session.planes.capacity - made.session.planes.len < 4
    made.check()
    with pytest.raises(CapacityExceeded):
        made.run(1)
    made.check()
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_on_rings(device, seed):
    """A window that is rebased between launches, never inside one."""
    rig = Rig(device, device.stream(name="rings"), max_ctx=160)
    rig.window = 16
    expected = rig.plain(PROMPT, 60)
    rig.ring = {"ring_chunk": 17, "ring_slack": 8}
    made = Looped(rig, 3, layers=2 + seed % 2)
    reasons = set()
    while len(made.new) < 60:
        reasons.add(made.run(20 + seed).reason)
        made.check()
    assert made.new[:60] == expected
    assert "no room" in reasons
    made.close()


def test_a_row_of_nan_commits_nothing(rig):
    made = Looped(rig, 3)
    made.run(4)
    before = list(made.tokens)
    norm = rig.model.output_norm
    saved = poison(norm, rig.stream)
    with pytest.raises(TokenError, match="after 0 tokens"):
        made.run(5)
    norm.copy_from(rig.stream, saved)
    made.check()
    made.run(9)
    assert made.tokens[: len(before)] == before
    assert made.new == rig.expected[: len(made.new)]
    made.close()


def test_refusals(rig):
    session, chain = rig.session(), rig.chain(layers=2, k_max=4)
    session.prime(rig.stream, PROMPT[:-1])
    for bad in ({"k": 0}, {"k": 5}, {"k": 2, "n_max": 0}):
        with pytest.raises(MemraError):
            DeviceLoop(rig.stream, session, chain, **bad)
    for given, named in (
        ((None, session, chain, 2), "stream"), ((rig.stream, None, chain, 2), "target"),
        ((rig.stream, session, session, 2), "chain"), ((rig.stream, session, chain, "2"), "k"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"DeviceLoop: {named}"):
            DeviceLoop(*given)
    for bad in ({"n_max": 8.5}, {"end_tokens": ["a"]}, {"end_tokens": [1 << 40]}):
        with pytest.raises(ArgumentError, match="DeviceLoop: "):
            DeviceLoop(rig.stream, session, chain, 2, **bad)
    with pytest.raises(MemraError, match="p_min"):
        DeviceLoop(rig.stream, session, rig.chain(layers=2, p_min=0.5), 2)
    loop = DeviceLoop(rig.stream, session, chain, 2, n_max=8)
    for tokens, n in ((PROMPT, 9), (PROMPT, 0), (PROMPT[:-1], 3), ([], 3)):
        with pytest.raises(MemraError):
            loop.run(rig.stream, tokens, n)
    assert session.planes.len == len(PROMPT) - 1
    loop.close()
    session.close()


def test_the_kernel_equals_its_oracle(device, stream):
    rng, seen = np.random.default_rng(5), set()
    oracle = registry.oracle("round_advance")
    small = device.zeros(4, np.int32, stream)
    for i in range(200):
        k, n_planes = int(rng.integers(1, 6)), int(rng.choice([1, 40]))
        drafts = rng.integers(0, 6, k + 1).astype(np.int32)
        argmax = np.where(rng.random(k + 1) < 0.7, np.append(drafts[1:], 3), 5).astype(np.int32)
        if rng.random() < 0.1:
            argmax[rng.integers(k + 1)] = rng.choice([-1, 6, 0x7FFFFFFF])
        io = np.array(
            [1, 2, k, 1, 1 if rng.random() < 0.1 else -1, *rng.integers(0, 6, 4)], np.int32
        )
        done, position = int(rng.integers(0, 9)), int(rng.integers(20, 40))
        state = np.array([done, 12, 2, position, 46, 45, 0], np.int32)
        ends = np.array([[-1, -1], [4, -1]][rng.random() < 0.3], np.int32)
        followed = bool(rng.random() < 0.5)
        want = oracle(io, drafts, argmax, state, ends, k, 6, followed)
        up = [device.from_numpy(a, stream) for a in (io, drafts, argmax, state)]
        target, draft = (device.from_numpy(np.full(n_planes, 100, np.int32), stream) for _ in "ab")
        tokens, accepted = (device.from_numpy(np.full(20, -7, np.int32), stream) for _ in "ab")
        kernels.round_advance(
            stream, *up, target, draft, device.from_numpy(ends, stream), tokens, accepted,
            k=k, n_vocab=6, goes_on=0, lags=0, followed=followed,
        )  # fmt: skip
        got_io, got_drafts, _, got_state = (b.to_numpy(stream) for b in up)
        assert got_io.tolist() == want["io"] and got_drafts.tolist() == want["drafts"], i
        assert got_state.tolist() == want["state"], i
        assert (target.to_numpy(stream) == 100 + want["target"]).all()
        assert (draft.to_numpy(stream) == 100 + want["draft"]).all()
        new = tokens.to_numpy(stream)
        assert new[done : done + len(want["tokens"])].tolist() == want["tokens"]
        assert (np.delete(new, range(done, done + len(want["tokens"]))) == -7).all()
        assert [a for a in accepted.to_numpy(stream).tolist() if a != -7] == want["accepted"]
        seen |= {
            ("reason", want["state"][6]),
            ("lags", want["lags"]),
            ("none", want["target"] == 1),
            ("all, followed", want["target"] == k + 1 and followed),
            ("all, alone", want["target"] == k + 1 and not followed),
        }
        if want["target"] == k + 1:  # all drafts right: a row behind, or none
            assert (want["lags"], want["draft"]) == ((0, 1) if followed else (1, 0))
    assert seen >= {*(("reason", r) for r in range(5)), ("lags", 1), ("lags", 0), ("none", True)}
    assert seen >= {("all, followed", True), ("all, alone", True)}
    with pytest.raises(ArgumentError):
        kernels.round_advance(
            stream, small, *up[1:], target, draft, small, tokens, accepted,
            k=k, n_vocab=6, goes_on=0, lags=0,
        )  # fmt: skip
