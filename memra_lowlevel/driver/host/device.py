# ruff: noqa: D102  (the methods are the driver API, described there)
"""The host driver: library and device calls, entry points for native code."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

from ...errors import MemraError
from .. import explain
from ..calls import driver_call, result_of
from ..table import DeviceAttribute
from .graphs import HostGraphs
from .options import current_options

__all__ = ["HostDriver"]

_P, _U, _S = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
    "cuGraphLaunch": (_P, _P),
    "cuStreamSynchronize": (_P,),
    "cuEventRecord": (_P, _P),
    "cuStreamWaitEvent": (_P, _P, _U),
    "cuMemcpyHtoDAsync": (_P, _P, _S, _P),
    "cuMemcpyDtoHAsync": (_P, _P, _S, _P),
    "cuMemcpyDtoDAsync": (_P, _P, _S, _P),
    "cuMemsetD32Async": (_P, _U, _S, _P),
}


class HostDriver(HostGraphs):
    """CUDA's call surface on the CPU.

    Pointers are real addresses of guarded memory. Work waits in queues and runs at
    synchronisation in an order that only events and streams fix, see
    :func:`~memra_lowlevel.driver.host.host_options`. Errors of kernels are raised by the
    synchronising call and leave the device usable.

    Attributes
    ----------
    kind : str
        ``"host"``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: dict[str, object] = {}
        self._initialised = False

    # -- library and devices -------------------------------------------------------------------
    @driver_call
    def cuInit(self) -> None:
        self._initialised = True

    @driver_call
    def cuDriverGetVersion(self) -> int:
        return 12090

    @driver_call
    def cuDeviceGetCount(self) -> int:
        return len(self._contexts)

    @driver_call
    def cuDeviceGet(self, ordinal: int) -> int:
        return self._device_of(ordinal, "cuDeviceGet").device

    @driver_call
    def cuDeviceGetName(self, device: int) -> str:
        self._device_of(device, "cuDeviceGetName")
        return f"host CPU ({platform.machine()})"

    @driver_call
    def cuDeviceGetAttribute(self, attribute: DeviceAttribute, device: int) -> int:
        self._device_of(device, "cuDeviceGetAttribute")
        return self.limits[DeviceAttribute(attribute)]

    @driver_call
    def cuDeviceTotalMem(self, device: int) -> int:
        self._device_of(device, "cuDeviceTotalMem")
        return current_options().memory_bytes

    @driver_call
    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        ctx = self._device_of(device, "cuDevicePrimaryCtxRetain")
        ctx.retained += 1
        return ctx.handle

    @driver_call
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        call = "cuDevicePrimaryCtxRelease"
        ctx = self._device_of(device, call)
        if ctx.retained == 0:
            raise self._error("CUDA_ERROR_INVALID_CONTEXT", call, "it was not retained")
        ctx.retained -= 1
        if ctx.retained == 0:
            self._finish_device(ctx.device)
            self._trim(ctx.device, 0)

    @driver_call
    def cuCtxSetCurrent(self, ctx: int) -> None:
        self._thread.ctx = (
            self._find(self._by_context, ctx, "cuCtxSetCurrent", "context") if ctx else None
        )

    @driver_call
    def cuCtxGetCurrent(self) -> int:
        ctx = self._thread.ctx
        return ctx.handle if ctx is not None else 0

    @driver_call
    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return (0, -5)

    # -- native callers ------------------------------------------------------------------------
    def entry_point(self, name: str) -> int:
        """Address of a function with the C signature of ``name``.

        It is not counted and not traced here: its caller does both. When it returns an error,
        :meth:`error_from` gives the whole exception, on the same thread.
        """
        with self._lock:
            if name not in self._callbacks:
                signature = _SIGNATURES.get(name)
                if signature is None:
                    raise self._error(
                        "CUDA_ERROR_NOT_FOUND", "entry_point",
                        f"{name} has no entry point; there are {', '.join(_SIGNATURES)}",
                    )  # fmt: skip
                prototype = ctypes.CFUNCTYPE(ctypes.c_int, *signature)
                self._callbacks[name] = prototype(self._guarded(self._native_body(name)))
            address = ctypes.cast(self._callbacks[name], _P).value  # type: ignore[arg-type]
        assert address is not None
        return address

    def error_from(self, code: int, call: str, stream: int = 0, kernel: int = 0) -> MemraError:
        """Return the exception behind a code that an entry point gave this thread."""
        error, self._thread.error = self._thread.error, None
        if error is not None:
            return error
        return super().error_from(code, call, stream, kernel)

    def _native_body(self, name: str) -> Callable[..., None]:
        if name == "cuLaunchKernel":

            def launch(
                f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
                shared: int, stream: int | None, params: int | None, _extra: int | None,
            ) -> None:  # fmt: skip
                self._launch(
                    name, f or 0, (gx, gy, gz), (bx, by, bz), shared, stream or 0, params or 0
                )

            return launch
        if name == "cuGraphLaunch":
            return lambda exec_, stream: self._launch_graph(exec_ or 0, stream or 0)
        method = getattr(type(self), name).__wrapped__
        n = len(_SIGNATURES[name]) - (1 if name == "cuStreamWaitEvent" else 0)
        return lambda *args: method(self, *(a or 0 for a in args[:n]))

    def _guarded(self, body: Callable[..., None]) -> Callable[..., int]:
        def call(*args: int | None) -> int:
            try:
                with self._lock:
                    body(*args)
            except MemraError as error:
                self._thread.error = error
                return explain.result_code(result_of(error))
            except Exception as error:
                self._thread.error = MemraError(f"host device: {type(error).__name__}: {error}")
                return 999
            return 0

        return call
