import random

import pytest

from memra_lowlevel.errors import MemraError
from memra_lowlevel.speculative.ngram import NgramIndex


def brute(tokens, k, longest, shortest):
    tokens = list(tokens)
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        tail = tokens[len(tokens) - n :]
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n : at] == tail:
                out = []
                line = tokens[at:]
                for i in range(k):
                    out.append(line[i])
                    line.append(line[i])
                return out
    return []


def test_against_brute_force():
    rng = random.Random(11)
    found = 0
    for _ in range(200):
        index, tokens = NgramIndex(rng.randint(2, 4), rng.randint(1, 2)), []
        for _ in range(30):
            piece = [rng.randrange(6) for _ in range(rng.randint(0, 3))]
            index.extend(piece)
            tokens += piece
            k = rng.randint(0, 6)
            got = index.propose(k)
            assert got == brute(tokens, k, index.longest, index.shortest)
            found += len(got) > 0
        assert len(index) == len(tokens)
    assert found > 1000


def test_a_loop_is_continued():
    index = NgramIndex(2)
    index.extend([5, 6, 7, 5, 6, 7])
    assert index.propose(8) == [5, 6, 7, 5, 6, 7, 5, 6]
    index = NgramIndex(1)
    index.extend([4, 4])
    assert index.propose(3) == [4, 4, 4]


def test_nothing_known():
    index = NgramIndex(3)
    assert index.propose(4) == []
    index.extend([1, 2, 3])
    assert index.propose(4) == []
    with pytest.raises(MemraError):
        NgramIndex(0)
