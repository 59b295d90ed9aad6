"""The command on the host device: every group runs, files are sound, peers are guarded."""

import importlib
import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import rows

from memra_lowlevel import Device, cli, errors, native
from memra_lowlevel.bench import (
    attend,
    ceilings,
    clock,
    command,
    launch,
    peers,
    plot,
    result,
    tables,
)
from memra_lowlevel.bench.attend import CASES, ROWS, Case, measure_case
from memra_lowlevel.bench.clock import graph_us
from memra_lowlevel.bench.result import REPOSITORY, Row, load, ratio
from memra_lowlevel.bench.run import SMALL_NOTE, Run

run_module = importlib.import_module("memra_lowlevel.bench.run")

FAST = ["ceilings", "launch", "replay", "append", "attend", "rows", "recur"]


@pytest.fixture(scope="module")
def run():
    with Device("host") as device, device.stream(name="bench") as stream:
        yield Run(device, stream, small=True)


def test_groups_of_the_host_device(tmp_path, capsys):
    path = tmp_path / "host.json"
    assert cli.main(["bench", *FAST, "--device", "host", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    found = load(path)
    assert found.problems == []
    assert {row.group for row in found.rows} == set(FAST)
    assert "reduced sizes" in printed
    for row in found.rows:
        assert row.what in printed
        assert row.median > 0 or row.unit == "ns", row.what  # a stub's loop may cost nothing
        assert row.note, f"{row.what} on the host device must say what it is"
        if row.note == SMALL_NOTE:
            assert row.floor is None and row.goal is None
    names = [row.what for row in found.rows]
    assert "launch, prepared" in names and "replay + sync" in names
    if "launch, C" in names:
        prepared = next(row for row in found.rows if row.what == "launch, prepared")
        assert prepared.baseline == "launch, C" and ratio(prepared, found.rows)
    assert json.loads(path.read_text())["environment"]["kind"] == "host"


def test_the_layer_cache_has_its_full_size_everywhere(monkeypatch, capsys):
    """It runs on the CPU whatever the device is, so nothing is reduced."""
    monkeypatch.setattr(command, "measure", lambda state, name: None)
    for groups, reduced in ((["layer_kv"], False), (["layer_kv", "launch"], True)):
        assert cli.main(["bench", *groups, "--device", "host"]) == 0
        assert ("reduced sizes" in capsys.readouterr().out) == reduced


def test_an_unknown_group_is_bad_usage(capsys):
    assert cli.main(["bench", "nonsense", "--device", "host"]) == 2
    assert "attend" in capsys.readouterr().err


def test_the_tool_is_the_command():
    done = subprocess.run(
        [sys.executable, "tools/bench.py", "nonsense"], cwd=REPOSITORY, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "no group" in done.stderr


def test_missing_libraries_are_notes_and_no_rows(run, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(peers.importlib, "import_module", missing)
    before = len(run.rows)
    run.notes.clear()
    peers.launch_rows(run, None, None, None, "launch, C")
    peers.replay_rows(run, None, None, None, 2, "replay, C")
    peers.attend_rows(run, Case(4, 2, 64, 32))
    assert len(run.rows) == before
    for name in ("cuda.bindings", "cuda.core", "CuPy", "torch", "Triton", "numba-cuda"):
        assert any(note.startswith(f"{name}: not installed") for note in run.notes), name


@pytest.fixture
def others(tmp_path, monkeypatch):
    """Libraries of the names that a row tells of; each notes that it was imported."""
    names = ("peer_of_tests", "second_peer_of_tests")
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(run_module, "OTHERS", names)
    yield names
    for name in names:
        sys.modules.pop(name, None)


def in_order(monkeypatch, peers, groups, small=False):
    """Measure made-up groups on a made-up GPU, where each asks for a library in its middle."""
    state = Run(SimpleNamespace(kind="host" if small else "cuda"), None, peers, small)
    done, saved = [], []

    def other(name, group):
        if name == "gone":
            state.add(Row(f"{group}, begun", "us", [1.0], peer=name))
        importlib.import_module(name)
        state.add(Row(f"{group}, {name}", "us", [1.0], peer=name))

    def fake(state, group):
        done.append(group)
        state.group = group
        state.add(Row(f"{group}, first", "us", [1.0]))
        name = groups[group]
        if name is not None:
            state.later(partial(other, name, group))
        state.add(Row(f"{group}, second", "us", [1.0]))
        if name == "fails":
            raise RuntimeError("after all")

    monkeypatch.setattr(command, "measure", fake)
    failed = command.measure_all(
        state, list(groups), lambda name: None, lambda: saved.append(len(state.rows))
    )
    assert done == list(groups)
    return state, failed, saved


def test_everything_of_ours_is_measured_before_any_other_library_is_imported(others, monkeypatch):
    first, second = others
    state, failed, saved = in_order(
        monkeypatch, True, {"launch": first, "attend": second, "model": None}
    )
    assert [row.what for row in state.rows] == [
        "launch, first", "launch, second", "attend, first", "attend, second", "model, first",
        "model, second", f"launch, {first}", f"attend, {second}",
    ]  # fmt: skip
    assert [row.loaded for row in state.rows] == [*[[]] * 6, [first], [first, second]]
    assert [row.group for row in state.rows[-2:]] == ["launch", "attend"]
    assert failed == [] and saved == [2, 4, 6, 7, 8]


def test_a_result_file_tells_what_was_loaded(others, monkeypatch, tmp_path):
    state, _, _ = in_order(monkeypatch, True, {"launch": others[0]})
    path = tmp_path / "told.json"
    result.write(path, state.rows, about={"kind": "host"})
    assert [row.loaded for row in load(path).rows] == [[], [], [others[0]]]


@pytest.mark.parametrize(("peers", "small"), [(False, False), (True, True)])
def test_no_other_library_is_imported_without_peers_or_a_gpu(others, monkeypatch, peers, small):
    state, failed, _ = in_order(monkeypatch, peers, {"launch": others[0]}, small)
    assert len(state.rows) == 2 and not failed and others[0] not in sys.modules


def test_a_group_that_failed_asks_no_other_library(others, monkeypatch, capsys):
    state, failed, _ = in_order(
        monkeypatch, True, {"launch": "fails", "attend": others[0], "rows": "gone"}
    )
    assert failed == ["launch", "rows"] and "after all" in capsys.readouterr().err
    # What the library of the third group broke costs its rows, not those of the group.
    assert [row.what for row in state.rows] == [
        "attend, first", "attend, second", "rows, first", "rows, second", f"attend, {others[0]}",
    ]  # fmt: skip
    assert any("rows: failed, ModuleNotFoundError" in note for note in state.notes)


def test_the_groups_put_their_peers_off(run, monkeypatch):
    """None of them is asked while ours are measured, and each is asked afterwards."""
    asked = []
    for name in ("launch_rows", "replay_rows", "attend_rows"):
        monkeypatch.setattr(peers, name, lambda run, *words, name=name: asked.append(name))
    state = Run(run.device, run.stream, small=True)
    monkeypatch.setattr(Run, "later", lambda self, call: self._later.append((self.group, call)))
    for group in ("launch", "replay", "attend", "rows"):
        command.measure(state, group)
    assert asked == []
    for _, call in state.take_later():
        call()
    assert list(dict.fromkeys(asked)) == ["launch_rows", "replay_rows", "attend_rows"]
    assert asked.count("attend_rows") >= 2 and state.take_later() == []


def test_c_is_measured_again_beside_the_others(run, monkeypatch):
    """They are compared with what C took in the same process as they found it."""

    def other(run, *words):
        run.add(Row(f"{words[-1]} of another", "us", [1.0], peer="other", baseline=words[-1]))

    monkeypatch.setattr(peers, "launch_rows", other)
    monkeypatch.setattr(peers, "replay_rows", other)
    monkeypatch.setattr(launch, "_LAUNCHES", (2, 3))
    state = Run(run.device, run.stream, small=True)
    state.group = "launch"
    launch._others_launch(state)
    state.group = "replay"
    launch._others_replay(state, 2)
    names = {row.what: row for row in state.rows}
    if not native.available():
        return
    for c_row in ("launch beside others, C", "replay beside others, C"):
        assert names[c_row].peer == "C"
        assert ratio(names[f"{c_row} of another"], state.rows) == names[c_row].median


def test_a_failing_library_is_a_note(run):
    run.notes.clear()
    with run.guard("other"):
        raise RuntimeError("no kernel image\nmore")
    assert run.notes == ["other: RuntimeError: no kernel image"]


def test_cases_cover_what_the_goals_name():
    shapes = {(c.shape, c.ctx) for c in CASES if c.goal is not None}
    assert len(shapes) == 11
    one = [c.ctx for c in CASES if c.shape == "32/8/128" and c.what.endswith("q8_0/q5_1")]
    assert {512, 1 << 20} <= set(one)
    assert {c.n_rows for c in ROWS} == {1, 2, 4, 8, 16}
    assert sum(c.window is not None for c in CASES) == 2 and sum(c.ring for c in CASES) == 1
    for cases in (CASES, ROWS):
        assert len({c.what for c in cases}) == len(cases)
    case = Case(32, 8, 128, 32768)
    assert case.key_bytes == 58 * 32 and case.n_keys == 32768  # performance: 60.8 MB
    assert Case(32, 8, 128, 1 << 17, 4, window=4096).n_keys == 4099


def test_sets_outgrow_the_caches():
    assert clock.n_sets(1 << 20) * (1 << 20) >= 3 * (60 << 20)
    assert clock.n_sets(4 << 30) == 1 and clock.n_sets(1 << 20, small=True) == 2


def test_attention_of_a_case_sees_every_key(run):
    """The planes of a window and a ring are filled where a query looks, at the far end."""
    for case in (Case(4, 2, 64, 96), Case(4, 2, 64, 160, window=64, ring=True)):
        row = measure_case(run, case)
        assert row.extra["ctx"] == case.ctx and row.extra["bytes"] == case.n_keys * case.key_bytes


def test_ceilings_interpolate():
    found = ceilings.Ceilings({1 << 20: 1.0, 4 << 20: 4.0, 64 << 20: 16.0}, {1 << 20: 2.0})
    assert found.read_us(1) == 1.0 and found.read_us(1 << 20) == 1.0
    assert found.read_us(2 << 20) == pytest.approx(2.0)
    assert found.read_us(16 << 20) == pytest.approx(8.0)
    assert found.read_us(128 << 20) == pytest.approx(32.0)
    assert found.copy_us(1) == 2.0 and found.copy_us(2 << 20) == 4.0


def test_of_each_ceiling_the_fastest_turn_counts(monkeypatch):
    """A turn that something disturbs is in no floor; large reads, which it cannot slow, are one."""
    monkeypatch.setattr(clock, "ROTATION_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "READ_BYTES", (1 << 16, 1 << 20))
    monkeypatch.setattr(ceilings, "COPY_BYTES", (1 << 20,))
    monkeypatch.setattr(ceilings, "ROTATION_BYTES", 2 << 20)
    monkeypatch.setattr(ceilings, "_BRIEF_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "_WAKE_S", 0.0)
    taken = iter([9.0, 5.0, 20.0, 30.0, 4.0, 6.0])  # empty, reads, copy, turns
    with Device("host") as device, device.stream(name="bench") as stream:
        state = Run(device, stream)
        state.timed = lambda calls: [next(taken, 7.0)] * 3
        found = ceilings.measure(state)
    rows = {row.what: row for row in state.rows}
    assert rows["read 64 KiB"].extra["turns"] == [5.0, 4.0, 6.0] and found.read_us(1 << 16) == 4.0
    assert rows["read 1 MiB"].extra["turns"] == [20.0] and found.copy_us(1 << 20) == 30.0
    assert rows["read 64 KiB"].samples == [4.0] * 3


def test_samples_in_turn_change_their_order():
    said = []
    calls = [(said.append, (name,), 2) for name in "abc"]
    found = clock.host_us_in_turn(calls, lambda: said.append("|"), 2)
    assert "".join(said) == "cc|bb|aa|aa|bb|cc|cc|bb|aa|"
    assert [len(samples) for samples in found] == [2, 2, 2]  # the first turn warms up


def test_a_sample_may_be_the_fastest_of_several_turns(monkeypatch):
    now = iter(range(10**9))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: 0.01 * next(now))
    took = iter([9, 9, 9, 9, 5, 3, 4, 2, 8, 7])
    stamps = iter(x for us in took for x in (0, 1000 * us))
    monkeypatch.setattr(clock.time, "perf_counter_ns", lambda: next(stamps))
    calls = [(lambda x: None, (0,), 1)]
    found = clock.host_us_in_turn(calls, lambda: None, 2, best_of=3, warm_s=0.035)
    assert found == [[3.0, 2.0]]  # four turns warmed up


def test_a_line_says_share_and_goal():
    found = rows()
    text = command.line(found[0], found)
    assert "79.7% of the floor" in text and "goal 3.9 met" in text and "TB/s" in text
    assert "93.9% of launch, C" in command.line(Row("x", "us", [3.3], baseline="launch, C"), found)


def test_figures(tmp_path):
    curves = plot.series(rows())
    assert set(curves) == {"32/8/128 q8_0/q5_1", "32/8/128 torch"}
    assert [row.extra["ctx"] for row in curves["32/8/128 torch"]] == [4096, 32768]
    plot.draw(tmp_path / "a.svg", rows(), {"device": "made up"})
    plot.draw(tmp_path / "b.svg", rows(), {"device": "made up"})
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text() and "made up" in text
    plot.draw(tmp_path / "a.png", rows(), {"device": "made up"})
    assert (tmp_path / "a.png").stat().st_size > 10_000
    with pytest.raises(errors.ArgumentError, match="attend"):
        plot.draw(tmp_path / "c.svg", rows()[-2:], {})


def test_a_missing_plotter_is_said_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "attend", "--device", "host", "--plot", "x.svg"]) == 1
    said = capsys.readouterr()
    assert "pip install matplotlib" in said.err and "bench on" not in said.out


def test_the_whole_path_with_floors_and_goals(monkeypatch):
    """What a GPU runs, in small: every group with ceilings of the same run, rows complete."""
    monkeypatch.setattr(clock, "ROTATION_BYTES", 1 << 20)
    monkeypatch.setattr(clock, "_N_CALLS", 2)
    monkeypatch.setattr(clock, "_MAX_SETS", 2)
    monkeypatch.setattr(ceilings, "READ_BYTES", (1 << 16, 1 << 20))
    monkeypatch.setattr(ceilings, "COPY_BYTES", (1 << 20,))
    monkeypatch.setattr(ceilings, "ROTATION_BYTES", 2 << 20)
    monkeypatch.setattr(attend, "CASES", attend._SMALL)
    monkeypatch.setattr(attend, "ROWS", attend._SMALL_ROWS)
    monkeypatch.setattr(launch, "_REPLAYS", (2, 31))
    monkeypatch.setattr(launch, "_BEST_OF", 2)
    monkeypatch.setattr(launch, "_WAITS", (2, 5))
    monkeypatch.setattr(launch, "_WARM_S", 0.0)
    with Device("host") as device, device.stream(name="bench") as stream:
        state = Run(device, stream)
        state.timed = lambda calls, n=2: graph_us(device, stream, calls, 2)
        for group in ("attend", "rows", "launch", "replay"):
            command.measure(state, group)
    by_group = {group: [r for r in state.rows if r.group == group] for group in FAST}
    assert {r.what for r in by_group["ceilings"]} == {
        "read 64 KiB", "read 1 MiB", "copy 1 MiB", "set 2 MiB", "empty node",
        "node of one small kernel",
    }  # fmt: skip
    for row in by_group["attend"] + by_group["rows"]:
        assert row.floor and row.share and not row.note
        assert {"shape", "ctx", "n_rows", "bytes", "sets"} <= set(row.extra)
    more = [row for row in by_group["rows"] if row.extra["n_rows"] > 1]
    assert more and all(row.goal and row.extra["over_one_row"] for row in more)
    named = {row.what: row for row in state.rows}
    if "launch, C" in named:
        for what, factor, more in (("launch", 1.05, 0.0), ("replay", 1.0, 0.1)):
            ours, c = named["launch, prepared" if factor > 1 else what], named[f"{what}, C"]
            assert ours.in_turn and ours.baseline == c.what and len(ours.samples) > 30
            longer = np.median(np.subtract(ours.samples, c.samples))
            wanted = factor * (ours.median - longer) + more
            assert ours.goal == pytest.approx(wanted, abs=1e-3)
    for group in ("ceilings", "attend", "rows", "launch", "replay"):
        found = result.Result(REPOSITORY, {"command": []}, state.rows, [], {}, [], "")
        assert len(tables.render(group, found, "x.json")) == len(by_group_lines(found, group)) + 4


def by_group_lines(found, group):
    return [r for r in found.group(group) if group not in ("attend", "rows") or r.peer is None]
