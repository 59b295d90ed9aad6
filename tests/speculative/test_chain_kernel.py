import numpy as np
import pytest

from memra_lowlevel.errors import ArgumentError
from memra_lowlevel.kernels import registry
from memra_lowlevel.kernels.speculative import chain_advance


@pytest.mark.parametrize("n_planes", [0, 1, 31, 33, 100])
def test_chain_advance_equals_its_oracle(device, stream, n_planes):
    oracle = registry.oracle("chain_advance")
    rng = np.random.default_rng(n_planes)
    seen = set()
    for _ in range(60):
        k_max = int(rng.integers(1, 7))
        n_feed = int(rng.integers(1, 5))
        step = int(rng.integers(0, n_feed + k_max + 1))
        n_vocab = 50
        token = int(rng.choice([0, 7, 49, 50, -1, 0x7FFFFFFF]))
        bad = int(rng.choice([-1, 1, 3]))
        io = np.array([token, 100, step, n_feed, bad, *rng.integers(0, 50, 5)], np.int32)
        drafts = rng.integers(0, 50, k_max + 1).astype(np.int32)
        counters = rng.integers(0, 1000, n_planes).astype(np.int32)
        tokens = rng.permutation(500)[:n_vocab].astype(np.int32) if rng.random() < 0.5 else None
        want = oracle(io, drafts, counters, n_vocab, k_max, tokens)
        io_d, drafts_d = (device.from_numpy(a, stream) for a in (io, drafts))
        counters_d = device.from_numpy(counters, stream) if n_planes else None
        chain_advance(
            stream, io_d, drafts_d, counters_d, n_vocab=n_vocab, k_max=k_max,
            token_map=None if tokens is None else device.from_numpy(tokens, stream),
        )  # fmt: skip
        got = [io_d.to_numpy(stream), drafts_d.to_numpy(stream)]
        got.append(counters_d.to_numpy(stream) if n_planes else counters)
        for g, w in zip(got, want, strict=True):
            assert np.array_equal(g, w)
        index = step + 2 - n_feed
        seen.add("fed" if index < 1 else "past" if index > k_max else "draft")
        seen.add("mapped" if tokens is not None else "same")
        seen.add("sentinel" if index >= 1 and not 0 <= token < n_vocab else "token")
    assert seen == {"fed", "past", "draft", "sentinel", "token", "mapped", "same"}


def test_small_buffers_are_refused(device, stream):
    block, drafts = (device.zeros(n, np.int32, stream) for n in (8, 3))
    with pytest.raises(ArgumentError):
        chain_advance(stream, block, drafts, None, n_vocab=5, k_max=3)
    tokens = device.zeros(4, np.int32, stream)
    with pytest.raises(ArgumentError, match="token map"):
        chain_advance(stream, block, drafts, None, n_vocab=5, k_max=2, token_map=tokens)
