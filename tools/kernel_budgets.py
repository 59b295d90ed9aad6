"""What each hot kernel may take and must contain, on record: registers, memory, instructions.

    python tools/kernel_budgets.py            compare with tests/vectors/kernel_budgets.json
    python tools/kernel_budgets.py --write    make the record anew; its diff is to be reviewed

A kernel may need no more registers (rounded up to what the hardware allocates) and no more static
shared memory than on record, keeps the kinds of instructions that it has (tensor cores, bulk and
asynchronous copies, wide loads), and never touches local memory. Needs no GPU: NVRTC compiles,
nvdisasm (the wheel nvidia-cuda-nvdisasm) reads.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RECORD = ROOT / "tests" / "vectors" / "kernel_budgets.json"
ARCHS = ("sm_80", "sm_90")

KINDS = {
    "int8 tensor cores": r"IMMA|IGMMA",
    "half tensor cores": r"(HMMA|HGMMA)(?!.*\bTF32\b)",
    "tf32 tensor cores": r"(HMMA|HGMMA).*\bTF32\b",
    "bulk copy": r"UBLKCP|UTMALDG|UBLKPF",
    "asynchronous copy": r"LDGSTS",
    "128-bit load": r"LDG\..*\b128\b",
    "dp4a": r"IDP",
    "waits for its predecessor": r"ACQBULK",
}
"""Kinds of instructions worth keeping, as patterns of opcodes."""

LOCAL = re.compile(r"LDL|STL")
_SECTION = re.compile(r"\s*\.section\s+\.text\.(\S+?),")
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")

Record = dict[str, dict[str, dict[str, Any]]]


def find_nvdisasm() -> Path:
    """The disassembler: from its wheel, else from the path."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or [] if spec else []:
        for found in sorted(Path(place).glob("*/bin/nvdisasm")):
            return found
    on_path = shutil.which("nvdisasm")
    if on_path is None:
        raise SystemExit("kernel_budgets: no nvdisasm; pip install nvidia-cuda-nvdisasm")
    return Path(on_path)


def opcodes(cubin: bytes) -> dict[str, Counter[str]]:
    """Opcodes by symbol, with how often each stands in the code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([find_nvdisasm(), "-c", path], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"kernel_budgets: nvdisasm failed: {done.stderr.strip()[:500]}")
    mixes: dict[str, Counter[str]] = {}
    mix: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        if section := _SECTION.match(line):
            mix = mixes.setdefault(section[1], Counter())
        elif instruction := _LINE.match(line):
            mix[instruction[1]] += 1
    return mixes


def kinds(mix: Counter[str]) -> list[str]:
    """Names of :data:`KINDS` that occur."""
    return [name for name, p in KINDS.items() if any(re.match(p, opcode) for opcode in mix)]


def measure(archs: Iterable[str] = ARCHS) -> Record:
    """What the hot kernels take and contain now: architecture, name expression, facts."""
    from memra_lowlevel.kernels import registry

    hot = [s for s in registry.all_specs() if s.hot]
    found: Record = {}
    for arch in archs:
        of_arch = found[arch] = {}
        images = registry.images(arch, hot)
        mixes = {source: opcodes(image.data) for source, image in images.items()}
        for s in hot:
            image = images[s.source]
            for expression in s.expressions:
                symbol = image.entries[expression]
                used, mix = image.resources[symbol], mixes[s.source][symbol]
                of_arch[expression] = {
                    "registers": -(-used.registers // 8) * 8,
                    "shared_bytes": used.shared_bytes,
                    "local": sum(n for op, n in mix.items() if LOCAL.match(op)),
                    "has": kinds(mix),
                }
    return {arch: dict(sorted(kernels.items())) for arch, kernels in found.items()}


def differences(now: Record, record: Record) -> list[str]:
    """What breaks the record; less of everything is no fault."""
    faults = []
    for arch, kernels in now.items():
        known = record.get(arch, {})
        for name, facts in kernels.items():
            where = f"{arch} {name}"
            if facts["local"]:
                faults.append(f"{where}: {facts['local']} instructions touch local memory")
            if name not in known:
                faults.append(f"{where}: not on record")
                continue
            for what in ("registers", "shared_bytes"):
                if facts[what] > known[name][what]:
                    faults.append(
                        f"{where}: {facts[what]} {what}, on record are {known[name][what]}"
                    )
            if gone := sorted(set(known[name]["has"]) - set(facts["has"])):
                faults.append(f"{where}: lost {', '.join(gone)}")
        faults += [
            f"{arch} {name}: on record, but gone" for name in sorted(set(known) - set(kernels))
        ]
    return faults


def load() -> Record:
    record: Record = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="make the record anew")
    arguments = parser.parse_args()
    now = measure()
    if arguments.write:
        blocks = []
        for arch, kernels in now.items():
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in kernels.items())
            blocks.append(f" {json.dumps(arch)}: {{\n{lines}\n }}")
        RECORD.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
        print(f"kernel_budgets: wrote {RECORD}")
        return 0
    faults = differences(now, load())
    for fault in faults:
        print(fault)
    if faults:
        print("kernel_budgets: if this is meant, python tools/kernel_budgets.py --write")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
