"""Linear attention: oracles, slots, rollback, capture; on both devices the same claims."""

import numpy as np
import pytest

from memra_lowlevel.cache import RecurLayer, Recurrent
from memra_lowlevel.errors import (
    ArgumentError,
    CapacityExceeded,
    FormatUnsupported,
    PlaneError,
    RewindRefused,
)
from memra_lowlevel.reference import recur


class Net:
    """Random weights of one layer, rows on demand, and the oracle of both rules."""

    def __init__(self, device, stream, rule, d=64, n_k=1, n_v=2, taps=4, seed=0):
        self.device, self.stream, self.rule, self.d = device, stream, rule, d
        self.n_k, self.n_v, self.taps = n_k, n_v, taps
        self.rng = np.random.default_rng(seed)
        self.width = (2 * n_k + n_v) * d
        self.plan = Recurrent(self.width, taps, n_v * d * d)
        self.gates = n_v * d if rule == "kda" else n_v
        self.w = self.normal(self.width, taps) * 0.5
        self.a = -np.abs(self.normal(n_v)) if rule == "gated" else self.normal(n_v) * 0.3
        self.dt = self.normal(self.gates)
        self.fixed = [self.up(x) for x in (self.w, self.a, self.dt)]

    def normal(self, *shape):
        return self.rng.normal(size=shape).astype(np.float32)

    def up(self, x):
        return self.device.from_numpy(np.ascontiguousarray(x), self.stream)

    def inputs(self, n):
        alpha = self.normal(n, self.gates)
        alpha[0, 0] = 25.0  # above the knee of softplus
        return [self.normal(n, self.width), alpha, self.normal(n, self.n_v)]

    def run(self, layer, x, how="step", fused=True):
        n = len(x[0])
        rows, alpha, beta = (self.up(i) for i in x)
        out = self.device.empty((n, self.n_v, self.d), np.float32, self.stream)
        out.fill(self.stream, 0xFF)
        w, a, dt = self.fixed
        if not fused:
            mixed = self.device.empty((n, self.width), np.float32, self.stream)
            layer.conv_assemble_and_roll(self.stream, rows, w, mixed)
            rows, w = mixed, None
        getattr(layer, how)(self.stream, rows, w, alpha, a, dt, beta, out, rule=self.rule)
        return out.to_numpy(self.stream)

    def oracle(self, x, conv, ssm):
        rows, alpha, beta = x
        n = len(rows)
        mixed, convs = recur.conv_assemble_and_roll(conv, rows, self.w)
        heads = mixed.reshape(n, -1, self.d)
        q, k, v = np.split(heads, [self.n_k, 2 * self.n_k], axis=1)
        pick = np.arange(self.n_v) % self.n_k
        q, k = (recur.l2_normalise(y)[:, pick] for y in (q, k))
        rate = recur.sigmoid(beta)
        if self.rule == "gated":
            g = np.exp(self.a * recur.softplus(alpha + self.dt))
            out, states = recur.gated_delta(ssm, q, k, v, g, rate)
        else:
            shape = (n, self.n_v, self.d)
            decay = recur.kda_decay(
                self.a[:, None], alpha.reshape(shape), self.dt.reshape(shape[1:])
            )
            out, states = recur.kda(ssm, q, k, v, decay, rate)
        return out, convs, states

    def zero(self):
        return np.zeros((self.width, self.taps - 1)), np.zeros((self.n_v, self.d, self.d))

    def state(self, layer):
        return layer.conv_state.to_numpy(self.stream), layer.ssm_state.to_numpy(self.stream)


def take(x, start, end):
    return [i[start:end] for i in x]


def close(got, want):
    scale = np.abs(want).max() + 1e-30
    assert np.isfinite(got).all() and np.abs(got - want).max() <= 2e-5 * scale


@pytest.mark.parametrize("rule", ["gated", "kda"])
@pytest.mark.parametrize(("d", "n_k", "n_v"), [(64, 1, 2), (128, 2, 2), (32, 1, 3)])
def test_against_float64(device, stream, rule, d, n_k, n_v):
    net = Net(device, stream, rule, d, n_k, n_v)
    layer = RecurLayer.allocate(device, net.plan, 5)
    conv, ssm = net.zero()
    for n in (1, 5, 3):
        x = net.inputs(n)
        out, convs, states = net.oracle(x, conv, ssm)
        close(net.run(layer, x), out)
        layer.select_slot(stream, n)
        conv, ssm = convs[-1], states[-1]
        got_conv, got_ssm = net.state(layer)
        close(got_conv, conv)
        close(got_ssm.reshape(ssm.shape), ssm)
    layer.close()


@pytest.mark.parametrize("rule", ["gated", "kda"])
@pytest.mark.parametrize("taps", range(1, 9))
def test_rows_together_equal_rows_one_by_one(device, stream, rule, taps):
    net = Net(device, stream, rule, 32, taps=taps, seed=taps)
    n = 11  # more than a batch of the kernel
    together, single, scanned, split = (RecurLayer.allocate(device, net.plan, n) for _ in range(4))
    x = net.inputs(n)
    a = net.run(together, x)
    together.select_slot(stream, n)
    b = []
    for r in range(n):
        b.append(net.run(single, take(x, r, r + 1)))
        single.select_slot(stream, 1)
    c = net.run(scanned, x, "scan")
    scanned.select_slot(stream, 1)
    d = net.run(split, x, fused=False)
    split.select_slot(stream, n)
    for other in (np.concatenate(b), c, d):
        assert a.tobytes() == other.tobytes()
    want = [s.tobytes() for s in net.state(together)]
    for layer in (single, scanned, split):
        assert [s.tobytes() for s in net.state(layer)] == want
    for layer in (together, single, scanned, split):
        layer.close()


