"""What the trace shows of compiled launches."""

from __future__ import annotations

from typing import Any

import numpy as np
from native_rig import CONFIG, SOURCE

from memra_lowlevel import compile_source, prepare
from memra_lowlevel.runtime.overhead import stub_device


def test_the_ring_keeps_the_last_launches_in_order(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 0
    plans = [prepare(s, CONFIG, kernel, a, i, 2, 3.0, e) for i in range(2)]
    for p in plans:
        p.launch(s)
    gate = s.context.native
    for i in range(700):
        plans[i % 2].launch(s)
    entries = list(gate.entries())
    assert len(entries) == 256
    assert {x.call for x in entries} == {"cuLaunchKernel"} and {x.kernel for x in entries} == {
        "mixed"
    }
    times = [x.t_us for x in entries]
    assert times == sorted(times) and times[-1] - times[0] > 0
    assert all("test_native_trace.py" in x.where for x in entries)


def test_traced_lines_on_request(stub: Any) -> None:
    with stub_device(1) as dev:
        dev.context.trace_lines = True
        module = dev.module(compile_source(SOURCE, arch=dev.arch, name="stubbed.cu"))
        s = dev.stream(name="lined")
        a = dev.empty(4, np.float32, s)
        p = prepare(s, CONFIG, module.kernel("mixed"), a, 1, 2, 3.0, None)
        before = int(stub.n_launches)
        for _ in range(3):
            p.launch(s)
        assert int(stub.n_launches) == before  # each went through Python, which looks up the line
        last = s.context.driver.trace.entries()[-1]
        assert last.call == "cuLaunchKernel" and "test_native_trace.py" in last.where
        for thing in (a, s):
            thing.close()
        module.close()
