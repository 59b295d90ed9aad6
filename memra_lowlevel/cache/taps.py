"""Taps: copies of the hidden states of chosen layers, for drafters that feed on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..closing import Closing
from ..errors import ArgumentError, PlaneError

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = ["DflashTapSink", "HcTapSink"]


class _Sink(Closing):
    """What both sinks have in common: which layers, how wide, and where a row goes."""

    def __init__(self, layer_ids: Sequence[int], hidden: int, t: int):
        self.layer_ids = tuple(layer_ids)
        if hidden < 1 or t < 1 or not self.layer_ids:
            raise PlaneError(
                f"{type(self).__name__}: hidden {hidden} and t {t} must be at least 1, and at "
                f"least one layer is tapped ({list(layer_ids)})"
            )
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise PlaneError(f"{type(self).__name__}: a layer is tapped twice: {list(layer_ids)}")
        self.hidden, self.t = hidden, t

    @property
    def n_taps(self) -> int:
        """Tapped layers."""
        return len(self.layer_ids)

    def slot_of(self, layer: int) -> int | None:
        """Return the tap slot of a layer, or None."""
        return self.layer_ids.index(layer) if layer in self.layer_ids else None

    def _at(self, row: int, slot: int, n_rows: int) -> int:
        if not 0 <= row < n_rows or not 0 <= slot < self.n_taps:
            raise PlaneError(
                f"{type(self).__name__}: row {row}, slot {slot} lies outside the sink of {n_rows} "
                f"rows and {self.n_taps} taps; set base (and origin) for this walk"
            )
        return row * self.n_taps * self.hidden + slot * self.hidden

    def _rows(self, values: Buffer) -> int:
        if values.dtype != np.float32 or values.shape[-1] != self.hidden or len(values.shape) != 2:
            raise ArgumentError(
                f"{type(self).__name__}: values must be f32 [n, {self.hidden}], got "
                f"{values.dtype} {list(values.shape)}",
                name="values",
                expected=f"float32 [n, {self.hidden}]",
                got=f"{values.dtype} {list(values.shape)}",
            )
        return int(values.shape[0])


class DflashTapSink(_Sink):
    """Taps on the device: row r, slot s lies at ``buf[(base + r) * n_taps * hidden + s * hidden]``.

    Attributes
    ----------
    layer_ids : tuple of int
    buf : Buffer
        f32 ``[t, n_taps, hidden]``.
    hidden, t : int
    base : int
        Row of the sink that row 0 of a walk goes to: 0 for whole walks, set by chunked ones.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        layer_ids: Sequence[int],
        hidden: int,
        t: int,
        *,
        base: int = 0,
    ):
        super().__init__(layer_ids, hidden, t)
        self.base = base
        self.buf: Buffer = device.zeros((t, self.n_taps, hidden), np.float32, stream, "taps")

    def offset(self, row: int, slot: int) -> int:
        """Return the element at which a row of the walk begins in a slot."""
        return self._at(self.base + row, slot, self.t)

    def write(self, stream: Stream, layer: int, values: Buffer) -> None:
        """Store the output rows of a layer; nothing for a layer that is not tapped.

        One copy per row, legal under capture (the base is frozen then).

        Parameters
        ----------
        values : Buffer
            f32 ``[n, hidden]``.
        """
        slot = self.slot_of(layer)
        if slot is None:
            return
        n = self._rows(values)
        if n:
            self.offset(n - 1, slot)  # the last row fits, so all do: nothing is written before
        for r in range(n):
            self.buf.view(4 * self.offset(r, slot), (self.hidden,), np.float32).copy_from(
                stream, values.view(4 * r * self.hidden, (self.hidden,), np.float32)
            )

    def close(self) -> None:
        """Free the buffer; idempotent."""
        self.buf.close()


class HcTapSink(_Sink):
    """Taps on the host: row r, slot s lies at ``rows[(base - origin + r) * n_taps * hidden + …]``.

    Values are means over the streams of a hyper-connection. With ``device_stage`` the rows of a
    walk are first kept on the device, one buffer per slot, so that a walk may be captured, and
    :meth:`drain` brings them over once.

    Attributes
    ----------
    layer_ids : tuple of int
    rows : numpy.ndarray
        f32 ``[t, n_taps, hidden]``.
    hidden, t : int
    base : int
        Position of the walk's row 0.
    origin : int
        Position of the sink's row 0: 0 for a fresh prompt.
    dev : list of Buffer or None
        Per slot, f32 ``[t, hidden]``.
    device_stage : bool
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        layer_ids: Sequence[int],
        hidden: int,
        t: int,
        *,
        base: int = 0,
        origin: int = 0,
        device_stage: bool = False,
    ):
        super().__init__(layer_ids, hidden, t)
        self.base, self.origin, self.device_stage = base, origin, device_stage
        self.rows: NDArray[np.float32] = np.zeros((t, self.n_taps, hidden), np.float32)
        self.dev: list[Buffer | None] = [
            device.zeros((t, hidden), np.float32, stream, "tap stage") if device_stage else None
            for _ in self.layer_ids
        ]
        self._staged = [0] * self.n_taps

    def offset(self, row: int, slot: int) -> int:
        """Return the element at which a row of the walk begins in a slot."""
        return self._at(self.base - self.origin + row, slot, self.t)

    def put(self, layer: int, values: Any) -> None:
        """Store rows that are on the host: ``[n, hidden]``, or ``[n, n_streams, hidden]``."""
        slot = self.slot_of(layer)
        if slot is None:
            return
        rows = np.asarray(values, np.float32)
        if rows.ndim == 3:
            rows = rows.mean(axis=1, dtype=np.float32)
        if len(rows):
            self.offset(len(rows) - 1, slot)
        for r, row in enumerate(rows):
            self.rows.reshape(-1)[self.offset(r, slot) :][: self.hidden] = row

    def write(self, stream: Stream, layer: int, values: Buffer) -> None:
        """Store rows that are on the device, f32 ``[n, hidden]``, already averaged.

        Staged, this is one copy on the device and legal under capture; otherwise it waits for the
        stream.
        """
        slot = self.slot_of(layer)
        if slot is None:
            return
        n = self._rows(values)
        if n:
            self.offset(n - 1, slot)
        stage = self.dev[slot]
        if stage is None:
            self.put(layer, values.to_numpy(stream))
        elif n:
            stage.view(0, values.shape, np.float32).copy_from(stream, values)
            self._staged[slot] = n

    def drain(self, stream: Stream, n: int | None = None) -> None:
        """Bring the staged rows of a walk to the host; waits for the stream.

        Parameters
        ----------
        n : int, optional
            Rows of the walk; default those of the last write (a replayed graph writes as many as
            it was captured with).
        """
        for slot, stage in enumerate(self.dev):
            count = self._staged[slot] if n is None else n
            if stage is not None and count:
                rows = stage.view(0, (count, self.hidden), np.float32).to_numpy(stream)
                self.put(self.layer_ids[slot], rows)

    def close(self) -> None:
        """Free the staging buffers; idempotent."""
        for stage in self.dev:
            if stage is not None:
                stage.close()
