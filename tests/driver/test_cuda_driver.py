"""The CUDA driver over a double of the bindings: mapping, counting, tracing, errors."""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

real = pytest.importorskip("cuda.bindings.driver")

from fake_bindings import FakeBindings, parameters, returned  # noqa: E402

from memra_lowlevel import driver, errors  # noqa: E402
from memra_lowlevel.driver import explain, table  # noqa: E402
from memra_lowlevel.driver.cuda import CudaDriver  # noqa: E402
from memra_lowlevel.driver.host import HostDriver  # noqa: E402
from memra_lowlevel.driver.table import (  # noqa: E402
    CaptureInfo,
    CaptureMode,
    CaptureStatus,
    ConditionalNodeParams,
    ConditionalType,
    DeviceAttribute,
    FuncAttribute,
    KernelNodeParams,
    LaunchAttributes,
    MemcpyNodeParams,
    MemsetNodeParams,
)

SOURCES = Path(driver.__file__).parent
SURFACE = sorted(n for n in vars(table.Driver) if n.startswith("cu"))


@pytest.fixture
def fake() -> FakeBindings:
    return FakeBindings()


@pytest.fixture
def d(fake: FakeBindings) -> CudaDriver:
    return CudaDriver(fake)


# -- the surface ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [CudaDriver, HostDriver])
def test_both_drivers_have_the_whole_surface(cls: type) -> None:
    assert len(SURFACE) > 70
    for name, want in vars(table.Driver).items():
        if name.startswith("_") or not callable(want):
            continue
        got = getattr(cls, name)
        names = list(inspect.signature(want).parameters)
        assert list(inspect.signature(got).parameters) == names, name
        if name.startswith("cu"):
            assert getattr(got, "__is_driver_call__", False), f"{name} is not counted"


_BY_NAME: dict[str, Any] = {
    "image": b"ptx", "name": "kernel", "path": "/tmp/x.dot", "grid": (1, 1, 1), "block": (1, 1, 1),
    "deps": [], "attributes": LaunchAttributes(), "mode": CaptureMode.THREAD_LOCAL, "params": 0,
    "param_sizes": None,
}  # fmt: skip


def _arguments(name: str) -> list[Any]:
    method = getattr(table.Driver, name)
    hints = typing.get_type_hints(method, vars(table))
    out: list[Any] = []
    for p in list(inspect.signature(method).parameters)[1:]:
        hint = hints[p]
        if hint is KernelNodeParams:
            out.append(KernelNodeParams(0x99, (1, 1, 1), (1, 1, 1), 0, (b"\x01\0\0\0",)))
        elif hint is MemcpyNodeParams:
            out.append(MemcpyNodeParams(0x10, 0x20, 4, "htod"))
        elif hint is MemsetNodeParams:
            out.append(MemsetNodeParams(0x10, 1, 4, 1))
        elif hint is ConditionalNodeParams:
            out.append(ConditionalNodeParams(0x30, ConditionalType.WHILE, 0x40))
        elif hint is DeviceAttribute:
            out.append(DeviceAttribute.WARP_SIZE)
        elif hint is FuncAttribute:
            out.append(FuncAttribute.NUM_REGS)
        else:
            out.append(_BY_NAME.get(p, 3))
    return out


@pytest.mark.parametrize("name", SURFACE)
def test_each_call_is_made_counted_and_traced_once(
    d: CudaDriver, fake: FakeBindings, name: str
) -> None:
    before = dict(d.counts())
    fake.calls.clear()
    if name == "cuFuncGetParamInfo":
        fake.answers[name] = (0, 8)
    if name == "cuTensorMapEncodeTiled":
        fake.answers[name] = (real.CUtensorMap(),)
    if name == "cuGraphKernelNodeGetParams":
        fake.fail["cuFuncGetParamInfo"] = 1
    getattr(d, name)(*_arguments(name))
    after = dict(d.counts())
    assert {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)} == {
        name: 1
    }
    made = [c for c, _ in fake.calls]
    assert any(c.startswith(name) or c.startswith("cuMemPool") for c in made), made
    entry = d.trace.entries(1)[0]
    assert entry.call == name and entry.where.startswith(__file__)


