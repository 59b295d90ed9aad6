"""Result files: what they keep, and what is wrong with one that was touched."""

import json
import math

import pytest
from synthetic import rows, write

from memra_lowlevel import errors
from memra_lowlevel.bench import result
from memra_lowlevel.bench.result import Row, load, ratio
from memra_lowlevel.compile import Job, aot, cuda_src_root


def test_a_file_comes_back(tmp_path):
    found = load(write(tmp_path / "a.json"))
    assert found.problems == [] and found.notes == ["CuPy: not installed"]
    assert [row.what for row in found.rows] == [row.what for row in rows()]
    for back, row in zip(found.rows, rows(), strict=True):
        assert back.samples == [round(s, 4) for s in row.samples]
        assert (back.floor, back.goal, back.work, back.peer, back.in_turn) == (
            row.floor, row.goal, row.work, row.peer, row.in_turn,
        )  # fmt: skip
    assert not any(found.stale(row.group) for row in found.rows)


def test_statistics():
    row = Row("x", "us", [4.0, 1.0, 3.0, 2.0, 100.0], floor=1.5)
    assert (row.median, row.share) == (3.0, 0.5)
    assert row.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    other = Row("y", "us", [6.0], baseline="x")
    assert ratio(other, [row, other]) == 0.5 and ratio(row, [row, other]) == 0.5
    assert ratio(Row("z", "us", [1.0]), []) is None
    # Taken in turn, samples are compared one by one: two modes that both share cancel.
    base = Row("c", "us", [1.0, 8.0, 1.0, 8.0])
    ours = Row("o", "us", [1.25, 10.0, 1.25, 10.0], baseline="c", in_turn=True)
    assert ratio(ours, [base, ours]) == 0.8
    apart = Row("o", "us", [10.0, 10.0, 1.25, 10.0], baseline="c")
    assert ratio(apart, [base, apart]) == 0.45
    with pytest.raises(errors.ArgumentError, match="without samples"):
        Row("nothing", "us", [])


@pytest.mark.parametrize("place", ["sample", "median", "commit", "families", "row", "item"])
def test_an_edit_by_hand_breaks_the_seal(tmp_path, place):
    path = write(tmp_path / "a.json")
    body = json.loads(path.read_text())
    if place == "sample":
        body["rows"][0]["samples"][0] -= 0.5
    elif place == "median":
        body["rows"][0]["median"] = 1.0
    elif place == "row":
        del body["rows"][0]
    elif place == "item":
        body["items"]["parity/kernels"]["passed"] = 70
    else:
        body["environment"][place] = "other"
    path.write_text(json.dumps(body))
    assert any("seal" in problem for problem in load(path).problems)


def test_an_unsound_file_is_told(tmp_path):
    path = tmp_path / "b.json"
    twice = [Row("a", "us", [1.0], group="attend"), Row("a", "us", [1.0], group="attend")]
    odd = Row("b", "us", [1.0], baseline="gone", group="no such group")
    result.write(path, [*twice, odd], about={"time": "now"})
    text = "\n".join(load(path).problems)
    for word in ("lacks 'commit'", "lacks 'families'", "['a']", "'gone'", "'no such group'"):
        assert word in text
    path.write_text("{}")
    with pytest.raises(errors.ArgumentError, match="no result file"):
        load(path)


def test_nan_is_no_share(tmp_path):
    row = Row("a", "us", [math.nan], floor=1.0)
    assert not (row.share or 0) > 0


def test_the_environment_says_where_and_what():
    from memra_lowlevel import Device

    with Device("host") as device:
        about = result.environment(device)
    assert about["kind"] == "host" and about["clocks"] == {}
    for name in result._REQUIRED:
        assert name in about
    assert set(about["families"]) == set(result.sources.FAMILIES)


def test_the_store_that_kernels_came_from_is_named(tmp_path, monkeypatch):
    store = aot.build(tmp_path / "s.zip", [Job(cuda_src_root() / "kv/counters.cu", "sm_90")])
    assert result.environment(None)["store"] is None
    monkeypatch.setenv(aot.VARIABLE, str(store.path))
    try:
        assert result.environment(None)["store"] == store.compiler != ""
    finally:
        aot.open_named(str(store.path)).close()
        aot.open_named.cache_clear()
