"""Counters of ``ncu``: its table is read as it is written, and nothing is made up."""

import dataclasses
import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import ABOUT

from memra_lowlevel.bench import counters, repoint, result, sources, tables
from memra_lowlevel.bench.result import REPOSITORY, load

sys.path.insert(0, str(REPOSITORY / "tools"))
import counters as tool

# Made by hand in the format of `ncu --csv --page raw --print-units base`.
SAMPLE = Path(__file__).with_name("ncu_raw_sample.csv")
NAME = "benchmarks/results/2030-01-02-counters.json"
ATTEND, APPEND = "attend 32/8/128 ctx 4096, q8_0/q5_1", "append 8x128, 16 rows, q8_0/q5_1"
BATCH = [
    tool.Counted(ATTEND, tool.ATTENTION),
    tool.Counted(ATTEND, tool.COMBINATION, "combination"),
    tool.Counted(APPEND, "append_\\w+"),
]
GMMA = counters.STALLS["gmma"]
FAMILIES = {family: f"digest of {family}" for family in sources.FAMILIES}


def rows_of(text=None):
    found = counters.parse(SAMPLE.read_text() if text is None else text)
    return [row for _, row in tool.pick(BATCH, found)]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "digest_of", lambda family: f"digest of {family}")
    (tmp_path / "docs").mkdir()
    about = {**ABOUT, "families": FAMILIES, "package": "made up"}
    result.write(tmp_path / NAME, rows_of(), about=about)
    mark = f"<!-- table: counters from {NAME} -->\n{tables.END}\n"
    (tmp_path / "docs" / "performance.md").write_text(mark)
    return tmp_path


def cells_of(root, what):
    text = (root / "docs" / "performance.md").read_text()
    line = next(x for x in text.splitlines() if x.startswith(f"| {what} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


# -- what ncu prints ------------------------------------------------------------------------------
def test_units_separators_and_missing_values():
    mark, attend, combine, _, append = counters.parse(SAMPLE.read_text())
    assert [one.function for one in (mark, attend, combine, append)] == [
        tool.MARK, "attend_mma", "attend_mma_combine", "append_few",
    ]  # fmt: skip
    assert (mark.grid, attend.grid) == ((1, 1, 1), (128, 2, 1))
    assert attend.values[counters.DURATION] == 6208 and combine.values[counters.DURATION] == 3104
    assert attend.values["smsp__inst_executed.sum"] == 2_252_800
    assert attend.values["dram__bytes_read.sum"] == 7_602_176
    assert combine.values["dram__bytes_read.sum"] is None  # n/a
    assert attend.values[counters.STALLS["misc"]] is None  # no such column
    assert set(attend.values) == set(counters.METRICS)


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("6.5", "us", 6500.0), ("6.5", "usecond", 6500.0), ("1", "msecond", 1e6),
        ("6,208", "ns", 6208.0), ("6.2e+03", "ns", 6200.0), ("6.208,5", "ns", None),
        ("62,08", "ns", None), ("n/a", "ns", None), ("", "ns", None), ("nan", "ns", None),
        ("inf", "ns", None), ("1e999", "ns", None), ("6208", "fortnight", None),
        ("1 (1; 2)", "ns", None),
    ],
)  # fmt: skip
def test_a_value_is_a_number_in_a_known_unit_or_none(text, unit, expected):
    table = f'"ID","Kernel Name","{counters.DURATION}"\n"","","{unit}"\n"0","k","{text}"\n'
    (one,) = counters.parse(table)
    assert one.values[counters.DURATION] == expected


def test_what_is_no_table_holds_no_launch():
    for text in ("", "==ERROR== ERR_NVGPUCTRPERM\n", '"ID","Kernel Name"\n', "hello, world\n1,2\n"):
        assert counters.parse(text) == []
    cut = SAMPLE.read_text().rstrip("\n").rpartition('","')[0]  # the last line is not whole
    assert len(counters.parse(cut)) == 4
    swapped = '"Kernel Name","Grid Size","ID"\n"k(int)","(2, 1, 1)","0"\n'
    assert counters.parse(swapped) == []  # a table of ncu begins with ID
    no_units = f'"ID","Kernel Name","{counters.GROUP}"\n"0","a::b(int)","1"\n'
    (one,) = counters.parse(no_units)
    assert one.function == "b" and one.grid == ()


def test_launches_belong_to_the_mark_before_them():
    attend, combine, append = rows_of()
    assert [row.what for row in (attend, combine, append)] == [case.what for case in BATCH]
    assert (attend.median, combine.median, append.median) == (6.208, 3.104, 2.208)
    assert attend.extra["missing"] == [GMMA, counters.STALLS["misc"]]
    assert "dram__bytes_read.sum" in combine.extra["missing"]
    # Without the second mark, the append is not taken for the first row's.
    lines = SAMPLE.read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith('"3","4242"'))
    assert "is not among" in rows_of(text)[2]
    # Without a time there is no row, whatever else was counted.
    assert rows_of(SAMPLE.read_text().replace('"2,208"', '"n/a"'))[2] == "ncu gave no time"
    second = [dataclasses.replace(BATCH[0], nth=1)]
    assert "launch 1" in tool.pick(second, counters.parse(SAMPLE.read_text()))[0][1]


