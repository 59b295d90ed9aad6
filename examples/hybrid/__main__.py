"""``python -m memra_lowlevel.examples.hybrid``: speculation, and a prompt restored from disk."""

from __future__ import annotations

import argparse
import sys

from memra_lowlevel import Device
from memra_lowlevel.errors import MemraError

from .generate import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="hybrid", description=__doc__)
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate")
    parser.add_argument("--draft-len", type=int, default=4, help="drafts per round")
    parser.add_argument("--device", default=None, help="cuda:0, host; the first that exists")
    options = parser.parse_args()
    try:
        with Device(options.device) as device:
            print(f"device: {device} ({device.name})")
            report = run(device, n_tokens=options.tokens, draft_len=options.draft_len)
    except MemraError as error:
        print(f"hybrid: {error}", file=sys.stderr)
        return 1
    for name, value in report.items():
        print(f"{name:<28}{value}")
    return 0 if report["exact"] and report["restored_exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
