"""What the README says can be done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_program_runs(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    path = tmp_path / "first.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("101 ")
    assert "memory nodes: 0, findings: 0" in done.stdout
    assert "node updates: 0" in done.stdout


def test_the_ci_runs_the_test_command_word_for_word():
    (command,) = re.findall(r"^(python3 run\.py tests)\b", README, re.M)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_options_of_the_demo_exist():
    shown = subprocess.run(
        [sys.executable, "-m", "memra_lowlevel.cli", "demo", "--help"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for option in re.findall(r"`(--[a-z-]+)", README):
        assert option in shown


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
