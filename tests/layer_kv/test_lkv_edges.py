"""The compiled loops under the address and undefined-behaviour checks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import memra_lowlevel
from memra_lowlevel.compile import cuda_src_root
from memra_lowlevel.layer_kv import compiled

HERE = Path(__file__).resolve().parent
PACKAGE = Path(memra_lowlevel.__file__).resolve().parent


def test_no_loop_steps_over_an_edge(tmp_path):
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler built the loops; this test needs it too"
    program = tmp_path / "edges"
    subprocess.run(
        [compiler, "-w", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
         "-ffp-contract=off", "-std=gnu11", f"-I{PACKAGE / 'native'}",
         f"-I{cuda_src_root()}", str(HERE / "edges_of_buffers.c"), "-o", str(program),
         "-lm"],
        check=True,
    )  # fmt: skip
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "LD_PRELOAD": ""}
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout == f"{len(compiled.available()) - 1} sets, clean\n"
