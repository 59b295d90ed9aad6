"""What ``tools/gpu_check.py`` makes of reports and benchmarks, without a GPU."""

import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
from synthetic import ABOUT, write

from memra_lowlevel.bench import regress
from memra_lowlevel.bench.result import REPOSITORY, load

sys.path.insert(0, str(REPOSITORY / "tools"))
import gpu_check


def case(name, *inside):
    element = ElementTree.Element("testcase", classname="tests.kernels.test_x", name=name)
    for tag, message in inside:
        ElementTree.SubElement(element, tag, message=message)
    return element


def test_a_skip_fails_unless_it_is_the_compilers():
    good = case("a")
    assert gpu_check.judge([good], 0)["ok"] and not gpu_check.judge([good], 1)["ok"]
    answer = gpu_check.judge([good, case("b", ("skipped", "no torch"))], 0)
    assert not answer["ok"] and (answer["passed"], answer["skipped"]) == (1, 1)
    answer = gpu_check.judge([good, case("b", ("skipped", f"Skipped: {gpu_check.NO_COMPILER}"))], 0)
    assert answer["ok"] and answer["without_nvrtc"] == ["tests.kernels.test_x::b"]
    assert (answer["passed"], answer["skipped"]) == (1, 0)
    answer = gpu_check.judge([case("c", ("failure", "1 != 2"))], 1)
    assert not answer["ok"] and "1 != 2" in answer["failures"][0]


def test_the_plan_takes_sections_and_items(tmp_path):
    def keys(only, but=()):
        return [i.key for i in gpu_check.plan(only, but, ["attend"], "cuda:0", tmp_path / "x.json")]

    everything = keys(gpu_check.SECTIONS)
    assert everything[-1] == "bench/all" and {"parity/kernels", "graphs/graph"} <= set(everything)
    assert keys(["parity"], ["parity/e2e"]) == [
        k for k in everything if k.startswith("parity/") and k != "parity/e2e"
    ]
    assert keys(["sanitize/memcheck", "legality"]) == ["legality/table", "sanitize/memcheck"]
    with pytest.raises(SystemExit, match="nonsense"):
        keys(["nonsense"])


def test_cores_are_shared_and_a_benchmark_is_alone():
    cores, busy, most = gpu_check.Cores(4), [0], [0]

    def work(wanted):
        n = cores.take(wanted)
        busy[0] += n
        most[0] = max(most[0], busy[0])
        time.sleep(0.01)
        busy[0] -= n
        cores.give(n)
        return n

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3, 0, 9, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= 4 and cores.free == 4 and work(0) == 4


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Have the benchmark be a list of factors by which its rows take longer than the reference."""
    reference = load(write(tmp_path / "reference.json"))
    monkeypatch.setattr(regress, "references", lambda: [reference])
    factors, groups = [], []

    def run(command, **more):
        command = [str(word) for word in command]
        groups.append(command[2 : command.index("--device")])
        out = command[command.index("--json") + 1]
        write(gpu_check.Path(out), factors.pop(0))
        return SimpleNamespace(returncode=0, stdout="a table", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return factors, groups


def test_a_loss_counts_when_two_runs_show_it(runs, tmp_path):
    factors, groups = runs
    wanted = ["ceilings", "launch", "attend"]

    def bench(*times):
        factors[:], groups[:] = times, []
        return gpu_check.bench(wanted, "cuda:0", tmp_path / "now.json", 60.0)

    assert bench(1.0)["ok"] and groups == [wanted]
    assert bench(1.2, 1.0)["ok"] and groups == [wanted, ["launch", "attend"]]
    lost = bench(1.2, 1.2)
    assert not lost["ok"] and len(lost["failures"]) == 3 and "reference.json" in lost["failures"][0]
    kept = load(tmp_path / "now.json")  # the first run, not the better one
    assert regress.losses(regress.ratios(kept.rows), ABOUT["device"], regress.references())


def test_a_benchmark_that_fails_is_told(monkeypatch, tmp_path):
    def run(command, **more):
        return SimpleNamespace(returncode=1, stdout="half a table", stderr="why")

    monkeypatch.setattr(subprocess, "run", run)
    answer = gpu_check.bench(["launch"], "cuda:0", tmp_path / "now.json", 60.0)
    assert not answer["ok"] and "why" in answer["failures"][0]


@pytest.mark.parametrize("budget", ["-3", "0", "nan", "inf"])
def test_a_budget_is_a_time(monkeypatch, capsys, budget):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--budget-s", budget])
    with pytest.raises(SystemExit) as caught:
        gpu_check.main()
    assert caught.value.code == 2 and f"{budget} is no time" in capsys.readouterr().err
