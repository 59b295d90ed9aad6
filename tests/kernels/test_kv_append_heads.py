"""Append with norm and rotation: heads against float64, bytes against a plain append of them."""

import numpy as np
import pytest
from rig import Planes, error, normal, same

from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner
from memra_lowlevel.formats import E4M3, F16, F32, FORMATS, Q5_1, Q8_0
from memra_lowlevel.kernels import kv_append, kv_append_heads
from memra_lowlevel.kernels.kv_append_heads import HeadTurn
from memra_lowlevel.reference.kv import turn_heads
from memra_lowlevel.reference.model import rope_angles

H, D = 3, 64  # kv heads, channels
I32 = np.int32


def table(n_positions, n_rot):
    return rope_angles(n_positions, n_rot, 1e4).astype(np.float32)


def append(planes, k, v, turn, q=None, n_kv_heads=H):
    """Append; gives the turned queries."""
    up = planes.upload
    q_d = None if q is None else up(q)
    kv_append_heads.append(
        planes.stream, up(k.reshape(len(k), -1)), up(v.reshape(len(v), -1)), planes.k, planes.v,
        planes.len_d, turn, k_format=planes.k_format, v_format=planes.v_format, rows=planes.rows,
        n_kv_heads=n_kv_heads, q=q_d, base_d=planes.base_d,
    )  # fmt: skip
    return None if q is None else q_d.to_numpy(planes.stream)


