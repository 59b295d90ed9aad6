"""A Llama model on a device: weights, activations at fixed addresses, and one forward pass.

``forward`` only launches kernels, so the same call runs eagerly or inside a capture. Lengths,
positions and tokens are read on the device; what the host passes is the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from memra_lowlevel.errors import CapacityExceeded, ModelError
from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model import TiledMatrix
from memra_lowlevel.kernels.model_tiles import chunk_blocks
from memra_lowlevel.runtime import Arena, Buffer, Device, Stream

from .fetch import smollm2_path
from .tiny import tiny_weights
from .tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from .weights import Config, Tensor, Weights, matrix_names, read_gguf


class KvPlane(Protocol):
    """What a layer needs of its keys and values; ``memra_lowlevel.cache.KvLayer`` is one."""

    len_d: Buffer

    def append(self, stream: Stream, k: Buffer, v: Buffer) -> None:
        """Write rows behind the plane's length, which stays as it is."""

    def attend(self, stream: Stream, q: Buffer, out: Buffer) -> None:
        """Attention of rows that were just appended, each over all rows up to its own."""


class Projection:
    """One product made of several matrices with the same input: their outputs side by side.

    Where all are of one format they are one matrix and one launch; else a launch each.
    """

    def __init__(self, device: Device, stream: Stream, tensors: Sequence[Tensor]):
        self.n_out = sum(t.shape[0] for t in tensors)
        self.n_in = tensors[0].shape[1]
        chunk = chunk_blocks(self.n_out, self.n_in)
        groups = [[t] for t in tensors]
        if len({t.format for t in tensors}) == 1:
            groups = [list(tensors)]
        self.matrices = [
            TiledMatrix.upload(
                device, stream, np.concatenate([t.rows for t in g]), g[0].format, chunk=chunk
            )
            for g in groups
        ]
        self.n_parts = self.matrices[0].n_parts

    def __call__(self, stream: Stream, x: Buffer, parts: Buffer, n_rows: int) -> None:
        column = 0
        for matrix in self.matrices:
            ops.matmul_rows(stream, matrix, x, parts, n_rows, width=self.n_out, column=column)
            column += matrix.n_out


class Layer:
    """The weights of one Llama block."""

    def __init__(self, device: Device, stream: Stream, weights: Weights, index: int):
        names = {role: name for role, (name, _) in matrix_names(weights.config, index).items()}

        def project(*roles: str) -> Projection:
            return Projection(device, stream, [weights[names[role]] for role in roles])

        def vector(name: str) -> Buffer:
            return device.from_numpy(weights[f"blk.{index}.{name}.weight"].rows, stream)

        self.attn_norm, self.ffn_norm = vector("attn_norm"), vector("ffn_norm")
        self.qkv, self.out = project("q", "k", "v"), project("out")
        self.gate_up, self.down = project("gate", "up"), project("down")


class Workspace:
    """All activations of up to ``n_rows_max`` rows, at fixed addresses in one arena.

    Attributes
    ----------
    tok_d : Buffer
        u32[n_rows_max], tokens of the rows.
    h, x, q, k, v, attended, gated, parts, logits : Buffer
        f32. ``h`` is the residual stream, ``logits`` is [n_rows_max, n_vocab].
    argmax_d : Buffer
        i32[n_rows_max], greedy token of each row.
    """

    def __init__(self, model: Model, n_rows_max: int):
        config, layers = model.config, model.layers
        n = self.n_rows_max = n_rows_max
        projections = [p for x in layers for p in (x.qkv, x.out, x.gate_up, x.down)]
        columns = {
            "h": config.width,
            "x": config.width,
            "q": config.q_dim,
            "k": config.kv_dim,
            "v": config.kv_dim,
            "attended": config.q_dim,
            "gated": config.n_ff,
            "parts": max(p.n_parts * p.n_out for p in projections),
            "logits": model.head.n_parts * config.n_vocab,
        }
        n_bytes = sum(4 * n * c + 256 for c in columns.values()) + 2 * (4 * n + 256)
        self.arena: Arena = model.device.arena(n_bytes, name="activations")
        for name, width in columns.items():
            setattr(self, name, self.arena.take((n * width,), np.float32, name=name))
        self.tok_d = self.arena.take((n,), np.uint32, name="tok_d")
        self.argmax_d = self.arena.take((n,), np.int32, name="argmax_d")
        self.config = config

    h: Buffer
    x: Buffer
    q: Buffer
    k: Buffer
    v: Buffer
    attended: Buffer
    gated: Buffer
    parts: Buffer
    logits: Buffer

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()


