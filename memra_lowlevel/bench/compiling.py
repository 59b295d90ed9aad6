"""How long the kernels take to be there: a cold compilation, and a warm start from the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .result import Row

if TYPE_CHECKING:
    from ..kernels.registry import KernelSpec
    from ..runtime import Device
    from .run import Run

__all__ = ["cores_apart", "default_set", "measure_compile"]

_NOTE = "one process each, a cache of its own"

_PROGRAM = """
import json, os, sys, time
start = time.perf_counter()
laps = {}
def lap(name):
    global start
    now = time.perf_counter()
    laps[name] = (now - start) * 1e3
    start = now
arch, ordinal, cpus, whole, state = sys.argv[1:]
workers = None
if cpus != "all":
    chosen = {int(cpu) for cpu in cpus.split(",")}
    os.sched_setaffinity(0, chosen)
    workers = len(chosen)
import memra_lowlevel
from memra_lowlevel.kernels import registry
from memra_lowlevel.bench.compiling import default_set
from memra_lowlevel.compile import nvrtc
specs = registry.all_specs() if whole == "whole" else None
lap("import")
device = None
if ordinal != "-":
    device = memra_lowlevel.Device(f"cuda:{ordinal}")
    lap("device")
if specs is None:
    specs = default_set(device)
    lap("default_set")
busy = time.process_time()
if state == "cold":
    nvrtc.library()
    lap("compiler")
if device is None:
    images = registry.compiled(arch, specs, workers=workers)
else:
    registry.preload(device, specs, workers=workers)
    kernels = [k for k in device.memo.values() if hasattr(k, "image")]
    images = {id(k.image): k.image for k in kernels}.values()
lap("kernels")
busy = time.process_time() - busy
ms = {}
for image in images:
    ms[image.name] = ms.get(image.name, 0) + round(image.ms)
