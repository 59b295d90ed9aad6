"""Whole texts of the example engine: a captured step a token, and rounds with a trained head."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..demo import engine
from ..errors import MemraError
from ..speculative import DeviceLoop
from .result import Row

if TYPE_CHECKING:
    from .run import Run

__all__ = ["GOAL_TIMES", "QUESTIONS", "measure_texts"]

GOAL_TIMES = 1.5
"""Tokens a second of rounds on the device, in those of the captured step."""

QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a fox and a lighthouse.",
    "How do I make bread at home?",
    "Write a Python function that reverses a list.",
    "What are the benefits of regular exercise?",
    "Who was Ada Lovelace?",
)
"""What the texts answer. Heads are trained on answers to questions that the model makes up itself,
behind words like the first of these."""

_MAX_CTX = 1024
_DRAFTS = (2, 3, 4)


def measure_texts(run: Run, name: str, model: Any) -> None:
    """Time the greedy answers of a model to some questions, both ways; they must be the same.

    A figure is the time a token over all answers, each up to its end or 256 tokens, from the first
    new token on; each sample goes through all of them. What a round commits behind that does not
    count as tokens.

    Parameters
    ----------
    run : Run
    name : str
        Of the model, in the rows.
    model : smollm2.Model
    """
    small = run.small
    n, n_samples = (6, 1) if small else (256, 5)
    encode = model.tokenizer.encode
    questions = QUESTIONS[:1] if small else map(model.tokenizer.chat, QUESTIONS)
    texts = [encode(question) for question in questions]
    plain, samples = _plain(run, model, texts, n, n_samples)
    step = Row(f"text {name}, captured step", "us", samples)
    step.extra["tokens_per_s"] = round(1e6 / step.median, 1)
    run.add(step)
    head = engine().DraftHead.load(model, run.stream)
    kind = "made-up head" if small else "trained head"
    for k in _DRAFTS:
        samples, n_tokens, n_rounds = _rounds(run, model, head, k, texts, plain, n_samples)
        row = Row(
            f"text {name}, {kind}, {k} drafts, on the device", "us", samples,
            baseline=step.what, goal=None if small else round(step.median / GOAL_TIMES, 1),
        )  # fmt: skip
        row.extra.update(
            tokens_per_round=round(n_tokens / n_rounds, 3),
            tokens_per_s=round(1e6 / row.median, 1),
            round_us=round(row.median * sum(map(len, plain)) / n_rounds, 1),
        )
        run.add(row)


def _timed(turns: int, work: Callable[[], object]) -> list[float]:
    """Microseconds of ``work``, by turn."""
    samples = []
    for i in range(turns + 1):
        begin = time.perf_counter_ns()
        work()
        if i:  # the first turn loads and uploads
            samples.append((time.perf_counter_ns() - begin) / 1e3)
    return samples


def _plain(
    run: Run, model: Any, texts: list[list[int]], n: int, n_samples: int
) -> tuple[list[list[int]], list[float]]:
    """Answers, and µs a token of them: the captured step again and again, without the host."""
    smollm2, stream = engine(), run.stream
    session = smollm2.Session.allocate(model, stream, _MAX_CTX)
    step = smollm2.GreedyStep(session, stream)
    answers: list[list[int]] = []
    totals = [0.0] * n_samples
    for text in texts:
        answer = smollm2.generate_greedy(session, stream, text, n, step=step)
        answers.append(answer)

        def again(text: list[int] = text, n: int = len(answer)) -> None:
            session.planes.set_len(stream, len(text) - 1)
            step.start(stream, text[-1])
            for _ in range(n):
                step.exec.launch(stream)
            stream.sync()

        totals = [a + b for a, b in zip(totals, _timed(n_samples, again), strict=True)]
    step.close()
    session.close()
    return answers, [total / sum(map(len, answers)) for total in totals]


def _rounds(
    run: Run,
    model: Any,
    head: Any,
    k: int,
    texts: list[list[int]],
    plain: list[list[int]],
    n_samples: int,
) -> tuple[list[float], int, int]:
    """µs a token of the answers by rounds on the device; tokens of all rounds, and rounds.

    Raises
    ------
    MemraError
        An answer differs from that of plain greedy decoding.
    """
    smollm2, stream = engine(), run.stream
    session = smollm2.Session.allocate(model, stream, _MAX_CTX)
    drafter = smollm2.HeadDrafter(session, head, stream, k)
    loop = DeviceLoop(
        stream, session, drafter.chain, k, n_max=max(map(len, plain)),
        end_tokens=sorted(model.tokenizer.end_tokens),
    )  # fmt: skip
    totals, n_tokens, n_rounds = [0.0] * n_samples, 0, 0
    for text, answer in zip(texts, plain, strict=True):
        for planes in (session.planes, drafter.planes):
            planes.set_len(stream, 0)
        session.prime(stream, text[:-1])
        drafter.chain.fill(stream, text[:-1])
        result: Any = None

        def again(text: list[int] = text, n: int = len(answer)) -> None:
            nonlocal result
            for planes in (session.planes, drafter.planes):
                planes.set_len(stream, len(text) - 1)
            result = loop.run(stream, text, n)

        samples = _timed(n_samples, again)
        if list(result.tokens[: len(answer)]) != answer:
            raise MemraError(f"text {k} drafts: rounds on the device committed another answer")
        totals = [a + b for a, b in zip(totals, samples, strict=True)]
        n_tokens, n_rounds = n_tokens + len(result.tokens), n_rounds + len(result.accepted)
    loop.close()
    drafter.close()
    session.close()
    return [total / sum(map(len, plain)) for total in totals], n_tokens, n_rounds
