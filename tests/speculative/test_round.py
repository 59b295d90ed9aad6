"""Speculation is greedy decoding, token for token; and the mutations that must be found."""

import itertools
import random

import numpy as np
import pytest
from spec_rig import PROMPT, Rig, lively_weights, poison, smollm2

from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    ClosedError,
    MemraError,
    TokenError,
)
from memra_lowlevel.graph import DeviceCounter
from memra_lowlevel.speculative import NODE_UPDATE_CALLS, Rewind, SpecRound, accept, stats

N = 48


@pytest.fixture(scope="module")
def rig(device):
    stream = device.stream(name="spec")
    made = Rig(device, stream)
    made.expected = made.plain(PROMPT, N)
    assert len(set(made.expected)) > 15, "a text that repeats itself would hide faults"
    return made


def fresh_meter(rig):
    rig.meter = stats.CallMeter(rig.device.driver)
    return rig.meter


@pytest.mark.parametrize(
    ("k", "layers"), [*((k, 2) for k in range(1, 8)), (1, 1), (4, 1), (7, 1), (2, 3), (7, 3)]
)
def test_equals_plain_greedy(rig, k, layers):
    got, rounds = rig.speculate(PROMPT, N, k=k, layers=layers)
    assert got == rig.expected
    assert rounds.stats.accepted > 0 and rounds.stats.rejected > 0, rounds.stats
    assert rounds.stats.tokens_per_target_pass > 1
    assert rounds.target.planes.len == len(rounds.tokens) - 1
    assert rounds.tokens[: len(PROMPT) + N] == PROMPT + rig.expected


def test_look_up_drafter(rig):
    got, rounds = rig.speculate(PROMPT, N, drafter=rig.ngram())
    assert got == rig.expected
    assert rounds.stats.accepted > 0 and rounds.stats.rejected > 0


def test_another_model_as_draft(rig):
    other = smollm2.Model(rig.device, rig.stream, lively_weights(4), max_ctx=rig.max_ctx)
    got, rounds = rig.speculate(PROMPT, N, model=other, layers=4)
    assert got == rig.expected and rounds.stats.rejected > 0


def test_a_draft_with_a_vocabulary_of_its_own(rig):
    """No token keeps its number; the drafts come out the same, unless the map is left out."""
    n_vocab = rig.model.config.n_vocab
    order = (np.arange(n_vocab) * 5 + 3) % n_vocab  # 5 and 272 have no common factor
    assert (order != np.arange(n_vocab)).all() and len(set(order.tolist())) == n_vocab
    other = smollm2.Model(rig.device, rig.stream, lively_weights(order=order), max_ctx=rig.max_ctx)
    token_map = rig.device.from_numpy(order.astype(np.int32), rig.stream)
    proposed = {}
    for name, options in {
        "same": {}, "mapped": {"model": other, "token_map": token_map}, "lost": {"model": other},
    }.items():  # fmt: skip
        chain = rig.chain(layers=2, **options)
        got, rounds = rig.speculate(PROMPT, N, drafter=chain)
        assert got == rig.expected
        proposed[name] = (rounds.stats.drafted, rounds.stats.accepted)
        chain.io.begin(rig.stream, PROMPT[:1], 0)
        chain.rewind(rig.stream, 0)
        chain.replay(rig.stream, 4)
        chain.io.download(rig.stream)
        rig.stream.sync()
        proposed[name] += tuple(chain.io.drafts(4))
    assert proposed["same"] == proposed["mapped"] != proposed["lost"]
    assert proposed["lost"][1] < proposed["same"][1]
    bad = rig.device.from_numpy(np.array([0, n_vocab], np.int32), rig.stream)
    with pytest.raises(TokenError, match="outside the vocabulary"):
        rig.chain(token_map=bad)


@pytest.mark.parametrize("seed", range(4))
def test_k_changes_every_round(rig, seed):
    """Zero included, often, so that the draft lags and catches up."""
    rng = random.Random(seed)
    ks = iter(lambda: rng.choice([0, 0, 0, 1, 2, 3, 4]), None)
    got, rounds = rig.speculate(PROMPT, N, ks=ks, layers=2)
    assert got == rig.expected
    assert rounds.stats.accepted > 0 and rounds.stats.rejected > 0


