"""Every exception that the library raises, as one tree.

A message says what failed, where, the likely cause and what to do. Refusals are raised before the
driver is asked, so they leave every object usable; only errors marked *sticky* end a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "ArchUnsupported",
    "ArgumentError",
    "BarrierDivergence",
    "CapacityExceeded",
    "CaptureError",
    "CaptureForbidden",
    "CaptureInvalidated",
    "CaptureUnjoined",
    "CaptureWrongThread",
    "ClosedError",
    "CompileError",
    "CompilerNotFound",
    "CounterUnknown",
    "DataRace",
    "Deadlock",
    "Diagnostic",
    "DriverError",
    "DriverNotFound",
    "FormatUnsupported",
    "HeaderNotFound",
    "HostCheckError",
    "IllegalAddress",
    "InvalidArgument",
    "KvShapeError",
    "KvStateError",
    "KvWireError",
    "LaunchFailed",
    "LaunchLimit",
    "LeakError",
    "MemraError",
    "ModelError",
    "NotReady",
    "OutOfBounds",
    "OutOfMemory",
    "PlaneError",
    "RestoreRefused",
    "RewindRefused",
    "RingLapped",
    "SnapshotRefused",
    "TokenError",
    "ToolkitMismatch",
    "TransactionRefused",
    "UninitialisedRead",
    "UpdateRefused",
]


class MemraError(Exception):
    """Base of all errors of this library.

    Attributes
    ----------
    result : str
        Name of the driver's result code behind the error, e.g. ``"CUDA_ERROR_INVALID_VALUE"``;
        empty where no driver call stands behind it.
    """

    result: str = ""


class ClosedError(MemraError):
    """An object was used after its ``close()``."""


class ModelError(MemraError):
    """A model file cannot be fetched, is damaged, or has an architecture that is not supported."""


class TokenError(MemraError):
    """A token id outside the vocabulary was about to be fed to an embedding.

    The argmax of a row without any finite-or-infinite value is the sentinel ``0x7FFFFFFF``; it
    means that every logit of the row was NaN.
    """


class DriverNotFound(MemraError):
    """No CUDA driver library could be loaded on this machine."""


class CompilerNotFound(MemraError):
    """No C++ compiler could be found for the host device."""


class ToolkitMismatch(MemraError):
    """Driver, NVRTC and bindings do not fit together.

    Attributes
    ----------
    driver, nvrtc, bindings : str
        The three versions found; ``"?"`` where one could not be read.
    """

    def __init__(self, message: str, *, driver: str = "?", nvrtc: str = "?", bindings: str = "?"):
        super().__init__(message)
        self.driver, self.nvrtc, self.bindings = driver, nvrtc, bindings


class DriverError(MemraError):
    """A driver call failed.

    Attributes
    ----------
    result : str
        Name of the driver's result code, e.g. ``"CUDA_ERROR_INVALID_VALUE"``.
    code : int
        Its number.
    call : str
        Name of the driver call, e.g. ``"cuMemcpyHtoDAsync"``.
    stream, kernel : str or None
        Names, where the call had them.
    recent : tuple of str
        The last calls of the trace ring, newest last.
    """

    sticky = False

    def __init__(
        self,
        message: str,
        *,
        result: str = "",
        code: int = 0,
        call: str = "",
        stream: str | None = None,
        kernel: str | None = None,
        recent: Sequence[str] = (),
    ):
        super().__init__(message)
        self.result, self.code, self.call = result, code, call
        self.stream, self.kernel, self.recent = stream, kernel, tuple(recent)


class InvalidArgument(DriverError):
    """The driver refused a value (``CUDA_ERROR_INVALID_VALUE`` and its kin)."""


class OutOfMemory(DriverError):
    """The device, or the host for pinned memory, has no room left."""


class NotReady(DriverError):
    """Work that was asked about has not finished yet."""


class IllegalAddress(DriverError):
    """A kernel touched memory it may not touch. Sticky: the context is lost."""

    sticky = True


class LaunchFailed(DriverError):
    """A kernel stopped with a fault. Sticky: the context is lost."""

    sticky = True


class CaptureError(MemraError):
    """Something about stream capture was refused."""


class CaptureForbidden(CaptureError):
    """A call that is not allowed while a stream is being captured; nothing was done.

    Attributes
    ----------
    call : str
        The refused call.
    """

    def __init__(self, message: str, *, call: str = ""):
        super().__init__(message)
        self.call = call


class CaptureInvalidated(CaptureError):
    """The capture can no longer end in a graph.

    Attributes
    ----------
    cause : str
        The first call that invalidated it, with its Python line.
    """

    def __init__(self, message: str, *, cause: str = ""):
        super().__init__(message)
        self.cause = cause


class CaptureUnjoined(CaptureError):
    """A forked stream was not joined back before the end of the capture.

    Attributes
    ----------
    streams : tuple of str
        Names of the streams left open.
    """

    def __init__(self, message: str, *, streams: Sequence[str] = ()):
        super().__init__(message)
        self.streams = tuple(streams)


class CaptureWrongThread(CaptureError):
    """A thread-local capture was ended by another thread than the one that began it."""


class UpdateRefused(MemraError):
    """An executable graph cannot take the change that was asked for.

    Attributes
    ----------
    node, field, reason : str
    """

    def __init__(self, message: str, *, node: str = "", field: str = "", reason: str = ""):
        super().__init__(message)
        self.node, self.field, self.reason = node, field, reason


@dataclass(frozen=True)
class Diagnostic:
    """One message of a compiler.

    Attributes
    ----------
    severity : str
        ``"error"``, ``"warning"`` or ``"note"``.
    file, line, column, message, source_line
        Where and what; ``line`` and ``column`` are 1-based and 0 where unknown.
    """

    severity: str
    file: str
    line: int
    column: int
    message: str
    source_line: str = ""


class CompileError(MemraError):
    """A kernel source did not compile.

    Attributes
    ----------
    diagnostics : tuple of Diagnostic
    log : str
        The compiler's whole log.
    """

    def __init__(self, message: str, *, diagnostics: Sequence[Diagnostic] = (), log: str = ""):
        super().__init__(message)
        self.diagnostics, self.log = tuple(diagnostics), log


class HeaderNotFound(CompileError):
    """An ``#include`` could not be resolved.

    Attributes
    ----------
    name : str
    searched : tuple of str
    """

    def __init__(self, message: str, *, name: str = "", searched: Sequence[str] = ()):
        super().__init__(message)
        self.name, self.searched = name, tuple(searched)


class ArchUnsupported(MemraError):
    """The compiler at hand cannot make code for an architecture.

    Attributes
    ----------
    want : str
    have : tuple of str
    """

    def __init__(self, message: str, *, want: str = "", have: Sequence[str] = ()):
        super().__init__(message)
        self.want, self.have = want, tuple(have)


class ArgumentError(MemraError):
    """A kernel argument does not fit the loaded kernel.

    Attributes
    ----------
    kernel : str
    index : int
        0-based position; -1 when the count is wrong.
    name, expected, got : str
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        index: int = -1,
        name: str = "",
        expected: str = "",
        got: str = "",
    ):
        super().__init__(message)
        self.kernel, self.index, self.name = kernel, index, name
        self.expected, self.got = expected, got


