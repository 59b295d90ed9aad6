"""The regression gate compares ratios of runs, on one kind of device, and has a limit."""

import math

import pytest
from synthetic import ABOUT, write

from memra_lowlevel import errors
from memra_lowlevel.bench import regress
from memra_lowlevel.bench.result import load

DEVICE = ABOUT["device"]


def compare(tmp_path, scale, device=DEVICE):
    then = load(write(tmp_path / "then.json"))
    now = load(write(tmp_path / "now.json", scale))
    return regress.losses(regress.ratios(now.rows), device, [then])


def test_the_limit_is_five_per_cent(tmp_path):
    assert compare(tmp_path, 1.0) == [] and compare(tmp_path, 0.5) == []
    assert compare(tmp_path, 1.05) == []  # 4.8 % of the ratio
    lost = compare(tmp_path, 1.06)
    assert [loss.what.split(",")[0] for loss in lost] == [
        "attend 32/8/128 ctx 4096", "attend 32/8/128 ctx 32768", "launch",
    ]  # fmt: skip
    assert all(0.05 < loss.part < 0.06 for loss in lost)
    assert "79.7% in" in str(lost[0]) and "then.json" in str(lost[0])


def test_other_devices_and_peers_are_not_compared(tmp_path):
    assert compare(tmp_path, 2.0, device="another GPU") == []
    now = regress.ratios(load(write(tmp_path / "now.json")).rows)
    assert set(now) == {
        "attend 32/8/128 ctx 4096, q8_0/q5_1", "attend 32/8/128 ctx 32768, q8_0/q5_1",
        "launch, prepared",
    }  # fmt: skip


def test_the_first_reference_that_holds_a_row_counts(tmp_path):
    slow = load(write(tmp_path / "slow.json", 2.0))
    fast = load(write(tmp_path / "fast.json"))
    now = regress.ratios(load(write(tmp_path / "now.json", 1.5)).rows)
    assert regress.losses(now, DEVICE, [slow, fast]) == []
    assert len(regress.losses(now, DEVICE, [fast, slow])) == 3


def test_nan_is_a_loss(tmp_path):
    then = load(write(tmp_path / "then.json"))
    kept = regress.ratios(then.rows)
    now = {what: regress.Ratio(math.nan, ratio.over) for what, ratio in kept.items()}
    assert len(regress.losses(now, DEVICE, [then])) == 3


def test_shares_of_different_ceilings_are_not_compared(tmp_path):
    """A row that gets a floor is compared with the first file where it has one."""
    beside = load(write(tmp_path / "beside.json"))
    floored = load(write(tmp_path / "floored.json"))
    (row,) = (row for row in floored.rows if row.what == "launch, prepared")
    row.floor = 0.5 * row.median
    slower = load(write(tmp_path / "slower.json", 1.5))
    (other,) = (row for row in slower.rows if row.what == "launch, prepared")
    other.floor = row.floor
    now = regress.ratios(slower.rows)
    what = [loss.what for loss in regress.losses(now, DEVICE, [beside])]
    assert "launch, prepared" not in what and len(what) == 2
    lost = regress.losses(now, DEVICE, [beside, floored])
    assert [loss.then for loss in lost if loss.what == "launch, prepared"] == [0.5]


def test_the_listing(tmp_path):
    listing = tmp_path / "benchmarks" / "reference.txt"
    assert regress.references(listing) == []
    write(tmp_path / "benchmarks" / "results" / "a.json")
    listing.write_text("# what we compare with\nbenchmarks/results/a.json\n\n")
    (found,) = regress.references(listing)
    assert found.path.name == "a.json"
    listing.write_text("benchmarks/results/gone.json\n")
    with pytest.raises(errors.ArgumentError, match=r"gone\.json"):
        regress.references(listing)


def test_the_listing_of_this_repository_is_sound():
    for found in regress.references():
        assert found.problems == []
