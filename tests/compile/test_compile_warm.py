"""A warm start: code from the cache without loading the compiler, and never from a wrong memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memra_lowlevel.compile import KernelCache, compile_source, compiler, nvrtc

PROGRAM = """
import json, sys
from memra_lowlevel.compile import compile_source, nvrtc
image = compile_source(sys.argv[1], arch="sm_80")
print(json.dumps([image.origin, image.key, nvrtc.loaded(), "cuda.bindings.nvrtc" in sys.modules]))
"""


def start(text: str, cache: Path) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, text],
        env={**os.environ, "MEMRA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: list[object] = json.loads(done.stdout)
    return answer


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remember the real library in a fresh cache, as a process does that has not loaded it."""
    found = nvrtc.library()
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path / "cache"))
    nvrtc._remember(found)
    nvrtc._remembered.cache_clear()
    monkeypatch.setattr(nvrtc, "loaded", lambda: False)
    (memo,) = (tmp_path / "cache" / "libraries").glob("nvrtc-*.json")
    return memo


def test_a_second_process_loads_no_compiler(sample: str, tmp_path: Path) -> None:
    cold = start(sample, tmp_path / "cache")
    warm = start(sample, tmp_path / "cache")
    assert cold == ["compiled", cold[1], True, True]
    assert warm == ["disk", cold[1], False, False]
    # Another source is compiled, by the library itself.
    other = start(sample + "\n", tmp_path / "cache")
    assert other[0] == "compiled" and other[2:] == [True, True] and other[1] != cold[1]


def test_what_is_remembered_is_what_was_loaded(memory: Path) -> None:
    assert nvrtc.remembered() == nvrtc.library()


def test_threads_that_begin_together_describe_the_library_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, digests = nvrtc.library(), []
    meet = threading.Barrier(4)

    def slow(path: str) -> str:
        digests.append(path)
        time.sleep(0.05)  # as long as others may need to come here too
        return known.digest

    def begin(_: int) -> nvrtc.Library:
        meet.wait()
        return nvrtc.library()

    nvrtc._library.cache_clear()
    monkeypatch.setattr(nvrtc, "_library_digest", slow)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(begin, range(4))) == {known}
    assert len(digests) == 1


def test_nothing_is_remembered_while_the_library_is_loaded(memory: Path) -> None:
    assert nvrtc.remembered() is not None
    nvrtc.loaded = lambda: True  # the fixture's monkeypatch restores it
    assert nvrtc.remembered() is None


@pytest.mark.parametrize("damage", ["{", "[]", '{"identity": []}', ""])
def test_a_damaged_memory_is_none(memory: Path, damage: str) -> None:
    memory.write_text(damage)
    assert nvrtc.remembered() is None


@pytest.mark.parametrize("field", range(1, 5))
def test_a_changed_library_is_not_believed(memory: Path, field: int) -> None:
    known = json.loads(memory.read_text())
    known["identity"][0][field] += 1
    memory.write_text(json.dumps(known))
    assert nvrtc.remembered() is None


def test_a_library_that_is_gone_is_not_believed(memory: Path, tmp_path: Path) -> None:
    known = json.loads(memory.read_text())
    memory.write_text(json.dumps({**known, "path": str(tmp_path / "libnvrtc.so.12")}))
    assert nvrtc.remembered() is None


def test_another_search_has_another_memory(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nvrtc.remembered() is not None
    with monkeypatch.context() as m:
        m.setenv("LD_LIBRARY_PATH", str(tmp_path))
        assert nvrtc.remembered() is None
    # A folder with other packages on the path, and an installation into it.
    (tmp_path / "site" / "nvidia").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert nvrtc.remembered() is None
    nvrtc._remember(nvrtc.library())
    nvrtc._remembered.cache_clear()
    assert nvrtc.remembered() is not None
    os.utime(tmp_path / "site", ns=(1, 1))
    assert nvrtc.remembered() is None


def test_code_of_another_compiler_is_not_taken(
    memory: Path, sample: str, disk: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.clear_memory()
    first = compile_source(sample, arch="sm_80", cache=disk)
    assert first.origin == "compiled"
    compiler.clear_memory()
    assert compile_source(sample, arch="sm_80", cache=disk).origin == "disk"
    other = dataclasses.replace(nvrtc.library(), digest="0" * 40)
    monkeypatch.setattr(nvrtc, "remembered", lambda: other)
    compiler.clear_memory()
    # What is remembered wrongly finds nothing; the loaded library then decides.
    again = compile_source(sample, arch="sm_80", cache=disk)
    assert (again.origin, again.key) == ("disk", first.key)


def test_a_warm_start_reads_each_source_and_each_image_once(
    memory: Path, sample: str, disk: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_source(sample, arch="sm_80", cache=disk)
    compiler.clear_memory()
    reads: list[str] = []
    real = Path.read_bytes

    def counted(self: Path) -> bytes:
        reads.append(self.suffix)
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", counted)
    monkeypatch.setattr(nvrtc, "library", lambda: pytest.fail("the compiler was loaded"))
    for _ in range(3):
        compile_source(sample, arch="sm_80", cache=disk)
    assert reads.count(".kernel") == 1
