# ruff: noqa: D102  (the methods are the driver API, described there)
"""The call surface: what every device driver of this library answers to.

Methods carry the names of the CUDA driver API without version suffixes. Handles and device
pointers are plain ``int``; sizes are bytes. A failing call raises the fitting
:class:`~memra_lowlevel.errors.DriverError` (or a capture or host-check error); none returns a code.
Two implementations exist: :class:`memra_lowlevel.driver.cuda.CudaDriver` over ``cuda.bindings``
and :class:`memra_lowlevel.driver.host.HostDriver`, which runs the same kernels on the CPU.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ..errors import MemraError
    from .trace import TraceRing

__all__ = [
    "CaptureInfo",
    "CaptureMode",
    "CaptureStatus",
    "DeviceAttribute",
    "Driver",
    "FuncAttribute",
    "GraphUpdateResult",
    "KernelNodeParams",
    "LaunchAttributes",
    "MemcpyNodeParams",
    "MemsetNodeParams",
    "NodeType",
]

Dim3 = tuple[int, int, int]


class CaptureMode(enum.IntEnum):
    """``CUstreamCaptureMode``."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


class CaptureStatus(enum.IntEnum):
    """``CUstreamCaptureStatus``."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


class NodeType(enum.IntEnum):
    """``CUgraphNodeType``."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    HOST = 3
    GRAPH = 4
    EMPTY = 5
    WAIT_EVENT = 6
    EVENT_RECORD = 7
    EXT_SEMAS_SIGNAL = 8
    EXT_SEMAS_WAIT = 9
    MEM_ALLOC = 10
    MEM_FREE = 11
    BATCH_MEM_OP = 12
    CONDITIONAL = 13


class ConditionalType(enum.IntEnum):
    """``CUgraphConditionalNodeType``."""

    IF = 0
    WHILE = 1


class DeviceAttribute(enum.IntEnum):
    """The device attributes that the library reads (``CUdevice_attribute`` numbers)."""

    MAX_THREADS_PER_BLOCK = 1
    MAX_BLOCK_DIM_X = 2
    MAX_BLOCK_DIM_Y = 3
    MAX_BLOCK_DIM_Z = 4
    MAX_GRID_DIM_X = 5
    MAX_GRID_DIM_Y = 6
    MAX_GRID_DIM_Z = 7
    MAX_SHARED_MEMORY_PER_BLOCK = 8
    WARP_SIZE = 10
    MAX_REGISTERS_PER_BLOCK = 12
    CLOCK_RATE = 13
    MULTIPROCESSOR_COUNT = 16
    MEMORY_CLOCK_RATE = 36
    GLOBAL_MEMORY_BUS_WIDTH = 37
    L2_CACHE_SIZE = 38
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81
    COOPERATIVE_LAUNCH = 95
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    MEMORY_POOLS_SUPPORTED = 115
    CLUSTER_LAUNCH = 120


class FuncAttribute(enum.IntEnum):
    """``CUfunction_attribute``."""

    MAX_THREADS_PER_BLOCK = 0
    SHARED_SIZE_BYTES = 1
    CONST_SIZE_BYTES = 2
    LOCAL_SIZE_BYTES = 3
    NUM_REGS = 4
    PTX_VERSION = 5
    BINARY_VERSION = 6
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


@dataclass(frozen=True)
class LaunchAttributes:
    """Optional attributes of ``cuLaunchKernelEx``.

    Attributes
    ----------
    cluster : (int, int, int) or None
    programmatic : bool
        Programmatic stream serialisation (the kernel waits for its predecessor by itself).
    cooperative : bool
    priority : int or None
    """

    cluster: Dim3 | None = None
    programmatic: bool = False
    cooperative: bool = False
    priority: int | None = None


@dataclass(frozen=True)
class CaptureInfo:
    """What ``cuStreamGetCaptureInfo`` tells: status, capture id, graph and dependency nodes."""

    status: CaptureStatus
    id: int = 0
    graph: int = 0
    dependencies: tuple[int, ...] = ()


@dataclass(frozen=True)
class KernelNodeParams:
    """Parameters of a kernel node.

    ``params`` holds the bytes of each kernel parameter in order. When a driver gives parameters
    back, they are copies; when they are given in, the driver copies them.
    """

    func: int
    grid: Dim3
    block: Dim3
    shared_bytes: int
    params: tuple[bytes, ...]
    programmatic: bool = False


@dataclass(frozen=True)
class MemcpyNodeParams:
    """A linear copy of ``n_bytes``; each side is a device pointer or pinned host address."""

    dst: int
    src: int
    n_bytes: int
    kind: Literal["htod", "dtoh", "dtod", "unknown"]


@dataclass(frozen=True)
class ConditionalNodeParams:
    """A node whose body runs if, or as long as, its condition is not 0."""

    handle: int
    type: ConditionalType
    ctx: int


@dataclass(frozen=True)
class MemsetNodeParams:
    """A linear set of ``n_elements`` of ``element_bytes`` (1, 2 or 4)."""

    dst: int
    value: int
    element_bytes: int
    n_elements: int


