"""A launch that never ends: told by kernel, block and thread, and everything stays usable."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, compile_source, errors, launch
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.driver.host.options import HostOptions

SPINS = """
KERNEL void spins(int* x, int stuck) {
    if (blockIdx.x == 1 && int(threadIdx.x) == stuck) {
        volatile int* flag = x;
        while (*flag != 7) {}
    }
    __syncthreads();
    if (blockIdx.x == 2 && threadIdx.x == 0) x[1] = 2;
}
"""
I32 = np.int32


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_endless_loop_is_given_up(kernel, check, workers):
    run = kernel(SPINS, "spins", check=check)
    x = np.zeros(4, I32)
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(errors.Deadlock) as info:
            run(3, 64, 0, x, I32(33), seconds=0.2, workers=workers)
        assert 0.19 < time.monotonic() - begin < 20
        said = str(info.value)
        assert info.value.kernel == "spins"
        assert info.value.block == (1, 0, 0) and info.value.thread == (33, 0, 0)
        assert "did not end within 0.2 s" in said and "kernel_seconds" in said
        assert "threads 0-32 at __syncthreads" in said and "thread 33 runs" in said
        assert info.value.where.endswith((":7", ":8")), info.value.where
        run(3, 64, 0, x, I32(-1), seconds=0.2, workers=workers)
        assert x[1] == 2
        x[:] = 0


def test_all_workers_leave(kernel):
    body = "KERNEL void all(int* x) { volatile int* f = x; while (*f != 7) {} }"
    with pytest.raises(errors.Deadlock):
        kernel(body, "all")(8, 32, 0, np.zeros(1, I32), seconds=0.2, workers=4)


def test_a_loop_around_barriers_is_found_too(kernel):
    body = """
    KERNEL void turns(int* x) {
        do { __syncthreads(); } while (__syncthreads_or(*(volatile int*)x != 7));
    }
    """
    with pytest.raises(errors.Deadlock):
        kernel(body, "turns")(1, 96, 0, np.zeros(1, I32), seconds=0.2)


def test_launches_within_the_limit_are_left_alone(kernel):
    run = kernel(SPINS, "spins")
    x = np.zeros(4, I32)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:  # many launches, together far beyond the limit of one
        run(3, 64, 0, x, I32(-1), seconds=0.2)
    run(3, 64, 0, x, I32(-1), seconds=math.inf)
    assert x[1] == 2


def test_the_option_reaches_launches_of_a_device():
    with (
        host_options(kernel_seconds=0.2),
        Device("host") as device,
        device.stream(name="s") as stream,
    ):
        x = device.zeros(4, I32, stream)
        source = '#include "common/device.cuh"\n' + SPINS
        spins = device.module(compile_source(source, arch=device.arch)).kernel("spins")
        config = LaunchConfig(3, 64)
        launch(stream, config, spins, x, 33)
        with pytest.raises(errors.Deadlock, match="kernel spins, block"):
            stream.sync()
        launch(stream, config, spins, x, -1)
        stream.sync()
        assert x.to_numpy(stream)[1] == 2


@pytest.mark.parametrize("bad", [0, -1.0, math.nan])
def test_limits_that_are_none(bad):
    with pytest.raises(ValueError, match="kernel_seconds"):
        host_options(kernel_seconds=bad)
    assert HostOptions().kernel_seconds >= 60


def test_signals_of_others_and_forks():
    program = textwrap.dedent(
        """
        import os, signal
        import numpy as np
        from memra_lowlevel import errors
        from memra_lowlevel.driver.host import runner
        text = '''#include "common/device.cuh"
        KERNEL void ends(int* x, int n) { volatile int* f = x; while (*f != n) {} }
        '''
        run = runner.quick(text, "ends")
        x = np.zeros(1, np.int32)
        def stuck():
            try:
                run(1, 1, 0, x, np.int32(7), seconds=0.2)
            except errors.Deadlock:
                return True
        seen = []
        signal.signal(signal.SIGURG, lambda *_: seen.append(1))  # before our first launch
        assert stuck()
        os.kill(os.getpid(), signal.SIGURG)
        assert len(seen) == 1
        signal.signal(signal.SIGURG, lambda *_: seen.append(2))  # and after it
        assert stuck() and len(seen) == 1
        os.kill(os.getpid(), signal.SIGURG)
        assert seen == [1, 2]
        child = os.fork()
        if child == 0:
            os._exit(0 if stuck() and stuck() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert stuck()
        run(1, 1, 0, x, np.int32(0), seconds=0.2)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
