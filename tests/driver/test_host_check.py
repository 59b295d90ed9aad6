"""What the host device finds always, and what only ``host_options(check=True)``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, compile_file, compile_source, errors, launch
from memra_lowlevel.driver.host import host_options

SOURCE = '#include "common/device.cuh"\nKERNEL void put(float* y, int32_t i) { y[i] = 7.0f; }\n'
EARLY = r"""
import numpy as np
from memra_lowlevel import Device, LaunchConfig, compile_source, errors, launch
from memra_lowlevel.driver.host import host_options

SOURCE = '''#include "common/device.cuh"
KERNEL void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
'''
with host_options(check=True), Device("host") as device, device.stream() as stream:
    early = device.empty(64, np.float32, stream)
    written = device.zeros(64, np.float32, stream)
    y = device.zeros(64, np.float32, stream)
    copy = device.module(compile_source(SOURCE, arch="host", name="copy.cu")).kernel("copy")
    launch(stream, LaunchConfig(1, 64), copy, written, y)
    stream.sync()
    launch(stream, LaunchConfig(1, 64), copy, early, y)
    try:
        stream.sync()
        print("silent")
    except errors.UninitialisedRead as error:
        print("found")
"""


def test_a_report_names_buffer_parameter_and_remedy() -> None:
    with Device("host:2") as device, device.stream() as stream:
        put = device.module(compile_source(SOURCE, arch="host", name="put.cu")).kernel("put")
        y = device.zeros(16, np.float32, stream, name="logits")
        launch(stream, LaunchConfig(1, 1), put, y, 5000)
        with pytest.raises(errors.OutOfBounds) as caught:
            y.to_numpy(stream)
        for part in ("put.cu:2", "('logits')", "parameter 0 (y)", "Compare the index"):
            assert part in str(caught.value)


def test_two_barriers_on_one_line() -> None:
    source = """#include "common/device.cuh"
KERNEL void part() { if (threadIdx.x < 8) { __syncthreads(); } else { __syncthreads(); } }
"""
    with Device("host:2") as device, device.stream() as stream:
        part = device.module(compile_source(source, arch="host", name="part.cu")).kernel("part")
        launch(stream, LaunchConfig(1, 64), part)
        with pytest.raises(errors.BarrierDivergence, match=r"part\.cu:2.* two calls on one line"):
            stream.sync()


def test_an_index_outside_a_shared_array_shows_the_line(tmp_path: Path) -> None:
    (tmp_path / "far.cu").write_text(
        '#include "common/device.cuh"\n'
        "KERNEL void far(float* y, int32_t i) {\n"
        "  __shared__ float total[32];\n"
        "  total[i] = 1.0f;\n"
        "  y[0] = total[i];\n"
        "}\n"
    )
    with Device("host:2") as device, device.stream() as stream:
        image = compile_file(tmp_path / "far.cu", arch="host", options={"check": True})
        y = device.zeros(1, np.float32, stream)
        launch(stream, LaunchConfig(1, 1), device.module(image).kernel("far"), y, 32)
        with pytest.raises(errors.OutOfBounds, match=r"index 32 is outside the array: total\[i\]"):
            stream.sync()


RACE = """#include "common/device.cuh"
KERNEL void turn(float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = 1.0f;
  y[threadIdx.x] = s[63 - threadIdx.x];
}
KERNEL void sum(float* y) { y[0] += 1.0f; }
"""


@pytest.mark.parametrize(
    ("name", "kind", "remedy"),
    [
        ("turn", errors.UninitialisedRead, "another thread writes it, a __syncthreads"),
        ("sum", errors.DataRace, "Order the two accesses"),
    ],
)
def test_what_to_do_is_said(name: str, kind: type[Exception], remedy: str) -> None:
    with Device("host:2") as device, device.stream() as stream:
        image = compile_source(RACE, arch="host", name="race.cu", options={"check": True})
        y = device.zeros(64, np.float32, stream)
        launch(stream, LaunchConfig(1, 64), device.module(image).kernel(name), y)
        with pytest.raises(kind, match=remedy):
            stream.sync()


def test_memory_from_before_the_first_checked_kernel_is_known() -> None:
    """In a process of its own: tracking that another test began would hide a late begin."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("found\n", "")


@pytest.mark.parametrize(
    ("n", "index", "check", "found"),
    [
        (64, 64, False, "at once"),
        (3, 4, False, "at once"),
        (64, -2000, False, "at once"),
        (3, 3, False, "when given back"),
        (64, -1, False, "when given back"),
        (3, 3, True, "at once"),
        (64, -1, True, "at once"),
    ],
)
def test_bounds(n: int, index: int, check: bool, found: str) -> None:
    with host_options(check=check), Device("host:2") as device, device.stream() as stream:
        put = device.module(compile_source(SOURCE, arch="host", name="put.cu")).kernel("put")
        y = device.zeros(n, np.float32, stream)
        launch(stream, LaunchConfig(1, 1), put, y, index)
        if found == "at once":
            with pytest.raises(errors.OutOfBounds):
                stream.sync()
            y.close()
            return
        stream.sync()
        y.close()
        with pytest.raises(errors.OutOfBounds, match="right beside"):
            device.trim()
