"""A tokenizer for CUDA C++ sources, precise where text search goes wrong.

It knows comments, string and character literals, raw strings, digit separators, line continuations
and preprocessor directives, and nothing of C++'s grammar. Include resolution and the reading of
kernel signatures stand on it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Include", "Token", "includes", "line_of", "tokens"]

_TOKEN = re.compile(
    r"""
    (?P<newline>\n)
  | (?P<space>(?:[ \t\r\f\v]|\\\r?\n)+)
  | (?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?(?:\*/|\Z))
  | (?P<raw>(?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)")
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"?)
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*'?)
  | (?P<number>\.?[0-9](?:[eEpP][+-]|'?[0-9A-Za-z_.])*)
  | (?P<word>[A-Za-z_$][A-Za-z0-9_$]*)
  | (?P<punct>::|->|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_SPLICED_WORD = re.compile(r"(?:[A-Za-z_]|\\\r?\n)+")
_MAYBE = re.compile(r"#[^\n]*?(?:include|import)")
_ODD = re.compile(r"#[ \t]*\\\r?\n|[a-z]\\\r?\n[a-z]|#\s*/\*")  # over several lines
_HEADER_NAME = re.compile(r'"(?P<quote>[^"\n]*)"|<(?P<angle>[^>\n]*)>')


@dataclass(frozen=True)
class Token:
    """One token: ``kind`` in ``word number string char punct directive``; offsets into the text."""

    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Include:
    """One ``#include`` of a text.

    Attributes
    ----------
    name : str
        Header name as written, or the macro's text where ``form`` is ``"computed"``.
    form : str
        ``"quote"``, ``"angle"`` or ``"computed"``.
    start, end : int
        Offsets of the header name between its delimiters.
    line : int
        1-based.
    conditional : bool
        Inside some ``#if``; then a header that is not found may never be asked for.
    """

    name: str
    form: str
    start: int
    end: int
    line: int
    conditional: bool


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of ``text``; spaces and comments are dropped, a directive is one token."""
    fresh = True  # only spaces and comments since the last line end
    position, size = 0, len(text)
    while position < size:
        found = _TOKEN.match(text, position)
        assert found is not None  # the last alternative takes any character
        kind = found.lastgroup if found.lastgroup != "fence" else "raw"
        position = found.end()
        if kind == "newline":
            fresh = True
        elif kind == "punct" and fresh and found.group() == "#":
            start = found.start()
            position = _directive_end(text, position)
            yield Token("directive", text[start:position], start, position)
        elif kind not in ("space", "comment"):
            fresh = False
            yield Token(
                "string" if kind == "raw" else str(kind), found.group(), found.start(), position
            )


@functools.lru_cache(maxsize=256)
def includes(text: str) -> tuple[Include, ...]:
    """Give every ``#include`` of ``text`` in order, those under conditions too.

    Kept by content: most sources include the same headers.
    """
    return tuple(_includes(text))


def _includes(text: str) -> Iterator[Include]:
    # Includes stand at the top: nothing behind the last line that spells one can be one.
    last = max((m.start() for m in _MAYBE.finditer(text)), default=-1)
    if ("\\\n" in text or "\\\r" in text or "/*" in text) and _ODD.search(text):
        last = len(text)
    depth = 0
    for token in tokens(text):
        if token.start > last:
            return
        if token.kind != "directive":
            continue
        word, at = _directive_word(token.text)
        if word in ("if", "ifdef", "ifndef"):
            depth += 1
        elif word == "endif":
            depth = max(0, depth - 1)
        elif word in ("include", "include_next", "import"):
            at = _skip_blank(token.text, at)
            name = _HEADER_NAME.match(token.text, at)
            line = line_of(text, token.start)
            if name is None:
                rest = token.text[at:].strip()
                yield Include(rest, "computed", token.start + at, token.end, line, depth > 0)
                continue
            form = "quote" if name.group("quote") is not None else "angle"
            start, end = name.span(form)
            yield Include(
                name.group(form), form, token.start + start, token.start + end, line, depth > 0
            )


def line_of(text: str, offset: int) -> int:
    """1-based line of an offset."""
    return text.count("\n", 0, offset) + 1


def _directive_end(text: str, position: int) -> int:
    """Offset of the line end of a directive; a block comment inside may span lines."""
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found is not None
        if found.lastgroup == "newline":
            break
        position = found.end()
    return position


def _directive_word(text: str) -> tuple[str, int]:
    """Name of a directive and the offset behind it."""
    at = _skip_blank(text, 1)
    found = _SPLICED_WORD.match(text, at)
    return (re.sub(r"\\\r?\n", "", found.group()), found.end()) if found else ("", at)


def _skip_blank(text: str, at: int) -> int:
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None
        if found.lastgroup not in ("space", "comment"):
            break
        at = found.end()
    return at
