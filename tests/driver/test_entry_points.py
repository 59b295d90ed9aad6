"""C entry points of the host driver: same work as the methods, errors as codes and exceptions."""

from __future__ import annotations

import ctypes
import threading

import pytest
from driver_bench import Bench, pack

from memra_lowlevel.driver.table import CaptureMode
from memra_lowlevel.errors import InvalidArgument, MemraError, OutOfBounds

_P, _U = ctypes.c_void_p, ctypes.c_uint
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P)
ONE_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, _P)
TWO = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P)


def test_launch_and_graph_launch_through_c(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    launch = LAUNCH(d.entry_point("cuLaunchKernel"))
    graph_launch = TWO(d.entry_point("cuGraphLaunch"))
    sync = ONE_STREAM(d.entry_point("cuStreamSynchronize"))
    f, x = bench.func("add"), bench.ints([0] * 4)
    address, keep = pack(ctypes.c_void_p(x), ctypes.c_int32(3), ctypes.c_int32(4))
    before = d.counts()["cuLaunchKernel"]
    assert launch(f, 1, 1, 1, 32, 1, 1, 0, s, address, None) == 0
    d.cuStreamBeginCapture(s, CaptureMode.THREAD_LOCAL)
    assert launch(f, 1, 1, 1, 32, 1, 1, 0, s, address, None) == 0
    e = d.cuGraphInstantiate(d.cuStreamEndCapture(s), 0)
    del keep
    assert graph_launch(e, s) == 0 and graph_launch(e, s) == 0
    assert sync(s) == 0
    assert bench.read(x, 4) == [9] * 4
    assert d.counts()["cuLaunchKernel"] == before  # the caller counts


def test_the_address_is_stable(bench: Bench) -> None:
    assert bench.d.entry_point("cuLaunchKernel") == bench.d.entry_point("cuLaunchKernel")
    with pytest.raises(MemraError, match="has no entry point"):
        bench.d.entry_point("cuFlyToTheMoon")


def test_a_code_becomes_the_whole_exception(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    launch = LAUNCH(d.entry_point("cuLaunchKernel"))
    code = launch(bench.func("empty"), 0, 1, 1, 1, 1, 1, 0, s, None, None)
    assert code == 1
    error = d.error_from(code, "cuLaunchKernel", s)
    assert isinstance(error, InvalidArgument) and "grid (0, 1, 1)" in str(error)
    plain = d.error_from(code, "cuLaunchKernel", s)  # handed over once
    assert isinstance(plain, InvalidArgument) and "grid" not in str(plain)


def test_a_kernel_fault_comes_through_c(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    sync = ONE_STREAM(d.entry_point("cuStreamSynchronize"))
    bench.launch("stray", s, ctypes.c_void_p(bench.ints([0])), ctypes.c_int32(1 << 16))
    code = sync(s)
    assert code != 0
    assert isinstance(d.error_from(code, "cuStreamSynchronize", s), OutOfBounds)
    assert sync(s) == 0


def test_the_exception_belongs_to_the_thread(bench: Bench) -> None:
    d, s = bench.d, bench.stream()
    launch = LAUNCH(d.entry_point("cuLaunchKernel"))
    f = bench.func("empty")
    launch(f, 0, 1, 1, 1, 1, 1, 0, s, None, None)
    seen: list[str] = []
    t = threading.Thread(target=lambda: seen.append(str(d.error_from(1, "cuLaunchKernel"))))
    t.start()
    t.join()
    assert "grid (0, 1, 1)" not in seen[0]
    assert "grid (0, 1, 1)" in str(d.error_from(1, "cuLaunchKernel"))


def test_calls_through_c_from_many_threads(bench: Bench) -> None:
    d = bench.d
    launch = LAUNCH(d.entry_point("cuLaunchKernel"))
    f = bench.func("add")
    codes: list[int] = []

    def work(x: int, s: int) -> None:
        address, keep = pack(ctypes.c_void_p(x), ctypes.c_int32(1), ctypes.c_int32(1))
        codes.extend(launch(f, 1, 1, 1, 32, 1, 1, 0, s, address, None) for _ in range(50))
        del keep

    cells = [bench.ints([0]) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(x, bench.stream())) for x in cells]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    d.cuCtxSynchronize()
    assert codes == [0] * 200 and [bench.read(x, 1)[0] for x in cells] == [50] * 4