def test_a_long_lag_is_filled(rig):
    ks = itertools.cycle([0] * 7 + [4, 4, 4])
    got, rounds = rig.speculate(PROMPT, N, ks=ks, layers=2, n_feed_max=2)
    assert got == rig.expected and rounds.stats.accepted > 0


@pytest.mark.parametrize("force", ["none", "all", "position"])
def test_forced_acceptance(rig, monkeypatch, force):
    """Drafts that are all right, all wrong, or wrong at one place: the text is the same."""
    full = PROMPT + rig.plain(PROMPT, N + 8)
    drafter = rig.ngram()

    def propose(stream, committed, k):
        at = len(committed)
        drafts = full[at : at + k]
        wrong = {"none": range(k), "all": (), "position": [at % 4]}[force]
        drafts = [(t + 1) % 272 if i in wrong else t for i, t in enumerate(drafts)]
        drafter.io.begin(stream, committed[-1:], at - 1, drafts)
        return len(drafts)

    monkeypatch.setattr(drafter, "propose", propose)
    got, rounds = rig.speculate(PROMPT, N, drafter=drafter)
    assert got == rig.expected
    want = {"none": rounds.stats.accepted == 0, "all": rounds.stats.rejected == 0}
    assert want.get(force, rounds.stats.accepted > 0 and rounds.stats.rejected > 0)


def test_probability_floor(rig):
    got, rounds = rig.speculate(PROMPT, N, layers=2, p_min=0.0057)
    assert got == rig.expected
    full = rig.speculate(PROMPT, N, layers=2)[1]
    # Some rounds end early, some do not.
    assert rounds.stats.rounds < rounds.stats.drafted < full.stats.drafted
    assert rounds.stats.accepted > 0


@pytest.mark.parametrize("drafter", ["chain", "ngram"])
def test_ring_planes_equal_masked_decoding(rig, drafter):
    """Windowed planes in a ring that is rebased often, against a masked flat plane."""
    rig = Rig(rig.device, rig.stream, max_ctx=260)
    rig.window = 16
    expected = rig.plain(PROMPT, 220)
    rig.ring = {"ring_chunk": 20, "ring_slack": 8}
    chosen = rig.chain(k_max=7) if drafter == "chain" else rig.ngram(7)
    got, rounds = rig.speculate(PROMPT, 220, k=7, drafter=chosen)
    figures = rounds.stats
    print(f"rebases {figures.rebases}, before a rejection {figures.rebased_and_rejected}")
    assert got == expected
    assert figures.rebases >= 3 and figures.rebased_and_rejected >= 1
    assert figures.accepted > 0 and figures.rejected > 0
    assert rounds.target.planes.kv[0].rows == 16 + 20 + 8 + 31
    if drafter == "chain":
        assert chosen.planes.kv[0].ring.base > 0 and chosen.exec.n_updates == 0


# -- mutations --------------------------------------------------------------------------------


def mutated(rig):
    try:
        got, _ = rig.speculate(PROMPT, N, layers=2)
    except TokenError:
        return False
    return got == rig.expected


def test_mutation_rewind_skipped(rig, monkeypatch):
    real = DeviceCounter.set

    def lost(self, stream, value):
        """The mirror believes in a write that never happened."""
        if self.name.startswith("target") and stream.recording is None and value > len(PROMPT):
            self.note_set(value)
        else:
            real(self, stream, value)

    monkeypatch.setattr(DeviceCounter, "set", lost)
    assert not mutated(rig)


def test_mutation_everything_accepted(rig, monkeypatch):
    monkeypatch.setattr(accept, "accept_greedy", lambda d, a: (len(d), [*d, a[-1]]))
    assert not mutated(rig)


def test_mutation_bonus_off_by_one(rig, monkeypatch):
    real = accept.accept_greedy

    def off(drafts, argmax):
        accepted, new = real(drafts, argmax)
        other = accepted - 1 if accepted else min(1, len(drafts))
        return accepted, [*new[:-1], argmax[other]]

    monkeypatch.setattr(accept, "accept_greedy", off)
    assert not mutated(rig)


