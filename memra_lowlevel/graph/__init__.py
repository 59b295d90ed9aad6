"""Captured work: graphs, executables, device counters, audits."""

from ..driver.table import CaptureMode, NodeType
from .audit import Finding, Frozen, Report
from .capture import Capture
from .counters import DeviceCounter, sync_counters, verify_counters
from .effects import Effect
from .executable import GraphExec
from .graph import Graph, Node

__all__ = [
    "Capture",
    "CaptureMode",
    "DeviceCounter",
    "Effect",
    "Finding",
    "Frozen",
    "Graph",
    "GraphExec",
    "Node",
    "NodeType",
    "Report",
    "sync_counters",
    "verify_counters",
]
