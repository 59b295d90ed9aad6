"""Pending work of the host device: a graph of operations, run in an order that may be random.

An operation waits for others; everything else is free. A GPU promises no more than that, so a
program that forgot an event gets, over some seeds, the order that it did not think of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Protocol

from .options import current_options, options_generation

__all__ = ["Op", "Schedule", "Work"]


class Work(Protocol):
    """What an operation or a graph node does."""

    label: str

    def run(self) -> None:
        """Do it now; errors are reported at the next synchronisation."""
        ...


class _Failure:
    """An error of an operation, and the position at which somebody was told of it."""

    __slots__ = ("error", "told")

    def __init__(self, error: Exception):
        self.error = error
        self.told: int | None = None

    def cancels(self, op: Op) -> bool:
        """Whether a dependent is cancelled; not what was submitted by those who knew."""
        return self.told is None or op.seq < self.told


class Op:
    """One pending or finished operation.

    Attributes
    ----------
    seq : int
        Position in the order of submission.
    waits : int
        Operations that must still finish before this one.
    done : bool
        Finished or cancelled.
    """

    __slots__ = ("always", "cancelled", "device", "done", "next", "seq", "stream", "waits", "work")

    def __init__(self, work: Work | None, device: int, stream: int, always: bool = False):
        self.work = work
        self.device = device
        self.stream = stream
        self.always = always
        self.seq = 0
        self.waits = 0
        self.next: list[Op] = []
        self.done = False
        self.cancelled: _Failure | None = None


class Schedule:
    """All pending operations of all host devices.

    A failed operation cancels those that depend on it (but never a release of memory), as far as
    they were submitted before its error was told, at the next synchronisation of its device.
    """

    def __init__(self) -> None:
        self._ready: list[Op] = []
        self._seq = 0
        self.pending: dict[int, int] = {}
        self.n_pending = 0
        self.executed = 0
        self._errors: dict[int, list[_Failure]] = {}
        self._rng = random.Random(0)
        self._generation = -1

    def add(self, op: Op, after: Iterable[Op | None]) -> None:
        """Submit an operation that runs after the given ones."""
        op.seq = self._seq
        self._seq += 1
        for before in after:
            if before is None:
                continue
            if before.done:
                continue
            before.next.append(op)
            op.waits += 1
        self.n_pending += 1
        self.pending[op.device] = self.pending.get(op.device, 0) + 1
        if op.waits == 0:
            self._ready.append(op)

    def relieve(self) -> None:
        """Run some operations if too many wait, as a GPU with a full queue makes callers wait."""
        limit = current_options().max_pending
        if self.n_pending > limit:
            self.run_until(lambda: self.n_pending <= limit // 2)

    def run_until(self, finished: Callable[[], bool]) -> None:
        """Run operations in the order of the options until the condition holds."""
        pick = self._picker()
        while not finished():
            if not self._ready:
                raise RuntimeError("host device: operations wait for something that cannot happen")
            self._execute(self._ready.pop(pick()))

    def run_some(self) -> None:
        """Run a random number of operations, at least one: time passes."""
        if not self._ready:
            return
        pick = self._picker()
        for _ in range(self._rng.randint(1, 1 + self.n_pending // 2)):
            if not self._ready:
                return
            self._execute(self._ready.pop(pick()))

    def random(self) -> random.Random:
        """Return the source of random choices, reseeded when the options changed."""
        if self._generation != options_generation():
            self._generation = options_generation()
            self._rng = random.Random(current_options().seed)
        return self._rng

    def unseen(self, device: int) -> list[_Failure]:
        """Failures of a device that nobody was told of."""
        return list(self._errors.get(device, ()))

    def take_errors(self, device: int) -> list[Exception]:
        """Hand over the errors of a device that nobody saw yet."""
        failures = self._errors.pop(device, [])
        for failure in failures:
            failure.told = self._seq
        return [failure.error for failure in failures]

    def _picker(self) -> Callable[[], int]:
        """Return a function that gives the index in the ready list of what runs next."""
        rng = self.random()
        ready = self._ready
        order = current_options().order
        if order == "forward":
            return lambda: min(range(len(ready)), key=lambda i: ready[i].seq)
        if order == "reverse":
            return lambda: max(range(len(ready)), key=lambda i: ready[i].seq)
        # Uniform choices alone hardly ever starve a stream for long, which is what it takes to
        # find a missing edge behind a long chain; so some drains run depth or breadth first, and
        # some prefer streams.
        style = rng.randrange(5)
        if style == 0:
            return lambda: len(ready) - 1
        if style == 1:
            return lambda: 0
        if style == 2:
            liking: dict[int, float] = {}

            def favourite() -> int:
                best, at = -1.0, 0
                for i, op in enumerate(ready):
                    like = liking.get(op.stream)
                    if like is None:
                        like = liking[op.stream] = rng.random()
                    if like > best:
                        best, at = like, i
                return at

            return favourite
        return lambda: int(rng.random() * len(ready))

    def _execute(self, op: Op) -> None:
        if op.work is not None and (op.always or op.cancelled is None):
            try:
                op.work.run()
            except Exception as error:  # reported at the next synchronisation
                op.cancelled = _Failure(error)
                self._errors.setdefault(op.device, []).append(op.cancelled)
            self.executed += 1
        op.done = True
        op.work = None
        self.n_pending -= 1
        self.pending[op.device] -= 1
        for after in op.next:
            after.waits -= 1
            if op.cancelled is not None and op.cancelled.cancels(after):
                after.cancelled = op.cancelled
            if after.waits == 0:
                self._ready.append(after)
        op.next = []
