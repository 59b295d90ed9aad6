"""Ends in every order: closing, dropping, leaving captures the wrong way, threads, forks."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
from abuse import CONFIG, SOURCE, N

from memra_lowlevel import (
    DeviceCounter,
    compile_source,
    launch,
    no_leaks,
    prepare,
)
from memra_lowlevel.cache import KvLayer
from memra_lowlevel.errors import (
    CapacityExceeded,
    CaptureForbidden,
    CaptureUnjoined,
    CaptureWrongThread,
    ClosedError,
    MemraError,
    OutOfMemory,
)

F32 = np.float32


@pytest.fixture
def y(device: Any, stream: Any) -> Any:
    with device.zeros(N, F32, stream) as buffer:
        yield buffer


def test_every_order_of_closing(device: Any, stream: Any, healthy: Any, scale: int = 40) -> None:
    orders = list(itertools.permutations(range(6)))
    image = compile_source(SOURCE, arch=device.arch, name_expressions=["scale", "first"])
    with no_leaks():
        for order in random.Random(7).sample(orders, scale):
            other, loaded = device.stream(), device.module(image)
            b, arena = device.zeros(N, F32, other), device.arena(1024)
            with other.capture("c") as graph:
                launch(other, CONFIG, loaded.kernel("scale"), b, arena.take(N, F32), N, 1.0)
            step = graph.instantiate()
            step.launch(other)
            things = [other, b, graph, step, loaded, arena]
            for i in order:
                things[i].close()
                things[i].close()
    healthy(stream)


def test_nodes_of_a_closed_graph_are_not_touched(
    device: Any, stream: Any, scale: Any, healthy: Any, y: Any
) -> None:
    with stream.capture("g") as graph:
        launch(stream, CONFIG, scale, y, y, N, 1.0)
    step = graph.instantiate()
    step.update(0, args={"f": 2.0})
    graph.close()
    for refused in (
        lambda: step.update(0, args={"f": 3.0}),  # its parameters are known from the first update
        lambda: step.update("scale", grid=1),
        step.describe,
        graph.nodes,
        graph.instantiate,
    ):
        with pytest.raises(ClosedError):
            refused()
    step.launch(stream)
    step.close()
    with pytest.raises(ClosedError):
        step.launch(stream)
    healthy(stream)


def test_captures_that_end_the_wrong_way(
    device: Any, stream: Any, scale: Any, healthy: Any, y: Any
) -> None:
    never = stream.capture("never entered")
    never.__exit__(None, None, None)
    healthy(stream)

    with pytest.raises(KeyError, match="mine"), stream.capture("raises") as graph:
        launch(stream, CONFIG, scale, y, y, N, 1.0)
        raise KeyError("mine")
    with pytest.raises(MemraError):
        graph.instantiate()
    healthy(stream)

    with pytest.raises(CaptureForbidden), stream.capture("outer"), stream.capture("inner"):
        pass
    healthy(stream)

    with (
        device.stream(name="fork") as fork,
        pytest.raises(CaptureUnjoined, match="fork"),
        stream.capture("unjoined"),
    ):
        fork.wait(stream)
        launch(fork, CONFIG, scale, y, y, N, 1.0)
    healthy(stream)

    def generator() -> Any:
        with stream.capture("abandoned"):
            launch(stream, CONFIG, scale, y, y, N, 1.0)
            yield

    abandoned = generator()
    next(abandoned)
    del abandoned
    gc.collect()
    healthy(stream)

    wrong: list[Any] = []
    capture = stream.capture("here")
    capture.__enter__()

    def end_there() -> None:
        try:
            capture.__exit__(None, None, None)
        except CaptureWrongThread as error:
            wrong.append(error)

    thread = threading.Thread(target=end_there)
    thread.start()
    thread.join()
    capture.__exit__(None, None, None)
    assert len(wrong) == 1
    healthy(stream)


def test_closing_and_collecting_during_a_capture(
    device: Any, stream: Any, scale: Any, healthy: Any, y: Any
) -> None:
    source = device.from_numpy(np.arange(N, dtype=F32), stream)
    dropped = [device.zeros(N, F32, stream) for _ in range(20)]
    with stream.capture("g") as graph:
        launch(stream, CONFIG, scale, source, y, N, 2.0)
        source.close()
        dropped.clear()
        device.stream(name="short lived")
        gc.collect()
        for refused in (stream.close, graph.close):
            with pytest.raises(CaptureForbidden):
                refused()
        for refused in (graph.instantiate, graph.describe, stream.sync, device.sync, stream.done):
            with pytest.raises(MemraError):
                refused()
        for refused in (
            lambda: device.zeros(4, F32, stream),
            lambda: device.pinned(4, F32),
            lambda: device.arena(64),
            lambda: y.copy_from(stream, np.zeros(N, F32)),
            lambda: y.to_numpy(stream),
            lambda: DeviceCounter(device, stream=stream),
            lambda: KvLayer.allocate(device, 8, 1, 64),
            device.trim,
        ):
            with pytest.raises(CaptureForbidden):
                refused()
    with graph.instantiate() as step:
        y.fill(stream, 0xFF)
        step.launch(stream)
        assert (y.to_numpy(stream) == 2 * np.arange(N)).all()
    graph.close()
    healthy(stream)


def test_threads_capture_side_by_side(device: Any, stream: Any, scale: Any, healthy: Any) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with device.stream(name=f"thread {number}") as own, device.arena(4096) as arena:
                a, b = arena.take(N, F32), arena.take(N, F32)
                landing = pinned[number]
                for i in range(20):
                    landing.array[:] = number + i
                    with own.capture("g") as graph:
                        a.copy_from(own, landing)
                        launch(own, CONFIG, scale, a, b, N, float(i))
                        b.copy_to(own, landing)
                    ready.wait()  # nobody instantiates or waits while another one captures
                    with graph.instantiate() as step:
                        step.launch(own)
                        own.sync()
                    graph.close()
                    assert (landing.array == F32(number + i) * i).all()
                    ready.wait()
        except BaseException as error:
            failed.append(error)
            ready.abort()

    pinned = [device.pinned(N, F32) for _ in range(3)]
    ready = threading.Barrier(3, timeout=30)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    for buffer in pinned:
        buffer.close()
    healthy(stream)


def test_no_graph_runs_over_a_counter(device: Any, stream: Any, healthy: Any) -> None:
    counter = DeviceCounter(device, "slots", capacity=3, stream=stream)
    with stream.capture("step") as graph:
        counter.advance(stream, 1)
    with graph.instantiate() as step:
        for _ in range(3):
            step.launch(stream)
        for _ in range(2):
            with pytest.raises(CapacityExceeded, match="Nothing was launched"):
                step.launch(stream)
        assert counter.sync(stream) == 3
    graph.close()
    counter.close()
    healthy(stream)


def test_handles_are_neither_pickled_nor_copied(
    device: Any, stream: Any, module: Any, scale: Any, healthy: Any, y: Any
) -> None:
    layer = KvLayer.allocate(device, 8, 1, 64)
    counter = DeviceCounter(device, "c", stream=stream)
    with stream.capture("g") as graph:
        launch(stream, CONFIG, scale, y, y, N, 1.0)
    step, plan = graph.instantiate(), prepare(device, CONFIG, scale, y, y, N, 1.0)
    event, pinned, arena = device.event(), device.pinned(4, F32), device.arena(64)
    things = [device, stream, y, module, graph, step, plan, counter, layer, event, pinned, arena]
    for thing in things:
        for take in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(MemraError, match="pickled or copied"):
                take(thing)
    for thing in (step, graph, counter, layer, event, pinned, arena):
        thing.close()
    for plain in (CONFIG, module.image):
        assert pickle.loads(pickle.dumps(plain)) == plain
    healthy(stream)


def test_more_memory_than_there_is(device: Any, stream: Any, healthy: Any) -> None:
    _, total = device.memory_bytes()
    for take in (
        lambda: device.alloc(total + 1, stream),
        lambda: device.alloc(2**62, stream),
        lambda: device.empty((2**31, 2**31), F32, stream),
        lambda: device.arena(2**62),
        lambda: device.pinned(2**60, F32),
    ):
        with pytest.raises(OutOfMemory):
            take()
    healthy(stream)


def test_thousands_of_things_dropped(device: Any, stream: Any, healthy: Any) -> None:
    with no_leaks():
        for _ in range(4):
            dropped = [device.stream() for _ in range(100)]
            dropped += [device.event() for _ in range(500)]
            dropped += [device.empty(4, F32, stream) for _ in range(500)]
            del dropped
            gc.collect()
            stream.sync()
    healthy(stream)


def test_a_forked_child_of_the_host_device_goes_on(
    device: Any, stream: Any, healthy: Any, y: Any
) -> None:
    healthy(stream)
    if device.kind != "host":
        return  # a CUDA context does not survive a fork
    child = os.fork()
    if child == 0:
        status = 1
        try:
            healthy(stream)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    healthy(stream)
