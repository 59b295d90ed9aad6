"""The regression gate: ratios to ceilings of a new run against those of committed result files.

``benchmarks/reference.txt`` names the result files, one a line, relative to the repository; the
first that holds a row on the same kind of device counts. Only ratios taken within one run are
compared, never times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError
from .result import REPOSITORY, Result, Row, load, over, ratio

__all__ = ["LIMIT", "REFERENCE", "Loss", "Ratio", "losses", "ratios", "references"]

LIMIT = 0.05
"""Largest part of a ratio that may be lost."""

REFERENCE = REPOSITORY / "benchmarks" / "reference.txt"


class Ratio(NamedTuple):
    """Share of a ceiling, and which: the floor, or a row of the same run."""

    share: float
    over: str


@dataclass(frozen=True)
class Loss:
    """A row whose ratio fell: ``now`` and ``then`` are shares of a ceiling of their own run."""

    what: str
    now: float
    then: float
    reference: Path

    @property
    def part(self) -> float:
        """Part of the ratio that was lost."""
        return 1.0 - self.now / self.then

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.now:.1%} of its ceiling, {self.then:.1%} in "
            f"{self.reference.name}: {self.part:.1%} lost"
        )


def references(listing: Path = REFERENCE) -> list[Result]:
    """Read the committed result files; none without a listing.

    Raises
    ------
    ArgumentError
        A file that is named is missing, or is not what a benchmark wrote.
    """
    if not listing.exists():
        return []
    found = []
    for line in listing.read_text(encoding="utf-8").splitlines():
        name = line.partition("#")[0].strip()
        if not name:
            continue
        result = load(listing.parent.parent / name)
        if result.problems:
            raise ArgumentError(f"{listing}: {name}: {'; '.join(result.problems)}", name=name)
        found.append(result)
    return found


def ratios(rows: Sequence[Row]) -> dict[str, Ratio]:
    """Share of a ceiling by row, for our own rows that have one."""
    found = {row.what: (ratio(row, rows), over(row)) for row in rows if row.peer is None}
    return {
        what: Ratio(share, ceiling) for what, (share, ceiling) in found.items() if share is not None
    }


def losses(
    now: dict[str, Ratio], device: str, committed: Iterable[Result], limit: float = LIMIT
) -> list[Loss]:
    """Tell which rows lost more than ``limit`` of their ratio to the same ceiling.

    Parameters
    ----------
    now : dict of str to Ratio
        From :func:`ratios`.
    device : str
        ``environment["device"]`` of the new run; other devices are not compared.
    committed : iterable of Result
    """
    found, known = [], set()
    for result in committed:
        if result.environment.get("device") != device:
            continue
        for what, (then, ceiling) in ratios(result.rows).items():
            if what in known or what not in now or now[what].over != ceiling:
                continue
            known.add(what)
            share = now[what].share
            if then > 0 and not share >= then * (1.0 - limit):  # NaN is a loss
                found.append(Loss(what, share, then, result.path))
    return found
