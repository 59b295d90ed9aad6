"""What tools read of their command lines."""

from __future__ import annotations

import argparse


def seconds(text: str) -> float:
    """A time, as an ``argparse`` type."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time; give seconds above 0")
    return value
