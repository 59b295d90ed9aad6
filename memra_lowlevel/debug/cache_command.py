"""``memra-lowlevel cache``: look at the caches of compiled kernels, verify them, clear them."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

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
    parser.add_argument("--folder", help="another cache folder than the user's own")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; status 1 when ``verify`` finds damage."""
    from ..compile.cache import KernelCache
    from ..paths import cache_root

    root = Path(args.folder) if args.folder else cache_root()
    cache = KernelCache(root / "kernels")
    if args.action == "clear":
        n = cache.clear() + _clear_host(root / "host")
        deleted = {"folder": str(root), "deleted": n}
        print(json.dumps(deleted) if args.json else f"{root}: {n} files deleted")
        return 0
    verify = args.action == "verify"
    rows: list[dict[str, Any]] = [
        {"file": f"kernels/{e.path.name}", "bytes": e.n_bytes, "problem": e.problem}
        for e in cache.entries(verify=verify)
    ]
    rows += _host(root / "host", verify)
    damaged = sum(bool(row["problem"]) for row in rows)
    if args.json:
        print(json.dumps({"folder": str(root), "entries": rows}, indent=1))
    else:
        for row in rows:
            note = f"  DAMAGED: {row['problem']}" if row["problem"] else ""
            print(f"{row['bytes']:>9}  {row['file']}{note}")
        total = sum(row["bytes"] for row in rows)
        state = f", {damaged} damaged" if verify else ""
        print(f"{root}: {len(rows)} files, {total / 1e6:.1f} MB{state}")
    return 1 if damaged else 0


def _host(folder: Path, verify: bool) -> list[dict[str, Any]]:
    from ..driver.host.build import published

    whole = dict(published(folder)) if verify else {}
    return [
        {
            "file": f"host/{path.name}",
            "bytes": path.stat().st_size,
            "problem": "" if whole.get(path, True) else "its checksum does not fit",
        }
        for path in sorted(folder.glob("*.so"))
    ]


def _clear_host(folder: Path) -> int:
    """Delete the libraries of the host device; a process that has one loaded keeps it."""
    n = 0
    for path in [*folder.glob("*.so"), *folder.glob("*.so.lock")]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            n += path.suffix == ".so"
    return n
