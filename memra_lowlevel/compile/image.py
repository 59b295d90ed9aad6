"""The result of a compilation: code, and everything that is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import expect
from ..errors import Diagnostic
from .logs import Resources
from .signature import ParamDecl, Signature

__all__ = ["CompiledImage"]

Layout = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CompiledImage:
    """Code for one architecture.

    Attributes
    ----------
    kind : str
        ``"cubin"``, ``"ptx"`` or ``"host"``.
    arch : str
        What it was compiled for, e.g. ``"sm_90"``, ``"compute_90"``, ``"host"``.
    rung : str
        ``"exact"``, ``"family"``, ``"ptx"`` or ``"host"``: how ``arch`` relates to what was asked.
    data : bytes
        What ``cuModuleLoadData`` takes; for the host device the UTF-8 path of a shared library.
    entries : mapping of str to str
        Kernel name or name expression to symbol.
    signatures : mapping of str to Signature
        By the names of ``entries``; a kernel that a macro spells out has none.
    layouts : mapping of str to tuple of (offset, size)
        Parameter layout by symbol, in bytes, as the compiler fixed it; empty for PTX.
    resources : mapping of str to Resources
        By symbol; empty for PTX and host code.
    diagnostics : tuple of Diagnostic
        Warnings of the compilation.
    log : str
    key : str
        Cache key; equal keys mean equal code.
    ms : float
        Time of the compilation itself, also when it came from the cache.
    name : str
        Name of the source.
    want : str
        The architecture that was asked for.
    origin : str
        ``"compiled"``, ``"memory"``, ``"disk"`` or ``"store"``.
    """

    kind: str
    arch: str
    rung: str
    data: bytes = field(repr=False)
    entries: Mapping[str, str]
    signatures: Mapping[str, Signature] = field(default_factory=dict, repr=False)
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    resources: Mapping[str, Resources] = field(default_factory=dict, repr=False)
    diagnostics: tuple[Diagnostic, ...] = ()
    log: str = field(default="", repr=False)
    key: str = ""
    ms: float = 0.0
    name: str = ""
    want: str = ""
    origin: str = "compiled"

    def symbol(self, name_expression: str) -> str | None:
        """Symbol of a kernel by its name or name expression, blanks aside; None if absent."""
        expect.kind("kernel", name_expression, str, "a name or name expression")
        if name_expression in self.entries:
            return self.entries[name_expression]
        wanted = "".join(name_expression.split())
        for name, symbol in self.entries.items():
            if "".join(name.split()) == wanted:
                return symbol
        return None

    def header(self) -> dict[str, Any]:
        """Everything but ``data`` and ``origin``, for JSON."""
        return {
            "kind": self.kind,
            "arch": self.arch,
            "rung": self.rung,
            "want": self.want,
            "name": self.name,
            "key": self.key,
            "ms": self.ms,
            "entries": dict(self.entries),
            "signatures": {k: _signature_out(s) for k, s in self.signatures.items()},
            "layouts": {k: [list(p) for p in v] for k, v in self.layouts.items()},
            "resources": {k: r.to_dict() for k, r in self.resources.items()},
            "diagnostics": [vars(d) for d in self.diagnostics],
            "log": self.log,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], data: bytes, origin: str) -> CompiledImage:
        """Reverse :meth:`header`; raises KeyError, TypeError or ValueError on nonsense."""
        return cls(
            kind=str(header["kind"]),
            arch=str(header["arch"]),
            rung=str(header["rung"]),
            data=data,
            entries=dict(header["entries"]),
            signatures={k: _signature_in(s) for k, s in header["signatures"].items()},
            layouts={
                k: tuple((int(o), int(n)) for o, n in v) for k, v in header["layouts"].items()
            },
            resources={k: Resources.from_dict(r) for k, r in header["resources"].items()},
            diagnostics=tuple(Diagnostic(**d) for d in header["diagnostics"]),
            log=str(header["log"]),
            key=str(header["key"]),
            ms=float(header["ms"]),
            name=str(header["name"]),
            want=str(header["want"]),
            origin=origin,
        )


def _signature_out(signature: Signature) -> dict[str, Any]:
    return {
        "name": signature.name,
        "params": [vars(p) for p in signature.params],
        "template": list(signature.template),
        "type_template": list(signature.type_template),
    }


def _signature_in(data: Mapping[str, Any]) -> Signature:
    return Signature(
        str(data["name"]),
        tuple(ParamDecl(**p) for p in data["params"]),
        tuple(data["template"]),
        tuple(bool(t) for t in data["type_template"]),
    )
