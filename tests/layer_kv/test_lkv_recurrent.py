"""Phase cores, convolution, the speculative pair."""

from __future__ import annotations

import numpy as np
import pytest
from lkv_data import close, fill, gen, refused, same_bits, state_of

from memra_lowlevel.errors import KvShapeError, KvStateError
from memra_lowlevel.layer_kv import (
    KvMode,
    LayerKvCache,
    PhaseCore,
    WireKind,
    compiled,
    decay_from_log,
    validate_delta_layers,
)  # fmt: skip
from memra_lowlevel.layer_kv.recurrent import gated_delta_len, phase_len, short_conv_len

F = np.float32


def layer() -> LayerKvCache:
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    c.wire_kind = WireKind.LINEAR
    return c


@pytest.fixture(params=compiled.available(), autouse=True)
def path(request):
    with compiled.use(request.param):
        yield request.param


def test_classic_steps():
    c, core = layer(), PhaseCore(1, 1, 2, [0.5, 0.25])
    o = core.step(c, F([0]), F([0]), F([1, 2]))
    close(o, "1 2")
    close(c.linear_state, "1 2 0 0")
    o = core.step(c, F([np.pi / 4]), F([np.pi / 2]), F([3, -1]))
    close(o, "2.4748738 0")
    close(c.linear_state, "0.5 1 3 -1")
    assert c.seq_len == 2


def test_gate_and_mass():
    c = layer()
    o = PhaseCore(1, 1, 2, [1, 1]).step(c, F([0.3]), F([0.3]), F([1, 2]), F([0.5]))
    close(o, "0.5 1")
    close(c.linear_state, "0.47766826 0.9553365 0.14776011 0.29552022")
    c = layer()
    o = PhaseCore(1, 1, 2, [1, 1], mass=1.0).step(c, F([0.3]), F([0.9]), F([1, 2]))
    close(o, "0.95533645 1.9106729")
    close(c.linear_state, "0.90044713 1.8008943 0.43496552 0.86993104")


DECAY = [0.9 + 0.005 * (i % 10) for i in range(12)]


def walk(core: PhaseCore, c: LayerKvCache, t: int, scratch: bool = False) -> np.ndarray:
    return core.step(c, gen(50 + t, 6, 2), gen(60 + t, 6, 2), gen(70 + t, 8), scratch=scratch)


def test_three_steps():
    c, core = layer(), PhaseCore(2, 3, 4, DECAY)
    outs = [walk(core, c, t) for t in range(3)]
    close(outs[0][:4], "-0.1376538 -0.70875454 -0.8663832 -0.4709236")
    close(
        outs[2],
        "0.46362466 0.56457675 0.5622045 -2.1676912 0.3585343 -0.87302446 0.099371135 -0.09907091",
    )
    s = c.linear_state.reshape(2, 6, 4)
    close(s[0, 0], "-0.5650969 -0.5883385 -0.5370987 0.035808068")
    close(s[1, 5], "0.08513474 0.40581638 0.78423405 1.4181001")


def test_delta_overwrites_exactly():
    c, core = layer(), PhaseCore(1, 2, 3, [0.9, 0.8, 0.7, 0.6], delta=True, mass=3.0)
    core.prepare(c)
    c.linear_state = gen(77, 12)
    theta, v = gen(78, 2, 2), gen(79, 3)
    close(v, "0.8871839 0.19624007 0.63885486", 1e-7)
    close(core.step(c, theta, theta, v), v, 1.2e-7)


def test_delta_against_float64():
    rng = np.random.default_rng(1)
    core, c = PhaseCore(2, 3, 5, rng.uniform(0.5, 1, 12), delta=True), layer()
    s = np.zeros((2, 6, 5))
    for _ in range(6):
        tq, tk, v = (rng.standard_normal(n).astype(np.float32) for n in (6, 6, 10))
        beta = rng.random(2).astype(np.float32)
        got = core.step(c, tq, tk, v, beta)

        def feature(t):
            t = t.astype(float).reshape(2, 3)
            return np.concatenate([np.cos(t), np.sin(t)], axis=1) / np.sqrt(3)

        held = s * core.decay[:, :, None]
        k, q = feature(tk), feature(tq)
        read = np.einsum("hf,hfd->hd", k, held)
        s = held + beta[:, None, None] * k[:, :, None] * (v.reshape(2, 1, 5) - read[:, None])
        close(got, np.einsum("hf,hfd->hd", q, s).ravel())
    close(c.linear_state, s.ravel())


def test_every_path_gives_the_same_bits():
    for delta in (False, True):
        results = []
        for name in compiled.available():
            with compiled.use(name):
                c, core = layer(), PhaseCore(2, 3, 4, DECAY, delta=delta)
                outs = np.concatenate([walk(core, c, t) for t in range(5)])
            results.append((outs, c.linear_state))
        for outs, state in results[1:]:
            same_bits(outs, results[0][0])
            same_bits(state, results[0][1])


def test_convolution_is_exact():
    taps = F([[0.25, 0.5, 1], [-1, 0, 2]])
    core, c = PhaseCore(1, 1, 1, [1, 1], taps=taps), layer()
    ys = [core.convolve(c, F(x)).tolist() for x in ([1, 2], [3, 4], [5, 6])]
    assert ys == [[1, 4], [3.5, 8], [6.75, 10]]
    assert c.linear_state.tolist() == [0, 0, 3, 4, 5, 6]


