"""``memra-lowlevel bench``: measure, print a table, write a result file, draw."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .result import Row
    from .run import Run

__all__ = ["GROUPS", "add_arguments", "line", "measure_all", "run"]

GROUPS = {
    "ceilings": "ceilings:measure",
    "launch": "launch:measure_launch",
    "replay": "launch:measure_replay",
    "append": "append:measure_append",
    "attend": "attend:measure_attend",
    "rows": "attend:measure_rows",
    "latent": "latent:measure_latent",
    "recur": "recur:measure_recur",
    "model": "model:measure_model",
    "round": "model:measure_round",
    "layer_kv": "layer_kv:measure_layer_kv",
    "compile": "compiling:measure_compile",
}
"""Group to ``module:function``; each function takes the :class:`~.run.Run`."""

_DEFAULT = [name for name in GROUPS if name not in ("layer_kv", "compile")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP",
        help=f"any of {', '.join(GROUPS)} (default: all but layer_kv, compile)",
    )  # fmt: skip
    parser.add_argument("--device", help="cuda:0, host … (default: cuda:0 where there is one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a result file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw share of the ceiling against context"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave out other libraries")


def run(args: argparse.Namespace) -> int:
    """Run the command; status 1 if a group failed, 2 for a group that does not exist.

    The file is written after each group, so that what ends the process costs one group, not all.
    """
    from ..runtime.device import Device
    from . import plot, result
    from .run import Run

    groups = list(dict.fromkeys(args.groups)) or _DEFAULT
    if unknown := [name for name in groups if name not in GROUPS]:
        print(f"bench: no group {unknown}; there are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    if args.plot:
        plot.check_installed()
    with Device(args.device) as device, device.stream(name="bench") as stream:
        small = device.kind == "host"
        print(f"bench on {device} ({device.name})", flush=True)
        if small and set(groups) != {"layer_kv"}:  # that one runs on the CPU, whatever the device
            print(
                "reduced sizes: times of the host device say nothing about a GPU, so there are "
                "neither floors nor peers",
                flush=True,
            )
        about = result.environment(device)
        state = Run(device, stream, peers=not args.no_peers, small=small)

        def save() -> None:
            if args.json:
                result.write(args.json, state.rows, about=about, notes=state.notes)

        with _progress(groups, state) as begin:
            failed = measure_all(state, groups, begin, save)
        for note in dict.fromkeys(state.notes):
            print(f"not measured: {note}", flush=True)
        # A group that needs the ceilings leaves them in the file: they are what it is compared to.
        if args.json:
            print(f"bench: wrote {args.json}", flush=True)
        if args.plot:
            plot.draw(args.plot, state.rows, about)
            print(f"bench: wrote {args.plot}", flush=True)
    return 1 if failed else 0


def measure_all(
    state: Run, groups: Sequence[str], begin: Callable[[str], None], save: Callable[[], None]
) -> list[str]:
    """Measure groups, then the other libraries of all of them; give the groups that failed.

    What other libraries are asked to do is put off (:meth:`~.run.Run.later`): each leaves something
    in the process. ``begin`` is told each group, ``save`` is called after it.
    """
    failed: list[str] = []
    for name in groups:
        begin(name)
        if not _attempt(state, name, partial(measure, state, name)):
            failed.append(name)
            state.rows[:] = [row for row in state.rows if row.group != name]
        save()
    for name, others in state.take_later():
        if name in failed:
            continue
        state.group, kept = name, len(state.rows)
        if not _attempt(state, name, others):
            failed.append(name)
            del state.rows[kept:]
        save()
    return failed


def _attempt(state: Run, name: str, call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception as error:
        traceback.print_exc()
        state.notes.append(f"{name}: failed, {type(error).__name__}: {error}"[:300])
        return False
    return True


def measure(state: Run, name: str) -> None:
    """Measure one group into ``state``.

    Raises
    ------
    ArgumentError
        When this build has no such measurement.
    """
    module, _, function = GROUPS[name].partition(":")
    if importlib.util.find_spec(f"{__package__}.{module}") is None:
        raise ArgumentError(f"bench: the group {name!r} has no measurement in this build")
    state.group = name
    if name == "ceilings":
        _ = state.ceilings  # once, also when an earlier group needed them
        return
    call: Callable[[Run], Any] = getattr(
        importlib.import_module(f"{__package__}.{module}"), function
    )
    call(state)


def line(row: Row, rows: Sequence[Row], width: int = 56) -> str:
    """Give one line of the table: median, spread, floor, share, goal."""
    from .result import ratio

    text = f"{row.what:<{width}} {row.median:10.3f} {row.unit} ±{row.spread:5.1%}"
    if row.floor is not None:
        text += f"  floor {row.floor:9.3f}"
    share = ratio(row, rows)
    if share is not None:
        text += f"  {share:5.1%} of {'the floor' if row.floor is not None else row.baseline}"
    if row.goal is not None:
        text += f"  goal {row.goal:g}{' met' if row.median <= row.goal else ''}"
    if "bytes" in row.extra and row.unit == "us":
        text += f"  {row.extra['bytes'] / row.median / 1e6:.3f} TB/s"
    return text


@contextmanager
def _progress(groups: Sequence[str], state: Run) -> Iterator[Callable[[str], None]]:
    """Print each row as it comes; above it a bar over the groups, where there is a terminal."""
    heading: list[str] = []

    def headed(row: Row) -> list[str]:
        new = [] if heading == [row.group] else [f"-- {row.group}"]
        heading[:] = [row.group]
        return [*new, line(row, state.rows)]

    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        state.tell = lambda row: print("\n".join(headed(row)), flush=True)
        yield lambda name: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=len(groups))
        started: list[str] = []

        def begin(name: str) -> None:
            bar.update(task, description=name, completed=len(started))
            started.append(name)

        def tell(row: Row) -> None:
            bar.console.print("\n".join(headed(row)), markup=False, highlight=False, soft_wrap=True)

        state.tell = tell
        yield begin
