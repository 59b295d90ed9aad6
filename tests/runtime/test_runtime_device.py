"""Devices, their contexts, and the import of the package."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, compile_source, driver, errors, launch
from memra_lowlevel.runtime import context as contexts
from memra_lowlevel.runtime import lifetime


def test_import_makes_no_cuda_call_and_is_quick() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import memra_lowlevel as m; "
        "t = time.perf_counter() - t; m.Device; "
        "bad = [n for n in sys.modules if n.startswith('cuda.bindings')]; "
        "assert not bad, bad; assert t < 0.3, t; "
        "assert set(m.__all__) <= set(dir(m)); [getattr(m, n) for n in m.__all__]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import memra_lowlevel

    with pytest.raises(AttributeError, match="no_such_name"):
        memra_lowlevel.no_such_name  # noqa: B018


@pytest.mark.parametrize("spec", ["gpu", "cuda:x", "host:-1", "host:99", "", "host:1:2"])
def test_bad_specs_are_named(spec: str) -> None:
    with pytest.raises(errors.ArgumentError, match="Device"):
        Device(spec)


def test_specs_of_the_same_device_are_equal_and_share_the_context() -> None:
    with Device("host") as a, Device("host:0") as b, Device("host:1") as c:
        assert a == b and hash(a) == hash(b) and a.ctx is b.ctx
        assert a != c and a.ctx.handle != c.ctx.handle
        assert Device(a) == a
        assert (str(a), str(c), a.arch, a.kind, c.ordinal) == (
            "host:0",
            "host:1",
            "host",
            "host",
            1,
        )
        Device(a).close()


def test_context_goes_with_the_last_device_and_object() -> None:
    counts = driver.get("host").counts
    released = counts().get("cuDevicePrimaryCtxRelease", 0)
    a, b = Device("host:3"), Device("host:3")
    s = a.stream(name="keeps the context")
    buffer = a.zeros(4, np.int32, s)
    a.close()
    a.close()
    assert a.closed and not b.closed
    with pytest.raises(errors.ClosedError, match="host:3"):
        a.stream()
    b.close()
    assert ("host", 3) in contexts._registry
    assert buffer.to_numpy(s).tolist() == [0] * 4
    buffer.close()
    s.close()
    assert ("host", 3) not in contexts._registry
    assert counts()["cuDevicePrimaryCtxRelease"] == released + 1
    with Device("host:3") as again:
        assert again.memory_bytes()[1] > 0


def test_kernels_do_not_outlive_their_context(path: str) -> None:
    source = '#include "common/device.cuh"\nKERNEL void one(int32_t* p) { p[0] = 1; }\n'
    with Device("host:3") as dev:
        kernel = dev.module(compile_source(source, arch="host", name="outlived.cu")).kernel("one")
    with Device("host:3") as dev, _stream(dev) as s:
        out = dev.zeros(1, np.int32, s)
        with pytest.raises(errors.ClosedError, match=r"outlived\.cu"):
            launch(s, LaunchConfig(1, 1), kernel, out)
        out.close()


def test_limits_come_from_the_driver(device: Device) -> None:
    limits = device.limits
    assert limits.threads_per_block >= 256 and limits.shared_bytes >= 48 << 10
    assert limits.shared_optin_bytes >= limits.shared_bytes
    assert all(n >= 65535 for n in limits.grid[:1])


def test_census_names_open_objects_and_where_they_were_made(device: Device) -> None:
    before = {leak.serial for leak in device.census()}
    s = device.stream(name="listed")
    e = device.event(name="listed event")
    b = device.alloc(100, s, name="listed buffer")
    found = {leak.name: leak for leak in device.census() if leak.serial not in before}
    assert set(found) == {"listed", "listed event", "listed buffer"}
    assert found["listed buffer"].n_bytes == 100
    assert all("test_runtime_device.py" in leak.where for leak in found.values())
    for thing in (b, e, s):
        thing.close()
    assert {leak.serial for leak in device.census()} == before


def test_no_leaks_raises_by_name(device: Device) -> None:
    with pytest.raises(errors.LeakError, match="forgotten") as caught:
        with lifetime.no_leaks():
            kept = device.event(name="forgotten")
    assert len(caught.value.objects) == 1
    kept.close()
    with lifetime.no_leaks():
        device.event(name="remembered").close()


def test_dropped_objects_are_destroyed_at_a_safe_point(device: Device) -> None:
    gc.collect()  # what earlier tests dropped goes first
    device.sync()
    counts = device.driver.counts
    destroyed = counts().get("cuEventDestroy", 0)
    device.event(name="dropped")
    gc.collect()
    # The finaliser only queued it.
    assert counts().get("cuEventDestroy", 0) == destroyed
    device.sync()
    assert counts()["cuEventDestroy"] == destroyed + 1


def test_use_after_close_is_refused_by_name(device: Device) -> None:
    s = device.stream(name="gone")
    e = device.event(name="gone too")
    b = device.alloc(8, s, name="gone as well")
    b.close()
    e.close()
    s.close()
    s.close()
    with _stream(device) as live:
        for act, name in (
            (lambda: s.sync(), "gone"),
            (lambda: live.record(e), "gone too"),
            (lambda: live.wait(e), "gone too"),
            (lambda: b.fill(live, 0), "gone as well"),
            (lambda: b.view(0, 1, np.uint8), "gone as well"),
            (lambda: device.alloc(4, s), "gone"),
        ):
            with pytest.raises(errors.ClosedError, match=name):
                act()


def test_devices_work_from_several_threads() -> None:
    failures: list[BaseException] = []

    def work(ordinal: int) -> None:
        try:
            with Device(f"host:{ordinal}") as dev, _stream(dev) as s:
                for i in range(20):
                    b = dev.from_numpy(np.full(64, i, np.int32), s)
                    assert (b.to_numpy(s) == i).all()
                    b.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


class _stream:
    def __init__(self, device: Device) -> None:
        self.s = device.stream(name="scoped")

    def __enter__(self):
        return self.s

    def __exit__(self, *exc: object) -> None:
        self.s.close()
