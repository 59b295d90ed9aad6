"""``memra-lowlevel formats``: which K and V formats attention has kernels for."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..cache import policy
from ..formats import FORMATS
from ..kernels import kv_attend, registry

__all__ = ["add_arguments", "matrix", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def matrix() -> dict[str, Any]:
    """Return formats, head sizes, groups, classes and pairs, from the registry.

    A pair is ``"ahead"`` where it is compiled ahead of time for some head size, ``"on demand"``
    where its kernels are compiled when they are first used.
    """
    ahead = {(i["k_format"], i["v_format"]) for i in registry.spec("attend_partial").instances}
    selected = policy.kv_cache_formats()
    return {
        "formats": {
            name: {"block_bytes": f.block_bytes, "bits": f.bits} for name, f in FORMATS.items()
        },
        "head_dims": list(kv_attend.HEAD_DIMS),
        "max_group": kv_attend.MAX_GROUP,
        "classes": list(kv_attend.CLASSES),
        "selected": [f.name for f in selected],
        "pairs": {
            f"{k.name}/{v.name}": "ahead" if (k.constant, v.constant) in ahead else "on demand"
            for k in FORMATS.values()
            for v in FORMATS.values()
        },
        "doors": policy.doors(),
    }


def run(args: argparse.Namespace) -> int:
    """Print the matrix."""
    found = matrix()
    if args.json:
        print(json.dumps(found))
        return 0
    names = list(found["formats"])
    print("bytes of 32 elements: " + ", ".join(
        f"{name} {found['formats'][name]['block_bytes']}" for name in names
    ))  # fmt: skip
    print("\nK \\ V     " + "".join(f"{name:>10}" for name in names))
    for k in names:
        cells = (found["pairs"].get(f"{k}/{v}", "-") for v in names)
        print(f"{k:<10}" + "".join(f"{c:>10}" for c in cells))
    print(f"\nhead sizes {', '.join(map(str, found['head_dims']))}; K and V may differ")
    print(f"query heads per kv head 1 to {found['max_group']}; classes {found['classes'][0]}")
    print(f"selected: K {found['selected'][0]}, V {found['selected'][1]}")
    return 0
