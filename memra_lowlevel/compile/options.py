"""Options of a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from .. import expect

__all__ = ["CompileOptions", "Defines", "define_flags"]

Defines = Mapping[str, "str | int | bool | None"]


_STANDARDS = ("c++17", "c++20")


@dataclass(frozen=True)
class CompileOptions:
    """How a source is compiled. Every field is part of the cache key.

    ``--fmad=false`` is no option but always set: a product and a sum fuse where the source says
    ``fmaf`` and nowhere else, so that both devices compute the same bits.

    Attributes
    ----------
    std : str
        Language standard, ``"c++17"`` or ``"c++20"``; the host device takes C++17 always.
    lineinfo : bool
        Keep source lines in the cubin, for profilers and sanitizers.
    debug : bool
        Full device debug information, no optimisation.
    max_registers : int or None
        Upper bound of registers per thread.
    check : bool
        Host device only, and refused elsewhere: instrument for races, bounds and uninitialised
        reads.
    sanitize : {"undefined", "address"} or None
        Host device only, and refused elsewhere: a sanitizer of the C++ compiler.
    extra : tuple of str
        Further NVRTC options, passed as they are.
    """

    std: str = "c++17"
    lineinfo: bool = False
    debug: bool = False
    max_registers: int | None = None
    check: bool = False
    sanitize: Literal["undefined", "address"] | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", tuple(self.extra))
        if self.std not in _STANDARDS:
            raise expect.refusal("options: std", self.std, f"one of {', '.join(_STANDARDS)}")

    @classmethod
    def of(cls, value: CompileOptions | Mapping[str, object] | None) -> CompileOptions:
        """Accept an instance, a dict of fields, or None for the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise expect.refusal("options", value, "CompileOptions, or a mapping of its fields")
        unknown = set(value) - {f.name for f in fields(cls)}
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise expect.refusal("options", str(sorted(map(str, unknown))[0]), f"one of {known}")
        return cls(**value)  # type: ignore[arg-type]

    def nvrtc_flags(self) -> tuple[str, ...]:
        """List the NVRTC options, without architecture, defines and include paths."""
        flags = ["--fmad=false", f"--std={self.std}", "--ptxas-options=-v"]
        if self.lineinfo:
            flags.append("--generate-line-info")
        if self.debug:
            flags.append("--device-debug")
        if self.max_registers is not None:
            flags.append(f"--maxrregcount={self.max_registers}")
        return (*flags, *self.extra)


def define_flags(defines: Defines) -> tuple[str, ...]:
    """Options for preprocessor names, sorted: True and None define without a value, False drops."""
    flags = []
    for name in sorted(defines):
        value = defines[name]
        if value is False:
            continue
        flags.append(f"-D{name}" if value is None or value is True else f"-D{name}={value}")
    return tuple(flags)
