"""The captured draft step by itself: protocol, counters, refusals."""

import numpy as np
import pytest
from spec_rig import PROMPT, Rig

from memra_lowlevel import Device
from memra_lowlevel.cache import KvLayer, KvRing
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    CaptureForbidden,
    ClosedError,
    MemraError,
    RewindRefused,
    RingLapped,
    TokenError,
    UninitialisedRead,
)
from memra_lowlevel.graph import verify_counters
from memra_lowlevel.speculative import ChainIo, DraftChain

HEAD = 64


class Toy:
    """A chain over one plane whose token is 3 * token + length, so that every step shows."""

    def __init__(self, device, stream, *, ring=None, window=None, max_ctx=64, k_max=4, warmups=1):
        self.device, self.stream = device, stream
        self.layer = KvLayer.allocate(device, max_ctx, 1, HEAD, window=window, ring=ring)
        rng = np.random.default_rng(0)
        self.k, self.v = (
            device.from_numpy(rng.normal(size=(1, HEAD)).astype(np.float32), stream)
            for _ in range(2)
        )
        self.q = device.from_numpy(rng.normal(size=(1, 2, HEAD)).astype(np.float32), stream)
        self.out = device.zeros((1, 2, HEAD), np.float32, stream)
        self.io = ChainIo(device, HEAD, k_max, 1000)
        if not warmups:  # without a warm-up the caller has run the body before
            self.body(stream)
        self.chain = DraftChain.capture(
            stream, self.body, self.io, self.layer, k_max, warmups=warmups
        )

    def body(self, stream):
        """A model of sorts: the new token is the position, put there by a device copy."""
        self.layer.append(stream, self.k, self.v)
        self.layer.attend(stream, self.q, self.out)
        self.io.tok_d.view(0, (1,), np.int32).copy_from(stream, self.io.pos_d)

    def hold(self, n):
        """Bring the planes to n rows and write them all: attention reads what the length says."""
        rows = np.random.default_rng(1).normal(size=(2, n, HEAD)).astype(np.float32)
        self.layer.set_len(self.stream, 0)
        if n:
            k, v = (self.device.from_numpy(x, self.stream) for x in rows)
            self.layer.append(self.stream, k, v)
        self.layer.set_len(self.stream, n)

    def drafts(self, k):
        self.io.download(self.stream)
        self.stream.sync()
        return self.io.drafts(k)


def test_a_body_that_records_nothing(device, stream):
    toy = Toy(device, stream)
    with device.stream(name="other") as other:
        for body in (lambda s: None, lambda s: toy.out.fill(other, 0)):
            with pytest.raises(MemraError, match='"draft" recorded nothing on stream'):
                DraftChain.capture(stream, body, toy.io, toy.layer, 2)
            assert toy.layer.len == 0 and stream.recording is None
        other.sync()
    usable(device, stream)
    toy.chain.close()


def test_a_body_that_moves_the_length_itself(device, stream):
    toy = Toy(device, stream)

    def body(stream):
        toy.body(stream)
        toy.layer.advance(stream, 1)

    with pytest.raises(MemraError, match='body of "own" moved the length'):
        DraftChain.capture(stream, body, toy.io, toy.layer, 2, name="own")
    assert toy.layer.len == 0 == toy.layer.len_d.to_numpy(stream)[0]
    toy.chain.close()
    for call in (lambda: toy.chain.replay(stream, 99), lambda: toy.chain.propose(stream, [1], 1)):
        with pytest.raises(ClosedError, match='DraftChain "draft"'):
            call()


def test_a_draft_outside_the_vocabulary_names_both_causes(device, stream):
    toy = Toy(device, stream)
    toy.io.begin(stream, [1], 0)
    toy.chain.replay(stream, 2)
    toy.io.block.view(16, (1,), np.int32).fill(stream, 0)
    with pytest.raises(TokenError, match=r"by the chain is no token.*NaN.*or its body left"):
        toy.drafts(2)
    toy.chain.close()


def usable(device, stream):
    buffer = device.zeros(4, np.int32, stream)
    with stream.capture("fresh") as graph:
        buffer.fill(stream, 1)
    exec_ = graph.instantiate()
    exec_.launch(stream)
    assert (buffer.to_numpy(stream) == 0x01010101).all()
    exec_.close()


