"""A target whose passes write the draft's rows too: rounds without a lag, and the same text."""

import itertools
import random

import numpy as np
import pytest
from spec_rig import PROMPT, Rig, lively_weights, poison, smollm2

from memra_lowlevel.cache import KvLayer, RowsAt
from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    ClosedError,
    MemraError,
    TokenError,
)
from memra_lowlevel.graph import counters
from memra_lowlevel.speculative import ChainIo, DeviceLoop, DraftChain, SpecRound

N = 40
LAST = len(PROMPT) - 1


@pytest.fixture(scope="module")
def rig(device):
    stream = device.stream(name="followed")
    made = Rig(device, stream)
    made.expected = made.plain(PROMPT, N)
    return made


class _Behind:
    """A plane of the draft, with rows that begin where the target's length is."""

    def __init__(self, plane, len_d):
        self.plane, self.len_d = plane, len_d

    def __getattr__(self, name):
        return getattr(self.plane, name)

    def reserve(self, *_):
        """The target's own planes have refused already, and these are as long."""

    check_reads = reserve

    def attend(self, *args, **options):
        KvLayer.attend(self, *args, **options)


class Followed:
    """A target and a draft of its first layers, whose rows every pass of the target writes."""

    def __init__(self, rig, layers=2, k_max=4, *, model=None, p_min=None, primed=True, ring=None):
        self.rig, self.stream, self.layers, self.mute = rig, rig.stream, layers, False
        self.model = model or rig.model
        self.session = rig.session()
        rig.ring = ring or rig.ring
        self.planes = rig.planes(layers, "draft")
        own, self.ws = self.model.workspace(1), self.model.workspace(17)
        kv, io = list(self.planes.planes()), self._io(k_max)
        self.behind = [_Behind(plane, self.session.kv_layers[0].len_d) for plane in kv]

        def body(stream):
            self.model.forward(
                stream, own, kv, 1, 0, layers, tokens=io.tok_d, positions=io.pos_d,
                argmax=io.tok_d, probability=io.p_d if p_min is not None else None,
            )  # fmt: skip

        def fill(stream, tokens, position):
            self.planes.advance(stream, len(tokens))  # the target's passes wrote the rows

        self.chain = DraftChain.capture(
            self.stream,
            body,
            io,
            self.planes,
            k_max,
            fill=fill,
            p_min=p_min,
            follows=self.session.planes,
        )
        self.session.follower = self
        self.session.prime(self.stream, PROMPT[:-1])
        if primed:
            self.chain.fill(self.stream, PROMPT[:-1])
        self.tokens = list(PROMPT)

    def _io(self, k_max):
        config = self.model.config
        return ChainIo(self.rig.device, config.width, k_max, config.n_vocab)

    def follow(self, stream, ws, tokens, n_rows):
        if not self.mute:
            self.model.forward(
                stream, self.ws, self.behind, n_rows, 0, self.layers, False, tokens=tokens
            )

    def rounds(self, k=4):
        return SpecRound(self.session, self.chain, k, self.tokens)

    def loop(self, k=3, **options):
        return DeviceLoop(self.stream, self.session, self.chain, k, **options)

    def run(self, loop, n):
        result = loop.run(self.stream, self.tokens, n)
        self.tokens += result.tokens
        return result

    def check_lengths(self, tokens):
        """No lag, and mirrors and device agree."""
        assert self.planes.len == self.session.planes.len == len(tokens) - 1
        for planes in (self.planes, self.session.planes):
            mirrors = [c for c in (planes.lengths.counter, planes.lengths.slots) if c is not None]
            counters.verify_counters(self.stream, mirrors)
            for plane in planes.planes():
                assert planes.len - (plane.ring.base if plane.ring else 0) <= plane.rows

    def rows(self, planes):
        """Bytes of the valid rows of the draft's layers."""
        found = []
        for plane in list(planes.planes())[: self.layers]:
            assert plane.ring is None
            for buffer, n_bytes in ((plane.k, plane.k_tok_bytes), (plane.v, plane.v_tok_bytes)):
                found.append(buffer.to_numpy(self.stream)[: n_bytes * planes.len])
        return np.concatenate(found)

    def differing(self):
        """Bytes of the draft's rows that are not those of the target's first layers."""
        assert self.model is self.rig.model
        return int((self.rows(self.planes) != self.rows(self.session.planes)).sum())

    def check(self, tokens):
        self.check_lengths(tokens)
        assert self.differing() == 0

    def ends(self):
        """What lies behind the last row of each plane of the draft."""
        return [
            buffer.to_numpy(self.stream)[plane.rows * n_bytes :]
            for plane in self.planes.planes()
            for buffer, n_bytes in ((plane.k, plane.k_tok_bytes), (plane.v, plane.v_tok_bytes))
        ]

    def close(self):
        for owned in (self.chain, self.session, self.planes, self.ws):
            owned.close()


