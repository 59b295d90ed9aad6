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
from memra_lowlevel.kernels.model import KvRows, TiledMatrix
from memra_lowlevel.runtime import Arena, Buffer, Device, Stream

from .fetch import smollm2_path
from .tiny import MADE_UP, made_up
from .tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from .weights import Config, Tensor, Weights, check_installed, matrix_names, read_gguf


class KvPlane(KvRows, Protocol):
    """What a layer needs of its keys and values; ``memra_lowlevel.cache.KvLayer`` is one."""

    def reserve(self, stream: Stream, n: int) -> None:
        """Refuse unless ``n`` rows fit behind the plane's length."""

    def attend(
        self, stream: Stream, q: Buffer, out: Buffer, *,
        kernel: str | None = None, programmatic: bool = False, settled: bool = False,
    ) -> None:  # fmt: skip
        """Attention of rows that were just appended, each over all rows up to its own."""


class Layer:
    """The weights of one Llama block.

    The products of q, k and v are one matrix, and one launch, where all are of one format.
    """

    def __init__(self, device: Device, stream: Stream, weights: Weights, index: int):
        names = {role: name for role, (name, _) in matrix_names(weights.config, index).items()}
        stored = {role: weights[name] for role, name in names.items()}

        def matrix(tensors: Sequence[Tensor]) -> TiledMatrix:
            rows = np.concatenate([t.rows for t in tensors])
            return TiledMatrix.upload(device, stream, rows, tensors[0].format)

        def vector(name: str) -> Buffer:
            return device.from_numpy(weights[f"blk.{index}.{name}.weight"].rows, stream)

        self.attn_norm, self.ffn_norm = vector("attn_norm"), vector("ffn_norm")
        qkv = [stored[role] for role in ("q", "k", "v")]
        groups = [qkv] if len({t.format for t in qkv}) == 1 else [[t] for t in qkv]
        self.qkv = [matrix(group) for group in groups]
        self.out, self.gate, self.up, self.down = (
            matrix([stored[role]]) for role in ("out", "gate", "up", "down")
        )


class Workspace:
    """All activations of up to ``n_rows_max`` rows, at fixed addresses in one arena.

    Attributes
    ----------
    tok_d : Buffer
        u32[n_rows_max], tokens of the rows.
    h, q, attended, gated, logits : Buffer
        f32. ``h`` is the residual stream, ``logits`` is [n_rows_max, n_vocab].
    best, best_ids, sums : Buffer
        f32, i32, f32 [n_rows_max, tiles of the output layer]: best logit of each tile, its token,
        and what a probability is made of.
    argmax_d : Buffer
        i32[n_rows_max], greedy token of each row.
    """

    def __init__(self, blocks: Blocks, n_rows_max: int):
        config = blocks.config
        n = self.n_rows_max = n_rows_max
        n_tiles = blocks.head.n_tiles
        columns = {
            "h": config.width,
            "q": config.q_dim,
            "attended": config.q_dim,
            "gated": config.n_ff,
            "logits": config.n_vocab,
            "best": n_tiles,
            "sums": n_tiles,
        }
        n_bytes = sum(4 * n * c + 256 for c in columns.values())
        n_bytes += 4 * n * n_tiles + 256 + 2 * (4 * n + 256)
        self.arena: Arena = blocks.device.arena(n_bytes, name="activations")
        for name, width in columns.items():
            setattr(self, name, self.arena.take((n * width,), np.float32, name=name))
        self.best_ids = self.arena.take((n * n_tiles,), np.int32, name="best_ids")
        self.tok_d = self.arena.take((n,), np.uint32, name="tok_d")
        self.argmax_d = self.arena.take((n,), np.int32, name="argmax_d")
        self.config = config

    h: Buffer
    q: Buffer
    attended: Buffer
    gated: Buffer
    logits: Buffer
    best: Buffer
    sums: Buffer

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()


