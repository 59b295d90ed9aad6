"""Settings of the host device."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = ["HostOptions", "Order", "current_options", "host_options"]

Order = Literal["forward", "reverse", "random"]
_ORDERS = ("forward", "reverse", "random")
KERNEL_SECONDS = 600.0


@dataclass(frozen=True)
class HostOptions:
    """How the host device runs work.

    Attributes
    ----------
    seed : int
        Seed of all random choices.
    order : str
        Which of the operations that may run next runs next: ``"forward"`` (the oldest),
        ``"reverse"`` (the newest) or ``"random"``.
    thread_order : str
        The same for the threads of a block inside a kernel.
    workers : int
        Operating-system threads that run the blocks of a kernel.
    check : bool
        Kernels that are compiled from then on report races, reads of memory that nobody wrote,
        accesses one byte or more outside an allocation, and indices outside a ``__shared__`` array
        (they are several times slower); freed stream-ordered memory is never reused, so that a
        late access is found. Memory allocated before counts as written, and kernels that a device
        has loaded stay as they are: set this before the first ``Device``. For one kernel of your
        own, ``CompileOptions(check=True)``; memory counts as unwritten then from its loading on.

        Where an allocation was given to a kernel in parts (views, slices of an arena), what lies
        beside all parts is out of bounds too, unless the kernel may have the address from
        elsewhere, such as a table of up to 1 MiB that it was given. (A pointer in a larger one, or
        in a ``__device__`` variable, is not looked for: give the kernel the whole buffer then.) A
        view that begins where a larger living one does counts as that one.

        Without it are reported: divergent barriers, and what touches a page outside an allocation.
        That is all that lies behind its end, but for up to 15 bytes where its size is no multiple
        of 16, and before its begin what is further than the rest of its page; stray writes nearer
        than that are found when the memory is given back to the system.
    n_devices : int
        Number of host devices; read when the driver is made.
    memory_bytes : int
        Memory of each device; an allocation beyond it fails as on a GPU.
    max_pending : int
        Operations that may wait before an asynchronous call runs some of them.
    kernel_seconds : float
        Time that one launch may take; one that needs longer loops for ever, and ends in
        ``Deadlock``, which names where. ``math.inf`` sets no limit. The default is far beyond
        what kernels need even in check mode: ten minutes.
    """

    seed: int = 0
    order: Order = "random"
    thread_order: Order = "forward"
    workers: int = 1
    check: bool = False
    n_devices: int = 4
    memory_bytes: int = 64 << 30
    max_pending: int = 1024
    kernel_seconds: float = KERNEL_SECONDS

    def __post_init__(self) -> None:
        for name in ("order", "thread_order"):
            if getattr(self, name) not in _ORDERS:
                raise ValueError(f"{name} must be one of {_ORDERS}, not {getattr(self, name)!r}")
        for name in ("workers", "n_devices", "max_pending", "memory_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.kernel_seconds > 0:
            raise ValueError(f"kernel_seconds must be above 0, not {self.kernel_seconds}")


class _Holder:
    def __init__(self) -> None:
        self.options = HostOptions(workers=min(4, os.cpu_count() or 1))
        self.generation = 0
        self.lock = threading.Lock()

    def set(self, options: HostOptions) -> None:
        with self.lock:
            self.options = options
            self.generation += 1


_HOLDER = _Holder()


def current_options() -> HostOptions:
    """Return the settings in force."""
    return _HOLDER.options


def options_generation() -> int:
    """Count of changes; the scheduler reseeds itself when it moves."""
    return _HOLDER.generation


class host_options:
    """Change settings of the host device, for all threads.

    They hold from the call on; used in a ``with`` statement, until the end of the block. The call
    also reseeds the random choices, so that what follows can be repeated. Arguments left out keep
    their value. See :class:`HostOptions` for their meaning.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        order: Order | None = None,
        thread_order: Order | None = None,
        workers: int | None = None,
        check: bool | None = None,
        memory_bytes: int | None = None,
        max_pending: int | None = None,
        kernel_seconds: float | None = None,
    ) -> None:
        self._before = _HOLDER.options
        given: dict[str, Any] = {
            "seed": seed,
            "order": order,
            "thread_order": thread_order,
            "workers": workers,
            "check": check,
            "memory_bytes": memory_bytes,
            "max_pending": max_pending,
            "kernel_seconds": kernel_seconds,
        }
        self.options = replace(self._before, **{k: v for k, v in given.items() if v is not None})
        _HOLDER.set(self.options)

    def __enter__(self) -> HostOptions:
        return self.options

    def __exit__(self, *_: object) -> None:
        _HOLDER.set(self._before)
