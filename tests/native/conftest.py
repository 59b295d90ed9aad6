"""Fixtures of the tests of the compiled launch path."""

from launch_fixtures import nothing_left

from memra_lowlevel import native

# Built without Python headers there is nothing to test here; doctor says so, and CI, which has
# them, demands the number of tests.
collect_ignore = [] if native.available() else ["test_native_launch.py"]

__all__ = ["nothing_left"]
