"""Random lives of a mixed cache against a model that keeps everything in float64."""

import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memra_lowlevel import Device, formats
from memra_lowlevel.cache import (
    Cache,
    KvCache,
    LayerPlan,
    ModelPlan,
    Recurrent,
    SlidingKvCache,
)
from memra_lowlevel.errors import CapacityExceeded, RewindRefused
from memra_lowlevel.graph import verify_counters
from memra_lowlevel.reference import recur

HEAD, D, WINDOW, CHUNK, SLACK, ROUND = 64, 32, 48, 96, 64, 8
TOKENS, MAX_CTX = 128, 6000
MODEL = ModelPlan(
    (
        LayerPlan(SlidingKvCache(WINDOW), HEAD, HEAD, HEAD, HEAD),
        LayerPlan(Recurrent(3 * D, 4, D * D)),
        LayerPlan(KvCache(), HEAD, HEAD, HEAD, HEAD),
    )
)
COUNTS = dict.fromkeys(
    ("steps", "append", "prime", "draft", "rejection", "rebase", "rebase in draft", "wrap",
     "snapshot", "restore", "restore by copy", "rewind", "refused", "checked"), 0
)  # fmt: skip


class World:
    """What all lives share: the device, the tokens' rows, and what they decode to."""

    def __init__(self, spec):
        self.device = Device(spec)
        self.stream = self.device.stream(name="life")
        rng = np.random.default_rng(0)
        normal = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
        self.k, self.v, self.rows = (
            normal(TOKENS, HEAD),
            normal(TOKENS, HEAD),
            normal(TOKENS, 3 * D),
        )
        self.q = normal(TOKENS, 2, HEAD)
        self.alpha, self.beta = normal(TOKENS, 1), normal(TOKENS, 1)
        self.w, self.dt, self.a = normal(3 * D, 4) * 0.5, normal(1), np.array([-0.4], np.float32)
        self.k_seen = formats.decode(formats.Q8_0, formats.encode(formats.Q8_0, self.k))
        self.v_seen = formats.decode(formats.Q5_1, formats.encode(formats.Q5_1, self.v))
        up = lambda x: self.device.from_numpy(x, self.stream)  # noqa: E731
        self.fixed = [up(self.w), up(self.a), up(self.dt)]
        options = {"ring_chunk": CHUNK, "ring_slack": SLACK, "round_rows": ROUND, "check": False}
        self.cache = Cache(self.device, self.stream, MODEL, MAX_CTX, ring=True, **options)
        self.flat = Cache(self.device, self.stream, MODEL, MAX_CTX, ring=False, **options)

    def up(self, x, tokens):
        return self.device.from_numpy(np.ascontiguousarray(x[tokens]), self.stream)

    def run(self, cache, tokens, scan):
        stream, n = self.stream, len(tokens)
        outs = []
        for il, layer in enumerate(cache.kv):
            if layer is None:
                continue
            layer.append(stream, self.up(self.k, tokens), self.up(self.v, tokens))
            if n <= ROUND:
                out = self.device.empty((n, 2, HEAD), np.float32, stream)
                out.fill(stream, 0xFF)
                layer.attend(stream, self.up(self.q, tokens), out)
                outs.append((il, out))
        layer = cache.recur[1]
        out = self.device.empty((n, 1, D), np.float32, stream)
        w, a, dt = self.fixed
        (layer.scan if scan else layer.step)(
            stream, self.up(self.rows, tokens), w, self.up(self.alpha, tokens), a, dt,
            self.up(self.beta, tokens), out,
        )  # fmt: skip
        outs.append((1, out))
        cache.advance(stream, n, scanned=scan)
        return [(il, out.to_numpy(stream)) for il, out in outs]


class History:
    """The whole past in float64: tokens, and the recurrent state after each."""

    def __init__(self, world):
        self.world, self.tokens = world, []
        self.states = [(np.zeros((3 * D, 3)), np.zeros((1, D, D)))]

    def append(self, tokens):
        w = self.world
        conv, ssm = self.states[-1]
        rows = np.asarray(tokens)
        mixed, convs = recur.conv_assemble_and_roll(conv, w.rows[rows], w.w)
        q, k, v = np.split(mixed.reshape(len(rows), 3, D), 3, axis=1)
        q, k = recur.l2_normalise(q), recur.l2_normalise(k)
        g = np.exp(w.a * recur.softplus(w.alpha[rows] + w.dt))
        out, ssms = recur.gated_delta(ssm, q, k, v, g, recur.sigmoid(w.beta[rows]))
        self.states += list(zip(convs, ssms, strict=True))
        self.tokens += list(tokens)
        return out

    def cut(self, length):
        del self.tokens[length:]
        del self.states[length + 1 :]

    def attend(self, row, window):
        w = self.world
        past = self.tokens[: row + 1][-window:] if window else self.tokens[: row + 1]
        k, v = w.k_seen[past].astype(np.float64), w.v_seen[past].astype(np.float64)
        q = w.q[self.tokens[row]].astype(np.float64)
        score = q @ k.T * HEAD**-0.5
        p = np.exp(score - score.max(axis=1, keepdims=True))
        return (p / p.sum(axis=1, keepdims=True)) @ v


