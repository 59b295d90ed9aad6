"""Which code a figure speaks of: one digest per family of measurements.

A result file keeps the digests of all families. A figure is *older than its source* when the digest
of its family differs from today's; an edit elsewhere ages nothing. Comments, docstrings and blank
lines do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..compile.source import cuda_src_root
from ..compile.tokens import tokens

__all__ = ["FAMILIES", "digest_of", "digests", "files_of", "package_digest"]

PACKAGE = Path(__file__).resolve().parent.parent

_LAUNCH = ("native/launch_*.c", "native/launch_*.h", "runtime/launch.py", "runtime/arguments.py")

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ceilings": ("cuda:bench/*.cu",),
    "launch": _LAUNCH,
    "replay": (*_LAUNCH, "graph/executable.py", "graph/counters.py"),
    "append": ("cuda:kv/append*.cu", "kernels/kv_append*.py"),
    "attend": ("cuda:kv/attend*.cu", "kernels/kv_attend*.py"),
    "rows": ("cuda:kv/attend*.cu", "kernels/kv_attend*.py"),
    "model": ("cuda:model/*.cu", "kernels/model*.py"),
    "round": (
        "cuda:model/*.cu", "cuda:kv/*.cu", "cuda:speculative/*.cu", "kernels/model*.py",
        "kernels/kv_*.py", "kernels/speculative.py", "kernels/counters.py", "speculative/*.py",
        "graph/executable.py",
    ),
    "compile": ("cuda:**/*.cu", "compile/*.py", "kernels/*.py"),
    "counters": (
        "cuda:kv/attend*.cu", "cuda:kv/append*.cu", "cuda:model/*.cu", "cuda:recur/*.cu",
        "kernels/kv_attend*.py", "kernels/kv_append*.py", "kernels/model*.py", "kernels/recur*.py",
    ),
    "latent": ("cuda:latent/*.cu", "kernels/latent_*.py"),
    "recur": ("cuda:recur/*.cu", "kernels/recur*.py"),
    "layer_kv": (
        "cuda:layer_kv/*.cu", "kernels/layer_kv*.py", "layer_kv/*.py", "native/layer_kv*.[ch]",
    ),
}  # fmt: skip
"""Group of measurements to patterns: below ``cuda_src`` after ``cuda:``, else below the package.

A ``.cu`` brings its headers along. Every kernel source belongs to at least one family.
"""


def digests(families: Iterable[str] = FAMILIES) -> dict[str, str]:
    """Digest of each family as the sources are now."""
    return {family: digest_of(family) for family in families}


def package_digest() -> str:
    """Digest over the whole package and ``cuda_src``, byte for byte."""
    total = hashlib.blake2b(digest_size=12)
    patterns = ("*.py", "*.c", "*.h", "*.cpp", "*.cu", "*.cuh")
    for root in (PACKAGE, cuda_src_root()):
        for path in sorted({p for pattern in patterns for p in root.rglob(pattern)}):
            if not path.name.startswith("_") or path.suffix == ".py":
                total.update(f"{path.relative_to(root).as_posix()}\n".encode())
                total.update(path.read_bytes())
    return total.hexdigest()


def digest_of(family: str) -> str:
    """Digest over everything that decides the figures of a family.

    Raises
    ------
    KeyError
        For a family that does not exist.
    """
    total = hashlib.blake2b(digest_size=12)
    for name, path in files_of(family).items():
        total.update(f"{name} {_meaning(path, path.stat().st_mtime_ns)}\n".encode())
    return total.hexdigest()


def files_of(family: str) -> dict[str, Path]:
    """Files of a family, headers included, by a name that does not depend on the installation."""
    found: dict[str, Path] = {}
    for pattern in FAMILIES[family]:
        place, _, below = pattern.rpartition(":")
        root = cuda_src_root() if place else PACKAGE
        for path in sorted(root.glob(below)):
            # What cffi generates is no source.
            if path.is_file() and not path.name.startswith("_"):
                found[f"{place or 'package'}/{path.relative_to(root).as_posix()}"] = path
    for path in [p for p in found.values() if p.suffix == ".cu"]:
        for header in _headers(path):
            found[f"cuda/{header.relative_to(cuda_src_root()).as_posix()}"] = header
    return dict(sorted(found.items()))


def _headers(path: Path) -> list[Path]:
    from ..compile.source import read

    return [cuda_src_root() / name for name, _ in read(path).headers]


@functools.lru_cache(maxsize=1024)
def _meaning(path: Path, _mtime_ns: int) -> str:
    """Digest of a file without what changes no result."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        kept = _python(text)
    elif path.suffix in (".cu", ".cuh", ".c", ".h"):
        kept = [token.text for token in tokens(text) if token.kind != "comment"]
    else:
        kept = text.splitlines()
    return hashlib.blake2b("\n".join(kept).encode(), digest_size=12).hexdigest()


def _python(text: str) -> list[str]:
    """Lines of a module without docstrings, comment lines and blank lines."""
    dropped: set[int] = set()
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, holders):
            continue
        for part in node.body:  # attribute docstrings too: any bare string changes nothing
            value = part.value if isinstance(part, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                dropped.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return [
        line.rstrip()
        for number, line in lines
        if number not in dropped and line.strip() and not line.lstrip().startswith("#")
    ]
