"""NVRTC, the run-time compiler. The only module that imports ``cuda.bindings.nvrtc``.

Nothing is loaded before :func:`library` is first called, and a start that finds all its code in the
cache never calls it: :func:`remembered` tells what the last process loaded. NVRTC works without a
driver and without a GPU. The bindings release the interpreter's lock while it compiles, so threads
compile in parallel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError, ToolkitMismatch
from ..paths import cache_root

__all__ = ["Library", "Output", "compile_program", "library", "loaded", "remembered"]

_REMEDY = (
    "Install the compiler that fits the bindings: "
    "pip install 'nvidia-cuda-nvrtc-cu12==12.9.*' 'cuda-python==12.9.*' "
    "(or nvidia-cuda-nvrtc and cuda-python 13)"
)


@dataclass(frozen=True)
class Library:
    """The NVRTC library of this process.

    Attributes
    ----------
    version : (int, int)
    path : str
        File that was loaded; ``""`` where the system does not tell.
    digest : str
        Hash of the library's content, its built-ins file included: two builds of one version
        number are two compilers.
    archs : tuple of int
        Architectures it compiles for, as numbers (90, 100, …).
    bindings : str
        Version of ``cuda.bindings``.
    """

    version: tuple[int, int]
    path: str
    digest: str
    archs: tuple[int, ...]
    bindings: str

    @property
    def name(self) -> str:
        """``"NVRTC 12.9"``."""
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    @property
    def families(self) -> bool:
        """Whether the family targets (``sm_100f``) exist: from version 12.9 on."""
        return self.version >= (12, 9)


@dataclass(frozen=True)
class Output:
    """Result of one compilation.

    Attributes
    ----------
    ok : bool
    result : str
        Name of NVRTC's result code.
    data : bytes
        The cubin or PTX; empty on failure.
    log : str
    lowered : dict of str to str
        Name expression to symbol.
    ms : float
    """

    ok: bool
    result: str
    data: bytes
    log: str
    lowered: dict[str, str]
    ms: float


def library() -> Library:
    """Load NVRTC once and describe it.

    Raises
    ------
    ToolkitMismatch
        When the bindings or the library are not there, or do not fit together.
    """
    with _loading:  # threads that compile come here at once, and its digest takes 0.2 s
        return _library()


_loading = threading.Lock()


@functools.cache
def _library() -> Library:
    api = _api()
    version = _call(api, "nvrtcVersion")
    archs = _call(api, "nvrtcGetSupportedArchs")[0]
    path = _loaded_path()
    found = Library(
        (int(version[0]), int(version[1])),
        path,
        _library_digest(path) if path else "unknown",
        tuple(int(a) for a in archs),
        bindings_version(),
    )
    if path:
        _remember(found)
    return found


def loaded() -> bool:
    """Whether this process has loaded NVRTC."""
    return _api.cache_info().currsize > 0


def remembered() -> Library | None:
    """Describe, without loading it, the library that a process like this one loaded last.

    None when NVRTC is loaded (:func:`library` is free then), when nothing is remembered, or when
    anything that decides which library is loaded has changed: its files, the installed packages,
    the interpreter's prefix, the variables of the search. Whoever compiles asks :func:`library`;
    this answer only finds code that an equal compiler made before.
    """
    return None if loaded() else _remembered(cache_root(), _search())


@functools.lru_cache(maxsize=8)
def _remembered(root: Path, search: tuple[str, ...]) -> Library | None:
    try:
        known = json.loads(_memo(root, search).read_text())
        if known["identity"] != _identity(known["path"]):
            return None
        return Library(
            (int(known["version"][0]), int(known["version"][1])),
            str(known["path"]),
            str(known["digest"]),
            tuple(int(a) for a in known["archs"]),
            str(known["bindings"]),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def bindings_version() -> str:
    """Version of the installed ``cuda.bindings``, ``"?"`` where there is none."""
    from importlib import metadata

    try:
        return metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return "?"


def compile_program(
    text: str,
    name: str,
    headers: Sequence[tuple[str, str]],
    flags: Sequence[str],
    name_expressions: Sequence[str],
    kind: str,
) -> Output:
    """Compile one program; a failed compilation is an :class:`Output` too.

    Parameters
    ----------
    kind : str
        ``"cubin"`` or ``"ptx"``: what to take from the result.
    """
    api = _api()
    program = _call(
        api,
        "nvrtcCreateProgram",
        text.encode(),
        name.encode(),
        len(headers),
        [content.encode() for _, content in headers],
        [header.encode() for header, _ in headers],
    )[0]
    try:
        for expression in name_expressions:
            _call(api, "nvrtcAddNameExpression", program, expression.encode())
        start = time.perf_counter()
        result = api.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0]
        ms = (time.perf_counter() - start) * 1e3
        log = _bytes(api, "ProgramLog", program).decode("utf-8", "replace").replace("\0", "")
        if int(result) != 0:
            return Output(False, result.name, b"", log.strip(), {}, ms)
        lowered = {
            expression: _call(api, "nvrtcGetLoweredName", program, expression.encode())[0].decode()
            for expression in name_expressions
        }
        data = _bytes(api, {"cubin": "CUBIN", "ptx": "PTX"}[kind], program)
        return Output(True, result.name, data, log.strip(), lowered, ms)
    finally:
        api.nvrtcDestroyProgram(program)


@functools.cache
def _api() -> Any:
    try:
        import cuda.bindings.nvrtc as api
    except Exception as error:  # a broken binary fails in many ways
        raise ToolkitMismatch(
            f"the NVRTC bindings cannot be imported ({error}). {_REMEDY}",
            bindings=bindings_version(),
        ) from error
    try:
        api.nvrtcVersion()
    except Exception as error:  # the loader's own error classes derive from RuntimeError
        raise ToolkitMismatch(
            f"the NVRTC library cannot be loaded ({_first_line(error)}). {_REMEDY}",
            bindings=bindings_version(),
        ) from error
    return api


def _call(api: Any, name: str, *args: Any) -> tuple[Any, ...]:
    """Call a function of the bindings; the values behind its result code."""
    result, *values = getattr(api, name)(*args)
    if int(result) != 0:
        raise CompileError(f"{name} failed with {result.name}")
    return tuple(values)


def _bytes(api: Any, what: str, program: Any) -> bytes:
    size = int(_call(api, f"nvrtcGet{what}Size", program)[0])
    content = bytearray(size)
    # The bindings write into the object they are given; they ask for bytes.
    holder = bytes(content)
    if size:
        _call(api, f"nvrtcGet{what}", program, holder)
    return holder


def _loaded_path() -> str:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return str(load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    except Exception:
        return ""


def _library_digest(path: str) -> str:
    """Hash the library and its built-ins; 0.2 s, so the answer is kept beside the cache.

    The kept answer is bound to size, inode and both time stamps (the change time cannot be set by
    a program), and only saves time: it is never asked whether a *source* is fresh.
    """
    identity = _identity(path)
    memo = _memo(cache_root(), (str(Path(path).resolve().parent),), "digest")
    try:
        known = json.loads(memo.read_text())
        if known["identity"] == identity:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    whole = hashlib.blake2b(digest_size=20)
    for file, *_ in identity:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 22):
                whole.update(block)
    digest = whole.hexdigest()
    _publish(memo, {"identity": identity, "digest": digest})
    return digest


def _identity(path: str) -> list[list[Any]]:
    """Name, size, inode and both time stamps of the library and of its built-ins."""
    whole = Path(path).resolve()
    identity = []
    for file in sorted({whole, *whole.parent.glob("libnvrtc-builtins*")}):
        s = file.stat()
        identity.append([str(file), s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns])
    return identity


def _search() -> tuple[str, ...]:
    """Everything outside the library that decides which one a process loads.

    An installation shows in the time stamps of the folders that hold the packages.
    """
    variables = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
    decides = [sys.prefix, *(os.environ.get(name, "") for name in variables)]
    for entry in sys.path:
        for place in ("nvidia", "cuda"):
            folder = os.path.join(entry or ".", place)
            with contextlib.suppress(OSError):
                stamps = os.stat(folder).st_mtime_ns, os.stat(entry or ".").st_mtime_ns
                decides.append(f"{folder} {stamps}")
    return tuple(decides)


def _remember(found: Library) -> None:
    memo = _memo(cache_root(), _search())
    try:
        content = {
            "identity": _identity(found.path),
            "path": found.path,
            "digest": found.digest,
            "version": list(found.version),
            "archs": list(found.archs),
            "bindings": found.bindings,
        }
        if memo.exists() and json.loads(memo.read_text()) == content:
            return
    except (OSError, ValueError):
        return
    _publish(memo, content)


def _memo(root: Path, decides: tuple[str, ...], what: str = "nvrtc") -> Path:
    return root / "libraries" / f"{what}-{_hash(json.dumps(decides).encode())[:16]}.json"


def _publish(memo: Path, content: dict[str, Any]) -> None:
    """Write a memo in one step; a folder that cannot take it only costs time."""
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        scratch = memo.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        scratch.write_text(json.dumps(content))
        os.replace(scratch, memo)
    except OSError:
        pass


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
