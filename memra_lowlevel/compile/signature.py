"""Kernel parameter lists, read from the source.

The driver tells offset and size of each parameter; only the source knows its name and type. The
two are joined when a kernel is loaded, and must agree.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .tokens import Token, tokens

__all__ = ["CTYPES", "ParamDecl", "Signature", "base_name", "parse", "specialise", "split_name"]

CTYPES: Mapping[str, tuple[int, str]] = {
    "bool": (1, "bool"),
    "char": (1, "int8"),
    "signed char": (1, "int8"),
    "unsigned char": (1, "uint8"),
    "short": (2, "int16"),
    "unsigned short": (2, "uint16"),
    "int": (4, "int32"),
    "unsigned int": (4, "uint32"),
    "long": (8, "int64"),
    "unsigned long": (8, "uint64"),
    "long long": (8, "int64"),
    "unsigned long long": (8, "uint64"),
    "int8_t": (1, "int8"),
    "uint8_t": (1, "uint8"),
    "int16_t": (2, "int16"),
    "uint16_t": (2, "uint16"),
    "int32_t": (4, "int32"),
    "uint32_t": (4, "uint32"),
    "int64_t": (8, "int64"),
    "uint64_t": (8, "uint64"),
    "size_t": (8, "uint64"),
    "ptrdiff_t": (8, "int64"),
    "intptr_t": (8, "int64"),
    "uintptr_t": (8, "uint64"),
    "float": (4, "float32"),
    "double": (8, "float64"),
}
"""Size in bytes and NumPy name of the scalar types, on 64-bit Linux and in CUDA alike."""

_LAUNCH_WORDS = {"__global__", "KERNEL"}
_QUALIFIERS = {"const", "volatile", "__restrict__", "__restrict", "register", "struct", "class"}
_QUALIFIERS |= {"__grid_constant__"}
_NULLABLE = "NULLABLE"
_INT_WORDS = {"unsigned", "signed", "short", "long", "int", "char"}


@dataclass(frozen=True)
class ParamDecl:
    """One declared parameter.

    Attributes
    ----------
    name : str
        Empty where the declaration has none.
    ctype : str
        Type without qualifiers, e.g. ``"int32_t"`` or ``"uint16_t*"``.
    pointer : bool
    pointee : str
        Type behind the pointer, else empty.
    nullable : bool
        Declared with the ``NULLABLE`` marker: None may be passed.
    const : bool
        The pointee (or value) is const.
    """

    name: str
    ctype: str
    pointer: bool
    pointee: str
    nullable: bool
    const: bool = False


@dataclass(frozen=True)
class Signature:
    """Parameters of one kernel.

    Attributes
    ----------
    name : str
        Without namespace and template arguments.
    params : tuple of ParamDecl
    template : tuple of str
        Names of the template parameters, in order.
    type_template : tuple of bool
        Which of them are types.
    """

    name: str
    params: tuple[ParamDecl, ...]
    template: tuple[str, ...] = ()
    type_template: tuple[bool, ...] = ()


def parse(text: str) -> dict[str, Signature]:
    """Find every ``__global__`` function of a text, by name; the first of a name wins."""
    return dict(_functions(text))


# Many compilations include the same headers.
@functools.lru_cache(maxsize=256)
def _functions(text: str) -> Mapping[str, Signature]:
    stream = [t for t in tokens(text) if t.kind != "directive"]
    found: dict[str, Signature] = {}
    for i, token in enumerate(stream):
        if token.kind == "word" and token.text in _LAUNCH_WORDS:
            signature = _function(stream, i)
            if signature is not None:
                found.setdefault(signature.name, signature)
    return found


def split_name(name_expression: str) -> tuple[str, tuple[str, ...]]:
    """Split ``"ns::f<128, float>"`` into ``"f"`` and its template arguments."""
    head, angle, rest = name_expression.strip().lstrip("&").partition("<")
    name = head.strip().rpartition("::")[2].strip()
    if not angle:
        return name, ()
    inner = rest.rstrip()
    inner = inner[:-1] if inner.endswith(">") else inner
    return name, tuple(a.strip() for a in _split_commas(inner))


def base_name(name_expression: str) -> str:
    """Return the function's own name in a name expression."""
    return split_name(name_expression)[0]


def specialise(signature: Signature, name_expression: str) -> Signature:
    """Put the type arguments of a name expression in place of the template's type names."""
    values = dict(
        (name, argument)
        for name, is_type, argument in zip(
            signature.template,
            signature.type_template,
            split_name(name_expression)[1],
            strict=False,
        )
        if is_type
    )
    if not values:
        return signature
    params = []
    for p in signature.params:
        pointee = values.get(p.pointee, p.pointee)
        ctype = f"{pointee}*" if p.pointer else values.get(p.ctype, p.ctype)
        params.append(replace(p, ctype=ctype, pointee=pointee))
    return replace(signature, params=tuple(params))


