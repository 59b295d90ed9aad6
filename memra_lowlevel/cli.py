"""The command ``memra-lowlevel``.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``; it is imported
when it is asked for, so that ``--help`` and ``doctor`` do not wait for the rest.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("memra_lowlevel.debug.doctor", "what is here, what is missing, what still works"),
    "demo": ("memra_lowlevel.demo", "a captured draft chain on a real language model"),
    "formats": ("memra_lowlevel.debug.formats_table", "which K and V formats have kernels"),
    "compile": ("memra_lowlevel.debug.compile_table", "compile the kernels, list their resources"),
    "cache": ("memra_lowlevel.debug.cache_command", "show, verify or clear the kernel cache"),
    "bench": ("memra_lowlevel.bench.command", "measure launches, replays and kernels"),
}
"""Subcommand to module and one line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Errors of the library end in one message on stderr and status 1; bad usage is status 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words else ""
    parser = argparse.ArgumentParser(
        prog="memra-lowlevel", description="A low-level runtime for LLM decoding."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        if name != chosen and not _exists(module):
            continue
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            try:
                command = importlib.import_module(module)
            except KeyboardInterrupt:
                return 130
            except ImportError as error:
                print(f"memra-lowlevel {name}: {error}", file=sys.stderr)
                return 1
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    args = parser.parse_args(words)
    if args.version:
        print(f"memra-lowlevel {_version()}")
        return 0
    if not args.command:
        parser.print_help()
        return 2
    return _guarded(args)


def _guarded(args: argparse.Namespace) -> int:
    from .errors import MemraError

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model's text has any character; a terminal that cannot show one must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return int(args.run(args) or 0)
    except MemraError as error:
        print(f"memra-lowlevel: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe went away; nothing is left to be said, not at shutdown either.
        sys.stdout = None
        return 1
    except OSError as error:
        # A full disk behind stdout, a file that cannot be opened: nothing of ours is wrong.
        print(f"memra-lowlevel: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _exists(module: str) -> bool:
    """Whether a module could be imported; parents are packages of ours and cheap."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("memra-lowlevel")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
