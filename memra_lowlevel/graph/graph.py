"""Graphs: captured work, or nodes added by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .. import expect
from ..closing import Closing
from ..driver.table import (
    ConditionalNodeParams,
    ConditionalType,
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeType,
)
from ..driver.trace import caller
from ..errors import ArgumentError, CaptureError, CaptureForbidden, ClosedError
from ..runtime.config import ConfigLike
from ..runtime.device import Device
from ..runtime.launch import Launcher
from ..runtime.lifetime import Owned
from ..runtime.memory import Buffer, PinnedBuffer
from ..runtime.recording import Keeps
from ..runtime.storage import MemoryView

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime.context import Context
    from .audit import Finding, Report
    from .capture import Capture
    from .effects import Effect
    from .executable import GraphExec

__all__ = ["Body", "Graph", "Node"]


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Attributes
    ----------
    index : int
        Position in the graph's list of nodes.
    handle : int
        Driver handle.
    kind : NodeType
    name : str
        ``"kernel#k"`` with the kernel's name and its how-manieth use, else ``"memset#k"`` …
    func : int
        For kernel nodes, the driver's function handle.
    """

    index: int
    handle: int
    kind: NodeType
    name: str
    func: int = 0

    def __str__(self) -> str:
        return self.name


class _Handle(Owned):
    """A driver graph with everything that its nodes use."""

    kind = "graph"

    def __init__(self, context: Context, name: str, handle: int, keeps: Keeps) -> None:
        driver = context.driver
        self.handle = handle

        def reclaim() -> None:
            try:
                driver.cuGraphDestroy(handle)
                driver.name_handle(handle, "")
            finally:
                keeps.release()

        super().__init__(context, name, reclaim)
        driver.name_handle(handle, name)


