"""The wrong kind of thing in every place of every call: a named error, and nothing moved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from abuse import (
    ARRAYS,
    CONFIG,
    NOT_DTYPE,
    NOT_INT,
    NOT_NUMBER,
    NOT_SHAPE,
    NOT_TEXT,
    SOURCE,
    THINGS,
    N,
)

from memra_lowlevel import (
    Device,
    DeviceCounter,
    Graph,
    LaunchConfig,
    compile_file,
    compile_source,
    launch,
    launch_many,
    prepare,
    sync_counters,
)
from memra_lowlevel.cache import KvLayer
from memra_lowlevel.errors import ClosedError, MemraError

F32 = np.float32
NO_ARRAY = [v for v in THINGS if not isinstance(v, np.ndarray)]
NO_TEXT_NOR_NONE = [v for v in NOT_TEXT if v is not None]


@pytest.fixture(scope="module")
def made(device: Any, module: Any) -> Iterator[SimpleNamespace]:
    """One of everything, open and closed."""
    m = SimpleNamespace(device=device, scale=module.kernel("scale"), first=module.kernel("first"))
    m.module = module
    m.stream = s = device.stream(name="made")
    m.x, m.y = device.zeros(N, F32, s), device.zeros(N, F32, s)
    m.pinned, m.arena = device.pinned(N, F32), device.arena(1 << 16)
    m.event, m.timer = device.event(), device.event(timing=True)
    m.counter = DeviceCounter(device, "c", capacity=10, stream=s)
    m.layer = KvLayer.allocate(device, 8, 1, 64)
    m.row = device.zeros((1, 64), F32, s)
    m.q, m.out = device.zeros((1, 2, 64), F32, s), device.zeros((1, 2, 64), F32, s)
    launch(s, CONFIG, m.scale, m.x, m.y, N, 1.0)
    m.layer.append(s, m.row, m.row)
    m.layer.attend(s, m.q, m.out)
    with s.capture("made") as m.graph:
        launch(s, CONFIG, m.scale, m.x, m.y, N, 1.0)
    m.step, m.hand = m.graph.instantiate(), Graph(device, "hand")
    m.plan = prepare(device, CONFIG, m.scale, m.x, m.y, N, 1.0)
    m.closed_stream, m.closed = device.stream(), device.zeros(N, F32, s)
    m.closed_event, m.closed_q = device.event(), device.zeros((1, 2, 64), F32, s)
    for gone in (m.closed_stream, m.closed, m.closed_event, m.closed_q):
        gone.close()
    yield m
    s.sync()
    for name in ("step", "graph", "hand", "layer", "counter", "event", "timer", "arena", "pinned"):
        getattr(m, name).close()
    for buffer in (m.x, m.y, m.row, m.q, m.out, s):
        buffer.close()


CALLS: dict[str, tuple[Any, list[Any]]] = {
    "Device": (lambda m, v: Device(v), [v for v in THINGS if v is not None]),
    "Device text": (lambda m, v: Device(v), ["", "gpu", "host:x", "host:-1", "host:²", "host:99"]),
    "Device trace": (lambda m, v: Device("host", trace=v), THINGS),
    "stream name": (lambda m, v: m.device.stream(v), NO_TEXT_NOR_NONE),
    "stream priority": (lambda m, v: m.device.stream(priority=v), NOT_INT),
    "stream_of": (lambda m, v: m.device.stream_of(v), NOT_INT),
    "event name": (lambda m, v: m.device.event(name=v), NO_TEXT_NOR_NONE),
    "event timing": (lambda m, v: m.device.event(timing=v), [None, "yes", 1.5, *ARRAYS]),
    "empty shape": (lambda m, v: m.device.empty(v, F32, m.stream), NOT_SHAPE),
    "empty dtype": (lambda m, v: m.device.empty(4, v, m.stream), NOT_DTYPE),
    "empty stream": (lambda m, v: m.device.empty(4, F32, v), THINGS),
    "alloc": (lambda m, v: m.device.alloc(v, m.stream), NOT_SHAPE),
    "from_numpy": (
        lambda m, v: m.device.from_numpy(v, m.stream),
        [*NO_ARRAY, *ARRAYS[2:4]],
    ),
    "pinned shape": (lambda m, v: m.device.pinned(v, F32), NOT_SHAPE),
    "pinned size": (lambda m, v: m.device.pinned((v, 2**32), F32), [2**32, 2**31, 2**62]),
    "pinned dtype": (lambda m, v: m.device.pinned(4, v), NOT_DTYPE),
    "arena": (lambda m, v: m.device.arena(v), [*NOT_INT, 0, -1, 2**70]),
    "take shape": (lambda m, v: m.arena.take(v, F32), NOT_SHAPE),
    "take dtype": (lambda m, v: m.arena.take(1, v), NOT_DTYPE),
    "take align": (lambda m, v: m.arena.take(1, F32, v), [*NOT_INT, 0, 3, -4, 2**70]),
    "wrap": (lambda m, v: m.device.wrap(v, m.stream), [*NO_ARRAY, *ARRAYS[2:]]),
    "wrap stream": (lambda m, v: m.device.wrap(m.x, v), THINGS),
    "module": (lambda m, v: m.device.module(v), THINGS),
    "copy_from": (lambda m, v: m.y.copy_from(m.stream, v), THINGS),
    "copy_from stream": (lambda m, v: m.y.copy_from(v, m.x), THINGS),
    "copy_to": (lambda m, v: m.y.copy_to(m.stream, v), THINGS),
    "copy_to stream": (lambda m, v: m.y.copy_to(v, m.x), THINGS),
    "fill": (lambda m, v: m.y.fill(m.stream, v), [*NOT_INT, -1, 256]),
    "to_numpy": (lambda m, v: m.y.to_numpy(v), THINGS),
    "view offset": (lambda m, v: m.y.view(v, 1, F32), [*NOT_INT, -4, 1, 2**70]),
    "view shape": (lambda m, v: m.y.view(0, v, F32), NOT_SHAPE),
    "view dtype": (lambda m, v: m.y.view(0, 1, v), NOT_DTYPE),
    "record": (lambda m, v: m.stream.record(v), THINGS),
    "wait": (lambda m, v: m.stream.wait(v), THINGS),
    "elapsed_ms": (lambda m, v: m.timer.elapsed_ms(v), THINGS),
    "capture name": (lambda m, v: m.stream.capture(v).__enter__(), [None, *NOT_TEXT]),
    "capture mode": (lambda m, v: m.stream.capture("c", v).__enter__(), THINGS),
    "grid": (lambda m, v: LaunchConfig(v, 32), [*NOT_INT[:7], "x", (1, 1, 1, 1), (), *ARRAYS]),
    "block": (lambda m, v: LaunchConfig(1, v), [*NOT_INT[:7], (2.5,), (None,), *ARRAYS]),
    "shared": (lambda m, v: LaunchConfig(1, 32, v), NOT_INT),
    "cluster": (
        lambda m, v: launch(m.stream, LaunchConfig(1, 32, 0, v), m.first, m.x, m.y),
        ["x", 1.5, True, {}, object()],
    ),
    "launch stream": (lambda m, v: launch(v, CONFIG, m.scale, m.x, m.y, N, 1.0), THINGS),
    "launch config": (
        lambda m, v: launch(m.stream, v, m.scale, m.x, m.y, N, 1.0),
        [*THINGS, {"grid": 1}, {"grid": 1, "blok": 1}, {"grid": 1, "block": 1, "x": 1}],
    ),
    "launch kernel": (lambda m, v: launch(m.stream, CONFIG, v, m.x, m.y, N, 1.0), THINGS),
    "launch pointer": (lambda m, v: launch(m.stream, CONFIG, m.scale, v, m.y, N, 1.0), THINGS),
    "launch int": (
        lambda m, v: launch(m.stream, CONFIG, m.scale, m.x, m.y, v, 1.0),
        [*NOT_INT, 2**31, -(2**31) - 1],
    ),
    "launch float": (
        lambda m, v: launch(m.stream, CONFIG, m.scale, m.x, m.y, N, v),
        [*NOT_NUMBER, 1e39, 2**200],
    ),
    "launch count": (lambda m, v: launch(m.stream, CONFIG, m.scale, *v), [(), (1,), (1,) * 5]),
    "prepare device": (lambda m, v: prepare(v, CONFIG, m.scale, m.x, m.y, N, 1.0), THINGS),
    "prepare kernel": (lambda m, v: prepare(m.device, CONFIG, v, m.x), THINGS),
    "plan launch": (lambda m, v: m.plan.launch(v), THINGS),
    "plan set": (lambda m, v: m.plan.set(v, 1), THINGS[:1] + THINGS[1:3] + THINGS[5:]),
    "plan set value": (lambda m, v: m.plan.set("n", v), NOT_INT),
    "plan get": (lambda m, v: m.plan.get(v), ["q", 99, None, [], object()]),
    "launch_many": (
        lambda m, v: launch_many(m.stream, v),
        [v for v in THINGS if not isinstance(v, list)],
    ),
    "launch_many item": (lambda m, v: launch_many(m.stream, [m.plan, v]), THINGS),
    "launch_many stream": (lambda m, v: launch_many(v, [m.plan]), THINGS),
    "exec launch": (lambda m, v: m.step.launch(v), THINGS),
    "exec upload": (lambda m, v: m.step.upload(v), THINGS),
    "exec params": (lambda m, v: m.step.params(v), ["q", 99, None, 1.5, True, object()]),
    "exec update": (lambda m, v: m.step.update(v, grid=1), ["q", 99, None, 1.5, object()]),
    "exec update grid": (lambda m, v: m.step.update(0, grid=v), [None, "x", 1.5, 0, True]),
    "exec update args": (lambda m, v: m.step.update(0, args=v), [None, 5, "x", [1], {"q": 1}]),
    "exec update arg": (lambda m, v: m.step.update(0, args={"n": v}), NOT_INT),
    "exec update_graph": (lambda m, v: m.step.update_graph(v), THINGS),
    "node": (lambda m, v: m.graph.node(v), ["q", 99, None, 1.5, True, object()]),
    "audit_against": (lambda m, v: m.graph.audit_against(v), THINGS),
    "debug_dot": (lambda m, v: m.graph.debug_dot(v), [None, 5, 1.5, [], object()]),
    "Graph": (lambda m, v: Graph(v), THINGS),
    "graph kernel": (lambda m, v: m.hand.kernel(CONFIG, v, m.x), THINGS),
    "graph after": (lambda m, v: m.hand.empty(after=v), [None, 5, "x", [None], ["q"], {}]),
    "graph copy": (lambda m, v: m.hand.copy(m.y, v), THINGS),
    "graph copy to": (lambda m, v: m.hand.copy(v, m.y), THINGS),
    "graph memset": (lambda m, v: m.hand.memset(v, 0), THINGS),
    "graph memset value": (lambda m, v: m.hand.memset(m.y, v), [*NOT_INT, 2**32]),
    "graph child": (lambda m, v: m.hand.child(v), THINGS),
    "counter place": (lambda m, v: DeviceCounter(v), THINGS),
    "counter stream": (lambda m, v: DeviceCounter(m.device, stream=v), THINGS),
    "counter capacity": (
        lambda m, v: DeviceCounter(m.device, stream=m.stream, capacity=v),
        [v for v in [*NOT_INT, -1, 2**31] if v is not None],
    ),
    "counter set": (lambda m, v: m.counter.set(m.stream, v), [*NOT_INT, -1, 11]),
    "counter set stream": (lambda m, v: m.counter.set(v, 1), THINGS),
    "counter advance": (lambda m, v: m.counter.advance(m.stream, v), [*NOT_INT, 11, -1, 2**40]),
    "counter advance stream": (lambda m, v: m.counter.advance(v, 1), THINGS),
    "sync_counters": (lambda m, v: sync_counters(m.stream, v), [None, 5, "x", [None], [5]]),
    "sync_counters stream": (lambda m, v: sync_counters(v, [m.counter]), THINGS),
    "layer device": (lambda m, v: KvLayer.allocate(v, 8, 1, 64), THINGS),
    "layer max_ctx": (lambda m, v: KvLayer.allocate(m.device, v, 1, 64), [*NOT_INT, 0, 2**31]),
    "layer heads": (lambda m, v: KvLayer.allocate(m.device, 8, v, 64), [*NOT_INT, 0, -1]),
    "layer head_dim": (
        lambda m, v: KvLayer.allocate(m.device, 8, 1, v),
        [*NOT_INT, 0, -64, 80, 1000],
    ),
    "layer format": (
        lambda m, v: KvLayer.allocate(m.device, 8, 1, 64, k_format=v),
        [v for v in THINGS if v is not None],
    ),
    "layer window": (
        lambda m, v: KvLayer.allocate(m.device, 8, 1, 64, window=v),
        [v for v in [*NOT_INT, 0, -1, 2**40] if v is not None],
    ),
    "layer ring": (
        lambda m, v: KvLayer.allocate(m.device, 8, 1, 64, ring=v),
        [v for v in THINGS if v is not None],
    ),
    "append stream": (lambda m, v: m.layer.append(v, m.row, m.row), THINGS),
    "append k": (lambda m, v: m.layer.append(m.stream, v, m.row), THINGS),
    "append v": (lambda m, v: m.layer.append(m.stream, m.row, v), THINGS),
    "attend stream": (lambda m, v: m.layer.attend(v, m.q, m.out), THINGS),
    "attend q": (lambda m, v: m.layer.attend(m.stream, v, m.out), THINGS),
    "attend out": (lambda m, v: m.layer.attend(m.stream, m.q, v), THINGS),
    "attend scale": (
        lambda m, v: m.layer.attend(m.stream, m.q, m.out, scale=v),
        [v for v in [*NOT_NUMBER, math.nan, math.inf, 1e39] if v is not None],
    ),
    "attend softcap": (
        lambda m, v: m.layer.attend(m.stream, m.q, m.out, softcap=v),
        [v for v in [*NOT_NUMBER, math.nan, math.inf, 0.0, -1.0] if v is not None],
    ),
    "attend window": (
        lambda m, v: m.layer.attend(m.stream, m.q, m.out, window=v),
        [v for v in [*NOT_INT, -1, 2**40] if v is not None],
    ),
    "attend sinks": (
        lambda m, v: m.layer.attend(m.stream, m.q, m.out, sinks=v),
        [v for v in THINGS if v is not None],
    ),
    "attend numeric": (lambda m, v: m.layer.attend(m.stream, m.q, m.out, numeric=v), THINGS),
    "layer advance": (lambda m, v: m.layer.advance(m.stream, v), [*NOT_INT, -1, 9]),
    "layer set_len": (lambda m, v: m.layer.set_len(m.stream, v), [*NOT_INT, -1, 9]),
    "layer prepare": (lambda m, v: m.layer.prepare(m.stream, v), [*NOT_INT, -1, 9]),
    "layer can_rewind_to": (lambda m, v: m.layer.can_rewind_to(v), NOT_INT),
    "layer physical_rows": (lambda m, v: m.layer.physical_rows(0, v), [*NOT_INT, -1, 9]),
    "source": (lambda m, v: compile_source(v, arch="host"), [*NOT_TEXT, None, "// \udcff"]),
    "source arch": (lambda m, v: compile_source(SOURCE, arch=v), [*NOT_TEXT, None, "x", "sm_"]),
    "source name": (lambda m, v: compile_source(SOURCE, arch="host", name=v), NOT_TEXT),
    "source names": (
        lambda m, v: compile_source(SOURCE, arch="host", name_expressions=v),
        [None, 5, [5], ["no such"], b"scale", *ARRAYS[:1]],
    ),
    "source defines": (
        lambda m, v: compile_source(SOURCE, arch="host", defines=v),
        [5, "A", ["A"], {5: 1}, {"A B": 1}, {"": 1}, *ARRAYS],
    ),
    "source include_dirs": (
        lambda m, v: compile_source(SOURCE, arch="host", include_dirs=v),
        [None, 5, [5], b"x"],
    ),
    "source options": (
        lambda m, v: compile_source(SOURCE, arch="host", options=v),
        [5, "x", [], {"no": 1}, {5: 1}, object()],
    ),
    "compile_file": (
        lambda m, v: compile_file(v, arch="host"),
        [None, 5, [], "/no/such.cu", "/", object()],
    ),
    "module kernel": (lambda m, v: m.module.kernel(v), [*NOT_TEXT, None, "no such"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_wrong_kind_is_refused_by_name(made: Any, call: str) -> None:
    do, values = CALLS[call]
    made.stream.sync()
    length, count = made.layer.len, made.counter.value
    for value in values:
        with pytest.raises(MemraError) as refused:
            do(made, value)
        assert len(str(refused.value)) > 20, f"{call}({value!r}) says only {refused.value}"
    made.stream.sync()
    assert made.layer.len == length and made.counter.value == count
    assert made.stream.recording is None


def test_the_device_works_after_all_of_it(made: Any, healthy: Any) -> None:
    assert made.layer.len == 0 and made.counter.sync(made.stream) == 0
    healthy(made.stream)


CLOSED: dict[str, Any] = {
    "stream sync": lambda m: m.closed_stream.sync(),
    "stream capture": lambda m: m.closed_stream.capture("c").__enter__(),
    "stream wait": lambda m: m.stream.wait(m.closed_stream),
    "empty": lambda m: m.device.empty(4, F32, m.closed_stream),
    "launch stream": lambda m: launch(m.closed_stream, CONFIG, m.scale, m.x, m.y, N, 1.0),
    "plan": lambda m: m.plan.launch(m.closed_stream),
    "exec": lambda m: m.step.launch(m.closed_stream),
    "launch": lambda m: launch(m.stream, CONFIG, m.scale, m.closed, m.y, N, 1.0),
    "prepare": lambda m: prepare(m.device, CONFIG, m.scale, m.closed, m.y, N, 1.0),
    "set": lambda m: m.plan.set("x", m.closed),
    "copy_from": lambda m: m.y.copy_from(m.stream, m.closed),
    "copy_to": lambda m: m.closed.copy_to(m.stream, m.y),
    "to_numpy": lambda m: m.closed.to_numpy(m.stream),
    "view": lambda m: m.closed.view(0, 1, F32),
    "graph copy": lambda m: m.hand.copy(m.y, m.closed),
    "record": lambda m: m.stream.record(m.closed_event),
    "wait": lambda m: m.stream.wait(m.closed_event),
    "attend": lambda m: m.layer.attend(m.stream, m.closed_q, m.out),
}


@pytest.mark.parametrize("call", CLOSED)
def test_what_is_closed_is_refused_by_name(made: Any, healthy: Any, call: str) -> None:
    with pytest.raises(ClosedError, match="closed"):
        CLOSED[call](made)
    healthy(made.stream)