print(json.dumps({
    "laps": laps, "busy_ms": busy * 1e3, "origins": [i.origin for i in images],
    "nvrtc": nvrtc.loaded(), "modules": len(images),
    "instances": sum(len(spec.expressions) for spec in specs),
    "bytes": sum(len(i.data) for i in images), "ms": ms,
}))
"""

PAIRS = (
    ("Q8_0", "Q5_1"), ("Q8_0", "Q8_0"), ("Q8_0", "Q4_0"), ("E4M3", "E4M3"), ("F16", "F16"),
    ("BF16", "BF16"),
)  # fmt: skip
HEAD_DIMS = (64, 128, 256)
CHANNELS = 512
"""Channels of a row of K and of V: 8 heads of 64, 4 of 128, 2 of 256."""


def default_set(device: Device | None = None) -> list[KernelSpec]:
    """Kernels of a decoder of ordinary layers: six pairs of formats, three head sizes, the model's.

    Of each pair what its appends take, and for each head size what one row takes of the attention
    kernel that :func:`.kv_attend.choose` names, for groups of up to 4. What more rows or other
    numbers of heads take in addition, a ``prepare`` compiles. Of the other families of a decoder
    step everything that is registered.

    Parameters
    ----------
    device : Device, optional
        A GPU; default one of sm_90.
    """
    from .. import formats
    from ..kernels import kv_append, kv_attend, registry

    asked = _Asked(device)
    for pair in PAIRS:
        k, v = (getattr(formats, name) for name in pair)
        kv_append.prepare(asked.device, k, v)
        for d in HEAD_DIMS:
            kv_attend.prepare(asked.device, k, v, d, n_kv_heads=CHANNELS // d, group=4, max_rows=1)
    chosen = []
    for spec in registry.all_specs():
        if spec.name in ("append_kv", "append_few") or spec.name.startswith("attend_"):
            of_it = re.compile(rf"{spec.name}(<|$)")
            found = [name for source, name in asked if of_it.match(name) and source == spec.source]
            chosen += [replace(spec, entry=name, instances=({},)) for name in found]
        elif spec.source.split("/")[0] in ("kv", "model", "speculative"):
            chosen.append(spec)
    return chosen


class _Asked(dict[Any, Any]):
    """The memo of a device that has every kernel, in name: keeps what it is asked for.

    Iterates over pairs of a source and a name expression.
    """

    def __init__(self, device: Device | None) -> None:
        super().__init__()
        limits = SimpleNamespace(shared_optin_bytes=232_448) if device is None else device.limits
        arch = "sm_90" if device is None else device.arch
        self.device: Any = SimpleNamespace(kind="cuda", arch=arch, limits=limits, memo=self)

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: Any) -> None:
        self[key] = None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        from ..kernels import registry

        for key in self.keys():
            if key[0] == registry.__name__:
                yield key[1:]


_CORES = 2
"""Cores that the goal of a cold compilation speaks of."""


def measure_compile(run: Run) -> None:
    """Time cold compilations and warm starts, each in a process of its own with its own cache.

    On the host device too: NVRTC needs no GPU, so sm_90 is compiled; only the loading is missing.
    """
    cuda = run.device.kind == "cuda"
    arch = run.device.arch if cuda else "sm_90"
    ordinal = str(run.device.ordinal) if cuda else "-"
    n_warm = 3 if run.small else 5
    with tempfile.TemporaryDirectory() as folder:
        cpus = ",".join(map(str, cores_apart(_CORES)))
        default = _start(arch, ordinal, f"{folder}/default", cpus, "default", "cold")
        whole = _start(arch, ordinal, f"{folder}/whole", "all", "whole", "cold")
        again = f"{folder}/whole", "all", "whole", "warm"
        warm = [_start(arch, ordinal, *again) for _ in range(n_warm)]
    for name, cold, goal in (
        (f"the default set on {_CORES} cores", default, 10_000.0),
        ("everything", whole, None),
    ):
        slowest = sorted(cold["ms"].items(), key=lambda item: -item[1])[:5]
        laps = cold["laps"]
        extra = {
            "arch": arch, "cores": os.cpu_count(), "cubin_bytes": cold["bytes"],
            "instances": cold["instances"], "modules": cold["modules"],
            "compiler_ms": round(laps["compiler"]), "busy_ms": round(cold["busy_ms"]),
            "nvrtc_ms": sum(cold["ms"].values()), "slowest_ms": dict(slowest),
        }  # fmt: skip
        if cold is default:
            extra["cpus"] = cpus
        what, samples = f"cold compilation of {name}, {arch}", [laps["compiler"] + laps["kernels"]]
        run.add(Row(what, "ms", samples, extra=extra, note=_NOTE, goal=goal, loaded=[]))
    names = {
        "import": "import and registry", "device": "open the device",
        "kernels": "every module loaded" if cuda else "every image read",
    }  # fmt: skip
    for name, words in names.items():
        if name in warm[0]["laps"]:
            samples = [start["laps"][name] for start in warm]
            goal = 150.0 if cuda and name == "kernels" else None
            run.add(
                Row(f"warm start, {words}, {arch}", "ms", samples, note=_NOTE, goal=goal, loaded=[])
            )
    origins = {origin for start in warm for origin in start["origins"]}
    if origins != {"disk"}:
        run.notes.append(f"compile: the sources changed meanwhile, so warm starts were {origins}")
    elif any(start["nvrtc"] for start in warm):
        run.notes.append("compile: a warm start loaded NVRTC, though nothing was compiled")


def cores_apart(n: int, told: str = "/sys/devices/system/cpu") -> list[int]:
    """Choose CPUs of ``n`` different cores, as far as the system tells which share one."""
    cpus = sorted(os.sched_getaffinity(0))
    first: dict[str, int] = {}
    for cpu in cpus:
        try:
            siblings = Path(told, f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        first.setdefault(siblings, cpu)
    apart = list(first.values())
    return (apart + [cpu for cpu in cpus if cpu not in apart])[:n]


def _start(arch: str, ordinal: str, cache: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arch, ordinal, *words], capture_output=True, text=True,
        env={**os.environ, "MEMRA_CACHE_DIR": cache}, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"a start of the library failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
