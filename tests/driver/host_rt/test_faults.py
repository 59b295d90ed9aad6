"""Living with others: other handlers, other threads, forks, and faults that are not ours."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from memra_lowlevel import errors

PROLOGUE = """
import ctypes, faulthandler, os, signal, sys, threading
import numpy as np
from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner
text = '''#include "common/device.cuh"
KERNEL void put(int* x, int n) { __syncthreads(); x[n] = 1; }
'''
run = runner.quick(text, "put")
x = np.zeros(4, np.int32)
def bad():
    try:
        run(1, 4, 0, x, np.int32(5000))
    except errors.OutOfBounds:
        return True
def good():
    x[:] = 0
    run(2, 4, 0, x, np.int32(3), workers=2)
    assert x[3] == 1
assert bad(); good()
"""


def python(body, expect=0):
    program = PROLOGUE + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, timeout=120)
    out = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == expect, out
    return out


def test_faults_of_others_reach_faulthandler():
    for enable in ("", "faulthandler.enable()"):
        out = python(f"{enable}\nassert bad(); good()\nctypes.string_at(16)", -signal.SIGSEGV)
        assert ("Fatal Python error: Segmentation fault" in out) == bool(enable)


def test_a_handler_that_is_installed_later_is_taken_over_and_passed_on_to():
    out = python(
        """
        faulthandler.enable()          # after our first launch
        assert bad() and bad(); good()
        faulthandler.disable()
        assert bad(); good()           # its alternate stack is gone too
        faulthandler.enable()
        assert bad()
        print("alive")
        ctypes.string_at(16)
        """,
        -signal.SIGSEGV,
    )
    assert "alive" in out and out.count("Fatal Python error") == 1


def test_signals_of_a_user_are_not_faults():
    python("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV)
    python(
        """
        seen = []
        signal.signal(signal.SIGUSR1, lambda *a: seen.append(1))
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1); good()
        assert len(seen) == 20
        """
    )


def test_a_forked_child_runs_launches():
    python(
        """
        import warnings
        warnings.simplefilter("ignore")
        for _ in range(3):
            child = os.fork()
            if child == 0:
                good(); assert bad(); good()
                os._exit(0)
            good()
            assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_spawned_and_forked_pools():
    python(
        """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert all(pool.apply(bad) for _ in range(4))
        good()
        """
    )


def test_launches_from_many_threads(kernel):
    body = """KERNEL void fill(int* x, int v, int bad) {
      __shared__ int s;
      if (threadIdx.x == 0) s = v;
      __syncthreads();
      x[blockIdx.x * 64 + threadIdx.x + bad] = s;
    }"""
    run = kernel(body, "fill")
    wrong: list[object] = []

    def work(k: int) -> None:
        for i in range(40):
            x = np.zeros(256, np.int32)
            try:
                run(4, 64, 0, x, np.int32(k), np.int32(100000 * (i % 2)), workers=1 + k % 3)
                if i % 2 or (x != k).any():
                    wrong.append((k, i))
            except errors.OutOfBounds:
                if not i % 2:
                    wrong.append((k, i, "raised"))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 7)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_stack_overflow_is_caught_on_any_thread(kernel):
    body = """__device__ __noinline__ int deep(int n, volatile int* x) {
      volatile int pad[256]; pad[n & 255] = n;
      return n == 0 ? 0 : deep(n - 1, x) + pad[n & 255];
    }
    KERNEL void recurse(int* x) { x[0] = deep(1 << 20, x); }"""
    run = kernel(body, "recurse")
    caught: list[object] = []

    def work() -> None:
        for _ in range(3):
            with pytest.raises(errors.OutOfBounds, match="stack overflow"):
                run(1, 1, 0, np.zeros(1, np.int32))
            caught.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert len(caught) == 6
