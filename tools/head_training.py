"""How the draft head of SmolLM2 is trained: the target in torch, texts that it writes, the head.

``tools/train_head.py`` begins it. The head is one Llama block that reads, at a position, the
embedding of its token and the last hidden state of the target one position before, and guesses the
next token among the most frequent ones. It learns the guesses of a whole round: behind the first,
the hidden state is its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import regex
import torch
import torch.nn.functional as F
from gguf import GGUFReader
from gguf.quants import dequantize
from head_file import pack, unpack
from torch.nn.attention import SDPBackend, sdpa_kernel

# The shape of SmolLM2-135M.
N_LAYERS, WIDTH, N_FF, N_HEADS, N_KV, DIM = 30, 576, 1536, 9, 3, 64
THETA, EPS = 100000.0, 1e-5
QKV = (N_HEADS * DIM, N_KV * DIM, N_KV * DIM)  # rows of queries, keys and values

END = 2  # <|im_end|>
LIKELY = 8  # words of the target that are kept at a position

# How a question begins; an empty one leaves even its first word to the model.
OPENINGS = (
    "", "", "", "", "Write", "Explain", "What is", "How do I", "How can", "Why", "Tell me about",
    "List", "Give me", "Can you", "Describe", "Summarize", "Create", "Who", "Where", "When",
    "Compare", "Translate", "Suggest", "Help me", "What are", "I want to", "Design", "Define",
    "Write a Python", "Write a short story", "Write an email", "Solve", "Rewrite", "Name", "Is it",
    "Discuss", "Imagine",
)  # fmt: skip
# How a plain text begins, one that is no conversation.
RAW = (
    "The", "In", "A", "It was", "Once upon a time", "def", "Scientists", "# ", "When",
    "The history of", "Many people", "This", "If you", "I", "There are", "Water", "import",
    "According to", "To", "He",
)  # fmt: skip
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


# -- the target ------------------------------------------------------------------------------------
def rms(x: torch.Tensor) -> torch.Tensor:
    """Normalise the last axis, in f32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channels: x [..., t, DIM], angles [t, DIM / 2, 2]."""
    a, b = x.float().unflatten(-1, (DIM // 2, 2)).unbind(-1)
    c, s = angles.unbind(-1)
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


def rotation(n: int, device: str) -> torch.Tensor:
    """Cosines and sines for n positions: [n, DIM / 2, 2]."""
    exponents = -torch.arange(0, DIM, 2, device=device) / DIM
    angle = torch.arange(n, device=device)[:, None] * THETA**exponents
    return torch.stack((angle.cos(), angle.sin()), -1).float()


class Target:
    """The weights of the file, as bf16 (f32 on a CPU)."""

    def __init__(self, path: str, device: str):
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        reader = GGUFReader(path)
        self.w = {}
        for t in reader.tensors:
            values = np.array(dequantize(t.data, t.tensor_type), np.float32)
            weight = torch.from_numpy(values).to(device).reshape(*reversed(t.shape.tolist()))
            # The gains of the norms stay f32: the norms are computed in it.
            self.w[t.name] = weight.to(kind if weight.dim() == 2 else torch.float32)
        self.device, self.kind = device, kind
        self.table = self.w["token_embd.weight"]
        self.gain = self.w["output_norm.weight"]
        self.angles = rotation(8192, device)
        self.name = str(reader.fields["general.name"].contents())
        self.pieces = reader.fields["tokenizer.ggml.tokens"].contents()
        self.merges = reader.fields["tokenizer.ggml.merges"].contents()
        self.layers = [self._layer(i) for i in range(N_LAYERS)]

    def _layer(self, i: int) -> dict[str, torch.Tensor]:
        """One block; matrices that read the same input are joined, for fewer products."""
        b = f"blk.{i}."
        w = self.w
        return {
            "an": w[b + "attn_norm.weight"],
            "qkv": torch.cat([w[b + f"attn_{n}.weight"] for n in "qkv"]),
            "o": w[b + "attn_output.weight"],
            "fn": w[b + "ffn_norm.weight"],
            "gu": torch.cat([w[b + "ffn_gate.weight"], w[b + "ffn_up.weight"]]),
            "d": w[b + "ffn_down.weight"],
        }

    def advance(self, word: torch.Tensor, at: int, cache: torch.Tensor) -> torch.Tensor:
        """Read the token at position ``at`` of each of n texts; the last hidden state [n, WIDTH].

        ``cache`` [N_LAYERS, 2, n, N_KV, length, DIM] takes its keys and values.
        """
        n, angles = len(word), self.angles[at : at + 1]
        h = self.table[word].float()
        for layer, kv in zip(self.layers, cache, strict=True):
            x = (rms(h) * layer["an"]).to(self.kind)
            q, k, v = (y.view(n, -1, 1, DIM) for y in (x @ layer["qkv"].T).split(QKV, -1))
            kv[0, :, :, at] = turn(k, angles)[:, :, 0]
            kv[1, :, :, at] = v[:, :, 0]
            # The query heads that share keys stand where a text's positions usually do.
            q = turn(q, angles).view(n, N_KV, N_HEADS // N_KV, DIM)
            a = F.scaled_dot_product_attention(q, kv[0, :, :, : at + 1], kv[1, :, :, : at + 1])
            h = h + a.reshape(n, -1) @ layer["o"].T
            g, u = ((rms(h) * layer["fn"]).to(self.kind) @ layer["gu"].T).chunk(2, -1)
            h = h + (F.silu(g) * u) @ layer["d"].T
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return (rms(h) * self.gain).to(self.kind) @ self.table.T


# -- text ------------------------------------------------------------------------------------------
class Tokens:
    """Byte-pair encoding of short plain texts, enough for openings."""

    def __init__(self, target: Target):
        self.ids = {p: i for i, p in enumerate(target.pieces)}
        self.rank = {tuple(m.split(" ")): i for i, m in enumerate(target.merges)}
        # Every byte has a printable character; those that have none of their own follow at 256.
        keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
        self.bytes = {b: chr(b) for b in keep}
        for extra, b in enumerate(b for b in range(256) if b not in self.bytes):
            self.bytes[b] = chr(256 + extra)

    def __call__(self, text: str) -> list[int]:
        out = []
        for special in regex.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            if special in ("<|im_start|>", "<|im_end|>"):
                out.append(self.ids[special])
                continue
            for word in regex.findall(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", special):
                out += [self.ids[p] for p in self._merged(word)]
        return out

    def _merged(self, word: str) -> list[str]:
        """The pieces of a word: the pair that ranks first is merged until none has a rank."""
        parts = [self.bytes[b] for b in word.encode()]
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda p: self.rank.get(p, 1 << 30))
            if best not in self.rank:
                break
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [parts[i] + parts[i + 1]]
                i += 1
        return parts


@dataclass
class Texts:
    """Texts with what the target thought of them: all of it [n, length, …]."""

    tokens: torch.Tensor  # i64
    hidden: torch.Tensor  # the last hidden state
    best: torch.Tensor  # i64: its greedy token
    likely: torch.Tensor  # i32 […, LIKELY]: its likeliest tokens
    odds: torch.Tensor  # […, LIKELY]: their probabilities
    answer: torch.Tensor  # bool: whether the token belongs to an answer

    def __getitem__(self, at: torch.Tensor | slice) -> Texts:
        return Texts(*(getattr(self, f.name)[at] for f in fields(self)))

    @staticmethod
    def join(parts: list[Texts]) -> Texts:
        return Texts(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Texts)))


# The attention that is preferred otherwise compiles something for each length.
@torch.no_grad()
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def write(target: Target, n: int, length: int, seed: int, greedy: bool = False) -> Texts:
    """Let the model write n conversations and texts of ``length`` tokens.

    Questions are sampled, answers are greedy or nearly so. Where a turn ends the next is opened.
    """
    device, kind, encode = target.device, target.kind, functools.cache(Tokens(target))
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    system = encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
    user = encode("<|im_start|>user\n")
    # What opens the next turn, behind a question and behind an answer.
    assistant = torch.tensor(encode("\n<|im_start|>assistant\n"), device=device)
    again = torch.tensor(encode("\n<|im_start|>user\n"), device=device)

    # Tokens that are given; -1 where the model writes. A turn may be opened behind the last token.
    forced = torch.full((n, length + 64), -1, dtype=torch.long)
    raw = torch.from_numpy(random.random(n) < 0.2)
    for i in range(n):
        if raw[i]:
            first = encode(RAW[random.integers(len(RAW))])
        else:
            opening = encode(OPENINGS[random.integers(len(OPENINGS))])
            first = [*(system if random.random() < 0.7 else []), *user, *opening]
        forced[i, : len(first)] = torch.tensor(first)
    forced, raw = forced.to(device), raw.to(device)
    heats = [0.0] if greedy else [0.0, 0.0, 0.3, 0.6, 0.9]
    heat = torch.from_numpy(random.choice(heats, n)).to(device).float()
    # Plain texts count as answers, but their beginnings are sampled, or they would be all alike.
    answering = raw.clone()
    sampled_to = torch.from_numpy(random.integers(16, 64, n)).to(device)

    cache = torch.empty(N_LAYERS, 2, n, N_KV, length, DIM, dtype=kind, device=device)
    rows = torch.arange(n, device=device)
    out = Texts(
        tokens=torch.zeros(n, length, dtype=torch.long, device=device),
        hidden=torch.zeros(n, length, WIDTH, dtype=kind, device=device),
        best=torch.zeros(n, length, dtype=torch.long, device=device),
        likely=torch.zeros(n, length, LIKELY, dtype=torch.int32, device=device),
        odds=torch.zeros(n, length, LIKELY, dtype=kind, device=device),
        answer=torch.zeros(n, length, dtype=torch.bool, device=device),
    )
    word = forced[:, 0]
    for at in range(length):
        h = target.advance(word, at, cache)
        values, ids = target.logits(h).float().topk(50, -1)
        out.tokens[:, at] = word
        out.hidden[:, at] = rms(h).to(kind)
        out.best[:, at] = ids[:, 0]
        out.likely[:, at] = ids[:, :LIKELY].int()
        out.odds[:, at] = values.softmax(-1)[:, :LIKELY].to(kind)
        out.answer[:, at] = answering & (forced[:, at] < 0)

        # The largest of the values with Gumbel noise is a sample at that temperature.
        warmth = torch.where(answering, torch.where(raw & (at < sampled_to), 0.9, heat), 0.9)
        noise = -torch.log(-torch.log(torch.rand_like(values).clamp_(1e-9, 1 - 1e-9)))
        chosen = ids.gather(1, (values + noise * warmth[:, None]).argmax(-1, True))[:, 0]
        word = torch.where(forced[:, at + 1] >= 0, forced[:, at + 1], chosen)

        # Behind the end of a turn the next one is opened.
        ended = (word == END) & (forced[:, at + 1] < 0)
        for which, turn_ in ((~answering, assistant), (answering, again)):
            who = rows[ended & which]
            places = torch.arange(at + 2, at + 2 + len(turn_), device=device)
            forced[who[:, None], places] = turn_
        answering = answering ^ ended
    return out


# -- the head --------------------------------------------------------------------------------------
class Guess(torch.autograd.Function):
    """Cross entropy with a few likely words.

    Its gradient is made at once, a part of the rows at a time: nothing wide is kept.
    """

    @staticmethod
    def forward(ctx, x, words, likely, odds, weight):
        """The weighted sum of the losses, and each row's best guess (a place in ``words``).

        x [n, WIDTH], words [v, WIDTH], likely i64 [n, m] (places in ``words``), odds f32 [n, m],
        weight f32 [n].
        """
        loss, grad = torch.empty_like(weight), torch.empty_like(x)
        best = torch.empty_like(likely[:, 0])
        for i in range(0, len(x), 8192):
            part = slice(i, i + 8192)
            logits = x[part] @ words.T
            best[part] = logits.argmax(-1)
            total = logits.float().logsumexp(-1)
            p = odds[part]
            loss[part] = p.sum(-1) * total - (p * logits.gather(1, likely[part]).float()).sum(-1)
            # The slope at the logits: the probabilities, less the wanted ones.
            slope = torch.exp(logits - total[:, None]).mul_(p.sum(-1)[:, None]).to(x.dtype)
            slope.scatter_add_(1, likely[part], (-p).to(x.dtype))
            grad[part] = (slope @ words) * weight[part, None].to(x.dtype)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(best)
        return (loss * weight).sum(), best

    @staticmethod
    def backward(ctx, up, _):
        (grad,) = ctx.saved_tensors
        return grad * up, None, None, None, None


class Head(torch.nn.Module):
    """One block of the target's shape with a feed-forward part of ``n_ff``.

    It begins as the target's last block. The added feed-forward rows are random, but their columns
    of ``down`` are zero, so that they change nothing yet.
    """

    def __init__(self, target: Target, vocabulary: torch.Tensor, n_ff: int):
        super().__init__()
        last, device = target.layers[-1], target.device
        gate, up = (w.float() for w in last["gu"].chunk(2))
        more = torch.randn(2, n_ff - N_FF, WIDTH, device=device) * gate.std()
        start = {
            "features": torch.eye(WIDTH, device=device) * 0.5,
            "attn_norm": last["an"],
            "ffn_norm": last["fn"],
            "output_norm": target.gain,
            "qkv": last["qkv"],
            "out": last["o"],
            "gate_up": torch.cat([gate, more[0], up, more[1]]),
            "down": F.pad(last["d"].float(), (0, n_ff - N_FF)),
        }
        self.p = torch.nn.ParameterDict(
            {k: torch.nn.Parameter(v.float().clone()) for k, v in start.items()}
        )
        self.target, self.vocabulary = target, vocabulary
        self.words = target.table[vocabulary]

    def begin(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What a position enters with: its token, and the hidden state one position before."""
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        features = self.p["features"].T.to(self.target.kind)
        return self.target.table[tokens].float() + before @ features

    def step(
        self, x: torch.Tensor, past: list, angles: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, list]:
        """One guess for every position; ``past`` are keys and values of the guesses before."""
        kind = self.target.kind
        p = {k: v.to(kind) if v.dim() == 2 else v for k, v in self.p.items()}
        n, t, _ = x.shape
        y = (rms(x) * p["attn_norm"]).to(kind) @ p["qkv"].T
        q, k, v = (z.view(n, t, -1, DIM).transpose(1, 2) for z in y.split(QKV, -1))
        q, k = turn(q, angles), turn(k, angles)
        past = [*past, tuple(z.repeat_interleave(N_HEADS // N_KV, 1) for z in (k, v))]
        keys, values = (torch.cat(z, 2) for z in zip(*past, strict=True))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        h = x + a.transpose(1, 2).reshape(n, t, -1) @ p["out"].T
        g, u = ((rms(h) * p["ffn_norm"]).to(kind) @ p["gate_up"].T).chunk(2, -1)
        return h + (F.silu(g) * u) @ p["down"].T, past

    def guesses(self, texts: Texts, k: int) -> Iterator[torch.Tensor]:
        """Yield what the output layer sees for each of k guesses, for a round at every position.

        Guess j sees the rows that the guesses before it left for the last j - 1 positions, and rows
        made from the target's own hidden states behind those.
        """
        t = texts.tokens.shape[1]
        angles, i = self.target.angles[:t], torch.arange(t, device=self.target.device)
        past, given = [], texts.hidden
        for j in range(1, k + 1):
            masks = [i[None, :] <= i[:, None] - (j - 1)]
            masks += [i[None, :] == i[:, None] - (j - m) for m in range(2, j + 1)]
            h, past = self.step(self.begin(texts.tokens, given), past, angles, torch.cat(masks, 1))
            normed = rms(h)
            given = normed.to(self.target.kind)
            yield (normed * self.p["output_norm"]).to(self.target.kind)


def loss_of(head: Head, index: torch.Tensor, texts: Texts, k: int) -> torch.Tensor:
    """Sum over the guesses; a guess counts less where the round would have ended before it."""
    places = index[texts.likely.long()]
    known = places >= 0
    odds = texts.odds.float() * known
    odds[..., 0] += known[..., 0].float()  # the greedy token is what decides
    label, right, total = index[texts.best], None, torch.zeros((), device=places.device)
    # Whether this token was the greedy one.
    follows = F.pad((texts.best == texts.tokens.roll(-1, 1))[:, :-1], (1, 0))
    for j, x in enumerate(head.guesses(texts, k)):
        seen = torch.ones_like(follows) if right is None else F.pad(right[:, :-1], (1, 0)) & follows
        weight = torch.where(seen, 1.0, 0.1) * torch.where(texts.answer, 1.0, 0.3)
        loss, best = Guess.apply(
            x.flatten(0, 1),
            head.words,
            places.clamp(min=0).flatten(0, 1),
            odds.flatten(0, 1),
            weight.flatten() / weight.sum(),
        )
        right = seen & (best.view_as(label) == label)
        total = total + 0.9**j * loss
    return total


@torch.no_grad()
def tokens_per_round(head: Head, index: torch.Tensor, texts: Texts, k: int) -> list[float]:
    """Tokens that rounds with 1 … k drafts commit on greedy answers, one round after the other."""
    label, right, accepted = index[texts.best], None, []
    # Whether this token was the greedy one.
    greedy = F.pad(texts.best[:, :-1] == texts.tokens[:, 1:], (1, 0))
    for j, x in enumerate(head.guesses(texts, k)):
        now = (x @ head.words.T).argmax(-1) == label
        right = now if right is None else now & F.pad(right[:, :-1], (1, 0)) & greedy
        # By the position at which the round began; what the roll brought round does not count.
        began = torch.roll(right, -j, 1)
        inside = torch.arange(began.shape[1], device=began.device) < began.shape[1] - j
        accepted.append((began & inside).cpu().numpy())
    answer, out = (texts.answer & greedy).cpu().numpy(), []
    for n in range(1, k + 1):
        drafts = np.sum(accepted[:n], 0)
        n_tokens = n_rounds = 0
        for text in range(len(drafts)):
            at = 0
            while at < drafts.shape[1] - k - 1:
                step = int(drafts[text, at]) + 1 if answer[text, at] else 1
                if answer[text, at]:
                    n_tokens, n_rounds = n_tokens + step, n_rounds + 1
                at += step
        out.append(n_tokens / max(1, n_rounds))
    return out


# -- the training ----------------------------------------------------------------------------------
def train(
    head: Head,
    index: torch.Tensor,
    texts: Texts,
    args: argparse.Namespace,
    report: Callable[..., None],
) -> int:
    """Train until the time is up; the number of steps."""
    groups = [
        {"params": [p for p in head.p.values() if p.dim() == 2], "weight_decay": 0.05},
        {"params": [p for p in head.p.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=args.rate, betas=(0.9, 0.95), fused=args.device == "cuda"
    )
    report(0)
    order, queue = np.random.default_rng(7), np.empty(0, np.int64)
    start, step, share, next_report = time.time(), 0, 0.0, 0.125
    while share < 1.0 and step < args.most_steps:
        if len(queue) < args.at_once:
            queue = order.permutation(len(texts.tokens))
        pick = torch.from_numpy(queue[: args.at_once]).to(args.device)
        queue = queue[args.at_once :]

        # The rate follows the clock, since the time is what is given: up, then down a cosine.
        share = (time.time() - start) / args.train_s
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, share))
        slope = min(1.0, (step + 1) / 200) * max(0.01, cosine)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * slope

        loss = loss_of(head, index, texts[pick], args.guesses)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step == 20 or share >= next_report:
            s_a_step = (time.time() - start) / step
            report(step, loss=round(loss.item(), 4), s_a_step=round(s_a_step, 4))
            next_report += 0.125 if step > 20 else 0.0
    report(step, epochs=round(step * args.at_once / len(texts.tokens), 2))
    return step


def run(args: argparse.Namespace) -> None:
    """Write texts, train on them, save the head; ``args`` as of ``tools/train_head.py``."""
    begin = time.time()

    def say(**words: object) -> None:
        print(json.dumps({"s": round(time.time() - begin, 1), **words}), flush=True)

    target = Target(args.model, args.device)
    say(event="loaded")
    held = write(target, max(2, args.batch // 16), args.length, seed=1 << 20, greedy=True)
    say(event="held out", answers=round(held.answer.float().mean().item(), 3))

    # Another batch only where it would be done in time, going by the last one.
    parts, start, last = [], time.time(), 0.0
    while not parts or time.time() - start + last < args.write_s:
        at = time.time()
        parts.append(write(target, args.batch, args.length, args.seed + len(parts)))
        last = time.time() - at
    texts = Texts.join(parts)
    parts.clear()  # or the memory would hold everything twice
    say(
        event="written",
        texts=len(texts.tokens),
        tokens=texts.tokens.numel(),
        batch_s=round(last, 2),
    )

    counts = torch.bincount(texts.best.flatten(), minlength=len(target.pieces))
    vocabulary = counts.argsort(descending=True)[: args.vocabulary].sort()[0]
    before: dict[str, np.ndarray] = {}
    if args.begin:
        before, known = unpack(args.begin)
        vocabulary = torch.from_numpy(known).to(args.device)
    # From a token to its place in the vocabulary; -1 where it has none.
    index = torch.full((len(target.pieces),), -1, dtype=torch.long, device=args.device)
    index[vocabulary] = torch.arange(len(vocabulary), device=args.device)
    say(
        event="vocabulary",
        covers=round((counts[vocabulary].sum() / counts.sum()).item(), 5),
        held=round((index[held.best] >= 0).float().mean().item(), 5),
    )

    head = Head(target, vocabulary, args.n_ff)
    for name, values in before.items():
        head.p[name].data.copy_(torch.from_numpy(values))

    def report(step: int, **words: object) -> None:
        rates = [
            tokens_per_round(head, index, held[slice(i, i + 64)], 6)
            for i in range(0, len(held.tokens), 64)
        ]
        say(
            event="held out",
            step=step,
            tokens_per_round=[round(x, 3) for x in np.mean(rates, 0)],
            **words,
        )

    step = train(head, index, texts, args, report)
    arrays = {name: p.detach().float().cpu().numpy() for name, p in head.p.items()}
    pack(arrays, vocabulary.cpu().numpy(), args.out, target.name)
    say(event="saved", out=args.out, bytes=Path(args.out).stat().st_size, steps=step)
