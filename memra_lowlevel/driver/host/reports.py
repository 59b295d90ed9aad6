"""What a failed launch says: the runtime's record of a failure, turned into an exception."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

from ... import errors
from .build import RUNTIME

__all__ = ["Failure", "locate", "translate"]


class Failure(ctypes.Structure):
    """The record that the runtime fills (``Failure`` in ``rt.h``)."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("message", ctypes.c_char * 1024),
        ("kernel", ctypes.c_char * 256),
        ("file", ctypes.c_char * 512),
        ("module", ctypes.c_char * 512),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("other_block", ctypes.c_uint32 * 3),
        ("other_thread", ctypes.c_uint32 * 3),
        ("address", ctypes.c_uint64),
    )


_ERRORS: dict[int, type[errors.HostCheckError]] = {
    1: errors.OutOfBounds,
    2: errors.DataRace,
    3: errors.BarrierDivergence,
    4: errors.UninitialisedRead,
    5: errors.Deadlock,
    6: errors.HostCheckError,
    8: errors.OutOfBounds,
}


_REMEDIES: dict[type[errors.HostCheckError], str] = {
    errors.OutOfBounds: "Compare the index with the size of what the launch was given",
    errors.DataRace: "Order the two accesses: __syncthreads, a warp operation, or an atomic",
    errors.UninitialisedRead: (
        "Write it first: zeros, fill, from_numpy, or earlier work on the same stream"
    ),
}
_SHARED_REMEDY = (
    "Write it first; if another thread writes it, a __syncthreads between the two is missing"
)


_TWO_ON_A_LINE = re.compile(r"at the __syncthreads of (\S+:\d+), .* waits at the one of \1:")


def _line(where: str) -> str:
    """Give the line of the source at ``file:line``; empty where the file is not at hand."""
    path, _, number = where.rpartition(":")
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def translate(f: Failure) -> errors.MemraError:
    """Make the exception of a record: kernel, block, thread, source place, cause."""
    message = f.message.decode(errors="replace")
    kernel = f.kernel.decode(errors="replace")
    if f.kind == 7:
        return errors.LaunchLimit(f"launch of {kernel}: {message}", what=message)
    where = f"{f.file.decode(errors='replace')}:{f.line}" if f.line else ""
    if not where and f.pc:
        where = locate(f.module.decode(errors="replace"), f.pc)
    block, thread = tuple(f.block), tuple(f.thread)
    at = f" at {where}" if where else ""
    other = locate(f.module.decode(errors="replace"), f.other_pc) if f.other_pc else ""
    if other:
        message += f" (the other access: {other})"
    kind = _ERRORS[f.kind]
    if kind is errors.BarrierDivergence and _TWO_ON_A_LINE.search(message):
        message += ". These are two calls on one line: put each on a line of its own to tell them"
    elif message.endswith(" is outside the array") and (line := _line(where)):
        message += f": {line}"
    remedy = _REMEDIES.get(kind, "")
    if kind is errors.UninitialisedRead and "shared" in message:
        remedy = _SHARED_REMEDY
    if remedy:
        message += f". {remedy}."
    return kind(
        f"kernel {kernel}, block {block}, thread {thread}{at}: {message}",
        kernel=kernel, block=block, thread=thread, where=where,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def locate(module: str, offset: int) -> str:
    """Source place (``file:line``) of an offset into a library; empty without ``addr2line``."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None or not module:
        return ""
    try:
        answer = subprocess.run(
            [tool, "-i", "-e", module, hex(offset)], capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    # Innermost first; what the runtime's headers inline is not what a reader wants to see.
    for line in answer.stdout.decode(errors="replace").splitlines():
        path, _, number = line.split(" (")[0].rpartition(":")
        if number.isdigit() and number != "0" and RUNTIME not in Path(path).parents:
            return f"{path if Path(path).exists() else Path(path).name}:{number}"
    return ""
