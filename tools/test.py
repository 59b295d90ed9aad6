"""The whole check: lint, types, and the test suite with its own rules.

``python tools/test.py`` runs everything; with arguments they go to pytest and only pytest runs.
Beyond green tests it demands that nothing but tests marked ``gpu`` was skipped and that at least
``tests/minimum.txt`` tests ran. A test over 20 s that ``docs/testing.md`` does not list is named,
and fails the run in CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 20.0


def step(name: str, *command: str) -> bool:
    print(f"--- {name}", flush=True)
    start = time.monotonic()
    status = subprocess.call(command, cwd=ROOT)
    print(f"--- {name}: {'ok' if not status else 'FAILED'} in {time.monotonic() - start:.0f} s")
    return status == 0


def judge(report: Path) -> list[str]:
    """What the report of pytest says against the rules, and the ten slowest tests."""
    faults = []
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    executed = 0
    listed = (ROOT / "docs" / "testing.md").read_text()
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if skipped is None:
            executed += 1
        elif "needs an NVIDIA GPU" not in (skipped.get("message") or ""):
            faults.append(f"{name} was skipped: {skipped.get('message')}")
        base = (case.get("name") or "").split("[")[0]
        if float(case.get("time") or 0) > SLOW_S and base not in listed:
            said = f"{name} took {case.get('time')} s and is not listed in docs/testing.md"
            # Elsewhere than in CI the machine may be slow or busy: then it is said, no more.
            if os.environ.get("CI"):
                faults.append(said)
            else:
                print(f"--- {said}")
    minimum = int((ROOT / "tests" / "minimum.txt").read_text())
    if executed < minimum:
        faults.append(f"only {executed} tests ran; tests/minimum.txt demands {minimum}")
    print(f"--- {executed} tests ran (at least {minimum} must), the slowest:")
    for case in sorted(cases, key=lambda c: -float(c.get("time") or 0))[:10]:
        seconds = float(case.get("time") or 0)
        print(f"    {seconds:6.1f} s  {case.get('classname')}::{case.get('name')}")
    return faults


def main(arguments: list[str]) -> int:
    python = sys.executable
    if arguments:
        return subprocess.call([python, "-m", "pytest", *arguments], cwd=ROOT)
    # Hundreds of processes import the package: let the first of them keep its bytecode.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Each worker would rewrite the assertions of every test for itself, at once: half a minute of
    # work, which one process does while the lint leaves the other cores idle.
    collecting = subprocess.Popen(
        [python, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    good = step("ruff check", python, "-m", "ruff", "check", ".")
    good &= step("ruff format", python, "-m", "ruff", "format", "--check", ".")
    good &= step("mypy --strict", python, "-m", "mypy")
    collecting.wait()  # what it cannot import fails the tests
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        workers = str(min(os.cpu_count() or 1, 8))
        good &= step(
            "tests", python, "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal",
            "--durations=10", f"--junitxml={report}",
        )  # fmt: skip
        faults = judge(report) if report.exists() else ["pytest wrote no report"]
    for fault in faults:
        print(f"FAILED: {fault}")
    return 0 if good and not faults else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
