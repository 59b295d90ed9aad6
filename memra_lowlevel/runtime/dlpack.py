"""The DLPack structures and capsules, over ctypes: both the versioned and the old form.

Layout in bytes (64-bit): ``DLTensor`` = data 0, device type i32 8, device id i32 12, ndim i32 16,
dtype code u8 20, bits u8 21, lanes u16 22, shape* 24, strides* 32, byte offset u64 40.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError

__all__ = ["CPU", "CUDA", "CUDA_HOST", "Imported", "capsule_of", "take"]

CPU, CUDA, CUDA_HOST = 1, 2, 3
_FLAG_READ_ONLY = 1
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4
_KINDS = {0: "i", 1: "u", 2: "f"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def _prototype(name: str, result: Any, *args: Any) -> Any:
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = result, args
    return function


_new = _prototype("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p,
                  ctypes.c_void_p)  # fmt: skip
_valid = _prototype("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _prototype("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _prototype("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# The destructor gets a capsule that is being torn down: no reference may be taken, so raw pointers.
_raw_valid = ctypes.PyDLL(None).PyCapsule_IsValid
_raw_valid.restype, _raw_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_raw_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
_raw_pointer.restype, _raw_pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)

_OLD, _NEW = b"dltensor", b"dltensor_versioned"
_USED = {_OLD: b"used_dltensor", _NEW: b"used_dltensor_versioned"}
_exports: dict[int, tuple[Any, ...]] = {}
_ids = itertools.count(1)


def _delete_old(address: int) -> None:
    _exports.pop(_Managed.from_address(address).manager, None)


def _delete_new(address: int) -> None:
    _exports.pop(_Versioned.from_address(address).manager, None)


def _drop(capsule: int) -> None:
    # A consumed capsule was renamed; its tensor belongs to the consumer then.
    for name, kind in ((_OLD, _Managed), (_NEW, _Versioned)):
        if _raw_valid(capsule, name):
            _exports.pop(kind.from_address(_raw_pointer(capsule, name)).manager, None)


_c_delete_old, _c_delete_new = _Deleter(_delete_old), _Deleter(_delete_new)
_c_drop = _CapsuleDestructor(_drop)


def capsule_of(
    owner: Any,
    ptr: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: tuple[int, int],
    *,
    versioned: bool,
) -> Any:
    """Make a capsule over memory that ``owner`` keeps alive.

    Parameters
    ----------
    device : (int, int)
        DLPack device type and id.
    versioned : bool
        Make the form with a version (1.0) instead of the old one.
    """
    code = _BFLOAT if dtype.name == "bfloat16" else _CODES.get(dtype.kind)
    if code is None:
        raise ArgumentError(
            f"__dlpack__: {dtype} has no DLPack type; view the buffer as uint8.",
            name="dtype", expected="integer, float or bool", got=str(dtype),
        )  # fmt: skip
    managed: Any = _Versioned() if versioned else _Managed()
    t = managed.tensor
    t.data, t.device_type, t.device_id = ptr, *device
    t.ndim, t.code, t.bits, t.lanes = len(shape), code, 8 * dtype.itemsize, 1
    dims = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    steps = (ctypes.c_int64 * max(1, len(shape)))()
    step = 1
    for i in range(len(shape) - 1, -1, -1):
        steps[i] = step
        step *= max(1, shape[i])
    t.shape = ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64))
    t.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    if versioned:
        managed.major, managed.minor = 1, 0
    number = next(_ids)
    managed.manager = number
    deleter = _c_delete_new if versioned else _c_delete_old
    managed.deleter = ctypes.cast(deleter, ctypes.c_void_p).value
    _exports[number] = (owner, managed, dims, steps)
    name = _NEW if versioned else _OLD
    return _new(ctypes.addressof(managed), name, ctypes.cast(_c_drop, ctypes.c_void_p))


@dataclass
class Imported:
    """A tensor taken out of a capsule.

    Attributes
    ----------
    ptr : int
    shape : tuple of int
    dtype : numpy.dtype
    device : (int, int)
    read_only : bool
    release : callable
        Gives the tensor back to its producer; to be called once.
    """

    ptr: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: tuple[int, int]
    read_only: bool
    release: Callable[[], None]


def take(capsule: Any) -> Imported:
    """Take the tensor out of a capsule; the capsule cannot be used again.

    Raises
    ------
    ArgumentError
        If it was taken before, or holds a layout or type that a Buffer cannot have; the capsule
        is then untouched.
    """
    name = next((n for n in (_NEW, _OLD) if _valid(capsule, n)), None)
    if name is None:
        raise ArgumentError(
            "this DLPack capsule was consumed already, or is none.",
            name="capsule", expected="a fresh capsule", got=repr(capsule),
        )  # fmt: skip
    address = _pointer(capsule, name)
    managed: Any = (_Versioned if name == _NEW else _Managed).from_address(address)
    if name == _NEW and managed.major > 1:
        raise ArgumentError(
            f"DLPack {managed.major}.{managed.minor} is not known; 1.x is.",
            name="capsule", expected="1.x", got=str(managed.major),
        )  # fmt: skip
    t = managed.tensor
    shape = tuple(t.shape[i] for i in range(t.ndim))
    step = 1
    for i in range(t.ndim - 1, -1, -1):
        if t.strides and shape[i] > 1 and t.strides[i] != step:
            raise ArgumentError(
                f"a Buffer is C-contiguous; the tensor {shape} has strides "
                f"{tuple(t.strides[j] for j in range(t.ndim))}. Copy it first.",
                name="strides", expected="C-contiguous", got="strided",
            )  # fmt: skip
        step *= shape[i]
    dtype = _dtype(t.code, t.bits, t.lanes)
    read_only = bool(name == _NEW and managed.flags & _FLAG_READ_ONLY)
    found = Imported(
        (t.data or 0) + t.byte_offset, shape, dtype, (t.device_type, t.device_id), read_only,
        lambda: _Deleter(managed.deleter)(address) if managed.deleter else None,
    )  # fmt: skip
    _rename(capsule, _USED[name])
    return found


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    if lanes == 1 and bits % 8 == 0:
        if code == _BFLOAT and bits == 16:
            return np.dtype(np.uint16)  # NumPy alone has no bfloat16; kernels take its bits
        if code == 6 and bits == 8:
            return np.dtype(np.bool_)
        if code in _KINDS and bits in (8, 16, 32, 64) and not (code == 2 and bits == 8):
            return np.dtype(f"{_KINDS[code]}{bits // 8}")
    raise ArgumentError(
        f"DLPack type (code {code}, {bits} bits, {lanes} lanes) is not supported.",
        name="dtype", expected="integer, float, bfloat16 or bool, 1 lane", got=f"code {code}",
    )  # fmt: skip
