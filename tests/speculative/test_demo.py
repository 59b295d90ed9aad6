"""The demo as a user runs it, on the made-up model."""

import importlib
import json
import sys

import pytest

from memra_lowlevel import cli, demo
from memra_lowlevel.errors import ModelError

KEYS = {
    "device", "model", "drafter", "tokens", "text", "exact", "drafted", "accepted", "rejected",
    "tokens_per_target_pass", "graph", "graphs", "driver_calls_per_draft_step",
    "h2d_writes_per_round", "tokens_per_s", "host_us_per_replay",
}  # fmt: skip
GRAPH_KEYS = {"kernel_nodes", "memory_nodes", "captures", "replays", "node_updates"}


def run(capsys, *words):
    status = cli.main(["demo", "--device", "host", "--model", "tiny", *words])
    return status, capsys.readouterr()


@pytest.mark.parametrize("tokens", [8, 40])
def test_json(capsys, tokens):
    status, out = run(capsys, "--json", "--tokens", str(tokens), "--drafter", "early-exit:2")
    report = json.loads(out.out)
    assert status == 0 and out.out.count("\n") == 1
    assert set(report) >= KEYS
    assert report["exact"] is True and report["device"] == "host:0"
    assert report["tokens"] == tokens == len(report["token_ids"])
    assert report["accepted"] + report["rejected"] == report["drafted"]
    assert set(report["graph"]) >= GRAPH_KEYS
    assert report["graph"]["captures"] == 1 and report["graph"]["node_updates"] == 0
    assert report["graph"]["replays"] >= report["drafted"]
    assert report["driver_calls_per_draft_step"] == 1.0
    assert 0 < report["h2d_writes_per_round"] <= 3
    assert all(g["captures"] == 1 and g["node_updates"] == 0 for g in report["graphs"])
    assert all(g["memory_nodes"] == 0 for g in report["graphs"])
    verifies = [g for g in report["graphs"] if g["name"].startswith("verify")]
    assert sum(g["replays"] for g in verifies) == report["rounds"]
    if tokens == 40:
        assert report["accepted"] > 0 and report["rejected"] > 0


def test_text_and_table(capsys):
    status, out = run(capsys, "--tokens", "12", "--prompt", "abc")
    assert status == 0
    lines = out.out.splitlines()
    assert lines[0].startswith("device: host:0")
    assert any(line.startswith("abc") for line in lines)
    assert any("exact" in line and line.endswith("yes") for line in lines)
    assert any(line.startswith("node updates") and line.endswith(" 0") for line in lines)


def test_an_end_of_text_token_ends_early_and_is_told(capsys, monkeypatch):
    _, out = run(capsys, "--json", "--tokens", "40")
    whole = json.loads(out.out)["token_ids"]
    at = next(i for i in range(9, 40) if whole[i] not in whole[:i])
    tokenizer = importlib.import_module(f"{demo.engine().__name__}.tokenizer")
    monkeypatch.setattr(tokenizer.ByteTokenizer, "end_tokens", frozenset({whole[at]}))
    status, out = run(capsys, "--json", "--tokens", "40")
    report = json.loads(out.out)
    assert status == 0 and report["exact"] and report["ended"]
    assert report["token_ids"] == whole[: at + 1] and report["tokens"] == at + 1
    status, out = run(capsys, "--tokens", "40")
    assert status == 0 and "the model ended the text" in out.out


def test_chat_applies_the_template_of_the_model(capsys, monkeypatch):
    status, out = run(capsys, "--chat")
    assert status == 1 and "chat template" in out.err
    tokenizer = importlib.import_module(f"{demo.engine().__name__}.tokenizer")
    monkeypatch.setattr(tokenizer.ByteTokenizer, "chat", lambda self, text: f"<user>{text}</user>")
    words = ("--json", "--tokens", "8", "--prompt")
    asked, spelled = (
        json.loads(run(capsys, *words, *how)[1].out)["token_ids"]
        for how in (("hi", "--chat"), ("<user>hi</user>",))
    )
    assert asked == spelled


def test_look_up_drafter(capsys):
    status, out = run(capsys, "--json", "--tokens", "40", "--drafter", "ngram")
    report = json.loads(out.out)
    assert status == 0 and report["exact"] and report["drafted"] > 0


def test_window_and_ring(capsys):
    words = ("--tokens", "200", "--window", "16", "--ring-chunk", "8", "--ring-slack", "0")
    status, out = run(capsys, "--json", *words)
    report = json.loads(out.out)
    assert status == 0 and report["exact"]
    assert report["rebases"] >= 3 and report["rebased_and_rejected"] >= 1
    assert report["plane_bytes"] * 3 < report["flat_plane_bytes"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--drafter", "oracle"), "early-exit"),
        (("--drafter", "early-exit:9"), "1 to 3"),
        (("--drafter", "early-exit:0"), "1 to 3"),
        (("--prompt", ""), "--prompt"),
        (("--model", "/nowhere/x.gguf"), "x.gguf"),
        (("--tokens", "99999"), "context"),
        (("--ring-slack", "4"), "--window"),
        (("--window", "8", "--ring-chunk", "3"), "chunk"),
        (("--device", "tpu"), "host"),
    ],
)
def test_bad_input_ends_in_one_message(capsys, words, text):
    status, out = run(capsys, *words)
    assert status == 1 and "Traceback" not in out.err
    assert text in out.err and out.err.startswith("memra-lowlevel: ")


@pytest.mark.parametrize("words", [("--tokens", "0"), ("--draft-len", "x")])
def test_bad_usage(words):
    with pytest.raises(SystemExit) as info:
        cli.main(["demo", *words])
    assert info.value.code == 2


def test_a_missing_engine_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "memra_lowlevel" / "demo.py"))
    for name in [n for n in sys.modules if "smollm2" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "memra_lowlevel.examples", None)
    with pytest.raises(ModelError, match="engine"):
        demo.engine()
