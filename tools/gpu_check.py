"""Everything that only a real GPU can show, in one command.

``python tools/gpu_check.py [--only parity,graphs,legality,sanitize,bench] [--budget-s N]``

parity    every kernel against its oracle, caches, model and speculation (tests marked gpu)
graphs    driver, runtime and graph tests marked gpu
legality  the table of capture rules put to the real driver; every difference from the table
sanitize  compute-sanitizer memcheck, racecheck, initcheck, synccheck on small sizes
bench     the groups of ``memra-lowlevel bench``, or those of ``--groups``, in one process and into
          one result file; a row that lost more than 5 % of its share of the ceiling against
          benchmarks/reference.txt, in this run and in a second one, fails. ``--bench`` is short
          for ``--only bench``

An item alone is ``--only parity/kernels``; ``--but parity/e2e`` leaves one out. It stops cleanly
when the budget is spent, writes what it has, says what is left, and goes on from there when it is
started again with the same ``--out``. Items run side by side as far as there are cores, since what
they wait for is mostly the CPU; a benchmark runs alone.

Without NVRTC (``MEMRA_CUBINS`` names a store of kernels instead) the tests of the compiler itself,
marked ``nvrtc``, are listed under ``without_nvrtc``; any other skip fails its item.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from words import seconds

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SECTIONS = ["parity", "graphs", "legality", "sanitize", "bench"]
GRAPH_DIRS = ["compile", "runtime", "graph", "native"]
# The one test of tests/driver for a GPU asks what the item legality/table asks.
NOT_ON_A_GPU = ["bench", "debug", "driver", "vectors", "__pycache__"]
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]
WORKERS = 6
NO_COMPILER = "no NVRTC of this major"

Answer = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """Something to check; ``cores`` is what it keeps busy, 0 for the whole machine."""

    section: str
    name: str
    call: Callable[[float], Answer]
    cores: int = 1

    @property
    def key(self) -> str:
        return f"{self.section}/{self.name}"


class Cores:
    """Cores that items share; :meth:`take` waits for its turn."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self._changed = threading.Condition()

    def take(self, wanted: int) -> int:
        n = min(wanted or self.total, self.total)
        with self._changed:
            self._changed.wait_for(lambda: self.free >= n)
            self.free -= n
        return n

    def give(self, n: int) -> None:
        with self._changed:
            self.free += n
            self._changed.notify_all()


def pytest_gpu(folder: str, limit_s: float) -> Answer:
    """Run the tests marked gpu of one folder, several at once: most of their time is the CPU's."""
    workers = min(WORKERS, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"tests/{folder}",
             "-n", str(workers), "--dist", "worksteal", "--maxfail=20",
             "-p", "no:cacheprovider", f"--junitxml={report}"],
            cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
            env={"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", **os.environ},
        )  # fmt: skip
        if done.returncode == 5:
            return {"ok": True, "passed": 0, "failed": 0, "skipped": 0, "failures": []}
        if not report.exists():
            return {"ok": False, "failures": [done.stdout[-2000:] + done.stderr[-2000:]]}
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    return judge(cases, done.returncode)


def judge(cases: Sequence[ElementTree.Element], status: int) -> Answer:
    """What the cases of a report come to: a skip is a failure unless it is the compiler's."""
    failures, skipped, without = [], 0, []
    for case in cases:
        skip = case.find("skipped")
        if skip is not None and NO_COMPILER in (skip.get("message") or ""):
            without.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            skipped += skip is not None
        for kind in ("failure", "error"):
            element = case.find(kind)
            if element is not None:
                text = (element.text or element.get("message") or "")[-1500:]
                failures.append(f"{case.get('classname')}::{case.get('name')}\n{text}")
    return {
        "ok": not failures and not skipped and status == 0,
        "passed": len(cases) - len(failures) - skipped - len(without),
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
        **({"without_nvrtc": without} if without else {}),
    }