def test_sizes():
    assert phase_len(8, 32, 128, 4, 384) == 66688
    assert gated_delta_len(4, 4, 128, 128, 4) == 70144
    assert short_conv_len(3, 64) == 128
    core = PhaseCore(8, 32, 128, np.full(512, 0.9), taps=np.zeros((384, 4), np.float32))
    assert core.state_len == 66688


@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("delta", [True, False])
def test_pair_equals_single_steps(accept, delta):
    taps = gen(3, 8).reshape(4, 2)
    core = PhaseCore(2, 3, 4, DECAY, delta=delta, taps=taps)
    single, pair = layer(), layer()
    outs = []
    for t in range(2 if accept else 1):
        outs.append(core.convolve(single, gen(90 + t, 4)))
        outs.append(walk(core, single, t))
    got = [core.convolve(pair, gen(90, 4)), walk(core, pair, 0)]
    pair.fork_linear()
    got += [core.convolve(pair, gen(91, 4), scratch=True), walk(core, pair, 1, scratch=True)]
    assert pair.seq_len == 2
    refused(KvStateError, pair, lambda: walk(core, pair, 2))
    refused(KvStateError, pair, pair.export_wire)
    if accept:
        pair.accept_linear_scratch()
    else:
        pair.truncate_last(1)
    for a, b in zip(outs, got, strict=False):
        same_bits(a, b)
    same_bits(pair.linear_state, single.linear_state)
    assert pair.seq_len == single.seq_len and pair.linear_scratch.size == 0


def test_discard_forgets_the_second_lane():
    core, c = PhaseCore(2, 3, 4, DECAY), layer()
    walk(core, c, 0)
    before = c.linear_state.copy()
    c.fork_linear()
    walk(core, c, 1, scratch=True)
    c.discard_linear_scratch()
    assert c.seq_len == 1
    same_bits(c.linear_state, before)
    c.discard_linear_scratch()
    assert c.seq_len == 1


def test_refusals():
    for args in ((0, 1, 1, []), (1, 0, 1, []), (1, 1, 0, [1, 1]), (1, 1, 1, [1])):
        with pytest.raises(KvShapeError):
            PhaseCore(*args)
    for decay in ([0, 0.5], [0.5, 1.1], [np.nan, 1], [-0.1, 1], [np.inf, 1]):
        with pytest.raises(KvStateError):
            PhaseCore(1, 1, 1, decay)
    with pytest.raises(KvStateError):
        PhaseCore(1, 1, 1, [1, 1], mass=-1)
    for taps in (np.zeros((2, 1), np.float32), np.zeros(4, np.float32)):
        with pytest.raises(KvShapeError):
            PhaseCore(1, 1, 1, [1, 1], taps=taps)
    core, c = PhaseCore(2, 3, 4, DECAY), layer()
    refused(KvStateError, c, c.accept_linear_scratch)
    refused(KvStateError, c, c.fork_linear)
    walk(core, c, 0)
    refused(KvStateError, c, c.accept_linear_scratch)
    refused(KvStateError, c, lambda: walk(core, c, 1, scratch=True))
    refused(KvStateError, c, lambda: core.convolve(c, F([1])))
    six, eight = gen(1, 6), gen(2, 8)
    for args in ((six[:5], six, eight), (six, six[:5], eight), (six, six, eight[:7]),
                 (six, six, eight, F([1]))):  # fmt: skip
        refused(KvShapeError, c, lambda a=args: core.step(c, *a))
    bad = six.copy()
    bad[3] = np.nan
    for args in ((bad, six, eight), (six, bad, eight), (six, six, eight * np.inf),
                 (six, six, eight, F([1, np.nan]))):  # fmt: skip
        with np.errstate(invalid="ignore"):
            refused(KvStateError, c, lambda a=args: core.step(c, *a))
    other = PhaseCore(1, 3, 4, DECAY[:6])
    refused(KvShapeError, c, lambda: other.step(c, six[:3], six[:3], eight[:4]))
    refused(KvShapeError, c, lambda: other.prepare(c))
    ring = LayerKvCache(1, 4, mode=KvMode.F32)
    ring.install_bounded(2)
    refused(KvStateError, ring, lambda: walk(core, ring, 0))


def test_delta_selector():
    types = ["LinearAttention", "FullAttention", "LinearAttention"]
    validate_delta_layers("vmf_phase", None, types)
    validate_delta_layers("vmf_phase_delta_v1", [0, 2], types)
    for kind, chosen in (
        ("vmf_phase", [0]), ("vmf_phase_delta_v1", []), ("vmf_phase_delta_v1", None),
        ("vmf_phase_delta_v1", [0, 0]), ("vmf_phase_delta_v1", [3]), ("vmf_phase_delta_v1", [-1]),
        ("vmf_phase_delta_v1", [1]), ("other", None),
    ):  # fmt: skip
        with pytest.raises(KvStateError):
            validate_delta_layers(kind, chosen, types)


def test_decay_from_log():
    close(decay_from_log([0.0, -1.0]), [np.exp(-1.0), np.exp(-np.exp(-1.0))], 1e-15)


def test_rows_beside_a_state():
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    fill(c, 2)
    c.linear_state = F([1, 2])
    before = state_of(c)[2]
    c.linear_scratch = F([3, 4])
    c.accept_linear_scratch()
    assert c.linear_state.tolist() == [3, 4] and state_of(c)[2] == before
