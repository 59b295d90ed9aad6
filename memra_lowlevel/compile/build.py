"""One compilation: from a source with its headers to an image, or to the error that says most."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import CompileError, Diagnostic
from . import arch as archs
from . import cubin as cubins
from . import logs, nvrtc, signature
from . import source as sources
from .image import CompiledImage
from .options import CompileOptions, Defines

__all__ = ["build", "build_host", "compile_error", "plain_entries", "signatures_of"]

_BUILT_IN_NAMES = "common/device.cuh"


def build(
    compiler: nvrtc.Library,
    target: archs.Target,
    key: str,
    flags: Sequence[str],
    closure: sources.Closure,
    names: tuple[str, ...],
) -> CompiledImage:
    """Compile for a GPU.

    Raises
    ------
    CompileError, HeaderNotFound
    """
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
    entries = {**plain_entries(symbols), **output.lowered}
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


def build_host(
    text: str | Path,
    closure: sources.Closure,
    names: tuple[str, ...],
    defines: Defines,
    folders: Sequence[str | Path],
    options: CompileOptions,
) -> CompiledImage:
    """Compile for the host device, by a C++ compiler; its results are kept by the builder."""
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


def plain_entries(symbols: Iterable[str]) -> dict[str, str]:
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
