"""Append: bytes equal to the encoders, whatever the formats, widths, rows, slots and order."""

import numpy as np
import pytest
from rig import POISON, Planes, normal

from memra_lowlevel import LaunchConfig, compile_source, errors, launch
from memra_lowlevel.formats import E4M3, F16, F32, FORMATS, Q4_0, Q5_1, Q8_0
from memra_lowlevel.kernels import counters, kv_append
from memra_lowlevel.reference import kv as oracle

PAIRS = [(Q8_0, Q5_1), (Q8_0, Q4_0), (E4M3, E4M3), (F16, F16)]
EVERY_FORMAT = [(f, g) for f, g in zip(FORMATS.values(), reversed(FORMATS.values()), strict=True)]


def check(planes, before, k, v, slot, base=0):
    for plane, old, fmt, rows in zip(
        planes.bytes(), before, (planes.k_format, planes.v_format), (k, v), strict=True
    ):
        assert np.array_equal(plane, oracle.append(old, rows, fmt, slot, base))


@pytest.mark.parametrize(("k_format", "v_format"), EVERY_FORMAT, ids=str)
def test_every_format_on_either_side(stream, k_format, v_format):
    rng = np.random.default_rng(1)
    planes = Planes(stream, 3, 64, 40, k_format, v_format, head_dim_v=32)
    before = planes.bytes()
    k, v = normal(rng, 33, 192), normal(rng, 33, 96)
    k[4, 10], v[7, 95], v[0, 0], k[32, 191] = np.nan, np.inf, -np.inf, 3e38
    k[3, :32], v[3, :32], k[5, 32:64] = 0, -0.0, 1e-6
    planes.set_len(5)
    planes.append(k, v)
    check(planes, before, k, v, 5)


@pytest.mark.parametrize("fmt", [Q8_0, Q5_1, Q4_0, E4M3], ids=str)
def test_blocks_with_ties_zeros_and_tiny_scales(stream, fmt):
    rng = np.random.default_rng(2)
    n = 512
    blocks = rng.standard_normal((n, 32)).astype(np.float32)
    blocks[:128] = rng.integers(-254, 255, (128, 32)) / 2
    blocks[:128, 3] = 127
    blocks[128:192] = rng.integers(0, 63, (64, 32)) / 2
    blocks[128:192, 0], blocks[128:192, 1] = 0, 31
    blocks[192:256] = rng.integers(-32, 33, (64, 32)) / 4
    blocks[192:256, 9], blocks[192:224, 20] = -8, 8
    blocks[256:320] = rng.choice([0.0, -0.0, 1.0, -1.0], (64, 32))
    blocks[320:448] *= np.exp2(rng.integers(-140, 120, (128, 1)).astype(np.float32))
    blocks[448:480] = blocks[448:480, :1]
    wide = blocks.reshape(-1, 128)
    planes = Planes(stream, 1, 128, len(wide), fmt, fmt)
    planes.append(wide, wide[::-1])
    check(planes, planes.bytes(), wide, wide[::-1], 0)
    assert not any((plane == POISON).all() for plane in planes.bytes())


@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize(("width_k", "width_v"), [(96, 96), (192, 192), (256, 128), (64, 1024)])
def test_rows_in_one_launch_equal_rows_one_by_one(stream, n, width_k, width_v):
    rng = np.random.default_rng(n)
    k, v = normal(rng, n, width_k), normal(rng, n, width_v)
    together = Planes(stream, 1, width_k, 40, head_dim_v=width_v)
    before = together.bytes()
    together.set_len(3)
    together.append(k, v)
    single = Planes(stream, 1, width_k, 40, head_dim_v=width_v)
    single.set_len(3)
    for r in range(n):
        single.append(k[r : r + 1], v[r : r + 1])
        counters.add_counters(stream, single.len_d, 1)
    check(together, before, k, v, 3)
    for a, b in zip(together.bytes(), single.bytes(), strict=True):
        assert np.array_equal(a, b)
    assert together.len_d.to_numpy(stream)[0] == 3  # append does not move the counter
    assert single.len_d.to_numpy(stream)[0] == 3 + n


