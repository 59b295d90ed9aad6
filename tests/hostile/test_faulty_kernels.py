"""Kernels of a user's own with every fault: each is named, and the device works afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from abuse import N

from memra_lowlevel import Device, LaunchConfig, compile_source, launch
from memra_lowlevel.driver.host.schedule import Op, Schedule
from memra_lowlevel.errors import (
    BarrierDivergence,
    CompileError,
    Deadlock,
    HeaderNotFound,
    HostCheckError,
    LaunchLimit,
    MemraError,
    OutOfBounds,
)

ONE = LaunchConfig(1, 1)
WARP = LaunchConfig(1, 32)
HEAD = '#include "common/device.cuh"\n'

FAULTS: dict[str, tuple[str, LaunchConfig, type[MemraError]]] = {
    "past the end": ("x[64] = 1.0f;", ONE, OutOfBounds),
    "far away": ("x[1l << 40] = 1.0f;", ONE, OutOfBounds),
    "not canonical": ("x[1l << 61] = 1.0f;", ONE, OutOfBounds),
    "null": ("float* volatile p = nullptr; *p = x[0];", ONE, OutOfBounds),
    "call of null": ("void (*volatile p)() = nullptr; p();", ONE, OutOfBounds),
    "vector unaligned": ("*(float4*)(x + 1) = make_float4(1, 2, 3, 4);", ONE, OutOfBounds),
    "no dynamic shared": ("DYN_SMEM(float, s); s[threadIdx.x] = x[0];", WARP, OutOfBounds),
    "division": ("int* n = (int*)x; n[0] = n[1] / n[2];", ONE, HostCheckError),
    "division overflow": ("int* n = (int*)x; n[0] = (-2147483647 - 1) / (n[2] - 1);", ONE,
                          HostCheckError),
    "trap": ("__trap();", ONE, HostCheckError),
    "large frame": ("volatile char b[8 << 20]; b[0] = 1; x[0] = b[5];", ONE, OutOfBounds),
    "huge frame": ("volatile char b[200 << 20]; b[0] = 1; x[0] = b[0];", ONE, OutOfBounds),
    "divergent": ("if (threadIdx.x < 5) __syncthreads(); x[threadIdx.x] = 1.0f;", WARP,
                  BarrierDivergence),
    "return before": ("if (threadIdx.x < 5) return; __syncthreads(); x[0] = 1.0f;", WARP,
                      BarrierDivergence),
    "lanes missing": ("if (threadIdx.x < 5) __syncwarp(0xffffffffu); x[0] = 1.0f;", WARP,
                      BarrierDivergence),
    "mask lacks lane": ("x[threadIdx.x] = __shfl_sync(0x1u, x[0], 0);", WARP, BarrierDivergence),
    "spin": ("if (threadIdx.x) __syncwarp(); else while (!atomicAdd((int*)x, 0)) {}", WARP,
             Deadlock),
}  # fmt: skip
RECURSION = """
__device__ int deep(int n, volatile float* p) {
  volatile char frame[4096];
  frame[0] = n;
  return p[0] + frame[0] + deep(n + 1, p) + frame[1];
}
KERNEL void recursion(float* x) { x[0] = deep(0, x); }
"""


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    """The host device: a GPU loses its context to most of these."""
    with Device("host") as opened:
        yield opened


@pytest.fixture(scope="module")
def faulty(device: Any) -> Any:
    names = {call: f"fault_{i}" for i, call in enumerate(FAULTS)}
    text = HEAD + "".join(
        f"KERNEL void {names[call]}(float* x) {{ {body} }}\n"
        for call, (body, _, _) in FAULTS.items()
    )
    image = compile_source(text + RECURSION, arch="host")
    with device.module(image) as module:
        yield {call: module.kernel(name) for call, name in names.items()} | {
            "recursion": module.kernel("recursion")
        }


@pytest.mark.parametrize("fault", [*FAULTS, "recursion"])
def test_a_fault_is_named_and_leaves_the_device(
    device: Any, stream: Any, healthy: Any, faulty: Any, fault: str
) -> None:
    _, config, kind = FAULTS.get(fault, ("", ONE, OutOfBounds))
    x = device.zeros(N, np.float32, stream)
    launch(stream, config, faulty[fault], x)
    with pytest.raises(kind) as found:
        stream.sync()
    assert isinstance(found.value, HostCheckError)
    assert found.value.kernel.startswith(("fault_", "recursion"))
    assert found.value.block == (0, 0, 0)
    assert fault == "call of null" or found.value.where.startswith("source.cu:")
    stream.sync()  # told once
    healthy(stream)
    with stream.capture("faulty") as graph:
        launch(stream, config, faulty[fault], x)
    with graph.instantiate() as step:
        for _ in range(2):
            step.launch(stream)
            with pytest.raises(kind):
                x.to_numpy(stream)
    graph.close()
    x.close()
    healthy(stream)


BROKEN = {
    "syntax": "KERNEL void f(float* x) { x[0] = ; }",
    "unknown name": "KERNEL void f(float* x) { x[0] = nothing; }",
    "no kernel": "",
    "another kernel": "KERNEL void g(float* x) {}",
    "twice": "KERNEL void f(float* x) {}\nKERNEL void f(float* x) {}",
    "#error": "#error no",
    "template without arguments": "template <int N> __global__ void f(float* x) {}",
    "exception": "KERNEL void f(float* x) { throw 1; }",
    "system header": "#include <nowhere.h>\nKERNEL void f(float* x) {}",
    "macro include": "#include __FILE__\nKERNEL void f(float* x) {}",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_source_that_does_not_compile(device: Any, what: str) -> None:
    with pytest.raises(CompileError):
        compile_source(HEAD + BROKEN[what], arch="host", name_expressions=["f"])


def test_a_header_that_is_nowhere() -> None:
    with pytest.raises(HeaderNotFound, match="include_dirs"):
        compile_source('#include "nowhere.cuh"\n', arch="host")


@pytest.mark.parametrize(
    "config",
    [
        (0, 1), (1, 0), (-1, 1), (1, 1025), (1, (1024, 2)), (1, (1, 1, 65)), ((1, 65536), 1),
        ((1, 1, 65536), 1), (2**31, 1), (2**70, 1), (1, 2**70), (1, 1, -1), (1, 1, 2**40),
    ],
)  # fmt: skip
def test_launches_beyond_the_limits(
    device: Any, stream: Any, module: Any, healthy: Any, config: Any
) -> None:
    x = device.zeros(N, np.float32, stream)
    with pytest.raises(LaunchLimit):
        launch(stream, LaunchConfig(*config), module.kernel("first"), x, x)
    x.close()
    healthy(stream)


class _Work:
    label = "work"

    def __init__(self, done: list[str], name: str, error: Exception | None = None):
        self.done, self.name, self.error = done, name, error

    def run(self) -> None:
        if self.error is not None:
            raise self.error
        self.done.append(self.name)


def test_who_was_told_of_an_error_can_go_on_at_once() -> None:
    """Work behind a fault is dropped; not what is submitted once the fault was told."""
    schedule, done = Schedule(), []
    fault = Op(_Work(done, "fault", OutOfBounds("here")), 0, 1)
    behind, release = Op(_Work(done, "behind"), 0, 1), Op(_Work(done, "release"), 0, 1, True)
    schedule.add(fault, [])
    schedule.add(behind, [fault])
    schedule.add(release, [behind])
    schedule.run_until(lambda: fault.done)
    late = Op(_Work(done, "late, untold"), 0, 1)
    schedule.add(late, [release])
    assert [str(error) for error in schedule.take_errors(0)] == ["here"]
    assert not behind.done
    fresh = Op(_Work(done, "fresh"), 0, 1)
    schedule.add(fresh, [late])
    schedule.run_until(lambda: fresh.done)
    assert done == ["release", "fresh"]
    assert schedule.take_errors(0) == []


def test_an_error_that_is_told_by_an_allocation_loses_nothing(
    device: Any, stream: Any, healthy: Any, faulty: Any
) -> None:
    """Page-locked memory looks whether earlier work is done, and may be the first to be told."""
    x, told = device.zeros(N, np.float32, stream), 0
    for _ in range(50):
        device.pinned(N, np.float32).array[:] = 0  # dropped with a copy in flight below
        landing = device.pinned(N, np.float32)
        launch(stream, ONE, faulty["trap"], x)
        x.copy_to(stream, landing)
        del landing
        with pytest.raises(HostCheckError):
            for _ in range(3):
                device.pinned(4, np.float32).close()
            stream.sync()
        told += 1
        given = np.random.default_rng().standard_normal(N).astype(np.float32)
        x.copy_from(stream, given)
        assert (x.to_numpy(stream) == given).all()
    assert told == 50
    x.close()
    healthy(stream)
