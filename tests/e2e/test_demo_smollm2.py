"""The demo on SmolLM2 itself: exact speculation from one capture, on both devices."""

import json
import time

import pytest

from memra_lowlevel import cli

pytestmark = pytest.mark.e2e
GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)


def demo(capsys, *words):
    begin = time.monotonic()
    status = cli.main(["demo", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    assert status == 0 and report["exact"] is True
    assert report["accepted"] > 0 and report["rejected"] > 0
    assert report["graph"]["captures"] == 1 and report["graph"]["node_updates"] == 0
    assert report["driver_calls_per_draft_step"] == 1.0
    for graph in report["graphs"]:
        assert (graph["captures"], graph["node_updates"], graph["memory_nodes"]) == (1, 0, 0)
    with capsys.disabled():
        print(
            f" [{report['device']}: {time.monotonic() - begin:.0f} s, accepted "
            f"{report['accepted']}, rejected {report['rejected']}]",
            end="",
        )
    return report


@pytest.mark.slow
@pytest.mark.parametrize("device", ["host", GPU])
def test_speculation_is_greedy_decoding(capsys, device):
    report = demo(capsys, "--device", device)
    assert report["tokens"] == 24 and report["device"].startswith(device.split(":")[0])
    assert "smollm2" in report["model"].lower() and len(report["text"]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("device", [GPU])
def test_more_tokens_need_no_more_captures(capsys, device):
    assert demo(capsys, "--device", device, "--tokens", "200")["tokens"] == 200


@pytest.mark.slow
@pytest.mark.parametrize("device", [GPU])
def test_windows_on_rings(capsys, device):
    words = ("--window", "64", "--ring-chunk", "16", "--ring-slack", "0", "--tokens", "400")
    report = demo(capsys, "--device", device, *words)
    assert report["rebases"] >= 3 and report["rebased_and_rejected"] >= 1
    assert 0 < report["plane_bytes"] < report["flat_plane_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "n"), [("host", 12), pytest.param("cuda:0", 200, marks=pytest.mark.gpu)]
)
def test_a_trained_head_guesses_right_and_wrong(capsys, device, n):
    words = ("--chat", "--prompt", "How do I make bread at home?", "--draft-len", "2")
    report = demo(capsys, "--device", device, "--drafter", "head", "--tokens", str(n), *words)
    assert report["tokens_per_target_pass"] > 1.3
