from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memra_lowlevel.compile import Job, aot, compile_source, compiler, nvrtc
from memra_lowlevel.errors import ArchUnsupported, CompileError

NAMES = ("scale<32, float>", "scale<64, float>")


@pytest.fixture(autouse=True)
def no_store_stays() -> Iterator[None]:
    before = list(compiler.stores)
    yield
    compiler.stores[:] = before
    aot.open_named.cache_clear()


@pytest.fixture
def jobs(sample: str) -> list[Job]:
    return [Job(sample, a, NAMES, name="s.cu") for a in ("sm_80", "sm_90", "sm_100", "compute_90")]


@pytest.fixture(params=["store", "store.zip"])
def store(request: pytest.FixtureRequest, tmp_path: Path, jobs: list[Job]) -> aot.CubinStore:
    return aot.build(tmp_path / request.param, jobs)


def test_code_comes_from_the_store(
    store: aot.CubinStore, sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compile_source(sample, arch="sm_90", name="s.cu", name_expressions=NAMES)
    store.use()

    def gone() -> nvrtc.Library:
        raise AssertionError("NVRTC was asked")

    monkeypatch.setattr(nvrtc, "library", gone)
    image = compile_source(sample, arch="sm_90", name="s.cu", name_expressions=NAMES[:1])
    assert (image.origin, image.rung) == ("store", "exact")
    assert image.data == plain.data and image.entries == plain.entries
    assert image.resources == plain.resources and image.layouts == plain.layouts
    # The ladder holds in a store too.
    for want, arch, rung in [
        ("sm_86", "sm_80", "family"),
        ("sm_103", "sm_100", "family"),
        ("sm_120", "compute_90", "ptx"),
        ("compute_90", "compute_90", "ptx"),
    ]:
        found = compile_source(sample, arch=want, name="s.cu", name_expressions=NAMES)
        assert (found.arch, found.rung, found.want) == (arch, rung, want)
    store.close()
    store.close()
    with pytest.raises(AssertionError, match="NVRTC was asked"):
        compile_source(sample, arch="sm_90", name="s.cu", name_expressions=NAMES)


def test_what_does_not_fit_is_compiled(store: aot.CubinStore, sample: str) -> None:
    store.use()
    settings = {"arch": "sm_90", "name": "s.cu", "name_expressions": NAMES}
    assert compile_source(sample, **settings).origin == "store"
    assert compile_source(sample + "\n", **settings).origin != "store"
    assert compile_source(sample, **settings, defines={"A": 1}).origin != "store"
    assert compile_source(sample, **settings, options={"lineinfo": True}).origin != "store"
    assert compile_source(sample, **settings, cache=False).origin != "store"
    more = {**settings, "name_expressions": ["scale<96, float>"]}
    assert compile_source(sample, **more).origin != "store"
    assert compile_source(sample, **{**settings, "arch": "sm_75"}).origin != "store"
    assert compile_source(sample, **{**settings, "arch": "sm_90a"}).origin != "store"


def test_damage_is_found_and_compiled_around(
    tmp_path: Path, jobs: list[Job], sample: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = aot.build(tmp_path / "s", jobs)
    assert store.verify() == []
    record = next(r for r in store.records if r.arch == "sm_90")
    path = tmp_path / "s" / record.file
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    assert [file for file, _ in store.verify()] == [record.file]
    store.use()
    for _ in range(2):
        image = compile_source(sample, arch="sm_90", name="s.cu", name_expressions=NAMES)
        assert image.origin in ("compiled", "memory")
    (line,) = caplog.records
    assert record.file in line.getMessage()
    path.unlink()
    assert store.verify()


def test_bad_stores_are_refused(tmp_path: Path, jobs: list[Job], sample: str) -> None:
    for text in ("", "{}", '{"format": 99, "compiler": "", "images": []}', "[]"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(CompileError, match=r"build_cubins\.py"):
            aot.CubinStore(tmp_path)
    (tmp_path / "x.zip").write_bytes(b"PK nonsense")
    with pytest.raises(CompileError):
        aot.CubinStore(tmp_path / "x.zip")
    with pytest.raises(CompileError):
        aot.CubinStore(tmp_path / "absent")
    with pytest.raises(ArchUnsupported):
        aot.build(tmp_path / "h", [Job(sample, "host")])
    bad = dataclasses.replace(jobs[0], source="int x = ;")
    with pytest.raises(CompileError):
        aot.build(tmp_path / "bad", [*jobs, bad])
    assert not (tmp_path / "bad").exists()


def test_a_zip_is_the_same_for_the_same_kernels(tmp_path: Path, jobs: list[Job]) -> None:
    one, two = (aot.build(tmp_path / f"{n}.zip", jobs) for n in "ab")
    assert one.path.read_bytes() == two.path.read_bytes()
    folder = aot.build(tmp_path / "f", jobs)
    assert len(folder.records) == 4 and folder.archs()[0] == "compute_90"
    aot.build(tmp_path / "f", jobs[:1])
    assert len(list((tmp_path / "f").glob("*.kernel"))) == 1


def test_a_process_without_nvrtc_runs_from_a_store(tmp_path: Path) -> None:
    """The tool builds, and a process that has no bindings at all takes the code."""
    tool = Path(__file__).parents[2] / "tools" / "build_cubins.py"
    out = tmp_path / "cubins.zip"
    build = [sys.executable, str(tool), str(out), "--arch", "sm_90", "--kernel", "counters"]
    done = subprocess.run(build, capture_output=True, text=True, check=True)
    assert "CubinStore" in done.stdout
    check = subprocess.run([*build[:3], "--verify"], capture_output=True, text=True, check=True)
    assert "0 damaged" in check.stdout
    program = (
        "import sys; sys.modules['cuda'] = None\n"
        "from memra_lowlevel.compile import compile_file\n"
        "image = compile_file('kv/counters.cu', arch='sm_90')\n"
        "print(image.origin, sorted(image.entries)[0], image.data[:4])"
    )
    import os

    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MEMRA_CUBINS": str(out)},
    )
    assert run.stdout.startswith("store add_counters b'\\x7fELF'")
    bad = subprocess.run(
        [sys.executable, "-c", program.replace("sys.modules['cuda'] = None", "pass")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MEMRA_CUBINS": str(tmp_path / "absent")},
    )
    assert not bad.stdout.startswith("store") and bad.stderr.count("MEMRA_CUBINS") == 1


def test_manifest_reads_like_a_table(store: aot.CubinStore) -> None:
    manifest = json.loads(store._read("manifest.json"))
    assert manifest["compiler"].startswith("NVRTC ")
    first = manifest["images"][0]
    assert first["source"] == "s.cu" and first["file"].startswith("s-sm_80-")
    assert set(NAMES) <= set(first["names"])
