"""KvLayer: bytes, lock-step, refusals, capture."""

import numpy as np
import pytest

from memra_lowlevel import formats
from memra_lowlevel.cache import HeadTurn, KvLayer, KvRing
from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    CaptureForbidden,
    ClosedError,
    CounterUnknown,
    FormatUnsupported,
    PlaneError,
    RingLapped,
)
from memra_lowlevel.graph import sync_counters
from memra_lowlevel.reference.model import rope_angles

HEAD = 64


def rows(device, stream, rng, n, width):
    return device.from_numpy(rng.normal(size=(n, width)).astype(np.float32), stream)


class Pair:
    """Random K, V and query rows for one layer, on the host and the device."""

    def __init__(self, device, stream, rng, n, layer, n_heads=None):
        self.n_heads = n_heads or 2 * layer.n_kv_heads
        self.k_host = rng.normal(size=(n, layer.kv_dim_k)).astype(np.float32)
        self.v_host = rng.normal(size=(n, layer.kv_dim_v)).astype(np.float32)
        self.k = device.from_numpy(self.k_host, stream)
        self.v = device.from_numpy(self.v_host, stream)
        q = rng.normal(size=(n, self.n_heads, layer.head_dim_k)).astype(np.float32)
        self.q = device.from_numpy(q, stream)
        self.out = device.empty((n, self.n_heads, layer.head_dim_v), np.float32, stream)
        self.out.fill(stream, 0xFF)


def step(layer, stream, pair):
    layer.append(stream, pair.k, pair.v)
    layer.attend(stream, pair.q, pair.out)
    layer.advance(stream, pair.k.shape[0])


def plane_rows(layer, stream, side, start, end):
    plane, tok = (layer.k, layer.k_tok_bytes) if side == "k" else (layer.v, layer.v_tok_bytes)
    data = plane.to_numpy(stream)
    return [data[r * tok : (r + 1) * tok].tobytes() for r in layer.physical_rows(start, end)]


def usable(device, stream, layer):
    """One plain launch and one fresh capture still work."""
    length = layer.len
    layer.set_len(stream, length)
    with stream.capture("after") as graph:
        layer.set_len(stream, length)
    exec_ = graph.instantiate()
    exec_.launch(stream)
    stream.sync()
    assert layer.len == length == layer.len_d.to_numpy(stream)[0]
    exec_.close()


@pytest.mark.parametrize(("heads", "dim_v"), [(2, 64), (3, 96), (1, 128)])
def test_append_gives_the_formats_bytes(device, stream, heads, dim_v):
    rng = np.random.default_rng(heads)
    one = KvLayer.allocate(device, 40, heads, HEAD, head_dim_v=dim_v)
    many = KvLayer.allocate(device, 40, heads, HEAD, head_dim_v=dim_v)
    for layer in (one, many):
        layer.k.fill(stream, 0xA5)
        layer.v.fill(stream, 0xA5)
    n = 33
    pair = Pair(device, stream, rng, n, one)
    many.append(stream, pair.k, pair.v)
    many.advance(stream, n)
    for r in range(n):
        one.append(
            stream,
            pair.k.view(4 * r * one.kv_dim_k, (1, one.kv_dim_k), np.float32),
            pair.v.view(4 * r * one.kv_dim_v, (1, one.kv_dim_v), np.float32),
        )
        one.advance(stream, 1)
    for plane, other, x, fmt in (
        (one.k, many.k, pair.k_host, formats.Q8_0),
        (one.v, many.v, pair.v_host, formats.Q5_1),
    ):
        want = formats.encode(fmt, x).tobytes()
        want += b"\xa5" * (plane.n_bytes - len(want))
        assert plane.to_numpy(stream).tobytes() == want, "rows exact, nothing else touched"
        assert other.to_numpy(stream).tobytes() == want
    for layer in (one, many):
        layer.close()