class Graph(Closing):
    """Work that can be instantiated and launched any number of times.

    From ``with stream.capture("step") as graph:``, or built by hand: ``Graph(device, "step")`` and
    :meth:`kernel`, :meth:`copy`, :meth:`memset`, :meth:`empty`, :meth:`child`. Keeps its operands
    and kernels alive until it is closed; so does every executable made from it.

    Attributes
    ----------
    name : str
    device : Device
    effects : dict
        What one launch does to device counters.
    checks : list of callable
        Called with the executable before each launch.
    """

    def __init__(self, device: Device, name: str = "graph", *, _recording: Any = None) -> None:
        self.context = expect.kind("Graph", device, Device, "a Device").context
        self.name = expect.kind("Graph: name", name, str, "a str")
        self.where = caller(2)
        self.keeps = Keeps()
        self.effects: dict[int, Effect] = {}
        self.checks: list[Callable[[GraphExec], None]] = []
        self._conditions: dict[int, str] = {}  # those that no node asks yet: where they were made
        self._recording: Any = _recording
        self._owned: _Handle | None = None
        self._state = "recording"
        self._nodes: list[Node] | None = None
        if _recording is None:
            self.context.ensure()
            self._own(self.context.driver.cuGraphCreate())

    @property
    def device(self) -> Device:
        """Device of the graph."""
        return self.context.device

    @property
    def handle(self) -> int:
        """Driver handle; there is one once the capture has ended."""
        if self._state == "recording":
            raise CaptureError(
                f'graph "{self.name}" is still being captured (from {caller()}). '
                "Use it after the with block."
            )
        if self._state == "failed":
            raise CaptureError(
                f'graph "{self.name}": its capture failed, there is no graph (from {caller()}).'
            )
        if self._owned is None or self._owned.closed:
            raise ClosedError(f'graph "{self.name}" is closed: used at {caller()}.')
        return self._owned.handle

    @property
    def closed(self) -> bool:
        """Whether there is nothing to instantiate: closed, or the capture failed."""
        return self._state != "recording" and (self._owned is None or self._owned.closed)

    # -- nodes ------------------------------------------------------------------------------------
    def nodes(self) -> list[Node]:
        """All nodes, in the driver's order."""
        handle = self.handle
        if self._nodes is None:
            self._nodes = list_nodes(self.context, handle, self.keeps.kernels)
        return self._nodes

    def edges(self) -> list[tuple[int, int]]:
        """Pairs of node indices: the first runs before the second."""
        at = {node.handle: node.index for node in self.nodes()}
        return sorted((at[a], at[b]) for a, b in self.context.driver.cuGraphGetEdges(self.handle))

    def node(self, which: Node | int | str) -> Node:
        """Find a node by index or name."""
        nodes = self.nodes()
        if not isinstance(which, Node | int | str) or isinstance(which, bool):
            raise expect.refusal(f"{self.name}: node", which, "a Node, its index or its name")
        if isinstance(which, Node):
            if which.index < len(nodes) and nodes[which.index].handle == which.handle:
                return which
        elif isinstance(which, int):
            if 0 <= which < len(nodes):
                return nodes[which]
        else:
            for node in nodes:
                if node.name == which or (
                    node.name == f"{which}#0" and f"{which}#1" not in {n.name for n in nodes}
                ):
                    return node
        names = ", ".join(n.name for n in nodes[:20])
        raise ArgumentError(
            f'graph "{self.name}" has no node {which!r}; it has {names}{"…" * (len(nodes) > 20)}.',
            name=str(which),
            expected=names,
            got=str(which),
        )

    # -- building by hand -------------------------------------------------------------------------
    def kernel(
        self, config: ConfigLike, kernel: Kernel, *args: Any, after: Sequence[Node] = ()
    ) -> Node:
        """Add a kernel node; arguments as for :func:`memra_lowlevel.launch`."""
        launcher = Launcher.of(self.context, kernel)
        site = launcher.site(config)
        if site.attributes is not None:
            raise ArgumentError(
                f"{kernel.name}: clusters, programmatic and cooperative launches cannot be added "
                "by hand; capture them.", kernel=kernel.name, name="config",
                expected="grid, block, shared_bytes", got=str(site.attributes),
            )  # fmt: skip
        block, storages = launcher.encoder.pack(args, self.context)
        params = KernelNodeParams(
            kernel.handle, site.grid, site.block, site.config.shared_bytes,
            launcher.encoder.split(block),
        )  # fmt: skip
        deps = self._deps(after)
        self.keeps.add_kernel(kernel)
        handle = self.context.driver.cuGraphAddKernelNode(self.handle, deps, params)
        return self._added(handle, storages)

    def copy(
        self,
        dst: Buffer | PinnedBuffer,
        src: Buffer | PinnedBuffer,
        *,
        after: Sequence[Node] = (),
    ) -> Node:
        """Add a copy of the whole of ``src`` to ``dst``; sizes and dtypes must agree."""
        params = copy_params(self.context, dst, src)
        handle = self.context.driver.cuGraphAddMemcpyNode(
            self.handle, self._deps(after), params, self.context.handle
        )
        return self._added(handle, [dst.storage, src.storage])

    def memset(self, dst: Buffer, value: int, *, after: Sequence[Node] = ()) -> Node:
        """Add a node that sets every element to ``value`` (elements of 1, 2 or 4 bytes)."""
        params = memset_params(self.context, dst, value)
        handle = self.context.driver.cuGraphAddMemsetNode(
            self.handle, self._deps(after), params, self.context.handle
        )
        return self._added(handle, [dst.storage])

    def empty(self, *, after: Sequence[Node] = ()) -> Node:
        """Add a node that does nothing but order others."""
        handle = self.context.driver.cuGraphAddEmptyNode(self.handle, self._deps(after))
        return self._added(handle, [])

    def child(self, graph: Graph, *, after: Sequence[Node] = ()) -> Node:
        """Add a copy of another graph as one node; its operands are kept alive here too."""
        expect.kind(f"{self.name}: child", graph, Graph, "a Graph")
        self._check_repeatable(graph)
        handle = self.context.driver.cuGraphAddChildGraphNode(
            self.handle, self._deps(after), graph.handle
        )
        for kernel in graph.keeps.kernels.values():
            self.keeps.add_kernel(kernel)
        self._join_effects(graph.effects)
        self.checks += graph.checks
        return self._added(handle, list(graph.keeps.operands.values()))

    # -- bodies that the device decides about -----------------------------------------------------
    def condition(self, default: int = 1) -> int:
        """Make a condition that kernels of the graph set; it is ``default`` at each launch.

        Returns
        -------
        int
            A handle, for :meth:`loop` and :meth:`branch`, and for the kernel that calls
            ``cudaGraphSetConditional`` (``cuda_src/common/conditional.cuh``), as its u64 argument.
        """
        self.context.ensure()
        condition = self.context.driver.cuGraphConditionalHandleCreate(
            self.handle, self.context.handle, expect.integer("condition: default", default), 1
        )
        self._conditions[condition] = caller()
        return condition

    def loop(self, condition: int, *, after: Sequence[Node] = ()) -> Body:
        """Add a body that runs as long as the condition is not 0; returns it, to be filled.

        The body is a part of this graph: it is filled by hand, before the graph is instantiated,
        and may have conditional nodes itself. What it does happens any number of times, so nothing
        in it may move a counter by an amount that is booked; let a kernel move it, and read it
        back after the launch.
        """
        return self._body(condition, ConditionalType.WHILE, after)

    def branch(self, condition: int, *, after: Sequence[Node] = ()) -> Body:
        """Add a body that runs once if the condition is not 0; as :meth:`loop`."""
        return self._body(condition, ConditionalType.IF, after)

    def _body(self, condition: int, kind: ConditionalType, after: Sequence[Node]) -> Body:
        what = f"{self.name}: condition"
        condition = expect.integer(what, condition, 0, (1 << 64) - 1)
        params = ConditionalNodeParams(condition, kind, self.context.handle)
        node, handle = self.context.driver.cuGraphAddNode(self.handle, self._deps(after), params)
        added = self._added(node, [])
        self._conditions.pop(condition, None)
        return Body(self, added, handle)

    # -- use --------------------------------------------------------------------------------------
    def instantiate(self) -> GraphExec:
        """Make the graph launchable.

        Raises
        ------
        ArgumentError
            A condition that no :meth:`loop` or :meth:`branch` asks: a driver refuses such graphs.
        """
        from .executable import instantiate

        for where in self._conditions.values():
            raise ArgumentError(
                f"{self.name}: no loop or branch asks the condition made at {where}, and a driver "
                "refuses to instantiate such a graph. Use it, or do not make it.",
                name=self.name, expected="a loop or branch for each condition", got="none",
            )  # fmt: skip
        return instantiate(self)

    def describe(self) -> Report:
        """Tell what the graph consists of and what it froze."""
        from .audit import report

        return report(self)

    def audit(self) -> list[Finding]:
        """List what is doubtful about the graph."""
        return list(self.describe().findings)

    def audit_against(self, other: Graph) -> list[Finding]:
        """List scalars and pointers that two captures of the same work froze differently."""
        from .audit import differences

        expect.kind(f"{self.name}: audit_against", other, Graph, "a Graph")
        return differences(self, other)

    def dot(self) -> str:
        """Draw the graph in DOT, with kernel names and frozen scalars."""
        from .view import dot

        return dot(self)

    def debug_dot(self, path: str | os.PathLike[str], flags: int = 0) -> None:
        """Let the driver write its own DOT file."""
        if not isinstance(path, str | os.PathLike):
            raise expect.refusal(f"{self.name}: debug_dot", path, "a path")
        self.context.driver.cuGraphDebugDotPrint(self.handle, os.fspath(path), flags)

    def close(self) -> None:
        """Give the graph back; executables made from it stay usable."""
        if self._state == "recording":
            raise CaptureForbidden(
                f'cuGraphDestroy of "{self.name}" while it is being captured (from {caller()}).',
                call="cuGraphDestroy",
            )
        if self._owned is not None:
            self._owned.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self._state
        return f"<Graph {self.name!r} {state}>"

    # -- below ------------------------------------------------------------------------------------
    def _own(self, handle: int) -> None:
        self._owned = _Handle(self.context, self.name, handle, self.keeps)
        self._owned.where = self.where
        self._state = "ready"

    def _complete(self, handle: int, capture: Capture) -> None:
        self.keeps = capture.keeps
        self.effects, self.checks = capture.effects, capture.checks
        self._recording = None
        self._own(handle)

    def _fail(self, handle: int) -> None:
        self._recording.keeps.release()
        self._state, self._recording = "failed", None
        if handle:
            self.context.driver.cuGraphDestroy(handle)

    def _deps(self, after: Sequence[Node]) -> list[int]:
        if not isinstance(after, tuple | list):
            raise expect.refusal(f"{self.name}: after", after, "a list of nodes")
        self.context.ensure()
        return [self.node(n).handle for n in after]

    def _added(self, handle: int, operands: Iterable[Any]) -> Node:
        for operand in operands:
            self.keeps.add(operand)
        self._nodes = None
        return next(n for n in self.nodes() if n.handle == handle)

    def _check_repeatable(self, graph: Graph) -> None:
        """Refuse a child that must not run more often than the graph; a graph takes any."""

    def _join_effects(self, effects: dict[int, Effect]) -> None:
        from .effects import Effect

        for serial, effect in effects.items():
            mine = self.effects.setdefault(serial, Effect(effect.counter))
            mine.then(effect)
            self.keeps.add(effect.counter)


