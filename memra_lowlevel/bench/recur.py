"""The recurrent step of linear attention: convolution, gates, delta rule, a state per token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ..kernels.early import starts_early
from ..kernels.recur import delta_rows
from .clock import n_sets
from .result import Row

if TYPE_CHECKING:
    from ..runtime.memory import Buffer
    from .run import Run

__all__ = ["measure_recur", "steps"]

GOALS = {1: 2.3, 4: 3.8, 8: 5.5}
"""Tokens of a launch to the time to reach, in µs: 32 heads of 128 x 128 states in f32."""

_TAPS = 4


def measure_recur(run: Run) -> None:
    """Time one launch over rotating states; the floor is a copy of one state to the next."""
    for n, goal in GOALS.items():
        with ExitStack() as stack:
            _step(run, n, goal, stack)


def _step(run: Run, n: int, goal: float, stack: ExitStack) -> None:
    n_heads, d = _heads(run)
    state_bytes = 4 * n_heads * d * d
    n_states = n_sets(state_bytes * (n + 1), small=run.small)
    calls = steps(run, n, n_states, stack)
    calls(False)[0]()  # loads the kernel
    run.stream.sync()
    for early in (True, False) if starts_early(run.device, True) else (False,):
        row = Row(
            f"recur {n_heads}x{d}x{d}, {n} tokens{', starts early' if early else ''}", "us",
            run.timed(calls(early)), goal=goal,
            extra={"bytes": state_bytes * (n + 1), "sets": n_states},
        )  # fmt: skip
        if not run.small:
            row.floor = run.ceilings.copy_us(state_bytes * (n + 1) // 2)
        run.add(row)


def steps(
    run: Run, n: int, n_states: int, stack: ExitStack
) -> Callable[[bool], list[Callable[[], None]]]:
    """Give what makes the launches of ``n`` tokens, one over each of ``n_states`` sets of buffers.

    Parameters
    ----------
    run : Run
    n : int
        Tokens of a launch.
    n_states : int
    stack : ExitStack
        Closes the buffers.

    Returns
    -------
    callable
        Takes whether a launch may start early.
    """
    device, stream = run.device, run.stream
    n_heads, d = _heads(run)
    width, n_slots = 3 * n_heads * d, n + 1
    random = np.random.default_rng(n)

    def up(*shape: int) -> Buffer:
        values = (0.1 * random.standard_normal(shape)).astype(np.float32)
        buffer = device.from_numpy(values, stream)
        stack.callback(buffer.close)
        return buffer

    slot = device.zeros(1, np.int32, stream, "slot")
    stack.callback(slot.close)
    weights, a, bias = up(width, _TAPS), up(n_heads), up(n_heads)
    sets = [
        (up(n, width), up(n_slots, width, _TAPS - 1), up(n_slots, n_heads, d, d), up(n, n_heads),
         up(n, n_heads), up(n, n_heads, d))
        for _ in range(n_states)
    ]  # fmt: skip

    def calls(early: bool) -> list[Callable[[], None]]:
        def call(rows: Buffer, conv: Buffer, ssm: Buffer, alpha: Buffer, beta: Buffer, out: Buffer):  # type: ignore[no-untyped-def]
            return lambda: delta_rows(
                stream, rows, weights, conv, ssm, slot, alpha, a, bias, beta, out,
                programmatic=early,
            )  # fmt: skip

        return [call(*buffers) for buffers in sets]

    return calls


def _heads(run: Run) -> tuple[int, int]:
    """Heads and the side of a state."""
    return (2, 64) if run.small else (32, 128)