def turn_of(planes, weights, angles, halves=False):
    """A HeadTurn on the device, and the words of its oracle for K and for q."""
    up = planes.upload
    k_norm, q_norm = weights if weights is not None else (None, None)
    turn = HeadTurn(
        angles=None if angles is None else up(angles), halves=halves,
        k_norm=None if k_norm is None else up(k_norm),
        q_norm=None if q_norm is None else up(q_norm), eps=1e-5,
    )  # fmt: skip
    words = {"angles": angles, "halves": halves, "eps": 1e-5}
    return turn, {**words, "weight": k_norm}, {**words, "weight": q_norm}


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("n_rot", [0, 16, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_against_float64(stream, normed, n_rot, halves):
    rng = np.random.default_rng(n_rot)
    n, slot = 5, 7
    planes = Planes(stream, H, D, 20, F32, F32, head_dim_v=32)
    planes.set_len(slot)
    k, v, q = normal(rng, n, H, D), normal(rng, n, H, 32), normal(rng, n, 6, D)
    weights = (1 + normal(rng, 2, D) / 4) if normed else None
    turn, of_k, of_q = turn_of(planes, weights, table(30, n_rot) if n_rot else None, halves)
    turned = append(planes, k, v, turn, q)
    got, kept = planes.decoded(slot + n)
    assert same(kept[slot:], v)
    for y, x, words in ((got[slot:], k, of_k), (turned, q, of_q)):
        assert error(y, turn_heads(x, slot, **words)) < 1e-6
        if not normed and not n_rot:
            assert same(y, x)
        elif n_rot:
            assert same(y[..., n_rot:], x[..., n_rot:]) or normed


@pytest.mark.parametrize(
    ("k_format", "v_format"),
    list(zip(FORMATS.values(), reversed(FORMATS.values()), strict=True)), ids=str,
)  # fmt: skip
def test_the_bytes_of_a_plain_append_of_turned_rows(stream, k_format, v_format):
    rng = np.random.default_rng(1)
    n, slot = 4, 3
    k, v, weights = normal(rng, n, H, D), normal(rng, n, H, D), 1 + normal(rng, 2, D) / 4
    plain, packed = Planes(stream, H, D, 9, F32, F32), Planes(stream, H, D, 9, k_format, v_format)
    wanted = Planes(stream, H, D, 9, k_format, v_format)
    for planes in (plain, packed):
        planes.set_len(slot)
        append(planes, k, v, turn_of(planes, weights, table(30, 32))[0])
    wanted.set_len(slot)
    turned = plain.decoded(slot + n)[0][slot:]
    wanted.append(turned.reshape(n, -1), v.reshape(n, -1))
    assert all(same(a, b) for a, b in zip(packed.bytes(), wanted.bytes(), strict=True))


@pytest.mark.parametrize(("dim", "dim_v", "n_rot"), [(96, 128, 90), (128, 96, 128), (512, 32, 260)])
@pytest.mark.parametrize("halves", [False, True])
def test_every_size_of_heads(stream, dim, dim_v, n_rot, halves):
    rng = np.random.default_rng(dim)
    n = 3
    planes = Planes(stream, 2, dim, 5, F32, F32, head_dim_v=dim_v)
    k, v, weights = normal(rng, n, 2, dim), normal(rng, n, 2, dim_v), 1 + normal(rng, 2, dim) / 4
    turn, of_k, _ = turn_of(planes, weights, table(4, n_rot), halves)
    append(planes, k, v, turn, n_kv_heads=2)
    got, kept = planes.decoded(n)
    assert same(kept, v) and error(got, turn_heads(k, 0, **of_k)) < 1e-6


def test_rows_together_are_rows_alone_on_a_ring(stream):
    rng = np.random.default_rng(2)
    n = 6
    k, v, q = normal(rng, n, H, D), normal(rng, n, H, D), normal(rng, n, 9, D)
    together, alone = (Planes(stream, H, D, 12, ring=True) for _ in range(2))
    weights = 1 + normal(rng, 2, D) / 4
    together.set_len(1004, base=1000)
    turned = append(together, k, v, turn_of(together, weights, table(2000, D))[0], q)
    turn = turn_of(alone, weights, table(2000, D))[0]
    for r in range(n):
        alone.set_len(1004 + r, base=1000)
        assert same(append(alone, k[[r]], v[[r]], turn, q[[r]])[0], turned[r])
    assert all(same(a, b) for a, b in zip(together.bytes(), alone.bytes(), strict=True))


def test_past_the_table_and_without_room(stream):
    rng = np.random.default_rng(3)
    planes = Planes(stream, H, D, 8, F32, F32)
    planes.set_len(6)
    k, v = normal(rng, 4, H, D), normal(rng, 4, H, D)
    turned = append(planes, k, v, turn_of(planes, None, table(7, 32))[0], k.copy())
    got = planes.bytes()[0].view(np.float32).reshape(8, H, D)
    assert np.isfinite(got[6]).all() and np.isnan(got[7, :, :32]).all()
    assert same(got[7, :, 32:], k[1, :, 32:]) and (planes.bytes()[0][:6] == 0xFF).all()
    assert np.isfinite(turned[0]).all() and np.isnan(turned[1:, :, :32]).all()


def test_refusals_move_nothing(stream):
    rng = np.random.default_rng(4)
    planes = Planes(stream, H, D, 8)
    before = planes.bytes()
    up, rows = planes.upload, normal(rng, 2, H * D)

    def call(k=rows, v=rows, q=None, rows=8, n_kv_heads=H, **turn):
        made = {name: up(x) for name, x in turn.items()}
        kv_append_heads.append(
            stream, up(k), up(v), planes.k, planes.v, planes.len_d, HeadTurn(**made),
            k_format=Q8_0, v_format=Q5_1, rows=rows, n_kv_heads=n_kv_heads,
            q=None if q is None else up(q),
        )  # fmt: skip

    for bad in (
        {"k": rows[:, :100]}, {"v": rows[:1]}, {"k": rows.astype(np.float64)}, {"rows": 9},
        {"n_kv_heads": 5}, {"q": rows}, {"q": normal(rng, 3, 2, D)}, {"q": normal(rng, 2, 2, 32)},
        {"k_norm": normal(rng, 32)}, {"q_norm": normal(rng, 2 * D)}, {"angles": normal(rng, 9, 32)},
        {"angles": normal(rng, 9, 33, 2)}, {"angles": normal(rng, 9, 16, 3)},
    ):  # fmt: skip
        with pytest.raises(errors.ArgumentError):
            call(**bad)
    assert all(same(a, b) for a, b in zip(planes.bytes(), before, strict=True))
    call()


@pytest.mark.parametrize("turned", [True, False], ids=["append_heads", "append"])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n_kv_heads", (0, -3, None, "3", 3.0, True)),
        ("rows", (0, -1, None, "8", 8.0, 2**31)),
        ("k", (None, np.zeros((2, H * D), np.float32))),
        ("v", (5, np.zeros((2, H * D), np.float32))),
        ("k_plane", (None, 5, np.zeros(1 << 16, np.uint8))),
        ("v_plane", (None, 5, np.zeros(1 << 16, np.uint8))),
        ("len_d", (None, 5, np.zeros(1, np.int32))),
        ("k_format", (None, "q8_0", 5)),
        ("v_format", (None, "q5_1", 5)),
        ("q", (5, np.zeros((2, 2, D), np.float32))),
        ("turn", (None, 5, {})),
        ("table", (5, "x", np.zeros((2, 5), np.uint64))),
    ],
)
def test_what_is_none_of_an_argument(stream, name, values, turned):
    """Refused with the name of the argument, and no byte written."""
    planes, rng = Planes(stream, H, D, 8), np.random.default_rng(5)
    k, v = (planes.upload(normal(rng, 2, H * D)) for _ in range(2))
    given = {
        "k": k, "v": v, "k_plane": planes.k, "v_plane": planes.v, "len_d": planes.len_d,
        "k_format": Q8_0, "v_format": Q5_1, "rows": 8,
    }  # fmt: skip
    call = kv_append.append
    if turned:
        if name == "table":
            return
        call, given = kv_append_heads.append, {**given, "turn": HeadTurn(), "n_kv_heads": H}
    elif name in ("n_kv_heads", "q", "turn"):
        return
    before = planes.bytes()
    for value in values:
        with pytest.raises(errors.ArgumentError, match=f"{name}|planes and len_d"):
            call(stream, **{**given, name: value})
    assert all(same(a, b) for a, b in zip(planes.bytes(), before, strict=True))
    call(stream, **given)
    assert not all(same(a, b) for a, b in zip(planes.bytes(), before, strict=True))


