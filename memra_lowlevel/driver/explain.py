"""Driver results in our own words: which exception, the likely cause, and what to do.

The one place that knows the numbers of ``CUresult``; both drivers make their errors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import (
    CaptureError,
    CaptureForbidden,
    CaptureInvalidated,
    CaptureUnjoined,
    CaptureWrongThread,
    DriverError,
    DriverNotFound,
    IllegalAddress,
    InvalidArgument,
    LaunchFailed,
    MemraError,
    NotReady,
    OutOfMemory,
    ToolkitMismatch,
    UpdateRefused,
)

__all__ = [
    "EXPLANATIONS",
    "RESULT_CODES",
    "Explanation",
    "explain",
    "is_capture_result",
    "make_error",
    "result_code",
    "result_name",
    "short",
]


@dataclass(frozen=True)
class Explanation:
    """What a result means.

    Attributes
    ----------
    code : int
        Number in ``CUresult``.
    error : type
        Class of the exception that stands for it.
    what, cause, remedy : str
        One clause each: what happened, what usually leads to it, what to do.
    """

    code: int
    error: type[MemraError]
    what: str
    cause: str
    remedy: str


_ASYNC = (
    "it belongs to work that was launched earlier, not to this call; "
    "rerun under debug.DebugSession, which synchronises after each launch"
)
_NEW_PROCESS = "the context is lost: start a new process"


def _e(code: int, error: type[MemraError], what: str, cause: str, remedy: str) -> Explanation:
    return Explanation(code, error, what, cause, remedy)


EXPLANATIONS: dict[str, Explanation] = {
    "CUDA_ERROR_INVALID_VALUE": _e(
        1, InvalidArgument, "a value is out of range",
        "a size, pointer or flag does not fit the call, often a pointer that was freed already",
        "check the sizes and that every buffer is still open",
    ),
    "CUDA_ERROR_OUT_OF_MEMORY": _e(
        2, OutOfMemory, "no memory is left",
        "live buffers, cached pool memory and graphs with memory nodes together fill the device",
        "close buffers, trim the pool, or plan a smaller arena",
    ),
    "CUDA_ERROR_NOT_INITIALIZED": _e(
        3, DriverError, "the driver is not initialised", "cuInit was not called in this process",
        "open a Device first; after a fork, start the child with the spawn method",
    ),
    "CUDA_ERROR_DEINITIALIZED": _e(
        4, DriverError, "the driver is shutting down", "a call was made while the process exits",
        "close devices and buffers before the interpreter ends",
    ),
    "CUDA_ERROR_STUB_LIBRARY": _e(
        34, DriverNotFound, "the library found is a link-time stub, not a driver",
        "a toolkit's stubs directory stands before the real driver in the search path",
        "remove the stubs directory from LD_LIBRARY_PATH",
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": _e(
        46, DriverError, "the device is busy or in exclusive use",
        "another process holds it in exclusive mode", "end that process or take another device",
    ),
    "CUDA_ERROR_NO_DEVICE": _e(
        100, DriverNotFound, "no CUDA device is visible",
        "none is installed, or CUDA_VISIBLE_DEVICES hides them",
        'use Device("host"), or check nvidia-smi and CUDA_VISIBLE_DEVICES',
    ),
    "CUDA_ERROR_INVALID_DEVICE": _e(
        101, InvalidArgument, "there is no such device", "the ordinal is out of range",
        "list the devices with memra-lowlevel doctor",
    ),
    "CUDA_ERROR_INVALID_IMAGE": _e(
        200, InvalidArgument, "the code image cannot be read",
        "the bytes are damaged or are no cubin, PTX or host library",
        "compile again; delete the compile cache if it happens twice",
    ),
    "CUDA_ERROR_INVALID_CONTEXT": _e(
        201, InvalidArgument, "no valid context is current on this thread",
        "the device was closed, or the call came from a thread without a context",
        "keep the Device open as long as its objects",
    ),
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _e(
        209, ToolkitMismatch, "the image holds no code for this GPU",
        "it was compiled for another architecture",
        "compile for the architecture that doctor prints for this device",
    ),
    "CUDA_ERROR_ECC_UNCORRECTABLE": _e(
        214, LaunchFailed, "memory of the device has an uncorrectable error", "failing hardware",
        _NEW_PROCESS + " and have the device checked",
    ),
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": _e(
        217, DriverError, "these devices cannot reach each other's memory",
        "no NVLink or PCIe path between them", "copy through pinned host memory",
    ),
    "CUDA_ERROR_INVALID_PTX": _e(
        218, InvalidArgument, "the driver's compiler refuses the PTX",
        "an instruction the architecture lacks, or a damaged image",
        "compile to a cubin for the exact architecture",
    ),
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": _e(
        220, LaunchFailed, "an NVLink transfer failed", "failing hardware", _NEW_PROCESS,
    ),
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": _e(
        221, ToolkitMismatch, "the driver's PTX compiler is missing",
        "an incomplete driver installation", "compile to a cubin, or reinstall the driver",
    ),
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _e(
        222, ToolkitMismatch, "the PTX is newer than the driver understands",
        "NVRTC is newer than the driver", "compile to a cubin, or install an NVRTC not newer than "
        "the driver",
    ),
    "CUDA_ERROR_FILE_NOT_FOUND": _e(
        301, InvalidArgument, "a file does not exist", "the path is wrong or was deleted",
        "compile again",
    ),
    "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED": _e(
        303, InvalidArgument, "a shared library could not be loaded",
        "it was built for another machine or its dependencies are missing", "compile again",
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": _e(
        304, DriverError, "a call to the operating system failed",
        "limits on memory, files or locked pages", "see ulimit -a and the kernel's log",
    ),
    "CUDA_ERROR_INVALID_HANDLE": _e(
        400, InvalidArgument, "a handle is not valid",
        "the object was closed, belongs to another device, or lacks what the call needs "
        "(an event made without timing has no time)",
        "check that it is still open and was made for this use",
    ),
    "CUDA_ERROR_ILLEGAL_STATE": _e(
        401, InvalidArgument, "the object is not in a state that allows the call",
        "a capture was begun twice on a stream, or ended on a stream that has none",
        "begin and end each capture once; the capture context manager does both",
    ),
    "CUDA_ERROR_NOT_FOUND": _e(
        500, InvalidArgument, "the name does not exist in the module",
        "a kernel name was not lowered, or a template instance was not asked for",
        "ask for it among name_expressions when compiling",
    ),
    "CUDA_ERROR_NOT_READY": _e(
        600, NotReady, "the work has not finished", "it still runs", "synchronise first",
    ),
    "CUDA_ERROR_ILLEGAL_ADDRESS": _e(
        700, IllegalAddress, "a kernel touched memory that it may not touch", _ASYNC,
        "run it on Device('host'), which names block and thread; " + _NEW_PROCESS,
    ),
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": _e(
        701, InvalidArgument, "the launch needs more registers or shared memory than there are",
        "too many threads a block for the kernel's registers, or shared memory above the opt-in",
        "use fewer threads, or raise MAX_DYNAMIC_SHARED_SIZE_BYTES of the kernel",
    ),
    "CUDA_ERROR_LAUNCH_TIMEOUT": _e(
        702, LaunchFailed, "a kernel ran longer than the display watchdog allows", _ASYNC,
        "split the work or use a device without a display; " + _NEW_PROCESS,
    ),
    "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE": _e(
        708, InvalidArgument, "the primary context is in use already",
        "another library initialised it", "open the Device before changing its flags",
    ),
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": _e(
        709, InvalidArgument, "the context was destroyed", "the last Device on it was closed",
        "keep a Device open while its objects live",
    ),
    "CUDA_ERROR_ASSERT": _e(
        710, LaunchFailed, "an assert in a kernel failed", _ASYNC, _NEW_PROCESS,
    ),
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _e(
        714, LaunchFailed, "a kernel's stack is damaged", _ASYNC, _NEW_PROCESS,
    ),
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _e(
        715, LaunchFailed, "a kernel met an illegal instruction", _ASYNC, _NEW_PROCESS,
    ),
    "CUDA_ERROR_MISALIGNED_ADDRESS": _e(
        716, IllegalAddress, "a kernel made a misaligned access",
        "a vector load on an address that is no multiple of its size; " + _ASYNC,
        "align views to 16 bytes; " + _NEW_PROCESS,
    ),
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": _e(
        717, IllegalAddress, "a kernel used an address of the wrong memory space", _ASYNC,
        _NEW_PROCESS,
    ),
    "CUDA_ERROR_INVALID_PC": _e(
        718, LaunchFailed, "a kernel jumped to an invalid place", _ASYNC, _NEW_PROCESS,
    ),
    "CUDA_ERROR_LAUNCH_FAILED": _e(
        719, LaunchFailed, "a kernel stopped with a fault", _ASYNC,
        "run it on Device('host'); " + _NEW_PROCESS,
    ),
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": _e(
        720, InvalidArgument, "a cooperative launch does not fit the device at once",
        "more blocks than can be resident together", "use a smaller grid",
    ),
    "CUDA_ERROR_NOT_PERMITTED": _e(
        800, InvalidArgument, "the operation is not permitted here",
        "the object forbids it, for example destroying a graph owned by a capture",
        "see the call's own rules",
    ),
    "CUDA_ERROR_NOT_SUPPORTED": _e(
        801, InvalidArgument, "this device or driver does not support the operation",
        "an older driver or device, or a virtual machine without it",
        "see what memra-lowlevel doctor says of the device",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": _e(
        802, DriverError, "the system's fabric is not ready", "the fabric manager does not run",
        "start nvidia-fabricmanager",
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": _e(
        803, ToolkitMismatch, "kernel module and driver library have different versions",
        "the driver was updated without a restart", "restart the machine or the container",
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": _e(
        804, ToolkitMismatch, "forward compatibility is not available on this device",
        "a compatibility package on a consumer GPU", "remove the compatibility libraries",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": _e(
        900, CaptureForbidden, "the call is not allowed while a stream is being captured",
        "it would have to wait for, or touch, work that is only being recorded",
        "do it before the capture or after it; take memory from an Arena beforehand",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": _e(
        901, CaptureInvalidated, "the capture was invalidated by an earlier error",
        "a call that captures forbid was made meanwhile",
        "find the first cause, move that call out of the capture, and capture again",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": _e(
        902, CaptureInvalidated, "two captures would have been merged",
        "a stream of one capture waited for an event of another",
        "capture both streams as forks of one capture",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": _e(
        903, CaptureError, "the capture was not begun on this stream",
        "the end was asked of a forked stream", "end it on the stream where it began",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": _e(
        904, CaptureUnjoined, "a forked stream was not joined back",
        "the capture ended before the origin waited for the fork's last event",
        "record an event on the fork and let the origin stream wait for it",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": _e(
        905, CaptureInvalidated, "work inside the capture would depend on work outside it",
        "a captured stream waited for an event recorded outside of the capture",
        "record that event inside the capture, or wait for it before the capture begins",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": _e(
        906, CaptureForbidden, "the call depends on the legacy default stream",
        "a synchronous copy or a blocking stream was used beside a captured blocking stream",
        "create streams as non-blocking and use asynchronous copies from pinned memory",
    ),
    "CUDA_ERROR_CAPTURED_EVENT": _e(
        907, CaptureForbidden, "the event was recorded inside a capture and never occurs by itself",
        "a query or a wait of the host on an event that is only a node's edge",
        "use another event outside of the graph; graphs order themselves",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": _e(
        908, CaptureWrongThread, "the capture was begun by another thread, and is lost now",
        "captures other than relaxed ones end on the thread that began them",
        "end it there, or begin it in relaxed mode",
    ),
    "CUDA_ERROR_TIMEOUT": _e(909, DriverError, "a wait ended without success", "", "try again"),
    "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE": _e(
        910, UpdateRefused, "the executable graph cannot take this change",
        "the new graph has other nodes, edges or kinds of memory",
        "instantiate the new graph instead",
    ),
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": _e(
        912, InvalidArgument, "the cluster does not fit the device or the grid",
        "the grid is no multiple of the cluster, or the cluster is too large",
        "ask for a smaller cluster",
    ),
    "CUDA_ERROR_FUNCTION_NOT_LOADED": _e(
        913, DriverError, "the kernel is not loaded yet", "lazy loading inside a forbidden place",
        "touch the kernel once before the capture",
    ),
    "CUDA_ERROR_UNKNOWN": _e(
        999, DriverError, "the driver gave no reason", "unknown",
        "see the kernel's log for an Xid message",
    ),
}  # fmt: skip

_PLAIN_CODES = {
    "CUDA_SUCCESS": 0,
    "CUDA_ERROR_DEVICE_NOT_LICENSED": 102,
    "CUDA_ERROR_MAP_FAILED": 205,
    "CUDA_ERROR_UNMAP_FAILED": 206,
    "CUDA_ERROR_UNSUPPORTED_LIMIT": 215,
    "CUDA_ERROR_CONTEXT_ALREADY_IN_USE": 216,
    "CUDA_ERROR_JIT_COMPILATION_DISABLED": 223,
    "CUDA_ERROR_CONTAINED": 226,
    "CUDA_ERROR_INVALID_SOURCE": 300,
    "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND": 302,
    "CUDA_ERROR_LOSSY_QUERY": 402,
    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": 704,
    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": 705,
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": 712,
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": 713,
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": 721,
    "CUDA_ERROR_EXTERNAL_DEVICE": 911,
    "CUDA_ERROR_STREAM_DETACHED": 917,
}

RESULT_CODES: dict[str, int] = {
    **_PLAIN_CODES,
    **{name: e.code for name, e in EXPLANATIONS.items()},
}
"""Numbers of the results by name; results missing here are still reported, by number."""

_NAMES = {code: name for name, code in RESULT_CODES.items()}


def result_name(code: int) -> str:
    """Name of a result number; ``CUDA_ERROR_<number>`` for one that is not in the table."""
    return _NAMES.get(code, f"CUDA_ERROR_{code}")


def result_code(name: str) -> int:
    """Return the number of a result; 999 (unknown) for a name that is not in the table."""
    if name in RESULT_CODES:
        return RESULT_CODES[name]
    tail = name.rpartition("_")[2]
    return int(tail) if tail.isdigit() else 999


def short(name: str) -> str:
    """Return a result's name without its prefix."""
    return name.removeprefix("CUDA_ERROR_")


