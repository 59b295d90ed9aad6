"""Device and pinned memory: storages that own it, and typed views of them.

A :class:`Storage` owns an allocation and remembers every stream that used it, so that it can be
given back in order. A :class:`Buffer` is a view with a shape and a dtype; a
:class:`PinnedBuffer` is page-locked host memory with a NumPy view.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..driver.trace import caller
from ..errors import ArgumentError, ClosedError, OutOfMemory
from .lifetime import Keepable
from .recording import forbid

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .stream import Stream

__all__ = ["Buffer", "PinnedBuffer", "Shape", "Storage", "normal_shape"]

Shape = int | Sequence[int]
_STAGING_LIMIT_BYTES = 64 << 20
_PINNED_KEPT_BYTES = 256 << 20


class Storage(Keepable):
    """One allocation. Internal: buffers, arenas and interop make them.

    Attributes
    ----------
    ptr, n_bytes : int
    space : str
        ``"pool"``, ``"arena"``, ``"pinned"`` or ``"external"``.
    streams : set of Stream
        Streams whose work used it; it is given back after that work.
    users : weak set
        Prepared launches and executables that froze its address; told when it closes.
    """

    kind = "buffer"

    def __init__(
        self,
        context: Context,
        ptr: int,
        n_bytes: int,
        space: str,
        name: str,
        give_back: Callable[[set[Stream]], None],
    ) -> None:
        self.ptr, self.n_bytes, self.space = ptr, n_bytes, space
        self.open = True
        self.streams: set[Stream] = set()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holds = 0
        streams = self.streams
        super().__init__(context, name, lambda: give_back(streams))
        context.storages[self.serial] = self

    def hold(self) -> None:
        """Keep the memory even after ``close()``, until :meth:`release`."""
        self._holds += 1

    def release(self) -> None:
        """Undo one :meth:`hold`; the memory goes back if it was closed meanwhile."""
        self._holds -= 1
        if self._holds == 0 and not self.open:
            super().close()

    def close(self) -> None:
        """End its use; the memory goes back once no graph holds it and its work is done."""
        if self.open:
            self.open = False
            for user in list(self.users):
                user._operand_closed(self)
            if self._holds == 0:
                super().close()


class _Memory:
    """What device and pinned buffers have in common: a place in a storage."""

    __slots__ = ("__weakref__", "_closed", "_root", "_storage", "dtype", "n_bytes", "ptr", "shape")
    _what = "buffer"

    def __init__(
        self,
        storage: Storage,
        ptr: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        root: bool,
    ) -> None:
        self._storage, self._root, self._closed = storage, root, False
        self.ptr = ptr
        self.shape, self.dtype = shape, dtype
        self.n_bytes = math.prod(shape) * dtype.itemsize

    @property
    def name(self) -> str:
        """Name of the storage."""
        return self._storage.name

    @property
    def device(self) -> Device:
        """Device that the memory belongs to."""
        return self._storage.context.device

    @property
    def storage(self) -> Storage:
        """The allocation this is a view of."""
        return self._storage

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def closed(self) -> bool:
        """Whether this view or the memory below it was closed."""
        return self._closed or not self._storage.open

    def close(self) -> None:
        """End this view; the view that allocated the memory gives it back.

        Memory that a graph uses is given back when the last such graph closes.
        """
        if not self._closed:
            self._closed = True
            if self._root:
                self._storage.close()

    def _check_open(self) -> None:
        if self._closed or not self._storage.open:
            raise ClosedError(
                f"{self._what} {self.name!r} (made at {self._storage.where or '?'}) is closed: "
                f"used at {caller()}. Keep it open for as long as it is used."
            )

    def _slice(
        self, offset_bytes: int, shape: Shape, dtype: npt.DTypeLike
    ) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
        self._check_open()
        shape, kind = normal_shape(shape), np.dtype(dtype)
        end = offset_bytes + math.prod(shape) * kind.itemsize
        if offset_bytes < 0 or end > self.n_bytes or (self.ptr + offset_bytes) % kind.alignment:
            raise ArgumentError(
                f"view of {self._what} {self.name!r}: bytes [{offset_bytes}, {end}) as {kind} do "
                f"not lie, aligned to {kind.alignment}, inside its {self.n_bytes} bytes.",
                name=self.name,
                expected=f"at most {self.n_bytes} bytes",
                got=f"[{offset_bytes}, {end})",
            )
        return self.ptr + offset_bytes, shape, kind

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<{type(self).__name__} {self.name!r} {self.dtype}{list(self.shape)} "
            f"on {self._storage.context}{state}>"
        )


class PinnedBuffer(_Memory):
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
        self._array = np.asarray(_HostMemory(storage, ptr, self.n_bytes)).view(dtype).reshape(shape)

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """NumPy view of the memory; it may outlive this object."""
        self._check_open()
        return self._array

    def view(self, offset_bytes: int, shape: Shape, dtype: npt.DTypeLike) -> PinnedBuffer:
        """A part of the memory as another array; shares it, copies nothing."""
        ptr, dims, kind = self._slice(offset_bytes, shape, dtype)
        return PinnedBuffer(self._storage, ptr, dims, kind, root=False)


class Buffer(_Memory):
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
        """A part of the memory as another array; shares it, copies nothing.

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
        src._check_open()
        self._same(src.shape, src.dtype, src.n_bytes, f"{src._what} {src.name!r}")
        driver, ours, theirs = stream.context.driver, self._storage, src._storage
        if self.n_bytes:
            if isinstance(src, PinnedBuffer):
                _check_family(stream, src)
                driver.cuMemcpyHtoDAsync(self.ptr, src.ptr, self.n_bytes, stream.handle)
            elif theirs.context is ours.context:
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
        dst._check_open()
        self._same(dst.shape, dst.dtype, dst.n_bytes, f"{dst._what} {dst.name!r}")
        _check_family(stream, dst)
        if self.n_bytes:
            stream.context.driver.cuMemcpyDtoHAsync(dst.ptr, self.ptr, self.n_bytes, stream.handle)
        note_use(stream, self._storage, dst._storage)

    def fill(self, stream: Stream, byte: int) -> None:
        """Set every byte to ``byte`` (0 … 255) on ``stream``."""
        self._ready(stream)
        if not 0 <= byte <= 255:
            raise ArgumentError(
                f"fill: {byte} is no byte.", name=self.name, expected="0 … 255", got=str(byte)
            )
        if self.n_bytes:
            stream.context.driver.cuMemsetD8Async(self.ptr, byte, self.n_bytes, stream.handle)
        note_use(stream, self._storage)

    def to_numpy(self, stream: Stream) -> np.ndarray[Any, Any]:
        """A copy as a NumPy array; blocks until the work on ``stream`` is done."""
        out = np.empty(self.shape, self.dtype)
        self.copy_to(stream, out)
        return out

    # -- below ------------------------------------------------------------------------------------
    def _ready(self, stream: Stream) -> None:
        self._check_open()
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
        flat = src.reshape(-1).view(np.uint8)
        for start in range(0, self.n_bytes, _STAGING_LIMIT_BYTES):
            part = flat[start : start + _STAGING_LIMIT_BYTES]
            staging = staging_buffer(stream.context, part.nbytes)
            staging.array[: part.nbytes] = part
            stream.context.driver.cuMemcpyHtoDAsync(
                self.ptr + start, staging.ptr, part.nbytes, stream.handle
            )
            note_use(stream, self._storage, staging._storage)
            staging.close()

    def _download(self, stream: Stream, dst: np.ndarray[Any, Any]) -> None:
        flat = dst.reshape(-1).view(np.uint8)
        note_use(stream, self._storage)
        if not self.n_bytes:
            stream.sync()
        for start in range(0, self.n_bytes, _STAGING_LIMIT_BYTES):
            part = flat[start : start + _STAGING_LIMIT_BYTES]
            staging = staging_buffer(stream.context, part.nbytes)
            stream.context.driver.cuMemcpyDtoHAsync(
                staging.ptr, self.ptr + start, part.nbytes, stream.handle
            )
            note_use(stream, staging._storage)
            stream.sync()
            part[:] = staging.array[: part.nbytes]
            staging.close()


