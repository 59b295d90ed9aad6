"""A device that is never closed: what nobody waited for is named when the process ends."""

import subprocess
import sys

import numpy as np
import pytest

PROGRAM = """
import sys, numpy as np
from memra_lowlevel import Device, LaunchConfig, compile_source, launch
SOURCE = '#include "common/device.cuh"\\nKERNEL void put(float* x, int32_t i) { x[i] = 1.0f; }'
device = Device(sys.argv[1])
stream = device.stream(name="decode")
x = device.zeros(4, np.float32, stream, name="x")
put = device.module(compile_source(SOURCE, arch=device.arch)).kernel("put")
def go(i=1):
    launch(stream, LaunchConfig(1, 1), put, x, i)
"""


def ends(device, last):
    """What the process says on stderr when it ends behind ``last``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}\n{last}", str(device)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_work_that_nobody_waited_for(device):
    said = ends(device, "go()")
    assert said.count("was never closed") == 1 and f"{device} was never closed" in said
    assert "nobody waited for the last work on stream 'decode'" in said
    assert "with Device() as device" in said


def test_of_many_streams_some_are_named(device):
    said = ends(
        device,
        "stream.sync(); many = [device.stream(name=f's{i}') for i in range(30)]\n"
        "for s in many: launch(s, LaunchConfig(1, 1), put, x, 1)",
    )
    assert said.count("stream 's") == 5 and " and 25 more; if it fails" in said


@pytest.mark.parametrize(
    "last",
    ["go(); stream.sync()", "go(); x.to_numpy(stream)", "go(); device.close()",
     "go(); device.sync()", "go()\nwhile not stream.done(): pass",
     "go(); stream.record(device.event()).sync()"],
)  # fmt: skip
def test_silence_where_somebody_waited(device, last):
    assert ends(device, last) == ""


def test_a_forked_child_is_silent(device):
    quiet = "import os, warnings\nwarnings.simplefilter('ignore')\n"
    fork = "go()\nif os.fork() == 0: sys.exit(0)\nos.wait(); stream.sync()"
    assert ends(device, quiet + fork) == ""


def test_a_failure_of_the_host_device_is_told():
    """It ran because other work had to wait for it, and the synchronisation was never made."""
    said = ends("host", "go(100_000)\nfor _ in range(5000): go()")
    assert "work failed and nobody waited for it: kernel put" in said and "'x'" in said


def test_waiting_for_the_device_is_waiting_for_its_streams(device):
    with device.stream() as stream, device.zeros(4, np.float32, stream):
        assert stream.cell is None or stream.cell.issued > stream.cell.seen
        device.sync()
        assert stream.cell is None or stream.cell.issued == stream.cell.seen
