"""One plane pair with its counters on a device, driven with NumPy arrays."""

from __future__ import annotations

import numpy as np

from memra_lowlevel.formats import Q5_1, Q8_0
from memra_lowlevel.kernels import counters, kv_append, kv_attend
from memra_lowlevel.reference import attend as oracle

PAD = 8
POISON = 0xFF


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


class Planes:
    def __init__(
        self, stream, n_kv_heads, head_dim, rows, k_format=Q8_0, v_format=Q5_1, *,
        head_dim_v=None, ring=False,
    ):  # fmt: skip
        self.stream, self.device = stream, stream.device
        self.n_kv_heads, self.head_dim, self.rows = n_kv_heads, head_dim, rows
        self.head_dim_v = head_dim_v or head_dim
        self.k_format, self.v_format = k_format, v_format
        self.k_row = k_format.row_bytes(n_kv_heads * head_dim)
        self.v_row = v_format.row_bytes(n_kv_heads * self.head_dim_v)
        self.k = self.poisoned(rows * self.k_row + PAD)
        self.v = self.poisoned(rows * self.v_row + PAD)
        self.len_d = self.upload(np.zeros(1, np.int32))
        self.base_d = self.upload(np.zeros(1, np.int32)) if ring else None
        self.tickets = self.upload(np.zeros(kv_attend.TICKETS, np.uint32))
        self.kernel = None  # that attends unless a call says otherwise

    def poisoned(self, n_bytes):
        buffer = self.device.alloc(n_bytes, self.stream)
        buffer.fill(self.stream, POISON)
        return buffer

    def upload(self, array):
        return self.device.from_numpy(np.ascontiguousarray(array), self.stream)

    def set_len(self, value, base=None):
        counters.set_counters(self.stream, self.len_d, value)
        if base is not None:
            counters.set_counters(self.stream, self.base_d, base)

    def append(self, k, v, fault=None):
        kv_append.append(
            self.stream, self.upload(k), self.upload(v), self.k, self.v, self.len_d,
            k_format=self.k_format, v_format=self.v_format, rows=self.rows, base_d=self.base_d,
            fault=fault,
        )  # fmt: skip

    def load(self, k, v, first=0):
        """Put encoded rows at physical row ``first`` without a kernel."""
        for plane, fmt, rows, row_bytes in (
            (self.k, self.k_format, k, self.k_row),
            (self.v, self.v_format, v, self.v_row),
        ):
            data = fmt.encode(rows, check=False)
            plane.view(first * row_bytes, data.shape, np.uint8).copy_from(self.stream, data)

    def bytes(self):
        """Both planes as u8 [rows, row bytes]; the pads must be untouched."""
        found = []
        for plane, row_bytes in ((self.k, self.k_row), (self.v, self.v_row)):
            raw = plane.to_numpy(self.stream)
            assert (raw[-PAD:] == POISON).all()
            found.append(raw[:-PAD].reshape(self.rows, row_bytes))
        return found

    def decoded(self, n):
        """The first n rows as f32 [n, n_kv_heads, head_dim]."""
        k, v = self.bytes()
        return (
            self.k_format.decode(k[:n]).reshape(n, self.n_kv_heads, self.head_dim),
            self.v_format.decode(v[:n]).reshape(n, self.n_kv_heads, self.head_dim_v),
        )

    def attend(self, q, *, workspace=None, lse=False, sinks=None, joined=True, **options):
        """Run attention; returns out, or (out, lse). Output and workspace start as NaN.

        Not ``joined``: in two launches.
        """
        n, n_heads, _ = q.shape
        options.setdefault("kernel", self.kernel)
        size = kv_attend.workspace_bytes(
            self.device, n, n_heads, self.head_dim_v, self.rows,
            window=options.get("window"), ring=self.base_d is not None,
            kernel=options.get("kernel"),
        )  # fmt: skip
        if workspace is None:
            workspace = self.poisoned(size)
        out = self.poisoned(n * n_heads * self.head_dim_v * 4)
        out = out.view(0, (n, n_heads, self.head_dim_v), np.float32)
        sums = self.poisoned(n * n_heads * 4).view(0, (n, n_heads), np.float32) if lse else None
        kv_attend.attend(
            self.stream, self.upload(q), self.k, self.v, out,
            len_d=self.len_d, k_format=self.k_format, v_format=self.v_format, rows=self.rows,
            n_kv_heads=self.n_kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim_v,
            workspace=workspace.view(0, (size // 4,), np.float32), base_d=self.base_d, lse=sums,
            tickets=self.tickets if joined else None,
            sinks=None if sinks is None else self.upload(sinks), **options,
        )  # fmt: skip
        result = out.to_numpy(self.stream)
        return (result, sums.to_numpy(self.stream)) if lse else result


def reference(planes, q, length, n_rows=None, base=0, **options):
    """Float64 attention over what the planes hold; physical row i is absolute row base + i."""
    n = length + q.shape[0] - base if n_rows is None else n_rows
    k, v = planes.decoded(n)
    return oracle.attend(q, k, v, length, base=base, **options)


def error(got, wanted):
    """Largest difference over the largest magnitude, worst (row, head); NaN is infinite."""
    got = np.asarray(got, np.float64)
    top = np.abs(wanted).max(axis=-1)
    difference = np.abs(got - wanted).max(axis=-1)
    worst = np.where(top > 0, difference / np.maximum(top, 1e-300), difference)
    return np.inf if np.isnan(worst).any() else float(worst.max())


def same(a, b):
    """Bitwise equality, NaN included."""
    return np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
