"""Result files: the only way by which a figure enters the repository.

A file holds the raw samples, the command line, what ran it (device, driver, versions, clocks), the
commit, a digest over the package and ``cuda_src``, and the ceilings measured in the same process.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.device import Device

__all__ = ["Row", "environment", "source_digest", "write"]

REPOSITORY = Path(__file__).resolve().parent.parent.parent


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
    """

    what: str
    unit: str
    samples: list[float]
    floor: float | None = None
    peer: str | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median of the samples."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median, 0 for fewer than 4 samples."""
        ordered = sorted(self.samples)
        n = len(ordered)
        if n < 4 or not self.median:
            return 0.0
        return (ordered[3 * n // 4] - ordered[n // 4]) / 2 / self.median

    @property
    def share(self) -> float | None:
        """Floor over median: 1.0 is the limit of the hardware."""
        return None if self.floor is None or not self.median else self.floor / self.median


def source_digest() -> str:
    """Digest over every file that decides a measurement: the package and ``cuda_src``."""
    from ..compile.source import cuda_src_root

    digest = hashlib.blake2b(digest_size=16)
    package = Path(__file__).resolve().parent.parent
    roots = ((package, ("*.py", "*.c", "*.h", "*.cpp")), (cuda_src_root(), ("*.cu", "*.cuh")))
    for root, patterns in roots:
        files = {path for pattern in patterns for path in root.rglob(pattern)}
        for path in sorted(files):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=10
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _clocks() -> Mapping[str, str]:
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    first = done.stdout.strip().split("\n")[0]
    return dict(zip(fields.split(","), (v.strip() for v in first.split(",")), strict=False))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: Device | None) -> dict[str, Any]:
    """Everything about the machine and the code that a reader of a figure needs."""
    from ..compile import nvrtc

    names = ["cuda-bindings", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "numpy", "torch"]
    try:
        nvrtc_version = nvrtc.library().name
    except Exception as error:
        nvrtc_version = f"unavailable: {error}"
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": os.environ.get("MEMRA_COMMIT") or _git("rev-parse", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain")) if _git("rev-parse", "HEAD") else None,
        "source": source_digest(),
        "device": None if device is None else f"{device.name} ({device})",
        "arch": None if device is None else device.arch,
        "driver": None if device is None else device.driver.cuDriverGetVersion(),
        "nvrtc": nvrtc_version,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "versions": {name: v for name in names if (v := _version(name))},
        "clocks": _clocks(),
    }


def write(
    path: Path,
    rows: Iterable[Row],
    *,
    device: Device | None,
    ceilings: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
) -> None:
    """Write a result file, replacing it atomically."""
    body = {
        "environment": environment(device),
        "ceilings": dict(ceilings or {}),
        "rows": [
            {**asdict(row), "median": row.median, "spread": row.spread, "share": row.share}
            for row in rows
        ],
        **dict(sections or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(body, indent=1)
    # One line per list of numbers: raw samples stay readable and small in a diff.
    text = re.sub(r"\[\s+([-0-9.e,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)