@pytest.fixture
def checked():
    """A device and a stream in check mode, where reading a row that nobody wrote is an error."""
    with host_options(check=True), Device("host:2") as device, device.stream() as stream:
        yield device, stream


def counters_follow_the_rows(device, stream, warmups):
    toy = Toy(device, stream, warmups=warmups)
    assert toy.layer.len == 0 == toy.layer.len_d.to_numpy(stream)[0]
    address = toy.layer.len_d.ptr
    for start in (0, 5):
        toy.hold(start)
        toy.io.begin(stream, [7], start)
        toy.chain.replay(stream, 4)
        assert toy.layer.len == start + 4 and toy.layer.len_d.ptr == address
        assert toy.drafts(4) == [start, start + 1, start + 2, start + 3]
        verify_counters(stream, [toy.layer.lengths.counter])
        toy.chain.rewind(stream, start + 1)
        verify_counters(stream, [toy.layer.lengths.counter])
    assert toy.chain.exec.n_launches == 8 and toy.chain.exec.n_updates == 0


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_capture_leaves_the_counters_alone(device, stream, warmups):
    counters_follow_the_rows(device, stream, warmups)


@pytest.mark.parametrize("warmups", [0, 1])
def test_the_chain_reads_only_what_was_written(checked, warmups):
    counters_follow_the_rows(*checked, warmups)


def test_a_length_beyond_the_rows_is_found_in_check_mode(checked):
    """The gate of the test above: one row that the length counts and nobody wrote."""
    device, stream = checked
    toy = Toy(device, stream)
    toy.hold(5)
    toy.layer.set_len(stream, 6)
    toy.io.begin(stream, [7], 6)
    toy.chain.replay(stream, 1)
    with pytest.raises(UninitialisedRead, match=r"attend_partial.*'kv planes'"):
        toy.drafts(1)


def test_known_tokens_are_fed_first(device, stream):
    toy = Toy(device, stream)
    toy.io.begin(stream, [11, 12, 13], 0)
    toy.chain.replay(stream, 2)
    assert toy.io.tok_d.to_numpy(stream)[0] == 13
    toy.chain.replay(stream, 3)
    assert toy.drafts(3) == [2, 3, 4]
    assert toy.io.draft_d.to_numpy(stream)[0] == 13, "the pending token stands first"
    assert toy.layer.len == 5


def test_replay_is_one_call_and_rewind_is_one_write(device, stream):
    toy = Toy(device, stream)
    toy.io.begin(stream, [1], 0)
    before = dict(device.driver.counts())
    toy.chain.replay(stream, 4)
    middle = dict(device.driver.counts())
    toy.chain.rewind(stream, 2)
    after = dict(device.driver.counts())
    assert {k: n - before.get(k, 0) for k, n in middle.items() if n != before.get(k, 0)} == {
        "cuGraphLaunch": 4
    }
    assert {k: n - middle.get(k, 0) for k, n in after.items() if n != middle.get(k, 0)} == {
        "cuMemsetD32Async": 1
    }
    toy.chain.rewind(stream, 2)
    assert dict(device.driver.counts()) == after, "nothing to rewind, nothing written"


def test_refusals(device, stream):
    toy = Toy(device, stream, max_ctx=6)
    toy.io.begin(stream, [1], 0)
    toy.chain.replay(stream, 4)
    with pytest.raises(CapacityExceeded):
        toy.chain.replay(stream, 3)
    assert toy.layer.len == 4, "none of the three was launched"
    with pytest.raises(RewindRefused):
        toy.chain.rewind(stream, 5)
    with pytest.raises(ArgumentError):
        toy.chain.rewind(stream, -1)
    with pytest.raises(MemraError, match="fill"):
        toy.chain.fill(stream, [1])
    with pytest.raises(CapacityExceeded, match="lags"):
        toy.chain.propose(stream, list(range(100)), 1)
    with pytest.raises(MemraError, match="rewind"):
        toy.chain.propose(stream, [1, 2], 1)
    for k_max in (0, 5):
        with pytest.raises(MemraError):
            DraftChain.capture(stream, toy.body, toy.io, toy.layer, k_max)
    usable(device, stream)
    toy.chain.close()
    toy.chain.close()