def _function(stream: Sequence[Token], start: int) -> Signature | None:
    """Read the declaration around a launch word."""
    i = start + 1
    name = ""
    while i < len(stream):
        text = stream[i].text
        if text in ("__launch_bounds__", "__attribute__", "__cluster_dims__", "__maxnreg__"):
            i = _closing(stream, i + 1) + 1
            continue
        if text == "(":
            break
        if text in (";", "{", "}", "="):
            return None  # an attribute on something that is no function
        if stream[i].kind == "word":
            name = text
        i += 1
    if i >= len(stream) or not name:
        return None
    end = _closing(stream, i)
    params = _params(stream[i + 1 : end])
    template, is_type = _template_before(stream, start)
    return Signature(name, params, template, is_type)


def _closing(stream: Sequence[Token], i: int) -> int:
    """Index of the bracket that closes the one at ``i``."""
    depth = 0
    for j in range(i, len(stream)):
        if stream[j].text == "(":
            depth += 1
        elif stream[j].text == ")":
            depth -= 1
            if depth == 0:
                return j
    return len(stream) - 1


def _template_before(
    stream: Sequence[Token], start: int
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Names of the template parameters in front of a declaration."""
    i = start - 1
    while i >= 0 and (
        stream[i].text in ("extern", "static", "inline") or stream[i].kind == "string"
    ):
        i -= 1
    if i < 0 or stream[i].text != ">":
        return (), ()
    close, depth = i, 0
    while i >= 0:
        depth += {">": 1, "<": -1}.get(stream[i].text, 0)
        if depth == 0:
            break
        i -= 1
    if i < 1 or stream[i - 1].text != "template":
        return (), ()
    names, kinds = [], []
    for part in _comma_groups(stream[i + 1 : close]):
        words = [t.text for t in _until(part, "=") if t.kind == "word"]
        names.append(words[-1] if words else "")
        kinds.append(bool(words) and words[0] in ("typename", "class"))
    return tuple(names), tuple(kinds)


def _params(stream: Sequence[Token]) -> tuple[ParamDecl, ...]:
    groups = list(_comma_groups(stream))
    if len(groups) == 1 and [t.text for t in groups[0]] in ([], ["void"]):
        return ()
    return tuple(_param(_until(g, "=")) for g in groups)


def _param(stream: Sequence[Token]) -> ParamDecl:
    texts = [t.text for t in stream]
    array = "[" in texts
    if array:
        texts = texts[: texts.index("[")]
    nullable = _NULLABLE in texts
    const = "const" in texts and ("*" not in texts or texts.index("const") < texts.index("*"))
    kept = [t for t in texts if t not in _QUALIFIERS and t != _NULLABLE]
    stars = kept.count("*") + array
    body = [t for t in kept if t not in ("*", "&")]
    name = ""
    if len(body) > 1 and re.fullmatch(r"[A-Za-z_]\w*", body[-1]) and body[-1] not in _INT_WORDS:
        # The last word is the name unless it is glued to the type by '::' (an unnamed parameter).
        if body[-2] != "::":
            name = body.pop()
    base = _type_name(body)
    if stars:
        pointee = base + "*" * (stars - 1)
        return ParamDecl(name, pointee + "*", True, pointee, nullable, const)
    return ParamDecl(name, base, False, "", nullable, const)


def _type_name(words: Sequence[str]) -> str:
    """Spell a type one way: ``unsigned`` is ``unsigned int``, ``long int`` is ``long``."""
    if words and all(w in _INT_WORDS for w in words):
        unsigned = "unsigned" in words
        core = [w for w in words if w not in ("unsigned", "signed", "int")]
        if core == ["char"] and "signed" in words:
            return "signed char"
        base = " ".join(core) or "int"
        return f"unsigned {base}" if unsigned else base
    text = " ".join(words)
    text = re.sub(r"\s*(::|<|>|,)\s*", r"\1", text)
    return text.removeprefix("std::")


def _until(stream: Sequence[Token], stop: str) -> Sequence[Token]:
    for i, token in enumerate(stream):
        if token.text == stop:
            return stream[:i]
    return stream


def _comma_groups(stream: Sequence[Token]) -> list[list[Token]]:
    """Split at commas outside brackets."""
    groups: list[list[Token]] = [[]]
    depth = 0
    for token in stream:
        if token.text == "," and depth == 0:
            groups.append([])
            continue
        depth += {"(": 1, "<": 1, "[": 1, "{": 1, ")": -1, ">": -1, "]": -1, "}": -1}.get(
            token.text, 0
        )
        groups[-1].append(token)
    return groups


def _split_commas(text: str) -> list[str]:
    stream = list(tokens(text))
    groups = _comma_groups(stream)
    return [text[g[0].start : g[-1].end] if g else "" for g in groups]
