"""Compiling of unmodified ``.cu`` files with a C++ compiler, for the host device.

The result is a shared library that holds the kernels and a table of them. Parameter sizes in the
table come from the kernels' own types, so a wrong count or size can be told at launch.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CompileError, HeaderNotFound
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

__all__ = ["HostImage", "compile_host", "plain_kernels"]


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
    for file in _closure(text, folder, folders):
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
        if _EXTERN_SHARED.search(_strip(translated)) or any(
            _EXTERN_SHARED.search(_strip(file.read_text(encoding="utf-8")))
            for file in _closure(text, folder, folders)
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


def _optimise(compiler: Compiler) -> tuple[str, ...]:
    """Return what makes kernels as fast as -O2 does, large ones in half of its time."""
    if compiler.kind != "gcc":
        return ("-O2",)
    return (
        "-O1", "-fexpensive-optimizations", "-finline-functions", "-finline-small-functions",
        "-findirect-inlining", "-ftree-pre", "-ftree-vrp", "-ftree-vectorize",
        "-fvect-cost-model=cheap",
    )  # fmt: skip


def _flags(compiler: Compiler, check: bool, sanitize: Sanitizer | None) -> list[str]:
    flags = [
        "-std=gnu++17", "-x", "c++", *_optimise(compiler),
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
    rows = "".join(f'  memra::Launch<{n}{_bound_of(n, bounded)}>::entry("{n}"),\n' for n in names)
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


_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.S)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.M)
_KERNEL = re.compile(
    r"(?P<qualifier>\bKERNEL\b|\b__global__\b)(?P<between>(?:\s|\bvoid\b|\b__launch_bounds__\s*"
    r"\([^()]*(?:\([^()]*\)[^()]*)*\))*)\b(?P<name>\w+)\s*\("
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)


def _strip(text: str) -> str:
    return _COMMENT.sub(lambda m: m.group(1) or " ", text)


_EXTERN_SHARED = re.compile(r"\bextern\s+__shared__\b")
_DYNAMIC = re.compile(
    r"\bextern(?P<before>\s+)__shared__\s(?P<align>\s*(?:__align__|alignas)\s*\([^()]*\)\s*)?"
    r"(?P<type>[\w:<>,\s]+?)(?P<blank>\s+)(?P<name>\w+)\s*\[\s*\]"
)
_USE_DYN_SMEM = (
    "On the host device an extern __shared__ array is understood in the body of a kernel of the "
    "source itself; elsewhere write DYN_SMEM(type, name) of common/device.cuh, inside the function"
)


def dynamic_shared(text: str) -> str:
    """Rewrite ``extern __shared__ T name[]`` in function bodies as a pointer; lines stay.

    C++ has no storage class for memory whose address depends on the running block.
    """
    if _EXTERN_SHARED.search(text) is None:
        return text
    plain = _blanked(text)
    out, at = [], 0
    for found in _DYNAMIC.finditer(plain):
        if not _in_function(plain[: found.start()]):
            continue
        kind, lines = " ".join(found["type"].split()), "\n" * found.group().count("\n")
        pointer = f"reinterpret_cast<{kind}*>(memra::dynamic_shared())"
        out += [text[at : found.start()], f"{kind}* const {found['name']} = {pointer}{lines}"]
        at = found.end()
    return "".join([*out, text[at:]])


def _blanked(text: str) -> str:
    """Blank out comments, strings and directives, so that what is left stays in its place."""
    for what in (_COMMENT, _DIRECTIVE):
        text = what.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    return text


_BOUNDS = re.compile(r"__launch_bounds__\s*\((.*)\)", re.S)
_BEFORE_KERNEL = re.compile(
    r"(?:\A|[;{}])\s*(?P<head>(?P<template>template\s*<[^;{}]*>\s*)?(?:(?:extern|static|inline)\s+)*)\Z"
)
_SPECIALISED = re.compile(r"\btemplate\s*<\s*>([^;{}]*)")
_CALLED = re.compile(r"\b(\w+)\s*(?:<[^<>]*>\s*)?\(")


def launch_bounds(text: str) -> tuple[str, frozenset[str]]:
    """Put a function ``memra_bound_NAME`` before kernels with ``__launch_bounds__``; lines stay.

    It has the kernel's own template parameters and scope, for bounds are written in terms of them.
    C++ has no attribute that would keep a number.

    Returns
    -------
    str
        The text.
    frozenset of str
        Names of the kernels whose bounds can be asked for. A kernel in a header or out of a macro
        has none, nor one with words of its own before ``__global__``, with bounds that a directive
        chooses, or with explicit specialisations.
    """
    if "__launch_bounds__" not in text:
        return text, frozenset()
    plain = _blanked(text)
    places: list[tuple[int, str, str]] = []
    unclear = {name for head in _SPECIALISED.findall(plain) for name in _CALLED.findall(head)}
    for kernel in _KERNEL.finditer(plain):
        name, bounds = kernel["name"], _BOUNDS.search(kernel["between"])
        before = _BEFORE_KERNEL.search(plain[: kernel.start()])
        chosen = _DIRECTIVE.search(text, kernel.start(), kernel.end())  # bounds under an #if
        if before is None or chosen is not None:
            unclear.add(name)
        elif _is_definition(plain[kernel.end() :]):
            value = f"memra::launch_bound({bounds[1]})" if bounds else "0"
            made = f"{before['template'] or ''} constexpr unsigned memra_bound_{name}() "
            made += f"{{ return {value}; }} "
            places.append((before.start("head"), name, " ".join(made.split())))
    bounded = frozenset(name for _, name, made in places if "launch_bound(" in made) - unclear
    out, at = [], 0
    for place, name, made in places:
        if name in bounded:
            out += [text[at:place], made, " "]
            at = place
    return "".join([*out, text[at:]]), bounded


def _is_definition(after: str) -> bool:
    """Whether a body follows on the parameters, of which ``after`` begins behind the bracket."""
    depth = 1
    for bracket in re.finditer(r"[()]", after):
        depth += 1 if bracket.group() == "(" else -1
        if depth == 0:
            return after[bracket.end() :].lstrip().startswith("{")
    return False


def _bound_of(name_expression: str, bounded: frozenset[str]) -> str:
    """Give the second argument of ``memra::Launch``, with its comma; empty for no bounds."""
    head, angle, arguments = name_expression.lstrip("& ").partition("<")
    scope, colons, name = head.strip().rpartition("::")
    return f", {scope}{colons}memra_bound_{name}{angle}{arguments}()" if name in bounded else ""


def _in_function(before: str) -> bool:
    """Whether a place lies within the braces of a function, not of a namespace or class alone."""
    opened: list[bool] = []
    for brace in re.finditer(r"[{}]", before):
        if brace.group() == "{":
            opened.append(before[: brace.start()].rstrip().endswith(")"))
        elif opened:
            opened.pop()
    return any(opened)


def plain_kernels(text: str) -> list[str]:
    """Names of the kernels in a source that are no templates, in order."""
    text = _DIRECTIVE.sub("", _COMMENT.sub(lambda m: '"C"' if m.group() == '"C"' else " ", text))
    names = []
    for match in _KERNEL.finditer(text):
        before = text[: match.start()].rstrip()
        if before.endswith('extern "C"'):
            before = before[: -len('extern "C"')].rstrip()
        if before.endswith(">") and re.search(r"\btemplate\s*<[^;{}]*\Z", before):
            continue
        names.append(match.group("name"))
    return list(dict.fromkeys(names))


def _closure(text: str, folder: Path, folders: Iterable[Path]) -> list[Path]:
    """Every file that the text includes by quotes, found as the compiler finds them."""
    found: dict[Path, None] = {}
    todo = [(text, folder)]
    search = [*folders, RUNTIME]
    while todo:
        current, where = todo.pop()
        for name in _INCLUDE.findall(_strip(current)):
            for candidate in (where, *search):
                path = candidate / name
                if path.is_file():
                    break
            else:
                raise HeaderNotFound(
                    f'#include "{name}" is in none of: '
                    + ", ".join(map(str, (where, *search)))
                    + ". Kernels include common/… relative to cuda_src/.",
                    name=name,
                    searched=[str(p) for p in (where, *search)],
                )
            if path not in found:
                found[path] = None
                todo.append((path.read_text(encoding="utf-8"), path.parent))
    return sorted(found)
