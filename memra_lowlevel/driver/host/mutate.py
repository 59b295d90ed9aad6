"""Removing barriers from kernels, one at a time: whether check mode notices is a test of both.

A barrier whose removal nobody reports is either not needed, and then deleted from the kernel, or a
gap of check mode or of the test's inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import HostCheckError
from . import runner

__all__ = ["Mutation", "flatten", "mutations", "unreported"]

_BARRIER = re.compile(
    r"\b(?P<name>__syncthreads|__syncwarp|__threadfence(?:_block)?|cp_async_wait_all"
    r"|cp_async_wait\s*<[^<>;]*>)\s*\((?P<arguments>[^()]*)\)"
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.M)
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
# These define the operations that others use.
_WORLD = ("common/device.cuh", "common/pipeline.cuh", "common/mma.cuh")


@dataclass(frozen=True)
class Mutation:
    """A source without one of its barriers.

    Attributes
    ----------
    what : str
        The removed text, e.g. ``"__syncthreads()"``.
    file, line
        Where it stood.
    source : str
        The whole mutated source, includes in place.
    """

    what: str
    file: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.what} at {self.file}:{self.line}"


def flatten(source: Path, include_dirs: Iterable[Path] = ()) -> str:
    """Return a source with its own includes in place, so that a barrier in a header is one of its.

    ``#line`` directives keep messages pointing to the files. The headers that define the operations
    (``common/device.cuh`` and its like) stay included.
    """
    folders = [*include_dirs, runner.cuda_src()]
    done: set[Path] = set()

    def expand(path: Path) -> str:
        text = path.read_text(encoding="utf-8")
        parts = [f'#line 1 "{path}"\n']
        at = 0
        for match in _INCLUDE.finditer(text):
            name = match.group(1)
            if name in _WORLD:
                continue
            for folder in (path.parent, *folders):
                if (folder / name).is_file():
                    found = (folder / name).resolve()
                    break
            else:
                continue
            line = text.count("\n", 0, match.end()) + 2  # of the line after the include
            fresh = found not in done
            done.add(found)  # before it is read: a header may include the one that includes it
            inner = expand(found) if fresh else ""
            parts += [text[at : match.start()], inner, f'\n#line {line} "{path}"']
            at = match.end()
        return "".join([*parts, text[at:]]).replace("#pragma once", "")

    return expand(source.resolve()) + "\n"


def mutations(source: Path, names: Iterable[str] | None = None) -> list[Mutation]:
    """Make every mutation of a kernel file and of the headers it includes.

    Parameters
    ----------
    source : Path
    names : iterable of str, optional
        Which operations to remove; by default ``__syncthreads``, ``__syncwarp``, ``cp_async_wait``
        and ``cp_async_wait_all`` (``__threadfence`` is known too).
    """
    wanted = set(names or ("__syncthreads", "__syncwarp", "cp_async_wait", "cp_async_wait_all"))
    text = flatten(source)
    blank = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    found = []
    for match in _BARRIER.finditer(blank):
        if match.group("name").split("<")[0].strip() not in wanted:
            continue
        file, line = _place(text, match.start())
        mutated = text[: match.start()] + "((void)0)" + text[match.end() :]
        found.append(Mutation(text[match.start() : match.end()], file, line, mutated))
    return found


def _place(text: str, at: int) -> tuple[str, int]:
    found = list(re.finditer(r'^#line (\d+) "([^"]+)"$', text[:at], re.M))
    last = found[-1] if found else None
    if last is None:
        return "source.cu", text.count("\n", 0, at) + 1
    return last.group(2), int(last.group(1)) - 1 + text.count("\n", last.end(), at)


def unreported(
    source: Path,
    drive: Callable[[str], None],
    names: Iterable[str] | None = None,
    only: Callable[[Mutation], bool] = lambda _: True,
) -> list[Mutation]:
    """Run every mutation; return those that check mode did not report.

    Parameters
    ----------
    source : Path
        A kernel file.
    drive : callable
        ``drive(source_text)`` compiles the text with ``check=True`` (e.g. ``runner.quick(text,
        name, check=True)``) and runs it on inputs that reach its barriers, in several orders if
        need be. Everything but a :class:`~memra_lowlevel.errors.HostCheckError` passes through.
    names
        As for :func:`mutations`.
    only : callable
        Picks mutations, for kernels that share a file.

    Returns
    -------
    list of Mutation
        Empty when each removed barrier was reported.

    Raises
    ------
    HostCheckError
        The source is wrong before anything is removed.
    """
    drive(flatten(source))
    missed = []
    for mutation in mutations(source, names):
        if not only(mutation):
            continue
        try:
            drive(mutation.source)
        except HostCheckError:
            continue
        missed.append(mutation)
    return missed
