"""Result files made up for tests."""

from __future__ import annotations

from pathlib import Path

from memra_lowlevel.bench import result, sources
from memra_lowlevel.bench.result import Row

ABOUT = {
    "time": "2030-01-02T03:04:05+00:00",
    "command": ["memra-lowlevel", "bench", "attend"],
    "commit": "0123456789abcdef",
    "dirty": False,
    "device": "NVIDIA Made Up (cuda:0)",
    "kind": "made up",
    "arch": "sm_90",
    "driver": 13000,
    "versions": {"numpy": "2.0"},
    "clocks": {"clocks.sm": "1980 MHz"},
}


def rows(scale: float = 1.0) -> list[Row]:
    """Two contexts of attention beside a peer, and launches beside C."""
    found = []
    for ctx, floor in ((4096, 3.0), (32768, 15.0)):
        work = f"attend 32/8/128 ctx {ctx}"
        numbers = {"shape": "32/8/128", "ctx": ctx, "n_rows": 1, "formats": "q8_0/q5_1"}
        samples = [floor * 1.25 * scale * (1 + i / 1000) for i in range(9)]
        found += [
            Row(
                f"{work}, q8_0/q5_1", "us", samples, floor, group="attend", work=work,
                goal=floor * 1.3, extra={"bytes": ctx * 1856, **numbers},
            ),
            Row(
                f"{work}, torch", "us", [floor * 4.0], floor * 2, "torch", group="attend",
                work=work, extra={"bytes": ctx * 4096, **numbers},
            ),
        ]  # fmt: skip
    found += [
        Row("launch, C", "us", [3.0, 3.1, 3.2], peer="C", group="launch", work="launch"),
        Row(
            "launch, prepared", "us", [3.2 * scale] * 3, group="launch", work="launch",
            baseline="launch, C",
        ),
    ]  # fmt: skip
    return found


def write(path: Path, scale: float = 1.0, **about: object) -> Path:
    """Write a sound file of the sources as they are."""
    facts = {
        **ABOUT, "families": sources.digests(), "package": sources.package_digest(), **about,
    }  # fmt: skip
    items = {"parity/kernels": {"ok": True, "passed": 7, "seconds": 1.5}}
    result.write(path, rows(scale), about=facts, notes=["CuPy: not installed"], items=items)
    return path
