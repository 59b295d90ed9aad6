"""Compiling of unmodified ``.cu`` files with a C++ compiler, for the host device.

The result is a shared library that holds the kernels and a table of them. Parameter sizes in the
table come from the kernels' own types, so a wrong count or size can be told at launch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CompileError
from .build import (
    RUNTIME,
    Compiler,
    Sanitizer,
    cpu_flags,
    find_compiler,
    publish,
    run_compiler,
    runtime_library,
)
from .translate import (
    EXTERN_SHARED,
    bound_of,
    closure,
    dynamic_shared,
    launch_bounds,
    plain_kernels,
    stripped,
)

__all__ = ["HostImage", "compile_host"]

_USE_DYN_SMEM = (
    "On the host device an extern __shared__ array is understood in the body of a kernel of the "
    "source itself; elsewhere write DYN_SMEM(type, name) of common/device.cuh, inside the function"
)


@dataclass(frozen=True)
class HostImage:
    """A compiled kernel file.

    Attributes
    ----------
    path : Path
        The library; ``str(path).encode()`` is the image that the host's ``cuModuleLoadData`` takes.
    entries : dict of str to str
        Symbol of each name expression and of each plain kernel of the file. On the host they are
        the same text.
    check : bool
    sanitize : str or None
    """

    path: Path
    entries: dict[str, str]
    check: bool = False
    sanitize: Sanitizer | None = None

    @functools.cached_property
    def param_sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes in bytes of the parameters of each entry; loads the library."""
        from . import runner

        module = runner.load(self.path)
        return {
            name: runner.param_sizes(runner.get_function(module, symbol))
            for name, symbol in self.entries.items()
        }


def compile_host(
    source: str | Path,
    name_expressions: Sequence[str] = (),
    include_dirs: Sequence[str | Path] = (),
    defines: Mapping[str, object] | None = None,
    check: bool = False,
    sanitize: Sanitizer | None = None,
    name: str = "source.cu",
) -> HostImage:
    """Compile a kernel source for the host device, or take it from the cache.

    Parameters
    ----------
    source : Path or str
        A path, or the text of a source (a ``str`` with a line break).
    name_expressions : sequence of str
        Kernels to export, e.g. ``"attend<128>"``; those that are no templates are exported anyway.
    include_dirs : sequence of path
        Searched after the file's own folder; the folder of ``common/`` must be among them.
    defines : mapping
        Macros; None or True as a value stands for 1.
    check : bool
        Instrument every memory access for check mode.
    sanitize : {"undefined", "address"}, optional
    name : str
        File name in messages, when ``source`` is a text.

    Raises
    ------
    CompileError, HeaderNotFound, CompilerNotFound
    """
    common = (source, name_expressions, include_dirs, defines or {}, check, sanitize, name)
    try:
        return _compiled(*common, bounds=True)
    except CompileError as error:
        if "memra_bound_" not in error.log:
            raise
    # C++ cannot name the function of a bound everywhere that it can name the kernel.
    return _compiled(*common, bounds=False)


