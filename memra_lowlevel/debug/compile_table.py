"""``memra-lowlevel compile``: compile the kernels of the library and list what each takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, CompileError

if TYPE_CHECKING:
    from ..compile import CompiledImage, Job

__all__ = ["KEYS", "add_arguments", "all_names", "jobs", "rows", "run"]

KEYS = ("kernel", "arch", "registers", "spills", "local_bytes", "shared_bytes", "ms")
"""Keys of a row of ``--json``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="A",
        help="sm_90, sm_90a, compute_90, host …; may be repeated (default: sm_90)",
    )
    parser.add_argument(
        "--all-archs", action="store_true", help="every architecture that kernels are built for"
    )
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help="only kernels whose name or source contains NAME; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--no-cache", action="store_true", help="compile afresh, store nothing")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one per core)")


def run(args: argparse.Namespace) -> int:
    """Run the command; status 1 when a kernel does not compile."""
    from ..compile import DEFAULT_ARCHS, compile_many

    archs = list(dict.fromkeys([*(DEFAULT_ARCHS if args.all_archs else ()), *args.arch]))
    wanted = jobs(archs or ["sm_90"], args.kernel, apart=True)
    images = compile_many(wanted, workers=args.workers, cache=not args.no_cache)
    failed = [image for image in images if isinstance(image, CompileError)]
    table = rows(
        (image, job.name_expressions)
        for job, image in zip(wanted, images, strict=True)
        if not isinstance(image, CompileError)
    )
    if args.kernel:
        table = [r for r in table if _chosen(args.kernel, r["kernel"], r["source"])]
    if args.json:
        print(json.dumps([{key: row[key] for key in KEYS} for row in table], indent=1))
    else:
        _print(table)
    for arch, rung in sorted({(r["arch"], r["rung"]) for r in table}):
        if rung == "family" or (rung == "ptx" and not arch.startswith("compute_")):
            print(f"{arch}: this compiler does not know it; {rung} code instead", file=sys.stderr)
    for error in failed:
        print(error, file=sys.stderr)
    return 1 if failed else 0


def all_names() -> dict[str, tuple[str, ...]]:
    """Name expressions of every registered kernel, by source relative to ``cuda_src``.

    Sources that no kernel is registered for are there with none: their plain kernels are compiled.
    """
    from ..compile import cuda_src_root, kernel_sources
    from ..kernels.registry import all_specs

    root = cuda_src_root()
    found: dict[str, list[str]] = {p.relative_to(root).as_posix(): [] for p in kernel_sources()}
    for spec in all_specs():
        found.setdefault(spec.source, []).extend(spec.expressions)
    return {source: tuple(dict.fromkeys(names)) for source, names in found.items()}


def jobs(archs: Sequence[str], kernels: Sequence[str] = (), *, apart: bool = False) -> list[Job]:
    """List what to compile: one job per source and architecture, all its instances together.

    Parameters
    ----------
    archs : sequence of str
    kernels : sequence of str
        Only sources, or kernels, whose name contains one of these.
    apart : bool
        One job per template instance instead, and one for the plain kernels of a source: more work
        for the front end, but jobs of like size for the threads and a time for each instance.

    Raises
    ------
    ArgumentError
        When ``kernels`` chooses nothing.
    """
    from ..compile import Job, cuda_src_root
    from ..compile.signature import parse

    root = cuda_src_root()
    groups: list[tuple[str, tuple[str, ...]]] = []
    for source, names in all_names().items():
        found = parse((root / source).read_text(encoding="utf-8"))
        plain = [name for name, signature in found.items() if not signature.template]
        # Plain kernels are there anyway.
        instances = tuple(n for n in names if "<" in n or "::" in n)
        if kernels and not any(k in source for k in kernels):
            instances = tuple(n for n in instances if _chosen(kernels, n, source))
            plain = [n for n in plain if _chosen(kernels, n, source)]
        if not apart and (plain or instances):
            groups.append((source, instances))
        elif apart:
            groups += [(source, ())] * bool(plain) + [(source, (n,)) for n in instances]
    if not groups:
        raise ArgumentError(
            f"no kernel is called {', '.join(kernels)}; `memra-lowlevel compile` lists them all",
            got=", ".join(kernels),
        )
    return [Job(root / source, arch, names) for arch in archs for source, names in groups]


def rows(images: Iterable[tuple[CompiledImage, Sequence[str]]]) -> list[dict[str, Any]]:
    """Give one row per kernel and architecture: ``KEYS``, ``source`` and ``rung``.

    Each image comes with the kernels to list; none stands for all. ``spills`` are bytes of spill
    stores and loads per thread; ``ms`` is the time in which the instance, or the plain kernels of
    one source together, were compiled. ``registers`` and the sizes are None for PTX and for the
    host device, where nobody has assigned them.
    """
    table = []
    for image, names in images:
        for name in names or sorted(image.entries):
            r = image.resources.get(image.entries[name])
            table.append(
                {
                    "kernel": name,
                    "arch": image.want,
                    "registers": r.registers if r else None,
                    "spills": r.spills_bytes if r else None,
                    "local_bytes": r.local_bytes if r else None,
                    "shared_bytes": r.shared_bytes if r else None,
                    "ms": round(image.ms, 3),
                    "source": image.name,
                    "rung": image.rung,
                }
            )
    return table


def _chosen(kernels: Sequence[str], name: str, source: str) -> bool:
    return any(k in name or k in source for k in kernels)


def _print(table: Sequence[dict[str, Any]]) -> None:
    text = [[("-" if r[c] is None else str(r[c])) for c in KEYS] for r in table]
    widths = [
        max(len(c), *(len(t[i]) for t in text), 0) if text else len(c) for i, c in enumerate(KEYS)
    ]
    for line in [list(KEYS), *text]:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
