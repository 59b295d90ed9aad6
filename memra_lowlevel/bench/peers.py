"""The same work through other libraries, where they are installed.

Each probe runs under :meth:`Run.guard`: a library that is missing, or fails, is a note and no row.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .clock import host_us, n_repeats, n_sets, rested_us
from .result import Row

if TYPE_CHECKING:
    from .attend import Case
    from .run import Run

__all__ = ["attend_rows", "launch_rows", "replay_rows"]

N_CALLS = 200
_N_REPLAYS = 20
_PARAMETERS = """(const uint4* src, unsigned long long n, unsigned never, unsigned* out) {
  unsigned mix = 0;
  for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x) {
    uint4 v = src[i];
    mix ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (mix == never) out[0] = mix;
}"""
SOURCE = f'extern "C" __global__ void peer_read{_PARAMETERS}'


def launch_rows(run: Run, kernel: Any, source: Any, out: Any, baseline: str | None) -> None:
    """Time one launch of the same small kernel through every library that is here."""

    def add(
        peer: str, how: str, settle: Callable[[], Any], call: Callable[..., Any], *words: Any
    ) -> None:
        call(*words)
        settle()
        samples = host_us(call, settle, N_CALLS, args=words)
        what = f"launch, {how}"
        run.add(Row(what, "us", samples, peer=peer, work="launch", baseline=baseline))

    for name, probe in (
        ("cuda.bindings", _launch_bindings), ("cuda.core", _launch_core), ("CuPy", _launch_cupy),
        ("torch", _launch_torch), ("Triton", _launch_triton), ("numba-cuda", _launch_numba),
    ):  # fmt: skip
        with run.guard(name):
            probe(run, add, kernel, source, out)


def replay_rows(
    run: Run, kernel: Any, source: Any, out: Any, n_nodes: int, baseline: str | None
) -> None:
    """Time the replay of a chain of small kernels by the libraries that capture."""
    for name, probe in (
        ("cuda.bindings", _chain_bindings), ("cuda.core", _chain_core), ("CuPy", _chain_cupy),
        ("torch", _chain_torch),
    ):  # fmt: skip
        with run.guard(name):
            replay, settle, *words = probe(run, kernel, source, out, n_nodes)

            def both(replay: Any = replay, settle: Any = settle, words: Any = words) -> None:
                replay(*words)
                settle()

            for work, call, after, given in (
                ("replay", replay, settle, words), ("replay + sync", both, lambda: None, ()),
            ):  # fmt: skip
                against = baseline and baseline + work.removeprefix("replay")
                samples = host_us(call, after, _N_REPLAYS, args=given)
                what = f"{work}, {name}"
                run.add(Row(what, "us", samples, peer=name, work=work, baseline=against))


def attend_rows(run: Run, case: Case) -> None:
    """Time decode attention of the same shape over a cache of torch's, captured like ours."""
    with run.guard("torch"):
        torch = importlib.import_module("torch")
        for name, element_bytes, probe in (
            ("torch cuDNN f16", 2, _sdpa("CUDNN_ATTENTION")),
            ("torch flash f16", 2, _sdpa("FLASH_ATTENTION")),
            ("FlashInfer f16", 2, _flashinfer),
            ("FA3 bf16", 2, _flash3("bfloat16")),
            ("FA3 fp8", 1, _flash3("float8_e4m3fn")),
        ):
            with run.guard(name):
                _attend(run, torch, name, case, element_bytes, probe)
    note = "llama.cpp: its Python package has no attention operator to call"
    run.notes.append(note)


# -- launches -------------------------------------------------------------------------------------
def _launch_bindings(run: Run, add: Any, kernel: Any, source: Any, out: Any) -> None:
    cuda, func, handle, address, keep, values, types = _bound(run, kernel, source, out)
    for how, given in (("prebuilt pointers", address), ("tuples", (values, types))):
        add(
            "cuda.bindings", f"cuda.bindings, {how}", run.stream.sync,
            cuda.cuLaunchKernel, func, 1, 1, 1, 32, 1, 1, 0, handle, given, 0,
        )  # fmt: skip
    del keep


def _bound(run: Run, kernel: Any, source: Any, out: Any) -> tuple[Any, ...]:
    cuda = importlib.import_module("cuda.bindings.driver")
    values = (source.ptr, 0, 1, out.ptr)
    types = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p)
    boxed = [t(v) for t, v in zip(types, values, strict=True)]
    array = (ctypes.c_void_p * 4)(*(ctypes.addressof(b) for b in boxed))
    func, handle = cuda.CUfunction(kernel.handle), cuda.CUstream(run.stream.handle)
    return cuda, func, handle, ctypes.addressof(array), (boxed, array), values, types


