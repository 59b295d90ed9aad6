"""``LayerKvCache`` against the machine's memory and against NumPy and PyTorch, on one thread.

The floor of a row is a plain read, by the same compiled module, of the bytes that the layer holds.
A process of its own measures, because NumPy's BLAS fixes its number of threads when it is loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from .result import Row
from .run import loaded

if TYPE_CHECKING:
    from .run import Run

__all__ = ["measure_layer_kv"]

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_GOAL_SHARE = 0.6
"""Share of the read bandwidth that float32 attention of one query is to reach."""


def measure_layer_kv(run: Run) -> None:
    """Time attention over 32,768 rows of 128 for 1, 4 and 8 query heads, in float32 and q8.

    The CPU is the device here: sizes are the same wherever it runs.
    """
    command = [sys.executable, "-m", __name__, "torch" if run.peers else ""]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **_ONE_THREAD}, timeout=600,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"measuring the layer cache failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    note = f"CPU, one thread, path {found['path']}"
    for row in found["rows"]:
        run.add(Row(**row, note=note))
    run.notes.extend(found["notes"])


def _main(peers: bool, n_rows: int = 32768, head_dim: int = 128) -> None:
    import numpy as np

    from ..layer_kv import KvMode, LayerKvCache, compiled

    rng = np.random.default_rng(0)
    block = rng.standard_normal((64, 2, head_dim)).astype(np.float32)

    def filled(mode: KvMode) -> LayerKvCache:
        layer = LayerKvCache(1, head_dim, mode=mode)
        for p in range(n_rows):
            layer.append(block[p % 64, 0], block[(7 * p) % 64, 1])
        return layer

    layers = {"f32": filled(KvMode.F32), "q8": filled(KvMode.Q8())}
    k, v = layers["f32"].head_keys(0), layers["f32"].head_values(0)
    notes: list[str] = []
    calls: dict[str, Callable[[], object]] = {}
    rows: list[dict[str, Any]] = []
    floors: dict[str, str] = {}
    lib = compiled.lib
    if lib is None:
        notes.append("layer_kv: the compiled module is missing, so there is no floor")
    for name, layer in layers.items() if lib is not None else ():
        probe = np.ones(layer.memory_bytes() // 4, np.float32)
        what = floors[name] = f"read {probe.nbytes} bytes"
        at = compiled.ffi.from_buffer("float[]", probe)
        calls[what] = partial(lib.lkv_read, at, probe.size)
        rows.append({"what": what})
    torch = _torch() if peers else None
    if torch is None:
        notes.append("torch: not installed")
    for heads in (1, 4, 8):
        q = rng.standard_normal((heads, head_dim)).astype(np.float32)
        work = f"attend {n_rows} rows of {head_dim}, {heads} queries"

        def add(name: str, call: Callable[[], object], work: str = work, **more: Any) -> None:
            calls[f"{work}, {name}"] = call
            rows.append({"what": f"{work}, {name}", "work": work, **more})

        add("NumPy", partial(_numpy_attend, np, q, k, v), peer="NumPy")
        if torch is not None:
            keys, values, query = (torch.from_numpy(x.copy())[None] for x in (k, v, q))
            attend = torch.nn.functional.scaled_dot_product_attention
            add("torch", partial(attend, query, keys, values), peer="torch")
        for name, layer in layers.items():
            out = np.empty(heads * head_dim, np.float32)
            add(name, partial(layer.attend_group, q.reshape(-1), 0, out), floor=floors.get(name))
    samples = _in_turn(calls)
    for row in rows:
        row.update(unit="ms", samples=samples[row["what"]], loaded=loaded())
        if row.get("floor"):
            row["floor"] = median(samples[row["floor"]])
            if row["what"].endswith(" 1 queries, f32"):
                row["goal"] = row["floor"] / _GOAL_SHARE
    print(json.dumps({"path": compiled.backend(), "rows": rows, "notes": notes}))


def _in_turn(calls: dict[str, Callable[[], object]], n_rounds: int = 25) -> dict[str, list[float]]:
    """Time every call once a round, in ms: what else the machine does meets all of them alike."""
    samples: dict[str, list[float]] = {what: [] for what in calls}
    for i in range(n_rounds + 1):
        for what, call in calls.items():
            start = time.perf_counter()
            call()
            if i:  # the first round warms up
                samples[what].append((time.perf_counter() - start) * 1e3)
    return samples


def _numpy_attend(np: Any, q: Any, k: Any, v: Any) -> Any:
    s = q @ k.T * np.float32(q.shape[1] ** -0.5)
    e = np.exp(s - s.max(axis=1, keepdims=True))
    return (e / e.sum(axis=1, keepdims=True)) @ v


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


if __name__ == "__main__":
    _main(peers=sys.argv[1:] == ["torch"])
