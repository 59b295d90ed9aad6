"""Executable graphs: launch, update, upload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import expect, native
from ..driver.table import KernelNodeParams, MemcpyNodeParams
from ..driver.trace import caller
from ..errors import ArgumentError, CaptureForbidden, ClosedError, DriverError, UpdateRefused
from ..runtime.launch import driver_error
from ..runtime.lifetime import Owned
from ..runtime.recording import Keeps, forbid
from ..runtime.storage import Storage
from ..runtime.stream import expect_stream
from .capture import Capture, capture_of
from .graph import Graph, Node
from .update import FIELDS, NodeParams, new_copy, new_kernel, new_memset, read_params, refused

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.stream import Stream
    from .audit import Finding, Report
    from .effects import Effect

__all__ = ["GraphExec"]


_SLOW = -4  # MLL_SLOW
_REPLACE = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


class GraphExec(Owned):
    """A launchable graph; made by :meth:`Graph.instantiate`.

    Keeps operands, kernels and counters alive until it is closed, also when their owners close
    them. Launches of one executable run one after the other.

    Attributes
    ----------
    handle : int
        Driver handle.
    graph : Graph
        What it was made from (may be closed).
    n_launches, n_updates : int
        Launches and node updates made through this object.
    """

    kind = "graph executable"

    def __init__(self, graph: Graph) -> None:
        context = graph.context
        driver, source = context.driver, graph.handle
        forbid("cuGraphInstantiate", what=f"graph {graph.name!r}")
        context.reap()
        context.activate()
        handle = driver.cuGraphInstantiate(source, 0)
        self.handle, self.graph = handle, graph
        keeps = self.keeps = Keeps(graph.keeps.operands.values(), graph.keeps.kernels.values())
        self.effects: list[Effect] = list(graph.effects.values())
        self.checks = tuple(graph.checks)
        self.n_updates = 0
        self._n_slow = 0
        self._params: dict[int, NodeParams] = {}
        self._nodes = graph.nodes()

        def reclaim() -> None:
            try:
                driver.cuGraphExecDestroy(handle)
                driver.name_handle(handle, "")
            finally:
                keeps.release()

        super().__init__(context, graph.name, reclaim)
        driver.name_handle(handle, self.name)
        self._cell: Any = None
        self._bound: Stream | None = None

    @property
    def device(self) -> Device:
        """Device of the executable."""
        return self.context.device

    @property
    def n_launches(self) -> int:
        """Launches so far that the driver accepted."""
        return self._n_slow + (int(self._cell.n_done) if self._cell is not None else 0)

    # -- launch -----------------------------------------------------------------------------------
    def launch(self, stream: Stream) -> None:
        """Launch on ``stream``: one driver call.

        Before it, each counter's room is checked; after it, the host mirrors move.

        Raises
        ------
        CapacityExceeded, CounterUnknown
            If a counter has no room, or nobody knows whether it has. Nothing is launched.
        """
        for check in self.checks:
            check(self)
        self._launch_checked(stream)

    def upload(self, stream: Stream) -> None:
        """Bring the graph to the device ahead of its first launch."""
        self._check_stream(stream)
        forbid("cuGraphUpload", stream=stream, what=f"graph {self.name!r}")
        self.context.ensure()
        self.context.driver.cuGraphUpload(self.handle, stream.handle)

    # -- what it is -------------------------------------------------------------------------------
    def describe(self) -> Report:
        """Tell what the graph consists of, what it froze, and what it was used for."""
        from .audit import report

        return report(self.graph, self)

    def audit(self) -> list[Finding]:
        """List what is doubtful about the graph."""
        return list(self.describe().findings)

    def params(self, which: Node | int | str) -> NodeParams:
        """Parameters of a node as they will be launched."""
        node = self._node(which)
        found = self._params.get(node.index)
        if found is None:
            self._check_graph("parameters")
            found = read_params(self.graph, node)
        return found

    # -- update -----------------------------------------------------------------------------------
    def update(self, which: Node | int | str, **fields: Any) -> None:
        """Change parameters of one node for later launches.

        Parameters
        ----------
        which : Node, int or str
        args : mapping of parameter name or position to value
            Kernel nodes; other parameters stay.
        grid, block, shared_bytes
            Kernel nodes.
        dst, src : Buffer or PinnedBuffer
            Copy nodes; set nodes take ``dst`` and ``value``.

        Raises
        ------
        UpdateRefused
            With the node, the field and the reason; nothing is changed.
        """
        self._check_open()
        self._check_graph("update")
        node = self._node(which)
        allowed = FIELDS.get(node.kind, ())
        for name in fields:
            if name not in allowed:
                has = ", ".join(allowed) or "nothing"
                raise refused(node, name, f"a {node.kind.name.lower()} node can change {has}")
        old = self.params(node)
        operands: list[Storage] = []
        if isinstance(old, KernelNodeParams):
            new: NodeParams = new_kernel(self, node, old, fields, operands)
        elif isinstance(old, MemcpyNodeParams):
            new = new_copy(self, node, old, fields, operands)
        else:
            new = new_memset(self, node, old, fields, operands)
        for operand in operands:
            self.keeps.add(operand)
        self._set(node, new)
        self._params[node.index] = new
        self.n_updates += 1
        self._unbind()

    def update_graph(self, graph: Graph) -> None:
        """Take over all parameters of another graph of the same shape.

        Raises
        ------
        UpdateRefused
            With the driver's reason and the node it names; the executable is as before.
        """
        self._check_open()
        expect.kind(f"{self.name}: update_graph", graph, Graph, "a Graph")
        if graph.context is not self.context:
            raise UpdateRefused(
                f"{self.name}: graph {graph.name!r} is on {graph.context}, the executable on "
                f"{self.context}.", node="", field="device", reason="another device",
            )  # fmt: skip
        self.context.ensure()
        nodes = graph.nodes()
        result = self.context.driver.cuGraphExecUpdate(self.handle, graph.handle)
        if not result.ok:
            named = next((n.name for n in nodes if n.handle == result.node), "")
            raise UpdateRefused(
                f"{self.name}: the driver refuses the update from graph {graph.name!r}"
                f"{' at node ' + named if named else ''}: {result.reason} (from {caller()}). "
                "Instantiate the new graph instead.",
                node=named,
                field="topology" if "TOPOLOGY" in result.reason.upper() else "parameters",
                reason=result.reason,
            )
        for operand in graph.keeps.operands.values():
            self.keeps.add(operand)
        for kernel in graph.keeps.kernels.values():
            self.keeps.add_kernel(kernel)
        mine = self.nodes()
        self._params = {
            a.index: read_params(graph, b)
            for a, b in zip(mine, nodes, strict=False)
            if b.kind in FIELDS
        }
        self.effects, self.checks = list(graph.effects.values()), tuple(graph.checks)
        self._load_effects()
        self.n_updates += 1

    def nodes(self) -> list[Node]:
        """Nodes of the graph it was made from."""
        return self._nodes

    # -- below ------------------------------------------------------------------------------------
    def _check_graph(self, action: str) -> None:
        if self.graph.closed:
            # The driver names nodes by those of the source; without it the handles lead nowhere.
            raise ClosedError(
                f'{action} of executable "{self.name}": the graph it was made from is closed '
                f"(from {caller()}). Keep that graph open for as long as parameters of nodes are "
                "read or changed."
            )

    def _node(self, which: Node | int | str) -> Node:
        if isinstance(which, Node) and which in self._nodes:
            return which
        if not isinstance(which, int | str) or isinstance(which, bool):
            raise expect.refusal(f"{self.name}: node", which, "a Node, its index or its name")
        for node in self._nodes:
            if which in (node.index, node.name) or (
                f"{which}#0" == node.name and f"{which}#1" not in {n.name for n in self._nodes}
            ):
                return node
        return self.graph.node(which)

    def _check_stream(self, stream: Stream) -> None:
        self._check_open()
        expect_stream(f"graph executable {self.name!r}: stream", stream)._check_open()
        if stream.context is not self.context:
            raise ArgumentError(
                f"graph executable {self.name!r} is on {self.context}, stream {stream.name!r} on "
                f"{stream.context} (from {caller()}). Use a stream of the graph's device.",
                name=self.name,
                expected=str(self.context),
                got=str(stream.context),
            )

    def _launch_checked(self, stream: Stream) -> None:
        self._check_stream(stream)
        capture = capture_of(stream)
        if capture is not None:
            self._join(capture, stream)
            return
        for effect in self.effects:
            effect.check()
        self.context.ensure()
        self.context.driver.cuGraphLaunch(self.handle, stream.handle)
        for effect in self.effects:
            effect.apply()
        self._n_slow += 1
        native.note_issued(stream.cell)
        for operand in self.keeps.operands.values():
            if isinstance(operand, Storage):
                operand.streams.add(stream)
        if self._cell is not None and not self.context.trace_lines:
            self._bound, self._cell.bound = stream, stream.cell
            self._cell.bound_object = native.ffi.cast("void *", id(stream))

    def _join(self, capture: Capture, stream: Stream) -> None:
        """Become a child graph of a capture, which the driver's own launch cannot."""
        if self.graph.closed or self.n_updates:
            why = "was closed" if self.graph.closed else "differs from it since an update"
            raise CaptureForbidden(
                f'cuGraphLaunch of "{self.name}" while stream "{stream.name}" is being captured '
                f'into "{capture.name}" (from {caller()}): it becomes a copy of the graph '
                f"it was made from, which {why}. Remedy: keep that graph open; update it instead.",
                call="cuGraphLaunch",
            )
        capture.note_effects({e.counter.serial: e for e in self.effects})
        driver = self.context.driver
        self.context.ensure()
        info = driver.cuStreamGetCaptureInfo(stream.handle)
        node = driver.cuGraphAddChildGraphNode(info.graph, info.dependencies, self.graph.handle)
        driver.cuStreamUpdateCaptureDependencies(stream.handle, [node], _REPLACE)
        for operand in self.keeps.operands.values():
            capture.keeps.add(operand)
        for kernel in self.keeps.kernels.values():
            capture.keeps.add_kernel(kernel)
        for check in self.checks:
            capture.add_check(check)
        capture.tick(stream)

    def _unbind(self) -> None:
        """Let the next launch go the long way, which notes the use of the operands."""
        self._bound = None
        if self._cell is not None:
            self._cell.bound = self._cell.bound_object = native.ffi.NULL

    def _load_effects(self) -> None:
        """Tell the compiled path of changed effects and checks."""

    def _before_close(self) -> None:
        if self._cell is not None:
            self._cell.dead = 1
            if self.context.native is not None:
                self.context.native.forget(self._cell.id)

    def _set(self, node: Node, new: NodeParams) -> None:
        driver, ctx = self.context.driver, self.context.handle
        self.context.ensure()
        try:
            if isinstance(new, KernelNodeParams):
                driver.cuGraphExecKernelNodeSetParams(self.handle, node.handle, new)
            elif isinstance(new, MemcpyNodeParams):
                driver.cuGraphExecMemcpyNodeSetParams(self.handle, node.handle, new, ctx)
            else:
                driver.cuGraphExecMemsetNodeSetParams(self.handle, node.handle, new, ctx)
        except DriverError as error:
            raise refused(node, "parameters", f"the driver says {error.result}") from error


