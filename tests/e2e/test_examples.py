"""The small programs of examples/, run as a user runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

PROGRAMS = {
    "own_kernel": [
        r"saxpy on (host|cuda):0: right",
        r"DataRace: kernel sum<32>.* own\.cu:14: data race",
        r"OutOfBounds: kernel shift.* thread \(31, 0, 0\) at own\.cu:20: .*offset 128 of",
        r"BarrierDivergence: kernel half_a_barrier.* at own\.cu:24",
    ],
    "two_streams": [
        r"4 kernel; 3 edges",
        r"step 1000, on the device 1000; right: True",
        r"CapacityExceeded: counter 'step': at 1000 of 1000",
        r"CaptureUnjoined: .*\"forgotten join\"",
    ],
    "window_ring": [
        r"400 steps, (\d\d) rebases, 0 outputs differ",
        r"rewound to 368; the ring begins at row (3\d\d)",
        r"RewindRefused: ring: a rewind from 368 to 100",
    ],
    "own_head": [
        r"exact: True, .*'tokens': (4[89]|50),",
        r"target (\d+) rows, head \1: no lag",
    ],
    "own_draft": [
        r"exact: True, .*'tokens': (4[89]|5\d),",
        r"\d+ draft steps, 0 node updates",
    ],
}


def test_every_program_is_run_here():
    folder = Path(__file__).resolve().parent.parent.parent / "examples"
    assert {p.stem for p in folder.glob("*.py")} - {"__init__"} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_it_promises(name):
    done = subprocess.run(
        [sys.executable, "-m", f"memra_lowlevel.examples.{name}"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for pattern in PROGRAMS[name]:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)
