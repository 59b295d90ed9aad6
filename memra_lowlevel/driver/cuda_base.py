"""Loading of the CUDA driver through ``cuda.bindings``, and how its answers become errors.

The only module, with those beside it, that imports ``cuda.bindings.driver``; it does so when a
driver object is made, never at import. Bindings 12.9 and 13 are both served: where the plain name
of a call means another version, the call that carries edge data is picked by what exists.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Literal

from ..errors import DriverNotFound, MemraError, ToolkitMismatch
from . import explain
from .calls import DriverBase

__all__ = ["CudaBase"]

_MIN_DRIVER = 12000
_INVALID_VALUE, _OUT_OF_MEMORY = 1, 2


def _import_bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ToolkitMismatch(
            f"cuda.bindings cannot be imported ({error}). What to do: pip install cuda-python.",
            bindings="missing",
        ) from error


class CudaBase(DriverBase):
    """A loaded CUDA driver.

    Parameters
    ----------
    bindings : module, optional
        Stands in for ``cuda.bindings.driver``; tests give a double.

    Raises
    ------
    DriverNotFound
        No driver library, or no device.
    ToolkitMismatch
        No bindings, or a driver older than the bindings' major version.
    """

    kind: Literal["cuda", "host"] = "cuda"

    def __init__(self, bindings: Any = None) -> None:
        super().__init__()
        self._d: Any = bindings if bindings is not None else _import_bindings()
        self._entry_points: dict[str, int] = {}
        self._keep_alive: list[object] = []
        self._version = 0
        self._call("cuInit", 0)
        self._count("cuInit")
        self._version = int(self._call("cuDriverGetVersion"))
        self._count("cuDriverGetVersion")
        self._check_versions()

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    # -- versions -----------------------------------------------------------------------------
    def versions(self) -> tuple[str, str, str]:
        """Driver, NVRTC and bindings; ``"?"`` where not known here."""
        v = self._version
        return (f"{v // 1000}.{v % 1000 // 10}" if v else "?", "?", _bindings_version(self._d))

    def _check_versions(self) -> None:
        bindings = _bindings_version(self._d)
        major = bindings.partition(".")[0]
        needed = max(_MIN_DRIVER, int(major) * 1000 if major.isdigit() else 0)
        if self._version < needed:
            driver = self.versions()[0]
            raise ToolkitMismatch(
                f"The CUDA driver supports CUDA {driver}, the Python bindings are made for "
                f"{bindings}. What to do: update the driver to one for CUDA {needed // 1000}, or "
                f"install cuda-python for CUDA {self._version // 1000}.",
                driver=driver,
                bindings=bindings,
            )

    # -- calls --------------------------------------------------------------------------------
    def _call(self, call: str, *args: Any, stream: int = 0, kernel: int = 0) -> Any:
        """Make a call; return its value, a tuple of values, or None."""
        code, values = self._answer(call, *args)
        if code:
            raise self._failure(code, call, stream=stream, kernel=kernel)
        if len(values) == 1:
            return values[0]
        return values or None

    def _answer(self, call: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
        """Make a call; return its result number and its values."""
        try:
            answer = getattr(self._d, call)(*args)
        except OverflowError:
            # A number that does not fit into the call's type: the driver would say the same.
            return (_OUT_OF_MEMORY if "Alloc" in call else _INVALID_VALUE), ()
        except (RuntimeError, NotImplementedError) as error:
            raise self._loading_failed(call, error) from error
        return int(answer[0]), tuple(answer[1:])

    def _pick(self, *names: str) -> str:
        """Return the first of several names of a call that the bindings have."""
        for name in names:
            if hasattr(self._d, name):
                return name
        raise ToolkitMismatch(
            f"cuda.bindings {_bindings_version(self._d)} has none of {', '.join(names)}. "
            "What to do: install cuda-python 12.9 or 13.",
            bindings=_bindings_version(self._d),
        )

    def _loading_failed(self, call: str, error: Exception) -> MemraError:
        """Tell a missing library from a missing function.

        The bindings load the library at the first call and raise instead of returning a code.
        """
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self._version == 0 and call in ("cuInit", "cuDriverGetVersion"):
            return DriverNotFound(
                f"{call}: no CUDA driver library could be loaded ({text}). Likely cause: no NVIDIA "
                'driver on this machine or in this container. What to do: use Device("host"), or '
                "install a driver; memra-lowlevel doctor shows what was looked for."
            )
        driver, nvrtc, bindings = self.versions()
        return ToolkitMismatch(
            f"{call}: the CUDA driver ({driver}) does not have this call ({text}). What to do: "
            f"update the driver, or install older bindings than {bindings}.",
            driver=driver, nvrtc=nvrtc, bindings=bindings,
        )  # fmt: skip

    def _failure(self, code: int, call: str, *, stream: int = 0, kernel: int = 0) -> MemraError:
        name = explain.result_name(code)
        if name not in explain.RESULT_CODES:
            name = self._name_of(code) or name
        return self._error(name, call, stream=stream, kernel=kernel)

    def _name_of(self, code: int) -> str:
        """Name of a result that is newer than the table of explanations."""
        try:
            return str(self._d.CUresult(code).name)
        except (ValueError, AttributeError):
            return ""

    def error_from(self, code: int, call: str, stream: int = 0, kernel: int = 0) -> MemraError:
        """Make the exception for a result code that native code received."""
        return self._failure(code, call, stream=stream, kernel=kernel)

    # -- entry points -------------------------------------------------------------------------
    def entry_point(self, name: str) -> int:
        """Address of the driver's C function ``name`` as of CUDA 12.0; its caller counts.

        Later versions of some names take further parameters, so a fixed version is asked for.
        """
        found = self._entry_points.get(name)
        if found is None:
            pointer, _status = self._call("cuGetProcAddress", name.encode(), _MIN_DRIVER, 0)
            found = int(pointer or 0)
            if not found:
                raise self._error("CUDA_ERROR_NOT_FOUND", name, "the driver has no such function")
            self._entry_points[name] = found
        return found

    def _c_function(self, name: str, *argtypes: Any) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(self.entry_point(name))


def _bindings_version(bindings: Any) -> str:
    version = getattr(bindings, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version("cuda-bindings")
        except importlib.metadata.PackageNotFoundError:
            version = "?"
    return str(version)
