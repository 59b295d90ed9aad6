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

_PROGRAM = """
import json, sys, time
start = time.perf_counter()
laps = {}
def lap(name):
    global start
    now = time.perf_counter()
    laps[name] = (now - start) * 1e3
    start = now
arch, ordinal = sys.argv[1], sys.argv[2]
import memra_lowlevel
from memra_lowlevel.kernels import registry
specs = registry.all_specs()
lap("import")
device = None
if ordinal != "-":
    device = memra_lowlevel.Device(f"cuda:{ordinal}")
    lap("device")
images = registry.images(arch, specs)
lap("images")
if device is not None:
    registry.preload(device, specs)
    lap("load")
origins = [image.origin for image in images.values()]
from memra_lowlevel.compile import nvrtc
print(json.dumps({"laps": laps, "origins": origins, "nvrtc": nvrtc.loaded(),
                  "bytes": sum(len(i.data) for i in images.values()),
                  "ms": sum(i.ms for i in images.values())}))
"""


def measure_compile(run: Run) -> None:
    """Time cold compilations and warm starts of the whole library, each in a process of its own.

    On the host device too: NVRTC needs no GPU, so sm_90 is compiled; only the loading is missing.
    """
    cuda = run.device.kind == "cuda"
    arch = run.device.arch if cuda else "sm_90"
    ordinal = str(run.device.ordinal) if cuda else "-"
    n_cold, n_warm = (1, 3) if run.small else (2, 9)
    cold: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(n_cold):
            cold.append(_start(arch, ordinal, f"{folder}/{i}"))
        for _ in range(n_warm):
            warm.append(_start(arch, ordinal, f"{folder}/{n_cold - 1}"))
    about = {"arch": arch, "cores": os.cpu_count(), "cubin_bytes": cold[0]["bytes"]}
    origins = {origin for start in warm for origin in start["origins"]}
    note = "" if origins == {"disk"} else f"not from the disk cache alone: {sorted(origins)}"
    run.add(
        Row(
            f"cold compilation of the default set, {arch}", "ms",
            [start["laps"]["images"] for start in cold], note=note,
            extra={**about, "nvrtc_ms": round(cold[0]["ms"])},
        )
    )  # fmt: skip
    run.rows[-1].goal = 10_000.0
    for name, words in (
        ("import", "import and registry"), ("device", "open the device"),
        ("images", "images from the cache"), ("load", "load every module"),
    ):  # fmt: skip
        if name in warm[0]["laps"]:
            samples = [start["laps"][name] for start in warm]
            run.add(Row(f"warm start, {words}, {arch}", "ms", samples, extra=about, note=note))
    loading = [start["laps"]["images"] + start["laps"].get("load", 0.0) for start in warm]
    run.add(Row(f"warm start, images and modules, {arch}", "ms", loading, extra=about, note=note))
    run.rows[-1].goal = 150.0
    if any(start["nvrtc"] for start in warm):
        run.notes.append("compile: a warm start loaded NVRTC, though nothing was compiled")


def _start(arch: str, ordinal: str, cache: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arch, ordinal], capture_output=True, text=True,
        env={**os.environ, "MEMRA_CACHE_DIR": cache}, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"a start of the library failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
