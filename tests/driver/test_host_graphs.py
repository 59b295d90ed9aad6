"""Graphs of the host device: capture, explicit nodes, snapshots, updates, launches."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
from driver_bench import Bench, pack

from memra_lowlevel.driver.host import host_options
from memra_lowlevel.driver.table import (
    CaptureMode,
    CaptureStatus,
    FuncAttribute,
    KernelNodeParams,
    LaunchAttributes,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeType,
)
from memra_lowlevel.errors import (
    CaptureInvalidated,
    CaptureUnjoined,
    InvalidArgument,
    MemraError,
    OutOfBounds,
)

LOCAL = CaptureMode.THREAD_LOCAL
ONE = (1, 1, 1)


def _i32(*values: int) -> tuple[bytes, ...]:
    return tuple(v.to_bytes(4, "little", signed=True) for v in values)


def _add_params(bench: Bench, ptr: int, delta: int, n: int) -> KernelNodeParams:
    values = (ptr.to_bytes(8, "little"), *_i32(delta, n))
    return KernelNodeParams(bench.func("add"), ONE, (32, 1, 1), 0, values)


def test_capture_records_and_runs_nothing(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x = bench.ints([3] * 8)
    d.cuStreamBeginCapture(s, LOCAL)
    bench.add(x, 4, 8, s)
    d.cuMemsetD32Async(x, 9, 2, s)
    info = d.cuStreamGetCaptureInfo(s)
    graph = d.cuStreamEndCapture(s)
    assert info.status == CaptureStatus.ACTIVE and info.graph == graph
    d.cuCtxSynchronize()
    assert bench.read(x, 8) == [3] * 8
    nodes = d.cuGraphGetNodes(graph)
    assert [d.cuGraphNodeGetType(n) for n in nodes] == [NodeType.KERNEL, NodeType.MEMSET]
    assert info.dependencies == (nodes[1],)
    assert d.cuGraphGetEdges(graph) == [(nodes[0], nodes[1])]
    assert d.cuGraphKernelNodeGetParams(nodes[0]) == _add_params(bench, x, 4, 8)
    assert d.cuGraphMemsetNodeGetParams(nodes[1]) == MemsetNodeParams(x, 9, 4, 2)
    e = d.cuGraphInstantiate(graph, 0)
    for _ in range(3):
        d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert bench.read(x, 8) == [9, 9] + [3 + 12] * 6


def test_parameters_are_taken_by_value(bench: Bench) -> None:
    """Changing the caller's parameter block after the launch changes nothing."""
    d, s = bench.d, bench.stream()
    x = bench.ints([0])
    ptr, delta, n = ctypes.c_void_p(x), ctypes.c_int32(5), ctypes.c_int32(1)
    address, keep = pack(ptr, delta, n)
    d.cuLaunchKernel(bench.func("add"), ONE, (32, 1, 1), 0, s, address)
    delta.value = 1000
    d.cuStreamSynchronize(s)
    assert bench.read(x, 1) == [5]
    delta.value = 7
    d.cuStreamBeginCapture(s, LOCAL)
    d.cuLaunchKernel(bench.func("add"), ONE, (32, 1, 1), 0, s, address)
    graph = d.cuStreamEndCapture(s)
    delta.value = 1000
    del keep
    e = d.cuGraphInstantiate(graph, 0)
    d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert bench.read(x, 1) == [12]


