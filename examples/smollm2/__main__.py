"""``python -m memra_lowlevel.examples.smollm2 PROMPT``: plain greedy decoding."""

from __future__ import annotations

import argparse
import sys
import time

from memra_lowlevel import Device
from memra_lowlevel.errors import MemraError

from .generate import Session, generate_greedy
from .model import Model


def main() -> int:
    parser = argparse.ArgumentParser(prog="smollm2", description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens to generate")
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or PATH.gguf")
    parser.add_argument("--device", default=None, help="cuda:0, host; the first that exists")
    parser.add_argument("--chat", action="store_true", help="ask through the chat template")
    options = parser.parse_args()
    try:
        run(options)
    except MemraError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    with Device(options.device) as device:
        stream = device.stream(name="decode")
        model = Model.load(device, stream, options.model)
        tokenizer = model.tokenizer
        text = tokenizer.chat(options.prompt) if options.chat else options.prompt
        prompt = tokenizer.encode(text)
        session = Session.allocate(model, stream, max_ctx=len(prompt) + options.tokens)
        print(f"{model.name} on {device}", file=sys.stderr)

        pieces = tokenizer.stream()
        print(options.prompt, end="", flush=True)
        start = time.perf_counter()
        tokens = generate_greedy(
            session,
            stream,
            prompt,
            options.tokens,
            on_token=lambda token: print(pieces.push(token), end="", flush=True),
        )
        seconds = time.perf_counter() - start
        print(pieces.close())
        ended = ", ended by the model" if tokens[-1] in tokenizer.end_tokens else ""
        print(f"{len(tokens)} tokens in {seconds:.1f} s{ended}", file=sys.stderr)
        session.close()


if __name__ == "__main__":
    sys.exit(main())