def _compiled(
    source: str | Path,
    name_expressions: Sequence[str],
    include_dirs: Sequence[str | Path],
    defines: Mapping[str, object],
    check: bool,
    sanitize: Sanitizer | None,
    name: str,
    *,
    bounds: bool,
) -> HostImage:
    compiler = find_compiler()
    path: Path | None = None
    if isinstance(source, Path) or "\n" not in source:
        path = Path(source).resolve()
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise CompileError(f"cannot read the kernel source {source}: {error}") from error
        head = f'#include "{path}"\n'
        folder = path.parent
    else:
        text, folder = source, Path.cwd()
        head = f'#line 1 "{name}"\n{source}\n'
    folders = [Path(d).resolve() for d in include_dirs]
    translated, bounded = dynamic_shared(text), frozenset[str]()
    if bounds:
        translated, bounded = launch_bounds(translated)
    if translated != text:
        named = name if path is None else str(path)
        head = f'#line 1 "{named}"\n{translated}\n'
    names = list(dict.fromkeys([*plain_kernels(text), *name_expressions]))
    flags = [*_flags(compiler, check, sanitize), *_define_flags(defines)]
    runtime = runtime_library(check, sanitize)
    unit = head + _table(names, bounded, sanitize)
    digest = hashlib.sha256()
    parts = (compiler.fingerprint, runtime.name, *flags, unit, *map(str, folders))
    digest.update("\0".join(parts).encode())
    for file in closure(text, folder, folders):
        digest.update(str(file).encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(text.encode())
    key = f"kernel_{digest.hexdigest()[:32]}"

    def make(out: Path) -> None:
        unit_path = out.with_suffix(".cpp")
        object_path = out.with_suffix(".o")
        own = ["-iquote", str(path.parent)] if path is not None else []
        search = [*own, *(f"-I{d}" for d in (*folders, RUNTIME))]
        try:
            unit_path.write_text(unit, encoding="utf-8")
            run_compiler(
                compiler,
                [*flags, *search, "-c", str(unit_path), "-o", str(object_path)],
            )
            # What nothing defines is told here, as on a GPU, and not when the library is loaded.
            # (The address sanitizer's own library is joined only then.)
            link = ["-fsanitize=address"] if sanitize == "address" else ["-Wl,-z,defs"]
            # Symbols of the sanitisers' hooks come from the runtime, not from their own libraries
            # (zig adds its own unless it is told to optimise).
            run_compiler(
                compiler,
                ["-shared", "-O2", *link, str(object_path), str(runtime), "-o", str(out), "-lm"],
            )
        finally:
            unit_path.unlink(missing_ok=True)
            object_path.unlink(missing_ok=True)

    try:
        library = publish(key, make)
    except CompileError as error:
        if EXTERN_SHARED.search(stripped(translated)) or any(
            EXTERN_SHARED.search(stripped(file.read_text(encoding="utf-8")))
            for file in closure(text, folder, folders)
            if RUNTIME not in file.parents and file.name != "device.cuh"
        ):
            error.args = (f"{error}. {_USE_DYN_SMEM}", *error.args[1:])
        if wrong := _refused_names(error, names):
            error.args = (
                f"name_expressions: {', '.join(map(repr, wrong))} is no kernel of the source; name "
                f"an instance of a template, such as scale<64, float> ({error})",
                *error.args[1:],
            )
        if path is None:  # the compiler had no file to quote from
            lines = ["", *text.splitlines()]
            error.diagnostics = tuple(
                replace(d, source_line=lines[d.line])
                if d.file == name and d.line < len(lines)
                else d
                for d in error.diagnostics
            )
        raise
    return HostImage(library, {n: n for n in names}, check, sanitize)


def _optimise(compiler: Compiler, check: bool, sanitize: Sanitizer | None) -> tuple[str, ...]:
    """Return what makes kernels as fast as -O2 does, large ones in half of its time.

    Checked kernels spend their time in the checks, which the optimiser does not make faster but has
    to carry through all of its passes. Those of undefined behaviour stand in the code before any of
    them; those of memory come late, and without folding there would be many more.
    """
    if compiler.kind != "gcc":
        return ("-O2",)
    if check:
        return ("-Og",)
    if sanitize == "undefined":
        return ("-O0",)
    return (
        "-O1", "-fexpensive-optimizations", "-finline-functions", "-finline-small-functions",
        "-findirect-inlining", "-ftree-pre", "-ftree-vrp", "-ftree-vectorize",
        "-fvect-cost-model=cheap",
    )  # fmt: skip


def _flags(compiler: Compiler, check: bool, sanitize: Sanitizer | None) -> list[str]:
    flags = [
        "-std=gnu++17", "-x", "c++", *_optimise(compiler, check, sanitize),
        "-g1", "-fPIC", "-fvisibility=hidden", "-w",
        "-gdwarf-4",  # binutils reads the file table of DWARF 5 one off: faults named our own file
        # The arithmetic contract: no contraction. The rest changes speed or defines what a GPU
        # defines (wrapping integers, type punning), never the bits of a float.
        "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
        "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fno-stack-protector",
        # A large frame touches each of its pages, so that it cannot step over the guard page.
        # And what goes through a null pointer is a fault to be found, not dead code.
        "-fstack-clash-protection", "-fno-delete-null-pointer-checks",
        "-fno-plt", "-fsigned-char", "-U_FORTIFY_SOURCE", *cpu_flags(),
    ]  # fmt: skip
    if compiler.kind == "gcc":
        # Lines are wanted, not where variables lie: following those is a third of the work.
        flags += ["-fno-gnu-unique", "-fno-var-tracking", "-fno-var-tracking-assignments"]
    if sanitize != "undefined":
        flags.append("-fwrapv")
    if check:
        # Fixed bounds, alignment and shifts are what the memory hooks cannot see.
        flags += ["-DMEMRA_CHECK", "-fsanitize=thread,bounds,alignment,shift-exponent"]
        flags += ["-fno-tree-vectorize", "-fsanitize-recover=all"]
        if compiler.kind == "gcc":
            flags += ["-fno-tree-loop-distribute-patterns", "-fno-store-merging"]
            flags += ["--param", "tsan-distinguish-volatile=1"]
            flags += ["--param", "tsan-instrument-func-entry-exit=0"]
        else:
            flags += ["-mllvm", "-tsan-distinguish-volatile=1"]
            flags += ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
    if sanitize == "undefined":
        flags += ["-fsanitize=undefined", "-fno-sanitize=vptr,function", "-fsanitize-recover=all"]
        if compiler.kind == "gcc":
            flags.remove("-fno-sanitize=vptr,function")
            flags.append("-fno-sanitize=vptr")
    if sanitize == "address":
        flags += ["-fsanitize=address", "-fno-omit-frame-pointer"]
    return flags


def _define_flags(defines: Mapping[str, object]) -> list[str]:
    return [f"-D{k}={1 if v is None or v is True else v}" for k, v in sorted(defines.items())]


def _table(names: Sequence[str], bounded: frozenset[str], sanitize: Sanitizer | None) -> str:
    rows = "".join(f'  memra::Launch<{n}{bound_of(n, bounded)}>::entry("{n}"),\n' for n in names)
    flag = {"undefined": "memra::MODULE_UBSAN", "address": "memra::MODULE_ASAN"}.get(
        sanitize or "", "0"
    )
    return (
        '#line 1 "kernel table"\n'
        '#include "memra_table.h"\n'
        f"static const memra::Entry memra_entries[] = {{\n{rows}  {{}},\n}};\n"
        'extern "C" __attribute__((visibility("default"), used)) const memra::ModuleTable\n'
        f"memra_module = {{memra::ABI_VERSION, MEMRA_FLAG_CHECK | {flag}, &memra_context,\n"
        f"  memra_entries, {len(names)}}};\n"
    )


_FIRST_ROW = 3  # line of the first kernel in the table, below


def _refused_names(error: CompileError, names: Sequence[str]) -> list[str]:
    """Which kernels a compiler could not put into the table."""
    rows = [
        d.line - _FIRST_ROW
        for d in error.diagnostics
        if d.severity == "error" and d.file == "kernel table"
    ]
    return list(dict.fromkeys(names[row] for row in rows if 0 <= row < len(names)))
