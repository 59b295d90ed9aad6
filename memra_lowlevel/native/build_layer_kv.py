"""Build the compiled loops of LayerKvCache: ``memra_lowlevel.native._layer_kv``.

Run by setuptools through ``cffi_modules``; ``python memra_lowlevel/native/build_layer_kv.py``
builds it in place.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from typing import Any

from cffi import FFI

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_HERE = "memra_lowlevel/native"
_PARTS = ("loops", "attend", "base", "avx2", "avx512")


def _declarations() -> str:
    """Return the header as cffi reads it: no comments, no guards, no includes."""
    with open(os.path.join(_ROOT, _HERE, "layer_kv.h"), encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    keep = [
        line
        for line in text.splitlines()
        if not line.startswith("#") or re.match(r"#define LKV_\w+ \d+$", line)
    ]
    return "\n".join(keep)


def _builder(root: str) -> Any:
    """Describe the module; `root` leads its C files, relative for setuptools."""
    builder: Any = FFI()  # type: ignore[no-untyped-call]
    builder.cdef(_declarations())
    builder.set_source(
        "memra_lowlevel.native._layer_kv",
        '#include "layer_kv.h"\n',
        sources=[os.path.join(root, _HERE, "layer_kv.c")],
        include_dirs=[os.path.join(_ROOT, _HERE), os.path.join(_ROOT, "cuda_src")],
        depends=[
            os.path.join(root, *path.split("/"))
            for path in (
                *(f"{_HERE}/layer_kv_{part}.h" for part in _PARTS),
                f"{_HERE}/layer_kv.h",
                "cuda_src/common/elementary.cuh",
            )
        ],
        # Contraction would fuse products and sums that the arithmetic rounds separately. Nobody
        # reads errno or floating-point flags; without them exponentials run in vectors.
        extra_compile_args=[
            "-O3",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-std=gnu11",
        ],
        py_limited_api=True,
    )
    return builder


ffibuilder = _builder("")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        built = _builder(_ROOT).compile(tmpdir=scratch)
        target = os.path.join(_ROOT, _HERE, os.path.basename(built))
        shutil.copy(built, target + ".new")
        os.replace(target + ".new", target)
    print(target)
