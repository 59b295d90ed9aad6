"""Build every kernel ahead of time: ``python tools/build_cubins.py OUT [--arch A]...``.

OUT is a folder or a ``.zip`` file. A process with ``MEMRA_CUBINS=OUT`` (or
``memra_lowlevel.compile.aot.use(OUT)``) then needs no NVRTC for these kernels.

``--recorded FOLDER`` compiles what processes with ``MEMRA_RECORD_JOBS=FOLDER`` asked for (see
tools/record_jobs.py) instead of what is registered. Jobs that do not compile, such as those of
tests of errors, are named and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from memra_lowlevel.compile import DEFAULT_ARCHS, Job, aot, compile_many, recorded
from memra_lowlevel.compile import source as sources
from memra_lowlevel.compile.options import define_flags
from memra_lowlevel.debug.compile_table import jobs
from memra_lowlevel.errors import CompileError, MemraError


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
    parser.add_argument("--recorded", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="only check an existing store, and with --recorded that it answers every job",
    )
    args = parser.parse_args(argv)
    try:
        if args.verify:
            store = aot.CubinStore(args.out)
            problems = store.verify()
            for file, problem in problems:
                print(f"{file}: {problem}", file=sys.stderr)
            noted = [job for f in args.recorded for job in recorded.load(f, args.arch or ["sm_90"])]
            missing = [job for job in noted if not answers(store, job)]
            for job in missing:
                what = job.source if isinstance(job.source, Path) else job.name
                print(f"not there: {what} for {job.arch}: {', '.join(job.name_expressions)}",
                      file=sys.stderr)  # fmt: skip
            print(f"{store}: {len(problems)} damaged; {len(noted) - len(missing)} of {len(noted)} "
                  "noted jobs are answered")  # fmt: skip
            return 1 if problems else 0
        archs = args.arch or [*DEFAULT_ARCHS, "compute_120"]
        if args.recorded:
            wanted = compiling([job for f in args.recorded for job in recorded.load(f, archs)],
                               args.workers)  # fmt: skip
        else:
            wanted = jobs(archs, args.kernel)
        print(aot.build(args.out, wanted, workers=args.workers))
    except MemraError as error:
        print(f"build_cubins: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def answers(store: aot.CubinStore, job: Job) -> bool:
    """Whether the store has the code of a job."""
    try:
        closure = sources.read(job.source, name=job.name, include_dirs=job.include_dirs)
    except CompileError:
        return False
    flags = (*job.options.nvrtc_flags(), *define_flags(job.defines))
    return store.find(closure, job.arch, flags, job.name_expressions) is not None


def compiling(noted: Sequence[Job], workers: int | None) -> list[Job]:
    """Give the jobs that compile, each only where no other one covers it; name the rest."""
    left = list(noted)
    while True:
        chosen = recorded.covering(left)
        images = compile_many(chosen, workers=workers)
        bad = [j for j, i in zip(chosen, images, strict=True) if isinstance(i, CompileError)]
        for image in images:
            if isinstance(image, CompileError):
                print(f"left out: {str(image).splitlines()[0]}", file=sys.stderr)
        if not bad:
            return chosen
        left = [job for job in left if job not in bad]  # what they covered stands for itself


if __name__ == "__main__":
    sys.exit(main())
