"""Plots of a result: attention against the context, and every kernel against the memory's roof."""

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
        raise ArgumentError("bench --plot needs matplotlib: pip install matplotlib", name="plot")


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


def roof(rows: Iterable[Row]) -> tuple[list[tuple[float, float]], dict[str, list[Row]]]:
    """Give the read ceiling as (bytes, bytes per µs) by size, and our rows with bytes by group."""
    ceiling: list[tuple[float, float]] = []
    points: dict[str, list[Row]] = {}
    for row in rows:
        if "bytes" not in row.extra or row.unit != "us" or row.peer is not None:
            continue
        if row.group == "ceilings":
            if row.what.startswith("read") and "L2" not in row.what:
                ceiling.append((row.extra["bytes"], row.extra["bytes"] / row.median))
        else:
            points.setdefault(row.group, []).append(row)
    return sorted(ceiling), points


def draw(path: Path, rows: Sequence[Row], about: Mapping[str, Any], seal: str = "") -> None:
    """Write a figure; the format follows the file's suffix.

    Three panels: attention's share of the ceiling and its time, against the context, and the rate
    at which each of our kernels moves its bytes, below the rate of a pure read.

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
    figure, (share, time, rate) = pyplot.subplots(1, 3, figsize=(17, 4.8), layout="constrained")
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
    ceiling, groups = roof(rows)
    if ceiling:
        rate.plot(
            *zip(*[(n, r / 1e6) for n, r in ceiling], strict=True), color="black", label="read"
        )
    for group, points in groups.items():
        n_bytes = [row.extra["bytes"] for row in points]
        speeds = [n / row.median / 1e6 for n, row in zip(n_bytes, points, strict=True)]
        rate.plot(n_bytes, speeds, "o", markersize=3, label=group)
    rate.set(xlabel="bytes", ylabel="TB/s", xscale="log", yscale="log")
    rate.grid(alpha=0.3)
    rate.legend(fontsize=7)
    figure.suptitle(f"Decode attention and the memory's roof, {about.get('device')}", fontsize=10)
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
