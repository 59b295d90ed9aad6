"""Result files: the only way by which a figure enters the repository.

A file holds the raw samples, the command line, what ran it (device, driver, versions, clocks), the
commit, the digests of the sources by family, and the ceilings measured in the same process.
``memra-lowlevel bench`` and ``tools/gpu_check.py`` write them; a seal over the content shows an
edit by hand.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from . import sources
from .clock import spread

if TYPE_CHECKING:
    from ..runtime.device import Device

__all__ = [
    "FORMAT", "Result", "Row", "environment", "load", "over", "ratio", "row_data", "write",
]  # fmt: skip

FORMAT = 1
"""Version of the file format."""

REPOSITORY = Path(__file__).resolve().parent.parent.parent

_REQUIRED = (
    "time", "command", "commit", "families", "package", "device", "driver", "versions", "clocks",
)  # fmt: skip

_DISTRIBUTIONS = (
    "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "numpy", "torch",
    "cupy-cuda12x", "cupy-cuda13x", "triton", "numba-cuda", "flashinfer-python", "flash-attn-3",
)  # fmt: skip


@dataclass
class Row:
    """One measured thing.

    Attributes
    ----------
    what : str
        Name that is unique within the file, e.g. ``"attend 32/8/128 rows 1 ctx 32768"``.
    unit : str
        Unit of the samples, e.g. ``"us"``.
    samples : list of float
        Raw values, in the order in which they were taken.
    floor : float or None
        What the hardware allows, same unit, from the ceilings of the same run.
    peer : str or None
        Library that was measured, None for ours.
    note : str
        What a reader must know, e.g. reduced sizes.
    extra : dict
        Further figures, by name.
    group : str
        Group of the benchmark; names the family of sources that it speaks of.
    work : str
        What was done; rows of equal work stand side by side. Default: ``what``.
    baseline : str or None
        ``what`` of a row of the same run that this one is compared with, e.g. the same in C.
    goal : float or None
        The mark that this row is to reach, same unit.
    in_turn : bool
        Its samples were taken in turn with those of ``baseline``: equal places belong together, and
        what drifted in between drifted for both.
    loaded : list of str or None
        Other libraries that the measuring process had imported by then (``run.OTHERS``); None in
        files that do not tell.
    """

    what: str
    unit: str
    samples: list[float]
    floor: float | None = None
    peer: str | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    work: str = ""
    baseline: str | None = None
    goal: float | None = None
    in_turn: bool = False
    loaded: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise ArgumentError(
                f"{self.what}: a row without samples; say in a note why there is none"
            )
        self.work = self.work or self.what

    @property
    def median(self) -> float:
        """Median of the samples."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median, 0 for fewer than 4 samples."""
        return spread(self.samples)

    @property
    def share(self) -> float | None:
        """Floor over median: 1.0 is the limit of the hardware."""
        return None if self.floor is None or not self.median else self.floor / self.median


@dataclass(frozen=True)
class Result:
    """A result file, read.

    Attributes
    ----------
    path : Path
    environment : dict
        Who ran what, where, on which sources.
    rows : list of Row
    notes : list of str
        What was not measured, and why.
    items : dict
        Verdicts of ``tools/gpu_check.py`` by name; empty for a benchmark.
    problems : list of str
        What is wrong with the file: a broken seal, missing fields.
    seal : str
        Digest over its content.
    """

    path: Path
    environment: dict[str, Any]
    rows: list[Row]
    notes: list[str]
    items: dict[str, Any]
    problems: list[str]
    seal: str

    def group(self, name: str) -> list[Row]:
        """Rows of one group, in the order of the file."""
        return [row for row in self.rows if row.group == name]

    def stale(self, group: str) -> bool:
        """Whether the sources of this group changed since the file was written."""
        kept = self.environment.get("families", {}).get(group)
        return group in sources.FAMILIES and kept != sources.digest_of(group)


def over(row: Row) -> str:
    """Tell what :func:`ratio` compares a row with."""
    return "the floor" if row.share is not None else str(row.baseline)


def ratio(row: Row, rows: Iterable[Row]) -> float | None:
    """Share of a ceiling of the same run: the floor's, else that of the row it is compared with."""
    if row.share is not None:
        return row.share
    for other in rows:
        if other.what == row.baseline and row.median:
            if row.in_turn and len(row.samples) == len(other.samples):
                return median(b / s for b, s in zip(other.samples, row.samples, strict=True) if s)
            return other.median / row.median
    return None


def environment(device: Device | None) -> dict[str, Any]:
    """Everything about the machine and the code that a reader of a figure needs."""
    from ..compile import nvrtc

    try:
        nvrtc_version = nvrtc.library().name
    except Exception as error:
        nvrtc_version = f"unavailable: {error}"
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no") if head else ""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": os.environ.get("MEMRA_COMMIT") or head or None,
        "dirty": bool(changed) if head else None,
        "families": sources.digests(),
        "package": sources.package_digest(),
        "device": None if device is None else f"{device.name} ({device})",
        "kind": None if device is None else device.kind,
        "arch": None if device is None else device.arch,
        "driver": None if device is None else device.driver.cuDriverGetVersion(),
        "nvrtc": nvrtc_version,
        "store": _store(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "versions": {name: v for name in _DISTRIBUTIONS if (v := _version(name))},
        "clocks": _clocks() if device is not None and device.kind == "cuda" else {},
    }