def legality(limit_s: float) -> Answer:
    """Ask the real driver every question of the table."""
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "legality.json"
        done = subprocess.run(
            [sys.executable, "tools/legality_record.py", "--driver", "cuda", "--out", str(out),
             "--compare", "--jobs", "8"],
            cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        if done.returncode or not out.exists():
            return {"ok": False, "failures": [done.stdout[-1500:] + done.stderr[-3000:]]}
        now = {c["case"]: c["answers"] for c in json.loads(out.read_text())["cases"]}
    n_cases = len(now)
    differences = [line for line in done.stdout.splitlines()[1:-1] if line]
    file = json.loads((ROOT / "tests/vectors/legality_cuda.json").read_text())
    recorded = {c["case"]: c["answers"] for c in file["cases"]}
    differences += [
        f"{case}: recorded {recorded.get(case)}, now {answers}"
        for case, answers in now.items()
        if recorded.get(case) != answers
    ]
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


def bench(groups: Sequence[str], device: str, path: Path, limit_s: float) -> Answer:
    """Measure groups of the benchmark into ``path`` and compare them with the reference.

    One process measures all of them, so that they share their ceilings. Groups with a loss are
    measured once more, beside the file: what is committed is one run, not the better of two.
    """
    from memra_lowlevel.bench import regress, result

    deadline = time.monotonic() + limit_s
    now: dict[str, regress.Ratio] = {}
    tables: list[str] = []
    lost: list[regress.Loss] = []
    again = list(groups)
    for attempt in range(2):
        with tempfile.TemporaryDirectory() as tmp:
            out = path if attempt == 0 else Path(tmp) / "again.json"
            done = subprocess.run(
                [sys.executable, "tools/bench.py", *again, "--device", device, "--json", str(out)],
                cwd=ROOT, capture_output=True, text=True,
                timeout=max(1.0, deadline - time.monotonic()),
            )  # fmt: skip
            tables.append(done.stdout)
            if done.returncode or not out.exists():
                said = done.stdout[-1500:] + done.stderr[-3000:]
                return {"ok": False, "failures": [said], "table": tables[0]}
            found = result.load(out)
        if found.problems:
            return {"ok": False, "failures": found.problems}
        for what, share in regress.ratios(found.rows).items():
            now[what] = max(share, now.get(what, share))
        lost = regress.losses(now, found.environment["device"], regress.references())
        groups_of = {row.what: row.group for row in found.rows}
        again = [g for g in groups if g in {groups_of.get(loss.what) for loss in lost}]
        if not again:
            break
    return {"ok": not lost, "passed": len(now), "table": "\n".join(tables), "file": path.name,
            "failures": [str(loss) for loss in lost]}  # fmt: skip


def plan(
    only: Sequence[str], but: Sequence[str], groups: Sequence[str], device: str, results: Path
) -> list[Item]:
    """Every item that is asked for; the longest first, benchmarks last."""
    folders = sorted(p.name for p in (ROOT / "tests").iterdir() if p.is_dir())
    parity = [f for f in folders if f not in (*GRAPH_DIRS, *NOT_ON_A_GPU)]
    items = [Item("legality", "table", legality)]
    items += [Item("sanitize", tool, lambda s, t=tool: sanitize(t, s)) for tool in SANITIZERS]
    for section, names in (("parity", parity), ("graphs", GRAPH_DIRS)):
        items += [Item(section, f, lambda s, f=f: pytest_gpu(f, s), WORKERS) for f in names]
    call = functools.partial(bench, groups, device, results.with_name(f"{results.stem}-bench.json"))
    items.append(Item("bench", "all", call, cores=0))
    known = {name for i in items for name in (i.section, i.key)}
    if unknown := [name for name in (*only, *but) if name not in known]:
        raise SystemExit(f"gpu_check: nothing is called {unknown}; there are {SECTIONS}")
    return [
        i for i in items
        if {i.section, i.key} & set(only) and not {i.section, i.key} & set(but)
    ]  # fmt: skip


def tell(key: str, answer: Answer, table: str) -> None:
    """Print what became of an item."""
    counts = f"{answer['passed']} passed" if "passed" in answer else ""
    verdict = "ok" if answer["ok"] else "FAILED"
    print(f"{key}: {verdict} {counts} in {answer['seconds']} s", flush=True)
    for failure in answer.get("failures", [])[:6]:
        print("    " + failure.replace("\n", "\n    ")[-1200:], flush=True)
    if answer.get("without_nvrtc"):
        print(f"    {NO_COMPILER}, not run: {', '.join(answer['without_nvrtc'])}", flush=True)
    if table:
        print(table, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--but", default="", help="comma-separated sections or items to leave out")
    parser.add_argument("--bench", action="store_true", help="only the section bench")
    parser.add_argument("--groups", default="", help="groups of the benchmark (default: all)")
    parser.add_argument("--device", default="cuda:0", help="where the section bench measures")
    parser.add_argument("--budget-s", type=seconds, default=480.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="gpu-check", help="the files are <date>-<name>*.json")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier call did")
    parser.add_argument("--list", action="store_true", help="list the items and stop")
    arguments = parser.parse_args()
    from memra_lowlevel.bench.command import GROUPS

    only = ["bench"] if arguments.bench else [s for s in arguments.only.split(",") if s]
    path = arguments.out.resolve() / f"{time.strftime('%Y-%m-%d')}-{arguments.name}.json"
    but = [s for s in arguments.but.split(",") if s]
    groups = [g for g in arguments.groups.split(",") if g] or list(GROUPS)
    items = plan(only, but, groups, arguments.device, path)
    if arguments.list:
        print("\n".join(item.key for item in items))
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

    left: list[str] = []
    bad: list[str] = []
    cores, told = Cores(os.cpu_count() or 1), threading.Lock()

    def attempt(item: Item, n: int) -> None:
        room = arguments.budget_s - (time.monotonic() - start)
        began, answer = time.monotonic(), None
        try:
            answer = item.call(room) if room >= 5 else None
        except subprocess.TimeoutExpired:
            print(f"{item.key}: did not end within the budget", flush=True)
        finally:
            cores.give(n)
        with told:
            if answer is None:
                left.append(item.key)
                return
            answer["seconds"] = round(time.monotonic() - began, 1)
            table = answer.pop("table", "")
            done[item.key] = answer
            result.write(path, about=about, items=done)
            tell(item.key, answer, table)
            if not answer["ok"]:
                bad.append(item.key)

    with ThreadPoolExecutor(len(items) + 1) as pool:
        running = [
            pool.submit(attempt, item, cores.take(item.cores))
            for item in items
            if not done.get(item.key, {}).get("ok")
        ]
    for future in running:
        future.result()
    result.write(path, about=about, items=done)
    print(f"gpu_check: {path}")
    print(f"gpu_check: {'all green' if not bad else 'failed: ' + ', '.join(bad)}"
          + (f"; left for another call: {', '.join(left)}" if left else ""))  # fmt: skip
    return 1 if bad else (3 if left else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
