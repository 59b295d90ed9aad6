"""Buffers, pinned buffers, arenas: contents, order, refusals, lifetimes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, Stream, errors, launch
from memra_lowlevel.runtime.memory import Buffer


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "float32", "float64", "int64"])
def test_round_trip_is_bitwise(
    device: Device, stream: Stream, rng: np.random.Generator, dtype: str
) -> None:
    a = np.frombuffer(rng.bytes(3 * 5 * np.dtype(dtype).itemsize), dtype).reshape(3, 5)
    b = device.from_numpy(a, stream, name="round trip")
    assert (b.shape, b.dtype, b.n_bytes, b.device) == (a.shape, a.dtype, a.nbytes, device)
    back = b.to_numpy(stream)
    assert back.tobytes() == a.tobytes() and back.shape == a.shape
    b.close()


def test_the_source_array_may_change_at_once(device: Device, stream: Stream) -> None:
    a = np.arange(1 << 16, dtype=np.int32)
    b = device.empty(a.shape, a.dtype, stream)
    b.copy_from(stream, a)
    want = a.copy()
    a[:] = -1
    assert np.array_equal(b.to_numpy(stream), want)
    b.close()


def test_strided_sources_are_copied_in_order(device: Device, stream: Stream) -> None:
    a = np.arange(24, dtype=np.int32).reshape(4, 6)
    b = device.from_numpy(a.T, stream)
    assert np.array_equal(b.to_numpy(stream), a.T)
    b.close()


def test_zeros_and_fill(device: Device, stream: Stream) -> None:
    b = device.zeros((2, 7), np.float32, stream)
    assert (b.to_numpy(stream) == 0).all()
    b.fill(stream, 0xFF)
    assert b.to_numpy(stream).tobytes() == b"\xff" * 56
    with pytest.raises(errors.ArgumentError, match="256"):
        b.fill(stream, 256)
    b.close()


def test_empty_buffers_are_legal(device: Device, stream: Stream) -> None:
    b = device.zeros((0, 3), np.float32, stream)
    assert b.to_numpy(stream).shape == (0, 3)
    b.copy_from(stream, np.empty((0, 3), np.float32))
    b.close()


def test_views_share_memory_and_are_checked(device: Device, stream: Stream) -> None:
    b = device.zeros(16, np.int32, stream)
    v = b.view(16, (2, 2), np.int32)
    v.copy_from(stream, np.array([[1, 2], [3, 4]], np.int32))
    assert b.to_numpy(stream)[4:8].tolist() == [1, 2, 3, 4]
    assert v.ptr == b.ptr + 16
    for offset, shape, dtype in ((60, 2, "i4"), (-4, 1, "i4"), (2, 1, "i4"), (0, 17, "i4")):
        with pytest.raises(errors.ArgumentError, match="view"):
            b.view(offset, shape, dtype)
    with pytest.raises(errors.ArgumentError, match="negative"):
        b.view(0, -1, "u1")
    b.close()
    with pytest.raises(errors.ClosedError):
        v.to_numpy(stream)
    assert v.closed


def test_closing_a_view_leaves_the_rest(device: Device, stream: Stream) -> None:
    b = device.zeros(4, np.int32, stream)
    v = b.view(0, 2, np.int32)
    v.close()
    assert v.closed and not b.closed
    assert b.to_numpy(stream).tolist() == [0] * 4
    b.close()


@pytest.mark.parametrize("source", ["numpy", "buffer", "pinned"])
def test_mismatched_copies_are_refused(device: Device, stream: Stream, source: str) -> None:
    b = device.zeros(4, np.int32, stream)

    def other(n: int, dtype: Any) -> Any:
        if source == "numpy":
            return np.zeros(n, dtype)
        return device.zeros(n, dtype, stream) if source == "buffer" else device.pinned(n, dtype)

    for n, dtype in ((5, np.int32), (4, np.float32), (8, np.int16)):
        src = other(n, dtype)
        with pytest.raises(errors.ArgumentError, match="dtypes and sizes must agree"):
            b.copy_from(stream, src)
        if source != "numpy":
            src.close()
    assert b.to_numpy(stream).tolist() == [0] * 4
    b.close()


def test_copy_to_refuses_arrays_it_cannot_fill(device: Device, stream: Stream) -> None:
    b = device.zeros((2, 2), np.int32, stream)
    frozen = np.zeros((2, 2), np.int32)
    frozen.flags.writeable = False
    with pytest.raises(errors.ArgumentError, match="writable"):
        b.copy_to(stream, frozen)
    with pytest.raises(errors.ArgumentError, match="C-contiguous"):
        b.copy_to(stream, np.zeros((2, 2), np.int32).T)
    b.close()


def test_device_to_device_copies(device: Device, stream: Stream) -> None:
    a = device.from_numpy(np.arange(100, dtype=np.float32), stream)
    b = device.empty(100, np.float32, stream)
    a.copy_to(stream, b)
    assert np.array_equal(b.to_numpy(stream), np.arange(100, dtype=np.float32))
    a.close()
    b.close()


def test_copies_between_devices_and_wrong_streams(path: str) -> None:
    with Device("host:0") as one, Device("host:1") as two:
        s1, s2 = one.stream(name="first"), two.stream(name="second")
        a = one.from_numpy(np.arange(9, dtype=np.int32), s1, name="on the first")
        b = two.zeros(9, np.int32, s2, name="on the second")
        s1.sync()
        b.copy_from(s2, a)
        assert b.to_numpy(s2).tolist() == list(range(9))
        for act in (
            lambda: a.copy_from(s2, np.zeros(9, np.int32)),
            lambda: a.fill(s2, 0),
            lambda: a.to_numpy(s2),
            lambda: one.alloc(4, s2),
        ):
            with pytest.raises(errors.ArgumentError, match="host:"):
                act()
        for thing in (a, b, s1, s2):
            thing.close()


def test_pinned_copies_are_asynchronous_and_ordered(device: Device, stream: Stream) -> None:
    up, down = device.pinned(8, np.int32), device.pinned(8, np.int32)
    b = device.empty(8, np.int32, stream)
    for i in range(5):
        stream.sync()
        up.array[:] = i
        b.copy_from(stream, up)
        b.copy_to(stream, down)
        stream.sync()
        assert (down.array == i).all()
    part = up.view(4, 2, np.int32)
    part.array[:] = 77
    assert up.array.tolist() == [4, 77, 77, 4, 4, 4, 4, 4]
    for thing in (up, down, b):
        thing.close()


def test_numpy_views_of_pinned_memory_outlive_the_buffer(device: Device, stream: Stream) -> None:
    p = device.pinned(1 << 12, np.int32, name="outlived")
    a = p.array
    a[:] = 5
    p.close()
    with pytest.raises(errors.ClosedError, match="outlived"):
        p.array  # noqa: B018
    del p
    gc.collect()
    # Nobody may get the same memory while the view lives.
    others = [device.pinned(1 << 12, np.int32) for _ in range(4)]
    for other in others:
        other.array[:] = 9
    assert (a == 5).all()
    for other in others:
        other.close()


def test_pinned_memory_is_reused_only_after_its_copies(device: Device, stream: Stream) -> None:
    allocs = lambda: device.driver.counts().get("cuMemHostAlloc", 0)  # noqa: E731
    size = 12344
    p = device.pinned(size, np.uint8)
    address = p.ptr
    b = device.zeros(size, np.uint8, stream)
    p.array[:] = 3
    b.copy_from(stream, p)
    p.close()
    del p
    gc.collect()
    stream.sync()
    before = allocs()
    q = device.pinned(size, np.uint8)
    assert q.ptr == address and allocs() == before
    assert (b.to_numpy(stream) == 3).all()
    q.close()
    b.close()


def test_freed_memory_is_ordered_after_every_stream_that_used_it(
    device: Device, stream: Stream, kernels: Any
) -> None:
    """A use after free would show as a fault or as foreign data in one of the orders."""
    other = device.stream(name="other")
    for _ in range(10):
        x = device.from_numpy(np.ones(64, np.float32), stream)
        y = device.zeros(64, np.float32, stream)
        other.wait(stream)
        launch(other, LaunchConfig(1, 64), kernels.axpy, x, y, None, 2.0, 64)
        x.close()
        out = y.to_numpy(other)
        assert (out == 2).all()
        y.close()
    other.close()


def test_buffers_may_outlive_their_stream(device: Device, kernels: Any) -> None:
    s = device.stream(name="short")
    b = device.zeros(1, np.int32, s)
    launch(s, LaunchConfig(1, 32), kernels.put, b, 7)
    s.close()
    t = device.stream(name="later")
    device.sync()
    assert b.to_numpy(t).tolist() == [7]
    b.close()
    t.close()


def test_arena_slices(device: Device, stream: Stream) -> None:
    with device.arena(4096, name="plan") as arena:
        a = arena.take(10, np.float32, name="a")
        b = arena.take((2, 3), np.int64, align=512, name="b")
        assert a.ptr % 256 == 0 and b.ptr % 512 == 0
        assert b.ptr >= a.ptr + a.n_bytes
        a.fill(stream, 1)
        b.fill(stream, 2)
        assert a.to_numpy(stream).tobytes() == b"\1" * 40
        assert [name for name, _, _ in arena.layout()] == ["a", "b"]
        assert arena.slice_name(b.ptr + 8) == "b" and arena.slice_name(b.ptr + 4096) == ""
        used = arena.used_bytes
        with pytest.raises(errors.OutOfMemory, match=r"plan.*c"):
            arena.take(4096, np.uint8, name="c")
        assert arena.used_bytes == used
        with pytest.raises(errors.ArgumentError, match="alignment 3"):
            arena.take(1, np.uint8, align=3)
        arena.reset()
        assert arena.take(10, np.float32).ptr == a.ptr
    for act in (lambda: a.to_numpy(stream), lambda: arena.take(1, np.uint8)):
        with pytest.raises(errors.ClosedError, match="plan"):
            act()
    with pytest.raises(errors.ArgumentError, match="positive"):
        device.arena(0)


def test_out_of_memory_says_how_much_is_free_and_harms_nothing(
    device: Device, stream: Stream
) -> None:
    with pytest.raises(errors.OutOfMemory, match=r"too much.*free"):
        device.alloc(1 << 60, stream, name="too much")
    b = device.zeros(4, np.int32, stream)
    assert b.to_numpy(stream).tolist() == [0] * 4
    b.close()


def test_out_of_memory_trims_the_pool_and_tries_again(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = device.driver
    real, failures = driver.cuMemAllocAsync, [1]

    def scarce(n_bytes: int, s: int) -> int:
        if failures:
            failures.pop()
            raise errors.OutOfMemory("none left", result="CUDA_ERROR_OUT_OF_MEMORY", code=2)
        return real(n_bytes, s)

    monkeypatch.setattr(driver, "cuMemAllocAsync", scarce)
    before = driver.counts().get("cuMemPoolTrimTo", 0)
    b = device.zeros(4, np.int32, stream)
    assert driver.counts()["cuMemPoolTrimTo"] == before + 1
    assert b.to_numpy(stream).tolist() == [0] * 4
    b.close()


def test_dropped_buffers_go_back(device: Device, stream: Stream) -> None:
    frees = lambda: device.driver.counts().get("cuMemFreeAsync", 0)  # noqa: E731
    before = frees()
    for _ in range(3):
        device.zeros(16, np.int32, stream)
    gc.collect()
    stream.sync()
    assert frees() == before + 3


def test_destructors_after_a_sticky_error_are_counted_and_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    dev = Device("host:2")
    s = dev.stream(name="lost")
    buffers = [dev.alloc(8, s) for _ in range(4)]
    context = dev.ctx

    def lost(ptr: int, stream: int) -> None:
        raise errors.IllegalAddress("address", result="CUDA_ERROR_ILLEGAL_ADDRESS", code=700)

    with monkeypatch.context() as patch:
        patch.setattr(dev.driver, "cuMemFreeAsync", lost)
        for b in buffers:
            b.close()
    assert context.n_lost_destructors == 4
    assert len([r for r in caplog.records if "lost" in r.message]) == 1
    context.lost = ""
    s.close()
    dev.close()


def test_wrong_kinds_of_shape(device: Device, stream: Stream) -> None:
    with pytest.raises(errors.ArgumentError, match="negative"):
        device.zeros((-1,), np.int32, stream)
    b = device.zeros((), np.float32, stream)
    assert isinstance(b, Buffer) and b.to_numpy(stream).shape == ()
    b.close()
