"""Recurrent cores over a layer's ``linear_state``: classic phase, Phase-Delta, input convolution.

The vector of a layer is ``S float32 [n_heads][2 * n_phase][value_width]``, followed by the last
``k - 1`` raw inputs ``[k - 1][hidden]``, oldest first, where the core has a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_lowlevel.errors import KvShapeError, KvStateError

from . import loops
from .arith import F32
from .base import LayerBase
from .inputs import array_in, count, real

__all__ = [
    "PhaseCore",
    "RecurrentMethods",
    "decay_from_log",
    "gated_delta_len",
    "phase_len",
    "short_conv_len",
    "validate_delta_layers",
]

F64 = npt.NDArray[np.float64]


def phase_len(
    n_heads: int, n_phase: int, value_width: int, conv_kernel: int = 0, hidden: int = 0
) -> int:
    """Return the floats of a phase core's vector."""
    return n_heads * 2 * n_phase * value_width + max(conv_kernel - 1, 0) * hidden


def gated_delta_len(
    n_key_heads: int, n_value_heads: int, key_width: int, value_width: int, conv_kernel: int
) -> int:
    """Return the floats of a gated delta net: ``[(kk - 1) * c_dim ring | nv * dk * dv]``."""
    channels = 2 * n_key_heads * key_width + n_value_heads * value_width
    return (conv_kernel - 1) * channels + n_value_heads * key_width * value_width


def short_conv_len(kernel: int, hidden: int) -> int:
    """Return the floats of a short convolution, which is its ring alone."""
    return (kernel - 1) * hidden


def decay_from_log(a_log: Any) -> F64:
    """Return ``exp(-exp(A_log))`` in float64."""
    out: F64 = np.exp(-np.exp(_float64(a_log, "a_log")))
    return out


def validate_delta_layers(
    kind: str, delta_layers: Sequence[int] | None, layer_types: Sequence[str]
) -> None:
    """Check the list that chooses Phase-Delta layers, as a file's header gives it.

    Raises
    ------
    KvStateError
        If it is empty, repeats a layer, names one that is absent or not linear, or is present with
        the classic kind ``vmf_phase`` or absent with ``vmf_phase_delta_v1``.
    """
    if kind not in ("vmf_phase", "vmf_phase_delta_v1"):
        raise KvStateError(f"linear core {kind!r} is neither vmf_phase nor vmf_phase_delta_v1")
    if kind == "vmf_phase":
        if delta_layers is not None:
            raise KvStateError("delta layers are listed, but the core is the classic vmf_phase")
        return
    if not delta_layers:
        raise KvStateError("vmf_phase_delta_v1 names no delta layer")
    if len(set(delta_layers)) != len(delta_layers):
        raise KvStateError(f"delta layers {list(delta_layers)} repeat a layer")
    for layer in delta_layers:
        if not 0 <= layer < len(layer_types):
            raise KvStateError(f"delta layer {layer}: the model has {len(layer_types)} layers")
        if layer_types[layer] != "LinearAttention":
            raise KvStateError(f"delta layer {layer} is {layer_types[layer]}, not LinearAttention")


class RecurrentMethods(LayerBase):
    """The speculative pair of a recurrent layer.

    Lane 1 is always accepted and steps in `linear_state`; lane 2 steps in `linear_scratch`, a copy
    that :meth:`fork_linear` makes after lane 1. Acceptance swaps, rejection discards.
    """

    def fork_linear(self) -> None:
        """Copy the state to the scratch, for a second lane.

        Raises
        ------
        KvStateError
            If a scratch is pending or there is no state.
        """
        if self._linear_scratch.size:
            raise KvStateError("fork_linear: a scratch is pending; accept or discard it first")
        if not self._linear_state.size:
            raise KvStateError("fork_linear: the layer has no recurrent state yet")
        self._linear_scratch = self._linear_state.copy()
        self._scratch_positions = 0

    def accept_linear_scratch(self) -> None:
        """Make the second lane the state.

        Raises
        ------
        KvStateError
            If no scratch is pending.
        """
        if not self._linear_scratch.size:
            raise KvStateError("accept_linear_scratch: no scratch is pending")
        self._linear_state = self._state_vector(self._linear_scratch, "linear_scratch")
        self._linear_scratch = np.zeros(0, np.float32)
        self._scratch_positions = 0

    def discard_linear_scratch(self) -> None:
        """Drop the second lane, with the positions that only it holds."""
        self._linear_scratch = np.zeros(0, np.float32)
        self._seq_len -= self._scratch_positions
        self._scratch_positions = 0