@pytest.mark.parametrize("name", [n for n in SURFACE if n not in ("cuGraphExecUpdate",)])
def test_each_call_turns_a_failure_into_an_error(
    d: CudaDriver, fake: FakeBindings, name: str
) -> None:
    for call in (name, f"{name}_v2", f"{name}_v3", "cuDeviceGetDefaultMemPool"):
        fake.fail[call] = 700
    with pytest.raises(errors.IllegalAddress) as caught:
        getattr(d, name)(*_arguments(name))
    assert caught.value.result == "CUDA_ERROR_ILLEGAL_ADDRESS" and caught.value.code == 700
    assert caught.value.call.startswith(("cuMemPool", "cuDeviceGetDefaultMemPool", name))
    assert name in caught.value.recent[-1]


# -- the bindings, as installed ------------------------------------------------------------------

N_ARGUMENTS = {
    "cuInit": 1, "cuDriverGetVersion": 0, "cuDeviceGetCount": 0, "cuDeviceGet": 1,
    "cuDeviceGetName": 2, "cuDeviceGetAttribute": 2, "cuDeviceTotalMem": 1,
    "cuDevicePrimaryCtxRetain": 1, "cuDevicePrimaryCtxRelease": 1, "cuCtxSetCurrent": 1,
    "cuCtxGetCurrent": 0, "cuCtxSynchronize": 0, "cuCtxGetStreamPriorityRange": 0,
    "cuMemGetInfo": 0, "cuMemAlloc": 1, "cuMemFree": 1, "cuMemAllocAsync": 2, "cuMemFreeAsync": 2,
    "cuDeviceGetDefaultMemPool": 1, "cuMemPoolTrimTo": 2, "cuMemPoolGetAttribute": 2,
    "cuMemHostAlloc": 2, "cuMemFreeHost": 1, "cuMemcpyHtoD": 3, "cuMemcpyDtoH": 3,
    "cuMemcpyHtoDAsync": 4, "cuMemcpyDtoHAsync": 4, "cuMemcpyDtoDAsync": 4,
    "cuMemcpyPeerAsync": 6, "cuMemsetD8Async": 4, "cuMemsetD32Async": 4,
    "cuStreamCreateWithPriority": 2, "cuStreamDestroy": 1, "cuStreamSynchronize": 1,
    "cuStreamQuery": 1, "cuStreamWaitEvent": 3, "cuEventCreate": 1, "cuEventDestroy": 1,
    "cuEventRecord": 2, "cuEventQuery": 1, "cuEventSynchronize": 1, "cuEventElapsedTime": 2,
    "cuModuleLoadData": 1, "cuModuleUnload": 1, "cuModuleGetFunction": 2, "cuFuncGetAttribute": 2,
    "cuFuncSetAttribute": 3, "cuFuncGetParamInfo": 2,
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": 3, "cuLaunchKernel": 11, "cuLaunchKernelEx": 4,
    "cuStreamBeginCapture": 2, "cuStreamEndCapture": 1, "cuStreamIsCapturing": 1,
    "cuThreadExchangeStreamCaptureMode": 1, "cuGraphCreate": 1, "cuGraphDestroy": 1,
    "cuGraphGetNodes": 2, "cuGraphNodeGetType": 1, "cuGraphKernelNodeGetParams": 1,
    "cuGraphKernelNodeGetAttribute": 2, "cuGraphMemcpyNodeGetParams": 1,
    "cuGraphMemsetNodeGetParams": 1, "cuGraphChildGraphNodeGetGraph": 1, "cuGraphAddKernelNode": 4,
    "cuGraphAddMemcpyNode": 5, "cuGraphAddMemsetNode": 5, "cuGraphAddEmptyNode": 3,
    "cuGraphAddChildGraphNode": 4, "cuGraphInstantiate": 2, "cuGraphExecDestroy": 1,
    "cuGraphUpload": 2, "cuGraphLaunch": 2, "cuGraphExecKernelNodeSetParams": 3,
    "cuGraphExecMemcpyNodeSetParams": 4, "cuGraphExecMemsetNodeSetParams": 4,
    "cuGraphConditionalHandleCreate": 4, "cuGraphDebugDotPrint": 3, "cuGetProcAddress": 3,
    "cuTensorMapEncodeTiled": 11,
}  # fmt: skip
N_VALUES = {
    "cuCtxGetStreamPriorityRange": 2, "cuMemGetInfo": 2, "cuFuncGetParamInfo": 2,
    "cuGraphGetNodes": 2, "cuGetProcAddress": 2, "cuStreamEndCapture": 1, "cuLaunchKernel": 0,
}  # fmt: skip


