"""Describing, auditing, drawing, building and updating graphs."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_fixtures import shifted

from memra_lowlevel import Device, Graph, LaunchConfig, Stream, errors, launch

ONE = LaunchConfig(1, 32)


@pytest.fixture
def cell(device: Device, stream: Stream) -> Iterator[Any]:
    out = device.from_numpy(np.array([1], np.int32), stream, name="cell")
    yield out
    out.close()


def test_description_names_everything(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    arena = device.arena(4096, name="plan")
    y = arena.take(8, np.float32, name="y")
    x = device.zeros(8, np.float32, stream, name="x")
    down = device.pinned(1, np.int32, name="down")
    with stream.capture("all kinds") as graph:
        launch(stream, ONE, kernels.shift, cell, -7)
        launch(stream, ONE, kernels.axpy, x, y, None, 2.5, 8)
        x.fill(stream, 3)
        cell.copy_to(stream, down)
    report = graph.describe()
    assert report.nodes == {"kernel": 2, "memset": 1, "memcpy": 1}
    assert report.kernels == {"shift": 1, "axpy": 1} and report.edges == 3
    assert (report.kernel_nodes, report.memory_nodes, report.findings) == (2, 0, ())
    scalars = {(f.node, f.param): f.value for f in report.scalars}
    assert scalars[("shift#0", "by")] == -7
    assert scalars[("axpy#0", "a")] == 2.5 and scalars[("axpy#0", "n")] == 8
    owners = {(f.node, f.param): f.owner for f in report.pointers}
    assert owners[("shift#0", "out")] == "cell" and owners[("axpy#0", "x")] == "x"
    assert owners[("axpy#0", "y")].startswith("plan") and owners[("axpy#0", "len_d")] == ""
    assert owners[("memcpy#0", "dst")] == "down" and owners[("memcpy#0", "src")] == "cell"
    json.dumps(report.to_dict())
    text = str(report)
    for word in ("all kinds", "kernel axpy: 1", "shift#0.by = -7", "memory nodes: 0"):
        assert word in text
    assert graph.audit() == []
    dot = graph.dot()
    assert dot.count("->") == 3 and "axpy#0" in dot and "a = 2.5" in dot
    for thing in (graph, x, down, arena):
        thing.close()


def test_foreign_pointers_and_lost_memory_are_found(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    """Work that another library adds to the capture, behind our back."""
    other = device.zeros(1, np.int32, stream, name="elsewhere")
    stream.sync()
    pageable = np.zeros(4, np.int32)
    driver = device.driver

    def raw_put(ptr: int, value: int) -> None:
        values = (ctypes.c_uint64(ptr), ctypes.c_int32(value))
        params = (ctypes.c_void_p * 2)(*(ctypes.addressof(v) for v in values))
        driver.cuLaunchKernel(
            kernels.put.handle, (1, 1, 1), (1, 1, 1), 0, stream.handle, ctypes.addressof(params)
        )

    with stream.capture("suspicious") as graph:
        launch(stream, ONE, kernels.put, cell, 1)
        raw_put(other.ptr, 2)
        raw_put(pageable.ctypes.data, 3)
    found = {(f.code, f.node) for f in graph.audit()}
    assert found == {("not-kept", "put#1"), ("foreign-pointer", "put#2")}
    assert "elsewhere" in next(f.text for f in graph.audit() if f.code == "not-kept")
    graph.close()
    if device.kind == "host":
        # On the host device any address can be copied from, so the copy itself is legal.
        with stream.capture("pageable") as graph:
            driver.cuMemcpyHtoDAsync(cell.ptr, pageable.ctypes.data, 4, stream.handle)
            cell.fill(stream, 0)
        codes = {f.code for f in graph.audit()}
        assert "pageable-copy" in codes
        graph.close()
    other.close()


def test_kernels_that_were_not_launched_here_are_found(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    values = (ctypes.c_uint64(cell.ptr), ctypes.c_int32(4))
    params = (ctypes.c_void_p * 2)(*(ctypes.addressof(v) for v in values))
    with stream.capture("raw") as graph:
        device.driver.cuLaunchKernel(
            kernels.put.handle, (1, 1, 1), (1, 1, 1), 0, stream.handle, ctypes.addressof(params)
        )
    assert [f.code for f in graph.audit()] == ["unknown-kernel"]
    step = graph.instantiate()
    with pytest.raises(errors.UpdateRefused, match="not launched through this library"):
        step.update(0, args={"value": 3})
    step.close()
    graph.close()


def test_two_captures_are_compared(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    other = device.zeros(1, np.int32, stream, name="other")
    stream.sync()

    def record(name: str, out: Any, by: int, extra: bool = False) -> Graph:
        with stream.capture(name) as graph:
            launch(stream, ONE, kernels.shift, out, by)
            launch(stream, ONE, kernels.shift, cell, 1)
            if extra:
                cell.fill(stream, 0)
        return graph

    one, same = record("one", cell, 1), record("same", cell, 1)
    scalar, pointer = record("scalar", cell, 2), record("pointer", other, 1)
    shape = record("shape", cell, 1, True)
    assert one.audit_against(same) == []
    (found,) = one.audit_against(scalar)
    assert found.node == "shift#0" and "by: 1 in one, 2 in scalar" in found.text
    (found,) = one.audit_against(pointer)
    assert "pointer out" in found.text
    assert "shape" in one.audit_against(shape)[0].text
    for graph in (one, same, scalar, pointer, shape, other):
        graph.close()


# -- by hand --------------------------------------------------------------------------------------


def test_graphs_built_by_hand(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    up, down = device.pinned(1, np.int32), device.pinned(1, np.int32)
    mark = device.zeros(3, np.uint16, stream)
    with stream.capture("child") as child:
        launch(stream, ONE, kernels.shift, cell, 9)
    graph = Graph(device, "by hand")
    a = graph.copy(cell, up)
    b = graph.kernel(ONE, kernels.shift, cell, 4, after=[a])
    c = graph.child(child, after=[b])
    child.close()
    m = graph.memset(mark, -2)
    e = graph.empty(after=[c, m])
    d = graph.copy(down, cell, after=[e])
    assert [n.name for n in (a, b, c, m, e, d)] == [
        "memcpy#0", "shift#0", "graph#0", "memset#0", "empty#0", "memcpy#1"
    ]  # fmt: skip
    report = graph.describe()
    assert report.nodes == {"memcpy": 2, "kernel": 2, "graph": 1, "memset": 1, "empty": 1}
    assert report.kernels == {"shift": 2} and report.findings == ()
    step = graph.instantiate()
    for value in (1, 50):
        up.array[0] = value
        step.launch(stream)
        stream.sync()
        assert down.array[0] == shifted(shifted(value, 4), 9)
    assert mark.to_numpy(stream).tolist() == [0xFFFE] * 3
    for thing in (step, graph, up, down, mark):
        thing.close()


def test_bad_nodes_are_refused(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    graph = Graph(device, "refusing")
    wide = device.zeros(1, np.float64, stream)
    two = device.zeros(2, np.int32, stream)
    for act in (
        lambda: graph.kernel(ONE, kernels.shift, cell),
        lambda: graph.kernel(ONE, kernels.shift, cell, 1 << 40),
        lambda: graph.copy(cell, two),
        lambda: graph.memset(wide, 0),
        lambda: graph.memset(cell, 1 << 32),
        lambda: graph.empty(after=["nobody"]),  # type: ignore[list-item]
    ):
        with pytest.raises(errors.ArgumentError):
            act()
    with pytest.raises(errors.LaunchLimit):
        graph.kernel(LaunchConfig(1, 4096), kernels.shift, cell, 1)
    assert graph.nodes() == []
    for thing in (graph, wide, two):
        thing.close()


# -- updates --------------------------------------------------------------------------------------


def test_kernel_nodes_are_updated(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    other = device.from_numpy(np.array([10], np.int32), stream, name="other")
    with stream.capture("updated") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
        launch(stream, ONE, kernels.shift, cell, 2)
    step = graph.instantiate()
    step.launch(stream)
    value = shifted(shifted(1, 1), 2)
    step.update("shift#1", args={"by": 100})
    assert cell.to_numpy(stream)[0] == value
    step.launch(stream)
    value = shifted(shifted(value, 1), 100)
    assert cell.to_numpy(stream)[0] == value
    step.update(0, args={0: other}, block=64)
    step.launch(stream)
    assert other.to_numpy(stream)[0] == 31
    assert cell.to_numpy(stream)[0] == shifted(value, 100)
    report = step.describe()
    frozen = {(f.node, f.param): f.value for f in report.scalars}
    assert frozen[("shift#1", "by")] == 100 and report.node_updates == 2 == step.n_updates
    owners = {(f.node, f.param): f.owner for f in report.pointers}
    assert owners[("shift#0", "out")] == "other"
    # The new operand is kept alive, as the old one is.
    other.close()
    step.launch(stream)
    stream.sync()
    assert report.findings == ()
    for thing in (step, graph):
        thing.close()


def test_copy_and_set_nodes_are_updated(device: Device, stream: Stream, cell: Any) -> None:
    ups = [device.pinned(1, np.int32) for _ in range(2)]
    downs = [device.pinned(1, np.int32) for _ in range(2)]
    other = device.zeros(1, np.int32, stream)
    for i in range(2):
        ups[i].array[0], downs[i].array[0] = 5 + i, 0
    with stream.capture("copies") as graph:
        cell.copy_from(stream, ups[0])
        cell.copy_to(stream, downs[0])
        other.fill(stream, 1)
    step = graph.instantiate()
    step.update("memcpy#0", src=ups[1])
    step.update("memcpy#1", dst=downs[1])
    step.update("memset", value=2)
    step.launch(stream)
    stream.sync()
    assert [int(d.array[0]) for d in downs] == [0, 6]
    assert other.to_numpy(stream)[0] == 0x02020202
    wide = device.zeros(2, np.int32, stream)
    for node, fields, field in (
        ("memcpy#0", {"src": cell}, "src"),
        ("memcpy#0", {"src": wide}, "src"),
        ("memcpy#0", {"grid": 1}, "grid"),
        ("memset", {"value": 1 << 9}, "value"),
        ("memset", {"dst": wide}, "dst"),
        ("memcpy#1", {"dst": np.zeros(1, np.int32)}, "dst"),
    ):
        with pytest.raises(errors.UpdateRefused) as caught:
            step.update(node, **fields)
        assert caught.value.field == field and caught.value.node.startswith(node)
        assert caught.value.reason
    step.launch(stream)
    stream.sync()
    assert [int(d.array[0]) for d in downs] == [0, 6] and step.n_updates == 3
    for thing in (step, graph, *ups, *downs, other, wide):
        thing.close()


def test_refused_updates_name_node_field_and_reason(
    device: Device, stream: Stream, kernels: Any, cell: Any
) -> None:
    with stream.capture("strict") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
    step = graph.instantiate()
    for fields, field in (
        ({"args": {"by": 1 << 40}}, "args['by']"),
        ({"args": {"nope": 1}}, "args['nope']"),
        ({"args": {"out": None}}, "args['out']"),
        ({"grid": 0}, "grid"),
        ({"block": 1 << 20}, "block"),
        ({"shared_bytes": 1 << 30}, "shared_bytes"),
        ({"value": 1}, "value"),
    ):
        with pytest.raises(errors.UpdateRefused) as caught:
            step.update("shift", **fields)
        assert (caught.value.node, caught.value.field) == ("shift#0", field)
        assert "strict" not in caught.value.reason and caught.value.reason
        assert str(caught.value).count("(from ") == 1
    with pytest.raises(errors.ArgumentError, match="no node 'missing'"):
        step.update("missing")
    step.launch(stream)
    assert cell.to_numpy(stream)[0] == 4 and step.n_updates == 0
    step.close()
    graph.close()


def test_whole_graph_update(device: Device, stream: Stream, kernels: Any, cell: Any) -> None:
    other = device.from_numpy(np.array([10], np.int32), stream)
    stream.sync()

    def record(name: str, out: Any, by: int, twice: bool = False) -> Graph:
        with stream.capture(name) as graph:
            launch(stream, ONE, kernels.shift, out, by)
            if twice:
                launch(stream, ONE, kernels.put, out, by)
        return graph

    first, second, longer = (
        record("first", cell, 1), record("second", other, 5), record("longer", cell, 1, True)
    )  # fmt: skip
    step = first.instantiate()
    step.launch(stream)
    step.update_graph(second)
    second.close()
    other_ptr = other.ptr
    other.close()
    step.launch(stream)
    assert {f.value for f in step.describe().pointers} == {other_ptr}
    assert step.describe().scalars[0].value == 5
    assert cell.to_numpy(stream)[0] == 4
    with pytest.raises(errors.UpdateRefused, match="longer") as caught:
        step.update_graph(longer)
    assert caught.value.reason and caught.value.field in ("topology", "parameters")
    with Device("host:1") as elsewhere:
        foreign = Graph(elsewhere, "foreign")
        with pytest.raises(errors.UpdateRefused, match="foreign"):
            step.update_graph(foreign)
        foreign.close()
    step.launch(stream)
    stream.sync()
    for thing in (step, first, longer):
        thing.close()


def test_upload_and_driver_dot(
    device: Device, stream: Stream, kernels: Any, cell: Any, tmp_path: Path
) -> None:
    with stream.capture("drawn") as graph:
        launch(stream, ONE, kernels.shift, cell, 1)
    graph.debug_dot(str(tmp_path / "g.dot"))
    assert "digraph" in (tmp_path / "g.dot").read_text()
    step = graph.instantiate()
    step.upload(stream)
    step.launch(stream)
    assert cell.to_numpy(stream)[0] == 4
    step.close()
    graph.close()
