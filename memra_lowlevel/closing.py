"""The one way in which things that hold resources end: ``close()``, or the end of a ``with``."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Closing"]

Self = TypeVar("Self", bound="Closing")


class Closing:
    """Base of what has a ``close()``; leaving a ``with`` block calls it."""

    __slots__ = ()

    def close(self) -> None:
        """Give back what this holds; idempotent."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
