"""How long the kernels take to be there: a cold compilation, and a warm start from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .result import Row

if TYPE_CHECKING:
    from ..kernels.registry import KernelSpec
    from .run import Run

__all__ = ["default_set", "measure_compile"]

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
arch, ordinal, cores, whole = sys.argv[1:]
if cores != "all":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
import memra_lowlevel
from memra_lowlevel.kernels import registry
from memra_lowlevel.bench.compiling import default_set
specs = registry.all_specs() if whole == "whole" else default_set()
lap("import")
device = None
if ordinal != "-":
    device = memra_lowlevel.Device(f"cuda:{ordinal}")
    lap("device")
busy = time.process_time()
workers = None if cores == "all" else int(cores)
if device is None:
    images = registry.images(arch, specs, workers=workers)
else:
    registry.preload(device, specs, workers=workers)
    images = {k.image.name: k.image for k in device.memo.values() if hasattr(k, "image")}
lap("kernels")
busy = time.process_time() - busy
from memra_lowlevel.compile import nvrtc
print(json.dumps({
    "laps": laps, "busy_ms": busy * 1e3, "origins": [i.origin for i in images.values()],
    "nvrtc": nvrtc.loaded(),
    "bytes": sum(len(i.data) for i in images.values()),
    "ms": {source: round(i.ms) for source, i in images.items()},
}))
"""

PAIRS = (
    ("Q8_0", "Q5_1"), ("Q8_0", "Q8_0"), ("Q8_0", "Q4_0"), ("E4M3", "E4M3"), ("F16", "F16"),
    ("BF16", "BF16"),
)  # fmt: skip
HEAD_DIMS = (64, 128, 256)


def default_set() -> list[KernelSpec]:
    """Kernels of a decoder of ordinary layers: six pairs of formats, three head sizes, the model's.

    More than is registered to be compiled ahead of time: a program uses one or two of the pairs.
    As from sm_80 on: the general attention kernel only where none of tensor cores does the work.
    """
    from ..kernels import registry

    more: dict[str, list[dict[str, object]]] = {"append_kv": [], "attend_partial": []}
    for k, v in PAIRS:
        pair: dict[str, object] = {"k_format": k, "v_format": v}
        more["append_kv"].append(pair)
        more["attend_partial"] += [
            {**pair, "head_dim": d, "head_dim_v": d, "queries": 4}
            for d in HEAD_DIMS
            if not _on_tensor_cores(k, v, d)
        ]
    specs = [
        s for s in registry.all_specs() if s.source.split("/")[0] in ("kv", "model", "speculative")
    ]
    return [
        replace(s, instances=(*s.instances, *more.get(s.name, ()))) if s.name in more else s
        for s in specs
    ]


def _on_tensor_cores(k: str, v: str, head_dim: int) -> bool:
    """Whether an attention kernel of its own does this pair (:func:`.kv_attend.choose`)."""
    small = {"F16", "BF16", "E4M3"}
    return (k, v) == ("Q8_0", "Q5_1") or ({k, v} <= small and not (k == "BF16" and head_dim > 128))


_CORES = "2"
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
        default = _start(arch, ordinal, f"{folder}/default", _CORES, "default")
        whole = _start(arch, ordinal, f"{folder}/whole", "all", "whole")
        warm = [_start(arch, ordinal, f"{folder}/whole", "all", "whole") for _ in range(n_warm)]
    for name, cold, goal in (
        (f"the default set on {_CORES} cores", default, 10_000.0),
        ("everything", whole, None),
    ):
        slowest = sorted(cold["ms"].items(), key=lambda item: -item[1])[:5]
        extra = {
            "arch": arch, "cores": os.cpu_count(), "cubin_bytes": cold["bytes"],
            "busy_ms": round(cold["busy_ms"]), "nvrtc_ms": sum(cold["ms"].values()),
            "slowest_ms": dict(slowest),
        }  # fmt: skip
        what, samples = f"cold compilation of {name}, {arch}", [cold["laps"]["kernels"]]
        run.add(Row(what, "ms", samples, extra=extra, note=_NOTE, goal=goal))
    names = {
        "import": "import and registry", "device": "open the device",
        "kernels": "every module loaded" if cuda else "every image read",
    }  # fmt: skip
    for name, words in names.items():
        if name in warm[0]["laps"]:
            samples = [start["laps"][name] for start in warm]
            goal = 150.0 if cuda and name == "kernels" else None
            run.add(Row(f"warm start, {words}, {arch}", "ms", samples, note=_NOTE, goal=goal))
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