class Body(Graph):
    """The body of a conditional node; the driver's graph, and all it keeps, belong to the parent.

    Attributes
    ----------
    parent : Graph
    place : Node
        The conditional node of the parent, for those that come after it.
    """

    def __init__(self, parent: Graph, node: Node, handle: int) -> None:
        self.context, self.name, self.where = parent.context, f"{parent.name}/{node}", caller(3)
        self.parent, self.place = parent, node
        self.keeps, self.effects, self.checks = parent.keeps, parent.effects, parent.checks
        self._conditions = parent._conditions
        self._inner, self._state, self._nodes, self._recording = handle, "ready", None, None
        self._owned = None

    @property
    def handle(self) -> int:
        """Driver handle."""
        _ = self.parent.handle  # raises once the parent is closed
        return self._inner

    @property
    def closed(self) -> bool:
        """Whether the graph that it belongs to is."""
        return self.parent.closed

    def instantiate(self) -> GraphExec:
        """Refuse: only the whole graph can be launched."""
        raise ArgumentError(
            f"{self.name} is the body of a conditional node; instantiate {self.parent.name!r}.",
            name=self.name, expected="the graph it belongs to", got="a body",
        )  # fmt: skip

    def close(self) -> None:
        """Nothing: it goes with the graph that it belongs to."""

    def _check_repeatable(self, graph: Graph) -> None:
        for effect in graph.effects.values():
            if effect.has_set or effect.add_lower or effect.add_upper or not effect.bounded:
                raise ArgumentError(
                    f"{self.name}: graph {graph.name!r} moves counter {effect.counter.name!r}, and "
                    "a conditional body runs any number of times. Let a kernel move it unbooked, "
                    "and read it back after the launch.",
                    name=graph.name, expected="no booked move of a counter", got=str(effect),
                )  # fmt: skip


