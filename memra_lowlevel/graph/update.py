"""Parameters of nodes: reading them, and making checked new ones for an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..driver.table import KernelNodeParams, MemcpyNodeParams, MemsetNodeParams, NodeType
from ..driver.trace import caller
from ..errors import ArgumentError, LaunchLimit, UpdateRefused
from ..runtime.config import LaunchConfig, check_limits
from ..runtime.launch import Launcher
from ..runtime.storage import Storage
from .graph import Graph, Node, copy_params, memset_params

if TYPE_CHECKING:
    from .executable import GraphExec

__all__ = ["FIELDS", "NodeParams", "new_copy", "new_kernel", "new_memset", "read_params", "refused"]

NodeParams = KernelNodeParams | MemcpyNodeParams | MemsetNodeParams
FIELDS = {
    NodeType.KERNEL: ("args", "grid", "block", "shared_bytes"),
    NodeType.MEMCPY: ("dst", "src"),
    NodeType.MEMSET: ("dst", "value"),
}


def new_kernel(
    exec_: GraphExec,
    node: Node,
    old: KernelNodeParams,
    fields: Mapping[str, Any],
    operands: list[Storage],
) -> KernelNodeParams:
    """Check and make new parameters of a kernel node; ``operands`` gets the memory they name."""
    kernel = exec_.keeps.kernels.get(old.func)
    if kernel is None:
        raise refused(node, "args", "its kernel was not launched through this library")
    launcher = Launcher.of(exec_.context, kernel)
    values = list(old.params)
    args = fields.get("args", {})
    if not isinstance(args, Mapping):
        raise refused(node, "args", f"a mapping of parameters to values is needed, not {args!r}")
    for which, value in args.items():
        try:
            index = launcher.encoder.index(which)
            values[index], storages = launcher.encoder.pack_one(index, value, exec_.context)
        except ArgumentError as error:
            raise refused(node, f"args[{which!r}]", str(error)) from error
        operands += storages
    grid = fields.get("grid", old.grid)
    block = fields.get("block", old.block)
    shared = fields.get("shared_bytes", old.shared_bytes)
    try:
        config = LaunchConfig(grid, block, shared)
        check_limits(launcher, config)
    except (LaunchLimit, ArgumentError) as error:
        what = getattr(error, "what", "") or getattr(error, "name", "")
        raise refused(node, what.partition(".")[0] or "grid", str(error)) from error
    site = launcher.site(config)
    return KernelNodeParams(
        old.func, site.grid, site.block, shared, tuple(values), old.programmatic
    )


def new_copy(
    exec_: GraphExec,
    node: Node,
    old: MemcpyNodeParams,
    fields: Mapping[str, Any],
    operands: list[Storage],
) -> MemcpyNodeParams:
    """Check and make new parameters of a copy node; ``operands`` gets the memory they name."""
    new = {"dst": old.dst, "src": old.src}
    for name, memory in fields.items():
        try:
            copy_params(exec_.context, memory, memory)
        except (ArgumentError, AttributeError) as error:
            raise refused(node, name, str(error)) from error
        if memory.n_bytes != old.n_bytes:
            reason = f"{memory!r} has {memory.n_bytes} bytes, the node copies {old.n_bytes}"
            raise refused(node, name, reason)
        pinned = memory.storage.space == "pinned"
        side = {"htod": "src", "dtoh": "dst"}.get(old.kind, "")
        if old.kind != "unknown" and pinned != (side == name):
            reason = "a copy node cannot change between device and host memory"
            raise refused(node, name, reason)
        new[name] = memory.ptr
        operands.append(memory.storage)
    return MemcpyNodeParams(new["dst"], new["src"], old.n_bytes, old.kind)


def new_memset(
    exec_: GraphExec,
    node: Node,
    old: MemsetNodeParams,
    fields: Mapping[str, Any],
    operands: list[Storage],
) -> MemsetNodeParams:
    """Check and make new parameters of a set node; ``operands`` gets the memory they name."""
    dst, value, width = old.dst, fields.get("value", old.value), old.element_bytes
    if "dst" in fields:
        memory = fields["dst"]
        try:
            fresh = memset_params(exec_.context, memory, 0)
        except (ArgumentError, AttributeError) as error:
            raise refused(node, "dst", str(error)) from error
        if (fresh.element_bytes, fresh.n_elements) != (width, old.n_elements):
            reason = f"{memory!r} is not {old.n_elements} elements of {width} byte(s)"
            raise refused(node, "dst", reason)
        dst = memory.ptr
        operands.append(memory.storage)
    if not isinstance(value, int) or not -(1 << (8 * width - 1)) <= value < 1 << (8 * width):
        raise refused(node, "value", f"{value!r} does not fit in {width} byte(s)")
    mask = (1 << (8 * width)) - 1
    return MemsetNodeParams(dst, value & mask, width, old.n_elements)


def read_params(graph: Graph, node: Node, kernels: Mapping[int, Any] | None = None) -> NodeParams:
    """Parameters of a node as the driver has them."""
    driver = graph.context.driver
    if node.kind is NodeType.KERNEL:
        known = graph.keeps.kernels if kernels is None else kernels
        kernel = known.get(node.func)
        sizes = None if kernel is None else [p.size for p in kernel.params]
        return driver.cuGraphKernelNodeGetParams(node.handle, sizes)
    if node.kind is NodeType.MEMCPY:
        return driver.cuGraphMemcpyNodeGetParams(node.handle)
    if node.kind is NodeType.MEMSET:
        return driver.cuGraphMemsetNodeGetParams(node.handle)
    raise refused(node, "parameters", f"a {node.kind.name.lower()} node has none")


def refused(node: Node, field: str, reason: str) -> UpdateRefused:
    """Make the refusal of one field."""
    place = "" if "(from " in reason else f" (from {caller()})"  # another refusal may give it
    return UpdateRefused(
        f"update of node {node.name}, field {field}: {reason.removesuffix('.')}{place}. "
        "The executable is unchanged.",
        node=node.name,
        field=field,
        reason=reason,
    )
