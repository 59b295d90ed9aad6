"""The host runtime through ctypes: loading kernel files, device memory, running launches.

This is the lowest layer of the host device. It knows no streams and no contexts: :func:`run` runs a
launch to its end on the calling thread (and ``workers - 1`` others), one at a time per process.
All pointers are real addresses. Memory from :func:`alloc` ends at a guard page and starts as 0xFF
bytes. Whoever writes such memory from outside a kernel tells :func:`note_write` (or uses
:func:`copy_in`, :func:`fill`, :func:`copy`), or check mode takes the bytes for uninitialised.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ... import errors
from .build import Sanitizer, runtime_library
from .options import KERNEL_SECONDS
from .quick import quick
from .reports import Failure, translate
from .views import Fence

__all__ = [
    "Order",
    "alloc",
    "alloc_size",
    "copy",
    "copy_in",
    "copy_out",
    "enable_check",
    "fill",
    "free",
    "function_names",
    "get_function",
    "load",
    "max_threads",
    "module_flags",
    "note_copy",
    "note_write",
    "param_sizes",
    "quick",
    "run",
    "static_shared_bytes",
    "unload",
]

Order = Literal["forward", "reverse", "random"]
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
MAX_SHARED_BYTES = 227 * 1024
MAX_THREADS = 1024
_LONGEST = 1e8  # seconds that a clock in nanoseconds can add
Dim = int | tuple[int, ...]


class _Options(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_uint32),
        ("n_workers", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("strict", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("seconds", ctypes.c_double),
        ("n_fences", ctypes.c_uint64),
        ("fences", ctypes.c_void_p),
    )


_P, _U32, _U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "memra_alloc": (_U64, (_U64, _U64)),
    "memra_free": (ctypes.c_int, (_U64,)),
    "memra_alloc_size": (ctypes.c_int64, (_U64,)),
    "memra_live_bytes": (_U64, ()),
    "memra_check_enable": (ctypes.c_int, ()),
    "memra_note_write": (None, (_U64, _U64)),
    "memra_note_copy": (None, (_U64, _U64, _U64)),
    "memra_module_load": (_P, (ctypes.c_char_p, ctypes.c_char_p, _U32)),
    "memra_module_unload": (None, (_P,)),
    "memra_module_flags": (_U32, (_P,)),
    "memra_module_n_functions": (_U32, (_P,)),
    "memra_module_function": (_P, (_P, _U32)),
    "memra_function_name": (ctypes.c_char_p, (_P,)),
    "memra_function_shared_bytes": (_U64, (_P,)),
    "memra_function_n_params": (_U32, (_P,)),
    "memra_function_max_threads": (_U32, (_P,)),
    "memra_function_param_sizes": (ctypes.POINTER(_U32), (_P,)),
    "memra_run": (ctypes.c_int, (_P, _P, _P, _U32, _P, _P, _P)),
}


@functools.lru_cache(maxsize=1)
def runtime() -> ctypes.CDLL:
    """Build the runtime if need be and load it."""
    library = ctypes.CDLL(str(runtime_library(sanitize=_process_sanitizer())))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


def _process_sanitizer() -> Sanitizer | None:
    """Return ``"address"`` in a process that was started with ASan's library preloaded."""
    return "address" if hasattr(ctypes.CDLL(None), "__asan_init") else None


# ---- memory ------------------------------------------------------------------------------------


def alloc(n_bytes: int, align: int = 16) -> int:
    """Allocate device memory, filled with 0xFF bytes.

    The last byte stands against a guard page but for ``-n_bytes % align`` bytes of slack, which are
    watched when the memory is freed.

    Parameters
    ----------
    n_bytes : int
    align : int
        A power of two up to 4096.

    Returns
    -------
    int
        The address.

    Raises
    ------
    OutOfMemory
    """
    ptr = runtime().memra_alloc(n_bytes, align)
    if not ptr:
        raise errors.OutOfMemory(
            f"the host device cannot allocate {n_bytes} bytes", call="alloc", code=2,
            result="CUDA_ERROR_OUT_OF_MEMORY",
        )  # fmt: skip
    return int(ptr)


