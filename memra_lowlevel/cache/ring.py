"""The sliding-window ring: pure arithmetic over row numbers, no device.

A ring here is a linear buffer that is now and then *rebased*: the rows that are still needed move
down to physical row 0. Live rows are therefore always contiguous, and a kernel needs nothing more
than a shifted base (``physical = absolute - base``).

Three numbers rule a ring of window ``w``: a row at absolute position ``p`` attends
``p - (w - 1) ... p``; view starts are floored to multiples of 32, so up to 31 rows more are kept;
and ``slack`` rows below that are kept so that a later rewind is legal.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import expect
from ..errors import CapacityExceeded, PlaneError, RewindRefused, RingLapped

__all__ = [
    "PRIME_CHUNK_MAX_TOKENS",
    "SWA_REWIND_SLACK_ROWS",
    "SWA_VIEW_ALIGNMENT_ROWS",
    "KvRing",
    "KvRingAppend",
    "swa_retain_from",
    "swa_ring_rows",
]

PRIME_CHUNK_MAX_TOKENS = 4096
"""Largest prefill chunk that may be appended at once while rings are in use, in tokens."""

SWA_REWIND_SLACK_ROWS = 512
"""Rows kept below the aligned start of the window, so that a rewind of that depth is legal."""

SWA_VIEW_ALIGNMENT_ROWS = 32
"""View starts are floored to multiples of this many rows."""


def _floor_aligned(row: int) -> int:
    return row - row % SWA_VIEW_ALIGNMENT_ROWS


def _window_start(length: int, window: int) -> int:
    """First row, floored to the alignment, that a query at absolute row ``length`` still sees."""
    return _floor_aligned(max(0, length - (window - 1)))


def swa_ring_rows(
    window: int,
    max_ctx: int,
    *,
    chunk: int = PRIME_CHUNK_MAX_TOKENS,
    slack: int = SWA_REWIND_SLACK_ROWS,
) -> int:
    """Physical rows of the ring of a sliding-window plane.

    The worst rebase keeps ``(window - 1) + slack + 31`` rows; one chunk then always fits.

    Parameters
    ----------
    window : int
        Rows that a query attends, itself included.
    max_ctx : int
        Rows of the flat plane; a ring is never larger.
    chunk : int
        Largest append, in rows.
    slack : int
        Rows kept for rewinds.
    """
    if window < 1 or max_ctx < 1 or chunk < 1 or slack < 0:
        raise PlaneError(
            f"swa_ring_rows: window {window}, max_ctx {max_ctx} and chunk {chunk} must be at "
            f"least 1 and slack {slack} at least 0"
        )
    return min(max_ctx, window + chunk + slack + SWA_VIEW_ALIGNMENT_ROWS - 1)


def swa_retain_from(
    first_row: int, window: int, base: int, *, slack: int = SWA_REWIND_SLACK_ROWS
) -> int:
    """First absolute row that an append beginning at ``first_row`` has to keep.

    The result is clamped to ``base``: after a legal rewind ``first_row`` went back while the base
    did not, so slack is granted where it is there and never demanded.
    """
    if window < 1:
        raise PlaneError(f"swa_retain_from: window {window} must be at least 1")
    ideal = _floor_aligned(max(0, max(0, first_row - (window - 1)) - slack))
    return max(base, ideal)


@dataclass(frozen=True)
class KvRingAppend:
    """Where the next rows of a ring go.

    Attributes
    ----------
    write_row : int
        Physical row of the first new row.
    src_row, keep_rows, new_base : int or None
        A rebase that must come first: ``keep_rows`` rows move from physical ``src_row`` to 0 and
        the base becomes ``new_base``. All three are None when the append is contiguous.
    """

    write_row: int
    src_row: int | None = None
    keep_rows: int | None = None
    new_base: int | None = None

    @property
    def contiguous(self) -> bool:
        """Whether no rebase is needed."""
        return self.new_base is None


@dataclass
class KvRing:
    """A sliding-window ring: how many rows, how wide a window, and which row is row 0.

    A plain value: copying it copies its state. Planning never changes it.

    Attributes
    ----------
    rows : int
        Physical rows. A rebase keeps up to ``(window - 1) + slack + 31`` rows (starts are floored
        to 32), so with the default ``retain_from`` more than that are needed, by the largest
        append: :func:`swa_ring_rows`.
    window : int
        Rows that a query attends, itself included.
    base : int
        Absolute row that physical row 0 holds.
    slack : int
        Rows that appends keep below the window for rewinds.
    """

    rows: int
    window: int
    base: int = 0
    slack: int = SWA_REWIND_SLACK_ROWS

    def __post_init__(self) -> None:
        for what in ("rows", "window", "base", "slack"):
            value = getattr(self, what)
            if type(value) is not int:
                setattr(self, what, expect.integer(f"KvRing: {what}", value, high=None))
        if self.rows < 1 or self.window < 1 or self.slack < 0 or self.base < 0:
            raise PlaneError(
                f"KvRing: rows {self.rows} and window {self.window} must be at least 1, base "
                f"{self.base} and slack {self.slack} at least 0"
            )

    @property
    def least_rows(self) -> int:
        """Physical rows with which an append of one row always fits after a rebase."""
        return self.window + self.slack + SWA_VIEW_ALIGNMENT_ROWS - 1

    def retain_from(self, first_row: int) -> int:
        """:func:`swa_retain_from` with this ring's window, base and slack."""
        return swa_retain_from(first_row, self.window, self.base, slack=self.slack)

    def append_plan(self, len: int, retain_from: int, n: int) -> KvRingAppend:
        """Plan an append of ``n`` rows to a plane of ``len`` rows.

        Parameters
        ----------
        len : int
            Absolute rows that are valid.
        retain_from : int
            First absolute row that must survive.
        n : int
            Rows to append.

        Raises
        ------
        RingLapped
            Rows that are asked for were already dropped.
        CapacityExceeded
            The kept and the new rows do not fit together.
        """
        if n < 0:
            raise PlaneError(f"KvRing.append_plan: n {n} is negative")
        if len < self.base or retain_from < self.base or retain_from > len:
            raise RingLapped(
                f"KvRing.append_plan: the ring lapped required rows (base {self.base}, retain "
                f"from {retain_from}, len {len}): keep base <= retain_from <= len, or prime the "
                "sequence again"
            )
        used = len - self.base
        if used > self.rows:
            raise RingLapped(
                f"KvRing.append_plan: len {len} lies {used} rows above base {self.base}, but the "
                f"ring has {self.rows} rows; prime the sequence again"
            )
        if used + n <= self.rows:
            return KvRingAppend(write_row=used % self.rows)
        keep = len - retain_from
        if keep + n > self.rows:
            raise CapacityExceeded(
                f"KvRing.append_plan: {keep} kept and {n} new rows do not fit in {self.rows} "
                f"rows (len {len}, retain from {retain_from}): append at most "
                f"{max(0, self.rows - keep)} rows at once, or give the ring more rows: "
                "swa_ring_rows(window, max_ctx, chunk=rows of an append, slack=…)"
            )
        return KvRingAppend(
            write_row=keep,
            src_row=retain_from - self.base,
            keep_rows=keep,
            new_base=retain_from,
        )

    def apply_rebase(self, new_base: int) -> None:
        """Record that physical row 0 now holds absolute row ``new_base``; it never goes back."""
        if new_base < self.base:
            raise RingLapped(
                f"KvRing.apply_rebase: base {new_base} lies below the present base {self.base}, "
                "whose rows are gone"
            )
        self.base = new_base

    def physical_range(self, start: int, end: int) -> range:
        """Physical rows of the absolute rows ``[start, end)``."""
        if start < self.base or end < start or end - self.base > self.rows:
            raise RingLapped(
                f"KvRing.physical_range: rows [{start}, {end}) are not in the ring, which can "
                f"hold [{self.base}, {self.base + self.rows})"
            )
        first = (start - self.base) % self.rows
        return range(first, first + (end - start))

    def can_rewind_to(self, len: int) -> bool:
        """Whether every row that the next query after a rewind to ``len`` sees is still there."""
        return 0 <= len and _window_start(len, self.window) >= self.base

    def shortest_rewind(self) -> int:
        """Smallest length for which :meth:`can_rewind_to` holds."""
        aligned = -(-self.base // SWA_VIEW_ALIGNMENT_ROWS) * SWA_VIEW_ALIGNMENT_ROWS
        return 0 if aligned == 0 else aligned + self.window - 1

    def restore_plan(self, len: int) -> tuple[int, range]:
        """Plan what a copy of this ring at ``len`` into a fresh ring must move.

        Returns
        -------
        (int, range)
            The base of the fresh ring, and the physical rows here that become its rows 0, 1, ….

        Raises
        ------
        RewindRefused
            Rows of the window were already dropped.
        """
        new_base = _window_start(len, self.window)
        if not self.can_rewind_to(len):
            raise RewindRefused(
                f"KvRing.restore_plan: len {len} needs rows from {new_base} on, but the ring "
                f"begins at {self.base}: full re-prime required",
                asked=len,
                possible=self.shortest_rewind(),
            )
        return new_base, self.physical_range(new_base, len)