def test_bytes_of_a_layer(device):
    layer = KvLayer.allocate(device, 16, 8, 128)
    assert (layer.kv_dim_k, layer.k_tok_bytes, layer.v_tok_bytes) == (1024, 1088, 768)
    assert (layer.k.n_bytes, layer.v.n_bytes) == (16 * 1088 + 8, 16 * 768 + 8)
    layer.close()
    layer = KvLayer.allocate(device, 16, 8, 128, v_format=formats.Q4_0)
    assert layer.k_tok_bytes + layer.v_tok_bytes == 1664
    layer.close()
    both = {"k_format": formats.E4M3, "v_format": formats.E4M3}
    layer = KvLayer.allocate(device, 16, 8, 128, **both)
    assert layer.k_tok_bytes + layer.v_tok_bytes == 2048
    layer.close()


def test_lock_step(device, stream):
    rng = np.random.default_rng(1)
    layer = KvLayer.allocate(device, 16, 1, HEAD)
    address = layer.len_d.ptr

    def both():
        return layer.len, int(layer.len_d.to_numpy(stream)[0])

    assert both() == (0, 0)
    pair = Pair(device, stream, rng, 3, layer)
    layer.append(stream, pair.k, pair.v)
    assert both() == (0, 0), "append does not move the length"
    layer.advance(stream, 3)
    assert both() == (3, 3)
    layer.set_len(stream, 1)
    assert both() == (1, 1)
    assert layer.len_d.ptr == address
    assert layer.physical_rows(1, 5) == range(1, 5)
    for bad in ((-1, 2), (3, 2), (0, 17)):
        with pytest.raises(PlaneError):
            layer.physical_rows(*bad)
    layer.close()


def test_refusals_move_nothing(device, stream):
    rng = np.random.default_rng(2)
    layer = KvLayer.allocate(device, 8, 2, HEAD)
    pair = Pair(device, stream, rng, 5, layer)
    step(layer, stream, pair)
    before = layer.k.to_numpy(stream).tobytes()
    with pytest.raises(CapacityExceeded):
        layer.append(stream, pair.k, pair.v)
    with pytest.raises(CapacityExceeded):
        layer.advance(stream, 4)
    for n in (9, 2**31):
        with pytest.raises(CapacityExceeded, match="longer plane"):
            layer.set_len(stream, n)
    for call in (layer.set_len, layer.advance):
        with pytest.raises(ArgumentError, match="-1"):
            call(stream, -1)
    with pytest.raises(ArgumentError):
        layer.append(stream, rows(device, stream, rng, 2, 64), pair.v)
    with pytest.raises(ArgumentError):
        layer.append(stream, rows(device, stream, rng, 2, 128), rows(device, stream, rng, 3, 128))
    with pytest.raises(ArgumentError):
        wrong = device.zeros((2, 128), np.float16, stream)
        layer.append(stream, wrong, pair.v)
    with pytest.raises(PlaneError):
        layer.set_base(stream, 3)
    assert layer.k.to_numpy(stream).tobytes() == before
    assert layer.len == 5 == layer.len_d.to_numpy(stream)[0]
    usable(device, stream, layer)
    layer.close()


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        ((8, 2, 80), {}, PlaneError),
        ((8, 2, 0), {}, PlaneError),
        ((8, 2, 32), {}, FormatUnsupported),
        ((8, 0, 64), {}, PlaneError),
        ((0, 2, 64), {}, PlaneError),
        ((2**31, 2, 64), {}, PlaneError),
        ((8, 2, 64), {"window": 0}, PlaneError),
        ((8, 2, 64), {"window": 4, "ring": KvRing(8, 5)}, PlaneError),
        ((8, 2, 64), {"ring": KvRing(8, 5)}, PlaneError),
        ((64, 2, 64), {"window": 16, "ring": KvRing(15, 16)}, PlaneError),
        ((256, 2, 64), {"window": 16, "ring": KvRing(20, 16)}, PlaneError),
        ((256, 2, 64), {"window": 16, "ring": KvRing(16 + 4 + 30, 16, slack=4)}, PlaneError),
    ],
)
def test_impossible_layers(device, args, options, error):
    with pytest.raises(error):
        KvLayer.allocate(device, *args, **options)


