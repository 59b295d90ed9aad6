"""Loading of the compiled loops and the choice between them and the NumPy path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

__all__ = ["available", "backend", "ffi", "lib", "use", "work"]

ffi: Any = None
lib: Any = None
try:
    _module = import_module("memra_lowlevel.native._layer_kv")
    ffi, lib = _module.ffi, _module.lib
except ImportError:  # not built: the NumPy path gives the same bits
    pass

_SETS = ("baseline", "avx2", "avx512")
_native = lib is not None


def available() -> tuple[str, ...]:
    """Return the names of the paths that work here: ``numpy`` and the compiled sets."""
    if lib is None:
        return ("numpy",)
    mask = lib.lkv_isa_mask()
    return ("numpy", *(name for i, name in enumerate(_SETS) if mask >> i & 1))


def backend() -> str:
    """Return the name of the path in use; the widest compiled set unless :func:`use` says else."""
    return _SETS[lib.lkv_isa()] if _native else "numpy"


def native() -> bool:
    """Return whether the compiled loops are in use."""
    return _native


def work() -> dict[str, int]:
    """Count what the compiled loops of the calling thread have done since it began.

    Returns
    -------
    dict
        ``rows_scored``: rows of keys multiplied with a query; ``rows_added``: rows of values or of
        a state added to a sum; ``exponentials`` (softcap's tanh apart); ``scratch_bytes``: memory
        that was taken and given back. All 0 on the NumPy path.
    """
    names = ("rows_scored", "rows_added", "exponentials", "scratch_bytes")
    if lib is None:
        return dict.fromkeys(names, 0)
    counts = ffi.new("int64_t[]", lib.LKV_N_WORK)
    lib.lkv_work(counts)
    return dict(zip(names, counts, strict=True))


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Use one path for the length of a ``with`` block, in the whole process.

    Every path gives the same bits; this is for tests and measurements.

    Raises
    ------
    ValueError
        If the path is not in :func:`available`.
    """
    global _native
    if name not in available():
        raise ValueError(f"no path {name!r} here; there are {', '.join(available())}")
    before, isa = _native, lib.lkv_isa() if lib is not None else 0
    _native = name != "numpy"
    if _native:
        lib.lkv_select_isa(_SETS.index(name))
    try:
        yield
    finally:
        _native = before
        if lib is not None:
            lib.lkv_select_isa(isa)