def test_the_installed_bindings_have_every_call_with_these_arguments() -> None:
    """Run it with another version on PYTHONPATH to check that one."""
    wrong = {n: parameters(n) for n, k in N_ARGUMENTS.items() if len(parameters(n)) != k}
    assert not wrong
    assert {n: len(returned(n)) for n in N_VALUES} == N_VALUES


def test_the_installed_bindings_have_one_of_each_pair() -> None:
    info = [n for n in ("cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo") if hasattr(real, n)]
    edges = [n for n in ("cuGraphGetEdges_v2", "cuGraphGetEdges") if hasattr(real, n)]
    assert len(returned(info[0])) == 6 and len(parameters(info[0])) == 1  # with edge data
    assert len(returned(edges[0])) == 4 and len(parameters(edges[0])) == 2
    call = "cuGraphNodeGetDependencies"
    before = [n for n in (call + "_v2", call) if hasattr(real, n)]
    assert len(returned(before[0])) == 3 and len(parameters(before[0])) == 2
    add = [n for n in ("cuGraphAddNode_v2", "cuGraphAddNode") if hasattr(real, n)]
    assert len(parameters(add[0])) == 5  # with edge data


def test_the_sources_use_no_other_call_of_the_bindings() -> None:
    used: set[str] = set()
    for name in ("cuda.py", "cuda_base.py", "cuda_graphs.py"):
        text = (SOURCES / name).read_text(encoding="utf-8")
        used |= set(re.findall(r'_(?:call|answer|ready|pick)\(\s*"(cu\w+)"', text))
    paired = {  # checked in pairs
        "cuStreamGetCaptureInfo_v3", "cuGraphGetEdges_v2", "cuGraphNodeGetDependencies_v2",
        "cuGraphAddNode_v2",
    }  # fmt: skip
    assert used - paired <= set(N_ARGUMENTS)
    assert len(used) > 60


def test_dependencies_of_a_capture_are_set_in_both_forms(d: CudaDriver, fake: FakeBindings) -> None:
    call = "cuStreamUpdateCaptureDependencies"
    forms = {4} if hasattr(real, call + "_v2") else {5}
    assert {len(parameters(call))} == forms
    for missing in (False, True):
        if missing:
            fake.missing.add(call + "_v2")
        d.cuStreamUpdateCaptureDependencies(9, [0x70, 0x80], 1)
        args = _last(fake, call)
        assert [int(n) for n in args[1]] == [0x70, 0x80] and args[-2:] == (2, 1)
        plain = not missing and 4 in forms
        assert len(args) == (4 if plain else 5)
        assert plain or len(args[2]) == 2


