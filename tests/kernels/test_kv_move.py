"""Moving rows down in place equals a copy through another buffer."""

import numpy as np
import pytest
from rig import Planes

from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner
from memra_lowlevel.formats import F16, F32, Q4_0, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_move
from memra_lowlevel.reference import kv as oracle

MOVES = [(100, 600), (1, 699), (350, 350), (600, 100), (7, 1), (0, 20), (5, 0), (333, 350)]


@pytest.mark.parametrize(("src_row", "n_rows"), MOVES)
@pytest.mark.parametrize(
    ("k_format", "v_format", "width"), [(Q8_0, Q5_1, 96), (Q4_0, Q8_0, 32), (F16, F32, 64)], ids=str
)
def test_rows_move_down(stream, k_format, v_format, width, src_row, n_rows):
    planes = Planes(stream, 1, width, 700, k_format, v_format)
    rng = np.random.default_rng(src_row)
    wanted = []
    for buffer, row_bytes in ((planes.k, planes.k_row), (planes.v, planes.v_row)):
        data = rng.integers(0, 256, (700, row_bytes), dtype=np.uint8)
        buffer.view(0, data.shape, np.uint8).copy_from(stream, data)
        wanted.append(oracle.move_rows(data, src_row, n_rows))
    kv_move.move_rows(stream, planes.k, planes.v, planes.k_row, planes.v_row, src_row, n_rows)
    assert all(np.array_equal(a, b) for a, b in zip(planes.bytes(), wanted, strict=True))


def test_rows_outside_the_plane_are_refused(stream):
    planes = Planes(stream, 1, 64, 10)
    for src_row, n_rows in ((5, 6), (-1, 2), (0, -1)):
        with pytest.raises(errors.ArgumentError, match="not inside"):
            kv_move.move_rows(
                stream, planes.k, planes.v, planes.k_row, planes.v_row, src_row, n_rows
            )


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_no_order_between_threads_is_needed(order):
    rng = np.random.default_rng(0)
    k, v = rng.integers(0, 256, (60, 102), np.uint8), rng.integers(0, 256, (60, 72), np.uint8)
    wanted = [oracle.move_rows(plane, 9, 50) for plane in (k, v)]
    move = runner.quick("kv/move.cu", "move_rows", check=True)
    size = np.int64
    move(
        (2, 2), 256, 0, k, size(9 * 102), size(50 * 102), v, size(9 * 72), size(50 * 72),
        order=order, seed=1,
    )  # fmt: skip
    assert np.array_equal(k, wanted[0]) and np.array_equal(v, wanted[1])
