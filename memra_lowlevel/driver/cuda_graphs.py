# ruff: noqa: D102  (the methods are the driver API, described in table.py)
"""Graph calls over ``cuda.bindings``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

from . import explain
from .calls import driver_call
from .cuda_base import CudaBase
from .table import (
    ConditionalNodeParams,
    GraphUpdateResult,
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeType,
)

__all__ = ["CudaGraphs"]

_INVALID_VALUE = 1
_UPDATE_FAILURE = 910
_UPDATE_REASONS = {
    1: "ERROR: the update failed for a reason that the call's own result tells",
    2: "TOPOLOGY_CHANGED: other nodes or edges than before",
    3: "NODE_TYPE_CHANGED: a node is of another type than before",
    4: "FUNCTION_CHANGED: the kernel of a node cannot be exchanged for this one",
    5: "PARAMETERS_CHANGED: a parameter changed in a way that is not allowed",
    6: "NOT_SUPPORTED: something about a node cannot be updated",
    7: "UNSUPPORTED_FUNCTION_CHANGE: the kernel was exchanged in a way that is not allowed",
    8: "ATTRIBUTES_CHANGED: attributes of a node changed in a way that is not allowed",
}


class _UpdateInfo(ctypes.Structure):
    """``CUgraphExecUpdateResultInfo``."""

    _fields_ = (
        ("result", ctypes.c_int),
        ("errorNode", ctypes.c_void_p),
        ("errorFromNode", ctypes.c_void_p),
    )


_BODIES_AT = 32  # CUgraphNodeParams.conditional.phGraph_out
_PROGRAMMATIC_EDGE = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class _Packed:
    """Parameter values laid out as the driver wants them: an array of pointers."""

    def __init__(self, values: Sequence[bytes]):
        self._keep = [ctypes.create_string_buffer(v, len(v)) for v in values]
        self.pointers = (ctypes.c_void_p * max(1, len(values)))(
            *(ctypes.addressof(b) for b in self._keep)
        )
        self.address = ctypes.addressof(self.pointers) if values else 0


class CudaGraphs(CudaBase):
    """Building, reading, instantiating, updating and launching graphs."""

    # -- graphs and nodes -------------------------------------------------------------------------
    @driver_call
    def cuGraphCreate(self) -> int:
        return int(self._call("cuGraphCreate", 0))

    @driver_call
    def cuGraphDestroy(self, graph: int) -> None:
        self._call("cuGraphDestroy", graph)
        self._names.pop(graph, None)

    @driver_call
    def cuGraphGetNodes(self, graph: int) -> list[int]:
        _, n = self._call("cuGraphGetNodes", graph, 0)
        if not n:
            return []
        nodes, _ = self._call("cuGraphGetNodes", graph, n)
        return [int(x) for x in nodes]

    @driver_call
    def cuGraphGetEdges(self, graph: int) -> list[tuple[int, int]]:
        call = self._pick("cuGraphGetEdges_v2", "cuGraphGetEdges")
        n = int(self._call(call, graph, 0)[-1])
        if not n:
            return []
        values = self._call(call, graph, n)
        return [(int(a), int(b)) for a, b in zip(values[0], values[1], strict=True)]

    @driver_call
    def cuGraphNodeGetType(self, node: int) -> NodeType:
        return NodeType(int(self._call("cuGraphNodeGetType", node)))

    def _param_info(self, func: int, index: int) -> tuple[int, int] | None:
        code, values = self._answer("cuFuncGetParamInfo", func, index)
        if code == _INVALID_VALUE:
            return None  # past the last parameter
        if code:
            raise self._failure(code, "cuFuncGetParamInfo", kernel=func)
        return int(values[0]), int(values[1])

    def _param_sizes(self, func: int) -> tuple[int, ...]:
        sizes: list[int] = []
        while (info := self._param_info(func, len(sizes))) is not None:
            sizes.append(info[1])
        return tuple(sizes)

    @driver_call
    def cuGraphKernelNodeGetParams(
        self, node: int, param_sizes: Sequence[int] | None = None
    ) -> KernelNodeParams:
        p = self._call("cuGraphKernelNodeGetParams", node)
        func = int(p.func)
        sizes = tuple(param_sizes) if param_sizes is not None else self._param_sizes(func)
        address = int(p.kernelParams or 0)
        values: tuple[bytes, ...] = ()
        if address and sizes:
            pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
            values = tuple(
                ctypes.string_at(at or 0, size) for at, size in zip(pointers, sizes, strict=True)
            )
        return KernelNodeParams(
            func,
            (int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ)),
            (int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ)),
            int(p.sharedMemBytes),
            values,
            self._is_programmatic(node),
        )

    def _is_programmatic(self, node: int) -> bool:
        ids = getattr(self._d, "CUkernelNodeAttrID", None) or self._d.CUlaunchAttributeID
        attribute = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        code, values = self._answer("cuGraphKernelNodeGetAttribute", node, attribute)
        if code == 0 and bool(values[0].programmaticStreamSerializationAllowed):
            return True
        # A captured launch leaves it on the edge to its predecessor.
        call = self._pick("cuGraphNodeGetDependencies_v2", "cuGraphNodeGetDependencies")
        code, values = self._answer(call, node, 0)
        if code or not values or not int(values[-1]):
            return False
        code, values = self._answer(call, node, int(values[-1]))
        edges = values[1] if code == 0 and len(values) == 3 else ()
        return any(int(edge.type) == _PROGRAMMATIC_EDGE for edge in edges)

    @driver_call
    def cuGraphMemcpyNodeGetParams(self, node: int) -> MemcpyNodeParams:
        p = self._call("cuGraphMemcpyNodeGetParams", node)
        host = int(self._d.CUmemorytype.CU_MEMORYTYPE_HOST)
        device = int(self._d.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        src_type, dst_type = int(p.srcMemoryType), int(p.dstMemoryType)
        src = int(p.srcHost or 0) if src_type == host else int(p.srcDevice)
        dst = int(p.dstHost or 0) if dst_type == host else int(p.dstDevice)
        kinds: dict[tuple[int, int], Literal["htod", "dtoh", "dtod"]] = {
            (host, device): "htod",
            (device, host): "dtoh",
            (device, device): "dtod",
        }
        n_bytes = int(p.WidthInBytes) * max(1, int(p.Height)) * max(1, int(p.Depth))
        return MemcpyNodeParams(
            dst + int(p.dstXInBytes),
            src + int(p.srcXInBytes),
            n_bytes,
            kinds.get((src_type, dst_type), "unknown"),
        )

    @driver_call
    def cuGraphMemsetNodeGetParams(self, node: int) -> MemsetNodeParams:
        p = self._call("cuGraphMemsetNodeGetParams", node)
        n = int(p.width) * max(1, int(p.height))
        return MemsetNodeParams(int(p.dst), int(p.value), int(p.elementSize), n)

    @driver_call
    def cuGraphChildGraphNodeGetGraph(self, node: int) -> int:
        return int(self._call("cuGraphChildGraphNodeGetGraph", node))

    # -- building -------------------------------------------------------------------------------
    def _kernel_params(self, p: KernelNodeParams) -> tuple[Any, _Packed]:
        packed = _Packed(p.params)
        out = self._d.CUDA_KERNEL_NODE_PARAMS()
        out.func = self._d.CUfunction(p.func)
        out.gridDimX, out.gridDimY, out.gridDimZ = p.grid
        out.blockDimX, out.blockDimY, out.blockDimZ = p.block
        out.sharedMemBytes = p.shared_bytes
        out.kernelParams = packed.address
        return out, packed

    def _memcpy_params(self, p: MemcpyNodeParams) -> Any:
        types = self._d.CUmemorytype
        out = self._d.CUDA_MEMCPY3D()
        if p.kind == "htod":
            out.srcMemoryType, out.srcHost = types.CU_MEMORYTYPE_HOST, p.src
        else:
            kind = types.CU_MEMORYTYPE_UNIFIED if p.kind == "unknown" else None
            out.srcMemoryType = kind or types.CU_MEMORYTYPE_DEVICE
            out.srcDevice = self._d.CUdeviceptr(p.src)
        if p.kind == "dtoh":
            out.dstMemoryType, out.dstHost = types.CU_MEMORYTYPE_HOST, p.dst
        else:
            kind = types.CU_MEMORYTYPE_UNIFIED if p.kind == "unknown" else None
            out.dstMemoryType = kind or types.CU_MEMORYTYPE_DEVICE
            out.dstDevice = self._d.CUdeviceptr(p.dst)
        out.WidthInBytes, out.Height, out.Depth = p.n_bytes, 1, 1
        return out

    def _memset_params(self, p: MemsetNodeParams) -> Any:
        out = self._d.CUDA_MEMSET_NODE_PARAMS()
        out.dst = self._d.CUdeviceptr(p.dst)
        out.value = p.value & (2 ** (8 * p.element_bytes) - 1)
        out.elementSize = p.element_bytes
        out.width, out.height, out.pitch = p.n_elements, 1, 0
        return out

    def _nodes(self, deps: Sequence[int]) -> list[Any]:
        return [self._d.CUgraphNode(d) for d in deps]

    def _refuse_programmatic(self, call: str, params: KernelNodeParams) -> None:
        if params.programmatic:
            raise self._error(
                "CUDA_ERROR_NOT_SUPPORTED", call,
                "programmatic edges are made by capturing a launch, not by adding nodes",
                kernel=params.func,
            )  # fmt: skip

    @driver_call
    def cuGraphAddKernelNode(
        self, graph: int, deps: Sequence[int], params: KernelNodeParams
    ) -> int:
        call = "cuGraphAddKernelNode"
        self._refuse_programmatic(call, params)
        p, _keep = self._kernel_params(params)
        return int(self._call(call, graph, self._nodes(deps), len(deps), p, kernel=params.func))

    @driver_call
    def cuGraphAddMemcpyNode(
        self, graph: int, deps: Sequence[int], params: MemcpyNodeParams, ctx: int
    ) -> int:
        p = self._memcpy_params(params)
        return int(self._call("cuGraphAddMemcpyNode", graph, self._nodes(deps), len(deps), p, ctx))

    @driver_call
    def cuGraphAddMemsetNode(
        self, graph: int, deps: Sequence[int], params: MemsetNodeParams, ctx: int
    ) -> int:
        p = self._memset_params(params)
        return int(self._call("cuGraphAddMemsetNode", graph, self._nodes(deps), len(deps), p, ctx))

    @driver_call
    def cuGraphAddEmptyNode(self, graph: int, deps: Sequence[int]) -> int:
        return int(self._call("cuGraphAddEmptyNode", graph, self._nodes(deps), len(deps)))

    @driver_call
    def cuGraphAddChildGraphNode(self, graph: int, deps: Sequence[int], child: int) -> int:
        nodes = self._nodes(deps)
        return int(self._call("cuGraphAddChildGraphNode", graph, nodes, len(deps), child))

    @driver_call
    def cuGraphConditionalHandleCreate(self, graph: int, ctx: int, default: int, flags: int) -> int:
        return int(self._call("cuGraphConditionalHandleCreate", graph, ctx, default, flags))

    @driver_call
    def cuGraphAddNode(
        self, graph: int, deps: Sequence[int], params: ConditionalNodeParams
    ) -> tuple[int, int]:
        p = self._d.CUgraphNodeParams()
        p.type = self._d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        p.conditional.handle = self._d.CUgraphConditionalHandle(params.handle)
        p.conditional.type = self._d.CUgraphConditionalNodeType(int(params.type))
        p.conditional.size = 1
        p.conditional.ctx = self._d.CUcontext(params.ctx)
        call = self._pick("cuGraphAddNode_v2", "cuGraphAddNode")
        edges = [self._d.CUgraphEdgeData() for _ in deps]  # bindings 12.9 take no None here
        node = int(self._call(call, graph, self._nodes(deps), edges, len(deps), p))
        # The driver leaves the body's graph in an array of its own.
        bodies = ctypes.c_void_p.from_address(p.getPtr() + _BODIES_AT).value
        body = ctypes.c_void_p.from_address(bodies).value if bodies else 0
        return node, int(body or 0)

    # -- executable graphs ---------------------------------------------------------------------
    @driver_call
    def cuGraphInstantiate(self, graph: int, flags: int) -> int:
        return int(self._call("cuGraphInstantiate", graph, flags))

    @driver_call
    def cuGraphExecDestroy(self, exec_: int) -> None:
        self._call("cuGraphExecDestroy", exec_)
        self._names.pop(exec_, None)

    @driver_call
    def cuGraphUpload(self, exec_: int, stream: int) -> None:
        self._call("cuGraphUpload", exec_, stream, stream=stream)

    @driver_call
    def cuGraphLaunch(self, exec_: int, stream: int) -> None:
        self._call("cuGraphLaunch", exec_, stream, stream=stream)

    @driver_call
    def cuGraphExecKernelNodeSetParams(
        self, exec_: int, node: int, params: KernelNodeParams
    ) -> None:
        call = "cuGraphExecKernelNodeSetParams"
        p, _keep = self._kernel_params(params)
        self._call(call, exec_, node, p, kernel=params.func)

    @driver_call
    def cuGraphExecMemcpyNodeSetParams(
        self, exec_: int, node: int, params: MemcpyNodeParams, ctx: int
    ) -> None:
        p = self._memcpy_params(params)
        self._call("cuGraphExecMemcpyNodeSetParams", exec_, node, p, ctx)

    @driver_call
    def cuGraphExecMemsetNodeSetParams(
        self, exec_: int, node: int, params: MemsetNodeParams, ctx: int
    ) -> None:
        p = self._memset_params(params)
        self._call("cuGraphExecMemsetNodeSetParams", exec_, node, p, ctx)

    @driver_call
    def cuGraphExecUpdate(self, exec_: int, graph: int) -> GraphUpdateResult:
        # The bindings drop the result structure when the call fails, which is the only time it
        # is wanted: so the C function is called directly.
        function = self._c_function(
            "cuGraphExecUpdate", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        )
        info = _UpdateInfo()
        code = int(function(exec_, graph, ctypes.addressof(info)))
        if code == 0:
            return GraphUpdateResult(True)
        if code != _UPDATE_FAILURE and not info.result:
            raise self._failure(code, "cuGraphExecUpdate")
        reason = _UPDATE_REASONS.get(info.result, f"reason {info.result}")
        if code != _UPDATE_FAILURE:
            reason += f" [{explain.result_name(code)}]"
        return GraphUpdateResult(False, reason, int(info.errorNode or 0))

    @driver_call
    def cuGraphDebugDotPrint(self, graph: int, path: str, flags: int) -> None:
        self._call("cuGraphDebugDotPrint", graph, path.encode(), flags)