# -- rounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "layers"), [(1, 2), (1, 1), (4, 2), (7, 3), (3, 4)])
def test_rounds_equal_plain_greedy_and_leave_no_lag(rig, k, layers):
    made = Followed(rig, layers, max(k, 4))
    rounds, seen = made.rounds(k), set()
    while len(rounds.tokens) < len(PROMPT) + N:
        result = rounds.step(rig.stream)
        assert result.drafted == k
        seen.add("all" if result.accepted == k else "some")
        made.check(rounds.tokens)
    assert rounds.tokens[len(PROMPT) :][:N] == rig.expected
    assert seen == ({"all"} if layers == 4 else {"all", "some"})
    rounds.close()
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_k_changes_every_round(rig, seed):
    """Rounds of no draft leave their row to the target alone."""
    rng, made, seen = random.Random(seed), Followed(rig, 3), set()
    rounds = made.rounds()
    while len(rounds.tokens) < len(PROMPT) + N:
        result = rounds.step(rig.stream, rng.choice([0, 0, 1, 2, 4]))
        made.check(rounds.tokens)
        seen.add((result.drafted == 0, result.accepted == result.drafted))
    assert rounds.tokens[len(PROMPT) :][:N] == rig.expected
    assert seen == {(True, True), (False, True), (False, False)}
    rounds.close()
    made.close()


def test_a_probability_floor_ends_a_round_early(rig):
    made, drafted = Followed(rig, 3, p_min=0.0057), set()
    rounds = made.rounds()
    while len(rounds.tokens) < len(PROMPT) + N:
        result = rounds.step(rig.stream)
        made.check(rounds.tokens)
        drafted.add((result.drafted < 4, result.accepted == result.drafted))
    assert rounds.tokens[len(PROMPT) :][:N] == rig.expected
    assert {short for short, _ in drafted} == {False, True} and (True, True) in drafted
    rounds.close()
    made.close()


def test_the_follower_is_what_writes_the_rows(rig):
    """Without it the row of the last draft is missing behind a round that was all right."""
    for mute in (False, True):
        made = Followed(rig, 4)
        made.mute = mute
        rounds = made.rounds()
        assert rounds.step(rig.stream).accepted == 4
        made.check_lengths(rounds.tokens)
        assert (made.differing() > 0) == mute
        rounds.close()
        made.close()


def test_a_draft_that_is_not_followed_lags_as_before(rig):
    """A row behind all drafts right, and one more for each round of none."""
    chain = rig.chain(layers=4)
    rounds, lags = rig.rounds(PROMPT, chain, 3), []
    for k in (3, 0, 0, 3):
        result = rounds.step(rig.stream, k)
        assert result.accepted == k
        lags.append(rounds.target.planes.len - chain.planes.len)
    loop = DeviceLoop(rig.stream, rounds.target, chain, 3)
    assert set(loop.run(rig.stream, rounds.tokens, 9).accepted) == {3}
    lags.append(rounds.target.planes.len - chain.planes.len)
    counters.verify_counters(rig.stream, [chain.planes.lengths.counter])
    assert lags == [1, 2, 3, 1, 1]
    rounds.close()
    loop.close()


