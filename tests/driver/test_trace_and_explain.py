"""The trace ring, and results put into words."""

from __future__ import annotations

import inspect
import threading

import pytest
from driver_bench import Bench

from memra_lowlevel import errors
from memra_lowlevel.driver import explain
from memra_lowlevel.driver.trace import TraceEntry, TraceRing, caller
from memra_lowlevel.errors import InvalidArgument


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_ring_keeps_the_last_calls_in_order() -> None:
    ring = TraceRing(capacity=8, names={5: "decode"})
    for i in range(20):
        ring.record("cuLaunchKernel" if i % 2 else "cuEventRecord", 5 if i % 3 else 0, i)
    entries = ring.entries()
    assert len(entries) == 8
    assert [e.kernel for e in entries] == [hex(i) for i in range(12, 20)]
    assert [e.stream for e in entries] == ["" if i % 3 == 0 else "decode" for i in range(12, 20)]
    assert [e.t_us for e in entries] == sorted(e.t_us for e in entries)
    assert ring.entries(3) == entries[-3:] and len(ring.recent(3)) == 3
    ring.clear()
    assert not ring.entries()


def test_the_line_is_the_callers(bench: Bench) -> None:
    line = _line() + 1
    bench.d.cuMemGetInfo()
    last = bench.d.trace.entries(1)[0]
    assert last.call == "cuMemGetInfo" and last.where == f"{__file__}:{line}"
    assert str(last).endswith(f"({__file__}:{line})")
    assert caller() == f"{__file__}:{_line()}"


def test_lines_can_be_left_out() -> None:
    ring = TraceRing(4, lines=False)
    ring.record("cuInit")
    assert ring.entries()[0].where == ""
    ring.enabled = False
    ring.record("cuInit")
    assert len(ring.entries()) == 1


def test_other_rings_are_merged_by_time() -> None:
    ring = TraceRing(8)
    ring.record("first")
    ring.add_source(lambda: [TraceEntry(1e12, "native", "s", "k", "plan.py:3")])
    ring.record("second")
    assert [e.call for e in ring.entries()] == ["first", "second", "native"]


def test_threads_lose_no_entry() -> None:
    ring = TraceRing(4096, lines=False)

    def work(k: int) -> None:
        for _ in range(500):
            ring.record("call", k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    counts = [sum(e.stream == hex(k) for e in ring.entries()) for k in range(1, 5)]
    assert counts == [500] * 4


def test_every_result_has_a_class_and_words() -> None:
    for name, e in explain.EXPLANATIONS.items():
        assert issubclass(e.error, errors.MemraError), name
        assert e.what and e.remedy, name
        assert not e.what.endswith(".") and not e.remedy.endswith("."), name
        error = explain.make_error(name, "cuSomething", stream="decode", where="a.py:1")
        assert type(error) is e.error and error.result == name
        text = str(error)
        for part in ("cuSomething", "'decode'", "a.py:1", name, e.what, e.remedy):
            assert part in text


def test_numbers_and_names_go_both_ways() -> None:
    assert len(set(explain.RESULT_CODES.values())) == len(explain.RESULT_CODES)
    for name, code in explain.RESULT_CODES.items():
        assert explain.result_name(code) == name and explain.result_code(name) == code
    assert explain.result_code(explain.result_name(12345)) == 12345
    assert explain.explain("CUDA_ERROR_12345").error is errors.DriverError
    assert [n for n in explain.RESULT_CODES if explain.is_capture_result(n)] == [
        n for n, c in explain.RESULT_CODES.items() if 900 <= c <= 908
    ]


def test_numbers_are_those_of_the_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    real = {int(r): r.name for r in driver.CUresult}
    known = {c: n for n, c in explain.RESULT_CODES.items() if c in real}
    assert len(known) > 60
    assert known == {c: real[c] for c in known}
    newer = {"CUDA_ERROR_STREAM_DETACHED"}  # CUDA 13
    assert {n for n, c in explain.RESULT_CODES.items() if c not in real} <= newer


def test_sticky_errors_are_those_that_lose_the_context() -> None:
    sticky = {n for n, e in explain.EXPLANATIONS.items() if getattr(e.error, "sticky", False)}
    assert {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED"} <= sticky
    assert "CUDA_ERROR_OUT_OF_MEMORY" not in sticky
    assert all("context is lost" in explain.EXPLANATIONS[n].remedy for n in sticky)


def test_an_error_tells_the_last_calls(bench: Bench) -> None:
    s = bench.stream()
    bench.d.name_handle(s, "decode")
    with pytest.raises(InvalidArgument) as caught:
        bench.d.cuMemsetD8Async(0x1234, 0, 1, s)
    error = caught.value
    assert error.call == "cuMemsetD8Async" and error.code == 1
    assert "cuStreamCreateWithPriority" in error.recent[-2]
    assert "cuMemsetD8Async" in error.recent[-1] and "decode" in error.recent[-1]
    assert f"{__file__}:" in str(error)