class _HostMemory:
    """Holder through which NumPy views keep a storage alive."""

    def __init__(self, storage: Storage, ptr: int, n_bytes: int) -> None:
        self.storage = storage
        self.__array_interface__ = {
            "version": 3, "shape": (n_bytes,), "typestr": "|u1", "data": (ptr, False),
        }  # fmt: skip


def _check_family(stream: Stream, other: _Memory) -> None:
    if other._storage.context.driver is not stream.context.driver:
        raise ArgumentError(
            f"{other._what} {other.name!r} belongs to {other._storage.context}, stream "
            f"{stream.name!r} to {stream.context}; host and cuda devices share no memory.",
            name=other.name,
            expected=stream.context.driver.kind,
            got=other._storage.context.driver.kind,
        )


def note_use(stream: Stream, *storages: Storage) -> None:
    """Remember that work on ``stream`` uses ``storages``; a capture keeps them alive."""
    recording = stream.recording
    for storage in storages:
        storage.streams.add(stream)
        if recording is not None:
            recording.keeps.add(storage)
    if recording is not None:
        recording.tick(stream)


def normal_shape(shape: Shape) -> tuple[int, ...]:
    """``shape`` as a tuple of non-negative ints."""
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    dims = tuple(int(d) for d in dims)
    if any(d < 0 for d in dims):
        raise ArgumentError(
            f"shape {dims} has a negative extent.", expected="extents >= 0", got=str(dims)
        )
    return dims


