"""What compilers print, as data: diagnostics, and the resources that each kernel takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import Diagnostic

__all__ = ["NAME_MAP", "Resources", "diagnostics", "resources"]

NAME_MAP = "__nv_name_map"
"""File name under which NVRTC reports a name expression that does not resolve."""

_AT = re.compile(
    r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): "
    r"(?P<severity>(?:catastrophic |internal )?error|warning|remark|note)"
    r"(?: #[\w-]+)?: (?P<message>.*)$"
)
_PTXAS_LINE = re.compile(
    r"^\s*ptxas [^,;]*, line (?P<line>\d+); (?P<severity>error|warning|fatal)\s*: (?P<message>.*)$"
)
_PTXAS = re.compile(r"^\s*ptxas (?P<severity>error|fatal|warning)\s*: (?P<message>.*)$")
_NVRTC = re.compile(r"^nvrtc: (?P<severity>error|warning): (?P<message>.*)$")
_CARET = re.compile(r"^(?P<indent>\s*)\^\s*$")

_ENTRY = re.compile(r"Compiling entry function '(?P<entry>[^']+)' for '(?P<arch>[^']+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<function>\S+)")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers(?P<rest>.*)")
_REST = re.compile(r"(?P<n>\d+) bytes (?P<what>smem|lmem|cmem\[\d+\])")
_BARRIERS = re.compile(r"used (?P<n>\d+) barriers")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, as the assembler reports it.

    Attributes
    ----------
    registers : int
        Per thread.
    spill_store_bytes, spill_load_bytes : int
        Bytes of spill code, per thread.
    local_bytes : int
        Stack frame per thread.
    shared_bytes : int
        Static shared memory per block.
    barriers : int
    """

    registers: int
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    local_bytes: int = 0
    shared_bytes: int = 0
    barriers: int = 0

    @property
    def spills_bytes(self) -> int:
        """Stores and loads of spilled registers together; 0 means no spills."""
        return self.spill_store_bytes + self.spill_load_bytes

    def to_dict(self) -> dict[str, int]:
        """Give the fields, for JSON."""
        return {name: int(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Resources:
        """Reverse :meth:`to_dict`."""
        return cls(**{name: int(data[name]) for name in cls.__dataclass_fields__})


def diagnostics(log: str) -> tuple[Diagnostic, ...]:
    """Read NVRTC's log; a column comes from the caret under the source line, else it is 0."""
    found: list[Diagnostic] = []
    lines = log.replace("\0", "").splitlines()
    i = 0
    while i < len(lines):
        line = lines[i]
        i += 1
        at = _AT.match(line)
        if at is None:
            other = _PTXAS_LINE.match(line) or _PTXAS.match(line) or _NVRTC.match(line)
            if other is not None:
                number = int(other.groupdict().get("line") or 0)
                severity = "error" if other["severity"] == "fatal" else other["severity"]
                file = "<ptx>" if number else ""
                found.append(Diagnostic(severity, file, number, 0, other["message"].strip()))
            continue
        block = []
        while i < len(lines) and lines[i].strip() and not _AT.match(lines[i]):
            block.append(lines[i])
            i += 1
        found.append(_with_block(at, block))
    return tuple(found)


def _with_block(at: re.Match[str], block: list[str]) -> Diagnostic:
    """Join a headline with the source line, the caret and the context printed below it."""
    severity = at["severity"].split()[-1]
    severity = "note" if severity == "remark" else severity
    message, source, column = [at["message"].strip()], "", 0
    for n, line in enumerate(block):
        caret = _CARET.match(line)
        if caret is not None and n > 0 and not source:
            indent = 2  # the source line is printed behind two blanks
            source = block[n - 1][indent:]
            column = len(caret["indent"]) - indent + 1
            message += [b.strip() for b in block[: n - 1]]
            message += [b.strip() for b in block[n + 1 :]]
            break
    else:
        message += [b.strip() for b in block]
    return Diagnostic(severity, at["file"], int(at["line"]), column, "; ".join(message), source)


def resources(log: str) -> dict[str, Resources]:
    """Read the lines that ``--ptxas-options=-v`` adds to the log, by entry symbol."""
    found: dict[str, Resources] = {}
    entry, function = "", ""
    stack = (0, 0, 0)
    for line in log.splitlines():
        if started := _ENTRY.search(line):
            entry, stack = started["entry"], (0, 0, 0)
        elif properties := _PROPERTIES.search(line):
            function = properties["function"]
        elif frame := _STACK.search(line):
            if function == entry:
                stack = (int(frame["stack"]), int(frame["stores"]), int(frame["loads"]))
        elif (used := _USED.search(line)) and entry:
            sizes = {m["what"]: int(m["n"]) for m in _REST.finditer(used["rest"])}
            barriers = _BARRIERS.search(used["rest"])
            found[entry] = Resources(
                registers=int(used["registers"]),
                spill_store_bytes=stack[1],
                spill_load_bytes=stack[2],
                local_bytes=max(stack[0], sizes.get("lmem", 0)),
                shared_bytes=sizes.get("smem", 0),
                barriers=int(barriers["n"]) if barriers else 0,
            )
            entry = ""
    return found
