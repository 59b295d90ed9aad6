"""What ``ncu`` counts of one launch: which metrics, how its table is read, what a row keeps.

``tools/counters.py`` runs ``ncu`` and writes the result file; the table ``counters`` shows it. A
metric that ``ncu`` does not give is null in the file and named in its row, and ``–`` in the table.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .result import Row

__all__ = [
    "DURATION", "GROUP", "METRICS", "STALLS", "Launched", "cells", "head", "parse", "row_of",
]  # fmt: skip

GROUP = "counters"

DURATION = "gpu__time_duration.sum"
_INSTRUCTIONS = "smsp__inst_executed.sum"
_GRID, _BLOCK = "launch__grid_size", "launch__block_size"
_RESIDENT = "sm__warps_active.avg.per_cycle_active"
_LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"
_READ = "dram__bytes_read.sum"

_SHARES = {
    "SMs busy": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "ALU": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "FMA": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
}
"""Column of the table to the metric, in % of what the unit can do.

The first three are of the whole time; the others of the cycles in which a multiprocessor has work.
"""

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    name.replace("_", " "): _STALL.format(name)
    for name in (
        "long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "mio_throttle",
        "barrier", "not_selected", "dispatch_stall", "branch_resolving", "no_instruction",
        "lg_throttle", "sleeping", "membar", "tex_throttle", "imc_miss", "drain", "gmma", "misc",
    )
}  # fmt: skip
"""Why a warp issues nothing, to the metric: warps in that state per issued instruction."""

METRICS = (
    DURATION, _INSTRUCTIONS, *_SHARES.values(),
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor_op_imma.avg.pct_of_peak_sustained_active",
    _READ, _RESIDENT, "launch__registers_per_thread", _GRID, _BLOCK, _LATENCY,
    _STALL.format("selected"), *STALLS.values(),
)  # fmt: skip
"""What is asked for; times are kept in ns, sizes in bytes, shares in %."""

_FACTORS = {
    DURATION: {
        "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6,
        "s": 1e9, "second": 1e9,
    },
    _READ: {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
}  # fmt: skip
"""Metrics that come in several units: unit to factor. A unit that is not here makes no value."""

# Plain, or with a comma after every third digit; 1,5 or 1.234.567 of another language is no number.
_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MISSING = "–"
_SHOWN_STALLS = 3


@dataclass(frozen=True)
class Launched:
    """One launch in the table of ``ncu``.

    Attributes
    ----------
    kernel : str
        As ``ncu`` writes it, e.g. ``"void attend_mma<128, 4, 4>(...)"``.
    grid : tuple of int
        Blocks by dimension; empty where the table has none.
    values : dict of str to float or None
        Every one of :data:`METRICS`; None for what was not given.
    """

    kernel: str
    grid: tuple[int, ...]
    values: dict[str, float | None]

    @property
    def function(self) -> str:
        """Name of the kernel without its result, template and arguments."""
        found = re.match(r"(?:void\s+)?(?:[\w ]*::)?(\w+)\s*(?:[<(]|$)", self.kernel.strip())
        return found[1] if found else self.kernel


def parse(text: str) -> list[Launched]:
    """Read what ``ncu --csv --page raw`` prints: a header, a row of units, a row for each launch.

    Lines before the header are the profiler's own and the program's. Columns are found by name.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(r'"?ID"?,', line)), None)
    if start is None:
        return []
    table = [row for row in csv.reader(lines[start:]) if len(row) > 1]
    at = {name: i for i, name in enumerate(table[0])}
    body = [row for row in table[1:] if len(row) == len(table[0])]
    units: Sequence[str] = [""] * len(at)
    if body and not body[0][at["ID"]].strip():
        units = body.pop(0)
    found = []
    for row in body:
        if row[at["ID"]].strip().isdigit():
            grid = tuple(int(n) for n in re.findall(r"\d+", _cell(row, at, "Grid Size")))
            values = {
                name: _value(name, _cell(row, at, name), _cell(units, at, name)) for name in METRICS
            }
            found.append(Launched(_cell(row, at, "Kernel Name"), grid, values))
    return found


def _cell(row: Sequence[str], at: dict[str, int], name: str) -> str:
    return row[at[name]].strip() if name in at else ""


def _value(name: str, text: str, unit: str) -> float | None:
    """Give a number, or None for ``n/a``, another writing, or a unit that is not known."""
    if _NUMBER.fullmatch(text) is None:
        return None
    factor = _FACTORS[name].get(unit) if name in _FACTORS else 1.0
    value = None if factor is None else float(text.replace(",", "")) * factor
    return value if value is not None and math.isfinite(value) else None


def row_of(what: str, launched: Launched, **extra: Any) -> Row | None:
    """Make a row of the result file; None where ``ncu`` gave no time."""
    duration = launched.values[DURATION]
    if duration is None:
        return None
    missing = [name for name, value in launched.values.items() if value is None]
    kept = {"kernel": launched.kernel, "counters": launched.values, "missing": missing}
    return Row(what, "us", [duration / 1e3], group=GROUP, extra={**kept, **extra})


# -- the table ------------------------------------------------------------------------------------
def head() -> list[str]:
    """Names of the columns."""
    return [
        "what", "time", "blocks", "instructions a warp", "warps an SM", *_SHARES, "waits most for",
    ]  # fmt: skip


def cells(row: Row) -> list[str]:
    """Give the line of a row, with ``–`` for what the file does not have."""
    values: dict[str, float | None] = {
        name: float(value) if isinstance(value, int | float) else None
        for name, value in dict(row.extra.get("counters") or {}).items()
    }
    grid, block = values.get(_GRID), values.get(_BLOCK)
    instructions = values.get(_INSTRUCTIONS)
    per_warp = None
    if grid and block and instructions is not None:
        per_warp = instructions / (grid * math.ceil(block / 32))
    time = f"{row.median:.3g}" if row.median < 1000 else f"{row.median:.0f}"
    return [
        row.what,
        f"{time} µs",
        _shown(grid, "{:.0f}") + (f" × {block:.0f}" if block else ""),
        _shown(per_warp, "{:.0f}"),
        _shown(values.get(_RESIDENT), "{:.1f}"),
        *(_shown(values.get(metric), "{:.0f}%") for metric in _SHARES.values()),
        _waits(values),
    ]


def _waits(values: dict[str, float | None]) -> str:
    """Give the states in which warps spend most of their time, with their shares of it."""
    whole = values.get(_LATENCY)
    stalls = {name: value for name, m in STALLS.items() if (value := values.get(m)) is not None}
    if not whole or not stalls:
        return _MISSING
    most: Iterable[str] = sorted(stalls, key=lambda name: -stalls[name])[:_SHOWN_STALLS]
    return ", ".join(f"{name} {stalls[name] / whole:.0%}" for name in most)


def _shown(value: float | None, form: str) -> str:
    return _MISSING if value is None else form.format(value)