def test_another_model_as_draft(rig):
    """Its rows are not the target's; the target's length is all that they share."""
    other = smollm2.Model(rig.device, rig.stream, lively_weights(4), max_ctx=rig.max_ctx)
    made = Followed(rig, 4, model=other)
    rounds = made.rounds()
    for k in itertools.cycle((4, 0, 2)):
        rounds.step(rig.stream, k)
        made.check_lengths(rounds.tokens)
        if len(rounds.tokens) >= len(PROMPT) + N:
            break
    assert rounds.tokens[len(PROMPT) :][:N] == rig.expected and rounds.stats.rejected > 0
    # What the passes wrote, one after the other, is what the draft makes of the whole text.
    seen, fresh = made.rows(made.planes), Followed(rig, 4, model=other, primed=False)
    fresh.session.prime(rig.stream, rounds.tokens[LAST:-1])
    fresh.chain.fill(rig.stream, rounds.tokens[:-1])
    assert np.array_equal(fresh.rows(fresh.planes), seen)
    for owned in (rounds, made, fresh):
        owned.close()


def test_a_draft_that_was_not_filled_catches_up(rig):
    """The rows are there; the length is moved over them at the first round with drafts."""
    made = Followed(rig, 2, primed=False)
    rounds = made.rounds()
    assert made.planes.len == 0
    for k in (0, 4, 0, 4, 4):
        rounds.step(rig.stream, k)
        if k:
            made.check(rounds.tokens)
    assert rounds.tokens[len(PROMPT) :] == rig.expected[: len(rounds.tokens) - len(PROMPT)]
    rounds.close()
    made.close()


@pytest.mark.parametrize("where", ["target", "draft"])
def test_a_row_of_nan_moves_nothing(rig, where):
    other = smollm2.Model(rig.device, rig.stream, lively_weights(), max_ctx=rig.max_ctx)
    made = Followed(rig, 4, model=other)
    rounds = made.rounds(3)
    rounds.step(rig.stream)
    norm = (rig.model if where == "target" else other).output_norm
    before, saved = list(rounds.tokens), poison(norm, rig.stream)
    with pytest.raises(TokenError):
        rounds.step(rig.stream)
    norm.copy_from(rig.stream, saved)
    made.check_lengths(before)
    while len(rounds.tokens) < len(PROMPT) + 20:
        rounds.step(rig.stream)
        made.check_lengths(rounds.tokens)
    assert rounds.tokens[len(PROMPT) :][:20] == rig.expected[:20]
    assert rounds.stats.rejected == 0
    rounds.close()
    made.close()


# -- on the device ----------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "layers"), [(1, 2), (3, 2), (4, 3), (4, 4)])
def test_a_loop_equals_plain_greedy_in_one_launch(rig, k, layers):
    made = Followed(rig, layers)
    loop = made.loop(k)
    before = dict(rig.device.driver.counts())
    result = made.run(loop, N)
    spent = {c: n - before.get(c, 0) for c, n in rig.device.driver.counts().items()}
    assert spent["cuGraphLaunch"] == 1 and not spent.get("cuLaunchKernel")
    assert made.tokens[len(PROMPT) :][:N] == rig.expected and result.reason == "enough"
    assert k in result.accepted and (layers == 4) == (set(result.accepted) == {k})
    made.check(made.tokens)
    loop.close()
    made.close()


def test_a_loop_has_the_rounds_of_the_step_by_step_path(rig):
    looped, stepped = Followed(rig, 3), Followed(rig, 3)
    loop, rounds = looped.loop(3), stepped.rounds(3)
    result = looped.run(loop, N)
    assert [rounds.step(rig.stream).accepted for _ in result.accepted] == list(result.accepted)
    assert rounds.tokens == looped.tokens
    for owned in (loop, rounds, looped, stepped):
        owned.close()


