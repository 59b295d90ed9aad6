"""Record what a driver answers to the cases of stream capture.

    python tools/legality_record.py --driver cuda --compare

writes tests/vectors/legality_cuda.json and prints where the driver differs from the table. With
--prune it asks no driver: answers to cases that are gone leave the file, all else stays as it is.

Each run works in a child process. When a case ends the process or hangs, that is its answer, and
a new child goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# A kernel without parameters; any driver since CUDA 12 compiles this PTX itself.
PTX = b""".version 7.0
.target sm_52
.address_size 64
.visible .entry empty()
{
    ret;
}
\0"""
KERNEL = "empty"


def image_for(kind: str) -> tuple[bytes, str]:
    """Module image and kernel name for a driver."""
    if kind == "cuda":
        return PTX, KERNEL
    from memra_lowlevel.compile.hostcxx import compile_host

    source = '#include "common/device.cuh"\nKERNEL void empty() {}\n'
    image = compile_host(source, [KERNEL], [str(ROOT / "cuda_src")], {})
    return str(image.path).encode(), image.entries[KERNEL]


def child(kind: str, first: int, behind: int) -> None:
    """Run the cases ``[first, behind)``; print one JSON line before and after each."""
    from memra_lowlevel.driver import get
    from memra_lowlevel.driver.legality_cases import CASES, run_case

    driver = get(kind)  # type: ignore[arg-type]
    image, kernel = image_for(kind)
    for i, case in enumerate(CASES[first:behind], start=first):
        print(json.dumps({"begin": i, "case": case.id}), flush=True)
        answers = run_case(driver, case, image=image, kernel=kernel)
        print(json.dumps({"case": case.id, "answers": answers}), flush=True)


def record(kind: str, timeout_s: float, jobs: int = 1) -> list[dict[str, Any]]:
    """Run all cases in children, ``jobs`` at a time; the records are in the order of the cases."""
    from memra_lowlevel.driver.legality_cases import CASES

    edges = [len(CASES) * j // jobs for j in range(jobs + 1)]
    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(
            lambda j: _record(kind, timeout_s, edges[j], edges[j + 1]), range(jobs)
        )  # fmt: skip
        return [one for part in parts for one in part]


MOST_REFUSALS, REST_S = 5, 3.0


def found_no_room(err: str) -> bool:
    """Whether a child ended because the device had no memory for a context: that is no answer."""
    last = err.strip().splitlines()[-1:] or [""]
    return "OutOfMemory: cuDevicePrimaryCtxRetain" in last[0]


def _record(kind: str, timeout_s: float, first: int, behind: int) -> list[dict[str, Any]]:
    """Run the cases ``[first, behind)`` in children, one after the other."""
    from memra_lowlevel.driver.legality_cases import CASES

    records: list[dict[str, Any]] = []
    refused = 0
    while (at := first + len(records)) < behind:
        command = [
            sys.executable, __file__, "--child", str(at), "--behind", str(behind),
            "--driver", kind,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
            out, how = done.stdout, f"process ended with {done.returncode}"
            err = done.stderr
        except subprocess.TimeoutExpired as error:
            raw = error.stdout or b""
            out = raw.decode() if isinstance(raw, bytes) else raw
            how, err = f"no answer within {timeout_s:.0f} s", ""
        before = len(records)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        records += [line for line in lines if "answers" in line]
        at = first + len(records)
        if at < behind:
            if found_no_room(err) and (refused := refused + 1) < MOST_REFUSALS:
                print(
                    f"{CASES[at].id}: no context for it beside others; once more", file=sys.stderr
                )
                time.sleep(REST_S)
                continue
            if not lines or "ended with 1" in how:
                raise SystemExit(f"the child failed: {how}\n{err}")
            print(f"{CASES[at].id}: {how}\n{err[-2000:]}", file=sys.stderr)
            records.append({"case": CASES[at].id, "answers": {"process": how}})
        assert len(records) > before
    return records


def about(kind: str) -> dict[str, Any]:
    """Return what the recording was made with."""
    from memra_lowlevel.driver import get
    from memra_lowlevel.driver.table import DeviceAttribute

    d = get(kind)  # type: ignore[arg-type]
    d.cuInit()
    device = d.cuDeviceGet(0)
    facts: dict[str, Any] = {
        "driver": kind,
        "driver_version": d.cuDriverGetVersion(),
        "device": d.cuDeviceGetName(device),
        "arch": [
            d.cuDeviceGetAttribute(DeviceAttribute.COMPUTE_CAPABILITY_MAJOR, device),
            d.cuDeviceGetAttribute(DeviceAttribute.COMPUTE_CAPABILITY_MINOR, device),
        ],
        "python": platform.python_version(),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
    }
    if kind == "cuda":
        from importlib.metadata import version

        facts["bindings"] = version("cuda-bindings")
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            done = subprocess.run(query, capture_output=True, text=True, timeout=60)
            facts["nvidia_smi_driver"] = done.stdout.strip().splitlines()[0]
        except (OSError, IndexError, subprocess.TimeoutExpired):
            facts["nvidia_smi_driver"] = "?"
    return facts


def differences(records: list[dict[str, Any]]) -> list[str]:
    """Say where recorded answers differ from the table's predictions."""
    from memra_lowlevel.driver.legality_cases import CASES, expected

    recorded = {r["case"]: r["answers"] for r in records}
    out = []
    for case in CASES:
        want, got = expected(case), recorded.get(case.id)
        if got is None:
            out.append(f"{case.id}: no recorded answer")
        elif got != want:
            keys = [k for k in {**want, **got} if want.get(k) != got.get(k)]
            parts = ", ".join(f"{k}: table {want.get(k)}, driver {got.get(k)}" for k in keys)
            out.append(f"{case.id}: {parts}")
    return out


def write(out: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Write a recording, one case a line."""
    lines = ",\n".join("  " + json.dumps(r) for r in records)
    text = json.dumps(facts)[:-1] + ',\n "cases": [\n' + lines + "\n ]}\n"
    json.loads(text)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{len(records)} cases written to {out}")


def prune(out: Path) -> None:
    """Take the answers to cases that no longer exist out of a recording."""
    from memra_lowlevel.driver.legality_cases import CASES

    facts = json.loads(out.read_text(encoding="utf-8"))
    records, known = facts.pop("cases"), {case.id for case in CASES}
    gone = [r["case"] for r in records if r["case"] not in known]
    write(out, facts, [r for r in records if r["case"] in known])
    print("\n".join(f"gone: {case}" for case in gone))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--out", type=Path, help="default: tests/vectors/legality_<driver>.json")
    parser.add_argument("--compare", action="store_true", help="print differences from the table")
    parser.add_argument("--prune", action="store_true", help="drop answers to cases that are gone")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one child")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--behind", type=int, default=1 << 30, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child >= 0:
        child(args.driver, args.child, args.behind)
        return 0
    out = args.out or ROOT / "tests" / "vectors" / f"legality_{args.driver}.json"
    if args.prune:
        prune(out)
        return 0
    records = record(args.driver, args.timeout, args.jobs)
    write(out, about(args.driver), records)
    if args.compare:
        found = differences(records)
        print("\n".join(found))
        print(f"{len(found)} of {len(records)} cases differ from the table")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
