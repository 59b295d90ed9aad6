"""What a replay costs on our side: time per call with a driver that does nothing."""

from __future__ import annotations

from ..runtime.overhead import best_ns, stub_device
from .counters import DeviceCounter

__all__ = ["replay_overhead"]


def replay_overhead(*, n: int = 200, repeats: int = 200) -> dict[str, float]:
    """Nanoseconds per graph launch, loop overhead removed; the best of many short runs.

    Returns
    -------
    dict
        ``replay`` (no counters) and ``replay_counter`` (one device counter that is checked and
        moved).
    """
    with stub_device() as device:
        stream = device.stream(name="overhead")
        counter = DeviceCounter(device, "steps", stream=stream)
        with stream.capture("plain") as plain:
            counter.buffer.fill(stream, 0)
        with stream.capture("counted") as counted:
            counter.advance(stream, 1)
        steps = [plain.instantiate(), counted.instantiate()]
        names = {"f": steps[0].launch, "g": steps[1].launch, "s": stream}
        loop = best_ns("pass", {}, n, repeats)
        times = {
            "replay": best_ns("f(s)", names, n, repeats, "s.sync()") - loop,
            "replay_counter": best_ns("g(s)", names, n, repeats, "s.sync()") - loop,
        }
        for thing in (*steps, plain, counted, counter, stream):
            thing.close()
    return times
