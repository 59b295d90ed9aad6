"""Loaded code: modules and their kernels.

A :class:`Kernel` knows its parameters from two sides: offset and size from the driver (or the
compiled code), name and type from the source. They must agree when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import expect
from ..closing import Closing
from ..driver.table import FuncAttribute
from ..errors import ArgumentError, ClosedError, DriverError
from .signature import CTYPES, ParamDecl, Signature

if TYPE_CHECKING:
    from ..driver.table import Driver
    from .image import CompiledImage

__all__ = ["Kernel", "Module", "Param"]

_POINTER_BYTES = 8


@dataclass(frozen=True)
class Param:
    """One parameter of a loaded kernel.

    Attributes
    ----------
    name : str
        ``"arg3"`` where the source gives none.
    ctype : str
        Declared type without qualifiers; ``"?"`` where the source is not understood.
    offset, size : int
        In the parameter block, bytes.
    pointer : bool
    dtype : str
        NumPy name of the pointee or of the scalar; ``""`` for structs and unknown types.
    nullable : bool
        None may be passed.
    const : bool
        The kernel only reads through the pointer.
    """

    name: str
    ctype: str
    offset: int
    size: int
    pointer: bool
    dtype: str
    nullable: bool = False
    const: bool = False


class Kernel:
    """One entry point of a :class:`Module`, which it keeps alive.

    Attributes
    ----------
    name : str
        As asked for: ``"append_kv"`` or ``"scale<64, float>"``.
    symbol : str
    handle : int
        The driver's function handle.
    params : tuple of Param
    param_bytes : int
        Size of the parameter block.
    module : Module
    image : CompiledImage
    """

    __slots__ = (
        "_attributes",
        "handle",
        "image",
        "module",
        "name",
        "param_bytes",
        "params",
        "symbol",
    )

    def __init__(self, module: Module, name: str, symbol: str, handle: int):
        self.module, self.name, self.symbol, self.handle = module, name, symbol, handle
        self.image = module.image
        self.params = _join(
            name, self.image.signatures.get(name), _layout(module, name, symbol, handle)
        )
        self.param_bytes = max((p.offset + p.size for p in self.params), default=0)
        self._attributes: dict[str, int] | None = None

    @property
    def attributes(self) -> Mapping[str, int]:
        """What the driver says of the kernel, by lower-case name of ``FuncAttribute``.

        ``max_threads_per_block``, ``shared_size_bytes``, ``local_size_bytes``, ``num_regs``,
        ``binary_version``, ``max_dynamic_shared_size_bytes`` …; read once, updated by
        :meth:`set_attribute`. An attribute that the driver does not know is absent.
        """
        if self._attributes is None:
            driver, found = self.module.driver, {}
            for attribute in FuncAttribute:
                try:
                    found[attribute.name.lower()] = driver.cuFuncGetAttribute(
                        attribute, self.handle
                    )
                except DriverError:
                    continue
            self._attributes = found
        return self._attributes

    def set_attribute(self, attribute: FuncAttribute, value: int) -> None:
        """Set an attribute of the kernel, e.g. the limit of dynamic shared memory."""
        self.module.driver.cuFuncSetAttribute(self.handle, attribute, value)
        if self._attributes is not None:
            self._attributes[attribute.name.lower()] = value

    def __repr__(self) -> str:
        inner = ", ".join(f"{'const ' * p.const}{p.ctype} {p.name}" for p in self.params)
        return f"<Kernel {self.name}({inner}) {_made_for(self.image)}>"


class Module(Closing):
    """A :class:`CompiledImage` loaded into a context.

    Parameters
    ----------
    driver : Driver
    ctx : int
        Context handle; made current for the load.
    image : CompiledImage

    Kernels keep their module alive, and whoever launches or captures a kernel keeps the kernel.
    :meth:`close` unloads; a module that is still named by an executable graph must stay open.
    """

    def __init__(self, driver: Driver, ctx: int, image: CompiledImage):
        self.driver, self.ctx, self.image = driver, ctx, image
        self._kernels: dict[str, Kernel] = {}
        driver.cuCtxSetCurrent(ctx)
        self._handle: int | None = driver.cuModuleLoadData(image.data)

    @property
    def handle(self) -> int:
        """The driver's module handle."""
        if self._handle is None:
            raise ClosedError(f"module {self.image.name!r} was closed")
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._handle is None

    def kernel(self, name: str) -> Kernel:
        """Get a kernel by name or name expression; the same object each time.

        Raises
        ------
        ArgumentError
            When the module has no such kernel, or its parameters differ from the source's.
        """
        expect.kind(f"{self.image.name}: kernel", name, str, "a name or name expression")
        kernel = self._kernels.get(name)
        if kernel is not None:
            return kernel
        symbol = self.image.symbol(name)
        if symbol is None:
            have = ", ".join(sorted(self.image.entries)) or "none"
            raise ArgumentError(
                f"{self.image.name} has no kernel {name!r}; it has {have}. A template instance "
                "must be named in name_expressions when the source is compiled",
                kernel=name,
            )
        known = next(n for n, s in self.image.entries.items() if s == symbol)
        if self.image.symbol(known) == symbol and known != name and known in self._kernels:
            return self._kernels.setdefault(name, self._kernels[known])
        self.driver.cuCtxSetCurrent(self.ctx)
        handle = self.driver.cuModuleGetFunction(self.handle, symbol)
        self.driver.name_handle(handle, name)
        return self._kernels.setdefault(name, Kernel(self, name, symbol, handle))

    def close(self) -> None:
        """Unload the module; its kernels must not be used any more. Idempotent."""
        handle, self._handle = self._handle, None
        self._kernels.clear()
        if handle is not None:
            self.driver.cuCtxSetCurrent(self.ctx)
            self.driver.cuModuleUnload(handle)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.image.entries)} kernels"
        return f"<Module {self.image.name} {_made_for(self.image)}, {state}>"


