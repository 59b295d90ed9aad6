"""Fixtures of the tests of the compiled launch path."""

from launch_fixtures import nothing_left

__all__ = ["nothing_left"]
