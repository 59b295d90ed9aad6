"""Turning what callers hand in to float32 arrays, or refusing by name."""

from __future__ import annotations

import math
import operator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import KvShapeError, KvStateError

from .arith import F32

__all__ = ["array_in", "array_inout", "count", "flags_in", "read_only", "real", "scalar"]

_ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103


def array_in(x: Any, name: str, size: int | None = None) -> F32:
    """Return `x` as a contiguous float32 vector, without a copy where its layout allows.

    Parameters
    ----------
    x : array-like
        A NumPy array, anything with ``__array__``, the buffer protocol or DLPack on the CPU, or a
        sequence of Python numbers. Arrays must be float32.
    name : str
        The argument's name, for messages.
    size : int, optional
        Elements it must have.

    Raises
    ------
    KvShapeError
        For another dtype, a wrong number of elements, or an object that is no array.
    """
    if type(x) is not np.ndarray:
        x = _as_array(x, name)
    if x.dtype != np.float32 or not x.dtype.isnative:
        raise KvShapeError(
            f"{name}: dtype {x.dtype} where float32 is needed; convert it with astype(np.float32)"
        )
    if size is not None and x.size != size:
        raise KvShapeError(f"{name}: {x.size} elements (shape {x.shape}) where {size} are needed")
    flat: F32 = np.ascontiguousarray(x).reshape(-1)
    return flat


def array_inout(x: Any, name: str, size: int | None = None) -> F32:
    """Return a flat view of a buffer that will be written: float32, contiguous, writable."""
    if type(x) is not np.ndarray:
        x = _as_array(x, name, shared=True)
    if x.dtype != np.float32 or not x.dtype.isnative:
        raise KvShapeError(f"{name}: dtype {x.dtype} where float32 is needed")
    if size is not None and x.size != size:
        raise KvShapeError(f"{name}: {x.size} elements (shape {x.shape}) where {size} are needed")
    if not (x.flags.c_contiguous and x.flags.writeable):
        raise KvShapeError(f"{name}: must be C-contiguous and writable, as it is written in place")
    flat: F32 = x.reshape(-1)
    return flat


def count(x: SupportsIndex, name: str, low: int = 0) -> int:
    """Return an integer argument that is at least `low`; True is no number."""
    try:
        n = operator.index("" if isinstance(x, bool) else x)  # type: ignore[arg-type]
    except TypeError:
        raise KvShapeError(f"{name}: {type(x).__name__} {x!r} where an integer is needed") from None
    if n < low:
        raise KvShapeError(f"{name}: {n} where at least {low} is needed")
    return n


def read_only(x: F32) -> F32:
    """Return a view that nobody can make writable again, as a mere flag would allow."""
    view: F32 = np.asarray(memoryview(x).toreadonly())  # type: ignore[arg-type]
    return view


def real(x: Any, name: str) -> float:
    """Return a finite number as a float; text, truth values and arrays are none."""
    if type(x) is float:
        value = x
    else:
        wrong = isinstance(x, (bool, np.bool_, str, bytes, bytearray)) or np.ndim(x) != 0
        try:
            value = float("x" if wrong else x)
        except (TypeError, ValueError):
            raise KvShapeError(f"{name}: {type(x).__name__} where a number is needed") from None
        except OverflowError:
            value = math.inf
    if not math.isfinite(value):
        raise KvStateError(f"{name}: {x!r} is not a finite number")
    return value


def scalar(x: Any, name: str) -> np.float32:
    """Return a finite number as float32."""
    value = real(x, name)
    if abs(value) >= _ROUNDS_TO_INFINITY:
        raise KvStateError(f"{name}: {x!r} is not a finite float32")
    single: np.float32 = np.float32(value)
    return single


def flags_in(x: Any, name: str) -> npt.NDArray[np.bool_]:
    """Return a sequence of truth values, or of integers, as a vector of bool."""
    try:
        given = np.asarray(x)
    except ValueError:
        given = np.empty((0, 0))
    if given.ndim != 1 or (given.size and given.dtype.kind not in "bui"):
        raise KvShapeError(f"{name}: a flat sequence of True and False is needed, got {x!r}")
    return given.astype(bool)


def _as_array(x: Any, name: str, shared: bool = False) -> Any:
    try:
        if isinstance(x, (list, tuple)) and not shared:
            return _numbers(x, name)
        if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
            raise KvShapeError(f"{name}: masked elements have no value; fill them first")
        if isinstance(x, np.ndarray):
            return np.asarray(x)
        if hasattr(x, "__array__") and not shared:
            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        if hasattr(x, "__array_interface__"):
            return np.asarray(x)
        return np.asarray(memoryview(x))
    except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
        raise KvShapeError(f"{name}: {type(x).__name__} is no float32 array: {error}") from None


def _numbers(x: Any, name: str) -> Any:
    given = np.asarray(x)
    if given.size and given.dtype.kind not in "fui":
        raise TypeError(f"its elements are {given.dtype}, not numbers")
    with np.errstate(over="ignore"):
        made = given.astype(np.float32)
    if (np.isinf(made) & np.isfinite(given)).any():
        raise KvStateError(f"{name}: a number is too large for float32")
    return made
