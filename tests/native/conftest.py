"""Fixtures of the tests of the compiled launch path."""

from launch_fixtures import nothing_left
from native_rig import dev, rig, stub

from memra_lowlevel import native

# Built without Python headers there is nothing to test here; doctor says so, and CI, which has
# them, demands the number of tests.
collect_ignore_glob = [] if native.available() else ["test_*.py"]

__all__ = ["dev", "nothing_left", "rig", "stub"]
