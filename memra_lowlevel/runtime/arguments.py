"""Checking and packing of kernel arguments against the loaded kernel.

Offsets and sizes come from the driver, names and types from the source (see
:class:`memra_lowlevel.compile.Param`). Nothing is widened or guessed: a Python float becomes what
the parameter declares, an integer must lie in its range, a buffer must have its dtype.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from .. import native
from ..driver.trace import caller
from ..errors import ArgumentError
from .memory import Buffer, PinnedBuffer
from .storage import MemoryView, Storage

if TYPE_CHECKING:
    from ..compile import Kernel, Param
    from .context import Context
    from .stream import Stream

__all__ = ["Encoder", "Operand"]

_INTS = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H",
    "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
}  # fmt: skip
_FLOATS = {"float32": "f", "float64": "d", "float16": "e"}
_RANGES = {
    name: (int(np.iinfo(name).min), int(np.iinfo(name).max)) for name in _INTS
}  # fmt: skip
_F32_MAX = float(np.finfo(np.float32).max)
# 16-bit floats have no type of their own in kernel sources; their bits travel as uint16_t.
_SAME_BITS = {"uint16": ("float16", "bfloat16"), "uint8": ("float8_e4m3fn", "bool")}

Convert = Callable[[Any, "Context", list[Storage]], Any]


@runtime_checkable
class Operand(Protocol):
    """Anything that stands for a buffer as a kernel argument, such as a ``DeviceCounter``."""

    @property
    def buffer(self) -> Buffer:
        """The buffer that the kernel gets."""
        ...


class Encoder:
    """Argument checker and packer of one kernel.

    Attributes
    ----------
    kernel : Kernel
    offsets : tuple of int
        Offset in bytes of each parameter in a block.
    n_bytes : int
        Size of a block, a multiple of 8.
    pack_noting : callable
        ``pack_noting(args, context, stream)`` gives the block of as many arguments as there are
        parameters and notes the use of their storages. What it refuses without a name
        (``struct.error``, ``OverflowError``), :meth:`pack` refuses by name.
    """

    def __init__(self, kernel: Kernel) -> None:
        params = tuple(kernel.params)
        self.name, self.params = kernel.name, params
        self.offsets = tuple(p.offset for p in params)
        self.n_bytes = -(-max((p.offset + p.size for p in params), default=0) // 8) * 8 or 8
        codes, at = ["<"], 0
        self._convert: list[Convert] = []
        self._index: dict[int | str, int] = {}
        self._usual: list[np.dtype[Any]] = []
        for i, p in enumerate(params):
            codes.append(f"{p.offset - at}x")
            code, convert = _pointer(self.name, i, p) if p.pointer else _scalar(self.name, i, p)
            codes.append(code)
            self._convert.append(convert)
            self._index[i] = self._index[p.name] = i
            at = p.offset + p.size
        codes.append(f"{self.n_bytes - at}x")
        self._struct = struct.Struct("".join(codes))
        self._singles = [struct.Struct("<" + c) for c in codes[2::2]]
        self._pack, self.pack_noting = _unrolled(params, self._convert, self._struct.pack)

    def pack(self, args: Sequence[Any], context: Context) -> tuple[bytes, list[Storage]]:
        """Check ``args`` and give the parameter block and the storages it names."""
        if len(args) != len(self._convert):
            names = ", ".join(f"{p.ctype} {p.name}" for p in self.params)
            raise ArgumentError(
                f"{self.name} takes {len(self.params)} arguments ({names}), not {len(args)} "
                f"(from {caller()}).",
                kernel=self.name,
                expected=str(len(self.params)),
                got=str(len(args)),
            )
        storages: list[Storage] = []
        try:
            return self._pack(args, context, storages), storages
        except (struct.error, OverflowError):
            for arg, convert in zip(args, self._convert, strict=True):
                convert(arg, context, [])  # raises by name
            raise

    def describe(self) -> Any:
        """Describe the parameters to the compiled path; None where only Python can pack them."""
        if self.n_bytes > native.lib.MLL_BLOCK:
            return None
        described = native.ffi.new("mll_param[]", max(1, len(self.params)))
        for cell, p in zip(described, self.params, strict=False):
            kind = _compiled_kind(p)
            if kind is None:
                return None
            cell.kind, cell.nullable = kind, p.nullable
            cell.offset, cell.size = p.offset, p.size
            if p.pointer and p.dtype:
                self._usual.append(np.dtype(p.dtype))  # kept: C compares by address
                cell.dtype = native.ffi.cast("void *", id(self._usual[-1]))
        return described

    def operands(self, args: Sequence[Any], context: Context) -> dict[int, Storage]:
        """Give the storage that each pointer argument names, by position; None names none."""
        found = {}
        for i, (p, arg) in enumerate(zip(self.params, args, strict=True)):
            if p.pointer and arg is not None:
                found[i] = self.pack_one(i, arg, context)[1][0]
        return found

    def pack_into(self, block: Any, index: int, arg: Any, context: Context) -> list[Storage]:
        """Check one argument, write it into ``block``, and give the storage it names, if any."""
        storages: list[Storage] = []
        value = self._convert[index](arg, context, storages)
        self._singles[index].pack_into(block, self.offsets[index], value)
        return storages

    def pack_one(self, index: int, arg: Any, context: Context) -> tuple[bytes, list[Storage]]:
        """Check one argument and give its bytes."""
        storages: list[Storage] = []
        value = self._convert[index](arg, context, storages)
        return self._singles[index].pack(value), storages

    def index(self, which: int | str) -> int:
        """Position of a parameter given by position or name."""
        found = self._index.get(which) if isinstance(which, int | str) else None
        if found is not None:
            return found
        names = ", ".join(p.name for p in self.params)
        raise ArgumentError(
            f"{self.name} has no parameter {which!r}; it has {names}.",
            kernel=self.name, name=str(which), expected=names, got=str(which),
        )  # fmt: skip

    def split(self, block: bytes) -> tuple[bytes, ...]:
        """Cut a block into the bytes of each parameter."""
        return tuple(block[p.offset : p.offset + p.size] for p in self.params)

    def decode(self, index: int, raw: bytes) -> Any:
        """Value of a parameter from its bytes: an address, a number, or the bytes themselves."""
        p = self.params[index]
        if p.pointer:
            return int.from_bytes(raw, "little")
        if p.dtype in _INTS or p.dtype in _FLOATS or p.dtype == "bool":
            return np.frombuffer(raw, p.dtype)[0].item()
        return raw


def _unrolled(
    params: Sequence[Param], converters: Sequence[Convert], pack: Callable[..., bytes]
) -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    """Make the packing functions of a kernel: one line per parameter instead of a loop of calls.

    The common case of each parameter is decided in line (an open Buffer of the usual dtype, an int,
    a float; packing itself checks ranges); everything else goes to its converter, which also
    refuses by name. Halves the cost of a launch with new arguments.

    Returns
    -------
    (listing, noting)
        ``listing(args, context, storages)`` appends the storages; ``noting(args, context, stream)``
        notes their use by the stream, once all arguments are good.
    """
    # Under this module's name, so that messages show the line of the caller.
    names: dict[str, Any] = {"__name__": __name__, "Buffer": Buffer, "pack": pack}
    names["note"] = _note
    all_args = "".join(f"a{i}, " for i in range(len(params)))
    pointers = [i for i, p in enumerate(params) if p.pointer]
    lines = [f"    {all_args}= args"] if params else []
    for i, p in enumerate(params):
        names[f"convert{i}"], call = converters[i], f"convert{i}(a{i}, context, others)"
        if p.pointer:
            names[f"dtype{i}"] = np.dtype(p.dtype) if p.dtype else None
            lines += [
                f"    s{i} = a{i}._storage if type(a{i}) is Buffer and a{i}.dtype is dtype{i} "
                f"and not a{i}._closed else None",
                f"    if s{i} is not None and s{i}.open and s{i}.context is context:",
                f"        a{i} = a{i}.ptr",
                "    else:",
                f"        others = []; a{i} = {call}; s{i} = others[0] if others else None",
            ]
        elif p.dtype in _INTS or p.dtype in ("float32", "float64"):
            plain = "int" if p.dtype in _INTS else "float"
            lines.append(f"    if type(a{i}) is not {plain}: others = []; a{i} = {call}")
        else:
            lines.append(f"    others = []; a{i} = {call}")
    lines.append(f"    block = pack({all_args})")
    listing = [f"    if s{i} is not None: storages.append(s{i})" for i in pointers]
    noting = [
        f"    if s{i} is not None and s{i}.last is not stream: note(s{i}, stream)" for i in pointers
    ]
    for name, last, end in (("listing", "storages", listing), ("noting", "stream", noting)):
        text = [f"def {name}(args, context, {last}):", *lines, *end, "    return block"]
        exec("\n".join(text), names)
    return names["listing"], names["noting"]


def _compiled_kind(p: Param) -> int | None:
    if p.pointer:
        return int(native.lib.MLL_POINTER)
    if p.dtype in _INTS:
        signed = not p.dtype.startswith("u")
        return int(native.lib.MLL_SIGNED if signed else native.lib.MLL_UNSIGNED)
    if p.dtype in ("float32", "float64"):
        return int(native.lib.MLL_F32 if p.dtype == "float32" else native.lib.MLL_F64)
    return None if p.dtype in ("float16", "bool") else int(native.lib.MLL_BYTES)


def _note(storage: Storage, stream: Stream) -> None:
    storage.last = stream
    storage.streams.add(stream)


def _refuse(
    kernel: str, index: int, p: Param, got: str, why: str = "", expected: str = ""
) -> ArgumentError:
    expected = expected or p.ctype
    return ArgumentError(
        f"{kernel}: argument {index} ({p.ctype} {p.name}) got {got}{': ' + why if why else ''} "
        f"(from {caller()}). Expected {expected}.",
        kernel=kernel,
        index=index,
        name=p.name,
        expected=expected,
        got=got,
    )


def _pointer(kernel: str, index: int, p: Param) -> tuple[str, Convert]:
    accepted = {p.dtype, *_SAME_BITS.get(p.dtype, ())}
    # NumPy's own dtypes are single objects: identity answers nearly every call.
    usual = np.dtype(p.dtype) if p.dtype else None
    expected = f"a Buffer of {p.dtype or 'any dtype'}" + (" or None" if p.nullable else "")

    def convert(arg: Any, context: Context, storages: list[Storage]) -> Any:
        if type(arg) is not Buffer and not isinstance(arg, MemoryView):
            if arg is None:
                if p.nullable:
                    return 0
                why = "the parameter is not marked NULLABLE in the source"
                raise _refuse(kernel, index, p, "None", why, expected)
            inner = getattr(arg, "buffer", None)
            if not isinstance(inner, Buffer):
                why = ""
                if isinstance(arg, np.ndarray):
                    why = "a NumPy array is host memory; copy it to the device first"
                elif isinstance(arg, int):
                    why = "an address has no owner; wrap foreign memory with device.wrap()"
                raise _refuse(kernel, index, p, type(arg).__name__, why, expected)
            arg = inner
        storage = arg._storage
        if arg._closed or not storage.open:
            arg._check_open(f"{kernel}: argument {index} ({p.ctype} {p.name})")
        if storage.context is not context:
            pinned = isinstance(arg, PinnedBuffer)
            if not (pinned and storage.context.driver is context.driver):
                got = f"a buffer of {storage.context}"
                why = f"the launch is on {context}"
                raise _refuse(kernel, index, p, got, why, f"a buffer of {context}")
        dtype = arg.dtype
        # By object where NumPy has one; a dtype of the other byte order bears the same name.
        if (
            dtype is not usual
            and usual is not None
            and (dtype.name not in accepted or not dtype.isnative)
        ):
            raise _refuse(kernel, index, p, f"a buffer of {dtype}", "", expected)
        storages.append(storage)
        return arg.ptr

    return "Q", convert


def _scalar(kernel: str, index: int, p: Param) -> tuple[str, Convert]:
    if p.dtype in _INTS:
        return _INTS[p.dtype], _integer(kernel, index, p)
    if p.dtype in _FLOATS:
        return _FLOATS[p.dtype], _float(kernel, index, p)
    if p.dtype == "bool":

        def boolean(arg: Any, context: Context, storages: list[Storage]) -> bool:
            if isinstance(arg, bool | np.bool_):
                return bool(arg)
            raise _refuse(kernel, index, p, repr(arg), "", "a bool")

        return "?", boolean

    def raw(arg: Any, context: Context, storages: list[Storage]) -> bytes:
        if isinstance(arg, np.generic | np.ndarray):
            arg = arg.tobytes()
        if isinstance(arg, bytes) and len(arg) == p.size:
            return arg
        raise _refuse(kernel, index, p, type(arg).__name__, "", f"{p.size} bytes")

    return f"{p.size}s", raw


def _integer(kernel: str, index: int, p: Param) -> Convert:
    low, high = _RANGES[p.dtype]

    def convert(arg: Any, context: Context, storages: list[Storage]) -> int:
        if type(arg) is not int:
            if isinstance(arg, bool | np.bool_):
                raise _refuse(kernel, index, p, repr(arg), "a truth value; pass int(x)")
            if not isinstance(arg, int | np.integer):
                raise _refuse(kernel, index, p, f"{type(arg).__name__} {arg!r}")
            arg = int(arg)
        if not low <= arg <= high:
            why = f"outside {low} … {high}"
            raise _refuse(kernel, index, p, str(arg), why)
        return int(arg)

    return convert


def _float(kernel: str, index: int, p: Param) -> Convert:
    limit = {"float32": _F32_MAX, "float16": 65504.0}.get(p.dtype, math.inf)

    def convert(arg: Any, context: Context, storages: list[Storage]) -> float:
        if type(arg) is not float:
            if isinstance(arg, bool | np.bool_):
                raise _refuse(kernel, index, p, repr(arg), "a truth value; pass float(x)")
            if not isinstance(arg, float | int | np.floating | np.integer):
                raise _refuse(kernel, index, p, f"{type(arg).__name__} {arg!r}")
            try:
                arg = float(arg)
            except OverflowError:  # a whole number
                raise _refuse(kernel, index, p, "an int", f"too large for {p.dtype}") from None
        if limit < abs(arg) < math.inf:
            # Values that only round up to the largest finite one are rare enough to refuse too.
            raise _refuse(kernel, index, p, repr(arg), f"too large for {p.dtype}")
        return float(arg)

    return convert