def _launch_core(run: Run, add: Any, kernel: Any, source: Any, out: Any) -> None:
    core, queue, config, theirs, words = _core_kernel(run, source, out)
    add("cuda.core", "cuda.core", queue.sync, core.launch, queue, config, theirs, *words)


def _core_kernel(run: Run, source: Any, out: Any) -> tuple[Any, ...]:
    try:
        core = importlib.import_module("cuda.core")
        program = core.Program
    except AttributeError:  # before version 1.0
        core = importlib.import_module("cuda.core.experimental")
        program = core.Program
    unit = core.Device(run.device.ordinal)
    unit.set_current()
    queue = unit.create_stream()
    code = program(SOURCE, "c++", core.ProgramOptions(arch=f"sm_{unit.arch}")).compile("cubin")
    theirs, config = code.get_kernel("peer_read"), core.LaunchConfig(grid=1, block=32)
    return core, queue, config, theirs, (source.ptr, np.uint64(0), np.uint32(1), out.ptr)


def _launch_cupy(run: Run, add: Any, kernel: Any, source: Any, out: Any) -> None:
    cupy = importlib.import_module("cupy")
    raw, words = _cupy_kernel(cupy)
    settle = cupy.cuda.get_current_stream().synchronize
    add("CuPy", "CuPy RawKernel", settle, raw, (1,), (32,), words)


def _cupy_kernel(cupy: Any) -> tuple[Any, tuple[Any, ...]]:
    raw = cupy.RawKernel(SOURCE, "peer_read")
    a, b = cupy.zeros(4, cupy.uint32), cupy.zeros(32, cupy.uint32)
    return raw, (a, np.uint64(0), np.uint32(1), b)


def _launch_torch(run: Run, add: Any, kernel: Any, source: Any, out: Any) -> None:
    torch = importlib.import_module("torch")
    x = torch.zeros(32, device="cuda")
    add("torch", "torch add_", torch.cuda.synchronize, x.add_, 1.0)


def _launch_triton(run: Run, add: Any, kernel: Any, source: Any, out: Any) -> None:
    torch = importlib.import_module("torch")
    theirs = importlib.import_module("memra_lowlevel.bench.peer_triton").touch
    x, y = (torch.zeros(32, device="cuda", dtype=torch.int32) for _ in range(2))
    settle = torch.cuda.synchronize
    add("Triton", "Triton jit", settle, theirs[(1,)], x, y, 0, 1)
    compiled = theirs[(1,)](x, y, 0, 1)
    add("Triton", "Triton handle", settle, compiled[(1, 1, 1)], x, y, 0, 1)


def _launch_numba(run: Run, add: Any, kernel: Any, source: Any, out: Any) -> None:
    cuda = importlib.import_module("numba.cuda")

    def touch(a: Any, n: Any, never: Any, b: Any) -> None:
        i = cuda.threadIdx.x
        if n > never:
            b[i] = a[i]

    theirs = cuda.jit(touch)
    a, b = cuda.device_array(32, np.uint32), cuda.device_array(32, np.uint32)
    n, never = np.uint64(0), np.uint32(1)
    add("numba-cuda", "numba-cuda", cuda.synchronize, theirs[1, 32], a, n, never, b)


# -- replays --------------------------------------------------------------------------------------
def _chain_bindings(run: Run, kernel: Any, source: Any, out: Any, n_nodes: int) -> tuple[Any, ...]:
    cuda, func, handle, address, keep, _, _ = _bound(run, kernel, source, out)
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

    def checked(answer: tuple[Any, ...]) -> Any:
        if int(answer[0]):
            raise RuntimeError(answer[0].name)
        return answer[1] if len(answer) > 1 else None

    checked(cuda.cuStreamBeginCapture(handle, mode))
    for _ in range(n_nodes):
        checked(cuda.cuLaunchKernel(func, 1, 1, 1, 32, 1, 1, 0, handle, address, 0))
    graph = checked(cuda.cuStreamEndCapture(handle))
    step = checked(cuda.cuGraphInstantiate(graph, 0))
    checked(cuda.cuGraphUpload(step, handle))
    del keep  # a graph holds the values of its parameters
    return cuda.cuGraphLaunch, lambda: cuda.cuStreamSynchronize(handle), step, handle


