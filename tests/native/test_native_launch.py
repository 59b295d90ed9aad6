"""The compiled launch path over a stub driver: what arrives, what is refused, how much work it is.

The stub notes its arguments and returns a chosen result; nothing runs.
"""

from __future__ import annotations

import gc
import math
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import (
    Buffer,
    Device,
    DeviceCounter,
    LaunchConfig,
    Stream,
    compile_source,
    errors,
    launch,
    launch_many,
    native,
    prepare,
)
from memra_lowlevel.graph import Effect
from memra_lowlevel.graph.effects import Mirror
from memra_lowlevel.graph.overhead import replay_overhead
from memra_lowlevel.runtime import context as contexts
from memra_lowlevel.runtime.overhead import launch_overhead, stub_device
from memra_lowlevel.runtime.storage import Storage

SOURCE = """#include "common/device.cuh"
KERNEL void mixed(float* a, int32_t b, int64_t c, float d, const float* NULLABLE e) {
    if (a == nullptr) a[0] = float(b) + float(c) + d + (e ? e[0] : 0.0f);
}"""
CONFIG = LaunchConfig((3, 4, 5), (32, 2, 1), 1024)


@pytest.fixture
def stub() -> Any:
    return native.lib.mll_stub_state


@pytest.fixture
def dev() -> Iterator[Device]:
    with stub_device(1) as device:
        yield device


@pytest.fixture
def rig(dev: Device) -> Iterator[Any]:
    module = dev.module(compile_source(SOURCE, arch=dev.arch, name="stubbed.cu"))
    s, t = dev.stream(name="one"), dev.stream(name="two")
    a, e = dev.empty(4, np.float32, s, name="a"), dev.empty(4, np.float32, s, name="e")
    yield module.kernel("mixed"), s, t, a, e
    for thing in (a, e, s, t):
        thing.close()
    module.close()


def seen(stub: Any, n: int = 5) -> list[int]:
    return [int(stub.params[i]) for i in range(n)]


