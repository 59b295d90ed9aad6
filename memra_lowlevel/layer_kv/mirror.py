"""Device copies of a layer: rows, ring, override; kept by generation, stepped on the device.

Import this module by its name; the rest of the package needs no device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memra_lowlevel.errors import CapacityExceeded, KvShapeError, KvStateError
from memra_lowlevel.kernels import layer_kv as launches
from memra_lowlevel.kernels.counters import add_counters, set_counters
from memra_lowlevel.runtime import Buffer, Device, Stream

from .attend import default_scale
from .bounded import BoundedRope, BoundedWeights, check_ring
from .inputs import count, scalar
from .layer import LayerKvCache

__all__ = ["FarMirror", "RingMirror", "RowMirror"]


class RowMirror:
    """Rows of a layer on a device.

    :meth:`sync` brings them up to date: only new rows travel while the layer was only appended to,
    everything after any other change of rows. A row count alone could not tell that, as an eviction
    may give the same count.

    Parameters
    ----------
    device : Device
    layer : LayerKvCache
        Without a ring or override, without ragged heads.
    cap : int
        Rows that fit.
    stream : Stream
        On which the stores are made.
    """

    def __init__(self, device: Device, layer: LayerKvCache, cap: int, stream: Stream):
        _expect_layer("RowMirror", layer)
        cap = count(cap, "cap", 1)
        if layer.bounded is not None or layer.o1_sealed():
            raise KvStateError("RowMirror: this layer keeps no rows")
        self.layer, self.device = layer, device
        stores = layer._stores
        nkv, hd, mode = layer.num_kv_heads, layer.head_dim, layer.mode
        self._mode = mode

        def zeros(shape: tuple[int, ...], dtype: Any, on: bool) -> Buffer | None:
            return device.zeros(shape, dtype, stream) if on else None

        wide, f32 = (nkv, cap, hd), np.float32
        self.rows = launches.Rows(
            k=zeros(wide, f32, not mode.k),
            v=zeros(wide, f32, not mode.v),
            kq=zeros(wide, np.int8, mode.k),
            vq=zeros(wide, np.int8, mode.v),
            ks=zeros((nkv, cap, stores.groups), f32, mode.k),
            vs=zeros((nkv, cap), f32, mode.v),
            kcol=zeros((nkv, hd), f32, mode.k),
            vcol=zeros((nkv, hd), f32, mode.v),
            kcol_on=zeros((nkv,), np.uint8, mode.k),
            vcol_on=zeros((nkv,), np.uint8, mode.v),
            rows_d=device.zeros(1, np.int32, stream),
            n_kv_heads=nkv,
            hd=hd,
            cap=cap,
        )
        self._generation = -1
        self._cuts = self._n = 0
        self.rows_sent = 0

    def sync(self, stream: Stream) -> int:
        """Bring the device up to date with the layer; returns the rows that travelled.

        Raises
        ------
        CapacityExceeded
            If the layer has more rows than fit.
        KvStateError
            If it has ragged heads, or another mode than at the start.
        """
        layer, stores = self.layer, self.layer._stores
        layer._per_position("RowMirror.sync")
        layer._ragged("RowMirror.sync")
        n = layer.seq_len
        if layer.mode != self._mode:
            raise KvStateError(f"RowMirror.sync: made for {self._mode}, the layer has {layer.mode}")
        if n > self.rows.cap:
            raise CapacityExceeded(f"RowMirror.sync: {n} rows, but {self.rows.cap} fit")
        fresh = layer.generation != self._generation
        # a tail that was cut and grew again has the old count
        start = 0 if fresh else min(self._n, n, layer._rows_untouched_since(self._cuts))
        for name in stores.planes():
            plane = getattr(stores, name)
            width = plane.itemsize * (plane.shape[2] if plane.ndim == 3 else 1)
            for h in range(layer.num_kv_heads):
                if n > start and stores.rows[h]:
                    part = np.ascontiguousarray(plane[h, start:n])
                    target = getattr(self.rows, name)
                    offset = (h * self.rows.cap + start) * width
                    target.view(offset, part.shape, part.dtype).copy_from(stream, part)
        if fresh:
            for side in ("k", "v"):
                for name in (f"{side}col", f"{side}col_on"):
                    target = getattr(self.rows, name)
                    if target is not None:
                        target.copy_from(stream, getattr(stores, name))
        set_counters(stream, self.rows.rows_d, n)
        self._generation, self._cuts, self._n = layer.generation, layer._cut_serial, n
        sent = max(n - start, 0)
        self.rows_sent += sent
        return sent

    def append(self, stream: Stream, k: Buffer, v: Buffer) -> None:
        """Append f32 ``[n_kv_heads, hd]`` on the device alone; the host layer does not see it.

        A quantised layer freezes its columns on the host, so it must not cross row 64 here.
        """
        if self._n >= self.rows.cap:
            raise CapacityExceeded(f"RowMirror.append: all {self.rows.cap} rows are in use")
        if self._mode.quantised and self._n == 64 and not self.layer._stores.columns_frozen():
            raise KvStateError("RowMirror.append: the columns freeze here; append on the host")
        launches.append(stream, self.rows, k, v)
        add_counters(stream, self.rows.rows_d, 1)
        self._n += 1

    def attend(
        self,
        stream: Stream,
        q: Buffer,
        out: Buffer,
        scores: Buffer,
        *,
        n_heads: int,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Buffer | None = None,
        imp: Buffer | None = None,
    ) -> None:
        """Attend all query heads; see :func:`memra_lowlevel.kernels.layer_kv.attend`."""
        factor = default_scale(self.rows.hd) if scale is None else scalar(scale, "scale")
        cap = scalar(softcap, "softcap")
        if cap < 0:
            raise KvStateError(f"attend: softcap {softcap!r} is negative; 0 leaves the scores")
        launches.attend(
            stream, self.rows, q, out, scores, n_heads=count(n_heads, "n_heads", 1),
            scale=float(factor), window=count(window, "window"), softcap=float(cap), sinks=sinks,
            imp=imp,
        )  # fmt: skip


class RingMirror:
    """A bounded ring on a device; after the upload the device's copy is the valid one."""

    def __init__(
        self,
        device: Device,
        layer: LayerKvCache,
        w: BoundedWeights,
        rope: BoundedRope,
        stream: Stream,
    ):
        _expect_layer("RingMirror", layer)
        ring = layer.bounded
        if ring is None:
            raise KvStateError("RingMirror: this layer has no ring")
        check_ring(ring, w, rope)
        if ring.seen >= 2**31:
            raise KvShapeError("RingMirror: more positions than a device counter holds")
        send = device.from_numpy
        self.ring_k, self.ring_v = send(ring.ring_k, stream), send(ring.ring_v, stream)
        self.seen_d = send(np.array([ring.seen], np.int32), stream)
        self.n_sinks, self.half = w.n_sinks, rope.half
        self.sink_k = send(w.sink_k, stream) if w.n_sinks else None
        self.sink_v = send(w.sink_v, stream) if w.n_sinks else None
        self.cos = send(rope.cos, stream) if rope.half else None
        self.sin = send(rope.sin, stream) if rope.half else None

    def step(
        self, stream: Stream, q: Buffer, k: Buffer, v: Buffer, out: Buffer, *, scale: float,
        num_heads: int,
    ) -> None:  # fmt: skip
        """Insert one position and attend; see the layer's `bounded_step`."""
        heads = count(num_heads, "num_heads", 1)
        launches.ring_step(
            stream, self.ring_k, self.ring_v, self.seen_d, self.sink_k, self.sink_v, self.cos,
            self.sin, q, k, v, out, hpk=heads // self.ring_k.shape[0], n_sinks=self.n_sinks,
            half=self.half, scale=float(scalar(scale, "scale")),
        )  # fmt: skip
        add_counters(stream, self.seen_d, 1)


