"""Launches: arguments and configurations are checked against the loaded kernel, then run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memra_lowlevel import (
    Device,
    LaunchConfig,
    Stream,
    compile_source,
    errors,
    launch,
    launch_many,
    prepare,
)
from memra_lowlevel.runtime import occupancy

ONE = LaunchConfig(1, 64)


@pytest.fixture
def xy(device: Device, stream: Stream) -> Any:
    x = np.random.default_rng().random(64, np.float32)
    bx = device.from_numpy(x, stream, name="x")
    by = device.zeros(64, np.float32, stream, name="y")
    yield x, bx, by
    bx.close()
    by.close()


def _still_works(stream: Stream, kernels: Any, xy: Any) -> None:
    x, bx, by = xy
    by.fill(stream, 0)
    launch(stream, ONE, kernels.axpy, bx, by, None, 2.0, 64)
    assert np.array_equal(by.to_numpy(stream), 2 * x)


def test_launch_with_and_without_a_nullable_pointer(
    device: Device, stream: Stream, kernels: Any, xy: Any
) -> None:
    x, bx, by = xy
    n = device.from_numpy(np.array([3], np.int32), stream)
    launch(stream, ONE, kernels.axpy, bx, by, n, 2.0, 64)
    assert np.array_equal(by.to_numpy(stream), (2 * x) + np.float32(3))
    n.close()
    _still_works(stream, kernels, xy)


def test_config_as_a_mapping(stream: Stream, kernels: Any, xy: Any) -> None:
    x, bx, by = xy
    launch(stream, {"grid": (1, 1), "block": 64}, kernels.axpy, bx, by, None, 2.0, 64)
    assert np.array_equal(by.to_numpy(stream), 2 * x)


def test_scalars_arrive_bit_for_bit(device: Device, stream: Stream, kernels: Any) -> None:
    out = device.zeros(5, np.uint8, stream)
    launch(stream, ONE, kernels.scalars, out, -3, 0xAB00, 0x7F << 40, 0.1, True)
    assert out.to_numpy(stream).tolist() == [253, 0xAB, 0x7F, 1, 1]
    launch(
        stream, ONE, kernels.scalars, out, np.int8(-4), np.uint16(0xCD00), np.int64(5),
        np.float64(0.1), np.bool_(False),
    )  # fmt: skip
    assert out.to_numpy(stream).tolist() == [252, 0xCD, 0, 1, 0]
    out.close()


def test_float_arguments_are_rounded_to_the_declared_type(
    device: Device, stream: Stream, kernels: Any
) -> None:
    """A Python float for a float parameter is one float, never a double over two slots."""
    one = device.from_numpy(np.ones(64, np.float32), stream)
    y = device.zeros(64, np.float32, stream)
    for value in (0.1, np.float32(0.1), np.float64(0.1), 3, np.int64(3)):
        y.fill(stream, 0)
        launch(stream, ONE, kernels.axpy, one, y, None, value, 64)
        assert (y.to_numpy(stream) == np.float32(value)).all()
    for value in (float("inf"), float("nan"), -0.0):
        y.fill(stream, 0)
        launch(stream, ONE, kernels.axpy, one, y, None, value, 64)
        want = np.zeros(64, np.float32) + np.float32(value)
        assert np.array_equal(y.to_numpy(stream), want, equal_nan=True)
    one.close()
    y.close()


def test_bad_arguments_are_refused_by_name(
    device: Device, stream: Stream, kernels: Any, xy: Any
) -> None:
    _, bx, by = xy
    wrong_dtype = device.zeros(64, np.int32, stream, name="ints")
    before = device.driver.counts().get("cuLaunchKernel", 0)
    cases: list[tuple[tuple[Any, ...], int, str, str]] = [
        ((bx, by, None, 2.0), -1, "", "5 arguments"),
        ((bx, by, None, 2.0, 64, 1), -1, "", "5 arguments"),
        ((None, by, None, 2.0, 64), 0, "x", "NULLABLE"),
        ((wrong_dtype, by, None, 2.0, 64), 0, "x", "buffer of int32"),
        ((np.zeros(64, np.float32), by, None, 2.0, 64), 0, "x", "host memory"),
        ((bx.ptr, by, None, 2.0, 64), 0, "x", "no owner"),
        ((bx, by, bx, 2.0, 64), 2, "len_d", "buffer of float32"),
        ((bx, by, None, "2", 64), 3, "a", "str"),
        ((bx, by, None, True, 64), 3, "a", "truth"),
        ((bx, by, None, 1e39, 64), 3, "a", "too large"),
        ((bx, by, None, 1 + 1j, 64), 3, "a", "complex"),
        ((bx, by, None, 2.0, 64.0), 4, "n", "float"),
        ((bx, by, None, 2.0, True), 4, "n", "truth"),
        ((bx, by, None, 2.0, 1 << 31), 4, "n", "outside"),
        ((bx, by, None, 2.0, -(1 << 31) - 1), 4, "n", "outside"),
        ((bx, by, None, 2.0, None), 4, "n", "NoneType"),
        ((bx, by, None, bx, 64), 3, "a", "Buffer"),
    ]
    for args, index, name, text in cases:
        with pytest.raises(errors.ArgumentError, match=text) as caught:
            launch(stream, ONE, kernels.axpy, *args)
        assert (caught.value.kernel, caught.value.index, caught.value.name) == ("axpy", index, name)
        assert "test_runtime_launch.py" in str(caught.value)
        with pytest.raises(errors.ArgumentError, match=text):
            prepare(device, ONE, kernels.axpy, *args)
    assert device.driver.counts().get("cuLaunchKernel", 0) == before
    wrong_dtype.close()
    with pytest.raises(errors.ClosedError, match=r"put: argument 0 \(.* out\): buffer 'ints'"):
        launch(stream, ONE, kernels.put, wrong_dtype, 1)
    _still_works(stream, kernels, xy)


@pytest.mark.parametrize(
    ("kernel_arg", "bad"),
    [(1, 128), (1, -129), (2, -1), (2, 65536), (3, 1 << 63), (5, 1)],
)
def test_integer_ranges_of_each_width(
    device: Device, stream: Stream, kernels: Any, kernel_arg: int, bad: int
) -> None:
    out = device.zeros(5, np.uint8, stream)
    args: list[Any] = [out, 1, 2, 3, 0.1, True]
    args[kernel_arg] = bad
    with pytest.raises(errors.ArgumentError) as caught:
        launch(stream, ONE, kernels.scalars, *args)
    assert caught.value.index == kernel_arg
    out.close()


def test_half_precision_buffers_pass_as_their_bits(
    device: Device, stream: Stream, kernels: Any
) -> None:
    h = np.random.default_rng().standard_normal(64).astype(np.float16)
    x, y = device.from_numpy(h, stream), device.zeros(64, np.uint16, stream)
    launch(stream, ONE, kernels.halves, x, y, 64)
    assert y.to_numpy(stream).tobytes() == h.tobytes()
    signed = device.zeros(64, np.int16, stream)
    with pytest.raises(errors.ArgumentError, match="int16"):
        launch(stream, ONE, kernels.halves, signed, y, 64)
    for b in (x, y, signed):
        b.close()


def test_pinned_memory_is_an_argument(device: Device, stream: Stream, kernels: Any) -> None:
    p = device.pinned(1, np.int32)
    launch(stream, ONE, kernels.put, p, 42)
    stream.sync()
    assert p.array[0] == 42
    p.close()


def test_limits_are_refused_by_name(device: Device, stream: Stream, kernels: Any, xy: Any) -> None:
    _, bx, by = xy
    limits = device.limits
    cases = [
        (LaunchConfig(0, 64), "grid.x"),
        (LaunchConfig((1, limits.grid[1] + 1), 64), "grid.y"),
        (LaunchConfig((1, 1, limits.grid[2] + 1), 64), "grid.z"),
        (LaunchConfig(limits.grid[0] + 1, 64), "grid.x"),
        (LaunchConfig(1, 0), "block.x"),
        (LaunchConfig(1, (1, 1, limits.block[2] + 1)), "block.z"),
        (LaunchConfig(1, (32, limits.threads_per_block // 16)), "threads per block"),
        (LaunchConfig(1, 64, limits.shared_optin_bytes + 1), "shared_bytes"),
        (LaunchConfig(1, 64, -1), "shared_bytes"),
    ]
    if device.kind == "host":
        cases += [
            (LaunchConfig(1, 64, cluster=1), "cluster"),
            (LaunchConfig(1, 64, cooperative=True), "cooperative launch"),
            (LaunchConfig(1, 64, programmatic=True), "programmatic launch"),
        ]
    else:
        cases += [
            (LaunchConfig(16, 64, cluster=16), "cluster"),
            (LaunchConfig(3, 64, cluster=2), "cluster.x"),
            (LaunchConfig(1 << 20, 64, cooperative=True), "cooperative grid"),
        ]
    for config, what in cases:
        with pytest.raises(errors.LaunchLimit) as caught:
            launch(stream, config, kernels.axpy, bx, by, None, 2.0, 64)
        assert caught.value.what == what, caught.value
    with pytest.raises(errors.ArgumentError, match="extents"):
        LaunchConfig((1, 1, 1, 1), 1)
    _still_works(stream, kernels, xy)


@pytest.mark.parametrize("kib", [16, 48, 64])
def test_large_shared_memory_is_opted_into(
    device: Device, stream: Stream, kernels: Any, kib: int
) -> None:
    n_bytes = kib << 10
    if n_bytes > device.limits.shared_optin_bytes:
        n_bytes = device.limits.shared_optin_bytes
    n = n_bytes // 4
    out = device.zeros(1, np.float32, stream)
    launch(stream, LaunchConfig(1, 64, n_bytes), kernels.shared_sum, out, n)
    total = np.float32(0)
    for i in range(n):
        total += np.float32(i)
    assert out.to_numpy(stream)[0] == total
    out.close()


def test_static_shared_memory_counts_towards_the_limit(device: Device, stream: Stream) -> None:
    source = """#include "common/device.cuh"
    KERNEL void both(float* out) {
        __shared__ float fixed[1024];
        DYN_SMEM(float, tile);
        fixed[threadIdx.x] = 1.0f; tile[threadIdx.x] = 2.0f;
        __syncthreads();
        if (threadIdx.x == 0) out[0] = fixed[1] + tile[1];
    }"""
    image = compile_source(source, arch=device.arch, name="both.cu")
    module = device.module(image)
    kernel = module.kernel("both")
    static = kernel.attributes["shared_size_bytes"]
    out = device.zeros(1, np.float32, stream)
    if device.kind == "cuda":
        assert static == 4096
    # Exactly 48 KiB of dynamic memory, which the static part pushes over the driver's limit.
    launch(stream, LaunchConfig(1, 32, (48 << 10)), kernel, out)
    assert out.to_numpy(stream)[0] == 3
    with pytest.raises(errors.LaunchLimit, match="static"):
        room = device.limits.shared_optin_bytes - static
        launch(stream, LaunchConfig(1, 32, room + 1), kernel, out)
    out.close()
    module.close()


def test_a_block_beyond_the_launch_bounds_of_its_kernel(device: Device, stream: Stream) -> None:
    source = """#include "common/device.cuh"
    template <int WARPS>
    __global__ void __launch_bounds__(WARPS * 32) count(int32_t* out) { atomicAdd(out, 1); }
    """
    image = compile_source(source, name_expressions=["count<3>"], arch=device.arch, name="count.cu")
    module = device.module(image)
    kernel = module.kernel("count<3>")
    assert kernel.attributes["max_threads_per_block"] == 96
    out = device.zeros(1, np.int32, stream)
    n_calls = device.driver.counts()["cuLaunchKernel"]
    for make in (launch, prepare):
        with pytest.raises(errors.LaunchLimit) as caught:
            make(stream, LaunchConfig(1, (32, 4)), kernel, out)
        assert caught.value.what == "threads per block"
        assert (caught.value.limit, caught.value.got) == (96, 128)
        for words in ("count<3>", "at most 96", "__launch_bounds__", "smaller blocks"):
            assert words in str(caught.value)
    assert device.driver.counts()["cuLaunchKernel"] == n_calls
    launch(stream, LaunchConfig(1, (32, 3)), kernel, out)
    assert out.to_numpy(stream)[0] == 96
    out.close()
    module.close()


def test_kernels_and_streams_of_different_devices(stream: Stream, kernels: Any, xy: Any) -> None:
    _, bx, by = xy
    with Device("host:1") as other:
        s = other.stream(name="elsewhere")
        with pytest.raises(errors.ArgumentError, match="another device"):
            launch(s, ONE, kernels.axpy, bx, by, None, 1.0, 64)
        p = prepare(stream, ONE, kernels.axpy, bx, by, None, 1.0, 64)
        with pytest.raises(errors.ArgumentError, match="host:1"):
            p.launch(s)
        far = other.zeros(64, np.float32, s, name="far")
        with pytest.raises(errors.ArgumentError, match="a buffer of host:1") as caught:
            launch(stream, ONE, kernels.axpy, far, by, None, 1.0, 64)
        assert caught.value.index == 0
        far.close()
        s.close()


# -- prepared launches --------------------------------------------------------------------------


def test_prepared_launches_repeat_and_change(device: Device, stream: Stream, kernels: Any) -> None:
    out = device.from_numpy(np.array([1], np.int32), stream)
    p = prepare(device, ONE, kernels.shift, out, 5)
    value = 1
    for by in (5, 5, 5):
        p.launch(stream)
        value = value * 3 + by
    assert out.to_numpy(stream)[0] == value
    p.set("by", -2)
    assert (p.get("by"), p.get(0)) == (-2, out.ptr)
    p.launch(stream)
    assert out.to_numpy(stream)[0] == value * 3 - 2
    other = device.from_numpy(np.array([10], np.int32), stream)
    p.set(0, other)
    p.launch(stream)
    assert other.to_numpy(stream)[0] == 28
    for which, bad in (("by", 1 << 40), (0, None), (0, 7)):
        with pytest.raises(errors.ArgumentError):
            p.set(which, bad)
    with pytest.raises(errors.ArgumentError, match="no parameter 'nope'"):
        p.set("nope", 1)
    p.launch(stream)
    assert other.to_numpy(stream)[0] == 28 * 3 - 2
    out.close()
    other.close()


def test_exchanged_operands_are_forgotten_and_new_ones_noted(
    device: Device, stream: Stream, kernels: Any
) -> None:
    first = device.zeros(1, np.int32, stream, name="first")
    p = prepare(device, ONE, kernels.put, first, 5)
    p.launch(stream)
    p.launch(stream)
    maker = device.stream(name="maker")
    for through in (p.launch, lambda s: launch_many(s, [p])):
        second = device.zeros(1, np.int32, maker, name="second")
        stream.wait(maker)
        p.set("out", second)
        through(stream)
        # Closing must wait for this stream, so it must have been noted.
        assert stream in second.storage.streams
        assert second.to_numpy(stream)[0] == 5
        first.close()
        first = second
        p.launch(stream)
    first.close()
    with pytest.raises(errors.ClosedError, match="second"):
        p.launch(stream)
    maker.close()


def test_parameters_are_taken_at_the_launch(device: Device, stream: Stream, kernels: Any) -> None:
    """Changing a prepared launch must not reach launches that have not run yet."""
    out = device.from_numpy(np.array([0], np.int32), stream)
    p = prepare(device, ONE, kernels.shift, out, 1)
    value = 0
    for by in range(20):
        p.set("by", by)
        p.launch(stream)
        value = value * 3 + by
    assert out.to_numpy(stream)[0] == np.int64(value).astype(np.int32)
    out.close()


def test_prepared_launch_on_many_streams(device: Device, stream: Stream, kernels: Any) -> None:
    other = device.stream(name="other")
    out = device.from_numpy(np.array([0], np.int32), stream)
    p = prepare(device, ONE, kernels.shift, out, 1)
    value = 0
    for i in range(6):
        s = (stream, other)[i % 2]
        p.launch(s)
        s.sync()
        value = value * 3 + 1
    assert out.to_numpy(stream)[0] == value
    assert {stream, other} <= out.storage.streams
    other.close()
    with pytest.raises(errors.ClosedError, match="other"):
        p.launch(other)
    out.close()


def test_prepared_launch_refuses_closed_operands(
    device: Device, stream: Stream, kernels: Any
) -> None:
    out = device.zeros(1, np.int32, stream, name="operand")
    p = prepare(device, ONE, kernels.put, out, 5)
    p.launch(stream)
    out.close()
    before = device.driver.counts()["cuLaunchKernel"]
    for act in (lambda: p.launch(stream), lambda: launch_many(stream, [p])):
        with pytest.raises(errors.ClosedError, match="operand"):
            act()
    assert device.driver.counts()["cuLaunchKernel"] == before


def test_launch_many_launches_all_or_none(device: Device, stream: Stream, kernels: Any) -> None:
    out = device.from_numpy(np.array([1], np.int32), stream)
    doomed = device.zeros(1, np.int32, stream, name="doomed")
    ps = [prepare(device, ONE, kernels.shift, out, i) for i in range(4)]
    bad = prepare(device, ONE, kernels.put, doomed, 1)
    value = 1
    for _ in range(2):
        launch_many(stream, ps)
        for i in range(4):
            value = value * 3 + i
    assert out.to_numpy(stream)[0] == value
    launch_many(stream, [])
    doomed.close()
    with pytest.raises(errors.ClosedError, match="doomed"):
        launch_many(stream, [*ps, bad])
    assert out.to_numpy(stream)[0] == value
    out.close()


def test_every_launch_is_counted_and_traced(
    device: Device, stream: Stream, kernels: Any, path: str
) -> None:
    out = device.zeros(1, np.int32, stream)
    p = prepare(device, ONE, kernels.put, out, 5)
    before = device.driver.counts().get("cuLaunchKernel", 0)
    for _ in range(10):
        p.launch(stream)
        launch(stream, ONE, kernels.put, out, 1)
    launch_many(stream, [p] * 5)
    assert device.driver.counts()["cuLaunchKernel"] == before + 25
    last = device.driver.trace.entries(5)
    assert [(e.call, e.kernel, e.stream) for e in last] == [("cuLaunchKernel", "put", "test")] * 5
    assert [e.t_us for e in last] == sorted(e.t_us for e in last)
    assert all("test_runtime_launch.py" in e.where for e in last)
    out.close()


def test_occupancy_is_positive(kernels: Any) -> None:
    assert occupancy(kernels.axpy, LaunchConfig(1, 128)) >= 1


def test_closed_modules_drop_their_kernels(device: Device, stream: Stream) -> None:
    source = '#include "common/device.cuh"\nKERNEL void one(int32_t* p) { p[0] = 1; }\n'
    module = device.module(compile_source(source, arch=device.arch, name="one.cu"))
    kernel = module.kernel("one")
    out = device.zeros(1, np.int32, stream)
    launch(stream, LaunchConfig(1, 1), kernel, out)
    assert out.to_numpy(stream)[0] == 1
    prepared = prepare(device, LaunchConfig(1, 1), kernel, out)
    prepared.launch(stream)
    stream.sync()
    module.close()
    module.close()
    assert module.closed
    for act in (
        lambda: launch(stream, LaunchConfig(1, 1), kernel, out),
        lambda: prepare(device, LaunchConfig(1, 1), kernel, out),
        lambda: prepared.launch(stream),
        lambda: module.kernel("one"),
    ):
        with pytest.raises(errors.ClosedError, match=r"one\.cu"):
            act()
    out.close()
