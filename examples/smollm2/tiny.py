"""Llamas made up from a seed: a small one for tests and machines without a network, and one of the
shape of SmolLM2, for measurements without its file.

They babble, but deterministically, and have every part of a real one. Their last layers change the
residual stream less than their first ones, so that leaving early guesses right often, not always;
the output layer of the small one is not the embedding table, which would make it repeat its last
token for ever.
"""

from __future__ import annotations

import numpy as np

from .weights import Config, Tensor, Weights, required_head_shapes, required_shapes

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


SMOLLM2_135M = Config(
    n_layers=30,
    width=576,
    n_ff=1536,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    n_vocab=49152,
    n_rot=64,
    rope_theta=100000.0,
    norm_eps=1e-5,
    max_ctx=8192,
)

#: Names of the made-up models, beside those of files.
MADE_UP = ("tiny", "smollm2-shape", "smollm2-shape-f16")


def made_up(name: str, seed: int = 7) -> Weights:
    """Weights of a made-up model.

    Parameters
    ----------
    name : str
        ``"tiny"`` and ``"smollm2-shape"`` have matrices in q4_1 and tables in q8_0, as the file of
        SmolLM2 has; ``"smollm2-shape-f16"`` is f16 throughout.
    seed : int
    """
    random = np.random.default_rng(seed)
    config = TINY if name == "tiny" else SMOLLM2_135M
    shapes = required_shapes(config)
    if name == "tiny":
        shapes = {**shapes, "output.weight": shapes["token_embd.weight"]}
    tensors = {}
    for tensor, shape in shapes.items():
        if len(shape) == 1:
            rows = random.uniform(0.8, 1.2, shape).astype(np.float32)
            tensors[tensor] = Tensor(tensor, "f32", shape, rows)
            continue
        table = tensor in ("token_embd.weight", "output.weight")
        if table:
            spread = 0.02 if tensor == "token_embd.weight" else 0.125
        else:
            spread = _gain(tensor, config.n_layers) / np.sqrt(shape[1])
        format = "f16" if name == "smollm2-shape-f16" else "q8_0" if table else "q4_1"
        tensors[tensor] = Tensor(
            tensor, format, shape, random_rows(random, shape[:2], format, spread)
        )
    return Weights(name, config, tensors)


def made_up_head(
    config: Config, seed: int = 7, n_known: int | None = None
) -> tuple[dict[str, Tensor], np.ndarray]:
    """A draft head that guesses at random, and the tokens that it knows (all if left out).

    Parameters
    ----------
    config : Config
        Of the target.
    seed : int
    n_known : int, optional

    Returns
    -------
    tensors, tokens
        As ``DraftHead`` takes them.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in required_head_shapes(config).items():
        if len(shape) == 1:
            rows = random.uniform(0.8, 1.2, shape).astype(np.float32)
            tensors[name] = Tensor(name, "f32", shape, rows)
        else:
            rows = random_rows(random, shape[:2], "q8_0", 0.5 / np.sqrt(shape[1]))
            tensors[name] = Tensor(name, "q8_0", shape, rows)
    known = random.permutation(config.n_vocab)[: n_known or config.n_vocab]
    return tensors, np.sort(known).astype(np.int32)


def tiny_weights(seed: int = 7) -> Weights:
    """Weights of the tiny model."""
    return made_up("tiny", seed)


def random_rows(
    random: np.random.Generator, shape: tuple[int, int], format: str, spread: float
) -> np.ndarray:
    """Rows of a matrix as a file stores them, of a given standard deviation.

    Parameters
    ----------
    random : numpy Generator
    shape : (n_out, n_in)
    format : str
        ``"f16"``, ``"q8_0"`` or ``"q4_1"``.
    spread : float

    Returns
    -------
    uint8[n_out, row_bytes]
    """
    rows: np.ndarray = {"f16": _f16, "q8_0": _q8_0, "q4_1": _q4_1}[format](random, shape, spread)
    return rows


def _gain(name: str, n_layers: int) -> float:
    layer = int(name.split(".")[1])
    if name.endswith(("attn_output.weight", "ffn_down.weight")):
        return 0.1 if layer < n_layers // 2 else 0.02
    return 1.0


def _q8_0(random: np.random.Generator, shape: tuple[int, int], spread: float) -> np.ndarray:
    n_out, n_in = shape
    blocks = np.empty((n_out, n_in // 32, 34), np.uint8)
    scale = np.full((n_out, n_in // 32, 1), spread / 73.6, np.float16)  # deviation of -127..127
    blocks[..., :2] = scale.view(np.uint8)
    blocks[..., 2:] = random.integers(-127, 128, (n_out, n_in // 32, 32), np.int8).view(np.uint8)
    return blocks.reshape(n_out, -1)


def _q4_1(random: np.random.Generator, shape: tuple[int, int], spread: float) -> np.ndarray:
    n_out, n_in = shape
    blocks = np.empty((n_out, n_in // 32, 20), np.uint8)
    d = spread / 4.61 * random.uniform(0.8, 1.25, (n_out, n_in // 32, 1))  # deviation of 0..15
    scales = np.concatenate([d, -7.5 * d], axis=-1).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    blocks[..., 4:] = random.integers(0, 256, (n_out, n_in // 32, 16), np.uint8)
    return blocks.reshape(n_out, -1)


def _f16(random: np.random.Generator, shape: tuple[int, int], spread: float) -> np.ndarray:
    codes = random.integers(-127, 128, shape, np.int8).astype(np.float16)
    return (codes * np.float16(spread / 73.6)).view(np.uint8)
