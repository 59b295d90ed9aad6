"""A machine that lacks things, and a command line that is used badly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memra_lowlevel import Device
from memra_lowlevel.driver.host import build, guarded
from memra_lowlevel.errors import CompilerNotFound, OutOfMemory

DEMO = [sys.executable, "-m", "memra_lowlevel.cli", "demo", "--device", "host", "--model", "tiny"]
DEMO += ["--tokens", "2", "--prompt"]


def demo(prompt: Any, **how: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*DEMO, prompt], stderr=subprocess.PIPE, check=False, **how)


def test_no_more_memory_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host device fills what it hands out; more than there is would kill the process."""
    assert 0 < guarded.room() < 1 << 50
    with Device("host") as device, device.stream() as stream:
        monkeypatch.setattr(guarded, "room", lambda: 4 << 20)
        for take in (
            lambda: device.alloc(5 << 20, stream),
            lambda: device.arena(5 << 20),
            lambda: device.pinned(5 << 20, np.uint8),
        ):
            with pytest.raises(OutOfMemory):
                take()
        device.alloc(3 << 20, stream).close()


def test_a_compiler_that_makes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "cxx"
    fake.write_text("#!/bin/sh\necho fake 1.0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    compiler = build.find_compiler()
    with pytest.raises(CompilerNotFound, match="CXX"):
        build.run_compiler(compiler, ["-o", str(tmp_path / "out.so")])


def test_a_named_compiler_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for cxx in (str(tmp_path / "nothing"), "false"):
        monkeypatch.setenv("CXX", cxx)
        with pytest.raises(CompilerNotFound, match=f"CXX={cxx} cannot be used .*unset it"):
            build.find_compiler()


def test_a_prompt_that_is_no_text() -> None:
    run = demo(b"\xff\xfe", stdout=subprocess.DEVNULL)
    assert run.returncode == 2 and b"not UTF-8" in run.stderr and b"Traceback" not in run.stderr


def test_a_terminal_without_the_letters() -> None:
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = demo("é漢".encode(), stdout=subprocess.PIPE, env=plain)
    assert run.returncode == 0, run.stderr
    assert rb"\xe9\u6f22" in run.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout() -> None:
    with open("/dev/full", "wb") as full:
        run = demo("x", stdout=full)
    assert run.returncode != 0 and b"OSError" in run.stderr and b"Traceback" not in run.stderr


def test_a_kernel_with_letters_under_a_plain_locale(tmp_path: Path) -> None:
    """Sources are UTF-8, whatever the locale says."""
    kernel = tmp_path / "letters.cu"
    text = '// é漢\n#include "common/device.cuh"\nKERNEL void f(float* x) { x[0] = 1.0f; }\n'
    kernel.write_text(text, encoding="utf-8")
    program = (
        "from memra_lowlevel import compile_file, compile_source\n"
        f"compile_file({str(kernel)!r}, arch='host')\n"
        f"compile_source(open({str(kernel)!r}, encoding='utf-8').read(), arch='host')\n"
    )
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run([sys.executable, "-c", program], env=plain, capture_output=True)
    assert run.returncode == 0, run.stderr
