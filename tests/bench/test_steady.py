"""Samples go on while they disagree, and only so long; between them the device rests."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from memra_lowlevel.bench import clock, peers
from memra_lowlevel.bench.attend import Case
from memra_lowlevel.bench.clock import graph_us, spread, sustained_us


class Graph(nullcontext):
    def __enter__(self):
        return self


class FakeDevice:
    """Its graphs take as many milliseconds per call as it is told, one replay after the other."""

    def __init__(self, ms_per_call):
        self.left = iter(ms_per_call)
        self.captured = []
        self.n_replays = 0

    def event(self, timing):
        return nullcontext(SimpleNamespace(elapsed_ms=lambda begin: self.elapsed_ms()))

    def elapsed_ms(self):
        self.n_replays += 1
        return next(self.left) * self.captured[-1]

    def stream(self):
        nothing = lambda *_: None  # noqa: E731
        graph = Graph()
        graph.instantiate = lambda: nullcontext(SimpleNamespace(upload=nothing, launch=nothing))

        def capture(name):
            self.captured.append(0)
            return nullcontext(graph)

        return SimpleNamespace(capture=capture, record=nothing, sync=nothing)

    def call(self):
        self.captured[-1] += 1


@pytest.fixture
def slept(monkeypatch):
    found = []
    monkeypatch.setattr(clock.time, "sleep", found.append)
    return found


def timed(ms_per_call, n_calls=48, measure=graph_us, **options):
    """Samples of a device, and the device; two replays tell how long a call takes."""
    device = FakeDevice(ms_per_call)
    return measure(device, device.stream(), [device.call] * n_calls, **options), device


def test_a_steady_device_is_asked_once(slept):
    samples, device = timed([0.02] * 100, n_samples=8)
    assert samples == pytest.approx([20.0] * 8) and device.n_replays == 2 + 8 + 3


def test_what_disturbs_it_passes(slept):
    samples, _ = timed([0.01] * 2 + [0.01, 0.02] * 3 + [0.01] * 100, n_samples=8)
    assert len(samples) == 16 and spread(samples) <= 0.01


def test_a_device_that_never_settles_is_asked_four_times(slept):
    samples, device = timed([0.01, 0.01, 0.02, 0.02] * 50, n_samples=8)
    assert len(samples) == 32 and spread(samples) > 0.01 and device.n_replays == 2 + 4 * 11


def test_small_devices_are_asked_once(slept):
    samples, device = timed([0.1, 9.6] * 50, small=True)
    assert len(samples) == 3 and device.n_replays == 4 and not slept


@pytest.mark.parametrize(
    "us, n_calls, together",
    [(1, 1, 48), (1, 7, 42), (80, 1, 48), (100, 1, 40), (500, 1, 8), (500, 5, 10), (9000, 1, 1),
     (1, 100, 100)],
)  # fmt: skip
def test_a_sample_is_long_enough_and_no_longer(slept, us, n_calls, together):
    samples, device = timed([us / 1e3] * 100, n_calls, n_samples=4)
    assert device.captured == [n_calls, together]
    assert samples == pytest.approx([us] * 4)


def test_a_device_rests_three_times_as_long_as_it_worked(slept):
    timed([0.05] * 100, n_samples=8)
    assert slept == pytest.approx([3 * 2 * 48 * 0.05e-3] * 8)


def test_the_replay_that_wakes_a_rested_device_does_not_count(slept):
    samples, device = timed([0.05] * 5 + [0.09, 0.05] * 50, n_samples=8)
    assert samples == pytest.approx([50.0] * 8) and device.n_replays == 2 + 3 + 2 * 8


def test_short_calls_get_no_rest(slept):
    timed([0.039] * 100, n_samples=8)
    assert not slept


def test_without_rest_only_the_second_half_counts(slept):
    # 48 calls of 0.1 ms: 4.8 ms a replay, and 7.2 ms once 150 ms are nearly over.
    fast, slow = 30, 100
    samples, _ = timed([0.1] * (2 + fast) + [0.15] * slow, measure=sustained_us)
    assert samples == pytest.approx([150.0] * len(samples)) and len(samples) == 22
    assert not slept


class FakeTorch:
    """Its graphs take 0.1 ms for each call that was captured."""

    def __init__(self):
        self.cuda = self
        self.graphs = []

    def CUDAGraph(self):
        self.graphs.append(SimpleNamespace(n_calls=0, n_replays=0))
        made = self.graphs[-1]
        made.replay = lambda: setattr(made, "n_replays", made.n_replays + 1)
        return made

    def Event(self, enable_timing):
        ms = 0.1 * self.graphs[-1].n_calls
        nothing = lambda: None  # noqa: E731
        return SimpleNamespace(record=nothing, synchronize=nothing, elapsed_time=lambda end: ms)

    def call(self):
        if self.graphs:
            self.graphs[-1].n_calls += 1

    Stream = synchronize = empty_cache = lambda self: None
    graph = stream = lambda self, of: nullcontext()


def test_another_library_is_timed_like_ours(slept):
    """As many calls in a sample, as many samples, as much rest, and woken alike."""
    torch, rows = FakeTorch(), []
    run = SimpleNamespace(
        group="attend", add=rows.append, ceilings=SimpleNamespace(read_us=lambda n: 1.0)
    )
    case = Case(32, 8, 128, 1 << 20)
    peers._attend(run, torch, "other", case, 2, lambda *_: torch.call)
    theirs, (row,) = list(slept), rows
    slept.clear()
    ours, device = timed([0.1] * 100, 1, n_samples=15)
    assert row.samples == pytest.approx(ours) and theirs == pytest.approx(slept)
    assert [graph.n_calls for graph in torch.graphs] == device.captured == [1, 40]
    assert [graph.n_replays for graph in torch.graphs] == [2, 3 + 2 * 15]
