"""An independent Llama in NumPy float32: the ``gguf`` package for every format, BLAS for products.

It runs whole sequences at once and shares no code with the engine, its kernels or our formats.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize


def matrix(tensor) -> np.ndarray:
    return dequantize(np.ascontiguousarray(tensor.rows), Kind[tensor.format.upper()])


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def rotate(x: np.ndarray, theta: float, n_rot: int) -> np.ndarray:
    """Rotate neighbouring channels of [rows, heads, head_dim] by their row's position."""
    frequency = theta ** (-np.arange(0, n_rot, 2) / n_rot)
    angle = np.arange(len(x))[:, None, None] * frequency
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = x.copy()
    even, odd = x[..., 0:n_rot:2], x[..., 1:n_rot:2]
    out[..., 0:n_rot:2] = even * cos - odd * sin
    out[..., 1:n_rot:2] = even * sin + odd * cos
    return out


def steps_away(x: np.ndarray, rows: np.ndarray, kind: Kind) -> float:
    """Largest distance of values from what was stored of them, in steps of their block's scale."""
    scale = rows.reshape(len(rows), -1, {Kind.Q8_0: 34, Kind.Q5_1: 24}[kind])[..., :2]
    step = np.abs(np.ascontiguousarray(scale).view(np.float16).astype(np.float32))
    away = np.abs(x - dequantize(rows, kind)).reshape(*scale.shape[:2], 32)
    return float((away / np.maximum(step, 1e-8)).max())


def logits(weights, sequences, caches):
    """Run whole sequences.

    Rounding to the codes of a cache is a jump: a value that two right computations round apart
    moves logits by some tenths. So attention reads the rows that the engine stored, and how far
    they are from this computation's own keys and values is returned beside the logits.

    Parameters
    ----------
    weights : Weights
    sequences : list of list of int
    caches : list
        Per sequence and layer, what the engine stored: ``(k, v)``, uint8[len, row_bytes] each,
        q8_0 and q5_1.

    Returns
    -------
    logits : list of float32[len, n_vocab]
        After every token of each sequence.
    k_steps, v_steps : float
        Largest distance of a stored key and value from its own, in code steps.
    """
    c = weights.config
    group = c.n_heads // c.n_kv_heads
    ends = np.cumsum([len(s) for s in sequences])
    h = matrix(weights["token_embd.weight"])[np.concatenate(sequences)]
    k_steps = v_steps = 0.0
    for i in range(c.n_layers):

        def product(name: str, x: np.ndarray, i: int = i) -> np.ndarray:
            return x @ matrix(weights[f"blk.{i}.{name}.weight"]).T

        x = norm(h, weights[f"blk.{i}.attn_norm.weight"].rows, c.norm_eps)
        q, k, v = (product(f"attn_{n}", x) for n in "qkv")
        attended = np.empty_like(q)
        for start, end, cache in zip([0, *ends[:-1]], ends, caches, strict=True):
            n = end - start
            heads = rotate(q[start:end].reshape(n, c.n_heads, -1), c.rope_theta, c.n_rot)
            keys = rotate(k[start:end].reshape(n, c.n_kv_heads, -1), c.rope_theta, c.n_rot)
            k_rows, v_rows = cache[i]
            k_steps = max(k_steps, steps_away(keys.reshape(n, -1), k_rows, Kind.Q8_0))
            v_steps = max(v_steps, steps_away(v[start:end], v_rows, Kind.Q5_1))
            keys = dequantize(k_rows, Kind.Q8_0).reshape(n, c.n_kv_heads, -1)
            values = dequantize(v_rows, Kind.Q5_1).reshape(n, c.n_kv_heads, -1)
            for head in range(c.n_heads):
                scores = heads[:, head] @ keys[:, head // group].T / np.float32(c.head_dim**0.5)
                scores[np.triu_indices(n, 1)] = -np.inf
                p = np.exp(scores - scores.max(axis=-1, keepdims=True))
                p /= p.sum(axis=-1, keepdims=True)
                span = slice(head * c.head_dim, (head + 1) * c.head_dim)
                attended[start:end, span] = p @ values[:, head // group]
        h = h + product("attn_output", attended)
        x = norm(h, weights[f"blk.{i}.ffn_norm.weight"].rows, c.norm_eps)
        gate, up = product("ffn_gate", x), product("ffn_up", x)
        h = h + product("ffn_down", gate / (1 + np.exp(-gate)) * up)
    head = weights.tensors.get("output.weight", weights["token_embd.weight"])
    out = norm(h, weights["output_norm.weight"].rows, c.norm_eps) @ matrix(head).T
    return np.split(out.astype(np.float32), ends[:-1]), k_steps, v_steps
