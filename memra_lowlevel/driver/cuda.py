# ruff: noqa: D102  (the methods are the driver API, described in table.py)
"""The call surface over the CUDA driver, through ``cuda.bindings``."""

from __future__ import annotations

from collections.abc import Sequence

from .calls import driver_call
from .cuda_graphs import CudaGraphs
from .table import (
    CaptureInfo,
    CaptureMode,
    CaptureStatus,
    DeviceAttribute,
    Dim3,
    FuncAttribute,
    LaunchAttributes,
    StreamOrderedPool,
)

__all__ = ["CudaDriver"]

_NOT_READY = 600
_PORTABLE = 1
_NAME_BYTES = 256


class CudaDriver(CudaGraphs):
    """The CUDA driver. Thread-safe as far as the driver itself is.

    Attributes
    ----------
    kind : str
        ``"cuda"``.
    """

    # -- library and devices --------------------------------------------------------------------
    @driver_call
    def cuInit(self) -> None:
        self._call("cuInit", 0)

    @driver_call
    def cuDriverGetVersion(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    @driver_call
    def cuDeviceGetCount(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    @driver_call
    def cuDeviceGet(self, ordinal: int) -> int:
        return int(self._call("cuDeviceGet", ordinal))

    @driver_call
    def cuDeviceGetName(self, device: int) -> str:
        name: bytes = self._call("cuDeviceGetName", _NAME_BYTES, device)
        return name.split(b"\0", 1)[0].decode("utf-8", "replace").strip()

    @driver_call
    def cuDeviceGetAttribute(self, attribute: DeviceAttribute, device: int) -> int:
        number = self._d.CUdevice_attribute(int(attribute))
        return int(self._call("cuDeviceGetAttribute", number, device))

    @driver_call
    def cuDeviceTotalMem(self, device: int) -> int:
        return int(self._call("cuDeviceTotalMem", device))

    @driver_call
    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return int(self._call("cuDevicePrimaryCtxRetain", device))

    @driver_call
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", device)

    @driver_call
    def cuCtxSetCurrent(self, ctx: int) -> None:
        self._call("cuCtxSetCurrent", ctx)

    @driver_call
    def cuCtxGetCurrent(self) -> int:
        return int(self._call("cuCtxGetCurrent"))

    @driver_call
    def cuCtxSynchronize(self) -> None:
        self._call("cuCtxSynchronize")

    @driver_call
    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        least, greatest = self._call("cuCtxGetStreamPriorityRange")
        return int(least), int(greatest)

    @driver_call
    def cuMemGetInfo(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    # -- memory ---------------------------------------------------------------------------------
    @driver_call
    def cuMemAlloc(self, n_bytes: int) -> int:
        return int(self._call("cuMemAlloc", n_bytes))

    @driver_call
    def cuMemFree(self, ptr: int) -> None:
        self._call("cuMemFree", ptr)

    @driver_call
    def cuMemAllocAsync(self, n_bytes: int, stream: int) -> int:
        return int(self._call("cuMemAllocAsync", n_bytes, stream, stream=stream))

    @driver_call
    def cuMemFreeAsync(self, ptr: int, stream: int) -> None:
        self._call("cuMemFreeAsync", ptr, stream, stream=stream)

    @driver_call
    def cuMemPoolTrimTo(self, device: int, keep_bytes: int) -> None:
        pool = self._call("cuDeviceGetDefaultMemPool", device)
        self._call("cuMemPoolTrimTo", pool, keep_bytes)

    @driver_call
    def cuMemPoolGetUsage(self, device: int) -> StreamOrderedPool:
        pool = self._call("cuDeviceGetDefaultMemPool", device)
        names = self._d.CUmemPool_attribute
        reserved = self._call(
            "cuMemPoolGetAttribute", pool, names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        )
        used = self._call("cuMemPoolGetAttribute", pool, names.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        return StreamOrderedPool(int(reserved), int(used))

    @driver_call
    def cuMemHostAlloc(self, n_bytes: int) -> int:
        return int(self._call("cuMemHostAlloc", n_bytes, _PORTABLE))

    @driver_call
    def cuMemFreeHost(self, ptr: int) -> None:
        self._call("cuMemFreeHost", ptr)

    @driver_call
    def cuMemcpyHtoD(self, dst: int, src: int, n_bytes: int) -> None:
        self._call("cuMemcpyHtoD", dst, src, n_bytes)

    @driver_call
    def cuMemcpyDtoH(self, dst: int, src: int, n_bytes: int) -> None:
        self._call("cuMemcpyDtoH", dst, src, n_bytes)

    @driver_call
    def cuMemcpyHtoDAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", dst, src, n_bytes, stream, stream=stream)

    @driver_call
    def cuMemcpyDtoHAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", dst, src, n_bytes, stream, stream=stream)

    @driver_call
    def cuMemcpyDtoDAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync", dst, src, n_bytes, stream, stream=stream)

    @driver_call
    def cuMemcpyPeerAsync(
        self, dst: int, dst_ctx: int, src: int, src_ctx: int, n_bytes: int, stream: int
    ) -> None:
        self._call("cuMemcpyPeerAsync", dst, dst_ctx, src, src_ctx, n_bytes, stream, stream=stream)

    @driver_call
    def cuMemsetD8Async(self, dst: int, value: int, n: int, stream: int) -> None:
        self._call("cuMemsetD8Async", dst, value & 0xFF, n, stream, stream=stream)

    @driver_call
    def cuMemsetD32Async(self, dst: int, value: int, n: int, stream: int) -> None:
        self._call("cuMemsetD32Async", dst, value & 0xFFFFFFFF, n, stream, stream=stream)

    # -- streams and events -----------------------------------------------------------------------
    @driver_call
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> int:
        return int(self._call("cuStreamCreateWithPriority", flags, priority))

    @driver_call
    def cuStreamDestroy(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream, stream=stream)
        self._capture_ended(stream)
        self._names.pop(stream, None)

    @driver_call
    def cuStreamSynchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream, stream=stream)

    @driver_call
    def cuStreamQuery(self, stream: int) -> bool:
        return self._ready("cuStreamQuery", stream, stream=stream)

    @driver_call
    def cuStreamWaitEvent(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0, stream=stream)

    @driver_call
    def cuEventCreate(self, flags: int) -> int:
        return int(self._call("cuEventCreate", flags))

    @driver_call
    def cuEventDestroy(self, event: int) -> None:
        self._call("cuEventDestroy", event)
        self._names.pop(event, None)

    @driver_call
    def cuEventRecord(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream, stream=stream)

    @driver_call
    def cuEventQuery(self, event: int) -> bool:
        return self._ready("cuEventQuery", event)

    @driver_call
    def cuEventSynchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    @driver_call
    def cuEventElapsedTime(self, start: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    def _ready(self, call: str, handle: int, stream: int = 0) -> bool:
        code, _ = self._answer(call, handle)
        if code not in (0, _NOT_READY):
            raise self._failure(code, call, stream=stream)
        return code == 0

    # -- modules and launches ---------------------------------------------------------------------
    @driver_call
    def cuModuleLoadData(self, image: bytes) -> int:
        return int(self._call("cuModuleLoadData", image))

    @driver_call
    def cuModuleUnload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    @driver_call
    def cuModuleGetFunction(self, module: int, name: str) -> int:
        func = int(self._call("cuModuleGetFunction", module, name.encode()))
        self._names.setdefault(func, name)
        return func

    @driver_call
    def cuFuncGetAttribute(self, attribute: FuncAttribute, func: int) -> int:
        number = self._d.CUfunction_attribute(int(attribute))
        return int(self._call("cuFuncGetAttribute", number, func, kernel=func))

    @driver_call
    def cuFuncSetAttribute(self, func: int, attribute: FuncAttribute, value: int) -> None:
        number = self._d.CUfunction_attribute(int(attribute))
        self._call("cuFuncSetAttribute", func, number, value, kernel=func)

    @driver_call
    def cuFuncGetParamInfo(self, func: int, index: int) -> tuple[int, int] | None:
        return self._param_info(func, index)

    @driver_call
    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, func: int, block_threads: int, shared_bytes: int
    ) -> int:
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self._call(call, func, block_threads, shared_bytes, kernel=func))

    @driver_call
    def cuLaunchKernel(
        self, func: int, grid: Dim3, block: Dim3, shared_bytes: int, stream: int, params: int
    ) -> None:
        self._call(
            "cuLaunchKernel", func, *grid, *block, shared_bytes, stream, params, 0,
            stream=stream, kernel=func,
        )  # fmt: skip

    @driver_call
    def cuLaunchKernelEx(
        self,
        func: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream: int,
        params: int,
        attributes: LaunchAttributes,
    ) -> None:
        d = self._d
        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.hStream = d.CUstream(stream)
        attrs = []
        if attributes.cluster is not None:
            a = d.CUlaunchAttribute()
            a.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = attributes.cluster
            attrs.append(a)
        if attributes.programmatic:
            a = d.CUlaunchAttribute()
            a.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            a.value.programmaticStreamSerializationAllowed = 1
            attrs.append(a)
        if attributes.cooperative:
            a = d.CUlaunchAttribute()
            a.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            a.value.cooperative = 1
            attrs.append(a)
        if attributes.priority is not None:
            a = d.CUlaunchAttribute()
            a.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
            a.value.priority = attributes.priority
            attrs.append(a)
        config.attrs = attrs
        config.numAttrs = len(attrs)
        self._call("cuLaunchKernelEx", config, func, params, 0, stream=stream, kernel=func)

    @driver_call
    def cuTensorMapEncodeTiled(
        self, address: int, n_rows: int, row_bytes: int, box_rows: int, box_bytes: int
    ) -> bytes:
        d, unit = self._d, 8  # elements of 8 bytes: a box has at most 256 a side
        found = self._call(
            "cuTensorMapEncodeTiled",
            d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 2, address,
            [d.cuuint64_t(row_bytes // unit), d.cuuint64_t(n_rows)], [d.cuuint64_t(row_bytes)],
            [d.cuuint32_t(box_bytes // unit), d.cuuint32_t(box_rows)],
            [d.cuuint32_t(1), d.cuuint32_t(1)],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        return b"".join(int(word).to_bytes(8, "little") for word in found.opaque)

    # -- capture ----------------------------------------------------------------------------------
    @driver_call
    def cuStreamBeginCapture(self, stream: int, mode: CaptureMode) -> None:
        number = self._d.CUstreamCaptureMode(int(mode))
        self._call("cuStreamBeginCapture", stream, number, stream=stream)
        self._capture_began(stream)

    @driver_call
    def cuStreamEndCapture(self, stream: int) -> int:
        code, values = self._answer("cuStreamEndCapture", stream)
        if code:
            error = self._failure(code, "cuStreamEndCapture", stream=stream)
            # Some errors (another thread, a forked stream) leave the capture under way.
            status_code, status = self._answer("cuStreamIsCapturing", stream)
            if status_code or int(status[0]) == CaptureStatus.NONE:
                self._capture_ended(stream)
            raise error
        self._capture_ended(stream)
        return int(values[0])

    @driver_call
    def cuStreamIsCapturing(self, stream: int) -> CaptureStatus:
        return CaptureStatus(int(self._call("cuStreamIsCapturing", stream, stream=stream)))

    @driver_call
    def cuStreamGetCaptureInfo(self, stream: int) -> CaptureInfo:
        call = self._pick("cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo")
        values = self._call(call, stream, stream=stream)
        status = CaptureStatus(int(values[0]))
        if status != CaptureStatus.ACTIVE:
            return CaptureInfo(status)
        nodes = tuple(int(n) for n in values[3] or ())
        return CaptureInfo(status, int(values[1]), int(values[2]), nodes)

    @driver_call
    def cuStreamUpdateCaptureDependencies(
        self, stream: int, deps: Sequence[int], flags: int
    ) -> None:
        call = "cuStreamUpdateCaptureDependencies"
        nodes, n = self._nodes(deps), len(deps)
        if hasattr(self._d, call + "_v2"):
            self._call(call, stream, nodes, n, flags, stream=stream)
        else:  # the plain name takes edge data since CUDA 13
            data = [self._d.CUgraphEdgeData() for _ in deps]
            self._call(call, stream, nodes, data, n, flags, stream=stream)

    @driver_call
    def cuThreadExchangeStreamCaptureMode(self, mode: CaptureMode) -> CaptureMode:
        number = self._d.CUstreamCaptureMode(int(mode))
        return CaptureMode(int(self._call("cuThreadExchangeStreamCaptureMode", number)))
