"""``memra-lowlevel demo``: speculative decoding of a real model with a captured draft chain.

The text is generated twice, by code that shares no call: plain greedy decoding, and rounds of
speculation. ``exact`` compares the two. All counts come from the driver's call table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .cache import (
    PRIME_CHUNK_MAX_TOKENS,
    SWA_REWIND_SLACK_ROWS,
    Cache,
    LayerPlan,
    ModelPlan,
    SlidingKvCache,
)
from .errors import MemraError, ModelError
from .runtime import Device, Stream
from .speculative import (
    HOST_WRITE_CALLS,
    NODE_UPDATE_CALLS,
    CallMeter,
    ChainIo,
    DraftChain,
    NgramDrafter,
    SpecRound,
    early_exit_chain,
)

__all__ = ["add_arguments", "engine", "run"]

PROMPT = "The three primary colours are red, yellow and"
CHAT_PROMPT = "Name three fruits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("--device", help="cuda:N or host (default: cuda:0 where there is one, else host)")
    add("--model", default="smollm2", help="smollm2 (default), tiny, hybrid, or a GGUF file")
    add("--prompt", type=_text, help="text to continue, or with --chat the question")
    add("--tokens", type=_positive, default=24, metavar="N", help="tokens to generate (24)")
    add("--draft-len", type=_positive, default=4, metavar="K", help="drafts per round (4)")
    add(
        "--drafter",
        default="early-exit",
        metavar="NAME",
        help="early-exit (default), early-exit:LAYERS, head (trained; made up for tiny), or ngram",
    )
    add("--window", type=_positive, metavar="W", help="attend the newest W rows only, in a ring")
    add("--ring-chunk", type=_positive, metavar="C", help="rows of the ring for one append (4096)")
    add("--ring-slack", type=int, metavar="S", help="rows of the ring kept for rewinds (512)")
    add("--chat", action="store_true", help="apply the model's chat template")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if speculation gave what plain greedy decoding gives, else 1."""
    if args.model == "hybrid":
        return _run_hybrid(args)
    with Device(args.device) as device:
        if not args.json:
            print(f"device: {device} ({device.name})", flush=True)
        stream = device.stream(name="decode")
        report = _Demo(args, device, stream).run()
        stream.close()
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print_table(report)
    return 0 if report["exact"] else 1


def _run_hybrid(args: argparse.Namespace) -> int:
    """Latent and linear attention: speculation, and a prompt that is taken up again from disk."""
    hybrid = engine("hybrid")
    given = {k for k in ("prompt", "window", "ring_chunk", "ring_slack") if getattr(args, k)}
    if given or args.chat or args.drafter != "early-exit":
        raise ModelError(
            "--model hybrid is made up and has one prompt and one drafter; of the other options "
            "give --device, --tokens, --draft-len and --json only"
        )
    with Device(args.device) as device:
        say: Callable[[str], None] = (lambda _: None) if args.json else print
        say(f"device: {device} ({device.name})")
        report: dict[str, Any] = hybrid.run(
            device, n_tokens=args.tokens, draft_len=args.draft_len, say=say
        )
    if args.json:
        print(json.dumps(report))
    else:
        width = max(map(len, report))
        print()
        for name, value in report.items():
            print(f"{name.replace('_', ' '):<{width}}  {value}")
    return 0 if report["exact"] and report["restored_exact"] else 1


def engine(name: str = "smollm2") -> ModuleType:
    """Return an example's engine: of the installed package, else of the checkout.

    Parameters
    ----------
    name : str
        ``smollm2``, the small Llama engine, or ``hybrid``.

    Raises
    ------
    ModelError
        Neither place has it.
    """
    try:
        return importlib.import_module(f"memra_lowlevel.examples.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("memra_lowlevel.examples"):
            raise ModelError(
                f"the engine needs the package {error.name!r}: install what the demo needs, "
                "pip install 'gguf==0.19.0' regex"
            ) from error
    examples = Path(__file__).resolve().parent.parent / "examples"
    if not (examples / name / "__init__.py").is_file():
        raise ModelError(
            f"the engine is neither in the installed package nor in examples/{name} of a checkout; "
            "reinstall memra-lowlevel"
        )
    if str(examples) not in sys.path:
        sys.path.append(str(examples))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the engine needs the package {error.name!r}: install what the demo needs, "
            "pip install 'gguf==0.19.0' regex"
        ) from error


