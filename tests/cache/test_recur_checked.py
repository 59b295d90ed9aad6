"""Check mode over the kernels of linear attention and of the draft chain."""

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
        (1, n_v), 128, 0,
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