# -- the table ------------------------------------------------------------------------------------
def test_the_table_says_what_the_file_says(root):
    assert len(tables.check(root)) == 1
    assert tables.check(root, write=True) == [] and tables.check(root) == []
    head = cells_of(root, "what")
    attend = dict(zip(head, cells_of(root, ATTEND), strict=True))
    assert attend["time"] == "6.21 µs" and attend["blocks"] == "256 × 256"
    assert attend["instructions a warp"] == "1100" and attend["warps an SM"] == "14.8"
    assert (attend["dram"], attend["issue"], attend["ALU"]) == ("39%", "44%", "40%")
    assert attend["waits most for"] == "long scoreboard 40%, wait 20%, short scoreboard 15%"
    text = (root / "docs" / "performance.md").read_text()
    assert "NVIDIA Made Up (cuda:0), commit 0123456789" in text and tables.OLDER not in text


def test_a_missing_metric_is_a_dash(root):
    kept = load(root / NAME)
    path = root / NAME
    for row in kept.rows:
        values = row.extra["counters"]
        assert GMMA in values and values[GMMA] is None
        for name in values:
            if name != counters.DURATION:
                values[name] = None
    result.write(path, kept.rows, about=kept.environment)
    assert tables.check(root, write=True) == []
    cells = cells_of(root, ATTEND)
    assert cells[1] == "6.21 µs" and set(cells[2:]) == {"–"}


def test_a_changed_value_is_refused_by_the_seal(root):
    tables.check(root, write=True)
    path, good = root / NAME, (root / NAME).read_text()
    for old, new in (("38.91", "98.91"), ("2252800.0", "2252801.0"), ("6.208", "5.208")):
        assert old in good
        path.write_text(good.replace(old, new, 1))
        assert any("seal" in str(problem) for problem in tables.check(root)), old
    made_up = json.loads(good)
    made_up["rows"][0]["extra"]["counters"][GMMA] = 0.5  # a value where ncu gave none
    path.write_text(json.dumps(made_up))
    assert any("seal" in problem for problem in load(path).problems)
    path.write_text(good)
    assert tables.check(root) == []


@pytest.mark.parametrize("family", ["counters", "append"])
def test_older_kernels_are_marked(root, family):
    kept = load(root / NAME)
    about = {**kept.environment, "families": {**FAMILIES, family: "other"}}
    result.write(root / NAME, kept.rows, about=about)
    tables.check(root, write=True)
    text = (root / "docs" / "performance.md").read_text()
    assert (tables.OLDER in text) == (family == "counters")


def test_the_family_holds_what_is_counted():
    files = set(sources.files_of("counters"))
    for family in ("attend", "append", "model", "recur"):
        assert set(sources.files_of(family)) <= files, family


def test_marks_of_other_tables_do_not_move_to_counters(root):
    text = "<!-- table: attend from pending -->\n<!-- table: counters from pending -->\n"
    kept = load(root / NAME)
    result.write(root / NAME, kept.rows, about={**kept.environment, "kind": "cuda"})
    assert repoint.repoint(text, root, [root / NAME]) == text.replace(
        "counters from pending", f"counters from {NAME}"
    )


# -- the tool -------------------------------------------------------------------------------------
def test_cases_are_named_once_and_known():
    names = [case.what for case in tool.CASES]
    assert len(set(names)) == len(names)
    known = {f"attend {c.what}" for c in tool.ATTEND} | {f"rows {c.what}" for c in tool.ROWS}
    for case in tool.CASES:
        assert case.row in known or case.row.startswith(
            ("append ", "recur ", tool.TOKEN, tool.VERIFY)
        )
        assert case.cache in ("all", "none") and re.compile(case.kernel)
    entries = "attend_mma", "attend_f16", "attend_partial"
    assert all(re.fullmatch(tool.ATTENTION, name) for name in entries)
    assert not re.fullmatch(tool.ATTENTION, "attend_mma_combine")


def test_every_missed_goal_of_the_documents_has_a_case():
    text = (REPOSITORY / "docs" / "performance.md").read_text()
    counted = {case.row for case in tool.CASES}
    for kind, path in re.findall(r"<!-- table: (attend|rows|append|recur|model) from (\S+)", text):
        if path.startswith(tables.PENDING):
            continue
        for row in load(REPOSITORY / path).group(kind):
            # Started early or not, and with which weights, a kernel is the same.
            what = re.sub(r"^(token smollm2).*", tool.TOKEN, row.what)
            what = what.removesuffix(", starts early")
            if row.goal is not None and row.median > row.goal:
                assert what in counted, f"{row.what} misses its goal; add it to tools/counters.py"