def allocate(
    context: Context, n_bytes: int, stream: Stream, shape: Shape, dtype: npt.DTypeLike, name: str
) -> Buffer:
    """Stream-ordered memory from the pool; never under capture (a graph takes from an Arena)."""
    dims, kind = normal_shape(shape), np.dtype(dtype)
    stream._check_open()
    if stream.context is not context:
        raise ArgumentError(
            f"allocation on {context} with stream {stream.name!r} of {stream.context}; use a "
            "stream of the same device.", name=name, expected=str(context), got=str(stream.context),
        )  # fmt: skip
    driver = context.driver
    call = "cuMemAllocAsync" if context.limits.pools else "cuMemAlloc"
    forbid(call, stream=stream, what=f"{n_bytes} bytes for {name!r}")
    context.reap()
    context.ensure()
    asked = max(n_bytes, 1)
    if context.limits.pools:
        ptr = _with_retry(
            context, lambda: driver.cuMemAllocAsync(asked, stream.handle), asked, name
        )
        storage = Storage(
            context, ptr, n_bytes, "pool", name, lambda streams: context.free_async(ptr, streams)
        )
    else:
        ptr = _with_retry(context, lambda: driver.cuMemAlloc(asked), asked, name)
        storage = Storage(
            context, ptr, n_bytes, "pool", name, lambda streams: driver.cuMemFree(ptr)
        )
    storage.streams.add(stream)
    return Buffer(storage, ptr, dims, kind, root=True)


def _with_retry(context: Context, attempt: Callable[[], int], n_bytes: int, name: str) -> int:
    try:
        return attempt()
    except OutOfMemory:
        # What the pool keeps, and what waits for its last stream, may be enough.
        context.driver.cuCtxSynchronize()
        context.poll(wait=True)
        context.driver.cuMemPoolTrimTo(context.device_handle, 0)
    try:
        return attempt()
    except OutOfMemory as error:
        free, total = context.driver.cuMemGetInfo()
        raise OutOfMemory(
            f"{n_bytes} bytes for {name!r} on {context}: {free} of {total} bytes are free "
            f"(from {caller()}). Close buffers or graphs; census() lists what is open.",
            result=error.result,
            code=error.code,
            call=error.call,
            recent=error.recent,
        ) from error


def pinned(
    context: Context, shape: Shape, dtype: npt.DTypeLike, name: str, *, internal: bool = False
) -> PinnedBuffer:
    """Page-locked memory, reused from earlier buffers of the same size where possible."""
    dims, kind = normal_shape(shape), np.dtype(dtype)
    n_bytes = math.prod(dims) * kind.itemsize
    forbid("cuMemHostAlloc", what=f"{n_bytes} bytes for {name!r}")
    context.reap()
    context.poll()
    context.ensure()
    driver, asked = context.driver, max(n_bytes, 1)
    free = context.pinned_free.get(asked)
    if free:
        ptr = free.pop()
        context.pinned_free_bytes -= asked
    else:
        ptr = driver.cuMemHostAlloc(asked)

    def keep() -> None:
        if context.pinned_free_bytes + asked > _PINNED_KEPT_BYTES:
            driver.cuMemFreeHost(ptr)
        else:
            context.pinned_free.setdefault(asked, []).append(ptr)
            context.pinned_free_bytes += asked

    storage = _PinnedStorage(
        context, ptr, n_bytes, "pinned", name, lambda streams: context.after(streams, keep)
    )
    storage.internal = internal
    return PinnedBuffer(storage, ptr, dims, kind, root=True)


class _PinnedStorage(Storage):
    """Goes back when its last NumPy view is gone, not before: the views are plain arrays."""

    kind = "pinned buffer"

    def close(self) -> None:
        if self.open:
            self.open = False
            for user in list(self.users):
                user._operand_closed(self)

    def release(self) -> None:
        self._holds -= 1

    @property
    def closed(self) -> bool:
        return not self.open or super().closed


def staging_buffer(context: Context, n_bytes: int) -> PinnedBuffer:
    """Pinned memory of at least ``n_bytes`` for one copy; sizes are powers of two to be reused."""
    size = max(4096, 1 << (n_bytes - 1).bit_length())
    return pinned(context, size, np.uint8, "staging", internal=True)
