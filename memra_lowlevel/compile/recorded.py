"""What was asked of the compiler, noted so that a store of ready-made kernels can be built from it.

With ``MEMRA_RECORD_JOBS=FOLDER`` every process appends what it asks for to a file of its own in
that folder, one JSON object a line and each once, whether the answer came from a cache or not. A
library source is noted by its path below ``cuda_src``, so that the list outlives a change of the
kernels; any other source by its text. ``tools/build_cubins.py OUT --recorded FOLDER`` compiles the
list.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArchUnsupported, CompileError
from . import source as sources
from .arch import HOST, parse
from .options import CompileOptions, define_flags

if TYPE_CHECKING:
    from .compiler import Job

__all__ = ["VARIABLE", "covering", "load", "note"]

VARIABLE = "MEMRA_RECORD_JOBS"
"""Environment variable with the folder that requests are noted in."""

_noted: set[str] = set()
_guard = threading.Lock()


def note(job: Job) -> None:
    """Note a job if ``MEMRA_RECORD_JOBS`` is set; without it this is one look-up."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        if job.arch != HOST:
            parse(job.arch)
        line = json.dumps(_entry(job), sort_keys=True)
    except (OSError, UnicodeDecodeError, ArchUnsupported):
        return  # the compilation will say what is wrong
    path = Path(folder)
    with _guard:
        if line in _noted:
            return
        _noted.add(line)
        path.mkdir(parents=True, exist_ok=True)
        with open(path / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")


def load(folder: str | Path, archs: Sequence[str]) -> list[Job]:
    """Read what was noted, as jobs for GPUs.

    Parameters
    ----------
    folder : path
    archs : sequence of str
        What a request of the host device stands for: its twin on a GPU asks for the same.

    Returns
    -------
    list of Job
        Each once; those of library sources that are gone are left out.

    Raises
    ------
    CompileError
        For a folder without notes, or a line that is none.
    """
    found: dict[str, Job] = {}
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise CompileError(f"{folder} holds no notes; record with {VARIABLE}={folder}")
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                entry = json.loads(line)
                for arch in archs if entry["arch"] == HOST else [entry["arch"]]:
                    job = _job({**entry, "arch": arch})
                    if not isinstance(job.source, Path) or job.source.is_file():
                        found.setdefault(json.dumps(_entry(job), sort_keys=True), job)
            except (ValueError, KeyError, TypeError) as error:
                raise CompileError(f"{file}:{number} is no note of a job ({error})") from error
    return list(found.values())


def covering(jobs: Iterable[Job]) -> list[Job]:
    """Leave out each job whose names another job of the same source and flags has too."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in sorted(jobs, key=lambda j: -len(j.name_expressions)):
        flags = (*job.options.nvrtc_flags(), *define_flags(job.defines))
        kept = groups.setdefault((str(job.source), job.name, job.arch, flags), [])
        if not any(set(job.name_expressions) <= set(k.name_expressions) for k in kept):
            kept.append(job)
    return [job for kept in groups.values() for job in kept]


def _entry(job: Job) -> dict[str, Any]:
    root, source = sources.cuda_src_root(), job.source
    below = isinstance(source, Path) and source.resolve().is_relative_to(root.resolve())
    if isinstance(source, Path) and below:
        place = {"source": source.resolve().relative_to(root.resolve()).as_posix()}
    else:
        text = source.read_text("utf-8") if isinstance(source, Path) else source
        name = job.name or (source.name if isinstance(source, Path) else "source.cu")
        place = {"text": text, "name": name}
    # What instruments the host device changes no code for a GPU.
    options = dataclasses.replace(job.options, check=False, sanitize=None)
    return {
        **place,
        "arch": job.arch,
        "names": sorted(set(job.name_expressions)),
        "defines": dict(job.defines),
        "include_dirs": [str(Path(d).resolve()) for d in job.include_dirs],
        "options": dataclasses.asdict(options),
    }


def _job(entry: dict[str, Any]) -> Job:
    from .compiler import Job

    source = entry.get("source")
    return Job(
        entry["text"] if source is None else sources.cuda_src_root() / source,
        entry["arch"],
        tuple(entry["names"]),
        entry["defines"],
        tuple(entry["include_dirs"]),
        entry.get("name", ""),
        CompileOptions(**entry["options"]),
    )
