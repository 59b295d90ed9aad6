"""What a Llama model is made of: its numbers, its tensors, its vocabulary; read from GGUF.

Nothing here touches a device. A tensor keeps the bytes of the file.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_lowlevel.cache.plan import KvCache, LayerPlan, ModelPlan
from memra_lowlevel.errors import ModelError
from memra_lowlevel.kernels.model_tiles import TILE_FORMATS

Array = npt.NDArray[Any]

#: What stands in every message about a file that cannot be used.
ALTERNATIVES = (
    "Give another Llama-architecture file with --model PATH.gguf, or use --model tiny, "
    "which needs no file."
)


@dataclass(frozen=True)
class Config:
    """The numbers of a Llama model.

    Attributes
    ----------
    n_layers, width, n_ff, n_heads, n_kv_heads, head_dim, n_vocab : int
    n_rot : int
        Leading channels of a head that are rotated.
    rope_theta, norm_eps : float
    max_ctx : int
        Positions the model was trained for.
    """

    n_layers: int
    width: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_rot: int
    rope_theta: float
    norm_eps: float
    max_ctx: int

    @property
    def q_dim(self) -> int:
        """Columns of the query of one row."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Columns of the key, and of the value, of one row."""
        return self.n_kv_heads * self.head_dim

    @property
    def plan(self) -> ModelPlan:
        """What the model asks of its cache: a full-attention plane per layer."""
        layer = LayerPlan(KvCache(), self.kv_dim, self.kv_dim, self.head_dim, self.head_dim)
        return ModelPlan((layer,) * self.n_layers)


@dataclass(frozen=True)
class Tensor:
    """One tensor as stored.

    Attributes
    ----------
    name : str
    format : str
        ``"f32"``, ``"f16"``, ``"q8_0"`` or ``"q4_1"``.
    shape : tuple of int
        ``(n_out, n_in)`` of a matrix, ``(n,)`` of a vector.
    rows : ndarray
        ``uint8[n_out, row_bytes]`` of a matrix, ``float32[n]`` of a vector.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    rows: Array


@dataclass(frozen=True)
class Weights:
    """A model on the host.

    Attributes
    ----------
    name : str
    config : Config
    tensors : dict of str to Tensor
        Under their GGUF names.
    vocabulary : dict
        The ``tokenizer.*`` entries of the file; empty for a byte vocabulary.
    """

    name: str
    config: Config
    tensors: dict[str, Tensor]
    vocabulary: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def matrix_names(config: Config, layer: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """Names and shapes ``(n_out, n_in)`` of the matrices of one layer, by their role."""
    block = f"blk.{layer}."
    q, kv, width, ff = config.q_dim, config.kv_dim, config.width, config.n_ff
    return {
        "q": (block + "attn_q.weight", (q, width)),
        "k": (block + "attn_k.weight", (kv, width)),
        "v": (block + "attn_v.weight", (kv, width)),
        "out": (block + "attn_output.weight", (width, q)),
        "gate": (block + "ffn_gate.weight", (ff, width)),
        "up": (block + "ffn_up.weight", (ff, width)),
        "down": (block + "ffn_down.weight", (width, ff)),
    }


def required_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of these numbers must have, with its shape."""
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.n_vocab, width),
        "output_norm.weight": (width,),
    }
    for layer in range(config.n_layers):
        shapes[f"blk.{layer}.attn_norm.weight"] = (width,)
        shapes[f"blk.{layer}.ffn_norm.weight"] = (width,)
        shapes.update(matrix_names(config, layer).values())
    return shapes