def test_no_lag_behind_any_round_of_a_loop(rig):
    """Launches of a round each, launches of some, and rounds of the host in between."""
    made, seen = Followed(rig, 3, primed=False), set()
    loop = made.loop(2)
    for n in (1, 1, 1, 7, 1, 3, 1, 1):
        result = made.run(loop, n)
        seen.add(result.accepted[-1] == 2)
        made.check(made.tokens)
        if n == 7:
            rounds = made.rounds(2)
            for k in (0, 2):
                rounds.step(rig.stream, k)
                made.check(rounds.tokens)
            made.tokens = rounds.tokens
            rounds.close()
    assert seen == {False, True}
    assert made.tokens[len(PROMPT) :] == rig.expected[: len(made.tokens) - len(PROMPT)]
    loop.close()
    made.close()


def test_a_loop_over_nan_moves_nothing(rig):
    made = Followed(rig, 4)
    loop = made.loop(3)
    made.run(loop, 4)
    before, saved = list(made.tokens), poison(rig.model.output_norm, rig.stream)
    with pytest.raises(TokenError, match="after 0 tokens"):
        made.run(loop, 5)
    rig.model.output_norm.copy_from(rig.stream, saved)
    made.check(before)
    assert set(made.run(loop, 9).accepted) == {3}
    made.check(made.tokens)
    assert made.tokens[len(PROMPT) :] == rig.expected[: len(made.tokens) - len(PROMPT)]
    loop.close()
    made.close()


# -- where the planes end ---------------------------------------------------------------------


@pytest.mark.parametrize("extra", range(8, 14))
def test_rounds_up_to_the_last_row(rig, extra):
    small = Rig(rig.device, rig.stream, max_ctx=len(PROMPT) + extra)
    small.model = rig.model
    made = Followed(small, 4 if extra % 2 else 2)
    rounds, ends = made.rounds(), made.ends()
    while made.planes.len < made.planes.capacity:
        rounds.step(rig.stream)
        made.check(rounds.tokens)
    assert rounds.tokens[len(PROMPT) :] == rig.expected[: extra + 1]
    with pytest.raises(CapacityExceeded):
        rounds.step(rig.stream)
    made.check(rounds.tokens)
    assert all(np.array_equal(*pair) for pair in zip(ends, made.ends(), strict=True))
    rounds.close()
    made.close()


@pytest.mark.parametrize(("extra", "layers"), [*((n, 4) for n in range(8, 14)), (9, 2), (12, 2)])
def test_a_loop_stops_where_the_planes_end(rig, extra, layers):
    """With the whole model as draft a round is 4 rows: all ends are met, an exact one too."""
    small = Rig(rig.device, rig.stream, max_ctx=len(PROMPT) + extra)
    small.model = rig.model
    made = Followed(small, layers)
    loop, ends = made.loop(3), made.ends()
    result = made.run(loop, 50)
    room = made.planes.capacity - made.planes.len
    assert result.reason == "no room" and 0 <= room < 4
    assert layers < 4 or room == (extra + 1) % 4
    made.check(made.tokens)
    with pytest.raises(CapacityExceeded):
        made.run(loop, 1)
    made.check(made.tokens)
    assert made.tokens[len(PROMPT) :] == rig.expected[: len(made.tokens) - len(PROMPT)]
    assert all(np.array_equal(*pair) for pair in zip(ends, made.ends(), strict=True))
    loop.close()
    made.close()


