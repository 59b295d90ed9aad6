import copy
import random

import numpy as np
import pytest

from memra_lowlevel.cache.ring import (
    PRIME_CHUNK_MAX_TOKENS,
    SWA_REWIND_SLACK_ROWS,
    KvRing,
    KvRingAppend,
    swa_retain_from,
    swa_ring_rows,
)
from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    PlaneError,
    RewindRefused,
    RingLapped,
)


def test_rows():
    assert (PRIME_CHUNK_MAX_TOKENS, SWA_REWIND_SLACK_ROWS) == (4096, 512)
    assert swa_ring_rows(512, 262_144) == 5151
    assert swa_ring_rows(512, 4096) == 4096
    assert swa_ring_rows(32, 10_000) == 4671
    assert swa_ring_rows(64, 10_000, chunk=16, slack=32) == 64 + 16 + 32 + 31


@pytest.mark.parametrize(("rows", "window"), [(0, 5), (5, 0), (-1, 5)])
def test_empty_ring_is_refused(rows, window):
    with pytest.raises(PlaneError):
        KvRing(rows, window)


@pytest.mark.parametrize("wrong", [("a", 0), (20.5, 4), (20, "4"), (20, 4, None), (True, 4)])
def test_a_ring_of_no_numbers_is_refused_by_name(wrong):
    with pytest.raises(ArgumentError, match=r"KvRing: (rows|window|base) got"):
        KvRing(*wrong)
    assert KvRing(np.int64(20), 4).rows == 20


def test_contiguous_then_rebase():
    ring = KvRing(5151, 512)
    assert ring.append_plan(0, 0, 1024) == KvRingAppend(0)
    plan = ring.append_plan(4096, 3584, 4096)
    assert plan == KvRingAppend(write_row=512, src_row=3584, keep_rows=512, new_base=3584)
    assert ring.base == 0, "planning changes nothing"
    ring.apply_rebase(plan.new_base)
    assert ring.physical_range(3584, 8192) == range(0, 4608)
    assert [ring.can_rewind_to(n) for n in (4095, 4094, 0)] == [True, False, False]
    assert ring.shortest_rewind() == 4095
    with pytest.raises(RingLapped):
        ring.apply_rebase(3583)


def test_retain_keeps_slack():
    assert swa_retain_from(5151, 512, 0) == 4128
    assert swa_retain_from(5151, 512, 0, slack=0) == 4640
    ring = KvRing(5151, 512, base=4128)
    for depth in (1, 32, 256, 512):
        assert ring.can_rewind_to(5151 - depth)
    assert not ring.can_rewind_to(5151 - 513)
    assert not ring.can_rewind_to(5151 - 1024)
    assert 5151 - 4128 + 4096 <= 5151


def test_retain_is_clamped_to_base():
    assert swa_retain_from(4700, 512, 4128) == 4128


def test_walk_of_chunks():
    ring, length, bases = KvRing(5151, 512), 0, []
    for _ in range(10):
        plan = ring.append_plan(length, ring.retain_from(length), 4096)
        if not plan.contiguous:
            ring.apply_rebase(plan.new_base)
            assert plan.keep_rows == 1024 == plan.write_row
        bases.append(ring.base)
        length += 4096
    assert bases == [0, 3072, *range(7168, 35841, 4096)]
    assert ring.restore_plan(40960) == (40448, range(4608, 5120))
    with pytest.raises(RewindRefused, match="full re-prime") as info:
        ring.restore_plan(400)
    assert info.value.asked == 400 and info.value.possible == ring.shortest_rewind()
    assert KvRing(5151, 512).restore_plan(400) == (0, range(0, 400))


def test_inputs_of_a_lapped_ring():
    ring = KvRing(4639, 512, base=4128)
    assert not ring.can_rewind_to(4638)
    with pytest.raises(RingLapped, match=r"lapped.*base 4128.*4096.*4669"):
        ring.append_plan(4669, 4096, 1)


def test_refusals():
    ring = KvRing(100, 32, base=64)
    with pytest.raises(RingLapped):
        ring.append_plan(63, 64, 1)
    with pytest.raises(RingLapped):
        ring.append_plan(70, 71, 1)
    with pytest.raises(RingLapped):
        ring.append_plan(165, 100, 1)
    with pytest.raises(CapacityExceeded):
        ring.append_plan(164, 64, 1)
    for start, end in ((63, 70), (80, 79), (64, 165)):
        with pytest.raises(RingLapped):
            ring.physical_range(start, end)
    assert ring.base == 64
    assert ring.append_plan(164, 100, 0).write_row == 0, "a full ring takes no rows, and says so"


def test_rebase_between_rounds():
    """Rounds of four rows from length 5100 on: one rebase, at 5148."""
    for step, at, keep, base in ((4, 5148, 1052, 4096), (1, 5151, 1023, 4128)):
        ring, rebases = KvRing(5151, 512), []
        for length in range(5100, 5160, step):
            plan = ring.append_plan(length, ring.retain_from(length), step)
            if not plan.contiguous:
                ring.apply_rebase(plan.new_base)
                rebases.append((length, plan.keep_rows, plan.new_base))
        assert rebases == [(at, keep, base)]


def test_random_walk_against_a_model_with_all_history():
    """A list that keeps every row says what the ring must hold; rewinds are drawn at random."""
    rng = random.Random(7)
    counts = {"append": 0, "rebase": 0, "rewind": 0, "refused": 0}
    for _ in range(60):
        window, slack, chunk = rng.randint(1, 90), rng.randint(0, 80), rng.randint(1, 70)
        rows = swa_ring_rows(window, 1 << 20, chunk=chunk, slack=slack)
        ring, length = KvRing(rows, window, slack=slack), 0
        cells: list[object] = [None] * rows
        truth: list[object] = []
        for _ in range(120):
            if rng.random() < 0.7:
                n = rng.randint(1, chunk)
                before = copy.copy(ring)
                plan = ring.append_plan(length, ring.retain_from(length), n)
                assert ring == before
                if not plan.contiguous:
                    kept = cells[plan.src_row : plan.src_row + plan.keep_rows]
                    cells = kept + [None] * (rows - len(kept))
                    ring.apply_rebase(plan.new_base)
                    counts["rebase"] += 1
                for i in range(n):
                    truth.append(object())
                    cells[plan.write_row + i] = truth[-1]
                length += n
                counts["append"] += 1
            else:
                target = max(0, length - rng.randint(0, slack + window))
                if ring.can_rewind_to(target):
                    length = target
                    del truth[target:]
                    counts["rewind"] += 1
                else:
                    assert target < ring.shortest_rewind()
                    counts["refused"] += 1
            start = max(0, length - (window - 1))  # what the next query sees
            seen = [cells[p] for p in ring.physical_range(start, length)]
            assert seen == truth[start:length]
            new_base, moved = ring.restore_plan(length)
            assert [cells[p] for p in moved] == truth[new_base:length]
    assert counts["rebase"] >= 50 and counts["rewind"] >= 200 and counts["refused"] >= 50, counts