def test_many_rows_share_warps_and_a_table_leads_each_elsewhere(stream):
    """More rows than a device takes at once; the rows of a table go to their planes in reverse."""
    n, rng = 4301, np.random.default_rng(3)
    k, v = normal(rng, n, 96), normal(rng, n, 32)
    planes = Planes(stream, 1, 96, n + 2, head_dim_v=32)
    before = planes.bytes()
    planes.set_len(1)
    planes.append(k, v)
    check(planes, before, k, v, 1)
    table = planes.upload(table_of([planes], [(0, n - 1 - r) for r in range(n)]))
    kv_append.append(
        stream, planes.upload(k), planes.upload(v), None, None, None,
        k_format=Q8_0, v_format=Q5_1, rows=n + 2, table=table,
    )  # fmt: skip
    check(planes, before, k[::-1], v[::-1], 1)


def test_row_sizes_that_are_no_multiple_of_four():
    assert Q8_0.row_bytes(96) == 102 and Q8_0.row_bytes(192) == 204 and Q4_0.row_bytes(32) == 18


def test_a_ring_subtracts_its_base(stream):
    rng = np.random.default_rng(5)
    planes = Planes(stream, 2, 64, 16, ring=True)
    before = planes.bytes()
    planes.set_len(1003, base=1000)
    k, v = normal(rng, 4, 128), normal(rng, 4, 128)
    planes.append(k, v)
    check(planes, before, k, v, 1003, 1000)


def test_rows_without_room_are_dropped_and_told(stream):
    rng = np.random.default_rng(6)
    planes = Planes(stream, 1, 64, 8, ring=True)
    before = planes.bytes()
    fault = kv_append.fault_buffer(stream.device, stream)
    planes.set_len(6)
    k, v = normal(rng, 4, 64), normal(rng, 4, 64)
    planes.append(k, v, fault)
    check(planes, before, k, v, 6)
    with pytest.raises(errors.CapacityExceeded, match="no room"):
        kv_append.raise_if_faulty(stream, fault, 64, 64)
    planes.set_len(6, base=9)  # a base above the slot: below the plane
    before = planes.bytes()
    planes.append(k, v)
    check(planes, before, k, v, 6, 9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS, ids=str)
def test_a_bad_element_is_named_before_anything_is_written(stream, k_format, v_format, bad):
    rng = np.random.default_rng(8)
    planes = Planes(stream, 4, 64, 8, k_format, v_format)
    before = planes.bytes()
    k, v = normal(rng, 3, 256), normal(rng, 3, 256)
    v[1, 200] = bad
    v[2, 3], k[2, 9] = np.nan, np.nan  # later ones are not the first
    fault = kv_append.fault_buffer(stream.device, stream)
    options = {"k_format": k_format, "v_format": v_format, "fault": fault}
    kv_append.check_finite(stream, planes.upload(k), planes.upload(v), **options)
    first = r"row 1 of v, elements 192 to 223, head 3"
    if v_format is E4M3 and np.isfinite(bad):
        first = r"row 2 of k, elements 0 to 31, head 0"  # saturates: reads back finite
    with pytest.raises(errors.ArgumentError, match=first):
        kv_append.raise_if_faulty(stream, fault, 256, 256, head_dim=64)
    assert all(np.array_equal(a, b) for a, b in zip(planes.bytes(), before, strict=True))
    fault.fill(stream, 0)
    clean = normal(rng, 3, 256)
    kv_append.check_finite(stream, planes.upload(clean), planes.upload(clean), **options)
    kv_append.raise_if_faulty(stream, fault, 256, 256)


def test_sequences_of_a_table(stream):
    rng = np.random.default_rng(9)
    planes = [Planes(stream, 2, 64, 12, ring=r) for r in (False, True, False)]
    befores = [p.bytes() for p in planes]
    planes[0].set_len(4)
    planes[1].set_len(103, base=100)
    planes[2].set_len(0)
    of_row = [(0, 0), (1, 0), (1, 1), (2, 0), (0, 1)]
    k, v = normal(rng, 5, 128), normal(rng, 5, 128)
    table = table_of(planes, of_row)
    kv_append.append(
        stream, planes[0].upload(k), planes[0].upload(v), None, None, None,
        k_format=Q8_0, v_format=Q5_1, rows=12, table=planes[0].upload(table),
    )  # fmt: skip
    for i, (p, slot, base) in enumerate(zip(planes, (4, 103, 0), (0, 100, 0), strict=True)):
        mine = [r for r, (owner, _) in enumerate(of_row) if owner == i]
        check(p, befores[i], k[mine], v[mine], slot, base)


