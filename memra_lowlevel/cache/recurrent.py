"""The state of a linear-attention layer: a few slots, and a counter on the device that selects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..closing import Closing
from ..errors import CapacityExceeded, PlaneError, RewindRefused
from ..graph.capture import capture_of
from ..graph.counters import DeviceCounter
from ..kernels import recur as kernels
from .plan import Recurrent

if TYPE_CHECKING:
    from ..runtime import Arena, Buffer, Device, Stream

__all__ = ["RecurLayer"]

_ALIGN = 256


class RecurLayer(Closing):
    """Convolution and recurrent states of one layer, one per row of a round and one to start from.

    =============  ==========================================  ================================
    buffer         shape (f32)                                 layout
    =============  ==========================================  ================================
    ``conv``       ``[n_slots, conv_width, conv_kernel - 1]``  raw columns, oldest first
    ``ssm``        ``[n_slots, state_width]``                  ``[head, column, row]``
    =============  ==========================================  ================================

    The device counter ``slot_d`` counts committed steps; the current slot is its value modulo
    ``n_slots``. A step of n rows reads the current slot ``s`` and leaves the state after row r in
    slot ``s + 1 + r``; the state it started from stays. Taking over j rows adds j to the counter,
    rejecting some is a smaller j: one counter write, no copy, and a captured step needs no parity.

    Attributes
    ----------
    plan : Recurrent
    n_slots : int
    conv, ssm : Buffer
    slot_d : Buffer
        i32[1].
    """

    def __init__(
        self,
        plan: Recurrent,
        n_rows: int,
        *,
        arena: Arena,
        stream: Stream,
        counter: DeviceCounter | None = None,
        slot_d: Buffer | None = None,
        name: str = "recur",
    ):
        if n_rows < 1:
            raise PlaneError(f"{name}: rounds of {n_rows} rows; give at least 1")
        self.plan, self.name, self.n_slots = plan, name, n_rows + 1
        self.device = arena.device
        pad = plan.conv_kernel - 1
        self.conv: Buffer = arena.take(
            (self.n_slots, plan.conv_width, pad), np.float32, _ALIGN, f"{name}.conv"
        )
        self.ssm: Buffer = arena.take(
            (self.n_slots, plan.state_width), np.float32, _ALIGN, f"{name}.ssm"
        )
        self._grouped = counter is not None
        if counter is None or slot_d is None:
            slot_d = arena.take((1,), np.int32, 8, f"{name}.slot")
            slot_d.fill(stream, 0)
            counter = DeviceCounter(slot_d, f"{name}.slot")
        self.slot_d, self.counter = slot_d, counter
        self.conv.fill(stream, 0)
        self.ssm.fill(stream, 0)
        # States [low, high] of the counter are there: bounds of what may be selected.
        self._low = self._high = 0
        self._arena: Arena | None = None

    @classmethod
    def allocate(
        cls, device: Device, plan: Recurrent, n_rows: int, *, name: str = "recur"
    ) -> RecurLayer:
        """Make a layer of its own, all states zero, for rounds of at most ``n_rows`` rows."""
        arena = device.arena(cls.state_bytes(plan, max(1, n_rows)) + 4 * _ALIGN, name=name)
        stream = device.stream(name=f"{name} start")
        try:
            layer = cls(plan, n_rows, arena=arena, stream=stream, name=name)
            stream.sync()
        finally:
            stream.close()
        layer._arena = arena
        return layer

    @staticmethod
    def state_bytes(plan: Recurrent, n_rows: int) -> int:
        """Bytes of all states for rounds of at most ``n_rows`` rows."""
        one = plan.conv_width * (plan.conv_kernel - 1) + plan.state_width
        return 4 * (n_rows + 1) * one

    # -- what it holds ----------------------------------------------------------------------------
    @property
    def slot(self) -> int:
        """The current slot."""
        return self.counter.value % self.n_slots

    @property
    def conv_state(self) -> Buffer:
        """f32 ``[conv_width, conv_kernel - 1]`` of the current slot."""
        return self._view(self.conv, self.slot)

    @property
    def ssm_state(self) -> Buffer:
        """f32 ``[state_width]`` of the current slot."""
        return self._view(self.ssm, self.slot)

    # -- work -------------------------------------------------------------------------------------
    def conv_assemble_and_roll(
        self, stream: Stream, rows: Buffer, weights: Buffer, out: Buffer
    ) -> None:
        """Convolve rows by themselves; :meth:`step` does it in the same launch.

        Parameters
        ----------
        rows, out : Buffer
            f32 ``[n, conv_width]``.
        weights : Buffer
            f32 ``[conv_width, conv_kernel]``.
        """
        self._check_rows(rows.shape[0])
        kernels.conv_roll(stream, rows, weights, self.conv, self.slot_d, out)
        self._note_step(stream, rows.shape[0])

    def step(
        self,
        stream: Stream,
        rows: Buffer,
        weights: Buffer | None,
        alpha: Buffer,
        a: Buffer,
        dt_bias: Buffer,
        beta: Buffer,
        out: Buffer,
        **options: Any,
    ) -> None:
        """Run rows of a round; every row leaves its state in a slot, the counter does not move.

        Parameters
        ----------
        rows : Buffer
            f32 ``[n, conv_width]``: q, k, v of each row, before the convolution; after it where
            ``weights`` is None.
        weights, alpha, a, dt_bias, beta, out, **options
            As in :func:`memra_lowlevel.kernels.recur.delta_rows`.

        Raises
        ------
        CapacityExceeded
            More rows than a round may have.
        """
        self._check_rows(rows.shape[0])
        kernels.delta_rows(
            stream, rows, weights, self.conv if weights is not None else None,
            self._heads(out), self.slot_d, alpha, a, dt_bias, beta, out, **options,
        )  # fmt: skip
        self._note_step(stream, rows.shape[0])

    def scan(
        self,
        stream: Stream,
        rows: Buffer,
        weights: Buffer | None,
        alpha: Buffer,
        a: Buffer,
        dt_bias: Buffer,
        beta: Buffer,
        out: Buffer,
        **options: Any,
    ) -> None:
        """Run any number of rows; only the last leaves a state, in the next slot.

        The same arithmetic as :meth:`step`, bit for bit. The counter does not move; taking the
        rows over adds 1 to it, and it cannot be rewound into them.
        """
        kernels.delta_rows(
            stream, rows, weights, self.conv if weights is not None else None,
            self._heads(out), self.slot_d, alpha, a, dt_bias, beta, out,
            keep_all=False, **options,
        )  # fmt: skip
        self._note_step(stream, 1)

    def select_slot(self, stream: Stream, steps: int) -> None:
        """Take over ``steps`` rows of the last step (1 for a scan), or go back where negative.

        Captured, every launch adds ``steps``.

        Raises
        ------
        RewindRefused
            A state that is not kept any more, or was never made.
        """
        if self._grouped:
            raise PlaneError(
                f"{self.name}.select_slot: the slot moves with the cache; call advance or set_len "
                "of the cache"
            )
        if capture_of(stream) is None:
            self.check_counter(self.counter.value + steps)
        self.counter.advance(stream, steps)

    def check_counter(self, value: int) -> None:
        """Refuse a value of the counter whose state is not there."""
        if not self._low <= value <= self._high:
            raise RewindRefused(
                f"{self.name}: the state of step {value} is not kept, only those of steps "
                f"{self._low} to {self._high}; restore a snapshot and replay",
                plane=self.name,
                asked=value,
                possible=self._low,
            )

    def holds(self, value: int) -> bool:
        """Whether the state of a value of the counter is there."""
        return self._low <= value <= self._high

    def restored(self, value: int) -> None:
        """Note that the state of step ``value`` was just written, and is the only one."""
        self._low = self._high = value

    def describe(self) -> dict[str, Any]:
        """Return sizes and the current slot."""
        return {
            "name": self.name,
            "n_slots": self.n_slots,
            "slot": self.slot,
            "bytes": self.conv.n_bytes + self.ssm.n_bytes,
        }

    def close(self) -> None:
        """Free the states, unless they are part of a cache; idempotent."""
        if self._arena is not None:
            self._arena.close()

    # -- inside -----------------------------------------------------------------------------------
    def _view(self, buffer: Buffer, slot: int) -> Buffer:
        shape = buffer.shape[1:]
        size = 4 * int(np.prod(shape))
        return buffer.view(slot * size, shape, np.float32)

    def _heads(self, out: Buffer) -> Buffer:
        n_v, d = out.shape[-2:]
        if n_v * d * d != self.plan.state_width:
            raise PlaneError(
                f"{self.name}: {n_v} heads of {d} have a state of {n_v * d * d} elements, the "
                f"plane {self.plan.state_width}"
            )
        return self.ssm.view(0, (self.n_slots, n_v, d, d), np.float32)

    def _check_rows(self, n: int) -> None:
        if not 1 <= n < self.n_slots:
            raise CapacityExceeded(
                f"{self.name}: a round of {n} rows, but it keeps states for 1 to "
                f"{self.n_slots - 1}; allocate more, or scan"
            )

    def _note_step(self, stream: Stream, n: int) -> None:
        capture = capture_of(stream)
        if capture is not None:
            # Before each launch: the states that it will overwrite are gone.
            capture.add_check(lambda _: self._wrote(n))
        else:
            self._wrote(n)

    def _wrote(self, n: int) -> None:
        self._high = self.counter.value + n
        self._low = max(self._low, self._high - self.n_slots + 1)
