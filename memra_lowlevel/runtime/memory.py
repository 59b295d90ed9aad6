"""Typed memory: :class:`Buffer` on the device, :class:`PinnedBuffer` on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import expect
from ..driver.trace import caller
from ..errors import ArgumentError
from .recording import forbid
from .storage import MemoryView, Shape, Storage, note_use
from .stream import Stream, expect_stream

__all__ = ["Buffer", "PinnedBuffer"]

_STAGING_LIMIT_BYTES = 64 << 20


class PinnedBuffer(MemoryView):
    """Page-locked host memory; made by :meth:`Device.pinned`.

    Copies from and to it are asynchronous and may be captured; the graph keeps it alive and reads
    it anew at each launch. The memory goes back to the pool after the last copy in flight and the
    last NumPy view of it.
    """

    __slots__ = ("_array",)
    _what = "pinned buffer"

    def __init__(
        self,
        storage: Storage,
        ptr: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        root: bool,
    ) -> None:
        super().__init__(storage, ptr, shape, dtype, root=root)
        self._array = np.asarray(_HostArray(storage, ptr, self.n_bytes)).view(dtype).reshape(shape)

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """NumPy view of the memory; it may outlive this object."""
        self._check_open()
        return self._array

    def view(self, offset_bytes: int, shape: Shape, dtype: npt.DTypeLike) -> PinnedBuffer:
        """View a part of the memory as another array; nothing is copied."""
        ptr, dims, kind = self._slice(offset_bytes, shape, dtype)
        return PinnedBuffer(self._storage, ptr, dims, kind, root=False)


class Buffer(MemoryView):
    """Device memory with a shape and a dtype, C-contiguous.

    Attributes
    ----------
    ptr : int
        Device address.
    n_bytes : int
    shape : tuple of int
    dtype : numpy.dtype
    device : Device
    """

    __slots__ = ()
    _what = "buffer"

    def view(self, offset_bytes: int, shape: Shape, dtype: npt.DTypeLike) -> Buffer:
        """View a part of the memory as another array; nothing is copied.

        Parameters
        ----------
        offset_bytes : int
        shape : int or sequence of int
        dtype : dtype-like

        Raises
        ------
        ArgumentError
            If the part does not lie inside the buffer or is not aligned to ``dtype``.
        """
        ptr, dims, kind = self._slice(offset_bytes, shape, dtype)
        return Buffer(self._storage, ptr, dims, kind, root=False)

    # -- copies -----------------------------------------------------------------------------------
    def copy_from(self, stream: Stream, src: Buffer | PinnedBuffer | np.ndarray[Any, Any]) -> None:
        """Copy ``src`` here on ``stream``; sizes and dtypes must agree.

        A NumPy array goes through a staging buffer, so it may be changed at once afterwards; it is
        refused under capture, because a graph would read the staging buffer again at each launch.
        """
        self._ready(stream)
        if isinstance(src, np.ndarray):
            self._same(src.shape, src.dtype, src.nbytes, "a NumPy array")
            forbid("cuMemcpyHtoD", stream=stream, what=f"pageable copy into {self.name!r}")
            self._upload(stream, np.ascontiguousarray(src))
            return
        expect.kind("copy_from", src, MemoryView, "a Buffer, a PinnedBuffer or a NumPy array")
        src._check_open()
        self._same(src.shape, src.dtype, src.n_bytes, f"{src._what} {src.name!r}")
        driver, ours, theirs = stream.context.driver, self._storage, src._storage
        if self.n_bytes:
            if isinstance(src, PinnedBuffer):
                _check_family(stream, src)
                driver.cuMemcpyHtoDAsync(self.ptr, src.ptr, self.n_bytes, stream.handle)
            elif theirs.context is ours.context or stream.recording is not None:
                # A peer copy cannot be recorded; this one takes addresses of two devices as well.
                _check_family(stream, src)
                driver.cuMemcpyDtoDAsync(self.ptr, src.ptr, self.n_bytes, stream.handle)
            else:
                _check_family(stream, src)
                driver.cuMemcpyPeerAsync(
                    self.ptr, ours.context.handle, src.ptr, theirs.context.handle,
                    self.n_bytes, stream.handle,
                )  # fmt: skip
        note_use(stream, ours, theirs)

    def copy_to(self, stream: Stream, dst: Buffer | PinnedBuffer | np.ndarray[Any, Any]) -> None:
        """Copy this buffer to ``dst`` on ``stream``; sizes and dtypes must agree.

        Into a NumPy array the call blocks until the copy is done, and is refused under capture.
        """
        if isinstance(dst, Buffer):
            dst.copy_from(stream, self)
            return
        self._ready(stream)
        if isinstance(dst, np.ndarray):
            self._same(dst.shape, dst.dtype, dst.nbytes, "a NumPy array")
            if not (dst.flags.c_contiguous and dst.flags.writeable):
                raise ArgumentError(
                    f"copy_to: the array for buffer {self.name!r} must be writable and "
                    "C-contiguous.", name=self.name, expected="writable C-contiguous array",
                    got="another layout",
                )  # fmt: skip
            forbid("cuMemcpyDtoH", stream=stream, what=f"pageable copy of {self.name!r}")
            self._download(stream, dst)
            return
        expect.kind("copy_to", dst, MemoryView, "a Buffer, a PinnedBuffer or a NumPy array")
        dst._check_open()
        self._same(dst.shape, dst.dtype, dst.n_bytes, f"{dst._what} {dst.name!r}")
        _check_family(stream, dst)
        if self.n_bytes:
            stream.context.driver.cuMemcpyDtoHAsync(dst.ptr, self.ptr, self.n_bytes, stream.handle)
        note_use(stream, self._storage, dst._storage)

    def fill(self, stream: Stream, byte: int) -> None:
        """Set every byte to ``byte`` (0 … 255) on ``stream``."""
        self._ready(stream)
        byte = expect.integer("fill", byte, 0, 255)
        if self.n_bytes:
            stream.context.driver.cuMemsetD8Async(self.ptr, byte, self.n_bytes, stream.handle)
        note_use(stream, self._storage)

    def to_numpy(self, stream: Stream) -> np.ndarray[Any, Any]:
        """Copy into a NumPy array; blocks until the work on ``stream`` is done."""
        out = np.empty(self.shape, self.dtype)
        self.copy_to(stream, out)
        return out

    # -- other libraries --------------------------------------------------------------------------
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        from .interop import export

        return export(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        from .interop import dlpack_device

        return dlpack_device(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        from .interop import array_interface

        return array_interface(self)

    # -- below ------------------------------------------------------------------------------------
    def _ready(self, stream: Stream) -> None:
        self._check_open()
        if type(stream) is not Stream:
            expect_stream(f"{self._what} {self.name!r}: stream", stream)
        stream._check_open()
        if self._storage.context is not stream.context:
            raise ArgumentError(
                f"buffer {self.name!r} is on {self._storage.context}, stream {stream.name!r} on "
                f"{stream.context} (from {caller()}). Use a stream of the buffer's device.",
                name=self.name,
                expected=str(stream.context),
                got=str(self._storage.context),
            )
        stream.context.ensure()

    def _same(self, shape: tuple[int, ...], dtype: np.dtype[Any], n_bytes: int, other: str) -> None:
        if dtype != self.dtype or n_bytes != self.n_bytes:
            raise ArgumentError(
                f"copy between buffer {self.name!r}, {self.dtype}{list(self.shape)}, and {other}, "
                f"{dtype}{list(shape)} (from {caller()}): dtypes and sizes must agree. "
                "Use view() to name the part that is meant.",
                name=self.name,
                expected=f"{self.dtype}{list(self.shape)}",
                got=f"{dtype}{list(shape)}",
            )

    def _upload(self, stream: Stream, src: np.ndarray[Any, Any]) -> None:
        from . import pool

        flat = src.reshape(-1).view(np.uint8)
        for start in range(0, self.n_bytes, _STAGING_LIMIT_BYTES):
            part = flat[start : start + _STAGING_LIMIT_BYTES]
            staging = pool.staging_buffer(stream.context, part.nbytes)
            staging.array[: part.nbytes] = part
            stream.context.driver.cuMemcpyHtoDAsync(
                self.ptr + start, staging.ptr, part.nbytes, stream.handle
            )
            note_use(stream, self._storage, staging._storage)
            staging.close()

    def _download(self, stream: Stream, dst: np.ndarray[Any, Any]) -> None:
        from . import pool

        flat = dst.reshape(-1).view(np.uint8)
        note_use(stream, self._storage)
        if not self.n_bytes:
            stream.sync()
        for start in range(0, self.n_bytes, _STAGING_LIMIT_BYTES):
            part = flat[start : start + _STAGING_LIMIT_BYTES]
            staging = pool.staging_buffer(stream.context, part.nbytes)
            stream.context.driver.cuMemcpyDtoHAsync(
                staging.ptr, self.ptr + start, part.nbytes, stream.handle
            )
            note_use(stream, staging._storage)
            stream.sync()
            part[:] = staging.array[: part.nbytes]
            staging.close()


class _HostArray:
    """Holder through which NumPy views keep a storage alive."""

    def __init__(self, storage: Storage, ptr: int, n_bytes: int) -> None:
        self.storage = storage
        self.__array_interface__ = {
            "version": 3, "shape": (n_bytes,), "typestr": "|u1", "data": (ptr, False),
        }  # fmt: skip


def _check_family(stream: Stream, other: MemoryView) -> None:
    if other._storage.context.driver is not stream.context.driver:
        raise ArgumentError(
            f"{other._what} {other.name!r} belongs to {other._storage.context}, stream "
            f"{stream.name!r} to {stream.context}; host and cuda devices share no memory.",
            name=other.name,
            expected=stream.context.driver.kind,
            got=other._storage.context.driver.kind,
        )
