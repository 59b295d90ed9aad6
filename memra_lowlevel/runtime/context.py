"""One context per device: the handle, its limits, dead handles, and the thread it is current in.

Shared by every :class:`~memra_lowlevel.runtime.device.Device` of the same ordinal and by every
object made from them; given back when the last of both is gone.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import native
from ..compile.arch import of_devices
from ..driver.table import DeviceAttribute as A
from ..driver.table import Driver
from ..driver.trace import TraceEntry
from ..errors import DriverError, HostCheckError, MemraError
from . import lifetime

if TYPE_CHECKING:
    from ..compile import Kernel
    from .device import Device
    from .launch import Launcher
    from .module import LoadedModule
    from .storage import Storage
    from .stream import Stream

__all__ = ["Context", "Limits", "acquire", "opened"]

log = logging.getLogger("memra_lowlevel")
_PARAMETER = re.compile(r", parameter (\d+)")
_ADDRESS = re.compile(r"bytes at (0x[0-9a-f]+)")
_NON_BLOCKING = 1
_NO_TIMING = 2


@dataclass(frozen=True)
class Limits:
    """What a device allows.

    Attributes
    ----------
    grid, block : (int, int, int)
        Largest extent of each axis.
    threads_per_block : int
    shared_bytes : int
        Shared memory of a block without opting in (48 KiB).
    shared_optin_bytes : int
        The most a block may ask for; the library opts in by itself.
    warp_size, n_sms : int
    clusters, cooperative, pools : bool
        Whether cluster launches, cooperative launches and stream-ordered pools exist.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    threads_per_block: int
    shared_bytes: int
    shared_optin_bytes: int
    warp_size: int
    n_sms: int
    clusters: bool
    cooperative: bool
    pools: bool


