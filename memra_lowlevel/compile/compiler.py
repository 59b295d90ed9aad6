"""From a source to a :class:`CompiledImage`: the two entry points, and the compilation of many."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import expect
from ..errors import CompileError, Diagnostic
from . import arch as archs
from . import cubin as cubins
from . import logs, nvrtc, recorded, signature
from . import source as sources
from .cache import FORMAT_VERSION, KernelCache, default_cache
from .image import CompiledImage
from .options import CompileOptions, Defines, define_flags

__all__ = ["Job", "clear_memory", "compile_each", "compile_file", "compile_many", "compile_source"]

log = logging.getLogger(__name__)

_BUILT_IN_NAMES = "common/device.cuh"
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
        return _compile_host(text, closure, names, defines, folders, chosen)
    compiler = nvrtc.library()
    target = _target(arch, compiler)
    _tell(target)
    key = cache_key(compiler, target.arch, flags, closure, names)

    def build() -> CompiledImage:
        return _build(compiler, target, key, flags, closure, names)

    if not cache:
        return build()
    with _guard:
        lock = _in_flight.setdefault(key, threading.Lock())
    with lock:
        kept = _memory.get(key)
        if kept is not None:
            return replace(kept, want=target.want, rung=target.rung, origin="memory")
        disk = cache if isinstance(cache, KernelCache) else default_cache()
        image = disk.get_or_build(key, label(closure.name), target.arch, build)
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


def _build(
    compiler: nvrtc.Library,
    target: archs.Target,
    key: str,
    flags: Sequence[str],
    closure: sources.Closure,
    names: tuple[str, ...],
) -> CompiledImage:
    output = nvrtc.compile_program(
        closure.text,
        closure.name,
        closure.headers,
        [f"--gpu-architecture={target.arch}", *flags],
        names,
        target.kind,
    )
    found = logs.diagnostics(output.log)
    if not output.ok:
        raise compile_error(closure, target.arch, compiler.name, output, found, names)
    layouts = cubins.param_layout(output.data) if target.kind == "cubin" else {}
    symbols = tuple(layouts) if layouts else cubins.ptx_entry_points(output.data)
    entries = {**_plain_entries(symbols), **output.lowered}
    return CompiledImage(
        kind=target.kind,
        arch=target.arch,
        rung=target.rung,
        data=output.data,
        entries=entries,
        signatures=signatures_of(closure, entries),
        layouts=layouts,
        resources=logs.resources(output.log),
        diagnostics=found,
        log=output.log,
        key=key,
        ms=output.ms,
        name=closure.name,
        want=target.want,
    )


def _compile_host(
    text: str | Path,
    closure: sources.Closure,
    names: tuple[str, ...],
    defines: Defines,
    folders: Sequence[str | Path],
    options: CompileOptions,
) -> CompiledImage:
    from ..driver.host.options import current_options
    from . import hostcxx

    start = time.perf_counter()
    try:
        built = hostcxx.compile_host(
            text if isinstance(text, Path) else text + "\n",  # a text without a line end is a path
            names,
            [*folders, sources.cuda_src_root()],
            {k: v for k, v in defines.items() if v is not False},
            check=options.check or current_options().check,
            sanitize=options.sanitize,
            name=closure.name,
        )
    except CompileError as error:
        if any(header == _BUILT_IN_NAMES for header, _ in closure.headers):
            raise
        raise CompileError(
            f'{error}. The source does not include "{_BUILT_IN_NAMES}", which stands for CUDA\'s '
            "built-in names on the host device: include it first",
            diagnostics=error.diagnostics,
            log=error.log,
        ) from None
    data = str(built.path).encode()
    return CompiledImage(
        kind="host",
        arch=archs.HOST,
        rung="host",
        data=data,
        entries=dict(built.entries),
        signatures=signatures_of(closure, built.entries),
        key=hashlib.blake2b(data, digest_size=20).hexdigest(),
        ms=(time.perf_counter() - start) * 1e3,
        name=closure.name,
        want=archs.HOST,
    )


def signatures_of(closure: sources.Closure, names: Iterable[str]) -> dict[str, signature.Signature]:
    """Signatures of the given kernels, as far as the source spells them out."""
    known: dict[str, signature.Signature] = {}
    for text in (closure.text, *(content for _, content in closure.headers)):
        for name, found in signature.parse(text).items():
            known.setdefault(name, found)
    return {
        name: signature.specialise(known[base], name)
        for name in names
        if (base := signature.base_name(name)) in known
    }


def compile_error(
    closure: sources.Closure,
    arch: str,
    compiler: str,
    output: nvrtc.Output,
    found: Sequence[Diagnostic],
    names: Sequence[str],
) -> CompileError:
    """Turn a failed compilation into the error that says the most."""
    errors = [d for d in found if d.severity == "error"]
    for problem in errors:
        opened = re.search(r'(?:cannot|could not) open source file "([^"]+)"', problem.message)
        if opened is not None:
            missing = next((m for m in closure.missing if m.name == opened[1]), None)
            if missing is None:
                missing = sources.MissingHeader(opened[1], problem.file, problem.line, (), True)
            return sources.header_not_found(missing, problem.source_line, output.log)
    unresolved = [d for d in errors if d.file == logs.NAME_MAP]
    if unresolved and len(unresolved) == len(errors):
        at = [d.source_line.rpartition("nv_mangled_name ")[2].strip() for d in unresolved]
        which = ", ".join(repr(n) for n in names if n.strip() in at) or "one of " + repr(names)
        have = ", ".join(sorted(_kernel_names(closure))) or "none"
        return CompileError(
            f"{closure.name}: the name expression {which} names no kernel of this source: "
            f"{unresolved[0].message}. Its kernels are {have}",
            diagnostics=found,
            log=output.log,
        )
    text = f"{closure.name} does not compile for {arch} ({compiler}, {output.result})"
    if errors:
        first = errors[0]
        where = f"{first.file}:{first.line}:{first.column}: " if first.line else ""
        caret = f"\n  {first.source_line}\n  {' ' * (first.column - 1)}^" if first.column else ""
        more = f"\n(and {len(errors) - 1} more; see .diagnostics)" if len(errors) > 1 else ""
        text += f":\n{where}{first.message}{caret}{more}"
    elif output.log:
        text += f":\n{output.log}"
    return CompileError(text, diagnostics=found, log=output.log)


def _kernel_names(closure: sources.Closure) -> set[str]:
    names: set[str] = set()
    for text in (closure.text, *(content for _, content in closure.headers)):
        names.update(signature.parse(text))
    return names


def _plain_entries(symbols: Iterable[str]) -> dict[str, str]:
    """Give the kernels that are no templates their plain names: ``f`` for ``f`` and ``_Z1fPi``."""
    entries: dict[str, str] = {}
    twice: set[str] = set()
    for symbol in symbols:
        name = symbol
        mangled = re.match(r"_Z(\d+)", symbol)
        if mangled is not None:
            end = mangled.end() + int(mangled[1])
            if symbol[end : end + 1] == "I":
                continue  # a template instance has its name expression
            name = symbol[mangled.end() : end]
        elif symbol.startswith("_Z"):
            continue  # inside a namespace: ask by name expression
        if name in entries:
            twice.add(name)
        entries[name] = symbol
    for name in twice:  # overloads have no plain name
        del entries[name]
    return entries


def _tell(target: archs.Target) -> None:
    """Say once per architecture that the exact rung was not reached."""
    if target.reason and target.want != target.arch and target.want not in _told:
        _told.add(target.want)
        log.warning("%s: %s", target.want, target.reason)


def label(name: str) -> str:
    """Make a file name part that tells the kernel: ``kv.append`` for ``kv/append.cu``."""
    stem = name.removesuffix(".cu").replace("/", ".")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).strip(".")[-60:] or "source"
