"""``memra-lowlevel cache``: look at the kernel cache, verify it, clear it."""

from __future__ import annotations

import argparse
import json

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "verify", "clear"),
        help="list the entries (default), re-hash every entry, or delete them all",
    )
    parser.add_argument("--folder", help="another folder than the user's own")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; status 1 when ``verify`` finds damage."""
    from ..compile.cache import KernelCache, default_cache

    cache = KernelCache(args.folder) if args.folder else default_cache()
    if args.action == "clear":
        n = cache.clear()
        print(
            json.dumps({"folder": str(cache.folder), "deleted": n})
            if args.json
            else f"{cache.folder}: {n} kernels deleted"
        )
        return 0
    entries = cache.entries(verify=args.action == "verify")
    damaged = [e for e in entries if e.problem]
    if args.json:
        rows = [{"file": e.path.name, "bytes": e.n_bytes, "problem": e.problem} for e in entries]
        print(json.dumps({"folder": str(cache.folder), "entries": rows}, indent=1))
    else:
        for e in entries:
            print(f"{e.n_bytes:>9}  {e.path.name}{'  DAMAGED: ' + e.problem if e.problem else ''}")
        total = sum(e.n_bytes for e in entries)
        state = f", {len(damaged)} damaged" if args.action == "verify" else ""
        print(f"{cache.folder}: {len(entries)} kernels, {total / 1e6:.1f} MB{state}")
    return 1 if damaged else 0
