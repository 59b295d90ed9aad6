"""Plots of a result: attention's share of the ceiling, and its time, against the context."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .result import Row

__all__ = ["check_installed", "draw", "main", "series"]


def check_installed() -> None:
    """Refuse early where matplotlib is missing.

    Raises
    ------
    ArgumentError
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(
            "bench --plot needs matplotlib: pip install 'memra-lowlevel[plot]'", name="plot"
        )


def series(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of flat one-row attention by curve, sorted by context; at least two points each."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        numbers = row.extra
        if row.group != "attend" or numbers.get("window") or numbers.get("n_rows") != 1:
            continue
        what = row.peer or numbers.get("formats", "")
        curves.setdefault(f"{numbers['shape']} {what}", []).append(row)
    ordered = {name: sorted(c, key=lambda r: r.extra["ctx"]) for name, c in curves.items()}
    return {name: curve for name, curve in ordered.items() if len(curve) > 1}


def draw(path: Path, rows: Sequence[Row], about: Mapping[str, Any], seal: str = "") -> None:
    """Write a figure of two panels; the format follows the file's suffix.

    Parameters
    ----------
    path : Path
    rows : sequence of Row
    about : mapping
        The environment of the result.
    seal : str
        Of the result file; an SVG keeps it, so that a check can tell what it was drawn from.

    Raises
    ------
    ArgumentError
        When matplotlib is missing or the rows have no curve of attention.
    """
    check_installed()
    curves = series(rows)
    if not curves:
        raise ArgumentError(
            "bench --plot: no attention over two contexts was measured (group attend)", name="plot"
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "memra"  # the same rows give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    figure, (share, time) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for name, curve in curves.items():
        contexts = [row.extra["ctx"] for row in curve]
        style = {"linestyle": ":", "linewidth": 1.0} if curve[0].peer else {"marker": "o"}
        with_floor = [(row.extra["ctx"], row.share) for row in curve if row.share is not None]
        if with_floor:
            share.plot(*zip(*with_floor, strict=True), label=name, **style)
        (drawn,) = time.plot(contexts, [row.median for row in curve], label=name, **style)
        floors = [(row.extra["ctx"], row.floor) for row in curve if row.floor is not None]
        if floors and not curve[0].peer:
            time.plot(*zip(*floors, strict=True), color=drawn.get_color(), alpha=0.35)
    share.set(xlabel="keys", ylabel="share of the read ceiling", ylim=(0, 1.05))
    time.set(xlabel="keys", ylabel="µs (pale: the floor)", yscale="log")
    for panel in (share, time):
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    share.legend(fontsize=7)
    figure.suptitle(f"Decode attention, {about.get('device')}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": f"seal {seal}"} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from a result file: ``python -m memra_lowlevel.bench.plot RESULT.json FIGURE.svg``."""
    from .result import load

    parser = argparse.ArgumentParser(description="Draw a result file.")
    parser.add_argument("result", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args(argv)
    result = load(args.result)
    draw(args.figure, result.rows, result.environment, result.seal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
