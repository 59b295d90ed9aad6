"""``tools/train_head.py`` without torch: its options, its refusal, and the file that it writes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memra_lowlevel.demo import engine

TOOLS = Path(__file__).parents[2] / "tools"
WIDTH, N_KV, N_FF, N_WORDS = 576, 192, 64, 40


def call(*words):
    """Run the tool where importing torch fails."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        f"sys.path.insert(0, {str(TOOLS)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [sys.executable, "-c", code, str(TOOLS / "train_head.py"), *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_help_needs_no_torch():
    shown = call("--help")
    assert shown.returncode == 0 and "--train-s" in shown.stdout


def test_a_run_without_torch_says_what_is_missing():
    refused = call("--model", __file__)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "needs torch" in refused.stderr


@pytest.mark.parametrize("flag", ["--model", "--begin"])
def test_files_that_are_not_there_are_refused_at_once(flag):
    refused = call("--model", __file__, flag, "none.gguf")
    assert refused.returncode == 2 and f"{flag} none.gguf: there is no such file" in refused.stderr


@pytest.fixture(scope="module")
def head_file():
    spec = importlib.util.spec_from_file_location("head_file", TOOLS / "head_file.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_head_comes_back_as_it_was_packed(head_file, tmp_path):
    rng = np.random.default_rng(6)
    shapes = {
        "features": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "down": (WIDTH, N_FF),
        "qkv": (WIDTH + 2 * N_KV, WIDTH), "gate_up": (2 * N_FF, WIDTH),
        "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "output_norm": (WIDTH,),
    }  # fmt: skip
    arrays = {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    words = np.sort(rng.choice(49152, N_WORDS, replace=False))
    path = tmp_path / "head.gguf"
    head_file.pack(arrays, words, str(path), "smollm2")

    back, known = head_file.unpack(str(path))
    np.testing.assert_array_equal(known, words)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        # q8_0 in 255 steps of a block's largest, q4_1 in 15 from its least to its largest.
        step = 0.0 if array.ndim == 1 else 0.6 if name in ("gate_up", "down") else 0.04
        assert np.abs(back[name] - array).max() <= step / 2 + 1e-6, name

    target, tensors, tokens = engine().head.read_head(path)
    assert target == "smollm2" and (tokens == words).all()
    assert tensors["blk.0.attn_k.weight"].shape == (N_KV, WIDTH)
    assert tensors["blk.0.ffn_up.weight"].shape == (N_FF, WIDTH)
