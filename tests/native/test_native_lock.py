"""When a compiled launch keeps the interpreter lock."""

from __future__ import annotations

import threading
from typing import Any

from native_rig import CONFIG, KEEP, unlocked

from memra_lowlevel import Device, DeviceCounter, Stream, launch, launch_many, prepare


def test_the_lock_is_kept_while_the_queue_cannot_be_full(rig: Any, stub: Any) -> None:
    kernel, s, t, a, _ = rig
    stub.n_params = 0
    p, q = (prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None) for _ in range(2))
    p.launch(s)
    s.sync()
    start = unlocked(s)
    for _ in range(KEEP):
        p.launch(s)
    assert unlocked(s) == start
    p.launch(s)
    p.launch(s)
    assert unlocked(s) == start + 2
    q.launch(t)
    q.launch(t)  # another stream has its own queue
    assert unlocked(s) == start + 2
    assert s.done()
    p.launch(s)
    assert unlocked(s) == start + 2
    s.sync()
    launch_many(s, [p] * KEEP)
    assert unlocked(s) == start + 2
    launch_many(s, [p])
    assert unlocked(s) == start + 3


def test_an_event_tells_of_the_launches_before_it(rig: Any, stub: Any) -> None:
    kernel, s, _, a, _ = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None)
    p.launch(s)
    s.sync()
    start, event = unlocked(s), s.device.event(name="mark")
    for i in range(KEEP - 1):
        if i == 100:
            s.record(event)
        p.launch(s)
    event.sync()  # 100 launches and the event itself are through
    for _ in range(101):
        p.launch(s)
    assert unlocked(s) == start
    p.launch(s)
    assert unlocked(s) == start + 1
    event.close()


def test_work_that_goes_through_python_counts_too(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None)
    event = s.device.event(name="one of the calls")
    for call in (
        lambda: a.fill(s, 0),
        lambda: a.copy_from(s, e),
        lambda: s.record(event),
        lambda: s.wait(event),
        lambda: prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None).launch(s),
    ):
        p.launch(s)
        s.sync()
        start = unlocked(s)
        for _ in range(KEEP):
            call()
        p.launch(s)
        assert unlocked(s) == start + 1
    s.sync()
    event.close()


def test_a_stream_that_others_use_never_keeps_the_lock(rig: Any, stub: Any) -> None:
    kernel, s, t, a, _ = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None)
    for stream in (s, t):
        p.launch(stream)
        p.launch(stream)
    start = unlocked(s)
    t.cell.shared = 1
    for _ in range(3):
        p.launch(t)
        t.sync()
    assert unlocked(s) >= start + 2  # the first on a stream goes through Python
    foreign = Stream(s.context, name="theirs", foreign=s.handle)
    assert foreign.cell.shared == 1
    foreign.close()


def test_a_graph_is_one_call(dev: Device, stub: Any) -> None:
    s = dev.stream(name="heavy")
    counter = DeviceCounter(dev, "n", stream=s)
    with s.capture("nodes") as graph:
        for _ in range(20):
            counter.buffer.fill(s, 0)
    step = graph.instantiate()
    step.launch(s)
    s.sync()
    start = unlocked(s)
    for _ in range(KEEP):
        step.launch(s)
    assert unlocked(s) == start
    step.launch(s)
    assert unlocked(s) == start + 1
    for thing in (step, graph, counter, s):
        thing.close()


def test_a_launch_that_blocks_lets_others_run(rig: Any, stub: Any) -> None:
    """The stub blocks for a while; another thread counts, if it can."""
    kernel, s, _, a, _ = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None)
    p.launch(s)
    s.sync()
    steps, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            steps[0] += 1

    def during(act: Any) -> int:
        before = steps[0]
        act()
        return steps[0] - before

    thread = threading.Thread(target=count)
    stub.block_ms = 200
    thread.start()
    try:
        kept = during(lambda: p.launch(s))
        s.cell.shared = 1
        given = [
            during(lambda: p.launch(s)),
            during(lambda: launch_many(s, [p])),
            during(lambda: launch(s, CONFIG, kernel, a, 1, 2, 3.0, None)),
        ]
    finally:
        stop.set()
        stub.block_ms = 0
        thread.join()
    assert all(n > 20 * max(1, kept) for n in given) or min(given) > 10_000, (kept, given)
