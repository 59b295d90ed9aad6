"""Sources and what they include, read once and known by content.

The texts that were hashed are the texts that are compiled: headers go to NVRTC in memory, under
names that do not depend on where the library is installed. A header's time stamp means nothing.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import CompileError, Diagnostic, HeaderNotFound
from .tokens import Include, includes

__all__ = ["Closure", "MissingHeader", "cuda_src_root", "kernel_sources", "read"]


@dataclass(frozen=True)
class MissingHeader:
    """An include that no folder answered; ``name`` as written."""

    name: str
    file: str
    line: int
    searched: tuple[str, ...]
    conditional: bool


@dataclass(frozen=True)
class Closure:
    """A source with all that it includes.

    Attributes
    ----------
    name : str
        Name of the source for the compiler, e.g. ``"kv/append.cu"``.
    text : str
        Its text; include directives name headers by their names in ``headers``.
    headers : tuple of (str, str)
        Name and text of every header reached, in order of first use.
    digest : str
        Hash over names and contents.
    missing : tuple of MissingHeader
        Includes under a condition (or in angle brackets) that were not found. The compiler decides
        whether they are needed.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
    digest: str
    missing: tuple[MissingHeader, ...] = ()


@cache
def cuda_src_root() -> Path:
    """Folder of the library's own kernels.

    In an installed wheel it is package data, ``memra_lowlevel/cuda_src``; in a checkout, an
    editable install included, it is ``cuda_src`` beside the package.

    Raises
    ------
    HeaderNotFound
        When neither place has it: the installation is broken.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "cuda_src", package.parent / "cuda_src")
    for place in places:
        if (place / "common").is_dir():
            return place
    raise HeaderNotFound(
        "the kernel sources are missing: looked for 'common' in "
        + " and ".join(str(p) for p in places)
        + ". Install the package again (pip install --force-reinstall memra-lowlevel)",
        name="common",
        searched=[str(p) for p in places],
    )


def kernel_sources() -> tuple[Path, ...]:
    """Every ``.cu`` file of the library, sorted."""
    return tuple(sorted(cuda_src_root().rglob("*.cu")))


def read(source: str | Path, *, name: str = "", include_dirs: Iterable[str | Path] = ()) -> Closure:
    """Read a source with its whole include closure.

    Parameters
    ----------
    source : str or Path
        The text, or the path of a file.
    name : str
        Name for messages and profilers; default: the path below ``cuda_src``, else the file name,
        else ``"source.cu"``.
    include_dirs : iterable of path
        Searched after the including file's own folder and before ``cuda_src``.

    Raises
    ------
    HeaderNotFound
        For a quoted include outside any ``#if`` that is nowhere to be found.
    CompileError
        For an include whose name is a macro: its closure cannot be known.
    """
    folders = [Path(d).resolve() for d in include_dirs]
    if all(f != cuda_src_root() for f in folders):
        folders.append(cuda_src_root())
    path = source.resolve() if isinstance(source, Path) else None
    text = _text_of(path) if path is not None else str(source)
    for what, part in (("source", text), ("name", name)):
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise CompileError(
                f"{name[:60]!a}: the {what} has a lone surrogate at character {error.start}, which "
                "no file can hold; decode what you read as UTF-8 without errors='surrogateescape'"
            ) from None
    reader = _Reader(folders)
    main = name or (reader.canonical(path, "") if path is not None else "source.cu")
    reader.taken[main] = path
    rewritten = reader.visit(text, main, path)
    digest = hashlib.blake2b(digest_size=20)
    for part_name, part in [(main, rewritten), *reader.headers.items()]:
        for piece in (part_name.encode(), part.encode()):
            digest.update(len(piece).to_bytes(8, "little") + piece)
    return Closure(
        main,
        rewritten,
        tuple(reader.headers.items()),
        digest.hexdigest(),
        tuple(reader.missing),
    )


class _Reader:
    """Walks includes depth first; each file once, recursion through a cycle ends by itself."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.headers: dict[str, str] = {}
        self.missing: list[MissingHeader] = []
        self.names: dict[Path, str] = {}
        self.real: dict[str, str] = {}
        self.prefixes = [os.path.join(str(f), "") for f in folders]
        self.taken: dict[str, Path | None] = {}

    def visit(self, text: str, name: str, path: Path | None) -> str:
        """Return ``text`` with canonical include names, having read what it includes."""
        pieces, last = [], 0
        for include in includes(text):
            if include.form == "computed":
                raise _computed(include, name, text)
            found, searched = self.find(include, path)
            if found is None:
                self.note_missing(include, name, text, searched)
                continue
            pieces += [text[last : include.start], self.enter(found, include.name)]
            last = include.end
        return "".join([*pieces, text[last:]])

    def find(self, include: Include, path: Path | None) -> tuple[Path | None, list[str]]:
        own = [path.parent] if path is not None and include.form == "quote" else []
        places = [*own, *self.folders]
        for place in places:
            found = self.file(str(place), include.name)
            if found is not None:
                return found, []
        return None, [str(p) for p in dict.fromkeys(places)]

    def file(self, folder: str, name: str) -> Path | None:
        """Resolve a header below a resolved folder, by few system calls: a start reads hundreds."""
        candidate = os.path.join(folder, name)
        try:
            mode = os.lstat(candidate).st_mode
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(mode):  # a link, or no file
            path = Path(candidate)
            return path.resolve() if path.is_file() else None
        parent, base = os.path.split(candidate)
        if parent not in self.real:
            self.real[parent] = os.path.realpath(parent)
        return Path(self.real[parent], base)

    def enter(self, path: Path, written: str) -> str:
        """Read a header unless it is known; return its canonical name."""
        if path in self.names:
            return self.names[path]
        name = self.canonical(path, written)
        self.names[path] = name
        self.taken[name] = path
        self.headers[name] = ""  # keeps the order of first use while its own includes are read
        self.headers[name] = self.visit(_text_of(path), name, path)
        return name

    def canonical(self, path: Path, written: str) -> str:
        """Make a name free of the place of installation, unique within this closure."""
        name = written if written and ".." not in written else path.name
        place = str(path)
        for prefix in self.prefixes:
            if place.startswith(prefix):
                name = place[len(prefix) :].replace(os.sep, "/")
                break
        base, n = name, 1
        while self.taken.get(name, path) != path:
            n += 1
            name = f"{n}/{base}"
        return name

    def note_missing(self, include: Include, name: str, text: str, searched: list[str]) -> None:
        gone = MissingHeader(include.name, name, include.line, tuple(searched), include.conditional)
        if include.form == "quote" and not include.conditional:
            raise header_not_found(gone, _line(text, include.line))
        self.missing.append(gone)


