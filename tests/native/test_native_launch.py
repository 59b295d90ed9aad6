"""What a compiled launch does and refuses, and how much work it is."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from native_rig import CONFIG, SOURCE

from memra_lowlevel import Device, errors, launch, launch_many, prepare
from memra_lowlevel.graph.overhead import replay_overhead
from memra_lowlevel.runtime.overhead import launch_overhead


def test_constant_work_per_launch(rig: Any, stub: Any) -> None:
    """A warm launch is one driver call and nothing else, through either form."""
    kernel, s, _, a, e = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    many = [prepare(s, CONFIG, kernel, a, i, 2, 3.0, e) for i in range(8)]
    p.launch(s)
    launch(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    launch_many(s, many)
    gate = s.context.native
    before, driver, refused = int(stub.n_launches), dict(s.context.driver.counts()), gate.n_refused
    for _ in range(100):
        p.launch(s)
        launch(s, CONFIG, kernel, a, 1, 2, 3.0, e)
        launch_many(s, many)
    assert int(stub.n_launches) == before + 1000
    assert dict(s.context.driver.counts()) == driver
    assert gate.n_refused == refused


def test_a_warm_launch_raises_no_audit_event() -> None:
    """Libraries install hooks, and each event (of ``id()``, say) then costs a Python call."""
    code = f"""
import sys
import numpy as np
from memra_lowlevel import LaunchConfig, compile_source, launch, launch_many, prepare
from memra_lowlevel.runtime.overhead import stub_device
events = []
sys.addaudithook(lambda name, args: events.append(name))
with stub_device() as dev:
    kernel = dev.module(compile_source({SOURCE!r}, arch=dev.arch)).kernel("mixed")
    s, config = dev.stream(name="heard"), LaunchConfig(1, 32)
    a = dev.empty(4, np.float32, s)
    plan = prepare(s, config, kernel, a, 1, 2, 3.0, None)
    many = [prepare(s, config, kernel, a, i, 2, 3.0, None) for i in range(3)]
    def warm():
        plan.launch(s)
        launch(s, config, kernel, a, 1, 2, 3.0, None)
        launch_many(s, many)
    for _ in range(3):
        warm()
    events.clear()
    for _ in range(50):
        warm()
    assert not events, set(events)
    id(a)
    assert events == ["builtins.id"], events
    a.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_refusals_reach_no_driver(rig: Any, stub: Any, dev: Device) -> None:
    kernel, s, t, a, e = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    q = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, None)
    for plan in (p, q):
        plan.launch(s)
        plan.launch(s)
    before = int(stub.n_launches)
    host = s.context.driver.counts().get("cuLaunchKernel", 0)
    e.close()
    with pytest.raises(errors.ClosedError, match="'e'"):
        p.launch(s)
    with pytest.raises(errors.ClosedError, match="'e'"):
        launch_many(s, [q, p])
    with pytest.raises(errors.ClosedError, match="'e'"):
        launch(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    t.close()
    with pytest.raises(errors.ClosedError, match="two"):
        q.launch(t)
    with pytest.raises(errors.ClosedError, match="two"):
        launch(t, CONFIG, kernel, a, 1, 2, 3.0, None)
    with Device("host:0") as other, pytest.raises(errors.ArgumentError, match="elsewhere"):
        far = other.stream(name="elsewhere")
        try:
            q.launch(far)
        finally:
            far.close()
    assert int(stub.n_launches) == before
    assert s.context.driver.counts().get("cuLaunchKernel", 0) == host
    q.launch(s)  # makes the context current again, through Python
    q.launch(s)
    assert int(stub.n_launches) == before + 1


def test_driver_results_become_exceptions_and_the_path_goes_on(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    p.launch(s)
    for answer, error in ((1, errors.InvalidArgument), (2, errors.OutOfMemory)):
        stub.answer = answer
        for act in (
            lambda: p.launch(s),
            lambda: launch(s, CONFIG, kernel, a, 1, 2, 3.0, e),
            lambda: launch_many(s, [p, p]),
        ):
            with pytest.raises(error) as caught:
                act()
            assert caught.value.call == "cuLaunchKernel"
            assert caught.value.stream == "one" and caught.value.kernel == "mixed"
        stub.answer = 0
        p.launch(s)


def test_launches_from_other_threads_find_their_context(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 0
    p = prepare(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    p.launch(s)
    before = int(stub.n_launches)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(500):
                p.launch(s)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    # The first launch of each thread makes the context current, through Python.
    gate = s.context.native
    assert int(gate.cell.next) - int(gate.cell.n_graph_launches) >= 4 * 499
    assert int(stub.n_launches) - before >= 4 * 499 - 50  # the stub's own count is not atomic


def test_the_cost_is_reported(record_property: Any) -> None:
    """Time is reported, not judged; the work is judged above."""
    times = {**launch_overhead(n=200, repeats=20), **replay_overhead(n=200, repeats=20)}
    for name, value in times.items():
        record_property(name, round(value, 1))
    assert set(times) >= {"prepared", "new_arguments", "many", "floor", "replay"}
    assert all(np.isfinite(v) for v in times.values())
