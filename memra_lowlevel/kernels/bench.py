"""Kernels of the benchmark: the empty launch, the pure read and the copy that set the ceilings."""

from __future__ import annotations

from .registry import KernelSpec, Tolerance, register

__all__: list[str] = []

_EXACT = Tolerance("bitwise", 0.0, "moves bytes")

register(
    KernelSpec(
        name="bench_empty",
        source="bench/ceiling.cu",
        entry="bench_empty",
        oracle="memra_lowlevel.reference.bench:empty",
        tolerance=_EXACT,
        same_bits=True,
    ),
    KernelSpec(
        name="bench_read",
        source="bench/ceiling.cu",
        entry="bench_read",
        oracle="memra_lowlevel.reference.bench:read",
        tolerance=_EXACT,
        edges=("fewer vectors than threads", "more vectors than threads"),
        same_bits=True,
    ),
    KernelSpec(
        name="bench_copy",
        source="bench/ceiling.cu",
        entry="bench_copy",
        oracle="memra_lowlevel.reference.bench:copy",
        tolerance=_EXACT,
        edges=("fewer vectors than threads", "more vectors than threads"),
        same_bits=True,
    ),
)
