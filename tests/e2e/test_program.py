"""The example run as a user runs it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def smollm2(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "memra_lowlevel.examples.smollm2", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
        check=False,
    )


def test_the_tiny_model_speaks_twice_the_same():
    runs = [
        smollm2("hello", "--model", "tiny", "--device", "host", "--tokens", "12") for _ in range(2)
    ]
    assert [r.returncode for r in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.startswith("hello") and len(runs[0].stdout) > len("hello") + 6
    assert "tiny on host:0" in runs[0].stderr and "12 tokens in" in runs[0].stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nonexistent.gguf"], ["no such file", "--model tiny"]),
        (["--model", sys.executable], ["not a readable GGUF file", "--model tiny"]),
        (["--model", "tiny", "--chat"], ["no chat template"]),
        (["--model", "tiny", "--tokens", "100000"], ["positions"]),
        (["--model", "tiny", ""], ["no tokens"]),
    ],
    ids=["missing", "not a model", "chat", "too long", "empty prompt"],
)
def test_bad_input_ends_in_one_line_with_a_remedy(arguments, words):
    run = smollm2("--device", "host", *arguments)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("smollm2: ") and "Traceback" not in run.stderr
    for word in words:
        assert word in last
