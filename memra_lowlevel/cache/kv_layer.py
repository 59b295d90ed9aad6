"""The K and V planes of one attention layer: flat, or a ring under a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import expect
from ..driver.trace import caller
from ..errors import (
    ArgumentError,
    CaptureForbidden,
    FormatUnsupported,
    PlaneError,
    RewindRefused,
    RingLapped,
)
from ..formats import Format
from ..graph.capture import capture_of
from ..kernels import kv_append, kv_append_heads, kv_attend, kv_move
from ..kernels.kv_append_heads import HeadTurn
from ..runtime.device import Device
from ..runtime.memory import Buffer
from ..runtime.stream import expect_stream
from .geometry import MAX_ROWS, TAIL_PAD_BYTES, KvGeometry
from .one_length import OneLength
from .planes import Lengths, Workspace
from .ring import KvRing
from .turned import check_turn, turned_k

if TYPE_CHECKING:
    from ..graph import GraphExec
    from ..runtime import Arena, Stream

__all__ = ["KvLayer"]

_ALIGN = 256


class KvLayer(OneLength):
    """One layer's quantised keys and values, with its length on the host and on the device.

    Row r of a plane lies at byte ``r * tok_bytes``; a row is ``kv_dim / 32`` blocks of its format
    (layouts in :mod:`memra_lowlevel.formats`), kv head major. Behind the last row come 8 bytes of
    padding. A flat plane has ``max_ctx`` rows and row = position; under a ring row = position
    minus ``base``.

    At every quiescent point ``len_d[0] == len`` (and ``base_d[0] == ring.base``): ``append`` writes
    behind the length without moving it, ``advance`` moves it on the device and here, ``set_len``
    writes both. The buffers keep their addresses for the life of the layer, so that captured
    graphs stay valid.

    Attributes
    ----------
    k, v : Buffer
        u8 planes.
    kv_dim_k, kv_dim_v : int
        Elements of a row.
    k_tok_bytes, v_tok_bytes : int
        Bytes of a row.
    k_format, v_format : Format
    len : int
        Valid rows, an absolute exclusive end.
    ring : KvRing or None
        None for a flat plane.
    len_d : Buffer
        i32[1], the device's ``len``.
    base_d : Buffer or None
        i32[1], the device's ``ring.base``; None for a flat plane.
    window : int or None
        Rows that a query attends unless a call says otherwise; None for all.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        max_ctx: int,
        *,
        arena: Arena,
        lengths: Lengths,
        workspace: Workspace,
        index: int = 0,
        window: int | None = None,
        ring: KvRing | None = None,
        check: bool | None = None,
        name: str = "kv",
    ):
        self.device, self.name, self.max_ctx = arena.device, name, max_ctx
        self.n_kv_heads = geometry.n_kv_heads
        self.head_dim_k, self.head_dim_v = geometry.head_dim, geometry.head_dim_v
        self.k_format, self.v_format = geometry.k_format, geometry.v_format
        self.kv_dim_k = geometry.n_kv_heads * geometry.head_dim
        self.kv_dim_v = geometry.n_kv_heads * geometry.head_dim_v
        self.k_tok_bytes, self.v_tok_bytes = geometry.tok_bytes()
        self.window, self.ring = window, ring
        self.rows = ring.rows if ring else max_ctx
        k_bytes = self.rows * self.k_tok_bytes + TAIL_PAD_BYTES
        v_bytes = self.rows * self.v_tok_bytes + TAIL_PAD_BYTES
        self.k: Buffer = arena.take((k_bytes,), np.uint8, _ALIGN, f"{name}.k")
        self.v: Buffer = arena.take((v_bytes,), np.uint8, _ALIGN, f"{name}.v")
        self.lengths, self.index = lengths, index
        self.len_d: Buffer = lengths.view(index)
        self.base_d: Buffer | None = lengths.base(index) if ring else None
        self.check = self.device.kind == "host" if check is None else check
        self._fault: Buffer = arena.take((2,), np.int32, 8, f"{name}.fault")
        self._workspace = workspace
        self._arena = arena

    @classmethod
    def allocate(
        cls,
        device: Device,
        max_ctx: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        k_format: Format | None = None,
        v_format: Format | None = None,
        window: int | None = None,
        ring: KvRing | None = None,
        check: bool | None = None,
        name: str = "kv",
    ) -> KvLayer:
        """Make a layer of its own, with ``len`` 0 and undefined content.

        Parameters
        ----------
        device : Device
        max_ctx : int
            Longest sequence, in rows.
        n_kv_heads, head_dim : int
            ``head_dim`` a multiple of 32 that the attention kernels have.
        head_dim_v : int, optional
            Where V's head size differs.
        k_format, v_format : Format, optional
            Default: the formats that the process selected (q8_0 and q5_1).
        window : int, optional
            Rows that a query attends.
        ring : KvRing, optional
            Makes the planes a ring; its window must be ``window``.
        check : bool, optional
            Refuse rows that are not finite, by name, before an eager append (it waits for the
            stream); K as a ``turn`` leaves it. Default: on the host device. Otherwise only their
            blocks are poisoned.

        Raises
        ------
        FormatUnsupported
            No kernel for these formats and this head size.
        PlaneError
            A size that no plane can have.
        """
        expect.kind("KvLayer.allocate: device", device, Device, "a Device")
        expect.kind("KvLayer.allocate: name", name, str, "a str")
        if check is not None:
            expect.kind("KvLayer.allocate: check", check, bool, "a bool or None")
        v_dim = head_dim if head_dim_v is None else head_dim_v
        geometry = KvGeometry(n_kv_heads, head_dim, v_dim, k_format, v_format)
        geometry.check(device, max_ctx, window, ring)
        arena = device.arena(
            geometry.plane_bytes(max_ctx, ring) + 8 * _ALIGN, name=f"{name} planes"
        )
        stream = device.stream(name=f"{name} start")
        try:
            layer = cls(
                geometry, max_ctx, arena=arena,
                lengths=Lengths(arena, stream, 1, max_ctx, name=name),
                workspace=Workspace(device), window=window, ring=ring, check=check, name=name,
            )  # fmt: skip
            stream.sync()
        finally:
            stream.close()
        layer.owns_counters = True
        return layer

    # -- what it holds ----------------------------------------------------------------------------
    def physical_rows(self, start: int, end: int) -> range:
        """Physical rows of the absolute rows ``[start, end)``.

        Raises
        ------
        PlaneError
            Rows outside the plane (``RingLapped`` for a ring).
        """
        if self.ring is not None:
            return self.ring.physical_range(start, end)
        start = expect.integer(f"{self.name}: start", start, high=None)
        end = expect.integer(f"{self.name}: end", end, high=None)
        if not 0 <= start <= end <= self.max_ctx:
            raise PlaneError(
                f"{self.name}: rows [{start}, {end}) do not lie within [0, {self.max_ctx})"
            )
        return range(start, end)

    # -- rows in, attention out -------------------------------------------------------------------
    def append(
        self,
        stream: Stream,
        k: Buffer,
        v: Buffer,
        *,
        turn: HeadTurn | None = None,
        q: Buffer | None = None,
        programmatic: bool = False,
    ) -> None:
        """Quantise rows and write them behind the length, which does not move.

        Parameters
        ----------
        stream : Stream
        k, v : Buffer
            f32 ``[n, kv_dim_k]`` and ``[n, kv_dim_v]``; K already normalised and rotated unless
            there is a ``turn``.
        turn : HeadTurn, optional
            RMS norm and rotation of K's heads in the same launch. Its table of angles holds
            ``max_ctx`` positions or more.
        q : Buffer, optional
            f32 ``[n, n_heads, head_dim]``: queries to turn in place in the same launch.
        programmatic : bool
            Start while the predecessor, a kernel of the stream, still runs, on GPUs that can.

        Raises
        ------
        ArgumentError
            A buffer of another shape, a table of angles that ends before ``max_ctx``, ``q``
            without a ``turn``, or in memory that the same launch reads.
        CapacityExceeded
            ``len + n`` is more than the plane holds.
        RingLapped
            A ring has no room without a rebase: ``prepare_kv_append`` first.
        """
        expect_stream(f"{self.name}.append: stream", stream)
        self.check_open("append")
        n = self._rows_of("k", k, self.kv_dim_k)
        if self._rows_of("v", v, self.kv_dim_v) != n:
            raise ArgumentError(
                f"{self.name}.append: k has {n} rows, v has {v.shape[0]}",
                kernel="append_kv", index=1, name="v", expected=f"{n} rows", got=str(v.shape[0]),
            )  # fmt: skip
        check_turn(f"{self.name}.append", turn, k, v, q, self.max_ctx)
        self.reserve(stream, n)
        try:
            if self.check and stream.recording is None and n:
                self._check_finite(stream, k, v, turn)
            if turn is None:
                kv_append.append(
                    stream, k, v, self.k, self.v, self.len_d,
                    k_format=self.k_format, v_format=self.v_format, rows=self.rows,
                    base_d=self.base_d, programmatic=programmatic,
                )  # fmt: skip
            else:
                kv_append_heads.append(
                    stream, k, v, self.k, self.v, self.len_d, turn,
                    k_format=self.k_format, v_format=self.v_format, rows=self.rows,
                    n_kv_heads=self.n_kv_heads, q=q, base_d=self.base_d,
                    programmatic=programmatic,
                )  # fmt: skip
        except (ArgumentError, CaptureForbidden) as error:
            expect.asked_by(f"{self.name}.append", "append", error)
            raise

    def reserve(self, stream: Stream, n: int) -> None:
        """Refuse unless ``n`` more rows fit: now, or under capture at every launch of the graph.

        For kernels that write the rows themselves, behind ``len_d``; :meth:`append` calls it.
        """
        if stream.recording is None:
            self.check_headroom(n)
        else:
            self.lengths.need(stream, n)
            self.guard(stream, n)

    def attend(
        self,
        stream: Stream,
        q: Buffer,
        out: Buffer,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Buffer | None = None,
        softcap: float | None = None,
        lse: Buffer | None = None,
        counted: bool = False,
        numeric: str = "exact",
        kernel: str | None = None,
        programmatic: bool = False,
        settled: bool = False,
    ) -> None:
        """Attend the rows of the layer: row r of n sees ``len + r + 1`` rows.

        Parameters
        ----------
        stream : Stream
        q, out : Buffer
            f32 ``[n, n_heads, head_dim]`` and ``[n, n_heads, head_dim_v]``, 16-byte aligned.
        scale : float, optional
            Default ``head_dim ** -0.5``.
        window : int, optional
            Rows a query sees, itself included; default the layer's own, 0 for all. On a ring at
            most the ring's window.
        sinks : Buffer, optional
            f32 ``[n_heads]``, one learned logit per head.
        softcap : float, optional
            ``softcap * tanh(score / softcap)``.
        lse : Buffer, optional
            f32 ``[n, n_heads]``: log-sum-exp of the scores, -inf for an empty row.
        counted : bool
            The length already includes the n rows (append, advance, attend).
        numeric : str
            Numeric class of the kernel; ``"exact"`` is the only one.
        kernel : str, optional
            One of those of :func:`~memra_lowlevel.kernels.kv_attend.choose`, for all that attends
            these rows: their bits differ. Default its choice.
        programmatic : bool
            Start while the predecessor, a kernel of the stream, still runs.
        settled : bool
            The length and the rows below the n were written before the last launch of the stream
            that was not ``programmatic``; see :func:`~memra_lowlevel.kernels.kv_attend.attend`.

        Raises
        ------
        ArgumentError
            A buffer of another shape, dtype, device or alignment.
        FormatUnsupported
            No kernel for this number of query heads per kv head, or this numeric class; or
            ``kernel`` does not do these formats, head sizes or so many rows.
        PlaneError
            A window wider than the one that the ring keeps rows for; ``counted`` with a length of
            fewer than n rows.
        CapacityExceeded, RingLapped
            Rows beyond the plane, or beyond what the ring holds at its base. These two and
            ``counted`` are checked where the host knows the length, and not under capture.
        """
        expect_stream(f"{self.name}.attend: stream", stream)
        self._check_heads("q", q, self.head_dim_k)
        self._check_heads("out", out, self.head_dim_v)
        self.check_reads(stream, "attend", q.shape[0], counted)
        window = self.window if window is None else self._window(window)
        try:
            kv_attend.attend(
                stream, q, self.k, self.v, out,
                len_d=self.len_d, k_format=self.k_format, v_format=self.v_format, rows=self.rows,
                n_kv_heads=self.n_kv_heads, head_dim=self.head_dim_k, head_dim_v=self.head_dim_v,
                workspace=self._workspace.take(stream, self._workspace_bytes(q, window, kernel)),
                tickets=self._workspace.tickets,
                base_d=self.base_d, window=window,
                scale=scale, sinks=sinks, softcap=softcap, lse=lse, counted=counted,
                numeric=numeric, kernel=kernel, programmatic=programmatic, settled=settled,
            )  # fmt: skip
        except (ArgumentError, CaptureForbidden, FormatUnsupported) as error:
            expect.asked_by(f"{self.name}.attend", ("attend", "workspace_bytes"), error)
            raise

    # -- the length -------------------------------------------------------------------------------
    def check_len(self, n: int) -> None:
        """Refuse a length that :meth:`set_len` would refuse."""
        super().check_len(n)
        self.check_end("set_len", n)
        if self.ring is not None and n < self.len and not self.ring.can_rewind_to(n):
            raise RewindRefused(
                f"{self.name}: a rewind from {self.len} to {n} needs rows below the base "
                f"{self.ring.base} of the ring: full re-prime required",
                plane=self.name,
                asked=n,
                possible=self.ring.shortest_rewind(),
            )

    def check_advance(self, stream: Stream, n: int) -> None:
        """Refuse an advance by more rows than lie in the ring, where the length is known."""
        counter = self.lengths.counter
        if self.ring is not None and stream.recording is None and counter.known:
            n = expect.integer(f"{self.name}.advance: n", n, 0)
            self.check_end("advance", min(counter.value + n, self.max_ctx))

    def check_end(self, call: str, end: int) -> None:
        """Refuse an end that lies above what the ring holds at its present base."""
        ring = self.ring
        if ring is not None and end - ring.base > ring.rows:
            raise RingLapped(
                f"{self.name}.{call}: rows up to {end} do not lie in the ring, which holds "
                f"[{ring.base}, {ring.base + ring.rows}); append them, after prepare(stream, n). "
                "Nothing was changed"
            )

    def can_rewind_to(self, n: int) -> bool:
        """Whether :meth:`set_len` to a shorter length is possible."""
        n = expect.integer(f"{self.name}: length", n, high=None)
        return 0 <= n <= self.len and (self.ring is None or self.ring.can_rewind_to(n))

    # -- room -------------------------------------------------------------------------------------
    def check_headroom(self, n: int) -> None:
        """Refuse unless ``n`` more rows fit as the plane stands, without a rebase."""
        super().check_headroom(n)
        if self.ring is not None:
            length = self.len
            plan = self.ring.append_plan(length, self.ring.retain_from(length), n)
            if not plan.contiguous:
                raise _lapped(self, length, n)

    def guard(self, stream: Stream, n: int = 1) -> None:
        """Under capture: let every launch of the graph check the ring's headroom for ``n`` rows."""
        capture = capture_of(stream)
        if capture is not None and self.ring is not None:

            def check(launched: GraphExec) -> None:
                try:
                    self.check_headroom(n)
                except RingLapped as error:
                    error.args = (f"graph {launched.name!r}: {error}",)
                    raise

            capture.add_check(check)

    def prepare(self, stream: Stream, n: int) -> bool:
        """Make room for ``n`` more rows; return whether a ring had to be rebased."""
        if self.ring is None:
            self.check_headroom(n)
            return False
        base = self.ring.base
        self.prepare_kv_append(stream, self.ring.retain_from(self.len), n)
        return self.ring.base != base

    def prepare_kv_append(self, stream: Stream, retain_from: int, n: int) -> int:
        """Make room for ``n`` rows and return the physical row of the first one.

        On a ring that is full this moves the rows from ``retain_from`` on down to row 0 and writes
        ``base`` and ``base_d``. The length does not change.

        Raises
        ------
        CapacityExceeded, RingLapped
            The rows cannot be had; nothing moved.
        CaptureForbidden
            A rebase is needed while ``stream`` is being captured.
        """
        self.check_open("prepare_kv_append")
        length = self.len
        if length + n > self.max_ctx or n < 0:
            self.check_headroom(n)
        if self.ring is None:
            return length
        try:
            plan = self.ring.append_plan(length, retain_from, n)
        except PlaneError as error:
            raise type(error)(f"{self.name}.prepare_kv_append: {error}") from None
        if plan.contiguous:
            return plan.write_row
        assert plan.src_row is not None and plan.keep_rows is not None
        assert plan.new_base is not None
        if stream.recording is not None:
            raise CaptureForbidden(
                f"{self.name}.prepare_kv_append: a rebase to {plan.new_base} while the stream is "
                "being captured; make the headroom before the capture",
                call="prepare_kv_append",
            )
        kv_move.move_rows(
            stream, self.k, self.v, self.k_tok_bytes, self.v_tok_bytes, plan.src_row,
            plan.keep_rows,
        )  # fmt: skip
        self.set_base(stream, plan.new_base)
        return plan.write_row

    def set_base(self, stream: Stream, new_base: int, *, reset: bool = False) -> None:
        """Write the base of the ring, here and on the device; nothing else writes either.

        Parameters
        ----------
        reset : bool
            Allow a smaller base, for a plane whose rows are all given up.
        """
        if self.ring is None or self.base_d is None:
            raise PlaneError(f"{self.name}.set_base: the plane is flat and has no base")
        if stream.recording is not None:
            raise CaptureForbidden(
                f"{self.name}.set_base: a graph would write the same base at every launch",
                call="set_base",
            )
        if reset:
            self.ring.base = new_base
        else:
            self.ring.apply_rebase(new_base)
        self.lengths.set_base(stream, self.index, new_base)

    # -- end --------------------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """Return geometry, formats, bytes and lengths."""
        ring = self.ring
        return {
            "name": self.name,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": (self.head_dim_k, self.head_dim_v),
            "formats": (self.k_format.name, self.v_format.name),
            "rows": self.rows,
            "bytes": self.k.n_bytes + self.v.n_bytes,
            "len": self.len,
            "base": ring.base if ring else 0,
            "window": self.window,
            "ring_used": (self.len - ring.base) / ring.rows if ring else None,
        }

    def close(self) -> None:
        """Free the planes, unless they are part of a cache; idempotent."""
        if self.owns_counters:
            self._arena.close()
            self._workspace.close()

    # -- inside -----------------------------------------------------------------------------------
    def _window(self, window: int) -> int:
        window = expect.integer(f"{self.name}.attend: window", window, low=0, high=MAX_ROWS)
        if self.ring is not None and not 1 <= window <= self.ring.window:
            raise PlaneError(
                f"{self.name}.attend: the ring keeps rows for a window of {self.ring.window}. A "
                f"window of {window or 'all'} rows could reach rows that a rebase has dropped. "
                "Allocate the layer and its ring with the widest window that is asked for"
            )
        return window

    def _workspace_bytes(self, q: Buffer, window: int | None, kernel: str | None) -> int:
        return kv_attend.workspace_bytes(
            self.device, q.shape[0], q.shape[1], self.head_dim_v, self.rows, window=window,
            ring=self.base_d is not None, kernel=kernel,
        )  # fmt: skip

    def _check_finite(self, stream: Stream, k: Buffer, v: Buffer, turn: HeadTurn | None) -> None:
        if turn is not None:
            k = turned_k(stream, k, v, turn, self.len_d, self.n_kv_heads)
        self._fault.fill(stream, 0)
        kv_append.check_finite(
            stream, k, v, k_format=self.k_format, v_format=self.v_format, fault=self._fault
        )
        try:
            kv_append.raise_if_faulty(
                stream, self._fault, self.kv_dim_k, self.kv_dim_v, head_dim=self.head_dim_k
            )
        except ArgumentError as error:
            if turn is not None and error.name == "k":
                error.args = (f"{error}; k as the turn's norm and angles leave it",)
            raise

    def _check_heads(self, name: str, rows: Buffer, dim: int) -> None:
        expect.kind(f"{self.name}.attend: {name}", rows, Buffer, "a Buffer")
        if len(rows.shape) != 3 or rows.ptr % 16:
            expected = f"f32 [n, multiple of {self.n_kv_heads}, {dim}], 16-byte aligned"
            got = f"{rows.dtype} {list(rows.shape)} at {rows.ptr:#x}"
            raise ArgumentError(
                f"{self.name}.attend: {name} must be {expected}, got {got} (from {caller()})",
                kernel="attend", name=name, expected=expected, got=got,
            )  # fmt: skip

    def _rows_of(self, name: str, rows: Buffer, width: int) -> int:
        expect.kind(f"{self.name}.append: {name}", rows, Buffer, "a Buffer")
        if rows.dtype != np.float32 or len(rows.shape) != 2 or rows.shape[1] != width:
            raise ArgumentError(
                f"{self.name}.append: {name} must be f32 [n, {width}], got {rows.dtype} "
                f"{list(rows.shape)}",
                kernel="append_kv",
                index=0 if name == "k" else 1,
                name=name,
                expected=f"float32 [n, {width}]",
                got=f"{rows.dtype} {list(rows.shape)}",
            )
        return int(rows.shape[0])


def _lapped(layer: KvLayer, length: int, n: int) -> RingLapped:
    return RingLapped(
        f"{layer.name}: {n} rows behind {length} need a rebase of the ring (base "
        f"{layer.ring.base if layer.ring else 0}, {layer.rows} rows), which an append and a replay "
        f"never do; call prepare(stream, {n}), or prepare_kv_append, between steps. Nothing was "
        "launched"
    )
