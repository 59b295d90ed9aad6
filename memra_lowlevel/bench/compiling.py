"""How long the kernels take to be there: a cold compilation, and a warm start from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from .result import Row

if TYPE_CHECKING:
    from .run import Run

__all__ = ["measure_compile"]

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
arch, ordinal, cores, *folders = sys.argv[1:]
if cores != "all":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
import memra_lowlevel
from memra_lowlevel.kernels import registry
specs = [s for s in registry.all_specs() if not folders or s.source.split("/")[0] in folders]
lap("import")
device = None
if ordinal != "-":
    device = memra_lowlevel.Device(f"cuda:{ordinal}")
    lap("device")
busy = time.process_time()
images = registry.images(arch, specs, workers=None if cores == "all" else int(cores))
lap("images")
busy = time.process_time() - busy
if device is not None:
    registry.preload(device, specs)
    lap("load")
from memra_lowlevel.compile import nvrtc
print(json.dumps({
    "laps": laps, "busy_ms": busy * 1e3, "origins": [i.origin for i in images.values()],
    "nvrtc": nvrtc.loaded(),
    "bytes": sum(len(i.data) for i in images.values()),
    "ms": {source: round(i.ms) for source, i in images.items()},
}))
"""

_DEFAULT_SET = ("kv", "model", "speculative")
"""Folders of ``cuda_src`` that a decoder of ordinary layers needs."""

_CORES = "2"
"""Cores that the goal of a cold compilation speaks of."""


def measure_compile(run: Run) -> None:
    """Time cold compilations and warm starts, each in a process of its own with its own cache.

    On the host device too: NVRTC needs no GPU, so sm_90 is compiled; only the loading is missing.
    """
    cuda = run.device.kind == "cuda"
    arch = run.device.arch if cuda else "sm_90"
    ordinal = str(run.device.ordinal) if cuda else "-"
    n_warm = 3 if run.small else 9
    with tempfile.TemporaryDirectory() as folder:
        default = _start(arch, ordinal, f"{folder}/default", _CORES, *_DEFAULT_SET)
        whole = _start(arch, ordinal, f"{folder}/whole", "all")
        warm = [_start(arch, ordinal, f"{folder}/whole", "all") for _ in range(n_warm)]
    for name, cold, goal in (
        (f"{', '.join(_DEFAULT_SET)} on {_CORES} cores", default, 10_000.0),
        ("everything", whole, None),
    ):
        slowest = sorted(cold["ms"].items(), key=lambda item: -item[1])[:5]
        extra = {
            "arch": arch, "cores": os.cpu_count(), "cubin_bytes": cold["bytes"],
            "busy_ms": round(cold["busy_ms"]), "nvrtc_ms": sum(cold["ms"].values()),
            "slowest_ms": dict(slowest),
        }  # fmt: skip
        what, samples = f"cold compilation of {name}, {arch}", [cold["laps"]["images"]]
        run.add(Row(what, "ms", samples, extra=extra, note=_NOTE, goal=goal))
    sums = [start["laps"]["images"] + start["laps"].get("load", 0.0) for start in warm]
    names = {
        "import": "import and registry", "device": "open the device",
        "images": "images from the cache", "load": "load every module",
    }  # fmt: skip
    for name, words in names.items():
        if name in warm[0]["laps"]:
            samples = [start["laps"][name] for start in warm]
            run.add(Row(f"warm start, {words}, {arch}", "ms", samples, note=_NOTE))
    what = f"warm start, images and modules, {arch}"
    run.add(Row(what, "ms", sums, note=_NOTE, goal=150.0 if cuda else None))
    origins = {origin for start in warm for origin in start["origins"]}
    if origins != {"disk"}:
        run.notes.append(f"compile: the sources changed meanwhile, so warm starts were {origins}")
    elif any(start["nvrtc"] for start in warm):
        run.notes.append("compile: a warm start loaded NVRTC, though nothing was compiled")


def _start(arch: str, ordinal: str, cache: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arch, ordinal, *words], capture_output=True, text=True,
        env={**os.environ, "MEMRA_CACHE_DIR": cache}, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"a start of the library failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
