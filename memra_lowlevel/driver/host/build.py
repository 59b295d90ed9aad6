"""Building of C++ for the host device: which compiler, which flags, and an atomic user cache.

Everything that is built lies under its content key, so a stale library can never be loaded.
Libraries are published by rename, carry their own checksum and are rebuilt, with one log line, when
they are damaged. Any number of processes may build at once; a killed one leaves nothing that blocks
others.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock

from ...errors import CompileError, CompilerNotFound, Diagnostic
from ...paths import cache_root

__all__ = [
    "Compiler",
    "Sanitizer",
    "cpu_flags",
    "find_compiler",
    "publish",
    "published",
    "run_compiler",
    "runtime_library",
    "runtime_sources",
]

log = logging.getLogger(__name__)

Sanitizer = Literal["undefined", "address"]
RUNTIME = Path(__file__).parent / "rt"
MARK = b"MEMRA-SHA256:"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes
    ----------
    command : tuple of str
        How it is called, e.g. ``("g++",)`` or ``(python, "-m", "ziglang", "c++")``.
    kind : str
        ``"gcc"``, ``"clang"`` or ``"zig"``.
    version : str
        The first line of its ``--version``.
    """

    command: tuple[str, ...]
    kind: Literal["gcc", "clang", "zig"]
    version: str

    @property
    def fingerprint(self) -> str:
        """What goes into cache keys: another compiler is another key."""
        return "\0".join((*self.command, self.kind, self.version, platform.machine()))


def find_compiler() -> Compiler:
    """Find a C++ compiler: ``$CXX`` where it is set, else the first that there is.

    Those are ``c++``, ``g++``, ``clang++`` and the ``ziglang`` wheel. A compiler that was named is
    never replaced by another.

    Raises
    ------
    CompilerNotFound
        None works, or not the one in ``CXX``; the message lists what was tried.
    """
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find_compiler(cxx: str, path: str) -> Compiler:
    candidates: list[tuple[str, ...]] = []
    if cxx.strip():
        candidates.append(tuple(shlex.split(cxx)))
    else:
        candidates += [("c++",), ("g++",), ("clang++",)]
    if not cxx.strip() and importlib.util.find_spec("ziglang") is not None:
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    tried = []
    for command in candidates:
        if shutil.which(command[0], path=path) is None:
            tried.append(f"{shlex.join(command)}: not found")
            continue
        try:
            answer = subprocess.run(
                [*command, "--version"], capture_output=True, timeout=60, env=_environment()
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            tried.append(f"{shlex.join(command)}: {error}")
            continue
        text = answer.stdout.decode(errors="replace")
        if answer.returncode != 0 or not text.strip():
            tried.append(f"{shlex.join(command)}: --version failed")
            continue
        kind: Literal["gcc", "clang", "zig"] = (
            "zig" if "ziglang" in command or "zig" in command[0] else
            "clang" if "clang" in text else "gcc"
        )  # fmt: skip
        return Compiler(command, kind, text.strip().splitlines()[0])
    if cxx.strip():
        raise CompilerNotFound(
            f"CXX={cxx} cannot be used ({tried[0]}). Name another C++ compiler in CXX, or "
            "unset it: then c++, g++, clang++ and the ziglang wheel are tried"
        )
    raise CompilerNotFound(
        "no C++ compiler for the host device. Install one (Debian: apt install g++; or pip install "
        "ziglang), or name one in CXX. Tried: " + "; ".join(tried)
    )


@functools.lru_cache(maxsize=1)
def cpu_flags() -> tuple[str, ...]:
    """Return flags for instructions that this CPU has: they change speed, never bits."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        match = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return ()
    have = set(match.group(1).split()) if match else set()
    wanted = {"fma": "-mfma", "f16c": "-mf16c", "avx2": "-mavx2", "bmi2": "-mbmi2"}
    flags = tuple(flag for name, flag in wanted.items() if name in have)
    return flags if "-mfma" in flags else ()


@functools.lru_cache(maxsize=1)
def _private_folder() -> Path:
    """Stand-in for a cache that cannot be written; lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="memra-")
    _private_folder_owners.append(folder)
    return Path(folder.name)


_private_folder_owners: list[tempfile.TemporaryDirectory[str]] = []
_checked: set[tuple[str, int, int]] = set()


def _intact(path: Path, quiet: bool = False) -> bool:
    """Tell whether a published library is there and whole. Each file is read once per process."""
    try:
        about = path.stat()
        seen = (str(path), about.st_mtime_ns, about.st_size)
        if seen in _checked:
            return True
        data = path.read_bytes()
    except OSError:
        return False
    at = len(data) - len(MARK) - 32
    if at > 0 and data[at : at + len(MARK)] == MARK:
        if hashlib.sha256(data[:at]).digest() == data[at + len(MARK) :]:
            _checked.add(seen)
            return True
    if not quiet:
        log.warning("%s is damaged; building it again", path)
    return False


def published(folder: Path | None = None) -> list[tuple[Path, bool]]:
    """List the libraries in the cache, each with whether it is whole."""
    return [(p, _intact(p)) for p in sorted((folder or cache_root() / "host").glob("*.so"))]


