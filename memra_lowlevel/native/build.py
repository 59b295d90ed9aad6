"""Build script of ``memra_lowlevel.native._launch``, the prepared launch path in C.

``python memra_lowlevel/native/build.py`` builds it in place; setup.py names ``ffibuilder``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from cffi import FFI

HERE = Path(__file__).resolve().parent


def declarations() -> str:
    """Give the header without preprocessor lines and comments, which is what cffi reads."""
    text = (HERE / "launch_path.h").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


ffibuilder: Any = FFI()  # type: ignore[no-untyped-call]
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "memra_lowlevel.native._launch",
    # Included by content, so that the generated file builds wherever it is put.
    (HERE / "launch_path.h").read_text(encoding="utf-8")
    + (HERE / "launch_path.c").read_text(encoding="utf-8").replace('#include "launch_path.h"', "")
    + (HERE / "launch_object.c").read_text(encoding="utf-8"),
    extra_compile_args=["-O2", "-std=gnu11"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],  # calls without a tuple of arguments
    py_limited_api=True,
)

if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as build:
        built = Path(ffibuilder.compile(tmpdir=build, verbose=False))
        target, scratch = HERE / built.name, HERE / f".{built.name}.{os.getpid()}.tmp"
        scratch.write_bytes(built.read_bytes())
        os.replace(scratch, target)  # a running process keeps the module that it has mapped
        print(target)
