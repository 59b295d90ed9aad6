"""The engine on the tiny model: rows, chunks, captures, early exit, refusals."""

import gguf
import numpy as np
import numpy_llama
import pytest
from gguf_file import SMALL, write

from memra_lowlevel.errors import CapacityExceeded, ModelError, TokenError
from memra_lowlevel.examples.smollm2 import GreedyStep, Model, Session, generate_greedy
from memra_lowlevel.examples.smollm2.tiny import TINY, tiny_weights
from memra_lowlevel.examples.smollm2.weights import required_shapes

PROMPT = list(b"Hello, world")


@pytest.fixture(scope="module")
def model(device):
    stream = device.stream(name="load")
    loaded = Model.load(device, stream, "tiny", max_ctx=256)
    stream.sync()
    return loaded


@pytest.fixture
def session(model, stream):
    opened = Session.allocate(model, stream, max_ctx=96, n_rows_max=17)
    yield opened
    opened.close()


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8).tobytes()


def stored_rows(layer, stream):
    n = layer.len
    return tuple(
        plane.view(0, (n, row_bytes), np.uint8).to_numpy(stream)
        for plane, row_bytes in ((layer.k, layer.k_tok_bytes), (layer.v, layer.v_tok_bytes))
    )


def logits_of(session, stream, tokens, sizes):
    """Logits of all tokens, taken through the model in pieces of these sizes; moves the length."""
    model, ws, rows = session.model, session.ws, []
    session.planes.set_len(stream, 0)
    at = 0
    for n in sizes:
        piece = np.array(tokens[at : at + n], np.uint32)
        ws.logits.fill(stream, 0xFF)
        ws.tok_d.view(0, (n,), np.uint32).copy_from(stream, piece)
        model.forward(stream, ws, session.kv_layers, n)
        session.planes.advance(stream, n)
        n_vocab = model.config.n_vocab
        got = ws.logits.view(0, (n, n_vocab), np.float32).to_numpy(stream)
        argmax = ws.argmax_d.view(0, (n,), np.int32).to_numpy(stream)
        np.testing.assert_array_equal(argmax, got.argmax(axis=1))
        rows.append(got)
        at += n
    assert at == len(tokens)
    return np.concatenate(rows)


def test_logits_follow_numpy(session, stream):
    tokens = list(np.random.default_rng().integers(0, TINY.n_vocab, 60))
    got = logits_of(session, stream, tokens, [17, 17, 17, 9])
    caches = [[stored_rows(layer, stream) for layer in session.kv_layers]]
    want, k_steps, v_steps = numpy_llama.logits(tiny_weights(), [tokens], caches)
    assert k_steps <= 0.57 and v_steps <= 0.55
    assert np.abs(got - want[0]).max() <= 1e-4
    assert np.abs(got).max() > 1


def test_a_file_of_mixed_formats_follows_numpy(device, stream, tmp_path):
    """Joined products whose parts differ in format are launched apart and land side by side."""

    def change(tensors):
        for role, kind in (("attn_k", "Q8_0"), ("attn_v", "F16"), ("ffn_gate", "F32")):
            name, shape = f"blk.0.{role}.weight", required_shapes(SMALL)[f"blk.0.{role}.weight"]
            values = np.random.default_rng(3).standard_normal(shape).astype(np.float32) / 8
            type_ = gguf.GGMLQuantizationType[kind]
            stored = gguf.quants.quantize(values, type_) if kind == "Q8_0" else values
            tensors[name] = (stored.astype(np.float16) if kind == "F16" else stored, type_)

    write(tmp_path / "mixed.gguf", change=change)
    mixed = Model.load(device, stream, str(tmp_path / "mixed.gguf"), max_ctx=64)
    first = mixed.layers[0]
    assert [m.format for m in first.qkv] == ["q4_1", "q8_0", "f16"]
    assert [first.gate.format, first.up.format] == ["f32", "q4_1"]
    session = Session.allocate(mixed, stream, max_ctx=64, n_rows_max=17)
    tokens = list(np.random.default_rng().integers(0, SMALL.n_vocab, 20))
    got = logits_of(session, stream, tokens, [17, 3])
    caches = [[stored_rows(layer, stream) for layer in session.kv_layers]]
    want, k_steps, v_steps = numpy_llama.logits(mixed.weights, [tokens], caches)
    assert k_steps <= 0.57 and v_steps <= 0.55
    assert np.abs(got - want[0]).max() <= 1e-4 * np.abs(want[0]).max()
    assert bits(logits_of(session, stream, tokens, [1] * 20)) == bits(got)
    session.close()