def test_rows_that_are_not_finite_are_refused_by_name(device, stream):
    rng = np.random.default_rng(3)
    layer = KvLayer.allocate(device, 8, 2, HEAD, check=True)
    pair = Pair(device, stream, rng, 3, layer)
    bad = pair.v_host.copy()
    bad[1, 70] = np.inf
    layer.k.fill(stream, 0)
    with pytest.raises(ArgumentError, match=r"row 1 of v.*head 1"):
        layer.append(stream, pair.k, device.from_numpy(bad, stream))
    assert not layer.k.to_numpy(stream).any(), "nothing was written"
    layer.append(stream, pair.k, pair.v)
    layer.close()
    layer = KvLayer.allocate(device, 8, 2, HEAD, check=False)
    layer.append(stream, pair.k, device.from_numpy(bad, stream))
    got = formats.decode(formats.Q5_1, layer.v.to_numpy(stream)[: 3 * layer.v_tok_bytes])
    got = got.reshape(3, 128)
    assert np.isnan(got[1, 64:96]).all() and np.isfinite(got).sum() == 3 * 128 - 32
    layer.close()


def test_captured_steps_equal_eager_ones(device, stream):
    rng = np.random.default_rng(4)
    eager, captured = (KvLayer.allocate(device, 30, 2, HEAD) for _ in range(2))
    pairs = [Pair(device, stream, rng, 2, eager) for _ in range(14)]
    slot = Pair(device, stream, rng, 2, captured)
    step(captured, stream, slot)
    captured.set_len(stream, 0)
    with stream.capture("step") as graph:
        step(captured, stream, slot)
    exec_ = graph.instantiate()
    assert captured.len == 0 == captured.len_d.to_numpy(stream)[0], "a capture moves nothing"
    for i, pair in enumerate(pairs):
        step(eager, stream, pair)
        for name in ("k", "v", "q"):
            getattr(slot, name).copy_from(stream, getattr(pair, name))
        exec_.launch(stream)
        if i == 9:
            for layer in (eager, captured):
                layer.set_len(stream, 11)
        assert captured.len == eager.len == captured.len_d.to_numpy(stream)[0]
        got, want = slot.out.to_numpy(stream), pair.out.to_numpy(stream)
        assert np.isfinite(want).all() and got.tobytes() == want.tobytes()
    assert plane_rows(eager, stream, "k", 0, 19) == plane_rows(captured, stream, "k", 0, 19)
    captured.set_len(stream, 29)
    with pytest.raises(CapacityExceeded):
        exec_.launch(stream)
    assert captured.len == 29 == captured.len_d.to_numpy(stream)[0]
    report = exec_.describe()
    assert report.memory_nodes == 0 and report.node_updates == 0
    exec_.close()
    eager.close()
    captured.close()


def test_workspace_does_not_grow_under_capture(device, stream):
    layer = KvLayer.allocate(device, 300, 1, HEAD)
    pair = Pair(device, stream, np.random.default_rng(0), 4, layer)
    with pytest.raises(CaptureForbidden), stream.capture("grow"):
        layer.attend(stream, pair.q, pair.out)
    usable(device, stream, layer)
    layer.close()


def test_headroom_is_checked_at_launch(device, stream):
    layer = KvLayer.allocate(
        device, 500, 1, HEAD, window=8, ring=KvRing(48, 8, slack=0), name="tight"
    )
    slot = Pair(device, stream, np.random.default_rng(9), 1, layer)
    step(layer, stream, slot)
    with stream.capture("tight") as graph:
        step(layer, stream, slot)
    exec_ = graph.instantiate()
    for _ in range(47):
        exec_.launch(stream)
    assert layer.len == 48
    with pytest.raises(RingLapped, match=r"graph 'tight': tight.*prepare\(stream, 1\)"):
        exec_.launch(stream)
    assert layer.len == 48 == layer.len_d.to_numpy(stream)[0]
    layer.prepare(stream, 1)
    exec_.launch(stream)
    assert layer.len == 49 == layer.len_d.to_numpy(stream)[0]
    exec_.close()
    layer.close()


