"""Device counters: lengths, positions and slots that live on the device.

A kernel reads the counter, so the same captured work does the next step at each replay; the host
keeps a mirror and moves it in lock-step, so that it can say no before a plane overflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import expect
from ..closing import Closing
from ..compile import compile_file, cuda_src_root
from ..errors import ArgumentError, CapacityExceeded, CounterUnknown, MemraError
from ..runtime.device import Device
from ..runtime.launch import LaunchConfig, launch
from ..runtime.lifetime import capturing
from ..runtime.memory import Buffer, PinnedBuffer
from ..runtime.recording import forbid
from ..runtime.storage import note_use
from ..runtime.stream import expect_stream
from .capture import capture_of
from .effects import SYNC_REMEDY, Effect, new_mirror

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime.stream import Stream

__all__ = ["DeviceCounter", "sync_counters", "verify_counters"]

_serial = itertools.count(1)
_I32_MAX = 2**31 - 1


class DeviceCounter(Closing):
    """An i32 on the device, its host mirror, and the rule who may write it.

    Only this object and work announced to it (:meth:`advance_recorded`, ``note_*``) write the
    counter. Passed to a kernel it stands for its buffer. Several words that always move together,
    such as the lengths of all planes of a cache, may be one counter.

    Parameters
    ----------
    place : Buffer or Device
        An i32[n] view of words that are zero and move together; or a device, to allocate one
        word (then ``stream`` is needed).
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
        if not isinstance(name, str):
            raise expect.refusal("counter: name", name, "a str")
        if capacity is not None:
            capacity = expect.integer(f"counter {name!r}: capacity", capacity, 0, _I32_MAX)
        self._owns = isinstance(place, Device)
        if isinstance(place, Device):
            if stream is None:
                raise ArgumentError(
                    f"counter {name!r}: give stream= with a device, or a zeroed i32 view.",
                    name=name, expected="a stream", got="None",
                )  # fmt: skip
            place = place.zeros(1, np.int32, stream, name=name)
        expect.kind(f"counter {name!r}: place", place, Buffer, "a Device or an i32 Buffer")
        if place.dtype != np.int32 or place.size < 1:
            raise ArgumentError(
                f"counter {name!r}: it needs an i32 view, not {place!r}.",
                name=name, expected="int32[n]", got=f"{place.dtype}{list(place.shape)}",
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
                f"{low} … {'?' if high is None else high}. {SYNC_REMEDY}."
            )
        return int(self.mirror.lower)

    @property
    def bounds(self) -> tuple[int, int | None]:
        """Smallest and largest possible value; None where no upper bound is known."""
        m = self.mirror
        return int(m.lower), int(m.upper) if m.bounded else None

    # -- writing ----------------------------------------------------------------------------------
    def set(self, stream: Stream, value: int) -> None:
        """Write ``value`` on ``stream``; under capture, record that each launch writes it.

        Raises
        ------
        ArgumentError
            No integer, or one below 0.
        CapacityExceeded
            More than the counter may hold.
        """
        top = self.capacity if self.capacity is not None else _I32_MAX
        value = expect.integer(f"counter {self.name!r}: value", value, 0, None)
        if value > top:
            raise CapacityExceeded(
                f"counter {self.name!r}: {value} does not lie in 0 … {top}. Nothing was written; "
                "set less, or give the counter a larger capacity."
            )
        self.buffer._ready(stream)
        stream.context.driver.cuMemsetD32Async(
            self.buffer.ptr, value, self.buffer.size, stream.handle
        )
        note_use(stream, self.buffer.storage)
        self.note_set(value, stream)

    def advance(self, stream: Stream, n: int = 1) -> None:
        """Add ``n`` on the device, and to the mirror; under capture, for each launch."""
        n = expect.integer(f"counter {self.name!r}: n", n, -_I32_MAX - 1, _I32_MAX)
        self.note_need(stream, max(0, n))
        kernel = counter_kernel(self.buffer.device, "add_counters")
        if n < 0:
            self._check_lower(stream, n)
        size = self.buffer.size
        config = _ONE if size <= 32 else LaunchConfig(-(-size // 128), 128)
        launch(stream, config, kernel, self.buffer, None, size, n)
        self.advance_recorded(stream, n)

    def note_need(self, stream: Stream, n: int) -> None:
        """Refuse unless rows ``[value, value + n)``, about to be written, have room.

        Under capture the need is recorded and checked before each launch.
        """
        if type(n) is not int or not 0 <= n <= _I32_MAX:
            n = expect.integer(f"counter {self.name!r}: note_need: n", n, 0, _I32_MAX)
        capture = capture_of(stream)
        if capture is not None:
            capture.note_need(self, n)
            return
        effect = Effect(self)
        effect.note_need(n)
        effect.check()

    def advance_recorded(self, stream: Stream, n: int, at_most: int | None = None) -> None:
        """Book that work just issued on ``stream`` adds ``n`` (or ``n … at_most``).

        For kernels that move counters themselves, such as one that advances a whole cache. Moves
        the mirror; under capture, the mirror moves at each launch instead.

        Raises
        ------
        ArgumentError
            No integers, or ``at_most`` below ``n``. Nothing was booked.
        CapacityExceeded
            An amount that can take the counter below zero; under capture, each launch says so.
        """
        at_most = n if at_most is None else at_most
        if not (type(n) is type(at_most) is int and -_I32_MAX <= n <= at_most <= _I32_MAX):
            call = f"counter {self.name!r}: advance_recorded"
            n = expect.integer(f"{call}: n", n, -_I32_MAX - 1, _I32_MAX)
            at_most = expect.integer(f"{call}: at_most", at_most, n, _I32_MAX)
        capture = capture_of(stream)
        if capture is not None:
            capture.note_advance(self, n, at_most=at_most)
            return
        effect = Effect(self)
        effect.note_advance(n, at_most, 0)
        if n < 0:
            effect.check()
        effect.apply()

    def note_set(self, value: int, stream: Stream | None = None) -> None:
        """Book that work just issued on ``stream`` writes ``value``.

        Without a stream the write must not have been captured; the mirror is set at once.

        Raises
        ------
        ArgumentError
            No integer, or one below 0. Nothing was booked.
        """
        if type(value) is not int or not 0 <= value <= _I32_MAX:
            value = expect.integer(f"counter {self.name!r}: note_set: value", value, 0, _I32_MAX)
        capture = None if stream is None else capture_of(stream)
        if capture is not None:
            capture.note_set(self, value)
            return
        effect = Effect(self)
        effect.note_set(value)
        effect.apply()

    def note_unbounded(self, stream: Stream) -> None:
        """Book that work on ``stream`` moves the counter by what only the device knows."""
        capture = capture_of(stream)
        if capture is not None:
            capture.note_unbounded(self)
            return
        effect = Effect(self)
        effect.note_unbounded()
        effect.apply()

    # -- reading back -----------------------------------------------------------------------------
    def sync(self, stream: Stream) -> int:
        """Read the value back after all work on ``stream``; blocks."""
        sync_counters(stream, [self])
        return self.value

    @property
    def closed(self) -> bool:
        """Whether the memory of the counter is gone."""
        return self.buffer.closed

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
    for counter, words in _read(stream, counters):
        if len(set(words)) != 1:
            raise _differ([f"{counter.name!r} holds {words}, which should be equal"])
        if words[0] < 0:
            raise _differ([f"{counter.name!r} holds {words}, which should be 0 or more"])
        counter.note_set(words[0])


def verify_counters(stream: Stream, counters: Iterable[DeviceCounter]) -> None:
    """Compare mirrors with the device after all work on ``stream``; blocks.

    Raises
    ------
    MemraError
        Naming each counter whose device value lies outside its mirror: somebody else wrote it.
    """
    wrong = []
    for counter, words in _read(stream, counters):
        low, high = counter.bounds
        if len(set(words)) != 1 or words[0] < low or (high is not None and words[0] > high):
            wrong.append(f"{counter.name!r} holds {words}, its mirror is {counter!r}")
    if wrong:
        raise _differ(wrong)


def _differ(wrong: list[str]) -> MemraError:
    return MemraError(
        "counters and mirrors differ: " + "; ".join(wrong) + ". Something wrote a counter without "
        "telling it; use DeviceCounter.set, advance or advance_recorded."
    )


def _read(
    stream: Stream, counters: Iterable[DeviceCounter]
) -> list[tuple[DeviceCounter, list[int]]]:
    if not isinstance(counters, Iterable):
        raise expect.refusal("counters", counters, "a list of DeviceCounter")
    counters = [expect.kind("counters", c, DeviceCounter, "DeviceCounter") for c in counters]
    expect_stream("counters: stream", stream)
    forbid("cuStreamSynchronize", stream=stream, what="reading counters back")
    if not counters:
        return []
    sizes = [c.buffer.size for c in counters]
    landing: PinnedBuffer = stream.device.pinned(sum(sizes), np.int32, name="counters")
    at = 0
    for counter, size in zip(counters, sizes, strict=True):
        counter.buffer.copy_to(stream, landing.view(4 * at, counter.buffer.shape, np.int32))
        at += size
    stream.sync()
    words = [int(v) for v in landing.array]
    landing.close()
    parts = np.cumsum([0, *sizes])
    return [(c, words[parts[i] : parts[i + 1]]) for i, c in enumerate(counters)]
