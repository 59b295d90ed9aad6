"""Faults planted in the body for tensor cores: the tests of its values must notice each."""

import numpy as np
import pytest
import tensor_cores
import test_kernels as values
import test_special_numbers as special
from conftest import Bench

from memra_lowlevel import Device
from memra_lowlevel.compile import cuda_src_root


@pytest.fixture(scope="module")
def device():
    with Device("host") as opened:
        yield opened


@pytest.fixture
def bench(device, stream):
    return Bench(device, stream)


def sums(format, n_in=96):
    return lambda bench, rng: values.test_add_product(bench, rng, format, (33, n_in))


def scales(format):
    return lambda bench, rng: special.test_a_scale_that_is_not_finite_leaves_no_number(
        bench, rng, format
    )


#: What is wrong, the header, its text and the fault (or several of each), and who notices.
FAULTS = (
    ("activations without their rest", "tensor_tile.cuh",
     "g % 2 != 0 ? UPPER_BITS : 0u", "g % 2 != 0 ? 0xFFFFFFFFu : 0u", sums("f16")),
    ("weights without their rest", "tensor_tile.cuh",
     ": __float_as_uint(whole - __uint_as_float(a[i] & UPPER_BITS))", ": 0u", sums("f32")),
    ("a rest beside an infinity", "tensor_tile.cuh",
     "infinite(upper) ? upper : upper + rest", "upper + rest",
     lambda bench, rng: special.test_infinite_activations(bench, rng, "f16")),
    ("a rest beside an infinite weight", "tensor_tile.cuh",
     "infinite(upper) ? upper : upper + rest", "upper + rest",
     lambda bench, rng: special.test_infinite_weights(bench, rng, "f32")),
    ("infinite scales of q8_0 are multiplied", "tiles.cuh",
     "return {finite_half(d)};", "return {d};", scales("q8_0")),
    ("an infinite offset is added", "tiles.cuh",
     "finite_half(dm >> 16) << 16", "(dm >> 16) << 16",
     special.test_an_offset_that_is_infinite_leaves_no_number),
    ("offsets of codes about zero", "tiles.cuh",
     "fmaf(8.0f, scale, f16_to_f32(uint16_t(dm >> 16)))", "f16_to_f32(uint16_t(dm >> 16))",
     sums("q4_1")),
    ("codes far from their middle", "tiles.cuh",
     ("8388616.0f", "fmaf(8.0f, scale,"), ("8388592.0f", "fmaf(-16.0f, scale,"),
     lambda bench, rng: special.test_small_weights_about_the_middle_of_their_codes(bench, rng, 32)),
    ("a NaN of lower bits only is cut off", "tensor_tile.cuh",
     "if (!SHORT && w[i] != w[i]) w[i] = NAN_F32;", "",
     lambda bench, rng: special.test_a_weight_that_is_no_number_in_its_lower_bits(bench)),
    ("the last block of a slice alone", "product_tensor.cuh",
     "goes_on ? parts.get(out) + sums[i] : sums[i]", "sums[i]", sums("q8_0", 2400)),
    ("one block of two twice", "product_tensor.cuh",
     "block(at, g_ / 2 % W::BLOCKS)", "block(at)", sums("f16", 2400)),
    ("a second block that is not there", "product_tensor.cuh",
     "if (!both(now_)) others[i] = 0.0f;", "", sums("q8_0", 2400)),
    ("squares of another row", "product_tensor.cuh",
     "g_ == 2 * t_", "g_ == 0",
     lambda bench, rng: values.test_gate_up_rows(bench, rng, ("f16", "f16"), (33, 576))),
    ("rows at a time see the same columns", "product_tensor.cuh",
     "min(r0 + g_ / (2 * W::BLOCKS), n_rows - 1)", "min(g_ / (2 * W::BLOCKS), n_rows - 1)",
     lambda bench, rng: values.test_each_row_gets_the_bits_it_gets_alone(bench, rng, "f16", 576)),
)  # fmt: skip


def plant(monkeypatch, folder, header, old, new):
    text = (cuda_src_root() / "common" / header).read_text()
    for a, b in [(old, new)] if isinstance(old, str) else zip(old, new, strict=True):
        assert text.count(a) == 1, a
        text = text.replace(a, b)
    (folder / "common").mkdir()
    (folder / "common" / header).write_text(text)
    tensor_cores.take(monkeypatch, (folder,))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_a_fault_is_noticed(bench, rng, monkeypatch, tmp_path, fault):
    _, header, old, new, notices = fault
    plant(monkeypatch, tmp_path, header, old, new)
    with pytest.raises(AssertionError), np.errstate(invalid="ignore"):
        notices(bench, rng)
    monkeypatch.undo()
    tensor_cores.take(monkeypatch)
    notices(bench, rng)