def test_rows_are_described_in_units_of_8_bytes(d: CudaDriver, fake: FakeBindings) -> None:
    found = real.CUtensorMap()
    found.opaque = list(range(16))
    fake.answers["cuTensorMapEncodeTiled"] = (found,)
    made = d.cuTensorMapEncodeTiled(0x1000, 500, 1088, 32, 1120)
    assert made == np.arange(16, dtype=np.uint64).tobytes()
    _, rank, address, extent, strides, box, steps, *_ = _last(fake, "cuTensorMapEncodeTiled")
    assert (rank, address) == (2, 0x1000)
    numbers = [[int(x) for x in part] for part in (extent, strides, box, steps)]
    assert numbers == [[136, 500], [1088], [140, 32], [1, 1]]


def test_a_conditional_node_names_an_edge_for_each_dependency(
    d: CudaDriver, fake: FakeBindings
) -> None:
    """Bindings 12.9 refuse None for the edges of nodes that depend on others."""
    for deps in ([], [0x70], [0x70, 0x80]):
        d.cuGraphAddNode(0x10, deps, ConditionalNodeParams(5, ConditionalType.IF, 0x20))
        call = "cuGraphAddNode_v2" if hasattr(real, "cuGraphAddNode_v2") else "cuGraphAddNode"
        _, nodes, edges, n, _params = _last(fake, call)
        assert len(nodes) == len(edges) == n == len(deps)
        assert all(isinstance(edge, real.CUgraphEdgeData) for edge in edges)


def test_types_and_enums_that_are_used_exist() -> None:
    for name in (
        "CUDA_KERNEL_NODE_PARAMS", "CUDA_MEMCPY3D", "CUDA_MEMSET_NODE_PARAMS", "CUlaunchConfig",
        "CUlaunchAttribute", "CUlaunchAttributeID", "CUfunction", "CUdeviceptr", "CUstream",
        "CUgraphNode", "CUmemorytype", "CUmemPool_attribute", "CUstreamCaptureMode",
        "CUdevice_attribute", "CUfunction_attribute", "CUresult",
    ):  # fmt: skip
        assert hasattr(real, name), name
    for member in DeviceAttribute:
        assert int(real.CUdevice_attribute(int(member))) == member
        assert real.CUdevice_attribute(int(member)).name.endswith(member.name)
    for attribute in FuncAttribute:
        assert real.CUfunction_attribute(int(attribute)).name.endswith(attribute.name)
    for kind in table.NodeType:
        assert real.CUgraphNodeType(int(kind)).name.endswith(kind.name)
    for mode in CaptureMode:
        assert real.CUstreamCaptureMode(int(mode)).name.endswith(mode.name)
    for status in CaptureStatus:
        assert real.CUstreamCaptureStatus(int(status)).name.endswith(status.name)


# -- loading -------------------------------------------------------------------------------------


def test_a_missing_library_is_driver_not_found(fake: FakeBindings) -> None:
    fake.fail["cuInit"] = RuntimeError('"cuda" can only be found via system search\nmore')
    with pytest.raises(errors.DriverNotFound, match="system search") as caught:
        CudaDriver(fake)
    assert 'Device("host")' in str(caught.value) and "more" not in str(caught.value)


def test_no_device_is_driver_not_found(fake: FakeBindings) -> None:
    fake.fail["cuInit"] = 100
    with pytest.raises(errors.DriverNotFound, match="CUDA_VISIBLE_DEVICES"):
        CudaDriver(fake)


@pytest.mark.parametrize(
    ("version", "bindings", "fits"),
    [
        (12000, "12.9.0", True), (13000, "12.9.0", True), (13020, "13.1.0", True),
        (11080, "12.9.0", False), (12090, "13.0.0", False),
    ],
)  # fmt: skip
def test_versions_must_fit(version: int, bindings: str, fits: bool) -> None:
    fake = FakeBindings(version, bindings)
    if fits:
        assert CudaDriver(fake).versions()[2] == bindings
        return
    with pytest.raises(errors.ToolkitMismatch) as caught:
        CudaDriver(fake)
    assert caught.value.bindings == bindings
    assert caught.value.driver == f"{version // 1000}.{version % 1000 // 10}"


