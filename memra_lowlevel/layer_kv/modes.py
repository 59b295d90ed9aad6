"""Small value types of the layer cache: storage mode, rectifier, wire kind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar

from memra_lowlevel.errors import KvStateError

__all__ = ["KvMode", "O1Rect", "WireKind"]


@dataclass(frozen=True)
class KvMode:
    """How a layer stores its rows.

    ``KvMode.F32`` keeps float32. ``KvMode.Q8(k=True, v=True)`` keeps int8 codes for the named
    sides: keys with one scale per 32 channels, values with one scale per row.

    Attributes
    ----------
    k, v : bool
        Whether keys, values are quantised.
    """

    k: bool = False
    v: bool = False

    F32: ClassVar[KvMode]

    @staticmethod
    def Q8(k: bool = True, v: bool = True) -> KvMode:
        """Return the quantised mode for keys, values or both.

        Raises
        ------
        KvStateError
            If neither side is quantised; that is ``KvMode.F32``.
        """
        if not (k or v):
            raise KvStateError(
                "KvMode.Q8(k=False, v=False) quantises nothing; say KvMode.F32 instead"
            )
        return KvMode(bool(k), bool(v))

    @staticmethod
    def from_env() -> KvMode:
        """Read the door ``CMF_KV``: empty or unset, ``q8`` or ``q8_2f``, ``q8k``, ``q8v``.

        Raises
        ------
        KvStateError
            For any other value.
        """
        text = os.environ.get("CMF_KV", "")
        if text in _DOOR:
            return _DOOR[text]
        raise KvStateError(
            f"CMF_KV={text!r} is not a storage mode; use q8, q8_2f, q8k, q8v, or unset it for F32"
        )

    @property
    def quantised(self) -> bool:
        """Whether any side is quantised."""
        return self.k or self.v

    def __repr__(self) -> str:
        return f"KvMode.Q8(k={self.k}, v={self.v})" if self.quantised else "KvMode.F32"


KvMode.F32 = KvMode()
_DOOR = {
    "": KvMode.F32,
    "q8": KvMode(True, True),
    "q8_2f": KvMode(True, True),
    "q8k": KvMode(True, False),
    "q8v": KvMode(False, True),
}


class O1Rect(Enum):
    """What the skeleton does with negative weights.

    ``AGGREGATE`` keeps them as long as the far mass stays positive; ``FM`` clips each weight at 0,
    so that every answer is a convex combination of values.
    """

    AGGREGATE = "aggregate"
    FM = "fm"


class WireKind(IntEnum):
    """Record kinds of the state wire; a layer's own kind is one of the first three."""

    FULL = 0
    LINEAR = 1
    BOUNDED = 2
    FULL_TAIL = 3
