"""A small Llama made up from a seed: for tests and for machines without a network.

It babbles, but deterministically, and it has every part of a real one. Its last layers change the
residual stream less than its first ones, so that leaving early guesses right often, not always; its
output layer is not the embedding table, which would make it repeat its last token for ever.
"""

from __future__ import annotations

import numpy as np

from .weights import Config, Tensor, Weights, required_shapes

TINY = Config(
    n_layers=4,
    width=64,
    n_ff=160,
    n_heads=2,
    n_kv_heads=1,
    head_dim=64,
    n_vocab=272,
    n_rot=64,
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_ctx=4096,
)


def tiny_weights(seed: int = 7) -> Weights:
    """Random weights: matrices as q4_1 codes, the two tables as q8_0, norms as f32."""
    random = np.random.default_rng(seed)
    shapes = required_shapes(TINY)
    tensors = {}
    for name, shape in {**shapes, "output.weight": shapes["token_embd.weight"]}.items():
        if len(shape) == 1:
            rows = random.uniform(0.8, 1.2, shape).astype(np.float32)
            tensors[name] = Tensor(name, "f32", shape, rows)
        elif name in ("token_embd.weight", "output.weight"):
            spread = 0.02 if name == "token_embd.weight" else 0.125
            tensors[name] = Tensor(name, "q8_0", shape, _q8_0(random, shape, spread))
        else:
            spread = _gain(name) / np.sqrt(shape[1])
            tensors[name] = Tensor(name, "q4_1", shape, _q4_1(random, shape, spread))
    return Weights("tiny", TINY, tensors)


def _gain(name: str) -> float:
    layer = int(name.split(".")[1])
    if name.endswith(("attn_output.weight", "ffn_down.weight")):
        return (0.1, 0.1, 0.02, 0.02)[layer]
    return 1.0


def _q8_0(random: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    n_out, n_in = shape
    blocks = np.empty((n_out, n_in // 32, 34), np.uint8)
    scale = np.full((n_out, n_in // 32, 1), spread / 73.6, np.float16)  # deviation of -127..127
    blocks[..., :2] = scale.view(np.uint8)
    blocks[..., 2:] = random.integers(-127, 128, (n_out, n_in // 32, 32), np.int8).view(np.uint8)
    return blocks.reshape(n_out, -1)


def _q4_1(random: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    n_out, n_in = shape
    blocks = np.empty((n_out, n_in // 32, 20), np.uint8)
    d = spread / 4.61 * random.uniform(0.8, 1.25, (n_out, n_in // 32, 1))  # deviation of 0..15
    scales = np.concatenate([d, -7.5 * d], axis=-1).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    blocks[..., 4:] = random.integers(0, 256, (n_out, n_in // 32, 16), np.uint8)
    return blocks.reshape(n_out, -1)