@dataclass(frozen=True)
class GraphUpdateResult:
    """Answer of ``cuGraphExecUpdate``: ``ok``, or the driver's reason and the node it names."""

    ok: bool
    reason: str = ""
    node: int = 0


@dataclass(frozen=True)
class StreamOrderedPool:
    """Figures of a memory pool, in bytes."""

    reserved_bytes: int = 0
    used_bytes: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class Driver(Protocol):
    """All calls that the library makes. One instance serves every device of its kind."""

    kind: Literal["cuda", "host"]
    trace: TraceRing

    # -- book-keeping --------------------------------------------------------------------------
    def counts(self) -> Mapping[str, int]:
        """Return the calls made so far by name, those of the compiled fast path included."""
        ...

    def entry_point(self, name: str) -> int:
        """Address of the C function behind ``name`` (``cuLaunchKernel`` …), for native callers.

        Calls through it are counted and traced by whoever makes them.
        """
        ...

    def add_count_source(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Merge the counters of native code, which calls :meth:`entry_point` by itself."""
        ...

    def error_from(self, code: int, call: str, stream: int = 0, kernel: int = 0) -> MemraError:
        """Make the exception for a result code that native code got from an entry point.

        Call it on the thread that got the code: the host driver keeps the exception there.
        """
        ...

    def name_handle(self, handle: int, name: str) -> None:
        """Give a stream, event, kernel, graph or buffer a name for messages and the trace."""
        ...

    def handle_name(self, handle: int) -> str:
        """Name of a handle, or the handle in hexadecimal."""
        ...

    # -- library and devices -------------------------------------------------------------------
    def cuInit(self) -> None: ...
    def cuDriverGetVersion(self) -> int: ...
    def cuDeviceGetCount(self) -> int: ...
    def cuDeviceGet(self, ordinal: int) -> int: ...
    def cuDeviceGetName(self, device: int) -> str: ...
    def cuDeviceGetAttribute(self, attribute: DeviceAttribute, device: int) -> int: ...
    def cuDeviceTotalMem(self, device: int) -> int: ...
    def cuDevicePrimaryCtxRetain(self, device: int) -> int: ...
    def cuDevicePrimaryCtxRelease(self, device: int) -> None: ...
    def cuCtxSetCurrent(self, ctx: int) -> None: ...
    def cuCtxGetCurrent(self) -> int: ...
    def cuCtxSynchronize(self) -> None: ...
    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]: ...
    def cuMemGetInfo(self) -> tuple[int, int]: ...

    # -- memory --------------------------------------------------------------------------------
    def cuMemAlloc(self, n_bytes: int) -> int: ...
    def cuMemFree(self, ptr: int) -> None: ...
    def cuMemAllocAsync(self, n_bytes: int, stream: int) -> int: ...
    def cuMemFreeAsync(self, ptr: int, stream: int) -> None: ...
    def cuMemPoolTrimTo(self, device: int, keep_bytes: int) -> None: ...
    def cuMemPoolGetUsage(self, device: int) -> StreamOrderedPool: ...
    def cuMemHostAlloc(self, n_bytes: int) -> int: ...
    def cuMemFreeHost(self, ptr: int) -> None: ...
    def cuMemcpyHtoD(self, dst: int, src: int, n_bytes: int) -> None: ...
    def cuMemcpyDtoH(self, dst: int, src: int, n_bytes: int) -> None: ...
    def cuMemcpyHtoDAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None: ...
    def cuMemcpyDtoHAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None: ...
    def cuMemcpyDtoDAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None: ...
    def cuMemcpyPeerAsync(
        self, dst: int, dst_ctx: int, src: int, src_ctx: int, n_bytes: int, stream: int
    ) -> None: ...
    def cuMemsetD8Async(self, dst: int, value: int, n: int, stream: int) -> None: ...
    def cuMemsetD32Async(self, dst: int, value: int, n: int, stream: int) -> None: ...

    # -- streams and events --------------------------------------------------------------------
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> int: ...
    def cuStreamDestroy(self, stream: int) -> None: ...
    def cuStreamSynchronize(self, stream: int) -> None: ...
    def cuStreamQuery(self, stream: int) -> bool: ...
    def cuStreamWaitEvent(self, stream: int, event: int) -> None: ...
    def cuEventCreate(self, flags: int) -> int: ...
    def cuEventDestroy(self, event: int) -> None: ...
    def cuEventRecord(self, event: int, stream: int) -> None: ...
    def cuEventQuery(self, event: int) -> bool: ...
    def cuEventSynchronize(self, event: int) -> None: ...
    def cuEventElapsedTime(self, start: int, end: int) -> float: ...

    # -- modules and launches ------------------------------------------------------------------
    def cuModuleLoadData(self, image: bytes) -> int: ...
    def cuModuleUnload(self, module: int) -> None: ...
    def cuModuleGetFunction(self, module: int, name: str) -> int: ...
    def cuFuncGetAttribute(self, attribute: FuncAttribute, func: int) -> int: ...
    def cuFuncSetAttribute(self, func: int, attribute: FuncAttribute, value: int) -> None: ...
    def cuFuncGetParamInfo(self, func: int, index: int) -> tuple[int, int] | None:
        """Offset and size in bytes of a parameter; None past the last."""
        ...

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, func: int, block_threads: int, shared_bytes: int
    ) -> int: ...
    def cuLaunchKernel(
        self, func: int, grid: Dim3, block: Dim3, shared_bytes: int, stream: int, params: int
    ) -> None:
        """Launch; ``params`` is the address of an array of pointers to the parameter values."""
        ...

    def cuLaunchKernelEx(
        self,
        func: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream: int,
        params: int,
        attributes: LaunchAttributes,
    ) -> None: ...

    def cuTensorMapEncodeTiled(
        self, address: int, n_rows: int, row_bytes: int, box_rows: int, box_bytes: int
    ) -> bytes:
        """Describe rows of bytes in device memory for tile copies (sm_90); 128 bytes.

        Sizes of rows and boxes are multiples of 16 bytes, ``address`` too. A box may be wider than
        the rows; what lies outside reads as zero.
        """
        ...

    # -- capture -------------------------------------------------------------------------------
    def cuStreamBeginCapture(self, stream: int, mode: CaptureMode) -> None: ...
    def cuStreamEndCapture(self, stream: int) -> int: ...
    def cuStreamIsCapturing(self, stream: int) -> CaptureStatus: ...
    def cuStreamGetCaptureInfo(self, stream: int) -> CaptureInfo: ...
    def cuStreamUpdateCaptureDependencies(
        self, stream: int, deps: Sequence[int], flags: int
    ) -> None:
        """Let the next recorded work wait for nodes added by hand: also (0) or only (1).

        With the graph of ``cuStreamGetCaptureInfo`` this puts a child graph into a capture, which
        ``cuGraphLaunch`` cannot.
        """
        ...

    def cuThreadExchangeStreamCaptureMode(self, mode: CaptureMode) -> CaptureMode: ...

    # -- graphs --------------------------------------------------------------------------------
    def cuGraphCreate(self) -> int: ...
    def cuGraphDestroy(self, graph: int) -> None: ...
    def cuGraphGetNodes(self, graph: int) -> list[int]: ...
    def cuGraphGetEdges(self, graph: int) -> list[tuple[int, int]]: ...
    def cuGraphNodeGetType(self, node: int) -> NodeType: ...
    def cuGraphKernelNodeGetParams(
        self, node: int, param_sizes: Sequence[int] | None = None
    ) -> KernelNodeParams:
        """Read a kernel node; ``param_sizes`` spares the call of ``cuFuncGetParamInfo``."""
        ...

    def cuGraphMemcpyNodeGetParams(self, node: int) -> MemcpyNodeParams: ...
    def cuGraphMemsetNodeGetParams(self, node: int) -> MemsetNodeParams: ...
    def cuGraphChildGraphNodeGetGraph(self, node: int) -> int: ...
    def cuGraphAddKernelNode(
        self, graph: int, deps: Sequence[int], params: KernelNodeParams
    ) -> int: ...
    def cuGraphAddMemcpyNode(
        self, graph: int, deps: Sequence[int], params: MemcpyNodeParams, ctx: int
    ) -> int: ...
    def cuGraphAddMemsetNode(
        self, graph: int, deps: Sequence[int], params: MemsetNodeParams, ctx: int
    ) -> int: ...
    def cuGraphAddEmptyNode(self, graph: int, deps: Sequence[int]) -> int: ...
    def cuGraphAddChildGraphNode(self, graph: int, deps: Sequence[int], child: int) -> int: ...
    def cuGraphConditionalHandleCreate(self, graph: int, ctx: int, default: int, flags: int) -> int:
        """Make a condition of a graph; with flags 1 it is ``default`` at each launch."""
        ...

    def cuGraphAddNode(
        self, graph: int, deps: Sequence[int], params: ConditionalNodeParams
    ) -> tuple[int, int]:
        """Add a conditional node, the only kind added this way; returns it and its body's graph."""
        ...

    def cuGraphInstantiate(self, graph: int, flags: int) -> int: ...
    def cuGraphExecDestroy(self, exec_: int) -> None: ...
    def cuGraphUpload(self, exec_: int, stream: int) -> None: ...
    def cuGraphLaunch(self, exec_: int, stream: int) -> None: ...
    def cuGraphExecKernelNodeSetParams(
        self, exec_: int, node: int, params: KernelNodeParams
    ) -> None: ...
    def cuGraphExecMemcpyNodeSetParams(
        self, exec_: int, node: int, params: MemcpyNodeParams, ctx: int
    ) -> None: ...
    def cuGraphExecMemsetNodeSetParams(
        self, exec_: int, node: int, params: MemsetNodeParams, ctx: int
    ) -> None: ...
    def cuGraphExecUpdate(self, exec_: int, graph: int) -> GraphUpdateResult: ...
    def cuGraphDebugDotPrint(self, graph: int, path: str, flags: int) -> None: ...
