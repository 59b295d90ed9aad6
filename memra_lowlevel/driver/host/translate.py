"""Reading and rewriting of ``.cu`` sources, so that a C++ compiler takes them as they are.

Nothing that is added or taken away moves a line: places in messages are those of the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import HeaderNotFound
from .build import RUNTIME

__all__ = [
    "EXTERN_SHARED", "bound_of", "closure", "dynamic_shared", "launch_bounds", "plain_kernels",
    "stripped",
]  # fmt: skip

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.S)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.M)
_KERNEL = re.compile(
    r"(?P<qualifier>\bKERNEL\b|\b__global__\b)(?P<between>(?:\s|\bvoid\b|\b__launch_bounds__\s*"
    r"\([^()]*(?:\([^()]*\)[^()]*)*\))*)\b(?P<name>\w+)\s*\("
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)


def stripped(text: str) -> str:
    """Drop comments; strings stay."""
    return _COMMENT.sub(lambda m: m.group(1) or " ", text)


EXTERN_SHARED = re.compile(r"\bextern\s+__shared__\b")
_DYNAMIC = re.compile(
    r"\bextern(?P<before>\s+)__shared__\s(?P<align>\s*(?:__align__|alignas)\s*\([^()]*\)\s*)?"
    r"(?P<type>[\w:<>,\s]+?)(?P<blank>\s+)(?P<name>\w+)\s*\[\s*\]"
)


def dynamic_shared(text: str) -> str:
    """Rewrite ``extern __shared__ T name[]`` in function bodies as a pointer; lines stay.

    C++ has no storage class for memory whose address depends on the running block.
    """
    if EXTERN_SHARED.search(text) is None:
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


def bound_of(name_expression: str, bounded: frozenset[str]) -> str:
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


def closure(text: str, folder: Path, folders: Iterable[Path]) -> list[Path]:
    """Every file that the text includes by quotes, found as the compiler finds them."""
    found: dict[Path, None] = {}
    todo = [(text, folder)]
    search = [*folders, RUNTIME]
    while todo:
        current, where = todo.pop()
        for name in _INCLUDE.findall(stripped(current)):
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