def header_not_found(gone: MissingHeader, source_line: str = "", log: str = "") -> HeaderNotFound:
    """Build the error for a header that is needed and absent."""
    where = f"{gone.file}:{gone.line}"
    looked = ", ".join(gone.searched) or "no folder"
    error = HeaderNotFound(
        f"{where}: header {gone.name!r} was not found; looked in {looked}. Add its folder to "
        "include_dirs; NVRTC has no system headers, and common/device.cuh replaces them",
        name=gone.name,
        searched=gone.searched,
    )
    error.diagnostics = (
        Diagnostic("error", gone.file, gone.line, 0, f"cannot open {gone.name!r}", source_line),
    )
    error.log = log
    return error


def _computed(include: Include, name: str, text: str) -> CompileError:
    line = _line(text, include.line)
    problem = Diagnostic(
        "error", name, include.line, 0, "an #include must name its header literally", line
    )
    return CompileError(
        f"{name}:{include.line}: {line.strip()}: the included name is a macro, so the files that "
        "the result depends on cannot be known. Write the header's name itself",
        diagnostics=[problem],
    )


def _line(text: str, line: int) -> str:
    lines = text.splitlines()
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CompileError(
            f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8 text"
        ) from error
    except OSError as error:
        raise CompileError(f"{path} cannot be read: {error.strerror or error}") from error
