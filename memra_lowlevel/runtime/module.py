"""Loading code onto a device: a module that stays while an executable graph names it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..compile import CompiledImage, Kernel, Module
from ..compile.arch import HOST
from ..driver.trace import caller
from ..errors import ArchUnsupported
from .recording import forbid

if TYPE_CHECKING:
    from .context import Context

__all__ = ["LoadedModule"]


class LoadedModule(Module):
    """A module of :meth:`Device.module`; loading is refused under capture, unloading waits.

    Graphs :meth:`hold` it; :meth:`close` then takes effect when the last of them is closed.
    """

    def __init__(self, context: Context, image: CompiledImage) -> None:
        forbid("cuModuleLoadData", what=f"module {image.name!r}")
        if (image.kind == "host") != (context.arch == HOST):
            raise ArchUnsupported(
                f"module {image.name!r}: the image is for {image.arch}, device {context} needs "
                f"{context.arch!r} (from {caller()}). Compile with arch=device.arch.",
                want=context.arch,
                have=(image.arch,),
            )
        context.activate()
        super().__init__(context.driver, context.handle, image)
        self.context = context
        self.name = image.name
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holds = 0
        self._closing = False
        context.modules.add(self)

    def kernel(self, name: str) -> Kernel:
        """Get a kernel by name or name expression; the same object each time."""
        self.context.activate()
        return super().kernel(name)

    def hold(self) -> None:
        """Keep the code loaded even after ``close()``, until :meth:`release`."""
        self._holds += 1

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self._holds -= 1
        if self._closing:
            self.close()

    def close(self) -> None:
        """Unload, once no graph holds the module."""
        self._closing = True
        if self._holds == 0 and not self.closed:
            forbid("cuModuleUnload", what=f"module {self.image.name!r}")
            # Work in flight may still run the code.
            self.context.activate()
            try:
                self.driver.cuCtxSynchronize()
            finally:
                self.unload()

    def unload(self) -> None:
        """Unload at once; for a context that ends, with no work in flight."""
        for user in list(self.users):
            user._operand_closed(self)
        for kernel in self._kernels.values():
            self.context.launchers.pop(kernel, None)
        super().close()
