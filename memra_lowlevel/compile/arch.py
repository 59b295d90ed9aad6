"""Architecture names, and the choice of one for a device.

A compiler makes machine code (a cubin) for the architectures that it knows. For a device newer
than the compiler there is a ladder of three rungs:

``exact``
    a cubin for the device's own compute capability;
``family``
    a cubin for an older member of its family, which the hardware runs as it is;
``ptx``
    portable PTX that the driver translates when the module is loaded.

What was chosen is part of every result (:attr:`CompiledImage.rung`) and never silent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import ArchUnsupported

__all__ = [
    "DEFAULT_ARCHS",
    "HOST",
    "Arch",
    "Target",
    "device_arch",
    "of_devices",
    "parse",
    "relatives",
    "resolve",
]

HOST = "host"

DEFAULT_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures that the kernels are built and budgeted for."""

of_devices: set[str] = set()
"""Architectures of the devices that this process opened: those exist, whatever the table knows."""

# Oldest member first. A cubin runs on later members of its group: within a major version on a
# minor version that is not lower, embedded parts excepted; the groups from 10.0 on have an
# "f" (family) target that keeps the family's own instructions.
_FAMILIES: tuple[tuple[int, ...], ...] = (
    (70, 75),
    (80, 86, 89),
    (90,),
    (100, 103),
    (110,),
    (120, 121),
)
_FAMILY_TARGETS_FROM = 100
_NAME = re.compile(r"(?P<kind>sm|compute)_(?P<digits>\d{2,3})(?P<suffix>[af]?)")


@dataclass(frozen=True)
class Arch:
    """A parsed name.

    Attributes
    ----------
    kind : str
        ``"sm"`` for machine code, ``"compute"`` for PTX.
    number : int
        Ten times the major plus the minor version, e.g. 90.
    suffix : str
        ``""``, ``"a"`` (this architecture only) or ``"f"`` (this family only).
    """

    kind: str
    number: int
    suffix: str = ""

    def __str__(self) -> str:
        return f"{self.kind}_{self.number}{self.suffix}"


@dataclass(frozen=True)
class Target:
    """What the compiler is asked for.

    Attributes
    ----------
    want : str
        The architecture asked for.
    arch : str
        The one compiled for, e.g. ``"sm_90"`` or ``"compute_90"``.
    rung : str
        ``"exact"``, ``"family"``, ``"ptx"`` or ``"host"``.
    kind : str
        ``"cubin"``, ``"ptx"`` or ``"host"``.
    reason : str
        Why not exact; empty where it is.
    """

    want: str
    arch: str
    rung: str
    kind: str
    reason: str = ""


def parse(name: str) -> Arch:
    """Parse ``sm_90``, ``sm_90a``, ``sm_100f``, ``compute_90`` …; raises ArchUnsupported."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ArchUnsupported(
            f"{name!r} is no architecture name; write sm_90, sm_90a, sm_100f, compute_90 or host",
            want=name,
        )
    arch = Arch(found["kind"], int(found["digits"]), found["suffix"])
    lowest = {"a": 90, "f": _FAMILY_TARGETS_FROM}.get(arch.suffix, 0)
    if arch.number < lowest:
        raise ArchUnsupported(
            f"{name!r} does not exist: names with {arch.suffix!r} begin at sm_{lowest}; "
            f"use {arch.kind}_{arch.number}",
            want=name,
        )
    return arch


def device_arch(capability: tuple[int, int], *, specific: bool = False) -> str:
    """Name for a compute capability; ``specific`` asks for the ``a`` variant where one exists."""
    number = capability[0] * 10 + capability[1]
    return f"sm_{number}{'a' if specific and number >= 90 else ''}"


def resolve(
    want: str,
    supported: Sequence[int],
    *,
    compiler: str = "the compiler",
    families: bool = True,
    devices: Collection[str] = (),
) -> Target:
    """Choose what to compile so that the result runs on ``want``.

    Parameters
    ----------
    want : str
        Architecture of the device, or ``"host"``.
    supported : sequence of int
        What the compiler knows, as numbers (90, 100, …).
    compiler : str
        Its name, for messages.
    families : bool
        Whether the compiler knows the ``f`` targets.
    devices : collection of str
        Architectures that are known to exist.

    Raises
    ------
    ArchUnsupported
        For a malformed name, an architecture older than the compiler's oldest, one newer than all
        that compiler and library know (unless a device has it), and an ``a`` or ``f`` variant that
        the compiler does not know (there is nothing to fall back on).
    """
    if want == HOST:
        return Target(want, HOST, "host", "host")
    arch = parse(want)
    have = tuple(f"sm_{n}" for n in sorted(supported))
    if arch.number in supported and (arch.suffix != "f" or families):
        if arch.kind == "compute":
            return Target(want, want, "ptx", "ptx", "PTX was asked for")
        return Target(want, want, "exact", "cubin")
    if arch.suffix or not any(n <= arch.number for n in supported):
        raise ArchUnsupported(
            f"{compiler} cannot compile for {want}; it knows {', '.join(have) or 'nothing'}. "
            "Install another NVRTC, or use cubins built elsewhere (tools/build_cubins.py)",
            want=want,
            have=have,
        )
    newest = max(*supported, *(n for family in _FAMILIES for n in family))
    if arch.number > newest and f"sm_{arch.number}" not in devices:
        raise ArchUnsupported(
            f"{want} is newer than all that {compiler} and this library know (up to {newest}), and "
            f"no open device has it. Open its device first and use device.arch, or ask for PTX: "
            f"compute_{max(supported)}",
            want=want,
            have=have,
        )
    why = f"{compiler} does not know {want}"
    older = [n for n in relatives(arch.number) if n in supported and n < arch.number]
    if older and arch.kind == "sm":
        best = max(older)
        suffix = "f" if families and best >= _FAMILY_TARGETS_FROM else ""
        return Target(want, f"sm_{best}{suffix}", "family", "cubin", f"{why}, sm_{best} runs there")
    best = max(n for n in supported if n <= arch.number)
    return Target(
        want, f"compute_{best}", "ptx", "ptx", f"{why}, the driver translates compute_{best}"
    )


def relatives(number: int) -> tuple[int, ...]:
    """Members of the family of an architecture, itself included where it is known."""
    for family in _FAMILIES:
        if number in family:
            return family
    # Unknown to this table, newer than it: nothing but PTX is promised to run there.
    return ()
