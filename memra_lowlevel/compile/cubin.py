"""What a cubin says about its kernels, read without a driver.

A cubin is an ELF file; each kernel has a section ``.nv.info.<symbol>`` of attributes. Only two of
them matter here: the layout of the parameters, in two encodings.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

__all__ = ["entry_points", "param_layout", "ptx_entry_points"]

_SIZED = 0x04  # attribute format: a 16-bit size, then that many bytes
_KPARAM_INFO = 0x17
_KPARAM_INFO_V2 = 0x45
_PREFIX = ".nv.info."
_PTX_ENTRY = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)\s*\(", re.MULTILINE)


def entry_points(cubin: bytes) -> tuple[str, ...]:
    """Symbols of the kernels in a cubin."""
    return tuple(param_layout(cubin))


def param_layout(cubin: bytes) -> dict[str, tuple[tuple[int, int], ...]]:
    """Offset and size in bytes of each parameter, by kernel symbol.

    An empty dict for bytes that are no 64-bit ELF file.
    """
    layouts: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, content in _sections(cubin):
        if not name.startswith(_PREFIX):
            continue
        params: dict[int, tuple[int, int]] = {}
        for code, value in _attributes(content):
            if code in (_KPARAM_INFO, _KPARAM_INFO_V2) and len(value) >= 12:
                ordinal, offset = struct.unpack_from("<HH", value, 4)
                params[ordinal] = (offset, struct.unpack_from("<I", value, 8)[0] >> 18)
        layouts[name.removeprefix(_PREFIX)] = tuple(params[i] for i in sorted(params))
    return layouts


def ptx_entry_points(ptx: bytes) -> tuple[str, ...]:
    """Symbols of the kernels in PTX text."""
    return tuple(_PTX_ENTRY.findall(ptx.decode("utf-8", "replace")))


def _sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of every section of a 64-bit little-endian ELF file."""
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[4] != 2:
        return
    table, entry_bytes, count, names_index = (
        struct.unpack_from("<Q", data, 0x28)[0],
        *struct.unpack_from("<HHH", data, 0x3A),
    )
    headers = []
    for i in range(count):
        at = table + i * entry_bytes
        if at + 64 > len(data):
            return
        name, kind = struct.unpack_from("<II", data, at)
        offset, size = struct.unpack_from("<QQ", data, at + 0x18)
        headers.append((name, kind, offset, size))
    if names_index >= len(headers):
        return
    _, _, names_at, names_size = headers[names_index]
    names = data[names_at : names_at + names_size]
    for name, kind, offset, size in headers:
        text = names[name : names.find(b"\0", name)].decode("utf-8", "replace")
        yield text, b"" if kind == 8 else data[offset : offset + size]


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(content):
        form, code, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            yield code, content[at : at + size]
            at += size