def free(ptr: int) -> None:
    """Free memory of :func:`alloc`; its addresses stay forbidden for a while.

    Raises
    ------
    InvalidArgument
        ``ptr`` is not the begin of a live allocation.
    OutOfBounds
        Bytes beside the allocation were overwritten (the memory is freed all the same).
    """
    size = alloc_size(ptr)
    state = runtime().memra_free(ptr)
    if state < 0:
        raise errors.InvalidArgument(
            f"0x{ptr:x} is not the begin of a live allocation of the host device", call="free",
            code=1, result="CUDA_ERROR_INVALID_VALUE",
        )  # fmt: skip
    if state > 0:
        raise errors.OutOfBounds(
            f"bytes right beside the buffer of {size} bytes at 0x{ptr:x} were overwritten by some "
            "kernel or copy. Run the kernels in check mode to find which."
        )


def alloc_size(ptr: int) -> int:
    """Size in bytes of the live allocation that begins at ``ptr``; -1 where none does."""
    return int(runtime().memra_alloc_size(ptr))


def live_bytes() -> int:
    """Bytes in live allocations."""
    return int(runtime().memra_live_bytes())


def enable_check() -> None:
    """Track which bytes are initialised, for memory that is allocated from now on.

    Loading a checked module calls it; so does allocating while ``host_options(check=True)`` holds.
    Memory that is older counts as initialised. A launch without ``check`` in between does not write
    where the tracking can see it, so it makes all memory of that time count as initialised.

    Raises
    ------
    OutOfMemory
        There is not enough address space for the shadow memory.
    """
    if not runtime().memra_check_enable():
        raise errors.OutOfMemory(
            "no address space for the shadow of check mode; is there a limit on virtual memory "
            "(ulimit -v)?", call="enable_check", code=2, result="CUDA_ERROR_OUT_OF_MEMORY",
        )  # fmt: skip


def note_write(ptr: int, n_bytes: int) -> None:
    """Tell check mode that these bytes were written from outside a kernel."""
    runtime().memra_note_write(ptr, n_bytes)


def note_copy(dst: int, src: int, n_bytes: int) -> None:
    """Tell check mode of a copy between device addresses: what was uninitialised stays so."""
    runtime().memra_note_copy(dst, src, n_bytes)


def copy_in(ptr: int, array: npt.NDArray[Any]) -> None:
    """Write a C-contiguous array to device memory."""
    data = np.ascontiguousarray(array)
    ctypes.memmove(ptr, data.ctypes.data, data.nbytes)
    note_write(ptr, data.nbytes)


def copy_out(array: npt.NDArray[Any], ptr: int) -> None:
    """Read device memory into a C-contiguous array."""
    ctypes.memmove(array.ctypes.data, ptr, array.nbytes)


def copy(dst: int, src: int, n_bytes: int) -> None:
    """Copy between device addresses."""
    ctypes.memmove(dst, src, n_bytes)
    note_copy(dst, src, n_bytes)


def fill(ptr: int, byte: int, n_bytes: int) -> None:
    """Set device memory to a byte."""
    ctypes.memset(ptr, byte, n_bytes)
    note_write(ptr, n_bytes)


# ---- modules -----------------------------------------------------------------------------------


def load(path: str | Path | bytes) -> int:
    """Load a library of :func:`memra_lowlevel.driver.host.cxx.compile_host`; returns a handle.

    Raises
    ------
    InvalidArgument
        The file cannot be loaded, or is no kernel library of this version.
    """
    raw = path if isinstance(path, bytes) else str(path).encode()
    error = ctypes.create_string_buffer(1024)
    module = runtime().memra_module_load(raw, error, len(error))
    if not module:
        raise errors.InvalidArgument(
            f"cannot load the kernel library: {error.value.decode(errors='replace')}",
            call="load", code=200, result="CUDA_ERROR_INVALID_IMAGE",
        )  # fmt: skip
    return int(module)


def unload(module: int) -> None:
    """Unload a module; its functions must not be used any more."""
    runtime().memra_module_unload(module)


def module_flags(module: int) -> dict[str, bool]:
    """How the module was compiled: ``check``, ``address``, ``undefined``."""
    flags = runtime().memra_module_flags(module)
    return {"check": bool(flags & 1), "address": bool(flags & 2), "undefined": bool(flags & 4)}


def function_names(module: int) -> list[str]:
    """Names of the kernels of a module."""
    rt = runtime()
    n = rt.memra_module_n_functions(module)
    return [rt.memra_function_name(rt.memra_module_function(module, i)).decode() for i in range(n)]


