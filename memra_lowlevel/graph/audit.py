"""What a graph consists of, what it froze, and what is doubtful about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..driver.table import KernelNodeParams, MemcpyNodeParams, MemsetNodeParams, NodeType
from ..runtime.storage import Storage
from .graph import Graph, Node, list_nodes
from .update import NodeParams, read_params

if TYPE_CHECKING:
    from .executable import GraphExec

__all__ = ["Finding", "Frozen", "Report", "differences", "report"]

_MEMORY = (NodeType.MEM_ALLOC, NodeType.MEM_FREE)


@dataclass(frozen=True)
class Frozen:
    """A value that the graph keeps from launch to launch.

    Attributes
    ----------
    node, param : str
    value : int, float or bytes
    pointer : bool
    owner : str
        For pointers: name of the memory it lies in; empty if unknown.
    """

    node: str
    param: str
    value: Any
    pointer: bool = False
    owner: str = ""

    def __str__(self) -> str:
        value = f"0x{self.value:x}" if self.pointer and isinstance(self.value, int) else self.value
        return f"{self.node}.{self.param} = {value}{f' ({self.owner})' if self.owner else ''}"


@dataclass(frozen=True)
class Finding:
    """Something doubtful.

    Attributes
    ----------
    code : str
        ``foreign-pointer``, ``not-kept``, ``pageable-copy``, ``address-in-scalar``,
        ``memory-node``, ``host-node``, ``unknown-kernel``, ``programmatic-edge``, ``differs``.
    node : str
    text : str
    """

    code: str
    node: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.node}: {self.text}"


@dataclass(frozen=True)
class Report:
    """Census of a graph, child graphs included.

    Attributes
    ----------
    name, device : str
    nodes : dict of str to int
        Number of nodes by kind.
    kernels : dict of str to int
        Number of nodes by kernel.
    edges : int
    scalars, pointers : tuple of Frozen
    counters : tuple of str
        What one launch does to each counter.
    findings : tuple of Finding
    launches, node_updates : int
        Of the executable; 0 for a graph.
    """

    name: str
    device: str
    nodes: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    edges: int = 0
    scalars: tuple[Frozen, ...] = ()
    pointers: tuple[Frozen, ...] = ()
    counters: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    launches: int = 0
    node_updates: int = 0

    @property
    def kernel_nodes(self) -> int:
        """Number of kernel nodes."""
        return self.nodes.get("kernel", 0)

    @property
    def memory_nodes(self) -> int:
        """Number of nodes that allocate or free memory."""
        return self.nodes.get("mem_alloc", 0) + self.nodes.get("mem_free", 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name, "device": self.device, "nodes": dict(self.nodes),
            "kernels": dict(self.kernels), "edges": self.edges,
            "kernel_nodes": self.kernel_nodes, "memory_nodes": self.memory_nodes,
            "scalars": [str(s) for s in self.scalars], "pointers": [str(p) for p in self.pointers],
            "counters": list(self.counters), "findings": [str(f) for f in self.findings],
            "launches": self.launches, "node_updates": self.node_updates,
        }  # fmt: skip

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.nodes.items())) or "empty"
        lines = [f"graph {self.name!r} on {self.device}: {kinds}; {self.edges} edges"]
        lines += [f"  kernel {name}: {n}" for name, n in sorted(self.kernels.items())]
        lines += [f"  counter {text}" for text in self.counters]
        lines.append(f"  frozen scalars: {len(self.scalars)}, pointers: {len(self.pointers)}")
        lines += [f"    {s}" for s in self.scalars]
        lines.append(f"  memory nodes: {self.memory_nodes}, findings: {len(self.findings)}")
        lines += [f"    {f}" for f in self.findings]
        if self.launches or self.node_updates:
            lines.append(f"  launches: {self.launches}, node updates: {self.node_updates}")
        return "\n".join(lines)


def report(graph: Graph, executable: GraphExec | None = None) -> Report:
    """Describe a graph, or an executable as it will be launched."""
    keeps = executable.keeps if executable is not None else graph.keeps
    walk = _Walk(graph, keeps.operands, keeps.kernels, executable)
    edges = walk.visit("", graph.handle, graph.nodes())
    effects = executable.effects if executable is not None else graph.effects.values()
    return Report(
        graph.name, str(graph.context), walk.nodes, walk.used, edges,
        tuple(walk.scalars), tuple(walk.pointers), tuple(str(e) for e in effects),
        tuple(walk.findings),
        executable.n_launches if executable is not None else 0,
        executable.n_updates if executable is not None else 0,
    )  # fmt: skip


def differences(one: Graph, other: Graph) -> list[Finding]:
    """List what two captures of the same work froze differently; shape differences first."""
    a, b = one.describe(), other.describe()
    found = []
    if (a.nodes, a.kernels, a.edges) != (b.nodes, b.kernels, b.edges):
        text = f"{a.nodes} {a.kernels} {a.edges} edges against {b.nodes} {b.kernels} {b.edges}"
        found.append(Finding("differs", one.name, f"the shape: {text}"))
    theirs = {(f.node, f.param): f for f in (*b.scalars, *b.pointers)}
    for mine in (*a.scalars, *a.pointers):
        match = theirs.get((mine.node, mine.param))
        # Repr tells -0.0 from 0.0 and finds NaN equal to itself.
        if match is not None and repr(match.value) != repr(mine.value):
            what = "pointer" if mine.pointer else "scalar"
            text = f"{what} {mine.param}: {mine.value} in {one.name}, {match.value} in {other.name}"
            found.append(Finding("differs", mine.node, text))
    return found


class _Walk:
    """Visits all nodes, children included, and gathers the census."""

    def __init__(
        self,
        graph: Graph,
        operands: dict[int, Any],
        kernels: dict[int, Any],
        executable: GraphExec | None,
    ) -> None:
        self.graph, self.context, self.kernels = graph, graph.context, kernels
        self.executable = executable
        self.kept = _flatten(operands)
        self.nodes: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.scalars: list[Frozen] = []
        self.pointers: list[Frozen] = []
        self.findings: list[Finding] = []

    def visit(self, prefix: str, handle: int, nodes: list[Node]) -> int:
        """Census of one level; returns the number of edges at and below it."""
        driver = self.context.driver
        edges = len(driver.cuGraphGetEdges(handle))
        for node in nodes:
            kind, name = node.kind.name.lower(), prefix + node.name
            self.nodes[kind] = self.nodes.get(kind, 0) + 1
            if node.kind is NodeType.GRAPH:
                child = driver.cuGraphChildGraphNodeGetGraph(node.handle)
                below = list_nodes(self.context, child, self.kernels)
                edges += self.visit(name + "/", child, below)
            elif node.kind in _MEMORY:
                text = "memory of a graph moves between launches; take it from an Arena"
                self._find("memory-node", name, text)
            elif node.kind is NodeType.HOST:
                self._find("host-node", name, "calls back into the host at each launch")
            elif node.kind in (NodeType.KERNEL, NodeType.MEMCPY, NodeType.MEMSET):
                self._params(name, self._read(prefix, node))
        return edges

    def _read(self, prefix: str, node: Node) -> NodeParams:
        if self.executable is not None and not prefix:
            return self.executable.params(node)
        return read_params(self.graph, node, self.kernels)

    def _params(self, name: str, params: NodeParams) -> None:
        if isinstance(params, KernelNodeParams):
            self._kernel(name, params)
        elif isinstance(params, MemcpyNodeParams):
            for side in ("dst", "src"):
                address = getattr(params, side)
                on_host = params.kind in (("dtoh",) if side == "dst" else ("htod",))
                self._pointer(name, side, address, host=on_host or params.kind == "unknown")
        elif isinstance(params, MemsetNodeParams):
            self._pointer(name, "dst", params.dst)
            self.scalars.append(Frozen(name, "value", params.value))

    def _kernel(self, name: str, params: KernelNodeParams) -> None:
        kernel = self.kernels.get(params.func)
        label = kernel.name if kernel is not None else f"0x{params.func:x}"
        self.used[label] = self.used.get(label, 0) + 1
        if params.programmatic:
            text = "starts before its predecessor ends; it must wait by itself before it reads"
            self._find("programmatic-edge", name, text)
        if kernel is None:
            text = "was not launched through this library; its parameters are not understood"
            self._find("unknown-kernel", name, text)
            return
        launcher = self.context.launchers.get(kernel)
        for i, (param, raw) in enumerate(zip(kernel.params, params.params, strict=False)):
            if param.pointer:
                self._pointer(name, param.name, int.from_bytes(raw, "little"))
                continue
            value = launcher.encoder.decode(i, raw) if launcher is not None else raw
            told = f"{param.ctype} of {len(value)} bytes" if isinstance(value, bytes) else value
            self.scalars.append(Frozen(name, param.name, told))
            if param.size == 8 and isinstance(value, int):
                owner = self._owner(value)
                if owner is not None:
                    text = f"{param.name} = 0x{value:x} is an address inside {owner.name!r}"
                    self._find("address-in-scalar", name, text)

    def _pointer(self, name: str, param: str, address: int, *, host: bool = False) -> None:
        owner = _holding(self.kept, address) if address else None
        label = _label(owner, address) if owner is not None else ""
        self.pointers.append(Frozen(name, param, address, True, label))
        if owner is not None or not address:
            return
        known = self._owner(address)
        if known is not None:
            text = f"{param} lies in {known.name!r}, which the graph does not keep alive"
            self._find("not-kept", name, text)
        elif host:
            text = f"{param} = 0x{address:x} is host memory that is not a PinnedBuffer"
            self._find("pageable-copy", name, text)
        else:
            text = f"{param} = 0x{address:x} lies in no memory of this library"
            self._find("foreign-pointer", name, text)

    def _owner(self, address: int) -> Storage | None:
        return _holding(list(self.context.storages.values()), address)

    def _find(self, code: str, node: str, text: str) -> None:
        self.findings.append(Finding(code, node, text))


def _flatten(operands: dict[int, Any]) -> list[Storage]:
    return list(_storages(operands))


def _storages(operands: dict[int, Any]) -> Iterator[Storage]:
    for operand in operands.values():
        if isinstance(operand, Storage):
            yield operand


def _holding(storages: list[Storage], address: int) -> Storage | None:
    for storage in storages:
        if storage.ptr <= address < storage.ptr + max(1, storage.n_bytes):
            return storage
    return None


def _label(storage: Storage, address: int) -> str:
    offset = address - storage.ptr
    return f"{storage.name}+{offset}" if offset else storage.name
