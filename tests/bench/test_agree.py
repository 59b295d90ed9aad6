"""Two runs agree when their ratios do; a run is never compared with itself or with other code."""

import json
import math

import pytest
from synthetic import write

from memra_lowlevel.bench import agree, result, sources, tables
from memra_lowlevel.bench.agree import Pair
from memra_lowlevel.bench.result import Row


@pytest.fixture(autouse=True)
def sources_hold_still(monkeypatch):
    """Whatever is being edited."""
    monkeypatch.setattr(sources, "digest_of", lambda family: f"digest of {family}")


def both(tmp_path, scale, **about):
    first = write(tmp_path / "first.json")
    return [str(first), str(write(tmp_path / "second.json", scale, **about))]


def sealed(path, change):
    """Change a file as a benchmark of another kind would have written it."""
    body = json.loads(path.read_text())
    change(body)
    body["seal"] = result._seal(body)
    path.write_text(json.dumps(body))


def test_within_the_bound(tmp_path, capsys):
    for scale in (1.02, 0.98):
        assert agree.main(both(tmp_path, scale)) == 0
        assert "3 ratios compared, 0 differ by more than 3.0%" in capsys.readouterr().out


def test_rows_apart_are_named_with_both_ratios(tmp_path, capsys):
    files = both(tmp_path, 1.04)
    for given in (files, files[::-1]):  # which run is the slower one does not matter
        assert agree.main(given) == 1
        said = capsys.readouterr().out
        assert "3 ratios compared, 3 differ" in said
        (line,) = (x for x in said.splitlines() if x.startswith("launch, prepared"))
        assert "over launch, C" in line and "4.0%" in line and "0.969" in line and "0.931" in line
    assert agree.main([*files, "--bound", "0.05"]) == 0


def test_a_further_run_may_repeat_either(tmp_path, capsys):
    files = both(tmp_path, 1.1)
    for scale, again in ((1.11, 3), (0.99, 3), (1.2, 0), (1.05, 0)):
        third = str(write(tmp_path / "third.json", scale))
        assert agree.main([*files, third]) == (0 if again else 1)
        said = capsys.readouterr().out
        assert f"3 differ by more than 3.0%, {again} of them repeated by a further run" in said
        assert said.count(" repeated by a further run\n") == again + 1  # and the sum
        mark = f"<!-- table: agreement from first.json,second.json,third.json -->\n{tables.END}\n"
        (line,) = (x for x in tables.rewritten(mark, tmp_path)[0].splitlines() if "| launch" in x)
        assert line.endswith(f"| 1 | {again // 3} |")
    alone = str(write(tmp_path / "third.json", 1.11))
    sealed(tmp_path / "third.json", lambda body: [r.update(loaded=["cupy"]) for r in body["rows"]])
    for name in ("first", "second"):
        sealed(tmp_path / f"{name}.json", lambda body: [r.update(loaded=[]) for r in body["rows"]])
    assert agree.main([*files, alone]) == 1  # beside another library
    capsys.readouterr()
    assert agree.main([*files, files[0]]) == 2 and "the same run" in capsys.readouterr().err


def test_rows_over_one_row_and_rows_of_one_run_only():
    one = Row("rows 1", "us", [10.0], 5.0, group="rows")
    two = Row("rows 2", "us", [12.0], 5.0, group="rows", extra={"over_one_row": 1.2})
    slower = Row("rows 2", "us", [12.0], 5.0, group="rows", extra={"over_one_row": 1.3})
    peer = Row("rows 2, torch", "us", [9.0], 5.0, "torch", group="rows")
    pairs, unlike = agree.compare([one, two, peer], [slower, peer])
    assert not unlike
    assert [(p.what, p.over) for p in pairs] == [("rows 2", "the floor"), ("rows 2", "one row")]
    assert not pairs[0].differs() and pairs[1].differs()


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0])
def test_no_number_is_no_agreement(value):
    assert Pair("a", "g", "C", value, value).differs()


