# ruff: noqa: D102  (the methods are the driver API, described there)
"""Graphs of the host device: building, reading, instantiating, updating, launching."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..calls import driver_call
from ..table import (
    ConditionalNodeParams,
    GraphUpdateResult,
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeType,
)
from .graph_work import (
    ChildWork,
    Condition,
    ConditionalWork,
    DefaultWork,
    EmptyWork,
    node_type,
)
from .memory import CopyWork, SetWork
from .modules import HostModules, KernelWork
from .schedule import Op, Work
from .state import HostGraph, HostNode, HostStream

__all__ = ["HostGraphs"]


@dataclass(eq=False)
class _Step:
    """One operation of an executable graph: work and the indices of the steps before it."""

    work: Work | None
    before: tuple[int, ...]


@dataclass(eq=False)
class HostExec:
    """An executable graph: a snapshot, with all values, of the graph it was made of.

    ``where`` finds the step of a node of that graph; ``shape`` is what an update must match.
    """

    handle: int
    source: HostGraph
    steps: list[_Step]
    where: dict[int, int]
    leaves: tuple[int, ...]
    last: Op | None = None
    keep: list[Any] = field(default_factory=list)
    conditions: tuple[Condition, ...] = ()


class HostGraphs(HostModules):
    """Graph calls."""

    def __init__(self) -> None:
        super().__init__()
        self._execs: dict[int, HostExec] = {}
        self._conditions: dict[int, Condition] = {}

    def _graph(self, handle: int, call: str) -> HostGraph:
        return self._find(self._graphs, handle, call, "graph")

    def _node(self, handle: int, call: str) -> HostNode:
        return self._find(self._nodes, handle, call, "graph node")

    def _exec(self, handle: int, call: str) -> HostExec:
        return self._find(self._execs, handle, call, "executable graph")

    # -- graphs and nodes ----------------------------------------------------------------------
    @driver_call
    def cuGraphCreate(self) -> int:
        return self._new_graph().handle

    @driver_call
    def cuGraphDestroy(self, graph: int) -> None:
        g = self._graph(graph, "cuGraphDestroy")
        if g.capturing or g.parent is not None:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", "cuGraphDestroy",
                "the graph belongs to a capture or to a parent graph",
            )  # fmt: skip
        self._forget(g)

    def _forget(self, graph: HostGraph) -> None:
        for node in graph.nodes:
            self._drop_node(node)
            if isinstance(node.work, ChildWork | ConditionalWork):
                self._forget(node.work.graph)
        self._graphs.pop(graph.handle, None)
        self._names.pop(graph.handle, None)
        for condition in graph.conditions:
            if isinstance(condition, Condition):
                self._conditions.pop(ctypes.addressof(condition), None)

    def _clone(self, graph: HostGraph, parent: HostGraph | None) -> HostGraph:
        copy = self._new_graph()
        copy.parent = parent
        twins: dict[int, HostNode] = {}
        for node in graph.nodes:
            work = node.work
            if isinstance(work, ChildWork):
                work = ChildWork(self._clone(work.graph, copy))
            elif isinstance(work, ConditionalWork):
                inner = self._clone(work.graph, copy)
                work = ConditionalWork(work.condition, work.type, inner)
            twins[node.handle] = self._new_node(copy, work, [twins[d.handle] for d in node.deps])
            if node.handle in self._names:
                self._names[twins[node.handle].handle] = self._names[node.handle]
        return copy

    @driver_call
    def cuGraphGetNodes(self, graph: int) -> list[int]:
        return [n.handle for n in self._graph(graph, "cuGraphGetNodes").nodes]

    @driver_call
    def cuGraphGetEdges(self, graph: int) -> list[tuple[int, int]]:
        nodes = self._graph(graph, "cuGraphGetEdges").nodes
        return [(d.handle, n.handle) for n in nodes for d in n.deps]

    @driver_call
    def cuGraphNodeGetType(self, node: int) -> NodeType:
        return node_type(self._node(node, "cuGraphNodeGetType"))

    def _params_of(self, node: int, call: str, work_type: type[Any]) -> Any:
        n = self._node(node, call)
        if not isinstance(n.work, work_type):
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"the node is a {node_type(n).name.lower()} node",
            )  # fmt: skip
        return n.work

    @driver_call
    def cuGraphKernelNodeGetParams(
        self, node: int, param_sizes: Sequence[int] | None = None
    ) -> KernelNodeParams:
        work: KernelWork = self._params_of(node, "cuGraphKernelNodeGetParams", KernelWork)
        return work.params

    @driver_call
    def cuGraphMemcpyNodeGetParams(self, node: int) -> MemcpyNodeParams:
        work: CopyWork = self._params_of(node, "cuGraphMemcpyNodeGetParams", CopyWork)
        return work.params

    @driver_call
    def cuGraphMemsetNodeGetParams(self, node: int) -> MemsetNodeParams:
        work: SetWork = self._params_of(node, "cuGraphMemsetNodeGetParams", SetWork)
        return work.params

    @driver_call
    def cuGraphChildGraphNodeGetGraph(self, node: int) -> int:
        work: ChildWork = self._params_of(node, "cuGraphChildGraphNodeGetGraph", ChildWork)
        return work.graph.handle

    def _add(self, call: str, graph: int, deps: Sequence[int], work: Work) -> int:
        g = self._graph(graph, call)
        nodes = [self._node(d, call) for d in deps]
        if any(n.graph is not g for n in nodes):
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call, "a dependency belongs to another graph"
            )
        if len(set(deps)) != len(deps):
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, "a dependency is named twice")
        return self._new_node(g, work, nodes).handle

    @driver_call
    def cuGraphAddKernelNode(
        self, graph: int, deps: Sequence[int], params: KernelNodeParams
    ) -> int:
        call = "cuGraphAddKernelNode"
        return self._add(call, graph, deps, self._kernel_work(call, params))

    @driver_call
    def cuGraphAddMemcpyNode(
        self, graph: int, deps: Sequence[int], params: MemcpyNodeParams, ctx: int
    ) -> int:
        call = "cuGraphAddMemcpyNode"
        self._find(self._by_context, ctx, call, "context")
        return self._add(call, graph, deps, self._copy_work(call, params, snapshot=False))

    @driver_call
    def cuGraphAddMemsetNode(
        self, graph: int, deps: Sequence[int], params: MemsetNodeParams, ctx: int
    ) -> int:
        call = "cuGraphAddMemsetNode"
        self._find(self._by_context, ctx, call, "context")
        return self._add(call, graph, deps, self._set_work(call, params))

    @driver_call
    def cuGraphAddEmptyNode(self, graph: int, deps: Sequence[int]) -> int:
        return self._add("cuGraphAddEmptyNode", graph, deps, EmptyWork())

    @driver_call
    def cuGraphAddChildGraphNode(self, graph: int, deps: Sequence[int], child: int) -> int:
        call = "cuGraphAddChildGraphNode"
        parent, inner = self._graph(graph, call), self._graph(child, call)
        if any(isinstance(n.work, ConditionalWork) for n in inner.nodes):
            raise self._error(
                "CUDA_ERROR_NOT_SUPPORTED", call, "a child graph cannot have conditional nodes"
            )
        return self._add(call, graph, deps, ChildWork(self._clone(inner, parent)))

    @driver_call
    def cuGraphConditionalHandleCreate(self, graph: int, ctx: int, default: int, flags: int) -> int:
        call = "cuGraphConditionalHandleCreate"
        g = self._graph(graph, call)
        self._find(self._by_context, ctx, call, "context")
        if flags & ~1:
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"flags {flags:#x}")
        condition = Condition(default)
        condition.default = default if flags else None
        handle = ctypes.addressof(condition)
        self._conditions[handle] = condition
        g.conditions.append(condition)
        return handle

    @driver_call
    def cuGraphAddNode(
        self, graph: int, deps: Sequence[int], params: ConditionalNodeParams
    ) -> tuple[int, int]:
        call = "cuGraphAddNode"
        condition = self._find(self._conditions, params.handle, call, "condition")
        self._find(self._by_context, params.ctx, call, "context")
        root = parent = self._graph(graph, call)
        while root.parent is not None:
            root = root.parent
        if all(condition is not c for c in root.conditions):
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call, "the condition belongs to another graph"
            )
        body = self._new_graph()
        body.parent = parent
        node = self._add(call, graph, deps, ConditionalWork(condition, params.type, body))
        return node, body.handle

    # -- executable graphs ---------------------------------------------------------------------
    def _unfold(
        self, graph: HostGraph, steps: list[_Step], where: dict[int, int], entry: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Append the steps of a graph behind ``entry``; return the steps that end it."""
        ends: dict[int, int] = {}
        has_next: set[int] = set()
        for node in graph.nodes:
            before = tuple(ends[d.handle] for d in node.deps) or entry
            has_next.update(d.handle for d in node.deps)
            if isinstance(node.work, ChildWork):
                inner = self._unfold(node.work.graph, steps, where, before) or before
                steps.append(_Step(None, inner))
            else:
                where[node.handle] = len(steps)
                steps.append(_Step(node.work, before))
            ends[node.handle] = len(steps) - 1
        return tuple(ends[n.handle] for n in graph.nodes if n.handle not in has_next)

    @driver_call
    def cuGraphInstantiate(self, graph: int, flags: int) -> int:
        call = "cuGraphInstantiate"
        self._gate(call)
        g = self._graph(graph, call)
        if g.capturing:
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, "the graph is still being captured")
        if flags & ~0xF:
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"flags {flags:#x}")
        steps: list[_Step] = []
        where: dict[int, int] = {}
        leaves = self._unfold(g, steps, where, ())
        snapshot = self._clone(g, None)
        exec_ = HostExec(self._new_handle(), snapshot, steps, where, leaves)
        exec_.conditions = tuple(c for c in g.conditions if isinstance(c, Condition))
        self._execs[exec_.handle] = exec_
        return exec_.handle

    @driver_call
    def cuGraphExecDestroy(self, exec_: int) -> None:
        self._gate("cuGraphExecDestroy")
        found = self._exec(exec_, "cuGraphExecDestroy")
        self._forget(found.source)
        del self._execs[exec_]
        self._names.pop(exec_, None)

    @driver_call
    def cuGraphUpload(self, exec_: int, stream: int) -> None:
        call = "cuGraphUpload"
        self._exec(exec_, call)
        st = self._stream(stream, call)
        if st.capture is not None:
            self._refuse_named(st.capture, call, stream)

    @driver_call
    def cuGraphLaunch(self, exec_: int, stream: int) -> None:
        self._launch_graph(exec_, stream)

    def _launch_graph(self, exec_: int, stream: int) -> None:
        found = self._exec(exec_, "cuGraphLaunch")
        st = self._stream(stream, "cuGraphLaunch")
        if st.capture is not None:
            self._refuse_named(st.capture, "cuGraphLaunch", stream)
        self._replay(found, st)

    def _replay(self, exec_: HostExec, st: HostStream) -> None:
        """Submit all steps behind the stream's work and behind the graph's own last launch."""
        schedule, device, stream = self._schedule, st.ctx.device, st.handle
        first: tuple[Op | None, ...] = (st.tail, exec_.last)
        if exec_.conditions:
            defaults = Op(DefaultWork(exec_.conditions), device, stream)
            schedule.add(defaults, first)
            first = (defaults,)
        ops: list[Op] = []
        for step in exec_.steps:
            op = Op(step.work, device, stream)
            schedule.add(op, [ops[i] for i in step.before] if step.before else first)
            ops.append(op)
        end = Op(None, device, stream)
        schedule.add(end, [ops[i] for i in exec_.leaves] if exec_.leaves else first)
        st.tail = exec_.last = end
        schedule.relieve()

    # -- changes of executable graphs ----------------------------------------------------------
    def _step_of(self, exec_: int, node: int, call: str, work_type: type[Any]) -> _Step:
        found = self._exec(exec_, call)
        index = found.where.get(node)
        if index is None or not isinstance(found.steps[index].work, work_type):
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                "the node does not belong to the graph this executable was made of, or is of "
                "another type",
            )  # fmt: skip
        return found.steps[index]

    @driver_call
    def cuGraphExecKernelNodeSetParams(
        self, exec_: int, node: int, params: KernelNodeParams
    ) -> None:
        call = "cuGraphExecKernelNodeSetParams"
        step = self._step_of(exec_, node, call, KernelWork)
        step.work = self._kernel_work(call, params)

    @driver_call
    def cuGraphExecMemcpyNodeSetParams(
        self, exec_: int, node: int, params: MemcpyNodeParams, ctx: int
    ) -> None:
        call = "cuGraphExecMemcpyNodeSetParams"
        step = self._step_of(exec_, node, call, CopyWork)
        work = self._copy_work(call, params, snapshot=False)
        old = step.work
        assert isinstance(old, CopyWork)
        if work.kinds != old.kinds:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"kinds of memory {work.kinds}, the node was made with {old.kinds}",
            )  # fmt: skip
        step.work = work

    @driver_call
    def cuGraphExecMemsetNodeSetParams(
        self, exec_: int, node: int, params: MemsetNodeParams, ctx: int
    ) -> None:
        call = "cuGraphExecMemsetNodeSetParams"
        self._step_of(exec_, node, call, SetWork).work = self._set_work(call, params)

    @driver_call
    def cuGraphExecUpdate(self, exec_: int, graph: int) -> GraphUpdateResult:
        call = "cuGraphExecUpdate"
        found, new = self._exec(exec_, call), self._graph(graph, call)
        pairs: list[tuple[HostNode, HostNode]] = []
        refusal = self._match(found.source, new, pairs)
        if refusal is not None:
            return refusal
        steps: list[_Step] = []
        where: dict[int, int] = {}
        leaves = self._unfold(new, steps, where, ())
        # Node handles of the graph that the executable was made of stay valid for later changes.
        found.steps, found.leaves = steps, leaves
        snapshot = self._clone(new, None)
        self._forget(found.source)
        found.source = snapshot
        return GraphUpdateResult(True)

    def _match(
        self, old: HostGraph, new: HostGraph, pairs: list[tuple[HostNode, HostNode]]
    ) -> GraphUpdateResult | None:
        """Pair the nodes of two graphs in order of creation, or say why they differ."""
        if len(old.nodes) != len(new.nodes):
            return GraphUpdateResult(
                False,
                f"TOPOLOGY_CHANGED: {len(old.nodes)} nodes before, {len(new.nodes)} now",
            )
        index = {n.handle: i for g in (old, new) for i, n in enumerate(g.nodes)}
        for a, b in zip(old.nodes, new.nodes, strict=True):
            if node_type(a) != node_type(b):
                return GraphUpdateResult(
                    False,
                    f"NODE_TYPE_CHANGED: {node_type(a).name} before, {node_type(b).name} now",
                    b.handle,
                )
            if {index[d.handle] for d in a.deps} != {index[d.handle] for d in b.deps}:
                return GraphUpdateResult(
                    False, "TOPOLOGY_CHANGED: a node waits for other nodes than before", b.handle
                )
            if isinstance(a.work, CopyWork) and isinstance(b.work, CopyWork):
                if a.work.kinds != b.work.kinds:
                    return GraphUpdateResult(
                        False,
                        f"PARAMETERS_CHANGED: kinds of memory {a.work.kinds} before, "
                        f"{b.work.kinds} now",
                        b.handle,
                    )
            if isinstance(a.work, ChildWork) and isinstance(b.work, ChildWork):
                inner = self._match(a.work.graph, b.work.graph, pairs)
                if inner is not None:
                    return inner
            pairs.append((a, b))
        return None

    # -- text ----------------------------------------------------------------------------------
    @driver_call
    def cuGraphDebugDotPrint(self, graph: int, path: str, flags: int) -> None:
        g = self._graph(graph, "cuGraphDebugDotPrint")
        lines = ["digraph host_graph {"]
        ids = {n.handle: f"n{i}" for i, n in enumerate(g.nodes)}
        for n in g.nodes:
            name = self._names.get(n.handle, n.work.label)
            lines.append(f'  {ids[n.handle]} [label="{node_type(n).name}\\n{name}"];')
        for n in g.nodes:
            lines.extend(f"  {ids[d.handle]} -> {ids[n.handle]};" for d in n.deps)
        lines.append("}")
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise self._error(
                "CUDA_ERROR_OPERATING_SYSTEM", "cuGraphDebugDotPrint", str(error)
            ) from error
