"""A graph drawn in DOT: kernels by name, frozen scalars, edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .audit import report

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["dot"]

_SHAPES = {"kernel": "box", "memcpy": "cds", "memset": "note", "graph": "folder"}


def dot(graph: Graph) -> str:
    """Draw the graph as DOT text; a child graph is one node."""
    census = report(graph)
    scalars: dict[str, list[str]] = {}
    for frozen in census.scalars:
        scalars.setdefault(frozen.node, []).append(f"{frozen.param} = {frozen.value}")
    lines = [f"digraph {_quote(graph.name)} {{", "  rankdir=TB; node [fontname=monospace];"]
    for node in graph.nodes():
        label = "\n".join([node.name, *scalars.get(node.name, [])])
        shape = _SHAPES.get(node.kind.name.lower(), "ellipse")
        lines.append(f"  n{node.index} [shape={shape}, label={_quote(label)}];")
    lines += [f"  n{a} -> n{b};" for a, b in graph.edges()]
    return "\n".join([*lines, "}", ""])


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\l")
    return f'"{escaped}"'
