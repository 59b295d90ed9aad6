"""How products are divided among blocks of threads: by shape alone where bits are concerned."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import Bench
from products import FORMATS, bits, stored, upload

from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model_tiles import slice_blocks


def test_slices_are_a_function_of_the_shape_and_cover_it():
    for shape in (ops._QKV, ops._GATED, ops._ADDED, ops._ADDED_TWO, ops._ADDED_LATE):
        for n_in in (32, 64, 576, 1536, 2400, 8192):
            size = slice_blocks(n_in, shape.n_slices, shape.at_once)
            n = -(-(n_in // 32) // size)
            assert 1 <= n <= shape.n_slices and (n - 1) * size < n_in // 32 <= n * size
            assert size % shape.at_once == 0
        assert slice_blocks(576, shape.n_slices) == 1, "a block per warp"
    assert slice_blocks(1536, 24) == slice_blocks(1536, 24, 2) == 2


def test_a_sum_loads_its_kernels_of_every_shape(rng):
    """A step is run once before it is captured, where its launches may start early or not."""
    from memra_lowlevel import Device

    registry = ops.registry
    with Device("host") as device:
        bench = Bench(device, device.stream(name="once"))
        matrix = upload(bench, stored(rng, 32, 32, "q8_0"), "q8_0")
        h = bench.put(np.zeros((1, 32), np.float32))
        ops.add_product(bench.stream, matrix, bench.put(np.ones((1, 32), np.float32)), h, 1)
        loaded = {key[2] for key in device.memo if key[0] == registry.__name__}
    assert {e for e in registry.spec("add_product").expressions if "Q8_0" in e} <= loaded


@pytest.mark.parametrize("format", FORMATS)
def test_a_sum_that_starts_early_has_the_same_bits(bench, rng, format, monkeypatch):
    """Other blocks of threads do it then, where a warp has several blocks of columns."""

    def run(n, early):
        h = bench.put(np.zeros((n, 40), np.float32))
        ops.add_product(bench.stream, matrix, x, h, n, programmatic=early)
        return bits(bench.get(h))

    for n_in in (96, 1536, 2400):
        matrix = upload(bench, stored(rng, 40, n_in, format), format)
        x = bench.put(rng.standard_normal((5, n_in)).astype(np.float32))
        for n in (1, 2, 3, 5):
            late = run(n, False)
            # The shape of an early launch, also where there is none.
            with monkeypatch.context() as patch:
                patch.setattr(ops, "_ADDED_LATE", ops._ADDED_TWO)
                assert run(n, False) == late, (n_in, n)
            assert run(n, True) == late, (n_in, n)


def test_rows_go_to_more_blocks_where_multiprocessors_have_nothing_to_do():
    """SmolLM2 on 132 multiprocessors: outputs in 30, 36, 96 and 36 blocks; see _BUSY_THREADS."""
    limits = SimpleNamespace(n_sms=132)
    gpu = SimpleNamespace(kind="cuda", arch="sm_90", limits=limits)
    host = SimpleNamespace(kind="host", arch="host", limits=limits)

    kernel = SimpleNamespace(attributes={"max_threads_per_block": 1024})

    def cut_of(device, shape, n_out, n_in, n):
        return ops._Cut(device, kernel, shape, ops.TiledMatrix("f16", n_out, n_in, None), n, False)

    def groups(shape, n_out, n_in, device=gpu):
        cuts = {n: cut_of(device, shape, n_out, n_in, n) for n in (1, 2, 5, 16)}
        for n, cut in cuts.items():
            assert cut.config.grid[1] == -(-n // cut.group)
            assert cut.config.shared_bytes // cut.group == cuts[1].config.shared_bytes
        return [cut.group for cut in cuts.values()]

    # No row is refused by the launch, in its words, as on the host device.
    for device in (gpu, host):
        none = cut_of(device, ops._ADDED, 64, 64, 0)
        assert none.group == 1 and none.config.grid[1] == 0
    # As many more blocks as there is room for, but four rows cost one of them as much as one.
    assert groups(ops._QKV, 960, 576) == [1, 2, 4, 4]
    assert groups(ops._ADDED, 576, 576) == [1, 2, 4, 8]
    assert groups(ops._ADDED_TWO, 576, 1536) == [1, 2, 2, 6]  # two rows cost as much as one
    assert groups(ops._GATED, 1536, 576) == [1, 2, 5, 16]  # there are blocks enough
    assert groups(ops._QKV, 4800, 576) == [1, 2, 5, 12]  # shared memory takes 15 rows
    assert groups(ops._ADDED, 576, 576, host) == [1, 2, 5, 16]
