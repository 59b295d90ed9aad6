"""What only a GPU can show: launch attributes, sharing memory with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, Stream, compile_source, launch

pytestmark = pytest.mark.gpu

SOURCE = """#include "common/device.cuh"
KERNEL void add_one(float* x, int32_t n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        x[i] += 1.0f;
}
KERNEL void add_one_waiting(float* x, int32_t n) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        x[i] += 1.0f;
}
KERNEL void cluster_rank(int32_t* out) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) out[blockIdx.x] = int32_t(rank);
}
"""


@pytest.fixture(scope="module")
def cuda() -> Iterator[Any]:
    with Device("cuda:0") as device:
        module = device.module(compile_source(SOURCE, arch=device.arch, name="gpu_tests.cu"))
        yield device, module
        module.close()


@pytest.fixture
def s(cuda: Any) -> Iterator[Stream]:
    opened = cuda[0].stream(name="gpu")
    yield opened
    opened.close()


def test_clusters(cuda: Any, s: Stream) -> None:
    device, module = cuda
    if not device.limits.clusters:
        pytest.skip("no clusters on this GPU")
    out = device.zeros(8, np.int32, s)
    launch(s, LaunchConfig(8, 32, cluster=4), module.kernel("cluster_rank"), out)
    assert out.to_numpy(s).tolist() == [0, 1, 2, 3] * 2
    out.close()


def test_cooperative(cuda: Any, s: Stream) -> None:
    device, module = cuda
    x = device.zeros(1000, np.float32, s)
    launch(s, LaunchConfig(2, 128, cooperative=True), module.kernel("add_one"), x, 1000)
    assert (x.to_numpy(s) == 1).all()
    x.close()


def test_programmatic_launches_are_captured_and_listed(cuda: Any, s: Stream) -> None:
    device, module = cuda
    kernel, config = module.kernel("add_one_waiting"), LaunchConfig(4, 128, programmatic=True)
    x = device.zeros(1000, np.float32, s)
    for _ in range(10):
        launch(s, config, kernel, x, 1000)
    with s.capture("programmatic") as graph:
        for _ in range(10):
            launch(s, config, kernel, x, 1000)
    report = graph.describe()
    assert report.kernel_nodes == 10 and report.edges == 9
    step = graph.instantiate()
    step.launch(s)
    assert (x.to_numpy(s) == 20).all()
    for thing in (step, graph, x):
        thing.close()


def test_an_object_may_stand_for_the_default_stream(cuda: Any, s: Stream) -> None:
    """As PyTorch's current stream does at first."""

    class Default:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0

    device, module = cuda
    kernel, config = module.kernel("add_one"), LaunchConfig(2, 128)
    x = device.zeros(1000, np.float32, s)
    s.sync()
    theirs = device.stream_of(Default(), name="default")
    for _ in range(2):
        launch(theirs, config, kernel, x, 1000)
    theirs.sync()
    assert (x.to_numpy(s) == 2).all()
    theirs.close()
    x.close()


def test_torch_shares_memory_both_ways(cuda: Any, s: Stream) -> None:
    torch = pytest.importorskip("torch")
    device, module = cuda
    kernel, config = module.kernel("add_one"), LaunchConfig(64, 256)
    theirs = torch.zeros(1 << 20, dtype=torch.float32, device="cuda:0")
    for _ in range(20):
        theirs.mul_(1.0)
    theirs.fill_(5.0)
    x = device.wrap(theirs, s, name="torch")
    assert x.ptr == theirs.data_ptr()
    launch(s, config, kernel, x, 1 << 20)
    assert (x.to_numpy(s) == 6).all()
    ours = device.zeros(1 << 20, np.float32, s)
    for _ in range(50):
        launch(s, config, kernel, ours, 1 << 20)
    seen = torch.from_dlpack(ours)
    assert seen.data_ptr() == ours.ptr
    assert bool((seen + 0 == 50).all())
    seen.fill_(7)
    torch.cuda.current_stream().synchronize()
    assert (ours.to_numpy(s) == 7).all()
    through = torch.as_tensor(ours, device="cuda:0")
    assert through.data_ptr() == ours.ptr
    external = torch.cuda.ExternalStream(s.__cuda_stream__()[1])
    with torch.cuda.stream(external):
        seen.add_(1)
    assert (ours.to_numpy(s) == 8).all()
    wrapped = device.stream_of(torch.cuda.current_stream(), name="torch's")
    launch(wrapped, config, kernel, ours, 1 << 20) if wrapped.handle else None
    wrapped.close()
    del seen, through
    x.close()
    ours.close()