def test_a_body_that_allocates_is_refused(device, stream):
    toy = Toy(device, stream)
    toy.hold(3)

    def greedy(stream):
        toy.body(stream)
        device.zeros(4, np.int32, stream)

    with pytest.raises(CaptureForbidden):
        DraftChain.capture(stream, greedy, toy.io, toy.layer, 2)
    assert toy.layer.len == 3 == toy.layer.len_d.to_numpy(stream)[0]
    usable(device, stream)
    DraftChain.capture(stream, toy.body, toy.io, toy.layer, 2).close()


def test_full_planes_refuse_a_capture(device, stream):
    toy = Toy(device, stream, max_ctx=4)
    toy.layer.set_len(stream, 4)
    with pytest.raises(CapacityExceeded):
        DraftChain.capture(stream, toy.body, toy.io, toy.layer, 2)
    usable(device, stream)


def headroom_before_replay(device, stream):
    toy = Toy(device, stream, ring=KvRing(48, 8, slack=0), window=8, max_ctx=500)
    toy.hold(46)
    toy.io.begin(stream, [1], 46)
    with pytest.raises(RingLapped, match="prepare_kv_append"):
        toy.chain.replay(stream, 3)
    assert toy.layer.len == 46
    toy.layer.prepare(stream, 3)
    toy.chain.replay(stream, 3)
    assert toy.layer.len == 49 == toy.layer.len_d.to_numpy(stream)[0]
    assert toy.drafts(3) == [46, 47, 48]


def test_headroom_before_replay(device, stream):
    headroom_before_replay(device, stream)


def test_a_rebase_moves_only_what_was_written(checked):
    headroom_before_replay(*checked)


def test_two_chains_do_not_disturb_each_other(device, stream):
    """Two sequences on one model and one workspace, step by step in turn."""
    rig = Rig(device, stream, max_ctx=64)
    prompts = [PROMPT, PROMPT[::-1]]

    def alone(prompt):
        chain = rig.chain(k_max=4)
        chain.fill(stream, prompt[:-1])
        out = []
        for _ in range(3):
            chain.propose(stream, prompt + out[: len(out)], 4)
            chain.io.download(stream)
            stream.sync()
            out += chain.io.drafts(4)
        return out

    want = [alone(p) for p in prompts]
    chains = [rig.chain(k_max=4) for _ in prompts]
    for chain, prompt in zip(chains, prompts, strict=True):
        chain.fill(stream, prompt[:-1])
    got: list[list[int]] = [[], []]
    for _ in range(3):
        for chain, prompt, out in zip(chains, prompts, got, strict=True):
            chain.propose(stream, prompt + out, 4)
            chain.io.download(stream)
            stream.sync()
            out += chain.io.drafts(4)
    assert got == want and got[0] != got[1]


def test_redrafting_rewrites_the_rows(device, stream):
    """Draft four, accept one, draft again: the planes hold what a run without the detour holds."""
    rig = Rig(device, stream, max_ctx=64)

    def planes_of(chain):
        return [
            (p.k.to_numpy(stream)[: p.len * p.k_tok_bytes].tobytes(),
             p.v.to_numpy(stream)[: p.len * p.v_tok_bytes].tobytes())
            for p in chain.planes.planes()
        ]  # fmt: skip

    one, two = rig.chain(), rig.chain()
    for chain in (one, two):
        chain.fill(stream, PROMPT[:-1])
    one.propose(stream, PROMPT, 4)
    one.io.download(stream)
    stream.sync()
    first = one.io.drafts(1)
    one.settle(stream, 4, 1)
    committed = [*PROMPT, *first, 99]
    one.propose(stream, committed, 3)
    two.fill(stream, committed[len(PROMPT) - 1 : -1])
    two.propose(stream, committed, 3)
    assert one.planes.len == two.planes.len == len(committed) + 2
    assert planes_of(one) == planes_of(two)


def test_describe(device, stream):
    toy = Toy(device, stream)
    report = toy.chain.describe()
    assert report["k_max"] == 4 and report["len"] == 0 and report["capacity"] == 64
    assert report["graph"].memory_nodes == 0 and report["graph"].kernel_nodes >= 3