def publish(key: str, make: Callable[[Path], None], suffix: str = ".so") -> Path:
    """Return the library under ``key``, made by ``make(path)`` if it is not in the cache.

    Parameters
    ----------
    key : str
        Content key: the same key must always mean the same bytes' meaning.
    make : callable
        Writes the library to the path it is given; its errors pass through.

    Returns
    -------
    Path
        In the user's cache; in a folder of this process where that cannot be written.
    """
    shared = cache_root() / "host"
    try:
        shared.mkdir(parents=True, exist_ok=True)
        path = shared / (key + suffix)
        if _intact(path, quiet=True):
            return path
        with FileLock(str(path) + ".lock"):
            if not _intact(path):
                _make(path, make)
        return path
    except OSError as error:
        _tell_unwritable(str(shared), str(error))
    path = _private_folder() / (key + suffix)
    if not _intact(path):
        _make(path, make)
    return path


@functools.cache
def _tell_unwritable(folder: str, why: str) -> None:
    """Warn once for each folder and reason, not for each library."""
    log.warning("cannot write %s (%s); building for this process only", folder, why)


def _make(path: Path, make: Callable[[Path], None]) -> None:
    fresh = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{path.suffix}")
    try:
        make(fresh)
        digest = hashlib.sha256(fresh.read_bytes()).digest()
        with fresh.open("ab") as out:
            out.write(MARK + digest)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    environment = {**os.environ, "LC_ALL": "C"}
    environment.pop("LD_PRELOAD", None)  # a preloaded sanitiser is meant for kernels
    return environment


def run_compiler(compiler: Compiler, arguments: Sequence[str]) -> str:
    """Call the compiler; returns its messages.

    Raises
    ------
    CompileError
        With each message of the compiler as a :class:`~memra_lowlevel.errors.Diagnostic`.
    """
    answer = subprocess.run(
        [*compiler.command, *arguments], capture_output=True, env=_environment(), check=False
    )
    text = answer.stderr.decode(errors="replace")
    wanted = arguments[arguments.index("-o") + 1] if "-o" in arguments else None
    if answer.returncode == 0 and wanted is not None and not Path(wanted).exists():
        raise CompilerNotFound(
            f"{compiler.command[0]} ended well and wrote no {Path(wanted).name}: it is no C++ "
            "compiler. Name one in CXX, or unset CXX."
        )
    if answer.returncode != 0:
        found = diagnostics(text)
        errors = [d for d in found if d.severity == "error"]
        first = errors[0] if errors else None
        where = f"{first.file}:{first.line}: {first.message}" if first else text.strip()[-400:]
        if missing := undefined_symbols(text):
            where = (
                f"nothing defines {', '.join(missing)}; a kernel can call only what its own source "
                "and the headers that it includes define"
            )
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        raise CompileError(
            f"{compiler.command[0]} refused the source: {where}{more}", diagnostics=found, log=text
        )
    return text


_UNDEFINED = re.compile(r"undefined (?:reference to [`'](.+?)'|symbol: (.+?)(?: \(|$))", re.M)


def undefined_symbols(text: str) -> list[str]:
    """Read the names that a linker could not find, each once, in order."""
    return list(dict.fromkeys(a or b for a, b in _UNDEFINED.findall(text)))


_MESSAGE = re.compile(r"^(.+?):(\d+):(?:(\d+):)? (?:fatal )?(error|warning|note): (.*)$")


def diagnostics(text: str) -> tuple[Diagnostic, ...]:
    """Read the messages of a GCC-like compiler."""
    found = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        match = _MESSAGE.match(line)
        if match:
            source = lines[i + 1] if i + 1 < len(lines) else ""
            source = source.split("|", 1)[1].strip() if "|" in source else ""
            file, number, column, severity, message = match.groups()
            found.append(Diagnostic(severity, file, int(number), int(column or 0), message, source))
    return tuple(found)


def runtime_sources() -> list[Path]:
    """Return the files of the runtime and of its headers, sorted."""
    return sorted(p for p in RUNTIME.iterdir() if p.suffix in (".cpp", ".h"))


@functools.lru_cache(maxsize=1)
def _runtime_digest() -> bytes:
    digest = hashlib.sha256()
    for path in runtime_sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def runtime_library(check: bool = False, sanitize: Sanitizer | None = None) -> Path:
    """Build the host runtime, once per compiler and version of its sources.

    Parameters
    ----------
    check : bool
        Accepted for symmetry with kernels: one runtime serves plain and checked kernels.
    sanitize : {"undefined", "address"}, optional
        Only ``"address"`` has a runtime of its own (it must tell ASan about its stacks).

    Returns
    -------
    Path
        A shared library; kernels name it by its ``SONAME``, so it must be loaded before them.
    """
    compiler = find_compiler()
    address = sanitize == "address"
    flags = [
        "-std=gnu++17", "-O2", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden",
        "-fno-rtti", "-fno-exceptions", "-fno-strict-aliasing", "-fcf-protection=none"
        if platform.machine() == "x86_64" else "-fno-plt",
        *(("-DMEMRA_ASAN",) if address else ()),
    ]  # fmt: skip
    key = hashlib.sha256(
        "\0".join((compiler.fingerprint, *flags)).encode() + _runtime_digest()
    ).hexdigest()[:24]
    name = f"memra_rt_{key}"

    def make(out: Path) -> None:
        source = str(RUNTIME / "memra_rt.cpp")
        run_compiler(compiler, [*flags, source, "-o", str(out), f"-Wl,-soname,{name}.so", "-ldl"])

    return publish(name, make)