def required_head_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a draft head must have, with its shape; ``n_ff`` is the head's own."""
    width = config.width
    return {
        "features.weight": (width, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        **dict(matrix_names(config, 0).values()),
    }


#: Tensors a file may have besides the required ones.
OPTIONAL_TENSORS = ("output.weight", "rope_freqs.weight")


def check_installed(*packages: str) -> None:
    """Check that packages which reading a model needs are there, before anybody fetches one.

    Raises
    ------
    ModelError
        One of them is missing.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ModelError(
                f"Reading this model needs the package {package}, which is not installed "
                f"({error}). Install it, pip install 'gguf==0.19.0' regex, "
                "or use --model tiny."
            ) from error


def read_gguf(path: str | Path) -> Weights:
    """Read a Llama model.

    Parameters
    ----------
    path : path
        A GGUF file whose architecture is ``llama`` and whose tensors are f32, f16, q8_0 or q4_1.

    Returns
    -------
    Weights
        Its arrays are views of the mapped file, which stays open as long as they live.

    Raises
    ------
    ModelError
        No such file, not a GGUF file, damaged, or of an unsupported kind.
    """
    path = Path(path)
    metadata, stored = read_stored(path)
    config = _config(path, metadata, dict((name, shape) for name, _, shape, _ in stored))
    tensors = {
        name: as_tensor(path, name, format_, shape, data) for name, format_, shape, data in stored
    }
    _check(path, config, tensors)
    vocabulary = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
    return Weights(str(metadata.get("general.name", path.stem)), config, tensors, vocabulary)


def read_stored(
    path: Path, ways_on: str = ALTERNATIVES
) -> tuple[dict[str, Any], list[tuple[str, str, tuple[int, ...], Array]]]:
    """Metadata of a GGUF file, and its tensors: name, format, shape, stored bytes (mapped).

    Raises
    ------
    ModelError
        No such file, or not a readable GGUF file.
    """
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file. {ways_on}")
    check_installed("gguf")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {name: entry.contents() for name, entry in reader.fields.items()}
        stored = [(t.name, t.tensor_type.name.lower(), _shape(t), t.data) for t in reader.tensors]
    except Exception as error:  # the parser meets damage as whatever the bytes make of it
        raise ModelError(
            f"{path}: not a readable GGUF file; it is damaged, cut short or of another kind "
            f"({type(error).__name__}: {error}). Fetch it again. {ways_on}"
        ) from error
    return metadata, stored


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape.tolist()))


def _config(path: Path, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Config:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{path}: the architecture is {architecture!r}; this engine runs 'llama' only. "
            f"{ALTERNATIVES}"
        )

    def number(key: str, default: float | None = None) -> float:
        value = metadata.get(f"llama.{key}", default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ModelError(
                f"{path}: the entry llama.{key} is {value!r}, a positive number is needed; the "
                f"file is damaged or incomplete. {ALTERNATIVES}"
            )
        return value

    for key, plain in (("expert_count", 0), ("rope.scaling.type", "none")):
        value = metadata.get(f"llama.{key}", plain)
        if value != plain:
            raise ModelError(
                f"{path}: llama.{key} is {value!r}, which this engine does not run. {ALTERNATIVES}"
            )
    width, n_heads = int(number("embedding_length")), int(number("attention.head_count"))
    head_dim = int(number("attention.key_length", width // n_heads))
    config = Config(
        n_layers=int(number("block_count")),
        width=width,
        n_ff=int(number("feed_forward_length")),
        n_heads=n_heads,
        n_kv_heads=int(number("attention.head_count_kv", n_heads)),
        head_dim=head_dim,
        n_vocab=shapes.get("token_embd.weight", (0,))[0],
        n_rot=int(number("rope.dimension_count", head_dim)),
        rope_theta=float(number("rope.freq_base", 10000.0)),
        norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        max_ctx=int(number("context_length")),
    )
    if config.n_heads % config.n_kv_heads or config.n_rot > head_dim or config.n_rot % 2:
        raise ModelError(f"{path}: these numbers do not fit together: {config}. {ALTERNATIVES}")
    if metadata.get("llama.attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{path}: keys and values of different head sizes are not supported. {ALTERNATIVES}"
        )
    return config


def as_tensor(path: Path, name: str, format_: str, shape: tuple[int, ...], data: Array) -> Tensor:
    """A tensor of a file, refused if its format is not supported."""
    supported = TILE_FORMATS if len(shape) == 2 else ("f32",)
    if format_ not in supported:
        raise ModelError(
            f"{path}: tensor {name} is stored as {format_}; supported here: "
            f"{', '.join(supported)}. Convert the file, or choose another. {ALTERNATIVES}"
        )
    if len(shape) == 1:
        return Tensor(name, format_, shape, np.asarray(data, np.float32).reshape(shape))
    return Tensor(name, format_, shape, data.view(np.uint8).reshape(shape[0], -1))


def _check(path: Path, config: Config, tensors: dict[str, Tensor]) -> None:
    required = required_shapes(config)
    for name, shape in required.items():
        if name not in tensors:
            raise ModelError(f"{path}: the tensor {name} is missing. {ALTERNATIVES}")
        if tensors[name].shape != shape:
            raise ModelError(
                f"{path}: the tensor {name} has shape {tensors[name].shape}, "
                f"the model's numbers ask for {shape}. {ALTERNATIVES}"
            )
    unknown = sorted(set(tensors) - set(required) - set(OPTIONAL_TENSORS))
    if unknown:
        raise ModelError(
            f"{path}: the tensors {', '.join(unknown[:4])}{' …' if len(unknown) > 4 else ''} "
            f"belong to no plain Llama block; ignoring them would give wrong tokens. {ALTERNATIVES}"
        )
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and tensor.shape[1] % 32:
            raise ModelError(
                f"{path}: tensor {name} has {tensor.shape[1]} columns, no multiple of 32. "
                f"{ALTERNATIVES}"
            )
