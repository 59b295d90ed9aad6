"""Device counters: lengths, positions and slots that live on the device.

A kernel reads the counter, so the same captured work does the next step at each replay; the host
keeps a mirror and moves it in lock-step, so that it can say no before a plane overflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compile import compile_file, cuda_src_root
from ..errors import ArgumentError, CapacityExceeded, CounterUnknown, MemraError
from ..runtime.device import Device
from ..runtime.launch import LaunchConfig, launch
from ..runtime.lifetime import capturing
from ..runtime.memory import Buffer, PinnedBuffer, note_use
from ..runtime.recording import forbid
from .capture import capture_of
from .effects import Effect, new_mirror

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime.stream import Stream

__all__ = ["DeviceCounter", "sync_counters", "verify_counters"]

_serial = itertools.count(1)
_I32_MAX = 2**31 - 1


class DeviceCounter:
    """One i32 on the device, its host mirror, and the rule who may write it.

    Only this object and work announced to it (:meth:`moved`, or a capture's ``note_*``) write the
    counter. Passed to a kernel it stands for its buffer.

    Parameters
    ----------
    place : Buffer or Device
        An i32[1] view that is zero, usually of a block that holds all counters of a cache; or a
        device, to allocate one (then ``stream`` is needed).
    name : str
    capacity : int, optional
        Largest value; room is checked against it before each launch.
    stream : Stream, optional
        Where the allocated counter is zeroed.

    Attributes
    ----------
    buffer : Buffer
    """

    def __init__(
        self,
        place: Buffer | Device,
        name: str = "counter",
        *,
        capacity: int | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.serial, self.name = next(_serial), name
        if capacity is not None and not 0 <= capacity <= _I32_MAX:
            raise ArgumentError(
                f"counter {name!r}: capacity {capacity} is no i32.",
                name=name, expected=f"0 … {_I32_MAX}", got=str(capacity),
            )  # fmt: skip
        self._owns = isinstance(place, Device)
        if isinstance(place, Device):
            if stream is None:
                raise ArgumentError(
                    f"counter {name!r}: give stream= with a device, or a zeroed i32[1] view.",
                    name=name, expected="a stream", got="None",
                )  # fmt: skip
            place = place.zeros(1, np.int32, stream, name=name)
        if place.dtype != np.int32 or place.size != 1:
            raise ArgumentError(
                f"counter {name!r}: it needs an i32[1] view, not {place!r}.",
                name=name, expected="int32[1]", got=f"{place.dtype}{list(place.shape)}",
            )  # fmt: skip
        self.buffer = place
        if not capturing():
            # Loading is refused during a capture, where advance() is most used.
            counter_kernel(place.device, "add_counters")
        self.mirror: Any = new_mirror(-1 if capacity is None else capacity)

    # -- the mirror -------------------------------------------------------------------------------
    @property
    def capacity(self) -> int | None:
        """Largest value, or None."""
        capacity = int(self.mirror.capacity)
        return None if capacity < 0 else capacity

    @property
    def known(self) -> bool:
        """Whether the host knows the value."""
        return bool(self.mirror.known)

    @property
    def value(self) -> int:
        """Value once all work issued so far is done.

        Raises
        ------
        CounterUnknown
            After work in which a kernel decided; :func:`sync_counters` reads it back.
        """
        if not self.mirror.known:
            low, high = self.bounds
            raise CounterUnknown(
                f"counter {self.name!r}: a kernel decided its value; the host only knows "
                f"{low} … {'?' if high is None else high}. Call sync_counters(stream)."
            )
        return int(self.mirror.lower)

    @property
    def bounds(self) -> tuple[int, int | None]:
        """Smallest and largest possible value; None where no upper bound is known."""
        m = self.mirror
        return int(m.lower), int(m.upper) if m.bounded else None

    # -- writing ----------------------------------------------------------------------------------
    def set(self, stream: Stream, value: int) -> None:
        """Write ``value`` on ``stream``; under capture, record that each launch writes it."""
        top = self.capacity if self.capacity is not None else _I32_MAX
        if not 0 <= value <= top:
            raise CapacityExceeded(
                f"counter {self.name!r}: {value} does not lie in 0 … {top}. Nothing was written."
            )
        self.buffer._ready(stream)
        stream.context.driver.cuMemsetD32Async(self.buffer.ptr, value, 1, stream.handle)
        note_use(stream, self.buffer.storage)
        capture = capture_of(stream)
        if capture is not None:
            capture.note_set(self, value)
            return
        effect = Effect(self)
        effect.note_set(value)
        effect.apply()

    def advance(self, stream: Stream, n: int = 1) -> None:
        """Add ``n`` on the device, and to the mirror; under capture, for each launch."""
        self.need(stream, n)
        kernel = counter_kernel(self.buffer.device, "add_counters")
        if n < 0:
            self._check_lower(stream, n)
        launch(stream, _ONE, kernel, self.buffer, None, 1, n)
        self.moved(stream, n)

    def need(self, stream: Stream, n: int) -> None:
        """Rows ``[value, value + n)`` are about to be written: refuse if there is no room.

        Under capture the need is recorded and checked before each launch.
        """
        capture = capture_of(stream)
        if capture is not None:
            capture.note_need(self, n)
            return
        effect = Effect(self)
        effect.note_need(n)
        effect.check()

    def moved(self, stream: Stream, n: int, at_most: int | None = None) -> None:
        """Work on ``stream`` that was just issued adds ``n`` (or ``n … at_most``).

        For kernels that move counters themselves, such as one that advances a whole cache.
        """
        capture = capture_of(stream)
        if capture is not None:
            capture.note_advance(self, n, max(0, n), at_most=at_most)
            return
        effect = Effect(self)
        effect.note_advance(n, n if at_most is None else at_most, 0)
        effect.apply()

    def moved_unbounded(self, stream: Stream) -> None:
        """Work on ``stream`` moves the counter by an amount that only the device knows."""
        capture = capture_of(stream)
        if capture is not None:
            capture.note_unbounded(self)
            return
        effect = Effect(self)
        effect.note_unbounded()
        effect.apply()

    def advance_recorded(self, n: int) -> None:
        """Move the mirror alone, for device work that was announced in another way."""
        effect = Effect(self)
        effect.note_advance(n, n, 0)
        effect.apply()

    def was_set(self, value: int) -> None:
        """Set the mirror alone: the device value was written by work issued already."""
        effect = Effect(self)
        effect.note_set(value)
        effect.apply()

    # -- reading back -----------------------------------------------------------------------------
    def sync(self, stream: Stream) -> int:
        """Read the value back after all work on ``stream``; blocks."""
        sync_counters(stream, [self])
        return self.value

    def close(self) -> None:
        """Give the memory back if the counter allocated it."""
        if self._owns:
            self.buffer.close()

    def _check_lower(self, stream: Stream, n: int) -> None:
        if capture_of(stream) is None:
            effect = Effect(self)
            effect.note_advance(n, n, 0)
            effect.check()

    def __repr__(self) -> str:
        low, high = self.bounds
        text = str(low) if self.known else f"{low} … {'?' if high is None else high}"
        return f"<DeviceCounter {self.name!r} {text} of {self.capacity}>"


_ONE = LaunchConfig(1, 32)


def counter_kernel(device: Device, name: str) -> Kernel:
    """``add_counters`` or ``set_counters`` for a device; loaded once."""
    module = device.memo.get("counters")
    if module is None:
        forbid("cuModuleLoadData", what="the counter kernels")
        image = compile_file(cuda_src_root() / "kv" / "counters.cu", arch=device.arch)
        module = device.memo["counters"] = device.module(image)
    kernel: Kernel = module.kernel(name)
    return kernel


def sync_counters(stream: Stream, counters: Iterable[DeviceCounter]) -> None:
    """Read counters back after all work on ``stream`` and set their mirrors; blocks."""
    for counter, value in _read(stream, counters):
        counter.was_set(value)


def verify_counters(stream: Stream, counters: Iterable[DeviceCounter]) -> None:
    """Compare mirrors with the device after all work on ``stream``; blocks.

    Raises
    ------
    MemraError
        Naming each counter whose device value lies outside its mirror: somebody else wrote it.
    """
    wrong = []
    for counter, value in _read(stream, counters):
        low, high = counter.bounds
        if value < low or (high is not None and value > high):
            wrong.append(f"{counter.name!r} is {value}, its mirror says {counter!r}")
    if wrong:
        raise MemraError(
            "counters and mirrors differ: " + "; ".join(wrong) + ". Something wrote a counter "
            "without telling it; use DeviceCounter.set, advance or moved."
        )


def _read(stream: Stream, counters: Iterable[DeviceCounter]) -> list[tuple[DeviceCounter, int]]:
    counters = list(counters)
    forbid("cuStreamSynchronize", stream=stream, what="reading counters back")
    if not counters:
        return []
    landing: PinnedBuffer = stream.device.pinned(len(counters), np.int32, name="counters")
    for i, counter in enumerate(counters):
        counter.buffer.copy_to(stream, landing.view(4 * i, (1,), np.int32))
    stream.sync()
    values = [int(v) for v in landing.array]
    landing.close()
    return list(zip(counters, values, strict=True))
