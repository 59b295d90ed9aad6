"""Checks of what a caller hands in: the wrong kind of thing is refused, by name and at once.

Each function takes ``what``, the words that a message begins with, and gives the value back in
its plain form. Nothing is rounded or guessed: 2.5 is no extent, True is no number.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar

from .driver.trace import caller
from .errors import ArgumentError, MemraError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["asked_by", "dtype", "integer", "kind", "name", "refusal"]

T = TypeVar("T")
_I64 = 2**63 - 1


def refusal(what: str, got: Any, expected: str, remedy: str = "") -> ArgumentError:
    """Make the error for a value of the wrong kind."""
    shown = _show(got)
    return ArgumentError(
        f"{what} got {shown} (from {caller()}). Expected {expected}{'; ' if remedy else ''}"
        f"{remedy}.",
        name=what,
        expected=expected,
        got=shown,
    )


def asked_by(who: str, call: str | tuple[str, ...], error: MemraError) -> None:
    """Let the refusal of an inner call name the object that was used, and the caller's line.

    Parameters
    ----------
    who : str
        The method that the user called, with the object's name: ``"cache.3.attend"``.
    call : str or tuple of str
        The inner call, or several, which a message may begin with.
    """
    text = str(error)
    if text.startswith(who):
        return
    for inner in (call,) if isinstance(call, str) else call:
        text = text.removeprefix(f"{inner}: ")
    text = f"{who}: {text}"
    error.args = (text if "(from " in text else f"{text} (from {caller()})",)


def kind(what: str, value: Any, cls: type[T], expected: str, remedy: str = "") -> T:
    """Give ``value`` if it is a ``cls``."""
    if isinstance(value, cls):
        return value
    raise refusal(what, value, expected, remedy)


def integer(what: str, value: Any, low: int | None = None, high: int | None = _I64) -> int:
    """Give ``value`` as an int, if it is a Python or NumPy integer in ``low … high``."""
    if type(value) is not int:
        if type(value).__name__ in ("bool", "bool_"):  # NumPy's is called either
            raise refusal(what, value, "an integer", "a truth value is none")
        try:
            value = operator.index(value)
        except TypeError:
            raise refusal(what, value, "an integer") from None
    if (low is not None and value < low) or (high is not None and value > high):
        # The sizes of this library are 64-bit; a larger number would lose its upper bits below.
        if high is None:
            raise refusal(what, value, f"an integer of at least {low}")
        if low is None:
            raise refusal(what, value, f"an integer of at most {high}")
        raise refusal(what, value, f"an integer in {low} … {high}")
    return int(value)


def name(what: str, value: Any) -> str | None:
    """Give ``value`` if it is a str or None."""
    if value is None or isinstance(value, str):
        return value
    raise refusal(f"{what}: name", value, "a str")


def dtype(what: str, value: Any) -> np.dtype[Any]:
    """Give ``value`` as a dtype that device memory can hold: plain bytes, this machine's order."""
    import numpy as np

    if value is None:
        raise refusal(f"{what}: dtype", value, "a NumPy dtype", "name it")
    try:
        found: np.dtype[Any] = np.dtype(value)
    except (TypeError, ValueError):
        raise refusal(f"{what}: dtype", value, "a NumPy dtype") from None
    if found.hasobject:
        raise refusal(
            f"{what}: dtype", found, "a dtype of plain bytes", "a device holds no Python objects"
        )
    if not found.isnative:
        raise refusal(
            f"{what}: dtype", found, "the byte order of this machine",
            "convert the array with .astype(dtype.newbyteorder('='))",
        )  # fmt: skip
    if found.itemsize == 0:
        raise refusal(f"{what}: dtype", found, "a dtype of at least one byte")
    return found


def _show(got: Any) -> str:
    if isinstance(got, type):
        return f"the class {got.__name__}"
    # By name: compiling, and doctor, work without NumPy.
    numpy = type(got).__module__.partition(".")[0] == "numpy"
    if numpy and hasattr(got, "dtype") and getattr(got, "shape", None):
        return f"a NumPy array, {got.dtype}{list(got.shape)}"
    if got is None or numpy or isinstance(got, bool | int | float | str | bytes):
        text = repr(got)
        return text if len(text) <= 60 else text[:57] + "…"
    return f"an object of type {type(got).__name__}"
