from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memra_lowlevel.compile import nvrtc
from memra_lowlevel.debug import doctor, probes
from memra_lowlevel.debug.probes import DOORS, PROBES, Probe
from memra_lowlevel.errors import CompilerNotFound, ToolkitMismatch

PACKAGE = Path(doctor.__file__).parents[1]


def test_every_probe_answers() -> None:
    report = doctor.examine()
    assert [p.name for p in report.probes] == list(PROBES)
    for p in report.probes:
        assert p.state in ("ok", "missing", "warning") and p.found
        assert p.advice or p.state == "ok", f"{p.name} is {p.state} and says nothing of it"
    by = {p.name: p for p in report.probes}
    assert by["python"].state == by["nvrtc"].state == by["host device"].state == "ok"
    assert by["nvrtc"].data["version"] == ".".join(map(str, nvrtc.library().version))
    assert report.device.startswith(("cuda:0", "host"))


def test_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    from memra_lowlevel.cli import main

    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("device: ") and text.rstrip().splitlines()[-1].startswith("driver ")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"device", "verdict", "fits", "probes"}
    assert {p["name"] for p in report["probes"]} == set(PROBES)


def test_with_nothing_installed(tmp_path: Path) -> None:
    """A bare interpreter without site-packages: no package but ours can be imported."""
    (tmp_path / "memra_lowlevel").symlink_to(PACKAGE)
    run = subprocess.run(
        [sys.executable, "-S", "-m", "memra_lowlevel.debug.doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CXX": "/nowhere/cxx"},
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    by = {p["name"]: p for p in report["probes"]}
    for name in ("dependencies", "bindings", "nvrtc", "model"):
        assert by[name]["state"] == "missing", name
        assert "pip install" in by[name]["advice"], name
    assert "numpy" in by["dependencies"]["advice"]
    assert "host device" in by["bindings"]["advice"]


def test_a_probe_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Probe:
        raise SystemExit("boom")

    monkeypatch.setitem(PROBES, "nvrtc", broken)
    report = doctor.examine()
    by = {p.name: p for p in report.probes}
    assert by["nvrtc"].state == "missing" and "boom" in by["nvrtc"].found
    assert by["cache"].state == "ok" and "NVRTC none" in report.verdict


def test_missing_compiler_and_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    from memra_lowlevel.driver.host import build

    def no_compiler(*_: object) -> None:
        raise CompilerNotFound("none of them")

    def no_nvrtc() -> None:
        raise ToolkitMismatch("the NVRTC library cannot be loaded (x). Install y")

    monkeypatch.setattr(build, "find_compiler", no_compiler)
    monkeypatch.setattr(build, "runtime_library", no_compiler)
    monkeypatch.setattr(nvrtc, "library", no_nvrtc)
    report = doctor.examine()
    by = {p.name: p for p in report.probes}
    assert by["c++ compiler"].state == "missing" and "ziglang" in by["c++ compiler"].advice
    assert by["host device"].state == "missing"
    assert by["nvrtc"].found == "the NVRTC library cannot be loaded (x)"
    if by["devices"].state == "missing":
        assert report.device.startswith("none") and not report.fits
        assert "no kernel can run here" in report.verdict
        told = " ".join([report.verdict, *(p.advice for p in report.probes)])
        for untrue in ("run on the host device", "host device works", "takes the host device."):
            assert untrue not in told


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path / "file"))
    probe = PROBES["cache"]()
    assert probe.state == "warning" and "MEMRA_CACHE_DIR" in probe.advice
    assert probe.data["writable"] is False


def test_doors_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMRA_KV_K", "q8_0")
    assert "MEMRA_KV_K=q8_0" in PROBES["environment"]().found
    monkeypatch.setenv("MEMRA_KVK", "q8_0")
    probe = PROBES["environment"]()
    assert probe.state == "warning" and "MEMRA_KVK" in probe.advice


def test_every_door_of_the_package_is_known() -> None:
    """Names that the sources read from the environment, against the table."""
    pattern = re.compile(r"""["'](MEMRA_[A-Z0-9_]+|CMF_[A-Z0-9_]+)["']""")
    used = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in pattern.findall(path.read_text())
        if "environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert used - set(DOORS) == set()
    names = (PACKAGE.parent / "docs" / "names.md").read_text()
    assert {name for name in used if f"`{name}`" not in names} == set()


@pytest.mark.parametrize(
    ("driver", "nvrtc", "bindings", "fits", "words"),
    [
        ((13, 0), (13, 5), (13, 4), True, "PTX of this NVRTC may be too new"),
        ((13, 2), (13, 0), (13, 0), True, "they fit"),
        ((13, 0), (12, 9), (12, 9), True, "they fit"),
        ((12, 8), (12, 9), (12, 9), True, "machine code loads"),
        ((12, 4), (13, 0), (12, 9), False, "does not load code of NVRTC 13"),
        ((12, 4), (12, 9), (13, 0), False, "bindings are newer"),
        ((13, 0), (12, 9), (13, 0), False, "different major versions"),
        ((13, 0), None, (13, 0), False, "nvidia-cuda-nvrtc"),
        ((12, 8), (12, 9), None, False, "cuda-python==12.*"),
        (None, (12, 9), (12, 9), True, "can be compiled"),
        (None, None, None, True, "host device only"),
    ],
)
def test_verdict(
    driver: tuple[int, int] | None,
    nvrtc: tuple[int, int] | None,
    bindings: tuple[int, int] | None,
    fits: bool,
    words: str,
) -> None:
    answer, text = doctor.verdict(driver, nvrtc, bindings)
    assert answer is fits and words in text and "\n" not in text


class StubCuda:
    """The few entry points of libcuda that the probes call, with two devices behind them."""

    def __init__(self, init: int = 0, count: int = 2):
        self.init, self.count = init, count

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: Any) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = 139 << 30
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> int:
        out._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_driver_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_libcuda", StubCuda)
    report = doctor.examine()
    by = {p.name: p for p in report.probes}
    assert by["driver"].data["version"] == "12.8"
    assert by["devices"].found.startswith("cuda:0 NVIDIA H200 sm_90 139 GiB; cuda:1 ")
    assert report.device == "cuda:0 (NVIDIA H200)"
    assert report.verdict.startswith("driver 12.8, NVRTC ")


@pytest.mark.parametrize(
    ("init", "words"), [(100, "CUDA_VISIBLE_DEVICES"), (803, "reboot"), (999, "cuInit answers 999")]
)
def test_a_driver_that_refuses(init: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_libcuda", lambda: StubCuda(init))
    probe = PROBES["devices"]()
    assert probe.state == "missing" and words in probe.advice and "host device" in probe.advice
    monkeypatch.setattr(probes, "_libcuda", lambda: StubCuda(0, 0))
    assert "sees no device" in PROBES["devices"]().advice
    monkeypatch.setattr(probes, "_libcuda", lambda: None)
    assert PROBES["driver"]().state == PROBES["devices"]().state == "missing"
