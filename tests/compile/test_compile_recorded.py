"""Requests are noted once, outlive a change of the kernels, and make a store that answers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memra_lowlevel import Device
from memra_lowlevel.compile import (
    CompileOptions,
    Job,
    aot,
    compile_file,
    compile_source,
    compiler,
    cuda_src_root,
    nvrtc,
    recorded,
)
from memra_lowlevel.errors import ArchUnsupported, CompileError, HeaderNotFound
from memra_lowlevel.kernels import registry

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["scale<32, float>", "scale<64, float>"]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(recorded.VARIABLE, str(tmp_path / "notes"))
    monkeypatch.setattr(recorded, "_noted", set())
    return tmp_path / "notes"


@pytest.fixture(autouse=True)
def no_store_stays() -> Iterator[None]:
    before = list(compiler.stores)
    yield
    compiler.stores[:] = before


def lines(notes: Path) -> list[dict[str, object]]:
    return [json.loads(x) for f in notes.glob("*.jsonl") for x in f.read_text().splitlines()]


def test_each_request_is_noted_once_whatever_answers_it(notes: Path, sample: str) -> None:
    for _ in range(2):
        compile_source(sample, arch="sm_90", name="s.cu", name_expressions=NAMES[:1])
    compile_file("kv/counters.cu", arch="host")
    compile_file(cuda_src_root() / "kv/counters.cu", arch="host", options={"check": True})
    first, second = lines(notes)
    assert (first["text"], first["name"], first["names"]) == (sample, "s.cu", NAMES[:1])
    assert second["source"] == "kv/counters.cu" and "text" not in second
    with pytest.raises(HeaderNotFound):
        compile_source('#include "nowhere.cuh"\n', arch="host")
    with pytest.raises(CompileError):
        compile_file("/nowhere/x.cu", arch="sm_90")
    with pytest.raises(ArchUnsupported):
        compile_file("kv/counters.cu", arch="x")
    assert len(lines(notes)) == 3  # an unknown architecture or a file that cannot be read is no job


def test_nothing_is_noted_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recorded.VARIABLE, raising=False)
    monkeypatch.setattr(recorded, "_noted", set())
    compile_file("kv/counters.cu", arch="host")
    assert not recorded._noted


def test_notes_become_jobs_of_the_architectures(notes: Path, sample: str) -> None:
    options = CompileOptions(lineinfo=True)
    recorded.note(Job(sample, "host", tuple(NAMES), {"A": 1}, name="s.cu", options=options))
    recorded.note(Job(sample, "sm_80", name="s.cu"))
    recorded.note(Job(cuda_src_root() / "kv/counters.cu", "host"))
    found = recorded.load(notes, ["sm_90", "sm_100"])
    assert sorted(j.arch for j in found) == ["sm_100", "sm_100", "sm_80", "sm_90", "sm_90"]
    first = next(j for j in found if j.arch == "sm_90" and j.name_expressions)
    assert first == Job(sample, "sm_90", tuple(NAMES), {"A": 1}, name="s.cu", options=options)
    text = next(notes.glob("*.jsonl")).read_text()
    gone = text.replace("kv/counters.cu", "kv/gone.cu")
    (notes / "1.jsonl").write_text(gone)
    assert len(recorded.load(notes, ["sm_90", "sm_100"])) == len(found)
    (notes / "1.jsonl").write_text('{"arch": "host"}\n')
    with pytest.raises(CompileError, match=r"1\.jsonl:1"):
        recorded.load(notes, ["sm_90"])
    with pytest.raises(CompileError, match=recorded.VARIABLE):
        recorded.load(notes / "none", ["sm_90"])


def test_a_job_whose_names_another_has_is_left_out(sample: str) -> None:
    jobs = [
        Job(sample, "sm_90", (NAMES[0],)),
        Job(sample, "sm_90", tuple(NAMES)),
        Job(sample, "sm_90"),
        Job(sample, "sm_90", (), {"A": 1}),
        Job(sample, "sm_80", (NAMES[1],)),
        Job(sample + "\n", "sm_90", (NAMES[1],)),
    ]
    assert recorded.covering(jobs) == [jobs[1], jobs[4], jobs[5], jobs[3]]


def test_a_store_of_notes_answers_without_a_compiler(
    notes: Path, sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool leaves out what does not compile, and the smallest image that fits is taken."""
    wide = [*NAMES, "scale<96, float>"]
    for names in ([NAMES[0]], wide, [NAMES[1], "scale<128, float>"]):
        recorded.note(Job(sample, "host", tuple(names), name="s.cu"))
    recorded.note(Job("int x = ;", "host", name="bad.cu"))
    plain = '#include "common/device.cuh"\nKERNEL void f() {}\n'
    for names in (["no_such"], []):  # one that does not compile covers another that does
        recorded.note(Job(plain, "host", tuple(names), name="plain.cu"))
    out = tmp_path / "store.zip"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/build_cubins.py"), str(out), "--arch", "sm_90",
         "--recorded", str(notes)],
        capture_output=True, text=True, env={**os.environ, recorded.VARIABLE: ""}, check=True,
    )  # fmt: skip
    assert "3 images for sm_90" in done.stdout and "left out: bad.cu" in done.stderr
    verify = [sys.executable, str(ROOT / "tools/build_cubins.py"), str(out), "--verify",
              "--recorded", str(notes)]  # fmt: skip
    checked = subprocess.run(verify, capture_output=True, text=True)
    assert "0 damaged; 4 of 6 noted jobs are answered" in checked.stdout
    assert "not there: bad.cu for sm_90" in checked.stderr
    monkeypatch.setattr(nvrtc, "library", lambda: pytest.fail("NVRTC was asked"))
    store = aot.use(out)
    try:
        image = compile_source(sample, arch="sm_90", name="s.cu", name_expressions=NAMES[1:])
        assert image.origin == "store" and "scale<128, float>" in image.entries
        assert "scale<96, float>" not in image.entries
    finally:
        store.close()


def test_a_request_is_noted_whole_though_a_part_is_loaded(notes: Path) -> None:
    """Another process may lack another part; a store must answer it too."""
    spec = registry.spec("embed_rows")
    one, two = (dict(instance) for instance in spec.instances[:2])
    with Device("host") as device:
        registry.kernel(device, spec.name, **one)
        registry.kernels(device, [(spec.name, one), (spec.name, two)])
    both = sorted(spec.expression(**instance) for instance in (one, two))
    found = [line["names"] for line in lines(notes) if line.get("source") == spec.source]
    assert both in found and len(found) == 3  # what was compiled each time, and both together
