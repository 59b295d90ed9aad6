"""Whether two independent runs say the same: the ratios of two result files, row by row.

``python -m memra_lowlevel.bench.agree FILE FILE [FILE …]`` prints what differs by more than the
bound, and how many ratios were compared. Compared are ratios taken within one run (the share of a
ceiling, the ratio to C, the time of several rows over that of one), never times. Where the first
two runs differ, a further one may repeat either.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError
from .result import Result, Row, load, over, ratio

__all__ = ["BOUND", "Pair", "compare", "independent", "main", "repeated"]

BOUND = 0.03
"""Largest difference of two ratios, as a part of the smaller one."""


@dataclass(frozen=True)
class Pair:
    """A ratio of ours in two runs.

    Attributes
    ----------
    what : str
        Name of the row.
    group : str
        Group of the benchmark.
    over : str
        What the row is compared with.
    first, second : float
        The ratio in each run.
    loaded : (list of str or None, list of str or None)
        Other libraries that each run had imported by then; None where the file does not tell.
    """

    what: str
    group: str
    over: str
    first: float
    second: float
    loaded: tuple[list[str] | None, list[str] | None] = (None, None)

    @property
    def alike(self) -> bool:
        """Whether both were measured beside the same libraries, as far as the files tell."""
        return None in self.loaded or self.loaded[0] == self.loaded[1]

    @property
    def difference(self) -> float:
        """How much the larger ratio exceeds the smaller one, as a part of that; may be NaN."""
        low, high = sorted((self.first, self.second))
        return high / low - 1.0 if low > 0 else math.nan

    def differs(self, bound: float = BOUND) -> bool:
        """Whether the difference is larger than ``bound``, or no number."""
        return not self.difference <= bound


def compare(first: Iterable[Row], second: Iterable[Row]) -> tuple[list[Pair], list[Pair]]:
    """Pair the ratios that both runs have, in the order of the first one.

    Returns
    -------
    (alike, unlike)
        Those measured beside the same libraries, and the others, which are no comparison: what a
        library leaves in a process makes kernels slower.
    """
    other = _ratios(second)
    pairs = [
        Pair(what, group, over, value, other[what, over][1], (loaded, other[what, over][2]))
        for (what, over), (group, value, loaded) in _ratios(first).items()
        if (what, over) in other
    ]
    return [p for p in pairs if p.alike], [p for p in pairs if not p.alike]


def repeated(pair: Pair, runs: Iterable[Result], bound: float = BOUND) -> bool:
    """Whether one of further runs is within the bound of one of the two of a pair."""
    for run in runs:
        found = _ratios(run.rows).get((pair.what, pair.over))
        for value, loaded in zip((pair.first, pair.second), pair.loaded, strict=True):
            if found is None:
                continue
            other = Pair(pair.what, pair.group, pair.over, value, found[1], (loaded, found[2]))
            if other.alike and not other.differs(bound):
                return True
    return False


def independent(first: Result, second: Result) -> None:
    """Refuse two files that are not two sound runs of the same code on one kind of device.

    Raises
    ------
    ArgumentError
        A broken file, one run given twice, another device, other sources.
    """
    names = f"{first.path.name} and {second.path.name}"
    for result in (first, second):
        if result.problems:
            raise ArgumentError(f"{result.path}: {'; '.join(result.problems)}", name="path")
    if first.seal == second.seal:
        raise ArgumentError(f"{names} are the same run; measure a second time", name="path")
    devices = [result.environment.get("device") for result in (first, second)]
    if devices[0] != devices[1]:
        raise ArgumentError(
            f"{names} ran on {devices[0]} and {devices[1]}: only ratios of one kind of device are "
            "comparable",
            name="path",
        )
    families = [result.environment.get("families", {}) for result in (first, second)]
    groups = {row.group for row in first.rows} & {row.group for row in second.rows}
    if other := sorted(g for g in groups if families[0].get(g) != families[1].get(g)):
        raise ArgumentError(
            f"{names} measured different sources of {', '.join(other)}; measure both again from "
            "one commit",
            name="path",
        )


_Found = tuple[str, float, "list[str] | None"]


def _ratios(rows: Iterable[Row]) -> dict[tuple[str, str], _Found]:
    """Every ratio of our own rows: (row, compared with) to group, ratio and libraries loaded."""
    rows = list(rows)
    found: dict[tuple[str, str], _Found] = {}
    for row in rows:
        if row.peer is not None:
            continue
        share = ratio(row, rows)
        if share is not None:
            found[row.what, over(row)] = (row.group, share, row.loaded)
        if "over_one_row" in row.extra:
            found[row.what, "one row"] = (row.group, float(row.extra["over_one_row"]), row.loaded)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compare result files; status 1 if a ratio is not repeated, 2 if they cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m memra_lowlevel.bench.agree",
        description="Compare the ratios of independent runs of the benchmark.",
    )
    parser.add_argument("first", type=Path, metavar="FILE", help="result file")
    parser.add_argument("second", type=Path, metavar="FILE", help="result file of another run")
    parser.add_argument("more", nargs="*", type=Path, metavar="FILE", help="of further runs")
    parser.add_argument(
        "--bound", type=_bound, default=BOUND, metavar="PART",
        help=f"largest difference, as a part of the smaller ratio (default {BOUND})",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        first, second, *more = runs = [load(p) for p in (args.first, args.second, *args.more)]
        for one, other in itertools.combinations(runs, 2):
            independent(one, other)
    except ArgumentError as error:
        print(f"agree: {error}", file=sys.stderr)
        return 2
    pairs, unlike = compare(first.rows, second.rows)
    for pair in unlike:
        beside = " and ".join(", ".join(names or []) or "none" for names in pair.loaded)
        print(f"{pair.what:<56} over {pair.over:<24} not compared: loaded were {beside}")
    if not pairs:
        what = "that was measured beside the same libraries" if unlike else "in common"
        print(f"agree: the files have no ratio {what}", file=sys.stderr)
        return 2
    apart = [pair for pair in pairs if pair.differs(args.bound)]
    again = [pair for pair in apart if repeated(pair, more, args.bound)]
    for pair in sorted(apart, key=lambda p: p.difference, reverse=True):
        print(
            f"{pair.what:<56} over {pair.over:<24} {pair.first:7.3f} {pair.second:7.3f} "
            f"{pair.difference:7.1%}{' repeated by a further run' if pair in again else ''}"
        )
    common = len(pairs) + len(unlike)
    alone = len(_ratios(first.rows)) + len(_ratios(second.rows)) - 2 * common
    print(
        f"agree: {len(pairs)} ratios compared, {len(apart)} differ by more than {args.bound:.1%}"
        + (f", {len(again)} of them repeated by a further run" if more else "")
        + (f"; {len(unlike)} not compared, for other libraries were loaded" if unlike else "")
        + (f"; {alone} stand in one file only" if alone else "")
    )
    return 1 if len(apart) > len(again) else 0


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if not 0 <= bound < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no part of a ratio; give a number of at least 0"
        )
    return bound


if __name__ == "__main__":
    sys.exit(main())
