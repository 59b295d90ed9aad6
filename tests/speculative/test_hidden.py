"""Hidden states by position: the two kernels against their oracles, and what holds the rows."""

import itertools

import numpy as np
import pytest

from memra_lowlevel.driver.host import runner
from memra_lowlevel.errors import ArgumentError, ClosedError, MemraError, PlaneError
from memra_lowlevel.kernels import registry
from memra_lowlevel.kernels import speculative as kernels
from memra_lowlevel.speculative import HiddenRows

F, I = np.float32, np.int32  # noqa: E741
KEEP = registry.spec("keep_hidden").tolerance
WIDTHS = [1, 31, 128, 576, 1000]
N_KEPT = 12
FAR = 2**31 - 1


def bits(rows):
    return np.ascontiguousarray(rows).view(np.uint32)


def any_bits(rng, *shape):
    """Values of any kind, NaN of many kinds among them: what is not written must stay as it is."""
    return rng.integers(0, 2**32, shape, np.uint32).view(F)


def states(rng, n_rows, width):
    return (rng.standard_normal((n_rows, width)) * 10.0 ** rng.integers(-3, 4)).astype(F)


def at(device, stream, position):
    return device.from_numpy(np.array([position], I), stream)


def places(rng, n_rows):
    """A position, often near one of the two ends."""
    near = [-n_rows - 1, -n_rows, -1, 0, N_KEPT - n_rows - 1, N_KEPT - n_rows, N_KEPT - 2]
    return int(rng.choice([*near, N_KEPT - 1, N_KEPT, -FAR - 1, FAR, int(rng.integers(N_KEPT))]))


@pytest.mark.parametrize("width", WIDTHS)
def test_keep_equals_its_oracle(device, stream, width):
    assert (KEEP.kind, KEEP.value) == ("relative", 2e-6)
    oracle, rng, seen = registry.oracle("keep_hidden"), np.random.default_rng(width), set()
    for i in range(70):
        n_rows = int(rng.choice([1, 2, 5, N_KEPT + 3]))
        position, eps = places(rng, n_rows), float(rng.choice([1e-5, 1e-3]))
        h, kept = states(rng, n_rows + 1, width), any_bits(rng, N_KEPT, width)
        special = rng.choice(["", "zeros", "NaN"])
        odd = int(rng.integers(n_rows))
        if special:
            h[odd] = 0.0
        if special == "NaN":
            h[odd, rng.integers(width)] = np.nan
        step, n_feed = (int(x) for x in rng.integers(0, 4, 2))
        io = np.array([3, 99, step, n_feed, -1, 3, 3], I) if rng.random() < 0.5 else None
        want = oracle(h[:n_rows], np.full(kept.shape, 1e9), position, eps, io)
        kept_d = device.from_numpy(kept, stream)
        kernels.keep_hidden(
            stream, device.from_numpy(h, stream), kept_d, at(device, stream, position), n_rows, eps,
            block=None if io is None else device.from_numpy(io, stream),
        )  # fmt: skip
        got = kept_d.to_numpy(stream)
        known = io is not None and step + 1 < n_feed
        rows = np.arange(N_KEPT)
        written = (rows > max(position, 0)) & (rows <= position + n_rows) & (not known)
        assert np.array_equal(bits(got[~written]), bits(kept[~written])), i
        assert np.array_equal((want == 1e9).all(axis=1), ~written), i
        for g, w in zip(got[written], want[written], strict=True):
            assert np.array_equal(np.isnan(g), np.isnan(w)), i
            assert np.isnan(w).all() or np.abs(g - w).max() <= KEEP.value * np.abs(w).max(), i
        seen |= {"one row" if n_rows == 1 else "several rows"}
        seen |= {"a known token"} if known else {"a step"} if io is not None else {"a pass"}
        if known:
            continue
        seen |= {special} if 1 <= position + 1 + odd < N_KEPT else set()
        seen |= {"before"} if position < 0 else set()
        seen |= {"past"} if position + n_rows >= N_KEPT else set()
        seen |= {"cut"} if written.any() and written.sum() < n_rows else set()
    assert seen == {
        "one row", "several rows", "a known token", "a step", "a pass", "", "zeros", "NaN",
        "before", "past", "cut",
    }  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_take_equals_its_oracle(device, stream, width):
    oracle, rng, seen = registry.oracle("take_hidden"), np.random.default_rng(width), set()
    for i in range(50):
        n_rows = int(rng.choice([1, 2, 5, N_KEPT + 3]))
        position, kept = places(rng, n_rows), any_bits(rng, N_KEPT, width)
        out = any_bits(rng, n_rows + 1, width)
        kept_d, out_d = (device.from_numpy(a, stream) for a in (kept, out))
        kernels.take_hidden(stream, kept_d, at(device, stream, position), out_d, n_rows)
        got, want = out_d.to_numpy(stream), oracle(kept, position, n_rows)
        rows = position + np.arange(n_rows, dtype=np.int64)
        inside = (rows >= 0) & (rows < N_KEPT)
        assert np.array_equal(bits(got[:n_rows][inside]), bits(want[inside])), i
        assert np.isnan(got[:n_rows][~inside]).all() and np.isnan(want[~inside]).all(), i
        assert np.array_equal(bits(got[n_rows]), bits(out[n_rows])), "a row too many"
        assert np.array_equal(bits(kept_d.to_numpy(stream)), bits(kept))
        seen |= {"one row" if n_rows == 1 else "several rows"}
        seen |= {"before"} if position < 0 else {"past"} if position >= N_KEPT else set()
        seen |= {"cut"} if inside.any() and not inside.all() else set()
    assert seen == {"one row", "several rows", "before", "past", "cut"}


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_in_one_launch_are_rows_one_by_one(device, stream, width):
    rng, n = np.random.default_rng(width), 7
    h, before = states(rng, n, width), any_bits(rng, N_KEPT, width)
    h[3] = 0.0
    h_d = device.from_numpy(h, stream)
    together, single = (device.from_numpy(before, stream) for _ in "ab")
    kernels.keep_hidden(stream, h_d, together, at(device, stream, 2), n, 1e-5)
    out = device.zeros((n, width), F, stream)
    kernels.take_hidden(stream, together, at(device, stream, 3), out, n)
    for r in range(n):
        row = h_d.view(4 * r * width, (1, width), F)
        kernels.keep_hidden(stream, row, single, at(device, stream, 2 + r), 1, 1e-5)
        row = device.zeros((1, width), F, stream)
        kernels.take_hidden(stream, single, at(device, stream, 3 + r), row, 1)
        assert np.array_equal(bits(row.to_numpy(stream)[0]), bits(out.to_numpy(stream)[r]))
    assert np.array_equal(bits(together.to_numpy(stream)), bits(single.to_numpy(stream)))
    assert not np.array_equal(bits(together.to_numpy(stream)), bits(before))


