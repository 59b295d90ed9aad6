"""Conditional nodes: bodies that run once, many times or never, as kernels decide."""

import numpy as np
import pytest

from memra_lowlevel import LaunchConfig, compile_source, errors, launch
from memra_lowlevel.graph import DeviceCounter, Graph

ONE = LaunchConfig(1, 32)
SOURCE = """
#include "common/conditional.cuh"
// Counts words[0] down and words[1] up; goes on while words[0] > 0, and marks every third step.
KERNEL void step(int32_t* words, uint64_t loop, uint64_t third) {
    if (threadIdx.x == 0) {
        words[0] -= 1;
        words[1] += 1;
        cudaGraphSetConditional(loop, words[0] > 0);
        cudaGraphSetConditional(third, words[1] % 3 == 0);
    }
}
KERNEL void mark(int32_t* words) { if (threadIdx.x == 0) words[2] += 1; }
"""


@pytest.fixture
def kernels(device):
    module = device.module(compile_source(SOURCE, arch=device.arch))
    return module.kernel("step"), module.kernel("mark")


def looped(device, kernels, words):
    step, mark = kernels
    graph = Graph(device, "looped")
    loop, third = graph.condition(), graph.condition(0)
    body = graph.loop(loop)
    first = body.kernel(ONE, step, words, loop, third)
    then = body.branch(third, after=[first])
    then.kernel(ONE, mark, words)
    graph.kernel(ONE, mark, words, after=[body.place])
    return graph


def test_a_body_runs_as_often_as_the_device_says(device, stream, kernels):
    words = device.zeros(3, np.int32, stream, "words")
    with looped(device, kernels, words) as graph:
        assert graph.describe().nodes == {"conditional": 1, "kernel": 1}
        exec_ = graph.instantiate()
    for n in (1, 7, 2):  # also after the graph was closed, and again and again
        words.copy_from(stream, np.array([n, 0, 0], np.int32))
        before = device.driver.counts().get("cuGraphLaunch", 0)
        exec_.launch(stream)
        assert words.to_numpy(stream).tolist() == [0, n, n // 3 + 1]
        assert device.driver.counts().get("cuGraphLaunch", 0) == before + 1
    exec_.close()


def test_a_body_may_not_run(device, stream, kernels):
    words = device.zeros(3, np.int32, stream, "words")
    graph = Graph(device, "never")
    never = graph.condition(0)
    graph.loop(never).kernel(ONE, kernels[1], words)
    with graph.instantiate() as exec_:
        exec_.launch(stream)
        assert not words.to_numpy(stream).any()
    graph.close()


def test_a_captured_graph_is_a_child_of_a_body(device, stream, kernels):
    step, mark = kernels
    words = device.zeros(3, np.int32, stream, "words")
    graph = Graph(device, "outer")
    loop, third = graph.condition(), graph.condition(0)
    with stream.capture("inner") as inner:
        launch(stream, ONE, step, words, loop, third)
        launch(stream, ONE, mark, words)
    body = graph.loop(loop)
    body.child(inner)
    words.copy_from(stream, np.array([5, 0, 0], np.int32))
    with pytest.raises(errors.ArgumentError, match="no loop or branch asks the condition made at"):
        graph.instantiate()
    graph.branch(third, after=[body.place]).kernel(ONE, mark, words)
    with graph.instantiate() as exec_:
        exec_.launch(stream)
        assert words.to_numpy(stream).tolist() == [0, 5, 5]
    with Graph(device, "another") as another, pytest.raises(errors.DriverError):
        another.child(graph)  # the driver takes no conditional nodes in children
    graph.close()


def test_refusals(device, stream, kernels):
    graph, other = Graph(device, "one"), Graph(device, "other")
    words = device.zeros(1, np.int32, stream, "words")
    counter = DeviceCounter(words, name="n", capacity=10)
    foreign = other.condition()
    if device.kind == "host":  # a driver need not notice
        with pytest.raises(errors.DriverError):
            graph.loop(foreign)
    for wrong in ("handle", 1.5, -1, None):
        with pytest.raises(errors.ArgumentError, match="one: condition"):
            graph.loop(wrong)
        with pytest.raises(errors.ArgumentError, match="one: condition"):
            graph.branch(wrong)
    body = graph.loop(graph.condition(0))
    counter.advance(stream, 1)
    with stream.capture("moves") as moves:
        counter.advance(stream, 1)
    with pytest.raises(errors.ArgumentError, match="any number of times"):
        body.child(moves)
    with pytest.raises(errors.ArgumentError, match="instantiate 'one'"):
        body.instantiate()
    graph.close()
    assert body.closed
    with pytest.raises(errors.ClosedError):
        body.empty()
    other.close()
