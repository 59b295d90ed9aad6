"""One launch over several sequences, each with its own planes and its own length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import expect
from ..closing import Closing
from ..errors import ArgumentError, CaptureForbidden, FormatUnsupported, PlaneError
from ..kernels import kv_append, kv_attend
from ..runtime.storage import note_use
from .kv_layer import KvLayer
from .planes import Workspace

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream

__all__ = ["KvBatch"]


class KvBatch(Closing):
    """The same layer of several sequences, as a table of pointers on the device.

    Rows of a launch are those of the first sequence, then those of the second, and so on. A row
    gets the bits that it would get in a launch of its own sequence. Each counter is read on the
    device, so a captured launch serves every length; lengths are moved by their own layers.

    Parameters
    ----------
    stream : Stream
        Where the table is made.
    layers : sequence of KvLayer
        Of one geometry, one pair of formats and one number of rows; kept alive by the batch.
    n_rows : int or sequence of int
        Rows of each sequence in a launch.

    Attributes
    ----------
    table : Buffer
        u64 ``[rows, 5]``: K plane, V plane, pointer to ``len_d``, pointer to ``base_d`` or 0, the
        row's number within its sequence.
    """

    def __init__(self, stream: Stream, layers: Sequence[KvLayer], n_rows: int | Sequence[int] = 1):
        self.layers = tuple(layers)
        counts = [n_rows] * len(self.layers) if isinstance(n_rows, int) else list(n_rows)
        if not self.layers or len(counts) != len(self.layers) or min(counts) < 1:
            raise PlaneError(
                f"KvBatch: {len(self.layers)} layers and row counts {counts}; give at least one "
                "layer and a positive count for each"
            )
        if len({_kind(layer) for layer in self.layers}) > 1:
            raise PlaneError(
                "KvBatch: the layers differ in device, heads, head size, formats, rows or window: "
                + "; ".join(sorted({str(_kind(layer)) for layer in self.layers}))
            )
        self.counts = tuple(counts)
        words = np.array(
            [
                (p.k.ptr, p.v.ptr, p.len_d.ptr, p.base_d.ptr if p.base_d is not None else 0, r)
                for p, n in zip(self.layers, self.counts, strict=True)
                for r in range(n)
            ],
            np.uint64,
        )
        first = self.layers[0]
        self.table: Buffer = first.device.from_numpy(words, stream, name="sequences")
        self._workspace = Workspace(first.device)

    @property
    def n_rows(self) -> int:
        """Rows of a launch."""
        return sum(self.counts)

    def append(self, stream: Stream, k: Buffer, v: Buffer) -> None:
        """Write each sequence's rows behind its length; no length moves.

        Parameters
        ----------
        k, v : Buffer
            f32 ``[n_rows, kv_dim_k]`` and ``[n_rows, kv_dim_v]``.

        Raises
        ------
        CapacityExceeded, RingLapped
            A sequence has no room; nothing was written to any.
        """
        first = self.layers[0]
        for name, rows, width in (("k", k, first.kv_dim_k), ("v", v, first.kv_dim_v)):
            if rows.dtype != np.float32 or rows.shape != (self.n_rows, width):
                raise ArgumentError(
                    f"KvBatch.append: {name} must be f32 [{self.n_rows}, {width}], got "
                    f"{rows.dtype} {list(rows.shape)}",
                    kernel="append_kv", name=name, expected=f"float32 [{self.n_rows}, {width}]",
                    got=f"{rows.dtype} {list(rows.shape)}",
                )  # fmt: skip
        for layer, n in zip(self.layers, self.counts, strict=True):
            if stream.recording is None:
                layer.check_headroom(n)
            else:
                layer.lengths.need(stream, n)
                layer.guard(stream, n)
        kv_append.append(
            stream, k, v, None, None, None, k_format=first.k_format, v_format=first.v_format,
            rows=first.rows, table=self.table,
        )  # fmt: skip
        self._keep(stream)

    def attend(
        self,
        stream: Stream,
        q: Buffer,
        out: Buffer,
        *,
        window: int | None = None,
        **options: Any,
    ) -> None:
        """Attend each row over its own sequence.

        Parameters
        ----------
        q, out : Buffer
            f32 ``[n_rows, n_heads, head_dim]`` and ``[n_rows, n_heads, head_dim_v]``.
        window, **options
            As in :meth:`KvLayer.attend`, apart from ``counted``.

        Raises
        ------
        CapacityExceeded, RingLapped
            As :meth:`KvLayer.attend`, for any of the sequences.
        """
        first = self.layers[0]
        for layer, n in zip(self.layers, self.counts, strict=True):
            layer.check_reads(stream, "attend", n, counted=False)
        window = first.window if window is None else window
        n_heads = q.shape[1] if len(q.shape) == 3 else 1
        try:
            n_bytes = kv_attend.workspace_bytes(
                first.device, self.n_rows, n_heads, first.head_dim_v, first.rows, window=window,
                ring=True, kernel=options.get("kernel"),
            )  # fmt: skip
            kv_attend.attend(
                stream, q, None, None, out, len_d=None, k_format=first.k_format,
                v_format=first.v_format, rows=first.rows, n_kv_heads=first.n_kv_heads,
                head_dim=first.head_dim_k, head_dim_v=first.head_dim_v,
                workspace=self._workspace.take(stream, n_bytes), tickets=self._workspace.tickets,
                window=window, table=self.table,
                **options,
            )  # fmt: skip
        except (ArgumentError, CaptureForbidden, FormatUnsupported) as error:
            names = ", ".join(layer.name for layer in self.layers)
            inner = "attend", "workspace_bytes"
            expect.asked_by(f"KvBatch({names}).attend", inner, error)
            raise
        self._keep(stream)

    def close(self) -> None:
        """Free the table; the layers stay."""
        self.table.close()
        self._workspace.close()

    def _keep(self, stream: Stream) -> None:
        """Tell the runtime of the memory that only the table points to."""
        storages = {id(b.storage): b.storage for p in self.layers for b in (p.k, p.v, p.len_d)}
        note_use(stream, *storages.values())


def _kind(layer: KvLayer) -> tuple[Any, ...]:
    return (
        str(layer.device), layer.n_kv_heads, layer.head_dim_k, layer.head_dim_v,
        layer.k_format.name, layer.v_format.name, layer.rows, layer.window,
    )  # fmt: skip
