# ruff: noqa: D102  (the methods are the driver API, described there)
"""Memory of the host device: guarded blocks, a stream-ordered pool, copies and sets."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Literal

from ...errors import OutOfBounds
from ..calls import driver_call
from ..table import MemcpyNodeParams, MemsetNodeParams, NodeType, StreamOrderedPool
from . import guarded
from .options import current_options
from .schedule import Work
from .state import HostContext, HostState, HostStream

__all__ = ["Allocation", "CopyWork", "HostMemory", "PoolWork", "SetWork"]

_WORTH_ASKING = 1 << 20  # bytes from which the system is asked for its room


@dataclass(eq=False)
class Allocation:
    """One block. ``live`` turns false when it is freed, for pool blocks in stream order."""

    ptr: int
    n_bytes: int
    ctx: HostContext
    kind: Literal["device", "pinned", "pool"]
    live: bool = True
    stream: int = 0
    generation: int = 0
    holders: int = 0  # graph nodes that allocate it


class _Side:
    """One side of a copy: inside a block that must be live when the copy runs, or foreign."""

    __slots__ = ("block", "ptr")

    def __init__(self, ptr: int, block: Allocation | None):
        self.ptr, self.block = ptr, block

    def check(self, label: str, what: str) -> None:
        if self.block is not None and not self.block.live:
            raise OutOfBounds(
                f"{label}: its {what} 0x{self.ptr:x} lies in memory that was freed before the copy "
                "ran. Free it after the work that uses it, in the order of the same stream.",
                kernel=label,
            )


class CopyWork:
    """A linear copy; ``data`` holds the source when it was pageable host memory."""

    __slots__ = ("_dst", "_src", "data", "label", "params")
    node_type = NodeType.MEMCPY

    def __init__(
        self,
        params: MemcpyNodeParams,
        dst: _Side,
        src: _Side,
        data: bytes | None = None,
    ):
        self.params = params
        self._dst, self._src, self.data = dst, src, data
        self.label = f"copy {params.kind} of {params.n_bytes} bytes"

    @property
    def kinds(self) -> tuple[str, str]:
        """Kinds of memory of both sides; an executable graph's copy must keep them."""
        return tuple(s.block.kind if s.block else "foreign" for s in (self._dst, self._src))  # type: ignore[return-value]

    def run(self) -> None:
        """Copy now."""
        self._dst.check(self.label, "destination")
        self._src.check(self.label, "source")
        source = self.data if self.data is not None else self._src.ptr
        n = self.params.n_bytes
        ctypes.memmove(self._dst.ptr, source, n)
        device_source = self._src.block is not None and self._src.block.kind != "pinned"
        guarded.note_write(self._dst.ptr, n, self._src.ptr if device_source else 0)


class SetWork:
    """A linear set of 1-, 2- or 4-byte elements."""

    __slots__ = ("_dst", "label", "params")
    node_type = NodeType.MEMSET

    def __init__(self, params: MemsetNodeParams, dst: _Side):
        self.params, self._dst = params, dst
        self.label = f"set of {params.n_elements} x {params.element_bytes} bytes"

    def run(self) -> None:
        """Set now."""
        self._dst.check(self.label, "destination")
        p = self.params
        n = p.n_elements * p.element_bytes
        guarded.note_write(p.dst, n)
        if p.element_bytes == 1:
            ctypes.memset(p.dst, p.value & 0xFF, n)
            return
        pattern = (p.value & (2 ** (8 * p.element_bytes) - 1)).to_bytes(p.element_bytes, "little")
        if p.n_elements:
            ctypes.memmove(p.dst, pattern * p.n_elements, n)


class PoolWork:
    """Give a pool block to its new owner (poisoned), or take it back, in stream order."""

    def __init__(self, memory: HostMemory, block: Allocation, take: bool):
        self._memory, self.block, self.take = memory, block, take
        self._generation = block.generation
        self.label = "pool allocation" if take else "pool release"
        self.node_type = NodeType.MEM_ALLOC if take else NodeType.MEM_FREE

    def run(self) -> None:
        if self.take:
            self.block.live = True
            ctypes.memset(self.block.ptr, 0xFF, self.block.n_bytes)
        else:
            self.block.live = False
            self._memory._pool_released(self.block, self._generation)