def test_a_kernel_first_met_under_capture_is_refused_with_a_remedy(device, stream):
    layer = KvLayer.allocate(  # no other test has this combination
        device, 1 << 17, 1, HEAD, head_dim_v=96, k_format=formats.Q4_0, v_format=formats.E4M3,
        name="cold",
    )  # fmt: skip  # over a short plane eight rows would take the kernel of one
    many, one = (Pair(device, stream, np.random.default_rng(15), n, layer) for n in (8, 1))
    step(layer, stream, many)
    with (
        pytest.raises(CaptureForbidden, match=r"^cold\.attend: .*attend_partial.*as many rows"),
        stream.capture("one"),
    ):
        layer.attend(stream, one.q, one.out)
    step(layer, stream, one)  # the remedy
    with stream.capture("one") as graph:
        step(layer, stream, one)
    graph.close()
    layer.close()


def test_refusals_name_layer_and_line(device, stream):
    layer = KvLayer.allocate(device, 64, 1, HEAD, name="mine")
    pair = Pair(device, stream, np.random.default_rng(16), 1, layer)
    flat = device.zeros((1, 2 * HEAD), np.float32, stream)
    wide = device.zeros((1, 2, HEAD), np.float64, stream)
    many = Pair(device, stream, np.random.default_rng(16), 1, layer, n_heads=20)
    for error, q, out, options, words in (
        (ArgumentError, flat, pair.out, {}, "q must be"),
        (ArgumentError, pair.q, flat, {}, "out must be"),
        (ArgumentError, wide, pair.out, {}, "q|argument 0"),
        (ArgumentError, pair.q, pair.out, {"scale": float("nan")}, "scale"),
        (ArgumentError, pair.q, pair.out, {"softcap": 0}, "softcap"),
        (ArgumentError, pair.q, pair.out, {"sinks": device.zeros(1, "f4", stream)}, "sinks"),
        (FormatUnsupported, pair.q, pair.out, {"numeric": "fast"}, "for numeric class 'fast'"),
        (FormatUnsupported, many.q, many.out, {}, "for 20 query heads"),
    ):
        with pytest.raises(error, match=rf"^mine\.attend: .*({words})") as info:
            layer.attend(stream, q, out, **options)
        assert __file__ in str(info.value)
        assert str(info.value).count("mine") == 1
        if error is FormatUnsupported:
            assert "head_dim" not in str(info.value), "nothing is wrong with it"
    with pytest.raises(ArgumentError, match=r"^mine\.append: "):
        layer.append(stream, device.zeros((1, HEAD), np.float64, stream), pair.v)
    with pytest.raises(ArgumentError, match=r"^mine\.advance: n"):
        layer.advance(stream, 2.5)
    layer.close()


def test_the_remedy_for_an_unknown_length_works(device, stream):
    layer = KvLayer.allocate(device, 64, 1, HEAD, name="unknown")
    step(layer, stream, Pair(device, stream, np.random.default_rng(17), 3, layer))
    layer.lengths.counter.note_unbounded(stream)
    remedy = r"sync_counters\(stream, \[counter\]\).*lengths\.counter"
    with pytest.raises(CounterUnknown, match=remedy):
        _ = layer.len
    with pytest.raises(CounterUnknown, match=remedy):
        layer.advance(stream, 1)
    sync_counters(stream, [layer.lengths.counter])
    assert layer.len == 3
    layer.close()


@pytest.mark.parametrize("kernel", ["mma", "f16", "simt"])
def test_a_kernel_may_be_named(device, stream, kernel):
    """Eager and captured, with a workspace that is enough for it."""
    rng = np.random.default_rng(0)
    layer = KvLayer.allocate(device, 600, 3, HEAD)
    pair = Pair(device, stream, rng, 40, layer)
    layer.append(stream, pair.k, pair.v)
    layer.attend(stream, pair.q, pair.out, kernel=kernel)
    eager = pair.out.to_numpy(stream)
    with stream.capture("named") as graph:
        layer.attend(stream, pair.q, pair.out, kernel=kernel)
    exec_ = graph.instantiate()
    pair.out.fill(stream, 0xFF)
    exec_.launch(stream)
    assert pair.out.to_numpy(stream).tobytes() == eager.tobytes() and np.isfinite(eager).all()
    for wrong in ("fast", 3, np.str_("mma")):
        with pytest.raises(ArgumentError, match=r"^kv.attend: kernel got .*'f16', 'simt' or None"):
            layer.attend(stream, pair.q, pair.out, kernel=wrong)
    exec_.close()
    layer.close()