class Model:
    """A Llama model whose weights are on a device; see :meth:`load`.

    Attributes
    ----------
    name : str
    config : Config
    tokenizer : Tokenizer
    device : Device
    layers : list of Layer
    """

    def __init__(
        self, device: Device, stream: Stream, weights: Weights, *, max_ctx: int | None = None
    ):
        self.device, self.weights, self.name = device, weights, weights.name
        self.config: Config = weights.config
        self.tokenizer: Tokenizer = (
            BpeTokenizer(weights.vocabulary)
            if weights.vocabulary
            else ByteTokenizer(self.config.n_vocab)
        )
        if self.tokenizer.n_vocab != self.config.n_vocab:
            raise ModelError(
                f"{self.name}: {self.tokenizer.n_vocab} tokens but {self.config.n_vocab} rows in "
                "token_embd.weight; the file is damaged or was cut. Fetch it again."
            )
        ops.prepare(device, {t.format for t in weights.tensors.values() if len(t.shape) == 2})
        self.layers = [Layer(device, stream, weights, i) for i in range(self.config.n_layers)]
        self.output_norm = device.from_numpy(weights["output_norm.weight"].rows, stream)
        table = weights["token_embd.weight"]
        # one chunk, so that the product is the logits themselves
        whole = self.config.width // 32
        self.table = TiledMatrix.upload(device, stream, table.rows, table.format, chunk=whole)
        self.head = self.table
        if "output.weight" in weights.tensors:
            head = weights["output.weight"]
            self.head = TiledMatrix.upload(device, stream, head.rows, head.format, chunk=whole)
        self.angles = device.from_numpy(
            rope_table(self.config, max_ctx or self.config.max_ctx, weights), stream
        )

    @classmethod
    def load(
        cls, device: Device, stream: Stream, name: str = "smollm2", *, max_ctx: int | None = None
    ) -> Model:
        """Load a model.

        Parameters
        ----------
        device : Device
        stream : Stream
            Weights are copied on it.
        name : str
            ``"smollm2"`` (fetched once), ``"tiny"`` (made up, seeded), or the path of a GGUF file.
        max_ctx : int, optional
            Positions to make the rotation table for; those of the model if left out.

        Raises
        ------
        ModelError
            The file cannot be fetched or read, or is of an unsupported kind.
        """
        if name == "tiny":
            weights = tiny_weights()
        else:
            weights = read_gguf(smollm2_path() if name == "smollm2" else name)
        return cls(device, stream, weights, max_ctx=max_ctx)

    def workspace(self, n_rows_max: int) -> Workspace:
        """Activations for up to ``n_rows_max`` rows."""
        return Workspace(self, n_rows_max)

    def forward(
        self,
        stream: Stream,
        ws: Workspace,
        kv_layers: Sequence[KvPlane],
        n_rows: int,
        first_layer: int = 0,
        last_layer: int | None = None,
        head: bool = True,
        *,
        tokens: Buffer | None = None,
        positions: Buffer | None = None,
        argmax: Buffer | None = None,
        probability: Buffer | None = None,
    ) -> None:
        """Launch layers ``first_layer`` … ``last_layer - 1`` over rows.

        Appends a row per input row to each plane and moves no counter. Nothing is allocated and
        nothing waits, so the call may be captured.

        Parameters
        ----------
        ws : Workspace
        kv_layers : sequence of KvPlane
            One per layer that is run, the first for ``first_layer``.
        n_rows : int
        first_layer, last_layer : int
            ``first_layer = 0`` embeds tokens first; a later one goes on from ``ws.h``.
        head : bool
            Also the output layer: ``ws.logits`` and the greedy tokens. With ``last_layer`` short
            of the model this is its early exit.
        tokens : Buffer
            u32 or i32 [≥ n_rows]; ``ws.tok_d`` if left out.
        positions : Buffer
            i32[1], position of row 0; the length of the first plane if left out.
        argmax : Buffer
            i32 or u32 [≥ n_rows], where greedy tokens go; ``ws.argmax_d`` if left out.
        probability : Buffer
            f32[≥ n_rows], where probabilities of these go, if given.
        """
        config, eps = self.config, self.config.norm_eps
        layers = self.layers[first_layer:last_layer]
        if not 1 <= n_rows <= ws.n_rows_max or len(kv_layers) < len(layers):
            raise CapacityExceeded(
                f"forward: {n_rows} rows over {len(layers)} layers, but the workspace takes 1 to "
                f"{ws.n_rows_max} rows and {len(kv_layers)} planes were given"
            )
        positions = kv_layers[0].len_d if positions is None else positions
        rows_q = (n_rows, config.n_heads, config.head_dim)
        q, attended = (b.view(0, rows_q, np.float32) for b in (ws.q, ws.attended))
        k, v = (b.view(0, (n_rows, config.kv_dim), np.float32) for b in (ws.k, ws.v))

        if first_layer == 0:
            ops.embed_rows(stream, self.table, ws.tok_d if tokens is None else tokens, ws.h, n_rows)
        pending: Buffer | None = None  # a product that the next norm adds to the residual stream
        n_parts = 0
        for layer, plane in zip(layers, kv_layers, strict=False):
            ops.add_norm(stream, ws.h, pending, n_parts, layer.attn_norm, ws.x, n_rows, eps)
            layer.qkv(stream, ws.x, ws.parts, n_rows)
            ops.split_rope(
                stream, ws.parts, layer.qkv.n_parts, self.angles, positions, ws.q, ws.k, ws.v,
                n_rows, head_dim=config.head_dim, q_dim=config.q_dim, kv_dim=config.kv_dim,
            )  # fmt: skip
            plane.append(stream, k, v)
            plane.attend(stream, q, attended)
            layer.out(stream, ws.attended, ws.parts, n_rows)
            ops.add_norm(
                stream, ws.h, ws.parts, layer.out.n_parts, layer.ffn_norm, ws.x, n_rows, eps
            )
            layer.gate_up(stream, ws.x, ws.parts, n_rows)
            ops.swiglu(stream, ws.parts, layer.gate_up.n_parts, ws.gated, n_rows, config.n_ff)
            layer.down(stream, ws.gated, ws.parts, n_rows)
            pending, n_parts = ws.parts, layer.down.n_parts
        ops.add_norm(stream, ws.h, pending, n_parts, self.output_norm, ws.x, n_rows, eps)
        if head:
            ops.matmul_rows(stream, self.head, ws.x, ws.logits, n_rows)
            ops.argmax_rows(
                stream, ws.logits, ws.argmax_d if argmax is None else argmax, n_rows,
                config.n_vocab, probability=probability,
            )  # fmt: skip


def rope_table(config: Config, n_positions: int, weights: Weights) -> np.ndarray:
    """Cosines and sines of all positions, f32[n_positions, n_rot / 2, 2], from float64 angles."""
    frequency = config.rope_theta ** (-np.arange(0, config.n_rot, 2) / config.n_rot)
    if "rope_freqs.weight" in weights.tensors:
        frequency = frequency / weights["rope_freqs.weight"].rows.astype(np.float64)
    angle = np.arange(n_positions)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