def test_mutation_wrong_amount(rig, monkeypatch):
    """The amounts come from one place: too little rewound trips the check of the next round."""

    def short(k, accepted):
        amounts = accept.Rewind(k - accepted, max(0, k - 1 - accepted), max(0, accepted + 1 - k))
        return Rewind(max(0, amounts.target - 1), amounts.draft, amounts.lag)

    monkeypatch.setattr(accept, "rewind_amounts", short)
    with pytest.raises(MemraError, match="committed"):
        rig.speculate(PROMPT, N, layers=2)


def test_a_draft_that_is_not_rewound_is_only_slow(rig, monkeypatch):
    """Stale draft rows cost acceptance, never the text."""
    real = DeviceCounter.set

    def lost(self, stream, value):
        if self.name.startswith("draft") and stream.recording is None and value > len(PROMPT):
            self.note_set(value)
        else:
            real(self, stream, value)

    good = rig.speculate(PROMPT, N, layers=2)[1].stats.accepted
    monkeypatch.setattr(DeviceCounter, "set", lost)
    got, rounds = rig.speculate(PROMPT, N, layers=2)
    assert got == rig.expected
    assert rounds.stats.accepted < good


# -- counts -----------------------------------------------------------------------------------


def unexpected(findings):
    """But for kernels that start early: those of this library wait, which another test proves."""
    return [str(f) for f in findings if f.code != "programmatic-edge"]


def test_one_capture_no_update_one_call_per_step(rig):
    seen = []
    for n in (12, N):
        meter = fresh_meter(rig)
        with meter("capture draft"):
            drafter = rig.chain(k_max=4)
        drafter.sections = meter
        got, rounds = rig.speculate(PROMPT, n, drafter=drafter)
        assert got == rig.expected[:n]
        assert meter.count("capture draft", "cuStreamEndCapture") == 1
        assert meter.count("capture draft", "cuGraphInstantiate") == 1
        steps = meter.units["replay"]
        assert steps >= rounds.stats.drafted > 0
        assert meter.count("replay", "cuGraphLaunch") == steps == meter.count("replay")
        used = [s for s in meter.calls if not s.startswith("capture")]
        for section in used:
            assert not meter.count(section, "cuStreamBeginCapture", "cuGraphInstantiate")
            assert not meter.count(section, *NODE_UPDATE_CALLS)
            assert not meter.count(section, "cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc")
        writes = sum(meter.count(s, *stats.HOST_WRITE_CALLS) for s in used)
        assert 0 < writes <= 3 * rounds.stats.rounds
        for n_rows, exec_ in rounds.execs.items():
            report = exec_.describe()
            assert report.memory_nodes == 0 and not unexpected(report.findings), n_rows
        assert drafter.exec.describe().memory_nodes == 0
        assert not unexpected(drafter.exec.audit())
        seen.append((len(rounds.execs), drafter.exec.n_launches))
    assert seen[1][1] > seen[0][1]
    fresh_meter(rig)


def test_host_order_and_workers_do_not_matter(rig):
    if rig.device.kind != "host":
        return
    from memra_lowlevel.driver.host import host_options

    for seed, order, workers in ((1, "random", 1), (2, "random", 2), (3, "reverse", 2)):
        with host_options(seed=seed, order=order, workers=workers):
            got, _ = rig.speculate(PROMPT, 24, layers=2)
        assert got == rig.expected[:24]


# -- refusals ---------------------------------------------------------------------------------


def test_target_of_nan_is_a_token_error(rig):
    drafter = rig.ngram()
    rounds = rig.rounds(PROMPT, drafter, 3)
    first = rounds.step(rig.stream).tokens
    length = rounds.target.planes.len
    before = poison(rig.model.output_norm, rig.stream)
    try:
        with pytest.raises(TokenError):
            rounds.step(rig.stream)
    finally:
        rig.model.output_norm.copy_from(rig.stream, before)
    assert rounds.target.planes.len == length
    got = list(first)
    while len(got) < N:
        got += rounds.step(rig.stream).tokens
    assert got[:N] == rig.expected, "the device is still usable, nothing had moved"