def test_buffers_that_do_not_fit_are_refused(device, stream):
    kept, rows = device.zeros((4, 32), F, stream), device.zeros((2, 32), F, stream)
    position = at(device, stream, 0)

    def keep(h, kept, n_rows):
        kernels.keep_hidden(stream, h, kept, position, n_rows, 1e-5)

    def take(out, kept, n_rows):
        kernels.take_hidden(stream, kept, position, out, n_rows)

    for call, name in ((keep, "h"), (take, "out")):
        kernel = f"{call.__name__}_hidden"
        for shape, dtype in (((128,), F), ((4, 32, 1), F), ((4, 32), I), ((4, 32), np.float16)):
            with pytest.raises(ArgumentError, match=f"{kernel}: kept is") as error:
                call(rows, device.zeros(shape, dtype, stream), 1)
            assert (error.value.kernel, error.value.name) == (kernel, "kept")
        for n_rows in (3, 0, -1):
            with pytest.raises(ArgumentError, match=f"{kernel}: {name} holds 256 bytes") as error:
                call(rows, kept, n_rows)
            assert (error.value.kernel, error.value.name) == (kernel, name)
    assert not kept.to_numpy(stream).any() and not rows.to_numpy(stream).any()


def test_both_in_a_graph_leave_the_bits_of_eager_calls(device, stream):
    """The position is read at each launch, the kernels start early where a GPU can."""
    width, n, rng = 100, 3, np.random.default_rng(7)
    kernels.prepare(device)
    h, out = device.zeros((n, width), F, stream), device.zeros((n, width), F, stream)
    block = device.zeros(7, I, stream)
    position = at(device, stream, 0)
    replayed, eager = (HiddenRows(device, stream, 20, width) for _ in "ab")

    def both(hidden):
        hidden.keep(stream, h, position, n, block=block, programmatic=True)
        hidden.take(stream, position, out, n, programmatic=True)

    with stream.capture("hidden") as graph:
        both(replayed)
    with graph.instantiate() as exec_:
        # A known token keeps nothing: row 9 stays what the launch before made of it.
        for where, n_feed in ((0, 1), (8, 1), (3, 1), (8, 2), (18, 1), (-2, 1)):
            h.copy_from(stream, states(rng, n, width))
            block.copy_from(stream, np.array([0, where, 0, n_feed, -1, 0, 0], I))
            position.copy_from(stream, np.array([where], I))
            taken, kept = [], []
            for launch in (lambda: exec_.launch(stream), lambda: both(eager)):
                out.fill(stream, 0)
                launch()
                taken.append(bits(out.to_numpy(stream)))
            for hidden in (replayed, eager):
                kept.append(bits(hidden.rows.to_numpy(stream)))
            assert np.array_equal(*taken) and np.array_equal(*kept), where
        used = {r for r in range(21) if eager.rows.to_numpy(stream)[r].any()}
        assert used == {1, 2, 3, 4, 5, 6, 9, 10, 11, 19, 20}
    graph.close()
    for hidden in (replayed, eager):
        hidden.close()


