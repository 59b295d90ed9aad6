"""The same work through other libraries, where they are installed; each probe is guarded."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .clock import host_us
from .result import Row

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.stream import Stream

__all__ = ["attend_rows", "launch_rows"]

N_CALLS = 200
SOURCE = """
extern "C" __global__ void peer_read(const uint4* src, unsigned long long n, unsigned never,
                                     unsigned* out) {
  unsigned mix = 0;
  for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x) {
    uint4 v = src[i];
    mix ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (mix == never) out[0] = mix;
}"""


@contextmanager
def _guard(name: str, rows: list[Row]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        rows.append(Row(f"{name}: {type(error).__name__}: {error}"[:160], "", [0.0], peer=name))


def launch_rows(device: Device, stream: Stream, kernel: Any, source: Any, out: Any) -> list[Row]:
    """Time one launch through cuda.bindings, cuda.core, CuPy, torch, Triton and numba-cuda."""
    rows: list[Row] = []

    def add(peer: str, what: str, call: Callable[[], Any], settle: Callable[[], Any]) -> None:
        call()
        settle()
        rows.append(Row(what, "us", host_us(call, settle, n_calls=N_CALLS), peer=peer))

    with _guard("cuda.bindings", rows):
        cuda = importlib.import_module("cuda.bindings.driver")
        values = (source.ptr, 0, 1, out.ptr)
        types = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p)
        func, handle = cuda.CUfunction(kernel.handle), cuda.CUstream(stream.handle)
        boxed = [t(v) for t, v in zip(types, values, strict=True)]
        array = (ctypes.c_void_p * 4)(*(ctypes.addressof(b) for b in boxed))
        address = ctypes.addressof(array)
        add(
            "cuda.bindings", "launch, cuda.bindings prebuilt",
            lambda: cuda.cuLaunchKernel(func, 1, 1, 1, 32, 1, 1, 0, handle, address, 0),
            stream.sync,
        )  # fmt: skip
        add(
            "cuda.bindings", "launch, cuda.bindings tuples",
            lambda: cuda.cuLaunchKernel(
                func, 1, 1, 1, 32, 1, 1, 0, handle, (values, types), 0
            ), stream.sync,
        )  # fmt: skip
    with _guard("CuPy", rows):
        cupy = importlib.import_module("cupy")
        raw = cupy.RawKernel(SOURCE, "peer_read")
        a, b = cupy.zeros(4, cupy.uint32), cupy.zeros(32, cupy.uint32)
        import numpy as np

        arguments = (a, np.uint64(0), np.uint32(1), b)
        add(
            "CuPy", "launch, CuPy RawKernel", lambda: raw((1,), (32,), arguments),
            cupy.cuda.get_current_stream().synchronize,
        )  # fmt: skip
    with _guard("torch", rows):
        torch = importlib.import_module("torch")
        x = torch.zeros(32, device="cuda")
        add("torch", "launch, torch add_", lambda: x.add_(1.0), torch.cuda.synchronize)
    with _guard("cuda.core", rows):
        core = importlib.import_module("cuda.core")
        unit = core.Device(0)
        unit.set_current()
        queue = unit.create_stream()
        module = core.Program(SOURCE, "c++", core.ProgramOptions(arch=f"sm_{unit.arch}")).compile(
            "cubin"
        )
        theirs = module.get_kernel("peer_read")
        config = core.LaunchConfig(grid=1, block=32)
        import numpy as np

        words = (source.ptr, np.uint64(0), np.uint32(1), out.ptr)
        add(
            "cuda.core", "launch, cuda.core",
            lambda: core.launch(queue, config, theirs, *words), queue.sync,
        )  # fmt: skip
    return rows


def attend_rows(
    device: Device, n_heads: int, n_kv_heads: int, head_dim: int, ctx: int, n_rows: int
) -> list[Row]:
    """Time attention over an f16 cache of the same shape in torch, captured like ours."""
    rows: list[Row] = []
    with _guard("torch", rows):
        torch = importlib.import_module("torch")
        functional = torch.nn.functional
        n_bytes = 4 * ctx * n_kv_heads * head_dim
        n_sets = max(1, min(16, (256 << 20) // n_bytes + 1))
        sets = [
            tuple(
                torch.randn(1, h, n, head_dim, device="cuda", dtype=torch.float16)
                for h, n in ((n_heads, n_rows), (n_kv_heads, ctx), (n_kv_heads, ctx))
            )
            for _ in range(n_sets)
        ]
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            kind = getattr(torch.nn.attention.SDPBackend, backend)

            def run(kind: Any = kind) -> None:
                with torch.nn.attention.sdpa_kernel(kind):
                    for q, k, v in sets:
                        functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

            with _guard(f"torch {backend}", rows):
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    run()
                    run()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                samples = []
                for i in range(15):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    if i >= 3:
                        samples.append(begin.elapsed_time(end) * 1e3 / n_sets)
                rows.append(
                    Row(
                        f"attend {n_heads}/{n_kv_heads}/{head_dim} rows {n_rows} ctx {ctx} "
                        f"torch {backend} f16",
                        "us", samples, peer=f"torch {backend}",
                    )
                )  # fmt: skip
                del graph
    return rows
