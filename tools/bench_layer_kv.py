"""Measure LayerKvCache against the machine's memory and against NumPy, all in one run.

``python tools/bench_layer_kv.py [--rows N] [--json FILE]`` prints the best of several rounds and
their spread (quartiles over the median). Everything runs on one thread; the read bandwidth is that
of a plain sum over a buffer of the same size, so a ratio says how much of what the memory gives is
used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # before NumPy is loaded: its BLAS would use every core

import numpy as np  # noqa: E402

from memra_lowlevel.layer_kv import KvMode, LayerKvCache, compiled  # noqa: E402


def timed(run: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the best seconds of a call and the relative spread of all rounds."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    low, mid, high = np.percentile(times, [25, 50, 75])
    return min(times), float((high - low) / mid)


def filled(mode: KvMode, rows: int, hd: int, rng: np.random.Generator) -> LayerKvCache:
    layer = LayerKvCache(1, hd, mode=mode)
    block = rng.standard_normal((64, 2, hd)).astype(np.float32)
    for p in range(rows):
        layer.append(block[p % 64, 0], block[(7 * p) % 64, 1])
    return layer


def numpy_attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    s = q @ k.T * np.float32(scale)
    e = np.exp(s - s.max(axis=1, keepdims=True))
    return (e / e.sum(axis=1, keepdims=True)) @ v


def torch_attend(k: np.ndarray, v: np.ndarray) -> Callable[[np.ndarray], object] | None:
    """Return PyTorch's own attention on one thread, where PyTorch is installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    keys, values = torch.from_numpy(k.copy())[None], torch.from_numpy(v.copy())[None]

    def run(q: np.ndarray) -> object:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(
                torch.from_numpy(q)[None], keys, values
            )

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    rows, hd, rounds = args.rows, args.head_dim, args.rounds
    rng = np.random.default_rng(0)
    out: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "path": compiled.backend(),
        "rows": rows,
        "head_dim": hd,
    }
    layers = {m: filled(m, rows, hd, rng) for m in (KvMode.F32, KvMode.Q8())}
    k, v = layers[KvMode.F32].head_keys(0), layers[KvMode.F32].head_values(0)
    n_bytes = k.nbytes + v.nbytes
    other = torch_attend(k, v)
    probe = np.ascontiguousarray(np.concatenate([k, v]))
    lib, ffi = compiled.lib, compiled.ffi
    if lib is not None:
        at = ffi.from_buffer("float[]", probe)
        read, _ = timed(lambda: lib.lkv_read(at, probe.size), rounds)
    else:
        read, _ = timed(lambda: probe.sum(), rounds)
    bandwidth = n_bytes / read
    out["read_gb_s"] = round(bandwidth / 1e9, 2)
    print(f"{out['machine']}, path {out['path']}, {rows} rows of {hd}, one thread")
    print(f"plain read of {n_bytes / 2**20:.0f} MiB: {bandwidth / 1e9:.1f} GB/s")
    print(f"{'':24}{'ms':>9}{'spread':>9}{'GB/s':>8}{'of read':>9}{'numpy/this':>12}")
    for heads in (1, 4, 8):
        q = rng.standard_normal((heads, hd)).astype(np.float32)
        flat, target = q.reshape(-1), np.empty(heads * hd, np.float32)
        base, base_spread = timed(lambda q=q: numpy_attend(q, k, v, hd**-0.5), rounds)
        for mode, layer in layers.items():
            span, spread = timed(
                lambda layer=layer, f=flat, t=target: layer.attend_group(f, 0, t), rounds
            )
            rate = layer.memory_bytes() / span
            name = f"{mode} x{heads}"
            out[name] = {
                "ms": span * 1e3,
                "spread": spread,
                "gb_s": rate / 1e9,
                "of_read": rate / bandwidth,
                "numpy_over_this": base / span,
            }
            print(
                f"{name:24}{span * 1e3:9.3f}{spread:9.1%}{rate / 1e9:8.1f}{rate / bandwidth:9.1%}"
                f"{base / span:12.2f}"
            )
        if other is not None:
            span, spread = timed(lambda q=q: other(q), rounds)
            out[f"torch x{heads}"] = {"ms": span * 1e3, "spread": spread}
            print(f"{f'torch f32 x{heads}':24}{span * 1e3:9.3f}{spread:9.1%}")
        out[f"numpy x{heads}"] = {"ms": base * 1e3, "spread": base_spread}
        print(f"{f'numpy f32 x{heads}':24}{base * 1e3:9.3f}{base_spread:9.1%}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
