"""From a source to a :class:`CompiledImage`: the two entry points, and the compilation of many."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import expect
from ..errors import CompileError
from . import arch as archs
from . import nvrtc, recorded
from . import source as sources
from .build import build, build_host
from .cache import FORMAT_VERSION, KernelCache, default_cache
from .image import CompiledImage
from .options import CompileOptions, Defines, define_flags

__all__ = ["Job", "clear_memory", "compile_each", "compile_file", "compile_many", "compile_source"]

log = logging.getLogger(__name__)

_memory: dict[str, CompiledImage] = {}
_in_flight: dict[str, threading.Lock] = {}
_guard = threading.Lock()
# Reading is the interpreter's work: threads that did it at once would only wait for each other.
_reading = threading.RLock()
_told: set[str] = set()

Stored = Callable[[sources.Closure, str, tuple[str, ...], tuple[str, ...]], "CompiledImage | None"]
stores: list[Stored] = []
"""Look-ups of ready-made code, asked before anything is compiled; :mod:`.aot` adds to them."""


@dataclass(frozen=True)
class Job:
    """One compilation of :func:`compile_many`; ``source`` is a path or a text."""

    source: str | Path
    arch: str
    name_expressions: tuple[str, ...] = ()
    defines: Defines = field(default_factory=dict)
    include_dirs: tuple[str | Path, ...] = ()
    name: str = ""
    options: CompileOptions = field(default_factory=CompileOptions)


def compile_source(
    source: str,
    *,
    arch: str,
    name: str = "source.cu",
    name_expressions: Iterable[str] = (),
    defines: Defines | None = None,
    include_dirs: Iterable[str | Path] = (),
    options: CompileOptions | Mapping[str, object] | None = None,
    cache: bool | KernelCache = True,
) -> CompiledImage:
    """Compile a text.

    Parameters
    ----------
    source : str
        CUDA C++; ``#include "common/…"`` finds the library's own headers. For the host device a
        kernel needs ``#include "common/device.cuh"``, which stands for CUDA's built-in names
        there (``__global__``, ``threadIdx``, ``atomicAdd``, fixed-width integers …) and is
        harmless for GPUs. Of its own names three matter to an author: ``KERNEL`` is
        ``extern "C" __global__``; ``DYN_SMEM(float, s);`` in a function is the dynamic shared
        memory, ``LaunchConfig(shared_bytes=…)``, as a ``float* s`` (``extern __shared__ float
        s[];`` is understood too, on the host device in function bodies of the source itself);
        ``NULLABLE`` marks a pointer that may be None. C++'s and CUDA's own headers do not exist on
        a GPU. The host device does not refuse them: keep them out of what is to run on both.
    arch : str
        ``"sm_90"`` …, ``"host"``; a device's own is ``device.arch``. What the compiler does not
        know becomes code for an older member of its family, or PTX, with a line in the log
        (``image.rung``); a number newer than all known is refused unless an open device has it.
    name : str
        Name for messages.
    name_expressions : iterable of str
        Template instances to build, e.g. ``"scale<64, float>"``. Plain kernels need none.
    defines : mapping
        Preprocessor names; True and None define without a value.
    include_dirs : iterable of path
    options : CompileOptions, dict or None
    cache : bool or KernelCache
        False compiles afresh and stores nothing.

    Returns
    -------
    CompiledImage
        ``device.module(image).kernel("name")`` gives what :func:`memra_lowlevel.launch` takes.

    Raises
    ------
    CompileError
        With ``diagnostics`` as data: file, line, column, message, source line.
    HeaderNotFound, ArchUnsupported, ToolkitMismatch, CompilerNotFound
    """
    expect.kind("compile_source: source", source, str, "a text", "compile_file takes a path")
    return _compile(
        source,
        name,
        arch,
        name_expressions,
        {} if defines is None else defines,
        include_dirs,
        options,
        cache,
    )


def compile_file(
    path: str | Path,
    *,
    arch: str,
    name_expressions: Iterable[str] = (),
    defines: Defines | None = None,
    include_dirs: Iterable[str | Path] = (),
    options: CompileOptions | Mapping[str, object] | None = None,
    cache: bool | KernelCache = True,
) -> CompiledImage:
    """Compile a file; a relative path that does not exist is looked up below ``cuda_src``.

    Everything else is as for :func:`compile_source`.
    """
    if not isinstance(path, str | os.PathLike):
        raise expect.refusal("compile_file: path", path, "a path")
    found = Path(path)
    if not found.is_absolute() and not found.is_file():
        below = sources.cuda_src_root() / found
        found = below if below.is_file() else found
    return _compile(
        found,
        "",
        arch,
        name_expressions,
        {} if defines is None else defines,
        include_dirs,
        options,
        cache,
    )


def compile_many(
    jobs: Sequence[Job], *, workers: int | None = None, cache: bool | KernelCache = True
) -> list[CompiledImage | CompileError]:
    """Compile several sources in parallel threads; results in the order of ``jobs``.

    A job that does not compile gives its error in place of an image, so that one bad kernel hides
    no other. Anything but a :class:`CompileError` is raised.
    """
    return list(compile_each(jobs, workers=workers, cache=cache))


def compile_each(
    jobs: Sequence[Job], *, workers: int | None = None, cache: bool | KernelCache = True
) -> Iterator[CompiledImage | CompileError]:
    """Compile like :func:`compile_many`; yield each result while later ones are still made."""

    def one(job: Job) -> CompiledImage | CompileError:
        try:
            return _compile(
                job.source,
                job.name,
                job.arch,
                job.name_expressions,
                job.defines,
                job.include_dirs,
                job.options,
                cache,
            )
        except CompileError as error:
            return error

    n = min(len(jobs), workers or os.cpu_count() or 1)
    if n <= 1:
        yield from map(one, jobs)
        return
    with ThreadPoolExecutor(n, thread_name_prefix="memra-compile") as pool:
        yield from pool.map(one, jobs)


def clear_memory() -> None:
    """Forget the images that this process keeps; the disk cache is untouched."""
    with _guard:
        _memory.clear()
        _in_flight.clear()


def _compile(
    text: str | Path,
    name: str,
    arch: str,
    name_expressions: Iterable[str],
    defines: Defines,
    include_dirs: Iterable[str | Path],
    options: CompileOptions | Mapping[str, object] | None,
    cache: bool | KernelCache,
) -> CompiledImage:
    chosen = CompileOptions.of(options)
    expect.kind("compile: arch", arch, str, "an architecture name, such as device.arch")
    if arch != archs.HOST and (chosen.check or chosen.sanitize):
        asked = "check=True" if chosen.check else f"sanitize={chosen.sanitize!r}"
        raise expect.refusal(
            f"compile: options for {arch}", asked, "them for arch='host'",
            "only the host device checks; on a GPU use compute-sanitizer",
        )  # fmt: skip
    expect.kind("compile: name", name, str, "a str")
    if isinstance(defines, Mapping) and all(isinstance(n, str) for n in defines):
        for define in defines:
            if not re.fullmatch(r"[A-Za-z_]\w*(\([^)]*\))?", define, re.ASCII):
                raise expect.refusal("compile: defines", define, "names of the preprocessor")
    else:
        raise expect.refusal("compile: defines", defines, "a mapping of names to values")
    names = tuple(dict.fromkeys(_texts("name_expressions", name_expressions)))
    folders = _texts("include_dirs", include_dirs)
    recorded.note(Job(text, arch, names, defines, folders, name, chosen))
    flags = (*chosen.nvrtc_flags(), *define_flags(defines))
    with _reading:
        closure = sources.read(text, name=name, include_dirs=folders)
        stored = _ready(closure, arch, flags, names, cache) if arch != archs.HOST else None
    if stored is not None:
        return stored
    if arch == archs.HOST:
        return build_host(text, closure, names, defines, folders, chosen)
    compiler = nvrtc.library()
    target = _target(arch, compiler)
    _tell(target)
    key = cache_key(compiler, target.arch, flags, closure, names)

    def make() -> CompiledImage:
        return build(compiler, target, key, flags, closure, names)

    if not cache:
        return make()
    with _guard:
        lock = _in_flight.setdefault(key, threading.Lock())
    with lock:
        kept = _memory.get(key)
        if kept is not None:
            return replace(kept, want=target.want, rung=target.rung, origin="memory")
        disk = cache if isinstance(cache, KernelCache) else default_cache()
        image = disk.get_or_build(key, label(closure.name), target.arch, make)
        image = replace(image, want=target.want, rung=target.rung)
        _memory[key] = image
        return image


def _target(arch: str, compiler: nvrtc.Library) -> archs.Target:
    return archs.resolve(
        arch,
        compiler.archs,
        compiler=compiler.name,
        families=compiler.families,
        devices=archs.of_devices,
    )


def _ready(
    closure: sources.Closure,
    arch: str,
    flags: tuple[str, ...],
    names: tuple[str, ...],
    cache: bool | KernelCache,
) -> CompiledImage | None:
    """Look for code that is there already, without loading the compiler."""
    if not cache:
        return None
    stored = _from_stores(closure, arch, flags, names)
    known = nvrtc.remembered() if stored is None else None
    return stored if known is None else _made_before(known, arch, flags, closure, names, cache)


def _texts(what: str, values: object) -> tuple[Any, ...]:
    """Give one name or path, or several, as a tuple."""
    if isinstance(values, str | os.PathLike):
        return (values,)
    if not isinstance(values, Iterable) or isinstance(values, bytes):
        raise expect.refusal(f"compile: {what}", values, "a list of str")
    found = tuple(values)
    for value in found:
        if not isinstance(value, str | os.PathLike):
            raise expect.refusal(f"compile: {what}", value, "a str")
    return found


def _made_before(
    compiler: nvrtc.Library,
    arch: str,
    flags: Sequence[str],
    closure: sources.Closure,
    names: tuple[str, ...],
    cache: bool | KernelCache,
) -> CompiledImage | None:
    """Look up what this compiler made, without loading it."""
    target = _target(arch, compiler)
    key = cache_key(compiler, target.arch, flags, closure, names)
    image = _memory.get(key)
    if image is not None:
        return replace(image, want=target.want, rung=target.rung, origin="memory")
    disk = cache if isinstance(cache, KernelCache) else default_cache()
    image = disk.get(key, label(closure.name), target.arch)
    if image is None:
        return None
    _tell(target)
    image = replace(image, want=target.want, rung=target.rung)
    with _guard:
        _memory[key] = image
    return image


def cache_key(
    compiler: nvrtc.Library,
    arch: str,
    flags: Sequence[str],
    closure: sources.Closure,
    name_expressions: Sequence[str],
) -> str:
    """Hash of all that the code depends on, and of nothing that it does not (no path, no time)."""
    parts = [
        FORMAT_VERSION,
        list(compiler.version),
        compiler.digest,
        arch,
        list(flags),
        closure.digest,
        sorted(name_expressions),
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def _from_stores(
    closure: sources.Closure, arch: str, flags: tuple[str, ...], names: tuple[str, ...]
) -> CompiledImage | None:
    """Ask the stores of ready-made code; the one that the environment names is opened first."""
    if os.environ.get("MEMRA_CUBINS"):
        from . import aot

        aot.open_named(os.environ["MEMRA_CUBINS"])
    for look_up in tuple(stores):
        found = look_up(closure, arch, flags, names)
        if found is not None:
            return found
    return None


def _tell(target: archs.Target) -> None:
    """Say once per architecture that the exact rung was not reached."""
    if target.reason and target.want != target.arch and target.want not in _told:
        _told.add(target.want)
        log.warning("%s: %s", target.want, target.reason)


def label(name: str) -> str:
    """Make a file name part that tells the kernel: ``kv.append`` for ``kv/append.cu``."""
    stem = name.removesuffix(".cu").replace("/", ".")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).strip(".")[-60:] or "source"
