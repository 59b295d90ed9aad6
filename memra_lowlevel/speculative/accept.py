"""Greedy acceptance, and the only place where the amounts of a rewind are computed.

A round drafts ``k`` tokens behind the *pending* token: the newest committed token, which no plane
of the target has seen yet. The target verifies ``k + 1`` rows (pending, then the drafts), so it
appends ``k + 1`` rows; the draft was fed the pending token and all drafts but the last, so it
appended ``k``. With ``accepted`` drafts right, both should hold the rows of the pending token and
of the accepted drafts, and the target's own token behind them becomes the new pending token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MemraError

__all__ = ["Rewind", "accept_greedy", "rewind_amounts"]


@dataclass(frozen=True)
class Rewind:
    """How far planes go back after a round.

    Attributes
    ----------
    target : int
        Rows to drop from the target's planes.
    draft : int
        Rows to drop from the draft's planes.
    lag : int
        Rows that the draft misses afterwards *because of this round*. It adds to the lag of the
        rounds before unless this round fed those rows first.
    """

    target: int
    draft: int
    lag: int


def rewind_amounts(k: int, accepted: int) -> Rewind:
    """Amounts after a round of ``k`` drafts of which the first ``accepted`` were right.

    Raises
    ------
    MemraError
        Unless ``0 <= accepted <= k``.
    """
    if not 0 <= accepted <= k:
        raise MemraError(f"rewind_amounts: accepted {accepted} must lie in 0..k = {k}")
    return Rewind(target=k - accepted, draft=max(0, k - 1 - accepted), lag=max(0, accepted + 1 - k))


def accept_greedy(drafts: Sequence[int], argmax: Sequence[int]) -> tuple[int, list[int]]:
    """Accept drafts as long as they are what the target would have said.

    Parameters
    ----------
    drafts : sequence of int, length k
    argmax : sequence of int, length k + 1
        The target's token behind the pending token and behind each draft.

    Returns
    -------
    (int, list of int)
        How many drafts were right, and the tokens that the round commits: those drafts and the
        target's own token behind them. The last one is the new pending token.
    """
    if len(argmax) != len(drafts) + 1:
        raise MemraError(
            f"accept_greedy: {len(drafts)} drafts need {len(drafts) + 1} target tokens, got "
            f"{len(argmax)}"
        )
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == argmax[accepted]:
        accepted += 1
    return accepted, [*drafts[:accepted], argmax[accepted]]