class _CompiledExec(native.Exec, GraphExec):  # type: ignore[misc]
    """An executable whose method :meth:`launch` is compiled code; see launch_object.c."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        gate = self.context.native
        assert gate is not None
        cell = self._cell = native.cell_of(self, "mll_exec")
        cell.device, cell.exec = gate.cell, native.ffi.cast("void *", self.handle)
        cell.id = gate.number(self.name, self.where)
        self._load_effects()

    def _launch_code(self, stream: Stream, code: int) -> None:
        """Go on where the compiled launch gave up: a driver result, or a reason to look."""
        if code == _SLOW and self.checks:
            for check in self.checks:
                check(self)
            if stream is self._bound:
                code = self._launch_bound()
                if code == 0:
                    return
        if code > 0:
            raise driver_error(self.context, code, "cuGraphLaunch", stream, None)
        self._launch_checked(stream)

    def _load_effects(self) -> None:
        cells = self._effect_cells = native.ffi.new("mll_effect[]", max(1, len(self.effects)))
        for i, effect in enumerate(self.effects):
            effect.fill(cells[i])
        self._cell.effects, self._cell.n_effects = cells, len(self.effects)
        self._cell.has_checks = bool(self.checks)


def instantiate(graph: Graph) -> GraphExec:
    """Make an executable, with a compiled launch where that was built."""
    compiled = graph.context.native is not None and native.available()
    made: GraphExec = _CompiledExec(graph) if compiled else GraphExec(graph)
    return made
