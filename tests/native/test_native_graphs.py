"""Compiled launches of graphs: room is checked and mirrors move in C."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, DeviceCounter, errors, native
from memra_lowlevel.graph import Effect
from memra_lowlevel.graph.effects import Mirror


def test_graph_launches_check_room_and_move_mirrors_in_c(dev: Device, stub: Any) -> None:
    s = dev.stream(name="graphs")
    block = dev.zeros(2, np.int32, s)
    one = DeviceCounter(block.view(0, 1, np.int32), "one", capacity=10)
    two = DeviceCounter(block.view(4, 1, np.int32), "two")
    with s.capture("step") as graph:
        one.note_need(s, 3)
        one.advance_recorded(s, 2)
        two.advance_recorded(s, -1)
    step = graph.instantiate()
    two.set(s, 100)
    step.launch(s)
    before, driver = int(stub.n_graph_launches), dict(dev.driver.counts())
    step.launch(s)
    step.launch(s)
    assert int(stub.n_graph_launches) == before + 2 and dict(dev.driver.counts()) == driver
    assert int(native.ffi.cast("uintptr_t", stub.exec)) == step.handle
    assert (one.value, two.value, step.n_launches) == (6, 97, 3)
    stub.answer = 1
    with pytest.raises(errors.InvalidArgument) as caught:
        step.launch(s)
    assert caught.value.call == "cuGraphLaunch"
    stub.answer = 0
    assert (one.value, two.value, step.n_launches) == (6, 97, 3)
    step.launch(s)
    with pytest.raises(errors.CapacityExceeded, match="'one'"):
        step.launch(s)
    one.note_set(0)
    two.note_set(0)
    with pytest.raises(errors.CapacityExceeded, match="'two'"):
        step.launch(s)
    assert (one.value, two.value, step.n_launches) == (0, 0, 4)
    for thing in (step, graph, block, s):
        thing.close()


def test_c_and_python_agree_on_random_effects(dev: Device, stub: Any, scale: int) -> None:
    """The same effects, launched through C and applied in Python, from the same mirrors."""
    rng = np.random.default_rng()
    s = dev.stream(name="random")
    block = dev.zeros(1, np.int32, s)
    done = {"launched": 0, "refused": 0}
    for _ in range(60 * scale):
        capacity = int(rng.integers(5, 40))
        counter = DeviceCounter(block, "c", capacity=capacity)
        with s.capture("random") as graph:
            for _ in range(int(rng.integers(1, 5))):
                try:
                    random_note(rng, counter, s)
                except errors.CapacityExceeded:
                    pass
        step = graph.instantiate()
        effects = list(graph.effects.values())
        assert len(effects) <= 1
        mirror = Mirror(capacity=capacity)
        start = int(rng.integers(0, capacity + 1))
        counter.note_set(start)
        mirror.lower = mirror.upper = start
        for _ in range(6):
            python = [Effect(**{**vars(e), "counter": Holder(mirror)}) for e in effects]
            refused = ""
            try:
                for e in python:
                    e.check()
            except (errors.CapacityExceeded, errors.CounterUnknown) as error:
                refused = type(error).__name__
            if refused:
                with pytest.raises((errors.CapacityExceeded, errors.CounterUnknown)) as caught:
                    step.launch(s)
                assert type(caught.value).__name__ == refused
                done["refused"] += 1
            else:
                step.launch(s)
                for e in python:
                    e.apply()
                done["launched"] += 1
            c = counter.mirror
            fields = ("lower", "known", "bounded", "capacity")
            assert [int(getattr(c, f)) for f in fields] == [getattr(mirror, f) for f in fields]
            if mirror.bounded:
                assert int(c.upper) == mirror.upper
        step.close()
        graph.close()
    assert done["launched"] >= 60 and done["refused"] >= 30, done
    block.close()
    s.close()


def random_note(rng: np.random.Generator, counter: DeviceCounter, s: Any) -> None:
    kind = rng.integers(0, 8)
    n = int(rng.integers(-3, 6))
    if kind < 3:
        counter.advance_recorded(s, n)
    elif kind == 3:
        counter.advance_recorded(s, min(n, 0), at_most=max(n, 0))
    elif kind == 4:
        counter.note_set(abs(n), s)
    elif kind == 5 and rng.random() < 0.3:
        counter.note_unbounded(s)
    else:
        counter.note_need(s, abs(n))


class Holder:
    """Stands for a counter with a Python mirror."""

    name, serial = "c", 0

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
