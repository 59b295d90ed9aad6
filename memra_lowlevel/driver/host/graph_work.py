"""What the nodes of a host graph do that are neither copies nor kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ..table import ConditionalType, NodeType
from .state import HostGraph, HostNode

__all__ = [
    "ChildWork",
    "Condition",
    "ConditionalWork",
    "DefaultWork",
    "EmptyWork",
    "node_type",
]


class EmptyWork:
    """A node that only orders others."""

    node_type = NodeType.EMPTY
    label = "empty"

    def run(self) -> None:
        """Do nothing."""


class ChildWork:
    """A node that stands for a whole graph, copied when the node was added."""

    node_type = NodeType.GRAPH
    label = "child graph"

    def __init__(self, graph: HostGraph):
        self.graph = graph

    def run(self) -> None:
        """Never called: children are unfolded when a graph is instantiated."""
        raise AssertionError


class ConditionalWork:
    """A node whose body runs if, or as long as, its condition is not 0.

    The body runs here, one node behind the other: what its order leaves open stays hidden.
    """

    node_type = NodeType.CONDITIONAL
    label = "conditional"

    def __init__(self, condition: Condition, type: ConditionalType, graph: HostGraph):
        self.condition, self.type, self.graph = condition, type, graph

    def run(self) -> None:
        """Run the body."""
        while self.condition.value:
            _run_in_order(self.graph)
            if self.type is ConditionalType.IF:
                break


class DefaultWork:
    """Gives the conditions of a graph their values at a launch."""

    label = "conditions"

    def __init__(self, conditions: Sequence[Condition]):
        self.conditions = conditions

    def run(self) -> None:
        """Assign the defaults."""
        for condition in self.conditions:
            if condition.default is not None:
                condition.value = condition.default


class Condition(ctypes.c_uint32):
    """What a handle stands for; the handle is its address, where kernels write."""

    default: int | None = None


def _run_in_order(graph: HostGraph) -> None:
    for node in graph.nodes:
        if isinstance(node.work, ChildWork):
            _run_in_order(node.work.graph)
        else:
            node.work.run()


def node_type(node: HostNode) -> NodeType:
    """Type of a node."""
    kind: NodeType = node.work.node_type  # type: ignore[attr-defined]
    return kind
