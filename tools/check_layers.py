"""Check that each package imports only the layers below it.

``python tools/check_layers.py`` prints every import that goes against the direction and exits 1 if
there is one. The order is the table ``MAY_IMPORT``; an import inside a function counts like any
other, an import under ``if TYPE_CHECKING`` does not (it moves no code).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "memra_lowlevel"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

STACK = ["driver", "expect", "compile", "runtime", "graph", "kernels", "cache", "speculative"]
BOTTOM = {"closing", "lazy", "errors", "paths", "formats", "reference", "native"}
ANYTHING = {"cli", "debug", "demo", "bench", "examples", "__init__"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "closing": {"errors"},
    "lazy": set(),
    "paths": set(),
    "native": {"errors"},
    "formats": {"errors"},
    "reference": {"errors", "formats"},
    "layer_kv": {"errors", "formats", "native"},
    "layer_kv.mirror": {"errors", "formats", "native", "layer_kv", "kernels", "runtime", "compile"},
}
for i, layer in enumerate(STACK):
    MAY_IMPORT[layer] = {*BOTTOM, *STACK[:i], layer} - {"reference"}
for oracle_user in ("kernels",):
    MAY_IMPORT[oracle_user] |= {"reference"}

ONLY_IN = {
    "cuda.bindings.driver": ("driver/",),
    "cuda.bindings.nvrtc": ("compile/nvrtc.py",),
}


def imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import outside ``if TYPE_CHECKING``."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        stack.extend(ast.iter_child_nodes(node))


def layer_of(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    dotted = ".".join(parts[:2])
    return dotted if dotted in MAY_IMPORT else parts[0]


def violations(root: Path = ROOT) -> list[str]:
    """Every import that breaks a rule, as ``file:line: text``."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        layer = layer_of(relative)
        package = [PACKAGE, *relative.parts[:-1]]
        for line, name in imports(ast.parse(path.read_text()), package):
            where = f"{PACKAGE}/{relative}:{line}"
            for module, allowed in ONLY_IN.items():
                if (name + ".").startswith(module + ".") and not any(
                    str(relative).startswith(a) for a in allowed
                ):
                    found.append(f"{where}: {name} may be imported in {', '.join(allowed)} only")
            if not name.startswith(PACKAGE + "."):
                continue
            target = name.split(".")[1]
            if layer in ANYTHING or target == layer.split(".")[0]:
                continue
            if layer not in MAY_IMPORT:
                found.append(f"{where}: no rule for the layer {layer!r}; add it to MAY_IMPORT")
            elif target in ANYTHING or target not in MAY_IMPORT[layer]:
                found.append(f"{where}: {layer} may not import {target}")
    return found


if __name__ == "__main__":
    bad = violations()
    print("\n".join(bad) or "layers: every import goes downwards")
    sys.exit(bool(bad))
