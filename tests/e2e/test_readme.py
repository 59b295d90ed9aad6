"""What the README says can be done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


def _run(index, folder):
    programs = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(programs) == 2
    path = folder / "program.py"
    path.write_text(programs[index])
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_program_of_the_layer_cache_runs(tmp_path):
    assert _run(1, tmp_path).stdout.startswith("3 3 ")


def test_the_documents_and_examples_are_linked():
    linked = set(re.findall(r"\]\(([^)#]+)\)", README))
    here = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md")}
    here |= {f"examples/{p.name}" for p in (ROOT / "examples").iterdir() if p.name[0] not in "_."}
    assert here - linked == set()


def test_the_first_program_runs(tmp_path):
    done = _run(0, tmp_path)
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
