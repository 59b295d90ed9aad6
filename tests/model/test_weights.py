"""Reading GGUF files: what comes back, and every way to refuse one."""

import random
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf_file import SMALL, write

from memra_lowlevel.errors import MemraError, ModelError
from memra_lowlevel.examples.smollm2.tiny import TINY, tiny_weights
from memra_lowlevel.examples.smollm2.weights import read_gguf, required_shapes


def test_a_file_comes_back_as_it_was_written(tmp_path):
    tensors = write(tmp_path / "m.gguf")
    weights = read_gguf(tmp_path / "m.gguf")
    assert weights.config == replace(SMALL, rope_theta=5000.0, norm_eps=float(np.float32(1e-5)))
    assert set(weights.tensors) == set(tensors)
    for name, (array, kind) in tensors.items():
        tensor = weights[name]
        assert tensor.format == kind.name.lower()
        assert tensor.shape == required_shapes(SMALL)[name]
        assert tensor.rows.tobytes() == array.tobytes()


def test_f32_and_f16_matrices_come_back_as_bytes(tmp_path):
    def change(tensors):
        for name, dtype, kind in (("q", np.float16, "F16"), ("k", np.float32, "F32")):
            shape = required_shapes(SMALL)[f"blk.0.attn_{name}.weight"]
            array = np.random.default_rng(2).standard_normal(shape).astype(dtype)
            tensors[f"blk.0.attn_{name}.weight"] = (array, gguf.GGMLQuantizationType[kind])

    tensors = write(tmp_path / "m.gguf", change=change)
    weights = read_gguf(tmp_path / "m.gguf")
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        assert weights[name].rows.dtype == np.uint8
        assert weights[name].rows.tobytes() == tensors[name][0].tobytes()


F32 = gguf.GGMLQuantizationType.F32


def _drop(tensors):
    del tensors["blk.0.ffn_up.weight"]


def _wrong_shape(tensors):
    tensors["output_norm.weight"] = (np.ones(32, np.float32), F32)


def _wrong_kind(tensors):
    array = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q5_1
    tensors["blk.0.attn_v.weight"] = (gguf.quants.quantize(array, kind), kind)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"architecture": "qwen2"}, ["architecture", "'qwen2'", "'llama'"]),
        ({"change": _drop}, ["blk.0.ffn_up.weight", "missing"]),
        ({"change": _wrong_shape}, ["output_norm.weight", "shape"]),
        ({"change": _wrong_kind}, ["blk.0.attn_v.weight", "q5_1", "f32, f16, q8_0, q4_1"]),
        ({"extra": [("blk.0.attn_q.bias", np.ones(64, np.float32), F32)]}, ["attn_q.bias"]),
        ({"numbers": {"block_count": None}}, ["llama.block_count"]),
        ({"numbers": {"block_count": 0}}, ["llama.block_count", "0"]),
        ({"numbers": {"expert_count": 8}}, ["llama.expert_count", "8"]),
        ({"numbers": {"attention.head_count_kv": 3}}, ["n_kv_heads=3"]),
    ],
    ids=["architecture", "missing", "shape", "kind", "bias", "entry", "zero", "experts", "heads"],
)
def test_an_unsupported_file_is_refused_with_a_remedy(tmp_path, arguments, words):
    write(tmp_path / "m.gguf", **arguments)
    with pytest.raises(ModelError) as caught:
        read_gguf(tmp_path / "m.gguf")
    message = str(caught.value)
    for word in [str(tmp_path / "m.gguf"), "--model PATH.gguf", "--model tiny", *words]:
        assert word in message


@pytest.mark.parametrize("damage", ["empty", "text", "magic", "head", "half", "missing", "folder"])
def test_a_damaged_file_is_refused_with_a_remedy(tmp_path, damage):
    path = tmp_path / "m.gguf"
    write(path)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "text": b"hello\n" * 100,
                "magic": b"FUGG" + whole[4:],
                "head": whole[:100],
                "half": whole[: len(whole) // 2],
            }[damage]
        )
    with pytest.raises(ModelError, match="--model tiny"):
        read_gguf(path)


def test_flipped_bytes_of_the_head_never_raise_anything_else(tmp_path, scale):
    path = tmp_path / "m.gguf"
    write(path)
    whole = path.read_bytes()
    head = whole.index(b"blk.0.ffn_up.weight") + 100
    rng = random.Random(5)
    refused = 0
    for _ in range(150 * scale):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(head)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except MemraError as error:
            refused += isinstance(error, ModelError)
    print(f"{refused} of {150 * scale} damaged heads refused")
    assert refused >= 50 * scale


def test_tiny_is_the_same_every_time_and_whole():
    a, b = tiny_weights(), tiny_weights()
    shapes = {n: t.shape for n, t in a.tensors.items()}
    assert shapes.pop("output.weight") == (TINY.n_vocab, TINY.width)
    assert shapes == required_shapes(TINY)
    assert all(a[n].rows.tobytes() == b[n].rows.tobytes() for n in a.tensors)
    other = tiny_weights(seed=8)
    assert a["blk.1.ffn_up.weight"].rows.tobytes() != other["blk.1.ffn_up.weight"].rows.tobytes()