def test_prepared_arguments_arrive(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 5
    p = prepare(s, CONFIG, kernel, a, -7, 1 << 40, 2.5, None)
    p.launch(s)  # the first launch on a stream goes through Python, to the real driver
    before = int(stub.n_launches)
    p.launch(s)
    assert int(stub.n_launches) == before + 1
    assert list(stub.grid) == [3, 4, 5] and list(stub.block) == [32, 2, 1]
    assert stub.shared_bytes == 1024
    assert int(native.ffi.cast("uintptr_t", stub.func)) == kernel.handle
    assert int(native.ffi.cast("uintptr_t", stub.stream)) == s.handle
    values = seen(stub)
    assert values[0] == a.ptr and values[2] == 1 << 40 and values[4] == 0
    assert np.int64(values[1] & 0xFFFFFFFF).astype(np.int32) == -7
    assert np.uint32(values[3] & 0xFFFFFFFF).view(np.float32) == 2.5
    p.set("e", e)
    p.set("b", 9)
    p.launch(s)
    p.launch(s)
    values = seen(stub)
    assert values[4] == e.ptr and values[1] & 0xFFFFFFFF == 9


def test_new_arguments_arrive(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 5
    before = int(stub.n_launches)
    for i in range(5):
        launch(s, CONFIG, kernel, a, i, -i, i / 2, e)
        values = seen(stub)
        assert values[0] == a.ptr and values[4] == e.ptr
        assert values[1] & 0xFFFFFFFF == i and np.uint64(values[2]).view(np.int64) == -i
        assert np.uint32(values[3] & 0xFFFFFFFF).view(np.float32) == np.float32(i / 2)
    assert int(stub.n_launches) == before + 5


WIDE = """#include "common/device.cuh"
struct alignas(16) Four { float x, y, z, w; };
KERNEL void wide(float* a, const uint8_t* NULLABLE b, int8_t c, uint8_t d, int16_t e, uint16_t f,
                 int32_t g, uint32_t h, int64_t i, uint64_t j, float k, double l, Four m) {
    if (a == nullptr) a[0] = float(c + d + e + f + g + h + i + j) + k + l + m.x + (b ? b[0] : 0);
}"""
INTS = {2: (-128, 127), 3: (0, 255), 4: (-(2**15), 2**15 - 1), 5: (0, 2**16 - 1),
        6: (-(2**31), 2**31 - 1), 7: (0, 2**32 - 1), 8: (-(2**63), 2**63 - 1),
        9: (0, 2**64 - 1)}  # fmt: skip


def test_what_compiled_code_packs_is_what_python_packs(
    dev: Device, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = dev.module(compile_source(WIDE, arch=dev.arch, name="wide.cu"))
    kernel, s = module.kernel("wide"), dev.stream(name="wide")
    a, b = dev.empty(4, np.float32, s), dev.empty(4, np.uint8, s)
    stub.n_params = 13
    good: list[Any] = [a, b, -7, 7, -300, 300, -70000, 70000, -(2**40), 2**40, 1.5, -2.5, bytes(16)]
    launch(s, CONFIG, kernel, *good)  # notes the use of the buffers
    launcher = s.context.launchers[kernel]
    sizes = [p.size for p in kernel.params]
    asked = []
    pack = launcher.pack_noting
    monkeypatch.setattr(launcher, "pack_noting", lambda *x: (asked.append(1), pack(*x))[1])

    def check(i: int, value: Any) -> None:
        args = [*good[:i], value, *good[i + 1 :]]
        block, _ = launcher.encoder.pack(args, s.context)
        launch(s, CONFIG, kernel, *args)
        parts = zip(launcher.encoder.split(block), seen(stub, 13), sizes, strict=True)
        for wanted, found, size in parts:
            n = min(size, 8)
            assert wanted[:n] == found.to_bytes(8, "little")[:n], (i, value)

    floats = [0.0, -0.0, 1e-45, 1e-60, -1e-310, 3.4028234663852886e38, 1 / 3, math.inf, -math.inf]
    for i, (low, high) in INTS.items():
        for value in (low, low + 1, -1 if low else 1, 0, 1, high // 2 + 1, high - 1, high):
            check(i, value)
    for i in (10, 11):
        for number in [*floats, math.nan, *([1e300, -5e-324] if i == 11 else [])]:
            check(i, number)
    check(1, None)
    check(12, bytes(range(16)))
    assert len(asked) == 3  # whole numbers from 2^63 on alone: 2^63, 2^64 - 2, 2^64 - 1
    for thing in (a, b, s):
        thing.close()
    module.close()


@pytest.mark.parametrize(
    ("i", "values"),
    [
        (0, (None, 5, "a", np.zeros(4, np.float32))),
        (1, (5, b"1234")),
        *((i, (low - 1, high + 1, True, None, 1.0, "1", 2**70)) for i, (low, high) in INTS.items()),
        (10, (1e39, -3.5e38, True, None, "1", 10**400)),
        (11, (True, None, "1", 10**400)),
        (12, (b"", bytes(15), bytes(17), None, 5)),
    ],
)
def test_compiled_code_takes_nothing_that_python_refuses(
    dev: Device, stub: Any, i: int, values: tuple[Any, ...]
) -> None:
    module = dev.module(compile_source(WIDE, arch=dev.arch, name="wide.cu"))
    kernel, s = module.kernel("wide"), dev.stream(name="wide")
    a, b = dev.empty(4, np.float32, s), dev.empty(4, np.uint8, s)
    good: list[Any] = [a, b, 1, 1, 1, 1, 1, 1, 1, 1, 1.0, 1.0, bytes(16)]
    stub.n_params = 13
    launch(s, CONFIG, kernel, *good)
    before = int(stub.n_launches)
    for value in values:
        with pytest.raises(errors.ArgumentError) as caught:
            launch(s, CONFIG, kernel, *good[:i], value, *good[i + 1 :])
        assert caught.value.index == i
    for fewer in (good[:-1], [*good, 1], []):
        with pytest.raises(errors.ArgumentError, match="13 arguments"):
            launch(s, CONFIG, kernel, *fewer)
    assert int(stub.n_launches) == before
    for thing in (a, b, s):
        thing.close()
    module.close()


def test_compiled_code_takes_no_buffer_that_python_refuses(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params, more = 5, (1, 2, 3.0, None)
    view, gone, halves = (a.view(0, 4, kind) for kind in (np.float32, np.float32, np.int32))
    whole = s.device.empty(4, np.float32, s, name="whole")
    part = whole.view(0, 4, np.float32)
    with Device("host:0") as elsewhere, elsewhere.stream(name="far") as far:
        theirs = elsewhere.empty(4, np.float32, far)
        launched = int(stub.n_launches)
        for buffer in (a, view, gone, e, part, a, view, gone, e, part):
            launch(s, CONFIG, kernel, buffer, *more)  # all have been used on this stream
        assert int(stub.n_launches) - launched >= 9
        theirs.storage.last = s
        gone.close()
        whole.close()
        launched = int(stub.n_launches)
        for buffer, error in (
            (halves, errors.ArgumentError), (theirs, errors.ArgumentError),
            (gone, errors.ClosedError), (part, errors.ClosedError),
        ):  # fmt: skip
            with pytest.raises(error):
                launch(s, CONFIG, kernel, buffer, *more)
            launch(s, CONFIG, kernel, view, *more)
        assert int(stub.n_launches) == launched + 4
        theirs.close()


def test_the_use_on_another_stream_is_noted(rig: Any, stub: Any) -> None:
    kernel, s, t, a, e = rig
    stub.n_params = 5
    for stream in (s, s, t, t, s):
        launch(stream, CONFIG, kernel, a, 1, 2, 3.0, e)
        assert a.storage.last is stream and stream in a.storage.streams
        assert int(native.ffi.cast("uintptr_t", stub.stream)) == stream.handle
    assert a.storage.streams == {s, t}


def test_attributes_that_were_broken_reach_no_driver(rig: Any, stub: Any) -> None:
    """What compiled code reads without Python is checked there too."""
    kernel, s, _, a, e = rig
    stub.n_params = 5
    launch(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    before = int(stub.n_launches)
    alike: Any = Buffer.__new__(Buffer)  # with what is compared at the places of an allocation
    alike._storage, alike.dtype, alike.ptr = True, s.context, s
    for name, value in (
        ("_storage", object()), ("_storage", alike), ("ptr", "x"), ("ptr", -1), ("ptr", 2**64),
    ):  # fmt: skip
        view = a.view(0, 4, np.float32)
        setattr(view, name, value)
        with pytest.raises((AttributeError, struct.error)):
            launch(s, CONFIG, kernel, view, 1, 2, 3.0, e)
        view = a.view(0, 4, np.float32)
        delattr(view, name)
        with pytest.raises(AttributeError):
            launch(s, CONFIG, kernel, view, 1, 2, 3.0, e)
    assert int(stub.n_launches) == before


def test_views_and_allocations_end_with_their_last_reference(dev: Device) -> None:
    s = dev.stream(name="ends")
    gc.collect()
    of_types = [sys.getrefcount(cls) for cls in (Buffer, Storage)]
    for _ in range(200):
        whole = dev.empty(4, np.float32, s)
        part = whole.view(0, 2, np.float32)
        gone = [weakref.ref(x) for x in (whole, part, whole.storage)]
        whole.close()
        del whole, part
        assert [ref() for ref in gone] == [None, None, None]
    assert [sys.getrefcount(cls) for cls in (Buffer, Storage)] == of_types
    # A cycle through what compiled code holds is found by the collector.
    whole = dev.empty(4, np.float32, s)
    found = weakref.ref(whole.storage)
    whole.storage.cycle = whole
    whole.close()
    del whole
    gc.collect()
    assert found() is None
    s.close()


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


def test_the_ring_keeps_the_last_launches_in_order(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 0
    plans = [prepare(s, CONFIG, kernel, a, i, 2, 3.0, e) for i in range(2)]
    for p in plans:
        p.launch(s)
    gate = s.context.native
    for i in range(700):
        plans[i % 2].launch(s)
    entries = list(gate.entries())
    assert len(entries) == 256
    assert {x.call for x in entries} == {"cuLaunchKernel"} and {x.kernel for x in entries} == {
        "mixed"
    }
    times = [x.t_us for x in entries]
    assert times == sorted(times) and times[-1] - times[0] > 0
    assert all("test_native_launch.py" in x.where for x in entries)


def test_traced_lines_on_request(stub: Any) -> None:
    with stub_device(1) as dev:
        dev.context.trace_lines = True
        module = dev.module(compile_source(SOURCE, arch=dev.arch, name="stubbed.cu"))
        s = dev.stream(name="lined")
        a = dev.empty(4, np.float32, s)
        p = prepare(s, CONFIG, module.kernel("mixed"), a, 1, 2, 3.0, None)
        before = int(stub.n_launches)
        for _ in range(3):
            p.launch(s)
        assert int(stub.n_launches) == before  # each went through Python, which looks up the line
        last = s.context.driver.trace.entries()[-1]
        assert last.call == "cuLaunchKernel" and "test_native_launch.py" in last.where
        for thing in (a, s):
            thing.close()
        module.close()


# -- the interpreter lock -------------------------------------------------------------------------
KEEP = 256 if not native.available() else int(native.lib.MLL_KEEP)


def unlocked(stream: Any) -> int:
    return int(stream.context.native.n_unlocked)


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


# -- graphs ---------------------------------------------------------------------------------------


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


# -- without the module ---------------------------------------------------------------------------


def test_without_the_module_everything_works_and_says_so() -> None:
    code = """
import sys
sys.modules["memra_lowlevel.native._launch"] = None
import numpy as np
from memra_lowlevel import Device, DeviceCounter, native
assert not native.available() and "not built" in native.reason(), native.reason()
with Device("host") as dev:
    s = dev.stream(name="plain")
    c = DeviceCounter(dev, "len", capacity=3, stream=s)
    with s.capture("step") as g:
        c.advance(s)
    step = g.instantiate()
    for _ in range(3):
        step.launch(s)
    assert c.value == 3 == int(c.buffer.to_numpy(s)[0])
    try:
        step.launch(s)
    except Exception as error:
        assert type(error).__name__ == "CapacityExceeded"
    else:
        raise SystemExit("launched without room")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_build_is_not_used() -> None:
    code = """
import importlib, sys, types
import memra_lowlevel.native._launch as built
from memra_lowlevel import native
class Old:
    MLL_VERSION = 0
sys.modules["memra_lowlevel.native._launch"] = types.SimpleNamespace(ffi=built.ffi, lib=Old())
importlib.reload(native)
assert not native.available() and "older" in native.reason()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_generated_source_stands_alone(tmp_path: Path) -> None:
    """setup.py generates and builds it in another folder than the sources."""
    root = Path(native.__file__).parent
    generated = tmp_path / "generated.c"
    code = f"""
import runpy
runpy.run_path({str(root / "build.py")!r})["ffibuilder"].emit_c_code({str(generated)!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    text = generated.read_text()
    assert 'launch_path.h"' not in text and "mll_object_type" in text
    assert f"MLL_VERSION = {native._VERSION} " in text


def test_the_cost_is_reported(record_property: Any) -> None:
    """Time is reported, not judged; the work is judged above."""
    times = {**launch_overhead(n=200, repeats=20), **replay_overhead(n=200, repeats=20)}
    for name, value in times.items():
        record_property(name, round(value, 1))
    assert set(times) >= {"prepared", "new_arguments", "many", "floor", "replay"}
    assert all(np.isfinite(v) for v in times.values())
