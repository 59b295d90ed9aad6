"""Launches that move device counters (``cuda_src/kv/counters.cu``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.launch import LaunchConfig, launch
from . import registry
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..runtime import Buffer, Device, Stream

__all__ = ["add_counters", "prepare", "set_counters"]

_EXACT = Tolerance("bitwise", 0.0, "integer arithmetic")

registry.register(
    KernelSpec(
        name="set_counters",
        source="kv/counters.cu",
        entry="set_counters",
        oracle="memra_lowlevel.reference.kv:set_counters",
        tolerance=_EXACT,
        edges=("one counter", "more counters than threads of a block"),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="add_counters",
        source="kv/counters.cu",
        entry="add_counters",
        oracle="memra_lowlevel.reference.kv:add_counters",
        tolerance=_EXACT,
        edges=("one counter", "masked counters", "negative amount"),
        hot=True,
        same_bits=True,
    ),
)


def prepare(device: Device) -> None:
    """Compile and load the kernels now, not at their first launch."""
    registry.kernels(device, [("set_counters", {}), ("add_counters", {})])


def set_counters(stream: Stream, counters: Buffer, value: int) -> None:
    """``counters[:] = value``, in place.

    Parameters
    ----------
    counters : Buffer
        i32[n], any n.
    value : int
    """
    n = counters.n_bytes // 4
    launch(stream, _config(n), registry.kernel(stream.device, "set_counters"), counters, n, value)


def add_counters(
    stream: Stream, counters: Buffer, delta: int, *, mask: Buffer | None = None
) -> None:
    """``counters += delta``, in place.

    Parameters
    ----------
    counters : Buffer
        i32[n], any n.
    delta : int
        May be negative.
    mask : Buffer, optional
        i32[n]; counters whose mask is 0 stay.
    """
    n = counters.n_bytes // 4
    launch(
        stream,
        _config(n),
        registry.kernel(stream.device, "add_counters"),
        counters,
        mask,
        n,
        delta,
    )


def _config(n: int) -> LaunchConfig:
    threads = min(128, -(-n // 32) * 32)
    return LaunchConfig((-(-n // threads), 1, 1), (threads, 1, 1))
