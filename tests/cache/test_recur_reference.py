import numpy as np
import pytest

from memra_lowlevel.reference import recur

Q = np.array([[[0.6, 0.8]], [[1.0, 0.0]]])
K = np.array([[[0.8, 0.6]], [[0.6, 0.8]]])
V = np.array([[[2.0, 4.0]], [[1.0, 1.0]]])
BETA = np.array([[0.5], [1.0]])


def untransposed(state):
    return np.swapaxes(state, -1, -2)[0]


def test_golden_of_the_gated_rule():
    out, states = recur.gated_delta(np.zeros((1, 2, 2)), Q, K, V, [[0.5], [0.25]], BETA)
    np.testing.assert_allclose(untransposed(states[0]), [[0.8, 1.6], [0.6, 1.2]], atol=1e-12)
    np.testing.assert_allclose(
        untransposed(states[1]), [[0.656, 0.712], [0.758, 0.716]], atol=1e-12
    )
    np.testing.assert_allclose(
        out[:, 0], [[0.6788225, 1.3576450], [0.4638620, 0.5034600]], atol=1e-7
    )


def test_golden_of_kda():
    decay = np.array([[[0.5, 0.25]], [[0.25, 0.5]]])
    out, states = recur.kda(np.zeros((1, 2, 2)), Q, K, V, decay, BETA)
    np.testing.assert_allclose(
        untransposed(states[1]), [[0.584, 0.568], [0.812, 0.824]], atol=1e-12
    )
    np.testing.assert_allclose(out[1, 0], [0.4129504, 0.4016367], atol=1e-7)


def test_conv_state_rolls():
    out, states = recur.conv_assemble_and_roll([[1, 2, 3]], [[4]], [[1, 0, 0, 0]])
    assert states[0].tolist() == [[2, 3, 4]]
    assert out[0, 0] == pytest.approx(1 / (1 + np.exp(-1)))


@pytest.mark.parametrize("kernel", range(1, 9))
def test_conv_state_rebuilt_equals_rolled(kernel):
    rng = np.random.default_rng(kernel)
    old, new = rng.normal(size=(5, kernel - 1)), rng.normal(size=(6, 5))
    _, states = recur.conv_assemble_and_roll(old, new, rng.normal(size=(5, kernel)))
    for keep in range(1, 7):
        assert np.array_equal(recur.conv_keep(old, new, keep), states[keep - 1])
    assert np.array_equal(recur.conv_keep(old, new, 0), old)


def test_helpers():
    assert recur.softplus(30.0) == 30.0 and recur.softplus(0.0) == pytest.approx(np.log(2))
    x = np.array([3.0, 4.0])
    np.testing.assert_allclose(recur.l2_normalise(x, 0.0), [0.6, 0.8])
    assert recur.kda_decay(0.0, 0.0, 0.0) == pytest.approx(np.exp(-2.5))