def get_function(module: int, name: str) -> int:
    """Handle of a kernel by name, or by its name expression for an instance of a template.

    Raises
    ------
    InvalidArgument
        There is no such kernel; the message lists those that are there.
    """
    rt = runtime()
    names = function_names(module)
    if name not in names:
        raise errors.InvalidArgument(
            f"the module has no kernel {name!r}; it has: {', '.join(names) or 'none'}",
            call="get_function", code=500, result="CUDA_ERROR_NOT_FOUND",
        )  # fmt: skip
    return int(rt.memra_module_function(module, names.index(name)))


def param_sizes(func: int) -> tuple[int, ...]:
    """Sizes in bytes of the parameters of a kernel."""
    rt = runtime()
    sizes = rt.memra_function_param_sizes(func)
    return tuple(int(sizes[i]) for i in range(rt.memra_function_n_params(func)))


def max_threads(func: int) -> int:
    """Most threads of a block of a kernel: its ``__launch_bounds__`` where they say less."""
    return min(MAX_THREADS, int(runtime().memra_function_max_threads(func)) or MAX_THREADS)


def static_shared_bytes(func: int) -> int:
    """Bytes of the ``__shared__`` arrays that a kernel may use."""
    return int(runtime().memra_function_shared_bytes(func))


# ---- launches ----------------------------------------------------------------------------------

_Dim3 = ctypes.c_uint32 * 3


@functools.lru_cache(maxsize=4096)
def _dim3(value: Dim) -> ctypes.Array[ctypes.c_uint32]:
    dims = (value,) if isinstance(value, int) else tuple(value)
    return _Dim3(*(*dims, 1, 1)[:3])


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.failure = Failure()
        self.address = ctypes.addressof(self.failure)


_per_thread = _PerThread()


def run(
    func: int,
    grid: Dim,
    block: Dim,
    shared_bytes: int,
    params_address: int,
    *,
    order: Order = "forward",
    seed: int = 0,
    workers: int = 1,
    check: bool = False,
    strict: bool = True,
    seconds: float = KERNEL_SECONDS,
    fences: Sequence[Fence] = (),
) -> None:
    """Run a launch to its end.

    Parameters
    ----------
    func : int
        Handle from :func:`get_function`.
    grid, block : int or tuple of int
        Up to three dimensions; at most 1024 threads per block.
    shared_bytes : int
        Dynamic shared memory.
    params_address : int
        Address of an array of pointers to the parameter values, as for ``cuLaunchKernel``.
    order : {"forward", "reverse", "random"}
        In which order blocks and threads run; ``seed`` picks the random one.
    workers : int
        OS threads that run blocks. Check mode uses one.
    check : bool
        Needs a module compiled with ``check=True``.
    strict : bool
        Whether a thread that returned makes a later barrier an error.
    seconds : float
        Time that the launch may take; ``math.inf`` is no limit.
    fences : sequence of Fence
        With ``check``: parts of allocations of which nothing else may be touched.

    Raises
    ------
    HostCheckError
        One of its kinds: the kernel did something wrong. Memory keeps what was written before;
        everything stays usable.
    LaunchLimit
        The launch was refused; nothing ran.
    """
    limit = min(seconds, _LONGEST) if seconds < math.inf else 0.0
    rows = [(f.block.ptr, f.block.n_bytes, f.begin, f.end, f.parameter) for f in fences]
    table = (ctypes.c_uint64 * (5 * len(rows)))(*(word for row in rows for word in row))
    options = _Options(
        ORDERS[order], workers, seed & 0xFFFFFFFFFFFFFFFF, strict, check, limit, len(rows),
        ctypes.addressof(table),
    )  # fmt: skip
    kind = runtime().memra_run(
        func, _dim3(grid), _dim3(block), shared_bytes, params_address,
        ctypes.byref(options), _per_thread.address,
    )  # fmt: skip
    if kind:
        raise translate(_per_thread.failure)


def cuda_src() -> Path:
    """Folder of the kernel sources of this library."""
    here = Path(__file__).resolve().parents[2]
    for candidate in (here / "cuda_src", here.parent / "cuda_src"):
        if (candidate / "common" / "device.cuh").is_file():
            return candidate
    raise errors.HeaderNotFound("cuda_src/common/device.cuh was not found", name="device.cuh")
