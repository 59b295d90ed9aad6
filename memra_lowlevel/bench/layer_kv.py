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
from typing import TYPE_CHECKING, Any

from .result import Row

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
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    lib = compiled.lib
    floors: dict[str, float | None] = {}
    for name, layer in layers.items():
        probe = np.ones(layer.memory_bytes() // 4, np.float32)
        floors[name] = None
        if lib is not None:
            at = compiled.ffi.from_buffer("float[]", probe)
            samples = _timed(lib.lkv_read, at, probe.size)
            floors[name] = sorted(samples)[len(samples) // 2]
            what = f"read {probe.nbytes} bytes"
            rows.append({"what": what, "unit": "ms", "samples": samples})
    if lib is None:
        notes.append("layer_kv: the compiled module is missing, so there is no floor")
    torch = _torch() if peers else None
    if torch is None:
        notes.append("torch: not installed")
    for heads in (1, 4, 8):
        q = rng.standard_normal((heads, head_dim)).astype(np.float32)
        out = np.empty(heads * head_dim, np.float32)
        work = f"attend {n_rows} rows of {head_dim}, {heads} queries"
        rows.append(
            {
                "what": f"{work}, NumPy", "unit": "ms", "work": work, "peer": "NumPy",
                "samples": _timed(_numpy_attend, np, q, k, v),
            }
        )  # fmt: skip
        if torch is not None:
            keys, values = (torch.from_numpy(a.copy())[None] for a in (k, v))
            query = torch.from_numpy(q)[None]
            attend = torch.nn.functional.scaled_dot_product_attention
            rows.append(
                {
                    "what": f"{work}, torch", "unit": "ms", "work": work, "peer": "torch",
                    "samples": _timed(attend, query, keys, values),
                }
            )  # fmt: skip
        for name, layer in layers.items():
            floor = floors[name]
            rows.append(
                {
                    "what": f"{work}, {name}", "unit": "ms", "work": work, "floor": floor,
                    "samples": _timed(layer.attend_group, q.reshape(-1), 0, out),
                    "goal": floor / _GOAL_SHARE if floor and (heads, name) == (1, "f32") else None,
                }
            )  # fmt: skip
    print(json.dumps({"path": compiled.backend(), "rows": rows, "notes": notes}))


def _timed(call: Callable[..., object], *args: object, n_samples: int = 25) -> list[float]:
    call(*args)
    samples = []
    for _ in range(n_samples):
        start = time.perf_counter()
        call(*args)
        samples.append((time.perf_counter() - start) * 1e3)
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
