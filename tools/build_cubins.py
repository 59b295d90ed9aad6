"""Build every kernel ahead of time: ``python tools/build_cubins.py OUT [--arch A]...``.

OUT is a folder or a ``.zip`` file. A process with ``MEMRA_CUBINS=OUT`` (or
``memra_lowlevel.compile.aot.use(OUT)``) then needs no NVRTC for these kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from memra_lowlevel.compile import DEFAULT_ARCHS, aot
from memra_lowlevel.debug.compile_table import jobs
from memra_lowlevel.errors import MemraError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", help="folder, or file ending in .zip")
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="A",
        help=f"sm_90, compute_90 …; may be repeated (default: {', '.join(DEFAULT_ARCHS)} "
        "and compute_120 for what comes later)",
    )
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--verify", action="store_true", help="only check an existing store")
    args = parser.parse_args(argv)
    try:
        if args.verify:
            store = aot.CubinStore(args.out)
            problems = store.verify()
            for file, problem in problems:
                print(f"{file}: {problem}", file=sys.stderr)
            print(f"{store}: {len(problems)} damaged")
            return 1 if problems else 0
        wanted = jobs(args.arch or [*DEFAULT_ARCHS, "compute_120"], args.kernel)
        print(aot.build(args.out, wanted, workers=args.workers))
    except MemraError as error:
        print(f"build_cubins: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