_worlds: dict[str, World] = {}


class Life(RuleBasedStateMachine):
    spec = "host"

    def __init__(self):
        super().__init__()
        if self.spec not in _worlds:
            _worlds[self.spec] = World(self.spec)
        self.w = _worlds[self.spec]
        self.caches = (self.w.cache, self.w.flat)
        for cache in self.caches:
            cache.reset(self.w.stream)
        self.history = History(self.w)
        self.snaps = None

    def grow(self, tokens, scan=False):
        w, n = self.w, len(tokens)
        bases = [cache.kv[0].ring.base if cache.kv[0].ring else 0 for cache in self.caches]
        for cache in self.caches:
            cache.prepare(w.stream, n)
        moved = self.caches[0].kv[0].ring.base - bases[0]
        COUNTS["rebase"] += moved > 0
        COUNTS["wrap"] += moved >= WINDOW
        results = [w.run(cache, np.asarray(tokens), scan) for cache in self.caches]
        first = len(self.history.tokens)
        want = self.history.append(tokens)
        for (il, ring), (_, flat) in zip(*results, strict=True):
            assert ring.tobytes() == flat.tobytes(), "ring = flat, bit for bit"
            assert np.isfinite(ring).all()
            for r in {0, n - 1}:
                model = (
                    want[r]
                    if il == 1
                    else self.history.attend(first + r, WINDOW if il == 0 else None)
                )
                scale = np.abs(model).max() + 1e-9
                assert np.abs(ring[r] - model).max() <= (1e-3 if il == 1 else 2e-5) * scale
        COUNTS["checked"] += 1
        return moved > 0

    def go_back(self, length):
        """Set the length of both caches; refused by both or by the ring alone."""
        before = len(self.history.tokens)
        try:
            self.caches[0].set_len(self.w.stream, length)
        except RewindRefused:
            assert self.caches[0].len == before
            COUNTS["refused"] += 1
            return False
        self.caches[1].set_len(self.w.stream, length)
        self.history.cut(length)
        return True

    @rule(tokens=st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=ROUND))
    def append_rows(self, tokens):
        self.append(tokens)

    def append(self, tokens):
        self.grow(tokens)
        COUNTS["append"] += 1

    @initialize(seed=st.integers(0, 99))
    def prompt(self, seed):
        """Long enough that every life begins with a ring that has moved."""
        for n in (CHUNK, CHUNK, CHUNK - 7, CHUNK):
            self.prime(n, seed)

    @rule(n=st.integers(ROUND + 1, CHUNK), seed=st.integers(0, 99))
    def prime_more(self, n, seed):
        self.prime(n, seed)

    def prime(self, n, seed):
        if len(self.history.tokens) + n > MAX_CTX - 200:
            return
        self.grow(np.random.default_rng(seed).integers(0, TOKENS, n).tolist(), scan=True)
        COUNTS["prime"] += 1

    @rule(
        tokens=st.lists(st.integers(0, TOKENS - 1), min_size=2, max_size=ROUND),
        wrong=st.integers(0, ROUND),
    )
    def draft_and_verify(self, tokens, wrong):
        self.round(tokens, wrong)

    @rule(
        first=st.lists(st.integers(0, TOKENS - 1), min_size=2, max_size=ROUND),
        second=st.lists(st.integers(0, TOKENS - 1), min_size=2, max_size=ROUND),
        wrong=st.integers(1, ROUND),
    )
    def two_rounds(self, first, second, wrong):
        self.round(first, wrong)
        self.round(second, wrong)

    def round(self, tokens, wrong):
        rebased = self.grow(tokens)
        COUNTS["draft"] += 1
        drop = min(wrong, len(tokens) - 1)
        if drop:
            assert self.go_back(len(self.history.tokens) - drop), "a round is always undone"
            COUNTS["rejection"] += 1
            COUNTS["rebase in draft"] += rebased

    @rule(
        tokens=st.lists(st.integers(0, TOKENS - 1), min_size=3, max_size=ROUND),
        depths=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    )
    def append_and_step_back(self, tokens, depths):
        self.append(tokens)
        for depth in depths:
            self.rewind(depth)

    @rule(depth=st.integers(1, 2 * WINDOW + SLACK))
    def rewind_far(self, depth):
        self.rewind(depth)

    def rewind(self, depth):
        target = len(self.history.tokens) - depth
        if target > 0 and self.go_back(target):
            COUNTS["rewind"] += 1
            if self.snaps and self.snaps[1] > target:
                self.drop_snapshot()

    @rule(
        tokens=st.lists(
            st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=ROUND), min_size=1, max_size=4
        ),
        accept=st.integers(0, ROUND),
    )
    def try_and_roll_back(self, tokens, accept):
        if self.snaps is None:
            self.snapshot()
        for part in tokens:
            self.append(part)
        self.roll_back(accept)

    @precondition(lambda self: self.snaps is None)
    @rule()
    def take_snapshot(self):
        self.snapshot()

    def snapshot(self):
        made = [cache.snapshot(self.w.stream) for cache in self.caches]
        self.snaps = (made, len(self.history.tokens))
        COUNTS["snapshot"] += 1

    @precondition(lambda self: self.snaps is not None)
    @rule(accept=st.integers(0, ROUND))
    def roll_back_late(self, accept):
        self.roll_back(accept)

    def roll_back(self, accept):
        w, (made, at) = self.w, self.snaps
        accept = min(accept, len(self.history.tokens) - at)
        if not self.caches[0].can_rollback(made[0], accept):
            try:
                self.caches[0].rollback(w.stream, made[0], accept)
                raise AssertionError("can_rollback said no, rollback went through")
            except RewindRefused:
                COUNTS["refused"] += 1
            self.drop_snapshot()
            return
        missing = [c.rollback(w.stream, s, accept) for c, s in zip(self.caches, made, strict=True)]
        assert missing[0] == missing[1]
        kept = self.history.tokens[at : at + accept]
        if missing[0]:
            for cache in self.caches:
                layer, tokens = cache.recur[1], np.asarray(kept)
                out = w.device.empty((len(kept), 1, D), np.float32, w.stream)
                weights, a, dt = w.fixed
                layer.step(
                    w.stream, w.up(w.rows, tokens), weights, w.up(w.alpha, tokens), a, dt,
                    w.up(w.beta, tokens), out,
                )  # fmt: skip
                cache.advance(w.stream, len(kept), replay=True)
            COUNTS["restore by copy"] += 1
        self.history.cut(at + accept)
        COUNTS["restore"] += 1

    @rule()
    def too_much(self):
        for cache in self.caches:
            try:
                cache.prepare(self.w.stream, MAX_CTX + 1)
                raise AssertionError("more rows than there can be")
            except CapacityExceeded:
                pass

    @invariant()
    def in_lock_step(self):
        COUNTS["steps"] += 1
        n = len(self.history.tokens)
        for cache in self.caches:
            assert cache.len == cache.pos == n
            lengths = cache.lengths
            verify_counters(self.w.stream, [lengths.counter, lengths.slots])
        ring = self.caches[0].kv[0]
        assert ring.base_d.to_numpy(self.w.stream)[0] == ring.ring.base
        conv, _ = self.history.states[-1]
        for cache in self.caches:
            got = cache.recur[1].conv_state.to_numpy(self.w.stream)
            assert np.array_equal(got, conv.astype(np.float32))

    def drop_snapshot(self):
        if self.snaps:
            for snap in self.snaps[0]:
                snap.close()
        self.snaps = None

    def teardown(self):
        self.drop_snapshot()


def live(device, scale):
    for name in COUNTS:
        COUNTS[name] = 0
    Life.spec = str(device)
    case = Life.TestCase
    case.settings = settings(
        max_examples=56 * scale,
        stateful_step_count=72,
        deadline=None,
        derandomize="MEMRA_TEST_RANDOM" not in os.environ,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    try:
        case("runTest").runTest()
    finally:
        _worlds.pop(Life.spec).device.close()
    print(COUNTS)


@pytest.mark.slow
def test_random_lives(device, scale):
    live(device, scale)
    floor = {
        "steps": 2000, "append": 200, "draft": 200, "rejection": 200, "rebase": 50, "wrap": 10,
        "rebase in draft": 1, "restore": 50, "restore by copy": 3, "rewind": 20, "refused": 20,
    }  # fmt: skip
    low = {
        name: (COUNTS[name], want) for name, want in floor.items() if COUNTS[name] < want * scale
    }
    assert not low, low
