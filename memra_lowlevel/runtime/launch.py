"""Launching kernels: configuration, checks against device and kernel, prepared launches.

Every launch is checked before the driver is asked. What is checked once per kernel and
configuration (limits, opt-in to large shared memory) is remembered; what is checked once per
argument list (types, devices, NULLABLE) is remembered by :func:`prepare`, so that
:meth:`PreparedLaunch.launch` is one call into compiled code.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import expect, native
from ..closing import Closing
from ..compile import Kernel
from ..driver.table import LaunchAttributes
from ..driver.trace import caller
from ..errors import ArgumentError, ClosedError
from .arguments import Encoder
from .config import ConfigLike, LaunchConfig, check_limits, config_of, dim3, occupancy
from .device import Device
from .memory import Buffer
from .storage import Storage, note_use
from .stream import Stream, expect_stream

if TYPE_CHECKING:
    from .context import Context

__all__ = ["LaunchConfig", "PreparedLaunch", "launch", "launch_many", "occupancy", "prepare"]

_MOST_SITES = 512  # configurations remembered per kernel
_launch_args: Any = getattr(native.Plan, "launch_args", None)
_launch_site: Any = getattr(native.Plan, "launch_site", None)
_ARGUMENT = -6  # MLL_ARGUMENT


def launch(stream: Stream, config: ConfigLike, kernel: Kernel, *args: Any) -> None:
    """Launch ``kernel`` on ``stream``.

    Parameters
    ----------
    stream : Stream
    config : LaunchConfig or mapping of its fields
    kernel : Kernel
    *args
        One per parameter: a Buffer, DeviceCounter or PinnedBuffer for pointers (None where the
        source says NULLABLE), a Python or NumPy number for scalars.

    Raises
    ------
    ArgumentError
        If an argument does not fit the parameter: count, kind, range, dtype, device.
    LaunchLimit
        If grid, block, shared memory or cluster exceed what device and kernel allow.
    """
    if type(stream) is not Stream:
        expect_stream("launch", stream)
    context = stream.context
    try:
        launcher = context.launchers[kernel]
    except (KeyError, TypeError):  # the first launch, or no kernel
        launcher = Launcher.of(context, kernel)
    site = launcher.last
    if site is None or site.config is not config:
        site = launcher.last = launcher.site(config)
    if site.cell is not None and native._enabled and stream.recording is None:
        code = _launch_args(site.address, stream.address, stream, args)
        if code == 0:
            return
        if code > 0:
            raise driver_error(context, code, "cuLaunchKernel", stream, kernel)
        if code == _ARGUMENT and len(args) == launcher.n_params:
            try:
                block = launcher.pack_noting(args, context, stream)
            except (struct.error, OverflowError):
                launcher.encoder.pack(args, context)  # raises by name
                raise
            code = _launch_site(site.address, stream.address, block)
            if code == 0:
                return
            if code > 0:
                raise driver_error(context, code, "cuLaunchKernel", stream, kernel)
    block, storages = launcher.encoder.pack(args, context)
    site.launch_block(stream, block, storages)


def prepare(
    device: Device | Stream, config: ConfigLike, kernel: Kernel, *args: Any
) -> PreparedLaunch:
    """Check and pack a launch once, to be launched many times.

    Takes the same arguments as :func:`launch`; ``device`` may be any stream of the device.
    """
    if not isinstance(device, Device | Stream):
        raise expect.refusal("prepare", device, "a Device or a Stream")
    context = device.context
    launcher = Launcher.of(context, kernel)
    block, _ = launcher.encoder.pack(args, context)
    operands = launcher.encoder.operands(args, context)
    site = launcher.site(config)
    compiled = site.cell is not None and native.available()
    return (_CompiledLaunch if compiled else PreparedLaunch)(site, block, operands)


class PreparedLaunch:
    """A checked, packed launch; made by :func:`prepare`.

    Keeps its kernel and operands alive. An operand that is closed makes it refuse.

    Attributes
    ----------
    kernel : Kernel
    config : LaunchConfig
    where : str
        ``file:line`` of the preparation; what the trace shows for its launches.
    """

    def __init__(self, site: _Site, block: bytes, operands: dict[int, Storage]) -> None:
        self._site, self.config = site, site.config
        self.kernel = site.launcher.kernel
        self.where = caller()
        self._dead = ""
        encoder = site.launcher.encoder
        self._block = ctypes.create_string_buffer(block, len(block))
        base = ctypes.addressof(self._block)
        self._n = len(encoder.offsets)
        self._params = (ctypes.c_void_p * max(1, self._n))(*(base + o for o in encoder.offsets))
        self._address = ctypes.addressof(self._params)
        self._operands = operands
        self._plan: Any = None
        self._bound: Stream | None = None
        users = getattr(self.kernel.module, "users", None)
        if users is not None:
            users.add(self)
        for storage in operands.values():
            storage.users.add(self)

    __reduce_ex__ = Closing.__reduce_ex__

    def launch(self, stream: Stream) -> None:
        """Launch on ``stream``, with the parameters as they are now."""
        self._launch_checked(stream)

    def set(self, which: int | str, value: Any) -> None:
        """Change one parameter, by position or name, for later launches.

        Checked like an argument of :func:`launch`; on refusal the old value stays.
        """
        launcher = self._site.launcher
        encoder = launcher.encoder
        index = encoder.index(which)
        storages = encoder.pack_into(self._block, index, value, launcher.context)
        if encoder.params[index].pointer:
            self._replace(index, storages)

    def get(self, which: int | str) -> Any:
        """Value of one parameter as it will be launched: a number, or the address of a buffer."""
        encoder = self._site.launcher.encoder
        index = encoder.index(which)
        return encoder.decode(index, encoder.split(self._block.raw)[index])

    def _replace(self, index: int, storages: Sequence[Storage]) -> None:
        """Exchange the operand of one pointer; the next launch notes the use of the new one."""
        old = self._operands.pop(index, None)
        for storage in storages:
            self._operands[index] = storage
            storage.users.add(self)
        if old is not None and old not in self._operands.values():
            old.users.discard(self)
        self._bound = None
        if self._plan is not None:
            self._plan.bound = self._plan.bound_object = native.ffi.NULL

    def _operand_closed(self, operand: Any) -> None:
        self._dead = self._dead or operand.name
        if self._plan is not None:
            self._plan.dead = 1

    def _launch_checked(self, stream: Stream) -> None:
        site = self._site
        if self._dead:
            raise ClosedError(
                f"prepared launch of {self.kernel.name} (made at {self.where}): "
                f"{self._dead!r}, which it uses, was closed (launched from {caller()}). "
                "Prepare it again."
            )
        site.launch_at(stream, self._address, list(self._operands.values()))
        context = stream.context
        if self._plan is not None and stream.recording is None and not context.trace_lines:
            self._bound, self._plan.bound = stream, stream.cell
            self._plan.bound_object = native.ffi.cast("void *", id(stream))

    def __repr__(self) -> str:
        return f"<PreparedLaunch {self.kernel.name} {self.config.grid}x{self.config.block}>"


class _CompiledLaunch(native.Plan, PreparedLaunch):  # type: ignore[misc]
    """A prepared launch whose method :meth:`launch` is compiled code; see launch_object.c."""

    def __init__(self, site: _Site, block: bytes, operands: dict[int, Storage]) -> None:
        super().__init__(site, block, operands)
        gate = self._gate = site.launcher.context.native
        assert gate is not None
        plan = self._plan = native.cell_of(self, "mll_plan")
        plan.device, plan.func = gate.cell, site.cell.func
        plan.grid, plan.block = site.cell.grid, site.cell.block
        plan.shared_bytes, plan.n_params = site.cell.shared_bytes, self._n
        plan.params = native.ffi.cast("void **", self._address)
        plan.id = gate.number(self.kernel.name, self.where)

    def _launch_code(self, stream: Stream, code: int) -> None:
        """Go on where the compiled launch gave up: a driver result, or a reason to look."""
        if code > 0:
            raise driver_error(stream.context, code, "cuLaunchKernel", stream, self.kernel)
        self._launch_checked(stream)

    def __del__(self) -> None:
        if self._plan is not None and self._gate is not None:
            self._gate.forget(self._plan.id)


def launch_many(stream: Stream, prepared: Sequence[PreparedLaunch]) -> None:
    """Launch prepared launches in order.

    All are checked before the first is launched, so a refusal launches none.
    """
    if native.lib is not None:
        answer = native.Plan.launch_all(stream, prepared)
        if answer is None:
            return
        code, done = answer
        if code > 0:
            kernel = prepared[done].kernel
            raise driver_error(stream.context, code, "cuLaunchKernel", stream, kernel)
    expect_stream("launch_many", stream)
    if not isinstance(prepared, tuple | list):
        raise expect.refusal("launch_many", prepared, "a list of PreparedLaunch")
    for p in prepared:
        expect.kind("launch_many", p, PreparedLaunch, "a list of PreparedLaunch")
    for p in prepared:
        p._site.check_stream(stream)
        if p._dead:
            p._launch_checked(stream)  # raises by name
    for p in prepared:
        p.launch(stream)


class Launcher:
    """What is known about launching one kernel on one device; internal."""

    def __init__(self, context: Context, kernel: Kernel) -> None:
        if kernel.module.ctx != context.handle or kernel.module.driver is not context.driver:
            raise ArgumentError(
                f"{kernel.name} is loaded on another device than {context} (from {caller()}). "
                "Load its image with device.module(image) on the device of the stream.",
                kernel=kernel.name,
                expected=str(context),
                got="another device",
            )
        if kernel.module.closed:
            raise ClosedError(
                f"{kernel.name}: its module {kernel.module.image.name!r} is closed: used at "
                f"{caller()}. Keep the module open for as long as its kernels are used."
            )
        self.context, self.kernel = context, kernel
        encoder = self.encoder = Encoder(kernel)
        self.pack_noting, self.n_params = encoder.pack_noting, len(encoder.params)
        self.described = None if context.native is None else encoder.describe()
        self.sites: dict[LaunchConfig, _Site] = {}
        self.last: _Site | None = None
        self.dynamic_limit = 0

    @classmethod
    def of(cls, context: Context, kernel: Kernel) -> Launcher:
        """Give the launcher of a kernel; made once per context."""
        # By the kernel itself, for id() is told to audit hooks, which libraries install (filelock
        # from Python 3.12 on): 0.2 µs.
        expect.kind("kernel", kernel, Kernel, "a Kernel", "get one with module.kernel(name)")
        found = context.launchers.get(kernel)
        if found is None:
            found = context.launchers[kernel] = cls(context, kernel)
        return found

    def site(self, config: ConfigLike) -> _Site:
        """Give the checked combination with a configuration."""
        config = config_of(config)
        site = self.sites.get(config)
        if site is None:
            if len(self.sites) >= _MOST_SITES:
                self.sites.clear()
            site = self.sites[config] = _Site(self, config)
        return site


class _Site:
    """A kernel with a configuration that was checked against the device."""

    def __init__(self, launcher: Launcher, config: LaunchConfig) -> None:
        self.launcher, self.config = launcher, config
        self.grid, self.block = dim3("grid", config.grid), dim3("block", config.block)
        check_limits(launcher, config)
        self.attributes: LaunchAttributes | None = None
        if config.cluster is not None or config.programmatic or config.cooperative:
            cluster = None if config.cluster is None else dim3("cluster", config.cluster)
            self.attributes = LaunchAttributes(cluster, config.programmatic, config.cooperative)
        self.cell: Any = None
        gate = launcher.context.native
        offsets = launcher.encoder.offsets
        if gate is not None and self.attributes is None and len(offsets) <= 64:
            ffi = native.ffi
            self._offsets = ffi.new("uint32_t[]", list(offsets) or [0])
            cell = self.cell = ffi.new("mll_site *")
            cell.device = gate.cell
            cell.func = ffi.cast("void *", launcher.kernel.handle)
            cell.grid, cell.block = self.grid, self.block
            cell.shared_bytes, cell.n_params = config.shared_bytes, len(offsets)
            cell.offsets = self._offsets
            if launcher.described is not None:
                cell.params = launcher.described
            cell.context = ffi.cast("void *", id(launcher.context))
            cell.buffer_type = ffi.cast("void *", id(Buffer))
            self.address = native.address(cell)
            # The trace shows where the combination was first launched.
            cell.id = gate.number(launcher.kernel.name, caller())

    def __del__(self) -> None:
        gate = self.launcher.context.native
        if gate is not None and getattr(self, "cell", None) is not None:
            gate.forget(self.cell.id)

    def check_stream(self, stream: Stream) -> None:
        expect_stream(f"launch of {self.launcher.kernel.name}", stream)._check_open()
        if stream.context is not self.launcher.context:
            raise ArgumentError(
                f"{self.launcher.kernel.name} was prepared for {self.launcher.context}, stream "
                f"{stream.name!r} is on {stream.context} (from {caller()}). Use a stream of the "
                "kernel's device.",
                kernel=self.launcher.kernel.name,
                expected=str(self.launcher.context),
                got=str(stream.context),
            )

    def launch_block(self, stream: Stream, block: bytes, storages: Sequence[Storage]) -> None:
        buffer = ctypes.create_string_buffer(block, len(block))
        base, offsets = ctypes.addressof(buffer), self.launcher.encoder.offsets
        params = (ctypes.c_void_p * max(1, len(offsets)))(*(base + o for o in offsets))
        self.launch_at(stream, ctypes.addressof(params), storages)

    def launch_at(self, stream: Stream, params: int, storages: Sequence[Storage]) -> None:
        self.check_stream(stream)
        context, kernel = stream.context, self.launcher.kernel
        context.ensure()
        driver, shared = context.driver, self.config.shared_bytes
        if self.attributes is None:
            driver.cuLaunchKernel(
                kernel.handle, self.grid, self.block, shared, stream.handle, params
            )
        else:
            driver.cuLaunchKernelEx(
                kernel.handle, self.grid, self.block, shared, stream.handle, params,
                self.attributes,
            )  # fmt: skip
        if stream.recording is not None:
            stream.recording.keeps.add_kernel(kernel)
        note_use(stream, *storages)


def driver_error(
    context: Context, code: int, call: str, stream: Stream, kernel: Kernel | None
) -> Exception:
    """Make the exception for a result code that the compiled path got from the driver."""
    make = context.driver.error_from
    error: Exception = make(code, call, stream.handle, kernel.handle if kernel else 0)
    context.note_error(error)
    return error
