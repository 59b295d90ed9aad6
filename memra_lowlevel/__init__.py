"""A low-level runtime for LLM decoding.

Run-time compiled kernels, explicit streams, captured graphs with device counters, and a CPU device
that runs the same kernels. Names are loaded on first use: importing the package makes no CUDA call
and takes a few milliseconds.
"""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

from .lazy import attach

if TYPE_CHECKING:
    from . import cache, errors, formats, layer_kv, speculative
    from .compile import CompileOptions, Kernel, Module, compile_file, compile_source
    from .graph import CaptureMode, DeviceCounter, Graph, GraphExec, sync_counters
    from .runtime import (
        Arena,
        Buffer,
        Device,
        Event,
        LaunchConfig,
        PinnedBuffer,
        PreparedLaunch,
        Stream,
        census,
        launch_many,
        no_leaks,
        prepare,
    )
    from .runtime.launch import launch

__version__ = "0.1.0"

# In a checkout the examples lie beside the package; an installed package holds them.
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_checkout, "examples", "smollm2", "model.py")):
    __path__.append(_checkout)

__all__ = [
    "Arena",
    "Buffer",
    "CaptureMode",
    "CompileOptions",
    "Device",
    "DeviceCounter",
    "Event",
    "Graph",
    "GraphExec",
    "Kernel",
    "LaunchConfig",
    "Module",
    "PinnedBuffer",
    "PreparedLaunch",
    "Stream",
    "cache",
    "census",
    "compile_file",
    "compile_source",
    "errors",
    "formats",
    "launch",
    "launch_many",
    "layer_kv",
    "no_leaks",
    "prepare",
    "speculative",
    "sync_counters",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "compile": ("CompileOptions", "Kernel", "Module", "compile_file", "compile_source"),
    "graph": ("CaptureMode", "DeviceCounter", "Graph", "GraphExec", "sync_counters"),
    "runtime": (
        "Arena", "Buffer", "Device", "Event", "LaunchConfig", "PinnedBuffer", "PreparedLaunch",
        "Stream", "census", "launch", "launch_many", "no_leaks", "prepare",
    ),
    **dict.fromkeys(("cache", "errors", "formats", "layer_kv", "speculative"), ()),
}  # fmt: skip

if not TYPE_CHECKING:  # a checker knows the names from above, and tells those that are none
    __getattr__, __dir__ = attach(__name__, _HOMES)
