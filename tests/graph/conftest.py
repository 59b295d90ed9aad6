"""Fixtures of the graph layer's tests."""

from launch_fixtures import kernels, nothing_left, path

__all__ = ["kernels", "nothing_left", "path"]
