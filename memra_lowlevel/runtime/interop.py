"""Memory shared with other libraries, without copies: DLPack both ways, CUDA array interface.

A buffer of the host device is CPU memory to the others (``numpy.from_dlpack`` takes it), a buffer
of a cuda device is CUDA memory. Work in flight is ordered: an export makes the consumer's stream
wait, an import makes ours wait.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import expect
from ..driver.trace import caller
from ..errors import ArgumentError
from . import dlpack
from .memory import Buffer, PinnedBuffer
from .recording import forbid
from .storage import Storage
from .stream import expect_stream

if TYPE_CHECKING:
    from .context import Context
    from .stream import Stream

__all__ = ["array_interface", "dlpack_device", "export", "wrap"]

_LEGACY, _NO_SYNC = 1, -1


def dlpack_device(buffer: Buffer | PinnedBuffer) -> tuple[int, int]:
    """DLPack device type and id of a buffer."""
    context = buffer.storage.context
    if context.driver.kind == "host":
        return dlpack.CPU, 0
    if isinstance(buffer, PinnedBuffer):
        return dlpack.CUDA_HOST, context.ordinal
    return dlpack.CUDA, context.ordinal


def export(
    buffer: Buffer,
    stream: int | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> Any:
    """Make a DLPack capsule of a buffer; the body of ``Buffer.__dlpack__``."""
    buffer._check_open()
    device = dlpack_device(buffer)
    if dl_device is not None and tuple(dl_device) != device:
        raise BufferError(f"{buffer!r} is on DLPack device {device}, not {tuple(dl_device)}")
    if copy:
        raise BufferError(f"{buffer!r} is exported without a copy; copy it on a stream first")
    forbid("cuStreamSynchronize", what=f"DLPack export of {buffer.name!r}")
    publish(buffer.storage, stream, on_host=device[0] == dlpack.CPU)
    owner = _Hold(buffer.storage)
    versioned = max_version is not None and max_version[0] >= 1
    return dlpack.capsule_of(
        owner, buffer.ptr, buffer.shape, buffer.dtype, device, versioned=versioned
    )


def array_interface(buffer: Buffer) -> dict[str, Any]:
    """``__cuda_array_interface__`` version 3; consumers wait for its stream."""
    context = buffer.storage.context
    if context.driver.kind != "cuda":
        # AttributeError, so that hasattr() tells consumers the truth.
        raise AttributeError("__cuda_array_interface__: the buffer is not on a cuda device")
    buffer._check_open()
    streams = [s for s in buffer.storage.streams if s.alive]
    last = None
    if streams:
        forbid("cuEventRecord", what=f"export of {buffer.name!r}")
        context.ensure()
        last = streams[0].handle
        for other in streams[1:]:
            context.chain(other.handle, last)
    typestr = buffer.dtype.str if buffer.dtype.kind != "V" else f"<u{buffer.dtype.itemsize}"
    return {
        "version": 3, "shape": buffer.shape, "typestr": typestr, "strides": None,
        "data": (buffer.ptr, False), "stream": last,
    }  # fmt: skip


def publish(storage: Storage, stream: int | None, *, on_host: bool) -> None:
    """Order the work in flight on ``storage`` before what a consumer does on ``stream``."""
    context = storage.context
    streams = [s for s in storage.streams if s.alive]
    context.ensure()
    if on_host:
        # A CPU consumer reads at once.
        for ours in streams:
            context.driver.cuStreamSynchronize(ours.handle)
        return
    if stream == _NO_SYNC:
        return
    if stream == 0:
        raise BufferError("__dlpack__(stream=0) is ambiguous on CUDA; give 1, 2 or a handle")
    for ours in streams:
        context.chain(ours.handle, _LEGACY if stream is None else stream)


def wrap(context: Context, foreign: Any, stream: Stream, name: str) -> Buffer:
    """Make a Buffer over another library's memory; the body of ``Device.wrap``.

    The foreign object is kept alive until the buffer, and every graph that uses it, is closed and
    its work is done.
    """
    expect_stream("wrap: stream", stream)._check_open()
    expect.name("wrap", name)
    if stream.context is not context:
        raise ArgumentError(
            f"wrap on {context} with stream {stream.name!r} of {stream.context} (from {caller()}).",
            name=name, expected=str(context), got=str(stream.context),
        )  # fmt: skip
    if hasattr(foreign, "__dlpack__") and not isinstance(foreign, type):
        return _from_dlpack(context, foreign, stream, name)
    interface = getattr(foreign, "__cuda_array_interface__", None)
    if interface is not None and context.driver.kind == "cuda":
        return _from_interface(context, foreign, interface, stream, name)
    raise ArgumentError(
        f"wrap: {type(foreign).__name__} has neither __dlpack__ nor __cuda_array_interface__ for "
        f"{context} (from {caller()}). Copy it with device.from_numpy.",
        name=name, expected="__dlpack__", got=type(foreign).__name__,
    )  # fmt: skip


def _from_dlpack(context: Context, foreign: Any, stream: Stream, name: str) -> Buffer:
    kind, number = (int(x) for x in foreign.__dlpack_device__())
    on_host = context.driver.kind == "host"
    wanted = (dlpack.CPU, 0) if on_host else (dlpack.CUDA, context.ordinal)
    if (kind, number) != wanted and not (on_host and kind in (dlpack.CPU, dlpack.CUDA_HOST)):
        raise ArgumentError(
            f"wrap: the tensor is on DLPack device {(kind, number)}, {context} is {wanted} "
            f"(from {caller()}). Move it there, or copy it with device.from_numpy.",
            name=name, expected=str(wanted), got=str((kind, number)),
        )  # fmt: skip
    # The producer makes our stream wait for its work.
    handle = None if on_host else stream.handle
    try:
        try:
            capsule = foreign.__dlpack__(stream=handle, max_version=(1, 0))
        except TypeError:
            capsule = foreign.__dlpack__(stream=handle)
    except BufferError as error:
        raise ArgumentError(
            f"wrap: {type(foreign).__name__} does not export its memory: {error} (from "
            f"{caller()}). Copy it with device.from_numpy.",
            name=name, expected="memory that can be shared", got=str(error),
        ) from error  # fmt: skip
    taken = dlpack.take(capsule)
    return _adopt(context, taken.ptr, taken.shape, taken.dtype, stream, name, taken.release)


def _from_interface(
    context: Context, foreign: Any, interface: dict[str, Any], stream: Stream, name: str
) -> Buffer:
    dtype = np.dtype(interface["typestr"])
    shape = tuple(int(d) for d in interface["shape"])
    strides = interface.get("strides")
    packed = tuple(int(dtype.itemsize * math.prod(shape[i + 1 :])) for i in range(len(shape)))
    if strides is not None and tuple(strides) != packed and math.prod(shape) > 1:
        raise ArgumentError(
            f"wrap: a Buffer is C-contiguous; the array has strides {tuple(strides)}. Copy it.",
            name=name, expected=str(packed), got=str(tuple(strides)),
        )  # fmt: skip
    theirs = interface.get("stream")
    if theirs is not None:
        context.ensure()
        context.chain(int(theirs), stream.handle)
    keep = [foreign]
    return _adopt(context, int(interface["data"][0]), shape, dtype, stream, name, keep.clear)


def _adopt(
    context: Context,
    ptr: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    stream: Stream,
    name: str,
    release: Any,
) -> Buffer:
    n_bytes = math.prod(shape) * dtype.itemsize
    storage = Storage(
        context, ptr, n_bytes, "external", name, lambda streams: context.after(streams, release)
    )
    storage.streams.add(stream)
    return Buffer(storage, ptr, shape, dtype, root=True)


class _Hold:
    """Keeps a storage's memory for an exported tensor; dropped on any thread, at any moment."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        storage.hold()
        storage.context.n_live += 1

    def __del__(self) -> None:
        storage = self.storage
        storage.context.bury(storage.serial, storage.release)
