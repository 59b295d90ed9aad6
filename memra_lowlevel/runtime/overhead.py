"""What a launch costs on our side: time per call with a driver that does nothing."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import native
from ..driver import get
from .config import LaunchConfig
from .context import Context
from .device import Device
from .launch import launch, launch_many, prepare
from .module import LoadedModule

if TYPE_CHECKING:
    from ..compile import Kernel
    from .stream import Stream

__all__ = ["StubDriver", "best_ns", "launch_overhead", "stub_device"]

_SOURCE = """#include "common/device.cuh"
KERNEL void eleven(float* a, float* b, float* c, int32_t d, int32_t e, int32_t f, float g, float h,
                   int32_t i, int32_t j, int32_t k) {
    if (a == nullptr) b[0] = c[0] + float(d + e + f + i + j + k) + g + h;
}
KERNEL void four(float* a, float* b, float* c, int32_t d) { if (a == nullptr) b[0] = c[0] + d; }
"""


class StubDriver:
    """The host driver with launches that return at once; their work is not done."""

    def __init__(self) -> None:
        self._host = get("host")
        self._sources: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def entry_point(self, name: str) -> int:
        """Address of the stub behind ``cuLaunchKernel`` or ``cuGraphLaunch``."""
        return int(native.lib.mll_stub_entry(name == "cuGraphLaunch"))

    def add_count_source(self, source: Callable[[], Any]) -> None:
        """Keep counts of launches that nobody makes out of the host driver's."""
        self._sources.append(source)


@contextmanager
def stub_device(ordinal: int = 0) -> Iterator[Device]:
    """Give a device over :class:`StubDriver`; needs the compiled launch path."""
    driver: Any = StubDriver()
    context = Context(driver, ordinal)
    context.private = True
    context.users = 1
    device = Device._over(context)
    try:
        yield device
    finally:
        native.lib.mll_stub_state.answer = 0
        context.drop_user()


def launch_overhead(*, n: int = 200, repeats: int = 200) -> dict[str, float]:
    """Nanoseconds per call, loop overhead removed: the best of many short runs.

    Returns
    -------
    dict
        ``prepared`` (checked launch of a prepared plan), ``prepared_unlocked`` (the same when so
        much is queued that the interpreter lock is given away), ``prepared_set`` (one parameter
        changed before it), ``new_arguments`` (3 pointers, 1 int), ``new_arguments_11``, ``many``
        (per launch of a batch of 64), ``floor`` (a call through cffi that does nothing),
        ``function`` (a Python function that does nothing), ``stamp`` (reading the time counter).

    Notes
    -----
    Graph launches are measured by the graph layer's caller through :func:`best_ns`.
    """
    from ..compile import compile_source

    with stub_device() as device:
        image = compile_source(_SOURCE, arch=device.arch, name="overhead.cu")
        module = LoadedModule(device.context, image)
        stream = device.stream(name="overhead")
        blocks = [device.alloc(64, stream) for _ in range(3)]
        buffers = [b.view(0, 16, "f4") for b in blocks]
        times = _measure(
            stream, module.kernel("four"), module.kernel("eleven"), buffers, n, repeats
        )
        for block in blocks:
            block.close()
        stream.close()
        module.close()
    return times


def _measure(
    stream: Stream, four: Kernel, eleven: Kernel, buffers: list[Any], n: int, repeats: int
) -> dict[str, float]:
    config = LaunchConfig(4, 128)
    plan, far = (prepare(stream, config, four, *buffers, 1) for _ in range(2))
    other = stream.device.stream(name="shared")
    other.cell.shared = 1
    for made, on in ((plan, stream), (far, other)):
        made.launch(on)
    names = {
        "f": plan.launch, "s": stream, "p": plan, "launch": launch, "c": config, "four": four,
        "eleven": eleven, "a": buffers[0], "many": launch_many, "floor": native.lib.mll_stub_entry,
        "ps": [prepare(stream, config, four, *buffers, i) for i in range(64)],
    }  # fmt: skip

    def nothing(s: Any) -> None:
        pass

    names["nothing"] = nothing

    def best(statement: str, share: int = 1) -> float:
        return best_ns(statement, names, max(1, n // share), repeats, "s.sync()")

    loop = best("pass")
    times = {
        "prepared": best("f(s)") - loop,
        "prepared_unlocked": best_ns("f(s)", {**names, "s": other, "f": far.launch}, n, repeats)
        - loop,
        "prepared_set": best("p.set(3, 7); f(s)", 8) - loop,
        "new_arguments": best("launch(s, c, four, a, a, a, 1)", 8) - loop,
        "new_arguments_11": best("launch(s, c, eleven, a, a, a, 1, 2, 3, 1.0, 2.0, 3, 4, 5)", 16)
        - loop,
        "many": (best("many(s, ps)", 64) - loop) / 64,
        "floor": best("floor(0)") - loop,
        "function": best("nothing(s)") - loop,
        "stamp": native.lib.mll_stamp_ns(10000),
    }
    other.close()
    return times


def best_ns(
    statement: str, names: dict[str, Any], n: int, repeats: int, before: str = "pass"
) -> float:
    """Nanoseconds per execution of ``statement``: the best of ``repeats`` runs of ``n``.

    ``before`` is executed before each run and not timed: a stream that is waited for keeps the
    launches of a run on the path that real programs are on.
    """
    return min(timeit.Timer(statement, before, globals=names).repeat(repeats, n)) / n * 1e9