# -- what holds the rows ----------------------------------------------------------------------


def test_a_state_is_taken_one_position_on(device, stream):
    width, rng = 48, np.random.default_rng(3)
    with HiddenRows(device, stream, 9, width, eps=1e-3) as hidden:
        assert hidden.n_positions == 9 and hidden.rows.shape == (10, width)
        assert not hidden.rows.to_numpy(stream).any(), "row 0 is there, and nothing else"
        h = states(rng, 4, width)
        hidden.keep(stream, device.from_numpy(h, stream), at(device, stream, 0), 4)
        out = device.zeros((5, width), F, stream)
        hidden.take(stream, at(device, stream, 0), out, 5)
        got, wide = out.to_numpy(stream), h.astype(np.float64)
        assert not got[0].any()
        want = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-3)
        np.testing.assert_allclose(got[1:], want, rtol=1e-5)
        # The position before the first has no row, and the last one has.
        hidden.keep(stream, device.from_numpy(h, stream), at(device, stream, -1), 1)
        hidden.keep(stream, device.from_numpy(h, stream), at(device, stream, 8), 2)
        hidden.take(stream, at(device, stream, 9), out, 2)
        assert np.array_equal(bits(out.to_numpy(stream)[0]), bits(got[1]))
        assert np.isnan(out.to_numpy(stream)[1]).all()
        assert not hidden.rows.to_numpy(stream)[0].any()


def test_what_is_known_better_replaces_a_guess(device, stream):
    """A step of a chain keeps its guess, but not for a token that was known."""
    width, rng = 33, np.random.default_rng(4)
    block = device.zeros(7, I, stream)
    with HiddenRows(device, stream, 6, width) as hidden:
        seen = []
        # a pass of the target, a step with a known token, a step with a draft, the next pass
        for step, n_feed in ((None, 0), (0, 2), (1, 2), (None, 0)):
            io = None if step is None else block
            if io is not None:
                block.copy_from(stream, np.array([5, 2, step, n_feed, -1, 5, 5], I))
            h = device.from_numpy(states(rng, 1, width), stream)
            hidden.keep(stream, h, at(device, stream, 2), 1, block=io)
            seen.append(hidden.rows.to_numpy(stream)[3])
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, True, True] and seen[0].any()


def test_refusals(device, stream):
    for n_positions, width, eps in (
        (0, 4, 1e-5), (-1, 4, 1e-5), (4, 0, 1e-5), (4, 4, -1e-9), (4, 4, float("nan")),
    ):  # fmt: skip
        with pytest.raises(PlaneError, match="HiddenRows: n_positions"):
            HiddenRows(device, stream, n_positions, width, eps=eps)
    hidden = HiddenRows(device, stream, 1, 1, eps=0.0)
    row, position = device.zeros((1, 1), F, stream), at(device, stream, 0)
    hidden.keep(stream, row, position, 1)
    with pytest.raises(ArgumentError, match="keep_hidden: h holds"):
        hidden.keep(stream, row, position, 2)
    with pytest.raises(ArgumentError, match="take_hidden: out holds"):
        hidden.take(stream, position, row, 2)
    hidden.close()
    hidden.close()
    for use in (
        lambda: hidden.keep(stream, row, position, 1), lambda: hidden.take(stream, position, row, 1)
    ):  # fmt: skip
        with pytest.raises(ClosedError):
            use()


