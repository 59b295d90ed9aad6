"""Where memory comes from: the stream-ordered pool, and reused page-locked memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import expect
from ..driver.trace import caller
from ..errors import ArgumentError, OutOfMemory
from .memory import Buffer, PinnedBuffer
from .recording import forbid
from .storage import PinnedStorage, Shape, Storage, normal_shape
from .stream import expect_stream

if TYPE_CHECKING:
    from .context import Context
    from .stream import Stream

__all__ = ["allocate", "pinned", "staging_buffer", "with_retry"]

_PINNED_KEPT_BYTES = 256 << 20


def allocate(
    context: Context, n_bytes: int, stream: Stream, shape: Shape, dtype: npt.DTypeLike, name: str
) -> Buffer:
    """Stream-ordered memory from the pool; never under capture (a graph takes from an Arena)."""
    dims, kind = normal_shape(shape), expect.dtype(f"allocation of {name!r}", dtype)
    expect.name("allocation", name)
    expect_stream("allocation", stream)._check_open()
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
        ptr = with_retry(context, lambda: driver.cuMemAllocAsync(asked, stream.handle), asked, name)
        storage = Storage(
            context, ptr, n_bytes, "pool", name, lambda streams: context.free_async(ptr, streams)
        )
    else:
        ptr = with_retry(context, lambda: driver.cuMemAlloc(asked), asked, name)
        storage = Storage(
            context, ptr, n_bytes, "pool", name, lambda streams: driver.cuMemFree(ptr)
        )
    storage.streams.add(stream)
    return Buffer(storage, ptr, dims, kind, root=True)


def with_retry(context: Context, attempt: Callable[[], int], n_bytes: int, name: str) -> int:
    """Allocate; if memory is short, give back what waits and what the pool keeps, and try again."""
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
    dims, kind = normal_shape(shape), expect.dtype(f"pinned {name!r}", dtype)
    n_bytes = expect.integer(f"pinned {name!r}: n_bytes", math.prod(dims) * kind.itemsize, 0)
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

    storage = PinnedStorage(
        context, ptr, n_bytes, "pinned", name, lambda streams: context.after(streams, keep)
    )
    storage.internal = internal
    return PinnedBuffer(storage, ptr, dims, kind, root=True)


def staging_buffer(context: Context, n_bytes: int) -> PinnedBuffer:
    """Pinned memory of at least ``n_bytes`` for one copy; sizes are powers of two to be reused."""
    size = max(4096, 1 << (n_bytes - 1).bit_length())
    return pinned(context, size, np.uint8, "staging", internal=True)
