"""Trains the draft head of SmolLM2 that lies in ``examples/smollm2/``.

It learns from text that the model writes itself:

    python tools/train_head.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out head.gguf

Needs torch, gguf, regex and a GPU; nothing else in this repository needs torch. What it does stands
in ``head_training.py`` beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def options() -> argparse.Namespace:
    """What was asked for; asking for help needs no torch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(flag: str, text: str, **words: object) -> None:
        shown = " (default: %(default)s)" if "default" in words else ""
        parser.add_argument(flag, help=text + shown, **words)

    add("--model", "GGUF file of the target", required=True)
    add("--out", "GGUF file to write the head to", default="head.gguf")
    add(
        "--device",
        "where torch computes: cuda, or cpu, which is slow (default: cuda if it is there)",
    )
    add("--write-s", "time for writing texts, in seconds", type=float, default=60)
    add("--train-s", "time for training, in seconds", type=float, default=240)
    add("--batch", "texts written at a time, a count", type=int, default=4096)
    add("--length", "length of a text, in tokens", type=int, default=256)
    add("--at-once", "texts of a training step, a count", type=int, default=128)
    add(
        "--vocabulary",
        "most frequent tokens that the head can guess, a count; with --begin, that head's are kept",
        type=int,
        default=16384,
    )
    add("--n-ff", "width of the head's feed-forward part, in channels", type=int, default=3072)
    add("--guesses", "guesses of a round in training, a count", type=int, default=3)
    add("--rate", "highest learning rate of AdamW, a plain number", type=float, default=1e-3)
    add("--seed", "seed of the first batch of texts, an integer", type=int, default=0)
    add("--begin", "GGUF file of a head to go on with, one that this script wrote")
    parser.add_argument(
        "--most-steps",
        type=int,
        default=1 << 30,
        help="training steps after which to stop early, a count (default: none)",
    )
    args = parser.parse_args()
    for flag, path in (("--model", args.model), ("--begin", args.begin)):
        if path is not None and not Path(path).is_file():  # else found out after minutes of writing
            parser.error(f"{flag} {path}: there is no such file; give a GGUF file")
    return args


def main() -> None:
    args = options()
    # An ordinary install brings no torch, so that it may well be missing: say so, no traceback.
    try:
        import head_training
        import torch
    except ImportError as error:
        print(f"tools/train_head.py needs torch and gguf (and regex): {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    head_training.run(args)


if __name__ == "__main__":
    main()
