"""Sharing memory with other libraries: DLPack both ways, the CUDA array interface."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device, LaunchConfig, Stream, errors, launch
from memra_lowlevel.runtime import dlpack


@pytest.fixture
def host(device: Device) -> Device:
    """Shares memory with NumPy, so it is on the CPU."""
    return device


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "bool"]
)
def test_numpy_sees_a_buffer_without_a_copy(host: Device, stream: Stream, dtype: str) -> None:
    a = np.random.default_rng().integers(0, 2, (3, 4)).astype(dtype)
    b = host.from_numpy(a, stream)
    # No synchronisation here: the export orders the copy before the reader.
    seen = np.from_dlpack(b)
    assert seen.dtype == a.dtype and seen.shape == a.shape and np.array_equal(seen, a)
    assert seen.ctypes.data == b.ptr
    b.close()
    del seen


def test_exported_memory_lives_as_long_as_the_consumer(host: Device, stream: Stream) -> None:
    frees = lambda: host.driver.counts().get("cuMemFreeAsync", 0)  # noqa: E731
    b = host.from_numpy(np.arange(32, dtype=np.int32), stream)
    seen = np.from_dlpack(b)
    before = frees()
    b.close()
    del b
    gc.collect()
    stream.sync()
    assert frees() == before and seen.tolist() == list(range(32))
    del seen
    gc.collect()
    stream.sync()
    assert frees() == before + 1


def test_unused_capsules_give_the_memory_back(host: Device, stream: Stream) -> None:
    b = host.zeros(4, np.float32, stream)
    for version in (None, (1, 0), (0, 8)):
        capsule = b.__dlpack__(max_version=version)
        assert ("versioned" in repr(capsule)) == (version == (1, 0))
        exported = len(dlpack._exports)
        del capsule
        gc.collect()
        assert len(dlpack._exports) == exported - 1
    b.close()


def test_old_and_new_capsules_round_trip(host: Device, stream: Stream) -> None:
    b = host.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3), stream)
    for version in (None, (1, 0)):
        capsule = b.__dlpack__(max_version=version)
        taken = dlpack.take(capsule)
        assert (taken.ptr, taken.shape, taken.dtype) == (b.ptr, (2, 3), np.float32)
        with pytest.raises(errors.ArgumentError, match="consumed"):
            dlpack.take(capsule)
        exported = len(dlpack._exports)
        taken.release()
        assert len(dlpack._exports) == exported - 1
    b.close()


def test_kernels_write_into_numpy_memory(host: Device, stream: Stream, kernels: Any) -> None:
    a = np.zeros(64, np.float32)
    x = host.from_numpy(np.ones(64, np.float32), stream)
    y = host.wrap(a, stream, name="theirs")
    assert y.ptr == a.ctypes.data and y.storage.space == "external"
    launch(stream, LaunchConfig(1, 64), kernels.axpy, x, y, None, 2.5, 64)
    stream.sync()
    assert (a == 2.5).all()
    x.close()
    y.close()


def test_wrapped_memory_keeps_its_owner_until_its_work_is_done(
    host: Device, stream: Stream, kernels: Any
) -> None:
    class Owner(np.ndarray):  # type: ignore[type-arg]
        pass

    a = np.zeros(64, np.float32).view(Owner)
    gone = weakref.ref(a)
    y = host.wrap(a, stream)
    x = host.from_numpy(np.ones(64, np.float32), stream)
    launch(stream, LaunchConfig(1, 64), kernels.axpy, x, y, None, 1.0, 64)
    del a
    gc.collect()
    assert gone() is not None
    y.close()
    stream.sync()
    gc.collect()
    assert gone() is None
    x.close()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: np.zeros((4, 4), np.float32).T, "strides"),
        (lambda: np.zeros((4, 4), np.float32)[:, ::2], "strides"),
        (lambda: np.zeros(4, np.complex64), "not supported"),
        (lambda: [1, 2, 3], "neither"),
    ],
)
def test_what_cannot_be_wrapped_is_named(
    host: Device, stream: Stream, make: Any, text: str
) -> None:
    with pytest.raises(errors.ArgumentError, match=text):
        host.wrap(make(), stream)


def test_export_refusals(host: Device, stream: Stream) -> None:
    b = host.zeros(4, np.float32, stream, name="exported")
    with pytest.raises(BufferError, match="device"):
        b.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="copy"):
        b.__dlpack__(copy=True)
    assert b.__dlpack_device__() == (1, 0)
    assert not hasattr(b, "__cuda_array_interface__")
    with stream.capture("g") as graph, pytest.raises(errors.CaptureForbidden, match="exported"):
        b.__dlpack__()
    graph.close()
    assert np.from_dlpack(b).tolist() == [0] * 4
    b.close()
    with pytest.raises(errors.ClosedError, match="exported"):
        b.__dlpack__()


def test_strides_of_ones_and_zeros_do_not_matter(host: Device, stream: Stream) -> None:
    a = np.zeros((5, 1, 3), np.float32)[:, :, :]
    b = host.wrap(a, stream)
    assert b.shape == (5, 1, 3)
    b.close()


@pytest.mark.gpu
def test_cuda_array_interface(stream: Stream) -> None:
    with Device("cuda:0") as dev:
        s = dev.stream(name="s")
        b = dev.from_numpy(np.arange(8, dtype=np.float32), s)
        interface = b.__cuda_array_interface__
        assert interface["data"] == (b.ptr, False) and interface["stream"] == s.handle
        w = dev.wrap(type("Foreign", (), {"__cuda_array_interface__": interface})(), s)
        assert w.ptr == b.ptr and w.to_numpy(s).tolist() == list(range(8))
        for thing in (w, b, s):
            thing.close()
