"""``memra-lowlevel bench``: measure, print a table, write a result file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .result import Row

__all__ = ["GROUPS", "add_arguments", "run"]

GROUPS = ("ceilings", "launch", "replay", "append", "attend", "rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(GROUPS)}")
    parser.add_argument("--device", help="cuda:0, host … (default: cuda:0 where there is one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a result file")
    parser.add_argument("--no-peers", action="store_true", help="leave out other libraries")


def run(args: argparse.Namespace) -> int:
    """Run the command; status 2 for a group that does not exist."""
    from ..runtime.device import Device
    from . import attend, launch
    from .ceilings import Ceilings, measure
    from .result import write

    groups = args.groups or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        print(f"bench: no group {sorted(unknown)}; there are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    with Device(args.device) as device, device.stream(name="bench") as stream:
        print(f"bench on {device} ({device.name})", flush=True)
        small = device.kind == "host"
        ceilings = Ceilings([], {1: 0.0})
        if {"ceilings", "attend", "rows"} & set(groups):
            ceilings = measure(device, stream, (1,) if small else (1, 4, 16, 32, 64, 128, 256, 512))
            if "ceilings" in groups:
                rows += ceilings.rows
        if "launch" in groups:
            rows += launch.measure_launch(device, stream)
        if "replay" in groups:
            rows += launch.measure_replay(device, stream)
        if "append" in groups:
            rows += attend.measure_append(device, stream)
        if "attend" in groups:
            rows += attend.measure_attend(device, stream, ceilings, peers=not args.no_peers)
        if "rows" in groups:
            rows += attend.measure_rows(device, stream, ceilings)
        table(rows)
        if args.json:
            write(
                args.json, rows, device=device, ceilings={r.what: r.median for r in ceilings.rows}
            )
    return 0


def table(rows: list[Row]) -> None:
    """Print the rows: median, spread, floor and share of the ceiling."""
    width = max((len(row.what) for row in rows), default=0)
    for row in rows:
        text = f"{row.what:<{width}}  {row.median:9.3f} {row.unit} ±{row.spread:4.1%}"
        if row.floor is not None and row.share is not None:
            text += f"  floor {row.floor:8.3f}  {row.share:4.0%}"
        if "tb_per_s" in row.extra:
            text += f"  {row.extra['tb_per_s']} TB/s"
        print(text, flush=True)
