"""Byte-level BPE from a GGUF vocabulary, and a byte vocabulary for the tiny model."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from memra_lowlevel.errors import ModelError, TokenError

from .weights import ALTERNATIVES

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: How text is cut before merging, by the file's ``tokenizer.ggml.pre``: patterns applied in turn.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}|\P{N}+", _GPT2),
    "gpt-2": (_GPT2,),
    "default": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
}
_CONTROL, _USER_DEFINED = 3, 4


def _byte_alphabet() -> dict[int, str]:
    """Byte to the printable character that stands for it in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


class TokenStream:
    """Text of tokens as they come; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that became certain with this token; may be empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def close(self) -> str:
        """What is left, an unfinished character as the replacement character."""
        return self._decoder.decode(b"", True)


class Tokenizer:
    """Tokens of a text and back.

    Attributes
    ----------
    n_vocab : int
    end_tokens : frozenset of int
        Tokens that end a text.
    chat_template : str or None
        As the file has it.
    """

    end_tokens: frozenset[int] = frozenset()
    chat_template: str | None = None
    n_vocab = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text.

        With ``special``, names of control tokens in it become that token, and the token that
        begins a text comes first where the vocabulary asks for it.
        """
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of one token; empty for a control token."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; control tokens leave nothing."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def stream(self) -> TokenStream:
        """A decoder for tokens that arrive one by one."""
        return TokenStream(self)

    def chat(self, messages: str | Sequence[dict[str, str]]) -> str:
        """The prompt that asks for an answer to messages, by the model's template.

        Parameters
        ----------
        messages : str or sequence of dict
            One user message, or dicts with ``role`` and ``content``.

        Raises
        ------
        ModelError
            The model has no template, or one that is not of the ChatML kind.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        template = (self.chat_template or "").replace("\\n", "\n")
        if "<|im_start|>" not in template or "<|im_end|>" not in template:
            raise ModelError(
                "this model has no chat template of the ChatML kind (<|im_start|> … <|im_end|>); "
                "give the prompt without --chat"
            )
        _, opening, rest = template.partition("'<|im_start|>system\n")
        if opening and messages[0]["role"] != "system":  # the system message that it falls back to
            messages = [{"role": "system", "content": rest.partition("<|im_end|>")[0]}, *messages]
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + "<|im_start|>assistant\n"

    def _refuse(self, token: int) -> TokenError:
        return TokenError(f"token {token} is outside the vocabulary of {self.n_vocab}")


class ByteTokenizer(Tokenizer):
    """Token b is byte b; the tokens above are control tokens without text."""

    def __init__(self, n_vocab: int):
        self.n_vocab = n_vocab

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise self._refuse(token)
        return bytes([token]) if token < 256 else b""


class BpeTokenizer(Tokenizer):
    """Byte-level BPE with the merges, kinds and pre-tokenizer of a GGUF file.

    Parameters
    ----------
    vocabulary : dict
        The ``tokenizer.*`` entries of the file.

    Raises
    ------
    ModelError
        A vocabulary of another kind, an unknown pre-tokenizer, or the package ``regex`` missing.
    """

    def __init__(self, vocabulary: dict[str, Any]):
        kind = vocabulary.get("tokenizer.ggml.model")
        pre = str(vocabulary.get("tokenizer.ggml.pre", "default"))
        if kind != "gpt2" or pre not in PRE_TOKENIZERS:
            raise ModelError(
                f"the vocabulary is of kind {kind!r} with pre-tokenizer {pre!r}; supported are "
                f"'gpt2' (byte-level BPE) with {', '.join(PRE_TOKENIZERS)}. {ALTERNATIVES}"
            )
        try:
            import regex
        except ImportError as error:
            raise ModelError(
                "This vocabulary needs the package regex, which is not installed. "
                "Install it: pip install 'gguf==0.19.0' regex, or use --model tiny."
            ) from error
        try:
            self._read(vocabulary, regex)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"the vocabulary of the file is damaged ({type(error).__name__}: {error}). "
                f"{ALTERNATIVES}"
            ) from error
        self._patterns = [regex.compile(p) for p in PRE_TOKENIZERS[pre]]
        self._whole_words = pre == "llama-bpe"  # a word that is a token needs no merges
        self._merged = functools.lru_cache(maxsize=1 << 16)(self._merge)

    def _read(self, vocabulary: dict[str, Any], regex: Any) -> None:
        tokens: list[str] = vocabulary["tokenizer.ggml.tokens"]
        merges: list[str] = vocabulary["tokenizer.ggml.merges"]
        kinds: list[int] = vocabulary.get("tokenizer.ggml.token_type", [1] * len(tokens))
        if not tokens or not merges or len(kinds) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {len(kinds)} kinds, {len(merges)} merges")
        self.n_vocab = len(tokens)
        self.chat_template = vocabulary.get("tokenizer.chat_template")
        self._id = {token: i for i, token in enumerate(tokens)}
        self._rank = {tuple(merge.split(" ", 1)): i for i, merge in enumerate(merges)}
        self._alphabet = _byte_alphabet()
        byte = {c: b for b, c in self._alphabet.items()}
        self._bytes = [
            b"" if kind == _CONTROL
            else token.encode() if kind == _USER_DEFINED
            else bytes(byte[c] for c in token)
            for token, kind in zip(tokens, kinds, strict=True)
        ]  # fmt: skip
        named = {
            t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)
        }
        longest_first = sorted(named, key=len, reverse=True)
        self._special = (
            regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")") if named else None
        )
        ends = [vocabulary.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot")]
        ends += [self._id.get(n) for n in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>")]
        self.end_tokens = frozenset(int(t) for t in ends if t is not None)
        begin = vocabulary.get("tokenizer.ggml.bos_token_id")
        llama3 = vocabulary.get("tokenizer.ggml.pre") == "llama-bpe"
        adds = bool(vocabulary.get("tokenizer.ggml.add_bos_token", llama3))
        self._begin = [int(begin)] if adds and begin is not None else []

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        pieces = self._special.split(text) if special and self._special else [text]
        ids: list[int] = [*self._begin] if special else []
        for i, piece in enumerate(pieces):
            if i % 2:  # the split keeps what it splits at
                ids.append(self._id[piece])
            else:
                for word in self._words(piece):
                    ids.extend(self._merged("".join(self._alphabet[b] for b in word.encode())))
        return ids

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise self._refuse(token)
        return self._bytes[token]

    def _words(self, text: str) -> list[str]:
        words = [text] if text else []
        for pattern in self._patterns:
            words = [part for word in words for part in pattern.findall(word)]
        return words

    def _merge(self, word: str) -> tuple[int, ...]:
        if self._whole_words and word in self._id:
            return (self._id[word],)
        parts = list(word)
        while len(parts) > 1:
            ranks = [self._rank.get(pair, 1 << 30) for pair in pairwise(parts)]
            best = min(ranks)
            if best == 1 << 30:
                break
            merged, i = [], 0
            while i < len(parts):
                if i < len(ranks) and ranks[i] == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        unknown = [p for p in parts if p not in self._id]
        if unknown:
            raise TokenError(f"the vocabulary has no token for {unknown[0]!r}")
        return tuple(self._id[p] for p in parts)