def row_data(row: Row) -> dict[str, Any]:
    """Give a row for JSON: its fields, and the median of its samples."""
    data = {f.name: getattr(row, f.name) for f in fields(row)}
    data = {
        k: v
        for k, v in data.items()
        if v not in (None, "", {}, False) and (k, v) != ("work", row.what)
    }
    data["samples"] = [round(s, 4) for s in row.samples]
    data["median"] = median(data["samples"])
    return data


def write(
    path: Path,
    rows: Iterable[Row] = (),
    *,
    about: Mapping[str, Any],
    notes: Iterable[str] = (),
    items: Mapping[str, Any] | None = None,
) -> None:
    """Write a result file, replacing it atomically.

    Parameters
    ----------
    path : Path
    rows : iterable of Row
    about : mapping
        From :func:`environment`, taken when the measurements began.
    notes : iterable of str
    items : mapping, optional
        Verdicts of ``tools/gpu_check.py``.
    """
    body: dict[str, Any] = {
        "format": FORMAT,
        "environment": {**about, "clocks_after": _clocks() if about.get("kind") == "cuda" else {}},
        "rows": [row_data(row) for row in rows],
        "notes": list(dict.fromkeys(notes)),
    }
    if items is not None:
        body["items"] = dict(items)
    body["seal"] = _seal(body)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(body, indent=1)
    # One line per list of numbers: raw samples stay readable and small in a diff.
    text = re.sub(r"\[\s+([-0-9.e,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def load(path: Path) -> Result:
    """Read a result file and say what is wrong with it.

    Raises
    ------
    ArgumentError
        When it is no result file at all.
    """
    try:
        body = json.loads(path.read_text())
        about = {**body["environment"]}
        rows = [_row(_expect(data, dict, "a row")) for data in _expect(body["rows"], list, "rows")]
        notes = _expect(body.get("notes", []), list, "notes")
        items = _expect(body.get("items", {}), dict, "items")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ArgumentError) as error:
        raise ArgumentError(f"{path} is no result file ({error!r})", name="path") from error
    problems = []
    if body.get("format") != FORMAT:
        problems.append(f"its format is {body.get('format')!r}, this version reads {FORMAT}")
    if body.get("seal") != _seal(body):
        problems.append("its seal is broken: it was not written by a benchmark as it stands")
    for name in _REQUIRED:
        if name not in about:
            problems.append(f"its environment lacks {name!r}")
    if not isinstance(about.setdefault("families", {}), dict):
        problems.append(f"its families are {about['families']!r}")
        about["families"] = {}
    names = [row.what for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        problems.append(f"rows named twice: {sorted(twice)}")
    for row in rows:
        if row.baseline is not None and row.baseline not in names:
            problems.append(f"{row.what} is compared with {row.baseline!r}, which is not there")
        if row.group not in sources.FAMILIES:
            problems.append(f"{row.what} belongs to no known group ({row.group!r})")
    return Result(
        path,
        about,
        rows,
        notes,
        items,
        problems,
        str(body.get("seal", "")),
    )


def _row(data: dict[str, Any]) -> Row:
    """Make a row of what a file says, whose values have the kinds that a row has."""
    row = Row(**{f.name: data[f.name] for f in fields(Row) if f.name in data})
    for name in ("what", "unit", "note", "group", "work"):
        _expect(getattr(row, name), str, name)
    for name in ("peer", "baseline"):
        _expect(getattr(row, name), str | None, name)
    for library in _expect(row.loaded, list | None, "loaded") or []:
        _expect(library, str, "a library")
    for sample in _expect(row.samples, list, "samples"):
        _expect(sample, int | float, "a sample")
    for name in ("floor", "goal"):
        _expect(getattr(row, name), int | float | None, name)
    _expect(row.extra, dict, "extra")
    for name in ("over_one_row", "sustained"):
        _expect(row.extra.get(name, 1.0), int | float, name)
    return row


def _expect(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}"[:80])
    return value


def _seal(body: Mapping[str, Any]) -> str:
    content = {key: value for key, value in body.items() if key != "seal"}
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _clocks() -> Mapping[str, str]:
    names = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    first = done.stdout.strip().split("\n")[0]
    return dict(zip(names.split(","), (v.strip() for v in first.split(",")), strict=False))


def _store() -> str | None:
    """Compiler of the store that kernels come from; None without a store."""
    from ..compile import aot

    path = os.environ.get(aot.VARIABLE)
    store = aot.open_named(path) if path else None
    return None if store is None else store.compiler


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
