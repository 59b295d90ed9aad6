# ruff: noqa: D102  (the methods are the driver API, described there)
"""Modules, kernels and launches of the host device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from ..calls import driver_call
from ..table import (
    DeviceAttribute,
    Dim3,
    FuncAttribute,
    KernelNodeParams,
    LaunchAttributes,
    NodeType,
)
from . import runner
from .options import current_options
from .streams import HostStreams
from .views import Given, View, Views, given, still_closed

__all__ = ["HostFunction", "HostModules", "KernelWork"]

_POINTER = ctypes.sizeof(ctypes.c_void_p)


@dataclass(eq=False)
class HostModule:
    """A loaded kernel library."""

    handle: int
    native: Any
    check: bool = False
    functions: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class HostFunction:
    """A kernel: its native handle and the layout of its parameters."""

    handle: int
    name: str
    module: HostModule
    native: Any
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    max_threads: int
    shared_bytes: int = 0
    settings: dict[FuncAttribute, int] = field(default_factory=dict)
    accepted: set[tuple[Dim3, Dim3, int]] = field(default_factory=set)


def _natural_offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Offsets of parameters that are aligned to their size (at most 16), as on the device."""
    offsets, at = [], 0
    for size in sizes:
        align = min(16, size & -size) if size else 1
        at = -(-at // align) * align
        offsets.append(at)
        at += size
    return tuple(offsets)


class KernelWork:
    """A kernel with a copy of its parameter values."""

    __slots__ = ("_given", "_keep", "_pointers", "func", "label", "params", "serial")
    node_type = NodeType.KERNEL

    def __init__(self, func: HostFunction, params: KernelNodeParams, given: Given | None):
        self.func, self.params, self._given = func, params, given
        self.label = func.name
        self.serial = 0
        n = len(params.params)
        self._keep = [ctypes.create_string_buffer(p, len(p)) for p in params.params]
        self._pointers = (ctypes.c_void_p * max(1, n))(*(ctypes.addressof(b) for b in self._keep))

    def run(self) -> None:
        """Run all blocks of the grid."""
        o, p = current_options(), self.params
        self.serial += 1
        check = self.func.module.check
        closed = still_closed(self._given) if self._given else []
        runner.run(
            self.func.native,
            p.grid,
            p.block,
            p.shared_bytes,
            ctypes.addressof(self._pointers),
            order=o.thread_order,
            seed=o.seed + self.serial,
            workers=1 if check else o.workers,
            check=check,
            seconds=o.kernel_seconds,
            fences=closed,
        )


class HostModules(HostStreams):
    """Loading and launching."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: dict[int, HostModule] = {}
        self._functions: dict[int, HostFunction] = {}
        self._views = Views()

    def note_view(self, view: View) -> None:
        """Hear of a buffer or a part of one; kept where kernels are checked."""
        if self._views.on or current_options().check:
            self._views.note(view)

    @driver_call
    def cuModuleLoadData(self, image: bytes) -> int:
        call = "cuModuleLoadData"
        self._gate(call)
        self._ctx(call)
        try:
            path = Path(image.rstrip(b"\0").decode("utf-8"))
            known = path.is_file()
        except (UnicodeDecodeError, ValueError, OSError):
            known = False
        if not known:
            raise self._error(
                "CUDA_ERROR_INVALID_IMAGE",
                call,
                "a host image is the path of a kernel library, and these bytes name no file",
            )
        try:
            native = runner.load(path)
        except InvalidArgument as error:
            raise self._error(error.result, call, str(error)) from error
        module = HostModule(self._new_handle(), native, runner.module_flags(native)["check"])
        self._views.on |= module.check
        self._modules[module.handle] = module
        return module.handle

    @driver_call
    def cuModuleUnload(self, module: int) -> None:
        call = "cuModuleUnload"
        self._gate(call)
        found = self._find(self._modules, module, call, "module")
        for ctx in self._contexts:
            self._finish_device(ctx.device)
        for handle in found.functions.values():
            self._functions.pop(handle, None)
            self._names.pop(handle, None)
        del self._modules[module]
        if not self._in_use(found):
            runner.unload(found.native)

    @driver_call
    def cuModuleGetFunction(self, module: int, name: str) -> int:
        call = "cuModuleGetFunction"
        found = self._find(self._modules, module, call, "module")
        if name in found.functions:
            return found.functions[name]
        try:
            native = runner.get_function(found.native, name)
        except InvalidArgument as error:
            raise self._error(error.result, call, str(error)) from error
        sizes = tuple(int(s) for s in runner.param_sizes(native))
        func = HostFunction(
            self._new_handle(),
            name,
            found,
            native,
            sizes,
            _natural_offsets(sizes),
            runner.max_threads(native),
            runner.static_shared_bytes(native),
        )
        found.functions[name] = func.handle
        self._functions[func.handle] = func
        self._names.setdefault(func.handle, name)
        return func.handle

    def _in_use(self, module: HostModule) -> bool:
        """Whether a graph or an executable graph still holds kernels of a module."""
        return any(
            isinstance(n.work, KernelWork) and n.work.func.module is module
            for n in self._nodes.values()
        )

    def _func(self, handle: int, call: str) -> HostFunction:
        return self._find(self._functions, handle, call, "kernel")

    @driver_call
    def cuFuncGetAttribute(self, attribute: FuncAttribute, func: int) -> int:
        f = self._func(func, "cuFuncGetAttribute")
        default = {
            FuncAttribute.MAX_THREADS_PER_BLOCK: f.max_threads,
            FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES: 48 << 10,
            FuncAttribute.SHARED_SIZE_BYTES: f.shared_bytes,
        }
        return f.settings.get(attribute, default.get(attribute, 0))

    @driver_call
    def cuFuncSetAttribute(self, func: int, attribute: FuncAttribute, value: int) -> None:
        call = "cuFuncSetAttribute"
        f = self._func(func, call)
        if attribute == FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES:
            limit = self.limits[DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN]
            if not 0 <= value <= limit:
                raise self._error(
                    "CUDA_ERROR_INVALID_VALUE", call,
                    f"{value} bytes of shared memory, at most {limit}", kernel=func,
                )  # fmt: skip
        elif attribute != FuncAttribute.NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call, f"{attribute!r} cannot be set", kernel=func
            )
        f.settings[attribute] = value
        f.accepted.clear()

    @driver_call
    def cuFuncGetParamInfo(self, func: int, index: int) -> tuple[int, int] | None:
        f = self._func(func, "cuFuncGetParamInfo")
        if 0 <= index < len(f.sizes):
            return f.offsets[index], f.sizes[index]
        return None

    @driver_call
    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, func: int, block_threads: int, shared_bytes: int
    ) -> int:
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        f = self._func(func, call)
        if not 1 <= block_threads <= 1024:
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"{block_threads} threads a block")
        by_threads = 2048 // (-(-block_threads // 32) * 32)
        shared = self.limits[DeviceAttribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR]
        if shared_bytes > f.settings.get(FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, 48 << 10):
            return 0
        by_shared = shared // (shared_bytes + 1024)
        return int(min(32, by_threads, by_shared))

    # -- launches ------------------------------------------------------------------------------
    def _kernel_work(self, call: str, params: KernelNodeParams) -> KernelWork:
        """Check a launch against the limits that a GPU has, and copy its values."""
        f = self._func(params.func, call)
        shape = (params.grid, params.block, params.shared_bytes)
        if shape not in f.accepted:
            self._check_shape(call, f, params)
            f.accepted.add(shape)
        sizes = tuple(len(p) for p in params.params)
        if sizes != f.sizes:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"parameters of {sizes} bytes, the kernel takes {f.sizes}", kernel=params.func,
            )  # fmt: skip
        found = given(params.params, self._views, self._block_at) if f.module.check else None
        return KernelWork(f, params, found)

    def _check_shape(self, call: str, f: HostFunction, params: KernelNodeParams) -> None:
        """Refuse a grid, block or shared memory that a GPU would refuse."""
        lim = self.limits
        A = DeviceAttribute
        bounds = (
            (params.grid, (A.MAX_GRID_DIM_X, A.MAX_GRID_DIM_Y, A.MAX_GRID_DIM_Z), "grid"),
            (params.block, (A.MAX_BLOCK_DIM_X, A.MAX_BLOCK_DIM_Y, A.MAX_BLOCK_DIM_Z), "block"),
        )
        for dims, attributes, what in bounds:
            for value, attribute in zip(dims, attributes, strict=True):
                if not 1 <= value <= lim[attribute]:
                    raise self._error(
                        "CUDA_ERROR_INVALID_VALUE", call,
                        f"{what} {tuple(dims)}: each extent is at least 1 and within "
                        f"{tuple(lim[a] for a in attributes)}",
                        kernel=params.func,
                    )  # fmt: skip
        threads = params.block[0] * params.block[1] * params.block[2]
        if threads > f.max_threads:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"{threads} threads a block, at most {f.max_threads}",
                kernel=params.func,
            )  # fmt: skip
        shared_limit = f.settings.get(
            FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, lim[A.MAX_SHARED_MEMORY_PER_BLOCK]
        )
        shared_limit = max(shared_limit, lim[A.MAX_SHARED_MEMORY_PER_BLOCK])
        if not 0 <= params.shared_bytes <= shared_limit:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"{params.shared_bytes} bytes of dynamic shared memory, at most {shared_limit}; "
                "raise MAX_DYNAMIC_SHARED_SIZE_BYTES of the kernel first",
                kernel=params.func,
            )  # fmt: skip

    def _launch(
        self,
        call: str,
        func: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream: int,
        params: int,
        programmatic: bool = False,
    ) -> None:
        st = self._stream(stream, call)
        f = self._func(func, call)
        n = len(f.sizes)
        values: tuple[bytes, ...] = ()
        if n:
            if params == 0:
                raise self._error(
                    "CUDA_ERROR_INVALID_VALUE", call, f"no parameters given, {n} needed",
                    kernel=func,
                )  # fmt: skip
            pointers = (ctypes.c_void_p * n).from_address(params)
            values = tuple(
                ctypes.string_at(p, size) for p, size in zip(pointers, f.sizes, strict=True)
            )
        node = KernelNodeParams(func, grid, block, shared_bytes, values, programmatic)
        self._submit(call, st, self._kernel_work(call, node))

    @driver_call
    def cuLaunchKernel(
        self, func: int, grid: Dim3, block: Dim3, shared_bytes: int, stream: int, params: int
    ) -> None:
        self._launch("cuLaunchKernel", func, grid, block, shared_bytes, stream, params)

    @driver_call
    def cuTensorMapEncodeTiled(
        self, address: int, n_rows: int, row_bytes: int, box_rows: int, box_bytes: int
    ) -> bytes:
        raise self._error(
            "CUDA_ERROR_NOT_SUPPORTED",
            "cuTensorMapEncodeTiled",
            "the host device has no tile copies",
        )

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
        call = "cuLaunchKernelEx"
        if attributes.cooperative or attributes.cluster not in (None, (1, 1, 1)):
            raise self._error(
                "CUDA_ERROR_NOT_SUPPORTED", call,
                "the host device has no clusters and no cooperative launches", kernel=func,
            )  # fmt: skip
        self._launch(call, func, grid, block, shared_bytes, stream, params, attributes.programmatic)
