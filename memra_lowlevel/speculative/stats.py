"""What rounds did, and what the driver was asked for meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..driver.table import Driver

__all__ = ["HOST_WRITE_CALLS", "NODE_UPDATE_CALLS", "CallMeter", "SpecStats"]

NODE_UPDATE_CALLS = (
    "cuGraphExecKernelNodeSetParams",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams",
    "cuGraphExecUpdate",
)
"""Driver calls that change a node of an executable graph."""

HOST_WRITE_CALLS = (
    "cuMemcpyHtoD",
    "cuMemcpyHtoDAsync",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
)
"""Driver calls by which the host puts a value into device memory: copies and counter sets."""


@dataclass
class SpecStats:
    """Totals over rounds.

    Attributes
    ----------
    rounds, drafted, accepted, tokens : int
    rebases : int
        Rounds in which a ring of the target was rebased between drafts and verification.
    rebased_and_rejected : int
        Those of them that rejected a draft.
    by_accepted : dict of int to int
        Rounds by number of accepted drafts.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    rebases: int = 0
    rebased_and_rejected: int = 0
    by_accepted: dict[int, int] = field(default_factory=dict)

    @property
    def rejected(self) -> int:
        """Drafts that were not accepted."""
        return self.drafted - self.accepted

    @property
    def tokens_per_target_pass(self) -> float:
        """Committed tokens per verify; 1 is what decoding without drafts gives."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, drafted: int, accepted: int, rebased: bool = False) -> None:
        """Count one round."""
        self.rebases += rebased
        self.rebased_and_rejected += rebased and accepted < drafted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += accepted + 1
        self.by_accepted[accepted] = self.by_accepted.get(accepted, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "tokens": self.tokens,
            "tokens_per_target_pass": self.tokens_per_target_pass,
            "rebases": self.rebases,
            "rebased_and_rejected": self.rebased_and_rejected,
            "by_accepted": dict(sorted(self.by_accepted.items())),
        }


class CallMeter:
    """Counts driver calls by section of a round, read from the driver's own call table.

    Attributes
    ----------
    calls : dict of str to Counter
        Calls by name, per section; what an inner section counts, the outer one does not.
    seconds : dict of str to float
        Time per section, inner sections included.
    units : dict of str to int
        What the section was asked to do, as its caller says (draft steps of a replay).
    """

    def __init__(self, driver: Driver):
        self.driver = driver
        self.calls: dict[str, Counter[str]] = {}
        self.seconds: dict[str, float] = {}
        self.units: dict[str, int] = {}
        self._inner: list[Counter[str]] = []

    @contextmanager
    def __call__(self, name: str, units: int = 0) -> Iterator[None]:
        """Count what happens inside as section ``name``."""
        self._inner.append(Counter())
        before = dict(self.driver.counts())
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            delta = Counter(dict(self.driver.counts()))
            delta.subtract(before)
            inner = self._inner.pop()
            if self._inner:
                self._inner[-1].update(delta)
            delta.subtract(inner)
            section = self.calls.setdefault(name, Counter())
            section.update({call: n for call, n in delta.items() if n})
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.units[name] = self.units.get(name, 0) + units

    def count(self, name: str, *calls: str) -> int:
        """Return how often any of ``calls`` was made in section ``name``; all calls if none."""
        section = self.calls.get(name, Counter())
        return sum(section[c] for c in calls) if calls else sum(section.values())
