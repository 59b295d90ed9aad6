"""The hybrid example: speculation and restored prompts give what plain decoding gives."""

import json

import pytest

from memra_lowlevel import cli, demo, errors
from memra_lowlevel.cache import Cache
from memra_lowlevel.cache.latent_tail import IndexTail
from memra_lowlevel.speculative import accept


@pytest.fixture(scope="module")
def hybrid():
    return demo.engine("hybrid")


def test_three_generations_agree(hybrid, device):
    report = hybrid.run(device, n_tokens=40)
    assert report["exact"] and report["restored_exact"] and report["tokens"] == 40
    assert report["accepted"] > 0 and report["rejected"] > 0
    assert report["index_rings_wrapped"] >= 3
    assert len(set(report["token_ids"])) > 15, "a model that repeats itself shows little"


def test_every_length_of_draft_gives_the_same_tokens(hybrid, device):
    runs = [hybrid.run(device, n_tokens=16, draft_len=k) for k in (1, 3, 7)]
    assert len({tuple(r["token_ids"]) for r in runs}) == 1
    assert all(r["exact"] and r["restored_exact"] for r in runs)


def everything_accepted(drafts, argmax):
    return len(drafts), [*drafts, argmax[len(drafts)]]


def bonus_off_by_one(drafts, argmax, real=accept.accept_greedy):
    accepted, new = real(drafts, argmax)
    return accepted, [*new[:-1], (new[-1] + 1) % 256]


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (accept, "accept_greedy", everything_accepted),
        (accept, "accept_greedy", bonus_off_by_one),
        (Cache, "set_len", lambda self, stream, n: None),
        (IndexTail, "truncate", lambda self: None),
    ],
    ids=["everything accepted", "bonus off by one", "rewind skipped", "keys not clamped"],
)
def test_a_fault_in_the_round_shows(hybrid, stream, device, monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    try:
        report = hybrid.run(device, n_tokens=24)
    except errors.MemraError:
        return
    assert not report["exact"]


def test_the_command(capsys):
    command = ["demo", "--model", "hybrid", "--device", "host"]
    assert cli.main([*command, "--tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exact"] and report["restored_exact"] and report["tokens"] == 12
    assert cli.main([*command, "--tokens", "6"]) == 0
    assert "restored exact" in capsys.readouterr().out
    assert cli.main([*command, "--chat"]) != 0
    assert "made up" in capsys.readouterr().err