class PhaseCore:
    """A phase core: what it needs of a model, and its step on a layer.

    Parameters
    ----------
    n_heads, n_phase, value_width : int
    decay : float64 [n_heads * 2 * n_phase]
        In (0, 1].
    delta : bool
        Phase-Delta instead of the classic core; features carry ``1 / sqrt(n_phase)`` then and
        `mass` is ignored.
    mass : float
        Angles are divided by ``1 + mass``.
    taps : float32 [hidden, k], optional
        Depthwise causal convolution of the inputs, ``k >= 2``.

    Raises
    ------
    KvShapeError, KvStateError
        For a size below 1, a decay outside (0, 1] or not finite, a negative mass, fewer than two
        taps.
    """

    def __init__(
        self,
        n_heads: int,
        n_phase: int,
        value_width: int,
        decay: Any,
        *,
        delta: bool = False,
        mass: float = 0.0,
        taps: Any = None,
    ):
        self.n_heads = count(n_heads, "n_heads", 1)
        self.n_phase = count(n_phase, "n_phase", 1)
        self.value_width = count(value_width, "value_width", 1)
        width = 2 * self.n_phase
        self.decay: F64 = _float64(decay, "decay").reshape(-1)
        if self.decay.size != self.n_heads * width:
            raise KvShapeError(f"decay: {self.decay.size} values for {self.n_heads} x {width}")
        if not ((self.decay > 0.0) & (self.decay <= 1.0)).all():
            raise KvStateError("decay: every value must be finite and in (0, 1]")
        self.decay = self.decay.reshape(self.n_heads, width)
        self.delta, self.mass = bool(delta), real(mass, "mass")
        if self.mass < 0.0:
            raise KvStateError(f"mass: {mass!r} is negative")
        self.taps: F32 | None = None
        if taps is not None:
            shape = np.shape(taps)
            if len(shape) != 2 or shape[1] < 2 or shape[0] < 1:
                raise KvShapeError(f"taps: shape {shape}, where [hidden, k >= 2] is needed")
            self.taps = array_in(taps, "taps").reshape(shape).copy()

    @property
    def state_len(self) -> int:
        """Floats of the vector."""
        hidden, k = (0, 0) if self.taps is None else self.taps.shape
        return phase_len(self.n_heads, self.n_phase, self.value_width, k, hidden)

    def prepare(self, layer: RecurrentMethods) -> None:
        """Give a layer its zero state, and the length that its state must have from now on.

        Raises
        ------
        KvShapeError
            If the layer holds a state of another length; it is left alone.
        """
        layer.expected_state_len = self.state_len
        if not layer.linear_state.size:
            layer.linear_state = np.zeros(self.state_len, np.float32)

    def convolve(self, layer: RecurrentMethods, x: Any, *, scratch: bool = False) -> F32:
        """Convolve one raw input ``[hidden]`` with the kept ones and keep it.

        Returns
        -------
        float32 [hidden]
            What every projection of this position reads.
        """
        if self.taps is None:
            raise KvStateError("convolve: this core has no taps")
        hidden, k = self.taps.shape
        value = array_in(x, "x", hidden)
        if not np.isfinite(value).all():
            raise KvStateError("convolve: x holds a NaN or an infinity")
        vector = self._vector(layer, scratch)
        ring = vector[vector.size - (k - 1) * hidden :].reshape(k - 1, hidden)
        y: F32 = self.taps[:, k - 1] * value
        for j in range(k - 1):
            y = y + self.taps[:, j] * ring[j]
        ring[:-1] = ring[1:].copy()
        ring[-1] = value
        return y

    def step(
        self,
        layer: RecurrentMethods,
        theta_q: Any,
        theta_k: Any,
        v: Any,
        gate: Any = None,
        *,
        scratch: bool = False,
    ) -> F32:
        """Advance the state by one position and read it; advances the layer's `seq_len`.

        Parameters
        ----------
        layer : LayerKvCache
        theta_q, theta_k : float32 [n_heads * n_phase]
            Angles.
        v : float32 [n_heads * value_width]
        gate : float32 [n_heads], optional
            Write strength of a head; 1 where not given.
        scratch : bool
            Step lane 2, in `linear_scratch`.

        Returns
        -------
        float32 [n_heads * value_width]

        Raises
        ------
        KvShapeError, KvStateError
            For wrong sizes; for inputs that are not finite; for lane 2 without a fork and lane 1
            under a pending scratch. The state is unchanged then.
        """
        nh, dv = self.n_heads, self.value_width
        angles_q = array_in(theta_q, "theta_q", nh * self.n_phase).reshape(nh, -1)
        angles_k = array_in(theta_k, "theta_k", nh * self.n_phase).reshape(nh, -1)
        value = array_in(v, "v", nh * dv).reshape(nh, dv)
        strength = np.ones(nh, np.float32) if gate is None else array_in(gate, "gate", nh)
        for name, x in (("theta_q", angles_q), ("theta_k", angles_k), ("v", value)):
            if not np.isfinite(x).all():
                raise KvStateError(f"step: {name} holds a NaN or an infinity")
        if not np.isfinite(strength).all():
            raise KvStateError("step: gate holds a NaN or an infinity")
        vector = self._vector(layer, scratch)
        cells = 2 * self.n_phase * nh * dv
        state = vector[:cells].reshape(nh, 2 * self.n_phase, dv)
        if np.may_share_memory(value, vector):
            value = value.copy()  # the state moves while the value is read
        out = np.empty((nh, dv), np.float32)
        run = loops.phase_delta if self.delta else loops.phase
        run(
            self.decay,
            self._features(angles_k),
            self._features(angles_q),
            value,
            strength,
            state,
            out,
        )
        layer._seq_len += 1
        layer._scratch_positions += int(scratch)
        return out.reshape(-1)

    def _features(self, angles: F32) -> F64:
        wide = angles.astype(np.float64)
        if not self.delta:
            wide = wide / (1.0 + self.mass)
        out: F64 = np.concatenate([np.cos(wide), np.sin(wide)], axis=1)
        return out * (1.0 / np.sqrt(float(self.n_phase))) if self.delta else out

    def _vector(self, layer: RecurrentMethods, scratch: bool) -> F32:
        if layer.o1_error is not None or layer.bounded is not None or layer.o1 is not None:
            raise KvStateError("a recurrent core cannot run on a ring or under an O(1) override")
        if scratch:
            vector = layer.linear_scratch
            if not vector.size:
                raise KvStateError("lane 2 has no scratch; call fork_linear after lane 1")
        else:
            if layer.linear_scratch.size:
                raise KvStateError("a scratch is pending; accept or discard it before lane 1")
            if not layer.linear_state.size:
                self.prepare(layer)
            vector = layer.linear_state
        if vector.size != self.state_len:
            raise KvShapeError(
                f"linear_state: {vector.size} floats where this core needs {self.state_len}"
            )
        return vector


def _float64(x: Any, name: str) -> F64:
    try:
        return np.array(x, np.float64)
    except (TypeError, ValueError) as error:
        raise KvShapeError(f"{name}: no numbers: {error}") from None
