"""Run-time compilation: NVRTC for GPUs, the system's C++ compiler for the host device.

``compile_source`` and ``compile_file`` give a :class:`CompiledImage`; ``Module`` loads it. Nothing
here touches a GPU or loads NVRTC when it is imported, and a name is loaded on first use: a process
that launches kernels needs no compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .arch import DEFAULT_ARCHS
    from .cache import KernelCache, default_cache
    from .compiler import Job, compile_each, compile_file, compile_many, compile_source
    from .image import CompiledImage
    from .logs import Resources
    from .module import Kernel, Module, Param
    from .options import CompileOptions
    from .signature import ParamDecl, Signature
    from .source import cuda_src_root, kernel_sources

__all__ = [
    "DEFAULT_ARCHS",
    "CompileOptions",
    "CompiledImage",
    "Job",
    "Kernel",
    "KernelCache",
    "Module",
    "Param",
    "ParamDecl",
    "Resources",
    "Signature",
    "compile_each",
    "compile_file",
    "compile_many",
    "compile_source",
    "cuda_src_root",
    "default_cache",
    "kernel_sources",
]

_HOMES = {
    "arch": ("DEFAULT_ARCHS",),
    "cache": ("KernelCache", "default_cache"),
    "compiler": ("Job", "compile_each", "compile_file", "compile_many", "compile_source"),
    "image": ("CompiledImage",),
    "logs": ("Resources",),
    "module": ("Kernel", "Module", "Param"),
    "options": ("CompileOptions",),
    "signature": ("ParamDecl", "Signature"),
    "source": ("cuda_src_root", "kernel_sources"),
}

if not TYPE_CHECKING:  # a checker knows the names from above, and tells those that are none
    __getattr__, __dir__ = attach(__name__, _HOMES)
