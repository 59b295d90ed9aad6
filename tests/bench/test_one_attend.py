"""The program that profilers are pointed at."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs_on_the_host_device():
    for formats in ([], ["q8_0/q4_0"]):
        done = subprocess.run(
            [sys.executable, "tools/one_attend.py", "4/2/64", "300", "2", "host", *formats],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    bare = subprocess.run(
        [sys.executable, "tools/one_attend.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bare.returncode and "ncu -k attend_mma" in bare.stderr