def _chain_core(run: Run, kernel: Any, source: Any, out: Any, n_nodes: int) -> tuple[Any, ...]:
    core, queue, config, theirs, words = _core_kernel(run, source, out)
    core.launch(queue, config, theirs, *words)
    queue.sync()
    builder = queue.create_graph_builder()
    builder.begin_building()
    for _ in range(n_nodes):
        core.launch(builder, config, theirs, *words)
    graph = builder.end_building().complete()
    graph.upload(queue)
    return graph.launch, queue.sync, queue


def _chain_cupy(run: Run, kernel: Any, source: Any, out: Any, n_nodes: int) -> tuple[Any, ...]:
    cupy = importlib.import_module("cupy")
    raw, words = _cupy_kernel(cupy)
    queue = cupy.cuda.Stream(non_blocking=True)
    with queue:
        raw((1,), (32,), words)
        queue.synchronize()
        queue.begin_capture()
        for _ in range(n_nodes):
            raw((1,), (32,), words)
        graph = queue.end_capture()
    return graph.launch, queue.synchronize, queue


def _chain_torch(run: Run, kernel: Any, source: Any, out: Any, n_nodes: int) -> tuple[Any, ...]:
    torch = importlib.import_module("torch")
    x = torch.zeros(32, device="cuda")
    x.add_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n_nodes):
            x.add_(1.0)
    return graph.replay, torch.cuda.synchronize


# -- attention ------------------------------------------------------------------------------------
Probe = Callable[[Any, "Case", int], Callable[[], object]]


def _attend(run: Run, torch: Any, name: str, case: Case, element_bytes: int, probe: Probe) -> None:
    """Capture calls over rotating sets as one graph of torch's, and time its replays."""
    n_bytes = 2 * case.ctx * case.n_kv_heads * case.head_dim * element_bytes
    calls = [probe(torch, case, i) for i in range(n_sets(n_bytes))]

    def captured(n_passes: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls * n_passes:
                call()
        return graph

    def replayed_ms(graph: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
            call()
    torch.cuda.synchronize()
    once = captured(1)
    replayed_ms(once)
    n_passes = n_repeats(replayed_ms(once), len(calls))
    del once
    graph = captured(n_passes)
    samples = rested_us(partial(replayed_ms, graph), n_passes * len(calls), 15)
    extra = {"bytes": n_bytes, "shape": case.shape, "ctx": case.ctx, "n_rows": case.n_rows}
    run.add(
        Row(
            f"{run.group} {case.work}, {name}", "us", samples, run.ceilings.read_us(n_bytes), name,
            extra=extra, work=f"{run.group} {case.work}",
        )
    )  # fmt: skip
    del graph
    torch.cuda.empty_cache()


def _sdpa(backend: str) -> Probe:
    def probe(torch: Any, case: Case, i: int) -> Callable[[], object]:
        kind = getattr(torch.nn.attention.SDPBackend, backend)
        q, k, v = (
            torch.randn(1, h, n, case.head_dim, device="cuda", dtype=torch.float16)
            for h, n in (
                (case.n_heads, case.n_rows), (case.n_kv_heads, case.ctx),
                (case.n_kv_heads, case.ctx),
            )
        )  # fmt: skip
        attend = torch.nn.functional.scaled_dot_product_attention

        def call() -> None:
            with torch.nn.attention.sdpa_kernel(kind):
                attend(q, k, v, enable_gqa=True)

        return call

    return probe


def _flashinfer(torch: Any, case: Case, i: int) -> Callable[[], object]:
    flashinfer = importlib.import_module("flashinfer")
    if case.n_rows != 1:
        raise NotImplementedError("its single-sequence decode takes one row")
    q = torch.randn(case.n_heads, case.head_dim, device="cuda", dtype=torch.float16)
    k, v = (
        torch.randn(case.ctx, case.n_kv_heads, case.head_dim, device="cuda", dtype=torch.float16)
        for _ in range(2)
    )
    attend = flashinfer.single_decode_with_kv_cache
    return lambda: attend(q, k, v, kv_layout="NHD", use_tensor_cores=True)


def _flash3(kind: str) -> Probe:
    def probe(torch: Any, case: Case, i: int) -> Callable[[], object]:
        attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
        dtype = getattr(torch, kind)
        q, k, v = (
            torch.randn(1, n, h, case.head_dim, device="cuda").to(dtype)
            for h, n in (
                (case.n_heads, case.n_rows), (case.n_kv_heads, case.ctx),
                (case.n_kv_heads, case.ctx),
            )
        )  # fmt: skip
        length = torch.full((1,), case.ctx, device="cuda", dtype=torch.int32)
        return lambda: attend(q, k, v, cache_seqlens=length, causal=True)

    return probe