def test_what_cannot_be_compared(tmp_path, capsys):
    first, second = both(tmp_path, 1.01)

    def refused(*given):
        assert agree.main(given) == 2
        return capsys.readouterr().err

    assert "the same run" in refused(first, first)
    assert "no result file" in refused(first, str(tmp_path / "gone.json"))
    odd = tmp_path / "odd.json"
    for text in ("", "[]", "[" * 100_000, '{"environment": {}, "rows": [1]}', "\0"):
        odd.write_text(text)
        assert f"{odd} is no result file" in refused(first, str(odd))
    for change in (
        {"what": ["a"]}, {"group": ["a"]}, {"samples": []}, {"samples": "abc"}, {"samples": ["a"]},
        {"samples": [None]}, {"floor": "low"}, {"baseline": [1]}, {"extra": 5},
        {"extra": {"over_one_row": "x"}}, {"loaded": "torch"}, {"loaded": [5]},
    ):  # fmt: skip
        write(odd)
        sealed(odd, lambda body, change=change: body["rows"][0].update(change))
        assert f"{odd} is no result file" in refused(first, str(odd)), change
    for families in (None, []):
        write(odd, families=families)
        assert f"its families are {families}" in refused(first, str(odd))
    write(odd)
    sealed(odd, lambda body: body.update(format=2))
    assert "its format is 2, this version reads 1" in refused(first, str(odd))
    write(tmp_path / "second.json", device="Another (cuda:0)")
    assert "one kind of device" in refused(first, second)
    write(tmp_path / "second.json", families={**sources.digests(), "attend": "other"})
    assert "different sources of attend" in refused(first, second)
    path = tmp_path / "second.json"
    path.write_text(path.read_text().replace('"passed": 7', '"passed": 8'))
    assert "seal" in refused(first, second)


def test_rows_of_one_run_only_are_counted(tmp_path, capsys):
    first, second = both(tmp_path, 1.01)
    sealed(tmp_path / "second.json", lambda body: body["rows"].pop(0))
    assert agree.main([first, second]) == 0
    assert "2 ratios compared" in (said := capsys.readouterr().out)
    assert said.endswith("; 1 stand in one file only\n")


def test_only_like_is_compared_with_like(tmp_path, capsys):
    """What was measured beside another library says nothing of what was measured without."""
    files = both(tmp_path, 1.5)

    def told(place, which, loaded):
        def change(body):
            for row in body["rows"][which]:
                row["loaded"] = loaded

        sealed(tmp_path / f"{place}.json", change)

    told("first", slice(None), [])
    assert agree.main(files) == 1  # the second file does not tell
    assert "3 ratios compared, 3 differ" in capsys.readouterr().out
    told("second", slice(None), [])
    assert agree.main(files) == 1
    assert "3 ratios compared, 3 differ" in capsys.readouterr().out
    told("second", slice(0, 1), ["cupy", "torch"])
    assert agree.main(files) == 1
    said = capsys.readouterr().out
    (line,) = (x for x in said.splitlines() if "not compared:" in x)
    assert (
        line.startswith("attend 32/8/128 ctx 4096") and "loaded were none and cupy, torch" in line
    )
    assert "2 ratios compared, 2 differ" in said
    assert said.endswith("; 1 not compared, for other libraries were loaded\n")
    mark = f"<!-- table: agreement from first.json,second.json -->\n{tables.END}\n"
    assert "1 ratios are not compared" in tables.rewritten(mark, tmp_path)[0]
    told("second", slice(None), ["torch"])
    assert agree.main(files) == 2
    assert "measured beside the same libraries" in capsys.readouterr().err


@pytest.mark.parametrize("bound", ["nan", "-0.01", "inf", "much"])
def test_what_is_no_bound(tmp_path, capsys, bound):
    with pytest.raises(SystemExit) as ended:
        agree.main([*both(tmp_path, 1.01), f"--bound={bound}"])
    assert ended.value.code == 2
    assert f"'{bound}' is no part of a ratio" in capsys.readouterr().err


def test_a_table_for_the_documents(tmp_path):
    both(tmp_path, 1.02)
    text = f"<!-- table: agreement from first.json,second.json -->\n{tables.END}\n"
    fresh, problems = tables.rewritten(text, tmp_path)
    assert problems == []
    assert "| attend | 2 | 2.0% | attend 32/8/128 ctx 4096, q8_0/q5_1 | 0 |" in fresh
    assert "| launch | 1 | 2.0% | launch, prepared | 0 |" in fresh
    assert "[first.json](/first.json)" in fresh and "[second.json](/second.json)" in fresh
    for paths, said in (("first.json", "FILE.json,"), ("first.json,first.json", "same run")):
        mark = f"<!-- table: agreement from {paths} -->\n{tables.END}\n"
        ((_, problem),) = tables.rewritten(mark, tmp_path)[1]
        assert said in problem
