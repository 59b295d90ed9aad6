"""``memra-lowlevel doctor``: what is on this machine, what is missing, what still works.

Needs the standard library only, so that it also answers where nothing else is installed
(``python -m memra_lowlevel.debug.doctor``). Every probe stands alone: it never raises, names what
is missing, and says what that costs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from .probes import PROBES, Probe

__all__ = ["Report", "add_arguments", "examine", "run", "verdict"]


@dataclass(frozen=True)
class Report:
    """All answers, with the one line that sums them up."""

    device: str
    verdict: str
    fits: bool
    probes: tuple[Probe, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; status 0, whatever is missing."""
    report = examine()
    if args.json:
        print(json.dumps(asdict(report), indent=1))
        return 0
    print(f"device: {report.device}")
    width = max(len(p.name) for p in report.probes)
    for p in report.probes:
        mark = {"ok": "ok", "missing": "--", "warning": "!!"}[p.state]
        print(f"{mark}  {p.name.ljust(width)}  {p.found}")
        if p.advice:
            print(f"    {' ' * width}  {p.advice}")
    print(report.verdict)
    return 0


def examine() -> Report:
    """Run every probe."""
    probes = tuple(_guarded(name, probe) for name, probe in PROBES.items())
    by = {p.name: p for p in probes}
    fits, text = verdict(
        _pair(by["driver"].data.get("version")),
        _pair(by["nvrtc"].data.get("version")),
        _pair(by["bindings"].data.get("version")),
        host=by["host device"].state == "ok",
    )
    devices = by["devices"].data.get("devices") or []
    if devices and by["bindings"].state != "missing":
        device = f"cuda:0 ({devices[0]['name']})"
    elif by["host device"].state == "ok":
        device = "host (the kernels run on the CPU)"
    else:
        device = "none: no GPU can be used and the host device cannot be built"
    return Report(device, text, fits, probes)


def verdict(
    driver: tuple[int, int] | None,
    nvrtc: tuple[int, int] | None,
    bindings: tuple[int, int] | None,
    *,
    host: bool = True,
) -> tuple[bool, str]:
    """Whether driver, NVRTC and bindings fit together, and the sentence that says so."""

    def show(version: tuple[int, int] | None) -> str:
        return f"{version[0]}.{version[1]}" if version else "none"

    head = f"driver {show(driver)}, NVRTC {show(nvrtc)}, bindings {show(bindings)}: "
    if driver is None:
        can_compile = bool(nvrtc and bindings)
        if host:
            tail = "no CUDA driver, so kernels run on the host device" + " only" * (not can_compile)
        else:
            tail = "no CUDA driver and no host device, so no kernel can run here"
        return host, head + tail + "; kernels for GPUs can be compiled" * can_compile
    pins = f"pip install 'cuda-python=={driver[0]}.*' " + (
        "'nvidia-cuda-nvrtc-cu12==12.9.*'" if driver[0] == 12 else "nvidia-cuda-nvrtc"
    )
    if bindings is None:
        return False, head + f"the driver cannot be called without its bindings. {pins}"
    if nvrtc is None:
        return False, head + f"nothing can be compiled (ready-made kernels still load). {pins}"
    if bindings[0] > driver[0]:
        return False, head + f"the bindings are newer than the driver knows. {pins}"
    if nvrtc[0] > driver[0]:
        return False, head + f"this driver does not load code of NVRTC {nvrtc[0]}. {pins}"
    if nvrtc[0] != bindings[0]:
        return False, head + f"bindings and NVRTC of different major versions are untried. {pins}"
    if nvrtc > driver:
        return True, head + (
            "they fit; machine code loads, PTX of this NVRTC may be too new for the driver"
        )
    return True, head + "they fit"


def _guarded(name: str, probe: Callable[[], Probe]) -> Probe:
    try:
        return probe()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a probe of a broken machine may fail in any way
        lines = str(error).splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return Probe(name, "missing", text, "this probe could not finish; the others stand")


def _pair(version: str | None) -> tuple[int, int] | None:
    if not version:
        return None
    major, minor = [*version.split("."), "0"][:2]
    return int(major), int(minor)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="doctor")
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
