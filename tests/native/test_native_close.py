"""Closing what a launch uses that is in the driver, without the interpreter lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from native_rig import CONFIG, unlocked

from memra_lowlevel import Stream, errors, prepare
from memra_lowlevel.runtime import context as contexts


@contextmanager
def in_the_driver(stub: Any, stream: Stream, call: Callable[[], None], ms: int) -> Iterator[None]:
    """Run the block while another thread's launch is in the driver for some time."""

    def other() -> None:
        stream.context.ensure()
        call()

    start, thread = unlocked(stream), threading.Thread(target=other)
    stub.block_ms = ms
    thread.start()
    try:
        while unlocked(stream) == start:
            pass
        yield
    finally:
        stub.block_ms = 0
        thread.join()


@pytest.mark.parametrize("what", ["buffer", "stream", "module", "graph"])
def test_a_close_lets_a_launch_through_that_is_in_the_driver(
    rig: Any, stub: Any, what: str
) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None)
    with s.capture("fill") as graph:
        e.fill(s, 0)
    step = graph.instantiate()
    call = (step if what == "graph" else p).launch
    s.cell.shared = 1
    call(s)
    n = stub.n_launches + stub.n_graph_launches
    with in_the_driver(stub, s, lambda: call(s), 200):
        {"buffer": a, "stream": s, "module": kernel.module, "graph": step}[what].close()
        assert stub.n_launches + stub.n_graph_launches == n + 1
    with pytest.raises(errors.ClosedError):
        call(s)
    step.close()
    graph.close()


def test_a_close_gives_up_on_a_launch_that_takes_too_long(
    rig: Any, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, s, t, _, _ = rig
    monkeypatch.setattr(contexts, "_PATIENCE_S", 0.02)
    stub.n_params = 0
    a, b = (s.device.empty(4, np.float32, s) for _ in range(2))
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None)
    s.cell.shared = 1
    p.launch(s)

    def given_back() -> int:
        counts = s.device.driver.counts()
        return sum(counts.get(call, 0) for call in ("cuMemFreeAsync", "cuModuleUnload"))

    n, before = stub.n_launches, given_back()
    with in_the_driver(stub, s, lambda: p.launch(s), 500):
        for thing in (a, b, kernel.module):  # a wait that was given up shortens no later one
            thing.close()
        assert given_back() == before or stub.n_launches > n  # a slow machine may get here late
    t.sync()
    assert given_back() == before + 3
