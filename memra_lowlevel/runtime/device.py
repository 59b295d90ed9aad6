"""Devices: where everything begins. ``Device("cuda:0")``, ``Device("host")``, ``Device()``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .. import driver as drivers
from .. import expect, native
from ..closing import Closing
from ..errors import ArgumentError, ClosedError, DriverNotFound
from . import lifetime, pool
from .arena import Arena
from .context import Context, Limits, acquire
from .event import Event
from .memory import Buffer, PinnedBuffer
from .recording import forbid
from .storage import Shape, normal_shape
from .stream import Stream

if TYPE_CHECKING:
    from ..compile import CompiledImage, Module
    from ..driver.table import Driver

__all__ = ["Device"]


class Device(Closing):
    """A GPU, or the CPU standing in for one.

    Parameters
    ----------
    spec : str or Device, optional
        ``"cuda:N"``, ``"cuda"``, ``"host:N"``, ``"host"``. Without it ``cuda:0`` where there is a
        GPU, else ``host``; ``str(device)`` says which. Nothing else ever switches device.
    trace : {"plans", "lines"}
        What the trace shows for prepared launches: the line of their preparation, or of each
        launch (slower).

    Notes
    -----
    Two devices of the same spec share one context and compare equal. The context is given back
    when the last device and the last object made from it are closed.
    """

    def __init__(self, spec: str | Device | None = None, *, trace: str = "plans") -> None:
        kind, ordinal = _parse(spec)
        driver = _default_driver() if spec is None else drivers.get(kind)
        if driver.kind == "cuda":
            driver.cuInit()
        n_devices = driver.cuDeviceGetCount()
        if not 0 <= ordinal < n_devices:
            raise ArgumentError(
                f"Device({spec!r}): there are {n_devices} {driver.kind} devices, numbered from 0.",
                name="spec", expected=f"0 … {n_devices - 1}", got=str(ordinal),
            )  # fmt: skip
        if not isinstance(trace, str) or trace not in ("plans", "lines"):
            raise ArgumentError(
                f"Device(trace={trace!r}): use 'plans' or 'lines'.",
                name="trace", expected="plans | lines", got=str(trace),
            )  # fmt: skip
        self.context = acquire(driver, ordinal)
        self._owns, self._closed = True, False
        if trace == "lines":
            self.context.trace_lines = True

    @classmethod
    def _over(cls, context: Context) -> Device:
        device = cls.__new__(cls)
        device.context, device._owns, device._closed = context, False, False
        return device

    # -- what it is -------------------------------------------------------------------------------
    @property
    def kind(self) -> str:
        """``"cuda"`` or ``"host"``."""
        return self.context.driver.kind

    @property
    def ordinal(self) -> int:
        """Number of the device within its kind."""
        return self.context.ordinal

    @property
    def driver(self) -> Driver:
        """The call surface below."""
        return self.context.driver

    @property
    def ctx(self) -> Context:
        """The context; ``device.ctx.handle`` is the driver's handle."""
        return self.context

    @property
    def arch(self) -> str:
        """Architecture to compile for: ``"sm_90"``, ``"host"``."""
        return self.context.arch

    @property
    def name(self) -> str:
        """Name that the driver gives the device."""
        return self.context.device_name

    @property
    def limits(self) -> Limits:
        """What launches may ask for."""
        return self.context.limits

    @property
    def memo(self) -> dict[Any, Any]:
        """Store for loaded kernels and the like; lives as long as the context."""
        return self.context.memo

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called on this object."""
        return self._closed

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""
        self._check_open()
        self.context.activate()
        return self.driver.cuMemGetInfo()

    # -- what it makes ----------------------------------------------------------------------------
    def stream(self, name: str | None = None, priority: int = 0) -> Stream:
        """Make a stream; a lower ``priority`` number runs first."""
        self._check_open()
        self.context.reap()
        return Stream(self.context, name=name, priority=priority)

    def stream_of(self, foreign: Any, name: str | None = None) -> Stream:
        """Wrap a stream of another library: an object with ``__cuda_stream__``, or a handle.

        The foreign object keeps owning it and is kept alive. An object may stand for the default
        stream, handle 0, as PyTorch's does at first; as a bare number 0 is refused.
        """
        self._check_open()
        protocol = getattr(foreign, "__cuda_stream__", None)
        if protocol is not None:
            version, handle = protocol() if callable(protocol) else protocol
            if version != 0:
                raise ArgumentError(
                    f"__cuda_stream__ version {version} is not known; 0 is.",
                    name="foreign", expected="0", got=str(version),
                )  # fmt: skip
        else:
            handle = foreign
        handle = expect.integer("stream_of", handle, 1 if protocol is None else 0, 2**64 - 1)
        return Stream(self.context, name=name, foreign=handle, owner=foreign)

    def event(
        self, timing: bool = False, name: str | None = None, *, blocking: bool = False
    ) -> Event:
        """Make an event; with ``timing`` for :meth:`Event.elapsed_ms`, outside graphs only.

        ``blocking``: :meth:`Event.sync` sleeps, and leaves the processor to others.
        """
        self._check_open()
        return Event(self.context, timing=timing, blocking=blocking, name=name)

    def alloc(self, n_bytes: int, stream: Stream, name: str = "buffer") -> Buffer:
        """Allocate ``n_bytes`` of uninitialised memory as uint8, ordered on ``stream``."""
        return self.empty(n_bytes, np.uint8, stream, name)

    def empty(
        self, shape: Shape, dtype: npt.DTypeLike, stream: Stream, name: str = "buffer"
    ) -> Buffer:
        """Allocate uninitialised memory from the pool, usable by work on ``stream`` from now on.

        Raises
        ------
        CaptureForbidden
            While this thread or ``stream`` is capturing: graphs take memory from an Arena.
        OutOfMemory
        """
        self._check_open()
        dims, kind = normal_shape(shape), expect.dtype(f"allocation of {name!r}", dtype)
        n_bytes = math.prod(dims) * kind.itemsize
        return pool.allocate(self.context, n_bytes, stream, dims, kind, name)

    def zeros(
        self, shape: Shape, dtype: npt.DTypeLike, stream: Stream, name: str = "buffer"
    ) -> Buffer:
        """Allocate memory whose bytes are zero once ``stream`` gets there."""
        buffer = self.empty(shape, dtype, stream, name)
        buffer.fill(stream, 0)
        return buffer

    def from_numpy(
        self, array: np.ndarray[Any, Any], stream: Stream, name: str = "buffer"
    ) -> Buffer:
        """Copy ``array`` to the device; the array may be changed at once afterwards."""
        expect.kind("from_numpy", array, np.ndarray, "a NumPy array", "use np.asarray")
        buffer = self.empty(array.shape, array.dtype, stream, name)
        buffer.copy_from(stream, array)
        return buffer

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, name: str = "pinned") -> PinnedBuffer:
        """Allocate page-locked host memory for asynchronous and captured copies."""
        self._check_open()
        expect.name("pinned", name)
        return pool.pinned(self.context, shape, dtype, name)

    def arena(self, n_bytes: int, name: str = "arena") -> Arena:
        """Make a block of device memory with fixed addresses for captured work."""
        self._check_open()
        expect.name("arena", name)
        return Arena(self.context, n_bytes, name=name)

    def wrap(self, foreign: Any, stream: Stream, name: str = "foreign") -> Buffer:
        """Make a Buffer over memory of another library, without a copy.

        ``foreign`` has ``__dlpack__`` or ``__cuda_array_interface__``; see
        :mod:`memra_lowlevel.runtime.interop`.
        """
        from .interop import wrap

        self._check_open()
        return wrap(self.context, foreign, stream, name)

    def module(self, image: CompiledImage) -> Module:
        """Load compiled code; refused while this thread is capturing."""
        from ..compile import CompiledImage
        from .module import LoadedModule

        self._check_open()
        expect.kind("module", image, CompiledImage, "a CompiledImage", "use compile_source")
        return LoadedModule(self.context, image)

    # -- as a whole -------------------------------------------------------------------------------
    def sync(self) -> None:
        """Block until all work of the device is done; refused while this thread captures."""
        self._check_open()
        forbid("cuCtxSynchronize")
        self.context.activate()
        streams = [s for s in lifetime.living(self.context) if isinstance(s, Stream)]
        marks = [(s.cell, native.issued(s.cell)) for s in streams]
        try:
            self.driver.cuCtxSynchronize()
        except Exception as error:
            self.context.note_error(error)
            raise
        for cell, mark in marks:
            native.note_seen(cell, mark)
        self.context.reap()
        self.context.poll()

    def trim(self) -> None:
        """Give memory that the pools keep back to the system."""
        self._check_open()
        forbid("cuMemFreeHost")
        self.sync()
        if self.context.limits.pools:
            self.driver.cuMemPoolTrimTo(self.context.device_handle, 0)
        for free in self.context.pinned_free.values():
            for ptr in free:
                self.driver.cuMemFreeHost(ptr)
        self.context.pinned_free.clear()
        self.context.pinned_free_bytes = 0

    def census(self) -> list[lifetime.Leak]:
        """Objects of this device that are still open."""
        return lifetime.census(self.context)

    def close(self) -> None:
        """End the use of this object; idempotent.

        The last open one of its spec waits for all work and raises the error of what nobody
        had waited for; while another exception is under way, the logger ``memra_lowlevel``
        reports it instead (on stderr unless configured). Where none is ever closed, the end of
        the process names the streams that nobody waited for, without asking the driver.
        """
        if not self._closed and self._owns:
            self._closed = True
            self.context.drop_user()

    def _check_open(self) -> None:
        if self._closed or not self.context.handle:
            raise ClosedError(f"device {self} is closed.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.context is self.context

    def __hash__(self) -> int:
        return hash(id(self.context))

    def __str__(self) -> str:
        return str(self.context)

    def __repr__(self) -> str:
        return f"<Device {self.context} {self.name!r}>"


def _parse(spec: str | Device | None) -> tuple[Literal["cuda", "host"], int]:
    if spec is None:
        return "host", 0
    if isinstance(spec, Device):
        return spec.driver.kind, spec.ordinal
    words = spec if isinstance(spec, str) else ""
    kind, _, number = words.partition(":")
    if kind not in ("cuda", "host") or not (
        (number.isascii() and number.isdigit()) or number == ""
    ):
        raise ArgumentError(
            f"Device({spec!r}): a device is 'cuda', 'cuda:N', 'host' or 'host:N'.",
            name="spec", expected="cuda[:N] | host[:N]", got=str(spec),
        )  # fmt: skip
    return ("cuda" if kind == "cuda" else "host"), int(number or 0)


def _default_driver() -> Driver:
    try:
        driver = drivers.get("cuda")
        driver.cuInit()
        if driver.cuDeviceGetCount() > 0:
            return driver
    except DriverNotFound:
        pass
    return drivers.get("host")