# -- check mode -------------------------------------------------------------------------------


def run_hidden(source="speculative/hidden.cu", order="random", check=True, width=31):
    """Rows on both sides of the end, what lies beyond it guarded; return all that was written."""
    rng = np.random.default_rng(width)
    h, kept = states(rng, 3, width), np.full((N_KEPT, width), -7, F)
    io, out = np.array([3, 99, 1, 2, -1, 3, 3], I), np.full((3, width), -7, F)
    keep, take = (runner.quick(source, n, check=check) for n in ("keep_hidden", "take_hidden"))
    for position, block in ((-2, None), (N_KEPT - 3, None), (4, io)):
        keep(
            3, 128, 0, h, kept, np.array([position], I), block, I(N_KEPT), I(width), F(1 / width),
            F(1e-5), seed=2, order=order,
        )  # fmt: skip
    take(3, 128, 0, kept, np.array([N_KEPT - 2], I), out, I(N_KEPT), I(width), seed=2, order=order)
    assert np.isnan(out[2]).all() and np.array_equal(out[:2], kept[-2:])
    assert (kept[[0, 2, 3, 4, 8, 9]] == -7).all() and (kept[[1, 5, 6, 7, 10, 11]] != -7).all()
    return kept.tobytes() + out.tobytes()


@pytest.mark.parametrize("width", [31, 576])
def test_clean_in_check_mode_and_the_same_bits_in_any_order(width):
    found = {run_hidden(check=False, width=width)}
    found |= {run_hidden(order=o, width=width) for o in ("forward", "reverse", "random")}
    assert len(found) == 1


def test_refused_buffers_of_another_width(device, stream):
    kept, position = device.zeros((4, 4), F, stream), at(device, stream, 0)
    wide, small = device.zeros((2, 8), F, stream), device.zeros(2, I, stream)
    row = device.zeros((1, 4), F, stream)
    for name, call in (
        ("h", lambda: kernels.keep_hidden(stream, wide, kept, position, 1, 1e-5)),
        ("out", lambda: kernels.take_hidden(stream, kept, position, wide, 1)),
        ("block", lambda: kernels.keep_hidden(stream, row, kept, position, 1, 0.0, block=small)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.name == name
    inside = kept.view(16, (2, 4), F)
    for name, call in (
        (
            "positions",
            lambda: kernels.keep_hidden(stream, row, kept, device.zeros(0, I, stream), 1, 0.0),
        ),
        (
            "positions",
            lambda: kernels.take_hidden(stream, kept, device.zeros(0, I, stream), row, 1),
        ),
        ("out", lambda: kernels.take_hidden(stream, kept, position, inside, 1)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.name == name
    for n_rows in ("1", True, 1.0):
        with pytest.raises(ArgumentError, match="n_rows"):
            kernels.keep_hidden(stream, row, kept, position, n_rows, 0.0)
    for bad in ({"n_positions": "3"}, {"n_positions": True}, {"width": None}):
        with pytest.raises(ArgumentError):
            HiddenRows(device, stream, **{"n_positions": 4, "width": 4, **bad})
    for eps in ("x", None, float("inf"), True):
        with pytest.raises(MemraError, match="eps"):
            HiddenRows(device, stream, 4, 4, eps=eps)


def test_what_are_no_buffers_is_refused_by_name(device, stream):
    hidden, row = HiddenRows(device, stream, 4, 4), device.zeros((1, 4), F, stream)
    position = at(device, stream, 0)
    for name, call in (
        ("keep: h", lambda: hidden.keep(stream, np.zeros((1, 4), F), position, 1)),
        ("keep: positions", lambda: hidden.keep(stream, row, 3, 1)),
        ("keep: block", lambda: hidden.keep(stream, row, position, 1, block=object())),
        ("take: positions", lambda: hidden.take(stream, 3, row, 1)),
        ("take: out", lambda: hidden.take(stream, position, None, 1)),
    ):
        with pytest.raises(ArgumentError, match=f"HiddenRows.{name}"):
            call()
    hidden.close()