def table_of(planes, of_row):
    rows = [
        (planes[i].k.ptr, planes[i].v.ptr, planes[i].len_d.ptr,
         planes[i].base_d.ptr if planes[i].base_d else 0, offset)
        for i, offset in of_row
    ]  # fmt: skip
    return np.array(rows, np.int64).view(np.uint64)


def test_refusals_move_nothing(stream):
    planes = Planes(stream, 2, 64, 8)
    before = planes.bytes()
    good = planes.upload(np.zeros((2, 128), np.float32))

    def call(k=good, v=good, k_plane=planes.k, len_d=planes.len_d, rows=8, **more):
        kv_append.append(
            stream, k, v, k_plane, planes.v, len_d,
            k_format=Q8_0, v_format=Q5_1, rows=rows, **more,
        )  # fmt: skip

    def up(*shape, dtype=np.float32):
        return planes.upload(np.zeros(shape, dtype))

    for bad in (
        {"k": up(2, 100)},
        {"k": up(2, 128, dtype=np.float64)},
        {"v": up(3, 128)},
        {"k": up(256)},
        {"k": good.view(4, (1, 128), np.float32), "v": up(1, 128)},
        {"rows": 9},
        {"k_plane": None},
        {"len_d": None},
        {"table": up(1, 5, dtype=np.uint64)},
    ):
        with pytest.raises(errors.ArgumentError):
            call(**bad)
    assert all(np.array_equal(a, b) for a, b in zip(planes.bytes(), before, strict=True))
    call()  # still usable


def test_counters(stream):
    values = np.arange(300, dtype=np.int32)
    mask = (np.arange(300) % 3 == 0).astype(np.int32)
    block = stream.device.from_numpy(values, stream)
    counters.add_counters(stream, block, -7)
    counters.add_counters(stream, block, 5, mask=stream.device.from_numpy(mask, stream))
    expected = oracle.add_counters(oracle.add_counters(values, -7), 5, mask)
    assert np.array_equal(block.to_numpy(stream), expected)
    one = block.view(4 * 17, (1,), np.int32)
    counters.set_counters(stream, one, 123_456)
    expected[17] = 123_456
    assert np.array_equal(block.to_numpy(stream), expected)
    counters.set_counters(stream, block, -1)
    assert np.array_equal(block.to_numpy(stream), oracle.set_counters(values, -1))


def test_f32_planes_keep_every_bit(stream):
    rng = np.random.default_rng(4)
    x = rng.integers(0, 1 << 32, (5, 64), dtype=np.uint32).view(np.float32)
    planes = Planes(stream, 1, 64, 5, F32, F32)
    planes.append(x, x)
    assert all(plane.tobytes() == x.tobytes() for plane in planes.bytes())


DIVIDED = """#include "common/block32.cuh"
template <int N>
__device__ uint32_t differs(float x) {
  const Scale s = scale_by<N>(x);
  return s.d != x / float(N) || s.id != reciprocal_or_zero(x / float(N));
}
// Every mantissa at one exponent, and every exponent at some mantissas.
KERNEL void divided(uint32_t* n_wrong, uint32_t per_thread) {
  const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * per_thread;
  uint32_t n = 0;
  for (uint32_t i = first; i < first + per_thread; i++) {
    const float x = __uint_as_float(0x3F800000u + i);
    const float y = __uint_as_float((i % 0xFFu) << 23 | (i * 2654435761u) >> 9);
    n += quotient<127>(x) != x / 127.0f || quotient<31>(x) != x / 31.0f || inverse(x) != 1.0f / x;
    n += differs<127>(y) + differs<31>(y);
  }
  if (n != 0) atomicAdd(n_wrong, n);
}
"""


def test_scales_are_quotients_rounded_once(device, stream):
    """For all 2^23 mantissas, and from subnormal to the largest magnitudes."""
    image = compile_source(DIVIDED, arch=device.arch, name="divided.cu")
    with device.module(image) as module, device.zeros(1, np.uint32, stream) as n_wrong:
        config = LaunchConfig(64, 128)
        launch(stream, config, module.kernel("divided"), n_wrong, (1 << 23) // (64 * 128))
        assert n_wrong.to_numpy(stream) == 0