@pytest.mark.parametrize("rule", ["gated", "kda"])
def test_every_rollback_equals_a_run_that_saw_no_more(device, stream, rule):
    net = Net(device, stream, rule, 32)
    first, second, after = net.inputs(4), net.inputs(4), net.inputs(2)
    for keep in range(0, 5):
        layer, plain = (RecurLayer.allocate(device, net.plan, 4) for _ in range(2))
        net.run(layer, first)
        layer.select_slot(stream, 4)
        net.run(layer, second)
        layer.select_slot(stream, keep)
        net.run(plain, first)
        plain.select_slot(stream, 4)
        if keep:
            net.run(plain, take(second, 0, keep))
            plain.select_slot(stream, keep)
        assert [s.tobytes() for s in net.state(layer)] == [s.tobytes() for s in net.state(plain)]
        conv = net.state(layer)[0]
        rebuilt = recur.conv_keep(
            net_state_before(net, first, stream), second[0].astype(np.float64), keep
        )
        assert np.array_equal(conv, rebuilt.astype(np.float32))
        assert net.run(layer, after).tobytes() == net.run(plain, after).tobytes()
        layer.close()
        plain.close()


def net_state_before(net, first, stream):
    layer = RecurLayer.allocate(net.device, net.plan, 4)
    net.run(layer, first)
    layer.select_slot(stream, 4)
    conv = net.state(layer)[0]
    layer.close()
    return conv


def test_a_cancelled_round_is_undone_by_doing_nothing(device, stream):
    net = Net(device, stream, "gated", 32)
    layer = RecurLayer.allocate(device, net.plan, 3)
    net.run(layer, net.inputs(3))
    layer.select_slot(stream, 2)
    before = [s.tobytes() for s in net.state(layer)]
    net.run(layer, net.inputs(3))
    assert [s.tobytes() for s in net.state(layer)] == before
    layer.close()


def test_two_long_runs_are_the_same_bits(device, stream):
    net = Net(device, stream, "kda", 32)
    steps = [net.inputs(1) for _ in range(20)]

    def walk():
        layer = RecurLayer.allocate(device, net.plan, 2)
        out = b""
        for i in range(100):
            out = net.run(layer, steps[i % 20]).tobytes()
            layer.select_slot(stream, 1)
        state = net.state(layer)
        layer.close()
        return out, state[0].tobytes(), state[1].tobytes()

    assert walk() == walk()


def test_a_captured_step_needs_no_parity(device, stream):
    net = Net(device, stream, "gated", 32)
    eager, captured = (RecurLayer.allocate(device, net.plan, 2) for _ in range(2))
    x = net.inputs(2)
    rows, alpha, beta = (net.up(i) for i in x)
    out = device.empty((2, net.n_v, net.d), np.float32, stream)
    w, a, dt = net.fixed

    def body():
        captured.step(stream, rows, w, alpha, a, dt, beta, out, rule="gated")
        captured.select_slot(stream, 2)

    net.run(eager, x)  # loads the kernel
    with stream.capture("recur") as graph:
        body()
    exec_ = graph.instantiate()
    assert captured.counter.value == 0
    for i in range(7):
        x = net.inputs(2)
        for buffer, new in zip((rows, alpha, beta), x, strict=True):
            buffer.copy_from(stream, new)
        exec_.launch(stream)
        want = net.run(eager, x)
        eager.select_slot(stream, 2)
        assert out.to_numpy(stream).tobytes() == want.tobytes()
        if i % 3 == 1:  # one of the two rows is rejected
            for layer in (eager, captured):
                layer.select_slot(stream, -1)
        assert captured.slot == captured.slot_d.to_numpy(stream)[0] % captured.n_slots
        assert [s.tobytes() for s in net.state(captured)] == [s.tobytes() for s in net.state(eager)]
    report = exec_.describe()
    assert report.memory_nodes == 0 and report.node_updates == 0 and report.kernel_nodes == 2
    exec_.close()


def test_refusals(device, stream):
    net = Net(device, stream, "gated", 32)
    layer = RecurLayer.allocate(device, net.plan, 3)
    net.run(layer, net.inputs(3))
    layer.select_slot(stream, 3)
    for steps in (1, -4):
        with pytest.raises(RewindRefused):
            layer.select_slot(stream, steps)
    with pytest.raises(CapacityExceeded):
        net.run(layer, net.inputs(4))
    net.run(layer, net.inputs(40), "scan")
    layer.select_slot(stream, 1)
    assert layer.counter.value == 4
    before = [s.tobytes() for s in net.state(layer)]
    other = Net(device, stream, "gated", 64)
    with pytest.raises((PlaneError, ArgumentError)):
        other.run(layer, other.inputs(1))
    wrong = Net(device, stream, "gated", 32)
    wrong.rule = "delta"
    with pytest.raises(FormatUnsupported):
        wrong.run(layer, wrong.inputs(1))
    assert [s.tobytes() for s in net.state(layer)] == before
    with pytest.raises(PlaneError):
        RecurLayer.allocate(device, net.plan, 0)
    assert RecurLayer.state_bytes(Recurrent(24_576, 4, 1_048_576), 0) == 4 * (73_728 + 1_048_576)
    layer.close()