def test_every_split_of_a_sequence_gives_the_same_bits(session, stream):
    tokens = list(np.random.default_rng().integers(0, TINY.n_vocab, 34))
    one_by_one = logits_of(session, stream, tokens, [1] * 34)
    rows = [stored_rows(layer, stream) for layer in session.kv_layers]
    splits = [[n] * (34 // n) + [34 % n] * (34 % n > 0) for n in range(2, 18)]
    for sizes in [*splits, [1, 16, 17], [5, 12, 3, 14]]:
        assert bits(logits_of(session, stream, tokens, sizes)) == bits(one_by_one), sizes
        for layer, (k, v) in zip(session.kv_layers, rows, strict=True):
            again = stored_rows(layer, stream)
            assert bits(again[0]) == bits(k) and bits(again[1]) == bits(v), sizes


def test_captured_decoding_equals_eager(session, stream):
    tokens = generate_greedy(session, stream, PROMPT, 20)
    sequence = PROMPT + tokens
    logits = logits_of(session, stream, sequence[:-1], [1] * (len(sequence) - 1))
    assert list(logits.argmax(axis=1)[len(PROMPT) - 1 :]) == tokens
    assert len(set(tokens)) > 8, "the tiny model should not repeat itself"


def test_a_step_is_captured_once_and_two_runs_are_equal(session, stream):
    step = GreedyStep(session, stream)
    kernels = step.exec.describe().kernel_nodes
    runs = [generate_greedy(session, stream, PROMPT, 12, step=step) for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) == 12
    report = step.exec.describe()
    assert report.kernel_nodes == kernels == 1 + 4 * 5 + 2 + 1
    # embedding, five a layer, logits and token, counters
    assert report.memory_nodes == report.node_updates == 0
    assert report.launches == 24
    assert session.planes.len == len(PROMPT) - 1 + 12
    step.close()


def test_layers_can_be_run_in_two_goes(session, stream):
    tokens = np.array(PROMPT, np.uint32)
    n, layers = len(PROMPT), session.kv_layers
    whole = logits_of(session, stream, PROMPT, [n])
    session.planes.set_len(stream, 0)
    ws = session.ws
    ws.tok_d.view(0, (n,), np.uint32).copy_from(stream, tokens)
    session.model.forward(stream, ws, layers[:3], n, last_layer=3, head=False)
    session.model.forward(stream, ws, layers[3:], n, first_layer=3)
    got = ws.logits.view(0, whole.shape, np.float32).to_numpy(stream)
    assert bits(got) == bits(whole)


def test_early_exit_is_often_right_but_not_always(session, stream):
    tokens = generate_greedy(session, stream, PROMPT, 40)
    sequence = PROMPT + tokens
    session.planes.set_len(stream, 0)
    guesses = []
    for at in range(0, len(sequence) - 1, 17):
        piece = np.array(sequence[at : at + 17][: len(sequence) - 1 - at], np.uint32)
        n = len(piece)
        session.ws.tok_d.view(0, (n,), np.uint32).copy_from(stream, piece)
        session.model.forward(stream, session.ws, session.kv_layers, n, last_layer=2)
        session.planes.advance(stream, n)
        guesses += list(session.ws.argmax_d.view(0, (n,), np.int32).to_numpy(stream))
    right = np.mean(np.array(guesses[len(PROMPT) - 1 :]) == tokens)
    print(f"early exit right in {right:.0%}")
    assert 0.3 < right < 0.95


def test_tokens_positions_and_results_can_live_elsewhere(session, stream):
    want = logits_of(session, stream, PROMPT, [len(PROMPT)]).argmax(axis=1)
    n, device = len(PROMPT), session.model.device
    session.planes.set_len(stream, 0)
    tokens = device.from_numpy(np.array(PROMPT, np.int32), stream)
    position = device.from_numpy(np.array([0], np.int32), stream)
    argmax, prob = device.empty((n,), np.int32, stream), device.empty((n,), np.float32, stream)
    session.model.forward(
        stream, session.ws, session.kv_layers, n,
        tokens=tokens, positions=position, argmax=argmax, probability=prob,
    )  # fmt: skip
    np.testing.assert_array_equal(argmax.to_numpy(stream), want)
    p = prob.to_numpy(stream)
    assert ((p > 1 / TINY.n_vocab) & (p <= 1)).all()


def test_bad_input_is_refused_and_nothing_moves(session, stream, tmp_path):
    model, planes = session.model, session.planes
    want = generate_greedy(session, stream, PROMPT, 4)
    length = planes.len
    write(tmp_path / "other.gguf", architecture="qwen2")
    write(tmp_path / "cut.gguf")
    whole = (tmp_path / "cut.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])

    def load(path):
        return lambda: Model.load(model.device, stream, str(path))

    refusals = [
        (ModelError, lambda: generate_greedy(session, stream, [], 4)),
        (TokenError, lambda: session.prime(stream, [1, TINY.n_vocab])),
        (TokenError, lambda: session.prime(stream, [0x7FFFFFFF])),
        (CapacityExceeded, lambda: session.prime(stream, [1] * 96)),
        (CapacityExceeded, lambda: generate_greedy(session, stream, PROMPT, 96)),
        (CapacityExceeded, lambda: model.forward(stream, session.ws, session.kv_layers, 18)),
        (CapacityExceeded, lambda: model.forward(stream, session.ws, session.kv_layers, 0)),
        (CapacityExceeded, lambda: model.forward(stream, session.ws, session.kv_layers[:2], 1)),
        (CapacityExceeded, lambda: Session.allocate(model, stream, max_ctx=257)),
        (ModelError, load("/nonexistent.gguf")),
        (ModelError, load(tmp_path / "other.gguf")),
        (ModelError, load(tmp_path / "cut.gguf")),
    ]
    for kind, call in refusals:
        with pytest.raises(kind):
            call()
        assert planes.len == length
    assert generate_greedy(session, stream, PROMPT, 4) == want


def test_nan_logits_end_in_a_named_error(session, stream):
    """A poisoned key gives NaN rows; the sentinel is refused before it is embedded."""
    step = GreedyStep(session, stream)
    session.prime(stream, PROMPT)
    session.kv_layers[0].k.fill(stream, 0xFF)
    step.start(stream, 1)
    with pytest.raises(TokenError, match="NaN"):
        step(stream)
    step.close()
    session.planes.set_len(stream, 0)
    assert len(generate_greedy(session, stream, PROMPT, 3)) == 3
