#!/usr/bin/env python3
"""Set up and run, from nothing: ``python3 run.py demo`` or ``python3 run.py tests``.

Needs Python 3.10 or newer with the ``venv`` module, pip's index, and a C++ compiler. Makes
``.venv`` beside this file if it is absent, installs the package into it once per state of
``pyproject.toml``, and hands over. Everything after the first word goes to the program:
``python3 run.py demo --tokens 64`` or ``python3 run.py tests -k ring``. Only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "memra-lowlevel.installed"
EXTRAS = {"demo": "demo,cli", "tests": "dev,demo,cli,snapshots,plot"}


def stop(message: str) -> None:
    sys.exit(f"run.py: {message}")


def check_machine() -> None:
    """Name what is missing before anything is installed."""
    if sys.version_info < (3, 10):  # noqa: UP036 (an older Python must be told, not crash)
        stop(f"Python 3.10 or newer is needed; this is {sys.version.split()[0]}.")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop(
            "Python's venv module is missing (Debian and Ubuntu ship it apart). "
            "Install it: apt-get install python3-venv"
        )
    named = os.environ.get("CXX", "").split()[:1]
    if not any(map(shutil.which, named or ["c++", "g++", "clang++"])):
        print(
            "run.py: no C++ compiler found (CXX, c++, g++, clang++). The host device needs one: "
            "apt-get install g++, or pip install ziglang into .venv. Going on without.",
            file=sys.stderr,
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        print(
            f"run.py: {header} is missing (apt-get install python3-dev), so the compiled module "
            "is skipped; everything works through the slower Python path, and "
            "`memra-lowlevel doctor` says so.",
            file=sys.stderr,
        )


def run(*command: str | Path) -> None:
    status = subprocess.call([str(c) for c in command], cwd=ROOT)
    if status:
        stop(f"this step failed with status {status}: {' '.join(map(str, command))}")


def state() -> str:
    """Digest of what decides an installation: metadata and the sources of the compiled modules."""
    digest = hashlib.blake2b(digest_size=16)
    for path in [
        ROOT / "pyproject.toml",
        ROOT / "setup.py",
        *sorted((ROOT / "memra_lowlevel/native").glob("*.[ch]")),
        *sorted((ROOT / "memra_lowlevel/native").glob("build*.py")),
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(extras: str) -> None:
    done = STAMP.read_text().split("\n") if STAMP.exists() else []
    want = f"{state()} {extras}"
    if want in done:
        return
    if not PYTHON.exists():
        print(f"run.py: making {VENV}", file=sys.stderr)
        run(sys.executable, "-m", "venv", VENV)
    print(f"run.py: installing memra-lowlevel[{extras}]", file=sys.stderr)
    run(PYTHON, "-m", "pip", "install", "--quiet", "--editable", f".[{extras}]")
    kept = [line for line in done if line.startswith(state())]
    STAMP.write_text("\n".join([*kept, want]))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in EXTRAS:
        stop("say what to run: python3 run.py demo [options] | python3 run.py tests [options]")
    task, rest = sys.argv[1], sys.argv[2:]
    check_machine()
    install(EXTRAS[task])
    program = {
        "demo": [str(PYTHON), "-m", "memra_lowlevel.cli", "demo", *rest],
        "tests": [str(PYTHON), str(ROOT / "tools" / "test.py"), *rest],
    }[task]
    os.chdir(ROOT)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
