"""Planes that move together: one block of lengths on the device, one mirror on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from .. import expect
from ..closing import Closing
from ..errors import CaptureForbidden
from ..graph.counters import DeviceCounter
from ..kernels import counters as counter_kernels
from ..kernels.kv_attend import TICKETS
from ..runtime.storage import note_use

if TYPE_CHECKING:
    from ..runtime import Arena, Buffer, Device, Stream

__all__ = ["Lengths", "Planes", "Workspace"]


class Planes(Protocol):
    """A set of planes with one length: a ``KvLayer`` of its own, or a ``Cache``.

    Attributes
    ----------
    len, capacity : int
        Valid rows, and the most there can be.
    counters : Buffer
        i32[n], the lengths of all planes on the device, contiguous.
    """

    @property
    def len(self) -> int:
        """Valid rows."""
        ...

    @property
    def capacity(self) -> int:
        """Most rows."""
        ...

    @property
    def counters(self) -> Buffer:
        """The lengths on the device."""
        ...

    def prepare(self, stream: Stream, n: int) -> bool:
        """Make room for ``n`` rows, outside any capture; return whether a ring was rebased."""
        ...

    def check_headroom(self, n: int) -> None:
        """Refuse unless ``n`` rows fit as the planes stand."""
        ...

    def advance(self, stream: Stream, n: int) -> None:
        """Move every length by ``n``, on the device and on the host."""
        ...

    def moved(self, stream: Stream, n: int) -> None:
        """Book that a kernel which was just issued on ``stream`` moved every length by ``n``."""
        ...

    def guard(self, stream: Stream) -> None:
        """Under capture: let every launch of the graph check what only the planes know."""
        ...

    def set_len(self, stream: Stream, n: int) -> None:
        """Set every length, on the device and on the host."""
        ...


class Lengths:
    """The counters of planes in lock-step: lengths, slots of recurrent states, bases of rings.

    One block of i32 words: ``len_d`` of each plane, ``slot_d`` of each recurrent layer, ``base_d``
    of each plane. Lengths and slots lie together, so that one launch moves them all.

    Attributes
    ----------
    buffer : Buffer
        i32: the words that a step of n rows moves by n.
    counter : DeviceCounter
        The one host mirror of all lengths.
    slots : DeviceCounter or None
        The one host mirror of all slots.
    capacity : int
        Most rows.
    """

    def __init__(
        self,
        arena: Arena,
        stream: Stream,
        n_planes: int,
        capacity: int,
        *,
        n_slots: int = 0,
        name: str,
    ):
        self.n_planes, self.n_slots = max(1, n_planes), n_slots
        self.capacity, self.name = capacity, name
        self._words: Buffer = arena.take(
            (self.n_words(n_planes, n_slots),), np.int32, name=f"{name}.lengths"
        )
        self._words.fill(stream, 0)
        lens = self._words.view(0, (self.n_planes,), np.int32)
        self.buffer: Buffer = self._words.view(0, (self.n_planes + n_slots,), np.int32)
        self.counter = DeviceCounter(lens, name=f"{name}.len", capacity=capacity)
        self.slots: DeviceCounter | None = None
        if n_slots:
            words = self._words.view(4 * self.n_planes, (n_slots,), np.int32)
            self.slots = DeviceCounter(words, name=f"{name}.slot")
            counter_kernels.prepare(arena.device)

    @staticmethod
    def n_words(n_planes: int, n_slots: int) -> int:
        """Words of a block."""
        return 2 * max(1, n_planes) + n_slots

    @property
    def value(self) -> int:
        """The length on the host; raises ``CounterUnknown`` while only the device knows."""
        return self.counter.value

    def view(self, index: int) -> Buffer:
        """Return ``len_d`` i32[1] of plane ``index``."""
        return self._words.view(4 * index, (1,), np.int32)

    def slot(self, index: int) -> Buffer:
        """Return ``slot_d`` i32[1] of recurrent layer ``index``."""
        return self._words.view(4 * (self.n_planes + index), (1,), np.int32)

    def base(self, index: int) -> Buffer:
        """Return ``base_d`` i32[1] of plane ``index``."""
        return self._words.view(4 * (self.n_planes + self.n_slots + index), (1,), np.int32)

    def need(self, stream: Stream, n: int) -> None:
        """Refuse unless ``n`` rows fit behind the length; under capture, before each launch."""
        self.counter.note_need(stream, n)

    def advance(self, stream: Stream, n: int, steps: int | None = None) -> None:
        """Add ``n`` to every length and ``steps`` (default n) to every slot, here and there.

        One launch, or two where the amounts differ; captured, at every launch of the graph.
        """
        n = expect.integer(f"{self.name}.advance: n", n)
        if n < 0:
            raise expect.refusal(
                f"{self.name}.advance: n", n, "rows to add", "set_len shortens the planes"
            )
        if self.slots is None:
            self.counter.advance(stream, n)
        elif steps is None or steps == n:
            self.counter.note_need(stream, n)
            counter_kernels.add_counters(stream, self.buffer, n)
            self.moved(stream, n)
        else:
            self.counter.advance(stream, n)
            self.slots.advance(stream, steps)

    def moved(self, stream: Stream, n: int) -> None:
        """Book that a kernel which was just issued on ``stream`` added ``n`` to ``buffer``."""
        self.counter.advance_recorded(stream, n)
        if self.slots is not None:
            self.slots.advance_recorded(stream, n)

    def set(self, stream: Stream, n: int, slot: int | None = None) -> None:
        """Set every length (and every slot) in place, here and there; captured, at every launch."""
        self.counter.set(stream, n)
        if slot is not None and self.slots is not None:
            self.slots.set(stream, slot)

    def set_base(self, stream: Stream, index: int, base: int) -> None:
        """Write ``base_d`` of a plane in place."""
        word = self.base(index)
        word._ready(stream)
        stream.context.driver.cuMemsetD32Async(word.ptr, base, 1, stream.handle)
        note_use(stream, word.storage)


class Workspace(Closing):
    """Scratch memory of attention, shared by the planes of a group; used on one stream at a time.

    It grows when a call needs more, never under capture, and outgrown blocks are kept: captured
    graphs hold their addresses.

    Attributes
    ----------
    tickets : Buffer or None
        u32, zero between launches: what lets one launch do all; there from the first ``take`` on.
    """

    def __init__(self, device: Device):
        self.device = device
        self._blocks: list[Arena] = []
        self._buffer: Buffer | None = None
        self.tickets: Buffer | None = None

    def take(self, stream: Stream, n_bytes: int) -> Buffer:
        """Return an f32 buffer of at least ``n_bytes``.

        Raises
        ------
        CaptureForbidden
            It would have to grow while ``stream`` is being captured.
        """
        if self._buffer is None or self._buffer.n_bytes < n_bytes:
            if stream.recording is not None:
                raise CaptureForbidden(
                    f"attend: its workspace must grow to {n_bytes} bytes while stream "
                    f'"{stream.name}" is being captured; run the step once before the capture',
                    call="cuMemAlloc",
                )
            block = self.device.arena(n_bytes + 256, name="attend workspace")
            self._blocks.append(block)
            self._buffer = block.take((-(-n_bytes // 4),), np.float32, name="partials")
            if self.tickets is None:
                self.tickets = self.device.zeros(TICKETS, np.uint32, stream, "attend tickets")
        return self._buffer

    @property
    def n_bytes(self) -> int:
        """Bytes held, outgrown blocks included."""
        return sum(block.n_bytes for block in self._blocks)

    def close(self) -> None:
        """Free all blocks; idempotent."""
        self._buffer = None
        if self.tickets is not None:
            self.tickets.close()
            self.tickets = None
        for block in self._blocks:
            block.close()
        self._blocks.clear()