def test_draft_of_nan_is_a_token_error(rig):
    other = smollm2.Model(rig.device, rig.stream, lively_weights(), max_ctx=rig.max_ctx)
    drafter = rig.chain(model=other, layers=2)
    rounds = rig.rounds(PROMPT, drafter, 3)
    got = list(rounds.step(rig.stream).tokens)
    lengths = rounds.target.planes.len, drafter.planes.len
    before = poison(other.output_norm, rig.stream)
    with pytest.raises(TokenError, match="NaN"):
        rounds.step(rig.stream)
    other.output_norm.copy_from(rig.stream, before)
    assert rounds.target.planes.len == lengths[0]
    assert lengths[1] <= drafter.planes.len <= lengths[0]
    assert drafter.planes.len == drafter.planes.counters.to_numpy(rig.stream)[0]
    while len(got) < N:
        got += rounds.step(rig.stream).tokens
    assert got[:N] == rig.expected
    assert rounds.stats.accepted > 0


def test_a_target_that_moves_its_own_counter_is_named_at_once(rig):
    rounds = rig.rounds(PROMPT, rig.ngram(), 2)
    target, length = rounds.target, rounds.target.planes.len
    forward = target.forward

    def eager(stream, tokens, n_rows, argmax):
        forward(stream, tokens, n_rows, argmax)
        target.planes.advance(stream, n_rows)

    target.forward = eager
    with pytest.raises(MemraError, match=r"forward over \d rows moved its planes' length"):
        rounds.step(rig.stream)
    assert target.planes.len == length
    target.forward = forward
    got = list(rounds.step(rig.stream).tokens)
    assert got == rig.expected[: len(got)]


def test_up_to_the_last_row(rig):
    """k shrinks near the end of the planes; then the round says no and nothing moves."""
    small = Rig(rig.device, rig.stream, max_ctx=len(PROMPT) + 21)
    small.model = rig.model
    rounds = small.rounds(PROMPT, small.chain(), 4)
    got: list[int] = []
    while rounds.target.planes.len < rounds.target.planes.capacity:
        got += rounds.step(rig.stream).tokens
    assert got == rig.expected[: len(got)] and len(got) == 22
    with pytest.raises(CapacityExceeded):
        rounds.step(rig.stream)
    assert rounds.target.planes.len == rounds.target.planes.capacity


def test_wrong_use(rig):
    drafter = rig.ngram()
    rounds = rig.rounds(PROMPT, drafter, 2)
    for k in (-1, 5):
        with pytest.raises(MemraError):
            rounds.step(rig.stream, k)
    with pytest.raises(ArgumentError, match=r"SpecRound\.step: k got '4'"):
        rounds.step(rig.stream, "4")
    rounds.tokens.append(1)
    with pytest.raises(MemraError, match="prime"):
        rounds.step(rig.stream)
    with pytest.raises(TokenError, match="tokenizer"):
        drafter.io.begin(rig.stream, [272], 0)
    with pytest.raises(TokenError, match="NaN"):
        drafter.io.begin(rig.stream, [-1], 0)
    for tokens, error, words in (
        ([1, 2.5], ArgumentError, "a token got 2.5"),
        ([1, 272], TokenError, "SpecRound: token 272"),
    ):
        with pytest.raises(error, match=words):
            SpecRound(rounds.target, drafter, 2, tokens)
    with pytest.raises(ArgumentError, match=r"target got an object.*planes, forward"):
        SpecRound(object(), drafter, 2, [1])
    rounds.close()
    with pytest.raises(ClosedError, match="SpecRound"):
        rounds.step(rig.stream)
    with pytest.raises(TokenError, match="sentinel"):
        drafter.io.begin(rig.stream, [0x7FFFFFFF], 0)
    with pytest.raises(CapacityExceeded):
        drafter.io.begin(rig.stream, [1] * 9, 0)


def test_a_verification_that_is_refused_takes_the_drafts_back(rig):
    drafter = rig.chain(k_max=4)
    session = rig.session(rows=3)
    session.prime(rig.stream, PROMPT[:-1])
    drafter.fill(rig.stream, PROMPT[:-1])
    rounds = SpecRound(session, drafter, 4, PROMPT)
    lengths = session.planes.len, drafter.planes.len
    for _ in range(2):
        with pytest.raises(CapacityExceeded, match="5 rows"):
            rounds.step(rig.stream)
        assert (session.planes.len, drafter.planes.len) == lengths
    for _ in range(3):
        rounds.step(rig.stream, 2)
    assert rounds.tokens[len(PROMPT) :] == rig.expected[: len(rounds.tokens) - len(PROMPT)]
    rounds.close()
