"""Checkpoints of a cache: lengths, and copies of what cannot be rewound by an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..closing import Closing

if TYPE_CHECKING:
    from ..runtime import Buffer

__all__ = ["CacheSnapshot"]


@dataclass
class CacheSnapshot(Closing):
    """A point to which a cache can go back; made by ``Cache.snapshot``.

    KV planes need no copy: their rows stay until they are written over. Recurrent states are
    copied.

    Attributes
    ----------
    kv_len : list of int or None
        Rows of each layer's KV plane.
    tp_kv_len : list of int or None
        Committed rows of each tensor-parallel plane.
    conv, ssm : list of Buffer or None
        Device copies of each recurrent layer's states.
    pos : int
        Position of the next token.
    slot : int
        Committed steps of the recurrent layers.
    """

    kv_len: list[int | None]
    tp_kv_len: list[int | None]
    conv: list[Buffer | None]
    ssm: list[Buffer | None]
    pos: int
    slot: int = 0

    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(b.n_bytes for b in (*self.conv, *self.ssm) if b is not None)

    def close(self) -> None:
        """Free the copies; idempotent."""
        for buffer in (*self.conv, *self.ssm):
            if buffer is not None:
                buffer.close()
