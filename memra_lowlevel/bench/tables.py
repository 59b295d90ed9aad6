"""The tables of the documents, made from result files and from nothing else.

A document marks a table::

    <!-- table: attend from benchmarks/results/2026-11-29-bench.json -->
    …
    <!-- end of table -->

``python -m memra_lowlevel.bench.tables`` compares every table with its result file, ``--write``
refreshes them. Below each table stand the command, commit, device and file; and «older source»
where the code that it speaks of has changed since. A table of times outside such marks is refused.
A figure is marked like a table, ``<!-- figure: docs/attention.svg from FILE.json -->``; ``--write``
draws it. ``<!-- table: agreement from FILE.json,FILE.json -->`` compares independent runs.

``--from FILE.json`` first points the marks at a new result file (:mod:`.repoint`). A mark that
waits for its first one says ``from pending``.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from . import agree, counters
from .result import REPOSITORY, Result, Row, load, ratio

__all__ = [
    "AGREEMENT", "END", "KINDS", "MARK", "OLDER", "PENDING", "Problem", "check", "documents",
    "main", "render", "rewritten",
]  # fmt: skip

OLDER = "«older source»"
"""Mark of a table whose code has changed since it was measured."""

END = "<!-- end of table -->"
MARK = re.compile(r"<!-- (?:table: (?P<kind>[\w-]+)|figure: \S+\.svg) from (?P<path>\S+) -->")
_FIGURE = re.compile(r"<!-- figure: (?P<figure>\S+\.svg) from (?P<path>\S+) -->")
PENDING = "pending"
AGREEMENT = "agreement"
"""Kind of the table that compares two result files."""

_UNIT = re.compile(r"(?<![\w])(?:µs|us|ms|ns|TB/s|GB/s|tokens/s)(?![\w])")
_NUMBER = re.compile(r"\d")


@dataclass(frozen=True)
class Problem:
    """What is wrong with a document, and where."""

    document: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


def documents(root: Path = REPOSITORY) -> list[Path]:
    """Documents whose tables of times come from result files."""
    found = [
        *root.glob("*.md"),
        *(root / "docs").rglob("*.md"),
        *(root / "benchmarks").rglob("*.md"),
    ]
    return sorted(found)


def check(root: Path = REPOSITORY, *, write: bool = False) -> list[Problem]:
    """Compare every document with its result files; ``write`` makes them equal first.

    Parameters
    ----------
    root : Path
        Folder of README, ``docs`` and ``benchmarks``.

    Returns
    -------
    list of Problem
        Empty when every table is what its result file says.
    """
    problems = []
    for path in sorted((root / "benchmarks" / "results").glob("*.json")):
        try:
            for text in load(path).problems:
                problems.append(Problem(path.relative_to(root), 0, text))
        except ArgumentError as error:
            problems.append(Problem(path.relative_to(root), 0, str(error)))
    for document in documents(root):
        text = document.read_text(encoding="utf-8")
        fresh, found = rewritten(text, root)
        found += _figures(fresh if write else text, root, write=write)
        if write and fresh != text:
            document.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            pairs = zip(text.split("\n"), fresh.split("\n"), strict=False)
            line = next((i for i, (old, new) in enumerate(pairs, 1) if old != new), 0)
            why = "the table differs from its result file; python -m memra_lowlevel.bench.tables"
            found.append((line, f"{why} --write makes it anew"))
        problems += [Problem(document.relative_to(root), line, what) for line, what in found]
    return problems


def rewritten(text: str, root: Path) -> tuple[str, list[tuple[int, str]]]:
    """Return a document with its tables made anew, and what cannot be made right by that."""
    lines, out, problems = text.split("\n"), [], []
    at = 0
    while at < len(lines):
        line = lines[at]
        begin = MARK.search(line)
        if begin is None:
            if _times(lines, at):
                problems.append(
                    (at + 1, f"a table of times outside a mark: {_BEGIN_TEXT}, then --write")
                )
            out.append(line)
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == END), None)
        if end is None or any(MARK.search(other) for other in lines[at + 1 : end]):
            problems.append((at + 1, f"the mark has no {END}"))
            out.append(line)
            at += 1
            continue
        try:
            body = _body(line, begin["kind"], begin["path"], root)
        except ArgumentError as error:
            problems.append((at + 1, str(error)))
            body = lines[at + 1 : end]
        out += [line, *body, lines[end]]
        at = end + 1
    return "\n".join(out), problems


def _body(line: str, kind: str | None, path: str, root: Path) -> list[str]:
    """Return what stands between a mark and its end."""
    if path.startswith(PENDING):
        return ["*Not measured yet.*"]
    if kind == AGREEMENT:
        return _agreement(path, root)
    result = load(root / path)
    if kind is not None:
        return render(kind, result, path)
    mark = _FIGURE.search(line)
    assert mark is not None
    image = f"![Attention and its ceiling](/{mark['figure']})"
    return [image, "", _caption("attend", result, path)]


def _figures(text: str, root: Path, *, write: bool) -> list[tuple[int, str]]:
    """Tell which figures were not drawn from the file they name; ``write`` draws them anew."""
    problems = []
    for number, line in enumerate(text.split("\n"), 1):
        mark = _FIGURE.search(line)
        if mark is None or mark["path"].startswith(PENDING):
            continue
        try:
            result, figure = load(root / mark["path"]), root / mark["figure"]
            if write:
                from . import plot

                plot.draw(figure, result.rows, result.environment, result.seal)
            drawn = figure.is_file() and f"seal {result.seal}<" in figure.read_text("utf-8")
            if not drawn:
                problems.append((number, f"{mark['figure']} was not drawn from {mark['path']}"))
        except ArgumentError as error:
            problems.append((number, str(error)))
    return problems


_BEGIN_TEXT = "<!-- table: KIND from benchmarks/results/FILE.json -->"


def _times(lines: Sequence[str], at: int) -> bool:
    """Whether a table of times begins here: a header with a unit, or a first row with one."""
    if not lines[at].startswith("|") or (at and lines[at - 1].startswith("|")):
        return False
    end = at
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    if end - at < 3:
        return False
    if _UNIT.search(lines[at]):
        return any(_NUMBER.search(line) for line in lines[at + 2 : end])
    return any(re.search(r"\d\s*(?:" + _UNIT.pattern + ")", line) for line in lines[at + 2 : end])


# -- making tables --------------------------------------------------------------------------------
def render(kind: str, result: Result, shown: str) -> list[str]:
    """Return the lines of a table with its caption.

    Raises
    ------
    ArgumentError
        An unknown kind, or a result file without such rows.
    """
    if kind not in KINDS:
        raise ArgumentError(f"no table {kind!r}; there are {', '.join(KINDS)}", name="kind")
    table = KINDS[kind](result, kind)
    if not table:
        raise ArgumentError(f"{shown} has no rows for the table {kind!r}", name="kind")
    return [*table, "", _caption(kind, result, shown)]


def _caption(kind: str, result: Result, shown: str) -> str:
    about = result.environment
    commit = str(about.get("commit") or "not noted")[:10]
    edited = " with edits" if about.get("dirty") else ""
    words = " ".join(str(word) for word in about.get("command", []))
    groups = {row.group for row in result.group(kind)} or {kind}
    made = f", kernels by {about['store']}" if about.get("store") else ""
    older = f" {OLDER}" if any(result.stale(group) for group in groups) else ""
    return (
        f"<sub>{about.get('device')}{made}, commit {commit}{edited}, "
        f"{str(about.get('time'))[:10]}, `{words}`, [{shown}](/{shown}).{older}</sub>"
    )


def _plain(result: Result, kind: str) -> list[str]:
    """Return one line per row: floor, measured, spread, share, and times that of one row."""
    rows = result.group(kind)
    if not rows:
        return []
    beside = [row.extra.get("over_one_row") for row in rows]
    times = ["of one row"] if any(beside) else []
    head = ["what", "floor", "measured", "±", "of the ceiling", *times, "goal"]
    body = [
        [
            row.what,
            _figure(row.floor, row.unit),
            _figure(row.median, row.unit),
            f"{row.spread:.1%}",
            _percent(ratio(row, rows)),
            *("" if over is None else f"{over:.2f} ×" for _ in times),
            _goal(row),
        ]
        for row, over in zip(rows, beside, strict=True)
    ]
    return _markdown(head, body)


def _rounds(result: Result, kind: str) -> list[str]:
    """Return one line per row: measured, spread, tokens, and how much faster than a step."""
    rows, body = result.group(kind), []
    for row in rows:
        times = ratio(row, rows) if row.baseline else None
        body.append(
            [
                row.what,
                _figure(row.median, row.unit),
                f"{row.spread:.1%}",
                _number(row.extra.get("tokens_per_round")),
                _number(row.extra.get("tokens_per_s")),
                "" if times is None else f"{times:.2f} ×",
                _goal(row),
            ]
        )
    head = ["what", "measured", "±", "tokens a round", "tokens/s", "of the step's tokens/s", "goal"]
    return _markdown(head, body) if body else []


def _ceilings(result: Result, kind: str) -> list[str]:
    body = []
    for row in result.group(kind):
        n_bytes = row.extra.get("bytes")
        rate = "" if n_bytes is None else f"{n_bytes / row.median / 1e6:.2f} TB/s"
        body.append([row.what, _figure(row.median, row.unit), f"{row.spread:.1%}", rate])
    return _markdown(["what", "time", "±", "rate"], body) if body else []


def _attend(result: Result, kind: str) -> list[str]:
    """Return one line per piece of work of ours; the peers of the same work stand beside it."""
    rows = result.group(kind)
    ours = [row for row in rows if row.peer is None]
    if not ours:
        return []
    peers = list(dict.fromkeys(row.peer for row in rows if row.peer is not None))
    of_peer = {(row.work, row.peer): row for row in rows if row.peer is not None}
    first = dict.fromkeys(row.work for row in ours)
    unrested = ["without rest"] if any("sustained" in row.extra for row in ours) else []
    head = ["µs", "MB", "floor", "ours", "±", *unrested, "share", "goal", *peers]
    body = []
    for row in ours:
        beside = [of_peer.get((row.work, peer)) for peer in peers]
        # The first pair of formats over some work is what the peers are compared with.
        shown = [row if row is not None else None for row in beside] if row.work in first else []
        first.pop(row.work, None)
        body.append(
            [
                row.what.removeprefix(f"{kind} "),
                f"{row.extra.get('bytes', 0) / 1e6:.1f}",
                _number(row.floor),
                f"**{_number(row.median)}**",
                f"{row.spread:.1%}",
                *(_number(row.extra.get("sustained")) for _ in unrested),
                _percent(row.share),
                _goal(row),
                *(_number(None if peer is None else peer.median) for peer in shown),
                *[""] * (len(peers) - len(shown)),
            ]
        )
    return _markdown(head, body)


def _launch(result: Result, kind: str) -> list[str]:
    """Return host costs: time, and how many times that of C in the same run."""
    rows = result.group(kind)
    body = []
    for row in rows:
        share = ratio(row, rows) if row.baseline else None
        body.append(
            [
                row.what,
                _figure(row.median, row.unit),
                f"{row.spread:.1%}",
                "" if share is None else f"{1 / share:.2f} ×",
                _goal(row),
            ]
        )
    return _markdown(["call", "host time", "±", "over C", "goal"], body) if body else []


def _counters(result: Result, kind: str) -> list[str]:
    """Return what ``tools/counters.py`` counted, one line per launch."""
    body = [counters.cells(row) for row in result.group(kind)]
    return _markdown(counters.head(), body) if body else []


def _checks(result: Result, kind: str) -> list[str]:
    """Return the verdicts of ``tools/gpu_check.py``."""
    body = [
        [
            name,
            "ok" if item.get("ok") else "**failed**",
            str(item.get("passed", "")),
            f"{item.get('seconds', 0):.0f} s",
        ]
        for name, item in result.items.items()
    ]
    return _markdown(["item", "verdict", "passed", "took"], body) if body else []


def _missing(result: Result, kind: str) -> list[str]:
    """Return what was not measured, and why."""
    return [f"* {note}" for note in result.notes]


def _agreement(paths: str, root: Path) -> list[str]:
    """Return one line per group: how many ratios two runs have in common, how far they differ.

    With further runs also how many of those that differ one of them repeats.
    """
    shown = paths.split(",")
    if len(shown) < 2:
        raise ArgumentError(f"the table {AGREEMENT!r} needs FILE.json,FILE.json", name="path")
    first, second, *more = runs = [load(root / path) for path in shown]
    for one, other in itertools.combinations(runs, 2):
        agree.independent(one, other)
    pairs, unlike = agree.compare(first.rows, second.rows)
    if not pairs:
        raise ArgumentError(f"{paths} have no ratio in common", name="path")
    body = []
    for group in dict.fromkeys(pair.group for pair in pairs):
        of_group = [pair for pair in pairs if pair.group == group]
        widest = max(of_group, key=lambda pair: pair.difference)
        apart = [pair for pair in of_group if pair.differs()]
        line = [group, len(of_group), f"{widest.difference:.1%}", widest.what, len(apart)]
        if more:
            line.append(sum(agree.repeated(pair, more) for pair in apart))
        body.append(line)
    head = ["group", "ratios", "largest difference", "of", f"over {agree.BOUND:.0%}"]
    if more:
        head.append("of them repeated by a further run")
    captions = [_caption(pairs[0].group, *run) for run in zip(runs, shown, strict=True)]
    if unlike:
        what = "ratios are not compared: other libraries were loaded in one of the runs"
        captions.insert(0, f"<sub>{len(unlike)} {what}.</sub>")
    return [*_markdown(head, body), *(line for text in captions for line in ("", text))]


KINDS: dict[str, Callable[[Result, str], list[str]]] = {
    "ceilings": _ceilings,
    "launch": _launch,
    "replay": _launch,
    "append": _plain,
    "attend": _attend,
    "rows": _attend,
    "model": _plain,
    "round": _rounds,
    "compile": _plain,
    "latent": _plain,
    "recur": _plain,
    "layer_kv": _plain,
    counters.GROUP: _counters,
    "checks": _checks,
    "missing": _missing,
}
"""Kinds of tables; each gives lines of Markdown, none without rows."""


def _markdown(head: Sequence[str], body: Iterable[Sequence[Any]]) -> list[str]:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_number(value)} {'µs' if unit == 'us' else unit}"


def _goal(row: Row) -> str:
    """Return whether a row reaches its mark, and the mark; nothing for one without."""
    if row.goal is None:
        return ""
    return f"{'✓' if row.median <= row.goal else '✗'} {row.goal:g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or with ``--write`` refresh; status 1 while something differs."""
    parser = argparse.ArgumentParser(description="Tables of the documents from result files.")
    parser.add_argument("--write", action="store_true", help="make every table anew")
    parser.add_argument(
        "--from", dest="files", type=Path, action="append", default=[], metavar="FILE",
        help="point the marks at a new result file first; may be repeated",
    )  # fmt: skip
    parser.add_argument("--root", type=Path, default=REPOSITORY)
    args = parser.parse_args(argv)
    if args.files:
        from .repoint import repoint

        for document in documents(args.root):
            text = document.read_text(encoding="utf-8")
            fresh = repoint(text, args.root, args.files)
            if fresh != text:
                document.write_text(fresh, encoding="utf-8")
    problems = check(args.root, write=args.write)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