@pytest.mark.parametrize(("chunk", "least"), [(4, 3), (5, 0)])
@pytest.mark.parametrize("how", ["rounds", "loop"])
def test_the_row_of_the_last_draft_lies_in_the_ring(rig, how, chunk, least):
    """The draft's ring is rebased where not all 4 rows of a round fit; its own steps write 3."""
    ringed = Rig(rig.device, rig.stream, max_ctx=160)
    ringed.model, ringed.window = rig.model, 16
    expected = ringed.plain(PROMPT, 60)
    made = Followed(ringed, 4, ring={"ring_chunk": chunk, "ring_slack": 8})
    work = made.rounds(3) if how == "rounds" else made.loop(3)
    left, reasons = set(), set()
    while len(made.tokens) < len(PROMPT) + 60:
        ring = made.planes.kv[0].ring
        left.add(ring.base + ring.rows - made.planes.len)
        if how == "rounds":
            work.step(rig.stream)
            made.tokens = work.tokens
        else:
            reasons.add(made.run(work, 13).reason)
        made.check_lengths(made.tokens)
    assert made.tokens[len(PROMPT) :][:60] == expected
    assert made.planes.kv[0].ring.base > 0 and min(left) == least
    assert how == "rounds" or "no room" in reasons
    work.close()
    made.close()


@pytest.mark.parametrize("ks", [(0,), (0, 0, 0, 3)])
@pytest.mark.parametrize("chunk", [4, 5])
def test_rounds_without_drafts_make_room_in_the_ring_too(rig, chunk, ks):
    """The target's pass writes a row of the draft's, whether the round drafts or not."""
    ringed = Rig(rig.device, rig.stream, max_ctx=160)
    ringed.model, ringed.window = rig.model, 16
    expected = ringed.plain(PROMPT, 60)
    made = Followed(ringed, 4, ring={"ring_chunk": chunk, "ring_slack": 8})
    rounds, random = made.rounds(3), np.random.default_rng(chunk)
    while len(made.tokens) < len(PROMPT) + 60:
        rounds.step(rig.stream, int(random.choice(ks)))
        made.tokens = rounds.tokens
        made.check_lengths(made.tokens)
    assert made.tokens[len(PROMPT) :][:60] == expected and made.planes.kv[0].ring.base > 0
    rounds.close()
    made.close()


def test_what_cannot_be_followed_is_refused(rig):
    made = Followed(rig, 2)
    body, io, stream = made.chain.step, made.chain.io, rig.stream
    planes = rig.planes(2, "other")
    for follows, error, text in (
        (made.session, ArgumentError, "session.planes"), ("x", ArgumentError, "follows"),
        (planes, MemraError, "cannot follow themselves"),
        (made.session.planes, MemraError, "before the target is primed"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            DraftChain.capture(stream, body, io, planes, 2, follows=follows)
        assert planes.len == 0
    planes.close()
    made.close()


def test_closed_chains_and_loops_are_refused_before_anything_moves(rig):
    made = Followed(rig, 2, primed=False)
    loop = made.loop(3)
    loop.close()
    lengths = made.session.planes.len, made.planes.len
    with pytest.raises(ClosedError, match=r"DeviceLoop.run: the loop was closed"):
        loop.run(rig.stream, made.tokens, 4)
    other = made.loop(3)
    made.chain.close()
    with pytest.raises(ClosedError, match=r"DeviceLoop.run: chain .* was closed"):
        other.run(rig.stream, made.tokens, 4)
    with pytest.raises(ClosedError, match="DeviceLoop: chain"):
        made.loop(3)
    assert (made.session.planes.len, made.planes.len) == lengths
    other.close()
    made.close()


def test_rows_at_are_of_a_plane_and_a_length_on_the_device(rig):
    (plane,) = (planes := rig.planes(1, "plane")).planes()
    length = rig.device.zeros(1, np.int32, rig.stream)
    rows = RowsAt(plane, length)
    assert rows.len_d is length and rows.k is plane.k and rows.v is plane.v
    assert (rows.rows, rows.base_d) == (plane.rows, plane.base_d)
    for name, bad in (("plane", (5, length)), ("plane", (planes, length)), ("len_d", (plane, 5))):
        with pytest.raises(ArgumentError, match=f"RowsAt: {name}"):
            RowsAt(*bad)
    planes.close()