def test_an_executable_outlives_its_graph(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x = bench.ints([0])
    graph = d.cuGraphCreate()
    node = d.cuGraphAddKernelNode(graph, [], _add_params(bench, x, 2, 1))
    e = d.cuGraphInstantiate(graph, 0)
    d.cuGraphAddKernelNode(graph, [node], _add_params(bench, x, 100, 1))  # later: not in e
    d.cuGraphLaunch(e, s)
    d.cuGraphDestroy(graph)
    d.cuGraphLaunch(e, s)
    d.cuGraphExecDestroy(e)  # work that was launched goes on
    d.cuStreamSynchronize(s)
    assert bench.read(x, 1) == [4]
    with pytest.raises(InvalidArgument, match="no open executable graph"):
        d.cuGraphLaunch(e, s)


def test_fork_and_join_by_events(bench: Bench) -> None:
    d, s, t = bench.d, bench.stream(), bench.stream()
    x, y = bench.ints([1]), bench.ints([0])
    fork, join = bench.event(), bench.event()
    d.cuStreamBeginCapture(s, LOCAL)
    bench.add(x, 1, 1, s)
    d.cuEventRecord(fork, s)
    d.cuStreamWaitEvent(t, fork)
    bench.scale_add(y, x, 1, 1, t)
    d.cuEventRecord(join, t)
    d.cuStreamWaitEvent(s, join)
    bench.scale_add(x, y, 10, 1, s)
    graph = d.cuStreamEndCapture(s)
    assert d.cuStreamIsCapturing(t) == CaptureStatus.NONE
    a, b, c = d.cuGraphGetNodes(graph)
    assert sorted(d.cuGraphGetEdges(graph)) == sorted([(a, b), (a, c), (b, c)])
    e = d.cuGraphInstantiate(graph, 0)
    for seed in range(10):
        with host_options(seed=seed):
            d.cuMemsetD32Async(x, 1, 1, s)
            d.cuMemsetD32Async(y, 0, 1, s)
            d.cuGraphLaunch(e, s)
            d.cuStreamSynchronize(s)
            assert bench.read(x, 1) == [22]


def test_branches_without_an_edge_run_in_any_order(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x, one = bench.ints([1]), bench.ints([1])
    graph = d.cuGraphCreate()
    for factor in (2, 3):
        values = (x.to_bytes(8, "little"), one.to_bytes(8, "little"), *_i32(factor, 1))
        p = KernelNodeParams(bench.func("scale_add"), ONE, (32, 1, 1), 0, values)
        d.cuGraphAddKernelNode(graph, [], p)
    e = d.cuGraphInstantiate(graph, 0)
    seen = set()
    for seed in range(20):
        with host_options(seed=seed):
            d.cuMemsetD32Async(x, 1, 1, s)
            d.cuGraphLaunch(e, s)
            d.cuStreamSynchronize(s)
            seen.add(bench.read(x, 1)[0])
    assert seen == {(1 * 2 + 1) * 3 + 1, (1 * 3 + 1) * 2 + 1}


def test_one_executable_on_two_streams_is_ordered_with_itself(bench: Bench) -> None:
    """Launches of one executable never overlap, whatever streams they are on."""
    d, s, t = bench.d, bench.stream(), bench.stream()
    x, y = bench.ints([0]), bench.ints([0])
    graph = d.cuGraphCreate()
    a = d.cuGraphAddKernelNode(graph, [], _add_params(bench, x, 1, 1))
    copy = MemcpyNodeParams(y, x, 4, "dtod")
    b = d.cuGraphAddMemcpyNode(graph, [a], copy, bench.ctx)
    d.cuGraphAddKernelNode(graph, [b], _add_params(bench, y, 100, 1))
    e = d.cuGraphInstantiate(graph, 0)
    for seed in range(20):
        with host_options(seed=seed):
            d.cuMemsetD32Async(x, 0, 1, s)
            d.cuStreamSynchronize(s)
            d.cuGraphLaunch(e, s)
            d.cuGraphLaunch(e, t)
            d.cuStreamSynchronize(t)
            assert (bench.read(x, 1), bench.read(y, 1)) == ([2], [102])


def test_explicit_nodes_of_each_kind(bench: Bench, tmp_path: Path) -> None:
    d, s = bench.d, bench.stream()
    x, y, h = bench.ints([0] * 4), bench.ints([0] * 4), d.cuMemHostAlloc(16)
    child = d.cuGraphCreate()
    d.cuGraphAddMemsetNode(child, [], MemsetNodeParams(x, 5, 4, 4), bench.ctx)
    graph = d.cuGraphCreate()
    c = d.cuGraphAddChildGraphNode(graph, [], child)
    k = d.cuGraphAddKernelNode(graph, [c], _add_params(bench, x, 1, 4))
    m = d.cuGraphAddMemcpyNode(graph, [k], MemcpyNodeParams(y, x, 16, "dtod"), bench.ctx)
    z = d.cuGraphAddEmptyNode(graph, [k, m])
    out = d.cuGraphAddMemcpyNode(graph, [z], MemcpyNodeParams(h, y, 16, "dtoh"), bench.ctx)
    types = [d.cuGraphNodeGetType(n) for n in d.cuGraphGetNodes(graph)]
    N = NodeType
    assert types == [N.GRAPH, N.KERNEL, N.MEMCPY, N.EMPTY, N.MEMCPY]
    assert d.cuGraphMemcpyNodeGetParams(out) == MemcpyNodeParams(h, y, 16, "dtoh")
    inner = d.cuGraphChildGraphNodeGetGraph(c)
    assert inner != child and len(d.cuGraphGetNodes(inner)) == 1
    d.cuGraphDestroy(child)  # the node has its own copy
    with pytest.raises(InvalidArgument, match="parent"):
        d.cuGraphDestroy(inner)
    e = d.cuGraphInstantiate(graph, 0)
    d.cuGraphUpload(e, s)
    d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert list((ctypes.c_int32 * 4).from_address(h)) == [6] * 4
    dot = tmp_path / "graph.dot"
    d.name_handle(k, "bump")
    d.cuGraphDebugDotPrint(graph, str(dot), 0)
    text = dot.read_text()
    assert text.startswith("digraph") and "bump" in text and text.count("->") == 5


def test_nodes_refuse_what_does_not_fit(bench: Bench) -> None:
    d = bench.d
    x = bench.ints([0])
    one, two = d.cuGraphCreate(), d.cuGraphCreate()
    a = d.cuGraphAddEmptyNode(one, [])
    with pytest.raises(InvalidArgument, match="another graph"):
        d.cuGraphAddEmptyNode(two, [a])
    with pytest.raises(InvalidArgument, match="twice"):
        d.cuGraphAddEmptyNode(one, [a, a])
    with pytest.raises(InvalidArgument, match="empty node"):
        d.cuGraphKernelNodeGetParams(a)
    with pytest.raises(InvalidArgument, match="the kernel takes"):
        d.cuGraphAddKernelNode(one, [], KernelNodeParams(bench.func("add"), ONE, ONE, 0, ()))
    with pytest.raises(InvalidArgument, match="past its block"):
        d.cuGraphAddMemsetNode(one, [], MemsetNodeParams(x, 0, 4, 2), bench.ctx)
    assert len(d.cuGraphGetNodes(one)) == 1 and not d.cuGraphGetNodes(two)


def test_a_child_graph_goes_into_a_capture_by_hand(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x = bench.ints([1])
    child = d.cuGraphCreate()
    d.cuGraphAddKernelNode(child, [], _add_params(bench, x, 10, 1))
    d.cuStreamBeginCapture(s, LOCAL)
    bench.scale_add(x, x, 1, 1, s)  # x = 2 x
    info = d.cuStreamGetCaptureInfo(s)
    node = d.cuGraphAddChildGraphNode(info.graph, info.dependencies, child)
    d.cuStreamUpdateCaptureDependencies(s, [node], 1)
    bench.scale_add(x, x, 1, 1, s)
    with pytest.raises(InvalidArgument, match="captured graph"):
        d.cuStreamUpdateCaptureDependencies(s, d.cuGraphGetNodes(child), 1)
    graph = d.cuStreamEndCapture(s)
    a, b, c = d.cuGraphGetNodes(graph)
    assert (b, d.cuGraphGetEdges(graph)) == (node, [(a, b), (b, c)])
    e = d.cuGraphInstantiate(graph, 0)
    for seed in range(10):
        with host_options(seed=seed):
            d.cuMemsetD32Async(x, 1, 1, s)
            d.cuGraphLaunch(e, s)
            d.cuStreamSynchronize(s)
            assert bench.read(x, 1) == [24]
    with pytest.raises(InvalidArgument, match="no capture"):
        d.cuStreamUpdateCaptureDependencies(s, [], 0)


# -- changes -----------------------------------------------------------------------------------


def test_set_params_of_each_kind(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x, y = bench.ints([0] * 4), bench.ints([0] * 4)
    graph = d.cuGraphCreate()
    m = d.cuGraphAddMemsetNode(graph, [], MemsetNodeParams(x, 1, 4, 4), bench.ctx)
    k = d.cuGraphAddKernelNode(graph, [m], _add_params(bench, x, 1, 4))
    c = d.cuGraphAddMemcpyNode(graph, [k], MemcpyNodeParams(y, x, 16, "dtod"), bench.ctx)
    e = d.cuGraphInstantiate(graph, 0)
    d.cuGraphLaunch(e, s)  # its values are fixed now, before the changes below
    d.cuGraphExecMemsetNodeSetParams(e, m, MemsetNodeParams(x, 10, 4, 4), bench.ctx)
    d.cuGraphExecKernelNodeSetParams(e, k, _add_params(bench, x, 5, 2))
    d.cuGraphExecMemcpyNodeSetParams(e, c, MemcpyNodeParams(y, x, 8, "dtod"), bench.ctx)
    d.cuStreamSynchronize(s)
    assert bench.read(y, 4) == [2] * 4
    d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert (bench.read(x, 4), bench.read(y, 4)) == ([15, 15, 10, 10], [15, 15, 2, 2])
    with pytest.raises(InvalidArgument, match="another type"):
        d.cuGraphExecMemsetNodeSetParams(e, k, MemsetNodeParams(x, 1, 4, 4), bench.ctx)
    h = d.cuMemHostAlloc(16)
    with pytest.raises(InvalidArgument, match="kinds of memory"):
        d.cuGraphExecMemcpyNodeSetParams(e, c, MemcpyNodeParams(h, x, 8, "dtoh"), bench.ctx)
    d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert bench.read(y, 4) == [15, 15, 2, 2]


def _chain(bench: Bench, x: int, deltas: list[int]) -> int:
    d = bench.d
    graph, before = d.cuGraphCreate(), []
    for delta in deltas:
        before = [d.cuGraphAddKernelNode(graph, before, _add_params(bench, x, delta, 1))]
    return graph


def test_update_takes_all_values_or_names_the_node(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    x = bench.ints([0])
    old = _chain(bench, x, [1, 2])
    e = d.cuGraphInstantiate(old, 0)
    assert d.cuGraphExecUpdate(e, _chain(bench, x, [10, 20])).ok
    d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert bench.read(x, 1) == [30]
    longer = d.cuGraphExecUpdate(e, _chain(bench, x, [1, 2, 3]))
    assert not longer.ok and longer.reason.startswith("TOPOLOGY_CHANGED")
    other = d.cuGraphCreate()
    a = d.cuGraphAddKernelNode(other, [], _add_params(bench, x, 1, 1))
    b = d.cuGraphAddMemsetNode(other, [a], MemsetNodeParams(x, 0, 4, 1), bench.ctx)
    kind = d.cuGraphExecUpdate(e, other)
    assert not kind.ok and kind.reason.startswith("NODE_TYPE_CHANGED") and kind.node == b
    apart = d.cuGraphCreate()
    d.cuGraphAddKernelNode(apart, [], _add_params(bench, x, 1, 1))
    second = d.cuGraphAddKernelNode(apart, [], _add_params(bench, x, 1, 1))
    edge = d.cuGraphExecUpdate(e, apart)
    assert not edge.ok and edge.reason.startswith("TOPOLOGY_CHANGED") and edge.node == second
    d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert bench.read(x, 1) == [60]  # a refused update changed nothing
    d.cuGraphExecKernelNodeSetParams(e, d.cuGraphGetNodes(old)[0], _add_params(bench, x, 0, 1))
    d.cuGraphLaunch(e, s)
    d.cuStreamSynchronize(s)
    assert bench.read(x, 1) == [80]


def test_update_refuses_another_kind_of_memory(bench: Bench) -> None:
    d = bench.d
    x, y, h = bench.ints([0]), bench.ints([0]), d.cuMemHostAlloc(4)
    one, two = d.cuGraphCreate(), d.cuGraphCreate()
    d.cuGraphAddMemcpyNode(one, [], MemcpyNodeParams(y, x, 4, "dtod"), bench.ctx)
    n = d.cuGraphAddMemcpyNode(two, [], MemcpyNodeParams(h, x, 4, "dtoh"), bench.ctx)
    e = d.cuGraphInstantiate(one, 0)
    got = d.cuGraphExecUpdate(e, two)
    assert not got.ok and got.reason.startswith("PARAMETERS_CHANGED") and got.node == n


# -- captures that go wrong ---------------------------------------------------------------------


def test_invalidated_capture_names_the_first_cause(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    d.name_handle(s, "decode")
    x = bench.ints([0])
    d.cuStreamBeginCapture(s, LOCAL)
    bench.add(x, 1, 1, s)
    with pytest.raises(MemraError):
        d.cuMemAlloc(64)  # the cause
    with pytest.raises(CaptureInvalidated):
        bench.add(x, 1, 1, s)
    with pytest.raises(MemraError):
        d.cuMemFree(x)  # a later offence is not the cause
    with pytest.raises(CaptureInvalidated) as caught:
        d.cuStreamEndCapture(s)
    assert caught.value.cause.startswith("cuMemAlloc (STREAM_CAPTURE_UNSUPPORTED) at ")
    assert "test_host_graphs.py" in caught.value.cause and "'decode'" in str(caught.value)
    assert not d.active_captures()
    bench.add(x, 1, 1, s)
    d.cuStreamSynchronize(s)
    assert bench.read(x, 1) == [1]


def test_unjoined_streams_are_named(bench: Bench) -> None:
    d, s, t = bench.d, bench.stream(), bench.stream()
    d.name_handle(t, "copies")
    x, fork = bench.ints([0]), bench.event()
    d.cuStreamBeginCapture(s, LOCAL)
    d.cuEventRecord(fork, s)
    d.cuStreamWaitEvent(t, fork)
    bench.add(x, 1, 1, t)
    with pytest.raises(CaptureUnjoined) as caught:
        d.cuStreamEndCapture(s)
    assert caught.value.streams == ("copies",) and "'copies'" in str(caught.value)
    for stream in (s, t):
        assert d.cuStreamIsCapturing(stream) == CaptureStatus.NONE


def test_captures_of_two_threads_do_not_disturb(bench: Bench) -> None:
    d = bench.d
    barrier = threading.Barrier(2)
    results: list[object] = []

    def work(delta: int) -> None:
        try:
            d.cuCtxSetCurrent(bench.ctx)
            x, s = bench.ints([0]), bench.stream()
            barrier.wait(20)
            d.cuStreamBeginCapture(s, LOCAL)
            barrier.wait(20)
            for _ in range(10):
                bench.add(x, delta, 1, s)
            graph = d.cuStreamEndCapture(s)
            barrier.wait(20)
            e = d.cuGraphInstantiate(graph, 0)
            d.cuGraphLaunch(e, s)
            d.cuStreamSynchronize(s)
            results.append((len(d.cuGraphGetNodes(graph)), bench.read(x, 1)[0] == 10 * delta))
        except BaseException as error:
            barrier.abort()
            results.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in (3, 4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [(10, True), (10, True)]


def test_pool_memory_in_a_graph(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    out = bench.ints([0])
    d.cuStreamBeginCapture(s, LOCAL)
    a = d.cuMemAllocAsync(4, s)
    d.cuMemsetD32Async(a, 8, 1, s)
    d.cuMemcpyDtoDAsync(out, a, 4, s)
    d.cuMemFreeAsync(a, s)
    graph = d.cuStreamEndCapture(s)
    types = [d.cuGraphNodeGetType(n) for n in d.cuGraphGetNodes(graph)]
    N = NodeType
    assert types == [N.MEM_ALLOC, N.MEMSET, N.MEMCPY, N.MEM_FREE]
    e = d.cuGraphInstantiate(graph, 0)
    for _ in range(2):
        d.cuMemsetD32Async(out, 0, 1, s)
        d.cuGraphLaunch(e, s)
        d.cuStreamSynchronize(s)
        assert bench.read(out, 1) == [8]
    d.cuMemcpyDtoDAsync(out, a, 4, s)  # outside: the graph freed it
    with pytest.raises(OutOfBounds):
        d.cuStreamSynchronize(s)
    d.cuGraphDestroy(graph)
    assert d.cuMemPoolGetUsage(0).reserved_bytes == 4  # the executable still needs it
    d.cuGraphLaunch(e, s)
    d.cuGraphExecDestroy(e)
    assert d.cuMemPoolGetUsage(0).reserved_bytes == 0


# -- modules and launches -------------------------------------------------------------------------


def test_kernel_facts(bench: Bench) -> None:
    d = bench.d
    f = bench.func("wide")
    assert bench.func("wide") == f
    assert [d.cuFuncGetParamInfo(f, i) for i in range(4)] == [(0, 8), (8, 8), (16, 1), None]
    assert d.cuFuncGetAttribute(FuncAttribute.MAX_THREADS_PER_BLOCK, f) == 1024
    assert d.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 256, 0) == 8
    with pytest.raises(InvalidArgument, match="no kernel 'nothing'"):
        bench.func("nothing")
    with pytest.raises(InvalidArgument) as caught:
        d.cuModuleLoadData(b"\x7fELF\xff\xfe no path")
    assert caught.value.result == "CUDA_ERROR_INVALID_IMAGE"


@pytest.mark.parametrize(
    ("grid", "block", "shared", "text"),
    [
        ((0, 1, 1), ONE, 0, "grid"),
        ((1, 65536, 1), ONE, 0, "grid"),
        (ONE, (1025, 1, 1), 0, "block"),
        (ONE, (1, 1, 65), 0, "block"),
        (ONE, (1024, 2, 1), 0, "2048 threads"),
        (ONE, ONE, (48 << 10) + 1, "shared memory"),
        (ONE, ONE, -1, "shared memory"),
    ],
)
def test_launch_limits(
    bench: Bench, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        bench.d.cuLaunchKernel(bench.func("empty"), grid, block, shared, bench.stream(), 0)


def test_launch_bounds_are_a_limit_of_their_kernel(bench: Bench) -> None:
    d, s, f = bench.d, bench.stream(), bench.func("narrow")
    assert d.cuFuncGetAttribute(FuncAttribute.MAX_THREADS_PER_BLOCK, f) == 64
    d.cuLaunchKernel(f, ONE, (32, 2, 1), 0, s, 0)
    with pytest.raises(InvalidArgument, match="65 threads a block, at most 64"):
        d.cuLaunchKernel(f, ONE, (65, 1, 1), 0, s, 0)


def test_dynamic_shared_memory_above_the_default_needs_the_opt_in(bench: Bench) -> None:
    d, s, f = bench.d, bench.stream(), bench.func("shared")
    x = bench.ints([0] * 64)
    address, keep = pack(ctypes.c_void_p(x))
    size = 64 << 10
    with pytest.raises(InvalidArgument, match="MAX_DYNAMIC_SHARED_SIZE_BYTES"):
        d.cuLaunchKernel(f, ONE, (64, 1, 1), size, s, address)
    d.cuFuncSetAttribute(f, FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
    d.cuLaunchKernel(f, ONE, (64, 1, 1), size, s, address)
    d.cuStreamSynchronize(s)
    del keep
    assert bench.read(x, 64) == list(range(63, -1, -1))
    with pytest.raises(InvalidArgument):
        d.cuFuncSetAttribute(f, FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 20)


def test_launch_attributes(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    f = bench.func("empty")
    d.cuLaunchKernelEx(f, ONE, ONE, 0, s, 0, LaunchAttributes(programmatic=True, priority=-1))
    with pytest.raises(MemraError, match="clusters"):
        d.cuLaunchKernelEx(f, ONE, ONE, 0, s, 0, LaunchAttributes(cluster=(2, 1, 1)))
    with pytest.raises(InvalidArgument, match="no parameters given"):
        d.cuLaunchKernel(bench.func("add"), ONE, ONE, 0, s, 0)


def test_unloading_waits_and_closes_the_kernels(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    module = d.cuModuleLoadData(bench.image)
    f, x = d.cuModuleGetFunction(module, "add"), bench.ints([0])
    address, keep = pack(ctypes.c_void_p(x), ctypes.c_int32(1), ctypes.c_int32(1))
    d.cuLaunchKernel(f, ONE, (32, 1, 1), 0, s, address)
    d.cuModuleUnload(module)
    assert bench.read(x, 1) == [1]
    with pytest.raises(InvalidArgument, match="no open kernel"):
        d.cuLaunchKernel(f, ONE, (32, 1, 1), 0, s, address)
    del keep
