"""Guard-paged memory of the host device.

Blocks come from the C++ runtime, whose fault handler then knows them and can name offset and size
of a stray access. Without a C++ compiler no kernel can run, but memory, copies, streams and graphs
still work: then blocks are plain mappings between two inaccessible pages.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Callable
from types import ModuleType

from ...errors import CompilerNotFound

__all__ = ["alloc", "free", "note_write", "room", "track"]

_PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_RW = 0, 3
_MAP_PRIVATE_ANON = 0x22
_plain: dict[int, tuple[int, int]] = {}
_libc: ctypes.CDLL | None = None
_runner: ModuleType | None = None
_tried = False


def _backend() -> ModuleType | None:
    global _runner, _tried
    if not _tried:
        _tried = True
        try:
            from . import runner

            runner.free(runner.alloc(1))
            _runner = runner
        except (ImportError, CompilerNotFound):
            _runner = None
    return _runner


def note_write(ptr: int, n_bytes: int, source: int = 0) -> None:
    """Tell check mode that bytes were written from outside a kernel.

    With a ``source`` in device memory, what was uninitialised there is uninitialised here.
    """
    backend = _backend()
    if backend is not None and n_bytes:
        if source:
            backend.note_copy(ptr, source, n_bytes)
        else:
            backend.note_write(ptr, n_bytes)


def room() -> int:
    """Bytes that may be allocated without starving the machine; very many where unknown."""
    try:
        with open("/proc/meminfo", "rb") as file:
            found = re.search(rb"MemAvailable: +(\d+) kB", file.read())
    except OSError:
        return sys.maxsize
    if found is None:
        return sys.maxsize
    available = int(found[1]) << 10
    return max(0, available - max(available // 16, 256 << 20))


def track() -> None:
    """Let memory from now on be known as uninitialised until somebody writes it."""
    backend = _backend()
    if backend is not None:
        backend.enable_check()


def alloc(n_bytes: int) -> int:
    """Map ``n_bytes`` between guard pages, filled with 0xFF; the end is 16-byte aligned to one."""
    backend = _backend()
    if backend is not None:
        take: Callable[[int], int] = backend.alloc
        return take(n_bytes)
    libc = _c()
    size = -(-n_bytes // _PAGE) * _PAGE
    total = size + 2 * _PAGE
    base = libc.mmap(None, total, _PROT_NONE, _MAP_PRIVATE_ANON, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"mmap of {total} bytes failed")
    if libc.mprotect(base + _PAGE, size, _PROT_RW) != 0:
        raise MemoryError(f"mprotect of {size} bytes failed")
    ptr = int(base + _PAGE + ((size - n_bytes) & ~255))
    ctypes.memset(base + _PAGE, 0xFF, size)
    _plain[ptr] = (base, total)
    return ptr


def free(ptr: int) -> None:
    """Unmap a block of :func:`alloc`."""
    mapping = _plain.pop(ptr, None)
    if mapping is not None:
        _c().munmap(*mapping)
        return
    backend = _backend()
    if backend is not None:
        backend.free(ptr)


def _c() -> ctypes.CDLL:
    global _libc
    if _libc is None:
        lib = ctypes.CDLL(None, use_errno=True)
        lib.mmap.restype = ctypes.c_void_p
        lib.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_long,
        ]  # fmt: skip
        lib.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        lib.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        _libc = lib
    return _libc