def test_a_process_has_one_setting_of_the_caches_and_few_rows():
    found = tool.batches(tool.CASES)
    assert [case for batch in found for case in batch] == list(tool.CASES)
    for batch in found:
        assert len({case.cache for case in batch}) == 1
        assert len({case.row for case in batch}) <= tool.PER_PROCESS
    (token,) = [b for b in found if any(case.row == tool.TOKEN for case in b)]
    assert sum(case.row == tool.TOKEN for case in token) == 8


def test_the_work_is_done_on_the_host_device():
    done = subprocess.run(
        [sys.executable, "tools/counters.py", "--device", "host", "--launch",
         APPEND, "recur 32x128x128, 1 tokens", "nonsense"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "counters: nonsense: LookupError: no row of the benchmark is called 'nonsense'"
    ]


def fake_ncu(folder, body):
    """Write a program that answers as ncu: ``body`` has ``log``, ``metrics`` and ``rows``."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport sys, time\nwords = sys.argv[1:]\n"
        "if words == ['--version']:\n    sys.exit(print('Version 2025.3.0.0 (build 1)'))\n"
        "log = open(words[words.index('--log-file') + 1], 'w')\n"
        "metrics = words[words.index('--metrics') + 1].split(',')\n"
        f"rows = words[words.index('--launch') + 1:]\nsample = open({str(SAMPLE)!r}).read()\n{body}"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_metrics_that_ncu_refuses_are_left_out(tmp_path):
    ncu = fake_ncu(
        tmp_path,
        f"if {GMMA!r} in metrics:\n"
        f"    log.write('==ERROR== Failed to find metric {GMMA}\\n')\n    sys.exit(1)\n"
        "print('the program', *rows, sep='|')\nlog.write(sample)\n",
    )
    found, said = tool.count(ncu, BATCH, "cuda:0", 60.0)
    assert len(found) == 5 and f"the program|{ATTEND}|{APPEND}" in said
    ncu = fake_ncu(tmp_path, "log.write('==ERROR== ERR_NVGPUCTRPERM\\n')\nsys.exit(1)\n")
    found, said = tool.count(ncu, BATCH, "cuda:0", 60.0)
    assert found == [] and "ERR_NVGPUCTRPERM" in said
    ncu = fake_ncu(tmp_path, "time.sleep(60)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        tool.count(ncu, BATCH, "cuda:0", 1.0)


class Gpu:
    """A device that is there as far as its name."""

    kind = "cuda"

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def gpu(monkeypatch):
    about = {**ABOUT, "families": FAMILIES, "package": "made up"}
    monkeypatch.setattr("memra_lowlevel.Device", Gpu)
    monkeypatch.setattr(result, "environment", lambda device: dict(about))


def test_a_whole_run_writes_a_sound_file(tmp_path, monkeypatch, capsys, gpu):
    ncu = fake_ncu(tmp_path, "log.write(sample)\n")
    monkeypatch.setattr(tool, "find_ncu", lambda: ncu)
    path = tmp_path / "counters.json"
    assert tool.measure(BATCH, path, "cuda:0", 60.0) == 0
    kept = load(path)
    assert kept.problems == [] and [row.what for row in kept.rows] == [c.what for c in BATCH]
    assert kept.environment["profiler"]["ncu"] == "2025.3.0.0"
    assert kept.rows[0].extra["cache"] == "all" and "attend_mma" in kept.rows[0].extra["kernel"]
    assert "stalled_gmma" in capsys.readouterr().out  # what is missing is named
    # A launch that is not there fails by name and is in no row.
    extra = [*BATCH, tool.Counted(APPEND, "append_kv", "bulk")]
    assert tool.measure(extra, path, "cuda:0", 60.0) == 1
    assert len(load(path).rows) == 3 and "append_kv" in load(path).notes[0]
    # Nothing is begun that the budget cannot hold.
    assert tool.measure(BATCH, path, "cuda:0", 2.0) == 3
    assert load(path).rows == [] and len(load(path).notes) == 3
    assert f"left for another call: {ATTEND}" in capsys.readouterr().out


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tool.shutil, "which", lambda place: None)
    with pytest.raises(SystemExit, match="Nsight Compute"):
        tool.find_ncu()
    monkeypatch.setattr(tool, "find_ncu", lambda: "ncu")
    with pytest.raises(SystemExit, match="is no GPU"):
        tool.measure(BATCH, tmp_path / "x.json", "host", 60.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "("], "'(' is no regular expression"),
        (["--budget-s", "-3"], "-3 is no time"),
        (["--budget-s", "nan"], "nan is no time"),
        (["--budget-s", "soon"], "invalid seconds value"),
    ],
)
def test_wrong_words_are_told(monkeypatch, capsys, words, said):
    monkeypatch.setattr(tool.sys, "argv", ["counters.py", *words])
    with pytest.raises(SystemExit) as caught:
        tool.main()
    assert caught.value.code == 2 and said in capsys.readouterr().err
