"""Byte-level BPE on a small vocabulary, byte tokens, streams, chat; SmolLM2's own is in e2e."""

import pytest

from memra_lowlevel.errors import ModelError, TokenError
from memra_lowlevel.examples.smollm2.tokenizer import BpeTokenizer, ByteTokenizer, _byte_alphabet

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + …}}{% endfor %}"
)


def vocabulary(**changes):
    letters = sorted(_byte_alphabet().values())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
    tokens = ["<|endoftext|>", "<|im_end|>", *letters, *("".join(m.split()) for m in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }


def words(tokenizer, text, **options):
    return [tokenizer.token_bytes(t) for t in tokenizer.encode(text, **options)]


def test_merges_go_by_rank_and_stay_within_words():
    t = BpeTokenizer(vocabulary())
    assert words(t, "hello wo") == [b"hello", b" wo"]
    assert words(t, "hell hello") == [b"hell", b" ", b"hello"]
    assert words(t, "h ello") == [b"h", b" ", b"e", b"ll", b"o"]
    assert words(t, "x12") == [b"x", b"1", b"2"], "smollm cuts digits apart before merging"
    plain = BpeTokenizer(vocabulary(**{"tokenizer.ggml.pre": "gpt-2"}))
    assert words(plain, "x12") == [b"x", b"12"]


def test_llama_3_takes_whole_words_first_and_begins_a_text():
    changes = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 0}
    v = vocabulary(**changes)
    v["tokenizer.ggml.tokens"] = [*v["tokenizer.ggml.tokens"], "owl"]
    v["tokenizer.ggml.token_type"] = [*v["tokenizer.ggml.token_type"], 1]
    t = BpeTokenizer(v)
    assert t.encode("owl") == [0, t.n_vocab - 1]
    assert words(t, "owl", special=False) == [b"owl"]
    assert t.encode("")[:1] == [0]
    v["tokenizer.ggml.pre"], v["tokenizer.ggml.add_bos_token"] = "smollm", False
    assert words(BpeTokenizer(v), "owl") == [b"o", b"w", b"l"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe"])
def test_every_text_comes_back(pre):
    t = BpeTokenizer(vocabulary(**{"tokenizer.ggml.pre": pre}))
    for text in [
        "",
        " ",
        "a  b\n\n c\t",
        "日本語 🙂 é",
        "\x00\x7f\u00ad",
        "it's I'LL 3.14\r\n",
        "\u2028",
    ]:
        assert t.decode(t.encode(text, special=False)) == text


def test_control_tokens_are_found_only_when_asked_and_have_no_text():
    t = BpeTokenizer(vocabulary())
    assert t.encode("<|im_end|>hello")[0] == 1
    assert len(t.encode("<|im_end|>", special=False)) > 1
    assert t.decode([1, *t.encode("hello"), 0]) == "hello"
    assert t.end_tokens == {0, 1}


def test_a_stream_holds_back_unfinished_characters():
    t = ByteTokenizer(272)
    stream = t.stream()
    pieces = [stream.push(b) for b in "é🙂".encode()] + [stream.close()]
    assert pieces == ["", "é", "", "", "", "🙂", ""]
    stream = t.stream()
    assert stream.push(0xF0) + stream.close() == "\ufffd"
    assert t.token_bytes(260) == b""


def test_tokens_outside_the_vocabulary_are_refused():
    for t in (ByteTokenizer(272), BpeTokenizer(vocabulary())):
        for token in (-1, t.n_vocab, 0x7FFFFFFF):
            with pytest.raises(TokenError, match=str(token)):
                t.decode([token])


def test_chat_follows_the_template():
    t = BpeTokenizer(vocabulary())
    tail = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert t.chat("Hi") == "<|im_start|>system\nBe kind<|im_end|>\n" + tail
    own = [{"role": "system", "content": "X"}, {"role": "user", "content": "Hi"}]
    assert t.chat(own) == "<|im_start|>system\nX<|im_end|>\n" + tail
    with pytest.raises(ModelError, match="without --chat"):
        BpeTokenizer(vocabulary(**{"tokenizer.chat_template": "[INST]"})).chat("Hi")
    with pytest.raises(ModelError, match="without --chat"):
        ByteTokenizer(272).chat("Hi")


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.pre": "unheard-of"},
        {"tokenizer.ggml.merges": []},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.token_type": None},
        {"tokenizer.ggml.tokens": ["日本"] * 5},
        {"tokenizer.ggml.tokens": 7},
        {"tokenizer.ggml.eos_token_id": "x"},
    ],
)
def test_other_vocabularies_are_refused_with_a_remedy(change):
    with pytest.raises(ModelError, match="--model tiny"):
        BpeTokenizer(vocabulary(**change))