class LaunchLimit(MemraError):
    """A launch asks for more than the device or the kernel allows.

    Attributes
    ----------
    what : str
    limit, got : int
    """

    def __init__(self, message: str, *, what: str = "", limit: int = 0, got: int = 0):
        super().__init__(message)
        self.what, self.limit, self.got = what, limit, got


class FormatUnsupported(MemraError):
    """No kernel exists for a combination of formats, head size and architecture.

    Attributes
    ----------
    op, k_format, v_format, arch : str
    head_dim : int
    nearest : tuple of str
        The closest combinations that exist.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        k_format: str = "",
        v_format: str = "",
        head_dim: int = 0,
        arch: str = "",
        nearest: Sequence[str] = (),
    ):
        super().__init__(message)
        self.op, self.k_format, self.v_format = op, k_format, v_format
        self.head_dim, self.arch, self.nearest = head_dim, arch, tuple(nearest)


class PlaneError(MemraError):
    """An operation on a plane of the cache was refused; the plane is unchanged."""


class CapacityExceeded(PlaneError):
    """More rows than the plane can hold."""


class CounterUnknown(PlaneError):
    """A host mirror was read while only the device knows the value; call ``sync_counters``."""


class RewindRefused(PlaneError):
    """A rewind past what the plane keeps.

    Attributes
    ----------
    plane : str
    asked, possible : int
        The length asked for and the smallest one that is possible.
    """

    def __init__(self, message: str, *, plane: str = "", asked: int = 0, possible: int = 0):
        super().__init__(message)
        self.plane, self.asked, self.possible = plane, asked, possible


class SnapshotRefused(PlaneError):
    """The state cannot be captured faithfully."""


class RestoreRefused(PlaneError):
    """A snapshot does not fit its destination."""


class RingLapped(PlaneError):
    """Rows that are needed were already overwritten in a ring."""


class TransactionRefused(PlaneError):
    """A transaction step is illegal in the present state."""


class KvShapeError(MemraError):
    """An argument of ``LayerKvCache`` has the wrong geometry."""


class KvStateError(MemraError):
    """An operation of ``LayerKvCache`` is illegal in its present state."""


class KvWireError(MemraError):
    """Bytes handed to ``import_wire`` are refused."""


class HostCheckError(MemraError):
    """The host device found a fault in a kernel.

    Attributes
    ----------
    kernel : str
    block, thread : tuple of int
    where : str
        ``file:line`` of the source, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        block: tuple[int, ...] = (),
        thread: tuple[int, ...] = (),
        where: str = "",
    ):
        super().__init__(message)
        self.kernel, self.block, self.thread, self.where = kernel, block, thread, where


class OutOfBounds(HostCheckError):
    """A kernel read or wrote outside its buffers."""


class DataRace(HostCheckError):
    """Two threads touched the same byte without order, at least one of them writing."""


class BarrierDivergence(HostCheckError):
    """Threads of a block, or lanes of a mask, met different barriers."""


class UninitialisedRead(HostCheckError):
    """A kernel read memory that nobody wrote."""


class Deadlock(HostCheckError):
    """Threads wait for each other for ever, or a launch exceeds its limit of time."""


class LeakError(MemraError):
    """Resources were left open.

    Attributes
    ----------
    objects : tuple of str
    """

    def __init__(self, message: str, *, objects: Sequence[str] = ()):
        super().__init__(message)
        self.objects = tuple(objects)