def _made_for(image: CompiledImage) -> str:
    return image.arch if image.arch == image.rung else f"{image.arch} {image.rung}"


def _layout(module: Module, name: str, symbol: str, handle: int) -> tuple[tuple[int, int], ...]:
    """Parameter layout: the driver's own where it tells, else the compiled code's, else by rule."""
    found: list[tuple[int, int]] = []
    try:
        while (info := module.driver.cuFuncGetParamInfo(handle, len(found))) is not None:
            found.append(info)
        return tuple(found)
    except (DriverError, AttributeError, NotImplementedError):
        pass  # drivers before 12.4 lack the call
    if symbol in module.image.layouts:
        return module.image.layouts[symbol]
    signature = module.image.signatures.get(name)
    if signature is None:
        raise ArgumentError(
            f"the parameters of {name!r} are unknown: the driver lacks cuFuncGetParamInfo, PTX "
            "tells none, and the source is not understood. Use a driver from 12.4 on",
            kernel=name,
        )
    return _natural(name, signature)


def _natural(name: str, signature: Signature) -> tuple[tuple[int, int], ...]:
    """C's layout rule: each parameter at the next multiple of its own size."""
    layout, at = [], 0
    for p in signature.params:
        size = _POINTER_BYTES if p.pointer else CTYPES.get(p.ctype, (0, ""))[0]
        if not size:
            raise ArgumentError(
                f"the size of parameter {p.name!r} ({p.ctype}) of {name!r} is unknown",
                kernel=name,
                name=p.name,
            )
        at = -(-at // size) * size
        layout.append((at, size))
        at += size
    return tuple(layout)


def _join(
    name: str, signature: Signature | None, layout: tuple[tuple[int, int], ...]
) -> tuple[Param, ...]:
    """Put names and types to offsets and sizes; raises ArgumentError where they contradict."""
    if signature is None:
        return tuple(
            Param(f"arg{i}", "?", offset, size, False, "")
            for i, (offset, size) in enumerate(layout)
        )
    if len(signature.params) != len(layout):
        raise ArgumentError(
            f"{name!r} has {len(layout)} parameters as loaded and {len(signature.params)} in its "
            "source; the code and the source do not belong together",
            kernel=name,
            expected=str(len(layout)),
            got=str(len(signature.params)),
        )
    return tuple(_param(name, i, p, *layout[i]) for i, p in enumerate(signature.params))


def _param(kernel: str, index: int, p: ParamDecl, offset: int, size: int) -> Param:
    known, dtype = CTYPES.get(p.pointee if p.pointer else p.ctype, (0, ""))
    expected = _POINTER_BYTES if p.pointer else known
    if expected and expected != size:
        raise ArgumentError(
            f"parameter {index} ({p.ctype} {p.name}) of {kernel!r} takes {size} bytes as loaded "
            f"and {expected} by its source",
            kernel=kernel,
            index=index,
            name=p.name,
            expected=str(expected),
            got=str(size),
        )
    return Param(
        p.name or f"arg{index}", p.ctype, offset, size, p.pointer, dtype, p.nullable, p.const
    )