class HostMemory(HostState):
    """Allocation, copies and sets."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, Allocation] = {}
        self._bases: list[int] = []
        self._used = [0] * len(self._contexts)
        self._idle: list[Allocation] = []
        self._releasing: dict[int, Allocation] = {}

    # -- submission, completed in streams.py ---------------------------------------------------
    def _submit(self, call: str, stream: HostStream, work: Work, always: bool = False) -> None:
        raise NotImplementedError

    def _sync_legacy(self, ctx: HostContext) -> None:
        raise NotImplementedError

    def _refuse_legacy(self, ctx: HostContext, call: str) -> None:
        raise NotImplementedError

    # -- blocks --------------------------------------------------------------------------------
    def _map(
        self, call: str, ctx: HostContext, n: int, kind: Literal["device", "pinned", "pool"]
    ) -> Allocation:
        if n <= 0:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call, f"a size of {n} bytes was asked for"
            )
        if kind != "pinned" and self._used[ctx.device] + n > current_options().memory_bytes:
            self._trim(ctx.device, 0)
            if self._used[ctx.device] + n > current_options().memory_bytes:
                raise self._error(
                    "CUDA_ERROR_OUT_OF_MEMORY", call,
                    f"{n} bytes asked for, {self._used[ctx.device]} of "
                    f"{current_options().memory_bytes} in use",
                )  # fmt: skip
        room = guarded.room() if n >= _WORTH_ASKING else n
        if n > room:
            # Fresh memory is filled, so it is real at once; beyond what there is, the system would
            # kill the process.
            raise self._error(
                "CUDA_ERROR_OUT_OF_MEMORY", call,
                f"{n} bytes asked for, this machine has {room} bytes left",
            )  # fmt: skip
        if current_options().check:
            guarded.track()  # not only once a checked kernel is loaded: this block is read then
        try:
            ptr = guarded.alloc(n)
        except MemoryError as error:
            raise self._error("CUDA_ERROR_OUT_OF_MEMORY", call, str(error)) from error
        block = Allocation(ptr, n, ctx, kind)
        self._blocks[ptr] = block
        bisect.insort(self._bases, ptr)
        if kind != "pinned":
            self._used[ctx.device] += n
        return block

    def _unmap(self, block: Allocation) -> None:
        block.live = False
        del self._blocks[block.ptr]
        del self._bases[bisect.bisect_left(self._bases, block.ptr)]
        if block.kind != "pinned":
            self._used[block.ctx.device] -= block.n_bytes
        guarded.free(block.ptr)

    def _block_at(self, ptr: int) -> Allocation | None:
        i = bisect.bisect_right(self._bases, ptr) - 1
        if i < 0:
            return None
        block = self._blocks[self._bases[i]]
        return block if ptr <= block.ptr + block.n_bytes else None

    def _side(self, call: str, ptr: int, n: int, *, foreign: bool, what: str) -> _Side:
        block = self._block_at(ptr)
        if block is None or (ptr == block.ptr + block.n_bytes and n > 0):
            if foreign:
                return _Side(ptr, None)
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call, f"{what} {ptr:#x} is no memory of this driver"
            )
        if ptr + n > block.ptr + block.n_bytes:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"{what} {ptr:#x} + {n} bytes ends {ptr + n - block.ptr - block.n_bytes} bytes "
                f"past its block of {block.n_bytes} bytes",
            )  # fmt: skip
        if not block.live and block.ptr not in self._releasing and block.kind != "pool":
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"{what} {ptr:#x} was freed")
        return _Side(ptr, block)

    @driver_call
    def cuMemAlloc(self, n_bytes: int) -> int:
        self._gate("cuMemAlloc")
        return self._map("cuMemAlloc", self._ctx("cuMemAlloc"), n_bytes, "device").ptr

    @driver_call
    def cuMemFree(self, ptr: int) -> None:
        self._gate("cuMemFree")
        if ptr == 0:
            return
        block = self._blocks.get(ptr)
        if block is None or block.kind == "pinned" or not block.live:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", "cuMemFree", f"{ptr:#x} is no start of a live block"
            )
        self._finish_device(block.ctx.device)
        self._unmap(block)

    @driver_call
    def cuMemHostAlloc(self, n_bytes: int) -> int:
        self._gate("cuMemHostAlloc")
        return self._map("cuMemHostAlloc", self._ctx("cuMemHostAlloc"), n_bytes, "pinned").ptr

    @driver_call
    def cuMemFreeHost(self, ptr: int) -> None:
        self._gate("cuMemFreeHost")
        block = self._blocks.get(ptr)
        if block is None or block.kind != "pinned":
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", "cuMemFreeHost", f"{ptr:#x} is no pinned block"
            )
        for ctx in self._contexts:
            self._finish_device(ctx.device)
        self._unmap(block)

    # -- the stream-ordered pool ---------------------------------------------------------------
    @driver_call
    def cuMemAllocAsync(self, n_bytes: int, stream: int) -> int:
        st = self._stream(stream, "cuMemAllocAsync")
        if st.capture is None:
            self._gate("cuMemAllocAsync")
        block = self._reuse(n_bytes, st) if st.capture is None else None
        if block is None:
            block = self._map("cuMemAllocAsync", st.ctx, n_bytes, "pool")
            block.live = False
        block.stream = stream
        self._submit("cuMemAllocAsync", st, PoolWork(self, block, True))
        return block.ptr

    @driver_call
    def cuMemFreeAsync(self, ptr: int, stream: int) -> None:
        st = self._stream(stream, "cuMemFreeAsync")
        if st.capture is None:
            self._gate("cuMemFreeAsync")
        block = self._blocks.get(ptr)
        if block is None or block.kind != "pool" or ptr in self._releasing:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", "cuMemFreeAsync", f"{ptr:#x} is no live pool block"
            )
        block.generation += 1
        self._submit("cuMemFreeAsync", st, PoolWork(self, block, False), always=True)
        if st.capture is None:
            block.stream = stream
            self._releasing[ptr] = block

    def _reuse(self, n_bytes: int, st: HostStream) -> Allocation | None:
        """Find a free block: on the same stream at once, from another after its release ran."""
        if current_options().check:
            return None
        for block in self._releasing.values():
            if block.stream == st.handle and block.n_bytes == n_bytes and block.ctx is st.ctx:
                del self._releasing[block.ptr]
                return block
        for i, block in enumerate(self._idle):
            if block.n_bytes == n_bytes and block.ctx is st.ctx:
                return self._idle.pop(i)
        return None

    def _pool_released(self, block: Allocation, generation: int) -> None:
        if block.generation != generation or block.ptr not in self._releasing:
            return  # it has a new owner on the same stream, or was freed by a graph
        del self._releasing[block.ptr]
        if current_options().check:
            self._unmap(block)
        else:
            self._idle.append(block)

    def _release_graph_block(self, block: Allocation) -> None:
        """Unmap a block whose last graph is gone, after the work that may still use it."""
        self._finish_device(block.ctx.device)
        self._unmap(block)

    def _trim(self, device: int, keep_bytes: int) -> None:
        kept = 0
        for block in list(self._idle):
            if block.ctx.device != device:
                continue
            if kept + block.n_bytes <= keep_bytes:
                kept += block.n_bytes
            else:
                self._idle.remove(block)
                self._unmap(block)

    @driver_call
    def cuMemPoolTrimTo(self, device: int, keep_bytes: int) -> None:
        self._gate("cuMemPoolTrimTo")
        self._trim(self._device_of(device, "cuMemPoolTrimTo").device, keep_bytes)

    @driver_call
    def cuMemPoolGetUsage(self, device: int) -> StreamOrderedPool:
        self._gate("cuMemPoolGetUsage")
        self._device_of(device, "cuMemPoolGetUsage")
        pool = [b for b in self._blocks.values() if b.kind == "pool" and b.ctx.device == device]
        idle = sum(b.n_bytes for b in self._idle if b.ctx.device == device)
        reserved = sum(b.n_bytes for b in pool)
        return StreamOrderedPool(reserved, reserved - idle)

    @driver_call
    def cuMemGetInfo(self) -> tuple[int, int]:
        ctx = self._ctx("cuMemGetInfo")
        total = current_options().memory_bytes
        return total - self._used[ctx.device], total

    # -- copies --------------------------------------------------------------------------------
    def _copy_work(
        self,
        call: str,
        params: MemcpyNodeParams,
        *,
        snapshot: bool,
    ) -> CopyWork:
        n = params.n_bytes
        if n < 0:
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"a size of {n} bytes")
        dst = self._side(
            call, params.dst, n, foreign=params.kind in ("dtoh", "unknown"), what="destination"
        )
        src = self._side(
            call, params.src, n, foreign=params.kind in ("htod", "unknown"), what="source"
        )
        # A pageable source is staged by the driver before the call returns, so later writes to it
        # do not count; a pinned one is read when the copy runs.
        data = ctypes.string_at(params.src, n) if snapshot and src.block is None and n else None
        return CopyWork(params, dst, src, data)

    def _copy_async(self, call: str, params: MemcpyNodeParams, stream: int) -> None:
        st = self._stream(stream, call)
        work = self._copy_work(call, params, snapshot=st.capture is None)
        self._submit(call, st, work)
        if st.capture is None and params.kind == "dtoh" and work.kinds[0] == "foreign":
            self._finish(st.tail)  # copies to pageable memory return when they are complete
            self._raise_errors(st.ctx.device, call)

    def _copy_now(self, call: str, params: MemcpyNodeParams) -> None:
        self._gate(call)
        ctx = self._ctx(call)
        self._refuse_legacy(ctx, call)
        work = self._copy_work(call, params, snapshot=True)
        self._sync_legacy(ctx)
        work.run()
        self._raise_errors(ctx.device, call)

    @driver_call
    def cuMemcpyHtoD(self, dst: int, src: int, n_bytes: int) -> None:
        self._copy_now("cuMemcpyHtoD", MemcpyNodeParams(dst, src, n_bytes, "htod"))

    @driver_call
    def cuMemcpyDtoH(self, dst: int, src: int, n_bytes: int) -> None:
        self._copy_now("cuMemcpyDtoH", MemcpyNodeParams(dst, src, n_bytes, "dtoh"))

    @driver_call
    def cuMemcpyHtoDAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        self._copy_async("cuMemcpyHtoDAsync", MemcpyNodeParams(dst, src, n_bytes, "htod"), stream)

    @driver_call
    def cuMemcpyDtoHAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        self._copy_async("cuMemcpyDtoHAsync", MemcpyNodeParams(dst, src, n_bytes, "dtoh"), stream)

    @driver_call
    def cuMemcpyDtoDAsync(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        self._copy_async("cuMemcpyDtoDAsync", MemcpyNodeParams(dst, src, n_bytes, "dtod"), stream)

    @driver_call
    def cuMemcpyPeerAsync(
        self, dst: int, dst_ctx: int, src: int, src_ctx: int, n_bytes: int, stream: int
    ) -> None:
        call = "cuMemcpyPeerAsync"
        capture = self._stream(stream, call).capture
        if capture is not None:
            self._refuse_named(capture, call, stream)
        for ptr, ctx, what in ((dst, dst_ctx, "destination"), (src, src_ctx, "source")):
            context = self._find(self._by_context, ctx, call, "context")
            block = self._side(call, ptr, n_bytes, foreign=False, what=what).block
            if block is not None and block.ctx is not context:
                raise self._error(
                    "CUDA_ERROR_INVALID_VALUE", call,
                    f"the {what} lies on device {block.ctx.device}, not on {context.device}",
                )  # fmt: skip
        self._copy_async(call, MemcpyNodeParams(dst, src, n_bytes, "dtod"), stream)

    def _set_work(self, call: str, params: MemsetNodeParams) -> SetWork:
        if params.element_bytes not in (1, 2, 4) or params.n_elements < 0:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"{params.n_elements} elements of {params.element_bytes} bytes",
            )  # fmt: skip
        if params.dst % params.element_bytes:
            raise self._error(
                "CUDA_ERROR_INVALID_VALUE", call,
                f"{params.dst:#x} is no multiple of {params.element_bytes}",
            )  # fmt: skip
        n = params.n_elements * params.element_bytes
        return SetWork(params, self._side(call, params.dst, n, foreign=False, what="destination"))

    @driver_call
    def cuMemsetD8Async(self, dst: int, value: int, n: int, stream: int) -> None:
        st = self._stream(stream, "cuMemsetD8Async")
        work = self._set_work("cuMemsetD8Async", MemsetNodeParams(dst, value, 1, n))
        self._submit("cuMemsetD8Async", st, work)

    @driver_call
    def cuMemsetD32Async(self, dst: int, value: int, n: int, stream: int) -> None:
        st = self._stream(stream, "cuMemsetD32Async")
        work = self._set_work("cuMemsetD32Async", MemsetNodeParams(dst, value, 4, n))
        self._submit("cuMemsetD32Async", st, work)