class Context:
    """A retained primary context; internal, reached through ``Device.ctx``.

    Attributes
    ----------
    handle : int
        The driver's context handle.
    memo : dict
        Per-context store for whoever loads kernels (cleared when the context is released).
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self.device_handle = driver.cuDeviceGet(ordinal)
        self.handle = driver.cuDevicePrimaryCtxRetain(self.device_handle)
        self.users = 0
        self.n_live = 0
        self.lost = ""
        self.n_lost_destructors = 0
        self.memo: dict[Any, Any] = {}
        self.launchers: dict[Kernel, Launcher] = {}
        self.modules: weakref.WeakSet[LoadedModule] = weakref.WeakSet()
        self._dead: deque[tuple[int, Callable[[], None]]] = deque()
        # Every allocation that is not given back, to tell whose address a graph has frozen.
        self.storages: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        self._pending: list[tuple[list[int], Callable[[], None]]] = []
        self._lock = threading.RLock()
        self._current = threading.local()
        self._keeper = 0
        self.pinned_free: dict[int, list[int]] = {}
        self.pinned_free_bytes = 0
        self._view: Device | None = None
        self.trace_lines = False
        self.private = False  # not in the registry

        def attr(a: A) -> int:
            return driver.cuDeviceGetAttribute(a, self.device_handle)

        self.total_bytes = driver.cuDeviceTotalMem(self.device_handle)
        self.device_name = driver.cuDeviceGetName(self.device_handle)
        if driver.kind == "host":
            self.arch = "host"
        else:
            major, minor = attr(A.COMPUTE_CAPABILITY_MAJOR), attr(A.COMPUTE_CAPABILITY_MINOR)
            self.arch = f"sm_{major}{minor}"
            of_devices.add(self.arch)
        shared = attr(A.MAX_SHARED_MEMORY_PER_BLOCK)
        self.limits = Limits(
            grid=(attr(A.MAX_GRID_DIM_X), attr(A.MAX_GRID_DIM_Y), attr(A.MAX_GRID_DIM_Z)),
            block=(attr(A.MAX_BLOCK_DIM_X), attr(A.MAX_BLOCK_DIM_Y), attr(A.MAX_BLOCK_DIM_Z)),
            threads_per_block=attr(A.MAX_THREADS_PER_BLOCK),
            shared_bytes=shared,
            shared_optin_bytes=max(shared, attr(A.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)),
            warp_size=attr(A.WARP_SIZE),
            n_sms=attr(A.MULTIPROCESSOR_COUNT),
            clusters=bool(attr(A.CLUSTER_LAUNCH)),
            cooperative=bool(attr(A.COOPERATIVE_LAUNCH)),
            pools=bool(attr(A.MEMORY_POOLS_SUPPORTED)),
        )
        # The host device closes to a checked kernel what lies beside the views that it was given.
        self.note_view = getattr(driver, "note_view", None)
        self.native = native.Gate(driver, self.handle, TraceEntry) if native.available() else None

    def __str__(self) -> str:
        return f"{self.driver.kind}:{self.ordinal}"

    @property
    def device(self) -> Device:
        """A device object over this context that owns nothing (what ``buffer.device`` gives)."""
        if self._view is None:
            from .device import Device

            self._view = Device._over(self)
        return self._view

    # -- current context --------------------------------------------------------------------------
    def activate(self) -> None:
        """Make the context current in this thread, whatever other libraries did meanwhile."""
        self.driver.cuCtxSetCurrent(self.handle)
        self._current.is_set = True
        _remember(self)

    def ensure(self) -> None:
        """Make the context current in this thread unless this library knows that it is."""
        if getattr(_thread, "context", None) is not self:
            self.activate()

    # -- dead handles -----------------------------------------------------------------------------
    def bury(self, serial: int, reclaim: Callable[[], None]) -> None:
        """Queue a dead handle. Called by finalisers: no driver call, no lock, any thread."""
        self._dead.append((serial, reclaim))

    def reap(self) -> None:
        """Destroy queued handles, unless a capture is in progress anywhere."""
        if not self._dead and not self._closing():
            return
        with lifetime.gate:
            if lifetime.recordings:
                return
            while self._dead:
                _, reclaim = self._dead.popleft()
                self.n_live -= 1
                self._destroy(reclaim)
            if self._closing():
                self._release()

    def _destroy(self, reclaim: Callable[[], None]) -> None:
        if self.lost:
            self.n_lost_destructors += 1
            return
        try:
            self.ensure()
            reclaim()
        except DriverError as error:
            if not error.sticky:
                log.warning("%s: giving back a handle failed: %s", self, error)
                return
            # Every later destructor would fail the same way: say it once, count the rest.
            self.lost = str(error)
            self.n_lost_destructors = 1
            log.error("%s: the context is lost; handles are dropped from here on: %s", self, error)
        except MemraError as error:
            log.warning("%s: giving back a handle failed: %s", self, error)

    def note_error(self, error: BaseException) -> None:
        """Remember a sticky error, so that destructors stop calling the driver."""
        if isinstance(error, DriverError) and error.sticky and not self.lost:
            self.lost = str(error)

    def describe(self, error: BaseException) -> None:
        """Name buffer and parameter in the error of a kernel, which knows their addresses only."""
        if not isinstance(error, HostCheckError) or not error.args:
            return
        text = str(error)
        parameter = _PARAMETER.search(text)
        if parameter is not None:
            index = int(parameter[1])
            for launcher in list(self.launchers.values()):
                params = launcher.kernel.params
                if launcher.kernel.name == error.kernel and index < len(params):
                    end = parameter.end()
                    text = f"{text[:end]} ({params[index].name}){text[end:]}"
                    break
        address = _ADDRESS.search(text)
        if address is not None:
            for storage in list(self.storages.values()):
                if storage.ptr == int(address[1], 16):
                    end = address.end()
                    text = f"{text[:end]} ({storage.name!r}){text[end:]}"
                    break
        error.args = (text, *error.args[1:])

    def tell(self, error: BaseException | None) -> None:
        """Raise what a ``close()`` learnt; beside another exception it goes to the log instead."""
        if error is None:
            return
        if sys.exc_info()[1] is None:
            raise error
        log.error("%s: work that nobody had waited for failed: %s", self, error)

    def _last_errors(self) -> BaseException | None:
        """Wait for all work and return its error, which nobody could be told of later."""
        if lifetime.recordings or self.lost or not self.handle:
            return None

        def wait() -> None:
            self.activate()
            self.driver.cuCtxSynchronize()

        return self.ask(wait)

    def ask(self, call: Callable[[], object]) -> BaseException | None:
        """Make a call for the sake of its error; one that was told before is only logged."""
        told = getattr(self.driver, "told_sticky", False)
        try:
            call()
        except MemraError as error:
            self.note_error(error)
            if told and isinstance(error, DriverError) and error.sticky:
                log.warning("%s: the context was lost before: %s", self, error)
                return None
            return error
        return None

    def after(self, streams: Iterable[Stream], action: Callable[[], None]) -> None:
        """Run ``action`` once all work now on ``streams`` is done (polled at safe points)."""
        driver, events = self.driver, []
        for handle in self._tails(streams):
            event = driver.cuEventCreate(_NO_TIMING)
            driver.cuEventRecord(event, handle)
            events.append(event)
        if events:
            with self._lock:
                self._pending.append((events, action))
        else:
            action()

    def poll(self, *, wait: bool = False) -> None:
        """Run the actions of :meth:`after` whose work is done; with ``wait``, all of them."""
        if not self._pending or lifetime.recordings or self.lost:
            return
        self.ensure()
        with self._lock:
            waiting, self._pending = deque(self._pending), []
        try:
            while waiting:
                events, action = waiting[0]
                if wait:
                    for event in events:
                        self.driver.cuEventSynchronize(event)
                done = wait or all(self.driver.cuEventQuery(e) for e in events)
                waiting.popleft()
                if done:
                    for event in events:
                        self.driver.cuEventDestroy(event)
                    action()
                else:
                    with self._lock:
                        self._pending.append((events, action))
        finally:
            # An error of earlier work may be told here; what waits behind it goes on waiting.
            with self._lock:
                self._pending += waiting

    def _tails(self, streams: Iterable[Stream]) -> list[int]:
        """Give handles whose present work covers all work on ``streams``, closed ones included."""
        handles, closed = [], False
        for stream in list(streams):
            if stream.context is self:
                if stream.alive:
                    handles.append(stream.handle)
                else:
                    closed = True
        if closed and self._keeper:
            handles.append(self._keeper)
        return handles

    def keeper(self) -> int:
        """Give the internal stream on which closed streams end; frees are ordered on it."""
        if not self._keeper:
            self._keeper = self.driver.cuStreamCreateWithPriority(_NON_BLOCKING, 0)
            self.driver.name_handle(self._keeper, f"{self} housekeeping")
        return self._keeper

    def chain(self, before: int, after: int) -> None:
        """Order the present work of stream ``before`` ahead of later work of stream ``after``."""
        if before != after:
            event = self.driver.cuEventCreate(_NO_TIMING)
            self.driver.cuEventRecord(event, before)
            self.driver.cuStreamWaitEvent(after, event)
            self.driver.cuEventDestroy(event)

    def free_async(self, ptr: int, streams: Iterable[Stream]) -> None:
        """Give stream-ordered memory back after all work on ``streams``."""
        tails = self._tails(streams)
        target = tails[0] if len(tails) == 1 else self.keeper()
        for tail in tails:
            self.chain(tail, target)
        self.driver.cuMemFreeAsync(ptr, target)

    # -- end --------------------------------------------------------------------------------------
    def _closing(self) -> bool:
        return self.users == 0 and self.n_live <= 0 and self.handle != 0

    def _release(self) -> None:
        driver, handle = self.driver, self.handle
        with _registry_lock:
            if self.users or not self.handle:
                return
            if not self.private:
                _registry.pop((driver.kind, self.ordinal), None)
            self.handle = 0
        self.memo.clear()
        self.launchers.clear()
        if self.lost:
            return
        error: BaseException | None = None
        try:
            driver.cuCtxSetCurrent(handle)
            try:
                driver.cuCtxSynchronize()
            except MemraError as failed:
                self.note_error(failed)
                error = failed
                if isinstance(failed, DriverError) and failed.sticky:
                    return
            waiting, self._pending = self._pending, []
            for events, action in waiting:
                for event in events:
                    driver.cuEventDestroy(event)
                action()
            # A kernel that somebody still holds must not look loaded in the next context.
            for module in list(self.modules):
                module.unload()
            for free in self.pinned_free.values():
                for ptr in free:
                    driver.cuMemFreeHost(ptr)
            self.pinned_free.clear()
            if self._keeper:
                driver.cuStreamDestroy(self._keeper)
            driver.cuCtxSetCurrent(0)
        finally:
            _thread.context = None
            if self.native is not None:
                self.native.close()
            driver.cuDevicePrimaryCtxRelease(self.device_handle)
            self.tell(error)

    def drop_user(self) -> None:
        """One Device less; the last one waits for the work, and is told how it went."""
        with _registry_lock:
            self.users -= 1
        if self.users == 0:
            error = self._last_errors()
            self.reap()
            self.tell(error)


_registry: dict[tuple[str, int], Context] = {}
_registry_lock = threading.RLock()
_thread = threading.local()


def _remember(context: Context) -> None:
    _thread.context = context
    native.note_context(context.handle)


def acquire(driver: Driver, ordinal: int) -> Context:
    """Give the context of a device, one user more."""
    with _registry_lock:
        key = (driver.kind, ordinal)
        context = _registry.get(key)
        if context is None or context.driver is not driver:
            context = _registry[key] = Context(driver, ordinal)
            describers = getattr(driver, "describers", None)  # the host driver's
            if describers is not None:
                describers[ordinal] = context.describe
        context.users += 1
        return context


def opened() -> list[Context]:
    """Contexts of devices that are not closed."""
    return [context for context in list(_registry.values()) if context.users]
