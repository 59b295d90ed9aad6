"""The example engine: its kernels one by one, a captured token, a round of speculation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import Cache, KvLayer, LayerPlan, ModelPlan
from ..demo import engine
from ..errors import MemraError
from ..kernels import model as ops
from ..speculative import ChainIo, DeviceLoop, SpecRound, early_exit_chain
from .clock import host_us, n_sets
from .result import Row
from .texts import measure_texts

if TYPE_CHECKING:
    from ..graph import GraphExec
    from ..runtime import Buffer
    from .run import Run

__all__ = ["measure_model", "measure_round"]

TOKEN_GOAL_US = 350.0
"""A captured token of the SmolLM2 shape, whatever its weights are stored in."""

K = 4
"""Drafts of a round."""

_CONTEXT = 64
_MAX_CTX = 1024
_BURST = 16


def measure_model(run: Run) -> None:
    """Time each kernel of a block over rotating weights, then a captured token of each model."""
    for format in ("q4_1",) if run.small else ("q4_1", "f16"):
        _Nodes(run, format).measure()
    for name in _models(run):
        with _Opened(run, name) as opened:
            _token(run, opened)


def measure_round(run: Run) -> None:
    """Time rounds with an early exit from the first half of the layers, and with a trained head."""
    for name in _models(run):
        with _Opened(run, name) as opened:
            _round(run, opened)
            if run.small or name == "smollm2":  # what a head is trained for, or stands for it
                measure_texts(run, name, opened.model)


def _models(run: Run) -> tuple[str, ...]:
    """SmolLM2 itself where its file was fetched before; its shape, made up, where not."""
    if run.small:
        return ("tiny",)
    if engine().fetch.fetched_path() is not None:
        return ("tiny", "smollm2", "smollm2-shape-f16")
    run.notes.append("SmolLM2 itself: its file was not fetched; a made-up model of its shape is")
    return ("tiny", "smollm2-shape", "smollm2-shape-f16")


# -- kernels --------------------------------------------------------------------------------------
class _Nodes:
    """The kernels of one pass over one row, back to back, each over rotating weights."""

    def __init__(self, run: Run, format: str):
        tiny = engine().tiny
        self.run, self.format, self.random_rows = run, format, tiny.random_rows
        self.config = tiny.TINY if run.small else tiny.SMOLLM2_135M
        self.random = np.random.default_rng(5)
        self.device, self.stream = run.device, run.stream
        c = self.config
        self.row = self._put(self.random.standard_normal(max(c.width, c.n_ff)))
        self.gain = self._put(np.ones(max(c.width, c.n_ff)))
        self.out = self._put(np.zeros(max(c.n_ff, c.q_dim)))
        angles = np.ones((_MAX_CTX, c.n_rot // 2, 2), np.float32)
        self.angles = self.device.from_numpy(angles, self.stream)

    def _put(self, values: Any) -> Buffer:
        return self.device.from_numpy(np.asarray(values, np.float32), self.stream)

    def measure(self) -> None:
        c, s, f = self.config, self.stream, self.format
        layer = KvLayer.allocate(self.device, 64, c.n_kv_heads, c.head_dim, check=False)
        position = self.device.zeros(1, np.int32, s)

        def qkv(m: ops.TiledMatrix, early: bool) -> None:
            ops.qkv_rows(
                s, m, self.row, self.gain, self.angles, position, self.out, layer, 1, c.norm_eps,
                head_dim=c.head_dim, q_dim=c.q_dim, kv_dim=c.kv_dim, programmatic=early,
            )  # fmt: skip

        def add(m: ops.TiledMatrix, early: bool) -> None:
            ops.add_product(s, m, self.row, self.out, 1, programmatic=early)

        def gated(m: ops.TiledMatrix, early: bool) -> None:
            half = m.tiles.n_bytes // 2
            gate, up = (
                ops.TiledMatrix(f, c.n_ff, c.width, m.tiles.view(at, (half,), np.uint8))
                for at in (0, half)
            )
            ops.gate_up_rows(
                s, gate, up, self.row, self.gain, self.out, 1, c.norm_eps, programmatic=early
            )

        self._node("qkv", f, c.q_dim + 2 * c.kv_dim, c.width, qkv)
        self._node("out", f, c.width, c.q_dim, add)
        self._node("gate and up", f, 2 * c.n_ff, c.width, gated)
        self._node("down", f, c.width, c.n_ff, add)
        layer.close()
        position.close()
        self._head("q8_0" if f == "q4_1" else f)
        for buffer in (self.row, self.gain, self.out, self.angles):
            buffer.close()

    def _head(self, format: str) -> None:
        c, s = self.config, self.stream
        n_tiles = -(-c.n_vocab // 32)
        logits, best = self._put(np.zeros(c.n_vocab)), self._put(np.zeros(n_tiles))
        ids = self.device.from_numpy(np.arange(n_tiles, dtype=np.int32), s)
        token = self.device.zeros(1, np.int32, s)

        def head(m: ops.TiledMatrix, early: bool) -> None:
            ops.logits_rows(
                s, m, self.row, self.gain, logits, best, ids, 1, c.norm_eps, programmatic=early
            )

        self._node("logits", format, c.n_vocab, c.width, head)
        ops.pick_rows(s, best, ids, token, 1, n_tiles)
        s.sync()
        for early in self._edges():
            row = Row(
                f"node token of {n_tiles} tiles{_edge(early)}", "us",
                self.run.timed([
                    lambda early=early: ops.pick_rows(  # type: ignore[misc]
                        s, best, ids, token, 1, n_tiles, programmatic=early
                    )
                ]),
            )  # fmt: skip
            if self.format == "q4_1":
                self.run.add(row)
        for buffer in (logits, best, ids, token):
            buffer.close()

    def _edges(self) -> tuple[bool, ...]:
        early = self.device.kind == "cuda" and int(self.device.arch[3:]) >= 90
        return (True, False) if early else (False,)

    def _node(
        self,
        name: str,
        format: str,
        n_out: int,
        n_in: int,
        launch: Callable[[ops.TiledMatrix, bool], None],
    ) -> None:
        rows = self.random_rows(self.random, (n_out, n_in), format, n_in**-0.5)
        one = ops.TiledMatrix.upload(self.device, self.stream, rows, format)
        n, n_bytes = n_sets(one.tiles.n_bytes, small=self.run.small), one.tiles.n_bytes
        pool = self.device.alloc(n * n_bytes, self.stream, name=f"{n} of {name}")
        sets = []
        for i in range(n):
            view = pool.view(i * n_bytes, (n_bytes,), np.uint8)
            view.copy_from(self.stream, one.tiles)
            sets.append(ops.TiledMatrix(format, n_out, n_in, view))
        launch(one, False)
        self.stream.sync()
        for early in self._edges():
            samples = self.run.timed(
                [lambda m=m, early=early: launch(m, early) for m in sets]  # type: ignore[misc]
            )
            floor = None if self.run.small else self.run.ceilings.read_us(n_bytes)
            row = Row(f"node {name} {n_out}x{n_in} {format}{_edge(early)}", "us", samples, floor)
            row.extra["bytes"] = n_bytes
            self.run.add(row)
        one.tiles.close()
        pool.close()


def _edge(early: bool) -> str:
    return ", starts early" if early else ""


# -- a token --------------------------------------------------------------------------------------
class _Opened:
    """A loaded model with a primed session."""

    def __init__(self, run: Run, name: str):
        self.run, self.name, self.smollm2 = run, name, engine()
        self.model: Any = None
        self.session: Any = None

    def __enter__(self) -> _Opened:
        stream = self.run.stream
        self.model = self.smollm2.Model.load(self.run.device, stream, self.name, max_ctx=_MAX_CTX)
        self.session = self.smollm2.Session.allocate(self.model, stream, _MAX_CTX, n_rows_max=K + 1)
        random = np.random.default_rng(3)
        self.prompt = [int(t) for t in random.integers(3, 256, _CONTEXT)]
        self.session.prime(stream, self.prompt[:-1])
        stream.sync()
        return self

    def __exit__(self, *error: object) -> None:
        self.run.stream.sync()
        self.session.close()
        for layer in self.model.layers:
            for matrix in (*layer.qkv, layer.out, layer.gate, layer.up, layer.down):
                matrix.tiles.close()
        self.model.table.tiles.close()

    @property
    def shaped(self) -> bool:
        """Whether it has the shape of SmolLM2."""
        return bool(self.model.config.width == 576)

    @property
    def floor_us(self) -> float | None:
        """Time that one read of the weights takes; those of a tiny model lie in the cache."""
        if self.run.small or not self.shaped:
            return None
        return self.run.ceilings.read_us(self.weight_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        matrices = [self.model.head]
        for layer in self.model.layers:
            matrices += [*layer.qkv, layer.out, layer.gate, layer.up, layer.down]
        return sum(int(m.tiles.n_bytes) for m in matrices)


def _token(run: Run, opened: _Opened) -> None:
    stream, planes, name = run.stream, opened.session.planes, opened.name
    step = opened.smollm2.GreedyStep(opened.session, stream)
    step.start(stream, opened.prompt[-1])
    length = planes.len

    def settle() -> None:
        stream.sync()
        planes.set_len(stream, length)

    report = step.exec.describe()
    row = Row(
        f"token {name}", "us", _launches_us(run, step.exec, settle), opened.floor_us,
        goal=TOKEN_GOAL_US if opened.shaped else None,
    )  # fmt: skip
    row.extra.update(
        bytes=opened.weight_bytes, kernel_nodes=report.kernel_nodes, context=_CONTEXT,
        starts_early=sum(f.code == "programmatic-edge" for f in report.findings),
    )  # fmt: skip
    run.add(row)
    n_calls, n_samples = (2, 3) if run.small else (10, 21)
    samples = host_us(lambda: step.exec.launch(stream), settle, n_calls, n_samples)
    run.add(Row(f"token {name}: host, per replay", "us", samples))
    samples = host_us(lambda: step(stream), settle, n_calls, n_samples)
    row = Row(f"token {name}: replay, sync, read", "us", samples)
    row.extra["tokens_per_s"] = round(1e6 / row.median, 1)
    run.add(row)
    settle()
    step.close()
    _passes(run, opened, settle)


def _passes(run: Run, opened: _Opened, settle: Callable[[], None]) -> None:
    """Time passes over several rows, as a verification makes them, beside that over one."""
    stream, name, session = run.stream, opened.name, opened.session
    rows = np.array(opened.prompt[: K + 1], np.uint32)
    one: Row | None = None
    with (
        run.device.from_numpy(rows, stream) as tokens,
        run.device.zeros(K + 1, np.uint32, stream) as chosen,
    ):
        for n in (1, 4) if run.small else range(1, K + 2):
            session.planes.prepare(stream, n)
            session.forward(stream, tokens, n, chosen)  # every kernel loaded
            with stream.capture(f"pass of {n}") as graph:
                session.forward(stream, tokens, n, chosen)
            with graph.instantiate() as exec_:
                samples = _launches_us(run, exec_, settle)
            row = Row(f"pass {name}, {n} row{'s' * (n > 1)}", "us", samples, opened.floor_us)
            if one is not None:
                row.extra["over_one_row"] = round(row.median / one.median, 3)
                row.baseline = one.what if row.floor is None else None
            one = one or row
            run.add(row)


def _launches_us(
    run: Run, exec_: GraphExec, settle: Callable[[], None], burst: int = _BURST
) -> list[float]:
    """Device time per launch of a graph that feeds itself, in bursts."""
    samples = []
    burst, n_samples = (1, 3) if run.small else (burst, 15)
    with run.device.event(timing=True) as begin, run.device.event(timing=True) as end:
        for i in range(n_samples + 2):
            settle()
            run.stream.record(begin)
            for _ in range(burst):
                exec_.launch(run.stream)
            run.stream.record(end)
            run.stream.sync()
            if i >= 2:
                samples.append(end.elapsed_ms(begin) * 1e3 / burst)
    settle()
    return samples


# -- a round --------------------------------------------------------------------------------------
@dataclass
class _Draft:
    planes: Cache
    workspace: Any
    io: ChainIo
    chain: Any

    def close(self) -> None:
        self.chain.close()
        self.io.close()
        self.planes.close()
        self.workspace.close()


def _draft(run: Run, opened: _Opened) -> _Draft:
    model, stream = opened.model, run.stream
    config = model.config
    n_layers = config.n_layers // 2
    layers: tuple[LayerPlan, ...] = config.plan.layers[:n_layers]
    planes = Cache(run.device, stream, ModelPlan(layers), _MAX_CTX, name="draft")
    workspace, kv = model.workspace(16), list(planes.planes())

    def first_layers(stream: Any, n_rows: int, **buffers: Any) -> None:
        head = buffers["argmax"] is not None
        model.forward(stream, workspace, kv, n_rows, 0, n_layers, head, **buffers)

    io = ChainIo(run.device, config.width, K, config.n_vocab)
    chain = early_exit_chain(stream, first_layers, io, planes, K, tokens=workspace.tok_d)
    return _Draft(planes, workspace, io, chain)


def _round(run: Run, opened: _Opened) -> None:
    stream, name = run.stream, opened.name
    draft = _draft(run, opened)
    draft.chain.fill(stream, opened.prompt[:-1])
    rounds = SpecRound(opened.session, draft.chain, K, opened.prompt)
    n_rounds = 4 if run.small else 40
    for _ in range(2):
        rounds.step(stream)
    begun = list(rounds.tokens)
    samples = []
    for _ in range(n_rounds):
        start = time.perf_counter_ns()
        rounds.step(stream)
        samples.append((time.perf_counter_ns() - start) / 1e3)
    committed = list(rounds.tokens)
    n_tokens = len(committed) - len(begun)
    row = Row(f"round {name}, {K} drafts", "us", samples)
    row.extra.update(
        tokens_per_s=round(n_tokens / sum(samples) * 1e6, 1),
        tokens_per_round=round(n_tokens / n_rounds, 3),
    )
    run.add(row)

    def settle() -> None:
        stream.sync()
        draft.planes.set_len(stream, _CONTEXT)
        draft.io.begin(stream, [5], _CONTEXT)

    run.add(Row(f"draft step {name}", "us", _launches_us(run, draft.chain.exec, settle, burst=K)))
    calls = (2, 3) if run.small else (K, 21)
    samples = host_us(lambda: draft.chain.exec.launch(stream), settle, *calls)
    run.add(Row(f"draft step {name}: host, per replay", "us", samples))
    rounds.close()
    _loop(run, opened, draft, begun, committed)
    draft.close()


def _loop(run: Run, opened: _Opened, draft: _Draft, begun: list[int], committed: list[int]) -> None:
    """Time the same rounds, from the same tokens on, without the host between them."""
    stream, name = run.stream, opened.name
    n = len(committed) - len(begun)
    loop = DeviceLoop(stream, opened.session, draft.chain, K, n_max=n)
    samples = []
    for i in range(2 if run.small else 5):
        stream.sync()
        opened.session.planes.set_len(stream, len(begun) - 1)
        draft.chain.rewind(stream, min(draft.planes.len, len(begun) - 1))
        stream.sync()
        start = time.perf_counter_ns()
        result = loop.run(stream, begun, n)
        if i:  # the first launch uploads the graph
            samples.append((time.perf_counter_ns() - start) / 1e3 / len(result.accepted))
        if list(result.tokens[:n]) != committed[len(begun) :]:
            raise MemraError(f"round {name}: the device committed other tokens than the host")
    row = Row(f"round {name}, {K} drafts, on the device", "us", samples)
    row.extra["tokens_per_round"] = round(loop.stats.tokens_per_target_pass, 3)
    row.extra["tokens_per_s"] = round(row.extra["tokens_per_round"] / row.median * 1e6, 1)
    run.add(row)
    loop.close()
