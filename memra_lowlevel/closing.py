"""The one way in which things that hold resources end: ``close()``, or the end of a ``with``."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from .errors import MemraError

__all__ = ["Closing"]

Self = TypeVar("Self", bound="Closing")


class Closing:
    """Base of what has a ``close()``; leaving a ``with`` block calls it."""

    __slots__ = ()

    def close(self) -> None:
        """Give back what this holds; idempotent."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Pickled or copied, it would name handles of another process, or end what is still used.
        raise MemraError(
            f"{type(self).__name__} cannot be pickled or copied: it holds resources of this "
            "process. Send NumPy arrays and make it again there, or share the object itself."
        )

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
