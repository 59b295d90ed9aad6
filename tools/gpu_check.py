"""Everything that only a real GPU can show, in one command.

``python tools/gpu_check.py [--only parity,graphs,legality,sanitize,bench] [--budget-s N]``

parity    every kernel against its oracle, caches, model and speculation (tests marked gpu)
graphs    driver, runtime and graph tests marked gpu
legality  the table of capture rules put to the real driver; every difference from the table
sanitize  compute-sanitizer memcheck, racecheck, initcheck, synccheck on small sizes
bench     ceilings, launch, replay, attend

It stops cleanly when the budget is spent, writes what it has, says what is left, and goes on from
there when it is started again with the same ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SECTIONS = ["parity", "graphs", "legality", "sanitize", "bench"]
PARITY_DIRS = ["kernels", "model", "cache", "speculative", "layer_kv", "e2e"]
GRAPH_DIRS = ["driver", "compile", "runtime", "graph", "native"]
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]

Answer = dict[str, Any]


def pytest_gpu(folder: str, limit_s: float) -> Answer:
    """Run the tests marked gpu of one folder."""
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"tests/{folder}", "-x",
             "--maxfail=20", "-p", "no:cacheprovider", f"--junitxml={report}"],
            cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        if done.returncode == 5:
            return {"ok": True, "passed": 0, "failed": 0, "skipped": 0, "failures": []}
        if not report.exists():
            return {"ok": False, "failures": [done.stdout[-2000:] + done.stderr[-2000:]]}
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failures, skipped = [], 0
    for case in cases:
        skipped += case.find("skipped") is not None
        for kind in ("failure", "error"):
            element = case.find(kind)
            if element is not None:
                text = (element.text or element.get("message") or "")[-1500:]
                failures.append(f"{case.get('classname')}::{case.get('name')}\n{text}")
    return {
        "ok": not failures and not skipped and done.returncode == 0,
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }


def legality(limit_s: float) -> Answer:
    """Ask the real driver every question of the table."""
    done = subprocess.run(
        [sys.executable, "tools/legality_record.py", "--device", "cuda:0", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    try:
        answers = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"ok": False, "failures": [done.stdout[-1500:] + done.stderr[-3000:]]}
    return {"ok": done.returncode == 0, **answers}


def sanitize(tool: str, limit_s: float) -> Answer:
    """Run the small program of every kernel under one sanitizer."""
    binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(binary).exists():
        return {"ok": False, "failures": ["compute-sanitizer was not found"]}
    command = [binary, "--tool", tool, "--error-exitcode", "86", "--launch-timeout", "0"]
    if tool == "memcheck":
        command += ["--leak-check", "no"]
    done = subprocess.run(
        [*command, sys.executable, "tools/small_run.py", "--device", "cuda:0"],
        cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    tail = (done.stdout + done.stderr)[-3000:]
    return {"ok": done.returncode == 0, "status": done.returncode, "tail": tail,
            "failures": [] if done.returncode == 0 else [tail]}  # fmt: skip


def bench(name: str, limit_s: float) -> Answer:
    """Measure one group of the benchmark."""
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "bench.json"
        done = subprocess.run(
            [sys.executable, "tools/bench.py", name, "--device", "cuda:0", "--json", str(out)],
            cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        if done.returncode or not out.exists():
            return {"ok": False, "failures": [done.stdout[-1500:] + done.stderr[-3000:]]}
        body = json.loads(out.read_text())
    return {"ok": True, "table": done.stdout, "rows": body["rows"], "ceilings": body["ceilings"]}


def plan(only: list[str]) -> Iterator[tuple[str, str, Callable[[float], Answer]]]:
    """Every item as (section, name, call)."""
    for section in only:
        if section in ("parity", "graphs"):
            for folder in PARITY_DIRS if section == "parity" else GRAPH_DIRS:
                if (ROOT / "tests" / folder).is_dir():
                    yield section, folder, lambda s, f=folder: pytest_gpu(f, s)
        elif section == "legality":
            yield section, "table", legality
        elif section == "sanitize":
            for tool in SANITIZERS:
                yield section, tool, lambda s, t=tool: sanitize(t, s)
        else:
            for group in ("ceilings", "launch", "replay", "attend"):
                yield section, group, lambda s, g=group: bench(g, s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="gpu-check", help="the file is <date>-<name>.json")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier call did")
    arguments = parser.parse_args()
    only = [s for s in arguments.only.split(",") if s]
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; there are {SECTIONS}")

    from memra_lowlevel import Device
    from memra_lowlevel.bench.result import environment

    start = time.monotonic()
    with Device("cuda:0") as device:
        about = environment(device)
    path = arguments.out / f"{time.strftime('%Y-%m-%d')}-{arguments.name}.json"
    body: dict[str, Any] = {"environment": about, "items": {}}
    if path.exists() and not arguments.fresh:
        kept = json.loads(path.read_text())
        if kept["environment"]["source"] == about["source"]:
            body["items"] = kept["items"]
        else:
            print("gpu_check: the sources changed since the last call; starting afresh")
    path.parent.mkdir(parents=True, exist_ok=True)

    left, bad = [], []
    for section, name, call in plan(only):
        key = f"{section}/{name}"
        if body["items"].get(key, {}).get("ok"):
            continue
        room = arguments.budget_s - (time.monotonic() - start)
        if room < 5:
            left.append(key)
            continue
        began = time.monotonic()
        try:
            answer = call(room)
        except subprocess.TimeoutExpired:
            left.append(key)
            print(f"{key}: did not end within the budget", flush=True)
            continue
        answer["seconds"] = round(time.monotonic() - began, 1)
        body["items"][key] = answer
        path.write_text(json.dumps(body, indent=1) + "\n")
        counts = f"{answer['passed']} passed" if "passed" in answer else ""
        verdict = "ok" if answer["ok"] else "FAILED"
        print(f"{key}: {verdict} {counts} in {answer['seconds']} s", flush=True)
        for failure in answer.get("failures", [])[:6]:
            print("    " + failure.replace("\n", "\n    ")[-1200:], flush=True)
        if "table" in answer:
            print(answer["table"], flush=True)
        if not answer["ok"]:
            bad.append(key)
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(f"gpu_check: {path}")
    print(f"gpu_check: {'all green' if not bad else 'failed: ' + ', '.join(bad)}"
          + (f"; left for another call: {', '.join(left)}" if left else ""))  # fmt: skip
    return 1 if bad else (3 if left else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