def test_a_call_that_the_driver_lacks_is_a_mismatch(d: CudaDriver, fake: FakeBindings) -> None:
    fake.fail["cuFuncGetParamInfo"] = RuntimeError('Function "cuFuncGetParamInfo" not found')
    with pytest.raises(errors.ToolkitMismatch, match="cuFuncGetParamInfo") as caught:
        d.cuFuncGetParamInfo(1, 0)
    assert caught.value.driver == "12.9"


def test_get_without_a_driver_raises_and_can_be_tried_again() -> None:
    """On a machine with a GPU it gives the one driver instead."""
    try:
        found = driver.get("cuda")
    except errors.MemraError as error:
        assert isinstance(error, errors.DriverNotFound | errors.ToolkitMismatch)
        with pytest.raises(type(error)):
            driver.get("cuda")
    else:
        assert driver.get("cuda") is found and found.kind == "cuda"
    assert driver.get("host") is driver.get("host")
    with pytest.raises(ValueError):
        driver.get("tpu")  # type: ignore[arg-type]


def test_importing_loads_no_bindings_and_makes_no_call() -> None:
    code = (
        "import sys, memra_lowlevel.driver, memra_lowlevel.driver.cuda, memra_lowlevel.driver.host;"
        "print([m for m in sys.modules if m.startswith('cuda.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- errors --------------------------------------------------------------------------------------


def test_every_result_of_the_bindings_maps_to_its_class(d: CudaDriver, fake: FakeBindings) -> None:
    for result in real.CUresult:
        code = int(result)
        if code == 0:
            continue
        fake.fail["cuMemGetInfo"] = code
        with pytest.raises(errors.MemraError) as caught:
            d.cuMemGetInfo()
        assert caught.value.result == result.name, result
        assert type(caught.value) is explain.explain(result.name).error
        assert result.name in str(caught.value)


def test_an_error_names_stream_and_kernel(d: CudaDriver, fake: FakeBindings) -> None:
    d.name_handle(0x50, "decode")
    d.name_handle(0x60, "append_kv")
    fake.fail["cuLaunchKernel"] = 701
    with pytest.raises(errors.InvalidArgument) as caught:
        d.cuLaunchKernel(0x60, (1, 1, 1), (1024, 1, 1), 0, 0x50, 0)
    e = caught.value
    assert (e.stream, e.kernel, e.call) == ("decode", "append_kv", "cuLaunchKernel")
    assert "append_kv" in str(e) and "registers" in str(e)


def test_query_is_false_while_not_ready(d: CudaDriver, fake: FakeBindings) -> None:
    assert d.cuStreamQuery(1) is True and d.cuEventQuery(1) is True
    fake.fail.update(cuStreamQuery=600, cuEventQuery=600)
    assert d.cuStreamQuery(1) is False and d.cuEventQuery(1) is False
    fake.fail["cuEventElapsedTime"] = 600
    with pytest.raises(errors.NotReady):
        d.cuEventElapsedTime(1, 2)


def test_native_code_gets_the_same_errors(d: CudaDriver) -> None:
    d.name_handle(0x50, "decode")
    error = d.error_from(2, "cuMemAllocAsync", 0x50)
    assert isinstance(error, errors.OutOfMemory) and error.stream == "decode"


def test_the_first_offence_is_the_cause(d: CudaDriver, fake: FakeBindings) -> None:
    d.name_handle(0x50, "decode")
    d.cuStreamBeginCapture(0x50, CaptureMode.GLOBAL)
    fake.fail["cuMemAlloc"] = 900
    fake.fail["cuMemFree"] = 900
    for call in (d.cuMemAlloc, d.cuMemFree):
        with pytest.raises(errors.CaptureForbidden):
            call(64)
    fake.fail["cuStreamEndCapture"] = 901
    with pytest.raises(errors.CaptureInvalidated) as caught:
        d.cuStreamEndCapture(0x50)
    assert caught.value.cause.startswith("cuMemAlloc (STREAM_CAPTURE_UNSUPPORTED) at ")
    assert Path(__file__).name in caught.value.cause and not d.active_captures()
    d.cuStreamBeginCapture(0x50, CaptureMode.GLOBAL)  # a new capture has a clean slate
    with pytest.raises(errors.CaptureInvalidated) as again:
        d.cuStreamEndCapture(0x50)
    assert again.value.cause == ""


def test_a_capture_stays_active_when_the_wrong_thread_ends_it(
    d: CudaDriver, fake: FakeBindings
) -> None:
    d.cuStreamBeginCapture(0x50, CaptureMode.GLOBAL)
    fake.fail["cuStreamEndCapture"] = 908
    fake.answers["cuStreamIsCapturing"] = (real.CUstreamCaptureStatus(1),)
    with pytest.raises(errors.CaptureWrongThread):
        d.cuStreamEndCapture(0x50)
    assert [c.stream for c in d.active_captures()] == [0x50]


# -- arguments and structures --------------------------------------------------------------------


def _last(fake: FakeBindings, name: str) -> tuple[Any, ...]:
    return next(args for call, args in reversed(fake.calls) if call == name)


def test_launch_passes_everything_in_order(d: CudaDriver, fake: FakeBindings) -> None:
    d.cuLaunchKernel(9, (1, 2, 3), (4, 5, 6), 7, 8, 0x1234)
    assert _last(fake, "cuLaunchKernel") == (9, 1, 2, 3, 4, 5, 6, 7, 8, 0x1234, 0)


def test_launch_attributes_reach_the_structure(d: CudaDriver, fake: FakeBindings) -> None:
    every = LaunchAttributes((2, 1, 1), programmatic=True, cooperative=True, priority=-3)
    seen: list[Any] = []

    def look(config: Any, func: int, params: int, extra: int) -> tuple[Any, ...]:
        seen.append(
            (config.gridDimX, config.gridDimZ, config.blockDimY, config.sharedMemBytes,
             int(config.hStream), config.numAttrs, [int(a.id) for a in config.attrs])
        )  # fmt: skip
        by_id = {a.id.name: a.value for a in config.attrs}
        seen.append(by_id["CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"].clusterDim.x)
        seen.append(by_id["CU_LAUNCH_ATTRIBUTE_PRIORITY"].priority)
        key = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        seen.append(by_id[key].programmaticStreamSerializationAllowed)
        return ()

    fake.answers["cuLaunchKernelEx"] = look
    d.cuLaunchKernelEx(9, (4, 1, 6), (1, 5, 1), 7, 0x88, 0, every)
    (gx, gz, by, shared, stream, n, ids), cluster, priority, programmatic = seen
    assert (gx, gz, by, shared, stream, n) == (4, 6, 5, 7, 0x88, 4)
    assert len(set(ids)) == 4 and (cluster, priority, programmatic) == (2, -3, 1)


def test_kernel_node_parameters_go_in_and_come_out(d: CudaDriver, fake: FakeBindings) -> None:
    want = KernelNodeParams(0x99, (1, 2, 3), (4, 5, 6), 7, (b"\x01\x02\x03\x04", bytes(range(8))))
    keep: list[Any] = []

    def copy(graph: int, deps: Any, n: int, p: Any) -> tuple[Any, ...]:
        assert n == 1 and int(deps[0]) == 0x77
        pointers = (ctypes.c_void_p * 2).from_address(int(p.kernelParams))
        values = [ctypes.string_at(pointers[0], 4), ctypes.string_at(pointers[1], 8)]
        keep.extend(ctypes.create_string_buffer(v, len(v)) for v in values)  # as the driver copies
        out = real.CUDA_KERNEL_NODE_PARAMS()
        out.func, out.sharedMemBytes = p.func, p.sharedMemBytes
        out.gridDimX, out.gridDimY, out.gridDimZ = p.gridDimX, p.gridDimY, p.gridDimZ
        out.blockDimX, out.blockDimY, out.blockDimZ = p.blockDimX, p.blockDimY, p.blockDimZ
        array = (ctypes.c_void_p * 2)(*(ctypes.addressof(k) for k in keep))
        keep.extend([array, out])
        out.kernelParams = ctypes.addressof(array)
        fake.answers["cuGraphKernelNodeGetParams"] = (out,)
        return (0x123,)

    fake.answers["cuGraphAddKernelNode"] = copy
    fake.answers["cuGraphKernelNodeGetAttribute"] = (real.CUlaunchAttributeValue(),)
    assert d.cuGraphAddKernelNode(5, [0x77], want) == 0x123
    assert d.cuGraphKernelNodeGetParams(0x123, (4, 8)) == want

    def info(func: int, index: int) -> tuple[Any, ...]:
        if index == 1:
            fake.fail["cuFuncGetParamInfo"] = 1  # the next index is past the last
        return (8 * index, (4, 8)[index])

    fake.answers["cuFuncGetParamInfo"] = info
    assert d.cuGraphKernelNodeGetParams(0x123) == want


@pytest.mark.parametrize(
    "want",
    [
        MemcpyNodeParams(0x1000, 0x2000, 48, "htod"),
        MemcpyNodeParams(0x1000, 0x2000, 48, "dtoh"),
        MemcpyNodeParams(0x1000, 0x2000, 48, "dtod"),
        MemcpyNodeParams(0x1000, 0x2000, 48, "unknown"),
    ],
)
def test_copy_node_parameters_go_in_and_come_out(
    d: CudaDriver, fake: FakeBindings, want: MemcpyNodeParams
) -> None:
    d.cuGraphAddMemcpyNode(5, [], want, 6)
    fake.answers["cuGraphMemcpyNodeGetParams"] = (_last(fake, "cuGraphAddMemcpyNode")[3],)
    assert d.cuGraphMemcpyNodeGetParams(1) == want


def test_set_node_parameters_go_in_and_come_out(d: CudaDriver, fake: FakeBindings) -> None:
    d.cuGraphAddMemsetNode(5, [], MemsetNodeParams(0x1000, -1, 4, 12), 6)
    fake.answers["cuGraphMemsetNodeGetParams"] = (_last(fake, "cuGraphAddMemsetNode")[3],)
    assert d.cuGraphMemsetNodeGetParams(1) == MemsetNodeParams(0x1000, 0xFFFFFFFF, 4, 12)


def test_an_early_start_is_found_on_the_edge_that_a_capture_leaves_it_on(
    d: CudaDriver, fake: FakeBindings
) -> None:
    call = "cuGraphNodeGetDependencies"
    call += "_v2" if hasattr(real, call + "_v2") else ""
    for kinds in ((), (0,), (0, 0), (1,), (0, 1)):
        edges = [SimpleNamespace(type=kind) for kind in kinds]

        def before(node: int, n: int, edges: list[Any] = edges) -> tuple[Any, ...]:
            return ([real.CUgraphNode(1)] * n, edges[:n], len(edges))

        fake.answers[call] = before
        assert d._is_programmatic(7) is (1 in kinds), kinds


def test_programmatic_edges_cannot_be_added_by_hand(d: CudaDriver, fake: FakeBindings) -> None:
    with pytest.raises(errors.InvalidArgument, match="capturing"):
        d.cuGraphAddKernelNode(1, [], KernelNodeParams(1, (1, 1, 1), (1, 1, 1), 0, (), True))
    assert not [c for c, _ in fake.calls if c == "cuGraphAddKernelNode"]


@pytest.mark.parametrize("modern", [True, False])
def test_nodes_edges_and_capture_info(modern: bool) -> None:
    """Bindings 12.9 have a name of its own for the form with edge data, 13 the plain one."""
    fake = FakeBindings()
    with_data = hasattr(real, "cuGraphGetEdges_v2") and modern
    edges = "cuGraphGetEdges_v2" if with_data else "cuGraphGetEdges"
    info = "cuStreamGetCaptureInfo_v3" if with_data else "cuStreamGetCaptureInfo"
    if not modern:
        fake.missing |= {"cuGraphGetEdges_v2", "cuStreamGetCaptureInfo_v3"}
    node = real.CUgraphNode

    def get_edges(graph: int, n: int) -> tuple[Any, ...]:
        if n == 0:
            return ([], [], [], 2)
        return ([node(1), node(2)], [node(3), node(4)], [None, None], 2)

    def get_nodes(graph: int, n: int) -> tuple[Any, ...]:
        return ([node(1), node(2)] if n else [], 2)

    fake.answers[edges] = get_edges
    fake.answers["cuGraphGetNodes"] = get_nodes
    fake.answers[info] = (
        real.CUstreamCaptureStatus(1), 77, real.CUgraph(0x500), [node(2)], [None], 1
    )  # fmt: skip
    d = CudaDriver(fake)
    assert d.cuGraphGetNodes(9) == [1, 2]
    assert d.cuGraphGetEdges(9) == [(1, 3), (2, 4)]
    assert d.cuStreamGetCaptureInfo(9) == CaptureInfo(CaptureStatus.ACTIVE, 77, 0x500, (2,))
    fake.answers[info] = (real.CUstreamCaptureStatus(2), 0, real.CUgraph(0), [], [], 0)
    assert d.cuStreamGetCaptureInfo(9) == CaptureInfo(CaptureStatus.INVALIDATED)
    fake.answers["cuGraphGetNodes"] = ([], 0)
    assert d.cuGraphGetNodes(9) == []


def test_update_tells_the_reason_and_the_node(d: CudaDriver, fake: FakeBindings) -> None:
    assert d.cuGraphExecUpdate(1, 2).ok
    for reason, word in ((2, "TOPOLOGY_CHANGED"), (3, "NODE_TYPE_CHANGED"), (8, "ATTRIBUTES")):
        fake.update = (910, reason, 0x700)
        got = d.cuGraphExecUpdate(1, 2)
        assert (got.ok, got.node) == (False, 0x700) and got.reason.startswith(word)
    fake.update = (400, 0, 0)
    with pytest.raises(errors.InvalidArgument) as caught:
        d.cuGraphExecUpdate(1, 2)
    assert caught.value.result == "CUDA_ERROR_INVALID_HANDLE"
    names = {int(r): r.name for r in real.CUgraphExecUpdateResult}
    for number in range(1, 9):
        fake.update = (910, number, 0)
        word = d.cuGraphExecUpdate(1, 2).reason.split(":")[0]
        assert names[number].endswith(word), (number, word)


def test_entry_points_are_looked_up_once(d: CudaDriver, fake: FakeBindings) -> None:
    a = d.entry_point("cuLaunchKernel")
    assert a == d.entry_point("cuLaunchKernel") == 0xABC0 + len("cuLaunchKernel")
    calls = [args for c, args in fake.calls if c == "cuGetProcAddress"]
    assert calls == [(b"cuLaunchKernel", 12000, 0)]
    fake.answers["cuGetProcAddress"] = (0, None)
    with pytest.raises(errors.InvalidArgument, match="no such function"):
        d.entry_point("cuNothing")


def test_counts_of_native_code_are_added(d: CudaDriver) -> None:
    d.cuMemGetInfo()
    d.add_count_source(lambda: {"cuLaunchKernel": 5, "cuMemGetInfo": 1})
    counts = d.counts()
    assert counts["cuLaunchKernel"] == 5 and counts["cuMemGetInfo"] == 2 and counts["cuInit"] == 1


def test_the_name_is_cut_at_the_end(d: CudaDriver) -> None:
    assert d.cuDeviceGetName(0) == "Fake GPU"
