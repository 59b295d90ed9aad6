"""Who lives how long: the list of captures in progress, the queue of dead handles, the census.

Finalisers run on any thread, at any allocation, also in the middle of a capture. They therefore
never call the driver: they append one closure to the queue of their context. The queue is emptied
at safe points (an allocation, a synchronisation, the end of a capture, a ``close()``), and only
while no stream of this process is being captured.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..closing import Closing
from ..driver.trace import caller
from ..errors import ClosedError, LeakError

if TYPE_CHECKING:
    from .context import Context
    from .recording import Recording

__all__ = [
    "Keepable", "Leak", "Owned", "capturing", "census", "gate", "living", "no_leaks", "recordings",
]  # fmt: skip

gate = threading.RLock()
"""Held while a capture begins or ends and while dead handles are destroyed."""

recordings: list[Recording] = []
"""Captures in progress, on any thread, oldest first. Changed under :data:`gate` only."""

_serial = itertools.count(1)
_live: weakref.WeakValueDictionary[int, Owned] = weakref.WeakValueDictionary()


def capturing() -> bool:
    """Whether any stream of this process is being captured through this library."""
    return bool(recordings)


class Owned(Closing):
    """Base of everything that owns a handle of the driver.

    Attributes
    ----------
    name : str
    closed : bool
    where : str
        ``file:line`` of the Python code that made the object.

    Notes
    -----
    ``close()`` is idempotent. An object that is dropped without it is closed by its finaliser,
    later, at a safe point.
    """

    kind = "object"
    internal = False

    def __init__(self, context: Context, name: str, reclaim: Callable[[], None]) -> None:
        self.context = context
        self.name = name
        self.serial = next(_serial)
        self.where = caller(2)
        # The closure must not refer to self, or it would keep it alive for ever.
        self._finalizer = weakref.finalize(self, context.bury, self.serial, reclaim)
        self._finalizer.atexit = False
        _live[self.serial] = self
        context.n_live += 1

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give the handle back; queued while any stream is being captured."""
        if self._finalizer.alive:
            self._before_close()
            self._finalizer()
            _live.pop(self.serial, None)
            self.context.reap()

    def _before_close(self) -> None:
        """Run before the handle is queued; a subclass refuses or marks here."""

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError(
                f"{self.kind} {self.name!r} (made at {self.where or '?'}) is closed: "
                f"used at {caller()}. Keep it open for as long as it is used."
            )

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<{type(self).__name__} {self.name!r}{state}>"


class Keepable(Owned):
    """Something that a graph keeps usable below, even after its owner closed it."""

    def hold(self) -> None:
        """Keep it even after ``close()``, until :meth:`release`."""
        raise NotImplementedError

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Leak:
    """One object that is still open.

    Attributes
    ----------
    kind, name, where, device : str
    n_bytes : int
        Memory it holds; 0 for streams, events and graphs.
    """

    kind: str
    name: str
    where: str
    device: str
    n_bytes: int
    serial: int

    def __str__(self) -> str:
        size = f", {self.n_bytes} bytes" if self.n_bytes else ""
        return f"{self.kind} {self.name!r} on {self.device}{size} (made at {self.where or '?'})"


def living(context: Context) -> list[Owned]:
    """Every open object of a context, oldest first."""
    return [o for _, o in sorted(_live.items()) if o.context is context and not o.closed]


def census(context: Context | None = None) -> list[Leak]:
    """Every object that owns a handle and is not closed, oldest first."""
    found = []
    for serial, owned in sorted(_live.items()):
        if owned.internal or owned.closed or (context is not None and owned.context is not context):
            continue
        n_bytes = int(getattr(owned, "n_bytes", 0))
        found.append(Leak(owned.kind, owned.name, owned.where, str(owned.context), n_bytes, serial))
    return found


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Raise :class:`~memra_lowlevel.errors.LeakError` if the block leaves open objects behind."""
    before = {leak.serial for leak in census()}
    yield
    left = [str(leak) for leak in census() if leak.serial not in before]
    if left:
        raise LeakError(
            f"{len(left)} object(s) left open:\n  " + "\n  ".join(left) + "\nCall close() on each.",
            objects=left,
        )
