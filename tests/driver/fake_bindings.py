"""A double of ``cuda.bindings.driver``: its own types and enums, but calls that only answer.

Every call succeeds with plausible values unless ``answers`` says otherwise; what was called with
which arguments is in ``calls``.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as real

UPDATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def returned(name: str) -> list[str]:
    """Types of what a call returns behind its result, from the docstring of the bindings."""
    doc = getattr(real, name).__doc__ or ""
    found = re.search(r"Returns\n\s*-+\n(.*?)(?:\n\s*\n\s*See Also|\Z)", doc, re.S)
    return re.findall(r"^\s*\w+ : (\S.*)$", found.group(1), re.M) if found else []


def parameters(name: str) -> list[str]:
    """Parameters of a call as its docstring's first line has them."""
    doc = getattr(real, name).__doc__ or ""
    inside = doc.split("\n", 1)[0].strip()[len(name) + 1 : -1]
    out, depth, part = [], 0, ""
    for c in inside:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            out.append(part.strip())
            part = ""
        else:
            part += c
    return [*out, part.strip()] if part.strip() else out


class FakeBindings:
    """Stands in for the module ``cuda.bindings.driver``."""

    def __init__(self, version: int = 12090, bindings: str = "12.9.0"):
        self.__version__ = bindings
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., tuple[Any, ...]] | tuple[Any, ...]] = {
            "cuDriverGetVersion": (version,),
            "cuDeviceGetName": (b"Fake GPU\0\0\0",),
            "cuGetProcAddress": self._address,
            "cuStreamIsCapturing": (real.CUstreamCaptureStatus(0),),
            "cuThreadExchangeStreamCaptureMode": (real.CUstreamCaptureMode(0),),
            "cuGraphNodeGetType": (real.CUgraphNodeType(0),),
            "cuGraphKernelNodeGetAttribute": (real.CUlaunchAttributeValue(),),
        }
        self.answers |= {
            name: (real.CUstreamCaptureStatus(0), 0, real.CUgraph(0), [], [], 0)
            for name in ("cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo")
        }
        self.fail: dict[str, int | Exception] = {}
        self.missing: set[str] = set()
        self.update: tuple[int, int, int] = (0, 0, 0)  # code, reason, node
        self._next = 0x1000
        self._keep = [UPDATE(self._update)]

    def _update(self, exec_: int, graph: int, info: int) -> int:
        code, reason, node = self.update
        self.calls.append(("cuGraphExecUpdate", (exec_, graph)))
        ctypes.c_int.from_address(info).value = reason
        ctypes.c_void_p.from_address(info + 8).value = node
        return code

    def _address(self, symbol: bytes, version: int, flags: int) -> tuple[Any, ...]:
        if symbol == b"cuGraphExecUpdate":
            pointer = ctypes.cast(self._keep[0], ctypes.c_void_p).value
            return (pointer, real.CUdriverProcAddressQueryResult(0))
        return (0xABC0 + len(symbol), real.CUdriverProcAddressQueryResult(0))

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("missing", ()):
            raise AttributeError(name)
        value = getattr(real, name)
        if not re.match(r"cu[A-Z]", name):
            return value

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            failure = self.fail.get(name, 0)
            if isinstance(failure, Exception):
                raise failure
            values = returned(name)
            if failure:
                return (real.CUresult(failure), *([None] * len(values)))
            answer = self.answers.get(name)
            if callable(answer):
                return (real.CUresult(0), *answer(*args))
            if answer is not None:
                return (real.CUresult(0), *answer)
            return (real.CUresult(0), *(self._value(t) for t in values))

        return call

    def _value(self, kind: str) -> Any:
        if kind.startswith("list"):
            return []
        found = re.search(r"`~\.(\w+)`", kind)
        if found and found.group(1).startswith("CUDA_"):
            out = getattr(real, found.group(1))()
            if found.group(1) == "CUDA_MEMCPY3D":
                out.srcMemoryType = out.dstMemoryType = real.CUmemorytype.CU_MEMORYTYPE_DEVICE
            return out
        if kind == "float":
            return 1.5
        if kind == "int" or kind == "Any":
            return 0
        self._next += 0x10
        return self._next
