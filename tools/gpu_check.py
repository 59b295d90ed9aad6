"""Everything that only a real GPU can show, in one command.

``python tools/gpu_check.py [--only parity,graphs,legality,sanitize,bench] [--budget-s N]``

parity    every kernel against its oracle, caches, model and speculation (tests marked gpu)
graphs    driver, runtime and graph tests marked gpu
legality  the table of capture rules put to the real driver; every difference from the table
sanitize  compute-sanitizer memcheck, racecheck, initcheck, synccheck on small sizes
bench     the groups of ``memra-lowlevel bench``, each into a result file of its own; a row that
          lost more than 5 % of its share of the ceiling against benchmarks/reference.txt, in this
          run and in a second one, fails. ``--bench`` is short for ``--only bench``

An item alone is ``--only parity/kernels``. It stops cleanly when the budget is spent, writes what
it has, says what is left, and goes on from there when it is started again with the same ``--out``.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SECTIONS = ["parity", "graphs", "legality", "sanitize", "bench"]
GRAPH_DIRS = ["driver", "compile", "runtime", "graph", "native"]
NOT_ON_A_GPU = ["bench", "debug", "vectors", "__pycache__"]
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]

Answer = dict[str, Any]


def pytest_gpu(folder: str, limit_s: float) -> Answer:
    """Run the tests marked gpu of one folder, several at once: most of their time is the CPU's."""
    workers = min(8, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"tests/{folder}",
             "-n", str(workers), "--dist", "worksteal", "--maxfail=20",
             "-p", "no:cacheprovider", f"--junitxml={report}"],
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
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "legality.json"
        done = subprocess.run(
            [sys.executable, "tools/legality_record.py", "--driver", "cuda", "--out", str(out),
             "--compare"],
            cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        if done.returncode or not out.exists():
            return {"ok": False, "failures": [done.stdout[-1500:] + done.stderr[-3000:]]}
        n_cases = len(json.loads(out.read_text())["cases"])
    differences = [line for line in done.stdout.splitlines()[1:-1] if line]
    return {"ok": not differences, "passed": n_cases - len(differences), "failures": differences}


def sanitize(tool: str, limit_s: float) -> Answer:
    """Run the small program of every kernel under one sanitizer."""
    binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(binary).exists():
        return {"ok": False, "failures": ["compute-sanitizer was not found"]}
    # Answers of the driver are the library's business (asking for a parameter behind the last one
    # is how their number is found), so only what kernels do is reported.
    command = [binary, "--tool", tool, "--error-exitcode", "86", "--launch-timeout", "0"]
    if tool == "memcheck":
        command += ["--leak-check", "no", "--report-api-errors", "no"]
    done = subprocess.run(
        [*command, sys.executable, "tools/small_run.py", "--device", "cuda:0"],
        cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    head, tail = (done.stdout + done.stderr)[:1500], (done.stdout + done.stderr)[-1500:]
    tail = head if len(head) < 1500 else f"{head}\n...\n{tail}"
    return {"ok": done.returncode == 0, "status": done.returncode, "tail": tail,
            "failures": [] if done.returncode == 0 else [tail]}  # fmt: skip


def bench(group: str, device: str, path: Path, limit_s: float) -> Answer:
    """Measure one group of the benchmark into ``path`` and compare it with the reference."""
    from memra_lowlevel.bench import regress, result

    deadline = time.monotonic() + limit_s
    table, now, lost = "", {}, []
    for attempt in range(2):
        # A second run goes beside the first file: what is committed is one run, not the better.
        with tempfile.TemporaryDirectory() as tmp:
            out = path if attempt == 0 else Path(tmp) / "again.json"
            done = subprocess.run(
                [sys.executable, "tools/bench.py", group, "--device", device, "--json", str(out)],
                cwd=ROOT, capture_output=True, text=True,
                timeout=max(1.0, deadline - time.monotonic()),
            )  # fmt: skip
            if done.returncode or not out.exists():
                return {"ok": False, "failures": [done.stdout[-1500:] + done.stderr[-3000:]]}
            found = result.load(out)
        if found.problems:
            return {"ok": False, "failures": found.problems}
        table = table or done.stdout
        for what, share in regress.ratios(found.rows).items():
            now[what] = max(share, now.get(what, 0.0))
        lost = regress.losses(now, found.environment["device"], regress.references())
        if not lost:
            break
    return {"ok": not lost, "table": table, "file": path.name, "failures": [str(x) for x in lost]}


def plan(
    only: list[str], device: str, results: Path
) -> Iterator[tuple[str, str, Callable[[float], Answer]]]:
    """Every item that is asked for as (section, name, call)."""
    from memra_lowlevel.bench.command import GROUPS

    folders = sorted(p.name for p in (ROOT / "tests").iterdir() if p.is_dir())
    parity = [f for f in folders if f not in (*GRAPH_DIRS, *NOT_ON_A_GPU)]
    items: list[tuple[str, str, Callable[[float], Answer]]] = []
    for folder in parity:
        items.append(("parity", folder, lambda s, f=folder: pytest_gpu(f, s)))
    for folder in GRAPH_DIRS:
        items.append(("graphs", folder, lambda s, f=folder: pytest_gpu(f, s)))
    items.append(("legality", "table", legality))
    for tool in SANITIZERS:
        items.append(("sanitize", tool, lambda s, t=tool: sanitize(t, s)))
    for group, place in GROUPS.items():
        module = place.partition(":")[0]
        if importlib.util.find_spec(f"memra_lowlevel.bench.{module}") is not None:
            out = results.with_name(f"{results.stem}-{group}.json")
            items.append(("bench", group, lambda s, g=group, o=out: bench(g, device, o, s)))
    for wanted in only:
        chosen = [i for i in items if wanted in (i[0], f"{i[0]}/{i[1]}")]
        if not chosen:
            raise SystemExit(f"gpu_check: nothing is called {wanted!r}; there are {SECTIONS}")
        yield from chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--bench", action="store_true", help="only the section bench")
    parser.add_argument("--device", default="cuda:0", help="where the section bench measures")
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="gpu-check", help="the files are <date>-<name>*.json")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier call did")
    parser.add_argument("--list", action="store_true", help="list the items and stop")
    arguments = parser.parse_args()
    only = ["bench"] if arguments.bench else [s for s in arguments.only.split(",") if s]
    path = arguments.out.resolve() / f"{time.strftime('%Y-%m-%d')}-{arguments.name}.json"
    items = list(plan(only, arguments.device, path))
    if arguments.list:
        print("\n".join(f"{section}/{name}" for section, name, _ in items))
        return 0

    from memra_lowlevel import Device, errors
    from memra_lowlevel.bench import result

    start = time.monotonic()
    try:
        with Device(arguments.device) as device:
            about = result.environment(device)
    except errors.MemraError as error:
        raise SystemExit(f"gpu_check: {error}") from error
    done: dict[str, Answer] = {}
    if path.exists() and not arguments.fresh:
        try:
            kept = result.load(path)
        except errors.ArgumentError as error:
            raise SystemExit(f"gpu_check: {error}; --fresh replaces it") from error
        if kept.environment.get("package") == about["package"]:
            done = kept.items
        else:
            print("gpu_check: the sources changed since the last call; starting afresh")

    left, bad = [], []
    todo = [item for item in items if not done.get(f"{item[0]}/{item[1]}", {}).get("ok")]

    def attempt(item: tuple[str, str, Callable[[float], Answer]]) -> Answer | None:
        room = arguments.budget_s - (time.monotonic() - start)
        began = time.monotonic()
        try:
            answer = item[2](room) if room >= 5 else None
        except subprocess.TimeoutExpired:
            print(f"{item[0]}/{item[1]}: did not end within the budget", flush=True)
            return None
        if answer is not None:
            answer["seconds"] = round(time.monotonic() - began, 1)
        return answer

    for section, group in itertools.groupby(todo, key=lambda item: item[0]):
        # Sanitizers wait for their own instrumentation most of the time; nothing is measured there.
        at_once = len(SANITIZERS) if section == "sanitize" else 1
        batch = list(group)
        with ThreadPoolExecutor(at_once) as pool:
            answers = pool.map(attempt, batch)
            for (_, name, _), answer in zip(batch, answers, strict=True):
                key = f"{section}/{name}"
                if answer is None:
                    left.append(key)
                    continue
                table = answer.pop("table", "")
                done[key] = answer
                result.write(path, about=about, items=done)
                counts = f"{answer['passed']} passed" if "passed" in answer else ""
                verdict = "ok" if answer["ok"] else "FAILED"
                print(f"{key}: {verdict} {counts} in {answer['seconds']} s", flush=True)
                for failure in answer.get("failures", [])[:6]:
                    print("    " + failure.replace("\n", "\n    ")[-1200:], flush=True)
                if table:
                    print(table, flush=True)
                if not answer["ok"]:
                    bad.append(key)
    result.write(path, about=about, items=done)
    print(f"gpu_check: {path}")
    print(f"gpu_check: {'all green' if not bad else 'failed: ' + ', '.join(bad)}"
          + (f"; left for another call: {', '.join(left)}" if left else ""))  # fmt: skip
    return 1 if bad else (3 if left else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