@pytest.mark.parametrize("name", ["k_norm", "q_norm", "angles"])
def test_a_turn_of_host_memory_is_refused(stream, name):
    planes, rng = Planes(stream, H, D, 8), np.random.default_rng(6)
    with pytest.raises(errors.ArgumentError, match=name):
        append(planes, *normal(rng, 2, 2, H * D), HeadTurn(**{name: np.zeros(D, np.float32)}))


def run_heads(fmt, source="kv/append_heads.cu", order="random", **how):
    """Two query heads and two kv heads of three rows, K and V of different widths."""
    rng = np.random.default_rng(0)
    n, d, d_v = 3, 64, 32
    q, k, v = normal(rng, n, 2, d), normal(rng, n, 2, d), normal(rng, n, 2, d_v)
    weight, angles = 1 + normal(rng, d) / 4, table(9, 48)
    planes = [np.full((n + 2, fmt.row_bytes(2 * w)), 0xFF, np.uint8) for w in (d, d_v)]
    expression = f"append_heads<{fmt.constant}, {fmt.constant}>"
    runner.quick(source, expression, **(how or {"check": True}))(
        (2, n), 128, 4 * 4 * d,
        q, k, v, weight, weight, angles, *planes, I32(2), I32(2), I32(d // 32), I32(d_v // 32),
        I32(48), I32(9), I32(1), np.float32(1e-6), I32(n + 2), np.array([1], I32), None,
        order=order,
    )  # fmt: skip
    assert all((plane[[0, -1]] == 0xFF).all() for plane in planes)
    return planes


@pytest.mark.parametrize("fmt", [Q8_0, Q5_1, E4M3, F16], ids=str)
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_no_order_between_threads_is_needed(fmt, order):
    first = run_heads(fmt)
    lanes = run_heads(fmt, order=order, check=True, defines={"BLOCK32_LANES": "1"})
    assert all(same(a, b) for a, b in zip(lanes, first, strict=True))
    assert all(
        same(a, b) for a, b in zip(run_heads(fmt, order=order, check=True), first, strict=True)
    )
