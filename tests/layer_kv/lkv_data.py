"""Deterministic inputs, float64 oracles and byte fingerprints for the layer cache tests."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memra_lowlevel.layer_kv import KvMode, LayerKvCache, compiled

SCALE = float(os.environ.get("MEMRA_TEST_SCALE", "1"))
MODES = [KvMode.F32, KvMode.Q8(), KvMode.Q8(v=False), KvMode.Q8(k=False)]
MASK = 0xFFFFFFFF


def gen(salt: int, n: int, amp: float = 1.0) -> np.ndarray:
    """Counter-based values in [-amp, amp), exact in float32 for amp 1."""
    out = np.empty(n, np.float32)
    for i in range(n):
        x = (i * 2654435761 + salt * 2246822519 + 374761393) & MASK
        x ^= x >> 15
        x = x * 2246822519 & MASK
        x ^= x >> 13
        x = x * 3266489917 & MASK
        x ^= x >> 16
        out[i] = np.float32(np.float32((x >> 8) * 2.0**-23 - 1) * np.float32(amp))
    return out


def mk(salt: int, n: int, d: int) -> np.ndarray:
    return gen(salt, n * d).reshape(n, d)


def ones(n: int, value: float = 1.0) -> np.ndarray:
    return np.full(n, value, np.float32)


def bits(x: Any) -> list[str]:
    return [f"{v:08x}" for v in np.asarray(x, np.float32).reshape(-1).view(np.uint32)]


def steps_done(call: Callable[[], Any], times: int) -> set[tuple[int, ...]]:
    """Call `times` times; what the calls did, as (scored, added, exponentials, scratch bytes)."""
    found, before = set(), tuple(compiled.work().values())
    for _ in range(times):
        call()
        after = tuple(compiled.work().values())
        found.add(tuple(b - a for a, b in zip(before, after, strict=True)))
        before = after
    return found


def numbers(text: str) -> np.ndarray:
    return np.array([float(t) for t in text.split()])


def close(got: Any, want: str | np.ndarray, tol: float = 2e-6) -> None:
    """Absolute tolerance; a NaN never passes."""
    expected = numbers(want) if isinstance(want, str) else np.asarray(want, np.float64)
    value = np.asarray(got, np.float64).reshape(-1)
    assert value.shape == expected.reshape(-1).shape
    error = np.abs(value - expected.reshape(-1))
    assert (error <= tol).all(), f"off by {error.max()}: {value} against {expected}"


def same_bits(a: Any, b: Any) -> None:
    x, y = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    assert x.shape == y.shape
    assert not np.isnan(x).any()
    assert (x.view(np.uint32) == y.view(np.uint32)).all(), f"{x} against {y}"


def poisoned(n: int) -> np.ndarray:
    return np.full(n, np.nan, np.float32)


def state_of(x: Any, seen: set[int] | None = None) -> Any:
    """Everything an object holds, arrays as bytes; unwritten capacity left out."""
    if isinstance(x, np.ndarray):
        return (x.shape, x.dtype.str, x.tobytes())
    if isinstance(x, LayerKvCache):
        d = dict(x.__dict__)
        stores = d.pop("_stores")
        imp = d.pop("_imp")
        return (
            {k: state_of(v) for k, v in d.items()},
            imp[: d["_n_imp"]].tobytes(),
            rows_of(stores),
        )
    if isinstance(x, (list, tuple)):
        return [state_of(v) for v in x]
    if hasattr(x, "__dict__") and not isinstance(x, type):
        skip = ("struct", "_trace")
        d = {k: state_of(v) for k, v in x.__dict__.items() if k not in skip}
        if hasattr(x, "trace"):
            d["trace"] = state_of(x.trace)
        return d
    return copy.copy(x)


def rows_of(stores: Any) -> Any:
    out = [stores.mode, stores.rows.tobytes()]
    for h in range(stores.nkv):
        n = int(stores.rows[h])
        out += [getattr(stores, name)[h, :n].tobytes() for name in stores.planes()]
    for side in ("k", "v"):
        on = getattr(stores, side + "col_on")
        out += [on.tobytes(), getattr(stores, side + "col")[on != 0].tobytes()]
    return out


def refused(error: type[Exception], layer: LayerKvCache, call: Callable[[], Any]) -> str:
    """Expect a refusal with a message, and not one byte of the layer changed."""
    before = state_of(layer)
    with pytest.raises(error) as info:
        call()
    assert state_of(layer) == before
    assert len(str(info.value)) > 10
    return str(info.value)


def fill(layer: LayerKvCache, n: int, salt: int = 0, amp: float = 1.0, alive: Any = None) -> None:
    width = layer.num_kv_heads * layer.head_dim
    for p in range(n):
        layer.append(
            gen(salt + 2 * p + 100000, width, amp), gen(salt + 2 * p + 100001, width, amp), alive
        )


def softmax64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, *, softcap: float = 0.0,
    sink: float | None = None, first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Float64 attention of one query: output and the probabilities of all rows."""
    q, k, v = q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)
    s = k @ q * scale
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s[: min(first, len(s) - 1)] = -np.inf
    m = s.max() if sink is None else max(s.max(), sink)
    e = np.exp(s - m)
    z = e.sum() + (0.0 if sink is None else np.exp(sink - m))
    return (e / z) @ v, e / z
