"""What a latent layer's indexer has ready: which keys are final, and which index rows still lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import CounterUnknown, PlaneError, RingLapped
from ..graph.capture import capture_of
from ..graph.effects import SYNC_REMEDY
from ..kernels.latent_index import MAX_POOL
from .index_ring import index_ring_take

if TYPE_CHECKING:
    from ..runtime import Stream
    from .planes import Lengths

__all__ = ["IndexTail"]


class IndexTail:
    """The book-keeping of an index plane; no device.

    Two numbers say what may be read. ``ready``: pools ``[0, ready)`` have final keys. It is
    ``len // pool`` whenever no call is under way; what eager calls leave is kept and compared at
    the next one, because a length that was lowered without :meth:`truncate` would otherwise leave
    keys of rows that are no more. After a replay the device has moved, and it is derived.
    ``intact_from``: index rows of the present sequence from there on have not been written over.

    Attributes
    ----------
    pool : int
        Rows per key; 0 until known.
    effective : int
        Rows of the ring, in whole pools; 0 for a flat plane.
    intact_from : int
    """

    def __init__(self, lengths: Lengths, ring_rows: int, name: str):
        self._lengths, self._ring_rows, self.name = lengths, ring_rows, name
        self.pool = self.effective = self.intact_from = 0
        self._ready: int | None = 0  # None: derived from the length

    @staticmethod
    def check_pool(pool: int, ring_rows: int, name: str) -> None:
        """Refuse a pool that cannot be, alone or with a ring of that many rows."""
        if not 1 <= pool <= MAX_POOL:
            raise PlaneError(f"{name}: {pool} rows per key; there are kernels for 1 to {MAX_POOL}")
        if 0 < ring_rows < pool:
            raise PlaneError(
                f"{name}: index_ring_rows {ring_rows} is less than a pool of {pool} rows. It is a "
                "number of rows, not a switch: give at least one pool, or None for a flat plane"
            )

    def fix_pool(self, pool: int) -> None:
        """Fix the rows per key, once."""
        if self.pool not in (0, pool):
            raise PlaneError(
                f"{self.name}: index_pool is {self.pool}, a call says {pool}; keys of another pool "
                "would not fit those that are there"
            )
        self.check_pool(pool, self._ring_rows, self.name)
        self.pool, self.effective = pool, self._ring_rows // pool * pool

    def check_ape(self, size: int, d: int) -> None:
        """Refuse gate offsets that are not ``[pool, d]``."""
        if size != self.pool * d:
            raise PlaneError(
                f"{self.name}: ape must be f32 [{self.pool}, {d}], got {size} elements"
            )

    # -- what is ready ----------------------------------------------------------------------------
    @property
    def ready(self) -> int:
        """Pools whose keys are final."""
        if self._ready is not None:
            return self._ready
        return self._lengths.value // self.pool if self.pool else 0

    @ready.setter
    def ready(self, n: int) -> None:
        self._ready = n

    def has_tail_of(self, length: int) -> bool:
        """Whether the rows of the open pool of that length still lie in the plane."""
        if self.effective == 0 or length % self.pool == 0:
            return True
        return self.intact_from <= length // self.pool * self.pool

    def check(self) -> None:
        """Refuse to go on from a state that the length contradicts.

        Raises
        ------
        PlaneError
            ``index_pools_ready`` is not ``len // pool``.
        RingLapped
            Rows of the open pool are gone.
        """
        length = self._lengths.value
        if self.ready != length // self.pool:
            raise PlaneError(
                f"{self.name}: index_pools_ready is {self.ready}, but len {length} has "
                f"{length // self.pool} whole pools of {self.pool}. Whoever sets the length calls "
                "truncate_index_pool_keys(pool)"
            )
        self._check_tail(length)

    def _check_tail(self, length: int) -> None:
        if not self.has_tail_of(length):
            raise RingLapped(
                f"{self.name}: the ring of {self.effective} index rows was written over below row "
                f"{self.intact_from}; len {length} still needs rows from "
                f"{length // self.pool * self.pool} on. Prime the sequence again"
            )

    def truncate(self) -> None:
        """Clamp to the length, after it was lowered."""
        length = self._lengths.value
        self._ready = min(self.ready, length // self.pool)
        # Rows from the length on will be written anew.
        self.intact_from = min(self.intact_from, length)

    def settle(self) -> None:
        """Clamp after an advance by fewer rows than were appended."""
        if self._ready is None or not self.pool:
            return
        if self._lengths.counter.known:
            self._ready = min(self._ready, self._lengths.value // self.pool)
        else:
            self._ready = None

    def reset(self, ready: int = 0, intact_from: int = 0) -> None:
        """Start again, with an empty plane or a restored one."""
        self._ready, self.intact_from = ready, intact_from

    # -- appending --------------------------------------------------------------------------------
    @contextmanager
    def appending(self, stream: Stream, n: int) -> Iterator[Iterator[tuple[int, int]]]:
        """Cut an append of n rows into pieces that the ring takes; book what they do.

        Gives (first row, rows) of each piece. If it fails half-way, ``ready`` is clamped to the
        length, which has not moved.
        """
        if stream.recording is not None:
            self._note_launch(stream, n)
            yield self._captured(n)
            return
        slot = self._lengths.value
        try:
            yield self._drained(slot, n)
        except BaseException:
            self._ready = min(self.ready, slot // self.pool)
            raise

    def _drained(self, slot: int, n: int) -> Iterator[tuple[int, int]]:
        done = 0
        self.intact_from = min(self.intact_from, slot)
        while done < n:
            take = index_ring_take(self.effective, self.pool, self.ready, slot + done, n - done)
            if take is None:
                raise RingLapped(
                    f"{self.name}: the ring of {self.effective} index rows has no room at row "
                    f"{slot + done} with {self.ready} keys built"
                )
            if self.effective:
                self.intact_from = max(self.intact_from, slot + done + take - self.effective)
            yield done, take
            done += take
            self._ready = (slot + done) // self.pool

    def _captured(self, n: int) -> Iterator[tuple[int, int]]:
        # The length is not known yet: an open pool may be one row short of being whole.
        most = self.effective - self.pool + 1 if self.effective else n
        for first in range(0, n, max(1, most)):
            yield first, min(most, n - first)

    def _note_launch(self, stream: Stream, n: int) -> None:
        """Let every launch of the graph check the state it starts from, and book what it does."""
        capture = capture_of(stream)
        if capture is None:
            return
        effect = capture.effect_on(self._lengths.counter)
        set_to = effect.set_to if effect.has_set else None
        lower, upper = effect.add_lower, effect.add_upper
        first = set_to is None and lower == upper == 0

        def check(_: object) -> None:
            counter = self._lengths.counter
            if first and counter.known and self._ready is not None:
                self.check()
            low, high = counter.bounds if set_to is None else (set_to, set_to)
            if self.effective:
                if high is None:
                    raise CounterUnknown(
                        f"{self.name}: the length has no bound, so its ring of index rows cannot "
                        f"be checked. {SYNC_REMEDY} first"
                    )
                if low + lower == high + upper:
                    self._check_tail(low + lower)
                self.intact_from = max(
                    min(self.intact_from, low + lower), high + upper + n - self.effective
                )
            self._ready = None

        capture.add_check(check)