@dataclass
class _Run:
    """What one generation gave."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    seconds: float = 0.0


class _Demo:
    def __init__(self, args: argparse.Namespace, device: Device, stream: Stream):
        self.args, self.device, self.stream = args, device, stream
        self.smollm2 = engine()
        self.kind, self.exit_layers = _parse_drafter(args.drafter)
        self.meter = CallMeter(device.driver)
        self.quiet = bool(args.json)
        self.closers: list[Callable[[], None]] = []
        self.plane_bytes: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        args, stream = self.args, self.stream
        self.model = model = self.smollm2.Model.load(self.device, stream, args.model)
        config = model.config
        text = args.prompt if args.prompt is not None else (CHAT_PROMPT if args.chat else PROMPT)
        prompt = model.tokenizer.encode(model.tokenizer.chat(text) if args.chat else text)
        if not prompt:
            raise ModelError("the prompt has no tokens; give --prompt at least one character")
        self.k = args.draft_len
        self.max_ctx = len(prompt) + args.tokens + self.k + 2
        self._choose_ring()
        if self.max_ctx > config.max_ctx:
            raise ModelError(
                f"{len(prompt)} prompt tokens, {args.tokens} new ones and {self.k} drafts do not "
                f"fit in the model's context of {config.max_ctx}"
            )
        self._say(f"model: {model.name}, {config.n_layers} layers, drafter: {args.drafter}\n")
        self._say(text if not args.chat else "", end="")
        speculative, rounds = self._speculate(prompt)
        self._say("\n\nplain greedy decoding for comparison …")
        plain = self._plain(prompt)
        return self._report(plain, speculative, rounds)

    def _choose_ring(self) -> None:
        args = self.args
        self.ring = args.window is not None
        if not self.ring and (args.ring_chunk is not None or args.ring_slack is not None):
            raise MemraError("--ring-chunk and --ring-slack belong to --window; give it too")
        self.ring_chunk = args.ring_chunk or PRIME_CHUNK_MAX_TOKENS
        self.ring_slack = SWA_REWIND_SLACK_ROWS if args.ring_slack is None else args.ring_slack
        if self.ring_slack < 0 or self.ring_chunk < self.k + 1:
            raise MemraError(
                f"a ring with --ring-chunk {self.ring_chunk} and --ring-slack {self.ring_slack} "
                f"cannot take the {self.k + 1} rows of a verify step; the chunk must be at least "
                "that and the slack not negative"
            )
        self.rows = min(16, self.ring_chunk)

    # -- the two generations ----------------------------------------------------------------------
    def _plain(self, prompt: Sequence[int]) -> _Run:
        session = self._session("plain", 16, ring=False)
        out = _Run()
        with self.meter("plain"):
            out.tokens = self.smollm2.generate_greedy(
                session, self.stream, prompt, self.args.tokens
            )
        out.seconds = self.meter.seconds["plain"]
        out.ended = out.tokens[-1] in self.model.tokenizer.end_tokens
        return out

    def _speculate(self, prompt: Sequence[int]) -> tuple[_Run, SpecRound]:
        stream, model = self.stream, self.model
        session = self._session("target", max(self.rows, self.k + 1), ring=self.ring)
        drafter = self._drafter(session)
        with self.meter("prime"):
            session.prime(stream, prompt[:-1])
            if isinstance(drafter, DraftChain) and len(prompt) > 1:
                drafter.fill(stream, prompt[:-1])
            stream.sync()
        rounds = SpecRound(session, drafter, self.k, prompt, sections=self.meter)
        self.closers.append(rounds.close)
        writer = model.tokenizer.stream()
        out = _Run()
        begin = time.perf_counter()
        while len(out.tokens) < self.args.tokens and not out.ended:
            left = self.args.tokens - len(out.tokens)
            for token in rounds.step(stream, min(self.k, left - 1)).tokens:
                out.tokens.append(token)
                self._say(writer.push(token), end="")
                if token in model.tokenizer.end_tokens:
                    out.ended = True
                    break
        out.seconds = time.perf_counter() - begin
        self._say(writer.close(), end="")
        if out.ended:
            self._say("\n[the model ended the text]", end="")
        return out, rounds

    # -- what they are made of --------------------------------------------------------------------
    def _planes(self, name: str, n_layers: int, *, ring: bool) -> Cache:
        args, layers = self.args, self.model.config.plan.layers[:n_layers]
        if args.window is not None:
            sliding = SlidingKvCache(args.window)
            layers = tuple(
                LayerPlan(sliding, p.kv_dim_k, p.kv_dim_v, p.head_dim_k, p.head_dim_v)
                for p in layers
            )
        cache = Cache(
            self.device, self.stream, ModelPlan(layers), self.max_ctx, ring=ring,
            ring_chunk=self.ring_chunk, ring_slack=self.ring_slack, name=name,
        )  # fmt: skip
        self.closers.append(cache.close)
        self.plane_bytes[name] = cache.describe()["bytes"]
        return cache

    def _session(self, name: str, rows: int, *, ring: bool) -> Any:
        planes = self._planes(name, self.model.config.n_layers, ring=ring)
        workspace = self.model.workspace(rows)
        return self.smollm2.Session(self.model, planes, workspace)

    def _drafter(self, session: Any) -> DraftChain | NgramDrafter:
        config, stream, model = self.model.config, self.stream, self.model
        if self.kind == "ngram":
            return NgramDrafter(self.device, self.k, config.n_vocab)
        if self.kind == "head":
            head = self.smollm2.DraftHead.load(model, stream)
            with self.meter("capture draft"):
                drafter = self.smollm2.HeadDrafter(session, head, stream, self.k)
            self.closers.append(drafter.close)
            self.plane_bytes["draft"] = drafter.planes.describe()["bytes"]
            chain: DraftChain = drafter.chain
            chain.sections = self.meter
            return chain
        n = _default_exit(config.n_layers) if self.exit_layers is None else self.exit_layers
        if not 1 <= n < config.n_layers:
            raise ModelError(
                f"early-exit:{n} is no part of a model of {config.n_layers} layers; give 1 to "
                f"{config.n_layers - 1}"
            )
        planes = self._planes("draft", n, ring=self.ring)
        layers = list(planes.planes())
        workspace = model.workspace(self.rows)

        def first_layers(stream: Stream, n_rows: int, **buffers: Any) -> None:
            model.forward(
                stream, workspace, layers, n_rows, 0, n, buffers["argmax"] is not None, **buffers
            )

        io = ChainIo(self.device, config.width, self.k, config.n_vocab)
        with self.meter("capture draft"):
            chain = early_exit_chain(
                stream, first_layers, io, planes, self.k, tokens=workspace.tok_d
            )
        chain.sections = self.meter
        self.closers += [chain.close, io.close]
        return chain

    # -- what is said -----------------------------------------------------------------------------
    def _report(self, plain: _Run, out: _Run, rounds: SpecRound) -> dict[str, Any]:
        meter, stats, chain = self.meter, rounds.stats, rounds.chain
        steps = meter.units.get("replay", 0)
        graphs = []
        if isinstance(chain, DraftChain):
            graphs.append(self._graph("draft", chain.exec, "capture draft", "replay"))
        for n, exec_ in sorted(rounds.execs.items()):
            graphs.append(self._graph(f"verify {n}", exec_, f"capture verify {n}", f"verify {n}"))
        in_rounds = [s for s in meter.calls if s in ("draft", "replay", "rebase", "rewind")]
        in_rounds += [s for s in meter.calls if s.startswith("verify")]
        writes = sum(meter.count(section, *HOST_WRITE_CALLS) for section in in_rounds)
        report: dict[str, Any] = {
            "device": str(self.device),
            "model": self.model.name,
            "drafter": self.args.drafter,
            "tokens": len(out.tokens),
            "token_ids": out.tokens,
            "text": self.model.tokenizer.decode(out.tokens),
            "ended": out.ended,
            "exact": out.tokens == plain.tokens,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "rejected": stats.rejected,
            "tokens_per_target_pass": round(stats.tokens_per_target_pass, 4),
            "graph": graphs[0] if isinstance(chain, DraftChain) else _no_graph(),
            "graphs": graphs,
            "driver_calls_per_draft_step": meter.count("replay") / steps if steps else 0.0,
            "rebases": stats.rebases,
            "rebased_and_rejected": stats.rebased_and_rejected,
            "plane_bytes": self.plane_bytes["target"],
            "flat_plane_bytes": self.plane_bytes["plain"],
            "h2d_writes_per_round": writes / stats.rounds if stats.rounds else 0.0,
            "tokens_per_s": round(len(out.tokens) / out.seconds, 3) if out.seconds else 0.0,
            "plain_tokens_per_s": round(len(plain.tokens) / plain.seconds, 3),
            "host_us_per_replay": (
                round(1e6 * meter.seconds["replay"] / steps, 3) if steps else 0.0
            ),
        }
        for close in reversed(self.closers):
            close()
        return report

    def _graph(self, name: str, exec_: Any, made: str, used: str) -> dict[str, Any]:
        meter, shape = self.meter, exec_.describe()
        return {
            "name": name,
            "kernel_nodes": shape.kernel_nodes,
            "memory_nodes": shape.memory_nodes,
            "captures": meter.count(made, "cuStreamEndCapture"),
            "replays": meter.count(used, "cuGraphLaunch"),
            "node_updates": sum(
                meter.count(section, *NODE_UPDATE_CALLS) for section in meter.calls
            ),
        }

    def _say(self, text: str, end: str = "\n") -> None:
        if not self.quiet:
            print(text, end=end, flush=True)


def _no_graph() -> dict[str, Any]:
    keys = ("kernel_nodes", "memory_nodes", "captures", "replays", "node_updates")
    return dict.fromkeys(keys, 0)


def _default_exit(n_layers: int) -> int:
    """Four fifths of the layers: right often enough to pay, wrong often enough to be seen."""
    return max(1, n_layers * 4 // 5)


def _parse_drafter(name: str) -> tuple[str, int | None]:
    kind, colon, number = name.partition(":")
    if kind in ("ngram", "head") and not colon:
        return kind, None
    if kind == "early-exit" and (not colon or number.isdigit()):
        return kind, int(number) if colon else None
    raise MemraError(
        f"--drafter {name!r} is not known; use early-exit, early-exit:LAYERS, head or ngram"
    )


def _text(words: str) -> str:
    # What the locale could not decode reaches us as surrogates; its bytes may still be UTF-8.
    try:
        return os.fsencode(words).decode() if not words.isascii() else words
    except UnicodeError:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _print_table(report: dict[str, Any]) -> None:
    graph = report["graph"]
    rows = [
        ("tokens", report["tokens"]),
        ("exact (= plain greedy)", "yes" if report["exact"] else "NO"),
        ("drafted / accepted / rejected",
         f"{report['drafted']} / {report['accepted']} / {report['rejected']}"),
        ("tokens per target pass", f"{report['tokens_per_target_pass']:.2f}"),
        ("draft graph: kernel / memory nodes",
         f"{graph['kernel_nodes']} / {graph['memory_nodes']}"),
        ("draft graph: captures / replays", f"{graph['captures']} / {graph['replays']}"),
        ("node updates", graph["node_updates"]),
        ("driver calls per draft step", f"{report['driver_calls_per_draft_step']:.2f}"),
        ("host-to-device writes per round", f"{report['h2d_writes_per_round']:.2f}"),
        ("target planes, bytes (flat)",
         f"{report['plane_bytes']:,} ({report['flat_plane_bytes']:,})"),
        ("ring rebases / of these before a rejection",
         f"{report['rebases']} / {report['rebased_and_rejected']}"),
        ("host time per replay", f"{report['host_us_per_replay']:.1f} µs"),
        ("tokens per second", f"{report['tokens_per_s']:.2f}"),
        ("plain greedy, tokens per second", f"{report['plain_tokens_per_s']:.2f}"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
