"""One captured step over two streams, replayed a thousand times without a node update.

``python -m memra_lowlevel.examples.two_streams``. An event forks the second stream off inside the
capture and another one joins it back; a device counter tells each replay which step it is.
"""

from __future__ import annotations

import numpy as np

from memra_lowlevel import Device, DeviceCounter, LaunchConfig, compile_source, launch
from memra_lowlevel.errors import CapacityExceeded, CaptureUnjoined

SOURCE = r"""
#include "common/device.cuh"

KERNEL void times(const int32_t* step, int32_t* out, int32_t factor) {
    if (threadIdx.x == 0) out[0] = step[0] * factor;
}

KERNEL void join(const int32_t* step, const int32_t* a, const int32_t* b, int32_t* out, int32_t n) {
    if (threadIdx.x == 0 && step[0] < n) out[step[0]] = a[0] + b[0];
}
"""
STEPS = 1000


def main() -> None:
    with Device() as device, device.stream("main") as main_s, device.stream("side") as side_s:
        module = device.module(compile_source(SOURCE, arch=device.arch, name="step.cu"))
        times, join = module.kernel("times"), module.kernel("join")
        one_warp = LaunchConfig(grid=1, block=32)

        # Everything that the graph uses has a fixed address before the capture begins.
        a, b = device.zeros(1, np.int32, main_s), device.zeros(1, np.int32, main_s)
        out = device.zeros(STEPS, np.int32, main_s)
        step = DeviceCounter(device, "step", capacity=STEPS, stream=main_s)
        fork, joined = device.event(name="fork"), device.event(name="joined")

        with main_s.capture("two streams") as graph:
            main_s.record(fork)
            side_s.wait(fork)  # from here on the side stream belongs to the capture
            launch(main_s, one_warp, times, step, a, 2)
            launch(side_s, one_warp, times, step, b, 3)
            side_s.record(joined)
            main_s.wait(joined)
            launch(main_s, one_warp, join, step, a, b, out, STEPS)
            step.advance(main_s, 1)  # captured: each launch adds one, on the device and here
        print(graph.describe())

        with graph.instantiate() as executable:
            for _ in range(STEPS):
                executable.launch(main_s)  # one driver call
            right = np.array_equal(out.to_numpy(main_s), 5 * np.arange(STEPS))
            print(f"step {step.value}, on the device {step.sync(main_s)}; right: {right}")
            try:
                executable.launch(main_s)
            except CapacityExceeded as error:  # known to the host: the device was not asked
                print(f"CapacityExceeded: {error}")

        try:
            with main_s.capture("forgotten join"):
                main_s.record(fork)
                side_s.wait(fork)
                launch(side_s, one_warp, times, step, b, 3)
        except CaptureUnjoined as error:
            print(f"CaptureUnjoined: {error}")


if __name__ == "__main__":
    main()
