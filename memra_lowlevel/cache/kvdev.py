"""The few device operations that a cache needs, on one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import ArgumentError
from ..runtime.storage import note_use

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = ["KvDev", "StreamKvDev"]


class KvDev(Protocol):
    """Eight operations, all ordered on the stream that the object is bound to.

    Offsets and lengths are elements; a range that does not lie inside its buffer is refused.

    Attributes
    ----------
    device : Device
    stream : Stream
    """

    device: Device
    stream: Stream

    def zeros(self, n: int) -> Buffer:
        """Return f32[n] of zeros."""
        ...

    def uninit(self, n: int) -> Buffer:
        """Return f32[n] of undefined content."""
        ...

    def alloc_u8(self, n: int) -> Buffer:
        """Return u8[n] of undefined content."""
        ...

    def htod_i32(self, values: Sequence[int]) -> Buffer:
        """Return a new i32 buffer with these values."""
        ...

    def clone_dtod(self, src: Buffer) -> Buffer:
        """Return a copy of an f32 buffer."""
        ...

    def copy_into(self, dst: Buffer, dst_off: int, src: Buffer, len: int) -> None:
        """Copy ``src[:len]`` to ``dst[dst_off:]``."""
        ...

    def copy_range_into(
        self, dst: Buffer, dst_off: int, src: Buffer, src_off: int, len: int
    ) -> None:
        """Copy ``src[src_off : src_off + len]`` to ``dst[dst_off:]``."""
        ...

    def set_i32_one(self, dst: Buffer, v: int) -> None:
        """Write ``v`` to an i32[1] in place; its address stays."""
        ...


class StreamKvDev:
    """:class:`KvDev` over a device and a stream, the same for ``cuda`` and ``host``.

    Parameters
    ----------
    device : Device
    stream : Stream
        Of that device; must outlive this object.
    """

    def __init__(self, device: Device, stream: Stream):
        if stream.device != device:
            raise ArgumentError(
                f"StreamKvDev: stream {stream.name!r} is on {stream.device}, not on {device}",
                name="stream",
                expected=str(device),
                got=str(stream.device),
            )
        self.device, self.stream = device, stream

    def zeros(self, n: int) -> Buffer:
        """Return f32[n] of zeros."""
        return self.device.zeros(n, np.float32, self.stream)

    def uninit(self, n: int) -> Buffer:
        """Return f32[n] of undefined content."""
        return self.device.empty(n, np.float32, self.stream)

    def alloc_u8(self, n: int) -> Buffer:
        """Return u8[n] of undefined content."""
        return self.device.empty(n, np.uint8, self.stream)

    def htod_i32(self, values: Sequence[int]) -> Buffer:
        """Return a new i32 buffer with these values."""
        return self.device.from_numpy(np.asarray(values, np.int32), self.stream)

    def clone_dtod(self, src: Buffer) -> Buffer:
        """Return a copy of an f32 buffer."""
        _typed("clone_dtod", src, np.float32)
        out = self.device.empty(src.shape, src.dtype, self.stream)
        out.copy_from(self.stream, src)
        return out

    def copy_into(self, dst: Buffer, dst_off: int, src: Buffer, len: int) -> None:
        """Copy ``src[:len]`` to ``dst[dst_off:]``."""
        self.copy_range_into(dst, dst_off, src, 0, len)

    def copy_range_into(
        self, dst: Buffer, dst_off: int, src: Buffer, src_off: int, len: int
    ) -> None:
        """Copy ``src[src_off : src_off + len]`` to ``dst[dst_off:]``."""
        _typed("copy_range_into", src, np.float32)
        _typed("copy_range_into", dst, np.float32)
        for name, buffer, offset in (("dst", dst, dst_off), ("src", src, src_off)):
            if offset < 0 or len < 0 or offset + len > buffer.size:
                raise ArgumentError(
                    f"copy_range_into: {name}[{offset} : {offset + len}] does not lie within its "
                    f"{buffer.size} elements; nothing was copied",
                    name=name,
                    expected=f"within {buffer.size} elements",
                    got=f"[{offset}, {offset + len})",
                )
        if len:
            dst.view(4 * dst_off, (len,), np.float32).copy_from(
                self.stream, src.view(4 * src_off, (len,), np.float32)
            )

    def set_i32_one(self, dst: Buffer, v: int) -> None:
        """Write ``v`` to an i32[1] in place; its address stays."""
        _typed("set_i32_one", dst, np.int32)
        if dst.size != 1 or not -(2**31) <= v < 2**31:
            raise ArgumentError(
                f"set_i32_one: {v} into {dst!r}; give an i32[1] and a value that fits",
                name="dst", expected="int32[1]", got=f"{dst.dtype}{list(dst.shape)}",
            )  # fmt: skip
        dst._ready(self.stream)
        driver = self.stream.context.driver
        driver.cuMemsetD32Async(dst.ptr, v & 0xFFFFFFFF, 1, self.stream.handle)
        note_use(self.stream, dst.storage)


def _typed(action: str, buffer: Buffer, dtype: type) -> None:
    if buffer.dtype != dtype:
        raise ArgumentError(
            f"{action}: {buffer!r} must be {np.dtype(dtype)}",
            name="buffer",
            expected=str(np.dtype(dtype)),
            got=str(buffer.dtype),
        )
