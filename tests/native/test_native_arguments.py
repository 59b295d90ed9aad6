"""What arguments arrive at the driver through compiled code, and which it leaves to Python."""

from __future__ import annotations

import gc
import math
import struct
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from native_rig import CONFIG, seen

from memra_lowlevel import Buffer, Device, compile_source, errors, launch, native, prepare
from memra_lowlevel.runtime.storage import Storage


def test_prepared_arguments_arrive(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 5
    p = prepare(s, CONFIG, kernel, a, -7, 1 << 40, 2.5, None)
    p.launch(s)  # the first launch on a stream goes through Python, to the real driver
    before = int(stub.n_launches)
    p.launch(s)
    assert int(stub.n_launches) == before + 1
    assert list(stub.grid) == [3, 4, 5] and list(stub.block) == [32, 2, 1]
    assert stub.shared_bytes == 1024
    assert int(native.ffi.cast("uintptr_t", stub.func)) == kernel.handle
    assert int(native.ffi.cast("uintptr_t", stub.stream)) == s.handle
    values = seen(stub)
    assert values[0] == a.ptr and values[2] == 1 << 40 and values[4] == 0
    assert np.int64(values[1] & 0xFFFFFFFF).astype(np.int32) == -7
    assert np.uint32(values[3] & 0xFFFFFFFF).view(np.float32) == 2.5
    p.set("e", e)
    p.set("b", 9)
    p.launch(s)
    p.launch(s)
    values = seen(stub)
    assert values[4] == e.ptr and values[1] & 0xFFFFFFFF == 9


def test_new_arguments_arrive(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params = 5
    before = int(stub.n_launches)
    for i in range(5):
        launch(s, CONFIG, kernel, a, i, -i, i / 2, e)
        values = seen(stub)
        assert values[0] == a.ptr and values[4] == e.ptr
        assert values[1] & 0xFFFFFFFF == i and np.uint64(values[2]).view(np.int64) == -i
        assert np.uint32(values[3] & 0xFFFFFFFF).view(np.float32) == np.float32(i / 2)
    assert int(stub.n_launches) == before + 5


WIDE = """#include "common/device.cuh"
struct alignas(16) Four { float x, y, z, w; };
KERNEL void wide(float* a, const uint8_t* NULLABLE b, int8_t c, uint8_t d, int16_t e, uint16_t f,
                 int32_t g, uint32_t h, int64_t i, uint64_t j, float k, double l, Four m) {
    if (a == nullptr) a[0] = float(c + d + e + f + g + h + i + j) + k + l + m.x + (b ? b[0] : 0);
}"""
INTS = {2: (-128, 127), 3: (0, 255), 4: (-(2**15), 2**15 - 1), 5: (0, 2**16 - 1),
        6: (-(2**31), 2**31 - 1), 7: (0, 2**32 - 1), 8: (-(2**63), 2**63 - 1),
        9: (0, 2**64 - 1)}  # fmt: skip


def test_what_compiled_code_packs_is_what_python_packs(
    dev: Device, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = dev.module(compile_source(WIDE, arch=dev.arch, name="wide.cu"))
    kernel, s = module.kernel("wide"), dev.stream(name="wide")
    a, b = dev.empty(4, np.float32, s), dev.empty(4, np.uint8, s)
    stub.n_params = 13
    good: list[Any] = [a, b, -7, 7, -300, 300, -70000, 70000, -(2**40), 2**40, 1.5, -2.5, bytes(16)]
    launch(s, CONFIG, kernel, *good)  # notes the use of the buffers
    launcher = s.context.launchers[kernel]
    sizes = [p.size for p in kernel.params]
    asked = []
    pack = launcher.pack_noting
    monkeypatch.setattr(launcher, "pack_noting", lambda *x: (asked.append(1), pack(*x))[1])

    def check(i: int, value: Any) -> None:
        args = [*good[:i], value, *good[i + 1 :]]
        block, _ = launcher.encoder.pack(args, s.context)
        launch(s, CONFIG, kernel, *args)
        parts = zip(launcher.encoder.split(block), seen(stub, 13), sizes, strict=True)
        for wanted, found, size in parts:
            n = min(size, 8)
            assert wanted[:n] == found.to_bytes(8, "little")[:n], (i, value)

    floats = [0.0, -0.0, 1e-45, 1e-60, -1e-310, 3.4028234663852886e38, 1 / 3, math.inf, -math.inf]
    for i, (low, high) in INTS.items():
        for value in (low, low + 1, -1 if low else 1, 0, 1, high // 2 + 1, high - 1, high):
            check(i, value)
    for i in (10, 11):
        for number in [*floats, math.nan, *([1e300, -5e-324] if i == 11 else [])]:
            check(i, number)
    check(1, None)
    check(12, bytes(range(16)))
    assert len(asked) == 3  # whole numbers from 2^63 on alone: 2^63, 2^64 - 2, 2^64 - 1
    for thing in (a, b, s):
        thing.close()
    module.close()


@pytest.mark.parametrize(
    ("i", "values"),
    [
        (0, (None, 5, "a", np.zeros(4, np.float32))),
        (1, (5, b"1234")),
        *((i, (low - 1, high + 1, True, None, 1.0, "1", 2**70)) for i, (low, high) in INTS.items()),
        (10, (1e39, -3.5e38, True, None, "1", 10**400)),
        (11, (True, None, "1", 10**400)),
        (12, (b"", bytes(15), bytes(17), None, 5)),
    ],
)
def test_compiled_code_takes_nothing_that_python_refuses(
    dev: Device, stub: Any, i: int, values: tuple[Any, ...]
) -> None:
    module = dev.module(compile_source(WIDE, arch=dev.arch, name="wide.cu"))
    kernel, s = module.kernel("wide"), dev.stream(name="wide")
    a, b = dev.empty(4, np.float32, s), dev.empty(4, np.uint8, s)
    good: list[Any] = [a, b, 1, 1, 1, 1, 1, 1, 1, 1, 1.0, 1.0, bytes(16)]
    stub.n_params = 13
    launch(s, CONFIG, kernel, *good)
    before = int(stub.n_launches)
    for value in values:
        with pytest.raises(errors.ArgumentError) as caught:
            launch(s, CONFIG, kernel, *good[:i], value, *good[i + 1 :])
        assert caught.value.index == i
    for fewer in (good[:-1], [*good, 1], []):
        with pytest.raises(errors.ArgumentError, match="13 arguments"):
            launch(s, CONFIG, kernel, *fewer)
    assert int(stub.n_launches) == before
    for thing in (a, b, s):
        thing.close()
    module.close()


def test_compiled_code_takes_no_buffer_that_python_refuses(rig: Any, stub: Any) -> None:
    kernel, s, _, a, e = rig
    stub.n_params, more = 5, (1, 2, 3.0, None)
    view, gone, halves = (a.view(0, 4, kind) for kind in (np.float32, np.float32, np.int32))
    whole = s.device.empty(4, np.float32, s, name="whole")
    part = whole.view(0, 4, np.float32)
    with Device("host:0") as elsewhere, elsewhere.stream(name="far") as far:
        theirs = elsewhere.empty(4, np.float32, far)
        launched = int(stub.n_launches)
        for buffer in (a, view, gone, e, part, a, view, gone, e, part):
            launch(s, CONFIG, kernel, buffer, *more)  # all have been used on this stream
        assert int(stub.n_launches) - launched >= 9
        theirs.storage.last = s
        gone.close()
        whole.close()
        launched = int(stub.n_launches)
        for buffer, error in (
            (halves, errors.ArgumentError), (theirs, errors.ArgumentError),
            (gone, errors.ClosedError), (part, errors.ClosedError),
        ):  # fmt: skip
            with pytest.raises(error):
                launch(s, CONFIG, kernel, buffer, *more)
            launch(s, CONFIG, kernel, view, *more)
        assert int(stub.n_launches) == launched + 4
        theirs.close()


def test_the_use_on_another_stream_is_noted(rig: Any, stub: Any) -> None:
    kernel, s, t, a, e = rig
    stub.n_params = 5
    for stream in (s, s, t, t, s):
        launch(stream, CONFIG, kernel, a, 1, 2, 3.0, e)
        assert a.storage.last is stream and stream in a.storage.streams
        assert int(native.ffi.cast("uintptr_t", stub.stream)) == stream.handle
    assert a.storage.streams == {s, t}


def test_attributes_that_were_broken_reach_no_driver(rig: Any, stub: Any) -> None:
    """What compiled code reads without Python is checked there too."""
    kernel, s, _, a, e = rig
    stub.n_params = 5
    launch(s, CONFIG, kernel, a, 1, 2, 3.0, e)
    before = int(stub.n_launches)
    alike: Any = Buffer.__new__(Buffer)  # with what is compared at the places of an allocation
    alike._storage, alike.dtype, alike.ptr = True, s.context, s
    for name, value in (
        ("_storage", object()), ("_storage", alike), ("ptr", "x"), ("ptr", -1), ("ptr", 2**64),
    ):  # fmt: skip
        view = a.view(0, 4, np.float32)
        setattr(view, name, value)
        with pytest.raises((AttributeError, struct.error)):
            launch(s, CONFIG, kernel, view, 1, 2, 3.0, e)
        view = a.view(0, 4, np.float32)
        delattr(view, name)
        with pytest.raises(AttributeError):
            launch(s, CONFIG, kernel, view, 1, 2, 3.0, e)
    assert int(stub.n_launches) == before


def test_views_and_allocations_end_with_their_last_reference(dev: Device) -> None:
    s = dev.stream(name="ends")
    gc.collect()
    of_types = [sys.getrefcount(cls) for cls in (Buffer, Storage)]
    for _ in range(200):
        whole = dev.empty(4, np.float32, s)
        part = whole.view(0, 2, np.float32)
        gone = [weakref.ref(x) for x in (whole, part, whole.storage)]
        whole.close()
        del whole, part
        assert [ref() for ref in gone] == [None, None, None]
    assert [sys.getrefcount(cls) for cls in (Buffer, Storage)] == of_types
    # A cycle through what compiled code holds is found by the collector.
    whole = dev.empty(4, np.float32, s)
    found = weakref.ref(whole.storage)
    whole.storage.cycle = whole
    whole.close()
    del whole
    gc.collect()
    assert found() is None
    s.close()