def is_capture_result(name: str) -> bool:
    """Whether a result is one of those that stream capture brings."""
    return 900 <= result_code(name) <= 908


def explain(name: str) -> Explanation:
    """Return the explanation of a result, a plain one if the table has none."""
    found = EXPLANATIONS.get(name)
    if found is not None:
        return found
    return Explanation(
        result_code(name), DriverError, "the driver reported an error",
        "this result has no explanation here", "look it up in the driver API's reference",
    )  # fmt: skip


def make_error(
    result: str,
    call: str,
    detail: str = "",
    *,
    remedy: str = "",
    stream: str | None = None,
    kernel: str | None = None,
    where: str = "",
    recent: Sequence[str] = (),
    cause: str = "",
    versions: tuple[str, str, str] = ("?", "?", "?"),
) -> MemraError:
    """Make the exception for a failed call.

    Parameters
    ----------
    result, call : str
        Name of the result and of the driver call.
    detail : str
        What is known beyond the result, as a clause; it then stands for the likely cause.
    remedy : str
        What to do here, instead of the general remedy.
    stream, kernel : str or None
        Names.
    where : str
        ``file:line`` of the caller's Python line.
    recent : sequence of str
        The trace's last entries.
    cause : str
        The call that invalidated a capture, where known.
    versions : (str, str, str)
        Driver, NVRTC and bindings, for :class:`~memra_lowlevel.errors.ToolkitMismatch`.
    """
    e = explain(result)
    subject = call
    if kernel:
        subject += f" of kernel {kernel!r}"
    if stream:
        subject += f" on stream {stream!r}"
    if where:
        subject += f" (from {where})"
    text = f"{subject}: {e.what} [{result}]"
    if detail:
        text += f"; {detail}"
    if cause and issubclass(e.error, CaptureInvalidated):
        text += f". First cause: {cause}"
    elif e.cause and not detail:
        text += f". Likely cause: {e.cause}"
    text += f". What to do: {remedy or e.remedy}."
    cls = e.error
    if issubclass(cls, DriverError):
        return cls(
            text, result=result, code=e.code, call=call, stream=stream, kernel=kernel,
            recent=recent,
        )  # fmt: skip
    error: MemraError
    if cls is ToolkitMismatch:
        error = ToolkitMismatch(text, driver=versions[0], nvrtc=versions[1], bindings=versions[2])
    elif cls is CaptureForbidden:
        error = CaptureForbidden(text, call=call)
    elif cls is CaptureInvalidated:
        error = CaptureInvalidated(text, cause=cause)
    elif cls is UpdateRefused:
        error = UpdateRefused(text, reason=detail or e.what)
    else:
        error = cls(text)
    error.result = result
    return error
