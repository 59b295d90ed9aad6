import itertools
import json

import numpy as np
import pytest

from memra_lowlevel import cli
from memra_lowlevel.cache import KvLayer
from memra_lowlevel.errors import FormatUnsupported
from memra_lowlevel.formats import FORMATS, by_name


def test_matrix(capsys):
    assert cli.main(["formats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"]["q8_0/q5_1"] == "ahead" and len(found["pairs"]) == len(FORMATS) ** 2
    assert found["selected"] == ["q8_0", "q5_1"] and found["formats"]["q8_0"]["block_bytes"] == 34
    assert cli.main(["formats"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FORMATS) and "64, 96, 128, 256" in text


PAIRS = [
    ("q8_0", "q5_1"), ("q8_0", "q4_0"), ("q8_0", "e4m3"),
    ("e4m3", "q5_1"), ("e4m3", "q4_0"), ("e4m3", "e4m3"),
    ("f16", "f16"), ("bf16", "f32"), ("q4_0", "q8_0"), ("f32", "bf16"), ("q5_1", "q5_1"),
]  # fmt: skip


@pytest.mark.parametrize(("k", "v"), PAIRS, ids="/".join)
def test_a_pair_decodes_right(device, stream, k, v):
    """One row attended alone gives back its own V, as the format decodes it."""
    k, v = by_name(k), by_name(v)
    layer = KvLayer.allocate(device, 4, 1, 64, k_format=k, v_format=v)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(1, 64)).astype(np.float32) for _ in range(2))
    out = device.empty((1, 2, 64), np.float32, stream)
    q = device.from_numpy(rng.normal(size=(1, 2, 64)).astype(np.float32), stream)
    layer.append(stream, device.from_numpy(x, stream), device.from_numpy(y, stream))
    want = v.decode(v.encode(y))
    # Of the row's largest, as the class has it. On tensor cores p * scale keeps 20 bits at least,
    # whose half unit counts twice where a minimum has the other sign: 2^-20.
    for kernel, near in ((None, 1e-6), ("simt", 2e-7)):
        layer.attend(stream, q, out, kernel=kernel)
        for head in out.to_numpy(stream)[0]:
            np.testing.assert_allclose(head, want[0], rtol=0, atol=near * np.abs(want).max())
    row = layer.k.to_numpy(stream)[: layer.k_tok_bytes]
    assert row.tobytes() == k.encode(x).tobytes()
    layer.close()


def test_what_has_no_kernel_is_refused(device):
    for k, v in itertools.product(list(FORMATS.values())[:2], repeat=2):
        with pytest.raises(FormatUnsupported) as info:
            KvLayer.allocate(device, 4, 1, 160, k_format=k, v_format=v)
        assert info.value.nearest