class FarMirror:
    """A sealed override on a device; after the upload the device's copy is the valid one."""

    def __init__(self, device: Device, layer: LayerKvCache, stream: Stream):
        _expect_layer("FarMirror", layer)
        if layer.o1_views() is None or layer.o1 is None or layer.o1.state is None:
            raise KvStateError("FarMirror: this layer is not sealed with a far field")
        s = layer.o1.state

        def send(a: Any) -> Buffer:
            return device.from_numpy(a, stream)

        book = np.array([s.win_len, s.win_head, s.far_len], np.int32)
        self.state = launches.FarState(
            win_k=send(s.win_k), win_v=send(s.win_v),
            sink_k=send(s.sink_k) if s.sink else None, sink_v=send(s.sink_v) if s.sink else None,
            kl=send(s.kl), ql=send(s.ql), pinv=send(s.pinv), shift=send(s.shift), mu=send(s.mu),
            z=send(s.z), t=send(s.t), book_d=send(book), groups=s.groups, hpk=s.hpk, m=s.m, w=s.w,
            sink=s.sink, d=s.d, dv=s.dv, scale=float(s.scale), fm=s.fm,
        )  # fmt: skip

    def step(self, stream: Stream, q: Buffer, k: Buffer, v: Buffer, out: Buffer) -> None:
        """Insert one position and attend; see the layer's `o1_step`."""
        launches.far_step(stream, self.state, q, k, v, out)


def _expect_layer(what: str, layer: Any) -> None:
    if not isinstance(layer, LayerKvCache):
        raise KvShapeError(f"{what}: {type(layer).__name__} is no LayerKvCache")
