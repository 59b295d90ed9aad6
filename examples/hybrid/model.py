"""Weights made up from a seed, and one forward pass over latent and linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_lowlevel.cache import Cache, LatentKvCache, LayerPlan, ModelPlan, Recurrent
from memra_lowlevel.kernels import latent_rows
from memra_lowlevel.runtime import Buffer, Device, Stream

from .ops import Ops, linear

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Config:
    """Sizes. A large model of this kind has 34 linear and 11 latent layers."""

    kinds: str = "RRMRRM"  # R: linear attention, M: latent attention with an indexer
    width: int = 64
    n_ff: int = 96
    n_vocab: int = 256
    n_heads: int = 4
    d_nope: int = 16
    d_rope: int = 8
    d_v: int = 16
    kv_rank: int = 32
    index_heads: int = 2
    index_dim: int = 16
    pool: int = 4
    top_k: int = 16
    recur_heads: int = 2
    recur_dim: int = 32
    taps: int = 4

    @property
    def latent_width(self) -> int:
        """Elements of a latent row."""
        return self.kv_rank + self.d_rope

    @property
    def recur_width(self) -> int:
        """Channels of q, k and v of a linear layer: one k head, some v heads."""
        return (2 + self.recur_heads) * self.recur_dim

    def plan(self, n_layers: int | None = None) -> ModelPlan:
        """What the cache must hold."""
        state = self.recur_heads * self.recur_dim**2
        states = {
            "R": LayerPlan(Recurrent(self.recur_width, self.taps, state)),
            "M": LayerPlan(LatentKvCache(self.latent_width, 2 * self.index_dim)),
        }
        return ModelPlan(tuple(states[k] for k in self.kinds[:n_layers]), index_pool=self.pool)

    def shapes(self, kind: str) -> Shapes:
        """Weights of a layer; matrices as [heads, out, in]."""
        w, h = self.width, self.n_heads
        common: Shapes = {"norm": (w,), "ff_norm": (w,), "ff_up": (1, 2 * self.n_ff, w),
                          "ff_down": (1, w, self.n_ff)}  # fmt: skip
        if kind == "R":
            heads, d = self.recur_heads, self.recur_dim
            return common | {
                "qkv": (1, self.recur_width, w), "conv": (self.recur_width, self.taps),
                "alpha": (1, heads, w), "beta": (1, heads, w), "a": (heads,), "dt": (heads,),
                "out": (1, w, heads * d),
            }  # fmt: skip
        d = self.index_dim
        return common | {
            "q": (1, h * (self.d_nope + self.d_rope), w), "kv": (1, self.latent_width, w),
            "kv_norm": (self.kv_rank,), "wk_b": (h, self.kv_rank, self.d_nope),
            "wv_b": (h, self.d_v, self.kv_rank), "out": (1, w, h * self.d_v),
            "index_kg": (1, 2 * d, w), "index_q": (1, self.index_heads * d, w),
            "index_w": (1, self.index_heads, w), "k_norm": (d,), "k_bias": (d,),
            "ape": (self.pool, d),
        }  # fmt: skip


class HybridModel:
    """The model on a device; all weights f32.

    Parameters
    ----------
    device : Device
    stream : Stream
    max_ctx : int
        Positions that are rotated.
    seed : int
    """

    def __init__(
        self, device: Device, stream: Stream, max_ctx: int, config: Config | None = None,
        seed: int = 4,
    ):  # fmt: skip
        self.device, self.config = device, config or Config()
        self.ops = Ops(device)
        c, rng = self.config, np.random.default_rng(seed)

        def make(name: str, shape: tuple[int, ...], gain: float) -> Buffer:
            x = rng.standard_normal(shape, dtype=np.float32)
            if "norm" in name:
                x = 1 + x / 10
            elif len(shape) == 3:
                x *= gain / shape[2] ** 0.5
            elif name == "a":
                x = -np.abs(x) / 4
            return device.from_numpy(np.ascontiguousarray(x, np.float32), stream)

        self.layers: list[dict[str, Buffer]] = []
        for il, kind in enumerate(c.kinds):
            # Later layers change the stream less, so leaving early often guesses right.
            small = 1.0 if il < 3 else 0.12
            self.layers.append(
                {
                    name: make(name, shape, small if name in ("out", "ff_down") else 1.0)
                    for name, shape in c.shapes(kind).items()
                }
            )
        self.table = device.from_numpy(
            rng.standard_normal((c.n_vocab, c.width), dtype=np.float32), stream
        )
        self.head = make("head", (1, c.n_vocab, c.width), 1.0)
        self.head_norm = make("norm", (c.width,), 1.0)
        turn = np.outer(np.arange(max_ctx), 10000.0 ** (-np.arange(0, c.d_rope, 2) / c.d_rope))
        angles = np.stack([np.cos(turn), np.sin(turn)], -1).reshape(max_ctx, c.d_rope)
        self.angles = device.from_numpy(angles.astype(np.float32), stream)

    def workspace(self, n_rows: int) -> Workspace:
        """Activations of up to ``n_rows`` rows."""
        return Workspace(self, n_rows)

    def forward(
        self, stream: Stream, ws: Workspace, cache: Cache, n: int, *, tokens: Buffer,
        argmax: Buffer | None,
    ) -> None:  # fmt: skip
        """Launch the layers that ``cache`` has planes of over n rows; moves no counter."""
        ops, c, h, x, y = self.ops, self.config, ws("h", n), ws("x", n), ws("y", n)
        ops(stream, "embed", n, self.table, _signed(tokens), h, c.width)
        for il, w in enumerate(self.layers[: len(cache.recur)]):
            ops(stream, "rms_rows", n, h, w["norm"], x, c.width)
            if c.kinds[il] == "R":
                self._linear_attention(stream, ws, cache, il, n)
            else:
                self._latent_attention(stream, ws, cache, il, n)
            ops(stream, "add_rows", n, h, y, c.width)
            ops(stream, "rms_rows", n, h, w["ff_norm"], x, c.width)
            linear(stream, x, w["ff_up"], ws("ff_both", n))
            ops(stream, "gate_rows", n, ws("ff_both", n), ws("ff", n), c.n_ff)
            linear(stream, ws("ff", n), w["ff_down"], y)
            ops(stream, "add_rows", n, h, y, c.width)
        if argmax is not None:
            ops(stream, "rms_rows", n, h, self.head_norm, x, c.width)
            linear(stream, x, self.head, ws("logits", n))
            ops(stream, "greedy_rows", n, ws("logits", n), _signed(argmax), c.n_vocab)

    def _linear_attention(
        self, stream: Stream, ws: Workspace, cache: Cache, il: int, n: int
    ) -> None:
        c, w, layer, x = self.config, self.layers[il], cache.recur[il], ws("x", n)
        assert layer is not None
        for name in ("qkv", "alpha", "beta"):
            linear(stream, x, w[name], ws(name, n))
        out = ws("recur", n)
        layer.step(
            stream, ws("qkv", n), w["conv"], ws("alpha", n), w["a"], w["dt"], ws("beta", n),
            out.view(0, (n, c.recur_heads, c.recur_dim), np.float32),
        )  # fmt: skip
        linear(stream, out, w["out"], ws("y", n))

    def _latent_attention(
        self, stream: Stream, ws: Workspace, cache: Cache, il: int, n: int
    ) -> None:
        c, w, layer, x = self.config, self.layers[il], cache.latent[il], ws("x", n)
        assert layer is not None
        for name in ("q", "kv", "index_kg", "index_q", "index_w"):
            linear(stream, x, w[name], ws(name, n))
        d = c.index_dim
        self.ops(stream, "norm_front", n, ws("index_kg", n), w["k_norm"], w["k_bias"], d, 2 * d)
        layer.append(
            stream, ws("kv", n), weight=w["kv_norm"], angles=self.angles,
            index=ws("index_kg", n), ape=w["ape"],
        )  # fmt: skip
        heads = (n, c.n_heads)
        q = ws("q", n).view(0, (*heads, c.d_nope + c.d_rope), np.float32)
        absorbed = ws("absorbed", n).view(0, (*heads, c.latent_width), np.float32)
        latent = ws("latent", n).view(0, (*heads, c.kv_rank), np.float32)
        values = ws("values", n)
        latent_rows.project(stream, q, w["wk_b"], absorbed)
        latent_rows.rotate(stream, q, absorbed, layer.len_d, d_rope=c.d_rope, angles=self.angles)
        lists = ws.lists.view(0, (n, ws.lists.shape[1]), np.int32)
        index_q = ws("index_q", n).view(0, (n, c.index_heads, d), np.float32)
        layer.select(stream, index_q, ws("index_w", n), lists, top_k=c.top_k)
        scale = (c.d_nope + c.d_rope) ** -0.5
        layer.attend(stream, absorbed, latent, scale=scale, indices=lists)
        latent_rows.project(stream, latent, w["wv_b"], values.view(0, (*heads, c.d_v), np.float32))
        linear(stream, values, w["out"], ws("y", n))


def _signed(tokens: Buffer) -> Buffer:
    return tokens.view(0, tokens.shape, np.int32)


class Workspace:
    """All activations of up to ``n_rows`` rows, at fixed addresses in one arena."""

    def __init__(self, model: HybridModel, n_rows: int):
        c, self.n_rows = model.config, n_rows
        widths = {
            "h": c.width, "x": c.width, "y": c.width, "ff_both": 2 * c.n_ff, "ff": c.n_ff,
            "logits": c.n_vocab, "qkv": c.recur_width, "alpha": c.recur_heads,
            "beta": c.recur_heads, "recur": c.recur_heads * c.recur_dim,
            "q": c.n_heads * (c.d_nope + c.d_rope), "kv": c.latent_width,
            "index_kg": 2 * c.index_dim, "index_q": c.index_heads * c.index_dim,
            "index_w": c.index_heads, "absorbed": c.n_heads * c.latent_width,
            "latent": c.n_heads * c.kv_rank, "values": c.n_heads * c.d_v,
        }  # fmt: skip
        listed = c.top_k + c.pool - 1
        n_bytes = sum(4 * n_rows * w + 256 for w in (*widths.values(), listed, 1, 1))
        self._arena = model.device.arena(n_bytes, name="activations")
        take = self._arena.take
        self._rows = {k: take((n_rows, w), np.float32, name=k) for k, w in widths.items()}
        self.lists: Buffer = take((n_rows, listed), np.int32, name="lists")
        self.tok_d: Buffer = take((n_rows,), np.int32, name="tok_d")
        self.argmax_d: Buffer = take((n_rows,), np.int32, name="argmax_d")

    def __call__(self, name: str, n: int) -> Buffer:
        """The first n rows of an activation."""
        rows = self._rows[name]
        return rows.view(0, (n, rows.shape[1]), np.float32)

    def put(self, stream: Stream, tokens: Sequence[int]) -> Buffer:
        """Bring tokens to the device."""
        view = self.tok_d.view(0, (len(tokens),), np.int32)
        view.copy_from(stream, np.array(tokens, np.int32))
        return view

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()
