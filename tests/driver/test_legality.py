"""The table of capture rules, the host device's obedience, and the real driver's answers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from driver_bench import Bench

from memra_lowlevel.driver import legality
from memra_lowlevel.driver.host import host_options
from memra_lowlevel.driver.legality_cases import CASES, Case, expected, run_case
from memra_lowlevel.driver.table import CaptureMode, Driver

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "tests" / "vectors" / "legality_cuda.json"
REAL = CaptureMode.GLOBAL, CaptureMode.THREAD_LOCAL, CaptureMode.RELAXED


def test_there_are_enough_cases_of_each_kind() -> None:
    assert len({c.id for c in CASES}) == len(CASES) >= 250
    by_mode = Counter(c.mode for c in CASES)
    assert all(by_mode[m] >= 80 for m in REAL)
    assert sum(c.other_thread for c in CASES) >= 45
    assert sum(c.script is not None for c in CASES) >= 60
    refused = [c for c in CASES if not c.script and expected(c)["first"] != legality.OK]
    assert len(refused) >= 50


def test_every_rule_has_a_case_and_every_case_a_call_of_the_surface() -> None:
    named = {c.call for c in CASES if c.situation == "named" and c.call}
    nearby = {c.call for c in CASES if c.situation == "nearby" and c.call}
    surface = {n for n in vars(Driver) if n.startswith("cu")}
    assert named | nearby <= surface and set(legality.RULES) <= surface
    for call, r in legality.RULES.items():
        if r.nearby.result != legality.OK:
            assert call in nearby, call
        if r.named.result != legality.OK or r.nodes:
            assert call in named or call == "cuMemFreeAsync", call


def test_refusals_say_why_and_what_to_do() -> None:
    for call, r in legality.RULES.items():
        if legality.OK not in (r.named.result, r.nearby.result) or r.nearby.invalidates:
            assert r.why and r.remedy, call


@pytest.mark.parametrize("seed", [0, 1])
def test_the_host_device_obeys_the_table(bench: Bench, seed: int) -> None:
    wrong = {}
    with host_options(seed=seed):
        for case in CASES:
            got = run_case(bench.d, case, image=bench.image, kernel="empty")
            if got != expected(case):
                wrong[case.id] = (got, expected(case))
    assert not wrong
    assert not bench.d._captures and not bench.d.active_captures()
    bench.d.cuMemPoolTrimTo(0, 0)
    assert len(bench.d._streams) == 0 and len(bench.d._blocks) == 0
    assert len(bench.d._execs) == 0


def _recorded() -> dict[str, Any]:
    if not RECORDING.exists():
        pytest.fail(
            f"{RECORDING.relative_to(ROOT)} is missing. Record it on a machine with a GPU: "
            "python tools/legality_record.py --driver cuda"
        )
    data: dict[str, Any] = json.loads(RECORDING.read_text(encoding="utf-8"))
    return data


def test_the_host_device_answers_as_the_recorded_driver(bench: Bench) -> None:
    data = _recorded()
    assert data["driver"] == "cuda" and data["driver_version"] >= 12000
    recorded = {c["case"]: c["answers"] for c in data["cases"]}
    missing = [c.id for c in CASES if c.id not in recorded]
    assert not missing, f"no recorded answer: {missing}"
    gone = sorted(set(recorded) - {c.id for c in CASES})
    assert not gone, f"answers to no case: {gone}; python tools/legality_record.py --prune"
    wrong = {}
    for case in CASES:
        got = run_case(bench.d, case, image=bench.image, kernel="empty")
        if got != recorded[case.id]:
            wrong[case.id] = {"host": got, "recorded": recorded[case.id]}
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.gpu
def test_the_driver_at_hand_answers_as_recorded() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "legality_record.py"), "--driver", "cuda"]
    tool += ["--jobs", "8"]
    out = ROOT / "build" / "legality_now.json"
    subprocess.run([*tool, "--out", str(out)], check=True, timeout=600)
    now = {c["case"]: c["answers"] for c in json.loads(out.read_text())["cases"]}
    recorded = {c["case"]: c["answers"] for c in _recorded()["cases"]}
    assert {k: (v, recorded.get(k)) for k, v in now.items() if v != recorded.get(k)} == {}


def test_who_is_prohibited() -> None:
    G, T, R = REAL
    table = {(c, t, same): legality.prohibits(c, t, same_thread=same)
             for c in REAL for t in REAL for same in (True, False)}  # fmt: skip
    assert {k for k, v in table.items() if v} == {
        (G, G, True), (G, T, True), (T, G, True), (T, T, True), (G, G, False),
    }  # fmt: skip
    assert not legality.prohibits(G, R, same_thread=True)


def test_the_runtime_can_ask_before_it_calls() -> None:
    alloc = legality.forbidden("cuMemAlloc")
    assert alloc is not None and "Arena" in alloc.remedy
    assert legality.forbidden("cuMemAlloc", CaptureMode.RELAXED) is None
    assert legality.forbidden("cuMemsetD32Async") is None
    assert legality.forbidden("cuEventRecord", on_captured=True) is None
    sync = legality.forbidden("cuStreamSynchronize", CaptureMode.RELAXED, on_captured=True)
    assert sync is not None and sync.named.result == legality.UNSUPPORTED
    assert legality.forbidden("cuSomethingNew") is None


def test_the_cases_bite(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host device that forgets one rule differs from the expectations."""
    rules = dict(legality.RULES)
    free = legality.Answer(legality.OK)
    rules["cuMemFree"] = legality.Rule("cuMemFree", free, free)
    before = {c.id: expected(c) for c in CASES}
    monkeypatch.setattr(legality, "RULES", rules)
    cases: list[Case] = [c for c in CASES if c.call == "cuMemFree"]
    wrong = [
        c.id
        for c in cases
        if run_case(bench.d, c, image=bench.image, kernel="empty") != before[c.id]
    ]
    assert len(wrong) == 3  # global on both threads, thread-local on the same


def test_the_recorder_writes_what_it_saw(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    tool = ROOT / "tools" / "legality_record.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--driver", "host", "--compare", "--out", str(out)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert f"0 of {len(CASES)} cases differ" in done.stdout
    text = out.read_text()
    data = json.loads(text)
    assert data["driver"] == "host" and len(data["cases"]) == len(CASES)
    # What is asked no more leaves the file, and nothing else changes.
    first = f'  {{"case": "{data["cases"][0]["case"]}"'
    out.write_text(text.replace(first, f'  {{"case": "gone", "answers": {{}}}},\n{first}', 1))
    pruned = subprocess.run(
        [sys.executable, str(tool), "--prune", "--out", str(out)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "gone: gone" in pruned.stdout and out.read_text() == text


def test_no_room_for_a_context_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other programs a device can be full for a moment: asked again, a few times."""
    spec = importlib.util.spec_from_file_location(
        "legality_record", ROOT / "tools" / "legality_record.py"
    )
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    full = "memra_lowlevel.errors.OutOfMemory: cuDevicePrimaryCtxRetain (from x): no memory is left"
    real, calls = subprocess.run, []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if len(calls) <= n_full:
            return subprocess.CompletedProcess(command, 1, "", f"Traceback\n{full}\n")
        return real(command, **how)

    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setattr(tool, "REST_S", 0.0)
    n_full = 2
    assert len(tool._record("host", 60.0, 0, 3)) == 3 and len(calls) == 3
    n_full, calls = 9, []
    with pytest.raises(SystemExit, match="no memory is left"):
        tool._record("host", 60.0, 0, 3)
    assert len(calls) == tool.MOST_REFUSALS
