"""Samples go on while they disagree, and only so long."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from memra_lowlevel.bench.clock import graph_us, spread


class Graph(nullcontext):
    def __enter__(self):
        return self


def timed(times, **options):
    """Samples of a device whose graph takes the given milliseconds, one after the other."""
    left = iter(times)
    event = nullcontext(SimpleNamespace(elapsed_ms=lambda begin: next(left)))
    nothing = lambda *_: None  # noqa: E731
    step = SimpleNamespace(upload=nothing, launch=nothing)
    graph = Graph()
    graph.instantiate = lambda: nullcontext(step)
    stream = SimpleNamespace(capture=lambda name: nullcontext(graph), record=nothing, sync=nothing)
    device = SimpleNamespace(event=lambda timing: event)
    return graph_us(device, stream, [nothing] * 48, 8, **options), left


def test_a_steady_device_is_asked_once():
    samples, left = timed([4.8] * 100)
    assert samples == pytest.approx([100.0] * 8) and len(list(left)) == 92


def test_what_disturbs_it_passes():
    samples, _ = timed([4.8, 9.6] * 3 + [4.8] * 100)
    assert len(samples) == 16 and spread(samples) <= 0.01


def test_a_device_that_never_settles_is_asked_four_times():
    samples, left = timed([4.8, 4.8, 9.6, 9.6] * 50)
    assert len(samples) == 32 and spread(samples) > 0.01 and len(list(left)) == 168


def test_small_devices_are_asked_once():
    samples, _ = timed([0.1, 9.6] * 50, small=True)
    assert len(samples) == 3
