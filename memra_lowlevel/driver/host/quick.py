"""A convenience for kernel authors: a kernel as a function of NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import errors
from .build import Sanitizer

__all__ = ["quick"]

Dim = int | tuple[int, ...]


def quick(
    source_file: str | Path,
    name_expr: str,
    defines: Mapping[str, object] | None = None,
    *,
    include_dirs: Sequence[str | Path] = (),
    check: bool = False,
    sanitize: Sanitizer | None = None,
) -> Callable[..., None]:
    """Compile a kernel and return a function that runs it on NumPy arrays.

    Parameters
    ----------
    source_file : path or str
        A path (relative ones are looked up in ``cuda_src`` too), or a source text.
    name_expr : str
        Kernel name, or name expression such as ``"attend<128>"``.
    defines : mapping, optional

    Returns
    -------
    callable
        ``f(grid, block, shared_bytes, *args, order=, seed=, workers=, check=, strict=, seconds=)``.
        An array is passed as a guarded copy and copied back, also when the launch fails; ``None``
        is a null pointer; everything else must be a NumPy scalar of the parameter's size.

    Examples
    --------
    >>> scale = quick("demo.cu", "scale<4>")                       # doctest: +SKIP
    >>> scale(8, 128, 0, x, np.float32(2), np.int32(x.size))       # doctest: +SKIP
    """
    from . import runner
    from .cxx import compile_host

    source: str | Path = source_file
    if isinstance(source_file, Path) or "\n" not in source_file:
        source = Path(source_file)
        if not source.is_file():
            source = runner.cuda_src() / source_file
    image = compile_host(
        source, [name_expr], [*include_dirs, runner.cuda_src()], defines, check, sanitize
    )
    func = runner.get_function(runner.load(image.path), name_expr)
    sizes = runner.param_sizes(func)

    def call(grid: Dim, block: Dim, shared_bytes: int, *args: Any, **options: Any) -> None:
        if len(args) != len(sizes):
            raise errors.ArgumentError(
                f"{name_expr} takes {len(sizes)} arguments, got {len(args)}", kernel=name_expr
            )
        options.setdefault("check", check)
        if options["check"]:
            runner.enable_check()
        values: list[Any] = []
        buffers: dict[int, tuple[npt.NDArray[Any], int]] = {}
        try:
            for i, (arg, size) in enumerate(zip(args, sizes, strict=True)):
                if arg is None or isinstance(arg, np.ndarray):
                    value = 0
                    if arg is not None:
                        if not arg.flags.c_contiguous:
                            raise errors.ArgumentError(
                                f"{name_expr}: array {i} is not C-contiguous", index=i
                            )
                        if id(arg) not in buffers:
                            buffers[id(arg)] = (arg, runner.alloc(arg.nbytes))
                            runner.copy_in(buffers[id(arg)][1], arg)
                        value = buffers[id(arg)][1]
                    data = value.to_bytes(8, "little")
                else:
                    data = np.generic.tobytes(arg)
                if len(data) != size:
                    raise errors.ArgumentError(
                        f"{name_expr}: argument {i} has {len(data)} bytes, the kernel wants {size}",
                        kernel=name_expr, index=i, expected=str(size), got=str(len(data)),
                    )  # fmt: skip
                values.append(ctypes.create_string_buffer(data, size))
            pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
            try:
                runner.run(func, grid, block, shared_bytes, ctypes.addressof(pointers), **options)
            finally:
                for array, ptr in buffers.values():
                    if array.flags.writeable:
                        runner.copy_out(array, ptr)
        finally:
            _free_all([ptr for _, ptr in buffers.values()])

    return call


def _free_all(pointers: list[int]) -> None:
    from . import runner

    damage = None
    for ptr in pointers:
        try:
            runner.free(ptr)
        except errors.OutOfBounds as error:
            damage = damage or error
    if damage is not None:
        raise damage
