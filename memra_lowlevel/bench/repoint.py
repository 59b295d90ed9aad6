"""Point the marks of documents at new result files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import ArgumentError
from .result import Result, load
from .tables import KINDS, MARK, PENDING

__all__ = ["repoint"]


def repoint(text: str, root: Path, files: Iterable[Path]) -> str:
    """Return a document whose marks name the newer files.

    A table or figure of measurements moves to a file of the same device (any, while it is pending)
    that has rows for it. The verdicts of ``tools/gpu_check.py`` move to a file of the same name but
    for its date; ``pending:NAME`` waits for one.

    Raises
    ------
    ArgumentError
        For a file that is no sound result file, or lies outside ``root``.
    """
    for path in files:
        result = load(path)
        if result.problems:
            raise ArgumentError(f"{path}: {'; '.join(result.problems)}", name="path")
        shown = path.resolve().relative_to(root.resolve()).as_posix()

        def moved(mark: re.Match[str], result: Result = result, shown: str = shown) -> str:
            start, end = (at - mark.start() for at in mark.span("path"))
            fits = _fits(mark["kind"], mark["path"], result, shown, root)
            return mark[0][:start] + shown + mark[0][end:] if fits else mark[0]

        text = MARK.sub(moved, text)
    return text


def _fits(kind: str | None, old: str, result: Result, shown: str, root: Path) -> bool:
    if kind in ("checks", "missing"):
        return _name(old.removeprefix(f"{PENDING}:")) == _name(shown)
    if kind is not None and (kind not in KINDS or not KINDS[kind](result, kind)):
        return False
    if kind is None and len({row.extra.get("ctx") for row in result.group("attend")}) < 2:
        return False
    if old.startswith(PENDING):
        return result.environment.get("kind") == "cuda"
    return load(root / old).environment.get("device") == result.environment.get("device")


def _name(path: str) -> str:
    """Give the name of a result file without its date."""
    return re.sub(r"^\d{4}-\d\d-\d\d-", "", Path(path).stem)
