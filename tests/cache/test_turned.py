"""KvLayer.append with a turn of heads: what is refused, by name, before anything is written."""

import numpy as np
import pytest

from memra_lowlevel import formats
from memra_lowlevel.cache import HeadTurn, KvLayer
from memra_lowlevel.errors import ArgumentError, ClosedError

HEAD, CTX = 64, 8


@pytest.fixture
def make(device, stream):
    """Random f32, or a constant."""
    rng = np.random.default_rng(5)

    def made(*shape, value=None):
        host = rng.normal(size=shape) if value is None else np.full(shape, value)
        return device.from_numpy(host.astype(np.float32), stream)

    return made


@pytest.fixture
def layer(device):
    with KvLayer.allocate(device, CTX, 2, HEAD, check=True, name="layer") as made:
        yield made


def test_what_is_no_turn_is_named(device, stream, make, layer):
    k, v, q = make(1, 128), make(1, 128), make(1, 4, HEAD)
    host, angles = np.zeros((CTX, 32, 2), np.float32), make(CTX, 32, 2)
    closed = make(HEAD)
    closed.close()
    before = [plane.to_numpy(stream) for plane in (layer.k, layer.v, q)]
    for turn, said in (
        (HeadTurn(host), "angles of the turn got a NumPy array"),
        (HeadTurn([1]), "angles of the turn got an object of type list"),
        (HeadTurn(device.zeros((), np.float32, stream)), r"angles of shape \[\]"),
        (HeadTurn(make(CTX - 1, 32, 2)), r"max_ctx = 8 positions"),
        (HeadTurn(k_norm=host), "k_norm of the turn"),
        (HeadTurn(q_norm="x"), "q_norm of the turn got 'x'"),
        *((HeadTurn(angles, halves), "halves of the turn") for halves in (2, "x", None, [1], -1)),
        *(
            (HeadTurn(angles, eps=eps), "eps of the turn")
            for eps in (float("nan"), float("inf"), -1e-6, "x", None, True)
        ),
    ):
        with pytest.raises(ArgumentError, match=rf"^layer\.append: .*{said}"):
            layer.append(stream, k, v, turn=turn, q=q)
    for wrong in (np.zeros((1, 4, HEAD), np.float32), "q"):
        with pytest.raises(ArgumentError, match=r"^layer\.append: q got"):
            layer.append(stream, k, v, turn=HeadTurn(), q=wrong)
    with pytest.raises(ClosedError):
        layer.append(stream, k, v, turn=HeadTurn(k_norm=closed), q=q)
    for plane, kept in zip((layer.k, layer.v, q), before, strict=True):
        assert np.array_equal(plane.to_numpy(stream), kept, equal_nan=plane is q)


def test_queries_share_no_memory_with_what_is_read(stream, make, layer):
    """The launch turns them in place, while other blocks read."""
    k, v, both = make(1, 128), make(1, 128), make(3 * 128)
    angles, norm = make(CTX, 32, 2), make(HEAD)
    turn = HeadTurn(angles, False, norm, norm)
    shared = {"k": k, "v": v, "angles": angles, "k_norm": norm}
    for name, buffer in shared.items():
        q = buffer.view(0, (1, buffer.n_bytes // 4 // HEAD, HEAD), np.float32)
        with pytest.raises(ArgumentError, match=f"q shares memory with {name}, "):
            layer.append(stream, k, v, turn=turn, q=q)
    q, k, v = (both.view(512 * i, (1, 128), np.float32) for i in range(3))
    layer.append(stream, k, v, turn=turn, q=q.view(0, (1, 2, HEAD), np.float32))  # side by side


def test_rows_are_checked_as_the_turn_leaves_them(device, stream, make):
    v, q, ones = make(1, 128), make(1, 4, HEAD), make(HEAD, value=1.0)
    large, plain = make(1, 128, value=1e5), make(1, 128)
    with KvLayer.allocate(
        device, CTX, 2, HEAD, k_format=formats.F16, v_format=formats.F16, check=True, name="f16"
    ) as layer:
        with pytest.raises(ArgumentError, match=r"^f16\.append: row 0 of k"):
            layer.append(stream, large, v)
        layer.append(stream, large, v, turn=HeadTurn(k_norm=ones))  # 1.0 fits
        k = layer.k.to_numpy(stream)[: layer.k_tok_bytes].view(np.float16)
        assert (k == 1).all()
        before = [buffer.to_numpy(stream) for buffer in (layer.k, layer.v, q)]
        for turn in (
            HeadTurn(k_norm=make(HEAD, value=np.nan)),
            HeadTurn(k_norm=make(HEAD, value=1e6)),
            HeadTurn(make(CTX, 32, 2, value=np.nan)),
            HeadTurn(make(CTX, 32, 2, value=1e30)),
        ):
            with pytest.raises(ArgumentError, match=r"^f16\.append: row 0 of k.*norm and angles"):
                layer.append(stream, plain, v, turn=turn, q=q)
        with pytest.raises(ArgumentError, match=r"^f16\.append: row 0 of v") as caught:
            layer.append(stream, plain, large, turn=HeadTurn(k_norm=ones), q=q)
        assert "angles" not in str(caught.value)
        for buffer, kept in zip((layer.k, layer.v, q), before, strict=True):
            assert np.array_equal(buffer.to_numpy(stream), kept)