def list_nodes(context: Context, handle: int, kernels: dict[int, Any]) -> list[Node]:
    """Nodes of a driver graph with readable names."""
    driver, nodes, used = context.driver, [], dict[str, int]()
    for index, node in enumerate(driver.cuGraphGetNodes(handle)):
        kind = driver.cuGraphNodeGetType(node)
        base, func = kind.name.lower(), 0
        if kind is NodeType.KERNEL:
            func = driver.cuGraphKernelNodeGetParams(node, ()).func
            kernel = kernels.get(func)
            base = kernel.name if kernel is not None else f"kernel@{func:x}"
        k = used[base] = used.get(base, -1) + 1
        nodes.append(Node(index, node, kind, f"{base}#{k}", func))
    return nodes


def copy_params(
    context: Context, dst: Buffer | PinnedBuffer, src: Buffer | PinnedBuffer
) -> MemcpyNodeParams:
    """Check and make the parameters of a copy node."""
    for memory in (dst, src):
        expect.kind("copy node", memory, MemoryView, "a Buffer or a PinnedBuffer")
        memory._check_open()
        foreign = memory.storage.context is not context
        if foreign and not (
            isinstance(memory, PinnedBuffer) and memory.storage.context.driver is context.driver
        ):
            raise ArgumentError(
                f"copy node on {context}: {memory!r} is on {memory.storage.context}.",
                name=memory.name, expected=str(context), got=str(memory.storage.context),
            )  # fmt: skip
    if dst.dtype != src.dtype or dst.n_bytes != src.n_bytes or not dst.n_bytes:
        raise ArgumentError(
            f"copy node: {src!r} to {dst!r}: dtypes and sizes must agree and not be empty.",
            name=dst.name, expected=repr(dst), got=repr(src),
        )  # fmt: skip
    kind: Literal["htod", "dtoh", "dtod", "unknown"] = "dtod"
    if isinstance(src, PinnedBuffer):
        kind = "unknown" if isinstance(dst, PinnedBuffer) else "htod"
    elif isinstance(dst, PinnedBuffer):
        kind = "dtoh"
    return MemcpyNodeParams(dst.ptr, src.ptr, dst.n_bytes, kind)


def memset_params(context: Context, dst: Buffer, value: int) -> MemsetNodeParams:
    """Check and make the parameters of a memset node."""
    expect.kind("memset node", dst, Buffer, "a Buffer")._check_open()
    value = expect.integer("memset node: value", value, high=None)
    width = dst.dtype.itemsize
    if dst.storage.context is not context or width not in (1, 2, 4) or not dst.n_bytes:
        raise ArgumentError(
            f"memset node on {context}: {dst!r} must be a non-empty buffer there with elements of "
            "1, 2 or 4 bytes.", name=dst.name, expected="1, 2 or 4 bytes", got=str(dst.dtype),
        )  # fmt: skip
    if not -(1 << (8 * width - 1)) <= value < 1 << (8 * width):
        raise ArgumentError(
            f"memset node: {value} does not fit in {width} byte(s).",
            name=dst.name, expected=f"{width} byte(s)", got=str(value),
        )  # fmt: skip
    mask = (1 << (8 * width)) - 1
    return MemsetNodeParams(dst.ptr, value & mask, width, dst.n_bytes // width)