class Blocks:
    """Llama blocks with an output layer behind them; all it does is launch kernels.

    Attributes
    ----------
    device : Device
    config : Config
    layers : list of Layer
    output_norm : Buffer
        f32[width]
    head : TiledMatrix
        [n_vocab, width], the output layer.
    angles : Buffer
        f32[n_positions, n_rot / 2, 2]
    attend_kernel : str or None
        Kernel of attention, one for all rows since bits differ; None for the library's choice.
    """

    device: Device
    config: Config
    layers: list[Layer]
    output_norm: Buffer
    head: TiledMatrix
    angles: Buffer
    attend_kernel: str | None

    def workspace(self, n_rows_max: int) -> Workspace:
        """Activations for up to ``n_rows_max`` rows."""
        return Workspace(self, n_rows_max)

    def project(
        self,
        stream: Stream,
        ws: Workspace,
        layer: Layer,
        plane: KvRows,
        n_rows: int,
        positions: Buffer,
        *,
        programmatic: bool,
    ) -> None:
        """Launch the beginning of a block: queries, and rows of keys and values behind a length."""
        config, column = self.config, 0
        for matrix in layer.qkv:
            ops.qkv_rows(
                stream, matrix, ws.h, layer.attn_norm, self.angles, positions, ws.q, plane, n_rows,
                config.norm_eps, head_dim=config.head_dim, q_dim=config.q_dim,
                kv_dim=config.kv_dim, column=column, programmatic=programmatic or column > 0,
            )  # fmt: skip
            column += matrix.n_out

    def run(
        self,
        stream: Stream,
        ws: Workspace,
        layers: Sequence[Layer],
        kv_layers: Sequence[KvPlane],
        n_rows: int,
        positions: Buffer,
        *,
        programmatic: bool,
    ) -> None:
        """Launch blocks over the rows in ``ws.h``; a row per input row goes to each plane."""
        eps, rows_q = self.config.norm_eps, (n_rows, self.config.n_heads, self.config.head_dim)
        q, attended = (b.view(0, rows_q, np.float32) for b in (ws.q, ws.attended))
        for layer, plane in zip(layers, kv_layers, strict=False):
            plane.reserve(stream, n_rows)
            self.project(stream, ws, layer, plane, n_rows, positions, programmatic=programmatic)
            # An ordinary launch began this pass: lengths, and the rows below, were there before.
            plane.attend(
                stream, q, attended, kernel=self.attend_kernel, programmatic=True, settled=True
            )
            ops.add_product(stream, layer.out, ws.attended, ws.h, n_rows, programmatic=True)
            ops.gate_up_rows(
                stream, layer.gate, layer.up, ws.h, layer.ffn_norm, ws.gated, n_rows, eps,
                programmatic=True,
            )  # fmt: skip
            ops.add_product(stream, layer.down, ws.gated, ws.h, n_rows, programmatic=True)
            programmatic = True  # behind a kernel of this pass, the next one may start early

    def choose(
        self,
        stream: Stream,
        ws: Workspace,
        n_rows: int,
        argmax: Buffer,
        probability: Buffer | None = None,
        *,
        programmatic: bool,
    ) -> None:
        """Launch the output layer: ``ws.logits``, and the greedy token of each row."""
        sums = None if probability is None else ws.sums
        ops.logits_rows(
            stream, self.head, ws.h, self.output_norm, ws.logits, ws.best, ws.best_ids, n_rows,
            self.config.norm_eps, sums=sums, programmatic=programmatic,
        )  # fmt: skip
        ops.pick_rows(
            stream, ws.best, ws.best_ids, argmax, n_rows, self.head.n_tiles, sums=sums,
            probability=probability, programmatic=True,
        )  # fmt: skip


class Model(Blocks):
    """A Llama model whose weights are on a device; see :meth:`load`.

    Attributes
    ----------
    name : str
    tokenizer : Tokenizer
    table : TiledMatrix
        [n_vocab, width], the embedding.
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
        self.table = TiledMatrix.upload(device, stream, table.rows, table.format)
        self.head = self.table
        if "output.weight" in weights.tensors:
            head = weights["output.weight"]
            self.head = TiledMatrix.upload(device, stream, head.rows, head.format)
        max_ctx = max_ctx or self.config.max_ctx
        self.angles = device.from_numpy(rope_table(self.config, max_ctx, weights), stream)
        # Over some hundred tokens of few channels one launch is faster than two on tensor cores.
        short = max_ctx <= 1024 and self.config.kv_dim <= 256
        self.attend_kernel = "simt" if short else None

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
            ``"smollm2"`` (fetched once), ``"tiny"`` or another of ``MADE_UP`` (made up, seeded),
            or the path of a GGUF file.
        max_ctx : int, optional
            Positions to make the rotation table for; those of the model if left out.

        Raises
        ------
        ModelError
            The file cannot be fetched or read, or is of an unsupported kind.
        """
        if name in MADE_UP:
            weights = made_up(name)
        else:
            if name == "smollm2":
                check_installed("gguf", "regex")
                name = str(smollm2_path())
            weights = read_gguf(name)
        return cls(device, stream, weights, max_ctx=max_ctx)

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
        layers = self.layers[first_layer:last_layer]
        if not 1 <= n_rows <= ws.n_rows_max or len(kv_layers) < len(layers):
            raise CapacityExceeded(
                f"forward: {n_rows} rows over {len(layers)} layers, but the workspace takes 1 to "
                f"{ws.n_rows_max} rows and {len(kv_layers)} planes were given"
            )
        positions = kv_layers[0].len_d if positions is None else positions
        if first_layer == 0:
            ops.embed_rows(stream, self.table, ws.tok_d if tokens is None else tokens, ws.h, n_rows)
        self.run(stream, ws, layers, kv_layers, n_rows, positions, programmatic=first_layer == 0)
        if head:
            self.choose(
                stream, ws, n_rows, ws.argmax_d if argmax is None else argmax, probability,
                programmatic=bool(layers) or first_layer == 0,
            )  # fmt: skip


def rope_table(config: Config, n_positions: int, weights: Weights) -> np.ndarray:
    """Cosines and sines of all positions, f32[n_positions, n_rot / 2, 2], from float64 angles."""
    frequency = config.rope_theta ** (-np.arange(0, config.n_rot, 2) / config.n_rot)
    if "rope_freqs.weight" in weights.tensors:
        frequency = frequency / weights["rope_freqs.weight"].rows.astype(np.float64)
    angle = np.arange(n_positions)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
