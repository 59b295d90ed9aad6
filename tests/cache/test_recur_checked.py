"""Check mode over the kernels of linear attention and of the draft chain."""

import ctypes

import numpy as np
import pytest

from memra_lowlevel.driver.host import runner

I32, F32 = np.int32, np.float32


def run(source, rule="GATED", n_rows=3, order="forward", **how):
    rng = np.random.default_rng(0)
    d, n_k, n_v, taps, n_slots = 32, 1, 2, 4, n_rows + 2
    width = (2 * n_k + n_v) * d
    normal = lambda *s: rng.normal(size=s).astype(F32)  # noqa: E731
    gates = n_v * d if rule == "KDA" else n_v
    out = np.full((n_rows, n_v, d), np.nan, F32)
    kernel = runner.quick(source, f"delta_rows<{d}, {rule}>", **(how or {"check": True}))
    kernel(
        (1, n_v), 256, 0,
        normal(n_rows, width), normal(width, taps), normal(n_slots, width, taps - 1),
        normal(n_slots, n_v, d, d), np.array([7 * n_slots + 2], I32), normal(n_rows, gates),
        -np.abs(normal(n_v)), normal(gates), normal(n_rows, n_v), out, I32(n_rows), I32(n_k),
        I32(n_v), I32(taps), I32(n_slots), I32(1), F32(1e-6), F32(-5.0), order=order, seed=2,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("rule", ["GATED", "KDA"])
def test_clean(rule, order):
    n_rows = 10  # two batches
    out = run("recur/delta.cu", rule, n_rows, order=order)
    assert np.isfinite(out).all()
    plain = run("recur/delta.cu", rule, n_rows, order="forward", check=False)
    assert out.tobytes() == plain.tobytes(), "the order of threads changes no bit"


def test_no_undefined_behaviour():
    for rule in ("GATED", "KDA"):
        assert np.isfinite(run("recur/delta.cu", rule, sanitize="undefined")).all()


def run_round(source, order="random"):
    """A round of three drafts, two of them right; more planes than threads."""
    kernel = runner.quick(source, "round_advance", check=True)
    io, drafts = np.array([5, 9, 4, 1, -1, 3, 0, 0], I32), np.array([4, 7, 8, 9], I32)
    state, argmax = np.array([2, 9, 1, 20, 60, 60, 0], I32), np.array([7, 8, 1, 2], I32)
    target, draft = np.full(70, 20, I32), np.full(40, 23, I32)
    tokens, accepted = np.zeros(12, I32), np.zeros(9, I32)
    goes_on, lags = ctypes.c_uint32(7), ctypes.c_uint32(7)  # as the host device has them
    kernel(
        1, 32, 0, io, drafts, argmax, state, target, I32(70), draft, I32(40), np.array([99], I32),
        I32(1), tokens, accepted, I32(3), I32(50), I32(0), np.uint64(ctypes.addressof(goes_on)),
        np.uint64(ctypes.addressof(lags)), order=order,
    )  # fmt: skip
    assert (goes_on.value, lags.value) == (1, 0)
    assert tokens.tolist()[:6] == [0, 0, 7, 8, 1, 0] and accepted[1] == 2
    assert state.tolist() == [5, 9, 2, 23, 60, 60, 0]
    assert (target == 23).all() and (draft == 23).all()
    assert io.tolist() == [1, 23, 0, 1, -1, 1, 1, 0] and drafts[0] == 1


def test_round_kernel_is_clean():
    for order in ("forward", "reverse", "random"):
        run_round("speculative/loop.cu", order)


def test_chain_kernel_is_clean():
    kernel = runner.quick("speculative/chain.cu", "chain_advance", check=True)
    io = np.array([5, 9, 0, 1, -1, 3, 0, 0], I32)
    drafts, counters = np.zeros(4, I32), np.arange(70, dtype=I32)
    kernel(1, 32, 0, io, drafts, counters, I32(70), None, I32(50), I32(3), order="random")
    assert drafts.tolist() == [0, 5, 0, 0] and np.array_equal(counters, np.arange(70) + 1)
    assert io[:5].tolist() == [5, 10, 1, 1, -1]
    tokens = np.arange(1000, 1050, dtype=I32)
    kernel(1, 32, 0, io, drafts, None, I32(0), tokens, I32(50), I32(3), order="random")
    assert drafts.tolist() == [0, 5, 1005, 0] and io[:5].tolist() == [1005, 11, 2, 1, -1]
