"""The layer's side of the state wire."""

from __future__ import annotations

from typing import Any

import numpy as np

from memra_lowlevel.errors import KvStateError, KvWireError

from . import wire
from .arith import F32
from .base import LayerBase
from .modes import KvMode, WireKind
from .store import Stores

__all__ = ["WireMethods"]

_F16_MAX = np.float32(65520.0)


class WireMethods(LayerBase):
    """A layer that can be sent and received."""

    def export_wire(self, f16: bool = False) -> bytes:
        """Return the state as one self-describing record.

        Parameters
        ----------
        f16 : bool
            Halve keys, values and rings; importance and recurrent vectors stay float32.

        Raises
        ------
        KvStateError
            For a quantised mode, an O(1) override or its latch, a pending scratch, a kind that
            does not fit what the layer holds, values that are not finite or do not fit f16.
        """
        self._usable("export_wire")
        kind = self._wire_kind
        ring = self._bounded
        rows = bool(self._stores.rows.any())
        checks = (
            (
                self.mode.quantised,
                f"its mode is {self.mode}; only float32 rows travel. A layer that is to be sent "
                "is made with mode=KvMode.F32; its rows can be appended to a quantised one there",
            ),
            (self._o1 is not None, "it has an O(1) override"),
            (self._stores.columns_frozen(), "it has frozen columns"),
            (self._linear_scratch.size > 0, "a recurrent scratch is pending; accept or discard it"),
            (
                (kind is WireKind.BOUNDED) != (ring is not None),
                f"kind {kind.name} with {'no ring' if ring is None else 'a ring'}",
            ),
            (ring is not None and ring.seen != self._seq_len, "ring and seq_len disagree"),
            (kind is WireKind.LINEAR and rows, "kind LINEAR would lose its stored rows"),
            (
                kind is WireKind.FULL and self._n_imp != self._seq_len,
                "it has positions without rows; a recurrent layer has wire kind LINEAR",
            ),
            (kind is WireKind.FULL and self._seq_len >> 32 != 0, "seq_len needs more than 32 bits"),
            (self.pos_len >> 64 != 0, "its position needs more than 64 bits"),
        )
        for wrong, why in checks:
            if wrong:
                raise KvStateError(f"export_wire: not from this layer: {why}")
        half = bool(f16)
        if kind is WireKind.LINEAR:
            _finite("recurrent state", self._linear_state, False)
            body = wire.pack_linear(self._nkv, self._hd, self._linear_state)
        elif ring is not None:
            _finite("ring", ring.ring_k, half)
            _finite("ring", ring.ring_v, half)
            body = wire.pack_bounded(ring.ring_k, ring.ring_v, ring.len, ring.head, half)
        else:
            heads = [
                (self._stores.view("k", h), self._stores.view("v", h)) for h in range(self._nkv)
            ]
            for pair in heads:
                _finite("keys", pair[0], half)
                _finite("values", pair[1], half)
            _finite("recurrent state", self._linear_state, False)
            _finite("importance", self.imp, False)
            body = wire.pack_full(
                heads, self._seq_len, self._hd, self._linear_state, self.imp, half
            )
            if self._base:
                kind = WireKind.FULL_TAIL
                body = self._base.to_bytes(8, "little") + body
        position = self._base + self._seq_len
        return wire.pack_header(self._wire_identity, self._wire_layer, kind, half, position) + body

    def import_wire(self, buf: Any) -> None:
        """Replace the state by an exported one; all of it is checked before anything changes.

        The mode becomes float32 and stays so, through :meth:`clear` too: quantising rows again is
        for a new layer, to which they are appended. An O(1) override, its latch and a pending
        scratch are dropped; sinks, wire fields and the ring's geometry stay.

        A record holds no checksum: a flipped bit of a value is a value. Where that can happen,
        send :func:`~memra_lowlevel.layer_kv.hash64` of the bytes beside them.

        Parameters
        ----------
        buf : bytes-like
            A version 2 record of this layer's kind, layer and identity, or an unversioned body.

        Raises
        ------
        KvWireError
            For anything else; the layer is unchanged, bit for bit.
        """
        ring = self._bounded
        record = wire.parse(
            buf,
            nkv=self._nkv,
            hd=self._hd,
            kind=self._wire_kind,
            layer=self._wire_layer,
            identity=self._wire_identity,
            window=None if ring is None else ring.window,
            state_len=self._expected_state_len,
        )
        if record.legacy and (not self._linear_wire_allowed or ring is not None):
            raise KvWireError(
                "import_wire: an unversioned state is refused here: nothing in it says which "
                "operator wrote it"
            )
        if record.kind is not WireKind.BOUNDED and ring is not None:
            raise KvWireError(f"import_wire: a {record.kind.name} record for a bounded ring")
        stores = Stores(self._nkv, self._hd, KvMode.F32)
        if record.heads:
            stores.reserve(max(len(k) for k, _ in record.heads))
            for h, (k, v) in enumerate(record.heads):
                stores.k[h, : len(k)], stores.v[h, : len(v)] = k, v
                stores.rows[h] = len(k)
        self._stores = stores
        self._imp, self._n_imp = record.imp, record.imp.size
        self._alive = None if record.imp.size == 0 else stores.rows > 0
        self._linear_state = record.linear
        self._linear_scratch: F32 = np.zeros(0, np.float32)
        self._scratch_positions = 0
        self._o1, self._o1_error = None, None
        self._base, self._seq_len = record.base, record.position - record.base
        if ring is not None and record.ring_k is not None and record.ring_v is not None:
            ring.clear()
            ring.ring_k[...], ring.ring_v[...] = record.ring_k, record.ring_v
            ring.seen = record.position
        self._touch()


def _finite(what: str, x: F32, f16: bool) -> None:
    bound = _F16_MAX if f16 else np.float32(np.inf)
    if not (np.abs(x) < bound).all():
        raise KvStateError(
            f"export_wire: {what} holds a value that is not finite"
            + (" or does not fit f16; export float32" if f16 else "")
        )
