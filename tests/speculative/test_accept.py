import random

import pytest

from memra_lowlevel.errors import MemraError
from memra_lowlevel.speculative.accept import Rewind, accept_greedy, rewind_amounts


def test_small_table():
    assert rewind_amounts(0, 0) == Rewind(target=0, draft=0, lag=1)
    assert rewind_amounts(1, 0) == Rewind(target=1, draft=0, lag=0)
    assert rewind_amounts(1, 1) == Rewind(target=0, draft=0, lag=1)
    assert rewind_amounts(4, 0) == Rewind(target=4, draft=3, lag=0)
    assert rewind_amounts(4, 3) == Rewind(target=1, draft=0, lag=0)
    assert rewind_amounts(4, 4) == Rewind(target=0, draft=0, lag=1)
    for k, a in ((3, 4), (3, -1), (-1, 0)):
        with pytest.raises(MemraError):
            rewind_amounts(k, a)


def test_brute_force_simulation():
    """Planes as lists of the tokens they were fed; k changes every round and is often zero."""
    rng = random.Random(3)
    full = zero = partial = 0
    for _ in range(300):
        committed = [rng.randrange(50) for _ in range(rng.randint(1, 5))]
        target, draft, lag = committed[:-1], committed[:-1], 0
        for _ in range(40):
            k = rng.choice([0, 0, 1, 2, 3, 5, 8])
            assert target == committed[:-1]
            assert draft == committed[: len(committed) - 1 - lag]
            drafts: list[int] = []
            if k:
                draft += committed[len(committed) - 1 - lag : len(committed) - 1]
                lag = 0
                token = committed[-1]
                for _ in range(k):
                    draft.append(token)
                    token = rng.randrange(50)
                    drafts.append(token)
            target += [committed[-1], *drafts]
            accepted = rng.randint(0, k)
            argmax = [d if i < accepted else (d + 1) % 50 for i, d in enumerate(drafts)] + [
                rng.randrange(50)
            ]
            got, new = accept_greedy(drafts, argmax)
            assert got == accepted and len(new) == accepted + 1
            amounts = rewind_amounts(k, got)
            del target[len(target) - amounts.target :]
            del draft[len(draft) - amounts.draft :]
            lag += amounts.lag
            committed += new
            full += k > 0 and accepted == k
            zero += k == 0
            partial += accepted < k
    assert min(full, zero, partial) > 500


def test_accept_checks_lengths():
    with pytest.raises(MemraError):
        accept_greedy([1, 2], [1, 2])
    assert accept_greedy([], [7]) == (0, [7])
    assert accept_greedy([1, 2], [1, 2, 3]) == (2, [1, 2, 3])
    assert accept_greedy([1, 2], [9, 2, 3]) == (0, [9])