def test_a_closed_layer_says_so(device, stream):
    layer = KvLayer.allocate(device, 4, 1, HEAD, name="gone")
    pair = Pair(device, stream, np.random.default_rng(18), 4, layer)
    step(layer, stream, pair)
    layer.close()
    for call in (
        lambda: layer.append(stream, pair.k, pair.v),
        lambda: layer.attend(stream, pair.q, pair.out),
        lambda: layer.prepare(stream, 1),
        lambda: layer.prepare(stream, 0),
        lambda: layer.advance(stream, 1),
        lambda: layer.set_len(stream, 5),
    ):
        with pytest.raises(ClosedError, match=r"gone\.\w+: the planes of the layer were closed"):
            call()


def test_attend_names_what_it_cannot_read_or_write(device, stream):
    rng = np.random.default_rng(20)
    with KvLayer.allocate(device, 8, 2, HEAD, name="l") as layer:
        shape = (1, 4, HEAD)
        q, out = (device.zeros(shape, np.float32, stream) for _ in range(2))
        odd = rows(device, stream, rng, 1, 300).view(4, shape, np.float32)
        flat, none = q.view(0, (4, HEAD), np.float32), device.zeros((), np.float32, stream)
        for wrong in (odd, flat, none):
            for name, pair in (("q", (wrong, out)), ("out", (q, wrong))):
                said = rf"^l\.attend: {name} must be .* 16-byte aligned, got float32 .* at 0x"
                with pytest.raises(ArgumentError, match=said):
                    layer.attend(stream, *pair)
        layer.append(stream, *(rows(device, stream, rng, 1, 2 * HEAD) for _ in range(2)))
        layer.attend(stream, q, out)
        stream.sync()
    for words in ({"name": 5}, {"check": "yes"}):
        with pytest.raises(ArgumentError, match=rf"^KvLayer\.allocate: {next(iter(words))} got "):
            KvLayer.allocate(device, 8, 2, HEAD, **words)


def test_append_with_norm_and_rotation_replays_as_it_ran(device, stream):
    """Positions come from the length: a captured append turns each row by its own."""
    rng = np.random.default_rng(19)
    eager, replayed = (KvLayer.allocate(device, 40, 2, HEAD, name=n) for n in ("eager", "replayed"))
    table = rope_angles(40, HEAD, 1e4).astype(np.float32)
    norms = [rows(device, stream, rng, 1, HEAD).view(0, (HEAD,), np.float32) for _ in range(2)]
    turn = HeadTurn(device.from_numpy(table, stream), True, *norms)
    k, v = rows(device, stream, rng, 1, 2 * HEAD), rows(device, stream, rng, 1, 2 * HEAD)
    q0 = rng.normal(size=(1, 4, HEAD)).astype(np.float32)
    q = device.from_numpy(q0, stream)
    eager.append(stream, k, v, turn=turn, q=q)  # loads the kernel
    with stream.capture("turned") as graph:
        replayed.append(stream, k, v, turn=turn, q=q)
        replayed.advance(stream, 1)
    with graph.instantiate() as once:
        for _ in range(12):
            q.copy_from(stream, q0)
            eager.append(stream, k, v, turn=turn, q=q)
            eager.advance(stream, 1)
            turned = q.to_numpy(stream)
            q.copy_from(stream, q0)
            once.launch(stream)
            assert np.array_equal(q.to_numpy(stream).view(np.uint32), turned.view(np.uint32))
    for side in "kv":
        kept = plane_rows(eager, stream, side, 0, 12)
        assert kept == plane_rows(replayed, stream, side, 0, 12)
        assert len(set(kept)) == (12 if side == "k" else 1)  # the same K at twelve positions
    short = HeadTurn(device.from_numpy(table[:39], stream))
    for words in ({"turn": short}, {"q": q}, {"turn": norms[0]}, {"turn": turn, "q": k}):
        with pytest.raises(ArgumentError, match=r"^eager\.append: "):
            eager.append(stream, k, v, **words)
    for layer in (eager, replayed):
        layer.close()
