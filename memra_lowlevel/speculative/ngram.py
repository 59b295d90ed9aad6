"""Drafting by look-up: what followed the last tokens the last time they were seen."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import MemraError

__all__ = ["NgramIndex"]


class NgramIndex:
    """Positions of all n-grams of a growing token sequence, for constant-time look-up.

    Parameters
    ----------
    longest, shortest : int
        Lengths of the n-grams that are tried, longest first.
    """

    def __init__(self, longest: int = 3, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise MemraError(
                f"NgramIndex: need 1 <= shortest <= longest, got {shortest} and {longest}"
            )
        self.longest, self.shortest = longest, shortest
        self._tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens; committed tokens never change."""
        for token in tokens:
            # An n-gram is entered when its follower arrives, so a look-up never finds itself.
            at = len(self._tokens)
            for n in range(self.shortest, min(self.longest, at) + 1):
                self._follows[tuple(self._tokens[at - n : at])] = at
            self._tokens.append(int(token))

    def propose(self, k: int) -> list[int]:
        """Return up to ``k`` tokens that followed the longest known ending of the sequence.

        The continuation may run into the proposal itself, so a loop of any period is continued
        to the full length.
        """
        size = len(self._tokens)
        for n in range(min(self.longest, size), self.shortest - 1, -1):
            at = self._follows.get(tuple(self._tokens[size - n :]))
            if at is not None:
                line = self._tokens[at:]
                out: list[int] = []
                while len(out) < k:
                    out.append(line[len(out)])
                    line.append(out[-1])
                return out
        return []
