"""Random lives of a latent layer: flat and in a ring, against a model that keeps every row.

Every operation that a program can do is tried; after each, both layers must hold what the model
says, and go on as a layer that only ever saw the rows that count.
"""

import collections

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import integers, lists, sampled_from, tuples
from latent_layers import POOL, Driver, Sequence
from latent_rig import same

from memra_lowlevel import errors
from memra_lowlevel.reference import latent as oracle

MAX_CTX, RING = 96, 12
COUNTS = collections.Counter()
TRUE, DRAFT = Sequence(MAX_CTX + 16, seed=1), Sequence(MAX_CTX + 16, seed=2)
DRAFT.ape = TRUE.ape


KEYS = oracle.pool_keys(TRUE.index, TRUE.ape, POOL)


class Life(RuleBasedStateMachine):
    stream = None
    first = None  # bits of each key, from whoever built it first

    @initialize()
    def start(self):
        self.layers = [Driver(self.stream, TRUE, MAX_CTX, ring=r, pool=POOL) for r in (None, RING)]
        self.high, self.wraps = 0, 0
        self.snapshot = self.capture = None

    @property
    def len(self):
        return self.layers[0].layer.len

    def room(self):
        return MAX_CTX - self.len

    def grow(self, n):
        """Book that rows were written up to len + n."""
        if (self.len + n) // RING > self.high // RING:
            COUNTS["wrap"] += 1
        self.high = max(self.high, self.len + n)

    @rule(n=integers(1, 20))
    def append(self, n):
        if n > self.room():
            for d in self.layers:
                d.layer.set_len(d.stream, 0)
            self.high, self.capture = 0, None
            COUNTS["renewal"] += 1
        self.grow(n)
        for d in self.layers:
            d.append(n)
        COUNTS["append"] += 1

    @rule(rounds=lists(tuples(integers(2, 8), integers(0, 9)), min_size=4, max_size=12))
    def verify(self, rounds):
        """Rounds of drafts, of which some rows are true; the others are taken back."""
        for n, keep in rounds:
            at, keep = self.len, min(n, keep)
            if n > self.room():
                return
            mixed = Sequence(MAX_CTX + 16, seed=1)
            mixed.rows[at + keep :] = DRAFT.rows[at + keep :]
            mixed.index[at + keep :] = DRAFT.index[at + keep :]
            possible = all(self.can(d, at + keep, at + n) for d in self.layers)
            self.grow(n)
            for d in self.layers:
                d.append(n, seq=mixed)
            if keep == n:
                COUNTS["accept"] += 1
                continue
            assert possible  # rounds of up to 8 rows over a ring of 12 can always be taken back
            for d in self.layers:
                d.layer.set_len(d.stream, at + keep)
            COUNTS["reject"] += 1

    def can(self, d, to, high):
        ring = d.layer.tail.effective
        return not ring or to % POOL == 0 or high - to // POOL * POOL <= ring

    @rule(back=integers(1, 30))
    def truncate(self, back):
        to = self.len - back
        if to < 0:
            return
        flat, ringed = self.layers
        assert flat.layer.can_rewind_to(to)
        if not ringed.layer.can_rewind_to(to):
            before = ringed.keys()
            with pytest.raises(errors.RewindRefused):
                ringed.layer.set_len(ringed.stream, to)
            assert same(ringed.keys(), before) and ringed.layer.len == self.len
            COUNTS["refused"] += 1
            return
        for d in self.layers:
            d.layer.set_len(d.stream, to)
        COUNTS["truncate"] += 1
        if self.capture is not None and to < self.capture[0].len:
            with pytest.raises(errors.SnapshotRefused, match="went back"):
                flat.layer.snapshot_plane_at(flat.dev, self.capture[0])
            self.capture = None

    @rule(which=sampled_from([0, 1]))
    def take(self, which):
        d = self.layers[which]
        if self.len == 0:
            with pytest.raises(errors.SnapshotRefused):
                d.layer.snapshot_plane(d.dev)
            return
        self.snapshot = d.layer.snapshot_plane(d.dev)
        COUNTS["snapshot"] += 1

    @rule()
    def take_tail(self):
        if self.len:
            self.capture = [d.layer.snapshot_tail(d.dev) for d in self.layers]
            COUNTS["tail"] += 1

    @precondition(lambda self: self.capture is not None)
    @rule(which=sampled_from([0, 1]))
    def complete(self, which):
        d = self.layers[which]
        self.snapshot = d.layer.snapshot_plane_at(d.dev, self.capture[which])
        self.capture = None
        COUNTS["complete"] += 1

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def restore(self):
        for d in self.layers:
            if d.layer.len:
                with pytest.raises(errors.RestoreRefused):
                    d.layer.restore_plane(d.dev, self.snapshot, MAX_CTX)
                d.layer.set_len(d.stream, 0)
            d.layer.restore_plane(d.dev, self.snapshot, MAX_CTX)
        self.high, self.capture = self.len, None
        COUNTS["restore"] += 1

    @rule(n=integers(1, 30), which=sampled_from([0, 1]))
    def prompt(self, n, which):
        """Capture the tail at the prompt, generate, complete the snapshot, start again from it."""
        n = min(n, self.room())
        if self.len == 0 or n == 0:
            return
        self.take_tail()
        at = self.len
        self.append(n)
        self.complete(which)
        self.restore()
        assert self.len == at

    @invariant()
    def check(self):
        if not hasattr(self, "layers"):
            return
        length, (flat, ringed) = self.len, self.layers
        COUNTS["steps"] += 1
        for d in self.layers:
            assert d.layer.len == d.len_d() == length
            assert d.layer.index_pools_ready == length // POOL
            assert length == 0 or same(d.rows(), TRUE.rows[:length])
        keys = flat.keys()
        assert same(keys, ringed.keys())
        for p, key in enumerate(keys):
            assert same(self.first.setdefault(p, key.copy()), key)
        if length:
            assert same(flat.select(1), ringed.select(1))

    def teardown(self):
        for d in getattr(self, "layers", ()):
            d.close()


def test_random_lives(stream, scale):
    COUNTS.clear()
    Life.stream, Life.first = stream, {}
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=32 * scale, stateful_step_count=50, deadline=None, derandomize=True,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None,
        ),
    )  # fmt: skip
    for p, key in Life.first.items():
        assert np.abs(key - KEYS[p]).max() <= 2e-6 * max(1.0, np.abs(KEYS[p]).max())
    print(dict(COUNTS))
    floor = {"reject": 200, "restore": 50, "wrap": 10, "complete": 20, "refused": 10,
             "truncate": 15, "append": 80, "accept": 30}  # fmt: skip
    per = max(1.0, COUNTS["steps"] / 2000)
    short = {k: COUNTS[k] for k, n in floor.items() if COUNTS[k] < n * per}
    assert not short, (short, dict(COUNTS))
